"""Traces: what is read, what is refused, what is generated instead.

No test reaches the network: `requests.get` is replaced in each.
"""

import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pooch
import pytest
import requests

from llm_systems_cookbook.workloads import traces
from llm_systems_cookbook.workloads.traces import (
    NAMES,
    Trace,
    TraceError,
    TraceUnavailable,
)

ROWS = {
    "azure-conv-2023": 19_366,
    "azure-code-2023": 8_819,
    "mooncake-conversation": 12_031,
    "mooncake-synthetic": 3_993,
}
CONV = "azure-conv-2023"
CONV_FILE = "AzureLLMInferenceTrace_conv.csv"
MOON = "mooncake-conversation"
SCRIPT = Path(__file__).parents[2] / "scripts" / "trace_quantiles.py"

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
# CRLF, and no newline after the last row, as in the published files.
AZURE = "\r\n".join(
    [
        HEADER,
        "2023-12-31 23:59:59.9999999,374,44",
        "2024-01-01 00:00:00.0000001,396,109",
        "2024-01-01 00:00:02.5,1,1",
    ]
).encode()


def moon_row(timestamp=0, input_length=600, output_length=5, hash_ids=(0, 1)):
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": list(hash_ids),
    }


def moon_file(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


MOONCAKE = moon_file(
    moon_row(timestamp=5000),
    moon_row(timestamp=6500, input_length=512, hash_ids=[0]),
    moon_row(timestamp=6500, input_length=513, hash_ids=[0, 7]),
)


class Response:
    """As much of a response as pooch reads."""

    def __init__(self, body):
        self.body = body
        self.headers = {}

    def raise_for_status(self):
        pass

    def iter_content(self, chunk_size):
        return [self.body]


class Network:
    """Stands in for requests.get; without a body, nothing is reachable."""

    def __init__(self):
        self.body = None
        self.calls = []

    def get(self, url, **options):
        self.calls.append((url, options))
        if self.body is None:
            raise requests.ConnectionError("name not resolved")
        return Response(self.body)


@pytest.fixture(autouse=True)
def network(monkeypatch):
    fake = Network()
    monkeypatch.setattr(requests, "get", fake.get)
    monkeypatch.setattr(traces, "_failed_connection", None)
    return fake


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """An empty offline folder."""
    monkeypatch.setenv("COOKBOOK_TRACES", str(tmp_path))
    return tmp_path


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, and no offline folder."""
    monkeypatch.delenv("COOKBOOK_TRACES", raising=False)
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / project)
    return tmp_path / "llm-systems-cookbook"


@pytest.fixture
def pinned(monkeypatch):
    """Pin the SHA-256 of a small file instead of the published one."""

    def pin(name, data):
        digest = hashlib.sha256(data).hexdigest()
        source = traces._SOURCES[name]._replace(sha256=digest)
        monkeypatch.setitem(traces._SOURCES, name, source)
        return digest

    return pin


def load_or_skip(name):
    try:
        return traces.load(name)
    except TraceUnavailable as error:
        pytest.skip(str(error))


def table_script():
    spec = importlib.util.spec_from_file_location("trace_quantiles", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The published traces


@pytest.mark.parametrize("name", NAMES)
def test_load_reads_every_row_of_the_published_trace(name):
    trace = load_or_skip(name)
    assert trace.name == trace.label == name
    assert len(trace) == ROWS[name]
    assert trace.sha256 == traces._SOURCES[name].sha256
    assert not trace.generated
    assert (trace.prefix_ids is None) == name.startswith("azure")
    assert trace.arrival_s[0] == 0
    assert trace.arrival_s.dtype == np.float64
    assert trace.input_len.dtype == trace.output_len.dtype == np.int64


def test_load_reads_azure_times_to_a_ten_millionth_of_a_second():
    trace = load_or_skip(CONV)
    assert trace.arrival_s[:3].tolist() == [0.0, 4.314579, 4.541877]
    assert trace.input_len[:3].tolist() == [374, 396, 879]
    assert trace.output_len[:3].tolist() == [44, 109, 55]


@pytest.mark.parametrize("name", NAMES)
def test_quantile_table_is_what_the_script_computes(name):
    trace = load_or_skip(name)
    table = traces.quantile_tables()
    script = table_script()
    assert table["traces"][name] == script.summarise(trace)
    assert table["levels"] == script.LEVELS


def test_script_check_passes_on_the_committed_table():
    for name in NAMES:
        load_or_skip(name)
    assert table_script().main(["--check"]) == 0


def test_script_check_fails_on_a_stale_table(monkeypatch, tmp_path, capsys):
    for name in NAMES:
        load_or_skip(name)
    script = table_script()
    stale = tmp_path / "trace_quantiles.json"
    stale.write_text("{}")
    monkeypatch.setattr(script, "TABLE", stale)
    assert script.main(["--check"]) == 1
    assert stale.read_text() == "{}"
    assert "stale" in capsys.readouterr().err
    assert script.main([]) == 0
    assert script.main(["--check"]) == 0
    assert list(tmp_path.iterdir()) == [stale]


def test_script_without_traces_fails_and_writes_nothing(
    monkeypatch, folder, capsys
):
    script = table_script()
    monkeypatch.setattr(script, "TABLE", folder / "table.json")
    assert script.main([]) == 2
    assert "COOKBOOK_TRACES" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
def test_generated_trace_resembles_the_published_one(name):
    real = load_or_skip(name)
    fake = traces.generate(name, n=40_000)
    for field in ("input_len", "output_len"):
        mean = getattr(real, field).mean()
        assert getattr(fake, field).mean() == pytest.approx(mean, rel=0.05)
    rate = (len(real) - 1) / real.arrival_s[-1]
    assert 40_000 / fake.arrival_s[-1] == pytest.approx(rate, rel=0.03)


# Parsing


def test_parse_azure_reads_crlf_and_up_to_seven_decimals():
    columns = traces.parse_azure(AZURE.decode())
    assert columns.arrival_s.tolist() == [0.0, 2e-7, 2.5000001]
    assert columns.input_len.tolist() == [374, 396, 1]
    assert columns.output_len.tolist() == [44, 109, 1]
    assert columns.prefix_ids is None


def test_parse_mooncake_counts_milliseconds_from_the_first_request():
    columns = traces.parse_mooncake(MOONCAKE.decode())
    assert columns.arrival_s.tolist() == [0.0, 1.5, 1.5]
    assert columns.input_len.tolist() == [600, 512, 513]
    assert columns.output_len.tolist() == [5, 5, 5]
    assert columns.prefix_ids == [(0, 1), (0,), (0, 7)]


def azure_with(row):
    return b"\r\n".join([*AZURE.split(b"\r\n")[:2], row])


def moon_with(**fields):
    return moon_file(moon_row(), moon_row(**{"timestamp": 3000, **fields}))


# What a maintainer could pin by mistake.
WRONG = {
    "empty": (CONV, b"", "n >= 1"),
    "header alone": (CONV, HEADER.encode(), "n >= 1"),
    "no header": (CONV, AZURE.split(b"\r\n", 1)[1], "'TIMESTAMP'"),
    "another trace": (CONV, MOONCAKE, "'TIMESTAMP'"),
    "no number": (CONV, azure_with(b"2024-01-01 00:00:01,5,x"), "'x'"),
    "no time": (CONV, azure_with(b"yesterday,5,5"), "yesterday"),
    "earlier": (CONV, azure_with(b"2023-01-01 00:00:00,5,5"), "arrival_s.1"),
    "no token": (CONV, azure_with(b"2024-01-01 00:00:01,0,5"), "input_len.1"),
    "half a row": (CONV, azure_with(b"2024-01-01 00:00:01,5"), "NoneType"),
    "not ASCII": (CONV, azure_with("\u0665".encode()), "ascii"),
    "no JSON": (MOON, MOONCAKE[:-5], "JSONDecodeError"),
    "no object": (MOON, b"[1, 2]\n", "TypeError"),
    "no key": (MOON, b'{"timestamp": 0}\n', "'input_length'"),
    "no answer": (MOON, moon_with(output_length=0), "output_len.1"),
    "half a token": (MOON, moon_with(output_length=1.5), "hold integers"),
    "no integer": (MOON, moon_with(output_length="5"), "hold integers"),
    "NaN": (MOON, moon_with(timestamp=float("nan")), "arrival_s.1. is nan"),
    "an id short": (MOON, moon_with(hash_ids=[0]), "1 ids .* 600 .* not 2"),
    "an id more": (MOON, moon_with(hash_ids=[0, 1, 2]), "3 ids .* not 2"),
}


@pytest.mark.parametrize(("name", "data", "words"), WRONG.values(), ids=WRONG)
def test_wrong_file_that_was_pinned_is_refused_by_name(
    name, data, words, folder, pinned
):
    pinned(name, data)
    path = folder / traces._SOURCES[name].file
    path.write_bytes(data)
    with pytest.raises(TraceError, match=words) as caught:
        traces.load(name)
    assert str(path) in str(caught.value)


# Where a file comes from


@pytest.mark.parametrize(
    "call", [traces.load, traces.generate, traces.load_or_generate]
)
def test_unknown_name_raises_and_lists_the_names(call):
    with pytest.raises(ValueError, match=r"'azure'.*mooncake-synthetic"):
        call("azure")


def test_offline_folder_is_read_without_the_network(folder, pinned, network):
    digest = pinned(CONV, AZURE)
    (folder / CONV_FILE).write_bytes(AZURE)
    trace = traces.load(CONV)
    assert trace.sha256 == digest
    assert trace.output_len.tolist() == [44, 109, 1]
    assert network.calls == []


@pytest.mark.parametrize("missing", ["file", "folder", "not a folder"])
def test_offline_folder_without_the_file_says_what_to_do(
    missing, folder, monkeypatch, network
):
    if missing == "folder":
        monkeypatch.setenv("COOKBOOK_TRACES", str(folder / "nowhere"))
    if missing == "not a folder":
        (folder / "file").write_text("")
        monkeypatch.setenv("COOKBOOK_TRACES", str(folder / "file"))
    with pytest.raises(TraceUnavailable) as caught:
        traces.load(CONV)
    message = str(caught.value)
    assert str(folder) in message
    assert CONV_FILE in message
    assert "Set COOKBOOK_TRACES" in message
    assert traces._SOURCES[CONV].url in message
    assert "\n" not in message
    assert caught.value.__suppress_context__
    assert network.calls == []


@pytest.mark.parametrize("call", [traces.load, traces.load_or_generate])
@pytest.mark.parametrize("data", [AZURE, b"", b"no trace", b"\xff"])
def test_file_with_another_sha256_is_refused_before_it_is_read(
    call, data, folder
):
    (folder / CONV_FILE).write_bytes(data)
    with pytest.raises(TraceError) as caught:
        call(CONV)
    message = str(caught.value)
    assert str(folder / CONV_FILE) in message
    assert hashlib.sha256(data).hexdigest() in message
    assert traces._SOURCES[CONV].sha256 in message
    assert traces._SOURCES[CONV].url in message


def test_empty_folder_variable_counts_as_unset(cache, monkeypatch, network):
    monkeypatch.setenv("COOKBOOK_TRACES", "")
    with pytest.raises(TraceUnavailable):
        traces.load(CONV)
    assert len(network.calls) == 1


def test_download_happens_once_and_is_cached(cache, pinned, network):
    digest = pinned(CONV, AZURE)
    network.body = AZURE
    assert traces.load(CONV).sha256 == digest
    network.body = None
    assert len(traces.load(CONV)) == 3
    assert len(network.calls) == 1
    assert (cache / CONV_FILE).read_bytes() == AZURE


@pytest.mark.parametrize("name", NAMES)
def test_download_asks_for_a_pinned_commit_with_a_timeout(
    name, cache, network
):
    with pytest.raises(TraceUnavailable):
        traces.load(name)
    [(url, options)] = network.calls
    assert url.startswith("https://raw.githubusercontent.com/")
    assert len(url.split("/")[5]) == 40
    assert url.endswith(traces._SOURCES[name].file)
    assert options["timeout"] == 5


def test_without_file_and_network_the_error_says_what_to_do(cache):
    with pytest.raises(TraceUnavailable) as caught:
        traces.load(CONV)
    message = str(caught.value)
    assert str(cache) in message
    assert CONV_FILE in message
    assert "no connection to" in message
    assert "Set COOKBOOK_TRACES" in message
    assert traces._SOURCES[CONV].url in message
    assert caught.value.__suppress_context__


def test_after_one_failed_connection_no_other_is_tried(cache, network):
    for name in NAMES:
        with pytest.raises(TraceUnavailable, match="no connection to"):
            traces.load(name)
    assert len(network.calls) == 1


def test_after_a_failed_connection_the_cache_is_still_read(cache, pinned):
    pinned(CONV, AZURE)
    with pytest.raises(TraceUnavailable):
        traces.load(MOON)
    (cache / CONV_FILE).write_bytes(AZURE)
    assert len(traces.load(CONV)) == 3


def test_download_with_another_sha256_is_thrown_away(cache, network):
    network.body = b"<html>please sign in</html>"
    with pytest.raises(TraceUnavailable, match="hash"):
        traces.load(CONV)
    assert list(cache.iterdir()) == []


def test_damaged_file_in_the_cache_is_downloaded_again(cache, pinned, network):
    pinned(CONV, AZURE)
    cache.mkdir()
    (cache / CONV_FILE).write_bytes(AZURE[:-2])
    network.body = AZURE
    assert len(traces.load(CONV)) == 3


def test_damaged_file_in_the_cache_without_network_is_an_error(cache):
    cache.mkdir()
    (cache / CONV_FILE).write_bytes(AZURE[:-2])
    with pytest.raises(TraceError, match="SHA-256"):
        traces.load(CONV)


def test_cache_that_cannot_be_made_is_unavailable(cache, pinned, network):
    pinned(CONV, AZURE)
    network.body = AZURE
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file where the folder should be")
    with pytest.raises(TraceUnavailable, match="COOKBOOK_TRACES"):
        traces.load(CONV)


# Generated instead


def test_load_or_generate_returns_the_trace_when_it_is_there(
    folder, pinned, capsys
):
    pinned(CONV, AZURE)
    (folder / CONV_FILE).write_bytes(AZURE)
    assert len(traces.load_or_generate(CONV)) == 3
    trace = traces.load_or_generate(CONV, n=2)
    assert trace.input_len.tolist() == [374, 396]
    assert not trace.generated
    assert capsys.readouterr().out == ""


def test_load_or_generate_says_in_one_line_that_it_generates(folder, capsys):
    trace = traces.load_or_generate(CONV, n=10)
    assert trace.generated
    [line] = capsys.readouterr().out.splitlines()
    assert "generated from quantiles, not the trace" in line
    assert CONV_FILE in line
    assert trace.label == f"{CONV} (generated from quantiles, not the trace)"


@pytest.mark.parametrize("name", NAMES)
def test_generated_trace_has_the_rows_and_range_of_the_table(name):
    trace = traces.generate(name)
    table = traces.quantile_tables()["traces"][name]
    assert len(trace) == table["rows"] == ROWS[name]
    assert trace.sha256 is None
    assert trace.prefix_ids is None
    assert trace.arrival_s[0] == 0
    for field in ("input_len", "output_len"):
        quantiles = table[field]["quantiles"]
        assert getattr(trace, field).min() >= quantiles[0]
        assert getattr(trace, field).max() <= quantiles[-1]
        mean = table[field]["mean"]
        assert getattr(trace, field).mean() == pytest.approx(mean, rel=0.08)


@pytest.mark.parametrize("name", NAMES)
def test_generated_trace_keeps_the_rank_correlation(name):
    trace = traces.generate(name, n=40_000)
    table = traces.quantile_tables()["traces"][name]
    found = table_script().spearman(trace.input_len, trace.output_len)
    assert found == pytest.approx(table["spearman"], abs=0.02)


def test_generated_trace_depends_on_the_seed_alone():
    one, same = traces.generate(CONV, 99, 1), traces.generate(CONV, 99, 1)
    other = traces.generate(CONV, 99, 2)
    for field in ("arrival_s", "input_len", "output_len"):
        assert np.array_equal(getattr(one, field), getattr(same, field))
        assert not np.array_equal(getattr(one, field), getattr(other, field))


@pytest.mark.parametrize("n", [0, -1])
def test_generate_refuses_fewer_than_one_request(n):
    with pytest.raises(ValueError, match=f"n must be .* got {n}"):
        traces.generate(CONV, n)


def test_generate_can_draw_one_request_and_more_than_the_trace_has():
    assert len(traces.generate(CONV, 1)) == 1
    assert len(traces.generate(CONV, 20_000)) == 20_000


def test_quantile_table_is_small_ordered_and_credited():
    tables = traces.quantile_tables()
    path = Path(traces.__file__).parent / "data" / "trace_quantiles.json"
    assert path.stat().st_size <= 8192
    levels = tables["levels"]
    assert {0.0, 0.99, 0.999, 1.0} <= set(levels)
    assert levels == sorted(levels)
    assert tuple(tables["traces"]) == NAMES
    for name, table in tables["traces"].items():
        assert table["sha256"] == traces._SOURCES[name].sha256
        assert table["licence"] in ("CC-BY-4.0", "Apache-2.0")
        assert table["source"].startswith("github.com/")
        assert " 202" in table["credit"]
        for field in ("input_len", "output_len"):
            quantiles = table[field]["quantiles"]
            assert len(quantiles) == len(levels)
            assert quantiles == sorted(quantiles)


def test_spearman_of_ties_takes_their_mean_rank():
    script = table_script()
    assert script.ranks(np.array([5, 9, 5, 1])).tolist() == [1.5, 3, 1.5, 0]
    rising = np.array([1, 2, 3, 4])
    assert script.spearman(rising, rising**3) == pytest.approx(1)
    assert script.spearman(rising, -rising) == pytest.approx(-1)


# The dataclass


def test_first_keeps_the_sha256_and_cuts_every_field():
    trace = Trace(
        "t", [0, 1, 2], [5, 6, 7], [1, 2, 3], [(0,), (1,), (2,)], "a"
    )
    part = trace.first(2)
    assert part.arrival_s.tolist() == [0.0, 1.0]
    assert part.input_len.tolist() == [5, 6]
    assert part.output_len.tolist() == [1, 2]
    assert part.prefix_ids == [(0,), (1,)]
    assert part.sha256 == "a"
    assert len(trace) == 3


@pytest.mark.parametrize("n", [0, -1, 3])
def test_first_refuses_a_count_outside_the_trace(n):
    trace = Trace("t", [0, 1], [5, 6], [1, 2])
    with pytest.raises(ValueError, match=rf"\[1, 2\], got {n}"):
        trace.first(n)


def test_trace_refuses_prefix_ids_for_other_requests():
    with pytest.raises(ValueError, match="1 prefix_ids for 2 requests"):
        Trace("t", [0, 1], [5, 6], [1, 1], prefix_ids=[(0,)])


def test_importing_traces_and_workload_leaves_torch_out():
    code = (
        "import sys, llm_systems_cookbook.workloads; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
