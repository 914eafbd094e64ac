"""Engines to compare, filled and stepped in turns.

All serve TinyGPT, on equal pools; they differ in where keys and values lie,
and in what reads them.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from llm_systems_cookbook.attention import ContiguousKVCache, PagedKVCache
from llm_systems_cookbook.memory import (
    BlockAllocator,
    FirstFitRegions,
    PagedMemory,
    ReservedMemory,
)
from llm_systems_cookbook.models import TinyGPT
from llm_systems_cookbook.serving import Scheduler
from llm_systems_cookbook.serving.engine import Backend, Engine

BLOCK_SIZE = 16
STEP_TOKENS = 512  # computed in a step at most


class TimedModel:
    """A model that adds up the seconds of its forward.

    On a GPU that is the time to hand the work over, not to do it.
    """

    def __init__(self, model: TinyGPT) -> None:
        self.model = model
        self.seconds = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def __call__(self, *inputs: Tensor | Sequence[int] | Callable) -> Tensor:
        """Compute, and add the time."""
        start = time.perf_counter()
        logits = self.model(*inputs)
        self.seconds += time.perf_counter() - start
        return logits

    @property
    def place(self) -> dict[str, torch.dtype | torch.device]:
        """Where a cache for this model lies, and the dtype of its numbers."""
        return {"dtype": self.model.dtype, "device": self.model.device}


def contiguous(
    model: TimedModel, num_slots: int, max_tokens: int, max_num_seqs: int
) -> Engine:
    """Return an engine that reserves max_tokens for each request."""
    memory = ReservedMemory(num_slots, max_tokens, regions=FirstFitRegions)
    cache = ContiguousKVCache(
        model.num_layers,
        num_slots,
        model.num_kv_heads,
        model.head_dim,
        **model.place,
    )
    scheduler = Scheduler(
        memory, max_num_seqs=max_num_seqs, max_num_batched_tokens=STEP_TOKENS
    )
    return Engine(model, scheduler, cache)


def paged(
    model: TimedModel,
    num_slots: int,
    block_size: int,
    max_num_seqs: int,
    backend: str | Backend = "auto",
    watermark: float = 0.01,
    host_blocks: int = 0,
    preemption: Literal["recompute", "swap"] = "recompute",
) -> Engine:
    """Return an engine whose requests take blocks as they grow."""
    num_blocks = num_slots // block_size
    memory = PagedMemory(BlockAllocator(num_blocks, block_size), host_blocks)
    cache = PagedKVCache(
        model.num_layers,
        num_blocks,
        block_size,
        model.num_kv_heads,
        model.head_dim,
        num_host_blocks=host_blocks,
        **model.place,
    )
    scheduler = Scheduler(
        memory,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=STEP_TOKENS,
        watermark=watermark,
        preemption=preemption,
    )
    return Engine(model, scheduler, cache, backend)


def fill(engine: Engine, batch: int, mean_prompt: int, outputs: int) -> None:
    """Add a batch, and step until all of it decodes.

    Prompts are half to one and a half times as long as their mean; each
    request then has at least `outputs` steps to go.
    """
    rng = random.Random(mean_prompt)
    for _ in range(batch):
        length = rng.randint(mean_prompt // 2, 3 * mean_prompt // 2)
        engine.add_request(rng.choices(range(256), k=length), outputs + 99)
    while len(engine.scheduler.running) < batch:
        engine.step()
    engine.step()
    engine.step()
    entries = engine.last_batch.entries
    if [entry.num_tokens for entry in entries] != [1] * batch:
        raise RuntimeError(f"{batch} requests do not decode at once")


class Spent(NamedTuple):
    """Median seconds of a round: of its steps, and of their forwards."""

    step: float
    forward: float


def timed_rounds(
    engines: Mapping[str, Engine], rounds: int, steps: int
) -> dict[str, list[Spent]]:
    """Step the engines in turns; their model is a `TimedModel`.

    A round before the first warms up and is not in the result.
    """
    spent: dict[str, list[Spent]] = {name: [] for name in engines}
    for _ in range(rounds + 1):
        for name, engine in engines.items():
            time.sleep(0.05)  # let the last library's threads fall asleep
            spent[name].append(_timed_steps(engine, steps))
    return {name: each[1:] for name, each in spent.items()}


def _timed_steps(engine: Engine, steps: int) -> Spent:
    step_seconds, forward_seconds = [], []
    for _ in range(steps):
        engine.model.seconds = 0.0
        engine.step()
        step_seconds.append(engine.step_seconds)
        forward_seconds.append(engine.model.seconds)
    return Spent(
        statistics.median(step_seconds), statistics.median(forward_seconds)
    )
