"""What is asked of an engine, and how far each sample of it has come."""

import math
import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple, SupportsIndex

from llm_systems_cookbook.validate import require_at_least, require_number

Reason = Literal["length", "stop", "error", "abort"]


@dataclass(frozen=True)
class Request:
    """A prompt, and what to generate from it. It never changes.

    Attributes:
        request_id: a name; not that of another unfinished request.
        prompt_token_ids: at least one; a `range` stays one, so a simulated
            prompt takes no memory.
        max_new_tokens: tokens to generate at most, at least 1.
        arrival: seconds, finite and at least 0.
        output_len: tokens that it will generate, where that is known (a
            simulation, the oracle memory); in [1, max_new_tokens].
        num_samples: independent continuations of the prompt, at least 1.
        stop_token_ids: tokens that end a sample; the token is still output.
        temperature: 0 takes the likeliest token; above, samples.
        seed: of the sampling. A token depends on the seed, the sample's
            index and the token's position, and on nothing else.

    Raises:
        TypeError: a count, the seed or a token is not an integer, a time or
            the temperature not a number, or a prompt has no order.
        ValueError: a value outside its limit.
    """

    request_id: Hashable
    prompt_token_ids: Sequence[int]
    max_new_tokens: int
    arrival: float = 0.0
    output_len: int | None = None
    num_samples: int = 1
    stop_token_ids: Iterable[int] = ()
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        hash(self.request_id)
        prompt = _ordered(self.prompt_token_ids)
        self._keep("prompt_token_ids", _tokens("prompt_token_ids", prompt))
        if len(self.prompt_token_ids) == 0:
            raise ValueError(f"request {self.request_id!r}: empty prompt")
        for name in ("max_new_tokens", "num_samples"):
            (value,) = require_at_least(1, **{name: getattr(self, name)})
            self._keep(name, value)
        (seed,) = require_at_least(0, seed=self.seed)
        self._keep("seed", seed)
        stops = _tokens("stop_token_ids", self.stop_token_ids)
        self._keep("stop_token_ids", frozenset(stops))
        for name in ("arrival", "temperature"):
            (value,) = require_number(**{name: getattr(self, name)})
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite, >= 0, got {value}")
            self._keep(name, value)
        if self.output_len is not None:
            self._keep("output_len", self._checked_output_len())

    def _checked_output_len(self) -> int:
        (length,) = require_at_least(1, output_len=self.output_len)
        if length > self.max_new_tokens:
            raise ValueError(
                f"output_len {length} is above max_new_tokens "
                f"{self.max_new_tokens}"
            )
        return length

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def max_tokens(self) -> int:
        """Tokens in memory at most, for one sample.

        The last sampled token is never written: nothing attends to it.
        """
        return self.num_prompt_tokens + self.max_new_tokens - 1

    @property
    def final_tokens(self) -> int:
        """Tokens in memory at the end, as far as that is known."""
        output = self.output_len or self.max_new_tokens
        return self.num_prompt_tokens + output - 1


def _ordered(prompt: Sequence[int]) -> Sequence[int]:
    """Return a prompt; refuse what has no order, or more than one."""
    if isinstance(prompt, Set | Mapping):
        raise TypeError(
            f"prompt_token_ids must be in order, got a {type(prompt).__name__}"
        )
    if getattr(prompt, "ndim", 1) != 1:  # a tensor or an array
        raise ValueError(
            f"prompt_token_ids must be one sequence, got {list(prompt.shape)}"
        )
    return prompt


def _tokens(name: str, token_ids: Iterable[int]) -> Sequence[int]:
    if isinstance(token_ids, range):
        return token_ids
    if not isinstance(token_ids, Iterable):
        raise TypeError(f"{name} must be a list of tokens, got {token_ids!r}")
    return tuple(_token(name, token) for token in token_ids)


def _token(name: str, token: SupportsIndex) -> int:
    try:
        return operator.index(token)
    except TypeError:
        raise TypeError(f"{name} must be integers, got {token!r}") from None


class TokenOutput(NamedTuple):
    """What a step has to tell about one sample.

    Attributes:
        request_id: whose token it is.
        token_id: the token; None when the sample ends without one.
        finished: whether it is the sample's last output.
        reason: why it has finished: "length", "stop" or "error".
        sample: which sample of the request.
        error: what went wrong, where the reason is "error".
    """

    request_id: Hashable
    token_id: int | None
    finished: bool
    reason: Reason | None
    sample: int = 0
    error: str | None = None


@dataclass(eq=False, slots=True)
class Sample:
    """One continuation of a request.

    Attributes:
        request: what was asked.
        index: which sample of it, in [0, num_samples).
        sequence_id: its name in memory.
        output_token_ids: tokens generated; preemption does not touch them.
        num_tokens: tokens of the prompt and the output so far.
        num_computed: tokens whose keys and values are in the cache.
        num_scheduled: tokens whose keys and values will be there after the
            step that was scheduled last.
        reason: why it has finished; None while it has not.
    """

    request: Request
    index: int
    sequence_id: tuple[Hashable, int] = field(init=False)
    output_token_ids: list[int] = field(default_factory=list)
    num_tokens: int = field(init=False)
    num_computed: int = 0
    num_scheduled: int = 0
    reason: Reason | None = None

    def __post_init__(self) -> None:
        self.sequence_id = self.request.request_id, self.index
        self.num_tokens = self.request.num_prompt_tokens

    def token_ids(self, start: int, end: int) -> list[int]:
        """Return the tokens of positions start to end, prompt and output.

        Raises:
            IndexError: positions outside [0, num_tokens].
        """
        if not 0 <= start <= end <= self.num_tokens:
            raise IndexError(
                f"positions {start} to {end} are outside "
                f"[0, {self.num_tokens}]"
            )
        prompt = self.request.num_prompt_tokens
        tokens = list(self.request.prompt_token_ids[start:end])
        if end > prompt:
            first = max(0, start - prompt)
            tokens += self.output_token_ids[first : end - prompt]
        return tokens

    def take(self, token_id: int) -> TokenOutput:
        """Add a token to the output, and tell whether it is the last."""
        self.output_token_ids.append(token_id)
        self.num_tokens += 1
        self.reason = self._finish_reason(token_id)
        return TokenOutput(
            self.request.request_id,
            token_id,
            self.reason is not None,
            self.reason,
            self.index,
        )

    def _finish_reason(self, token_id: int) -> Reason | None:
        request = self.request
        if token_id in request.stop_token_ids:
            return "stop"
        limit = request.output_len or request.max_new_tokens
        return "length" if len(self.output_token_ids) >= limit else None


class Status(Enum):
    """Where a request is in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class RequestState:
    """A request inside the scheduler.

    Attributes:
        request: what was asked.
        unfinished: its samples that have not finished.
        status: where it is.
        forked: whether each of these has its own block table. Until then the
            first of them computes the prompt for all.
        swapped: whether its blocks are on the host.
    """

    request: Request
    unfinished: list[Sample] = field(init=False)
    status: Status = Status.WAITING
    forked: bool = False
    swapped: bool = False

    def __post_init__(self) -> None:
        count = self.request.num_samples
        self.unfinished = [Sample(self.request, i) for i in range(count)]

    @property
    def with_tables(self) -> list[Sample]:
        """Samples that have, or are about to get, a block table."""
        return self.unfinished if self.forked else self.unfinished[:1]

    def drop_finished(self) -> None:
        """Keep the samples that have not finished."""
        self.unfinished = [s for s in self.unfinished if s.reason is None]

    def target(self, sample: Sample) -> int:
        """Return how many tokens the sample is to have in the cache."""
        if self.forked:
            return sample.num_tokens
        return self.request.num_prompt_tokens
