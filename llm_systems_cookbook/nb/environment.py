"""What a figure was measured on: versions, commit, machine and date."""

import importlib.metadata
import os
import platform
import subprocess
import sys
import tomllib
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from llm_systems_cookbook import __version__

PROJECT = "llm-systems-cookbook"

_PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
_CPUINFO = Path("/proc/cpuinfo")
_WINDOWS_CPU_KEY = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"


@dataclass(frozen=True)
class Conditions:
    """The circumstances of a measurement, written beside every figure.

    Attributes:
        package: version of this package.
        commit: full hash of the checkout's commit, with "-dirty" when a
            tracked file differs from it; None outside a git checkout.
        python: version of Python.
        torch: installed version, None when absent.
        numpy: installed version, None when absent.
        triton: installed version, None when absent.
        cpu: name of the processor.
        cores: logical cores this process may run on.
        device: name of the GPU, or "cpu".
        date: date and time in UTC, ISO 8601, to the second.
    """

    package: str
    commit: str | None
    python: str
    torch: str | None
    numpy: str | None
    triton: str | None
    cpu: str
    cores: int
    device: str
    date: str

    @classmethod
    def here(cls) -> "Conditions":
        """Return the conditions of this process, now; imports no library."""
        return cls(
            package=__version__,
            commit=_commit(),
            python=platform.python_version(),
            torch=_version("torch"),
            numpy=_version("numpy"),
            triton=_version("triton"),
            cpu=_cpu(),
            cores=_cores(),
            device=_device(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def as_dict(self) -> dict[str, str | int | None]:
        """Return the fields by name, ready for JSON."""
        return asdict(self)

    def line(self) -> str:
        """Return everything known on one plain line, the commit cut short."""
        sha, dirty, _ = (self.commit or "").partition("-dirty")
        commit = f" (commit {sha[:8]}{dirty})" if sha else ""
        libraries = (
            f"{name} {version}"
            for name, version in (
                ("torch", self.torch),
                ("numpy", self.numpy),
                ("triton", self.triton),
            )
            if version
        )
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        parts = [
            f"{PROJECT} {self.package}{commit}",
            f"Python {self.python}",
            *libraries,
            f"{self.cpu}, {cores}",
            f"device {self.device}",
            self.date,
        ]
        return " · ".join(parts)


def find_checkout() -> Path | None:
    """Return the root of the cookbook's checkout, or None without one.

    It is the first folder, at or above the package and then at or above the
    working directory, that has `notebooks/` and this project's
    `pyproject.toml`.
    """
    return checkout_above(_PACKAGE_FOLDER) or checkout_above(working_folder())


def checkout_above(folder: Path | None) -> Path | None:
    """Return the checkout that a folder is, or is in; None without one."""
    if folder is None:
        return None
    return next(filter(_is_checkout, [folder, *folder.parents]), None)


def working_folder() -> Path | None:
    """Return the working directory, or None when it has been removed."""
    try:
        return Path.cwd()
    except OSError:
        return None


def _is_checkout(folder: Path) -> bool:
    if not (folder / "notebooks").is_dir():
        return False
    try:
        text = (folder / "pyproject.toml").read_text(encoding="utf-8")
        project = tomllib.loads(text).get("project")
    except (OSError, ValueError):
        # Absent, unreadable or no TOML: somebody else's folder.
        return False
    return isinstance(project, dict) and project.get("name") == PROJECT


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    # Only of the code that runs: not of a checkout around an installed copy.
    checkout = checkout_above(_PACKAGE_FOLDER.parent)
    if checkout is None or _PACKAGE_FOLDER.parent != checkout:
        return None
    root = _git(checkout, "rev-parse", "--show-toplevel")
    # A copy without history, unpacked inside another repository, must not
    # carry that repository's commit.
    if root is None or Path(root).resolve() != checkout.resolve():
        return None
    return _git(
        checkout,
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    )


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints, or None when it is absent or fails."""
    # Inside a git hook these name the hook's repository, not the folder's.
    misleading = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    env = {k: v for k, v in os.environ.items() if k not in misleading}
    return _output(
        "git", "--no-optional-locks", *arguments, cwd=folder, env=env
    )


def _output(
    *command: str,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> str | None:
    """Return a command's output, stripped, or None when it fails."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip() or None


def _cpu() -> str:
    find = {
        "Linux": _linux_cpu,
        "Darwin": _mac_cpu,
        "Windows": _windows_cpu,
    }.get(platform.system())
    name = find() if find else None
    return name or platform.processor() or platform.machine() or "unknown"


def _linux_cpu() -> str | None:
    try:
        lines = _CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return None


def _mac_cpu() -> str | None:
    return _output("sysctl", "-n", "machdep.cpu.brand_string")


def _windows_cpu() -> str | None:
    try:
        import winreg

        with winreg.OpenKey(
            winreg.HKEY_LOCAL_MACHINE, _WINDOWS_CPU_KEY
        ) as key:
            name, _ = winreg.QueryValueEx(key, "ProcessorNameString")
    except (ImportError, OSError):
        return None
    return str(name).strip()


def _cores() -> int:
    """Return the cores this process may use, not those of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _device() -> str:
    # A process that has not imported torch measured nothing on a GPU.
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name()


def peak_memory_mb() -> float:
    """Return the most memory this process has held, in MB.

    On Linux `ru_maxrss` counts what the parent held, too, before it became
    this program: there the kernel is asked for this program's own.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(
            line
            for line in status.read_text().splitlines()
            if line.startswith("VmHWM:")
        )
        return int(line.split()[1]) / 1e3
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3
