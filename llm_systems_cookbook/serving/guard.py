"""One call at a time, from one thread: refuse others instead of waiting."""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Guard:
    """Know whose call is running, and whether a step is.

    A lock would hide the mistake: another thread's request would wait for
    the end of a step, or of all of `generate`. So it is an error, at once.
    """

    def __init__(self) -> None:
        self._taking = threading.Lock()  # held for a comparison, no longer
        self._owner: int | None = None
        self._is_stepping = False

    def call(
        self, function: Callable[P, R], *args: P.args, **options: P.kwargs
    ) -> R:
        """Call a function, unless another thread's call is running.

        Raises:
            RuntimeError: one is running; the function was not called.
        """
        me = threading.get_ident()
        outermost = self._owner != me
        try:
            self._take(me)
            return function(*args, **options)
        finally:
            # Ctrl-C is raised where a function is called. So we call none
            # here: otherwise the guard could stay taken for ever.
            if outermost and self._owner == me:
                self._owner = None

    def _take(self, me: int) -> None:
        with self._taking:
            if self._owner is None:
                self._owner = me
            if self._owner != me:
                raise RuntimeError(
                    f"a call from thread {threading.current_thread().name!r} "
                    f"while one from another thread is running: serve from "
                    f"one thread, or take a lock around every call"
                )

    def step(
        self, function: Callable[P, R], *args: P.args, **options: P.kwargs
    ) -> R:
        """Call a function that computes a step, unless a step is running.

        Raises:
            RuntimeError: one is running; the function was not called.
        """
        if self._is_stepping:
            raise RuntimeError("a step is running already")
        try:
            self._is_stepping = True
            return function(*args, **options)
        finally:
            self._is_stepping = False


class Guarded(Protocol):
    """What the decorators below need: a guard of its own."""

    _guard: Guard


S = TypeVar("S", bound=Guarded)
Method = Callable[Concatenate[S, P], R]


def one_thread(method: Method[S, P, R]) -> Method[S, P, R]:
    """Refuse a call while another thread's call is running."""

    @wraps(method)
    def guarded(self: S, *args: P.args, **options: P.kwargs) -> R:
        return self._guard.call(method, self, *args, **options)

    return guarded


def one_step(method: Method[S, P, R]) -> Method[S, P, R]:
    """Refuse a step within a step, and as `one_thread` does."""

    @wraps(method)
    def guarded(self: S, *args: P.args, **options: P.kwargs) -> R:
        guard = self._guard
        return guard.call(guard.step, method, self, *args, **options)

    return guarded
