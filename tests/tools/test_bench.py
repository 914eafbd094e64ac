"""The benchmark of attention counts what it should; no test asserts a time."""

import contextlib
import json
import runpy
import subprocess
import sys

import pytest
import torch
from cases.notebooks import ROOT
from typer.testing import CliRunner

from llm_systems_cookbook.attention.reference import reference_attention
from llm_systems_cookbook.nb import ChecksFailed
from llm_systems_cookbook.tools import bench
from llm_systems_cookbook.tools.cli import app
from llm_systems_cookbook.workloads import traces

TINY = bench.Shape(
    (5, 16, 33), num_heads=4, num_kv_heads=2, head_dim=8, block_size=16
)


@pytest.fixture(autouse=True)
def no_trace(monkeypatch, tmp_path):
    """Lengths are generated: these tests need no file and no network."""
    monkeypatch.setenv(traces.FOLDER_VARIABLE, str(tmp_path))


def test_minimal_bytes_count_every_byte_once():
    tokens, blocks = 5 + 16 + 33, 1 + 1 + 3
    keys_and_values = tokens * 2 * 2 * 8 * 4
    query_and_output = 2 * 3 * 4 * 8 * 4
    table = blocks * 4
    expected = keys_and_values + query_and_output + table
    assert TINY.num_blocks == blocks
    assert TINY.minimal_bytes() == expected


def test_minimal_bytes_halve_with_the_numbers_but_for_the_table():
    half = bench.Shape((5, 16, 33), 4, 2, 8, 16, dtype="float16")
    assert 2 * (half.minimal_bytes() - 20) == TINY.minimal_bytes() - 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": ()}, "num_sequences"),
        ({"lengths": (3, 0)}, "length"),
        ({"num_heads": 5}, "5 query heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"dtype": "float8"}, "float8"),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(change, message):
    arguments = {"lengths": (4,), "num_heads": 4, "num_kv_heads": 2}
    with pytest.raises(ValueError, match=message):
        bench.Shape(**{**arguments, **change})


def test_blocks_hold_the_same_tokens_as_the_padded_rows():
    problem = bench.Problem.draw(TINY)
    inputs = problem.inputs
    for seq, length in enumerate(TINY.lengths):
        for position in range(length):
            block = inputs.block_tables[seq, position // 16]
            cached = inputs.key_cache[block, :, position % 16]
            assert torch.equal(cached, problem.keys[seq, :, position])
    used = inputs.block_tables[inputs.block_tables >= 0]
    assert sorted(used.tolist()) == list(range(5))


def test_the_expected_result_is_that_of_the_reference():
    problem = bench.Problem.draw(TINY)
    exact = reference_attention(problem.inputs)
    assert torch.allclose(problem.exact.double(), exact, atol=1e-5)


@pytest.mark.parametrize("lengths", [(5, 16, 33), (24, 24)])
@pytest.mark.parametrize("name", ["sdpa", "cpu", "gather"])
def test_candidates_compute_the_same(name, lengths):
    shape = bench.Shape(lengths, 4, 2, 8, 16)
    problem = bench.Problem.draw(shape)
    result = bench.CANDIDATES[name](problem)()
    assert torch.allclose(result, problem.exact, atol=1e-5)


def test_every_candidate_has_a_turn_in_every_round(monkeypatch):
    turns = []
    plain = bench._seconds

    def counted(run, device):
        turns.append(run)
        return plain(run, device)

    monkeypatch.setattr(bench, "_seconds", counted)
    monkeypatch.setattr(bench, "numba_started", lambda: True)  # no looks
    shape = bench.Shape((24, 24), 4, 2, 8, 16)
    timings = bench.measure(
        shape, ["cpu", "gather"], rounds=3, repeats=2, pause=0
    )
    assert [t.name for t in timings] == ["sdpa", "cpu", "gather"]
    one_round = turns[:8]
    assert len(set(one_round)) == 4  # with the copy
    assert turns == one_round * 3
    for timing in timings:
        assert len(timing.seconds) == len(timing.copy_rates) == 3
        assert timing.minimal_bytes == shape.minimal_bytes()
    assert timings[0].ratios == (1, 1, 1)


def test_figures_follow_from_times_and_bytes():
    timing = bench.Timing(
        "cpu", (2.0, 1.0, 3.0), (1.0, 0.5, 1.5), 100, (200.0,)
    )
    assert timing.median == 2
    assert timing.spread == 1
    assert timing.rate == 50
    assert timing.of_copy == 0.25
    assert bench.rows_of([timing]) == [
        ["cpu", "2000.000 ms", "0.0 GB/s", "25%", "100%", "1.00 x"]
    ]


def test_what_cannot_run_here_says_why():
    problem = bench.Problem.draw(TINY)
    for name in ("flashinfer", "flash-attn"):
        with pytest.raises(bench.NotHere, match=r"not installed|needs a GPU"):
            bench.CANDIDATES[name](problem)
    timings = bench.measure(TINY, ["flashinfer"], rounds=1, repeats=1, pause=0)
    assert timings[1].seconds == ()
    assert bench.rows_of(timings)[1][-1] == timings[1].problem != ""


def test_a_wrong_result_is_not_timed(monkeypatch):
    def wrong(problem):
        return lambda: problem.exact + 1

    monkeypatch.setitem(bench.CANDIDATES, "cpu", wrong)
    with pytest.raises(AssertionError, match="cpu is wrong"):
        bench.measure(TINY, ["cpu"], rounds=1, repeats=1)


def timed_with_numba(monkeypatch, before, after):
    """Measure with the CPU's kernel; SDPA takes these seconds around it."""
    started = []

    def numba(problem):
        started.append(problem)
        return lambda: problem.exact

    def seconds(run, device):
        return after if started else before

    monkeypatch.setitem(bench.CANDIDATES, "cpu", numba)
    monkeypatch.setattr(bench, "_seconds", seconds)
    monkeypatch.setattr(bench, "numba_started", lambda: bool(started))
    return bench.measure(TINY, ["cpu"], rounds=1, repeats=1, pause=0)


def test_numba_that_slows_down_sdpa_is_refused_by_name(monkeypatch):
    with pytest.raises(RuntimeError, match=r"8\.0 times .* numba 0\."):
        timed_with_numba(monkeypatch, before=1.0, after=8.0)


def test_how_sdpa_fared_beside_numba_is_recorded(monkeypatch):
    sdpa, cpu = timed_with_numba(monkeypatch, before=1.0, after=1.5)
    assert bench.context_of(cpu)["sdpa_slowed_down_by_numba"] == 1.5
    assert "sdpa_slowed_down_by_numba" not in bench.context_of(sdpa)


def test_where_numba_had_started_before_nothing_is_told(monkeypatch):
    monkeypatch.setattr(bench, "numba_started", lambda: True)
    timings = bench.measure(TINY, ["cpu"], rounds=1, repeats=1, pause=0)
    assert timings[1].sdpa_slowdown is None
    told = bench.context_of(timings[1])["sdpa_slowed_down_by_numba"]
    assert told == "cannot be told: its threads ran before"


def test_numbas_threads_are_noticed_when_they_start():
    code = (
        "import numba\n"
        "from llm_systems_cookbook.tools.bench import numba_started\n"
        "before = numba_started()\n"
        "numba.set_num_threads(1)\n"
        "print(before, numba_started())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert done.stdout == "False True\n", done.stderr


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bench.mixed_lengths(0), "count must be >= 1, got 0"),
        (
            lambda: bench.mixed_lengths(1, longest=0),
            "longest must be >= 1, got 0",
        ),
        (
            lambda: bench.measure(TINY, [], rounds=0),
            "rounds must be >= 1, got 0",
        ),
        (
            lambda: bench.measure(TINY, [], repeats=0),
            "repeats must be >= 1, got 0",
        ),
    ],
)
def test_counts_below_one_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_device_that_is_not_here_is_told_in_one_line():
    result = CliRunner().invoke(
        app, ["bench", "attention", "--device", "nowhere", "--no-mixed"]
    )
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) < 4


def test_an_unknown_candidate_is_refused():
    with pytest.raises(ValueError, match="'fast'"):
        bench.measure(TINY, ["fast"])


def test_mixed_lengths_are_prompts_with_part_of_their_output(monkeypatch):
    lengths, trace = bench.mixed_lengths(200, seed=3)
    assert trace.generated
    assert (lengths, len(lengths)) == (bench.mixed_lengths(200, 3)[0], 200)
    assert lengths != bench.mixed_lengths(200, seed=4)[0]
    assert min(lengths) > int(trace.input_len.min())
    assert max(lengths) <= int((trace.input_len + trace.output_len).max())
    cut, _ = bench.mixed_lengths(200, seed=3, longest=300)
    assert cut == tuple(min(n, 300) for n in lengths)


def test_default_candidates_have_the_kernel_of_their_device():
    assert "triton" not in bench.default_candidates("cpu")
    assert "cpu" not in bench.default_candidates("cuda")
    assert set(bench.default_candidates("cpu")) | {"triton"} == set(
        bench.CANDIDATES
    )


SMALL = "--batch 2 --heads 4 --kv-heads 2 --head-dim 8 --rounds 1 --seed 1"


def run_cli(arguments):
    return CliRunner().invoke(app, ["bench", "attention", *arguments.split()])


def test_the_command_prints_a_table_for_each_case():
    done = run_cli(
        f"{SMALL} --length 20 --longest 50 --backend cpu --device cpu"
    )
    assert done.exit_code == 0, done.output
    assert "2 x 20 tokens each, float32, head_dim 8, cpu" in done.output
    assert "generated from quantiles" in done.output
    bytes_ = bench.Shape((20, 20), 4, 2, 8, 16).minimal_bytes()
    assert f"minimal bytes: {bytes_:,}" in done.output
    assert "sdpa" in done.output
    assert "cpu" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--dtype float8", "float8"),
        ("--backend fast", "'fast'"),
        ("--heads 5", "5 query heads"),
    ],
)
def test_the_command_refuses_in_one_line(arguments, message):
    done = run_cli(f"{SMALL} --no-mixed --length 4 --device cpu {arguments}")
    assert done.exit_code == 2
    assert message in done.output
    assert "Traceback" not in done.output


def test_the_record_has_every_figure_and_its_limit(tmp_path, monkeypatch):
    script = runpy.run_path(str(ROOT / "benchmarks" / "paged_attention.py"))
    monkeypatch.setitem(script["main"].__globals__, "LENGTHS", (20,))
    monkeypatch.setitem(script["main"].__globals__, "HEAD_DIMS", (8,))
    monkeypatch.setitem(script["main"].__globals__, "BATCH", 2)
    # On a busy machine a limit may be missed: the record is kept.
    with contextlib.suppress(ChecksFailed):
        script["main"](rounds=2, repeats=1, to=tmp_path)
    record = json.loads((tmp_path / "paged_attention.json").read_text())
    names = [m["name"] for m in record["measures"]]
    assert names == [
        f"{who}_{case}_dim_8"
        for case in ("20_each", "mixed")
        for who in ("sdpa", "cpu", "gather")
    ]
    assert [c["name"] for c in record["checks"]] == [
        "in_place_at_most_1.1x_20_each_dim_8",
        "in_place_at_most_0.7x_mixed_dim_8",
    ]
    context = record["measures"][1]["context"]
    assert context["rounds"] == 2
    assert (
        context["minimal_bytes"]
        == bench.Shape((20, 20), head_dim=8).minimal_bytes()
    )
