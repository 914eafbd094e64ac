import json
import os
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from datetime import UTC, datetime
from types import SimpleNamespace

import numpy as np
import pytest

import llm_systems_cookbook
from llm_systems_cookbook.nb import environment
from llm_systems_cookbook.nb.environment import (
    Conditions,
    find_checkout,
    peak_memory_mb,
)

PYPROJECT = '[project]\nname = "llm-systems-cookbook"\n'


def make_checkout(folder, pyproject=PYPROJECT):
    (folder / "notebooks").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(pyproject)
    return folder


def git(folder, *arguments):
    settings = ("user.name=T", "user.email=t@example.org")
    unsigned = ("commit.gpgsign=false", "tag.gpgsign=false")
    options = [x for pair in settings + unsigned for x in ("-c", pair)]
    done = subprocess.run(
        ["git", *options, *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def commit_everything(folder):
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--no-verify", "--message", "First")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Pretend the package is installed, and work, outside any checkout."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        environment, "_PACKAGE_FOLDER", tmp_path / "site-packages" / "package"
    )
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


# --- find_checkout ---------------------------------------------------------


def test_no_checkout_gives_none(elsewhere):
    assert find_checkout() is None


def test_checkout_is_found_above_the_package(elsewhere, tmp_path, monkeypatch):
    root = make_checkout(tmp_path / "root")
    monkeypatch.setattr(environment, "_PACKAGE_FOLDER", root / "src" / "pkg")
    assert find_checkout() == root


@pytest.mark.parametrize("below", [".", "notebooks", "notebooks/deep"])
def test_checkout_is_found_at_or_above_the_working_directory(
    elsewhere, monkeypatch, below
):
    root = make_checkout(elsewhere / "root")
    (root / below).mkdir(exist_ok=True)
    monkeypatch.chdir(root / below)
    assert find_checkout() == root


def test_checkout_of_the_package_goes_before_the_working_directory(
    elsewhere, tmp_path, monkeypatch
):
    root = make_checkout(tmp_path / "root")
    other = make_checkout(tmp_path / "other")
    monkeypatch.setattr(environment, "_PACKAGE_FOLDER", root / "pkg")
    monkeypatch.chdir(other)
    assert find_checkout() == root


def test_nearest_checkout_goes_before_the_one_around_it(
    elsewhere, monkeypatch
):
    outer = make_checkout(elsewhere / "outer")
    inner = make_checkout(outer / "inner")
    monkeypatch.chdir(inner)
    assert find_checkout() == inner


@pytest.mark.parametrize(
    "pyproject",
    [
        '[project]\nname = "another"\n',
        'project = "llm-systems-cookbook"\n',
        '[tool.x]\nname = "llm-systems-cookbook"\n',
        "this is = = no TOML",
    ],
)
def test_another_project_is_no_checkout(elsewhere, monkeypatch, pyproject):
    monkeypatch.chdir(make_checkout(elsewhere / "root", pyproject))
    assert find_checkout() is None


def test_pyproject_that_is_not_utf8_is_no_checkout(elsewhere, monkeypatch):
    root = make_checkout(elsewhere / "root")
    (root / "pyproject.toml").write_bytes(b"\xff\xfe")
    monkeypatch.chdir(root)
    assert find_checkout() is None


@pytest.mark.parametrize("missing", ["notebooks", "pyproject.toml"])
def test_folder_without_notebooks_or_pyproject_is_no_checkout(
    elsewhere, monkeypatch, missing
):
    root = make_checkout(elsewhere / "root")
    (root / missing).rename(root / "renamed")
    monkeypatch.chdir(root)
    assert find_checkout() is None


# --- Conditions.here -------------------------------------------------------


def test_here_has_the_ten_fields_of_the_contract():
    assert list(Conditions.here().as_dict()) == [
        "package",
        "commit",
        "python",
        "torch",
        "numpy",
        "triton",
        "cpu",
        "cores",
        "device",
        "date",
    ]


def test_here_gives_the_running_versions():
    here = Conditions.here()
    assert here.package == llm_systems_cookbook.__version__
    assert here.python == ".".join(map(str, sys.version_info[:3]))
    assert here.numpy == np.__version__


def test_absent_library_has_version_none(monkeypatch):
    def version(name):
        raise environment.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(environment.importlib.metadata, "version", version)
    here = Conditions.here()
    assert (here.torch, here.numpy, here.triton) == (None, None, None)


def test_here_imports_neither_torch_nor_triton():
    code = (
        "import sys;"
        "from llm_systems_cookbook.nb.environment import Conditions;"
        "Conditions.here();"
        "print([m for m in ('torch', 'triton') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_date_is_utc_to_the_second():
    date = Conditions.here().date
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", date)
    age = datetime.now(UTC) - datetime.fromisoformat(date)
    assert abs(age.total_seconds()) < 3600


def test_as_dict_survives_json():
    fields = Conditions.here().as_dict()
    assert json.loads(json.dumps(fields, allow_nan=False)) == fields


def test_conditions_are_frozen():
    with pytest.raises(FrozenInstanceError):
        Conditions.here().cores = 1000


# --- Commit ----------------------------------------------------------------


@pytest.fixture
def checkout(elsewhere, monkeypatch):
    root = make_checkout(elsewhere / "root")
    (root / "notebooks" / "a.txt").write_text("first\n")
    monkeypatch.chdir(root)
    monkeypatch.setattr(
        environment, "_PACKAGE_FOLDER", root / "llm_systems_cookbook"
    )
    return root


def test_an_installed_copy_has_no_commit_of_the_checkout_around_it(
    checkout, monkeypatch
):
    commit_everything(checkout)
    copy = checkout / ".venv" / "site-packages" / "llm_systems_cookbook"
    monkeypatch.setattr(environment, "_PACKAGE_FOLDER", copy)
    assert Conditions.here().commit is None


def test_commit_is_the_full_hash_of_the_checkout(checkout):
    head = commit_everything(checkout)
    assert Conditions.here().commit == head
    assert len(head) >= 40


def test_commit_of_a_tagged_checkout_is_still_its_hash(checkout):
    head = commit_everything(checkout)
    git(checkout, "tag", "v1", "--annotate", "--message", "One")
    assert Conditions.here().commit == head


def test_modified_checkout_is_dirty(checkout):
    head = commit_everything(checkout)
    (checkout / "notebooks" / "a.txt").write_text("second\n")
    assert Conditions.here().commit == f"{head}-dirty"


def test_untracked_file_leaves_the_checkout_clean(checkout):
    head = commit_everything(checkout)
    (checkout / "notes.txt").write_text("new\n")
    assert Conditions.here().commit == head


def test_commit_of_a_surrounding_repository_is_not_taken(checkout, elsewhere):
    commit_everything(elsewhere)
    assert Conditions.here().commit is None


def test_commit_outside_a_checkout_is_none(elsewhere):
    (elsewhere / "file").write_text("x")
    commit_everything(elsewhere)
    assert Conditions.here().commit is None


def test_commit_before_the_first_commit_is_none(checkout):
    git(checkout, "init", "--quiet")
    assert Conditions.here().commit is None


def test_commit_without_git_is_none(checkout, monkeypatch):
    commit_everything(checkout)
    monkeypatch.setenv("PATH", str(checkout / "nothing"))
    assert Conditions.here().commit is None


def test_commit_ignores_the_repository_of_a_git_hook(
    checkout, tmp_path, monkeypatch
):
    head = commit_everything(checkout)
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("x")
    assert commit_everything(other) != head
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(checkout))
    assert Conditions.here().commit == head


# --- Machine ---------------------------------------------------------------


@pytest.fixture
def system(monkeypatch):
    def pretend(name, processor="", machine=""):
        platform = environment.platform
        monkeypatch.setattr(platform, "system", lambda: name)
        monkeypatch.setattr(platform, "processor", lambda: processor)
        monkeypatch.setattr(platform, "machine", lambda: machine)

    return pretend


def test_cpu_on_linux_is_the_model_name(system, monkeypatch, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("vendor_id\t: V\nmodel\t: 7\nmodel name\t: Fast: 9\n")
    monkeypatch.setattr(environment, "_CPUINFO", cpuinfo)
    system("Linux")
    assert environment._cpu() == "Fast: 9"


@pytest.mark.parametrize("content", [None, "", "CPU part\t: 0xd0c\n"])
def test_cpu_on_linux_without_a_model_name_falls_back(
    system, monkeypatch, tmp_path, content
):
    cpuinfo = tmp_path / "cpuinfo"
    if content is not None:
        cpuinfo.write_text(content)
    monkeypatch.setattr(environment, "_CPUINFO", cpuinfo)
    system("Linux", machine="aarch64")
    assert environment._cpu() == "aarch64"


def test_cpu_on_a_mac_is_the_brand_string(system, monkeypatch):
    commands = []

    def output(*command):
        commands.append(command)
        return "Apple M2"

    monkeypatch.setattr(environment, "_output", output)
    system("Darwin")
    assert environment._cpu() == "Apple M2"
    assert commands == [("sysctl", "-n", "machdep.cpu.brand_string")]


def test_cpu_on_windows_is_read_from_the_registry(system, monkeypatch):
    class Key:
        def __enter__(self):
            return "open key"

        def __exit__(self, *_):
            return None

    asked = []

    def query(key, name):
        asked.append((key, name))
        return "Intel X  ", 1

    registry = SimpleNamespace(
        HKEY_LOCAL_MACHINE=0, OpenKey=lambda *_: Key(), QueryValueEx=query
    )
    monkeypatch.setitem(sys.modules, "winreg", registry)
    system("Windows")
    assert environment._cpu() == "Intel X"
    assert asked == [("open key", "ProcessorNameString")]


@pytest.mark.skipif(sys.platform == "win32", reason="has the registry")
def test_cpu_on_windows_without_the_registry_falls_back(system):
    system("Windows", processor="Intel64 Family 6")
    assert environment._cpu() == "Intel64 Family 6"


def test_cpu_on_an_unknown_system_is_still_a_name(system):
    system("Plan9")
    assert environment._cpu() == "unknown"


def test_cores_are_those_of_this_process(monkeypatch):
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: {3, 5, 8}, raising=False
    )
    assert Conditions.here().cores == 3


@pytest.mark.parametrize(("count", "expected"), [(6, 6), (None, 1)])
def test_cores_without_affinity_are_those_of_the_machine(
    monkeypatch, count, expected
):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert Conditions.here().cores == expected


def fake_torch(available):
    cuda = SimpleNamespace(
        is_available=lambda: available, get_device_name=lambda: "GPU 9000"
    )
    return SimpleNamespace(cuda=cuda)


def test_device_is_the_cpu_where_torch_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert Conditions.here().device == "cpu"


@pytest.mark.parametrize(
    ("available", "device"), [(False, "cpu"), (True, "GPU 9000")]
)
def test_device_is_the_gpu_that_an_imported_torch_can_use(
    monkeypatch, available, device
):
    monkeypatch.setitem(sys.modules, "torch", fake_torch(available))
    assert Conditions.here().device == device


# --- Conditions.line -------------------------------------------------------

FIXED = Conditions(
    package="0.1.0",
    commit="abc",
    python="3.12.1",
    torch="2.9",
    numpy="2.1",
    triton="3.7",
    cpu="Fast 9",
    cores=2,
    device="GPU 9000",
    date="2025-01-02T03:04:05+00:00",
)


def test_line_names_every_condition():
    assert FIXED.line() == (
        "llm-systems-cookbook 0.1.0 (commit abc) · Python 3.12.1 · torch 2.9"
        " · numpy 2.1 · triton 3.7 · Fast 9, 2 cores · device GPU 9000"
        " · 2025-01-02T03:04:05+00:00"
    )


def test_line_leaves_out_what_is_absent():
    bare = replace(FIXED, commit=None, torch=None, triton=None, cores=1)
    assert bare.line() == (
        "llm-systems-cookbook 0.1.0 · Python 3.12.1 · numpy 2.1"
        " · Fast 9, 1 core · device GPU 9000 · 2025-01-02T03:04:05+00:00"
    )


def test_line_is_one_line_here():
    assert "\n" not in Conditions.here().line()


def test_peak_memory_is_this_process_s_own_and_not_its_parent_s():
    held = bytearray(200_000_000)
    held[::4096] = b"x" * len(held[::4096])
    code = (
        "from llm_systems_cookbook.nb.environment import peak_memory_mb;"
        "print(peak_memory_mb())"
    )
    child = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(child.stdout) > 5
    assert peak_memory_mb() > 200
    if sys.platform == "linux":
        assert float(child.stdout) < 200
