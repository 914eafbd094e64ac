"""Random workloads, a small exact model, and a run that trusts nothing.

The model is float64, so that a token differs only when the code is wrong:
another batch adds in another order and changes the last of some 16 digits,
and the closest two logits here differ in far more than that.

Before each step every slot that holds no computed token is NaN, on the device
and on the host. So whatever reads a slot that was freed, or never written,
makes its request fail. After each step all invariants are checked.
"""

import random
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from llm_systems_cookbook.attention import ContiguousKVCache, PagedKVCache
from llm_systems_cookbook.memory import (
    BlockAllocator,
    FirstFitRegions,
    PagedMemory,
    ReservedMemory,
)
from llm_systems_cookbook.models import TinyGPT, TinyGPTConfig
from llm_systems_cookbook.serving import (
    Batch,
    Engine,
    Request,
    Scheduler,
    TokenOutput,
)

CONFIG = TinyGPTConfig(
    vocab_size=24,
    num_layers=2,
    width=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    hidden=24,
    max_context=64,
)
MAX_STEPS = 2000  # far more than any workload here needs

Texts = dict[tuple[Hashable, int], tuple[list[int], str | None]]


@cache
def small_model(dtype: torch.dtype = torch.float64) -> TinyGPT:
    return TinyGPT(CONFIG, seed=3, dtype=dtype)


@dataclass(frozen=True)
class Setup:
    """Everything about an engine but its requests."""

    num_blocks: int = 64
    block_size: int = 4
    host_blocks: int = 0
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 1024
    watermark: float = 0.0
    preemption: str = "recompute"
    contiguous: bool = False
    backend: object = "auto"
    dtype: torch.dtype = torch.float64
    scheduler: type[Scheduler] = Scheduler
    memory: type[PagedMemory] = PagedMemory

    def make_scheduler(self) -> Scheduler:
        if self.contiguous:
            memory = ReservedMemory(
                16 * CONFIG.max_context,
                CONFIG.max_context,
                regions=FirstFitRegions,
            )
        else:
            memory = self.memory(
                BlockAllocator(self.num_blocks, self.block_size),
                host_blocks=self.host_blocks,
            )
        return self.scheduler(
            memory,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            watermark=self.watermark,
            preemption=self.preemption,
        )

    def make_engine(self, model: object = None) -> Engine:
        model = small_model(self.dtype) if model is None else model
        scheduler = self.make_scheduler()
        shape = CONFIG.num_kv_heads, CONFIG.head_dim
        if self.contiguous:
            cache = ContiguousKVCache(
                CONFIG.num_layers,
                scheduler.memory.capacity,
                *shape,
                dtype=self.dtype,
            )
        else:
            cache = PagedKVCache(
                CONFIG.num_layers,
                self.num_blocks,
                self.block_size,
                *shape,
                dtype=self.dtype,
                num_host_blocks=self.host_blocks,
            )
        for tensor in all_tensors(cache):
            tensor.fill_(torch.nan)
        backend = self.backend
        if not self.contiguous and backend == "auto":
            backend = "gather"
        return Engine(model, scheduler, cache, backend)


@dataclass
class Workload:
    """Requests, and the step before which each is added."""

    requests: list[Request]
    steps: list[int]

    def in_order(self) -> Iterator[tuple[int, Request]]:
        yield from zip(self.steps, self.requests, strict=True)

    def with_output_len(self, texts: Texts) -> "Workload":
        """Return it as a simulator needs it: it must know where texts end."""
        requests = []
        for request in self.requests:
            text, _ = texts[request.request_id, 0]
            requests.append(
                replace(request, output_len=len(text), stop_token_ids=())
            )
        return Workload(requests, self.steps)


def random_workload(
    seed: int, *, samples: int = 1, tight: bool = False
) -> Workload:
    """Draw two to six requests; greedy and sampled, some with stop tokens.

    Args:
        seed: of everything drawn.
        samples: a request has up to so many; at least one has two, if so.
        tight: more requests of like lengths, all at once, so that a pool
            for the largest one is short for two.
    """
    rng = random.Random(seed)
    requests, steps, step = [], [], 0
    count = rng.randint(4, 6) if tight else rng.randint(2, 6)
    for i in range(count):
        longest = 10 if tight else 18
        prompt = rng.choices(
            range(CONFIG.vocab_size), k=rng.randint(1, longest)
        )
        stops = rng.sample(range(CONFIG.vocab_size), rng.choice([0, 0, 1]))
        request = Request(
            f"r{i}",
            prompt,
            rng.randint(6, 10) if tight else rng.randint(2, 10),
            num_samples=rng.randint(
                2 if i == 0 and samples > 1 else 1, samples
            ),
            stop_token_ids=stops,
            temperature=rng.choice([0.0, 0.0, 0.7, 1.5]),
            seed=rng.randrange(10**6),
        )
        requests.append(request)
        steps.append(step)
        if not tight:
            step += rng.choice([0, 0, 1, 3])
    return Workload(requests, steps)


def blocks_for(request: Request, block_size: int) -> int:
    """Count the blocks that a request needs at its longest, by hand."""
    prompt, longest = request.num_prompt_tokens, request.max_tokens
    total = -(-longest // block_size)
    if longest == prompt:
        return total
    shared = prompt // block_size
    return shared + request.num_samples * (total - shared)


def smallest_pool(workload: Workload, block_size: int) -> int:
    """Return the blocks that the largest request needs, alone."""
    return max(blocks_for(r, block_size) for r in workload.requests)


@dataclass
class Run:
    """What a run produced."""

    engine: Engine
    outputs: list[TokenOutput] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    used_blocks: list[int] = field(default_factory=list)
    forks: int = 0
    copies: int = 0
    chunks: int = 0

    @property
    def texts(self) -> Texts:
        """Each sample's tokens and the reason of its end."""
        texts: Texts = {}
        for output in self.outputs:
            key = output.request_id, output.sample
            tokens, reason = texts.get(key, ([], None))
            if output.token_id is not None:
                tokens.append(output.token_id)
            texts[key] = tokens, output.reason or reason
        return texts


def run(setup: Setup, workload: Workload, model: object = None) -> Run:
    """Serve a workload to the end, with poison and invariants."""
    engine = setup.make_engine(model)
    result = Run(engine)
    arrivals = list(workload.in_order())
    for step in range(MAX_STEPS):
        while arrivals and arrivals[0][0] <= step:
            engine.add(arrivals.pop(0)[1])
        if not engine.has_unfinished and not arrivals:
            break
        if engine.has_unfinished:
            take_step(result)
    assert not engine.has_unfinished, f"not done after {MAX_STEPS} steps"
    assert_whole(engine)
    return result


def finish(result: Run) -> list[TokenOutput]:
    """Step until nothing is left to do; return all outputs."""
    for _ in range(MAX_STEPS):
        if not result.engine.has_unfinished:
            return result.outputs
        take_step(result)
    raise AssertionError(f"not done after {MAX_STEPS} steps")


def take_step(result: Run) -> list[TokenOutput]:
    engine = result.engine
    poison(engine)
    before = [state.request for state in engine.scheduler.running]
    outputs = engine.step()
    engine.scheduler.assert_consistent()
    batch = engine.last_batch
    assert_rules(batch, before, engine.scheduler)
    assert batch.num_tokens <= engine.scheduler.max_num_batched_tokens
    left = engine.scheduler.max_num_batched_tokens - batch.num_tokens
    aborted = engine.scheduler.counts.aborted
    assert aborted or batch.budget == left, "withdrawn tokens go back"
    assert len(batch.entries) <= engine.scheduler.max_num_seqs
    result.outputs += outputs
    result.batches.append(batch)
    result.copies += len(batch.copies)
    result.forks += sum(len(e.produces) > 1 for e in batch.entries)
    result.chunks += sum(
        not e.produces and e.end < e.request.num_prompt_tokens
        for e in batch.entries
    )
    usage = engine.scheduler.memory.usage()
    result.used_blocks.append(
        engine.scheduler.memory.capacity - usage.external
    )
    assert sum(usage) == engine.scheduler.memory.capacity
    assert min(usage) >= 0
    return outputs


def assert_rules(
    batch: Batch, before: list[Request], scheduler: Scheduler
) -> None:
    """Check what a step did against the rules, from its batch alone."""
    newest_first = before[::-1][: len(batch.preempted)]
    assert batch.preempted == newest_first, "the newest is preempted first"
    computed = [entry.request for entry in batch.entries]
    for request in batch.preempted:
        assert request not in computed, "who was preempted is not computed"
    if batch.preempted:
        assert not batch.admitted, "a step that preempts admits nobody"
        assert not batch.resumed, "a step that preempts resumes nobody"
    if batch.admitted:
        assert not scheduler.preempted, "preempted requests come first"


def all_tensors(cache: PagedKVCache | ContiguousKVCache) -> list:
    tensors = [*cache.keys, *cache.values]
    if isinstance(cache, PagedKVCache):
        tensors += [*cache.host_keys, *cache.host_values]
    return tensors


def poison(engine: Engine) -> None:
    """Fill every slot that holds no computed token with NaN."""
    scheduler, cache = engine.scheduler, engine.kv_cache
    memory, size = scheduler.memory, cache.block_size
    device: set[int] = set()
    host: set[int] = set()
    for state in scheduler._states.values():
        swapped = state.swapped
        if state.status.value != "running" and not swapped:
            continue
        for sample in state.with_tables:
            if swapped:
                blocks = memory._host_tables[sample.sequence_id].block_ids
            else:
                blocks = memory.block_ids(sample.sequence_id)
            (host if swapped else device).update(
                blocks[p // size] * size + p % size
                for p in range(sample.num_computed)
            )
    for tensor in [*cache.keys, *cache.values]:
        _fill_but(tensor, device, size)
    if isinstance(cache, PagedKVCache) and cache.num_host_blocks > 0:
        for tensor in [*cache.host_keys, *cache.host_values]:
            _fill_but(tensor, host, size)


def _fill_but(tensor: torch.Tensor, live: set[int], size: int) -> None:
    num_slots = tensor.shape[0] * size
    dead = torch.ones(num_slots, dtype=torch.bool)
    dead[sorted(live)] = False
    blocks, offsets = dead.view(-1, size).nonzero(as_tuple=True)
    tensor[blocks, :, offsets] = torch.nan


def assert_whole(engine: Engine) -> None:
    """Check that nobody holds anything."""
    memory = engine.scheduler.memory
    engine.scheduler.assert_consistent()
    assert memory.usage().external == memory.capacity, "the pool is whole"
    assert memory.request_ids == set()
    if getattr(memory, "host", None) is not None:
        assert memory.host.used_blocks == 0, "so is the host's"
