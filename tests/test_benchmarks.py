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
from llm_systems_cookbook.memory import BlockAllocator


def run(name):
    return runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"))


def test_the_bare_and_the_guarded_version_do_the_same_work():
    """After as many blocks, both queues stand in the same order."""
    module = run("allocator")
    bare, guarded = module["Bare"](), BlockAllocator(module["POOL"])
    bare.seconds(3)
    module["seconds_at_once"](guarded, 3)
    assert list(bare.free) == list(guarded._free)
    assert bare.free[-1] == 3 * module["AT_ONCE"] - 1
    bare.seconds(2)
    module["seconds_one_by_one"](guarded, 2)
    assert list(bare.free) == list(guarded._free)
    assert bare.counts == guarded._refcounts


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


@pytest.mark.parametrize(
    "name", ["allocator", "paged_attention", "paged_trace"]
)
def test_committed_figures_carry_their_conditions(name):
    file = ROOT / "benchmarks" / "results" / f"{name}.json"
    record = json.loads(file.read_text())
    assert record["status"] == "passed"
    assert record["measures"]
    assert set(record["conditions"]) == set(Conditions.here().as_dict())
    assert record["conditions"]["cpu"]
