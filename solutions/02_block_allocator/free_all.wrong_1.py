# ruff: noqa: F821
def free_all(a: BlockAllocator, block_ids: list[int]) -> None:
    """Free one by one: a bad id in the middle leaves half of them freed."""
    for block_id in block_ids:
        a.free(block_id)
