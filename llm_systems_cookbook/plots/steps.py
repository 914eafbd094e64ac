"""What a kernel reads: its programs, step by step."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llm_systems_cookbook.plots.diagram import (
    PAGE,
    diagram,
    key,
    owner_label,
    shades,
)
from llm_systems_cookbook.plots.style import (
    _MUTED,
    _SMALL,
    WASTE,
    _box,
    _look,
    _shorten,
    _text,
    _text_on,
    _text_width,
    _waste,
)

_STEP_WORDS = {
    "first": "read for the first time",
    "again": "read again for the same KV head",
}


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
        ValueError: a step without a block.
    """
    _check_programs(programs)
    names = [_shorten(name, 170) for name in programs]
    gutter = max(_text_width(name, _SMALL) for name in names) + 10
    num_steps = max(1, *(len(steps) for _, _, steps in programs.values()))
    cell = min((PAGE - gutter) / num_steps, 76.0)
    shade = shades({sequence for sequence, _, _ in programs.values()})
    bottom = 18 + 22.0 * len(names)

    fig, ax = diagram(title, bottom + 26)
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
    key(ax, kinds, bottom + 6, _STEP_WORDS)
    ax.set(xlim=(0, PAGE), ylim=(bottom + 24, 0))
    return fig


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
    words = owner_label([str(block_id) for block_id in ids], width - 4)
    tag, ink = colour if again else None, _text_on(colour)
    _text(ax, x + width / 2, y + 9, words, "center", color=ink, tag=tag)


def _check_programs(
    programs: Mapping[str, tuple[str, int, Sequence[Sequence[int]]]],
) -> None:
    for name, (_, _, steps) in programs.items():
        for step, ids in enumerate(steps, start=1):
            if not ids:
                raise ValueError(f"{name}: step {step} reads no block")
