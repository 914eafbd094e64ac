"""Source cells are filled from the package, and nothing else is touched."""

import ast
import json
import stat
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from llm_systems_cookbook.tools.notebooks import CookbookError
from llm_systems_cookbook.tools.sync import derived_source, sync

CHECKOUT = Path(__file__).resolve().parents[2]
STEM = "02_block_allocator"

MODULE = '''\
"""A module."""

import functools

LIMIT = 3


# Why: stays behind.
@functools.cache
def double(n: int) -> int:
    """Return twice n.

    Raises:
        TypeError: n is no number.
    """

    def inner() -> int:
        """Return it.

        Slowly.
        """
        return n + n

    return inner()


class Pool:
    """Hold × blocks.

    More of it.

    Args:
        n: how many.
    """

    def __init__(self, n: int) -> None:
        self.n = n  # kept

    @property
    def size(self) -> int:
        """Blocks in the pool."""
        return self.n

    def grow(self) -> None:
        r"""Add a \\block.

        And no more.
        """
        self.n += 1


class Empty:
    """Hold nothing.

    Ever.
    """
'''

DERIVED_POOL = '''\
class Pool:
    """Hold × blocks."""

    def __init__(self, n: int) -> None:
        self.n = n  # kept

    @property
    def size(self) -> int:
        """Blocks in the pool."""
        return self.n

    def grow(self) -> None:
        r"""Add a \\block."""
        self.n += 1'''

DERIVED_DOUBLE = '''\
@functools.cache
def double(n: int) -> int:
    """Return twice n."""

    def inner() -> int:
        """Return it."""
        return n + n

    return inner()'''


@pytest.fixture
def root(tmp_path):
    """A repository with a package, and no notebook yet."""
    memory = tmp_path / "llm_systems_cookbook" / "memory"
    memory.mkdir(parents=True)
    (memory / "pool.py").write_text(MODULE, encoding="utf-8")
    return tmp_path


def sources(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return {cell["id"]: "".join(cell["source"]) for cell in cells}


# --- derived_source -------------------------------------------------------


def test_a_class_is_derived_with_each_docstring_cut_to_its_first_line(root):
    assert derived_source(root, "memory.pool:Pool") == DERIVED_POOL


def test_a_function_comes_with_its_decorators_and_without_its_comment(root):
    assert derived_source(root, "memory.pool:double") == DERIVED_DOUBLE


def test_several_names_come_in_the_order_asked_for(root):
    derived = derived_source(root, "memory.pool:Pool, double")
    assert derived == f"{DERIVED_POOL}\n\n\n{DERIVED_DOUBLE}"


def test_a_class_of_nothing_but_a_docstring_keeps_its_summary(root):
    derived = derived_source(root, "memory.pool:Empty")
    assert derived == 'class Empty:\n    """Hold nothing."""'


def test_a_summary_closed_on_the_next_line_is_closed_on_its_own(root):
    text = 'def f() -> None:\n    """Do it.\n    """\n    g()\n'
    (root / "llm_systems_cookbook" / "two.py").write_text(text)
    derived = derived_source(root, "two:f")
    assert derived == 'def f() -> None:\n    """Do it."""\n    g()'


def test_a_package_is_a_module_too(root):
    init = root / "llm_systems_cookbook" / "memory" / "__init__.py"
    init.write_text("def here() -> None:\n    pass\n")
    assert derived_source(root, "memory:here") == init.read_text().rstrip()


def test_deriving_does_not_run_the_module(root):
    module = root / "llm_systems_cookbook" / "bomb.py"
    module.write_text("1 / 0\n\n\ndef safe() -> int:\n    return 1\n")
    assert derived_source(root, "bomb:safe").startswith("def safe()")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("memory.pool", "is not module:Name"),
        ("../pool:Pool", "is not module:Name"),
        ("memory/pool:Pool", "is not module:Name"),
        ("memory.lake:Pool", "no module llm_systems_cookbook.memory.lake"),
        ("memory.pool:Lake", "it has: double, Pool, Empty"),
        ("memory.pool:Pool.grow", "no class or function 'Pool.grow'"),
        ("memory.pool:LIMIT", "no class or function 'LIMIT'"),
        ("memory.pool:Pool,", "no class or function ''"),
    ],
)
def test_an_unknown_source_is_an_error_that_names_it(root, spec, message):
    with pytest.raises(CookbookError, match=message.replace(".", r"\.")):
        derived_source(root, spec)


def test_a_summary_that_grows_too_wide_is_an_error(root):
    summary = "x" * 72
    text = f'def f() -> None:\n    """{summary}\n\n    More.\n    """\n'
    (root / "llm_systems_cookbook" / "wide.py").write_text(text)
    with pytest.raises(CookbookError, match="82 columns, limit 79"):
        derived_source(root, "wide:f")


def test_a_docstring_without_a_first_line_is_an_error(root):
    text = 'def f() -> None:\n    """\n    Do it.\n    """\n'
    (root / "llm_systems_cookbook" / "late.py").write_text(text)
    with pytest.raises(CookbookError, match="no summary on its first line"):
        derived_source(root, "late:f")


def test_a_summary_that_ends_in_a_quote_stays_valid(root):
    text = 'def f() -> None:\n    """Say "hi"\n\n    More.\n    """\n'
    (root / "llm_systems_cookbook" / "quote.py").write_text(text)
    derived = derived_source(root, "quote:f")
    assert derived.splitlines()[1] == '    """Say "hi" """'
    ast.parse(derived)


def without_docstrings(source):
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node) is not None:
            node.body[0].value.value = ""
    return tree


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("memory.allocator", "BlockAllocator"),
        ("memory.allocator", "OutOfBlocks"),
        ("memory.sequence_table", "SequenceTable"),
        ("memory.sequence_table", "fork_sequence"),
    ],
)
def test_the_packages_own_classes_derive_to_the_same_formatted_code(
    module, name
):
    derived = derived_source(CHECKOUT, f"{module}:{name}")
    file = CHECKOUT / "llm_systems_cookbook" / (module.replace(".", "/"))
    whole = without_docstrings(file.with_suffix(".py").read_text("utf-8"))
    original = next(n for n in whole.body if getattr(n, "name", "") == name)
    assert ast.dump(without_docstrings(derived).body[0]) == ast.dump(original)
    assert max(map(len, derived.splitlines())) <= 79
    command = [sys.executable, "-m", "ruff", "format", "--line-length=79", "-"]
    formatted = subprocess.run(
        command,
        input=derived,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    )
    assert formatted.stdout == derived + "\n"


# --- sync -----------------------------------------------------------------


def with_source_cell(text="", source="memory.pool:Pool"):
    cells = [
        nbformat.v4.new_markdown_cell("# Build", id="title"),
        nbformat.v4.new_code_cell(
            text, id="pool-class", metadata={"source": source}
        ),
        nbformat.v4.new_code_cell("x = 1", id="use"),
    ]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    return nbformat.v4.new_notebook(cells=cells, metadata=metadata)


def write(root, notebook, stem=STEM):
    path = root / "notebooks" / f"{stem}.ipynb"
    path.parent.mkdir(exist_ok=True)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    return path


def test_sync_fills_a_source_cell_and_nothing_else(root):
    notebook = with_source_cell("stale")
    path = write(root, notebook)
    before = sources(path)
    changes = sync(root)
    assert [change.where for change in changes] == [f"{STEM}: pool-class"]
    assert sources(path) == before | {"pool-class": DERIVED_POOL}
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["metadata"] == notebook["metadata"]
    assert sync(root) == []


def test_sync_check_reports_a_diff_and_changes_nothing(root):
    path = write(root, with_source_cell("stale"))
    before = path.read_bytes()
    (change,) = sync(root, check=True)
    assert "-stale" in change.diff().splitlines()
    assert "+class Pool:" in change.diff().splitlines()
    assert path.read_bytes() == before


def test_sync_notices_one_changed_character(root):
    write(root, with_source_cell(DERIVED_POOL.replace("+= 1", "+= 2")))
    assert len(sync(root, check=True)) == 1


def test_sync_leaves_a_notebook_in_step_untouched(root):
    path = write(root, with_source_cell(DERIVED_POOL))
    other = write(root, with_source_cell("stale"), "03_other")
    # A layout of its own shows whether the file was written again.
    path.write_text(json.dumps(json.loads(path.read_text("utf-8"))))
    before = path.read_bytes()
    assert len(sync(root)) == 1
    assert path.read_bytes() == before
    assert sources(other)["pool-class"] == DERIVED_POOL


def test_sync_with_one_unknown_source_writes_nothing(root):
    first = write(root, with_source_cell("stale"))
    write(root, with_source_cell(source="memory.pool:Lake"), "03_other")
    before = first.read_bytes()
    with pytest.raises(CookbookError, match=r"03_other: pool-class: .*'Lake'"):
        sync(root)
    assert first.read_bytes() == before


@pytest.mark.parametrize(
    ("bad_id", "complaint"),
    [
        (None, r"cells\.1\.id: None is not of type 'string'"),
        ("use", "2 cells have the id 'use'"),
    ],
)
def test_a_cell_without_an_id_of_its_own_is_refused_and_nothing_is_written(
    root, bad_id, complaint
):
    first = write(root, with_source_cell("stale"))
    second = with_source_cell("stale")
    second.cells[1]["id"] = bad_id
    other = first.with_name("03_other.ipynb")
    other.write_text(json.dumps(second))
    before = first.read_bytes(), other.read_bytes()
    with pytest.raises(CookbookError, match=f"03_other.*{complaint}"):
        sync(root)
    assert (first.read_bytes(), other.read_bytes()) == before


def test_sync_keeps_the_mode_of_the_file_and_leaves_no_other(root):
    path = write(root, with_source_cell("stale"))
    path.chmod(0o640)
    sync(root)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(path.parent.iterdir()) == [path]


def test_sync_reads_text_beyond_ascii_as_it_is(root):
    path = write(root, with_source_cell())
    sync(root)
    assert "×" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"nbformat": 3}',
        '{"nbformat": 4, "metadata": {}, "nbformat_minor": 5}',
        '{"nbformat": 4, "metadata": {}, "nbformat_minor": 5, "cells": [1]}',
    ],
)
def test_a_file_that_is_no_notebook_is_an_error_that_names_it(root, content):
    path = root / "notebooks" / "02_broken.ipynb"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(CookbookError, match=r"02_broken\.ipynb: not a note"):
        sync(root)
    assert path.read_text() == content
