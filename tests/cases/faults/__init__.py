"""Faulty versions of the taught code, by room: see test_faults.py."""

from typing import NamedTuple


class Fault(NamedTuple):
    """One piece of the package's source, and a faulty one in its place.

    `module` is a path relative to the package. `check` is what must notice:
    a check of the notebook, or of `cases.serving_checks`.
    """

    name: str
    notebook: str
    module: str
    old: str
    new: str
    check: str
