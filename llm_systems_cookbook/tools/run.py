"""Run notebooks from top to bottom, several at a time if asked."""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from tqdm import tqdm

from llm_systems_cookbook.nb.record import write_atomic
from llm_systems_cookbook.tools.notebooks import (
    CookbookError,
    import_extra,
)
from llm_systems_cookbook.tools.results import (
    Record,
    entry_lines,
    load_record,
    one_line,
)
from llm_systems_cookbook.validate import folder_from

KERNEL_ARGUMENTS = [
    # Kernels that run at once would wait for one history file.
    "--HistoryManager.hist_file=:memory:",
    # Warnings are about sockets, nothing that a reader can act on.
    "--IPKernelApp.log_level=ERROR",
]


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
        seconds: how long it took, the start of its kernel included.
    """

    record: Record
    error: str = ""
    checks_failed: bool = False
    strict: bool = False
    seconds: float = 0.0

    def failures(self) -> list[str]:
        """Return a line for everything that is wrong; none if all is well."""
        name, record = self.record.notebook, self.record
        bad = {"failed", "todo"} if self.strict else {"failed"}
        lines = [
            *entry_lines("check", record.checks, {"failed"}),
            *entry_lines("exercise", record.exercises, bad),
        ]
        if self.error and not (self.checks_failed and lines):
            lines.insert(0, self.error)
        if not self.error and not record.ok and not lines:
            note = f" ({record.note})" if record.note else ""
            lines.append(f"its record is {record.status}{note}")
        return [f"{name}: {line}" for line in lines]

    @property
    def status(self) -> str:
        """The record's status; `failed` when the run failed all the same."""
        if self.record.ok and self.failures():
            return "failed"
        return self.record.status


# --- Here: share the notebooks out ----------------------------------------


def run_notebooks(
    paths: Sequence[Path],
    settings: Settings,
    report: Callable[[str], None] = print,
) -> list[Run]:
    """Run notebooks from top to bottom, each in a kernel of its own.

    A notebook that fails does not stop the others; a worker that is killed
    leaves those that had not ended as failed, too. A record from before this
    run never counts: it is removed before its notebook starts. Ctrl-C ends
    the kernels, then passes through.

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
    import_extra("nbclient")
    for path in paths:
        _read(path)
    if settings.output is not None:
        _prepare_output(settings.output, paths)
    _make_folder(settings.results, "the folder of the records")
    # Fresh processes: a copy of this one would share its threads' locks.
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with ProcessPoolExecutor(
        settings.jobs, context, _start_worker, (stop,)
    ) as pool:
        try:
            with _workers_ignore_ctrl_c():
                futures = [pool.submit(_run_one, p, settings) for p in paths]
            _report_each(dict(zip(futures, paths, strict=True)), report)
        except BaseException:
            stop.set()
            # Waits for the kernels: each worker ends its own.
            pool.shutdown(cancel_futures=True)
            raise
    return [_outcome(*pair) for pair in zip(futures, paths, strict=True)]


@contextmanager
def _workers_ignore_ctrl_c() -> Iterator[None]:
    # A process that starts meanwhile inherits this, and shows no traceback
    # when Ctrl-C reaches it among its imports.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _report_each(
    futures: dict[Future[Run], Path], report: Callable[[str], None]
) -> None:
    # disable=None: no bar where nobody watches (a pipe, a log file).
    with tqdm(total=len(futures), unit="notebook", disable=None) as bar:
        for future in as_completed(futures):
            run = _outcome(future, futures[future])
            bar.clear()
            report(f"{run.record.notebook}: {run.status}, {run.seconds:.0f} s")
            bar.update(1)


def _outcome(future: Future[Run], path: Path) -> Run:
    try:
        return future.result()
    except BrokenProcessPool as error:
        # Whatever record is there may be from before this run.
        return Run(Record(path.stem, "missing"), one_line(error))


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


def _read(path: Path) -> Any:  # noqa: ANN401
    try:
        return import_extra("nbformat").read(path, as_version=4)
    except CookbookError:
        raise
    except Exception as error:  # nbformat raises many kinds, all about a file
        raise CookbookError(
            f"{path} is not a notebook: {one_line(error)}"
        ) from error


# --- In a worker: run one -------------------------------------------------

_stop: Event  # set when the worker is to end its notebook and take no other


def _start_worker(stop: Event) -> None:
    global _stop
    _stop = stop
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C reaches the parent alone, which sets `stop`
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A killed parent cannot set `stop`, so we wait for its end. The kernel
    # ends by itself when its worker does.
    multiprocessing.parent_process().join()
    os._exit(1)


def _run_one(path: Path, settings: Settings) -> Run:
    """Run one notebook; whatever stops it is its failure, and no other's."""
    if _stop.is_set():
        raise KeyboardInterrupt  # it had this one at hand; records stay
    start = time.monotonic()
    begun: list[str] = []  # the ids of the cells
    error, checks_failed = "", False
    try:
        # An old record that stays would be taken for this run's.
        (settings.results / f"{path.stem}.json").unlink(missing_ok=True)
        _run_cells(path, settings, begun)
    except Exception as problem:
        where = f"cell {begun[-1]}" if begun else "before the first cell"
        error = f"{where}: {_in_words(problem, settings)}"
        checks_failed = getattr(problem, "ename", "") == "ChecksFailed"
    return Run(
        load_record(settings.results, path.stem),
        error,
        checks_failed,
        settings.strict,
        time.monotonic() - start,
    )


def _run_cells(path: Path, settings: Settings, begun: list[str]) -> None:
    from nbclient import NotebookClient

    notebook = _read(path)
    client = NotebookClient(
        notebook,
        timeout=settings.timeout,
        kernel_name="python3",
        extra_arguments=KERNEL_ARGUMENTS,
        resources={"metadata": {"path": str(path.parent)}},
        shutdown_kernel="immediate",
        record_timing=False,
        store_widget_state=False,
    )

    def begin(cell: Any, cell_index: int) -> None:  # noqa: ANN401
        begun.append(cell.get("id", f"number {cell_index}"))
        # A busy kernel would see a request to shut down too late.
        client.shutdown_kernel = "immediate"

    def end(**_: object) -> None:
        client.shutdown_kernel = "graceful"

    client.on_cell_execute, client.on_cell_executed = begin, end
    try:
        asyncio.run(_until_stopped(client, _environment(settings)))
    finally:
        _keep_copy(path, settings, notebook)


async def _until_stopped(client: Any, env: dict[str, str]) -> None:  # noqa: ANN401
    work = asyncio.ensure_future(client.async_execute(env=env))
    while not (work.done() or _stop.is_set()):
        await asyncio.wait([work], timeout=0.2)
    work.cancel()  # nothing, if it is done; else nbclient ends the kernel
    await work


def _environment(settings: Settings) -> dict[str, str]:
    """Return the kernel's variables: it starts in another folder."""
    env = dict(os.environ, COOKBOOK_RESULTS=str(settings.results))
    env.pop("MPLBACKEND", None)  # the kernel draws inline
    traces = folder_from("COOKBOOK_TRACES")
    if traces is not None:
        env["COOKBOOK_TRACES"] = str(traces)
    if settings.strict:
        env["COOKBOOK_STRICT"] = "1"
    return env


def _keep_copy(path: Path, settings: Settings, notebook: Any) -> None:  # noqa: ANN401
    if settings.output is not None:
        text = import_extra("nbformat").writes(notebook).rstrip("\n") + "\n"
        write_atomic(settings.output / path.name, text)


def _in_words(problem: Exception, settings: Settings) -> str:
    from nbclient import exceptions

    match problem:
        case exceptions.CellExecutionError():
            return f"{problem.ename}: {one_line(problem.evalue)}"
        case exceptions.CellTimeoutError():
            return f"took longer than {settings.timeout} s"
        case exceptions.DeadKernelError():
            return "the kernel died"
    return f"{type(problem).__name__}: {one_line(problem)}"
