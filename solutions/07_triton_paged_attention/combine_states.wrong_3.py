# ruff: noqa: F821
def combine_states(a: State, b: State) -> State:
    """Return the state after the tokens of both."""
    # Takes b's largest for the larger one: exp overflows when it is not.
    scale = np.exp(a[0] - b[0])
    l = a[1] * scale + b[1]
    return b[0], l, a[2] * scale[:, None] + b[2]
