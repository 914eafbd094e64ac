"""Let Ctrl-C wait while things change that must change together."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Let an interrupt of the block be raised only at its end.

    Python interrupts the main thread alone, so in any other there is nothing
    to do. Nor is there anything to do where the program's handler of the
    signal is not a function, because the program then decides what Ctrl-C
    means.
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
    """Return the interrupt that caused an error; None if there was none.

    A function in C that was interrupted raises a SystemError whose cause is
    the interrupt. A function in C that called that one raises another
    SystemError, whose cause is the first.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__
    return cause
