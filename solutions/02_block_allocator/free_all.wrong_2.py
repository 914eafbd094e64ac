# ruff: noqa: F821
def free_all(a: BlockAllocator, block_ids: list[int]) -> None:
    """Check that each is in use, but not how often it is named."""
    for block_id in block_ids:
        if a.refcount(block_id) == 0:
            raise ValueError(f"block {block_id} is free")
    for block_id in block_ids:
        a.free(block_id)
