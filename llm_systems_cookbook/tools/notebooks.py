"""Notebook files as plain data: cells, their code, their syntax trees."""

import ast
import importlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from llm_systems_cookbook.nb.record import SLUG, write_atomic

MAX_COLUMNS = 79  # of a line of code or prose in a cell


class CookbookError(Exception):
    """Raised for input the reader can put right; the message says how."""


def import_extra(name: str) -> ModuleType:
    """Import a package that only the `[notebooks]` extra installs.

    Raises:
        CookbookError: the package is missing; names the extra.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CookbookError(
            f"this command needs {name} ({error}); install the package with "
            "its [notebooks] extra: pip install '.[notebooks]' in a checkout"
        ) from error


# --- Which notebooks ------------------------------------------------------


def notebook_paths(root: Path, folder: str = "notebooks") -> list[Path]:
    """Return the notebooks of a repository's folder, sorted by file name.

    Hidden files, such as an editor's copies, are left out.

    Raises:
        CookbookError: there is none.
    """
    found = (root / folder).glob("*.ipynb")
    paths = sorted(path for path in found if not path.name.startswith("."))
    if not paths:
        raise CookbookError(f"no notebooks in {root / folder}")
    return paths


def select_notebooks(root: Path, names: Sequence[str]) -> list[Path]:
    """Return the notebooks that `names` ask for; all of them without names.

    A name is a number (`02`), a stem (`02_block_allocator`), a file name or a
    path. A notebook asked for twice is returned once.

    Raises:
        CookbookError: a name fits no notebook, or several; two notebooks
            would write the same record; a stem cannot name a record.
    """
    if names:
        chosen = [_find(root, name) for name in names]
    else:
        chosen = notebook_paths(root)
    unique = list(dict.fromkeys(path.resolve() for path in chosen))
    by_stem: dict[str, Path] = {}
    for path in unique:
        if not SLUG.fullmatch(path.stem):
            raise CookbookError(
                f"{path.name}: the name of a notebook names its record, so "
                "it may hold lower-case letters, digits, _ and - only"
            )
        if by_stem.setdefault(path.stem, path) != path:
            raise CookbookError(
                f"{path} and {by_stem[path.stem]} would write the same record"
            )
    return unique


def _find(root: Path, name: str) -> Path:
    if name.endswith(".ipynb") and Path(name).is_file():
        return Path(name)
    paths = notebook_paths(root)
    exact = [path for path in paths if name in (path.stem, path.name)]
    numbered = [path for path in paths if path.stem.startswith(f"{name}_")]
    found = exact or (numbered if name.isdecimal() else [])
    if len(found) == 1:
        return found[0]
    problem = "no notebook is called" if not found else "several fit"
    choices = ", ".join(path.stem for path in found or paths)
    raise CookbookError(f"{problem} {name!r}; choose from: {choices}")


# --- What is in one ----------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One cell, as its file holds it.

    Attributes:
        index: position in the notebook, from 0.
        data: the cell's JSON object.
    """

    index: int
    data: dict[str, Any]

    @property
    def id(self) -> str:
        """The cell's id; empty when it has none."""
        cell_id = self.data.get("id")
        return cell_id if isinstance(cell_id, str) else ""

    @property
    def label(self) -> str:
        """The cell's id, or its place when it has no id."""
        return self.id or f"(cell number {self.index})"

    @property
    def is_code(self) -> bool:
        """Whether this is a code cell."""
        return self.data["cell_type"] == "code"

    @property
    def is_markdown(self) -> bool:
        """Whether this is a markdown cell."""
        return self.data["cell_type"] == "markdown"

    @property
    def metadata(self) -> dict[str, Any]:
        """The cell's metadata."""
        return self.data.get("metadata", {})

    @property
    def source(self) -> str:
        """The cell's text."""
        source = self.data["source"]
        return source if isinstance(source, str) else "".join(source)

    @property
    def lines(self) -> list[str]:
        """The cell's text, line by line."""
        return self.source.splitlines()

    @cached_property
    def tree(self) -> ast.Module | None:
        """The cell's code, magics as calls; None when it does not parse."""
        try:
            return ast.parse(without_magics(self.source))
        except SyntaxError:
            return None

    @cached_property
    def nodes(self) -> list[tuple[ast.AST, tuple[ast.AST, ...]]]:
        """Every node of the code, with the nodes around it."""
        if not self.is_code or self.tree is None:
            return []
        return list(_walk(self.tree, ()))


def without_magics(source: str) -> str:
    """Return a cell as Python: IPython turns its own syntax into calls."""
    if source.startswith("%%"):
        # The body of %%time and its like is code to look at, too.
        source = source.partition("\n")[2]
    transformer = import_extra("IPython.core.inputtransformer2")
    return transformer.TransformerManager().transform_cell(source)


def _walk(
    node: ast.AST, around: tuple[ast.AST, ...]
) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    yield node, around
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, (*around, node))


@dataclass(frozen=True)
class Notebook:
    """One notebook file, unchanged: nothing repaired, nothing filled in."""

    path: Path
    data: dict[str, Any]

    @property
    def root(self) -> Path:
        """The repository of the notebook."""
        return self.path.parent.parent

    @property
    def stem(self) -> str:
        """The file name without its ending."""
        return self.path.stem

    @cached_property
    def cells(self) -> list[Cell]:
        """The cells, in order."""
        return [Cell(*pair) for pair in enumerate(self.data["cells"])]

    @property
    def code_cells(self) -> list[Cell]:
        """The code cells, in order."""
        return [cell for cell in self.cells if cell.is_code]

    @property
    def markdown_cells(self) -> list[Cell]:
        """The markdown cells, in order."""
        return [cell for cell in self.cells if cell.is_markdown]


def read_notebook(path: Path) -> Notebook:
    """Read a notebook as it is; nothing is repaired on the way.

    Raises:
        CookbookError: the file is not a notebook of format 4, or two of its
            cells have one id. Writing would make up another.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        problem = _format_problem(data) or _id_problem(data)
    except (OSError, ValueError, RecursionError) as error:
        raise CookbookError(f"{path}: not a notebook: {error}") from error
    if problem:
        raise CookbookError(f"{path}: not a notebook: {problem}")
    return Notebook(path, data)


def _format_problem(data: object) -> str:
    if not isinstance(data, dict) or data.get("nbformat") != 4:
        return "its nbformat is not 4"
    # Unlike validate, this changes nothing: no id is made up.
    for error in import_extra("nbformat.validator").iter_validate(data):
        place = ".".join(map(str, error.absolute_path)) or "the whole"
        return f"{place}: {error.message.splitlines()[0]}"
    return ""


def _id_problem(data: dict[str, Any]) -> str:
    counts = Counter(cell.get("id") for cell in data["cells"])
    for cell_id, count in counts.items():
        if cell_id is not None and count > 1:
            return f"{count} cells have the id {cell_id!r}"
    return ""


def read_all(root: Path) -> list[Notebook]:
    """Return every notebook of a repository, in order.

    Raises:
        CookbookError: there is none, or a file is not a notebook.
    """
    return [read_notebook(path) for path in notebook_paths(root)]


def write_cells(notebook: Notebook, cells: list[dict[str, Any]]) -> None:
    """Replace a notebook's cells, in the layout that Jupyter saves."""
    nbformat = import_extra("nbformat")
    node = nbformat.from_dict(dict(notebook.data, cells=cells))
    write_atomic(notebook.path, nbformat.writes(node).rstrip("\n") + "\n")


def with_source(cell: Cell, source: str) -> dict[str, Any]:
    """Return a cell's JSON object with another text."""
    return dict(cell.data, source=source)
