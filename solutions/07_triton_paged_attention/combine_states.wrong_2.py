# ruff: noqa: F821
def combine_states(a: State, b: State) -> State:
    """Return the state after the tokens of both."""
    # Forgets that both may be empty: -inf - -inf is NaN.
    m = np.maximum(a[0], b[0])
    scale_a, scale_b = np.exp(a[0] - m), np.exp(b[0] - m)
    l = a[1] * scale_a + b[1] * scale_b
    acc = a[2] * scale_a[:, None] + b[2] * scale_b[:, None]
    return m, l, acc
