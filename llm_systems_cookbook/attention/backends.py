"""Where attention runs here, and Triton's interpreter, found without torch.

Triton decides when it is first imported whether its kernels are compiled for
a GPU or interpreted on the CPU. Afterwards only a new process can change it.
"""

import importlib.util
import os
import sys
from pathlib import Path

INTERPRET = "TRITON_INTERPRET"
BACKEND = "COOKBOOK_BACKEND"
BACKENDS = ("reference", "gather", "cpu", "triton")

# Files that a driver leaves: without one of them torch need not be asked.
_DRIVERS = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/kfd", "/dev/dxg")


class RestartKernel(RuntimeError):
    """Raised when Triton was imported too early to be interpreted."""

    def _render_traceback_(self) -> list[str]:
        # What to do, in place of a traceback through this package.
        return [f"{type(self).__name__}: {self}"]


def installed(module: str) -> bool:
    """Tell whether a module could be imported; imports nothing."""
    return importlib.util.find_spec(module) is not None


def has_gpu() -> bool:
    """Tell whether torch finds a GPU; imports torch only where one may be."""
    if "torch" not in sys.modules:
        if not any(Path(driver).exists() for driver in _DRIVERS):
            return False
        if not installed("torch"):
            return False
    import torch

    return torch.cuda.is_available()


def attention_runs_on() -> str:
    """Return, for a reader, the backend that `paged_attention` takes here."""
    forced = os.environ.get(BACKEND)
    if forced and forced not in BACKENDS:
        return f"{forced}, which is no backend ({BACKEND} says so)"
    if forced:
        return f"{forced} ({BACKEND} says so)"
    if has_gpu():
        if installed("triton"):
            return "triton, on the GPU"
        return "gather, on the GPU (Triton is not installed)"
    if installed("numba"):
        return "cpu (numba)"
    return "gather (numba is not installed)"


def turn_interpreter_on() -> str:
    """Let Triton interpret its kernels where there is no GPU; say what is.

    Raises:
        RestartKernel: Triton was imported before, without its interpreter.
    """
    if not installed("triton"):
        return "not installed here; its cells are skipped"
    if has_gpu():
        return "compiles for the GPU"
    if "triton" in sys.modules and not interpreting():
        raise RestartKernel(
            "Triton was imported before its interpreter could be turned on. "
            "Restart the kernel, and run this cell first."
        )
    os.environ[INTERPRET] = "1"
    return "interpreted on the CPU, because there is no GPU"


def interpreting() -> bool:
    """Tell whether Triton was imported to interpret; imports it.

    One of its own functions shows it.
    """
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    return not isinstance(tl.sum, JITFunction)
