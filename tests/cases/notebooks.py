"""Run a notebook's cells in this process, with some of them replaced."""

import ast
import dis
import linecache
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import CodeType
from unittest.mock import patch

import nbformat
from IPython.core.inputtransformer2 import TransformerManager

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# Cells that simulate, measure or compile for seconds. `make run` and nbmake
# run them; where a notebook runs for another reason they are left out.
LONG = {
    "05_memory_waste": {"fig2-run", "fig2-sensitivity", "traces-run"},
    "06_paged_kv_cache": {"times", "block-sizes"},
    "07_triton_paged_attention": {
        "variants-check",
        "compile",
        "times-run",
        "cost",
    },
    "08_continuous_batching": {
        "measure-engines",
        "measure-long",
        "load",
        "cost-scheduling",
    },
    "09_paged_engine": {
        "random-check",
        "float32",
        "compare",
        "short-memory",
        "crossover-run",
        "watermark-run",
        "block-sizes",
    },
    "10_paging_for_free": {
        "same-tokens",
        "ample",
        "short-memory",
        "large",
        "peaks",
        "exactness",
    },
}

CHECKING = ("check", "check_close")  # methods of a session


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    cells = nbformat.read(path, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def run_cell(source: str, namespace: dict, name: str) -> None:
    code = TransformerManager().transform_cell(source)
    # Triton reads the source of its kernels, as it can in a kernel of Jupyter.
    linecache.cache[name] = len(code), None, code.splitlines(True), name
    exec(compile(code, name, "exec"), namespace)


def names_of(source: str) -> tuple[set[str], set[str]]:
    """Return the names that a cell binds, and those it needs from others.

    What it binds before it reads is its own, such as the name of a loop. What
    its functions read counts as its own where the cell binds it anywhere.
    """
    whole = compile(TransformerManager().transform_cell(source), "", "exec")
    bound, needed, inner = set(), set(), set()
    for name, is_bound in _uses(whole):
        if is_bound:
            bound.add(name)
        elif name not in bound:
            needed.add(name)
    codes = [whole]
    while codes:
        nested = [c for c in codes.pop().co_consts if isinstance(c, CodeType)]
        inner |= {
            n for c in nested for n, is_bound in _uses(c) if not is_bound
        }
        codes += nested
    return bound, needed | (inner - bound)


def _uses(code: CodeType) -> Iterator[tuple[str, bool]]:
    """Yield the global names of compiled code in order; True if bound."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_NAME", "LOAD_GLOBAL", "STORE_NAME"):
            yield step.argval, step.opname == "STORE_NAME"


def short_cells(path: Path) -> list[nbformat.NotebookNode]:
    """Return the cells that are not `LONG`, and need nothing of those."""
    kept: list[nbformat.NotebookNode] = []
    missing: set[str] = set()
    for cell in code_cells(path):
        bound, read = names_of(cell.source)
        if cell.id in LONG.get(path.stem, ()) or read & missing:
            missing |= bound
        else:
            # Bound again, a name is there again.
            missing -= bound
            kept.append(cell)
    return kept


def cells_that_exercises_need(path: Path) -> list[nbformat.NotebookNode]:
    """Return the exercises' cells, and those that bind what they read."""
    cells = exercise_cells(path).values()
    return needed_cells(path, {c.id for part in cells for c in part})


def needed_cells(path: Path, ours: set[str]) -> list[nbformat.NotebookNode]:
    """Return the cells of these ids, and those that bind what they read.

    What is left out measures, draws and checks: minutes, in each process.
    Names are seen, changes are not: a cell that only changes an object
    (`x.append(1)`, `x[0] = 1`) is left out, and none of ours may need one.
    """
    kept: list[nbformat.NotebookNode] = []
    missing: set[str] = set()
    for cell in reversed(code_cells(path)):
        bound, read = names_of(cell.source)
        if cell.id in ours or bound & missing:
            # A name stays missing: this cell may only bind it again.
            missing |= read
            kept.insert(0, cell)
    return kept


def exercise_cells(path: Path) -> dict[str, list[nbformat.NotebookNode]]:
    """Return, by exercise, its stub cell and the cells up to its grading."""
    found: dict[str, list[nbformat.NotebookNode]] = {}
    current = None
    for cell in code_cells(path):
        current = cell.metadata.get("exercise", current)
        if current is None:
            continue
        found.setdefault(current, []).append(cell)
        if "s.exercise(" in cell.source:
            current = None
    return found


def example_of(grading: str, grader: str) -> str:
    """Return a grader's statements up to its first assert: the example."""
    tree = ast.parse(grading)
    function = next(
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == grader
    )
    kinds = [isinstance(node, ast.Assert) for node in function.body]
    body = function.body[: kinds.index(True) + 1]
    return "\n".join(ast.unparse(node) for node in body)


class CheckFailed(BaseException):
    """Ends a cell at its first failed check; no cell may catch it."""


def stopping(check: Callable[..., bool]) -> Callable[..., bool]:
    """Return a session's method that checks, and that ends the cell."""

    def checked(self: object, name: str, *rest: object, **named: object):
        if not check(self, name, *rest, **named):
            raise CheckFailed(name)
        return True

    return checked


def first_failed_check(path: Path) -> str | None:
    """Return the first failed check. Nothing runs after it."""
    session = import_module("llm_systems_cookbook.nb").Session
    methods = {n: stopping(getattr(session, n)) for n in CHECKING}
    namespace: dict = {"__name__": "__main__"}
    with patch.multiple(session, **methods):
        for cell in code_cells(path):
            try:
                run_cell(cell.source, namespace, f"{path.stem}:{cell.id}")
            except CheckFailed as failed:
                return str(failed)
    return None
