"""No assert does any work: `python -O` leaves every assert out.

`bootstrap` refuses such an interpreter. But code is copied out of notebooks
and the package is imported without them, and there a lost `append` would be a
wrong result that nobody is told of.
"""

import ast
from collections.abc import Iterator

import pytest
from cases.notebooks import NOTEBOOKS, ROOT, code_cells
from IPython.core.inputtransformer2 import TransformerManager

FOLDERS = ("llm_systems_cookbook", "solutions")

# What changes something: of the package, of the notebooks and of Python. A
# grader may call the reader's function in an assert, unless it is named here
# because a later line depends on what it changed.
CHANGES = {
    "abort",
    "add",
    "add_",
    "add_request",
    "admit",
    "advance",
    "alloc",
    "allocate",
    "append",
    "clear",
    "copy_",
    "copy_on_write",
    "discard",
    "extend",
    "fill_",
    "fork",
    "fork_sequence",
    "free",
    "generate",
    "grow",
    "grow_all",
    "incref",
    "insert",
    "next",
    "pop",
    "popleft",
    "put",
    "release",
    "remove",
    "reserve",
    "schedule",
    "send",
    "setdefault",
    "sort",
    "step",
    "swap_in",
    "swap_out",
    "take",
    "truncate",
    "update",
    "write",
    "write_kv",
}


def name_of(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def is_not_refused(node: ast.expr) -> bool:
    """Tell `not raises(...)`: a call that is not refused has its effect."""
    return (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.Not)
        and isinstance(node.operand, ast.Call)
        and name_of(node.operand.func) == "raises"
    )


def effects(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of what the asserts of a source change."""
    for statement in ast.walk(ast.parse(source)):
        if not isinstance(statement, ast.Assert):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.NamedExpr):
                yield node.lineno, f"{node.target.id} :="
            if isinstance(node, ast.Call) and name_of(node.func) in CHANGES:
                yield node.lineno, name_of(node.func)
            if is_not_refused(node):
                yield node.lineno, "not raises"


def sources() -> Iterator[tuple[str, str]]:
    """Yield what holds our code, with its name."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text("utf-8")
    for path in NOTEBOOKS:
        for cell in code_cells(path):
            code = TransformerManager().transform_cell(cell.source)
            yield f"{path.name}, cell {cell.id}", code


def test_no_assert_does_any_work():
    found = [
        f"{where}, line {line}: {what}"
        for where, source in sources()
        for line, what in effects(source)
    ]
    assert not found, "bind the result to a name first:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("assert table.append(allocator) is None", ["append"]),
        ("def f():\n    assert (n := 1) == 1", ["n :="]),
        ("assert [a.alloc() for _ in x], 'none'", ["alloc"]),
        ("assert ok, pool.pop()", ["pop"]),
        ("assert fork_sequence(table, a).length", ["fork_sequence"]),
        ("assert not raises(OutOfBlocks, a.alloc)", ["not raises"]),
        ("fork = table.append(a)\nassert fork is None", []),
        ("assert grown(table) and a.refcount(0) == 1", []),
        ("assert raises(OutOfBlocks, a.alloc)", []),
    ],
)
def test_an_effect_in_an_assert_is_found(source, what):
    assert [name for _, name in effects(source)] == what
