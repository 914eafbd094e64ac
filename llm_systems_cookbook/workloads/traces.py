"""Public traces of LLM serving: lengths and arrival times, no text.

A trace is downloaded once, checked against its SHA-256 and cached. Set the
environment variable COOKBOOK_TRACES to a folder that holds the files to stay
offline: then that folder alone is read. Without file or network,
`load_or_generate` draws a look-alike from a small table of quantiles.
"""

import csv
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from llm_systems_cookbook.validate import cdiv, folder_from
from llm_systems_cookbook.workloads.generated import (
    Workload,
    poisson_arrivals,
)

FOLDER_VARIABLE = "COOKBOOK_TRACES"
PREFIX_BLOCK_TOKENS = 512
HTTP_TIMEOUT_S = 5


class TraceUnavailable(RuntimeError):
    """Raised when a trace's file is neither here nor to be downloaded."""


class TraceError(ValueError):
    """Raised when a trace's file is not what it should be."""


@dataclass(frozen=True, eq=False)
class Trace(Workload):
    """Requests of a serving system, in order of arrival.

    The arrays are copied and read-only.

    Attributes:
        name: one of NAMES.
        arrival_s: float64 [n], seconds since the first request,
            non-decreasing.
        input_len: int64 [n], prompt tokens, at least 1 each.
        output_len: int64 [n], generated tokens, at least 1 each.
        prefix_ids: n tuples, one id for each 512-token block of the prompt;
            equal ids mean equal prefixes. None where the trace has none.
        sha256: of the file the trace was read from; None when generated.

    Raises:
        ValueError: no request, arrays or prefix_ids of unequal length, a
            length below 1 or not an integer, an arrival that is not finite
            or goes back in time, another number of ids than a prompt has
            blocks.
    """

    prefix_ids: list[tuple[int, ...]] | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefix_ids is not None:
            self._require_an_id_per_block(self.prefix_ids)

    def _require_an_id_per_block(self, ids: list[tuple[int, ...]]) -> None:
        if len(ids) != len(self):
            raise ValueError(f"{len(ids)} prefix_ids for {len(self)} requests")
        blocks = cdiv(self.input_len, PREFIX_BLOCK_TOKENS)
        found = np.array([len(prompt) for prompt in ids])
        for index in np.flatnonzero(found != blocks):
            raise ValueError(
                f"prefix_ids[{index}] has {found[index]} ids for "
                f"{self.input_len[index]} tokens, not {blocks[index]}"
            )

    @property
    def generated(self) -> bool:
        """Whether the requests were drawn, not read from the trace."""
        return self.sha256 is None

    @property
    def label(self) -> str:
        """The name for a figure; it says when the trace is generated."""
        if self.generated:
            return f"{self.name} (generated from quantiles, not the trace)"
        return self.name

    def first(self, n: int) -> "Trace":
        """Return the first `n` requests; the SHA-256 stays the file's.

        Raises:
            ValueError: n outside [1, len(trace)].
        """
        if not 1 <= n <= len(self):
            raise ValueError(f"n must be in [1, {len(self)}], got {n}")
        ids = self.prefix_ids
        return replace(
            self,
            arrival_s=self.arrival_s[:n],
            input_len=self.input_len[:n],
            output_len=self.output_len[:n],
            prefix_ids=None if ids is None else ids[:n],
        )


class Columns(NamedTuple):
    """What a trace file holds; fields as in Trace."""

    arrival_s: np.ndarray
    input_len: np.ndarray
    output_len: np.ndarray
    prefix_ids: list[tuple[int, ...]] | None


def parse_azure(text: str) -> Columns:
    """Read an Azure trace: a header, then time, input and output length.

    Times have up to seven decimals of a second.
    """
    rows = list(csv.DictReader(text.splitlines()))
    # Nanoseconds hold every decimal; Python's datetime keeps six.
    times = np.array([row["TIMESTAMP"] for row in rows], dtype="M8[ns]")
    return Columns(
        _seconds(times.astype(np.int64) // 100, ticks_per_second=10**7),
        np.array([int(row["ContextTokens"]) for row in rows]),
        np.array([int(row["GeneratedTokens"]) for row in rows]),
        None,
    )


def parse_mooncake(text: str) -> Columns:
    """Read a Mooncake trace: one JSON object a line, times in milliseconds."""
    rows = [json.loads(line) for line in text.splitlines()]
    times = np.array([row["timestamp"] for row in rows])
    return Columns(
        _seconds(times, ticks_per_second=1000),
        np.array([row["input_length"] for row in rows]),
        np.array([row["output_length"] for row in rows]),
        [tuple(row["hash_ids"]) for row in rows],
    )


def _seconds(ticks: np.ndarray, ticks_per_second: int) -> np.ndarray:
    """Return the seconds since the first request."""
    # The difference is an exact integer, so only the division rounds.
    return (ticks - ticks[:1]) / ticks_per_second


class _Source(NamedTuple):
    file: str
    folder_url: str
    sha256: str
    parse: Callable[[str], Columns]

    @property
    def url(self) -> str:
        return self.folder_url + self.file


_GITHUB = "https://raw.githubusercontent.com/"
_AZURE = (
    _GITHUB + "Azure/AzurePublicDataset/"
    "b469a113cedca53ddc3bdea71a143dc4b7d8700c/data/"
)
_MOONCAKE = (
    _GITHUB + "kvcache-ai/Mooncake/"
    "3b5a594133958449a1feaf1c9e0fc1b553e34a28/FAST25-release/traces/"
)
_SOURCES = {
    "azure-conv-2023": _Source(
        "AzureLLMInferenceTrace_conv.csv",
        _AZURE,
        "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
        parse_azure,
    ),
    "azure-code-2023": _Source(
        "AzureLLMInferenceTrace_code.csv",
        _AZURE,
        "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
        parse_azure,
    ),
    "mooncake-conversation": _Source(
        "conversation_trace.jsonl",
        _MOONCAKE,
        "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
        parse_mooncake,
    ),
    "mooncake-synthetic": _Source(
        "synthetic_trace.jsonl",
        _MOONCAKE,
        "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
        parse_mooncake,
    ),
}
NAMES = tuple(_SOURCES)


def load(name: str) -> Trace:
    """Return a trace, from COOKBOOK_TRACES, the cache or the network.

    When COOKBOOK_TRACES is set (and not empty), only that folder is read.
    Otherwise the file comes from the cache of this user, and is downloaded
    into it when it is missing or damaged. After one failed connection no
    other is tried until Python is restarted, so that four traces do not wait
    for four time-outs.

    Source: github.com/Azure/AzurePublicDataset (CC-BY-4.0; Patel et al.,
    Splitwise, ISCA 2024) and github.com/kvcache-ai/Mooncake (Apache-2.0; Qin
    et al., Mooncake, FAST 2025), each at a pinned commit.

    Args:
        name: one of NAMES.

    Raises:
        ValueError: an unknown name.
        TraceUnavailable: no file and no network; says what to do.
        TraceError: a file whose SHA-256 is not the pinned one, naming the
            file, both digests and where to get it; or one that is, but holds
            no trace.
    """
    source = _SOURCES[_known(name)]
    path = _find(name, source)
    data = _read(name, source, path)
    digest = hashlib.sha256(data).hexdigest()
    if digest != source.sha256:
        raise TraceError(
            f"{path}: SHA-256 is {digest}, expected {source.sha256}. "
            f"Replace the file by {source.url}"
        )
    try:
        return Trace(name, *source.parse(data.decode("ascii")), sha256=digest)
    except (LookupError, TypeError, ValueError) as error:
        # The digest of a wrong file was pinned, or the wrong parser named.
        raise TraceError(
            f"{path} has the pinned SHA-256, but holds no trace "
            f"({_cause(error)})"
        ) from error


def _known(name: str) -> str:
    if name not in NAMES:
        raise ValueError(
            f"unknown trace {name!r}; choose from {', '.join(NAMES)}"
        )
    return name


def _find(name: str, source: _Source) -> Path:
    folder = folder_from(FOLDER_VARIABLE)
    if folder:
        return folder / source.file
    return _download_once(name, source)


def _read(name: str, source: _Source, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TraceUnavailable(
            f"trace {name}: cannot read {path} ({_cause(error)}). "
            f"Set {FOLDER_VARIABLE} to a folder that has {source.file}, or "
            f"unset it and connect once to download it from {source.url}"
        ) from None


def _download_once(name: str, source: _Source) -> Path:
    """Return the path in the cache, where pooch puts and verifies the file."""
    import pooch  # seldom needed, and not everywhere

    # pooch says "Downloading" before it knows whether there is a network.
    pooch.get_logger().setLevel("WARNING")
    cache = pooch.os_cache("llm-systems-cookbook")
    path = Path(cache) / source.file
    try:
        pooch.retrieve(
            url=source.url,
            known_hash=source.sha256,
            fname=source.file,
            path=cache,
            downloader=_download,
        )
    except (OSError, ValueError) as error:
        if path.is_file():
            return path  # damaged: loading it names both digests
        raise TraceUnavailable(
            f"trace {name}: {source.file} is not in {cache}, and downloading "
            f"{source.url} failed ({_cause(error)}). Set {FOLDER_VARIABLE} "
            f"to a folder that has {source.file}, or connect once and "
            "restart Python"
        ) from None
    return path


_failed_connection: str | None = None


def _download(url: str, output_file: str, caller: object) -> None:
    """Fetch one file for pooch, unless an earlier connection failed."""
    import pooch
    import requests  # slow to import, and seldom needed

    global _failed_connection
    if _failed_connection is not None:
        raise requests.ConnectionError(f"{_failed_connection} before")
    fetch = pooch.HTTPDownloader(progressbar=True, timeout=HTTP_TIMEOUT_S)
    try:
        fetch(url, output_file, caller)
    except (requests.ConnectionError, requests.Timeout):
        # The library's own message is several lines of nested objects.
        _failed_connection = f"no connection to {urlsplit(url).hostname}"
        raise requests.ConnectionError(_failed_connection) from None


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def load_or_generate(name: str, n: int | None = None, seed: int = 0) -> Trace:
    """Return a trace, or a generated look-alike when it is unavailable.

    When it generates, it prints one line that says so and why. A damaged
    file is an error, never a reason to generate.

    Args:
        name: one of NAMES.
        n: the first n requests, or as many generated; all when None.
        seed: of the generator; the real trace does not depend on it.

    Raises:
        ValueError: an unknown name, n below 1 or beyond the trace.
        TraceError: see load.
    """
    try:
        trace = load(name)
    except TraceUnavailable:
        trace = generate(name, n, seed)
        print(
            f"{trace.label}: put {_SOURCES[name].file} into the folder "
            f"{FOLDER_VARIABLE}, or unset that and go online"
        )
        return trace
    return trace if n is None else trace.first(n)


def generate(name: str, n: int | None = None, seed: int = 0) -> Trace:
    """Draw requests that resemble a trace, from its table of quantiles.

    Lengths follow the quantiles, with the trace's rank correlation between
    input and output (a Gaussian copula). Arrivals are Poisson at the trace's
    mean rate. What is lost: bursts, the order of requests, shared prefixes.

    Args:
        name: one of NAMES.
        n: requests to draw, at least 1; as many as the trace has when None.
        seed: of the random generator.

    Returns:
        A trace with prefix_ids and sha256 None.

    Raises:
        TypeError: n that is not an integer.
        ValueError: an unknown name, n below 1.
    """
    tables = quantile_tables()
    table = tables["traces"][_known(name)]
    n = table["rows"] if n is None else n
    rng = np.random.default_rng(seed)
    rate = (table["rows"] - 1) / table["duration_s"]
    arrivals = poisson_arrivals(rng, n, rate)
    u_input, u_output = _correlated_uniforms(rng, n, table["spearman"])
    levels = tables["levels"]
    return Trace(
        name,
        arrivals - arrivals[0],
        _from_quantiles(u_input, levels, table["input_len"]["quantiles"]),
        _from_quantiles(u_output, levels, table["output_len"]["quantiles"]),
    )


def _correlated_uniforms(
    rng: np.random.Generator, n: int, spearman: float
) -> tuple[np.ndarray, np.ndarray]:
    """Draw two uniform [n] samples whose ranks correlate as asked."""
    # Pearson's correlation of the normals that gives this rank correlation.
    pearson = 2 * np.sin(np.pi / 6 * spearman)
    first, second = rng.standard_normal((2, n))
    second = pearson * first + np.sqrt(1 - pearson**2) * second
    return _normal_cdf(first), _normal_cdf(second)


def _normal_cdf(values: np.ndarray) -> np.ndarray:
    cdf = NormalDist().cdf
    return np.array([cdf(value) for value in values])


def _from_quantiles(
    uniforms: np.ndarray, levels: list[float], quantiles: list[int]
) -> np.ndarray:
    """Invert the CDF, linear between the levels of the table."""
    lengths = np.interp(uniforms, levels, quantiles)
    return np.rint(lengths).astype(np.int64)


def quantile_tables() -> dict[str, Any]:
    """Return the package's table of quantiles, one entry for each trace.

    scripts/trace_quantiles.py computes it and describes its fields.
    """
    folder = resources.files("llm_systems_cookbook.workloads") / "data"
    return json.loads((folder / "trace_quantiles.json").read_text("utf-8"))
