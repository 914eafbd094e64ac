"""What a step of the engine adds to its model and its kernels.

    python benchmarks/step_overhead.py --against OTHER_CHECKOUT

TinyGPT in float32 on the CPU, one thread, decode steps of 1 and of 32
sequences after a short prompt, read in place. From the time of each
`Engine.step` we subtract

- the time of the same model, called alone right after it with the same tokens
  and an attention that returns its query;
- the time inside functions that numba compiled, which attend and write.

What is left is scheduling, making inputs, checking, choosing and sampling. A
figure is the median over a round's steps. The two checkouts take turns, and
each round is a process of its own that imports the package from one of them;
a ratio is that of this checkout over the other in the same round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import llm_systems_cookbook
from llm_systems_cookbook.attention import PagedKVCache
from llm_systems_cookbook.memory import BlockAllocator, PagedMemory
from llm_systems_cookbook.models import TinyGPT
from llm_systems_cookbook.serving import Engine, Request, Scheduler

if TYPE_CHECKING:
    from llm_systems_cookbook.nb import Session

BATCHES = (1, 32)
PROMPT = 16  # tokens
WARM_UP = 10  # steps that are not timed
BLOCK_SIZE = 16
HERE = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
# In microseconds, but for the last.
Figures = dict[str, float]


class Noted:
    """A model that remembers what it was last asked."""

    def __init__(self, model: TinyGPT) -> None:
        self.model = model
        self.asked: tuple = ()

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def __call__(self, *inputs: object) -> Tensor:
        """Compute what the model computes."""
        self.asked = inputs
        return self.model(*inputs)

    @torch.no_grad()
    def again(self) -> None:
        """Compute the same without attention."""
        token_ids, positions, _, sampled_rows = self.asked
        self.model(token_ids, positions, _query, sampled_rows)


def _query(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query


class KernelClock:
    """Add up the seconds that Python spends in compiled functions.

    Wherever the package keeps them: in every module, what numba compiled is
    replaced by a function that looks at the clock. Make it after the first
    steps, because numba cannot compile a call of such a function.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.functions = 0
        for module, name, compiled in list(_compiled_functions()):
            setattr(module, name, self._timed(compiled))
            self.functions += 1

    def _timed(self, compiled: Callable) -> Callable:
        def timed(*arguments: object) -> object:
            began = time.perf_counter()
            try:
                return compiled(*arguments)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def _compiled_functions() -> Iterator[tuple[object, str, Callable]]:
    from numba.core.dispatcher import Dispatcher

    for name, module in list(sys.modules.items()):
        if name.startswith("llm_systems_cookbook"):
            for key, value in list(vars(module).items()):
                if isinstance(value, Dispatcher):
                    yield module, key, value


def decoding(batch: int, steps: int) -> Engine:
    """Return an engine whose requests all decode, for so many steps."""
    model = Noted(TinyGPT())
    per_request = -(-(PROMPT + steps + 1) // BLOCK_SIZE)
    num_blocks = batch * per_request
    memory = PagedMemory(BlockAllocator(num_blocks, BLOCK_SIZE))
    cache = PagedKVCache(
        model.num_layers,
        num_blocks,
        BLOCK_SIZE,
        model.num_kv_heads,
        model.head_dim,
    )
    scheduler = Scheduler(
        memory,
        max_num_seqs=batch,
        max_num_batched_tokens=batch * PROMPT,
        watermark=0.0,
    )
    engine = Engine(model, scheduler, cache, "cpu")
    for i in range(batch):
        prompt = [(i + j) % 256 for j in range(PROMPT)]
        engine.add(Request(i, prompt, steps + 1))
    engine.step()
    return engine


def one_round(steps: int) -> dict[str, Figures]:
    """Return the figures of both batches, in this process."""
    torch.set_num_threads(1)
    engines = [decoding(batch, WARM_UP + steps) for batch in BATCHES]
    for engine in engines:
        for _ in range(WARM_UP):
            engine.step()
    clock = KernelClock()
    return {
        str(batch): _figures(engine, clock, batch, steps)
        for batch, engine in zip(BATCHES, engines, strict=True)
    }


def _figures(
    engine: Engine, clock: KernelClock, batch: int, steps: int
) -> Figures:
    spent = []
    for _ in range(steps):
        clock.seconds = 0.0
        began = time.perf_counter()
        outputs = engine.step()
        stepped = time.perf_counter()
        engine.model.again()
        alone = time.perf_counter() - stepped
        if len(outputs) != batch or not clock.seconds:
            raise RuntimeError(
                f"{len(outputs)} of {batch} sequences decoded, kernels took "
                f"{clock.seconds} s"
            )
        spent.append((stepped - began, alone, clock.seconds))
    overhead = statistics.median(s - a - k for s, a, k in spent)
    step, alone, kernels = map(statistics.median, zip(*spent, strict=True))
    return {
        "overhead": overhead * 1e6,
        "step": step * 1e6,
        "alone": alone * 1e6,
        "kernels": kernels * 1e6,
        "tokens_per_second": batch / step,
    }


def round_of(checkout: Path, steps: int, cache: str) -> dict[str, Figures]:
    """Return the figures of a new process with a checkout's package.

    Raises:
        RuntimeError: the process failed, or took the package elsewhere.
    """
    env = os.environ | {
        "PYTHONPATH": str(checkout),
        "PYTHONDONTWRITEBYTECODE": "1",
        # The other checkout stays as it is.
        "NUMBA_CACHE_DIR": cache,
        "NUMBA_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, __file__, "--round", "--steps", str(steps)],
        env=env,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{checkout}: {done.stderr}")
    answer = json.loads(done.stdout)
    if not Path(answer["package"]).is_relative_to(checkout):
        raise RuntimeError(f"{checkout}: measured {answer['package']}")
    return answer["figures"]


def main(
    against: Path, rounds: int = 7, steps: int = 300, to: Path = RESULTS
) -> None:
    """Measure, print and write the figures."""
    # Not above: an older checkout need not have it.
    from llm_systems_cookbook.nb import Session

    session = Session("step_overhead", to)
    against = against.resolve()
    pairs = []
    with tempfile.TemporaryDirectory() as cache:
        for number in range(rounds + 1):
            order = [HERE, against] if number % 2 else [against, HERE]
            by_checkout = {c: round_of(c, steps, cache) for c in order}
            if number > 0:  # the first one compiled
                pairs.append((by_checkout[HERE], by_checkout[against]))
    context = {
        "rounds": rounds,
        "steps": steps,
        "against": _commit(against),
        "threads": 1,
    }
    for batch in BATCHES:
        own, other = zip(
            *((a[str(batch)], b[str(batch)]) for a, b in pairs), strict=True
        )
        record(session, batch, own, other, context)
    session.save()


def record(
    session: "Session",
    batch: int,
    own: tuple[Figures, ...],
    other: tuple[Figures, ...],
    context: dict[str, object],
) -> None:
    """Write the figures of one batch size; check what part 4 promised."""

    def measure(name: str, key: str, unit: str) -> float:
        ratios = sorted(
            a[key] / b[key] for a, b in zip(own, other, strict=True)
        )
        session.measure(
            f"{name}_batch_{batch}",
            statistics.median(ratios),
            unit,
            lowest=ratios[0],
            highest=ratios[-1],
            here={k: statistics.median(f[k] for f in own) for k in own[0]},
            before={k: statistics.median(f[k] for f in other) for k in own[0]},
            microseconds_here=statistics.median(f["overhead"] for f in own),
            microseconds_before=statistics.median(
                f["overhead"] for f in other
            ),
            **context,
        )
        return statistics.median(ratios)

    overhead = measure("overhead", "overhead", "x that of before")
    speed = measure(
        "in_place", "tokens_per_second", "x the tokens/s of before"
    )
    for name, figures in (("here", own), ("before", other)):
        rate = statistics.median(f["tokens_per_second"] for f in figures)
        print(f"batch {batch}, in place, {name}: {rate:,.1f} tokens/s")
    session.check(f"overhead_lower_batch_{batch}", lambda: overhead < 1)
    session.check(f"in_place_not_slower_batch_{batch}", lambda: speed >= 1)


def _commit(checkout: Path) -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"],
        cwd=checkout,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--to", type=Path, default=RESULTS)
    parser.add_argument("--round", action="store_true", help="for one round")
    given = parser.parse_args()
    if given.round:
        package = llm_systems_cookbook.__file__
        figures = one_round(given.steps)
        print(json.dumps({"package": package, "figures": figures}))
    elif given.against is None:
        parser.error("--against names the checkout to compare with")
    else:
        main(given.against, given.rounds, given.steps, given.to)
