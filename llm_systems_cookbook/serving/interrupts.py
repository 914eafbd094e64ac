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


def interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """Return the interrupt that an error comes from; None if from none.

    A function in C that was interrupted reports a SystemError, with what
    happened as its cause; one that called it, another.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__
    return cause
