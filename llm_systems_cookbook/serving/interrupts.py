"""Let Ctrl-C wait while things change that must change together."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Raise what interrupts the block only at its end.

    In another thread than the main one there is nothing to hold: Python
    interrupts only that one. Nor where a program handles the signal in
    another way than by a function.
    """
    handler = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or not callable(handler):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *given: held.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[-1])
