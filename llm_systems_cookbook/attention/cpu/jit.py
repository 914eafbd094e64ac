"""How the CPU kernels are compiled by numba.

numba keeps what it compiled until the file of the function changes, and does
not look at this one: after a change here, clear its cache (`__pycache__`).
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from numba import config, njit
from numba.core.caching import FunctionCache


class _OptionalCache(FunctionCache):
    """numba's cache on disk, which never costs an error.

    What cannot be read is compiled again, and what cannot be written stays
    in memory.
    """

    def load_overload(self, *what: Any) -> Any:  # noqa: ANN401
        try:
            return super().load_overload(*what)
        except Exception:
            # A damaged index would stay: nothing is saved before it is read.
            with suppress(Exception):
                self.flush()
            return None

    def save_overload(self, *what: Any) -> None:  # noqa: ANN401
        with suppress(Exception):
            super().save_overload(*what)


def compiled(**options: object) -> Callable[[Callable], Callable]:
    """Return njit that keeps its result on disk, where that is possible."""
    options["error_model"] = "numpy"  # no test for a division by zero
    options["no_cfunc_wrapper"] = True  # C calls nothing here: compiles faster

    def decorate(function: Callable) -> Callable:
        dispatcher = njit(**options)(function)
        # Without its compiler, numba returns the function as it is. There is
        # no cache either where no folder for one can be written.
        if not config.DISABLE_JIT:
            with suppress(Exception):
                dispatcher._cache = _OptionalCache(function)
        return dispatcher

    return decorate


def inlined(**options: object) -> Callable[[Callable], Callable]:
    """Return njit that copies a function into its callers.

    A call that passes arrays takes longer than what most functions here do.
    """
    return compiled(forceinline=True, **options)
