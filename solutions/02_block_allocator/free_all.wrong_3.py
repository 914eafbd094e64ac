# ruff: noqa: F821
def free_all(a: BlockAllocator, block_ids: list[int]) -> None:
    """Refuse every duplicate, also of a block that has two owners."""
    if len(set(block_ids)) < len(block_ids):
        raise ValueError("an id occurs twice")
    if any(a.refcount(block_id) == 0 for block_id in block_ids):
        raise ValueError("a block is free")
    for block_id in block_ids:
        a.free(block_id)
