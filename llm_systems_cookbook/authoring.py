"""Keep the notebooks in step with the package, and with their template."""

import ast
import difflib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from llm_systems_cookbook.runner import (
    CookbookError,
    import_extra,
    notebook_paths,
    write_atomic,
)

PACKAGE = "llm_systems_cookbook"
MAX_COLUMNS = 79

# --- Notebooks as plain data ----------------------------------------------


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
            return ast.parse(_without_magics(self.source))
        except SyntaxError:
            return None

    @cached_property
    def nodes(self) -> list[tuple[ast.AST, tuple[ast.AST, ...]]]:
        """Every node of the code, with the nodes around it."""
        if not self.is_code or self.tree is None:
            return []
        return list(_walk(self.tree, ()))


def _without_magics(source: str) -> str:
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
        CookbookError: the file is not a notebook of format 4.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CookbookError(f"{path}: not a notebook: {error}") from error
    problem = _format_problem(data)
    if problem:
        raise CookbookError(f"{path}: not a notebook: {problem}")
    return Notebook(path, data)


def _format_problem(data: object) -> str | None:
    if not isinstance(data, dict) or data.get("nbformat") != 4:
        return "its nbformat is not 4"
    if not isinstance(data.get("metadata"), dict):
        return "it has no metadata"
    if not isinstance(data.get("cells"), list):
        return "it has no list of cells"
    for index, cell in enumerate(data["cells"]):
        if not _is_cell(cell):
            return f"cell number {index} is malformed"
    return None


def _is_cell(cell: object) -> bool:
    if not isinstance(cell, dict):
        return False
    source = cell.get("source")
    if isinstance(source, list):
        is_text = all(isinstance(line, str) for line in source)
    else:
        is_text = isinstance(source, str)
    known = cell.get("cell_type") in ("code", "markdown", "raw")
    return is_text and known and isinstance(cell.get("metadata", {}), dict)


def _read_all(root: Path) -> list[Notebook]:
    return [read_notebook(path) for path in notebook_paths(root)]


def _write(notebook: Notebook, cells: list[dict[str, Any]]) -> None:
    """Replace a notebook's cells, in the layout that Jupyter saves."""
    nbformat = import_extra("nbformat")
    node = nbformat.from_dict(dict(notebook.data, cells=cells))
    write_atomic(notebook.path, nbformat.writes(node).rstrip("\n") + "\n")


def _with_source(cell: Cell, source: str) -> dict[str, Any]:
    return dict(cell.data, source=source)


# --- sync: source cells from the package ----------------------------------

MODULE = re.compile(r"[A-Za-z]\w*(\.[A-Za-z_]\w*)*")
OPENING_QUOTES = re.compile(r'\s*[rR]?("""|\'\'\')')


@dataclass(frozen=True)
class Change:
    """A text that differs from what it is derived from.

    Attributes:
        where: `notebook: cell-id`, or a file name.
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
    lines = text.splitlines()
    # From the end, so that the numbers of the lines before stay right.
    for docstring in sorted(_docstrings(node), key=_first_line, reverse=True):
        first, last = docstring.lineno - 1, docstring.end_lineno
        if last - first > 1:
            lines[first:last] = [_summary(lines[first], spec)]
    removed = len(text.splitlines()) - len(lines)
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
    for notebook in _read_all(root):
        cells, found = _synced(notebook)
        if found:
            changes += found
            rewritten.append((notebook, cells))
    if not check:
        for notebook, cells in rewritten:
            _write(notebook, cells)
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
        cells.append(_with_source(cell, new))
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


# --- badges: every link that holds the repository's slug ------------------

COLAB = "https://colab.research.google.com"
NAME = r"[A-Za-z0-9_.-]+"
COLAB_LINK = re.compile(
    rf"{re.escape(COLAB)}/github/(?P<slug>{NAME}/{NAME})"
    r"(?P<rest>/blob/[^/\s)]+/(?P<file>[^\s)\"'#?]+))"
)
INSTALL_LINK = re.compile(
    rf"(?P<before>git\+https://github\.com/){NAME}/{NAME}?"
    r"(?=\.git\b|[^A-Za-z0-9_.-]|$)"
)


def repository_slug(root: Path) -> str:
    """Return `owner/name` from `[project.urls]` of the repository.

    Raises:
        CookbookError: pyproject.toml has no such entry, or not on GitHub.
    """
    path = root / "pyproject.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        url = data["project"]["urls"]["Repository"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CookbookError(
            f"{path}: no Repository in [project.urls]: {error!r}"
        ) from error
    pattern = rf"https://github\.com/({NAME}/{NAME}?)(\.git)?/?"
    match = re.fullmatch(pattern, str(url))
    if match is None:
        raise CookbookError(
            f"{path}: Repository {url!r} is not "
            "https://github.com/<owner>/<name>"
        )
    return match.group(1)


def badge_line(slug: str, file_name: str) -> str:
    """Return the markdown of a notebook's Colab badge."""
    return (
        f"[![Open In Colab]({COLAB}/assets/colab-badge.svg)]"
        f"({COLAB}/github/{slug}/blob/main/notebooks/{file_name})"
    )


def badges(root: Path, check: bool = False) -> list[Change]:
    """Rewrite every Colab link and install URL from the repository's slug.

    Args:
        root: the repository.
        check: change nothing, only find what is stale.

    Returns:
        What was stale; a missing badge is stale.

    Raises:
        CookbookError: a link to a notebook that does not exist, or a badges
            cell that is not the first; nothing is written.
    """
    slug = repository_slug(root)
    changes, rewritten = [], []
    for notebook in _read_all(root):
        cells, found = _badged(notebook, slug)
        if found:
            changes += found
            rewritten.append((notebook, cells))
    readme = _readme_change(root, slug)
    if not check:
        for notebook, cells in rewritten:
            _write(notebook, cells)
        if readme:
            write_atomic(root / "README.md", readme.new)
    return changes + ([readme] if readme else [])


def _badged(
    notebook: Notebook, slug: str
) -> tuple[list[dict[str, Any]], list[Change]]:
    cells, changes = [], []
    if not notebook.cells or notebook.cells[0].id != "badges":
        _require_no_badges_cell(notebook)
        new = badge_line(slug, notebook.path.name)
        cells.append(_markdown_cell("badges", new))
        changes.append(Change(f"{notebook.stem}: badges", "", new, slug))
    for cell in notebook.cells:
        where = f"{notebook.stem}: {cell.label}"
        new = _badged_source(notebook, cell, slug, where)
        cells.append(_with_source(cell, new))
        if new != cell.source:
            changes.append(Change(where, cell.source, new, slug))
    return cells, changes


def _require_no_badges_cell(notebook: Notebook) -> None:
    if any(cell.id == "badges" for cell in notebook.cells):
        raise CookbookError(
            f"{notebook.stem}: badges: the badges cell is not the first"
        )


def _markdown_cell(cell_id: str, source: str) -> dict[str, Any]:
    return {
        "cell_type": "markdown",
        "id": cell_id,
        "metadata": {},
        "source": source,
    }


def _badged_source(
    notebook: Notebook, cell: Cell, slug: str, where: str
) -> str:
    if cell.index == 0 and cell.id == "badges":
        return _with_badge(cell, badge_line(slug, notebook.path.name), where)
    if cell.is_markdown:
        return _with_slug(cell.source, slug, notebook.root, where)
    if cell.id == "set-up":
        return INSTALL_LINK.sub(rf"\g<before>{slug}", cell.source)
    return cell.source


def _with_badge(cell: Cell, badge: str, where: str) -> str:
    """Return the badges cell with the one right Colab badge."""
    if not cell.is_markdown:
        raise CookbookError(f"{where}: the badges cell is not markdown")
    stale = [COLAB in line for line in cell.lines]
    place = stale.index(True) if any(stale) else 0
    pairs = zip(cell.lines, stale, strict=True)
    kept = [line for line, is_stale in pairs if not is_stale]
    return "\n".join([*kept[:place], badge, *kept[place:]])


def _with_slug(text: str, slug: str, root: Path, where: str) -> str:
    for link in COLAB_LINK.finditer(text):
        if not (root / link["file"]).is_file():
            raise CookbookError(
                f"{where}: links to {link['file']}, which does not exist"
            )
    return COLAB_LINK.sub(
        lambda link: f"{COLAB}/github/{slug}{link['rest']}", text
    )


def _readme_change(root: Path, slug: str) -> Change | None:
    path = root / "README.md"
    if not path.exists():
        return None
    old = path.read_text(encoding="utf-8")
    new = _with_slug(old, slug, root, path.name)
    return Change(path.name, old, new, slug) if new != old else None


# --- lint: the template, rule by rule -------------------------------------

SECTIONS = (
    "Problem",
    "Idea",
    "Build",
    "Measure",
    "The cost",
    "What breaks",
    "In vLLM and SGLang",
    "Exercises",
    "Recap",
    "Next",
    "References",
)
TITLE_WORDS = ("minutes", "Prerequisites", "Hardware", "Paper")
GOALS = ("You will build", "You will learn")
MIN_CODE_CELLS, MAX_CODE_CELLS = 15, 30
LONG_CELL, TOO_LONG_CELL, MAX_SOURCE_LINES = 25, 32, 75
MIN_EXERCISES, MIN_WRONG_ANSWERS = 3, 2

STEM = re.compile(r"\d{2}(_[a-z0-9]+)+")
EXERCISE_NAME = re.compile(r"[a-z][a-z0-9_]*")
ID = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
# Ids that a tool made up: cell-12, and hexadecimal with or without dashes.
MADE_UP_ID = re.compile(r"cell(-?\d+)?|[0-9a-f]{8,}|[0-9a-f]{8}(-[0-9a-f]+)+")
EDITABLE = re.compile(r"\bpip\b.*\binstall\b.*(?<![\w-])(-e|--editable)\b")
LINK_LINE = re.compile(r"\]\(|\]:|https?://|<img")
SHELL_MAGICS = ("sx", "system", "bash", "sh", "script", "cmd", "powershell")
SHELL_CELL = re.compile(rf"%%(!|{'|'.join(SHELL_MAGICS)}\b)")
LOOPS = (ast.For, ast.While, ast.ListComp, ast.GeneratorExp)

CHECK_CALLS = ("check", "check_close", "exercise")


@dataclass(frozen=True)
class Problem:
    """One violation of one rule.

    Attributes:
        notebook: stem of the notebook's file name.
        cell: id of the cell, or `notebook`.
        message: what is wrong, with the limit.
        rule: name of the rule.
        is_warning: it is shown, and fails nothing.
    """

    notebook: str
    cell: str
    message: str
    rule: str
    is_warning: bool = False

    def __str__(self) -> str:
        warning = "warning: " if self.is_warning else ""
        return f"{self.notebook}: {self.cell}: {warning}{self.message}"


# A rule yields (cell, message); without a cell it is about the notebook.
Findings = Iterator[tuple[Cell | None, str]]
Rule = Callable[[Notebook], Findings]
RULES: list[Rule] = []
WARNINGS: list[Rule] = []


def _rule(rule: Rule) -> Rule:
    RULES.append(rule)
    return rule


def _warning(rule: Rule) -> Rule:
    WARNINGS.append(rule)
    return rule


def lint(root: Path) -> list[Problem]:
    """Return every violation in every notebook of a repository.

    Raises:
        CookbookError: a file is not a notebook, or an extra is missing.
    """
    notebooks = _read_all(root)
    problems = [
        problem
        for notebook in notebooks
        for problem in lint_notebook(notebook)
    ]
    return problems + _solutions_without_notebook(root, notebooks)


def lint_notebook(notebook: Notebook) -> list[Problem]:
    """Return every violation in one notebook."""
    return [
        Problem(
            notebook.stem,
            cell.label if cell else "notebook",
            message,
            rule.__name__,
            rule in WARNINGS,
        )
        for rule in RULES + WARNINGS
        for cell, message in rule(notebook)
    ]


def _solutions_without_notebook(
    root: Path, notebooks: list[Notebook]
) -> list[Problem]:
    stems = {notebook.stem for notebook in notebooks}
    return [
        Problem(
            name,
            "notebook",
            f"solutions/{name} has no notebook",
            "solutions_have_a_notebook",
        )
        for name in _visible(root / "solutions")
        if name not in stems
    ]


def _visible(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    names = sorted(path.name for path in folder.iterdir())
    return [n for n in names if n[0] != "." and n != "__pycache__"]


# The file


@_rule
def file_name_is_a_slug(notebook: Notebook) -> Findings:
    """The file is called NN_name; the name becomes that of its record."""
    if not STEM.fullmatch(notebook.stem):
        yield None, "file name is not NN_name in lower case"


@_rule
def kernel_is_python3(notebook: Notebook) -> Findings:
    """Any Jupyter has a kernel of that name, Colab's too."""
    spec = notebook.data["metadata"].get("kernelspec")
    name = spec.get("name") if isinstance(spec, dict) else None
    if name != "python3":
        yield None, f"kernelspec name is {name!r}, expected 'python3'"


@_rule
def format_has_cell_ids(notebook: Notebook) -> Findings:
    """Cell ids came with nbformat 4.5."""
    minor = notebook.data.get("nbformat_minor")
    if not isinstance(minor, int) or minor < 5:
        yield None, f"nbformat is 4.{minor}, needs 4.5 or later"


@_rule
def no_widget_metadata(notebook: Notebook) -> Findings:
    """Saved widget state breaks the page that GitHub shows."""
    if "widgets" in notebook.data["metadata"]:
        yield None, "has widget metadata"
    for cell in notebook.cells:
        if "widgets" in cell.metadata:
            yield cell, "has widget metadata"


@_rule
def no_allowed_errors(notebook: Notebook) -> Findings:
    """An allowed error hides every other error of its cell."""
    if _allows_errors(notebook.data["metadata"]):
        yield None, "metadata allows errors"
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if "raises-exception" in tags or _allows_errors(cell.metadata):
            yield cell, "allows errors"


def _allows_errors(metadata: object) -> bool:
    if not isinstance(metadata, dict):
        return False
    return any(
        key.endswith("allow_errors") or _allows_errors(value)
        for key, value in metadata.items()
    )


# The cells


@_rule
def ids_are_present(notebook: Notebook) -> Findings:
    """Without an id a cell has no stable name."""
    for cell in notebook.cells:
        if not cell.id:
            yield cell, "has no id"


@_rule
def ids_are_unique(notebook: Notebook) -> Findings:
    """An id names one cell."""
    seen = Counter(cell.id for cell in notebook.cells if cell.id)
    for cell in notebook.cells:
        if seen[cell.id] > 1:
            yield cell, f"id is used by {seen[cell.id]} cells"


@_rule
def ids_are_meaningful(notebook: Notebook) -> Findings:
    """An id says what its cell does: words, joined by dashes."""
    for cell in notebook.cells:
        if not cell.id:
            continue
        if not ID.fullmatch(cell.id) or MADE_UP_ID.fullmatch(cell.id):
            yield cell, "id is not words in lower case joined by dashes"


@_rule
def no_outputs(notebook: Notebook) -> Findings:
    """Notebooks are committed as if never run."""
    for cell in notebook.code_cells:
        if cell.data.get("outputs"):
            yield cell, "has outputs"
        if cell.data.get("execution_count") is not None:
            yield cell, "has an execution count"


@_rule
def code_parses(notebook: Notebook) -> Findings:
    """Code that does not parse hides from every other rule."""
    for cell in notebook.code_cells:
        if cell.tree is None:
            yield cell, "does not parse as Python"


@_rule
def no_shell_lines(notebook: Notebook) -> Findings:
    """A shell line installs into another Python, or runs on one system."""
    for cell in notebook.code_cells:
        if SHELL_CELL.match(cell.source):
            yield cell, f"runs a shell: {cell.lines[0]}"
        for name, arguments in _magics(cell):
            if name == "!":
                yield cell, f"runs a shell: !{arguments}"
            elif name in SHELL_MAGICS:
                yield cell, f"runs a shell: %{name} {arguments}"


def _magics(cell: Cell) -> Iterator[tuple[str, str]]:
    """Yield (name, arguments) of every magic; the name of `!` is `!`."""
    for node, _ in cell.nodes:
        match node:
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Call(func=ast.Name(id="get_ipython")),
                    attr=method,
                ),
                args=[ast.Constant(value=first), *rest],
            ):
                if method in ("system", "getoutput"):
                    yield "!", first
                elif method == "run_line_magic":
                    second = rest[0] if rest else None
                    is_text = isinstance(second, ast.Constant)
                    yield first, str(second.value) if is_text else ""


@_rule
def no_editable_install(notebook: Notebook) -> Findings:
    """An editable install needs a checkout, which Colab has not."""
    for cell in notebook.code_cells:
        if any(EDITABLE.search(line) for line in cell.lines):
            yield cell, "installs in editable mode"


@_rule
def code_fits_the_width(notebook: Notebook) -> Findings:
    """Longer lines do not fit beside an output, or on a phone."""
    for cell in notebook.code_cells:
        for number, line in enumerate(cell.lines, start=1):
            if len(line) > MAX_COLUMNS:
                yield cell, _too_wide(number, line)


@_rule
def prose_fits_the_width(notebook: Notebook) -> Findings:
    """Prose breaks anywhere; tables, links, pictures and headings do not."""
    for cell in notebook.markdown_cells:
        for number, line in enumerate(cell.lines, start=1):
            unbreakable = line.lstrip().startswith(("|", "#"))
            if unbreakable or LINK_LINE.search(line):
                continue
            if len(line) > MAX_COLUMNS:
                yield cell, _too_wide(number, line)


def _too_wide(number: int, line: str) -> str:
    return f"line {number} has {len(line)} columns, limit {MAX_COLUMNS}"


@_rule
def code_cells_are_short(notebook: Notebook) -> Findings:
    """What does not fit on a screen is not read as one thought."""
    for cell in notebook.code_cells:
        count = _filled_lines(cell)
        if "source" not in cell.metadata and count > TOO_LONG_CELL:
            yield cell, f"has {count} lines of code, limit {TOO_LONG_CELL}"


@_warning
def code_cells_are_not_long(notebook: Notebook) -> Findings:
    """Beyond this length, a cell should say why it is not two."""
    for cell in notebook.code_cells:
        count = _filled_lines(cell)
        is_source = "source" in cell.metadata
        if not is_source and LONG_CELL < count <= TOO_LONG_CELL:
            yield cell, f"has {count} lines of code, aim for {LONG_CELL}"


def _filled_lines(cell: Cell) -> int:
    return sum(bool(line.strip()) for line in cell.lines)


@_rule
def source_cells_are_short(notebook: Notebook) -> Findings:
    """A longer class is shown method by method, not pasted."""
    for cell in notebook.code_cells:
        count = len(cell.lines)
        if "source" in cell.metadata and count > MAX_SOURCE_LINES:
            yield cell, f"has {count} lines, limit {MAX_SOURCE_LINES}"


@_rule
def enough_code_cells(notebook: Notebook) -> Findings:
    """Fewer cells would each do too much."""
    count = len(notebook.code_cells)
    if count < MIN_CODE_CELLS:
        yield None, f"has {count} code cells, at least {MIN_CODE_CELLS}"


@_rule
def not_too_many_code_cells(notebook: Notebook) -> Findings:
    """Stubs, graders and the fixed cells come on top."""
    fixed = [*_stubs(notebook), *_graders(notebook), *_frame(notebook)]
    excepted = {cell.index for cell in fixed}
    count = len({c.index for c in notebook.code_cells} - excepted)
    if count > MAX_CODE_CELLS:
        yield (
            None,
            f"has {count} code cells beside exercises and the fixed ones, "
            f"at most {MAX_CODE_CELLS}",
        )


def _frame(notebook: Notebook) -> list[Cell]:
    fixed = ("s.summary()", "s.save()")
    return [
        cell
        for cell in notebook.code_cells
        if cell.id == "set-up" or cell.source.strip() in fixed
    ]


# Names of checks and measures


@dataclass(frozen=True)
class Call:
    """A call of a method of the notebook session.

    Attributes:
        method: name of the method.
        name: the name it records; None when it is no literal.
        is_f_string: the name is an f-string.
        in_loop: the call stands in a loop.
    """

    method: str
    name: str | None
    is_f_string: bool
    in_loop: bool


def _session_calls(cell: Cell, *methods: str) -> list[Call]:
    """Return the calls of the session's methods in a cell, in order."""
    calls = []
    for node, around in cell.nodes:
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="s"), attr=method)
            ) if method in methods:
                in_loop = any(isinstance(outer, LOOPS) for outer in around)
                name = _name_argument(node)
                literal = name.value if _is_text(name) else None
                is_f_string = isinstance(name, ast.JoinedStr)
                calls.append(Call(method, literal, is_f_string, in_loop))
    return calls


def _name_argument(call: ast.Call) -> ast.expr | None:
    if call.args:
        return call.args[0]
    named = [word.value for word in call.keywords if word.arg == "name"]
    return named[0] if named else None


def _is_text(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@_rule
def check_names_are_literal(notebook: Notebook) -> Findings:
    """A name that the code makes up cannot be looked for."""
    for cell in notebook.code_cells:
        for call in _session_calls(cell, *CHECK_CALLS):
            if call.name is None:
                yield cell, f"s.{call.method}: its name is not a literal"


@_rule
def measure_names_are_literal(notebook: Notebook) -> Findings:
    """An f-string names the measures of a loop, and nothing else."""
    for cell in notebook.code_cells:
        for call in _session_calls(cell, "measure"):
            loop_name = call.is_f_string and call.in_loop
            if call.name is None and not loop_name:
                yield cell, "s.measure: its name is not a literal"


@_rule
def check_names_are_unique(notebook: Notebook) -> Findings:
    """The second record of a name would replace the first."""
    yield from _repeated(notebook, *CHECK_CALLS)


@_rule
def measure_names_are_unique(notebook: Notebook) -> Findings:
    """The second record of a name would replace the first."""
    yield from _repeated(notebook, "measure")


def _repeated(notebook: Notebook, *methods: str) -> Findings:
    seen: set[str] = set()
    for cell in notebook.code_cells:
        for call in _session_calls(cell, *methods):
            if call.name in seen:
                yield cell, f"s.{call.method}: {call.name!r} is used before"
            if call.name is not None:
                seen.add(call.name)


# The template, from top to bottom


@_rule
def first_cell_holds_the_badges(notebook: Notebook) -> Findings:
    """The badge is the way in; `cookbook badges` writes it."""
    first = notebook.cells[0] if notebook.cells else None
    if first is None or first.id != "badges" or not first.is_markdown:
        yield first, "first cell is not the markdown cell 'badges'"


@_rule
def second_cell_is_the_title(notebook: Notebook) -> Findings:
    """The title says what it takes, in time and otherwise."""
    cell = notebook.cells[1] if len(notebook.cells) > 1 else None
    if cell is None or not _is_title(cell):
        yield cell, "second cell is not a markdown title ('# …')"
        return
    for word in TITLE_WORDS:
        if word not in cell.source:
            yield cell, f"title cell does not say {word!r}"


def _is_title(cell: Cell) -> bool:
    return cell.is_markdown and cell.source.startswith("# ")


@_rule
def goals_follow_the_title(notebook: Notebook) -> Findings:
    """What you will build and learn comes before any code."""
    cells = [cell for cell in notebook.cells[1:3] if cell.is_markdown]
    if not any(all(goal in c.source for goal in GOALS) for c in cells):
        yield (
            None,
            f"neither the title nor the next cell says {GOALS[0]!r} and "
            f"{GOALS[1]!r}",
        )


@_rule
def set_up_comes_before_the_problem(notebook: Notebook) -> Findings:
    """The first code cell, `set-up`, makes the rest runnable."""
    code = notebook.code_cells
    if not code or code[0].id != "set-up":
        yield None, "first code cell is not 'set-up'"
        return
    headings = _headings(notebook)
    if headings and headings[0][0].index < code[0].index:
        yield code[0], "comes after the first section"


@_rule
def set_up_installs_when_needed(notebook: Notebook) -> Findings:
    """Colab installs the package; a reader who has it keeps it."""
    for cell in notebook.code_cells:
        if cell.id != "set-up":
            continue
        installs = list(_pip_installs(cell))
        if not installs:
            yield cell, "has no %pip install"
        elif not all(installs):
            yield cell, "runs %pip install outside an if or a try"


def _pip_installs(cell: Cell) -> Iterator[bool]:
    """Yield, for every %pip install, whether something guards it."""
    for node, around in cell.nodes:
        if isinstance(node, ast.Constant) and node.value == "pip":
            yield any(isinstance(n, ast.If | ast.Try) for n in around)


@_rule
def bootstrap_names_the_notebook(notebook: Notebook) -> Findings:
    """The session's name becomes the record's."""
    calls = [
        (cell, node)
        for cell in notebook.code_cells
        for node, _ in cell.nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "bootstrap"
    ]
    if len(calls) != 1 or calls[0][0].id != "set-up":
        yield None, "bootstrap is not called once, in the set-up cell"
        return
    cell, call = calls[0]
    first = call.args[0] if call.args else None
    if not _is_text(first) or first.value != notebook.stem:
        yield cell, f"bootstrap is not given {notebook.stem!r}"


def _headings(notebook: Notebook) -> list[tuple[Cell, str]]:
    """Return the sections: (cell, text of the heading up to a colon)."""
    headings = []
    for cell in notebook.markdown_cells:
        fenced = False
        for line in cell.lines:
            if line.startswith("```"):
                fenced = not fenced
            elif not fenced and line.startswith("## "):
                text = line[3:].partition(":")[0].strip()
                headings.append((cell, text))
    return headings


@_rule
def sections_are_present(notebook: Notebook) -> Findings:
    """Every notebook answers the same questions."""
    texts = [text for _, text in _headings(notebook)]
    for section in SECTIONS:
        if section not in texts:
            yield None, f"section {section!r} is missing"


@_rule
def sections_are_known(notebook: Notebook) -> Findings:
    """Smaller steps are headings of the third level."""
    for cell, text in _headings(notebook):
        if text not in SECTIONS:
            yield cell, f"section {text!r} is not in the template"


@_rule
def sections_are_in_order(notebook: Notebook) -> Findings:
    """The order is the template's, and each section comes once."""
    last = -1
    for cell, text in _headings(notebook):
        if text not in SECTIONS:
            continue
        place = SECTIONS.index(text)
        if place == last:
            yield cell, f"section {text!r} is repeated"
        elif place < last:
            yield cell, f"section {text!r} comes after {SECTIONS[last]!r}"
        last = place


@_rule
def problem_has_a_picture(notebook: Notebook) -> Findings:
    """The problem is seen before it is explained away."""
    starts = {text: cell for cell, text in reversed(_headings(notebook))}
    if "Problem" not in starts:
        return
    later = [c.index for t, c in starts.items() if t != "Problem"]
    begin = starts["Problem"].index
    end = min([i for i in later if i > begin], default=len(notebook.cells))
    if not any(_draws(cell) for cell in notebook.cells[begin:end]):
        yield starts["Problem"], "the section has no picture"


def _draws(cell: Cell) -> bool:
    marks = ("plots.", "plt.") if cell.is_code else ("![", "<img")
    return any(mark in cell.source for mark in marks)


@_rule
def ends_with_summary_and_save(notebook: Notebook) -> Findings:
    """What was checked is shown, and then recorded."""
    expected = ["s.summary()", "s.save()"]
    last = notebook.cells[-2:]
    sources = [cell.source.strip() for cell in last if cell.is_code]
    if sources != expected:
        yield None, "last two cells are not s.summary() and s.save()"


# Exercises


def _stubs(notebook: Notebook) -> list[Cell]:
    return [c for c in notebook.code_cells if "exercise" in c.metadata]


def _graders(notebook: Notebook) -> list[Cell]:
    return [c for c in notebook.code_cells if _session_calls(c, "exercise")]


def _exercise_names(notebook: Notebook) -> list[str]:
    """Return the names that can be file names, in order."""
    names = [cell.metadata["exercise"] for cell in _stubs(notebook)]
    return [name for name in names if _is_exercise_name(name)]


def _is_exercise_name(name: object) -> bool:
    return isinstance(name, str) and bool(EXERCISE_NAME.fullmatch(name))


@_rule
def enough_exercises(notebook: Notebook) -> Findings:
    """What was read is not yet understood."""
    count = len(_stubs(notebook))
    if count < MIN_EXERCISES:
        yield None, f"has {count} exercises, at least {MIN_EXERCISES}"


@_rule
def exercise_names_are_slugs(notebook: Notebook) -> Findings:
    """The name of an exercise names the files of its answers."""
    for cell in _stubs(notebook):
        name = cell.metadata["exercise"]
        if not _is_exercise_name(name):
            yield cell, f"exercise {name!r} is not a name in lower case"


@_rule
def stubs_are_not_implemented(notebook: Notebook) -> Findings:
    """An exercise counts as to do while its stub says so."""
    for cell in _stubs(notebook):
        if not any(_raises_not_implemented(node) for node, _ in cell.nodes):
            yield cell, "stub does not raise NotImplementedError"


def _raises_not_implemented(node: ast.AST) -> bool:
    if not isinstance(node, ast.Raise):
        return False
    raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"


@_rule
def graders_follow_their_stubs(notebook: Notebook) -> Findings:
    """The next code cell after a stub grades it."""
    after = {a.index: b for a, b in pairwise(notebook.code_cells)}
    for stub in _stubs(notebook):
        name, grader = stub.metadata["exercise"], after.get(stub.index)
        calls = _session_calls(grader, "exercise") if grader else []
        if name not in [call.name for call in calls]:
            yield stub, f"next code cell does not call s.exercise({name!r})"


@_rule
def graders_have_a_stub(notebook: Notebook) -> Findings:
    """A grader without a stub has nothing to grade."""
    names = [cell.metadata["exercise"] for cell in _stubs(notebook)]
    for cell in _graders(notebook):
        for call in _session_calls(cell, "exercise"):
            if call.name is not None and call.name not in names:
                yield cell, f"no stub has the exercise {call.name!r}"


@_rule
def exercises_have_a_solution(notebook: Notebook) -> Findings:
    """A grader that no answer passes is broken."""
    files = _answers(notebook)
    for name in _exercise_names(notebook):
        if f"{name}.py" not in files:
            yield None, f"no solutions/{notebook.stem}/{name}.py"


@_rule
def exercises_have_wrong_answers(notebook: Notebook) -> Findings:
    """A grader that every answer passes is broken, too."""
    for name in _exercise_names(notebook):
        count = sum(_is_wrong_answer(f, name) for f in _answers(notebook))
        if count < MIN_WRONG_ANSWERS:
            yield (
                None,
                f"solutions/{notebook.stem}: {count} wrong answers "
                f"({name}.wrong_*.py), at least {MIN_WRONG_ANSWERS}",
            )


@_rule
def answers_have_an_exercise(notebook: Notebook) -> Findings:
    """An answer to no question is never run."""
    names = _exercise_names(notebook)
    for file in _answers(notebook):
        known = any(
            file == f"{name}.py" or _is_wrong_answer(file, name)
            for name in names
        )
        if not known:
            yield None, f"solutions/{notebook.stem}/{file} has no exercise"


def _answers(notebook: Notebook) -> list[str]:
    return _visible(notebook.root / "solutions" / notebook.stem)


def _is_wrong_answer(file: str, name: str) -> bool:
    return file.startswith(f"{name}.wrong_") and file.endswith(".py")
