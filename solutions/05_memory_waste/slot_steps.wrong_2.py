def slot_steps(
    memory: str,
    requests: list[tuple[int, int]],
    max_tokens: int,
    block_size: int,
) -> tuple[int, int, int]:
    """Wrong: a page reserves its whole tail, past the final length too."""
    tokens = reserved = internal = 0
    for prompt, output in requests:
        final = prompt + output - 1
        rounded = 1 << (output - 1).bit_length()
        for held in range(prompt, final + 1):
            tokens += held
            if memory == "Paged":
                reserved += -held % block_size
                continue
            region = {
                "Max": max_tokens,
                "Pow2": min(prompt + rounded, max_tokens),
                "Oracle": final,
            }[memory]
            reserved += final - held
            internal += region - final
    return tokens, reserved, internal
