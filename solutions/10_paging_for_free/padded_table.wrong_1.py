# ruff: noqa: F821
def padded_table(
    block_ids: list[list[int]], seq_lens: list[int], block_size: int
) -> Tensor:
    """Return the block table [num_seqs, max_blocks] of a step."""
    width = max(map(len, block_ids))  # all that is owned
    rows = [blocks + [-1] * (width - len(blocks)) for blocks in block_ids]
    return torch.tensor(rows, dtype=torch.int32)
