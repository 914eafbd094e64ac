"""Who runs in the next step: admission, growth and preemption.

A scheduler sees token counts and never a tensor. An engine asks it for a
batch, runs the model, and tells it the tokens; a simulator asks for the same
batches and only counts the time.

The rules:

- A request that could never fit, even alone, is refused when it is added.
- Running requests go first, oldest first, then preempted ones, then waiting
  ones in the order in which they came. Nobody overtakes.
- What a step promises is taken from memory before the next candidate is
  looked at.
- When a running request cannot grow, the newest running one is preempted. It
  loses its cache and keeps its output. The last one is never preempted.
- A step that preempts admits nobody. Admission leaves a share of the memory
  free (the watermark), unless nothing runs.
"""

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal, NamedTuple

from llm_systems_cookbook.memory import BlockCopy, MemoryManager, Usage
from llm_systems_cookbook.serving.request import (
    Request,
    RequestState,
    Sample,
    Status,
    TokenOutput,
)
from llm_systems_cookbook.validate import (
    cdiv,
    require_at_least,
    require_number,
)


class RequestRefused(ValueError):
    """Raised when a request could never run, even alone."""


class Entry(NamedTuple):
    """What one sample computes in a step.

    Attributes:
        request: whose tokens they are.
        start: position of the first token.
        num_tokens: tokens to compute: 1 in decode, a chunk in prefill.
        sample: the sample whose tokens, and whose cache, these are.
        produces: the samples that get a token from the last position: none
            in the middle of a prompt, all samples at its end.
    """

    request: Request
    start: int
    num_tokens: int
    sample: Sample
    produces: tuple[Sample, ...]

    @property
    def end(self) -> int:
        """Length of the sequence once the step is done."""
        return self.start + self.num_tokens

    @property
    def aborted(self) -> bool:
        """Whether the request was aborted since."""
        return self.sample.reason is not None


@dataclass
class Batch:
    """What to do in one step: swap out, swap in, copy, then compute.

    Attributes:
        budget: tokens that may still be added.
        entries: what to compute.
        copies: blocks to copy on the device, for copy-on-write.
        swap_in: host blocks and the device blocks they go to.
        swap_out: device blocks and the host blocks they go to.
        preempted: requests that lost their memory in this step.
        resumed: preempted requests that run again from this step on.
        admitted: new requests that run from this step on.
    """

    budget: int
    entries: list[Entry] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    swap_out: list[BlockCopy] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return sum(entry.num_tokens for entry in self.entries)

    @property
    def sampled(self) -> list[Sample]:
        """The samples that get a token, in the order `update` takes them."""
        return [s for entry in self.entries for s in entry.produces]

    def add(self, entry: Entry) -> None:
        """Take an entry's tokens from the budget."""
        self.entries.append(entry)
        self.budget -= entry.num_tokens

    def withdraw(self, request: Request) -> None:
        """Drop a request's entries, and return their tokens to the budget."""
        ours = [e for e in self.entries if e.request is request]
        if ours:
            self.budget += sum(entry.num_tokens for entry in ours)
            self.entries = [
                e for e in self.entries if e.request is not request
            ]

    def drop_aborted(self) -> None:
        """Drop what was aborted after it was scheduled: nobody computes it."""
        self.entries = [entry for entry in self.entries if not entry.aborted]


@dataclass
class Counts:
    """What a scheduler has done since it was made.

    Attributes:
        finished: requests that produced their whole output.
        aborted: requests taken away before that.
        preemptions: times a running request lost its memory.
        swaps: how many of these kept their cache on the host.
        recomputed_tokens: tokens of discarded caches, to compute again; a
            shared prompt counts once.
        swapped_blocks: blocks copied to the host.
    """

    finished: int = 0
    aborted: int = 0
    preemptions: int = 0
    swaps: int = 0
    recomputed_tokens: int = 0
    swapped_blocks: int = 0


class Scheduler:
    """Choose what runs in each step, within memory and a budget of tokens.

    Source: sections 4.4 and 4.5 of Kwon et al., SOSP 2023; chunked prefill is
    section 4 of Agrawal et al., OSDI 2024 (Sarathi-Serve).

    Args:
        memory: any memory manager; nothing else may use it.
        max_num_seqs: samples that run at once, at least 1.
        max_num_batched_tokens: tokens computed in a step, at least 1. Longer
            prompts are computed in chunks.
        watermark: share of the memory that admission leaves free, in [0, 1).
        preemption: "recompute" drops the cache; "swap" moves it to the host,
            and drops it when the host has no room.

    Attributes:
        counts: what has been done so far.

    Raises:
        TypeError: a count is not an integer.
        ValueError: a value outside its limit, or an unknown preemption.
    """

    def __init__(
        self,
        memory: MemoryManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        watermark: float = 0.01,
        preemption: Literal["recompute", "swap"] = "recompute",
    ) -> None:
        self.max_num_seqs, self.max_num_batched_tokens = require_at_least(
            1,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        (watermark,) = require_number(watermark=watermark)
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark must be in [0, 1), got {watermark}")
        if preemption not in ("recompute", "swap"):
            raise ValueError(
                f"preemption must be recompute or swap, got {preemption!r}"
            )
        self.memory = memory
        self.watermark = watermark
        self.preemption = preemption
        self.counts = Counts()
        self.running: list[RequestState] = []
        self.preempted: deque[RequestState] = deque()
        self.waiting: deque[RequestState] = deque()
        self._states: dict[Hashable, RequestState] = {}
        self._scheduled: Batch | None = None  # and not updated yet

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is running, preempted or waiting."""
        return bool(self._states)

    def state(self, request_id: Hashable) -> RequestState:
        """Return where an unfinished request is, to read.

        Raises:
            KeyError: no unfinished request has this id.
        """
        if request_id not in self._states:
            raise KeyError(f"request {request_id!r} is not unfinished")
        return self._states[request_id]

    # --- Adding ------------------------------------------------------------

    def add(self, *requests: Request) -> None:
        """Put requests at the end of the queue, all or none.

        Raises:
            ValueError: an id belongs to an unfinished request. It is a
                RequestRefused when a request could never run, even alone.
                Nothing has changed.
        """
        states: dict[Hashable, RequestState] = {}
        for request in requests:
            name = request.request_id
            if name in self._states or name in states:
                raise ValueError(f"request {name!r} is here already")
            self._require_fits(request)
            states[name] = RequestState(request)
            states[name].forked = self._starts_forked(request)
        self._states |= states
        self.waiting.extend(states.values())

    def _require_fits(self, request: Request) -> None:
        if request.num_samples > self.max_num_seqs:
            raise RequestRefused(
                f"request {request.request_id!r}: {request.num_samples} "
                f"samples, at most {self.max_num_seqs} sequences run at once"
            )
        if not self.memory.fits(
            request.max_tokens, request.num_samples, request.num_prompt_tokens
        ):
            raise RequestRefused(
                f"request {request.request_id!r}: {request.num_samples} x "
                f"{request.max_tokens} tokens can never fit in "
                f"{self.memory.capacity} slots"
            )

    def _starts_forked(self, request: Request) -> bool:
        """Tell whether each sample computes the prompt itself."""
        return request.num_samples == 1 or not self.memory.shares_blocks

    # --- A step ------------------------------------------------------------

    def schedule(self) -> Batch:
        """Decide the next step, and take the memory that it needs.

        Returns:
            An empty batch when nothing is unfinished.

        Raises:
            RuntimeError: nothing can run though something is unfinished, or
                a request that runs alone, or was just admitted, cannot grow.
                Then somebody else has taken from this memory.
        """
        # Forgotten first: if this raises, memory is no longer prepared for
        # the batch before.
        self._scheduled = None
        batch = Batch(self.max_num_batched_tokens)
        self._continue_running(batch)
        # What was just preempted would not fit anyway. It also means that no
        # block goes out and in within one step, so the order of moves does
        # not matter.
        if not batch.preempted:
            self._resume_preempted(batch)
            self._admit_waiting(batch)
        if self.memory.shares_blocks:
            batch.copies = self.memory.take_copies()
        if not batch.entries and self.has_unfinished:
            raise RuntimeError(
                f"nothing can run, {len(self._states)} unfinished: "
                f"{self.memory.usage()}"
            )
        self._scheduled = batch
        return batch

    def _continue_running(self, batch: Batch) -> None:
        for state in list(self.running):
            if state.status is Status.PREEMPTED:
                return  # an older one preempted it and all newer ones
            self._schedule(state, batch)

    def _schedule(self, state: RequestState, batch: Batch) -> None:
        """Add what a running request computes, as far as the budget goes."""
        for sample in state.with_tables:
            left = state.target(sample) - sample.num_computed
            num_tokens = min(left, batch.budget)
            if num_tokens == 0:
                return
            # Memory first, then the batch: a sample must not be computed
            # into blocks that it does not have.
            end = sample.num_computed + num_tokens
            while not self._make_room(sample, end):
                if self._preempt_newest(batch) is state:
                    return
            sample.num_scheduled = end
            batch.add(self._entry(state, sample, num_tokens))

    def _make_room(self, sample: Sample, end: int) -> bool:
        missing = end - self.memory.length(sample.sequence_id)
        if missing <= 0:
            return True  # a prompt has all its blocks since it was admitted
        return self.memory.grow(sample.sequence_id, missing)

    def _entry(
        self, state: RequestState, sample: Sample, num_tokens: int
    ) -> Entry:
        start = sample.num_computed
        produces: tuple[Sample, ...] = ()
        if start + num_tokens == sample.num_tokens:
            produces = (sample,) if state.forked else tuple(state.unfinished)
        return Entry(state.request, start, num_tokens, sample, produces)

    # --- Preemption --------------------------------------------------------

    def _preempt_newest(self, batch: Batch) -> RequestState:
        """Take the memory of the newest running request; keep its output."""
        newest = self.running[-1].request
        if len(self.running) == 1:
            raise RuntimeError(
                f"request {newest.request_id!r} runs alone and cannot grow: "
                f"{self.memory.usage()}"
            )
        # Its room was counted, so somebody else has taken from this memory.
        # If we preempted it, it would be admitted again, and so on for ever.
        if newest in batch.resumed + batch.admitted:
            raise RuntimeError(
                f"request {newest.request_id!r} was just promised room and "
                f"cannot grow: {self.memory.usage()}"
            )
        state = self.running.pop()
        batch.withdraw(state.request)
        self.counts.preemptions += 1
        if not self._swap_out(state, batch):
            self._discard_cache(state)
        state.status = Status.PREEMPTED
        # In front, because all that are in this queue are newer than it is.
        self.preempted.appendleft(state)
        batch.preempted.append(state.request)
        return state

    def _swap_out(self, state: RequestState, batch: Batch) -> bool:
        # It is cheaper to take blocks without contents anew than to move them.
        computed = any(sample.num_computed for sample in state.with_tables)
        if self.preemption == "recompute" or not computed:
            return False
        names = [s.sequence_id for s in state.with_tables]
        pairs = self.memory.swap_out(names)
        if pairs is None:
            return False  # the host is full
        state.swapped = True
        batch.swap_out += pairs
        self.counts.swaps += 1
        self.counts.swapped_blocks += len(pairs)
        return True

    def _discard_cache(self, state: RequestState) -> None:
        self.counts.recomputed_tokens += _distinct_computed(state)
        self._release(state)
        for sample in state.unfinished:
            sample.num_computed = sample.num_scheduled = 0
        state.forked = self._starts_forked(state.request)

    def _release(self, state: RequestState) -> None:
        for sample in state.with_tables:
            self.memory.release(sample.sequence_id)

    # --- Admission ---------------------------------------------------------

    def _resume_preempted(self, batch: Batch) -> None:
        while self.preempted and self._may_admit(self.preempted[0], batch):
            state = self.preempted[0]
            if not self._bring_back(state, batch):
                return
            self.preempted.popleft()
            batch.resumed.append(state.request)
            self._start(state, batch)

    def _bring_back(self, state: RequestState, batch: Batch) -> bool:
        if not state.swapped:
            return self._admit(state)
        pairs = self.memory.swap_in(
            [s.sequence_id for s in state.with_tables],
            self._keep_free(self._growth(state)),
        )
        if pairs is None:
            return False
        batch.swap_in += pairs
        state.swapped = False
        return True

    def _admit_waiting(self, batch: Batch) -> None:
        if self.preempted:
            return  # they arrived before all that wait
        while self.waiting and self._may_admit(self.waiting[0], batch):
            if not self._admit(self.waiting[0]):
                return
            state = self.waiting.popleft()
            batch.admitted.append(state.request)
            self._start(state, batch)

    def _may_admit(self, state: RequestState, batch: Batch) -> bool:
        # A group takes all its seats now, because forking needs them later.
        seats = sum(len(running.unfinished) for running in self.running)
        free = self.max_num_seqs - seats
        return batch.budget > 0 and len(state.unfinished) <= free

    def _admit(self, state: RequestState) -> bool:
        """Take memory for all tokens that a request has, or for none."""
        admitted: list[Sample] = []
        growth = 0 if state.forked else self._growth(state)
        keep_free = self._keep_free(growth)
        for sample in state.with_tables:
            if not self.memory.admit(
                sample.sequence_id,
                state.target(sample),
                state.request.final_tokens,
                keep_free,
            ):
                # All or none: half a group could neither run nor be
                # preempted as one.
                for other in admitted:
                    self.memory.release(other.sequence_id)
                return False
            admitted.append(sample)
        return True

    def _growth(self, state: RequestState) -> int:
        """Return the slots that a request takes beyond those it is given.

        Without room for them, it would be preempted again at once.
        """
        size = self.memory.block_size
        if state.forked:  # and swapped out; otherwise it is given all it needs
            lengths = {s.sequence_id: s.num_tokens for s in state.with_tables}
            return self.memory.growth_after_swap_in(lengths) * size
        prompt = state.request.num_prompt_tokens
        own = [cdiv(sample.num_tokens, size) for sample in state.unfinished]
        blocks = sum(own) - len(own) * cdiv(prompt, size)
        if prompt % size:  # all write to this block, the last one in place
            blocks += len(own) - 1
        return blocks * size

    def _keep_free(self, growth: int = 0) -> int:
        """Return the slots that admission must leave free."""
        if not self.running:
            return 0  # it fits alone, so it must not wait
        # Rounded first: as floats, 7 % of 100 slots are a little more than 7,
        # and would become 8.
        share = round(self.watermark * self.memory.capacity, 6)
        return math.ceil(share) + growth

    def _start(self, state: RequestState, batch: Batch) -> None:
        state.status = Status.RUNNING
        self.running.append(state)
        self._schedule(state, batch)

    # --- After the step ----------------------------------------------------

    def update(
        self, batch: Batch, token_ids: Sequence[int]
    ) -> list[TokenOutput]:
        """Take the tokens of a step, and release what has finished.

        Args:
            batch: what `schedule` returned last, and was computed.
            token_ids: a token for each of `batch.sampled`, in that order.
                The tokens of a request that was aborted since are ignored.

        Raises:
            TypeError: a token is not an integer, or they have no order;
                nothing has changed.
            ValueError: another number of tokens, or a batch that is not the
                last one, or was updated before; nothing has changed.
        """
        if batch is not self._scheduled:
            raise ValueError(
                "update needs the batch that schedule returned last, and once"
            )
        if isinstance(token_ids, Set | Mapping):
            raise TypeError(
                f"tokens must be in order, got a {type(token_ids).__name__}"
            )
        expected = len(batch.sampled)
        if len(token_ids) != expected:
            raise ValueError(f"{len(token_ids)} tokens for {expected} samples")
        tokens = iter([_token(token_id) for token_id in token_ids])
        self._scheduled = None
        outputs: list[TokenOutput] = []
        for entry in batch.entries:
            here = not entry.aborted
            if here:
                self._take_entry(entry)
            for sample, token_id in zip(entry.produces, tokens, strict=False):
                if here:
                    outputs.append(sample.take(token_id))
        if any(output.finished for output in outputs):
            self._drop_finished()
        return outputs

    def _take_entry(self, entry: Entry) -> None:
        # Before the tokens, because a fork shares what is computed.
        entry.sample.num_computed = entry.end
        state = self._states[entry.request.request_id]
        if not state.forked and entry.end == state.target(entry.sample):
            self._fork(state, entry.sample)

    def _fork(self, state: RequestState, parent: Sample) -> None:
        """Let the other samples share the prompt that one has computed."""
        for sample in state.unfinished:
            if sample is not parent:
                self.memory.fork(parent.sequence_id, sample.sequence_id)
                sample.num_computed = parent.num_computed
                sample.num_scheduled = parent.num_scheduled
        state.forked = True

    def _drop_finished(self) -> None:
        for state in self.running:
            for sample in state.unfinished:
                if sample.reason is not None:
                    self.memory.release(sample.sequence_id)
            state.drop_finished()
            if not state.unfinished:
                self._forget(state)
                self.counts.finished += 1
        self.running = [s for s in self.running if s.unfinished]

    def _forget(self, state: RequestState) -> None:
        state.status = Status.FINISHED
        del self._states[state.request.request_id]

    def abort(self, request_id: Hashable) -> bool:
        """Take a request away, wherever it is, and release its memory.

        Returns:
            False when no unfinished request has this id: it has finished, or
            was aborted before.
        """
        state = self._states.get(request_id)
        if state is None:
            return False
        if self._holds_memory(state):
            self._release(state)
        # Batches still list the samples, and see by this what was aborted.
        for sample in state.unfinished:
            sample.reason = "abort"
        self._queues[state.status].remove(state)
        self._forget(state)
        self.counts.aborted += 1
        return True

    @property
    def _queues(
        self,
    ) -> dict[Status, list[RequestState] | deque[RequestState]]:
        return {
            Status.RUNNING: self.running,
            Status.PREEMPTED: self.preempted,
            Status.WAITING: self.waiting,
        }

    def _holds_memory(self, state: RequestState) -> bool:
        return state.status is Status.RUNNING or state.swapped

    # --- Looking -----------------------------------------------------------

    def usage(self) -> Usage:
        """Return where the memory's slots are now.

        A prompt's memory is taken at once and filled chunk by chunk: what is
        neither computed nor scheduled yet counts as reserved.
        """
        usage = self.memory.usage()
        promised = sum(
            self.memory.length(sample.sequence_id) - sample.num_scheduled
            for state in self.running
            for sample in state.with_tables
            if sample.num_scheduled < sample.num_tokens
        )
        return usage._replace(
            token_states=usage.token_states - promised,
            reserved=usage.reserved + promised,
        )

    def assert_consistent(self) -> None:
        """Check the queues, and that memory is held only by its owners.

        Raises:
            AssertionError: naming what is wrong.
        """
        self.memory.assert_consistent()
        self._assert_memory_is_theirs()
        queues = self._queues
        queued = [s for queue in queues.values() for s in queue]
        if {id(s) for s in queued} != {id(s) for s in self._states.values()}:
            raise AssertionError("the queues are not the unfinished requests")
        if len(queued) != len(self._states):
            raise AssertionError("a request is in two queues")
        for status, queue in queues.items():
            for state in queue:
                self._assert_state(state, status)

    def _assert_memory_is_theirs(self) -> None:
        theirs = {
            sample.sequence_id
            for state in self._states.values()
            if self._holds_memory(state)
            for sample in state.with_tables
        }
        found = self.memory.request_ids
        if found != theirs:
            raise AssertionError(
                f"memory without running: {found - theirs}; "
                f"running without memory: {theirs - found}"
            )

    def _assert_state(self, state: RequestState, status: Status) -> None:
        name = state.request.request_id
        if state.status is not status:
            raise AssertionError(f"request {name!r} is {state.status}")
        if status is not Status.RUNNING:
            return
        for sample in state.with_tables:
            room = self.memory.length(sample.sequence_id)
            if not sample.num_computed <= room <= state.request.max_tokens:
                raise AssertionError(
                    f"request {name!r} has room for {room} tokens, "
                    f"{sample.num_computed} computed"
                )


def _token(token_id: object) -> int:
    """Return a token as a plain integer, as numpy's are accepted, too.

    A tensor would never equal a stop token, so it is refused like a float.
    """
    if not isinstance(token_id, Integral):
        raise TypeError(
            f"tokens must be integers, got {token_id!r} "
            f"({type(token_id).__name__})"
        )
    return int(token_id)


def _distinct_computed(state: RequestState) -> int:
    """Count the tokens in a request's cache; a shared prompt counts once."""
    computed = [sample.num_computed for sample in state.with_tables]
    prompt = state.request.num_prompt_tokens
    shared = min(prompt, max(computed)) if state.forked else 0
    if state.request.num_samples == 1 or shared == 0:
        return sum(computed)
    return shared + sum(n - shared for n in computed)


class StaticScheduler(Scheduler):
    """Fill a batch once, and run it until its last request has finished.

    The baseline before continuous batching: the place of a request that has
    finished stays empty. Takes what `Scheduler` takes.
    """

    _open = True

    def schedule(self) -> Batch:
        """Decide the next step; admit only when nothing runs."""
        self._open = not self.running
        return super().schedule()

    def _may_admit(self, state: RequestState, batch: Batch) -> bool:
        return self._open and super()._may_admit(state, batch)
