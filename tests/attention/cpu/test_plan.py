"""How a step's work is cut, and what the layers of a step share."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from cases.attention import Case, counted_calls, inputs_of, poisoned_output

from llm_systems_cookbook.attention.cpu import cpu_attention
from llm_systems_cookbook.attention.cpu import plan as cpu_plan

LENGTHS = [1, 2, 3, 17] * 12 + [900, 2100]

# --- Cutting -----------------------------------------------------------------


def shares_of_work(lengths, rows, kv_heads, threads):
    """Return each thread's work: positions times rows."""
    starts = np.array([0, *np.cumsum(rows)])
    sizes = 8, cpu_plan.NO_WINDOW, 10**6, kv_heads, threads
    tiles, pieces, cuts = cpu_plan._cut(np.array(lengths), starts, *sizes)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, len(pieces), threads + 1)
    work = (pieces["end"] - pieces["low"]) * tiles["rows"][pieces["tile"]]
    return [int(work[a:b].sum()) for a, b in pairwise(cuts)], work


@pytest.mark.parametrize(
    ("lengths", "kv_heads", "threads", "expected"),
    [
        ([1024], 1, 2, [512, 512]),
        ([512, 512], 1, 2, [512, 512]),
        ([100], 2, 2, [100, 100]),
        ([100, 100], 2, 2, [200, 200]),
        ([100], 8, 8, [100] * 8),
        ([100] * 3, 1, 2, [200, 100]),
        ([100], 1, 3, [0, 100, 0]),
    ],
)
def test_few_equal_pieces_are_shared_evenly(
    lengths, kv_heads, threads, expected
):
    rows = [1] * len(lengths)
    assert shares_of_work(lengths, rows, kv_heads, threads)[0] == expected


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_get_equal_shares_of_uneven_work(threads):
    """No thread is off by more than the piece that lies across a cut."""
    rng = np.random.default_rng(threads)
    for rows in ([1] * len(LENGTHS), rng.integers(0, 2, len(LENGTHS)) * 7 + 1):
        rows = np.minimum(rows, LENGTHS)
        shares, work = shares_of_work(LENGTHS, rows, 2, threads)
        assert sum(shares) == 2 * np.dot(LENGTHS, rows)
        even = work.sum() / threads
        assert all(abs(share - even) <= work.max() for share in shares)


def test_a_long_sequence_is_cut_and_a_very_long_one_not_too_finely():
    def pieces(length):
        sizes = 8, cpu_plan.NO_WINDOW, 10**9, 1, 1
        return len(
            cpu_plan._cut(np.array([length]), np.array([0, 1]), *sizes)[1]
        )

    assert pieces(cpu_plan.MIN_PIECE) == 1
    assert pieces(cpu_plan.MIN_PIECE + 1) == 2
    assert pieces(10 * cpu_plan.MIN_PIECE) == 10
    assert pieces(10**8) == cpu_plan.PIECES


@pytest.mark.parametrize("window", [cpu_plan.NO_WINDOW, 1, 40])
@pytest.mark.parametrize("threads", [1, 3, 64])
def test_the_cut_holds_each_row_and_position_once(window, threads):
    """What each row sees, counted from the pieces, against plain ranges."""
    rng = np.random.default_rng(0)
    for height in (1, 5, 32):
        rows = rng.integers(0, 70, 12)
        lengths = rows + rng.choice([0, 3, 1500], 12)
        lengths[rng.integers(12)] = 0
        starts = np.array([0, *rows.cumsum()])
        most = int(lengths.max())
        tiles, pieces, shares = cpu_plan._cut(
            lengths, starts, height, window, most, 2, threads
        )
        assert shares[0] == 0
        assert (np.diff(shares) >= 0).all()
        assert shares[-1] == len(pieces)
        seen = np.zeros((2, starts[-1], most), int)
        for piece in pieces:
            tile = tiles[piece["tile"]]
            assert 1 <= tile["rows"] <= height
            row = slice(tile["row"], tile["row"] + tile["rows"])
            seen[piece["head"], row, piece["low"] : piece["end"]] += 1
        expected = np.zeros_like(seen)
        for seq, length in enumerate(lengths):
            first, stop = starts[seq], starts[seq + 1]
            for row in range(first, stop) if length else ():
                # A tile's rows are given what any of them sees.
                low = row - (row - first) % height
                high = min(low + height, stop)
                end = length - (stop - high)
                start = max(0, length - (stop - low) - window + 1)
                expected[:, row, start:end] = 1
        assert (seen == expected).all()


def test_starts_that_fall_far_without_validation_are_cut_to_what_there_is():
    """Rows of a falling range must not make room for fewer tiles."""
    starts = np.array([0, 20, 0, 20])
    lengths = np.full(3, 30)
    tiles, pieces, _ = cpu_plan._cut(
        lengths, starts, 8, cpu_plan.NO_WINDOW, 99, 1, 1
    )
    assert tiles["seq"].tolist() == [0, 0, 0, 2, 2, 2]
    assert len(pieces) == 6


# --- One plan for the layers of a step ---------------------------------------


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_a_shared_plan_changes_nothing_and_is_made_once(mode, monkeypatch):
    """Two layers: other queries and caches, the same tables and lengths."""
    made = counted_calls(monkeypatch, cpu_plan, "_cut")
    first = inputs_of(Case(mode=mode, lengths="around", group=2))
    second = replace(
        first,
        query=first.query.flip(0),
        key_cache=first.key_cache * 0.5,
        value_cache=first.value_cache * -2,
    )
    alone = [cpu_attention(i, poisoned_output(i)) for i in (first, second)]
    assert len(made) == 2
    plan = {}
    for inputs, expected in zip((first, second), alone, strict=True):
        planned = replace(inputs, plan=plan)
        out = cpu_attention(planned, poisoned_output(inputs))
        assert torch.equal(out, expected)
    assert len(made) == 3


def test_a_plan_of_another_step_is_refused():
    """Its rows would be written outside of the output."""
    plan = {}
    first = replace(inputs_of(Case(lengths="around")), plan=plan)
    cpu_attention(first, poisoned_output(first))
    second = replace(inputs_of(Case(lengths="many")), plan=plan)
    out = poisoned_output(second)
    with pytest.raises(ValueError, match="plan was made for other"):
        cpu_attention(second, out)
    assert out.isnan().all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["seq_lens", "block_tables", "sinks"])
def test_a_shared_plan_follows_what_is_changed_in_place(name, mode):
    with mode():
        inputs = inputs_of(Case(lengths="around", table="exact", sinks=True))
        inputs = replace(inputs, plan={})
        before = cpu_attention(inputs, poisoned_output(inputs))
        changed = getattr(inputs, name)
        changed.copy_(changed.flip(0) if name != "seq_lens" else changed - 3)
        out = cpu_attention(inputs, poisoned_output(inputs))
        fresh = replace(inputs, plan=None)
        assert torch.equal(
            out.nan_to_num(7),
            cpu_attention(fresh, poisoned_output(fresh)).nan_to_num(7),
        )
        assert not torch.equal(out, before)


@pytest.mark.parametrize(
    "name", ["block_tables", "seq_lens", "query_start_loc"]
)
def test_a_plan_for_other_tensors_is_refused(name):
    """Also where the numbers are the same: they may change later."""
    plan = {}
    case = Case(mode="prefill", lengths="around")
    first = replace(inputs_of(case), plan=plan)
    cpu_attention(first, poisoned_output(first))
    second = replace(first, **{name: getattr(first, name).clone()})
    with pytest.raises(ValueError, match="plan was made for other"):
        cpu_attention(second, poisoned_output(second))


@pytest.mark.parametrize(
    "change",
    [
        {"window": 4},
        {"softcap": 2.0},
        {"scale": 0.5},
        {"alibi_slopes": torch.ones(8)},
        {"sinks": torch.ones(8)},
        {"k_scale": torch.ones(2)},
        {"v_scale": torch.ones(2)},
        {"heads": 4},
        {"kv_heads": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_plan_for_other_options_or_heads_is_refused(change):
    plan = {}
    first = replace(inputs_of(Case(lengths="around", group=4)), plan=plan)
    assert (first.num_heads, first.num_kv_heads) == (8, 2)
    cpu_attention(first, poisoned_output(first))
    options = dict(change)
    heads, kv_heads = options.pop("heads", 8), options.pop("kv_heads", 2)
    second = replace(
        first,
        query=first.query[:, :heads],
        key_cache=first.key_cache[:, :kv_heads],
        value_cache=first.value_cache[:, :kv_heads],
        **options,
    )
    with pytest.raises(ValueError, match="plan was made for other"):
        cpu_attention(second, poisoned_output(second))
