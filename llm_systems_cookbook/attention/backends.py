"""Which backend can run here, which one is taken, and why not another.

Nothing here imports torch or Triton before it must, so a notebook that
computes nothing can say where attention would run. Triton decides when it is
first imported whether its kernels are compiled for a GPU or interpreted on
the CPU. Afterwards only a new process can change it.
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

INTERPRET = "TRITON_INTERPRET"
DISABLE_JIT = "NUMBA_DISABLE_JIT"
BACKEND = "COOKBOOK_BACKEND"
BACKENDS = ("reference", "gather", "cpu", "triton")

_INTERPRETER_OFF = (
    f"the tensors are on the CPU, and Triton's interpreter is off "
    f"({INTERPRET}=1 turns it on, before Triton is imported)"
)
# Files that a driver leaves: without one of them torch need not be asked.
_DRIVERS = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/kfd", "/dev/dxg")


class RestartKernel(RuntimeError):
    """Raised when Triton was imported too early to be interpreted."""

    def _render_traceback_(self) -> list[str]:
        # What to do, in place of a traceback through this package.
        return [f"{type(self).__name__}: {self}"]


class Place(NamedTuple):
    """What a choice depends on: where a tensor lies, and its dtype.

    Attributes:
        device: as torch prints it, such as "cpu" or "cuda:0".
        dtype: its name, such as "float32".
    """

    device: str
    dtype: str = "float32"

    @classmethod
    def of(cls, tensor: "Tensor") -> "Place":
        """Return where a tensor lies."""
        return cls(str(tensor.device), str(tensor.dtype).split(".")[-1])

    @property
    def on_cpu(self) -> bool:
        """Whether it lies in the host's memory."""
        return self.device == "cpu"

    @property
    def on_gpu(self) -> bool:
        """Whether it lies on a GPU that torch calls CUDA; AMD's are, too."""
        return self.device.startswith("cuda")


# --- Choosing ---------------------------------------------------------------


def choose_backend(tensor: "Tensor", backend: str = "auto") -> str:
    """Return the backend to use for a tensor on its device.

    Raises:
        ValueError: the backend is unknown, or cannot run this here.
    """
    return _chosen(Place.of(tensor), backend)


def why_not(backend: str, tensor: "Tensor") -> str:
    """Return what keeps a backend from taking a tensor; "" if nothing."""
    return _reason(backend, Place.of(tensor))


def _chosen(place: Place, backend: str) -> str:
    if backend == "auto":
        backend = os.environ.get(BACKEND) or _fastest(place)
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    reason = _reason(backend, place)
    if reason:
        raise ValueError(f"backend {backend!r} cannot run here: {reason}")
    return backend


def _fastest(place: Place) -> str:
    if not place.on_gpu:
        return "gather" if _reason("cpu", place) else "cpu"
    if _reason("triton", place) or interpreting():
        return "gather"  # the interpreter runs only when it is asked for
    return "triton"


def _reason(backend: str, place: Place) -> str:
    if backend == "cpu" and not place.on_cpu:
        return f"the tensors are on {place.device}"
    if backend == "cpu" and not installed("numba"):
        return "numba is not installed"
    if backend == "cpu" and _numbas_compiler_is_off():
        return f"numba's compiler is off ({DISABLE_JIT})"
    if backend in _ruled_out:
        return _ruled_out[backend]
    if backend == "triton":
        return _why_not_triton(place)
    return ""


def rule_out(backend: str, reason: str) -> None:
    """Stop choosing a backend in this process.

    A backend calls this itself when it finds out that it cannot run.
    """
    _ruled_out[backend] = reason


_ruled_out: dict[str, str] = {}


def _numbas_compiler_is_off() -> bool:
    """Tell whether numba runs its functions as plain Python; imports nothing.

    The kernels would crash, because they are no plain Python.
    """
    if "numba" in sys.modules:
        return bool(sys.modules["numba"].config.DISABLE_JIT)
    given = os.environ.get(DISABLE_JIT, "").strip()
    return given.isdigit() and int(given) != 0


def _why_not_triton(place: Place) -> str:
    if not installed("triton"):
        return "Triton is not installed"
    if place.dtype == "float64":
        return "the Triton kernels take float32, float16 and bfloat16"
    if not place.on_gpu and not _could_interpret():
        return _INTERPRETER_OFF
    from llm_systems_cookbook.attention.triton.kernels import INTERPRETED

    if interpreting() != INTERPRETED:
        return f"{INTERPRET} was changed after Triton was imported"
    if INTERPRETED:
        return ""
    return _why_not_this_gpu(place) if place.on_gpu else _INTERPRETER_OFF


def _could_interpret() -> bool:
    # We do not import it only to ask, because the interpreter could not be
    # turned on afterwards.
    if "triton" in sys.modules and interpreting():
        return True
    return os.environ.get(INTERPRET, "0") not in ("", "0")


def _why_not_this_gpu(place: Place) -> str:
    import torch

    if torch.version.hip:
        return ""
    capability = torch.cuda.get_device_capability(place.device)
    if capability < (7, 5):
        return "Triton compiles for compute capability 7.5 and later"
    if capability < (8, 0) and place.dtype == "bfloat16":
        return "this GPU has no bfloat16"
    return ""


# --- What is here -----------------------------------------------------------


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
    """Return, for a reader, the backend that `paged_attention` takes here.

    It is asked for float32, which every backend takes.
    """
    place = Place("cuda:0" if has_gpu() else "cpu")
    try:
        backend = _chosen(place, "auto")
    except ValueError as error:
        return f"nothing: {error} ({BACKEND} says so)"
    if os.environ.get(BACKEND):
        return f"{backend} ({BACKEND} says so)"
    where = "on the GPU" if place.on_gpu else "on the CPU"
    fastest = "triton" if place.on_gpu else "cpu"
    if backend == fastest:
        return f"{backend}, {where}"
    reason = _reason(fastest, place) or "Triton's interpreter is on"
    return f"{backend}, {where} ({reason})"


# --- Triton's interpreter ---------------------------------------------------


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
