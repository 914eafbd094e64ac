"""What the diagrams share: bare axes in points, and the key below them."""

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from llm_systems_cookbook.plots.style import (
    _FILL,
    _LIVE_SHADES,
    _MUTED,
    _SMALL,
    INK,
    _box,
    _new_figure,
    _shorten,
    _text,
    _text_width,
    _waste,
)

PAGE = 490.0  # points across a diagram: the width less its margins


KEY_WORDS = {
    "live": "one owner",
    "shared": "shared",
    "waste": "reserved, no token yet",
    "free": "free",
    "changed": "changed",
}


def diagram(title: str, height: float) -> tuple[Figure, Axes]:
    """Return bare axes measured in points, y downwards; `height` too."""
    fig, ax = _new_figure(title, height / 72 + 0.15)
    ax.set_aspect("equal", anchor="NW")
    ax.axis("off")
    return fig, ax


def owner_label(names: Sequence[str], room: float) -> str:
    """Return "A", "A+B" or, where the names do not fit, "×2"."""
    joined = "+".join(names)
    if len(names) > 1 and _text_width(joined, _SMALL) > room:
        return _shorten(f"×{len(names)}", room)
    return _shorten(joined, room)


def shades(names: Iterable[str]) -> dict[str, str]:
    """Give each name a blue; four lightnesses, then they repeat."""
    ordered = sorted(names)
    return {
        name: _LIVE_SHADES[index % len(_LIVE_SHADES)]
        for index, name in enumerate(ordered)
    }


def outline(ax: Axes, x: float, y: float, w: float, h: float) -> None:
    """Draw a dark frame: here something changed."""
    ax.add_patch(
        Rectangle((x, y), w, h, fill=False, edgecolor=INK, linewidth=2.2)
    )


def key(
    ax: Axes,
    kinds: set[str],
    y: float,
    meanings: Mapping[str, str] = KEY_WORDS,
) -> None:
    """Explain the fills in use, in one line below a diagram."""
    x = 0.0
    for kind, words in meanings.items():
        if kind not in kinds:
            continue
        if kind in ("waste", "again"):
            _waste(ax, x, y, 16, 10)
        elif kind == "changed":
            outline(ax, x + 1, y + 1, 14, 8)
        else:
            _box(ax, x, y, 16, 10, _FILL[kind])
        _text(ax, x + 20, y + 5, words, color=_MUTED)
        x += 20 + _text_width(words, _SMALL) + 16
