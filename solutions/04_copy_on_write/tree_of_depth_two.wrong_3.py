# ruff: noqa: F821
def tree_of_depth_two(
    pool: Pool,
    prompt: list[float],
    first: list[list[float]],
    second: list[list[float]],
) -> tuple[list[list[float]], int]:
    """Write into fresh blocks without making the copies first."""
    root = SequenceTable(pool.allocator.block_size)
    pool.write(root, prompt)
    parents = [root]
    for thoughts in (first, second):
        children = []
        for parent in parents:
            for thought in thoughts:
                child = fork_sequence(parent, pool.allocator)
                for token in thought:
                    child.append(pool.allocator)
                    pool.rows[child.translate(child.length - 1)] = token
                children.append(child)
            parent.free(pool.allocator)
        parents = children
    contents = [pool.read(leaf) for leaf in parents]
    used = pool.allocator.used_blocks
    for leaf in parents:
        leaf.free(pool.allocator)
    return contents, used
