"""The pool and who holds it: blocks, block tables, reference counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch
from matplotlib.path import Path

from llm_systems_cookbook.plots.diagram import (
    PAGE,
    diagram,
    key,
    outline,
    owner_label,
    shades,
)
from llm_systems_cookbook.plots.style import (
    _FILL,
    _LINE_SHADES,
    _MUTED,
    _SMALL,
    FREE,
    SHARED,
    _box,
    _look,
    _shorten,
    _text,
    _text_on,
    _text_width,
    _waste,
)
from llm_systems_cookbook.validate import cdiv


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
        ValueError: an owner named twice in a block, only one of filled and
            block_size, a length of filled other than num_blocks, a fill
            outside [0, block_size], or tokens in a free block.
    """
    names = [list(block) for block in owners]
    _check_pool(names, filled, block_size)
    columns = min(columns, len(names))
    shares = [1.0] * len(names)
    if filled is not None and block_size is not None:
        shares = [count / block_size for count in filled]
    cell = PAGE / max(columns, 8)
    head = 13.0
    pitch = 26.0 + head + 4.0
    bottom = cdiv(len(names), columns) * pitch
    ids_fit = _text_width(str(len(names) - 1), _SMALL) + 4 <= cell
    shade = shades({name for block in names for name in block})

    fig, ax = diagram(title, bottom + 26)
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
    key(ax, kinds, bottom + 6)
    ax.set(xlim=(0, PAGE), ylim=(bottom + 24, 0))
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
        ValueError: a block id outside [0, num_blocks) or twice in a table, a
            length outside [0, blocks * block_size], or tokens of an unknown
            sequence or of another number than its length.
    """
    texts = {} if tokens is None else dict(tokens)
    _check_tables(tables, num_blocks, block_size, texts)
    left_height = sum(30 + 20 * len(ids) for ids, _ in tables.values())
    pitch = min(max(left_height / num_blocks, 20.0), 28.0)
    body = max(left_height, num_blocks * pitch)
    fig, ax = diagram(title, body + 40)
    sheet = _TableSheet(
        ax=ax,
        block_size=block_size,
        pool=_physical(tables, num_blocks, block_size),
        texts=texts,
        shade=shades(tables),
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
    key(ax, sheet.kinds, body + 22)
    ax.set(xlim=(0, PAGE), ylim=(body + 40, 0))
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
        ValueError: two lengths, or a negative count.
    """
    rows = (list(before), list(after))
    _check_counts(labels, rows)
    names = [_shorten(label, 110) for label in labels]
    gutter = max(_text_width(name, 10) for name in names) + 10
    columns = min(len(rows[0]), 16)
    cell = min((PAGE - gutter) / columns, 44.0)
    bands = cdiv(len(rows[0]), columns)
    tall = 82.0

    fig, ax = diagram(title, bands * tall + 18)
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
    key(ax, kinds, bands * tall)
    ax.set(xlim=(-2, PAGE), ylim=(bands * tall + 16, -2))
    return fig


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _kind_of(owners: int) -> str:
    if owners == 0:
        return "free"
    return "live" if owners == 1 else "shared"


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
    label, middle, tag = owner_label(owners, width - 2), x + width / 2, None
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
            outline(ax, x, y, width, 26)


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
        owners = owner_label([u[0] for u in users], PAGE - self.NAMES)
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


def _check_pool(
    owners: Sequence[Sequence[str]],
    filled: Sequence[int] | None,
    block_size: int | None,
) -> None:
    for block_id, block in enumerate(owners):
        if len(set(block)) != len(block):
            raise ValueError(f"block {block_id} names an owner twice: {block}")
    if (filled is None) != (block_size is None):
        raise ValueError("filled and block_size come together")
    if filled is None or block_size is None:
        return
    for block_id, (count, block) in enumerate(
        zip(filled, owners, strict=True)
    ):
        limit = block_size if block else 0
        if not 0 <= count <= limit:
            raise ValueError(
                f"block {block_id}: filled is {count}, outside [0, {limit}]"
            )


def _check_counts(
    labels: tuple[str, str], rows: tuple[list[int], list[int]]
) -> None:
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
