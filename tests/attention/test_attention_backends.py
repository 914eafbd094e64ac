"""Every backend against the float64 reference, on the same cases."""

import importlib.util
from collections.abc import Callable

import pytest
import torch
from cases.attention import (
    OPTIONS,
    PAIRWISE,
    RANDOM,
    Case,
    assert_matches_reference,
    build,
    covered_pairs,
    device_of,
    inputs_of,
    moved,
    moved_tensor,
    pairwise,
    poison_parts,
    poisoned_output,
    relative_error,
)

from llm_systems_cookbook.attention.dispatch import attend
from llm_systems_cookbook.attention.inputs import (
    AttentionInputs,
    checked_inputs,
)
from llm_systems_cookbook.attention.reference import reference_attention

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(
    not HAS_TRITON, reason="Triton is not installed"
)
BACKENDS = ["gather", "cpu", pytest.param("triton", marks=needs_triton)]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """Return a function that runs a backend, into outputs of NaN."""
    if HAS_TRITON:
        from llm_systems_cookbook.attention.triton import launch

        poison_parts(monkeypatch, launch)

    def run(
        inputs: AttentionInputs, backend: str, splits: int | None = None
    ) -> torch.Tensor:
        inputs = moved(inputs, device_of(backend))
        out = poisoned_output(inputs)
        if backend != "triton" or splits is None:
            return attend(inputs, backend, out).cpu()
        return launch.triton_attention(inputs, out, splits).cpu()

    return run


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", PAIRWISE + RANDOM, ids=str)
def test_matches_the_reference(case: Case, backend: str, run: Callable):
    inputs = inputs_of(case)
    assert_matches_reference(run(inputs, backend, case.splits), inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["decode", "prefill"])
@pytest.mark.parametrize("bad", [-1, "one too many", 10_000, -(2**31)])
def test_an_unknown_block_is_nan_where_nothing_was_validated(
    backend: str, mode: str, bad: int | str, run: Callable
):
    arguments = build(Case(lengths="many", mode=mode, splits=2, seed=5))
    if bad == "one too many":
        bad = len(arguments["key_cache"])
    clean = checked_inputs(**arguments)
    tables = arguments["block_tables"].clone()
    tables[1, 0] = bad
    arguments["block_tables"] = tables
    inputs = checked_inputs(**arguments, validate=False)
    out = run(inputs, backend, splits=2)
    rows = _rows_of(inputs, 1)
    assert out[rows].isnan().all()
    kept = torch.ones(len(out), dtype=torch.bool)
    kept[rows] = False
    exact = reference_attention(clean)
    assert relative_error(out[kept], exact[kept]) < 1e-5
    assert reference_attention(inputs)[rows].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_length_beyond_the_table_is_nan_where_nothing_was_validated(
    backend: str, run: Callable
):
    arguments = build(Case(lengths="many", table="exact"))
    arguments["seq_lens"] = arguments["seq_lens"] + 1000
    inputs = checked_inputs(**arguments, validate=False)
    assert run(inputs, backend).isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_key_reaches_its_own_sequence_and_no_other(
    backend: str, run: Callable
):
    arguments = build(Case(lengths="many", seed=7))
    block_id = int(arguments["block_tables"][1, 0])
    arguments["key_cache"][block_id, 0, 2, 3] = torch.nan
    inputs = checked_inputs(**arguments)
    out = run(inputs, backend)
    assert out[1, : inputs.group].isnan().all()
    others = torch.cat(
        [out[[0, 2]].flatten(), out[1, inputs.group :].flatten()]
    )
    assert others.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["query", "key_cache", "value_cache"])
def test_a_sequence_of_nan_alone_stays_nan(
    backend: str, name: str, run: Callable
):
    arguments = build(Case(lengths="around"))
    tensor = arguments[name]
    if name == "query":
        tensor[1] = torch.nan
    else:
        tensor[int(arguments["block_tables"][1, 0])] = torch.nan
    out = run(checked_inputs(**arguments), backend)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cap", [2.0, 50.0, 500.0, 1e4])
def test_a_soft_cap_of_any_size_is_exact(
    backend: str, cap: float, run: Callable
):
    arguments = build(Case(lengths="around")) | {"softcap": cap}
    inputs = checked_inputs(**arguments)
    assert_matches_reference(run(inputs, backend), inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("splits", [1, 2])
def test_a_sink_of_minus_infinity_is_none(
    backend: str, splits: int, run: Callable
):
    arguments = build(Case(lengths="edges"))
    plain = run(checked_inputs(**arguments), backend, splits)
    arguments["sinks"] = torch.full((8,), -torch.inf)
    out = run(checked_inputs(**arguments), backend, splits)
    torch.testing.assert_close(out, plain, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_past_the_last_start_are_zeros(backend: str, run: Callable):
    arguments = build(Case(mode="prefill", lengths="around"))
    padding = torch.ones(3, *arguments["query"].shape[1:])
    arguments["query"] = torch.cat([arguments["query"], padding])
    inputs = checked_inputs(**arguments, validate=False)
    out = run(inputs, backend)
    assert (out[-3:] == 0).all()
    assert out[:-3].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [-60000.0, 60000.0])
def test_scores_of_any_size_stay_finite(
    backend: str, size: float, run: Callable
):
    arguments = build(Case(lengths="around"))
    # Keys of one sign: all scores are far above 0, or all far below.
    arguments["key_cache"].abs_()
    arguments["query"] = torch.full_like(arguments["query"], size)
    for softcap in (None, 30.0):
        inputs = checked_inputs(**arguments | {"softcap": softcap})
        assert_matches_reference(run(inputs, backend), inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_sequences_give_no_rows(backend: str, run: Callable):
    inputs = checked_inputs(
        torch.empty(0, 4, 32),
        torch.full((2, 2, 8, 32), torch.nan),
        torch.full((2, 2, 8, 32), torch.nan),
        torch.empty(0, 3, dtype=torch.int32),
        torch.empty(0, dtype=torch.int32),
    )
    assert run(inputs, backend).shape == (0, 4, 32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_table_without_columns_serves_empty_sequences(
    backend: str, run: Callable
):
    inputs = checked_inputs(
        torch.randn(2, 4, 32),
        torch.full((2, 2, 8, 32), torch.nan),
        torch.full((2, 2, 8, 32), torch.nan),
        torch.empty(2, 0, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
    )
    assert (run(inputs, backend) == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_transposed_output_is_filled(backend: str):
    inputs = inputs_of(Case(lengths="around"))
    tokens, heads, dim = inputs.output().shape
    device = device_of(backend)
    out = torch.full((dim, heads, tokens), torch.nan, device=device)
    out = out.permute(2, 1, 0)
    assert attend(moved(inputs, device), backend, out) is out
    assert_matches_reference(out, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_other_column_of_a_table_is_a_table(backend: str, run: Callable):
    arguments = build(Case(lengths="many"))
    tables = arguments["block_tables"]
    wide = torch.full((tables.shape[0], 2 * tables.shape[1]), -1).int()
    wide[:, ::2] = tables
    lens = arguments["seq_lens"].repeat_interleave(2)[::2]
    changes = {"block_tables": wide[:, ::2], "seq_lens": lens}
    inputs = checked_inputs(**arguments | changes)
    assert_matches_reference(run(inputs, backend), inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_other_start_of_a_list_is_a_start(backend: str, run: Callable):
    arguments = build(Case(lengths="around", mode="prefill"))
    starts = arguments["query_start_loc"].repeat_interleave(2)[::2]
    inputs = checked_inputs(**arguments | {"query_start_loc": starts})
    assert_matches_reference(run(inputs, backend), inputs)


def test_moved_tensors_keep_their_strides_and_what_is_around_them():
    whole = torch.arange(24.0).view(4, 6)
    view = whole[1:, ::2]
    copy = moved_tensor(view, "cpu")
    assert copy.stride() == view.stride()
    assert torch.equal(copy, view)


def test_pairwise_covers_every_pair_of_options():
    covered = set().union(*covered_pairs(PAIRWISE))
    names = list(OPTIONS)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            for x in OPTIONS[a]:
                for y in OPTIONS[b]:
                    assert ((a, x), (b, y)) in covered


def test_pairwise_is_the_same_on_every_run():
    assert pairwise(OPTIONS) == pairwise(OPTIONS)
    assert len(PAIRWISE) < 60


def test_every_case_reads_something_and_nothing_poisoned():
    for case in PAIRWISE + RANDOM[:50]:
        inputs = inputs_of(case)
        exact = reference_attention(inputs)
        assert exact.isfinite().all(), case
        assert len(exact) == 0 or exact.norm() > 0, case
        assert inputs.key_cache.float().isnan().any(), case


def _rows_of(inputs: AttentionInputs, seq: int) -> slice:
    if inputs.query_start_loc is None:
        return slice(seq, seq + 1)
    first, end = inputs.query_start_loc[seq : seq + 2].tolist()
    return slice(first, end)
