# ruff: noqa: F821
def tree_of_depth_two(
    pool: Pool,
    prompt: list[float],
    first: list[list[float]],
    second: list[list[float]],
) -> tuple[list[list[float]], int]:
    """Return without giving the leaves' blocks back."""
    root = SequenceTable(pool.allocator.block_size)
    pool.write(root, prompt)
    leaves = []
    for one in first:
        node = fork_sequence(root, pool.allocator)
        pool.write(node, one)
        for two in second:
            leaf = fork_sequence(node, pool.allocator)
            pool.write(leaf, two)
            leaves.append(leaf)
        node.free(pool.allocator)
    root.free(pool.allocator)
    contents = [pool.read(leaf) for leaf in leaves]
    return contents, pool.allocator.used_blocks
