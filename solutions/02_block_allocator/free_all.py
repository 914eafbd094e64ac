# ruff: noqa: F821
def free_all(a: BlockAllocator, block_ids: list[int]) -> None:
    """Drop a reference of each id, or raise ValueError and do nothing."""
    for block_id, references in Counter(block_ids).items():
        if a.refcount(block_id) < references:
            raise ValueError(f"block {block_id} has too few owners")
    for block_id in block_ids:
        a.free(block_id)
