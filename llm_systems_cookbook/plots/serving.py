"""Pictures of a running scheduler: who runs, what the pool holds, latency.

Notebooks reach them through `plots`, which explains the look.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from llm_systems_cookbook.plots.style import (
    _HATCH,
    _LIVE_SHADES,
    _MARGIN,
    _PARTS,
    _SMALL,
    _WIDTH,
    INK,
    LIVE,
    WASTE,
    WASTE_LIGHT,
    _chart,
    _end,
    _end_labels,
    _kinds,
    _line_styles,
    _look,
    _number,
    _plain_log_ticks,
    _require_few,
    _series,
    _shorten,
    _text_width,
    _x_values,
    note,
)
from llm_systems_cookbook.validate import cdiv


class Span(NamedTuple):
    """What one request does from `start` until `end`.

    Attributes:
        request: its name, which heads its row.
        kind: "waiting", "prefill", "decode", "preempted" (its cache is
            discarded), "swapped" (its cache is on the host) or "idle seat"
            (it is finished, but holds its place in a static batch).
        start: in steps or seconds.
        end: in the same unit, not before `start`. Step n lasts from n to
            n + 1.
    """

    request: str
    kind: str
    start: float
    end: float


class _Paint(NamedTuple):
    """How a kind of span looks; tall is for a request in the batch."""

    colour: str
    hatch: str | None
    ink: str  # of the hatch
    tall: float


_PALE = "#C4C4C4"  # waiting: a thin bar needs a darker grey than a cell
_PAINTS = {
    "waiting": _Paint(_PALE, None, _PALE, 0.22),
    "prefill": _Paint(_LIVE_SHADES[2], "....", "white", 0.76),
    "decode": _Paint(LIVE, None, LIVE, 0.76),
    "preempted": _Paint(WASTE, "////", _HATCH, 0.36),
    "swapped": _Paint(_LIVE_SHADES[3], "\\\\\\\\", _LIVE_SHADES[2], 0.36),
    "idle seat": _Paint(WASTE_LIGHT, "xxx", _HATCH, 0.76),
}
_IN_BATCH = ("prefill", "decode")
_OUT_OF_BATCH = ("preempted", "swapped")
_MARKS = {
    "arrival": {"marker": "o", "markersize": 5, "markerfacecolor": "white"},
    "preemption": {"marker": "X", "markersize": 8},
    "resume": {"marker": ">", "markersize": 7},
    "finish": {"marker": "s", "markersize": 5},
}
_MOST_POINTS = 2000
_BINS = 1000
_TICKS = 250  # as many preemptions as can be told apart
_KEY_ROOM = 36.0  # points beside the words of a legend entry


# --- the timeline ----------------------------------------------------------


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Join spans of one request and kind that follow without a gap.

    Collect one span per request and step, in any order, and merge them:
    `[Span("A", "decode", 3, 4), Span("A", "decode", 4, 5)]` becomes
    `[Span("A", "decode", 3, 5)]`. A gap, or another kind between, parts
    them.

    Returns:
        Requests in the order of their first span in `spans`, each one's
        spans by time.

    Raises:
        ValueError: an unknown kind, a time that is not finite, an end
            before its start, or two spans of a request that overlap.
    """
    merged: list[Span] = []
    for row in _rows(list(spans)).values():
        for index, span in enumerate(row):
            before = merged[-1] if index else None
            if before is None or not _continues(before, span):
                merged.append(span)
            else:
                merged[-1] = before._replace(end=span.end)
    return merged


def _continues(before: Span, span: Span) -> bool:
    return before.kind == span.kind and before.end == span.start


@_look()
def timeline(
    spans: Sequence[Span],
    *,
    title: str,
    xlabel: str = "step",
    unfinished: Collection[str] = (),
) -> Figure:
    """Draw a row per request: when it waits, runs and is preempted.

    A tall bar is a place in the batch, a thin one none. A circle marks the
    arrival (the start of the first span), an X each time a running request
    is preempted, a triangle its return, a square the end of the last span
    that computes. Made for up to 24 requests.

    Args:
        spans: the rows are in the order of the requests' first spans.
        title: the takeaway.
        xlabel: what the times are, with their unit.
        unfinished: requests that go on after the picture. They have no
            square; neither has a request that ends waiting or preempted.

    Raises:
        ValueError: an unknown kind, a time that is not finite, an end before
            its start, two spans of a request that overlap, or an unfinished
            request without a span.
    """
    rows = _rows(spans)
    strangers = sorted(set(unfinished) - set(rows))
    if strangers:
        raise ValueError(f"unfinished: {strangers} have no span")
    marks = _marks(rows, unfinished)
    kinds = {span.kind for span in spans}
    handles = [_kind_handle(kind) for kind in _PAINTS if kind in kinds]
    handles += [_mark_handle(mark) for mark in marks]
    key_lines = cdiv(len(handles), _key_columns(handles))
    fig, ax = _chart(title, 0.6 + 0.2 * key_lines + 0.21 * len(rows))
    for y, row in enumerate(rows.values()):
        for span in row:
            _draw_span(ax, y, span)
    for mark, points in marks.items():
        x, y = zip(*points, strict=True)
        ax.plot(x, y, **_mark_style(mark))
    times = [time for span in spans for time in (span.start, span.end)]
    _set_time_axis(ax, times, xlabel, margin=0.015)
    names = [_shorten(name, 110) for name in rows]
    ax.set(ylim=(len(rows) - 0.4, -0.6))
    ax.set_yticks(range(len(rows)), names)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    _key_above(ax, handles)
    return fig


def _rows(spans: Sequence[Span]) -> dict[str, list[Span]]:
    """Return each request's spans by time, or raise for bad ones."""
    rows: dict[str, list[Span]] = {}
    for span in spans:
        _check_span(span)
        rows.setdefault(span.request, []).append(span)
    for row in rows.values():
        row.sort(key=lambda span: (span.start, span.end))
        for before, after in pairwise(row):
            if after.start < before.end:
                raise ValueError(f"{before} and {after} overlap")
    return rows


def _draw_span(ax: Axes, y: int, span: Span) -> None:
    paint = _PAINTS[span.kind]
    if span.end == span.start:  # preempted and back at once: the marks say so
        return
    ax.add_patch(
        Rectangle(
            (span.start, y - paint.tall / 2),
            span.end - span.start,
            paint.tall,
            facecolor=paint.colour,
            edgecolor=paint.ink,
            hatch=paint.hatch,
            linewidth=0,
        )
    )


def _marks(
    rows: Mapping[str, Sequence[Span]], unfinished: Collection[str]
) -> dict[str, list[tuple[float, int]]]:
    """Return the points (time, row) of each mark that occurs."""
    points: dict[str, list[tuple[float, int]]] = {mark: [] for mark in _MARKS}
    for y, (request, row) in enumerate(rows.items()):
        points["arrival"].append((row[0].start, y))
        for before, after in pairwise(row):
            if before.kind in _IN_BATCH and after.kind in _OUT_OF_BATCH:
                points["preemption"].append((after.start, y))
            if before.kind in _OUT_OF_BATCH and after.kind in _IN_BATCH:
                points["resume"].append((after.start, y))
        end = _finish(row)
        if end is not None and request not in unfinished:
            points["finish"].append((end, y))
    return {mark: found for mark, found in points.items() if found}


def _finish(row: Sequence[Span]) -> float | None:
    """Return when a request stops computing, if it is not waiting then."""
    computed = [span for span in row if span.kind != "idle seat"]
    if computed and computed[-1].kind in _IN_BATCH:
        return computed[-1].end
    return None


def _mark_style(mark: str) -> dict[str, Any]:
    """Return a dark mark, with a light rim to stand out on a bar."""
    style = {
        "linestyle": "none",
        "color": INK,
        "markeredgecolor": "white",
        "markeredgewidth": 0.8,
        "clip_on": False,
        "zorder": 5,
    }
    if mark == "arrival":
        style |= {"markeredgecolor": INK, "markeredgewidth": 1.2}
    return style | _MARKS[mark]


def _kind_handle(kind: str) -> Patch:
    paint = _PAINTS[kind]
    return Patch(
        facecolor=paint.colour,
        edgecolor=paint.ink,
        hatch=paint.hatch,
        linewidth=0,
        label=kind,
    )


def _mark_handle(mark: str) -> Line2D:
    return Line2D([], [], **_mark_style(mark), label=mark)


# --- around the axes -------------------------------------------------------


def _key_columns(handles: Sequence[Patch | Line2D]) -> int:
    """Return the columns of a legend of as few lines as fit the figure."""
    words = [_text_width(str(h.get_label()), _SMALL) for h in handles]
    for lines in range(1, len(words)):
        columns = cdiv(len(words), lines)
        # Dealt out as the legend does it: the first columns are longer.
        wide = [max(column) for column in np.array_split(words, columns)]
        if sum(wide) + columns * _KEY_ROOM <= _WIDTH * 72 - 2 * _MARGIN:
            return columns
    return 1


def _key_above(ax: Axes, handles: Sequence[Patch | Line2D]) -> None:
    """Explain the picture above it, from the left edge of the figure."""
    fig = ax.figure.canvas.figure
    fig.draw_without_rendering()  # settles how far left the labels reach
    box = ax.get_window_extent()
    margin = _MARGIN * fig.dpi / 72
    ax.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=((margin - box.x0) / box.width, 1.0),
        ncols=_key_columns(handles),
        columnspacing=1.2,
        handlelength=1.6,
        borderaxespad=0.2,
        borderpad=0.2,
    )


def _set_time_axis(
    ax: Axes, times: Sequence[float], xlabel: str, margin: float = 0.0
) -> None:
    """Show the times from first to last; whole steps get whole ticks."""
    first, last = min(times), max(times)
    room = (last - first or 1) * margin
    ax.set(xlim=(first - room, last + room), xlabel=xlabel)
    if all(float(time).is_integer() for time in times):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))


# --- the pool over time ----------------------------------------------------


@_look()
def pool_over_time(
    times: Sequence[float],
    split: Mapping[str, Sequence[float]],
    *,
    capacity: float,
    title: str,
    preemptions: Sequence[float] = (),
    xlabel: str = "step",
    ylabel: str = "slots",
) -> Figure:
    """Draw where the pool's slots are over time, as stacked steps.

    Token states are blue, waste orange with hatches, what is left blank is
    free. The values at a time hold until the next one; the last time only
    ends the picture. Of more than 2,000 times, each of 1,000 equal bins
    shows its time-weighted mean, and a note says so: totals stay right,
    short peaks are flattened.

    Args:
        times: [n] rising, n >= 2.
        split: part -> [n] what it takes; the parts are "token_states",
            "reserved", "internal" and "external", as in `split_bars`. Leave
            "external" out where those slots are simply free.
        capacity: of the pool, in the unit of split; a dashed line.
        title: the takeaway.
        preemptions: when a request was preempted; ticks above the line,
            taller where several fall together.
        xlabel: what the times are, with their unit.
        ylabel: the unit of split and capacity.

    Raises:
        ValueError: fewer than 2 times, times that do not rise, an unknown
            part, values of another length, negative or not finite, a sum
            above the capacity, or a preemption outside the times.
    """
    edges = _rising_times("times", times)
    parts = _check_parts(split, edges, capacity)
    put_out = _check_preemptions(preemptions, edges[0], edges[-1])

    fig, ax = _chart(title, 2.9)
    binned = len(edges) > _MOST_POINTS
    if binned:
        parts = {p: _bin_means(edges, y) for p, y in parts.items()}
        edges = _bin_edges(edges)
    floor = np.zeros(len(edges) - 1)
    for part, values in parts.items():
        _, colour, hatch = _PARTS[part]
        ax.stairs(
            floor + values[: len(floor)],
            edges,
            baseline=floor,
            fill=True,
            facecolor=colour,
            edgecolor=_HATCH,
            hatch=hatch,
            linewidth=0,
        )
        floor = floor + values[: len(floor)]
    _set_time_axis(ax, times, xlabel)
    ax.set(ylim=(0, 1.12 * capacity), ylabel=ylabel)
    handles: list[Patch | Line2D] = [_part_handle(part) for part in parts]
    handles += _draw_limits(ax, capacity, put_out)
    _key_above(ax, handles)
    if binned:
        _note_bins(fig, len(times))
    return fig


@_look()
def occupancy_lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    capacity: float,
    title: str,
    preemptions: Sequence[float] = (),
    xlabel: str = "step",
    ylabel: str = "slots",
    kinds: Mapping[str, str] | None = None,
) -> Figure:
    """Draw what several engines hold over time, as labelled steps.

    Values hold, and many of them are binned, as in `pool_over_time`.

    Args:
        series: name -> (times [n], values [n]), n >= 2; the times of two
            engines may differ. At most 8.
        capacity: of the pool, in the unit of the values; a dashed line.
        title: the takeaway.
        preemptions: when a request was preempted; ticks above the line,
            taller where several fall together.
        xlabel: what the times are, with their unit.
        ylabel: the unit of the values and the capacity.
        kinds: name -> "live", "waste", "shared" or "neutral", as in `lines`.

    Raises:
        ValueError: no series or more than 8, fewer than 2 times, times that
            do not rise, values of another length, negative, not finite or
            above the capacity, a preemption outside all times, an unknown
            kind or a kind for an unknown series.
    """
    steps = _check_steps(series, capacity)
    kind_of = _kinds(steps, {} if kinds is None else kinds, "neutral")
    first = min(edges[0] for edges, _ in steps.values())
    last = max(edges[-1] for edges, _ in steps.values())
    put_out = _check_preemptions(preemptions, first, last)

    fig, ax = _chart(title, 2.9)
    styles = _line_styles(kind_of, 1)
    ends = []
    for name, (edges, values) in steps.items():
        x, y = edges, values
        if len(edges) > _MOST_POINTS:
            x, y = _bin_edges(edges), _bin_means(edges, values)
            y = np.append(y, y[-1])
        style = styles[name] | {"marker": "", "linewidth": 1.5}
        ax.plot(x, y, drawstyle="steps-post", **style)
        ends.append(_end(name, x, y))
    _set_time_axis(ax, [t for x, _ in steps.values() for t in x], xlabel)
    ax.set(ylim=(0, 1.12 * capacity), ylabel=ylabel)
    _key_above(ax, _draw_limits(ax, capacity, put_out))
    _end_labels(ax, ends)
    longest = max(len(edges) for edges, _ in steps.values())
    if longest > _MOST_POINTS:
        _note_bins(fig, longest)
    return fig


def _bin_edges(edges: np.ndarray) -> np.ndarray:
    return np.linspace(edges[0], edges[-1], _BINS + 1)


def _bin_means(edges: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the time-weighted mean of steps in each of the equal bins."""
    area = np.cumsum(values[:-1] * np.diff(edges))
    bins = _bin_edges(edges)
    up_to = np.interp(bins, edges, np.concatenate(([0.0], area)))
    return np.maximum(np.diff(up_to) / np.diff(bins), 0)


def _note_bins(fig: Figure, points: int) -> None:
    note(
        fig,
        f"{points:,} points, drawn as the time-weighted means of {_BINS:,} "
        "equal bins: short peaks are flattened.",
    )


def _part_handle(part: str) -> Patch:
    words, colour, hatch = _PARTS[part]
    return Patch(
        facecolor=colour, edgecolor=_HATCH, hatch=hatch, lw=0, label=words
    )


def _draw_limits(
    ax: Axes, capacity: float, put_out: np.ndarray
) -> list[Line2D]:
    """Draw the capacity and the preemptions; return their legend handles."""
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: _number(v)))
    style = {"color": INK, "linestyle": (0, (5, 2)), "linewidth": 1.2}
    ax.axhline(capacity, **style)
    words = f"capacity {_number(capacity)}"
    handles = [Line2D([], [], **style, label=words)]
    if len(put_out):
        x, counts = _group(put_out, *ax.get_xlim())
        tall = 0.3 + 0.7 * counts / counts.max()
        ax.vlines(
            x,
            1.03 * capacity,
            (1.03 + 0.08 * tall) * capacity,
            colors=INK,
            linewidth=1,
        )
        words = "preemption" if len(put_out) == 1 else "preemptions"
        tick = {"linestyle": "none", "marker": "|", "markersize": 7}
        words = f"{len(put_out):,} {words}"
        handles.append(Line2D([], [], color=INK, **tick, label=words))
    return handles


def _group(
    times: np.ndarray, first: float, last: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return one time, and how many there are, for each tick in sight."""
    edges = np.linspace(first, last, _TICKS + 1)
    place = np.searchsorted(edges, times, side="right")
    _, index, counts = np.unique(place, return_index=True, return_counts=True)
    return times[index], counts


# --- latency ---------------------------------------------------------------


@_look()
def latency_against_load(
    loads: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    *,
    title: str,
    ylabel: str,
    xlabel: str = "requests per second",
    upper: Mapping[str, Sequence[float]] | None = None,
    upper_label: str = "p99",
    slo: float | None = None,
    slo_unit: str = "",
    logy: bool = False,
    kinds: Mapping[str, str] | None = None,
) -> Figure:
    """Draw latency against load, a labelled line per engine.

    Args:
        loads: [n] offered load, rising.
        curves: name -> [n] latencies, for example medians; NaN where a load
            was not measured, which leaves a gap.
        title: the takeaway.
        ylabel: which latency, with its unit.
        xlabel: what the load is, with its unit.
        upper: name -> [n] a high percentile, as a thin line, with the range
            down to the curve shaded. Names may be left out.
        upper_label: which percentile that is.
        slo: the latency that is promised, a dotted line.
        slo_unit: its unit, for the key.
        logy: logarithmic y axis.
        kinds: name -> "live", "waste", "shared" or "neutral", as in `lines`.

    Raises:
        ValueError: no loads, loads that do not rise, no curves, more than 8,
            a curve of another length, of no finite value, infinite or
            negative somewhere (not positive, if logy), an upper value below
            its curve or for an unknown curve, an unknown kind or a kind for
            an unknown curve.
    """
    x = _rising("loads", loads)
    medians = _series(curves, len(x), minimum=0)
    uppers = _check_upper({} if upper is None else upper, medians)
    kind_of = _kinds(medians, {} if kinds is None else kinds, "neutral")
    for name, y in [*medians.items(), *uppers.items()]:
        if logy and np.nanmin(y) <= 0:
            raise ValueError(f"logy needs every value of {name!r} positive")

    fig, ax = _chart(title, 3.4)
    styles = _line_styles(kind_of, 1)
    ends = []
    for name, y in medians.items():
        ax.plot(x, y, **styles[name])
        ends.append(_end(name, x, y))
        if name in uppers:
            _draw_upper(ax, x, y, uppers[name], styles[name], kind_of[name])
    handles: list[Patch | Line2D] = []
    if uppers:
        handles.append(_upper_handle(upper_label))
    if slo is not None:
        dots = {"color": INK, "linestyle": ":", "linewidth": 1.2}
        ax.axhline(slo, **dots)
        label = f"SLO {_number(slo)} {slo_unit}".rstrip()
        handles.append(Line2D([], [], **dots, label=label))
    ax.set(xlabel=xlabel, ylabel=ylabel)
    if logy:
        ax.set_yscale("log")
        _plain_log_ticks(ax, "y")
    else:
        ax.set_ylim(bottom=0)
    if handles:
        _key_above(ax, handles)
    _end_labels(ax, ends)
    return fig


def _draw_upper(
    ax: Axes,
    x: np.ndarray,
    y: np.ndarray,
    high: np.ndarray,
    style: Mapping[str, Any],
    kind: str,
) -> None:
    """Draw a thin line, and the range down to y; waste has its hatch."""
    ax.plot(x, high, **{**style, "linewidth": 0.9, "markersize": 3.0})
    ax.fill_between(
        x,
        y,
        high,
        facecolor=to_rgba(style["color"], 0.12),
        edgecolor=to_rgba(style["color"], 0.4),
        hatch="////" if kind == "waste" else None,
        linewidth=0,
    )


def _upper_handle(upper_label: str) -> Patch:
    return Patch(
        facecolor=to_rgba(INK, 0.12),
        edgecolor=INK,
        linewidth=0.9,
        label=f"up to the {upper_label} (thin line)",
    )


# --- checks ----------------------------------------------------------------


def _check_span(span: Span) -> None:
    if span.kind not in _PAINTS:
        raise ValueError(
            f"{span}: unknown kind {span.kind!r}, not one of {list(_PAINTS)}"
        )
    if not math.isfinite(span.start) or not math.isfinite(span.end):
        raise ValueError(f"{span}: the times must be finite")
    if span.end < span.start:
        raise ValueError(f"{span} ends before it starts")


def _rising(name: str, values: Sequence[float]) -> np.ndarray:
    array = _x_values(name, values)
    if (np.diff(array) <= 0).any():
        index = int(np.flatnonzero(np.diff(array) <= 0)[0])
        raise ValueError(
            f"{name} must rise, got {array[index + 1]:g} after "
            f"{array[index]:g}"
        )
    return array


def _rising_times(name: str, times: Sequence[float]) -> np.ndarray:
    array = _rising(name, times)
    if len(array) < 2:
        raise ValueError(f"{name} needs 2 or more, got {len(array)}")
    return array


def _held(
    name: str, values: Sequence[float], times: np.ndarray, capacity: float
) -> np.ndarray:
    """Return what is held at the times, if that is possible."""
    array = np.asarray(values, dtype=float)
    if array.shape != times.shape:
        raise ValueError(
            f"{name!r} has shape {array.shape}, expected {times.shape}"
        )
    if not np.isfinite(array).all() or array.min() < 0:
        raise ValueError(f"{name!r} must be finite and >= 0 everywhere")
    _check_capacity(name, array, times, capacity)
    return array


def _check_capacity(
    name: str, held: np.ndarray, times: np.ndarray, capacity: float
) -> None:
    index = int(held.argmax())
    if held[index] > capacity * (1 + 1e-9):
        raise ValueError(
            f"{name!r} is {held[index]:g} at {times[index]:g}, above the "
            f"capacity {capacity:g}"
        )


def _check_parts(
    split: Mapping[str, Sequence[float]], times: np.ndarray, capacity: float
) -> dict[str, np.ndarray]:
    """Return the parts, in the order in which they are stacked."""
    unknown = sorted(set(split) - set(_PARTS))
    if unknown:
        raise ValueError(
            f"split: unknown parts {unknown}, not in {list(_PARTS)}"
        )
    parts = {
        part: _held(part, split[part], times, capacity)
        for part in _PARTS
        if part in split
    }
    total = np.sum(list(parts.values()), axis=0)
    _check_capacity("the sum", total, times, capacity)
    return parts


def _check_steps(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    capacity: float,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    _require_few(series)
    steps = {}
    for name, (times, values) in series.items():
        edges = _rising_times(f"times of {name!r}", times)
        steps[name] = (edges, _held(name, values, edges, capacity))
    return steps


def _check_preemptions(
    preemptions: Sequence[float], first: float, last: float
) -> np.ndarray:
    """Return the preemptions by time."""
    if not len(preemptions):
        return np.empty(0)
    times = np.sort(_x_values("preemptions", preemptions))
    if times[0] < first or times[-1] > last:
        raise ValueError(
            f"preemptions must be in [{first:g}, {last:g}], got "
            f"{times[0]:g} to {times[-1]:g}"
        )
    return times


def _check_upper(
    upper: Mapping[str, Sequence[float]], medians: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    for name in upper:
        if name not in medians:
            raise ValueError(f"upper of {name!r}, which is not drawn")
    if not upper:
        return {}
    length = len(next(iter(medians.values())))
    uppers = _series(upper, length, minimum=0)
    for name, high in uppers.items():
        # Where either is NaN there is nothing to compare.
        if (high < medians[name]).any():
            raise ValueError(f"upper of {name!r} falls below its curve")
    return uppers
