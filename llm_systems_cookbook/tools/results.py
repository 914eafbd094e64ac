"""Read the records that notebooks leave behind."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_systems_cookbook.nb.record import SCHEMA_VERSION, results_folder
from llm_systems_cookbook.nb.values import shown_measure, shown_value
from llm_systems_cookbook.tools.notebooks import notebook_paths

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

RECORD_STATUSES = ("incomplete", "passed", "failed")
ENTRY_STATUSES = {
    "checks": ("passed", "failed", "skipped"),
    "exercises": ("passed", "failed", "todo"),
}
# What an entry may leave out, and what each of these is when it is there.
OPTIONAL = {"message": str, "unit": str, "context": dict, "non_finite": dict}


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
            *entry_lines("check", self.checks, {"failed", "skipped"}),
            *entry_lines("exercise", self.exercises, {"failed"}),
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


def entry_lines(
    kind: str, entries: Iterable[dict[str, Any]], statuses: set[str]
) -> list[str]:
    """Return a line for each entry of a record with one of the statuses."""
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


def load_record(folder: Path, notebook: str) -> Record:
    """Read one notebook's record; whatever is wrong becomes its status."""
    path = folder / f"{notebook}.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        status, problem = _problem(data, notebook)
    except FileNotFoundError:
        return Record(notebook, "missing", note=f"no {path}")
    except RecursionError:
        status, problem = "unreadable", "is nested too deeply"
    except (OSError, ValueError) as error:
        status, problem = "unreadable", str(error)
    if problem:
        return Record(notebook, status, note=f"{path}: {problem}")
    return Record(
        notebook,
        data["status"],
        data["checks"],
        data["exercises"],
        data["measures"],
    )


def _problem(data: object, notebook: str) -> tuple[str, str]:
    """Return the status that a file deserves and why; no why if it is fine.

    Anything may lie under a record's name. What passes here can be counted
    and shown without another look.
    """
    if not isinstance(data, dict):
        return "unreadable", "not an object"
    schema = data.get("schema_version")
    if schema != SCHEMA_VERSION:
        return "wrong schema", f"schema {schema!r}, expected {SCHEMA_VERSION}"
    if data.get("notebook") != notebook:
        return "unreadable", f"is a record of {data.get('notebook')!r}"
    if data.get("status") not in RECORD_STATUSES:
        return "unreadable", f"unknown status {data.get('status')!r}"
    for key in ("checks", "exercises", "measures"):
        if not isinstance(data.get(key), list):
            return "unreadable", f"{key} is not a list"
        for entry in data[key]:
            problem = _entry_problem(entry, ENTRY_STATUSES.get(key))
            if problem:
                return "unreadable", f"an entry of {key} {problem}"
    if data["status"] == "passed" and not _passes(data):
        why = "says passed, with a failed check or without any check"
        return "unreadable", why
    return "", ""


def _entry_problem(entry: object, statuses: tuple[str, ...] | None) -> str:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return "has no name"
    for key, kind in OPTIONAL.items():
        if key in entry and not isinstance(entry[key], kind):
            return f"has a {key} that is no {kind.__name__}: {entry['name']}"
    if statuses and entry.get("status") not in statuses:
        return f"has the status {entry.get('status')!r}: {entry['name']}"
    # What is nested too deeply to be shown is found now, not in a table.
    shown_measure(entry)
    shown_value([*entry.get("non_finite", {}).values()])
    return ""


def _passes(data: dict[str, Any]) -> bool:
    entries = data["checks"] + data["exercises"]
    failed = any(entry["status"] == "failed" for entry in entries)
    return bool(data["checks"]) and not failed
