"""What does a notebook say? Checks, measures, exercises, and their record."""

from llm_systems_cookbook.nb.session import (
    AssertionsOff,
    ChecksFailed,
    Session,
    bootstrap,
    raises,
)

__all__ = [
    "AssertionsOff",
    "ChecksFailed",
    "Session",
    "bootstrap",
    "raises",
]
