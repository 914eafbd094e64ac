"""Keep the notebooks in step with the package they show."""

import ast
import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_systems_cookbook.tools.notebooks import (
    MAX_COLUMNS,
    CookbookError,
    Notebook,
    read_all,
    with_source,
    write_cells,
)

PACKAGE = "llm_systems_cookbook"

MODULE = re.compile(r"[A-Za-z]\w*(\.[A-Za-z_]\w*)*")
OPENING_QUOTES = re.compile(r'\s*[rR]?("""|\'\'\')')


@dataclass(frozen=True)
class Change:
    """A cell that differs from what it is derived from.

    Attributes:
        where: `notebook: cell-id`.
        old: the text as it is.
        new: the text as it should be.
        derived_from: what `new` comes from.
    """

    where: str
    old: str
    new: str
    derived_from: str

    def diff(self) -> str:
        """Return a unified diff from the old text to the new one."""
        lines = difflib.unified_diff(
            self.old.splitlines(),
            self.new.splitlines(),
            self.where,
            self.derived_from,
            lineterm="",
        )
        return "\n".join(lines)


def derived_source(root: Path, spec: str) -> str:
    """Return the text of a source cell, from the package's source files.

    Each docstring is cut to its first line. The code above a definition, its
    comments too, stays behind; its decorators come along.

    Args:
        root: the repository.
        spec: module below the package, a colon, and names of classes or
            functions at the module's top level, separated by commas:
            `"memory.sequence_table:BlockCopy,SequenceTable"`.

    Raises:
        CookbookError: unknown module or name, or a line that is too long.
    """
    module, colon, names = spec.partition(":")
    if not colon or not MODULE.fullmatch(module):
        raise CookbookError(f"source {spec!r} is not module:Name[,Name…]")
    path = _module_file(root, module)
    text = path.read_text(encoding="utf-8")
    definitions = _definitions(ast.parse(text, filename=str(path)))
    parts = []
    for name in names.split(","):
        node = definitions.get(name.strip())
        if node is None:
            known = ", ".join(definitions) or "none"
            raise CookbookError(
                f"{PACKAGE}.{module} has no class or function "
                f"{name.strip()!r} at its top level; it has: {known}"
            )
        parts.append(_shortened(text, node, f"{module}:{name.strip()}"))
    return "\n\n\n".join(parts)


Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _module_file(root: Path, module: str) -> Path:
    base = root.joinpath(PACKAGE, *module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    raise CookbookError(f"no module {PACKAGE}.{module} in {root}")


def _definitions(tree: ast.Module) -> dict[str, Definition]:
    return {
        node.name: node for node in tree.body if isinstance(node, Definition)
    }


def _shortened(text: str, node: Definition, spec: str) -> str:
    lines = text.split("\n")
    # From the end, so that the numbers of the lines before stay right.
    for docstring in sorted(_docstrings(node), key=_first_line, reverse=True):
        first, last = docstring.lineno - 1, docstring.end_lineno
        if last - first > 1:
            lines[first:last] = [_summary(lines[first], spec)]
    removed = len(text.split("\n")) - len(lines)
    start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    result = lines[start - 1 : node.end_lineno - removed]
    for line in result:
        if len(line) > MAX_COLUMNS:
            raise CookbookError(
                f"{spec}: with its docstring cut to one line, this one has "
                f"{len(line)} columns, limit {MAX_COLUMNS}: {line.strip()}"
            )
    return "\n".join(result)


def _first_line(node: ast.expr) -> int:
    return node.lineno


def _docstrings(definition: Definition) -> list[ast.expr]:
    documented = [
        node
        for node in ast.walk(definition)
        if isinstance(node, Definition) and ast.get_docstring(node) is not None
    ]
    return [node.body[0].value for node in documented]


def _summary(line: str, spec: str) -> str:
    """Return a docstring's first line, closed."""
    opening = OPENING_QUOTES.match(line)
    if opening is None or not line[opening.end() :].strip():
        raise CookbookError(
            f"{spec}: a docstring has no summary on its first line: "
            f"{line.strip()!r}"
        )
    quotes = opening.group(1)
    text = line.rstrip()
    # A closing quote of the text would run into the closing quotes.
    space = " " if text.endswith(quotes[0]) else ""
    return text + space + quotes


def sync(root: Path, check: bool = False) -> list[Change]:
    """Fill every source cell of the notebooks from the package.

    Args:
        root: the repository.
        check: change nothing, only find what differs.

    Returns:
        What differed, cell by cell.

    Raises:
        CookbookError: a cell names an unknown source; nothing is written.
    """
    changes, rewritten = [], []
    for notebook in read_all(root):
        cells, found = _synced(notebook)
        if found:
            changes += found
            rewritten.append((notebook, cells))
    if not check:
        for notebook, cells in rewritten:
            write_cells(notebook, cells)
    return changes


def _synced(
    notebook: Notebook,
) -> tuple[list[dict[str, Any]], list[Change]]:
    cells, changes = [], []
    for cell in notebook.cells:
        spec = cell.metadata.get("source")
        if not cell.is_code or spec is None:
            cells.append(cell.data)
            continue
        where = f"{notebook.stem}: {cell.label}"
        new = _derived_for(notebook.root, spec, where)
        cells.append(with_source(cell, new))
        if new != cell.source:
            changes.append(Change(where, cell.source, new, spec))
    return cells, changes


def _derived_for(root: Path, spec: object, where: str) -> str:
    if not isinstance(spec, str):
        raise CookbookError(f"{where}: source {spec!r} is not a text")
    try:
        return derived_source(root, spec)
    except CookbookError as error:
        raise CookbookError(f"{where}: {error}") from error
