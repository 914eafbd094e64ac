"""A cache of compiled kernels is optional: it never costs an error."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm_systems_cookbook.attention.cpu import jit

# Imported by itself: torch would take longer than all the rest.
MODULE = """
from jit import compiled


@compiled()
def twice(x):
    return 2 * x


def hits():
    assert twice(21) == 42
    return sum(twice.stats.cache_hits.values())
"""


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the module, and what numba kept of it."""
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "small.py").write_text(MODULE)
    assert hits(folder) == 0, "nothing was there"
    assert hits(folder) == 1, "it was kept"
    return folder


@pytest.fixture
def kept(compiled_once: Path) -> Iterator[Path]:
    """Return the same folder, and put its cache back as it was."""
    cache, copy = compiled_once / "cache", compiled_once / "copy"
    shutil.copytree(cache, copy)
    yield compiled_once
    shutil.rmtree(cache)
    copy.rename(cache)


def hits(folder: Path, before_the_call: str = "") -> int:
    """Return how many functions a new process found in the cache."""
    code = f"import small\n{before_the_call}\nprint(small.hits())"
    path = [str(folder), str(Path(jit.__file__).parent)]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ
        | {
            "NUMBA_CACHE_DIR": str(folder / "cache"),
            "PYTHONPATH": os.pathsep.join(path),
        },
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("kind", ["nbi", "nbc"], ids=["index", "data"])
@pytest.mark.parametrize("left", [0, -7])
def test_a_damaged_cache_is_compiled_again_and_replaced(
    kept: Path, kind: str, left: int
):
    (path,) = kept.glob(f"cache/*/*.{kind}")
    path.write_bytes(path.read_bytes()[:left])
    assert hits(kept) == 0
    assert hits(kept) == 1, "the damaged file was replaced"


@pytest.mark.parametrize(
    "before",
    [
        # A file in its place: nobody can write there, root neither.
        "import shutil; shutil.rmtree('cache'); open('cache', 'w').close()",
        # As on a full disk.
        "from numba.core.caching import IndexDataCacheFile as File\n"
        "def full(*_): raise OSError(28, 'No space left on device')\n"
        "File._save_index = File._save_data = full",
    ],
    ids=["unwritable", "full"],
)
def test_a_cache_that_cannot_be_written_after_the_import_is_done_without(
    tmp_path: Path, before: str
):
    (tmp_path / "small.py").write_text(MODULE)
    assert hits(tmp_path, before) == 0


def test_no_folder_for_a_cache_means_none(tmp_path: Path):
    """Neither that of the package nor that of the user can be written."""
    (tmp_path / "small.py").write_text(MODULE)
    without = (
        "from numba.core.caching import CacheImpl\n"
        "import sys; del sys.modules['small']\n"
        "CacheImpl._locator_classes = []\n"
        "import small"
    )
    assert hits(tmp_path, without) == 0
