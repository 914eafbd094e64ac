def slot_steps(
    memory: str,
    requests: list[tuple[int, int]],
    max_tokens: int,
    block_size: int,
) -> tuple[int, int, int]:
    """Wrong: the power of two may exceed the maximum."""
    tokens = reserved = internal = 0
    for prompt, output in requests:
        final = prompt + output - 1
        rounded = 1 << (output - 1).bit_length()
        for held in range(prompt, final + 1):
            region = {
                "Max": max_tokens,
                "Pow2": prompt + rounded,
                "Oracle": final,
                "Paged": -(-held // block_size) * block_size,
            }[memory]
            filled = min(final, region)
            tokens += held
            reserved += filled - held
            internal += region - filled
    return tokens, reserved, internal
