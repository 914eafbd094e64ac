"""The template's rules, on a small notebook made for the purpose."""

import json
import sys

import nbformat
import pytest

from llm_systems_cookbook.tools import notebooks
from llm_systems_cookbook.tools.notebooks import CookbookError, read_notebook
from llm_systems_cookbook.tools.template import RULES, SECTIONS, WARNINGS, lint

STEM = "02_block_allocator"
BADGE = "[![Open In Colab](badge.svg)](notebook)"


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
    %pip install -q book
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
            md("badges", BADGE),
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
    """A repository with answers, and no notebook yet."""
    write_solutions(tmp_path)
    return tmp_path


def find(notebook, cell_id):
    return next(c for c in notebook["cells"] if c["id"] == cell_id)


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


def kernel(**values):
    return notebook_metadata(kernelspec=values)


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
    ("kernel_is_python3", kernel(name="conda", display_name="Conda")),
    ("kernel_is_python3", lambda nb: nb["metadata"].clear()),
    (NO_ERRORS, notebook_metadata(allow_errors=True)),
    (NO_ERRORS, notebook_metadata(execution={"allow_errors": True})),
    (NO_ERRORS, metadata("build-1", tags=["raises-exception"])),
    (ID_RULE, data("build-1", id="cell-12")),
    (ID_RULE, data("build-1", id="deadbeef")),
    (ID_RULE, data("build-1", id="a1b2c3d4")),
    (ID_RULE, data("build-1", id="12-blocks")),
    (ID_RULE, data("build-1", id="Build")),
    (ID_RULE, data("build-1", id="b2cd61de-2eb0-4a3c-9c5a-8c1f1f1f1f1f")),
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
    put("recap", "## Recap\n\n" + "x" * 80)(notebook)
    write_raw(root, notebook)
    (problem,) = lint(root)
    assert str(problem) == f"{STEM}: recap: line 3 has 80 columns, limit 79"


def test_a_warning_says_so(root):
    notebook = good_notebook()
    put("build-1", lines(26))(notebook)
    write_raw(root, notebook)
    (problem,) = lint(root)
    assert problem.is_warning
    assert "build-1: warning: has 26 lines of code, aim for 25" in str(problem)


def no_id(notebook):
    del find(notebook, "recap")["id"]


def of_format_4_4(notebook):
    notebook["nbformat_minor"] = 4


def same_id(notebook):
    find(notebook, "recap")["id"] = "next"


@pytest.mark.parametrize("change", [no_id, of_format_4_4, same_id])
def test_cells_without_ids_of_their_own_are_refused(root, change):
    notebook = good_notebook()
    change(notebook)
    write_raw(root, notebook)
    with pytest.raises(
        CookbookError, match=rf"{STEM}.*: not a notebook: .*id"
    ):
        lint(root)


def test_every_notebook_is_looked_at(root):
    for stem in (STEM, "03_other"):
        notebook = good_notebook()
        put("build-1", "!ls")(notebook)
        write_raw(root, notebook, stem)
    found = [p for p in lint(root) if p.rule == SHELL]
    assert [problem.notebook for problem in found] == [STEM, "03_other"]


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
        notebooks.write_cells(notebook, [])
