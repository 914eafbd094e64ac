"""Who imports whom: nobody upward, nothing in a circle.

Imports are read from the source, those inside functions and for type
checkers too, so an import that seldom runs counts as well.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases.notebooks import NOTEBOOKS, ROOT, code_cells

PACKAGE = "llm_systems_cookbook"
FILES = sorted((ROOT / PACKAGE).rglob("*.py"))

# Lowest first: a room may import from those on lower floors, and from its
# own. Two rooms on one floor do not know each other.
FLOORS = (
    {"validate", "__init__"},
    {"workloads", "plots"},
    {"memory"},
    {"attention", "models"},
    {"serving", "nb"},
    {"tools"},
)
# Narrower than its floor: all that these rooms may know of others.
KNOWS = {
    "plots": {"validate"},
    "memory": {"validate", "workloads"},
    "models": {"validate"},
    "nb": {"__init__", "validate", "attention.backends"},
    "tools": {
        "__init__",
        "validate",
        "workloads",
        "memory",
        "attention",
        "models",
        "serving",
        "nb.environment",
        "nb.record",
        "nb.values",
    },
}
LEAVES_OUT = {  # module, or room: libraries that it never imports
    "memory": {"torch", "triton", "numba"},
    "serving.scheduler": {"torch", "triton", "numba"},
    "plots": {"torch", "triton", "numba"},
    "workloads": {"torch", "triton", "numba"},
}


def module_of(path: Path, top: Path) -> str:
    """Return a file's module below the package: "memory.paged"."""
    parts = path.relative_to(top).with_suffix("").parts
    return ".".join(parts)


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield what a file imports, as dotted names, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_of_files(top: Path) -> dict[str, set[str]]:
    """Return, by module, the package's modules that its file imports."""
    files = {module_of(path, top): path for path in top.rglob("*.py")}
    return {
        name: {
            found
            for target in imported(ast.parse(path.read_text("utf-8")))
            if (found := resolved(target, files)) is not None
        }
        - {name}
        for name, path in files.items()
    }


def resolved(target: str, files: dict[str, Path]) -> str | None:
    """Return the file that an imported name stands in; None if not ours."""
    package, _, rest = target.partition(".")
    if package != PACKAGE:
        return None
    parts = rest.split(".") if rest else []
    while parts:
        for name in (".".join(parts), ".".join([*parts, "__init__"])):
            if name in files:
                return name
        parts.pop()
    return "__init__"


def room(module: str) -> str:
    return module.partition(".")[0]


def floor(module: str) -> int:
    (found,) = [i for i, rooms in enumerate(FLOORS) if room(module) in rooms]
    return found


def climbs(graph: dict[str, set[str]]) -> list[str]:
    """Return the imports that go up, or to another room on one floor."""
    return [
        f"{name} -> {target}"
        for name, targets in graph.items()
        for target in targets
        if room(name) != room(target) and floor(target) >= floor(name)
    ]


def strays(graph: dict[str, set[str]]) -> list[str]:
    """Return the imports that a room is not to know of."""
    return [
        f"{name} -> {target}"
        for name, targets in graph.items()
        if room(name) in KNOWS
        for target in targets
        if room(target) != room(name)
        and not {target, room(target)} & KNOWS[room(name)]
    ]


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of a circle; none when there is none.

    A room's `__init__` hands on what its files hold: who imports a name from
    it depends on those files. So it stands for them, and a file of the room
    must not import from it.
    """
    left = {name: set(targets) for name, targets in graph.items()}
    while free := [
        n for n, targets in left.items() if not targets & set(left)
    ]:
        for name in free:
            del left[name]
    return sorted(left)


GRAPH = imports_of_files(ROOT / PACKAGE)


def test_every_room_has_a_floor():
    rooms = {room(module) for module in GRAPH}
    assert rooms == set().union(*FLOORS)


def test_nobody_imports_upward():
    assert climbs(GRAPH) == []


def test_a_room_knows_only_what_it_may():
    assert strays(GRAPH) == []


def test_nothing_imports_in_a_circle():
    assert circle(GRAPH) == []


@pytest.mark.parametrize("part", LEAVES_OUT)
def test_a_room_leaves_the_heavy_libraries_out(part: str):
    files = [
        path
        for path in FILES
        if f"{module_of(path, ROOT / PACKAGE)}.".startswith(f"{part}.")
    ]
    assert files
    libraries = {
        target.partition(".")[0]
        for path in files
        for target in imported(ast.parse(path.read_text("utf-8")))
    }
    assert libraries & LEAVES_OUT[part] == set()


def package_of(folder: Path, sources: dict[str, str]) -> dict[str, set[str]]:
    for name, source in sources.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return imports_of_files(folder)


@pytest.mark.parametrize(
    "source",
    [
        f"from {PACKAGE}.serving.scheduler import Scheduler",
        f"from {PACKAGE} import serving",
        f"import {PACKAGE}.serving.scheduler",
        f"def late():\n    from {PACKAGE}.serving import Scheduler",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        f"    from {PACKAGE}.serving.scheduler import Scheduler",
    ],
)
def test_an_import_that_climbs_is_noticed(tmp_path: Path, source: str):
    rooms = {"serving/__init__": "", "serving/scheduler": ""}
    graph = package_of(tmp_path, rooms | {"memory/paged": source})
    assert len(climbs(graph)) == 1


def test_a_circle_is_noticed_also_through_the_face_of_a_room(tmp_path: Path):
    sources = {
        "memory/__init__": f"from {PACKAGE}.memory.paged import Paged",
        "memory/paged": f"from {PACKAGE}.memory import Waste",
    }
    graph = package_of(tmp_path, sources)
    assert circle(graph) == ["memory.__init__", "memory.paged"]


def test_a_stray_import_is_noticed(tmp_path: Path):
    sources = {
        "attention/backends": "",
        "attention/inputs": "",
        "nb/session": f"from {PACKAGE}.attention import backends, inputs",
    }
    graph = package_of(tmp_path, sources)
    assert strays(graph) == ["nb.session -> attention.inputs"]


# --- Notebooks ---------------------------------------------------------------

# 07 teaches the Triton kernels themselves.
TAUGHT = {"07_triton_paged_attention": {"attention.triton"}}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_imports_from_a_room_and_no_deeper(path: Path):
    deeper = set()
    for cell in code_cells(path):
        source = "\n".join(
            line
            for line in cell.source.splitlines()
            if not line.lstrip().startswith(("%", "!"))
        )
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module:
                package, _, rest = node.module.partition(".")
                if package == PACKAGE and "." in rest:
                    deeper.add(rest)
    assert deeper <= TAUGHT.get(path.stem, set())
