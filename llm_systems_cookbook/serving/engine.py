"""Serve a model: the scheduler decides, the cache holds, the model computes.

A step has four parts: schedule, move blocks (swaps and copies), compute, and
update. What a layer computes, and which blocks are free, is not known here.

What may differ between two runs of one request: in another batch, a matrix
product may add in another order, so logits differ in their last bits. With
float64 a differing token would take two logits that agree to about 15 digits;
the tests compare token for token. With float32 about 7 digits are enough, and
a long text may come upon two such logits.
"""

import itertools
import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from llm_systems_cookbook.attention import (
    AttentionInputs,
    CacheWrite,
    ContiguousKVCache,
    PagedKVCache,
    attend,
    checked_inputs,
    choose_backend,
    contiguous_attention,
)
from llm_systems_cookbook.attention.inputs import FP8
from llm_systems_cookbook.memory import BlockCopy
from llm_systems_cookbook.models import Attention
from llm_systems_cookbook.serving.guard import Guard, one_step, one_thread
from llm_systems_cookbook.serving.interrupts import (
    interrupt_behind,
    interrupts_held,
)
from llm_systems_cookbook.serving.request import Request, TokenOutput
from llm_systems_cookbook.serving.sampling import draw_token, unusable
from llm_systems_cookbook.serving.scheduler import (
    Batch,
    Entry,
    RequestRefused,
    Scheduler,
)
from llm_systems_cookbook.validate import cdiv

Backend = Callable[[AttentionInputs, Tensor], Tensor]
Move = Callable[[Iterable[BlockCopy]], None]
Errors = list[tuple[Entry, str]]


class Options(TypedDict, total=False):
    """What may be said of a request beside its prompt; see `Request`."""

    arrival: float
    output_len: int | None
    num_samples: int
    stop_token_ids: Iterable[int]
    temperature: float
    seed: int


class Model(Protocol):
    """What an engine needs of a model, which knows no cache layout."""

    vocab_size: int
    max_context: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        sampled_rows: Sequence[int],
    ) -> Tensor:
        """Return the logits of the sampled rows: [num_sampled, vocab_size].

        Args:
            token_ids: [num_tokens] int64.
            positions: [num_tokens] int64, each token's in its sequence.
            attention: called once per layer with the layer's index and
                query [num_tokens, num_heads, head_dim], key and value
                [num_tokens, num_kv_heads, head_dim]; returns what the query
                sees, of its shape.
            sampled_rows: which tokens' logits are wanted.
        """


@dataclass(frozen=True)
class StepInputs:
    """A step's entries as the model and attention take them.

    Attributes:
        token_ids: [num_tokens] int64.
        positions: [num_tokens] int64.
        slots: [num_tokens] int64, where each token's key and value go.
        block_ids: per entry, the blocks of its sequence.
        seq_lens: per entry, tokens with those of this step.
        query_lens: per entry, tokens of this step.
        sampled_rows: rows whose logits are wanted.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    block_ids: list[Sequence[int]]
    seq_lens: list[int]
    query_lens: list[int]
    sampled_rows: list[int]


class Engine:
    """Serve requests with one model, one scheduler and one KV cache.

    Paged or contiguous is decided by what is passed: `PagedMemory` in the
    scheduler goes with a `PagedKVCache`, `ReservedMemory` with a
    `ContiguousKVCache`.

    An engine is for one thread at a time. A call from another thread, while
    one is running, raises RuntimeError at once and changes nothing. A server
    of many threads puts requests into a queue, which the thread that steps
    empties between two steps. `on_batch` and the model may add and abort.

    Args:
        model: see `Model`.
        scheduler: decides; its memory has as many slots as the cache.
        kv_cache: holds keys and values, on the model's device.
        backend: as in `paged_attention`, or a function that fills `out` from
            `AttentionInputs`. A contiguous cache is read in place with SDPA
            when this is "auto".
        clock: returns seconds.

    Attributes:
        last_batch: what the last step computed.
        step_seconds: how long it took, by the clock.
        on_batch: called with a batch before it is computed, if set; its time
            does not count.

    Raises:
        ValueError: sizes or dtypes of model, memory and cache do not fit, or
            the backend cannot run here.
    """

    def __init__(
        self,
        model: Model,
        scheduler: Scheduler,
        kv_cache: PagedKVCache | ContiguousKVCache,
        backend: str | Backend = "auto",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        _require_same_sizes(model, scheduler, kv_cache)
        _require_same_numbers(model, kv_cache)
        self.model = model
        self.scheduler = scheduler
        self.kv_cache = kv_cache
        self.clock = clock
        self.last_batch: Batch | None = None
        self.step_seconds = 0.0
        self.on_batch: Callable[[Batch], None] | None = None
        self._device = kv_cache.keys[0].device
        self._backend = self._chosen(backend)
        # Whatever attends, the bytes are the same: take the fastest write.
        self._writer = choose_backend(kv_cache.keys[0])
        self._known: set[Hashable] = set()
        self._first_free = 0  # a number that is no request's id
        self._moves: deque[tuple[Move, list[BlockCopy]]] = deque()
        # Outputs of a step that an interrupt kept from being returned.
        self._ready: list[TokenOutput] = []
        self._guard = Guard()
        self._is_generating = False
        self._has_warned = False  # that the model fails on batches alone

    def _chosen(self, backend: str | Backend) -> Backend | None:
        """Return what attends through block tables; None for a region."""
        contiguous = isinstance(self.kv_cache, ContiguousKVCache)
        if contiguous and backend == "auto":
            return None
        if callable(backend):
            return backend
        name = choose_backend(self.kv_cache.keys[0], backend)
        return partial(_attend_with, name)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is running, preempted or waiting.

        Or an interrupt kept `step` from returning what it had computed.
        """
        return bool(self._ready) or self.scheduler.has_unfinished

    # --- Requests ----------------------------------------------------------

    @one_thread
    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        max_new_tokens: int,
        *,
        request_id: Hashable = None,
        **options: Unpack[Options],
    ) -> Hashable:
        """Queue a prompt; return the id that its outputs carry.

        Args:
            prompt_token_ids: tokens of the prompt, at least one.
            max_new_tokens: tokens to generate at most, at least 1.
            request_id: a name that was never used here; a number when None.
            **options: see `Request`.

        Raises:
            TypeError: a number that is not an integer.
            ValueError: an empty prompt, a token outside the vocabulary, a
                request longer than the model's context or than the memory,
                an id that was used before. The engine has not changed.
        """
        if request_id is None:
            request_id = self._new_ids(1)[0]
        self.add(
            Request(request_id, prompt_token_ids, max_new_tokens, **options)
        )
        return request_id

    def _new_ids(self, count: int) -> list[int]:
        """Return numbers that no request has had."""
        numbers = itertools.count(self._first_free)
        free = (number for number in numbers if number not in self._known)
        return list(itertools.islice(free, count))

    @one_thread
    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RuntimeError: `generate` is running; it knows its own requests
                only. The engine has not changed.
            ValueError: see `add_request`.
        """
        if self._is_generating:
            raise RuntimeError(
                f"request {request.request_id!r} comes while generate is "
                f"running: use add and step"
            )
        with interrupts_held():
            self._queue([request])

    def _queue(self, requests: list[Request]) -> None:
        """Queue all, or none when one of them is refused."""
        for request in requests:
            self._require_suitable(request)
        self.scheduler.add(*requests)
        self._known.update(request.request_id for request in requests)
        while self._first_free in self._known:
            self._first_free += 1

    def _require_suitable(self, request: Request) -> None:
        """Refuse what is not for this engine or its model."""
        name = request.request_id
        if name in self._known:
            raise ValueError(f"request {name!r} was used before")
        self._require_in_vocabulary(request)
        if request.max_tokens > self.model.max_context:
            raise RequestRefused(
                f"request {name!r}: {request.num_prompt_tokens} prompt tokens "
                f"and {request.max_new_tokens} new ones do not fit in the "
                f"model's context of {self.model.max_context}"
            )

    def _require_in_vocabulary(self, request: Request) -> None:
        for name in ("prompt_token_ids", "stop_token_ids"):
            for token_id in getattr(request, name):
                if not 0 <= token_id < self.model.vocab_size:
                    raise ValueError(
                        f"request {request.request_id!r}: {name} has "
                        f"{token_id}, outside [0, {self.model.vocab_size})"
                    )

    @one_thread
    def abort(self, request_id: Hashable) -> None:
        """Take a request away; it has no more outputs.

        Does nothing when it has finished, or was aborted before.

        Raises:
            KeyError: no request ever had this id.
        """
        if request_id not in self._known:
            raise KeyError(f"request {request_id!r} was never added")
        with interrupts_held():
            self.scheduler.abort(request_id)
            self._ready = [
                output
                for output in self._ready
                if output.request_id != request_id
            ]

    @one_thread
    def generate(
        self,
        prompts: Iterable[Sequence[int]],
        max_new_tokens: int,
        **options: Unpack[Options],
    ) -> list[list[int]]:
        """Generate one continuation of each prompt, all in one go.

        Args:
            prompts: tokens of each prompt.
            max_new_tokens: tokens to generate at most, for each.
            **options: see `Request`; num_samples must be 1.

        Returns:
            The new tokens of each prompt.

        Raises:
            ValueError: other requests are unfinished, more than one sample,
                or a bad prompt: see `add_request`. The engine has not
                changed.
            RuntimeError: a request failed; the others are done, too.

        After an interrupt, the requests are aborted.
        """
        if self.has_unfinished:
            raise ValueError("generate needs an engine with nothing to do")
        if options.get("num_samples", 1) != 1:
            raise ValueError(
                f"generate returns one sample each, not "
                f"{options['num_samples']}: use add_request"
            )
        stops = tuple(options.get("stop_token_ids", ()))
        options["stop_token_ids"] = stops  # an iterator ends with the first
        prompts = list(prompts)
        names = self._new_ids(len(prompts))
        requests = [
            Request(name, prompt, max_new_tokens, **options)
            for name, prompt in zip(names, prompts, strict=True)
        ]
        texts: dict[Hashable, list[int]] = {name: [] for name in names}
        try:
            with interrupts_held():
                self._queue(requests)
                self._is_generating = True
            self._drain(texts)
        finally:  # after an interrupt, too, there is nothing left to do
            with interrupts_held():
                self._is_generating = False
                for name in self._known.intersection(names):
                    self.abort(name)
        return list(texts.values())

    def _drain(self, texts: dict[Hashable, list[int]]) -> None:
        errors: list[str] = []
        while self.has_unfinished:
            for output in self.step():
                if output.error is not None:
                    errors.append(f"{output.request_id!r}: {output.error}")
                else:
                    texts[output.request_id].append(output.token_id)
        if errors:
            raise RuntimeError(f"requests failed: {'; '.join(errors)}")

    # --- A step ------------------------------------------------------------

    @one_step
    def step(self) -> list[TokenOutput]:
        """Compute the next step; return its tokens, and what has failed.

        A model that raises, or returns no usable logits, is run again with
        each entry alone, to find out whose fault it is. That request ends
        with the reason "error", and the others go on. A request whose logits
        are NaN ends in the same way. When each entry works alone, the model
        fails on batches only. Every step then takes longer, so a
        RuntimeWarning says it once.

        Ctrl-C waits while memory and requests change together. If it comes
        before the tokens are taken, the next call repeats the step. If it
        comes later, the next call returns the tokens that were computed.

        Raises:
            RuntimeError: called from within a step, by `on_batch` or by the
                model; or see `Scheduler.schedule`.
        """
        if not self._ready:
            self._step()
        outputs, self._ready = self._ready, []
        return outputs

    def _step(self) -> None:
        began = self.clock()
        with interrupts_held():
            batch = self.scheduler.schedule()
            self._plan_moves(batch)
        scheduled = self.clock() - began
        if self.on_batch is not None:
            self.on_batch(batch)
        began = self.clock()
        self._move_blocks()
        batch.drop_aborted()
        tokens, errors = self._compute(batch.entries)
        with interrupts_held():
            failed = [
                output
                for entry, error in errors
                if not entry.aborted
                for output in self._fail(entry.request, error)
            ]
            self._ready = failed + self.scheduler.update(batch, tokens)
            self.last_batch = batch
            self.step_seconds = scheduled + self.clock() - began

    def _plan_moves(self, batch: Batch) -> None:
        """Remember the moves: a step that is interrupted does them later."""
        if batch.swap_out:
            self._moves.append((self.kv_cache.swap_out, batch.swap_out))
        if batch.swap_in:
            self._moves.append((self.kv_cache.swap_in, batch.swap_in))
        if batch.copies:
            self._moves.append((self.kv_cache.copy_blocks, batch.copies))

    def _move_blocks(self) -> None:
        """Swap and copy, before anything of this step is written."""
        while self._moves:
            move, pairs = self._moves[0]
            move(pairs)
            self._moves.popleft()

    def _fail(self, request: Request, error: str) -> list[TokenOutput]:
        name = request.request_id
        unfinished = self.scheduler.state(name).unfinished
        outputs = [
            TokenOutput(name, None, True, "error", sample.index, error)
            for sample in unfinished
        ]
        self.scheduler.abort(name)
        return outputs

    def _compute(self, entries: list[Entry]) -> tuple[list[int], Errors]:
        """Return a token for each sample, and what went wrong.

        A failed entry's tokens are -1.
        """
        if not entries:
            return [], []
        try:
            return self._choose(entries, self._run_model(entries))
        except Exception as error:
            interrupt = interrupt_behind(error)
            if interrupt is not None:
                raise interrupt from None
            message = f"{type(error).__name__}: {error}"
        if len(entries) > 1:
            return self._compute_one_by_one(entries, message)
        # The error is reported with its request; it concerns no other.
        return [-1] * len(entries[0].produces), [(entries[0], message)]

    def _compute_one_by_one(
        self, entries: list[Entry], message: str
    ) -> tuple[list[int], Errors]:
        """Compute again; what was written before is written once more."""
        results = [self._compute([entry]) for entry in entries]
        errors = [error for _, errors in results for error in errors]
        if all(error == _unusable_logits(entry) for entry, error in errors):
            self._warn_of_batches(len(entries), message)
        return [token for tokens, _ in results for token in tokens], errors

    def _warn_of_batches(self, count: int, message: str) -> None:
        """Say once what would otherwise only show as a slow engine."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the model fails on a batch of {count} sequences and not on "
                f"each alone, so all are computed one by one: {message}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _choose(
        self, entries: list[Entry], logits: Tensor
    ) -> tuple[list[int], Errors]:
        """Choose tokens; `logits` has a row per entry that produces any."""
        likeliest = logits.argmax(dim=1).tolist()
        bad = unusable(logits).tolist()
        tokens: list[int] = []
        errors: Errors = []
        producing = [entry for entry in entries if entry.produces]
        for row, entry in enumerate(producing):
            if bad[row]:
                tokens += [-1] * len(entry.produces)
                errors.append((entry, _unusable_logits(entry)))
            elif entry.request.temperature == 0:
                tokens += [likeliest[row]] * len(entry.produces)
            else:
                tokens += [
                    draw_token(
                        logits[row],
                        entry.request,
                        sample.index,
                        sample.num_tokens,
                    )
                    for sample in entry.produces
                ]
        return tokens, errors

    @torch.no_grad()
    def _run_model(self, entries: list[Entry]) -> Tensor:
        inputs = self._inputs(entries)
        if self._backend is None:
            attention = self._contiguous_attention(inputs)
        else:
            attention = self._table_attention(inputs, self._backend)
        logits = self.model(
            inputs.token_ids, inputs.positions, attention, inputs.sampled_rows
        )
        _require_logits(
            logits, (len(inputs.sampled_rows), self.model.vocab_size)
        )
        return logits

    # --- Inputs ------------------------------------------------------------

    def _inputs(self, entries: list[Entry]) -> StepInputs:
        memory, size = self.scheduler.memory, self.kv_cache.block_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        block_ids: list[Sequence[int]] = []
        sampled_rows: list[int] = []
        for entry in entries:
            sample, start, end = entry.sample, entry.start, entry.end
            blocks = memory.block_ids(sample.sequence_id)
            token_ids += sample.token_ids(start, end)
            positions += range(start, end)
            slots += _slots(blocks, size, start, end)
            block_ids.append(blocks)
            if entry.produces:
                sampled_rows.append(len(token_ids) - 1)
        return StepInputs(
            self._tensor(token_ids),
            self._tensor(positions),
            self._tensor(slots),
            block_ids,
            [entry.end for entry in entries],
            [entry.num_tokens for entry in entries],
            sampled_rows,
        )

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _contiguous_attention(self, inputs: StepInputs) -> Attention:
        starts = [blocks[0] for blocks in inputs.block_ids]
        write = self._write(inputs.slots)

        def attention(
            layer: int, query: Tensor, key: Tensor, value: Tensor
        ) -> Tensor:
            write(layer, key, value)
            return contiguous_attention(
                self.kv_cache,
                layer,
                query,
                starts,
                inputs.seq_lens,
                inputs.query_lens,
            )

        return attention

    def _table_attention(
        self, inputs: StepInputs, backend: Backend
    ) -> Attention:
        tables = self._block_tables(inputs)
        seq_lens = self._tensor(inputs.seq_lens)
        starts = self._query_start_loc(inputs.query_lens)
        write = self._write(inputs.slots)
        first: AttentionInputs | None = None  # of the first layer called

        def attention(
            layer: int, query: Tensor, key: Tensor, value: Tensor
        ) -> Tensor:
            nonlocal first
            write(layer, key, value)
            given = (
                query,
                self.kv_cache.keys[layer],
                self.kv_cache.values[layer],
            )
            if first is None:
                # The values are right by construction: not read again.
                first = checked = checked_inputs(
                    *given,
                    tables,
                    seq_lens,
                    query_start_loc=starts,
                    validate=False,
                    plan={},  # the backend fills it, for all layers
                )
            else:
                checked = first.for_layer(*given)
            return backend(checked, checked.output())

        return attention

    def _write(self, slots: Tensor) -> Callable[[int, Tensor, Tensor], None]:
        """Return what writes a layer's keys and values of this step."""
        write: CacheWrite | None = None  # checked with the first layer called

        def write_layer(layer: int, key: Tensor, value: Tensor) -> None:
            nonlocal write
            keys = self.kv_cache.keys[layer]
            given = key, value, keys, self.kv_cache.values[layer]
            if write is None:
                write = CacheWrite(
                    *given, slots, backend=self._writer, validate=False
                )
            write(*given)

        return write_layer

    def _block_tables(self, inputs: StepInputs) -> Tensor:
        """Return [num_entries, max_blocks] int32, padded with -1."""
        size = self.kv_cache.block_size
        counts = [cdiv(length, size) for length in inputs.seq_lens]
        width = max(counts)
        rows = [
            [*blocks[:count], *[-1] * (width - count)]
            for blocks, count in zip(inputs.block_ids, counts, strict=True)
        ]
        # By numpy: torch takes longer to read a list of lists.
        tables = np.array(rows, dtype=np.int32).reshape(len(rows), width)
        return torch.from_numpy(tables).to(self._device)

    def _query_start_loc(self, query_lens: list[int]) -> Tensor | None:
        if max(query_lens) == 1:
            return None  # all decode
        return self._tensor([0, *itertools.accumulate(query_lens)])


def _require_logits(logits: object, shape: tuple[int, int]) -> None:
    """Refuse logits from which no token can be chosen, whatever they hold."""
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"the model returned {type(logits).__name__}, not a tensor"
        )
    if tuple(logits.shape) != shape:
        raise ValueError(
            f"the model returned {list(logits.shape)}, not {list(shape)}"
        )
    if logits.is_complex() or logits.dtype == torch.bool:
        raise TypeError(f"the model returned {logits.dtype}, not real numbers")
    if logits.layout != torch.strided or logits.is_meta:
        raise TypeError(
            f"the model returned a {logits.layout} tensor on "
            f"{logits.device}, without numbers to be read in rows"
        )


def _unusable_logits(entry: Entry) -> str:
    return (
        f"position {entry.end - 1}: logits are not usable, they are NaN or "
        f"infinite"
    )


def _slots(
    blocks: Sequence[int], block_size: int, start: int, end: int
) -> list[int]:
    """Return the slots of positions start to end."""
    return [
        blocks[position // block_size] * block_size + position % block_size
        for position in range(start, end)
    ]


def _attend_with(name: str, inputs: AttentionInputs, out: Tensor) -> Tensor:
    return attend(inputs, name, out)


def _require_same_sizes(
    model: Model,
    scheduler: Scheduler,
    kv_cache: PagedKVCache | ContiguousKVCache,
) -> None:
    memory = scheduler.memory
    if isinstance(kv_cache, ContiguousKVCache) and memory.shares_blocks:
        raise ValueError(
            "a ContiguousKVCache needs memory that reserves regions, got "
            f"{type(memory).__name__}"
        )
    num_blocks, kv_heads, block_size, head_dim = kv_cache.keys[0].shape
    host = getattr(memory, "host", None)
    for name, wanted, got in (
        ("block size of memory", memory.block_size, block_size),
        ("slots of memory", memory.capacity, num_blocks * block_size),
        ("layers of the model", model.num_layers, len(kv_cache.keys)),
        ("KV heads of the model", model.num_kv_heads, kv_heads),
        ("head_dim of the model", model.head_dim, head_dim),
        (
            "host blocks of memory",
            0 if host is None else host.num_blocks,
            getattr(kv_cache, "num_host_blocks", 0),
        ),
    ):
        if wanted != got:
            raise ValueError(f"{name}: {wanted}, the cache has {got}")


def _require_same_numbers(
    model: Model, kv_cache: PagedKVCache | ContiguousKVCache
) -> None:
    """Refuse keys and values that the model's queries cannot meet."""
    keys, values = kv_cache.keys[0], kv_cache.values[0]
    if values.shape[3] != model.head_dim:
        raise ValueError(
            f"head_dim of the model: {model.head_dim}, the cache has "
            f"{values.shape[3]} for values"
        )
    for name, got in (("dtype", keys.dtype), ("device", keys.device)):
        # A model need not say; a cache of 8 bits is for any dtype.
        wanted = getattr(model, name, got)
        if wanted != got and got not in FP8:
            raise ValueError(
                f"{name} of the model: {wanted}, the cache has {got}"
            )
