# ruff: noqa: F821
def padded_table(
    block_ids: list[list[int]], seq_lens: list[int], block_size: int
) -> Tensor:
    """Return the block table [num_seqs, max_blocks] of a step."""
    counts = [-(-length // block_size) for length in seq_lens]
    width = max(counts)
    rows = [
        blocks[:count] + [-1] * (width - count)
        for blocks, count in zip(block_ids, counts, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int32)
