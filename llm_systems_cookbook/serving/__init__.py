"""Who runs in the next step, and how long do the requests take?

`Engine` is imported only when it is asked for, because it needs torch and the
other names do not.
"""

from typing import TYPE_CHECKING

from llm_systems_cookbook.serving.metrics import (
    GROWTH,
    SLO,
    Histogram,
    Report,
)
from llm_systems_cookbook.serving.replay import (
    Driver,
    replay,
    requests_from,
)
from llm_systems_cookbook.serving.request import (
    Request,
    RequestState,
    Status,
    TokenOutput,
)
from llm_systems_cookbook.serving.scheduler import (
    Batch,
    Entry,
    RequestRefused,
    Scheduler,
    StaticScheduler,
)
from llm_systems_cookbook.serving.simulator import (
    Clock,
    LinearClock,
    Simulator,
    StepTime,
    one_iteration,
)

if TYPE_CHECKING:
    from llm_systems_cookbook.serving.engine import Engine

__all__ = [
    "GROWTH",
    "SLO",
    "Batch",
    "Clock",
    "Driver",
    "Engine",
    "Entry",
    "Histogram",
    "LinearClock",
    "Report",
    "Request",
    "RequestRefused",
    "RequestState",
    "Scheduler",
    "Simulator",
    "StaticScheduler",
    "Status",
    "StepTime",
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
