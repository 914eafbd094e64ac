"""Where a notebook's record lies, what it is called, and how it is written."""

import os
import re
import tempfile
from pathlib import Path

from llm_systems_cookbook.validate import folder_from

SCHEMA_VERSION = 1
# A notebook's name becomes a file name.
SLUG = re.compile(r"[a-z0-9][a-z0-9_-]{0,99}")


def results_folder(root: Path) -> Path:
    """Return where records go: `COOKBOOK_RESULTS`, or `results` in `root`."""
    return folder_from("COOKBOOK_RESULTS") or root / "results"


def write_atomic(path: Path, text: str) -> None:
    """Write UTF-8 text to a file, whole or not at all.

    The file keeps its mode; a symbolic link keeps pointing where it did.
    Missing folders are made.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = path.stat().st_mode if path.exists() else 0o666 & ~_umask()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(name, mode & 0o777)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    # The only way to read the mask is to set it.
    mask = os.umask(0)
    os.umask(mask)
    return mask
