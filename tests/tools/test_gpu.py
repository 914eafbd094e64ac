"""What `cookbook gpu` does around its parts; none of them needs a GPU here."""

import json
import os

import pytest
import torch
from typer.testing import CliRunner

from llm_systems_cookbook.nb.environment import Conditions
from llm_systems_cookbook.tools import bench, cli, gpu


def saying(name, code, **options):
    """Return a part that runs a line of Python."""
    return gpu.Part(name, ("-c", code), **options)


GOOD = saying("good", "print('{\"speed\": 2.5}'); print('all is well')")
BAD = saying("bad", "print('{\"speed\": 1}'); raise SystemExit('it broke')")
LACKING = saying("lacking", "print('never')", needs=("json", "no_such_module"))


def main(parts, folder, **options):
    """Run parts on the CPU; return the status and what was recorded."""
    status = gpu.main(parts, "cpu", folder, **options)
    record = json.loads((folder / "gpu-cpu.json").read_text())
    return status, record, {part["name"]: part for part in record["parts"]}


def test_the_record_is_whole_and_stamped(tmp_path, capsys):
    status, record, parts = main([GOOD], tmp_path)
    assert status == 0
    assert record["status"] == "passed"
    assert record["conditions"].keys() == Conditions.here().as_dict().keys()
    assert parts["good"]["status"] == "passed"
    assert parts["good"]["figures"] == [{"speed": 2.5}]
    assert parts["good"]["message"] == "all is well"
    assert parts["good"]["seconds"] > 0
    shown = capsys.readouterr().out
    assert "speed 2.5" in shown
    assert str(tmp_path / "gpu-cpu.json") in shown


def test_a_record_that_cannot_be_written_leaves_the_one_before(
    tmp_path, monkeypatch
):
    main([GOOD], tmp_path)
    before = (tmp_path / "gpu-cpu.json").read_bytes()

    def full(*arguments):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        gpu.main([BAD], "cpu", tmp_path)
    assert (tmp_path / "gpu-cpu.json").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_parts_that_fail_or_cannot_run_stop_no_other(tmp_path, capsys):
    crash = saying("crash", "import os; os.abort()")
    status, record, parts = main([BAD, LACKING, crash, GOOD], tmp_path)
    assert status == 1
    assert record["status"] == "failed"
    statuses = {name: part["status"] for name, part in parts.items()}
    assert statuses == {
        "bad": "failed",
        "lacking": "skipped",
        "crash": "failed",
        "good": "passed",
    }
    assert parts["bad"]["figures"] == [{"speed": 1}]  # what was known stays
    assert parts["bad"]["message"] == "it broke"
    assert parts["lacking"]["message"] == "no_such_module is not installed"
    assert parts["crash"]["message"]
    shown = capsys.readouterr().out
    assert all(name in shown for name in statuses)


def test_a_part_that_is_only_skipped_is_no_failure(tmp_path):
    assert main([LACKING, GOOD], tmp_path)[0] == 0


def test_a_part_that_hangs_is_ended_with_its_children(tmp_path):
    hang = saying(
        "hang",
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c',"
        " 'import time; time.sleep(600)'])\n"
        "print('{\"child\": %d}' % child.pid, flush=True)\n"
        "time.sleep(600)",
        share=1,
    )
    later = saying("later", "print('still here')", share=29)
    status, _, parts = main([hang, later], tmp_path, budget=90)
    assert status == 1
    assert parts["hang"]["status"] == "timeout"
    assert parts["hang"]["message"] == "stopped after 3 seconds"
    assert parts["later"]["message"] == "still here"
    child = parts["hang"]["figures"][0]["child"]
    assert not _runs(child)


def _runs(pid):
    """Tell whether a process runs; one that nobody waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_without_time_a_part_is_skipped_by_name(tmp_path):
    status, _, parts = main([GOOD], tmp_path, budget=0)
    assert status == 0
    assert parts["good"]["status"] == "skipped"
    assert parts["good"]["message"] == "no time was left of 0 seconds"


def test_the_parts_see_a_gpu_that_compiles_and_records_of_their_own(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("COOKBOOK_BACKEND", "gather")
    on_gpu = gpu._environment("cuda", tmp_path)
    assert "TRITON_INTERPRET" not in on_gpu
    assert "COOKBOOK_BACKEND" not in on_gpu
    assert on_gpu["COOKBOOK_RESULTS"] == str(tmp_path)
    assert gpu._environment("cpu", tmp_path)["TRITON_INTERPRET"] == "1"


def test_without_a_gpu_there_is_one_line_and_no_record(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "find_checkout", lambda: None)
    done = CliRunner().invoke(cli.app, ["gpu"])
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("no GPU here: torch ")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("NVIDIA H200", "gpu-nvidia-h200.json"),
        ("../../NVIDIA A100-SXM4/80GB", "gpu-nvidia-a100-sxm4-80gb.json"),
    ],
)
def test_a_device_gives_its_name_to_a_file(tmp_path, name, file):
    assert gpu.record_path(tmp_path, name) == tmp_path / file


@pytest.mark.parametrize("name", ["", "../", "x" * 200])
def test_a_device_that_no_file_can_be_named_after_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="no file can be named"):
        gpu.record_path(tmp_path, name)


# --- The parts themselves, tiny and on the CPU -------------------------------


def figures_of(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_attention_is_timed_in_both_16_bit_types(monkeypatch, capsys):
    monkeypatch.setattr(bench, "default_candidates", lambda device: ["cpu"])
    assert gpu.run_own("attention", "cpu", batch=2, length=20) == 0
    seen = [(f["candidate"], f["dtype"]) for f in figures_of(capsys)]
    types = ("float16", "bfloat16")
    assert seen == [(who, t) for t in types for who in ("sdpa", "cpu")]


def test_our_own_kernel_may_not_be_left_out(monkeypatch):
    def absent(problem):
        raise bench.NotHere("not installed")

    monkeypatch.setattr(bench, "default_candidates", lambda device: ["cpu"])
    monkeypatch.setitem(bench.CANDIDATES, "cpu", absent)
    with pytest.raises(RuntimeError, match="cpu, float16: not installed"):
        gpu.run_own("attention", "cpu", batch=2, length=20)


@pytest.mark.usefixtures("one_thread")
def test_engines_are_compared_and_swapping_changes_no_token(capsys):
    sizes = {"batch": 2, "mean_prompt": 8, "rounds": 1, "steps": 1}
    assert gpu.run_own("engine", "cpu", **sizes) == 0
    *engines, swapped = figures_of(capsys)
    names = [figure["engine"] for figure in engines]
    assert names == ["contiguous", "in_place", "gather"]
    assert swapped["swaps"] > 0
    assert swapped["tokens_equal"] == 8 * 24


def test_a_package_that_a_part_misses_is_named(monkeypatch, capsys):
    def needs_it(device):
        raise ModuleNotFoundError(name="pooch")

    monkeypatch.setitem(gpu.OWN, "engine", needs_it)
    assert gpu.run_own("engine", "cpu") == gpu.MISSING
    assert capsys.readouterr().out == "pooch is not installed\n"


def test_a_part_of_ours_that_misses_a_package_is_skipped(tmp_path):
    code = f"print('pooch is not installed'); raise SystemExit({gpu.MISSING})"
    status, _, parts = main([saying("engine", code)], tmp_path)
    assert status == 0
    assert parts["engine"]["status"] == "skipped"
    assert parts["engine"]["message"] == "pooch is not installed"


def test_the_parts_name_files_and_modules_that_are_here():
    for part in gpu.default_parts("cpu"):
        assert part.obstacle() == ""
        for argument in part.arguments:
            if argument.startswith("tests/"):
                assert (gpu.find_checkout() / argument).is_file()
