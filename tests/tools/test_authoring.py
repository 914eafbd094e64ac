"""sync, badges and lint, on small repositories made for the purpose."""

import ast
import json
import stat
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from llm_systems_cookbook.tools import notebooks as notebook_files
from llm_systems_cookbook.tools.notebooks import read_notebook
from llm_systems_cookbook.tools.run import CookbookError
from llm_systems_cookbook.tools.sync import (
    badge_line,
    badges,
    derived_source,
    repository_slug,
    sync,
)
from llm_systems_cookbook.tools.template import RULES, SECTIONS, WARNINGS, lint

CHECKOUT = Path(__file__).resolve().parents[2]
STEM = "02_block_allocator"
SLUG = "owner/book"

PYPROJECT = f"""\
[project]
name = "book"

[project.urls]
Repository = "https://github.com/{SLUG}"
"""

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


def md(cell_id, source):
    return {
        "cell_type": "markdown",
        "id": cell_id,
        "metadata": {},
        "source": source,
    }


def code(cell_id, text, /, **metadata):
    return {
        "cell_type": "code",
        "execution_count": None,
        "id": cell_id,
        "metadata": metadata,
        "outputs": [],
        "source": text,
    }


SET_UP = f"""\
try:
    from llm_systems_cookbook.nb import bootstrap
except ImportError:
    %pip install -q git+https://github.com/{SLUG}
    from llm_systems_cookbook.nb import bootstrap

s = bootstrap("{STEM}")"""

EXERCISES = ("easy", "middle", "hard")


def exercise(name):
    stub = f"def {name}():\n    raise NotImplementedError"
    return [
        md(f"ask-{name}", f"### {name}"),
        code(f"stub-{name}", stub, exercise=name),
        code(f"grade-{name}", f's.exercise("{name}", lambda: {name}() == 1);'),
    ]


def section(name):
    cell_id = name.lower().replace(" ", "-")
    cells = [md(cell_id, f"## {name}\n\nText.")]
    if name == "Problem":
        cells[0]["source"] = "## Problem: two owners, one block"
        cells.append(code("problem-picture", "plots.pool(pool);"))
    if name == "Build":
        checks = [f's.check("check_{i}", lambda: True);' for i in range(6)]
        cells += [code(f"build-{i}", c) for i, c in enumerate(checks)]
    if name == "Measure":
        loop = 'for n in (1, 2):\n    s.measure(f"share_{n}", n, "%")'
        cells += [
            code("measure-time", 's.measure("time", 1.5, "s");'),
            code("measure-shares", loop),
        ]
    if name == "Exercises":
        cells += [cell for name in EXERCISES for cell in exercise(name)]
    return cells


def good_notebook():
    title = (
        "# Build a block allocator\n\n20 minutes · Prerequisites: none · "
        "Hardware: none\n\nPaper: Kwon et al."
    )
    return {
        "cells": [
            md("badges", badge_line(SLUG, f"{STEM}.ipynb")),
            md("title", title),
            md("goals", "You will build a pool.\n\nYou will learn to count."),
            code("set-up", SET_UP),
            *[cell for name in SECTIONS for cell in section(name)],
            code("summary", "s.summary()"),
            code("save", "s.save();"),
        ],
        "metadata": {
            "kernelspec": {
                "display_name": "Python 3",
                "language": "python",
                "name": "python3",
            }
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def write(root, notebook, stem=STEM):
    path = root / "notebooks" / f"{stem}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = nbformat.writes(nbformat.from_dict(notebook))
    path.write_text(text + "\n", encoding="utf-8")
    return path


def write_solutions(root, stem=STEM):
    folder = root / "solutions" / stem
    folder.mkdir(parents=True)
    for name in EXERCISES:
        for ending in ("py", "wrong_1.py", "wrong_2.py"):
            (folder / f"{name}.{ending}").write_text("x = 1\n")
    return folder


@pytest.fixture
def root(tmp_path):
    """A repository with a package, and no notebook yet."""
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    memory = tmp_path / "llm_systems_cookbook" / "memory"
    memory.mkdir(parents=True)
    (memory / "pool.py").write_text(MODULE, encoding="utf-8")
    write_solutions(tmp_path)
    return tmp_path


def find(notebook, cell_id):
    return next(c for c in notebook["cells"] if c["id"] == cell_id)


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


def with_source_cell(source=""):
    notebook = good_notebook()
    cell = code("pool-class", source, source="memory.pool:Pool")
    notebook["cells"].insert(8, cell)
    return notebook


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
    second = with_source_cell()
    find(second, "pool-class")["metadata"]["source"] = "memory.pool:Lake"
    write(root, second, "03_other")
    before = first.read_bytes()
    with pytest.raises(CookbookError, match=r"03_other: pool-class: .*'Lake'"):
        sync(root)
    assert first.read_bytes() == before


@pytest.mark.parametrize("write_again", [sync, badges])
@pytest.mark.parametrize(
    ("bad_id", "complaint"),
    [(None, r"\(cell number \d+\): no id"), ("recap", "recap: used before")],
)
def test_a_cell_without_an_id_of_its_own_is_refused_and_nothing_is_written(
    root, write_again, bad_id, complaint
):
    first = write(root, with_source_cell("stale"))
    second = with_source_cell("stale")
    del second["cells"][0]  # its badge is stale, too
    find(second, "next")["id"] = bad_id
    write_raw(root, second, "03_other")
    other = first.with_name("03_other.ipynb")
    before = first.read_bytes(), other.read_bytes()
    with pytest.raises(CookbookError, match=f"03_other: {complaint}"):
        write_again(root)
    assert (first.read_bytes(), other.read_bytes()) == before
    assert write_again(root, check=True)


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
        '{"nbformat": 4, "metadata": {}}',
        '{"nbformat": 4, "metadata": {}, "cells": [1]}',
        '{"nbformat": 4, "metadata": {}, "cells": [{"cell_type": "code"}]}',
    ],
)
def test_a_file_that_is_no_notebook_is_an_error_that_names_it(root, content):
    path = root / "notebooks" / "02_broken.ipynb"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(CookbookError, match=r"02_broken\.ipynb: not a note"):
        sync(root)
    assert path.read_text() == content


# --- badges ---------------------------------------------------------------


def change_slug(root):
    path = root / "pyproject.toml"
    path.write_text(path.read_text().replace(SLUG, "new-owner/new.book"))


def test_the_slug_comes_from_the_repository_url(root):
    assert repository_slug(root) == SLUG


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[project]\nname = 'x'\n",
        "[project.urls]\nRepository = 'https://example.com/a/b'\n",
        "[project.urls]\nRepository = 'https://github.com/a'\n",
        "not toml",
    ],
)
def test_a_missing_or_foreign_repository_url_is_an_error(root, content):
    (root / "pyproject.toml").write_text(content)
    with pytest.raises(CookbookError, match="Repository"):
        repository_slug(root)


def test_badges_of_the_right_slug_need_no_change(root):
    write(root, good_notebook())
    assert badges(root, check=True) == []


def test_badges_rewrites_notebook_install_url_and_readme(root):
    path = write(root, good_notebook())
    readme = root / "README.md"
    readme.write_text(f"Run {badge_line(SLUG, f'{STEM}.ipynb')}.\n")
    change_slug(root)
    changes = badges(root)
    badge = badge_line("new-owner/new.book", f"{STEM}.ipynb")
    assert [change.where for change in changes] == [
        f"{STEM}: badges",
        f"{STEM}: set-up",
        "README.md",
    ]
    assert sources(path)["badges"] == badge
    install = "git+https://github.com/new-owner/new.book\n"
    assert install in sources(path)["set-up"]
    assert readme.read_text() == f"Run {badge}.\n"
    assert badges(root, check=True) == []


def test_badges_check_changes_nothing(root):
    path = write(root, good_notebook())
    change_slug(root)
    before = path.read_bytes()
    assert len(badges(root, check=True)) == 2
    assert path.read_bytes() == before


@pytest.mark.parametrize("ending", [".git", "@main", '"', ".git@v1"])
def test_badges_keeps_what_follows_the_slug_in_an_install_url(root, ending):
    notebook = good_notebook()
    url = f"git+https://github.com/{SLUG}"
    find(notebook, "set-up")["source"] = f"x = 1  # {url}{ending}"
    path = write(root, notebook)
    change_slug(root)
    badges(root)
    new = f"x = 1  # git+https://github.com/new-owner/new.book{ending}"
    assert sources(path)["set-up"] == new


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no badge",
        badge_line(SLUG, "99_other.ipynb"),
        badge_line("someone/else", f"{STEM}.ipynb"),
        "\n".join([badge_line(SLUG, f"{STEM}.ipynb")] * 2),
    ],
)
def test_a_missing_wrong_or_doubled_badge_is_stale(root, text):
    notebook = good_notebook()
    find(notebook, "badges")["source"] = text
    path = write(root, notebook)
    (change,) = badges(root, check=True)
    assert change.where == f"{STEM}: badges"
    badges(root)
    badge = badge_line(SLUG, f"{STEM}.ipynb")
    kept = "\nno badge" if text == "no badge" else ""
    assert sources(path)["badges"] == badge + kept


def test_a_notebook_without_a_badges_cell_gets_one(root):
    notebook = good_notebook()
    del notebook["cells"][0]
    path = write(root, notebook)
    badges(root)
    assert next(iter(sources(path).items())) == (
        "badges",
        badge_line(SLUG, f"{STEM}.ipynb"),
    )


def test_a_badges_cell_in_another_place_is_an_error(root):
    notebook = good_notebook()
    notebook["cells"].insert(3, notebook["cells"].pop(0))
    write(root, notebook)
    with pytest.raises(CookbookError, match="is not the first"):
        badges(root)


def test_a_link_in_the_prose_is_rewritten_too(root):
    notebook = good_notebook()
    link = badge_line(SLUG, "03_other.ipynb")
    find(notebook, "next")["source"] = f"## Next\n\n{link}"
    path = write(root, notebook)
    write(root, good_notebook(), "03_other")
    change_slug(root)
    badges(root)
    new = badge_line("new-owner/new.book", "03_other.ipynb")
    assert sources(path)["next"] == f"## Next\n\n{new}"


def test_a_link_to_no_notebook_is_an_error_and_nothing_is_written(root):
    path = write(root, good_notebook())
    (root / "README.md").write_text(badge_line(SLUG, "99_gone.ipynb"))
    change_slug(root)
    before = path.read_bytes()
    with pytest.raises(CookbookError, match=r"README.*99_gone\.ipynb"):
        badges(root)
    assert path.read_bytes() == before


# --- lint -----------------------------------------------------------------


def insert_after(notebook, cell_id, *cells):
    place = notebook["cells"].index(find(notebook, cell_id)) + 1
    notebook["cells"][place:place] = cells


def remove(notebook, *cell_ids):
    cells = notebook["cells"]
    notebook["cells"] = [c for c in cells if c["id"] not in cell_ids]


def move_before(notebook, cell_id, other_id):
    cell = find(notebook, cell_id)
    notebook["cells"].remove(cell)
    place = notebook["cells"].index(find(notebook, other_id))
    notebook["cells"].insert(place, cell)


def put(cell_id, source):
    return lambda nb: find(nb, cell_id).update(source=source)


def replaced(cell_id, old, new):
    def change(notebook):
        cell = find(notebook, cell_id)
        assert old in cell["source"]
        cell["source"] = cell["source"].replace(old, new)

    return change


def data(cell_id, **values):
    return lambda nb: find(nb, cell_id).update(values)


def metadata(cell_id, **values):
    return lambda nb: find(nb, cell_id)["metadata"].update(values)


def notebook_metadata(**values):
    return lambda nb: nb["metadata"].update(values)


def added(*cells, after="build-0"):
    return lambda nb: insert_after(nb, after, *cells)


def lines(count):
    return "\n\n".join(f"x{i} = {i}" for i in range(count))


def plain_cells(count):
    return [code(f"more-{i}", f"x{i} = {i}") for i in range(count)]


WIDE = "word " * 16  # 80 columns
IF_INSTALL = "if missing:\n    %pip install -q -e .\n"
ID_RULE = "ids_are_meaningful"
TITLE = "second_cell_is_the_title"
SHELL = "no_shell_lines"
NO_ERRORS = "no_allowed_errors"
LITERAL = "check_names_are_literal"
MEASURE_LITERAL = "measure_names_are_literal"
UNIQUE = "check_names_are_unique"
INSTALLS = "set_up_installs_when_needed"
NAMED = "bootstrap_names_the_notebook"
QUIET = "returned_values_are_not_shown"
FOLLOW = "graders_follow_their_stubs"
SHOWN = "listings_are_shown"

VIOLATIONS = [
    ("kernel_is_python3", notebook_metadata(kernelspec={"name": "conda"})),
    ("kernel_is_python3", notebook_metadata(kernelspec=None)),
    ("format_has_cell_ids", lambda nb: nb.update(nbformat_minor=4)),
    ("no_widget_metadata", notebook_metadata(widgets={})),
    ("no_widget_metadata", metadata("build-1", widgets={})),
    (NO_ERRORS, notebook_metadata(allow_errors=True)),
    (NO_ERRORS, notebook_metadata(execution={"allow_errors": True})),
    (NO_ERRORS, metadata("build-1", tags=["raises-exception"])),
    ("ids_are_present", lambda nb: find(nb, "recap").pop("id")),
    ("ids_are_unique", data("build-1", id="build-2")),
    (ID_RULE, data("build-1", id="cell-12")),
    (ID_RULE, data("build-1", id="deadbeef")),
    (ID_RULE, data("build-1", id="a1b2c3d4")),
    (ID_RULE, data("build-1", id="12-blocks")),
    (ID_RULE, data("build-1", id="Build")),
    (ID_RULE, data("build-1", id="b2cd61de-2eb0-4a3c-9c5a-8c1f1f1f1f1f")),
    (
        "no_outputs",
        data("build-1", outputs=[{"output_type": "stream", "text": "x"}]),
    ),
    ("no_outputs", data("build-1", execution_count=3)),
    ("code_parses", put("build-1", "def f(:")),
    (SHOWN, put("build-1", "s.show_source(f)\nx = 1")),
    (SHOWN, put("build-1", "s.show_source(f);")),
    (SHELL, put("build-1", "!pip list")),
    (SHELL, put("build-1", "if True:\n    !ls")),
    (SHELL, put("build-1", "files = !ls")),
    (SHELL, put("build-1", "%system ls")),
    (SHELL, put("build-1", "%%bash\n")),
    (SHELL, put("build-1", 'get_ipython().run_cell_magic("sh", "", "ls")')),
    (SHELL, put("build-1", 'ip = f()\nip.run_cell_magic("bash", "", "ls")')),
    (SHELL, put("build-1", 'ip = f()\nip.run_line_magic("sx", "ls")')),
    (SHELL, put("build-1", 'get_ipython().system("ls")')),
    (SHELL, put("build-1", 'ip = f()\nip.getoutput("ls")')),
    (SHELL, put("build-1", 'import os\nos.system("ls")')),
    (SHELL, put("build-1", 'from os import system\nsystem(f"ls {x}")')),
    (SHELL, put("build-1", 'import os\nos.popen("ls").read()')),
    (SHELL, put("build-1", 'subprocess.run("ls", shell=True)')),
    (SHELL, put("build-1", 'subprocess.run("ls", shell=on_linux)')),
    (SHELL, put("build-1", 'subprocess.getoutput("ls")')),
    (SHELL, put("build-1", 'subprocess.run(["bash", "-c", "ls"])')),
    ("no_editable_install", put("build-1", IF_INSTALL)),
    ("no_editable_install", put("build-1", "# pip install --editable .")),
    ("no_editable_install", put("build-1", 'x = ["pip", "install", "-e"]')),
    ("code_fits_the_width", put("build-1", f"# {WIDE}".rstrip() + "xx")),
    ("prose_fits_the_width", put("recap", f"## Recap\n\n{WIDE}.")),
    ("code_cells_are_short", put("build-1", lines(33))),
    ("code_cells_are_not_long", put("build-1", lines(26))),
    ("code_cells_are_not_long", put("build-1", lines(32))),
    ("source_cells_are_short", added(code("pool", "#\n" * 71, source="x:Y"))),
    (
        LITERAL,
        put("build-1", 'for ok in (0, 1):\n    s.check("same", ok == 1)'),
    ),
    (NO_ERRORS, metadata("build-1", tags=["skip-execution"])),
    (QUIET, put("build-1", 's.check("a", lambda: True)')),
    (QUIET, put("build-1", "x = 1\nplots.pool(x)")),
    (
        "enough_code_cells",
        lambda nb: remove(nb, *[f"build-{i}" for i in range(4)]),
    ),
    ("not_too_many_code_cells", added(*plain_cells(22))),
    (LITERAL, put("build-1", 's.check(f"a{1}", lambda: True);')),
    (LITERAL, put("build-1", "s.check_close(name, 1, 1);")),
    (LITERAL, put("build-1", 'for i in x:\n    s.check(f"{i}", True)')),
    (LITERAL, put("build-1", "s.check();")),
    (LITERAL, put("build-1", "s.check(3, lambda: True);")),
    (MEASURE_LITERAL, put("build-1", 's.measure(f"a{n}", 1, "s");')),
    (MEASURE_LITERAL, put("build-1", 'for n in x:\n    s.measure(n, 1, "s")')),
    (UNIQUE, put("build-1", 's.check("check_2", lambda: True);')),
    (UNIQUE, put("build-1", 's.check_close("check_2", 1, 1);')),
    (UNIQUE, put("build-1", 's.check(name="check_2", predicate=True);')),
    (UNIQUE, put("build-1", '%%time\ns.check("check_2", lambda: True);')),
    ("measure_names_are_unique", put("build-1", 's.measure("time", 1, "s");')),
    ("first_cell_holds_the_badges", data("badges", id="badge")),
    ("first_cell_holds_the_badges", data("badges", cell_type="raw")),
    (TITLE, replaced("title", "# Build", "Build")),
    (TITLE, replaced("title", "minutes", "min")),
    (TITLE, replaced("title", "Prerequisites", "Before")),
    (TITLE, replaced("title", "Hardware", "GPU")),
    (TITLE, replaced("title", "Paper", "Source")),
    ("goals_follow_the_title", replaced("goals", "You will build", "See")),
    ("goals_follow_the_title", replaced("goals", "You will learn", "See")),
    (
        "set_up_comes_before_the_problem",
        lambda nb: move_before(nb, "set-up", "problem-picture"),
    ),
    (
        "set_up_comes_before_the_problem",
        lambda nb: insert_after(nb, "goals", code("early", "x = 1")),
    ),
    (INSTALLS, replaced("set-up", "%pip install -q", "pass  #")),
    (INSTALLS, put("set-up", '%pip install x\ns = bootstrap("' + STEM + '")')),
    (NAMED, replaced("set-up", STEM, "03_other")),
    (NAMED, replaced("set-up", f'"{STEM}"', "name")),
    (NAMED, replaced("set-up", f's = bootstrap("{STEM}")', "")),
    (NAMED, added(code("again", f's = bootstrap("{STEM}")'))),
    ("sections_are_present", lambda nb: remove(nb, "the-cost")),
    ("sections_are_present", replaced("the-cost", "## The", "### The")),
    ("sections_are_known", replaced("recap", "Text.", "## More")),
    (
        "sections_are_in_order",
        lambda nb: move_before(nb, "the-cost", "measure"),
    ),
    ("sections_are_in_order", replaced("recap", "Text.", "## Recap")),
    ("problem_has_a_picture", put("problem-picture", "x = 1")),
    (
        "problem_has_a_picture",
        lambda nb: move_before(nb, "problem-picture", "build"),
    ),
    ("ends_with_summary_and_save", lambda nb: remove(nb, "summary")),
    ("ends_with_summary_and_save", put("save", "s.save()")),
    (
        "ends_with_summary_and_save",
        lambda nb: nb["cells"].append(md("end", "Bye.")),
    ),
    ("stubs_are_not_implemented", put("stub-hard", "def hard():\n    pass")),
    ("stubs_are_not_implemented", put("stub-hard", "raise ValueError")),
    (FOLLOW, lambda nb: remove(nb, "grade-hard")),
    (
        "graders_have_a_stub",
        put("build-1", 's.exercise("other", lambda: True);'),
    ),
]


def without(name):
    return lambda folder: (folder / name).unlink()


def extra(name):
    return lambda folder: (folder / name).write_text("x = 1\n")


SOLUTION_VIOLATIONS = [
    ("exercises_have_a_solution", without("hard.py")),
    ("exercises_have_wrong_answers", without("hard.wrong_2.py")),
    ("answers_have_an_exercise", extra("other.py")),
    ("answers_have_an_exercise", extra("other.wrong_1.py")),
    ("answers_have_an_exercise", extra("hard.md")),
    (
        "solutions_have_a_notebook",
        lambda folder: write_solutions(folder.parents[1], "09_gone"),
    ),
]


def test_a_good_notebook_has_no_problem(root):
    write(root, good_notebook())
    assert [str(problem) for problem in lint(root)] == []


def write_raw(root, notebook, stem=STEM):
    """Write JSON as it is: what is wrong must stay wrong."""
    path = root / "notebooks" / f"{stem}.ipynb"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(notebook), encoding="utf-8")


def rules_broken(root):
    return {problem.rule for problem in lint(root)}


@pytest.mark.parametrize(("rule", "violate"), VIOLATIONS)
def test_a_rule_is_the_only_one_to_find_its_violation(root, rule, violate):
    notebook = good_notebook()
    violate(notebook)
    write_raw(root, notebook)
    assert rules_broken(root) == {rule}


@pytest.mark.parametrize(("rule", "violate"), SOLUTION_VIOLATIONS)
def test_an_answer_out_of_place_is_found(root, rule, violate):
    write(root, good_notebook())
    violate(root / "solutions" / STEM)
    assert rules_broken(root) == {rule}


def without_answers_to_hard(root):
    for path in (root / "solutions" / STEM).glob("hard.*"):
        path.unlink()


def test_fewer_than_three_exercises_are_found(root):
    notebook = good_notebook()
    remove(notebook, "ask-hard", "stub-hard", "grade-hard")
    write_raw(root, notebook)
    without_answers_to_hard(root)
    assert rules_broken(root) == {"enough_exercises"}


@pytest.mark.parametrize("name", ["../hard", "Hard", "hard one", "", 3, None])
def test_an_exercise_name_that_names_no_file_is_found(root, name):
    notebook = good_notebook()
    metadata("stub-hard", exercise=name)(notebook)
    replaced("grade-hard", '"hard"', repr(name))(notebook)
    write_raw(root, notebook)
    without_answers_to_hard(root)
    literal = set() if isinstance(name, str) else {LITERAL, FOLLOW}
    assert rules_broken(root) - literal == {"exercise_names_are_slugs"}


@pytest.mark.parametrize("stem", ["block_allocator", "2_x", "02_Block", "02"])
def test_a_file_name_that_is_no_slug_is_found(root, stem):
    notebook = good_notebook()
    setup = find(notebook, "set-up")
    setup["source"] = setup["source"].replace(STEM, stem)
    write_raw(root, notebook, stem)
    (root / "solutions" / STEM).rename(root / "solutions" / stem)
    assert rules_broken(root) == {"file_name_is_a_slug"}


def test_every_rule_has_a_violation_here():
    elsewhere = {
        "enough_exercises",
        "exercise_names_are_slugs",
        "file_name_is_a_slug",
    }
    tried = {rule for rule, _ in VIOLATIONS + SOLUTION_VIOLATIONS}
    known = {rule.__name__ for rule in RULES + WARNINGS}
    assert tried | elsewhere == known | {"solutions_have_a_notebook"}


ALLOWED = {
    "a modulo at the start of a line": put(
        "build-1", "x = (\n    7\n    % 2\n)"
    ),
    "a comparison at the start of a line": put("build-1", "x = (7\n != 2)"),
    "this Python, in a process of its own": put(
        "build-1", 'subprocess.run([sys.executable, "-c", "1"], check=True)'
    ),
    "a process without a shell": put(
        "build-1", "subprocess.run([sys.executable], shell=False)"
    ),
    "the name of the system": put("build-1", "platform.system()"),
    "a cell magic that runs no shell": put("build-1", "%%time\nx = 1"),
    "a magic": put("build-1", "%matplotlib inline"),
    "a line of a text that looks like a shell": put(
        "build-1", 'x = """\n!\n"""'
    ),
    "a helper between stub and grading": lambda nb: insert_after(
        nb, "stub-hard", code("gap", "x = 1")
    ),
    "79 columns of code": put("build-1", "#" * 79),
    "25 lines": put("build-1", lines(25)),
    "70 lines of source": added(code("pool", "#\n" * 70, source="x:Y")),
    "30 code cells": added(*plain_cells(21)),
    "a wide table": put("recap", f"## Recap\n\n| {WIDE}{WIDE} |"),
    "a wide link": put("recap", f"## Recap\n\n[{WIDE}](https://a.b/c)"),
    "a wide heading": put("recap", f"## Recap: {WIDE}{WIDE}"),
    "a markdown picture": lambda nb: (
        put("problem-picture", "x = 1")(nb),
        put("problem", "## Problem\n\n![Pool](pool.png)")(nb),
    ),
    "goals in the title": lambda nb: (
        find(nb, "title").update(
            source=find(nb, "title")["source"]
            + "\n\nYou will build.\n\nYou will learn."
        ),
        remove(nb, "goals"),
    ),
    "a skip beside its check": put(
        "build-1",
        'if gpu:\n    s.check("check_1", True)\nelse:\n'
        '    s.skip("check_1", "no GPU")',
    ),
    "a heading inside a fence": put("recap", "## Recap\n\n```\n## x\n```"),
    "a set-up behind an if": put(
        "set-up",
        f"if missing:\n    %pip install book\ns = bootstrap('{STEM}')",
    ),
    "a check of another object": put("build-1", "other.check(name)"),
    "an id that is one word": data("build-1", id="decade"),
}


@pytest.mark.parametrize("change", ALLOWED.values(), ids=ALLOWED)
def test_lint_allows(root, change):
    notebook = good_notebook()
    change(notebook)
    write_raw(root, notebook)
    assert [str(problem) for problem in lint(root)] == []


def test_a_problem_names_notebook_and_cell(root):
    notebook = good_notebook()
    put("build-1", "#" * 80)(notebook)
    write_raw(root, notebook)
    (problem,) = lint(root)
    assert str(problem) == (
        f"{STEM}: build-1: line 1 has 80 columns, limit 79"
    )


def test_a_warning_says_so(root):
    notebook = good_notebook()
    put("build-1", lines(26))(notebook)
    write_raw(root, notebook)
    (problem,) = lint(root)
    assert problem.is_warning
    assert "build-1: warning: has 26 lines of code, aim for 25" in str(problem)


def test_every_notebook_is_looked_at(root):
    for stem in (STEM, "03_other"):
        notebook = good_notebook()
        put("build-1", "#" * 80)(notebook)
        write_raw(root, notebook, stem)
    wide = [p for p in lint(root) if p.rule == "code_fits_the_width"]
    assert [problem.notebook for problem in wide] == [STEM, "03_other"]


def test_an_empty_notebook_is_reported_and_not_a_crash(root):
    notebook = good_notebook() | {"cells": []}
    write_raw(root, notebook)
    assert "first_cell_holds_the_badges" in rules_broken(root)


def test_a_repository_without_notebooks_is_an_error(root):
    with pytest.raises(CookbookError, match="no notebooks in"):
        lint(root)


def test_a_missing_extra_is_named(root, monkeypatch):
    path = write(root, good_notebook())
    name = "IPython.core.inputtransformer2"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CookbookError, match=r"\[notebooks\] extra"):
        lint(root)
    notebook = read_notebook(path)
    monkeypatch.setitem(sys.modules, "nbformat", None)
    with pytest.raises(CookbookError, match="this command needs nbformat"):
        notebook_files.write_cells(notebook, [])


def test_badges_rewrites_the_clone_command_of_the_readme(root):
    write(root, good_notebook())
    readme = root / "README.md"
    clone = "git clone https://github.com/{}\n"
    readme.write_text(clone.format("someone/else"))
    assert [c.where for c in badges(root, check=True)] == ["README.md"]
    badges(root)
    assert readme.read_text() == clone.format(SLUG)
    assert badges(root, check=True) == []
