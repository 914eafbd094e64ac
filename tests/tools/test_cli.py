"""The commands as a reader types them: what they print, how they exit."""

import json
import os
import subprocess
import sys

import nbformat
import pytest
from typer.testing import CliRunner

from llm_systems_cookbook.tools import cli
from llm_systems_cookbook.tools.cli import app

PYPROJECT = """\
[project]
name = "book"

[project.urls]
Repository = "https://github.com/owner/book"
"""

MODULE = '''\
class Pool:
    """Hold blocks.

    Many.
    """
'''

FILLED = 'class Pool:\n    """Hold blocks."""'


@pytest.fixture
def root(tmp_path):
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "llm_systems_cookbook").mkdir()
    module = tmp_path / "llm_systems_cookbook" / "pool.py"
    module.write_text(MODULE)
    return tmp_path


def call(root, *arguments):
    options = ["--root", str(root)] if root else []
    return CliRunner().invoke(app, [*arguments, *options])


def write_notebook(root, stem, *sources, **metadata):
    cells = [
        nbformat.v4.new_code_cell(text, id=f"part-{i}", metadata=metadata)
        for i, text in enumerate(sources)
    ]
    path = root / "notebooks" / f"{stem}.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def entry(name, status):
    return {"name": name, "status": status, "message": ""}


def write_record(root, stem, **values):
    record = {
        "schema_version": 1,
        "notebook": stem,
        "status": "passed",
        "checks": [entry("a", "passed"), entry("b", "skipped")],
        "exercises": [entry("c", "todo")],
        "measures": [],
        "conditions": {},
    }
    path = root / "results" / f"{stem}.json"
    path.write_text(json.dumps(record | values))


def row(output, start):
    """Return the words of the first line that starts with a word."""
    rows = [line.split() for line in output.splitlines()]
    return next(words for words in rows if words[:1] == [start])


# --- results --------------------------------------------------------------


def test_results_shows_every_count_and_exits_0_when_all_passed(root):
    write_notebook(root, "01_a")
    write_record(root, "01_a")
    done = call(root, "results")
    assert done.exit_code == 0, done.output
    heading = [
        "notebook",
        "passed",
        "failed",
        "skipped",
        "solved",
        "todo",
        "status",
    ]
    assert row(done.output, "notebook") == heading
    assert row(done.output, "01_a") == [
        "01_a",
        "1",
        "0",
        "1",
        "0",
        "1",
        "passed",
    ]


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ({"status": "incomplete"}, "incomplete"),
        ({"status": "failed"}, "failed"),
        ({"schema_version": 2}, "wrong schema"),
        ({"checks": 3}, "unreadable"),
    ],
)
def test_results_exits_1_unless_every_notebook_passed(root, values, status):
    for stem in ("01_a", "02_b"):
        write_notebook(root, stem)
        write_record(root, stem)
    write_record(root, "02_b", **values)
    done = call(root, "results")
    assert done.exit_code == 1
    assert " ".join(row(done.output, "02_b")).endswith(status)
    assert row(done.output, "01_a")[-1] == "passed"


def test_results_says_missing_where_there_is_no_record(root):
    write_notebook(root, "01_a")
    done = call(root, "results")
    assert done.exit_code == 1
    assert row(done.output, "01_a")[-1] == "missing"


def test_results_notes_a_record_of_no_notebook_and_ignores_it(root):
    write_notebook(root, "01_a")
    write_record(root, "01_a")
    write_record(root, "09_gone", status="failed")
    done = call(root, "results")
    assert done.exit_code == 0
    assert "ignored 09_gone.json: no notebook of that name" in done.output


MEASURES = [
    {
        "name": "waste",
        "value": 12345.678,
        "unit": "%",
        "context": {"trace": "azure [x]", "rate": None},
        "non_finite": {"context.rate": "inf"},
    },
    {
        "name": "ratio",
        "value": None,
        "unit": "",
        "non_finite": {"value": "nan"},
    },
    {"name": "blocks", "value": 20000, "unit": "blocks", "context": {}},
    {"name": "shares", "value": [1, 2.5], "unit": ""},
]


def test_results_shows_measures_when_asked(root):
    write_notebook(root, "01_a")
    write_record(root, "01_a", measures=MEASURES)
    assert "waste" not in call(root, "results").output
    shown = call(root, "results", "--measures").output
    lines = [line.split() for line in shown.splitlines()]
    waste = ["waste", "12,345.7", "%", "trace=azure", "[x],"]
    assert ["01_a:", "measured"] in lines
    assert [*waste, "rate=inf"] in lines
    assert ["ratio", "nan"] in lines
    assert ["blocks", "20,000", "blocks"] in lines
    assert ["shares", "1,", "2.5"] in lines


def test_piped_output_has_no_colour_codes_and_no_broken_lines(root):
    name = "a_name_that_is_longer_than_a_terminal_would_have_room_for_" * 4
    write_notebook(root, "01_a")
    measure = {"name": name, "value": 1, "unit": "", "context": {}}
    write_record(root, "01_a", measures=[measure])
    program = "from llm_systems_cookbook.tools.cli import app; app()"
    arguments = ["results", "--measures", "--root", str(root)]
    unset = ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE")
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        encoding="utf-8",
        env={k: v for k, v in os.environ.items() if k not in unset}
        | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
        check=True,
    )
    assert "\x1b" not in done.stdout
    assert name in done.stdout


# --- run ------------------------------------------------------------------

SESSION = """\
from llm_systems_cookbook.nb import bootstrap
s = bootstrap("{stem}")
s.check("full", lambda: {result})
s.measure("used", 7, "blocks")
s.save()
"""


def test_run_shows_the_tables_and_exits_0_when_all_passed(root):
    write_notebook(root, "01_a", SESSION.format(stem="01_a", result=True))
    done = call(root, "run")
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.output.splitlines()]
    assert ["01_a", "1", "0", "0", "0", "0", "passed"] in lines
    assert ["used", "7", "blocks"] in lines
    assert call(root, "results").exit_code == 0


def test_run_exits_1_and_names_what_failed(root):
    for stem, result in (("01_a", False), ("02_b", True)):
        write_notebook(root, stem, SESSION.format(stem=stem, result=result))
    done = call(root, "run", "-j", "2")
    assert done.exit_code == 1
    failures = [x for x in done.output.splitlines() if "check full" in x]
    assert len(failures) == 1
    assert failures[0].startswith("01_a: check full: failed")
    ended = row(done.output, "02_b:")
    assert ended[:2] == ["02_b:", "passed,"], "and after how many seconds"
    assert ended[2].isdigit()
    assert ended[3:] == ["s"]


def test_run_of_one_notebook_leaves_the_others_alone(root):
    write_notebook(root, "01_a", "1 / 0")
    write_notebook(root, "02_b", SESSION.format(stem="02_b", result=True))
    done = call(root, "run", "02")
    assert done.exit_code == 0, done.output
    assert "01_a" not in done.output


def test_run_of_an_unknown_notebook_lists_the_choices(root):
    write_notebook(root, "01_a")
    done = call(root, "run", "07")
    assert done.exit_code == 2
    assert done.stderr == (
        "error: no notebook is called '07'; choose from: 01_a\n"
    )


@pytest.mark.parametrize("option", ["--timeout", "--jobs"])
def test_run_refuses_a_number_below_1(root, option):
    write_notebook(root, "01_a")
    assert call(root, "run", option, "0").exit_code == 2


# --- sync, lint -----------------------------------------------------------


def test_sync_check_shows_a_diff_and_exits_1_until_sync_has_run(root):
    path = write_notebook(root, "01_a", "old", source="pool:Pool")
    before = path.read_bytes()
    stale = call(root, "sync", "--check")
    assert stale.exit_code == 1
    assert "--- 01_a: part-0" in stale.output
    assert "-old\n+class Pool:" in stale.output
    assert path.read_bytes() == before
    done = call(root, "sync")
    assert done.exit_code == 0
    assert done.output == "filled 01_a: part-0\n"
    assert nbformat.read(path, as_version=4).cells[0].source == FILLED
    assert call(root, "sync", "--check").output == ""


def test_sync_of_an_unknown_source_names_notebook_and_cell(root):
    write_notebook(root, "01_a", "old", source="pool:Lake")
    done = call(root, "sync")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: 01_a: part-0: ")
    assert "'Lake'" in done.stderr


def test_lint_prints_every_problem_and_exits_1(root):
    write_notebook(root, "01_a", "!ls", "%%bash")
    done = call(root, "lint")
    assert done.exit_code == 1
    assert "01_a: part-0: runs a shell: !ls\n" in done.output
    assert "01_a: part-1: runs a shell: %%bash\n" in done.output


@pytest.mark.parametrize("is_warning", [True, False])
def test_lint_exits_0_when_there_are_only_warnings(
    root, monkeypatch, is_warning
):
    problem = cli.template.Problem("01_a", "x", "long", "rule", is_warning)
    monkeypatch.setattr(cli.template, "lint", lambda _: [problem])
    assert call(root, "lint").exit_code == (0 if is_warning else 1)


# --- Which repository -----------------------------------------------------

COMMANDS = ["run", "results", "sync", "lint"]


@pytest.mark.parametrize("command", COMMANDS)
def test_outside_a_checkout_a_command_asks_for_root(
    monkeypatch, command, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "find_checkout", lambda: None)
    done = call(None, command)
    assert done.exit_code == 2
    assert "--root" in done.stderr


def test_the_checkout_you_are_in_comes_before_the_packages(
    root, monkeypatch, tmp_path
):
    there = tmp_path / "there"
    (there / "notebooks").mkdir(parents=True)
    (there / "pyproject.toml").write_text(
        '[project]\nname = "llm-systems-cookbook"\n'
    )
    monkeypatch.chdir(there)
    monkeypatch.setattr(cli, "find_checkout", lambda: root)
    write_notebook(root, "01_a")
    done = call(None, "results")
    assert done.exit_code == 2
    assert str(there) in done.stderr


def test_without_root_the_checkout_is_used(root, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "find_checkout", lambda: root)
    write_notebook(root, "01_a")
    write_record(root, "01_a")
    assert call(None, "results").exit_code == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_repository_without_notebooks_is_an_error(root, command):
    done = call(root, command)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: no notebooks in ")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_root_that_does_not_exist_is_an_error(tmp_path, command):
    assert call(tmp_path / "gone", command).exit_code == 2


def test_a_pipe_that_lacks_a_character_gets_a_stand_in(root):
    write_notebook(root, "01_a")
    measure = {"name": "size \u2264 4", "value": 1, "unit": "", "context": {}}
    write_record(root, "01_a", measures=[measure])
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from llm_systems_cookbook.tools.cli import app; app()",
            *("results", "--measures", "--root", str(root)),
        ],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        check=True,
    )
    assert b"size ? 4" in done.stdout
