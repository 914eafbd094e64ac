"""The benchmarks run, count what they should, and write their conditions."""

import json
import os
import runpy
import subprocess
import sys

import pytest
from notebook_cells import ROOT

from llm_systems_cookbook import traces
from llm_systems_cookbook.conditions import Conditions


def run(name):
    return runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"))


def test_the_bare_and_the_guarded_version_do_the_same_work():
    allocator = run("allocator")
    for _ in range(2):
        assert allocator["bare_seconds"](3) > 0
        assert allocator["guarded_seconds"](3) > 0
    measured = allocator["ratios"](rounds=3, repeats=2)
    assert len(measured) == 3
    assert measured == sorted(measured)


def test_serving_the_start_of_the_trace_finishes_every_request():
    module = run("paged_trace")
    try:
        trace = traces.load(module["NAME"])
    except traces.TraceUnavailable as error:
        pytest.skip(str(error))
    seen = module["serve"](50)
    assert seen["finished"] == 50
    assert seen["free_blocks"] == seen["num_blocks"]
    assert seen["tokens"] == (
        trace.output_len[:50].sum() + seen["preemptions"]
    )


def test_serving_the_trace_imports_neither_torch_nor_pictures():
    """They would make up most of the memory that is measured."""
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1]);"
        "print(sorted({'torch', 'matplotlib'} & set(sys.modules)))"
    )
    file = ROOT / "benchmarks" / "paged_trace.py"
    done = subprocess.run(
        [sys.executable, "-c", code, file],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["allocator", "paged_trace"])
def test_committed_figures_carry_their_conditions(name):
    file = ROOT / "benchmarks" / "results" / f"{name}.json"
    record = json.loads(file.read_text())
    assert record["status"] == "passed"
    assert record["measures"]
    assert set(record["conditions"]) == set(Conditions.here().as_dict())
    assert record["conditions"]["cpu"]
