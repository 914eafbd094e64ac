"""The reference itself, against attention written another way."""

import math

import pytest
import torch
from cases.attention import Case, inputs_of

from llm_systems_cookbook.attention.inputs import (
    AttentionInputs,
    checked_inputs,
)
from llm_systems_cookbook.attention.reference import reference_attention


def contiguous(inputs: AttentionInputs, seq: int) -> tuple[torch.Tensor, ...]:
    """Return one sequence's keys and values: [num_kv_heads, length, dim]."""
    length = int(inputs.seq_lens[seq])
    blocks = -(-length // inputs.block_size)
    ids = inputs.block_tables[seq, :blocks].long()
    return tuple(
        cache[ids].transpose(0, 1).flatten(1, 2)[:, :length].double()
        for cache in (inputs.key_cache, inputs.value_cache)
    )


@pytest.mark.parametrize(
    "case",
    [
        Case(table="exact", lengths="many", block_size=8),
        Case(mode="prefill", lengths="around", block_size=5, group=3),
        Case(mode="prefill", lengths="many", head_dim_v=48, seed=9),
    ],
    ids=str,
)
def test_equals_torch_on_contiguous_keys(case: Case):
    inputs = inputs_of(case)
    starts = inputs.query_start_loc
    if starts is None:
        starts = torch.arange(inputs.num_seqs + 1)
    exact = reference_attention(inputs)
    for seq in range(inputs.num_seqs):
        rows = slice(int(starts[seq]), int(starts[seq + 1]))
        keys, values = contiguous(inputs, seq)
        count, length = rows.stop - rows.start, keys.shape[1]
        causal = torch.ones(count, length).tril(length - count).bool()
        expected = torch.nn.functional.scaled_dot_product_attention(
            inputs.query[rows].double().transpose(0, 1)[None],
            keys[None].repeat_interleave(inputs.group, 1),
            values[None].repeat_interleave(inputs.group, 1),
            attn_mask=causal,
        )[0].transpose(0, 1)
        torch.testing.assert_close(
            exact[rows], expected, rtol=1e-12, atol=1e-14
        )


def by_hand(scores: list[float], values: list[float], sink: float) -> float:
    weights = [math.exp(score) for score in scores]
    total = sum(weights) + math.exp(sink)
    return sum(w * v for w, v in zip(weights, values, strict=True)) / total


def test_every_option_by_hand():
    """One head of one number: scores can be worked out on paper."""
    keys, values = [1.0, -2.0, 0.5, 3.0], [10.0, 20.0, 30.0, 40.0]
    inputs = checked_inputs(
        torch.tensor([[[2.0]]], dtype=torch.float64),
        torch.tensor(keys, dtype=torch.float64).view(2, 1, 2, 1),
        torch.tensor(values, dtype=torch.float64).view(2, 1, 2, 1),
        torch.tensor([[0, 1]]),
        torch.tensor([4]),
        scale=0.5,
        window=3,
        softcap=4.0,
        alibi_slopes=torch.tensor([0.25]),
        sinks=torch.tensor([0.75]),
        k_scale=2.0,
        v_scale=torch.tensor([3.0]),
    )
    scores = [
        4.0 * math.tanh(0.5 * 2.0 * (key * 2.0) / 4.0) + 0.25 * (j - 3)
        for j, key in enumerate(keys)
    ][1:]
    expected = 3.0 * by_hand(scores, values[1:], sink=0.75)
    assert float(reference_attention(inputs)) == pytest.approx(
        expected, rel=1e-14
    )


def test_a_prefill_by_hand():
    """Two rows of four tokens: ALiBi counts from the last one for both."""
    keys, values = [1.0, -2.0, 0.5, 3.0], [10.0, 20.0, 30.0, 40.0]
    queries = [2.0, -1.5]
    inputs = checked_inputs(
        torch.tensor(queries, dtype=torch.float64).view(2, 1, 1),
        torch.tensor(keys, dtype=torch.float64).view(2, 1, 2, 1),
        torch.tensor(values, dtype=torch.float64).view(2, 1, 2, 1),
        torch.tensor([[0, 1]]),
        torch.tensor([4]),
        query_start_loc=torch.tensor([0, 2]),
        scale=0.5,
        window=3,
        alibi_slopes=torch.tensor([0.25]),
        sinks=torch.tensor([0.75]),
    )
    expected = []
    for query, position in zip(queries, (2, 3), strict=True):
        seen = range(max(0, position - 2), position + 1)
        scores = [0.5 * query * keys[j] + 0.25 * (j - 3) for j in seen]
        expected.append(by_hand(scores, [values[j] for j in seen], 0.75))
    found = reference_attention(inputs).flatten().tolist()
    assert found == pytest.approx(expected, rel=1e-14)


def test_length_0_is_zeros_also_with_a_sink():
    inputs = inputs_of(Case(lengths="zeros", sinks=True))
    assert (reference_attention(inputs)[:2] == 0).all()
