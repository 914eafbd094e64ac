"""What the shared grid does not ask of the CPU kernel."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases.attention import (
    PAIRWISE,
    Case,
    assert_matches_reference,
    build,
    decode,
    inputs_of,
    poisoned_output,
)
from numba import config, get_num_threads, set_num_threads

from llm_systems_cookbook.attention.cpu import cpu_attention, kernels, launch
from llm_systems_cookbook.attention.cpu.plan import MIN_PIECE
from llm_systems_cookbook.attention.inputs import FP8, checked_inputs
from llm_systems_cookbook.attention.reference import reference_attention

FLOAT64 = [replace(c, dtype=torch.float64, cache=None) for c in PAIRWISE[:24]]


def run(inputs):
    return cpu_attention(inputs, poisoned_output(inputs))


# --- Numbers ---------------------------------------------------------------


def every_pattern(dtype):
    """Return one of each bit pattern: [rows, 1, 1, 256]."""
    if dtype in FP8:
        bits = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    else:
        bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    return bits.view(dtype).view(-1, 1, 1, 256)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, *FP8], ids=str
)
def test_every_bit_pattern_is_widened_as_torch_does(dtype):
    cache = every_pattern(dtype)
    tile = np.empty((len(cache), 256), np.float32)
    rows = np.arange(len(cache)) * 256
    kernels._copy_rows(
        launch._cache(cache, torch.float32), rows, len(rows), tile
    )
    exact = cache.float().view(-1, 256).numpy()
    nan = np.isnan(exact)
    assert nan.any()
    np.testing.assert_array_equal(np.isnan(tile), nan)
    # As integers: -0.0 is not 0.0.
    np.testing.assert_array_equal(
        tile.view(np.int32)[~nan], exact.view(np.int32)[~nan]
    )


def test_exp_is_close_over_its_range_and_0_below():
    x = np.concatenate(
        [np.linspace(-87, 0, 4001), [-87.5, -1e30, -np.inf]]
    ).astype(np.float32)
    actual = np.array([kernels._exp32(v) for v in x])
    exact = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(actual[:4001], exact[:4001], rtol=3e-7)
    assert (actual[4001:] == 0).all()
    assert kernels._exp32(np.float32(0)) == 1
    assert np.isnan(kernels._exp32(np.float32(np.nan)))


@pytest.mark.parametrize("case", FLOAT64, ids=str)
def test_float64_matches_the_reference(case):
    inputs = inputs_of(case)
    assert_matches_reference(run(inputs), inputs)


# --- Bad ids, lengths and starts -------------------------------------------


@pytest.mark.parametrize("bad", [-1, -(2**40), 24, 2**32, 2**62])
def test_a_bad_id_makes_its_sequence_nan_and_no_other(bad):
    arguments = decode([40, 40, 40])
    arguments["block_tables"][1, 1] = bad
    if bad == 24:
        arguments["block_tables"][1, 1] = len(arguments["key_cache"])
    out = run(checked_inputs(**arguments, validate=False))
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("length", [33, 37, 50, 2**31, 2**60, 2**63 - 1])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("sinks", [None, torch.zeros(4)], ids=["", "sinks"])
def test_a_length_beyond_the_table_makes_its_sequence_nan(
    length, window, sinks
):
    """Also where the window lies wholly beyond, and a sink takes weight."""
    arguments = decode([32, 32])
    arguments["seq_lens"] = torch.tensor([length, 32])
    inputs = checked_inputs(
        **arguments, window=window, sinks=sinks, validate=False
    )
    out = run(inputs)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_prefill_rows_beyond_the_table_are_nan_and_no_others():
    arguments = decode([32])
    arguments["query"] = torch.randn(8, 4, 32)
    arguments["query_start_loc"] = torch.tensor([0, 8])
    arguments["seq_lens"] = torch.tensor([35])  # rows at 27 to 34
    for window in (None, 1, 3):
        out = run(checked_inputs(**arguments, window=window, validate=False))
        assert out[:5].isfinite().all()
        assert out[5:].isnan().all()


def test_a_bad_id_is_nan_in_the_prefill_rows_that_see_it():
    arguments = decode([40])
    arguments["query"] = torch.randn(40, 4, 32)
    arguments["query_start_loc"] = torch.tensor([0, 40])
    arguments["block_tables"][0, 1] = -1
    inputs = checked_inputs(**arguments, validate=False)
    out = run(inputs)
    assert out[:16].isfinite().all()
    assert out[16:].isnan().all()
    assert reference_attention(inputs)[16:].isnan().all()


@pytest.mark.parametrize(
    "starts", [[0, 1, 99], [-7, 1, 2], [0, 2, 1], [2**50, 0, -(2**50)]]
)
def test_bad_starts_without_validation_write_nothing_outside(starts):
    arguments = decode([20] * (len(starts) - 1))
    arguments["query_start_loc"] = torch.tensor(starts)
    arguments["query"] = torch.randn(2, 4, 32)
    inputs = checked_inputs(**arguments, validate=False)
    around = torch.full((6, 4, 32), 7.0)
    cpu_attention(inputs, around[2:4])
    assert (around[:2] == 7).all()
    assert (around[4:] == 7).all()


def test_a_negative_length_without_validation_gives_zeros():
    arguments = decode([20, 20])
    arguments["seq_lens"] = torch.tensor([-3, 20])
    out = run(checked_inputs(**arguments, validate=False))
    assert (out[0] == 0).all()
    assert out[1].isfinite().all()


# --- Tiles read where they are, and copied ones -----------------------------

# The kernel has sums of its own for two of them.
WIDTHS = [int(kernels.SMALL_WIDTH), int(kernels.USUAL_WIDTH), 20]


def with_steps(cache):
    """Return the same numbers, each two places from the next."""
    wide = torch.full((*cache.shape[:3], 2 * cache.shape[3]), torch.nan)
    wide[..., ::2] = cache
    return wide[..., ::2]


@pytest.mark.parametrize("dim", [*WIDTHS, 128])
@pytest.mark.parametrize("block", [16, 48, 5])
@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("rows", [1, 30])
def test_tiles_in_place_and_copied_ones_give_the_same_bits(
    dim, block, window, rows
):
    arguments = decode([700, 41, 30], dim=dim, block=block)
    arguments["query"] = torch.randn(3 * rows, 4, dim)
    arguments["query_start_loc"] = torch.arange(4) * rows
    inputs = checked_inputs(**arguments, window=window)
    out = run(inputs)
    assert_matches_reference(out, inputs)
    names = "key_cache", "value_cache"
    for moved in (names[:1], names[1:], names):
        copied = {name: with_steps(arguments[name]) for name in moved}
        other = checked_inputs(**{**arguments, **copied}, window=window)
        assert not launch._cache(copied[moved[0]], torch.float32).whole
        assert torch.equal(run(other), out)


def test_only_tiles_the_sums_can_take_as_they_are_stay_in_place():
    cache = torch.zeros(3, 2, 32, 8)
    assert launch._cache(cache, torch.float32).whole
    assert not launch._cache(cache.half(), torch.float32).whole
    assert not launch._cache(cache, torch.float64).whole
    assert launch._cache(cache.double(), torch.float64).whole
    assert not launch._cache(
        cache[:, :, :20].contiguous(), torch.float32
    ).whole
    assert not launch._cache(cache[:, :, :16], torch.float32).whole
    assert not launch._cache(
        cache[:1].expand(3, -1, -1, -1), torch.float32
    ).whole


def test_functions_that_may_reorder_sums_call_no_compiled_function():
    """What they call would inherit it, and `_exp32` must keep its order."""
    compiled = {
        name: function
        for name, function in vars(kernels).items()
        if hasattr(function, "py_func")
    }
    reordering = {
        name: function.py_func.__code__.co_names
        for name, function in compiled.items()
        if function.targetoptions.get("fastmath")
    }
    assert {"_score_by", "_add_values_by"} <= set(reordering)
    assert "_softmax_step" not in reordering
    for name, called in reordering.items():
        assert not {*compiled, "_exp", "_number"} & set(called), name
    assert not kernels.REORDER & {"fast", "nnan", "ninf"}


# --- Which rows a NaN or an infinity reaches --------------------------------


@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("cache", ["key_cache", "value_cache"])
def test_a_live_nan_stays_in_its_row_and_heads(cache, dim):
    arguments = decode([40, 40, 40], dim=dim)
    block = arguments["block_tables"][1, 2]
    arguments[cache][block, 0, 5] = torch.nan
    out = run(checked_inputs(**arguments))
    assert out[1, :2].isnan().all()
    assert out[1, 2:].isfinite().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("cache", ["key_cache", "value_cache"])
def test_a_nan_reaches_no_earlier_row_of_a_prefill(cache):
    arguments = decode([40])
    arguments["query"] = torch.randn(40, 4, 32)
    arguments["query_start_loc"] = torch.tensor([0, 40])
    arguments[cache][arguments["block_tables"][0, 1], :, 3] = torch.nan
    out = run(checked_inputs(**arguments))
    assert out[:19].isfinite().all()
    assert out[19:].isnan().all()


@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("keys", ["one", "first", "all"])
def test_scores_of_minus_infinity_are_as_in_the_reference(keys, dim):
    arguments = decode([1200], dim=dim)
    arguments["query"].abs_()
    which = {"one": [37], "first": range(700), "all": range(1200)}[keys]
    for position in which:
        block = arguments["block_tables"][0, position // 16]
        arguments["key_cache"][block, :, position % 16] = -torch.inf
    inputs = checked_inputs(**arguments)
    out, exact = run(inputs), reference_attention(inputs)
    assert bool(exact.isnan().all()) == (keys == "all")
    assert torch.equal(out.isnan(), exact.isnan())
    if keys != "all":
        assert_matches_reference(out, inputs)


# --- Shapes of the work ------------------------------------------------------


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_tokens_give_zeros(lengths):
    inputs = checked_inputs(**decode(lengths))
    assert inputs.num_blocks == 0
    out = run(inputs)
    assert out.shape == (len(lengths), 4, 32)
    assert (out == 0).all()


LENGTHS = [1, 2, 3, 17] * 12 + [900, 2100]


def test_many_short_sequences_and_few_long_ones():
    inputs = checked_inputs(**decode(LENGTHS))
    assert_matches_reference(run(inputs), inputs)


def test_a_row_has_the_same_bits_whether_or_not_others_are_cut():
    """Rows in one piece are combined at once, or after those that are cut."""
    arguments = decode(LENGTHS)
    together = run(checked_inputs(**arguments))
    short = [i for i, length in enumerate(LENGTHS) if length < 100]
    own = {name: arguments[name][short] for name in ("query", "seq_lens")}
    own["block_tables"] = arguments["block_tables"][short]
    alone = run(checked_inputs(**arguments | own))
    assert max(LENGTHS) > MIN_PIECE > 100
    assert torch.equal(alone, together[short])


def test_one_thread_and_two_give_the_same_bits():
    prefill = build(Case(mode="prefill", lengths="many", seed=3))
    before = torch.get_num_threads()
    try:
        for arguments in (decode(LENGTHS), prefill):
            inputs = checked_inputs(**arguments)
            results = []
            for threads in (1, 2, 1, 2):
                torch.set_num_threads(threads)
                results.append(run(inputs))
            assert all(torch.equal(results[0], r) for r in results)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_output_with_gaps_is_written_between_them(dtype):
    inputs = inputs_of(Case(dtype=dtype, lengths="around"))
    plain = run(inputs)
    wide = torch.full((*plain.shape[:2], 2 * plain.shape[2]), 7.0).to(dtype)
    out = wide[..., ::2]
    assert cpu_attention(inputs, out) is out
    assert torch.equal(out, plain)
    assert (wide[..., 1::2] == 7).all()


def test_rows_with_steps_and_overlapping_blocks_are_read():
    arguments = decode([40, 30])
    plain = run(checked_inputs(**arguments))
    for name in ("key_cache", "value_cache"):
        cache = arguments[name]
        wide = torch.full((*cache.shape[:3], 3 * cache.shape[3]), torch.nan)
        wide[..., ::3] = cache
        arguments[name] = wide[..., ::3]
    assert torch.equal(run(checked_inputs(**arguments)), plain)
    one = {n: arguments[n][:1] for n in ("key_cache", "value_cache")}
    expanded = {n: c.expand(6, -1, -1, -1) for n, c in one.items()}
    same = run(checked_inputs(**{**arguments, **expanded}))
    arguments["block_tables"] = torch.zeros_like(arguments["block_tables"])
    assert torch.equal(run(checked_inputs(**{**arguments, **one})), same)


def test_a_tensor_that_takes_part_in_a_graph_is_read():
    arguments = decode([20])
    plain = run(checked_inputs(**arguments))
    arguments["query"].requires_grad_()
    arguments["key_cache"].requires_grad_()
    assert torch.equal(run(checked_inputs(**arguments)), plain)


# --- Installing and importing ------------------------------------------------


def python(code, *arguments):
    # The threads of a test that runs beside this one are enough.
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=env,
        capture_output=True,
        text=True,
    )


def test_as_many_threads_as_numba_has_work_and_its_count_is_left():
    inputs = checked_inputs(**decode(LENGTHS))
    before, most = torch.get_num_threads(), config.NUMBA_NUM_THREADS
    expected = run(inputs)
    try:
        for count in (1, most, most + 3):
            torch.set_num_threads(count)
            set_num_threads(1)
            planned = replace(inputs, plan={})
            assert torch.equal(run(planned), expected)
            assert planned.plan["cpu"].threads == min(count, most)
            assert get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
        set_num_threads(most)


def test_an_output_of_another_shape_is_refused_and_left():
    inputs = checked_inputs(**decode([20, 30]))
    for wrong in (inputs.output()[1:], inputs.output()[:, :2]):
        wrong.fill_(7)
        with pytest.raises(ValueError, match="out must be \\[2, 4, 32\\]"):
            cpu_attention(inputs, wrong)
        assert (wrong == 7).all()


def test_the_first_call_leaves_torch_its_number_of_threads():
    """Where both use OpenMP, numba would set it when it starts its own."""
    code = """
import torch
from llm_systems_cookbook.attention import paged_attention
torch.set_num_threads(1)
cache = torch.ones(1, 1, 16, 8)
table, length = torch.tensor([[0]]), torch.tensor([3])
for _ in range(2):
    paged_attention(
        torch.ones(1, 1, 8), cache, cache, table, length, backend="cpu"
    )
    print(torch.get_num_threads())
"""
    result = python(code)
    assert result.stdout.split() == ["1", "1"], result.stderr
