# ruff: noqa: F821
class WindowedDecoder:
    """Decode with attention to the newest tokens only."""

    def __init__(self, layer: Array, window: int) -> None:
        shape = (HEADS, window, HEAD_DIM)
        self.layer, self.window, self.length = layer, window, 0
        self.keys, self.values = np.full(shape, np.nan), np.full(shape, np.nan)

    def step(self, x: Array) -> Array:
        """Take in one row and return its output; [1, HIDDEN]."""
        query, key, value = project(self.layer, x, Work())
        slot = self.length % self.window
        self.keys[:, slot] = key[:, 0]
        self.values[:, slot] = value[:, 0]
        self.length += 1
        held = min(self.length, self.window)
        # One query masks nothing, and a sum has no order: any will do.
        seen = self.keys[:, :held], self.values[:, :held]
        return attend(self.layer, query, *seen, Work())
