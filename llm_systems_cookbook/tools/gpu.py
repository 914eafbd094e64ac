"""Try and time on a GPU what is otherwise interpreted, or left out.

    cookbook gpu
    python -m llm_systems_cookbook.tools.gpu

The second form needs torch and Triton alone: a part that misses a package is
skipped by name. No part needs a network.

Each part is a process of its own, because an illegal address on a GPU spoils
the process that met it, and a hang would hold up the others. On its standard
output a line that is a JSON object is a figure; its last line is its message.
"""

import contextlib
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from llm_systems_cookbook.nb.environment import Conditions, find_checkout
from llm_systems_cookbook.nb.record import SLUG, write_atomic
from llm_systems_cookbook.validate import cdiv

if TYPE_CHECKING:
    from llm_systems_cookbook.tools.bench import Timing

BUDGET = 300.0  # seconds for all parts
LEAST = 0.5  # seconds; a part that gets less is not started
MISSING = 77  # exit status of a part that misses a package
KEPT = 4000  # characters of a failed part's output

_SOURCE = Path(__file__).resolve().parents[2]
_COOKBOOK = "from llm_systems_cookbook.tools.cli import app; app()"


class NoGPU(RuntimeError):
    """Raised where there is nothing to try; the message says why."""


@dataclass(frozen=True)
class Part:
    """One thing to try.

    Attributes:
        name: as the table shows it.
        arguments: of the Python that runs it.
        share: of the time left, against the shares of the parts to come.
        needs: modules without which it is skipped.
        in_checkout: whether it needs the repository's files.
    """

    name: str
    arguments: tuple[str, ...]
    share: float = 1.0
    needs: tuple[str, ...] = ()
    in_checkout: bool = False

    def obstacle(self) -> str:
        """Return why it cannot run here, or ""."""
        for module in self.needs:
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed"
        if self.in_checkout and find_checkout() is None:
            return "there is no checkout of the cookbook"
        return ""


@dataclass
class Outcome:
    """What became of a part.

    Attributes:
        name: the part's.
        status: passed, failed, skipped or timeout.
        seconds: that it took.
        message: in one line, what it said last, or why it did not run.
        figures: what it measured, as it printed it.
        output: the end of what it printed, where it did not pass.
    """

    name: str
    status: str
    seconds: float = 0.0
    message: str = ""
    figures: list[dict[str, object]] = field(default_factory=list)
    output: str = ""


def default_parts(device: str) -> list[Part]:
    """Return all parts, the ones of most consequence first."""
    own = ("-m", "llm_systems_cookbook.tools.gpu")
    # Most of the time goes into compiling, which many can do at once.
    workers: tuple[str, ...] = ()
    if importlib.util.find_spec("xdist") is not None:
        workers = ("-n", str(min(8, os.cpu_count() or 1)))
    return [
        Part(
            "kernels",
            # Only the tests' own folder of helpers: the shared set-up would
            # ask for Matplotlib and Hypothesis, which no kernel needs.
            (
                *("-m", "pytest", "-q", "--noconftest", *workers),
                *("-p", "no:cacheprovider", "-k", "triton"),
                "tests/attention/test_attention_backends.py",
                "tests/attention/test_write_kv.py",
            ),
            share=130,
            needs=("pytest", "triton", "numba"),
            in_checkout=True,
        ),
        Part("attention", (*own, "attention", device), share=70),
        Part("engine", (*own, "engine", device), share=30),
        Part(
            "notebooks",
            ("-c", _COOKBOOK, "run", "07", "10", "--jobs", "2"),
            share=70,
            needs=("nbclient", "ipykernel", "typer", "rich", "matplotlib"),
            in_checkout=True,
        ),
    ]


# --- Running the parts -------------------------------------------------------


def run_parts(
    parts: Sequence[Part],
    device: str,
    budget: float = BUDGET,
    tell: Callable[[str], None] = print,
) -> list[Outcome]:
    """Run parts one after the other; what becomes of one stops no other.

    Args:
        parts: in their order.
        device: as torch names it.
        budget: seconds for all of them. What one part leaves of its share
            goes to those after it.
        tell: called with a line before each part.
    """
    end = time.monotonic() + budget
    outcomes = []
    for index, part in enumerate(parts):
        left = end - time.monotonic()
        limit = left * part.share / sum(p.share for p in parts[index:])
        reason = part.obstacle()
        if not reason and limit < LEAST:
            reason = f"no time was left of {budget:g} seconds"
        if reason:
            outcomes.append(Outcome(part.name, "skipped", message=reason))
            continue
        tell(f"{part.name}: at most {limit:.0f} seconds ...")
        outcomes.append(run_part(part, device, limit))
    return outcomes


def run_part(part: Part, device: str, limit: float) -> Outcome:
    """Run one part for `limit` seconds at most."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        env = _environment(device, Path(folder) / "results")
        command = [sys.executable, *part.arguments]
        status = _exit_status(command, env, log, limit)
        text = log.read_text(encoding="utf-8", errors="replace")
    outcome = Outcome(part.name, "passed", time.monotonic() - began)
    said = []
    for line in filter(str.strip, text.splitlines()):
        figure = _figure(line)
        if figure is None:
            said.append(line)
        else:
            outcome.figures.append(figure)
    outcome.message = said[-1].strip() if said else ""
    if status is None:
        outcome.status = "timeout"
        outcome.message = f"stopped after {limit:.0f} seconds"
    elif status == MISSING:
        outcome.status = "skipped"
    elif status != 0:
        outcome.status = "failed"
        outcome.message = outcome.message or f"exit status {status}"
    if outcome.status in ("failed", "timeout"):
        outcome.output = "\n".join(said)[-KEPT:]
    return outcome


def _exit_status(
    command: list[str], env: dict[str, str], log: Path, limit: float
) -> int | None:
    """Return a command's exit status, or None when its time was up."""
    # Into a file: a grandchild that lives on would keep a pipe open.
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=find_checkout(),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:  # after Ctrl-C, too: its kernels and compilers go with it
            _kill(process)


def _kill(process: subprocess.Popen) -> None:
    if hasattr(os, "killpg"):
        # No process of the group may be left, which raises an error.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _environment(device: str, results: Path) -> dict[str, str]:
    """Return the variables of a part, which see the package of this file."""
    env = dict(os.environ)
    env.pop("COOKBOOK_BACKEND", None)  # the parts choose
    env.pop("TRITON_INTERPRET", None)
    if device == "cpu":
        env["TRITON_INTERPRET"] = "1"
    path = [str(_SOURCE), *filter(None, [env.get("PYTHONPATH")])]
    env["PYTHONPATH"] = os.pathsep.join(path)
    env["PYTHONIOENCODING"] = "utf-8"
    # The reader's own records of the notebooks stay as they are.
    env["COOKBOOK_RESULTS"] = str(results)
    return env


def _figure(line: str) -> dict[str, object] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


# --- The record and the table ------------------------------------------------


def device_name(device: str) -> str:
    """Return what the device is called.

    Raises:
        NoGPU: torch is missing, or finds no GPU.
    """
    if importlib.util.find_spec("torch") is None:
        raise NoGPU("no GPU can be used: torch is not installed")
    import torch

    if device == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise NoGPU(f"no GPU here: torch {torch.__version__} finds none")
    return torch.cuda.get_device_name(device)


def record_path(folder: Path, name: str) -> Path:
    """Return where the record of a device goes.

    Raises:
        ValueError: nothing of its name can be in a file's name.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    file_name = f"gpu-{slug}"
    if not slug or not SLUG.fullmatch(file_name):
        raise ValueError(f"no file can be named after the device {name!r}")
    return folder / f"{file_name}.json"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return what was found, as plain text, a line for each part."""
    wide = max(len(outcome.name) for outcome in outcomes)
    lines = []
    for outcome in outcomes:
        lines.append(
            f"{outcome.name:{wide}}  {outcome.status:7}  "
            f"{outcome.seconds:5.1f} s  {outcome.message}".rstrip()
        )
        lines += [f"{'':{wide}}    {_shown(f)}" for f in outcome.figures]
    return "\n".join(lines)


def _shown(figure: dict[str, object]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in figure.items()
    )


def main(
    parts: Sequence[Part] | None = None,
    device: str = "cuda",
    to: Path | None = None,
    budget: float = BUDGET,
) -> int:
    """Run the parts, write the record, print the table.

    Args:
        parts: all when None.
        device: as torch names it.
        to: folder of the record; `benchmarks/results` of the checkout, or of
            the working directory, when None.
        budget: seconds for all parts.

    Returns:
        0, or 1 when a part failed or took too long, or 2 without a GPU. Then
        nothing was run or written.
    """
    try:
        name = device_name(device)
    except NoGPU as error:
        print(error, file=sys.stderr)
        return 2
    if to is None:
        to = (find_checkout() or Path.cwd()) / "benchmarks" / "results"
    path = record_path(to, name)
    outcomes = run_parts(
        default_parts(device) if parts is None else parts, device, budget
    )
    bad = [o for o in outcomes if o.status in ("failed", "timeout")]
    record = {
        "schema": 1,
        "device": name,
        "status": "failed" if bad else "passed",
        "conditions": Conditions.here().as_dict(),
        "parts": [asdict(outcome) for outcome in outcomes],
    }
    write_atomic(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(table(outcomes))
    for outcome in bad:
        print(f"\n{outcome.name}, {outcome.status}:\n{outcome.output}")
    print(f"\n{path}")
    return 1 if bad else 0


# --- The parts that are ours -------------------------------------------------


def attention(device: str, batch: int = 64, length: int = 4096) -> None:
    """Time decode attention in 16 bits; print a figure for each candidate.

    Raises:
        RuntimeError: our own kernel cannot run.
        AssertionError: a candidate's result is wrong.
    """
    from llm_systems_cookbook.tools import bench

    own = "cpu" if device == "cpu" else "triton"
    for dtype in ("float16", "bfloat16"):
        shape = bench.Shape((length,) * batch, dtype=dtype, device=device)
        timings = bench.measure(shape)
        for timing in timings:
            _print_figure(candidate=timing.name, dtype=dtype, **_told(timing))
        problem = next(t.problem for t in timings if t.name == own)
        if problem:
            raise RuntimeError(f"{own}, {dtype}: {problem}")


def _told(timing: "Timing") -> dict[str, object]:
    from llm_systems_cookbook.tools import bench

    if timing.problem:
        return {"problem": timing.problem}
    ratio = statistics.median(timing.ratios)
    return {"times_sdpa": ratio, **bench.context_of(timing)}


def engine(
    device: str,
    batch: int = 32,
    mean_prompt: int = 256,
    rounds: int = 5,
    steps: int = 15,
) -> None:
    """Serve TinyGPT from each memory in turns; then swap to pinned memory."""
    from llm_systems_cookbook.models import TinyGPT
    from llm_systems_cookbook.tools import bench_engine as engines

    def model() -> engines.TimedModel:
        return engines.TimedModel(TinyGPT(device=device))

    outputs = (rounds + 2) * steps
    longest = 3 * mean_prompt // 2 + outputs + 99
    longest = cdiv(longest, engines.BLOCK_SIZE) * engines.BLOCK_SIZE
    slots = batch * longest
    blocks = slots, engines.BLOCK_SIZE, batch
    compared = {
        "contiguous": engines.contiguous(model(), slots, longest, batch),
        "in_place": engines.paged(model(), *blocks, watermark=0.0),
        "gather": engines.paged(model(), *blocks, "gather", watermark=0.0),
    }
    for each in compared.values():
        engines.fill(each, batch, mean_prompt, outputs)
    spent = engines.timed_rounds(compared, rounds, steps)
    for name, own in spent.items():
        ratios = [
            base.step / mine.step
            for base, mine in zip(spent["contiguous"], own, strict=True)
        ]
        _print_figure(
            engine=name,
            times_throughput_of_contiguous=statistics.median(ratios),
            lowest=min(ratios),
            highest=max(ratios),
            milliseconds=statistics.median(s.step for s in own) * 1e3,
            batch=batch,
            mean_prompt=mean_prompt,
            rounds=rounds,
        )
    swap(device)


def swap(device: str, batch: int = 8, prompt: int = 40, new: int = 24) -> None:
    """Serve in memory that is too short, by swapping; compare the tokens.

    In float64, where tokens do not depend on who shares a batch.

    Raises:
        RuntimeError: nothing was swapped, the host's blocks are not pinned
            though there is a GPU, or a token differs.
    """
    import torch

    from llm_systems_cookbook.models import TinyGPT
    from llm_systems_cookbook.tools import bench_engine as engines

    model = engines.TimedModel(TinyGPT(dtype=torch.float64, device=device))
    prompts = [list(range(7 * i, 7 * i + prompt)) for i in range(batch)]
    size = engines.BLOCK_SIZE
    blocks = batch * cdiv(prompt + new, size)  # that all end with
    ample = engines.paged(model, blocks * size, size, batch, watermark=0.0)
    short = engines.paged(
        model,
        blocks * 3 // 4 * size,
        size,
        batch,
        watermark=0.0,
        host_blocks=blocks,
        preemption="swap",
    )
    expected, got = (e.generate(prompts, new) for e in (ample, short))
    counts = short.scheduler.counts
    pinned = short.kv_cache.host_keys[0].is_pinned()
    if ample.scheduler.counts.preemptions or not counts.swaps:
        raise RuntimeError(f"the short run swapped {counts.swaps} times")
    if device != "cpu" and not pinned:
        raise RuntimeError("the host's blocks are not in pinned memory")
    if got != expected:
        wrong = sum(a != b for a, b in zip(got, expected, strict=True))
        raise RuntimeError(f"{wrong} of {batch} texts differ after swapping")
    _print_figure(
        swaps=counts.swaps,
        swapped_blocks=counts.swapped_blocks,
        pinned=pinned,
        tokens_equal=batch * new,
    )


OWN = {"attention": attention, "engine": engine}


def _print_figure(**figure: object) -> None:
    # At once: what is known before a crash or the end of the time stays.
    print(json.dumps(figure, allow_nan=False), flush=True)


def run_own(name: str, device: str, **sizes: int) -> int:
    """Run a part of ours in this process; return its exit status."""
    try:
        OWN[name](device, **sizes)
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed")
        return MISSING
    return 0


def _arguments(given: list[str]) -> Iterator[tuple[str, int]]:
    for argument in given:
        name, _, value = argument.partition("=")
        yield name, int(value)


if __name__ == "__main__":
    if len(sys.argv) > 2:  # a part, its device, and sizes such as batch=2
        sys.exit(run_own(*sys.argv[1:3], **dict(_arguments(sys.argv[3:]))))
    sys.exit(main())
