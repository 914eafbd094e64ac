"""Running notebooks: what each comes to, and how Ctrl-C ends them."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from tqdm import tqdm

from llm_systems_cookbook.tools import run as runner
from llm_systems_cookbook.tools.notebooks import (
    CookbookError,
    select_notebooks,
)
from llm_systems_cookbook.tools.run import Settings, run_notebooks

START = (
    "from llm_systems_cookbook.nb import bootstrap\ns = bootstrap('{stem}')\n"
)
GOOD = 's.check("one", lambda: True)'
OLD_RECORD = """\
{"schema_version": 1, "notebook": "stale", "status": "passed", "measures": [],
 "checks": [{"name": "old", "status": "passed"}], "exercises": []}
"""


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


def run_all(root, **settings):
    said = []
    paths = select_notebooks(root, [])
    chosen = Settings(root / "results", **settings)
    runs = run_notebooks(paths, chosen, said.append)
    return runs, said


# --- What each notebook comes to ------------------------------------------

SURROUNDINGS = """\
import os
from pathlib import Path
from llm_systems_cookbook.validate import folder_from
s.check("here", Path.cwd().name == "notebooks" and Path("fine.ipynb").exists())
s.check("inline", "inline" in os.environ["MPLBACKEND"])
s.check("traces", folder_from("COOKBOOK_TRACES") == Path("{traces}"))
s.measure("six", 6, "blocks")
print("hello")
"""
FAILS = """\
s.check("full", lambda: False, "pool not full")
s.exercise("grow", lambda: False)
"""
TODO = """\
def grader():
    raise NotImplementedError

s.exercise("grow", grader)
"""
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
RAISES = "print('x')\nraise ValueError('too many blocks:\\n7 of 6')"
NOTEBOOKS = {
    "fine": (SURROUNDINGS, "", "s.save()"),
    "meet_a": (MEET.format(mine="a", other="b"), "s.save()"),
    "meet_b": (MEET.format(mine="b", other="a"), "s.save()"),
    "raises": (GOOD, RAISES, "s.save()"),
    "fails": (GOOD, FAILS, "s.save()"),
    "todo": (GOOD, TODO, "s.save()"),
    "no_checks": ("s.save()",),
    "never_saves": (GOOD,),
    "stale": ("x = 1",),
    "blocked": ("x = 1",),
    "error_after_save": (GOOD, "s.save()", "1 / 0"),
    "dies": ("import os\nos._exit(7)", "s.save()"),
    "no_copy": (GOOD, "s.save()"),
}


class Ran:
    """All of these notebooks, run once, two at a time."""

    def __init__(self, root, monkeypatch):
        self.root, self.bars = root, []
        monkeypatch.setenv("MPLBACKEND", "agg")
        # As from an env file: no shell has expanded it.
        monkeypatch.setenv("COOKBOOK_TRACES", "~/traces")
        monkeypatch.setattr(runner, "tqdm", self.watched)
        traces = Path.home() / "traces"
        for stem, sources in NOTEBOOKS.items():
            texts = [
                source.replace("{traces}", str(traces)) for source in sources
            ]
            write_notebook(root, stem, *texts, start=stem != "stale")
        before = self.sources()
        (root / "results" / "blocked.json").mkdir(parents=True)
        (root / "results" / "stale.json").write_text(OLD_RECORD)
        (root / "copies" / "no_copy.ipynb").mkdir(parents=True)
        runs, self.said = run_all(root, jobs=2, output=root / "copies")
        self.order = [run.record.notebook for run in runs]
        self.runs = dict(zip(self.order, runs, strict=True))
        self.unchanged = self.sources() == before

    def watched(self, **options):
        shown = options | {"disable": False, "file": io.StringIO()}
        self.bars.append(tqdm(**shown))
        return self.bars[-1]

    def sources(self):
        folder = self.root / "notebooks"
        return [path.read_bytes() for path in sorted(folder.glob("*.ipynb"))]

    def copy(self, stem):
        return nbformat.read(self.root / "copies" / f"{stem}.ipynb", 4)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        return Ran(tmp_path_factory.mktemp("repository"), monkeypatch)


@pytest.mark.parametrize(
    ("stem", "status", "failures"),
    [
        ("fine", "passed", []),
        ("meet_a", "passed", []),
        ("meet_b", "passed", []),
        ("todo", "passed", []),
        (
            "raises",
            "incomplete",
            ["cell part-2: ValueError: too many blocks:"],
        ),
        (
            "fails",
            "failed",
            ["check full: failed: pool not full", "exercise grow: failed"],
        ),
        ("no_checks", "failed", ["cell part-1: ChecksFailed: "]),
        ("never_saves", "incomplete", ["its record is incomplete"]),
        ("stale", "missing", ["its record is missing"]),
        ("blocked", "unreadable", ["before the first cell: IsADirectory"]),
        ("error_after_save", "failed", ["cell part-3: ZeroDivisionError"]),
        ("dies", "incomplete", ["cell part-1: the kernel died"]),
        ("no_copy", "failed", ["cell part-2: IsADirectoryError"]),
    ],
)
def test_a_notebook_comes_to(ran, stem, status, failures):
    run = ran.runs[stem]
    assert run.status == status
    assert len(run.failures()) == len(failures)
    for line, start in zip(run.failures(), failures, strict=True):
        assert line.startswith(f"{stem}: {start}")
    (said,) = [line for line in ran.said if line.startswith(f"{stem}: ")]
    assert re.fullmatch(rf"{stem}: {status}, \d+ s", said)


def test_every_notebook_runs_in_order_and_none_is_changed(ran):
    assert ran.order == sorted(NOTEBOOKS)
    assert len(ran.said) == len(NOTEBOOKS)
    assert ran.unchanged


def test_a_run_reports_what_its_notebook_recorded(ran):
    record = ran.runs["fine"].record
    assert [c["name"] for c in record.checks] == ["here", "inline", "traces"]
    assert record.measures[0]["value"] == 6
    assert ran.runs["todo"].record.counts()["todo"] == 1


def test_executed_copies_are_kept_with_outputs_and_errors(ran):
    assert ran.copy("fine").cells[1].outputs[-1].text.endswith("hello\n")
    assert ran.copy("raises").cells[2].outputs[1].ename == "ValueError"
    names = {path.name for path in (ran.root / "copies").iterdir()}
    assert names == {f"{s}.ipynb" for s in NOTEBOOKS if s != "blocked"}


def test_the_bar_counts_the_notebooks(ran):
    (bar,) = ran.bars
    assert (bar.n, bar.total) == (len(NOTEBOOKS), len(NOTEBOOKS))


def test_an_exercise_to_do_fails_a_strict_run(tmp_path):
    write_notebook(tmp_path, "01_a", GOOD, TODO, "s.save()")
    (run,), _ = run_all(tmp_path, strict=True)
    assert run.failures() == ["01_a: exercise grow: todo"]
    assert run.record.status == "failed"


def test_a_cell_that_takes_too_long_is_a_failure(tmp_path):
    slow = "import time\ntime.sleep(30)"
    write_notebook(tmp_path, "01_a", slow, start=False)
    (run,), _ = run_all(tmp_path, timeout=1)
    assert run.failures() == ["01_a: cell part-0: took longer than 1 s"]
    assert run.seconds < 25, "the kernel does not sleep to its end"


@pytest.mark.parametrize("folder", ["~/traces", "traces", "/traces"])
def test_a_folder_of_traces_is_the_same_one_for_the_kernel(
    tmp_path, monkeypatch, folder
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COOKBOOK_TRACES", folder)
    env = runner._environment(Settings(tmp_path))
    home = folder.replace("~", str(tmp_path / "home"))
    assert env["COOKBOOK_TRACES"] == str(tmp_path / home)


# --- Nothing runs -----------------------------------------------------------


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
    with pytest.raises(CookbookError, match=r"02_b\.ipynb is not a notebook"):
        run_all(tmp_path)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("name", ["nbformat", "nbclient"])
def test_a_missing_extra_is_an_error_that_names_it(
    tmp_path, monkeypatch, name
):
    write_notebook(tmp_path, "01_a")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CookbookError, match=rf"{name}.*\[notebooks\]"):
        run_all(tmp_path)


# --- Ctrl-C -----------------------------------------------------------------

WAIT = """\
import os, time
from pathlib import Path
Path("part").write_text(f"{os.getpid()} {os.getppid()}")
Path("part").rename("pids")
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
    # One that has ended and that nobody has asked about is a zombie.
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or ") Z " not in status.read_text()


def signalled(process):
    process.send_signal(signal.SIGINT)


def ctrl_c_in_a_terminal(process):
    os.killpg(process.pid, signal.SIGINT)


def killed(process):
    process.kill()


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is not a signal there")
@pytest.mark.parametrize(
    ("interrupt", "status"),
    [
        (signalled, 130),
        (ctrl_c_in_a_terminal, 130),
        (killed, -signal.SIGKILL),
    ],
)
def test_an_interrupt_ends_the_kernel_and_starts_no_other_notebook(
    tmp_path, interrupt, status
):
    write_notebook(tmp_path, "01_a", WAIT, start=False)
    touch = "from pathlib import Path\nPath('second').touch()"
    write_notebook(tmp_path, "02_b", touch, start=False)
    command = "from llm_systems_cookbook.tools.cli import app; app()"
    process = subprocess.Popen(
        [sys.executable, "-c", command, "run", "--root", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        pid_file = tmp_path / "notebooks" / "pids"
        assert wait_until(pid_file.exists)
        kernel, worker = map(int, pid_file.read_text().split())
        interrupt(process)
        said, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == status
    assert "Traceback" not in said, said
    assert wait_until(lambda: not is_running(worker))
    assert wait_until(lambda: not is_running(kernel))
    assert not (tmp_path / "notebooks" / "second").exists()
