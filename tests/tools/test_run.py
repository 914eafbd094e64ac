"""Selecting and running notebooks, and reading what they record."""

import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from jupyter_client import manager
from tqdm import tqdm

from llm_systems_cookbook.nb.record import results_folder, write_atomic
from llm_systems_cookbook.tools import run as runner
from llm_systems_cookbook.tools.notebooks import (
    CookbookError,
    notebook_paths,
    select_notebooks,
)
from llm_systems_cookbook.tools.run import (
    Settings,
    load_record,
    load_records,
    run_notebooks,
)

START = (
    "from llm_systems_cookbook.nb import bootstrap\ns = bootstrap('{stem}')\n"
)
GOOD = 's.check("one", lambda: True)'


def write_notebook(root, stem, *sources, start=True):
    """Write a notebook whose first cell starts a session."""
    folder = root / "notebooks"
    folder.mkdir(exist_ok=True)
    texts = [START.format(stem=stem)] * start + list(sources)
    cells = [
        nbformat.v4.new_code_cell(text, id=f"part-{i}")
        for i, text in enumerate(texts)
    ]
    path = folder / f"{stem}.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def write_record(folder, stem, **values):
    record = {
        "schema_version": 1,
        "notebook": stem,
        "status": "passed",
        "checks": [{"name": "one", "status": "passed", "message": ""}],
        "measures": [],
        "exercises": [],
        "conditions": {},
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"{stem}.json"
    path.write_text(json.dumps(record | values), encoding="utf-8")
    return path


def run_all(root, **settings):
    said = []
    paths = select_notebooks(root, [])
    chosen = Settings(root / "results", **settings)
    runs = run_notebooks(paths, chosen, said.append)
    return runs, said


# --- Which notebooks ------------------------------------------------------


@pytest.fixture
def three(tmp_path):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    for stem in ("02_block_tables", "01_kv_cache", "10_free"):
        (folder / f"{stem}.ipynb").touch()
    return tmp_path


def stems(paths):
    return [path.stem for path in paths]


def test_without_names_all_notebooks_come_in_order(three):
    chosen = select_notebooks(three, [])
    assert stems(chosen) == ["01_kv_cache", "02_block_tables", "10_free"]


@pytest.mark.parametrize(
    "name", ["02", "02_block_tables", "02_block_tables.ipynb"]
)
def test_a_number_a_stem_and_a_file_name_find_a_notebook(three, name):
    assert stems(select_notebooks(three, [name])) == ["02_block_tables"]


def test_a_path_finds_a_notebook_from_the_working_directory(
    three, monkeypatch
):
    monkeypatch.chdir(three)
    chosen = select_notebooks(three, ["notebooks/10_free.ipynb"])
    assert chosen == [three.resolve() / "notebooks" / "10_free.ipynb"]


def test_a_notebook_asked_for_twice_comes_once(three):
    chosen = select_notebooks(three, ["10", "01", "10_free"])
    assert stems(chosen) == ["10_free", "01_kv_cache"]


@pytest.mark.parametrize("name", ["03", "0", "1", "block_tables", "", "02_"])
def test_an_unknown_name_is_an_error_that_lists_the_choices(three, name):
    choices = "01_kv_cache, 02_block_tables, 10_free"
    with pytest.raises(CookbookError, match=choices):
        select_notebooks(three, [name])


def test_a_number_of_two_notebooks_is_an_error_that_lists_them(three):
    (three / "notebooks" / "02_other.ipynb").touch()
    with pytest.raises(CookbookError, match=r"02_block_tables, 02_other$"):
        select_notebooks(three, ["02"])


def test_two_notebooks_with_one_record_are_an_error(three):
    twin = three / "01_kv_cache.ipynb"
    twin.touch()
    with pytest.raises(CookbookError, match="would write the same record"):
        select_notebooks(three, ["01", str(twin)])


def test_a_name_that_cannot_name_a_record_is_an_error(three):
    (three / "notebooks" / "03 a b.ipynb").touch()
    with pytest.raises(CookbookError, match=r"03 a b\.ipynb"):
        select_notebooks(three, [])


def test_a_repository_without_notebooks_is_an_error(tmp_path):
    with pytest.raises(CookbookError, match="no notebooks in"):
        select_notebooks(tmp_path, [])


# --- Records --------------------------------------------------------------


@pytest.mark.parametrize("status", ["passed", "failed", "incomplete"])
def test_a_record_has_the_status_it_says(tmp_path, status):
    write_record(tmp_path, "a", status=status)
    record = load_record(tmp_path, "a")
    assert record.status == status
    assert record.ok == (status == "passed")


def entry(name, status):
    return {"name": name, "status": status, "message": ""}


def test_a_record_counts_checks_and_exercises_by_status(tmp_path):
    write_record(
        tmp_path,
        "a",
        status="failed",
        checks=[
            entry("a", "passed"),
            entry("b", "failed"),
            entry("c", "skipped"),
        ],
        exercises=[
            entry("d", "passed"),
            entry("e", "failed"),
            entry("f", "todo"),
        ],
    )
    record = load_record(tmp_path, "a")
    assert record.counts() == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "solved": 1,
        "todo": 1,
    }
    assert record.remarks() == [
        "a: check b: failed",
        "a: check c: skipped",
        "a: exercise e: failed",
    ]


def test_an_incomplete_record_says_what_that_means(tmp_path):
    write_record(tmp_path, "a", status="incomplete")
    (remark,) = load_record(tmp_path, "a").remarks()
    assert "stopped before it saved" in remark


def test_an_absent_record_is_missing(tmp_path):
    assert load_record(tmp_path, "a").status == "missing"


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_schema_is_said_to_be_wrong(tmp_path, version):
    write_record(tmp_path, "a", schema_version=version)
    record = load_record(tmp_path, "a")
    assert record.status == "wrong schema"
    assert repr(version) in record.note


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "\xff"])
def test_a_file_that_is_no_record_is_unreadable(tmp_path, text):
    (tmp_path / "a.json").write_text(text, encoding="latin-1")
    record = load_record(tmp_path, "a")
    assert record.status == "unreadable"
    assert "a.json" in record.note


@pytest.mark.parametrize(
    "values",
    [
        {"notebook": "b"},
        {"status": "fine"},
        {"checks": None},
        {"checks": ["one"]},
        {"checks": [{"status": "passed"}]},
        {"checks": [entry("one", "todo")]},
        {"exercises": [entry("one", "skipped")]},
        {"measures": {}},
        {"measures": [{}]},
        {"checks": []},
        {"checks": [entry("one", "failed")]},
        {"exercises": [entry("one", "failed")]},
    ],
)
def test_a_record_that_contradicts_the_schema_is_unreadable(tmp_path, values):
    write_record(tmp_path, "a", **values)
    record = load_record(tmp_path, "a")
    assert record.status == "unreadable"
    assert record.note


def test_records_come_in_the_order_of_the_notebooks(three):
    results = three / "results"
    write_record(results, "10_free")
    write_record(results, "99_gone")
    records, ignored = load_records(three)
    assert [(r.notebook, r.status) for r in records] == [
        ("01_kv_cache", "missing"),
        ("02_block_tables", "missing"),
        ("10_free", "passed"),
    ]
    assert ignored == ["99_gone.json"]


def test_records_lie_in_the_repository_or_where_the_variable_says(
    tmp_path, monkeypatch
):
    assert results_folder(tmp_path) == tmp_path / "results"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COOKBOOK_RESULTS", "elsewhere")
    assert results_folder(Path("/")) == tmp_path / "elsewhere"


# --- Running --------------------------------------------------------------

SURROUNDINGS = """\
import os
from pathlib import Path
s.check("here", Path.cwd().name == "notebooks" and Path("01_a.ipynb").exists())
s.check("inline", "inline" in os.environ["MPLBACKEND"])
s.measure("six", 6, "blocks")
"""


def test_a_notebook_runs_in_its_folder_with_inline_figures(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("MPLBACKEND", "agg")
    path = write_notebook(tmp_path, "01_a", SURROUNDINGS, "s.save()")
    before = path.read_bytes()
    (run,), said = run_all(tmp_path)
    assert run.failures() == []
    assert run.status == "passed"
    assert [check["name"] for check in run.record.checks] == ["here", "inline"]
    assert run.record.measures[0]["value"] == 6
    assert len(said) == 1
    assert re.fullmatch(r"01_a: passed, \d+ s", said[0])
    assert path.read_bytes() == before


RAISE = "print('x')\nraise ValueError('too many blocks:\\n7 of 6')"


def test_a_raising_cell_is_one_plain_line_and_the_others_run(tmp_path):
    write_notebook(tmp_path, "01_bad", GOOD, RAISE, "s.save()")
    write_notebook(tmp_path, "02_good", GOOD, "s.save()")
    (bad, good), _ = run_all(tmp_path)
    line = "01_bad: cell part-2: ValueError: too many blocks:"
    assert bad.failures() == [line]
    assert bad.status == "incomplete"
    assert good.failures() == []


def test_failed_checks_are_named_once_each(tmp_path):
    fails = (
        's.check("full", lambda: False, "pool not full")\n'
        's.exercise("grow", lambda: False)'
    )
    write_notebook(tmp_path, "01_a", GOOD, fails, "s.save()")
    (run,), said = run_all(tmp_path)
    check, graded = run.failures()
    assert check.startswith("01_a: check full: failed: pool not full")
    assert graded.startswith("01_a: exercise grow: failed")
    assert len(said) == 1
    assert said[0].startswith("01_a: failed, ")


def test_a_session_without_checks_fails_with_its_reason(tmp_path):
    write_notebook(tmp_path, "01_a", "s.save()")
    (run,), _ = run_all(tmp_path)
    (line,) = run.failures()
    assert "cell part-1: ChecksFailed: " in line
    assert "no checks" in line


TODO = """\
def grader():
    raise NotImplementedError

s.exercise("grow", grader)
"""


def test_an_exercise_to_do_fails_a_strict_run_only(tmp_path):
    write_notebook(tmp_path, "01_a", GOOD, TODO, "s.save()")
    (run,), _ = run_all(tmp_path)
    assert run.failures() == []
    assert run.record.counts()["todo"] == 1
    (run,), _ = run_all(tmp_path, strict=True)
    assert run.failures() == ["01_a: exercise grow: todo"]
    assert run.record.status == "failed"


def test_a_notebook_that_never_saves_is_incomplete(tmp_path):
    write_notebook(tmp_path, "01_a", GOOD)
    (run,), _ = run_all(tmp_path)
    assert run.failures() == ["01_a: its record is incomplete"]


def test_a_record_from_before_the_run_does_not_count(tmp_path):
    write_notebook(tmp_path, "01_a", "x = 1", start=False)
    old = write_record(tmp_path / "results", "01_a")
    (run,), _ = run_all(tmp_path)
    (line,) = run.failures()
    assert line.startswith("01_a: its record is missing")
    assert not old.exists()


def test_an_old_record_that_cannot_go_is_a_failure(tmp_path):
    write_notebook(tmp_path, "01_a", "x = 1", start=False)
    (tmp_path / "results" / "01_a.json").mkdir(parents=True)
    (run,), _ = run_all(tmp_path)
    (line,) = run.failures()
    assert line.startswith("01_a: before the first cell: ")
    assert "01_a.json" in line


def test_a_passed_record_does_not_hide_a_later_error(tmp_path):
    write_notebook(tmp_path, "01_a", GOOD, "s.save()", "1 / 0")
    (run,), _ = run_all(tmp_path)
    assert run.record.status == "passed"
    assert run.status == "failed"
    (line,) = run.failures()
    assert line.startswith("01_a: cell part-3: ZeroDivisionError")


def test_a_kernel_that_dies_is_a_failure_of_its_cell(tmp_path):
    die = "import os\nos._exit(7)"
    write_notebook(tmp_path, "01_a", die, "s.save()")
    write_notebook(tmp_path, "02_good", GOOD, "s.save()")
    (run, good), _ = run_all(tmp_path)
    assert run.failures() == ["01_a: cell part-1: the kernel died"]
    assert good.failures() == []


def test_a_cell_that_takes_too_long_is_a_failure(tmp_path):
    slow = "import time\ntime.sleep(8)"
    write_notebook(tmp_path, "01_a", slow, start=False)
    (run,), _ = run_all(tmp_path, timeout=1)
    assert run.failures() == ["01_a: cell part-0: took longer than 1 s"]


DIED = "Kernel died before replying to kernel_info"


def count_starts(monkeypatch, deaths):
    """Let the first kernels die at birth; return the list of starts."""
    start, starts = manager.start_new_async_kernel, []

    async def flaky(**options):
        starts.append(options)
        if len(starts) <= deaths:
            raise RuntimeError(DIED)
        return await start(**options)

    monkeypatch.setattr(manager, "start_new_async_kernel", flaky)
    return starts


def test_a_kernel_that_dies_at_birth_is_started_again(tmp_path, monkeypatch):
    starts = count_starts(monkeypatch, deaths=2)
    write_notebook(tmp_path, "01_a", GOOD, "s.save()")
    (run,), _ = run_all(tmp_path)
    assert run.failures() == []
    assert len(starts) == 3


def test_a_kernel_that_never_starts_is_a_failure(tmp_path, monkeypatch):
    starts = count_starts(monkeypatch, deaths=99)
    write_notebook(tmp_path, "01_a", GOOD, "s.save()")
    (run,), _ = run_all(tmp_path)
    line = f"01_a: before the first cell: RuntimeError: {DIED}"
    assert run.failures() == [line]
    assert len(starts) == 3


# Each writes its own file, then waits for the other's.
MEET = """\
import time
from pathlib import Path
Path("here_{mine}").touch()
deadline = time.monotonic() + 40
while not Path("here_{other}").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
s.check("met", Path("here_{other}").exists())
"""


def test_two_jobs_run_two_notebooks_at_the_same_time(tmp_path):
    for mine, other in (("a", "b"), ("b", "a")):
        meet = MEET.format(mine=mine, other=other)
        write_notebook(tmp_path, f"01_{mine}", meet, "s.save()")
    runs, said = run_all(tmp_path, jobs=2)
    assert [run.failures() for run in runs] == [[], []]
    assert [run.record.notebook for run in runs] == ["01_a", "01_b"]
    endings = sorted(line.partition(",")[0] for line in said)
    assert endings == ["01_a: passed", "01_b: passed"]


def test_executed_copies_are_kept_with_outputs_and_errors(tmp_path):
    write_notebook(tmp_path, "01_a", "print('hello')", "1 / 0")
    output = tmp_path / "new" / "copies"
    run_all(tmp_path, output=output)
    copy = nbformat.read(output / "01_a.ipynb", as_version=4)
    assert copy.cells[1].outputs[0].text == "hello\n"
    assert copy.cells[2].outputs[0].ename == "ZeroDivisionError"
    assert list(output.iterdir()) == [output / "01_a.ipynb"]


def test_a_copy_that_cannot_be_written_is_a_failure(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("disk full")

    monkeypatch.setattr(runner, "write_atomic", refuse)
    write_notebook(tmp_path, "01_a", GOOD, "s.save()")
    (run,), _ = run_all(tmp_path, output=tmp_path / "copies")
    assert run.failures() == ["01_a: cell part-2: OSError: disk full"]


def test_copies_may_not_replace_the_notebooks(tmp_path):
    path = write_notebook(tmp_path, "01_a")
    before = path.read_bytes()
    with pytest.raises(CookbookError, match="would replace them"):
        run_all(tmp_path, output=tmp_path / "notebooks")
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    write_notebook(tmp_path, "01_a")
    (tmp_path / "file").touch()
    with pytest.raises(CookbookError, match="--output"):
        run_all(tmp_path, output=tmp_path / "file" / "copies")


def test_a_file_that_is_no_notebook_stops_the_run_before_it_starts(tmp_path):
    write_notebook(tmp_path, "01_a")
    (tmp_path / "notebooks" / "02_b.ipynb").write_text("{")
    old = write_record(tmp_path / "results", "01_a")
    with pytest.raises(CookbookError, match=r"02_b\.ipynb is not a notebook"):
        run_all(tmp_path)
    assert old.exists()


@pytest.mark.parametrize("name", ["nbformat", "nbclient"])
def test_a_missing_extra_is_an_error_that_names_it(
    tmp_path, monkeypatch, name
):
    write_notebook(tmp_path, "01_a")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CookbookError, match=rf"{name}.*\[notebooks\]"):
        run_all(tmp_path)


def test_the_bar_fills_up_though_a_notebook_stops_early(tmp_path, monkeypatch):
    bars = []

    def watched(**options):
        shown = options | {"disable": False, "file": io.StringIO()}
        bars.append(tqdm(**shown))
        return bars[-1]

    monkeypatch.setattr(runner, "tqdm", watched)
    write_notebook(tmp_path, "01_a", "1 / 0", "x = 1", "x = 2", start=False)
    write_notebook(tmp_path, "02_b", "x = 1", "", "x = 2", start=False)
    run_all(tmp_path)
    # One cell of the first notebook ran, and it raised; two of the second.
    assert (bars[0].n, bars[0].total) == (3, 3)


WAIT = """\
import os, time
from pathlib import Path
Path("part").write_text(str(os.getpid()))
Path("part").rename("pid")
time.sleep(60)
"""


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is not a signal there")
def test_ctrl_c_ends_the_kernel_and_starts_no_other_notebook(tmp_path):
    write_notebook(tmp_path, "01_a", WAIT, start=False)
    touch = "from pathlib import Path\nPath('second').touch()"
    write_notebook(tmp_path, "02_b", touch, start=False)
    command = "from llm_systems_cookbook.tools.cli import app; app()"
    process = subprocess.Popen(
        [sys.executable, "-c", command, "run", "--root", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        pid_file = tmp_path / "notebooks" / "pid"
        assert wait_until(pid_file.exists)
        kernel = int(pid_file.read_text())
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in said, said
    assert wait_until(lambda: not is_running(kernel))
    assert not (tmp_path / "notebooks" / "second").exists()


# --- Writing --------------------------------------------------------------


def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    tmp_path, monkeypatch
):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def refuse(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_has_the_mode_that_the_user_asks_for(tmp_path):
    write_atomic(tmp_path / "a.txt", "new")
    (tmp_path / "b.txt").write_text("plain")
    written, plain = (
        stat.S_IMODE((tmp_path / name).stat().st_mode)
        for name in ("a.txt", "b.txt")
    )
    assert written == plain


def test_a_symbolic_link_still_points_to_the_written_file(tmp_path):
    path, link = tmp_path / "a.txt", tmp_path / "link"
    path.write_text("old")
    link.symlink_to(path)
    write_atomic(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"


def test_hidden_copies_of_an_editor_are_no_notebooks(tmp_path):
    write_notebook(tmp_path, "01_a", GOOD)
    for name in (".~01_a.ipynb", "._01_a.ipynb"):
        (tmp_path / "notebooks" / name).write_bytes(b"\x00")
    assert [path.name for path in notebook_paths(tmp_path)] == ["01_a.ipynb"]
