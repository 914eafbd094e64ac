"""One visual language for every notebook: what is used, wasted, shared, free.

Three colours have one meaning each, everywhere: `LIVE` (blue) holds tokens,
`WASTE` (orange, always hatched as an area) is reserved or lost, `SHARED`
(bluish green) has several owners. Light grey is free. Figures are white and
opaque with dark text, so they stay readable on a dark page, and hatches,
labels and lightness carry the meaning without colour.

Each function returns the `Figure`. It is made by pyplot, so a notebook shows
it at the end of the cell: assign the result (`fig = pool_grid(…)`), or the
notebook shows it twice. No function picks a matplotlib backend or leaves a
changed rcParam behind. The colours and the rest of the look are in
`plots_look`, the pictures of a running scheduler in `plots_serving`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle
from matplotlib.path import Path

from llm_systems_cookbook.plots.style import (
    _FILL,
    _HATCH,
    _LINE_SHADES,
    _LIVE_SHADES,
    _MUTED,
    _PARTS,
    _SMALL,
    FREE,
    INK,
    LIVE,
    SHARED,
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
    _new_figure,
    _number,
    _plain_log_ticks,
    _points_wide,
    _series,
    _shorten,
    _text,
    _text_on,
    _text_width,
    _waste,
    _x_values,
    note,
)
from llm_systems_cookbook.validate import cdiv

_PAGE = 490.0  # points across a diagram: the width less its margins


@_look()
def pool_grid(
    owners: Sequence[Sequence[str]],
    *,
    title: str,
    columns: int = 16,
    filled: Sequence[int] | None = None,
    block_size: int | None = None,
) -> Figure:
    """Draw the pool as a grid, one cell per block, coloured by its owners.

    A free block is grey, a block with one owner blue with the owner's name,
    a shared one green with all names ("A+B"). Owners differ by name and by
    the lightness of the blue. Keep names to a few letters: what does not fit
    in a cell is shortened, and many names become a count ("×5").

    Args:
        owners: [num_blocks] the names of each block's owners; [] is free.
        title: the takeaway.
        columns: blocks in a row, at least 1.
        filled: [num_blocks] tokens in each block; the rest of the block is
            hatched as waste. Needs block_size.
        block_size: tokens per block, at least 1.

    Raises:
        ValueError: no blocks, an owner named twice in a block, columns or
            block_size below 1, only one of filled and block_size, a length
            of filled other than num_blocks, a fill outside [0, block_size],
            or tokens in a free block.
    """
    names = [list(block) for block in owners]
    _check_pool(names, columns, filled, block_size)
    columns = min(columns, len(names))
    shares = [1.0] * len(names)
    if filled is not None and block_size is not None:
        shares = [count / block_size for count in filled]
    cell = _PAGE / max(columns, 8)
    head = 13.0
    pitch = 26.0 + head + 4.0
    bottom = cdiv(len(names), columns) * pitch
    ids_fit = _text_width(str(len(names) - 1), _SMALL) + 4 <= cell
    shade = _shades({name for block in names for name in block})

    fig, ax = _diagram(title, bottom + 26)
    kinds = {_kind_of(len(block)) for block in names}
    for block_id, (block, share) in enumerate(zip(names, shares, strict=True)):
        row, column = divmod(block_id, columns)
        x, y = column * cell, row * pitch + head
        if ids_fit or column == 0:
            _text(ax, x, y - 3, str(block_id), va="bottom", color=_MUTED)
        if block:
            _draw_owned_cell(ax, x, y, cell - 2, block, share, shade)
        else:
            _box(ax, x, y, cell - 2, 26, FREE)
        if block and share < 1:
            kinds.add("waste")
    _key(ax, kinds, bottom + 6)
    ax.set(xlim=(0, _PAGE), ylim=(bottom + 24, 0))
    return fig


@_look()
def block_tables(
    tables: Mapping[str, tuple[Sequence[int], int]],
    *,
    num_blocks: int,
    block_size: int,
    title: str,
    tokens: Mapping[str, Sequence[str]] | None = None,
) -> Figure:
    """Draw block tables: logical blocks left, the pool right, arrows between.

    The number beside a logical block is its entry in the block table. A
    block in several tables is green on both sides; slots that hold no token
    yet are hatched. Made for up to 3 sequences of 8 blocks, 16 in the pool.

    Args:
        tables: name -> (block ids in logical order, length in tokens).
        num_blocks: blocks in the pool, at least 1.
        block_size: tokens per block, at least 1.
        title: the takeaway.
        tokens: name -> [length] texts to write into the slots; sequences
            that are left out get none.

    Raises:
        ValueError: no tables, num_blocks or block_size below 1, a block id
            outside [0, num_blocks) or twice in a table, a length outside
            [0, blocks * block_size], or tokens of an unknown sequence or of
            another number than its length.
    """
    texts = {} if tokens is None else dict(tokens)
    _check_tables(tables, num_blocks, block_size, texts)
    left_height = sum(30 + 20 * len(ids) for ids, _ in tables.values())
    pitch = min(max(left_height / num_blocks, 20.0), 28.0)
    body = max(left_height, num_blocks * pitch)
    fig, ax = _diagram(title, body + 40)
    sheet = _TableSheet(
        ax=ax,
        block_size=block_size,
        pool=_physical(tables, num_blocks, block_size),
        texts=texts,
        shade=_shades(tables),
        pool_top=18 + (body - num_blocks * pitch) / 2,
        pitch=pitch,
    )
    top = 18 + (body - left_height) / 2
    sheet.draw_headers(top)
    for block_id in range(num_blocks):
        sheet.draw_pool_block(block_id)
    for name, (ids, length) in tables.items():
        sheet.draw_table(name, ids, length, top)
        top += 30 + 20 * len(ids)
    _key(ax, sheet.kinds, body + 22)
    ax.set(xlim=(0, _PAGE), ylim=(body + 40, 0))
    return fig


@_look()
def refcounts(
    before: Sequence[int],
    after: Sequence[int],
    *,
    title: str,
    labels: tuple[str, str] = ("before", "after"),
) -> Figure:
    """Draw the reference count of each block before and after an operation.

    Counts that changed are outlined. 0 is free, 1 live, 2 and more shared.

    Args:
        before: [num_blocks] reference counts.
        after: [num_blocks] reference counts.
        title: the takeaway.
        labels: what the two rows are called.

    Raises:
        ValueError: no blocks, two lengths, or a negative count.
    """
    rows = (list(before), list(after))
    _check_counts(labels, rows)
    names = [_shorten(label, 110) for label in labels]
    gutter = max(_text_width(name, 10) for name in names) + 10
    columns = min(len(rows[0]), 16)
    cell = min((_PAGE - gutter) / columns, 44.0)
    bands = cdiv(len(rows[0]), columns)
    tall = 82.0

    fig, ax = _diagram(title, bands * tall + 18)
    for band in range(bands):
        _text(ax, 0, band * tall + 6, "block", color=_MUTED)
        for row, name in enumerate(names):
            _text(ax, 0, band * tall + 28 + row * 31, name, size=10)
    for block_id, counts in enumerate(zip(*rows, strict=True)):
        band, column = divmod(block_id, columns)
        _draw_counts(
            ax, gutter + column * cell, band * tall, cell - 4, block_id, counts
        )
    kinds = {_kind_of(count) for row in rows for count in row}
    if rows[0] != rows[1]:
        kinds.add("changed")
    _key(ax, kinds, bands * tall)
    ax.set(xlim=(-2, _PAGE), ylim=(bands * tall + 16, -2))
    return fig


@_look()
def program_grid(
    programs: Mapping[str, tuple[str, int, Sequence[Sequence[int]]]],
    *,
    title: str,
) -> Figure:
    """Draw which blocks each program of a kernel reads, in which order.

    A row is a program, a cell one of its steps, with the ids of the blocks
    that the step reads. A cell is blue, by the sequence. It is hatched when
    the programs above have read all of its blocks before, for the same KV
    head: those bytes move again. Made for up to 16 programs of 8 steps.

    Args:
        programs: name -> (sequence, KV head, steps); a step lists block ids.
            A program without steps has nothing to read.
        title: the takeaway.

    Raises:
        ValueError: no programs, a step without a block, or a negative block
            id.
    """
    _check_programs(programs)
    names = [_shorten(name, 170) for name in programs]
    gutter = max(_text_width(name, _SMALL) for name in names) + 10
    num_steps = max(1, *(len(steps) for _, _, steps in programs.values()))
    cell = min((_PAGE - gutter) / num_steps, 76.0)
    shade = _shades({sequence for sequence, _, _ in programs.values()})
    bottom = 18 + 22.0 * len(names)

    fig, ax = _diagram(title, bottom + 26)
    for step in range(num_steps):
        words, x = f"step {step + 1}", gutter + (step + 0.5) * cell - 1
        if _text_width(words, _SMALL) > cell:
            words = str(step + 1)
        _text(ax, x, 8, words, "center", color=_MUTED)
    known: set[tuple[int, int]] = set()
    kinds = set()
    rows = zip(names, programs.values(), strict=True)
    for row, (name, (sequence, head, steps)) in enumerate(rows):
        y = 18 + 22.0 * row
        _text(ax, 0, y + 9, name)
        if not steps:
            _text(ax, gutter, y + 9, "nothing to read", color=_MUTED)
        for step, ids in enumerate(steps):
            again = {(block_id, head) for block_id in ids} <= known
            kinds.add("again" if again else "first")
            colour = WASTE if again else shade[sequence]
            _draw_step(ax, gutter + step * cell, y, cell - 2, ids, colour)
        known |= {(block_id, head) for ids in steps for block_id in ids}
    _key(ax, kinds, bottom + 6, _STEP_WORDS)
    ax.set(xlim=(0, _PAGE), ylim=(bottom + 24, 0))
    return fig


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
        ValueError: no systems, an unknown or (in splits) missing key, a
            share that is negative or not finite, a sum above 100.5, or a
            reference for a system that is not in splits.
    """
    paper = {} if reference is None else dict(reference)
    if not splits:
        raise ValueError("splits is empty")
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
        ValueError: no systems, a share that is negative or not finite, or a
            pair whose sum is not 100 within 0.5.
    """
    if not pairs:
        raise ValueError("pairs is empty")
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
        ValueError: no values, a value that is negative or not finite, an
            unknown kind, or a kind for a name that is not in values.
    """
    if not values:
        raise ValueError("values is empty")
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


# --- figures and text ------------------------------------------------------


def _diagram(title: str, height: float) -> tuple[Figure, Axes]:
    """Return bare axes measured in points, y downwards; `height` too."""
    fig, ax = _new_figure(title, height / 72 + 0.15)
    ax.set_aspect("equal", anchor="NW")
    ax.axis("off")
    return fig, ax


def _owner_label(names: Sequence[str], room: float) -> str:
    """Return "A", "A+B" or, where the names do not fit, "×2"."""
    joined = "+".join(names)
    if len(names) > 1 and _text_width(joined, _SMALL) > room:
        return _shorten(f"×{len(names)}", room)
    return _shorten(joined, room)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# --- areas -----------------------------------------------------------------

_STEP_WORDS = {
    "first": "read for the first time",
    "again": "read again for the same KV head",
}
_KEY_WORDS = {
    "live": "one owner",
    "shared": "shared",
    "waste": "reserved, no token yet",
    "free": "free",
    "changed": "changed",
}


def _kind_of(owners: int) -> str:
    if owners == 0:
        return "free"
    return "live" if owners == 1 else "shared"


def _shades(names: Iterable[str]) -> dict[str, str]:
    """Give each name a blue; four lightnesses, then they repeat."""
    ordered = sorted(names)
    return {
        name: _LIVE_SHADES[index % len(_LIVE_SHADES)]
        for index, name in enumerate(ordered)
    }


def _outline(ax: Axes, x: float, y: float, w: float, h: float) -> None:
    ax.add_patch(
        Rectangle((x, y), w, h, fill=False, edgecolor=INK, linewidth=2.2)
    )


def _slot_lines(
    ax: Axes, x: float, y: float, width: float, block_size: int
) -> None:
    """Part a block into slots, where they are wide enough to be seen."""
    room = width / block_size
    if room < 6:
        return
    edges = [x + slot * room for slot in range(1, block_size)]
    ax.vlines(edges, y, y + 17, colors="white", linewidth=1)


def _arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], colour: str
) -> None:
    """Draw an arrow that leaves and arrives horizontally."""
    middle = (start[0] + end[0]) / 2
    path = Path(
        [start, (middle, start[1]), (middle, end[1]), end],
        [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4],
    )
    ax.add_patch(
        FancyArrowPatch(
            path=path,
            arrowstyle="-|>",
            mutation_scale=9,
            color=colour,
            linewidth=1.3,
        )
    )


def _key(
    ax: Axes,
    kinds: set[str],
    y: float,
    meanings: Mapping[str, str] = _KEY_WORDS,
) -> None:
    """Explain the fills in use, in one line below a diagram."""
    x = 0.0
    for kind, words in meanings.items():
        if kind not in kinds:
            continue
        if kind in ("waste", "again"):
            _waste(ax, x, y, 16, 10)
        elif kind == "changed":
            _outline(ax, x + 1, y + 1, 14, 8)
        else:
            _box(ax, x, y, 16, 10, _FILL[kind])
        _text(ax, x + 20, y + 5, words, color=_MUTED)
        x += 20 + _text_width(words, _SMALL) + 16


# --- the parts of the diagrams ---------------------------------------------


def _draw_owned_cell(
    ax: Axes,
    x: float,
    y: float,
    width: float,
    owners: Sequence[str],
    share: float,
    shade: Mapping[str, str],
) -> None:
    """Draw a block that is filled to `share`, with its owners' names."""
    colour = shade[owners[0]] if len(owners) == 1 else SHARED
    _box(ax, x, y, width, 26, colour)
    if share < 1:
        _waste(ax, x + share * width, y, (1 - share) * width, 26)
    label, middle, tag = _owner_label(owners, width - 2), x + width / 2, None
    if share < 1:
        tag = colour
        # Keep clear of the hatch where the filled part has room.
        if _text_width(label, _SMALL) + 4 <= share * width:
            middle, tag = x + share * width / 2, None
    _text(ax, middle, y + 13, label, "center", color=_text_on(colour), tag=tag)


def _draw_counts(
    ax: Axes,
    x: float,
    top: float,
    width: float,
    block_id: int,
    counts: tuple[int, int],
) -> None:
    """Draw one block's counts, before above after."""
    centre = x + width / 2
    _text(ax, centre, top + 6, str(block_id), "center", color=_MUTED)
    for row, count in enumerate(counts):
        y = top + 15 + row * 31
        colour = _FILL[_kind_of(count)]
        ink = _text_on(colour)
        _box(ax, x, y, width, 26, colour)
        _text(ax, centre, y + 13, str(count), "center", size=11, color=ink)
        if counts[0] != counts[1]:
            _outline(ax, x, y, width, 26)


def _draw_step(
    ax: Axes,
    x: float,
    y: float,
    width: float,
    ids: Sequence[int],
    colour: str,
) -> None:
    """Draw one step of a program, with the blocks that it reads."""
    again = colour == WASTE
    if again:
        _waste(ax, x, y, width, 18)
    else:
        _box(ax, x, y, width, 18, colour)
    words = _owner_label([str(block_id) for block_id in ids], width - 4)
    tag, ink = colour if again else None, _text_on(colour)
    _text(ax, x + width / 2, y + 9, words, "center", color=ink, tag=tag)


@dataclass
class _TableSheet:
    """The two halves of a block-table picture; lengths in points.

    Attributes:
        pool: for each block its users: (name, first token, tokens in it).
        texts: name -> token texts, for the sequences that have them.
        shade: name -> blue.
        pool_top: where block 0 starts.
        pitch: from one block of the pool to the next.
        kinds: the meanings drawn so far, for the key.
    """

    ax: Axes
    block_size: int
    pool: list[list[tuple[str, int, int]]]
    texts: Mapping[str, Sequence[str]]
    shade: Mapping[str, str]
    pool_top: float
    pitch: float
    kinds: set[str] = field(default_factory=set)

    LEFT: ClassVar[float] = 16.0  # logical blocks start here,
    WIDE: ClassVar[float] = 156.0  # are as wide as physical ones,
    ENTRY: ClassVar[float] = 176.0  # and are followed by the table's entry
    RIGHT: ClassVar[float] = 272.0  # physical blocks start here,
    IDS: ClassVar[float] = 433.0  # followed by their ids
    NAMES: ClassVar[float] = 450.0  # and the names of their owners

    def draw_headers(self, left_top: float) -> None:
        heads = (
            (self.LEFT, left_top, "logical blocks"),
            (self.ENTRY, left_top, "table"),
            (self.RIGHT, self.pool_top, "pool"),
        )
        for x, top, words in heads:
            _text(self.ax, x, top - 18, words, va="top", color=_MUTED)

    def draw_pool_block(self, block_id: int) -> None:
        y = self.pool_top + block_id * self.pitch
        users = self.pool[block_id]
        self.kinds.add(_kind_of(len(users)))
        _text(self.ax, self.IDS, y + 8.5, str(block_id), color=_MUTED)
        if not users:
            _box(self.ax, self.RIGHT, y, self.WIDE, 17, FREE)
            return
        # Owners of a shared block see the same bytes: show the longest.
        name, start, count = max(users, key=lambda user: user[2])
        self._draw_block(self.RIGHT, y, block_id, name, start, count)
        owners = _owner_label([u[0] for u in users], _PAGE - self.NAMES)
        _text(self.ax, self.NAMES, y + 8.5, owners)

    def draw_table(
        self, name: str, ids: Sequence[int], length: int, top: float
    ) -> None:
        words = f"{name}: {_count(length, 'token')}"
        words = _shorten(words, self.WIDE + 30, 10)
        _text(self.ax, self.LEFT, top + 10, words, size=10)
        for index, block_id in enumerate(ids):
            y = top + 20 + 20 * index
            start = index * self.block_size
            count = _tokens_in_block(index, length, self.block_size)
            _text(self.ax, 2, y + 8.5, str(index), color=_MUTED)
            self._draw_block(self.LEFT, y, block_id, name, start, count)
            self._draw_entry(y, block_id, name)

    def _draw_entry(self, y: float, block_id: int, name: str) -> None:
        """Draw a cell of the table, and its arrow to the block."""
        colour = self.shade[name]
        if len(self.pool[block_id]) > 1:
            colour = _LINE_SHADES["shared"][0]
        target = self.pool_top + block_id * self.pitch
        _box(self.ax, self.ENTRY, y, 24, 17, "white", edge=_MUTED)
        _text(self.ax, self.ENTRY + 12, y + 8.5, str(block_id), "center")
        _arrow(
            self.ax,
            (self.ENTRY + 26, y + 8.5),
            (self.RIGHT - 2, target + 8.5),
            colour,
        )

    def _draw_block(
        self,
        x: float,
        y: float,
        block_id: int,
        name: str,
        start: int,
        count: int,
    ) -> None:
        """Draw a block with `count` tokens of a sequence, from `start`."""
        shared = len(self.pool[block_id]) > 1
        colour = SHARED if shared else self.shade[name]
        slot = self.WIDE / self.block_size
        _box(self.ax, x, y, count * slot, 17, colour)
        if count < self.block_size:
            self.kinds.add("waste")
            rest = self.WIDE - count * slot
            _waste(self.ax, x + count * slot, y, rest, 17)
        _slot_lines(self.ax, x, y, self.WIDE, self.block_size)
        tokens = self.texts.get(name, [""] * (start + count))
        for offset, token in enumerate(tokens[start : start + count]):
            word = _shorten(token.replace("\n", "\\n"), slot - 2)
            centre = x + (offset + 0.5) * slot
            ink = _text_on(colour)
            _text(self.ax, centre, y + 8.5, word, "center", color=ink)


def _tokens_in_block(index: int, length: int, block_size: int) -> int:
    """Return how many of `length` tokens lie in logical block `index`."""
    return min(max(length - index * block_size, 0), block_size)


def _physical(
    tables: Mapping[str, tuple[Sequence[int], int]],
    num_blocks: int,
    block_size: int,
) -> list[list[tuple[str, int, int]]]:
    """Return for each block its users: (name, first token, tokens in it)."""
    pool: list[list[tuple[str, int, int]]] = [[] for _ in range(num_blocks)]
    for name, (ids, length) in tables.items():
        for index, block_id in enumerate(ids):
            count = _tokens_in_block(index, length, block_size)
            pool[block_id].append((name, index * block_size, count))
    return pool


# --- bars ------------------------------------------------------------------


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


# --- checks ----------------------------------------------------------------


def _check_pool(
    owners: Sequence[Sequence[str]],
    columns: int,
    filled: Sequence[int] | None,
    block_size: int | None,
) -> None:
    if not owners:
        raise ValueError("owners is empty: a pool has at least 1 block")
    if columns < 1:
        raise ValueError(f"columns must be >= 1, got {columns}")
    for block_id, block in enumerate(owners):
        if len(set(block)) != len(block):
            raise ValueError(f"block {block_id} names an owner twice: {block}")
    if (filled is None) != (block_size is None):
        raise ValueError("filled and block_size come together")
    if filled is None or block_size is None:
        return
    if block_size < 1:
        raise ValueError(f"block_size must be >= 1, got {block_size}")
    if len(filled) != len(owners):
        raise ValueError(
            f"filled has {len(filled)} entries for {len(owners)} blocks"
        )
    for block_id, count in enumerate(filled):
        limit = block_size if owners[block_id] else 0
        if not 0 <= count <= limit:
            raise ValueError(
                f"block {block_id}: filled is {count}, outside [0, {limit}]"
            )


def _check_programs(
    programs: Mapping[str, tuple[str, int, Sequence[Sequence[int]]]],
) -> None:
    if not programs:
        raise ValueError("programs is empty")
    for name, (_, _, steps) in programs.items():
        for step, ids in enumerate(steps, start=1):
            if not ids:
                raise ValueError(f"{name}: step {step} reads no block")
            if min(ids) < 0:
                raise ValueError(
                    f"{name}: step {step} reads block {min(ids)}, below 0"
                )


def _check_counts(
    labels: tuple[str, str], rows: tuple[list[int], list[int]]
) -> None:
    if not rows[0] or len(rows[0]) != len(rows[1]):
        raise ValueError(
            "before and after need the same number of blocks, at least 1; "
            f"got {len(rows[0])} and {len(rows[1])}"
        )
    for label, counts in zip(labels, rows, strict=True):
        for block_id, count in enumerate(counts):
            if count < 0:
                raise ValueError(
                    f"{label}: block {block_id} has a negative count {count}"
                )


def _check_tables(
    tables: Mapping[str, tuple[Sequence[int], int]],
    num_blocks: int,
    block_size: int,
    tokens: Mapping[str, Sequence[str]],
) -> None:
    if not tables:
        raise ValueError("tables is empty")
    if num_blocks < 1 or block_size < 1:
        raise ValueError(
            "num_blocks and block_size must be >= 1, got "
            f"{num_blocks} and {block_size}"
        )
    for name, (ids, length) in tables.items():
        for block_id in ids:
            if not 0 <= block_id < num_blocks:
                raise ValueError(
                    f"{name}: block {block_id} is outside [0, {num_blocks})"
                )
        if len(set(ids)) != len(ids):
            raise ValueError(f"{name}: a block is listed twice: {list(ids)}")
        if not 0 <= length <= len(ids) * block_size:
            raise ValueError(
                f"{name}: length {length} is outside "
                f"[0, {len(ids) * block_size}]"
            )
    for name, texts in tokens.items():
        if name not in tables:
            raise ValueError(f"tokens: {name!r} is not in tables")
        if len(texts) != tables[name][1]:
            raise ValueError(
                f"tokens: {name} has {len(texts)} texts for "
                f"{tables[name][1]} tokens"
            )


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
