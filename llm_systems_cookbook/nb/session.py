"""The notebook session: checks, exercises, measurements and their record.

A notebook starts with `s = bootstrap("02_block_allocator")` and ends with
`s.summary()` and `s.save()`. What happens in between is recorded by name, so
running a cell again replaces its record, and written to one JSON file.
"""

import contextlib
import json
import os
import reprlib
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from llm_systems_cookbook import __version__
from llm_systems_cookbook.attention.backends import (
    attention_runs_on,
    turn_interpreter_on,
)
from llm_systems_cookbook.nb.compare import compare, tolerance
from llm_systems_cookbook.nb.environment import (
    Conditions,
    find_checkout,
    working_folder,
)
from llm_systems_cookbook.nb.record import (
    SCHEMA_VERSION,
    SLUG,
    results_folder,
    write_atomic,
)
from llm_systems_cookbook.nb.shown import Row, Source, Summary, source_of
from llm_systems_cookbook.nb.values import (
    is_tensor,
    measurement,
    plain_value,
    shown_measure,
)

_TEXT_LIMIT = 120
_HINT_LIMIT = 480  # what was expected comes last, and is what helps
_MARKS = {"passed": "✓", "failed": "✗", "skipped": "–", "todo": "○"}


class _OneLineError(RuntimeError):
    def _render_traceback_(self) -> list[str]:
        # IPython prints these lines in place of a traceback: the reader needs
        # what the message says, not the inside of this module.
        return [f"{type(self).__name__}: {self}"]


class ChecksFailed(_OneLineError):
    """Raised by `Session.save`, after writing, when a run has not passed."""


class AssertionsOff(_OneLineError):
    """Raised by `bootstrap` where Python leaves out every `assert`."""


def bootstrap(name: str, interpret: bool = False) -> "Session":
    """Start a notebook's session and write an *incomplete* record.

    It says where `paged_attention` runs here; see `attention.backends`.

    A run that stops before `Session.save` leaves that record behind. Calling
    it again starts anew.

    Results go to the directory in the environment variable
    `COOKBOOK_RESULTS`, else to `results/` of the checkout, else to `results/`
    of the working directory.

    Args:
        name: the notebook's file name without its ending. It names the
            record's file: lower-case letters, digits, `_` and `-`, at most
            100 characters.
        interpret: turn Triton's interpreter on where there is no GPU.

    Raises:
        AssertionsOff: Python runs with -O or PYTHONOPTIMIZE; nothing is
            written.
        ValueError: name is not such a plain slug.
        RestartKernel: the interpreter is wanted, and Triton was imported
            without it.
    """
    if sys.flags.optimize:
        # Exercises are graded by asserts: wrong answers would pass.
        raise AssertionsOff(
            "assertions are turned off (python -O or PYTHONOPTIMIZE), and "
            "exercises are graded by them: unset PYTHONOPTIMIZE and restart "
            "Python without -O"
        )
    session = Session(name, results_folder(find_checkout() or Path.cwd()))
    session._write("incomplete")
    _say(f"{name} · llm-systems-cookbook {__version__}")
    _say(f"Results go to {_shown_path(session.path)}")
    # First: whether Triton is interpreted decides what can run on it.
    triton = turn_interpreter_on() if interpret else None
    _say(f"Attention runs on: {attention_runs_on()}")
    if triton is not None:
        _say(f"Triton: {triton}")
    return session


def raises(
    error: type[BaseException], action: Callable[..., object], *args: object
) -> bool:
    """Tell whether `action(*args)` raises `error`; others pass through."""
    try:
        action(*args)
    except error:
        return True
    return False


class Session:
    """The session of one notebook: what was checked, graded and measured.

    Args:
        name: the notebook's name, a plain slug.
        directory: where `save` writes `<name>.json`.

    Raises:
        ValueError: name is not a plain slug.
    """

    def __init__(self, name: str, directory: Path) -> None:
        _require_slug(name)
        self.name = name
        self._directory = directory
        self._checks: dict[str, dict] = {}
        self._measures: dict[str, dict] = {}
        self._exercises: dict[str, dict] = {}

    @property
    def path(self) -> Path:
        """The JSON file that holds this notebook's record."""
        return self._directory / f"{self.name}.json"

    def check(self, name: str, predicate: object, msg: str = "") -> bool:
        """Record and print whether a claim holds.

        Any exception except KeyboardInterrupt is a failure with its message.
        So is a value that is not one boolean: None, several booleans, a
        number, a function.

        Args:
            name: the check's name; a rerun replaces its record.
            predicate: a boolean, or a callable without arguments that returns
                one (a numpy boolean or a 0-d boolean array or tensor counts).
            msg: shown, with the reason, when the check fails.

        Raises:
            TypeError: name is not a string.
            ValueError: name is empty.
        """
        _require_name(name)
        passed, reason = _judge(predicate)
        message = "" if passed else _with_reason(msg, reason)
        return self._record_check(name, passed, message)

    def check_close(
        self,
        name: str,
        actual: object,
        expected: object,
        rtol: float = 1e-6,
        atol: float = 0.0,
    ) -> bool:
        """Record and print whether numbers agree within a tolerance.

        Every element must satisfy |actual - expected| <= atol + rtol *
        |expected|, or be equal (infinities are). Different shapes, NaN,
        nothing to compare and values that are no numbers are failures.
        Integers of any size compare exactly.

        Args:
            name: the check's name; a rerun replaces its record.
            actual: number, numpy array, tensor of any dtype, or nested list.
            expected: the same, of the same shape.
            rtol: relative tolerance, finite and at least 0.
            atol: absolute tolerance, finite and at least 0.

        Raises:
            TypeError: name is not a string.
            ValueError: name is empty, or a tolerance is negative, infinite
                or NaN.
        """
        _require_name(name)
        rtol = tolerance("rtol", rtol)
        atol = tolerance("atol", atol)
        try:
            passed, message = compare(actual, expected, rtol, atol)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            passed, message = False, _describe(error)
        return self._record_check(name, passed, _one_line(message))

    def skip(self, name: str, reason: str) -> None:
        """Record and print that a check could not run here, and why.

        Raises:
            TypeError: name or reason is not a string.
            ValueError: name or reason is empty.
        """
        _require_name(name)
        _require_name(reason, what="reason")
        reason = _one_line(reason)
        self._checks[name] = _outcome(name, "skipped", reason)
        _say(_line("skipped", name, f"skipped: {reason}"))

    def exercise(self, name: str, grader: Callable[[], object]) -> str:
        """Grade an exercise; return "todo", "passed" or "failed".

        It is *todo* while the grader meets a NotImplementedError, as the stub
        raises. Otherwise the grader's result is judged as in `check`.

        Args:
            name: the exercise's name; a rerun replaces its record.
            grader: called without arguments, returns a boolean.

        Raises:
            TypeError: name is not a string, or grader is not callable.
            ValueError: name is empty.
        """
        _require_name(name)
        if not callable(grader):
            raise TypeError(
                f"grader must be callable, got {type(grader).__name__}"
            )
        status, message = _grade(grader)
        self._exercises[name] = _outcome(name, status, message)
        _say(_line(status, name, message or status))
        return status

    def measure(
        self, name: str, value: object, unit: str, **context: object
    ) -> object:
        """Record and print a figure; return it as plain Python.

        In the record NaN and infinities become null, and `non_finite` says
        where they stood. The returned value keeps them.

        Args:
            name: the figure's name; a rerun replaces its record.
            value: number, boolean, string, None, numpy or torch value, or
                lists, tuples and dictionaries of these.
            unit: unit of the value, such as "%" or "bytes"; "" for a count.
            **context: what the figure depends on, of the same types.

        Raises:
            TypeError: a value, or a part of it, is of another type, or name
                or unit is not a string.
            ValueError: name is empty, or two keys of a dictionary read the
                same in JSON.
        """
        _require_name(name)
        if not isinstance(unit, str):
            raise TypeError(f"unit must be str, got {type(unit).__name__}")
        plain = plain_value(value)
        record = measurement(name, plain, unit, plain_value(context))
        self._measures[name] = record
        _say(f"{_one_line(name)} = {_one_line(shown_measure(record))}")
        return plain

    def show_source(self, *objects: object) -> Source:
        """Return the source of classes, functions, methods or properties.

        Raises:
            TypeError: one has no Python source, such as a built-in.
            OSError: the source is not available.
        """
        return Source("\n\n".join(map(source_of, objects)))

    def summary(self) -> Summary:
        """Return all records so far as a table, for text and for HTML."""
        return Summary(
            title=f"{self.name}: {self._counts()}",
            rows=list(self._rows()),
            conditions=Conditions.here().line(),
        )

    def save(self) -> Path:
        """Write the record, print where, and return its path.

        A todo exercise fails a run only in strict mode: the environment
        variable `COOKBOOK_STRICT` is set, and not to 0.

        Raises:
            ChecksFailed: after writing, naming failed checks and exercises,
                or saying that no checks were recorded.
        """
        problems = self._problems()
        path = self._write("failed" if problems else "passed")
        _say(f"Saved {_shown_path(path)}: {self._counts()}")
        if problems:
            raise ChecksFailed(f"{self.name}: {'; '.join(problems)}")
        return path

    def _record_check(self, name: str, passed: bool, message: str) -> bool:
        status = "passed" if passed else "failed"
        self._checks[name] = _outcome(name, status, message)
        _say(_line(status, name, message))
        return passed

    def _problems(self) -> list[str]:
        """Say what keeps this run from passing, one entry per kind."""
        strict = os.environ.get("COOKBOOK_STRICT", "") not in ("", "0")
        found = [
            ("failed checks", _named(self._checks, "failed")),
            ("failed exercises", _named(self._exercises, "failed")),
            ("exercises to do", _named(self._exercises, "todo") * strict),
        ]
        problems = [f"{what}: {', '.join(who)}" for what, who in found if who]
        if not self._checks:
            problems.append("no checks were recorded")
        return problems

    def _counts(self) -> str:
        """Count the checks by status, then the exercises."""
        checks = [
            f"{len(_named(self._checks, status))} {status}"
            for status in ("passed", "failed", "skipped")
        ]
        exercises = [
            f"{len(_named(self._exercises, status))} {status}"
            for status in ("passed", "failed", "todo")
        ]
        return f"checks {', '.join(checks)}; exercises {', '.join(exercises)}"

    def _rows(self) -> Iterator[Row]:
        checks = list(self._checks.values())
        # A failure must not hide among dozens that passed.
        for record in sorted(checks, key=lambda r: r["status"] != "failed"):
            yield Row("check", *_cells(record))
        for record in list(self._measures.values()):
            name = _one_line(record["name"])
            yield Row("measure", name, _one_line(shown_measure(record)))
        for record in list(self._exercises.values()):
            yield Row("exercise", *_cells(record))

    def _write(self, status: str) -> Path:
        """Write the record; where that is impossible, to a new directory."""
        text = json.dumps(self._as_dict(status), allow_nan=False, indent=2)
        try:
            write_atomic(self.path, text + "\n")
        except OSError as error:
            wanted = self._directory
            # An older record must not pass for this run's.
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
            self._directory = Path(tempfile.mkdtemp(prefix="cookbook-"))
            write_atomic(self.path, text + "\n")
            warnings.warn(
                f"cannot write results to {wanted} ({error}); "
                f"they go to {self._directory}",
                stacklevel=3,
            )
        return self.path

    def _as_dict(self, status: str) -> dict:
        return {
            "schema_version": SCHEMA_VERSION,
            "notebook": self.name,
            "status": status,
            "checks": list(self._checks.values()),
            "measures": list(self._measures.values()),
            "exercises": list(self._exercises.values()),
            "conditions": Conditions.here().as_dict(),
        }


# --- Where results go ------------------------------------------------------


def _require_slug(name: object) -> None:
    if not (isinstance(name, str) and SLUG.fullmatch(name)):
        raise ValueError(
            "a notebook's name holds lower-case letters, digits, _ and -, "
            "starts with a letter or digit, and has at most 100 characters; "
            f"got {name!r}"
        )


def _shown_path(path: Path) -> str:
    """Return the path from the working directory or the checkout on."""
    for base in (working_folder(), find_checkout()):
        if base and path.is_relative_to(base):
            return path.relative_to(base).as_posix()
    return str(path)


# --- Names, lines and messages ---------------------------------------------


def _require_name(name: object, what: str = "name") -> None:
    if not isinstance(name, str):
        raise TypeError(f"{what} must be str, got {type(name).__name__}")
    if not name.strip():
        raise ValueError(f"{what} must not be empty, got {name!r}")


def _outcome(name: str, status: str, message: str) -> dict:
    return {"name": name, "status": status, "message": message}


def _cells(record: dict) -> tuple[str, str]:
    """Return a record's name and its result: the status and any message."""
    message = f": {record['message']}" if record["message"] else ""
    return _one_line(record["name"]), record["status"] + message


def _named(records: dict[str, dict], status: str) -> list[str]:
    return [
        _one_line(record["name"])
        for record in list(records.values())
        if record["status"] == status
    ]


def _line(status: str, name: str, message: str) -> str:
    tail = f" — {message}" if message else ""
    return f"{_MARKS[status]} {_one_line(name)}{tail}"


def _with_reason(msg: object, reason: str) -> str:
    msg = _one_line(str(msg))
    reason = _one_line(reason)
    return f"{msg} ({reason})" if msg else reason


def _one_line(text: str, limit: int = _TEXT_LIMIT) -> str:
    """Return the text on one line, printable, and cut where it is long."""
    text = " ".join(text.split())
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return "".join(c if c.isprintable() else "�" for c in text)


def _say(line: str) -> None:
    """Print a line, also where the output's encoding lacks a character."""
    try:
        print(line)
    except UnicodeEncodeError as error:
        print(line.encode(error.encoding, "replace").decode(error.encoding))


def _describe(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = "its message cannot be shown"
    if isinstance(error, AssertionError) and not text:
        text = _failed_line(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _failed_line(error: BaseException) -> str:
    """Return the bare assert that failed, as it is written; "" if unknown."""
    frames = traceback.extract_tb(error.__traceback__)
    line = frames[-1].line if frames else None
    return line if line and line.startswith("assert") else ""


# --- Judging a check -------------------------------------------------------


def _judge(
    predicate: object,
    let_through: tuple[type[BaseException], ...] = (KeyboardInterrupt,),
) -> tuple[bool, str]:
    """Return whether a predicate holds and, when it does not, why."""
    try:
        value = predicate() if callable(predicate) else predicate
        return _verdict(value)
    except let_through:
        raise
    except BaseException as error:
        return False, _describe(error)


def _verdict(value: object) -> tuple[bool, str]:
    if isinstance(value, bool | np.bool_):
        return bool(value), "returned False"
    if value is None:
        return False, "returned None: forgotten return?"
    if is_tensor(value) or isinstance(value, np.ndarray):
        return _array_verdict(value)
    if callable(value):
        return False, "returned a function: forgotten call?"
    kind = type(value).__name__
    return False, f"returned {kind} {reprlib.repr(value)}, not a boolean"


def _array_verdict(value: object) -> tuple[bool, str]:
    kind = type(value).__name__
    if value.ndim:
        shape = tuple(value.shape)
        return False, (
            f"returned {kind} of shape {shape}, not one boolean: "
            "forgotten .all() or .any()?"
        )
    if str(value.dtype) not in ("bool", "torch.bool"):
        return False, f"returned {kind} of {value.dtype}, not a boolean"
    return bool(value), "returned False"


def _grade(grader: Callable[[], object]) -> tuple[str, str]:
    """Return the status of an exercise and its message."""
    try:
        passed, reason = _judge(
            grader, let_through=(KeyboardInterrupt, NotImplementedError)
        )
    except NotImplementedError:
        return "todo", ""
    if passed:
        return "passed", ""
    return "failed", _one_line(reason, _HINT_LIMIT)
