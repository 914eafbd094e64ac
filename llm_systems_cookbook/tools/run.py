"""Run the notebooks, and read the records that they leave behind."""

import asyncio
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from tqdm import tqdm

from llm_systems_cookbook.nb.record import (
    SCHEMA_VERSION,
    results_folder,
    write_atomic,
)
from llm_systems_cookbook.tools.notebooks import (
    CookbookError,
    import_extra,
    notebook_paths,
)

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

START_ATTEMPTS = 3
KERNEL_ARGUMENTS = [
    # Kernels that run at once would wait for one history file.
    "--HistoryManager.hist_file=:memory:",
    # Warnings are about sockets, nothing that a reader can act on.
    "--IPKernelApp.log_level=ERROR",
]

CHECK_STATUSES = ("passed", "failed", "skipped")
EXERCISE_STATUSES = ("passed", "failed", "todo")
RECORD_STATUSES = ("incomplete", "passed", "failed")


# --- Records --------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """What `results/<notebook>.json` says, or why it says nothing.

    Attributes:
        notebook: stem of the notebook's file name.
        status: `passed`, `failed`, `incomplete`, `missing`, `unreadable` or
            `wrong schema`.
        checks: dicts with name, status and message.
        exercises: dicts with name, status and message.
        measures: dicts with name, value, unit and context.
        note: why the record is unreadable or of another schema.
    """

    notebook: str
    status: str
    checks: list[dict[str, Any]] = field(default_factory=list)
    exercises: list[dict[str, Any]] = field(default_factory=list)
    measures: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""

    def counts(self) -> dict[str, int]:
        """Count checks and exercises: a solved exercise is no check."""
        checks = Counter(entry["status"] for entry in self.checks)
        exercises = Counter(entry["status"] for entry in self.exercises)
        return {
            "passed": checks["passed"],
            "failed": checks["failed"] + exercises["failed"],
            "skipped": checks["skipped"],
            "solved": exercises["passed"],
            "todo": exercises["todo"],
        }

    def remarks(self) -> list[str]:
        """Return a line for what failed, was skipped or cannot be read."""
        lines = [
            *_entries("check", self.checks, {"failed", "skipped"}),
            *_entries("exercise", self.exercises, {"failed"}),
        ]
        if self.status == "incomplete":
            lines.append("incomplete: it stopped before it saved its results")
        if self.note:
            lines.append(f"{self.status}: {self.note}")
        return [f"{self.notebook}: {line}" for line in lines]

    @property
    def ok(self) -> bool:
        """Whether the notebook is complete and passed."""
        return self.status == "passed"


def load_record(folder: Path, notebook: str) -> Record:
    """Read one notebook's record; whatever is wrong becomes its status."""
    path = folder / f"{notebook}.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Record(notebook, "missing", note=f"no {path}")
    except (OSError, ValueError) as error:
        return Record(notebook, "unreadable", note=f"{path}: {error}")
    if not isinstance(data, dict):
        return Record(notebook, "unreadable", note=f"{path}: not an object")
    schema = data.get("schema_version")
    if schema != SCHEMA_VERSION:
        note = f"{path}: schema {schema!r}, expected {SCHEMA_VERSION}"
        return Record(notebook, "wrong schema", note=note)
    problem = _record_problem(data, notebook)
    if problem:
        return Record(notebook, "unreadable", note=f"{path}: {problem}")
    return _record(data)


def _record_problem(data: dict[str, Any], notebook: str) -> str | None:
    if data.get("notebook") != notebook:
        return f"is a record of {data.get('notebook')!r}"
    if data.get("status") not in RECORD_STATUSES:
        return f"unknown status {data.get('status')!r}"
    for key, statuses in (
        ("checks", CHECK_STATUSES),
        ("exercises", EXERCISE_STATUSES),
        ("measures", None),
    ):
        entries = data.get(key)
        if not isinstance(entries, list):
            return f"{key} is not a list"
        for entry in entries:
            if not isinstance(entry, dict) or "name" not in entry:
                return f"an entry of {key} has no name"
            if statuses and entry.get("status") not in statuses:
                return f"{entry['name']}: status {entry.get('status')!r}"
    return None


def _record(data: dict[str, Any]) -> Record:
    record = Record(
        data["notebook"],
        data["status"],
        data["checks"],
        data["exercises"],
        data["measures"],
    )
    if record.ok and (record.counts()["failed"] or not record.checks):
        return Record(
            record.notebook,
            "unreadable",
            note="says passed, with a failed check or without any check",
        )
    return record


def load_records(root: Path) -> tuple[list[Record], list[str]]:
    """Read the record of every notebook of the repository.

    Returns:
        The records in the order of the notebooks, and the names of record
        files that belong to no notebook.
    """
    folder = results_folder(root)
    stems = [path.stem for path in notebook_paths(root)]
    others = {path.stem for path in folder.glob("*.json")} - set(stems)
    records = [load_record(folder, stem) for stem in stems]
    return records, sorted(f"{stem}.json" for stem in others)


# --- Running --------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """How to run notebooks.

    Attributes:
        results: folder of the records.
        timeout: seconds that one cell may take.
        jobs: notebooks that run at the same time.
        strict: an exercise left to do fails its notebook.
        output: folder for the executed copies; None keeps none.
    """

    results: Path
    timeout: int = 120
    jobs: int = 1
    strict: bool = False
    output: Path | None = None


@dataclass(frozen=True)
class Run:
    """What came of running one notebook.

    Attributes:
        record: the record that this run wrote.
        error: one line on what stopped it; empty when it ran to its end.
        checks_failed: what stopped it was `save()`, naming failures that
            the record holds one by one.
        strict: whether an exercise left to do is a failure.
    """

    record: Record
    error: str = ""
    checks_failed: bool = False
    strict: bool = False

    def failures(self) -> list[str]:
        """Return a line for everything that is wrong; none if all is well."""
        name, record = self.record.notebook, self.record
        lines = [
            *_entries("check", record.checks, {"failed"}),
            *_entries("exercise", record.exercises, self._bad()),
        ]
        if self.error and not (self.checks_failed and lines):
            lines.insert(0, self.error)
        if not self.error and not record.ok and not lines:
            note = f" ({record.note})" if record.note else ""
            lines.append(f"its record is {record.status}{note}")
        return [f"{name}: {line}" for line in lines]

    def _bad(self) -> set[str]:
        return {"failed", "todo"} if self.strict else {"failed"}

    @property
    def status(self) -> str:
        """The record's status; `failed` when the run failed all the same."""
        if self.record.ok and self.failures():
            return "failed"
        return self.record.status


def _entries(
    kind: str, entries: Iterable[dict[str, Any]], statuses: set[str]
) -> list[str]:
    return [
        f"{kind} {entry['name']}: {entry['status']}"
        + (f": {one_line(entry['message'])}" if entry.get("message") else "")
        for entry in entries
        if entry["status"] in statuses
    ]


def one_line(text: object) -> str:
    """Return the first line of a message that says something, uncoloured."""
    lines = ANSI.sub("", str(text)).strip().splitlines()
    return lines[0].strip() if lines else ""


def run_notebooks(
    paths: Sequence[Path],
    settings: Settings,
    report: Callable[[str], None] = print,
) -> list[Run]:
    """Run notebooks from top to bottom, each in a kernel of its own.

    A notebook that fails does not stop the others. A record from before this
    run never counts: it is removed before its notebook starts.

    Args:
        paths: the notebooks; each runs in its own folder.
        settings: how to run them.
        report: called with one line as each notebook ends: how, and after
            how many seconds, the start of its kernel included.

    Returns:
        What came of each, in the order of `paths`.

    Raises:
        CookbookError: nbclient is missing, a file is not a notebook, or
            `settings.output` is the folder of a notebook, or a folder cannot
            be made; nothing has run.
    """
    nbformat = import_extra("nbformat")
    import_extra("nbclient")
    if settings.output is not None:
        _prepare_output(settings.output, paths)
    notebooks = [_read(nbformat, path) for path in paths]
    _make_folder(settings.results, "the folder of the records")
    total = sum(len(_code_cells(notebook)) for notebook in notebooks)
    # disable=None: no bar where nobody watches (a pipe, a log file).
    with tqdm(total=total, unit="cell", disable=None) as bar:
        batch = _Batch(settings, bar, report)
        return _in_background(batch.run(paths, notebooks), batch.cancel)


def _prepare_output(output: Path, paths: Sequence[Path]) -> None:
    if any(path.resolve().parent == output.resolve() for path in paths):
        raise CookbookError(
            f"--output {output} is a folder the notebooks come from; the "
            "executed copies would replace them"
        )
    _make_folder(output, "--output")


def _make_folder(folder: Path, purpose: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CookbookError(f"{purpose}: {error}") from error


def _read(nbformat: ModuleType, path: Path) -> Any:  # noqa: ANN401
    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:  # nbformat raises many kinds, all about a file
        raise CookbookError(
            f"{path} is not a notebook: {one_line(error)}"
        ) from error


def _code_cells(notebook: Any) -> list[Any]:  # noqa: ANN401
    # The client passes over empty cells, so they do not count.
    return [
        cell
        for cell in notebook.cells
        if cell.cell_type == "code" and cell.source.strip()
    ]


def _in_background(
    work: Coroutine[Any, Any, list[Run]], cancel: Callable[[], None]
) -> list[Run]:
    """Run a coroutine in a thread of its own; Ctrl-C cancels it.

    In the main thread nbclient would catch Ctrl-C itself: one kernel would
    end, and the next notebook would start.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(asyncio.run, work)
        try:
            return future.result()
        except KeyboardInterrupt:
            cancel()  # leaving the `with` waits until the kernels are gone
            raise


class _Batch:
    """Notebooks that run together, in one event loop."""

    def __init__(
        self, settings: Settings, bar: tqdm, report: Callable[[str], None]
    ) -> None:
        self.settings = settings
        self.bar = bar
        self.report = report
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(
        self, paths: Sequence[Path], notebooks: Sequence[Any]
    ) -> list[Run]:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        places = asyncio.Semaphore(self.settings.jobs)
        # A group that is cancelled waits until every kernel has ended.
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._run_one(places, path, notebook))
                for path, notebook in zip(paths, notebooks, strict=True)
            ]
        return [task.result() for task in tasks]

    def cancel(self) -> None:
        """Stop everything; called from another thread."""
        if self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)

    async def _run_one(
        self,
        places: asyncio.Semaphore,
        path: Path,
        notebook: Any,  # noqa: ANN401
    ) -> Run:
        async with places:
            start = time.monotonic()
            run = await _Execution(self, path, notebook).run()
            seconds = time.monotonic() - start
        self.bar.clear()
        self.report(f"{path.stem}: {run.status}, {seconds:.0f} s")
        self.bar.refresh()
        return run


class _Execution:
    """One notebook on its way through a kernel."""

    def __init__(self, batch: _Batch, path: Path, notebook: Any) -> None:  # noqa: ANN401
        self.settings = batch.settings
        self.bar = batch.bar
        self.path = path
        self.notebook = notebook
        self.cell = ""
        self.cells_left = len(_code_cells(notebook))

    async def run(self) -> Run:
        stem, results = self.path.stem, self.settings.results
        try:
            (results / f"{stem}.json").unlink(missing_ok=True)
            error, checks_failed = await self._execute()
            self._keep_copy()
        except OSError as problem:
            # An old record that stays would be taken for this run's; a copy
            # that was asked for and is not there is a failure, too.
            error, checks_failed = self._at_cell(_describe(problem)), False
        # Cells that will not run leave the bar, so that it can fill up.
        self.bar.total -= self.cells_left
        return Run(
            load_record(results, stem),
            error,
            checks_failed,
            self.settings.strict,
        )

    async def _execute(self) -> tuple[str, bool]:
        """Run the cells; return what stopped them, and whether save() did."""
        from nbclient import exceptions

        try:
            await self._run_cells()
        except exceptions.CellExecutionError as error:
            line = f"{error.ename}: {one_line(error.evalue)}"
            return self._at_cell(line), error.ename == "ChecksFailed"
        except exceptions.CellTimeoutError:
            line = f"took longer than {self.settings.timeout} s"
            return self._at_cell(line), False
        except exceptions.DeadKernelError:
            return self._at_cell("the kernel died"), False
        except Exception as error:
            # Whatever stops one notebook is its failure, named in full, and
            # no reason to lose the others.
            return self._at_cell(_describe(error)), False
        return "", False

    async def _run_cells(self) -> None:
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError

        manager, channels = await self._start_kernel()
        client = NotebookClient(
            self.notebook,
            km=manager,
            timeout=self.settings.timeout,
            on_cell_execute=self._on_start,
            on_cell_executed=self._on_end,
            record_timing=False,
            store_widget_state=False,
        )
        client.kc = channels
        is_idle = False
        try:
            await client.async_execute()
            is_idle = True
        except CellExecutionError:
            is_idle = True
            raise
        finally:
            channels.stop_channels()
            # A busy kernel would not hear a polite request.
            await manager.shutdown_kernel(now=not is_idle)

    async def _start_kernel(self) -> tuple[Any, Any]:
        """Start a kernel; return its manager and the client's channels."""
        from jupyter_client import manager

        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                started, channels = await manager.start_new_async_kernel(
                    kernel_name="python3",
                    cwd=str(self.path.parent),
                    env=self._environment(),
                    extra_arguments=KERNEL_ARGUMENTS,
                )
                break
            except RuntimeError:
                # Kernels get their ports before they open them. When another
                # program takes one in between, the kernel dies at birth.
                if attempt == START_ATTEMPTS:
                    raise
        channels.allow_stdin = False
        return started, channels

    def _environment(self) -> dict[str, str]:
        env = dict(os.environ, COOKBOOK_RESULTS=str(self.settings.results))
        env.pop("MPLBACKEND", None)  # the kernel draws inline
        if env.get("COOKBOOK_TRACES"):  # it starts in another folder
            env["COOKBOOK_TRACES"] = os.path.abspath(env["COOKBOOK_TRACES"])
        if self.settings.strict:
            env["COOKBOOK_STRICT"] = "1"
        return env

    def _on_start(self, cell: Any, cell_index: int) -> None:  # noqa: ANN401
        self.cell = cell.get("id", f"number {cell_index}")

    def _on_end(self, **_: object) -> None:
        self.cells_left -= 1
        self.bar.update(1)

    def _at_cell(self, line: str) -> str:
        where = f"cell {self.cell}" if self.cell else "before the first cell"
        return f"{where}: {line}"

    def _keep_copy(self) -> None:
        if self.settings.output is None:
            return
        nbformat = import_extra("nbformat")
        text = nbformat.writes(self.notebook).rstrip("\n") + "\n"
        write_atomic(self.settings.output / self.path.name, text)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"
