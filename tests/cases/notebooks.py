"""Run a notebook's cells in this process, with some of them replaced."""

import ast
import linecache
import symtable
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    cells = nbformat.read(path, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def run_cell(source: str, namespace: dict, name: str) -> None:
    code = TransformerManager().transform_cell(source)
    # Triton reads the source of its kernels, as it can in a kernel of Jupyter.
    linecache.cache[name] = len(code), None, code.splitlines(True), name
    exec(compile(code, name, "exec"), namespace)


def names_of(source: str) -> tuple[set[str], set[str]]:
    """Return the names that a cell binds, and those it reads."""
    code = TransformerManager().transform_cell(source)
    whole = symtable.symtable(code, "cell", "exec")
    bound = {
        symbol.get_name()
        for symbol in whole.get_symbols()
        if symbol.is_assigned() or symbol.is_imported()
    }
    read, tables = set(), [whole]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        read |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced()
            and (table is whole or symbol.is_global())
        }
    return bound, read


def cells_that_exercises_need(path: Path) -> list[nbformat.NotebookNode]:
    """Return the exercises' cells, and those that bind what they read.

    What is left out measures, draws and checks: minutes, in each process.
    Names are seen, changes are not: a cell that only changes an object
    (`x.append(1)`, `x[0] = 1`) is left out, and no exercise may need one.
    """
    ours = {c.id for cells in exercise_cells(path).values() for c in cells}
    kept: list[nbformat.NotebookNode] = []
    missing: set[str] = set()
    for cell in reversed(code_cells(path)):
        bound, read = names_of(cell.source)
        if cell.id in ours or bound & missing:
            # A name bound here may have been bound before, and changed here.
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


def failed_check(namespace: dict) -> str | None:
    session = namespace.get("s")
    if session is None:
        return None
    record = session._as_dict("incomplete")["checks"]
    failed = [check["name"] for check in record if check["status"] == "failed"]
    return failed[0] if failed else None


def first_failed_check(path: Path) -> str | None:
    """Return the first failed check, also when its cell raises after it."""
    namespace: dict = {"__name__": "__main__"}
    for cell in code_cells(path):
        try:
            run_cell(cell.source, namespace, f"{path.stem}:{cell.id}")
        except Exception:
            if failed_check(namespace) is None:
                raise
        if failed_check(namespace) is not None:
            return failed_check(namespace)
    return None
