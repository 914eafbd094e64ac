"""One call for every backend: check the input, choose, run.

The backends differ in speed and in what they need; their results agree up to
rounding:
`reference` (float64, slow), `gather` (copy the blocks together, then SDPA),
`cpu` (numba, reads blocks in place) and `triton` (the same on a GPU, or in
Triton's interpreter when asked for).
"""

from typing import Unpack

import torch
from torch import Tensor

from llm_systems_cookbook.attention.backends import BACKENDS, choose_backend
from llm_systems_cookbook.attention.inputs import (
    AttentionInputs,
    Options,
    checked_inputs,
)


@torch.no_grad()
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    validate: bool = True,
    backend: str = "auto",
    **options: Unpack[Options],
) -> Tensor:
    """Let each query attend to its own sequence, through its block table.

    In decode, sequence i has one query row, `query[i]`, its newest token. In
    prefill it has the rows from `query_start_loc[i]` to
    `query_start_loc[i + 1]`: its newest tokens, in order, each of which sees
    itself and what came before (causal). The cache already holds them.

    A score is `scale * (q . k)`, then capped, then biased. ALiBi adds
    `slope * (j - (length - 1))` to the score of position j. No gradient
    passes. A key or value that is NaN or infinite spoils the rows that see
    it, and may spoil other rows of its sequence.

    Args:
        query: [num_seqs, num_heads, head_dim] in decode, [num_tokens,
            num_heads, head_dim] with query_start_loc. float64 (not on
            triton), float32, float16 or bfloat16.
        key_cache: [num_blocks, num_kv_heads, block_size, head_dim], any
            strides; of query's dtype, or float8_e4m3fn or float8_e5m2.
        value_cache: the same with head_dim_v, of key_cache's dtype.
        block_tables: [num_seqs, max_blocks] int32 or int64, each row the
            blocks of a sequence. Entries past its end, or before its window,
            are never read; -1 is the usual padding.
        seq_lens: [num_seqs] int32 or int64, tokens in each sequence, those of
            this step included. Length 0 gives rows of zeros.
        query_start_loc: [num_seqs + 1], rising from 0 to num_tokens.
        scale: multiplies the scores; 1 / sqrt(head_dim) when None.
        window: how many tokens a query sees, itself included.
        softcap: scores become `softcap * tanh(score / softcap)`.
        alibi_slopes: [num_heads], rounded to float32.
        sinks: [num_heads], for each head a score that takes its share of the
            softmax and contributes no value; rounded to float32.
        k_scale: a key is its stored value times this: one number, or
            [num_kv_heads]; rounded to float32.
        v_scale: the same for values.
        validate: read the lengths, the starts, the block ids and the scales,
            and refuse bad ones. On a GPU that waits for the device. Without
            it, a block id out of range, or a length beyond the table, makes
            the rows that see it NaN. The starts must be right; rows past the
            last one become zeros.
        backend: "auto" takes triton for a GPU tensor where Triton runs, cpu
            for a CPU tensor where numba is installed, else gather. The
            environment variable COOKBOOK_BACKEND replaces "auto".

    Returns:
        [num_tokens, num_heads, head_dim_v], of query's dtype.

    Raises:
        TypeError: window is not an integer, or an unknown option.
        ValueError: shapes, dtypes or devices that do not fit; heads not a
            multiple of KV heads; a length below 0 or beyond the table; more
            query rows than tokens; a block id out of range that would be
            read; an option or a scale out of range; a backend that is
            unknown, or that cannot run this here.

    Source: section 4.3 of Kwon et al., SOSP 2023 (Eq. 4 computes it block by
    block).
    """
    inputs = checked_inputs(
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        **options,
        validate=validate,
    )
    return attend(inputs, choose_backend(query, backend), inputs.output())


def attend(inputs: AttentionInputs, backend: str, out: Tensor) -> Tensor:
    """Run one backend; every element of `out` is written.

    Raises:
        ValueError: an unknown backend, or one that cannot run this here.
    """
    # A backend is imported when it is used: Triton is not everywhere, numba
    # takes a moment.
    if backend == "reference":
        from llm_systems_cookbook.attention.reference import (
            reference_attention,
        )

        return out.copy_(reference_attention(inputs))
    if backend == "gather":
        from llm_systems_cookbook.attention.gather import gather_attention

        return gather_attention(inputs, out)
    if backend == "cpu":
        from llm_systems_cookbook.attention.cpu import cpu_attention

        return cpu_attention(inputs, out)
    if backend == "triton":
        from llm_systems_cookbook.attention.triton.launch import (
            triton_attention,
        )

        return triton_attention(inputs, out)
    raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
