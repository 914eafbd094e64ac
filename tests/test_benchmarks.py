"""The benchmarks run, count what they should, and write their conditions."""

import json
import os
import runpy
import subprocess
import sys

import pytest
from cases.notebooks import ROOT

from llm_systems_cookbook.memory import BlockAllocator
from llm_systems_cookbook.nb.environment import Conditions
from llm_systems_cookbook.workloads import traces


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


def imported_by(name):
    """Return which of torch and matplotlib a benchmark imports."""
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1]);"
        "print(sorted({'torch', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, ROOT / "benchmarks" / f"{name}.py"],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_serving_the_trace_imports_neither_torch_nor_pictures():
    """They would make up most of the memory that is measured."""
    assert imported_by("paged_trace") == "[]"


def test_the_simulated_loads_are_served_to_the_end():
    module = run("simulator")
    seen = module["serve"]("60")
    assert seen["requests"] == seen["expected"] == 60
    assert seen["free_blocks"] == module["NUM_BLOCKS"]
    requests, _ = module["requests_of"]("60")
    assert seen["tokens"] == sum(r.output_len for r in requests)


@pytest.mark.parametrize("load", ["sharegpt", "book"])
def test_both_engines_are_given_the_same_requests(load):
    module = run("engine")
    limit = module["LIMITS"][load]
    requests = module["saturating_requests"](load, 2000)
    assert requests == module["saturating_requests"](load, 2000)
    lengths = [r.max_tokens for r in requests]
    assert max(lengths) <= limit
    assert 3 < limit / (sum(lengths) / len(lengths)) < 5


def test_checkouts_take_turns_and_the_first_round_only_compiles(
    tmp_path, monkeypatch
):
    module = run("step_overhead")
    order = []

    def round_of(checkout, steps, cache):
        order.append(checkout)
        own = checkout == module["HERE"]
        late = len(order) > 2
        figures = {"overhead": 1.0 if own else 2.0, "tokens_per_second": 5.0}
        if not late:
            figures["overhead"] = 1000.0
        return {str(batch): figures for batch in module["BATCHES"]}

    monkeypatch.setitem(module["main"].__globals__, "round_of", round_of)
    module["main"](tmp_path, rounds=2, steps=1, to=tmp_path)
    record = json.loads((tmp_path / "step_overhead.json").read_text())
    assert {m["name"]: m["value"] for m in record["measures"]} == {
        "overhead_batch_1": 0.5,
        "in_place_batch_1": 1.0,
        "overhead_batch_32": 0.5,
        "in_place_batch_32": 1.0,
    }
    here, other = module["HERE"], tmp_path.resolve()
    assert order == [other, here, here, other, other, here]


def test_simulating_imports_neither_torch_nor_pictures():
    assert imported_by("simulator") == "[]"


@pytest.mark.parametrize(
    "name",
    ["allocator", "engine", "paged_attention", "paged_trace", "simulator"],
)
def test_committed_figures_carry_their_conditions(name):
    file = ROOT / "benchmarks" / "results" / f"{name}.json"
    record = json.loads(file.read_text())
    assert record["status"] == "passed"
    assert record["measures"]
    assert set(record["conditions"]) == set(Conditions.here().as_dict())
    assert record["conditions"]["cpu"]
