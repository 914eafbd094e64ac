"""Charts of what was measured: bars, lines, shares of a pool."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from llm_systems_cookbook.plots.style import (
    _FILL,
    _HATCH,
    _PARTS,
    _SMALL,
    FREE,
    INK,
    LIVE,
    WASTE,
    _box,
    _chart,
    _end,
    _end_labels,
    _few_apart,
    _kinds,
    _line_styles,
    _look,
    _name_rows,
    _number,
    _plain_log_ticks,
    _points_wide,
    _series,
    _text,
    _text_on,
    _text_width,
    _waste,
    _x_values,
    note,
)


@_look()
def split_bars(
    splits: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    reference: Mapping[str, Mapping[str, float]] | None = None,
    source: str = "",
) -> Figure:
    """Draw where each system's pool goes, as stacked bars in % of the pool.

    Token states are blue, the three kinds of waste orange with three
    hatches, the remainder grey. Segments below 3 % carry no label.

    Args:
        splits: system -> {"token_states", "reserved", "internal",
            "external"}: % of the pool, all four.
        title: the takeaway.
        reference: system -> the same keys, drawn as a thinner bar labelled
            "paper". A key that the paper does not report may be left out.
        source: where the reference comes from; a note below the figure.

    Raises:
        ValueError: an unknown or (in splits) missing key, a
            share that is negative or not finite, a sum above 100.5, or a
            reference for a system that is not in splits.
    """
    paper = {} if reference is None else dict(reference)
    for system, split in splits.items():
        _check_split(system, split, complete=True)
    for system, split in paper.items():
        if system not in splits:
            raise ValueError(f"reference: {system!r} is not in splits")
        _check_split(f"reference {system}", split, complete=False)

    spans: list[tuple[float, float, str, Mapping[str, float]]] = []
    y = 0.0
    for system, split in splits.items():
        spans.append((y, 0.62, system, split))
        y += 0.62
        if system in paper:
            spans.append((y + 0.05, 0.38, "paper", paper[system]))
            y += 0.43
        y += 0.35
    fig, ax = _chart(title, 0.95 + y * 0.48)
    ax.set(xlim=(0, 100), ylim=(y - 0.25, -0.1), xlabel="% of the pool")
    _name_rows(ax, [(top + tall / 2, name) for top, tall, name, _ in spans])
    ax.legend(
        handles=_split_handles(spans),
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=5,
        columnspacing=1.2,
        handlelength=1.6,
        borderaxespad=0.2,
    )
    _draw_segments(ax, spans)
    if source:
        note(fig, source)
    return fig


@_look()
def used_and_wasted(
    pairs: Mapping[str, tuple[float, float]],
    *,
    title: str,
) -> Figure:
    """Draw used against wasted memory, one stacked bar per system, in %.

    Args:
        pairs: system -> (used, wasted), in % of what is reserved.
        title: the takeaway.

    Raises:
        ValueError: a share that is negative or not finite, or a
            pair whose sum is not 100 within 0.5.
    """
    for system, pair in pairs.items():
        for share in pair:
            _check_share(system, share)
        if abs(sum(pair) - 100) > 0.5:
            raise ValueError(
                f"{system}: used + wasted must be 100 %, got {sum(pair):g}"
            )
    fig, ax = _chart(title, 0.75 + 0.72 * len(pairs))
    ax.set(xlim=(0, 100), ylim=(len(pairs) - 0.6, -0.6))
    ax.set_xlabel("% of the reserved memory")
    _name_rows(ax, [(row, name) for row, name in enumerate(pairs)])
    per_point = _points_wide(ax) / 100
    for row, (used, wasted) in enumerate(pairs.values()):
        _box(ax, 0, row - 0.26, used, 0.52, LIVE)
        _waste(ax, used, row - 0.26, wasted, 0.52)
        for words, x, width, colour, edge in (
            (f"{used:.1f} % used", 0.0, used, LIVE, "left"),
            (f"{wasted:.1f} % wasted", used, wasted, WASTE, "right"),
        ):
            if _text_width(words, 10) + 8 <= width * per_point:
                _text(
                    ax,
                    x + width / 2,
                    row,
                    words,
                    "center",
                    size=10,
                    color=_text_on(colour),
                    tag=colour,
                )
            else:  # too narrow to hold its words: they stand above it
                side = 0.0 if edge == "left" else 100.0
                _text(ax, side, row - 0.29, words, edge, "bottom", size=10)
    return fig


@_look()
def waste_by_block_size(
    block_sizes: Sequence[int],
    measured: Sequence[float] | Mapping[str, Sequence[float]],
    bound: Sequence[float],
    *,
    title: str,
    expected: Sequence[float] | None = None,
) -> Figure:
    """Draw measured waste against block size, with the exact bound.

    Args:
        block_sizes: [n] tokens per block, rising; the axis is logarithmic.
        measured: [n] waste in %, or name -> [n]; NaN leaves a gap.
        bound: [n] the exact bound, in %.
        title: the takeaway.
        expected: [n] the expected waste, in %, as a dashed line.

    Raises:
        ValueError: block sizes that are empty, below 1 or not rising, no
            measured series or more than 8, a series of another length, of
            no finite value, or infinite or negative somewhere.
    """
    sizes = _x_values("block_sizes", block_sizes)
    if sizes[0] < 1 or any(b <= a for a, b in pairwise(sizes)):
        raise ValueError(
            f"block_sizes must be >= 1 and rising, got {list(block_sizes)}"
        )
    if isinstance(measured, Mapping):
        points = _series(measured, len(sizes), minimum=0)
    else:
        points = _series({"measured": measured}, len(sizes), minimum=0)
    curves = _series({"exact bound": bound}, len(sizes), minimum=0)
    if expected is not None:
        curves |= _series({"expected": expected}, len(sizes), minimum=0)

    fig, ax = _chart(title, 3.4)
    ends = []
    for (name, y), dash in zip(curves.items(), ("-", "--"), strict=False):
        ax.plot(sizes, y, dash, color=INK, linewidth=1.3)
        ends.append(_end(name, sizes, y))
    styles = _line_styles(dict.fromkeys(points, "waste"), len(sizes))
    for name, y in points.items():
        ax.plot(sizes, y, **styles[name] | {"linewidth": 0.8})
        ends.append(_end(name, sizes, y))
    ax.set(
        xlabel="block size (tokens)", ylabel="wasted (% of the reserved slots)"
    )
    ax.set_xscale("log", base=2)
    _plain_log_ticks(ax, "x", sizes)
    ax.set_ylim(bottom=0)
    _end_labels(ax, ends)
    return fig


@_look()
def lines(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    logx: bool = False,
    logy: bool = False,
    kinds: Mapping[str, str] | None = None,
) -> Figure:
    """Draw labelled lines, told apart by marker and dashes as well.

    Args:
        x: [n] positions.
        series: name -> [n] values, at most 8 names; NaN leaves a gap.
        title: the takeaway.
        xlabel: what x is, with its unit.
        ylabel: what the values are, with their unit.
        logx: logarithmic x axis.
        logy: logarithmic y axis.
        kinds: name -> "live", "waste", "shared" or "neutral". Lines are
            neutral (greys) unless a colour has its meaning for them.

    Raises:
        ValueError: no x or no series, more than 8 series, a series of
            another length, of no finite value or infinite somewhere, a value
            that is not positive on a logarithmic axis, an unknown kind or
            a kind for an unknown series.
    """
    positions = _x_values("x", x)
    values = _series(series, len(positions))
    kind_of = _kinds(values, {} if kinds is None else kinds, "neutral")
    if logx and positions.min() <= 0:
        raise ValueError("logx needs every x to be positive")
    for name, y in values.items():
        if logy and np.nanmin(y) <= 0:
            raise ValueError(f"logy needs every value of {name!r} positive")

    fig, ax = _chart(title, 3.4)
    styles = _line_styles(kind_of, len(positions))
    for name, y in values.items():
        ax.plot(positions, y, **styles[name])
    ax.set(xlabel=xlabel, ylabel=ylabel)
    if logx:
        ax.set_xscale("log")
        _plain_log_ticks(ax, "x", _few_apart(positions))
    if logy:
        ax.set_yscale("log")
        _plain_log_ticks(ax, "y")
    _end_labels(ax, [_end(name, positions, y) for name, y in values.items()])
    return fig


@_look()
def bars(
    values: Mapping[str, float],
    *,
    title: str,
    unit: str,
    kind: str | Mapping[str, str] = "live",
) -> Figure:
    """Draw horizontal bars from zero, each with its value beside it.

    Args:
        values: name -> value in `unit`, 0 or above; the first one on top.
        title: the takeaway.
        unit: written after each value; "" for a plain number.
        kind: "live", "waste", "shared" or "neutral" for all bars, or
            name -> kind; names left out are live.

    Raises:
        ValueError: a value that is negative or not finite, an
            unknown kind, or a kind for a name that is not in values.
    """
    for name, value in values.items():
        if not math.isfinite(value) or value < 0:
            raise ValueError(
                f"{name}: a bar must be finite and >= 0, got {value}"
            )
    if isinstance(kind, str):
        kind = dict.fromkeys(values, kind)
    kind_of = _kinds(values, kind, "live")

    fig, ax = _chart(title, 0.35 + 0.42 * len(values))
    longest = max(values.values()) or 1
    for row, (name, value) in enumerate(values.items()):
        if kind_of[name] == "waste":
            _waste(ax, 0, row - 0.32, value, 0.64)
        else:
            _box(ax, 0, row - 0.32, value, 0.64, _FILL[kind_of[name]])
        words = f"{_number(value)} {unit}".rstrip()
        ax.annotate(
            words,
            (value, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            annotation_clip=False,
        )
    ax.set(xlim=(0, longest), ylim=(len(values) - 0.5, -0.5))
    ax.xaxis.set_visible(False)
    ax.spines["bottom"].set_visible(False)
    _name_rows(ax, [(row, name) for row, name in enumerate(values)])
    return fig


def _split_handles(
    spans: Sequence[tuple[float, float, str, Mapping[str, float]]],
) -> list[Patch]:
    handles = [
        Patch(facecolor=c, edgecolor=_HATCH, hatch=hatch, lw=0, label=words)
        for words, c, hatch in _PARTS.values()
    ]
    if any(sum(split.values()) < 99.5 for *_, split in spans):
        handles.append(Patch(facecolor=FREE, label="not given"))
    return handles


def _draw_segments(
    ax: Axes, spans: Sequence[tuple[float, float, str, Mapping[str, float]]]
) -> None:
    per_cent = _points_wide(ax) / 100
    for top, tall, _, split in spans:
        _box(ax, 0, top, 100, tall, FREE)
        left = 0.0
        for part, (_, colour, hatch) in _PARTS.items():
            share = split.get(part, 0.0)
            _waste(ax, left, top, share, tall, colour, hatch)
            label = _share_label(share, share * per_cent)
            if label:
                _text(
                    ax,
                    left + share / 2,
                    top + tall / 2,
                    label,
                    "center",
                    color=_text_on(colour),
                    tag=colour,
                )
            left += share


def _share_label(share: float, room: float) -> str:
    """Return the share with one decimal if that fits in `room` points."""
    if share < 3:
        return ""
    label = f"{share:.1f}"
    return label if _text_width(label, _SMALL) + 4 <= room else ""


def _check_share(name: str, share: float) -> None:
    if not math.isfinite(share) or share < 0:
        raise ValueError(
            f"{name}: a share must be finite and >= 0, got {share}"
        )


def _check_split(
    name: str, split: Mapping[str, float], *, complete: bool
) -> None:
    unknown = sorted(set(split) - set(_PARTS))
    if unknown:
        raise ValueError(f"{name}: unknown parts {unknown}")
    missing = sorted(set(_PARTS) - set(split))
    if complete and missing:
        raise ValueError(f"{name}: missing parts {missing}")
    for part, share in split.items():
        _check_share(f"{name}, {part}", share)
    if sum(split.values()) > 100.5:
        raise ValueError(
            f"{name}: the parts sum to {sum(split.values()):g} %, above 100"
        )
