# ruff: noqa: F821
def combine_states(a: State, b: State) -> State:
    """Return the state after the tokens of both."""
    m = np.maximum(a[0], b[0])
    base = np.where(m == -np.inf, 0, m)
    scale_a, scale_b = np.exp(a[0] - base), np.exp(b[0] - base)
    l = a[1] * scale_a + b[1] * scale_b
    acc = a[2] * scale_a[:, None] + b[2] * scale_b[:, None]
    return m, l, acc
