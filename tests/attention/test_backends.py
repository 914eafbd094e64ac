"""Bootstrap finds where attention runs, and turns the interpreter on."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from llm_systems_cookbook.attention import backends
from llm_systems_cookbook.attention.backends import (
    RestartKernel,
    attention_runs_on,
    choose_backend,
    turn_interpreter_on,
)

kernels = pytest.importorskip("llm_systems_cookbook.attention.triton.kernels")
without_gpu = pytest.mark.skipif(
    backends.has_gpu(), reason="there is a GPU here"
)


def run_fresh(code: str, tmp_path) -> subprocess.CompletedProcess[str]:
    """Run code in a new process, without the interpreter."""
    import os

    environment = dict(os.environ, COOKBOOK_RESULTS=str(tmp_path))
    environment.pop(backends.INTERPRET, None)
    environment.pop(backends.BACKEND, None)
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
    )


@without_gpu
def test_bootstrap_turns_the_interpreter_on(tmp_path):
    done = run_fresh(
        "from llm_systems_cookbook.nb import bootstrap\n"
        "bootstrap('a', interpret=True)\n"
        "from llm_systems_cookbook.attention.triton import kernels\n"
        "assert kernels.INTERPRETED\n"
        "bootstrap('a', interpret=True)\n",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "Triton: interpreted on the CPU" in done.stdout


@without_gpu
def test_bootstrap_leaves_triton_alone_unless_asked(tmp_path):
    done = run_fresh(
        "import os\n"
        "from llm_systems_cookbook.nb import bootstrap\n"
        "bootstrap('a')\n"
        "assert 'TRITON_INTERPRET' not in os.environ\n",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "Triton" not in done.stdout


@without_gpu
@pytest.mark.parametrize("late", ["", "os.environ['TRITON_INTERPRET'] = '1'"])
def test_bootstrap_after_triton_says_to_restart(tmp_path, late):
    done = run_fresh(
        "import os, triton\n"
        f"{late}\n"
        "from llm_systems_cookbook.nb import bootstrap\n"
        "bootstrap('a', interpret=True)\n",
        tmp_path,
    )
    assert done.returncode == 1
    assert "RestartKernel" in done.stderr
    assert "Restart the kernel" in done.stderr


@without_gpu
def test_bootstrap_after_an_interpreting_triton_goes_on(tmp_path):
    done = run_fresh(
        "import os\n"
        "os.environ['TRITON_INTERPRET'] = '1'\n"
        "import triton\n"
        "from llm_systems_cookbook.nb import bootstrap\n"
        "bootstrap('a', interpret=True)\n",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_restart_is_shown_as_one_line():
    assert RestartKernel("why")._render_traceback_() == ["RestartKernel: why"]


def test_the_interpreter_is_left_alone_with_a_gpu(monkeypatch):
    monkeypatch.setattr(backends, "has_gpu", lambda: True)
    monkeypatch.delenv(backends.INTERPRET, raising=False)
    assert turn_interpreter_on() == "compiles for the GPU"
    assert backends.INTERPRET not in backends.os.environ


def test_without_triton_its_cells_are_skipped(monkeypatch):
    monkeypatch.setattr(backends, "installed", lambda name: False)
    assert "skipped" in turn_interpreter_on()


@pytest.mark.parametrize(
    ("capability", "modules", "expected"),
    [
        (None, {"numba", "triton"}, "cpu, on the CPU"),
        (None, {"triton"}, "gather, on the CPU (numba is not installed)"),
        ((9, 0), {"numba", "triton"}, "triton, on the GPU"),
        ((9, 0), {"numba"}, "gather, on the GPU (Triton is not installed)"),
        ((7, 0), {"triton"}, "gather, on the GPU (Triton compiles for com"),
    ],
)
def test_what_is_told_is_what_is_chosen(
    monkeypatch, capability, modules, expected
):
    """Also on a GPU that Triton does not compile for."""
    monkeypatch.delenv(backends.BACKEND, raising=False)
    monkeypatch.setattr(backends, "has_gpu", lambda: capability is not None)
    monkeypatch.setattr(backends, "installed", modules.__contains__)
    monkeypatch.setattr(backends, "interpreting", lambda: False)
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capability
    )
    assert attention_runs_on().startswith(expected)
    place = "cpu" if capability is None else "cuda:0"
    tensor = SimpleNamespace(device=place, dtype=torch.float32)
    assert expected.startswith(choose_backend(tensor))


def test_a_forced_choice_is_told(monkeypatch):
    monkeypatch.setenv(backends.BACKEND, "gather")
    assert attention_runs_on() == "gather (COOKBOOK_BACKEND says so)"


def test_bootstrap_says_where_attention_runs(monkeypatch, tmp_path, capsys):
    from llm_systems_cookbook.nb import bootstrap

    monkeypatch.setenv("COOKBOOK_RESULTS", str(tmp_path))
    bootstrap("a")
    assert (
        f"Attention runs on: {attention_runs_on()}" in capsys.readouterr().out
    )
