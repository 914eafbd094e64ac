"""Time: who runs when, and how long it takes.

`Engine` is imported when it is asked for: it needs torch, the others do not.
"""

from typing import TYPE_CHECKING

from llm_systems_cookbook.serving.metrics import SLO, Histogram, Report
from llm_systems_cookbook.serving.replay import (
    Driver,
    replay,
    requests_from,
)
from llm_systems_cookbook.serving.request import Request, TokenOutput
from llm_systems_cookbook.serving.scheduler import (
    Batch,
    Entry,
    RequestRefused,
    Scheduler,
    StaticScheduler,
)
from llm_systems_cookbook.serving.simulator import (
    LinearClock,
    Simulator,
    one_iteration,
)

if TYPE_CHECKING:
    from llm_systems_cookbook.serving.engine import Engine

__all__ = [
    "SLO",
    "Batch",
    "Driver",
    "Engine",
    "Entry",
    "Histogram",
    "LinearClock",
    "Report",
    "Request",
    "RequestRefused",
    "Scheduler",
    "Simulator",
    "StaticScheduler",
    "TokenOutput",
    "one_iteration",
    "replay",
    "requests_from",
]


def __getattr__(name: str) -> object:
    if name == "Engine":
        from llm_systems_cookbook.serving.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
