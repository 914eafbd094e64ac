"""How a call is cut into programs: splits, tiles and options."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from cases.attention import Case, inputs_of

pytest.importorskip("triton")
from llm_systems_cookbook.attention.triton.launch import (
    MAX_SPLITS,
    choose_splits,
    choose_tiles,
    compile_options,
    padded_dim,
    plan_launch,
    split_buffers,
)
from llm_systems_cookbook.attention.triton.offline import SHARED_LIMIT

TARGETS = ("interpreter", *SHARED_LIMIT)


@pytest.mark.parametrize(
    ("programs", "tiles", "processors", "expected"),
    [
        (264, 1000, 132, 1),  # enough programs already
        (265, 1000, 132, 1),
        (132, 1000, 132, 2),
        (100, 1000, 132, 4),  # a power of two: each is compiled
        (8, 1000, 132, 64),
        (1, 1000, 132, MAX_SPLITS),
        (8, 5, 132, 4),  # never more than tiles
        (8, 8, 132, 8),
        (8, 0, 132, 1),
        (0, 10, 132, 8),
        (1, 1000, 1, 2),
        (2, 1000, 1, 1),
    ],
)
def test_splits_give_every_processor_two_programs(
    programs: int, tiles: int, processors: int, expected: int
):
    assert choose_splits(programs, tiles, processors) == expected


def test_a_small_batch_is_split_on_a_large_device_and_a_large_one_is_not():
    inputs = inputs_of(Case(lengths="many", num_kv_heads=2))
    small = plan_launch(inputs, "sm_90", processors=132)
    assert small.num_splits > 1
    assert small.grid == (inputs.num_seqs, 2, small.num_splits)
    many = replace(
        inputs,
        query=inputs.query.repeat(200, 1, 1),
        block_tables=inputs.block_tables.repeat(200, 1),
        seq_lens=inputs.seq_lens.repeat(200),
    )
    assert plan_launch(many, "sm_90", processors=132).num_splits == 1


def test_splits_can_be_forced():
    inputs = inputs_of(Case(lengths="many"))
    assert plan_launch(inputs, "sm_90", 132, num_splits=7).grid[2] == 7


def test_prefill_has_a_program_for_every_query_row():
    for seed in range(20):
        inputs = inputs_of(Case(mode="prefill", lengths="many", seed=seed))
        plan = plan_launch(inputs, "interpreter", processors=1)
        size = plan.query_tile
        # What sequence_of_tile takes for the first tile of each sequence.
        tiles = [
            (start // size + seq, -(-(end - start) // size))
            for seq, (start, end) in enumerate(
                pairwise(inputs.query_start_loc.tolist())
            )
        ]
        for (first, count), (following, _) in pairwise(tiles):
            assert first + count <= following, "no tile serves two sequences"
        first, count = tiles[-1]
        assert first + count <= plan.grid[0]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("prefill", [False, True])
def test_tiles_are_what_dot_can_take(
    target: str, itemsize: int, prefill: bool
):
    for head_dim in (16, 32, 64, 128, 256, 512):
        for group in (1, 4, 8, 16):
            tiles = choose_tiles(target, head_dim, itemsize, group, prefill)
            assert tiles.tile >= 16
            assert tiles.tile & (tiles.tile - 1) == 0
            assert tiles.num_warps in (1, 4, 8)


@pytest.mark.parametrize(
    ("head_dim", "padded"), [(1, 16), (16, 16), (17, 32), (80, 128)]
)
def test_a_head_dimension_is_padded_to_a_power_of_two(
    head_dim: int, padded: int
):
    assert padded_dim(head_dim) == padded


def test_only_nvidia_is_told_how_many_registers_there_are():
    tiles = choose_tiles("sm_80", 128, 2, 4, prefill=False)
    assert compile_options(tiles, "sm_80")["maxnreg"] == 255
    assert "maxnreg" not in compile_options(tiles, "gfx942")
    assert "maxnreg" not in compile_options(tiles, "interpreter")


def test_split_buffers_are_float32_and_absent_for_one_split():
    inputs = inputs_of(Case(dtype=torch.float16, head_dim_v=48))
    assert split_buffers(inputs, 1) == (None, None)
    parts, part_lses = split_buffers(inputs, 3)
    assert parts.shape == (4, 8, 3, 48)
    assert part_lses.shape == (4, 8, 3)
    assert {parts.dtype, part_lses.dtype} == {torch.float32}
