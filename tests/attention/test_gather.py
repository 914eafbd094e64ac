"""Three ways to gather, the workspace, and what the backend makes of it."""

import threading
from dataclasses import replace

import pytest
import torch
from cases.attention import (
    Case,
    assert_matches_reference,
    inputs_of,
    poisoned_output,
)

from llm_systems_cookbook.attention import gather as module
from llm_systems_cookbook.attention.gather import (
    Workspace,
    gather_attention,
    gather_index_select,
    gather_loop,
    gather_loop_attention,
)
from llm_systems_cookbook.attention.reference import reference_attention

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("plain", "tokens_first", "interleaved")


def gather_into_workspace(cache, tables, length):
    return Workspace().gather(cache, tables, length)


WAYS = (gather_loop, gather_index_select, gather_into_workspace)


def pool(layout="plain", dtype=torch.float32):
    """Return a cache with a different number in every place."""
    cache = torch.arange(9 * 3 * 4 * 5).view(9, 3, 4, 5).to(dtype)
    if layout == "tokens_first":
        return cache.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "interleaved":
        return torch.stack([cache, cache], dim=-2)[..., 1, :]
    return cache


def token_by_token(cache, tables, length):
    block = cache.shape[2]
    return torch.stack(
        [
            torch.stack(
                [cache[row[i // block], :, i % block] for i in range(length)],
                dim=1,
            )
            for row in tables.tolist()
        ]
    )


# --- The three ways --------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_equals_token_by_token(way, layout, dtype):
    cache = pool(layout, dtype)
    assert layout == "plain" or not cache.is_contiguous()
    for index, rows, length in (
        (torch.int64, [[7, 2, 0], [1, 1, 8]], 12),
        (torch.int64, [[7, 2, 0], [1, 1, 8]], 9),
        (torch.int32, [[5]], 1),
        (torch.int32, [[3, -1, 99]], 4),
    ):
        tables = torch.tensor(rows, dtype=index)
        result = way(cache, tables, length)
        assert result.dtype == dtype
        assert torch.equal(result, token_by_token(cache, tables, length))


@pytest.mark.parametrize("way", WAYS)
def test_nothing_to_gather(way):
    tables = torch.zeros(2, 0, dtype=torch.int64)
    assert way(pool(), tables, 0).shape == (2, 3, 0, 5)
    assert way(pool(), tables[:0], 0).shape == (0, 3, 0, 5)
    tables = torch.full((2, 3), -1)
    assert way(pool(), tables, 0).shape == (2, 3, 0, 5)


@pytest.mark.parametrize("way", WAYS)
def test_bad_input_is_refused(way):
    cache, tables = pool(), torch.tensor([[0, 9]])
    for message, arguments in (
        (r"block 9 is outside \[0, 9\)", (cache, tables, 5)),
        (r"block -1 is outside \[0, 9\)", (cache, tables - 1, 5)),
        (r"length 9 is outside \[0, 8\]", (cache, tables, 9)),
        (r"length -1 is outside \[0, 8\]", (cache, tables, -1)),
        ("int32 or int64", (cache, tables.float(), 4)),
        ("block_tables must be", (cache, tables[0], 4)),
        ("cache must be", (cache[0], tables, 4)),
    ):
        with pytest.raises(ValueError, match=message):
            way(*arguments)


@pytest.mark.parametrize("way", [gather_loop, gather_index_select])
def test_a_gather_is_a_copy_of_its_own(way):
    cache, tables = pool().clone(), torch.tensor([[2]])
    first = way(cache, tables, 4)
    before = first.clone()
    way(cache, torch.tensor([[3]]), 4)
    cache.fill_(0)
    assert torch.equal(first, before)


@pytest.mark.parametrize("way", WAYS)
def test_heads_come_out_unbroken(way):
    """What SDPA reads is one run of memory for each head."""
    result = way(pool(), torch.tensor([[7, 2], [1, 8]]), 8)
    assert result[0, 0].is_contiguous()


# --- The workspace ---------------------------------------------------------


def test_the_workspace_is_used_again():
    workspace, cache = Workspace(), pool()
    first = workspace.gather(cache, torch.tensor([[7, 2, 0]]), 12)
    second = workspace.gather(cache, torch.tensor([[1, 8]]), 7)
    assert second.data_ptr() == first.data_ptr()
    assert torch.equal(
        second, token_by_token(cache, torch.tensor([[1, 8]]), 7)
    )


def test_the_workspace_holds_what_was_gathered_and_grows_by_doubling():
    cache = pool()
    block = cache[0].nbytes
    workspace = Workspace()
    assert workspace.nbytes == 0
    held = []
    for blocks in (4, 2, 5, 8, 9, 1):
        workspace.gather(cache, torch.arange(blocks)[None], 4 * blocks)
        held.append(workspace.nbytes // block)
    assert held == [4, 4, 8, 8, 16, 16]
    workspace.gather(cache, torch.zeros(5, 9, dtype=torch.int64), 36)
    assert workspace.nbytes == 45 * block
    workspace.release()
    assert workspace.nbytes == 0


def test_one_workspace_serves_every_dtype():
    workspace, tables = Workspace(), torch.tensor([[7, 2]])
    for dtype in (*DTYPES, torch.uint8):
        cache = (pool() % 100).to(dtype)
        result = workspace.gather(cache, tables, 6)
        assert torch.equal(result, token_by_token(cache, tables, 6))
    assert workspace.nbytes == 2 * 8 * pool()[0].numel()


def test_a_strided_cache_needs_no_workspace():
    workspace = Workspace()
    workspace.gather(pool(layout="interleaved"), torch.tensor([[7]]), 4)
    assert workspace.nbytes == 0


# --- The backend -----------------------------------------------------------


def test_the_backend_leaves_no_stale_data_between_calls():
    """A longer call, then shorter ones of other shapes and dtypes."""
    workspaces = Workspace(), Workspace()
    cases = [
        Case(lengths="many", head_dim=128, seed=1),
        Case(lengths="edges", seed=2),
        Case(lengths="around", dtype=torch.bfloat16, head_dim_v=48, seed=3),
        Case(lengths="many", mode="prefill", dtype=torch.float16, seed=4),
        Case(lengths="zeros", cache=torch.float8_e5m2, seed=5),
        Case(dtype=torch.float64, lengths="around", seed=6),
    ]
    for case in cases:
        inputs = inputs_of(case)
        for workspace in workspaces:
            if workspace.nbytes:
                workspace._bytes.fill_(255)  # NaN in every dtype
        out = gather_attention(inputs, poisoned_output(inputs), workspaces)
        assert_matches_reference(out, inputs)
        before = out.clone()
        gather_attention(inputs_of(cases[0]), before.new_empty(3, 8, 128))
        assert torch.equal(out, before), "a result lies in the workspace"


def test_a_workspace_given_is_used_and_the_default_is_left_alone(monkeypatch):
    monkeypatch.setattr(module, "_default", module._Default())
    inputs = inputs_of(Case(lengths="many"))
    given = Workspace(), Workspace()
    gather_attention(inputs, inputs.output(), given)
    assert module._default.by_device == {}
    assert all(workspace.nbytes > 0 for workspace in given)


def test_each_thread_has_a_default_workspace_of_its_own(monkeypatch):
    monkeypatch.setattr(module, "_default", module._Default())
    inputs = inputs_of(Case(lengths="many"))
    seen = []

    def attend():
        for _ in range(2):
            gather_attention(inputs, inputs.output())
        seen.append(module._default.by_device[torch.device("cpu")])

    attend()
    thread = threading.Thread(target=attend)
    thread.start()
    thread.join()
    mine, other = seen
    assert not set(mine) & set(other)
    assert len(module._default.by_device) == 1


@pytest.mark.parametrize("portion", [1, 5_000, 1 << 30])
def test_sequences_of_equal_length_go_together_within_the_limit(
    portion, monkeypatch
):
    monkeypatch.setitem(module.PORTION_BYTES, "cpu", portion)
    case = Case(lengths="around", head_dim=32, block_size=8, seed=2)
    inputs = inputs_of(case)  # 9, 8 and 16 tokens
    twice = replace(
        inputs,
        query=torch.cat([inputs.query, -inputs.query]),
        block_tables=torch.cat([inputs.block_tables] * 2),
        seq_lens=torch.cat([inputs.seq_lens] * 2),
    )
    counts = [len(p.seqs) for p in module._portions(twice)]
    token = 2 * 32 * 4
    fitting = [max(1, min(2, portion // (token * n))) for n in (9, 8, 16)]
    assert counts == [n for n in fitting for _ in range(2 // n)]
    workspaces = Workspace(), Workspace()
    out = gather_attention(twice, poisoned_output(twice), workspaces)
    assert_matches_reference(out, twice)
    largest = max(n * b for n, b in zip(fitting, (16, 8, 16), strict=True))
    assert all(w.nbytes <= 2 * largest * token for w in workspaces)


def test_many_query_rows_are_taken_in_parts(monkeypatch):
    monkeypatch.setattr(module, "QUERY_ROWS", 2)
    rows = 0
    for options in ({}, {"window": "over"}, {"alibi": True, "sinks": True}):
        for seed in range(4):
            case = Case(mode="prefill", lengths="many", seed=seed, **options)
            inputs = inputs_of(case)
            rows = max(rows, int(inputs.query_lens().max()))
            out = gather_attention(inputs, poisoned_output(inputs))
            assert_matches_reference(out, inputs)
    assert rows > 4


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_float64_is_exact_to_a_few_roundings(mode):
    for options in ({}, {"softcap": True, "sinks": True}, {"alibi": True}):
        case = Case(dtype=torch.float64, mode=mode, lengths="around")
        inputs = inputs_of(replace(case, **options))
        out = gather_attention(inputs, poisoned_output(inputs))
        assert_matches_reference(out, inputs)


def with_a_bad_id(inputs, row, column, block_id):
    tables = inputs.block_tables.clone()
    tables[row, column] = block_id
    return replace(inputs, block_tables=tables)


@pytest.mark.parametrize("bad", [-1, -7, 10**6])
@pytest.mark.parametrize("options", [{}, {"softcap": True, "alibi": True}])
def test_an_unchecked_bad_id_makes_its_own_sequence_nan(bad, options):
    inputs = inputs_of(Case(lengths="around", **options))
    exact = reference_attention(inputs)
    out = gather_attention(
        with_a_bad_id(inputs, 1, 0, bad), poisoned_output(inputs)
    )
    assert out[1].isnan().all()
    torch.testing.assert_close(out[::2], exact[::2].float())


def test_an_unchecked_length_beyond_the_table_gives_nan():
    inputs = inputs_of(Case(lengths="around"))
    longer = replace(inputs, seq_lens=inputs.seq_lens + 1000)
    out = gather_attention(longer, inputs.output())
    assert out.isnan().all()


def test_an_unchecked_id_in_an_empty_pool_gives_nan():
    inputs = inputs_of(Case(lengths="around"))
    empty = replace(
        inputs,
        key_cache=inputs.key_cache[:0],
        value_cache=inputs.value_cache[:0],
    )
    out = gather_attention(empty, inputs.output())
    assert out.isnan().all()


def test_an_unchecked_id_before_the_window_does_not_matter():
    inputs = inputs_of(Case(lengths="many", window="block"))
    assert (inputs.block_tables[0, 0] == -1).item()
    out = gather_attention(
        with_a_bad_id(inputs, 0, 0, 10**6), poisoned_output(inputs)
    )
    assert_matches_reference(out, inputs)


def test_inputs_that_want_gradients_are_taken():
    inputs = inputs_of(Case(lengths="around"))
    query = inputs.query.requires_grad_()
    cache = torch.nn.Parameter(inputs.key_cache)
    inputs = replace(inputs, query=query, key_cache=cache)
    out = gather_attention(inputs, poisoned_output(inputs))
    assert not out.requires_grad
    plain = replace(inputs, query=query.detach(), key_cache=cache.detach())
    assert_matches_reference(out, plain)


# --- The naive backend -----------------------------------------------------


@pytest.mark.parametrize("mode", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("dtype", "lengths"),
    [
        (torch.float64, "many"),
        (torch.float64, "edges"),
        (torch.float32, "around"),
        (torch.float32, "zeros"),
        (torch.float16, "around"),
        (torch.bfloat16, "edges"),
    ],
)
def test_the_naive_backend_equals_the_reference(mode, dtype, lengths):
    case = Case(
        dtype=dtype,
        mode=mode,
        lengths=lengths,
        group=2,
        head_dim=32,
        head_dim_v=48,
        block_size=DTYPES.index(dtype) * 5 + 1,
    )
    inputs = inputs_of(case)
    out = poisoned_output(inputs)
    assert gather_loop_attention(inputs, out) is out
    assert_matches_reference(out, inputs)


@pytest.mark.parametrize(
    "options",
    [
        {"index": torch.int64},
        {"table": "stale"},
        {"table": "shared"},
        {"layout": "tokens_first"},
        {"layout": "interleaved"},
        {"query_layout": "strided"},
        {"query_layout": "dims_apart"},
        {"group": 1},
        {"group": 7, "num_kv_heads": 1},
    ],
)
def test_the_naive_backend_takes_any_layout(options):
    case = Case(mode="prefill", lengths="around", block_size=4, head_dim=32)
    inputs = inputs_of(replace(case, **options))
    out = gather_loop_attention(inputs, poisoned_output(inputs))
    assert_matches_reference(out, inputs)


def test_the_naive_backend_keeps_the_scale():
    inputs = replace(inputs_of(Case(lengths="around")), scale=0.37)
    out = gather_loop_attention(inputs, poisoned_output(inputs))
    assert_matches_reference(out, inputs)
    plain = replace(inputs, scale=0.125)
    assert not torch.equal(
        out, gather_loop_attention(plain, poisoned_output(plain))
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"window": 3}, "got 3"),
        ({"k_scale": torch.ones(2)}, "scaled"),
        ({"v_scale": torch.ones(2)}, "scaled"),
    ],
)
def test_the_naive_backend_refuses_what_it_would_get_wrong(options, named):
    inputs = replace(inputs_of(Case(lengths="around")), **options)
    out = poisoned_output(inputs)
    with pytest.raises(ValueError, match=named):
        gather_loop_attention(inputs, out)
    assert out.isnan().all()


def test_the_naive_backend_gathers_each_sequence_twice(monkeypatch):
    gathered = []

    def spy(cache, tables, length):
        gathered.append((tuple(tables.shape), length))
        return gather_loop(cache, tables, length)

    monkeypatch.setattr(module, "gather_loop", spy)
    inputs = inputs_of(Case(lengths="around"))
    gather_loop_attention(inputs, poisoned_output(inputs))
    width = inputs.block_tables.shape[1]
    lengths = [n for n in inputs.seq_lens.tolist() if n > 0]
    assert gathered == [((1, width), n) for n in lengths for _ in range(2)]


def test_the_naive_backend_refuses_an_unchecked_bad_id():
    inputs = inputs_of(Case(lengths="around"))
    for bad in (-1, inputs.num_blocks):
        with pytest.raises(ValueError, match=f"block {bad} is outside"):
            gather_loop_attention(
                with_a_bad_id(inputs, 1, 0, bad), poisoned_output(inputs)
            )


def test_the_naive_backend_wants_no_gradients():
    inputs = inputs_of(Case(lengths="around"))
    wanting = replace(inputs, query=inputs.query.requires_grad_())
    out = gather_loop_attention(wanting, poisoned_output(wanting))
    assert not out.requires_grad
