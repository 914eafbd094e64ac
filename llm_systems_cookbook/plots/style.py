"""The look that all pictures share: colours, text, areas, lines, footnotes.

The colours and `note` are for notebooks, too; the rest is for the files that
draw.

Colours: Okabe and Ito, "Color Universal Design" (2008); the green is lighter
than theirs, so that dark text on it has enough contrast.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle
from matplotlib.textpath import text_to_path
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    NullLocator,
)

LIVE = "#0072B2"
WASTE = "#E69F00"
SHARED = "#3DBB98"
FREE = "#E9E9E9"
INK = "#1A1A1A"

WASTE_LIGHT = "#FBDD9B"
WASTE_DARK = "#C27400"
_HATCH = "#7A4600"
_MUTED = "#555555"
_LIVE_SHADES = (LIVE, "#6DB4DF", "#00466E", "#A9D4EE")
# Lines are thin: they start with a darker tone than areas.
_LINE_SHADES = {
    "live": _LIVE_SHADES[:3],
    "waste": (WASTE_DARK, WASTE, "#7A4600", "#D08A1E"),
    "shared": ("#1F8F70", SHARED, "#0E5C47", "#2AA583"),
    "neutral": (INK, "#6E6E6E", "#3F3F3F", "#949494"),
}

_WIDTH = 7.0  # inches
_MARGIN = 6.0  # points kept clear left and right of a title or a note
_TITLE_SIZE = 12.0
_SMALL = 9.0  # the smallest font, in points
_MARKERS = "osD^vPX*"
_DASHES = ("-", "--", "-.", ":")
_EARLY = 0.9  # of the width: a series that ends before is named there

# What the look is made of. Nothing else is touched: a notebook's backend is
# chosen while its first figure is made, and switches `interactive` on; putting
# all of rcParams back would switch it off again, and no later figure would be
# shown.
_AREAS = ("axes", "figure", "font", "hatch", "legend", "lines", "patch")
_AREAS += ("text", "xtick", "ytick")
_LOOK = {
    key: value
    for key, value in matplotlib.rcParamsDefault.items()
    if key.split(".")[0] in _AREAS
} | {
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.dpi": 100,
    "figure.facecolor": "white",
    "font.size": 10,
    "legend.fontsize": _SMALL,
    "legend.frameon": False,
    "text.color": INK,
    # A token or a title may hold a dollar sign.
    "text.parse_math": False,
}


@contextmanager
def _look() -> Iterator[None]:
    before = {key: matplotlib.rcParams[key] for key in _LOOK}
    matplotlib.rcParams.update(_LOOK)
    try:
        yield
    finally:
        matplotlib.rcParams.update(before)


@_look()
def note(fig: Figure, text: str) -> None:
    """Write a footnote: the conditions, or what the data really are.

    The figure grows by the lines it needs, so nothing is covered; a second
    note goes below the first. Meant for the figures of this module, whose
    layout keeps the space free.

    Raises:
        ValueError: the text is blank.
    """
    if not text.strip():
        raise ValueError("the text of a note is blank")
    room = fig.get_figwidth() * 72 - 2 * _MARGIN
    new = _wrap(text.strip(), room, _SMALL)
    earlier = fig.get_supxlabel()
    fig.supxlabel(
        f"{earlier}\n{new}" if earlier else new,
        x=_MARGIN / 72 / fig.get_figwidth(),
        ha="left",
        fontsize=_SMALL,
        color=_MUTED,
    )
    added = 0.16 * (new.count("\n") + 1) + (0 if earlier else 0.12)
    fig.set_figheight(fig.get_figheight() + added)


# --- figures and text ------------------------------------------------------


def _new_figure(title: str, height: float) -> tuple[Figure, Axes]:
    """Return a figure whose axes have about `height` inches."""
    words = _wrap(title, _WIDTH * 72 - 2 * _MARGIN, _TITLE_SIZE, "bold")
    title_height = 0.2 + 0.2 * (words.count("\n") + 1)
    fig, ax = plt.subplots(
        figsize=(_WIDTH, height + title_height), layout="constrained"
    )
    fig.get_layout_engine().set(w_pad=_MARGIN / 72, h_pad=_MARGIN / 72)
    fig.suptitle(
        words,
        x=_MARGIN / 72 / _WIDTH,
        ha="left",
        fontsize=_TITLE_SIZE,
        fontweight="bold",
    )
    return fig, ax


def _chart(title: str, height: float) -> tuple[Figure, Axes]:
    """Return a figure and axes for a chart; `height` in inches."""
    fig, ax = _new_figure(title, height)
    # Ticks may be made later, outside this style: tell the axis itself.
    ax.tick_params(colors=INK, labelsize=_SMALL, which="both")
    ax.set_axisbelow(True)
    return fig, ax


def _text_width(text: str, size: float, weight: str = "normal") -> float:
    """Return the width of the longest line, in points.

    The outlines' width, plus what hinting adds when they become pixels.
    """
    font = FontProperties(size=size, weight=weight)
    return 1.03 * max(
        text_to_path.get_text_width_height_descent(line, font, False)[0]
        for line in text.split("\n")
    )


def _wrap(text: str, room: float, size: float, weight: str = "normal") -> str:
    """Break lines at spaces, never before %, to fit `room` points."""
    wrapped = []
    for line in text.split("\n"):
        current = ""
        for word in re.split(r" +(?!%)", line):
            longer = f"{current} {word}".strip()
            if current and _text_width(longer, size, weight) > room:
                wrapped.append(current)
                longer = word
            current = longer
        wrapped.append(current)
    return "\n".join(wrapped)


def _shorten(text: str, room: float, size: float = _SMALL) -> str:
    """Cut `text` to `room` points, with an ellipsis for what is missing."""
    if _text_width(text, size) <= room:
        return text
    for end in range(len(text) - 1, 0, -1):
        shorter = text[:end] + "…"
        if _text_width(shorter, size) <= room:
            return shorter
    return ""


def _number(value: float) -> str:
    """Return three significant digits, or all digits of a whole number."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2, from 0 (black) to 1."""
    channels = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in to_rgb(colour)
    ]
    return sum(np.multiply((0.2126, 0.7152, 0.0722), channels))


def _text_on(colour: str) -> str:
    """Return the text colour, dark or white, with more contrast."""
    light = _luminance(colour) + 0.05
    dark_contrast = light / (_luminance(INK) + 0.05)
    return INK if dark_contrast > 1.05 / light else "white"


def _text(
    ax: Axes,
    x: float,
    y: float,
    words: str,
    ha: str = "left",
    va: str = "center",
    *,
    size: float = _SMALL,
    color: str = INK,
    tag: str | None = None,
) -> None:
    """Write words; a `tag` is the colour behind them, on top of a hatch."""
    box = None
    if tag is not None:
        box = {"facecolor": tag, "edgecolor": "none", "pad": 1.5}
    ax.text(x, y, words, ha=ha, va=va, size=size, color=color, bbox=box)


_FILL = {
    "free": FREE,
    "live": LIVE,
    "waste": WASTE,
    "shared": SHARED,
    "neutral": "#8A8A8A",
    "first": LIVE,
}
_PARTS = {
    "token_states": ("token states", LIVE, None),
    "reserved": ("reserved", WASTE_LIGHT, "//"),
    "internal": ("internal", WASTE, "\\\\\\"),
    "external": ("external", WASTE_DARK, "xx"),
}


# --- areas -----------------------------------------------------------------


def _box(
    ax: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    colour: str,
    edge: str = "none",
) -> None:
    if width > 0:
        ax.add_patch(
            Rectangle((x, y), width, height, facecolor=colour, edgecolor=edge)
        )


def _waste(
    ax: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    colour: str = WASTE,
    hatch: str | None = "////",
) -> None:
    """Draw a hatched area; the hatch takes the colour of the (absent) edge."""
    if width > 0:
        ax.add_patch(
            Rectangle(
                (x, y),
                width,
                height,
                facecolor=colour,
                edgecolor=_HATCH,
                hatch=hatch,
                linewidth=0,
            )
        )


def _name_rows(ax: Axes, rows: Sequence[tuple[float, str]]) -> None:
    """Name horizontal bars on the y axis, without its line and ticks."""
    names = [_wrap(name, 150, 10) for _, name in rows]
    ax.set_yticks([y for y, _ in rows], names)
    ax.tick_params(axis="y", length=0, labelsize=10)
    ax.spines["left"].set_visible(False)
    for label, (_, name) in zip(ax.get_yticklabels(), rows, strict=True):
        if name == "paper":
            label.set(size=_SMALL, color=_MUTED)


def _points_wide(ax: Axes) -> float:
    """Return the width of the axes in points, once the layout is settled."""
    fig = ax.figure.canvas.figure
    fig.draw_without_rendering()
    return ax.get_window_extent().width * 72 / fig.dpi


# --- lines -----------------------------------------------------------------


def _line_styles(
    kinds: Mapping[str, str], length: int
) -> dict[str, dict[str, Any]]:
    """Return a style per name: its kind's colour, its own marker and dash."""
    drawn = dict.fromkeys(_LINE_SHADES, 0)
    styles: dict[str, dict[str, Any]] = {}
    for index, (name, kind) in enumerate(kinds.items()):
        shades = _LINE_SHADES[kind]
        styles[name] = {
            "color": shades[drawn[kind] % len(shades)],
            "linestyle": _DASHES[index % len(_DASHES)],
            "linewidth": 1.8,
            "marker": _MARKERS[index],
            "markersize": 5.5,
            "markevery": max(1, length // 12),
        }
        drawn[kind] += 1
    return styles


class _End(NamedTuple):
    """Where a series ends, in data coordinates, and how high it was."""

    name: str
    x: float
    y: float
    mean: float


def _end(name: str, x: np.ndarray, y: np.ndarray) -> _End:
    """Return a series' name and its last finite point."""
    finite = np.flatnonzero(np.isfinite(y))
    last = finite[-1]
    return _End(name, float(x[last]), float(y[last]), float(y[finite].mean()))


def _end_labels(ax: Axes, ends: Sequence[_End]) -> None:
    """Name each series: at the right edge, or where it ends well before it.

    Labels that collide are moved apart. Where series end in one point, the
    label of the one that was higher is the upper one.
    """
    fig = ax.figure.canvas.figure
    fig.draw_without_rendering()  # settles limits and layout
    box = ax.get_window_extent()
    ends = sorted(ends, key=lambda end: end.mean)
    places = [
        (ax.transData.transform(end[1:3]) - box.p0) / (box.width, box.height)
        for end in ends
    ]
    sides = [_free_side(i, places) for i in range(len(ends))]
    for end, side in zip(ends, sides, strict=True):
        if side != 0:
            ax.annotate(
                end.name,
                end[1:3],
                xytext=(5 * side, 0),
                textcoords="offset points",
                ha="left" if side > 0 else "right",
                va="center",
            )
    late = [i for i, side in enumerate(sides) if side == 0]
    names = [_wrap(ends[i].name, 130, 10) for i in late]
    most_lines = max((name.count("\n") for name in names), default=0) + 1
    gap = (2 + 12 * most_lines) * fig.dpi / 72 / box.height
    # Rounded, so that those of one point keep the order of their means.
    heights = _spread([round(places[i][1], 2) for i in late], gap)
    for name, i, height in zip(names, late, heights, strict=True):
        ax.annotate(
            name,
            ends[i][1:3],
            xytext=(1.04, height),
            textcoords="axes fraction",
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": "#AAAAAA",
                "linewidth": 0.8,
                "shrinkA": 1,
                "shrinkB": 4,
                "relpos": (0, 0.5),
            },
        )


def _free_side(i: int, places: Sequence[np.ndarray]) -> int:
    """Return where a series that ends early has room for its name.

    1 is right of its end, -1 left of it, 0 nowhere, or it ends at the edge.
    """
    x, y = places[i]
    if x >= _EARLY:
        return 0
    beside = [
        other[0] - x
        for other in (*places[:i], *places[i + 1 :])
        if abs(other[1] - y) < 0.06
    ]
    if not any(0 <= distance < 0.4 for distance in beside):
        return 1
    if x > 0.3 and not any(-0.4 < distance <= 0 for distance in beside):
        return -1
    return 0


def _spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights in [0, 1] as little as needed to be `gap` apart."""
    placed = list(heights)
    order = sorted(range(len(placed)), key=placed.__getitem__)
    for below, above in pairwise(order):
        placed[above] = max(placed[above], placed[below] + gap)
    ceiling = 1.0
    for index in reversed(order):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - gap
    return placed


def _few_apart(x: np.ndarray) -> np.ndarray | None:
    """Return the positions if each can have its own tick on a log axis."""
    ordered = np.unique(x)
    if len(ordered) > 12 or (ordered[1:] < 1.5 * ordered[:-1]).any():
        return None
    return ordered


def _plain_log_ticks(
    ax: Axes, which: str, ticks: np.ndarray | None = None
) -> None:
    """Write 1,000 rather than 10 to the 3 on a logarithmic axis.

    Over less than two decades 2 and 5 have a number, too: one or two powers
    of ten are not enough to read a value off.
    """
    axis = ax.xaxis if which == "x" else ax.yaxis
    low, high = axis.get_view_interval()
    axis.set_major_formatter(FuncFormatter(lambda v, _: _number(v)))
    if ticks is not None:
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_minor_locator(NullLocator())
    elif high < 100 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_formatter(FuncFormatter(lambda v, _: ""))


# --- checks ----------------------------------------------------------------


def _x_values(name: str, values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=float)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise ValueError(f"{name} must be a list of 1 or more finite numbers")
    return array


def _require_few(series: Collection[str]) -> None:
    """Refuse more series than there are markers: two would look alike."""
    if not 1 <= len(series) <= len(_MARKERS):
        raise ValueError(
            f"1 to {len(_MARKERS)} series can be told apart, got {len(series)}"
        )


def _series(
    series: Mapping[str, Sequence[float]],
    length: int,
    minimum: float = -math.inf,
) -> dict[str, np.ndarray]:
    _require_few(series)
    arrays = {n: np.asarray(y, dtype=float) for n, y in series.items()}
    for name, y in arrays.items():
        if y.shape != (length,):
            raise ValueError(
                f"{name!r} has shape {y.shape}, expected ({length},)"
            )
        if np.isinf(y).any() or np.isnan(y).all():
            raise ValueError(f"{name!r} is infinite somewhere, or all NaN")
        if np.nanmin(y) < minimum:
            raise ValueError(f"{name!r} falls below {minimum}")
    return arrays


def _kinds(
    names: Iterable[str], kinds: Mapping[str, str], default: str
) -> dict[str, str]:
    known = dict.fromkeys(names, default)
    for name, kind in kinds.items():
        if name not in known:
            raise ValueError(f"kind of {name!r}, which is not drawn")
        if kind not in _LINE_SHADES:
            raise ValueError(f"{name}: unknown kind {kind!r}")
    return known | dict(kinds)
