def slot_steps(
    memory: str,
    requests: list[tuple[int, int]],
    max_tokens: int,
    block_size: int,
) -> tuple[int, int, int]:
    """Wrong: rounds up what is stored of the output, one token too few."""
    tokens = reserved = internal = 0
    for prompt, output in requests:
        final = prompt + output - 1
        stored = final - prompt
        rounded = 1 << (stored - 1).bit_length() if stored > 0 else 0
        for held in range(prompt, final + 1):
            region = {
                "Max": max_tokens,
                "Pow2": min(prompt + rounded, max_tokens),
                "Oracle": final,
                "Paged": -(-held // block_size) * block_size,
            }[memory]
            filled = min(final, region)
            tokens += held
            reserved += filled - held
            internal += region - filled
    return tokens, reserved, internal
