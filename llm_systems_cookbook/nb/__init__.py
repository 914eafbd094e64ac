"""What does a notebook say? What its session checks, measures and records."""

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
