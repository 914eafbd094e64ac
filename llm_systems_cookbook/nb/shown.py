"""What a notebook shows at the end of a cell: source code, and a table.

Each reads as plain text and as HTML.
"""

import html
import inspect
import textwrap
from collections.abc import Sequence
from typing import NamedTuple


class Source:
    """Source code that prints as it is, also on an HTML page.

    Attributes:
        text: the code.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        style = "font-family: monospace; text-align: left"
        return f'<pre style="{style}">{html.escape(self.text)}</pre>'


def source_of(obj: object) -> str:
    """Return the source of a class, function, method or property.

    Raises:
        TypeError: it has no Python source, such as a built-in.
        OSError: the source is not available.
    """
    if isinstance(obj, property):
        obj = obj.fget
    return textwrap.dedent(inspect.getsource(obj)).rstrip()


class Row(NamedTuple):
    """One line of a summary."""

    kind: str
    name: str
    result: str


class Summary:
    """A table of a notebook's records, as plain text and as HTML.

    Attributes:
        title: the notebook and its counts.
        rows: one per check, measure and exercise.
        conditions: the line that says what it ran on.
    """

    def __init__(
        self, title: str, rows: Sequence[Row], conditions: str
    ) -> None:
        self.title = title
        self.rows = rows
        self.conditions = conditions

    def __repr__(self) -> str:
        rows = [_HEADER, *self.rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width)
                for cell, width in zip(row, widths, strict=True)
            ).rstrip()
            for row in rows
        ]
        return "\n".join([self.title, *lines, self.conditions])

    def _repr_html_(self) -> str:
        # No colour of its own: the page's text and background show through,
        # light or dark.
        rows = [_html_row("th", _HEADER)]
        rows += [_html_row("td", row) for row in self.rows]
        body = "\n".join(rows)
        return (
            f"<p>{html.escape(self.title)}</p>\n"
            f"<table>\n{body}\n</table>\n"
            f"<p><small>{html.escape(self.conditions)}</small></p>"
        )


_HEADER = Row("what", "name", "result")


def _html_row(tag: str, row: Row) -> str:
    style = 'style="text-align: left"'
    cells = [f"<{tag} {style}>{html.escape(t)}</{tag}>" for t in row]
    return f"<tr>{''.join(cells)}</tr>"
