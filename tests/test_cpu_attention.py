"""What the shared grid does not ask of the CPU kernel."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from attention_cases import (
    PAIRWISE,
    Case,
    assert_matches_reference,
    build,
    inputs_of,
    poisoned_output,
)

from llm_systems_cookbook.attention import cpu, paged_attention
from llm_systems_cookbook.attention.inputs import FP8, checked_inputs
from llm_systems_cookbook.attention.reference import reference_attention

FLOAT64 = [replace(c, dtype=torch.float64, cache=None) for c in PAIRWISE[:24]]


def run(inputs):
    return cpu.cpu_attention(inputs, poisoned_output(inputs))


def decode(lengths, *, heads=4, kv_heads=2, dim=32, block=16, seed=0):
    """Return arguments of a plain float32 decode with random tables."""
    generator = torch.Generator().manual_seed(seed)
    width = -(-max(lengths, default=0) // block)
    count = len(lengths) * width
    shape = count, kv_heads, block, dim
    return {
        "query": torch.randn(len(lengths), heads, dim, generator=generator),
        "key_cache": torch.randn(shape, generator=generator),
        "value_cache": torch.randn(shape, generator=generator),
        "block_tables": torch.randperm(count, generator=generator).view(
            len(lengths), width
        ),
        "seq_lens": torch.tensor(lengths, dtype=torch.int64),
    }


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
    cpu._copy_rows(cpu._cache(cache), rows, len(rows), tile)
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
    actual = np.array([cpu._exp32(v) for v in x])
    exact = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(actual[:4001], exact[:4001], rtol=3e-7)
    assert (actual[4001:] == 0).all()
    assert cpu._exp32(np.float32(0)) == 1
    assert np.isnan(cpu._exp32(np.float32(np.nan)))


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


def test_a_length_beyond_the_table_makes_its_sequence_nan():
    arguments = decode([32, 32])
    arguments["seq_lens"] = torch.tensor([33, 32])
    out = run(checked_inputs(**arguments, validate=False))
    assert out[0].isnan().all()
    assert out[1].isfinite().all()
    arguments["seq_lens"] = torch.tensor([2**60, 32])
    out = run(checked_inputs(**arguments, validate=False))
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


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
    arguments = decode([20, 20])
    arguments["query_start_loc"] = torch.tensor(starts)
    inputs = checked_inputs(**arguments, validate=False)
    around = torch.full((6, 4, 32), 7.0)
    cpu.cpu_attention(inputs, around[2:4])
    assert (around[:2] == 7).all()
    assert (around[4:] == 7).all()


def test_a_negative_length_without_validation_gives_zeros():
    arguments = decode([20, 20])
    arguments["seq_lens"] = torch.tensor([-3, 20])
    out = run(checked_inputs(**arguments, validate=False))
    assert (out[0] == 0).all()
    assert out[1].isfinite().all()


# --- Which rows a NaN or an infinity reaches --------------------------------


@pytest.mark.parametrize("cache", ["key_cache", "value_cache"])
def test_a_live_nan_stays_in_its_row_and_heads(cache):
    arguments = decode([40, 40, 40])
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


@pytest.mark.parametrize("keys", ["one", "first", "all"])
def test_scores_of_minus_infinity_are_as_in_the_reference(keys):
    arguments = decode([600])
    arguments["query"].abs_()
    which = {"one": [37], "first": range(300), "all": range(600)}[keys]
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


def test_threads_get_equal_shares_of_uneven_sequences():
    inputs = checked_inputs(**decode(LENGTHS))
    pieces = cpu._pieces(cpu._query_tiles(inputs), inputs.num_kv_heads)
    work = (pieces.end - pieces.low) * pieces.rows
    assert work.sum() == sum(LENGTHS) * inputs.num_kv_heads
    for threads in (1, 2, 3, 8):
        cuts = cpu._shares(pieces, threads)
        assert cuts[0] == 0
        assert cuts[-1] == len(work)
        shares = [work[a:b].sum() for a, b in pairwise(cuts)]
        assert len(shares) == threads
        assert max(shares) - min(shares) <= 2 * work.max()


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
    assert cpu.cpu_attention(inputs, out) is out
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


def test_a_package_and_home_that_cannot_be_written_compile_each_time(
    monkeypatch,
):
    asked = []

    def njit(**options):
        asked.append(options)
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(cpu, "njit", njit)
    assert cpu._compiled()(len) is len
    assert [o.get("cache") for o in asked] == [True, None]


def python(code, *arguments):
    # The threads of a test that runs beside this one are enough.
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=env,
        capture_output=True,
        text=True,
    )


def test_importing_attention_imports_neither_numba_nor_triton():
    done = python(
        "import sys, llm_systems_cookbook.attention;"
        "print(sorted({'numba', 'triton'} & set(sys.modules)))"
    )
    assert done.stdout.strip() == "[]", done.stderr


# --- Memory: past 2**31 numbers, and never outside the tensors ---------------

PAST_2_31 = """
import resource
import torch
from llm_systems_cookbook.attention import paged_attention
block, dim = 16, 64
count = 2**31 // (block * dim) + 2
keys, values = (
    # Never written, so the system gives no memory for it.
    torch.empty(count, 1, block, dim, dtype=torch.float16) for _ in range(2)
)
last = count - 1
assert last * block * dim > 2**31
torch.manual_seed(0)
small = torch.randn(2, 1, 1, block, dim).half()
keys[last], values[last] = small[0, 0], small[1, 0]
query = torch.randn(1, 4, dim).half()
def attend(k, v, block_id):
    table = torch.tensor([[block_id]])
    lens = torch.tensor([block])
    return paged_attention(query, k, v, table, lens, backend="cpu")
far, near = attend(keys, values, last), attend(*small, 0)
assert torch.equal(far, near) and near.abs().sum() > 0
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert used < 2 * 2**20, f"{used} KiB: the whole cache was touched"
print("same")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory in KiB")
def test_a_block_past_2_to_the_31_numbers_is_found():
    done = python(PAST_2_31)
    assert done.stdout.strip() == "same", done.stderr


GUARDED = """
import ctypes, mmap, sys
import numpy as np
import torch
from llm_systems_cookbook.attention import paged_attention

def at_the_end(tensor):
    '''Move a tensor to memory whose next byte may not be read.'''
    size = tensor.numel() * tensor.element_size()
    page = mmap.PAGESIZE
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    guard = ctypes.c_void_p(start + pages * page)
    assert libc.mprotect(guard, ctypes.c_size_t(page), 0) == 0
    flat = torch.frombuffer(
        memory, dtype=tensor.dtype, count=tensor.numel(),
        offset=pages * page - size,
    )
    flat.copy_(tensor.reshape(-1))
    return flat.view(tensor.shape)

torch.manual_seed(0)
index = getattr(torch, sys.argv[1])
lens = torch.tensor([50, 50], dtype=index)
tables = torch.tensor([[3, 1, 0, 2], [0, 2, 1, 3]], dtype=index)
keys, values = torch.randn(2, 4, 2, 16, 40)
query = torch.randn(2, 8, 40)
plain = paged_attention(query, keys, values, tables, lens, backend="cpu")
moved = [at_the_end(t) for t in (query, keys, values, tables, lens)]
guarded = paged_attention(*moved, backend="cpu")
assert torch.equal(plain, guarded)
print("same", flush=True)
if sys.argv[2] == "over":
    table = moved[3]
    ctypes.string_at(table.data_ptr() + table.nbytes, 1)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_nothing_is_read_past_a_protected_page(index):
    done = python(GUARDED, index, "inside")
    assert (done.returncode, done.stdout.strip()) == (0, "same"), done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
def test_one_byte_past_a_protected_page_is_noticed():
    """The test above can fail."""
    done = python(GUARDED, "int32", "over")
    assert done.stdout.strip() == "same"
    assert done.returncode < 0


def test_auto_takes_the_compiled_kernel_on_the_cpu(monkeypatch):
    monkeypatch.delenv("COOKBOOK_BACKEND", raising=False)
    arguments = decode([20])
    taken = paged_attention(**arguments)
    assert torch.equal(taken, run(checked_inputs(**arguments)))
