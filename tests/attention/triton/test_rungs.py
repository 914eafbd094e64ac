"""The first four rungs: right on what they take, and plain about the rest."""

from dataclasses import replace

import pytest
import torch
from cases.attention import (
    TRITON_DEVICE,
    Case,
    assert_matches_reference,
    inputs_of,
    moved,
    poisoned_output,
)

from llm_systems_cookbook.attention.inputs import AttentionInputs

rungs = pytest.importorskip(
    "llm_systems_cookbook.attention.triton.rungs", exc_type=ImportError
)


def run(rung: str, inputs: AttentionInputs, *more: int) -> torch.Tensor:
    """Run a rung where Triton runs, into an output of NaN."""
    inputs = moved(inputs, TRITON_DEVICE)
    return rungs.RUNGS[rung](inputs, poisoned_output(inputs), *more)


ANY_BLOCK = ("tiled", "split")
SHAPES = [
    Case(),
    Case(lengths="many", group=1, block_size=64, table="exact"),
    Case(lengths="around", group=7, block_size=32, index=torch.int64),
    Case(lengths="zeros", table="stale", head_dim=32),
    Case(lengths="many", dtype=torch.float16, group=8, table="shared"),
    Case(lengths="around", dtype=torch.bfloat16, group=6, num_kv_heads=1),
    Case(
        lengths="many",
        group=16,
        num_kv_heads=1,
        head_dim=128,
        block_size=16,
    ),
]
ODD_SHAPES = [
    Case(lengths="many", block_size=24),
    Case(lengths="around", block_size=1, head_dim=80),
    Case(lengths="edges", block_size=5, head_dim=96, group=7),
]


@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("rung", rungs.RUNGS)
def test_matches_the_reference(rung: str, case: Case):
    inputs = inputs_of(case)
    out = run(rung, inputs)
    assert_matches_reference(out, inputs)


@pytest.mark.parametrize("case", ODD_SHAPES, ids=str)
@pytest.mark.parametrize("rung", ANY_BLOCK)
def test_tiles_take_any_block_size_and_head_dim(rung: str, case: Case):
    inputs = inputs_of(case)
    out = run(rung, inputs)
    assert_matches_reference(out, inputs)


@pytest.mark.parametrize("case", ODD_SHAPES, ids=str)
@pytest.mark.parametrize("rung", ["per_head", "grouped"])
def test_blocks_as_tiles_refuse_what_is_no_power_of_two(rung: str, case: Case):
    inputs = inputs_of(case)
    with pytest.raises(ValueError, match="power of two"):
        run(rung, inputs)


def test_grouped_rung_refuses_blocks_that_dot_cannot_take():
    inputs = inputs_of(Case(block_size=8))
    with pytest.raises(ValueError, match="at least 16, got 8"):
        run("grouped", inputs)


@pytest.mark.parametrize("splits", [2, 3, 8, 13])
def test_more_splits_than_tiles_change_nothing(splits: int):
    inputs = inputs_of(Case(lengths="many", seed=3))
    out = run("split", inputs, splits)
    assert_matches_reference(out, inputs)


@pytest.mark.parametrize("splits", [1, 0, -1])
def test_split_rung_refuses_fewer_than_two(splits: int):
    inputs = inputs_of(Case())
    with pytest.raises(ValueError, match="num_splits must be >= 2"):
        rungs.split_attention(inputs, inputs.output(), splits)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mode": "prefill"}, "decodes"),
        ({"window": "block"}, "window"),
        ({"softcap": True}, "softcap"),
        ({"alibi": True}, "alibi_slopes"),
        ({"sinks": True}, "sinks"),
        ({"cache": torch.float8_e4m3fn}, "k_scale"),
        ({"head_dim_v": 48}, "one size"),
        ({"layout": "strided"}, "key_cache in one piece"),
        ({"query_layout": "strided"}, "query in one piece"),
    ],
)
@pytest.mark.parametrize("rung", rungs.RUNGS)
def test_a_rung_refuses_what_it_does_not_know(
    rung: str, change: dict, reason: str
):
    inputs = inputs_of(replace(Case(), **change))
    out = poisoned_output(inputs)
    with pytest.raises(ValueError, match=reason):
        rungs.RUNGS[rung](inputs, out)
    assert out.isnan().all(), "nothing was written"
