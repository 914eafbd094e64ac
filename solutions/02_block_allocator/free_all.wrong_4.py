# ruff: noqa: F821
def free_all(a: BlockAllocator, block_ids: list[int]) -> None:
    """Free a block for everyone: owners outside the list lose theirs too."""
    for block_id, references in Counter(block_ids).items():
        if a.refcount(block_id) < references:
            raise ValueError(f"block {block_id} has too few owners")
    for block_id in block_ids:
        while a.refcount(block_id) > 0:
            a.free(block_id)
