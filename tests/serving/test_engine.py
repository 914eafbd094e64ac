"""The engine: its tokens, its errors, and what is left after each."""

import importlib
import inspect
import itertools
import math
import re
import signal
import sys
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases.attention import counted_calls
from cases.serving import (
    CONFIG,
    Run,
    Setup,
    Workload,
    all_tensors,
    assert_whole,
    finish,
    random_workload,
    run,
    small_model,
    smallest_pool,
    take_step,
)

from llm_systems_cookbook.attention import (
    ContiguousKVCache,
    PagedKVCache,
    cpu,
)
from llm_systems_cookbook.attention.gather import gather_attention
from llm_systems_cookbook.memory import (
    BlockAllocator,
    PagedMemory,
    ReservedMemory,
)
from llm_systems_cookbook.models import TinyGPT
from llm_systems_cookbook.serving import Engine, Request, Scheduler
from llm_systems_cookbook.serving.engine import StepInputs
from llm_systems_cookbook.serving.guard import Guard
from llm_systems_cookbook.serving.request import Status, TokenOutput

pytestmark = pytest.mark.usefixtures("one_thread")


PACKAGE = str(Path(sys.modules[Engine.__module__].__file__).parents[1])
GUARD = sys.modules[Guard.__module__].__file__
VOCAB = CONFIG.vocab_size
PROMPTS = ([1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11])


# --- An oracle without a cache ---------------------------------------------


def whole_text_attention(layer, query, key, value):
    """Attend to everything before, with every key computed anew."""
    group = query.shape[1] // key.shape[1]
    keys, values = (t.repeat_interleave(group, 1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, keys)
    scores = scores / math.sqrt(query.shape[2])
    unseen = torch.ones(scores.shape[1:]).triu(1).bool()
    weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def logits_after(tokens):
    ids = torch.tensor(tokens)
    return small_model()(
        ids, torch.arange(len(ids)), whole_text_attention, [len(ids) - 1]
    )[0]


def greedy(prompt, count):
    """Return the tokens that follow, by the model on the whole text."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_after(tokens).argmax()))
    return tokens[len(prompt) :]


# --- Models that fail ------------------------------------------------------


class Spoiled:
    """A model whose rows at some place in a text are spoiled."""

    def __init__(self, position, spoil=None, token=None):
        self.position, self.token, self.spoil = position, token, spoil
        self.calls = 0

    def __getattr__(self, name):
        return getattr(small_model(), name)

    def hits(self, token_ids, positions):
        return (positions == self.position) & (
            (token_ids == self.token) if self.token is not None else True
        )

    def __call__(self, token_ids, positions, attention, sampled_rows):
        self.calls += 1
        hits = self.hits(token_ids, positions)
        if self.spoil is None and hits.any():
            raise RuntimeError(f"cannot stand position {self.position}")
        logits = small_model()(token_ids, positions, attention, sampled_rows)
        if self.spoil is not None:
            logits = logits.clone()
            logits[hits[torch.tensor(sampled_rows, dtype=torch.int64)]] = (
                self.spoil
            )
        return logits


class Interrupted:
    """A model that is interrupted once, before or after its work."""

    def __init__(self, at_call, error, after):
        self.at_call, self.error, self.after = at_call, error, after
        self.calls = 0

    def __getattr__(self, name):
        return getattr(small_model(), name)

    def __call__(self, *arguments):
        self.calls += 1
        now = self.calls == self.at_call
        if now and not self.after:
            raise self.error
        logits = small_model()(*arguments)
        if now:
            raise self.error
        return logits


class Wrapped:
    """A model whose answer is changed by a function."""

    def __init__(self, change):
        self.change = change

    def __getattr__(self, name):
        return getattr(small_model(), name)

    def __call__(self, token_ids, *rest):
        return self.change(small_model()(token_ids, *rest), token_ids)


def drain(engine):
    """Run to the end, with poison; return the tokens and ends by sample."""
    result = Run(engine)
    for _ in range(1000):
        if not engine.has_unfinished:
            assert_whole(engine)
            return result.texts
        take_step(result)
    raise AssertionError("it hangs")


def state_of(engine):
    """Return what a refused call must leave as it was."""
    scheduler = engine.scheduler
    return (
        [s.request for s in scheduler._states.values()],
        [len(q) for q in (scheduler.running, scheduler.preempted)],
        vars(scheduler.counts).copy(),
        scheduler.memory.usage(),
        set(engine._known),
    )


# --- Construction ----------------------------------------------------------


def parts(contiguous=False, **sizes):
    """Return a scheduler and a cache; sizes say what does not fit."""
    sizes = {
        "layers": 2,
        "blocks": 8,
        "size": 4,
        "heads": 2,
        "dim": 4,
        "host": 3,
    } | sizes
    if contiguous:
        memory = ReservedMemory(32, 32)
        cache = ContiguousKVCache(
            sizes["layers"],
            sizes["blocks"] * 4,
            sizes["heads"],
            sizes["dim"],
            dtype=torch.float64,
        )
    else:
        memory = PagedMemory(BlockAllocator(8, 4), host_blocks=3)
        cache = PagedKVCache(
            sizes["layers"],
            sizes["blocks"],
            sizes["size"],
            sizes["heads"],
            sizes["dim"],
            dtype=torch.float64,
            num_host_blocks=sizes["host"],
        )
    scheduler = Scheduler(memory, max_num_seqs=4, max_num_batched_tokens=64)
    return scheduler, cache


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": 3}, "layers of the model: 2, the cache has 3"),
        ({"heads": 4}, "KV heads of the model: 2, the cache has 4"),
        ({"dim": 8}, "head_dim of the model: 4, the cache has 8"),
        ({"blocks": 7}, "slots of memory: 32, the cache has 28"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(contiguous, wrong, message):
    Engine(small_model(), *parts(contiguous))
    with pytest.raises(ValueError, match=message):
        Engine(small_model(), *parts(contiguous, **wrong))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": 2}, "block size of memory: 4, the cache has 2"),
        ({"host": 0}, "host blocks of memory: 3, the cache has 0"),
        ({"host": 4}, "host blocks of memory: 3, the cache has 4"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Engine(small_model(), *parts(**wrong))


@pytest.mark.parametrize("contiguous", [False, True])
def test_numbers_that_do_not_fit_are_refused(contiguous):
    """Each request would fail, and none would say that it is the cache."""
    model = TinyGPT(CONFIG, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"dtype of the model: torch.float32"):
        Engine(model, *parts(contiguous))
    scheduler, cache = parts(contiguous)
    for values in cache.values:
        values.resize_(*values.shape[:3], 8)
    with pytest.raises(ValueError, match="the cache has 8 for values"):
        Engine(small_model(), scheduler, cache)


def test_memory_of_one_kind_and_a_cache_of_the_other_are_refused():
    """Also where all sizes agree: a request's blocks may lie anywhere."""
    for block_size in (1, 4):
        memory = PagedMemory(BlockAllocator(32 // block_size, block_size))
        scheduler = Scheduler(memory, max_num_seqs=2, max_num_batched_tokens=9)
        _, cache = parts(contiguous=True)
        with pytest.raises(ValueError, match="regions, got PagedMemory"):
            Engine(small_model(), scheduler, cache)


@pytest.mark.parametrize("contiguous", [False, True])
def test_an_unknown_backend_is_refused(contiguous):
    with pytest.raises(ValueError, match="abacus"):
        Engine(small_model(), *parts(contiguous), backend="abacus")


# --- Tokens ----------------------------------------------------------------


@pytest.mark.parametrize(
    "setup",
    [
        Setup(),
        Setup(block_size=1),
        Setup(block_size=7, max_num_batched_tokens=3),
        Setup(backend="reference"),
        Setup(contiguous=True),
        Setup(contiguous=True, backend="gather"),
        Setup(max_num_seqs=1),
        Setup(max_num_batched_tokens=1, num_blocks=7),
    ],
)
def test_greedy_tokens_are_those_of_the_model_on_the_whole_text(setup):
    engine = setup.make_engine()
    for i, prompt in enumerate(PROMPTS):
        engine.add(Request(i, prompt, 6 - i))
    texts = drain(engine)
    for i, prompt in enumerate(PROMPTS):
        assert texts[i, 0] == (greedy(prompt, 6 - i), "length")


def test_a_backend_of_ones_own_does_the_attention():
    calls, plans = [], []

    def mine(inputs, out):
        calls.append(inputs.seq_lens.tolist())
        plans.append(inputs.plan)
        return gather_attention(inputs, out)

    scheduler, cache = parts()
    for tensor in all_tensors(cache):
        tensor.fill_(torch.nan)
    engine = Engine(small_model(), scheduler, cache, backend=mine)
    assert engine.generate([[1, 2, 3]], 3) == [greedy([1, 2, 3], 3)]
    # A call for each layer of each step.
    assert calls == [[3], [3], [4], [4], [5], [5]]
    # The layers of a step share what they plan, and no step another's.
    assert [id(plan) for plan in plans[::2]] == list(map(id, plans[1::2]))
    assert len({id(plan) for plan in plans}) == 3


HARSH = {
    "block size 1": Setup(block_size=1),
    "host of one block": Setup(host_blocks=1, preemption="swap"),
    "host of four": Setup(host_blocks=4, preemption="swap", block_size=2),
    "big host": Setup(host_blocks=40, preemption="swap", block_size=1),
}


@pytest.mark.parametrize("name", HARSH)
def test_the_smallest_pool_gives_the_same_tokens(name):
    """The pool holds the largest request alone, and no block more."""
    setup, preemptions = HARSH[name], 0
    for seed in range(3):
        workload = random_workload(seed + 900, samples=2, tight=True)
        blocks = smallest_pool(workload, setup.block_size)
        tight = run(replace(setup, num_blocks=blocks), workload)
        assert tight.texts == run(Setup(num_blocks=200), workload).texts
        preemptions += tight.engine.scheduler.counts.preemptions
    assert preemptions > 0


def test_a_stop_token_ends_a_text_and_is_part_of_it():
    text = greedy([1, 2, 3], 12)
    stop = text[4]
    engine = Setup().make_engine()
    engine.add_request([1, 2, 3], 12, request_id="a", stop_token_ids=[stop])
    tokens, reason = drain(engine)["a", 0]
    assert tokens == text[: text.index(stop) + 1]
    assert reason == "stop"


def test_a_known_output_length_ends_a_text():
    engine = Setup().make_engine()
    engine.add_request([1, 2, 3], 12, request_id="a", output_len=3)
    assert drain(engine)["a", 0] == (greedy([1, 2, 3], 3), "length")


# --- Streaming -------------------------------------------------------------


def test_tokens_come_out_as_they_are_made_in_the_order_of_the_batch():
    engine = Setup().make_engine()
    engine.add_request([1, 2, 3], 3, request_id="a")
    engine.add_request([4, 5], 2, request_id="b")
    first, second = greedy([1, 2, 3], 3), greedy([4, 5], 2)
    assert engine.step() == [
        TokenOutput("a", first[0], False, None),
        TokenOutput("b", second[0], False, None),
    ]
    engine.add_request([6], 1, request_id="c")
    assert engine.step() == [
        TokenOutput("a", first[1], False, None),
        TokenOutput("b", second[1], True, "length"),
        TokenOutput("c", greedy([6], 1)[0], True, "length"),
    ]
    assert engine.step() == [TokenOutput("a", first[2], True, "length")]
    assert not engine.has_unfinished


def test_a_chunk_in_the_middle_of_a_prompt_has_no_output():
    engine = Setup(max_num_batched_tokens=4).make_engine()
    engine.add_request(range(1, 10), 1, request_id="a")
    assert [len(engine.step()) for _ in range(3)] == [0, 0, 1]


def test_a_step_with_nothing_to_do_does_nothing():
    engine = Setup().make_engine(Spoiled(0))
    assert engine.step() == []
    assert engine.model.calls == 0
    assert engine.last_batch.entries == []


def test_a_step_shows_its_batch_and_its_time_without_the_observers():
    engine = Setup().make_engine()
    times = iter([0.0, 1.0, 10.0, 14.0])
    engine.clock = lambda: next(times)
    seen = []
    engine.on_batch = seen.append
    engine.add_request([1, 2, 3], 1)
    engine.step()
    assert engine.last_batch is seen[0]
    assert engine.last_batch.num_tokens == 3
    assert engine.step_seconds == 5.0


# --- Samples and sampling --------------------------------------------------


def sampled(setup=None, prompt=(1, 2, 3), new=5, extra=(), **options):
    """Return the texts of a request's samples."""
    engine = (setup or Setup()).make_engine()
    engine.add_request(prompt, new, request_id="a", **options)
    for i, other in enumerate(extra):
        engine.add_request(other, 7, request_id=i, temperature=1.0, seed=9)
    texts = drain(engine)
    count = options.get("num_samples", 1)
    return [texts["a", i][0] for i in range(count)]


def test_each_sample_has_its_own_outputs():
    engine = Setup().make_engine()
    engine.add_request([1, 2], 4, request_id="a", num_samples=3, temperature=2)
    outputs = finish(Run(engine))
    assert [o.sample for o in outputs] == [0, 1, 2] * 4
    assert [o.finished for o in outputs] == [False] * 9 + [True] * 3
    texts = {tuple(o.token_id for o in outputs[i::3]) for i in range(3)}
    assert len(texts) == 3


def test_greedy_samples_are_all_the_likeliest_text():
    assert sampled(num_samples=3) == [greedy([1, 2, 3], 5)] * 3


def test_a_sample_is_the_same_however_many_there_are_and_whoever_runs():
    options = {"temperature": 1.0, "seed": 4}
    alone = sampled(num_samples=4, **options)
    assert len({tuple(text) for text in alone}) == 4
    assert sampled(num_samples=2, **options) == alone[:2]
    assert sampled(num_samples=4, extra=PROMPTS, **options) == alone
    for setup in (
        Setup(contiguous=True),
        Setup(max_num_batched_tokens=2),
        Setup(block_size=1, num_blocks=23),
    ):
        assert sampled(setup, num_samples=4, **options) == alone
    # A longer text begins with the shorter one.
    longer = sampled(num_samples=4, new=9, **options)
    assert [text[:5] for text in longer] == alone
    assert sampled(num_samples=4, temperature=1.0, seed=5) != alone


def test_a_draw_depends_on_the_position_in_the_text_prompt_included():
    """A text goes on alike from its own beginning as a prompt."""
    options = {"temperature": 1.0, "seed": 4}
    (text,) = sampled(new=8, **options)
    prompt = [1, 2, 3, *text[:3]]
    assert sampled(prompt=prompt, new=5, **options) == [text[3:]]


@pytest.mark.parametrize("temperature", [1e-9, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature):
    assert sampled(temperature=temperature) == [greedy([1, 2, 3], 5)]


def test_first_tokens_follow_the_softmax():
    count, temperature = 1500, 1.5
    setup = Setup(max_num_seqs=count)
    texts = sampled(
        setup, new=1, num_samples=count, temperature=temperature, seed=1
    )
    seen = Counter(token for (token,) in texts)
    weights = (logits_after([1, 2, 3]) / temperature).softmax(0).tolist()
    common = [t for t, p in enumerate(weights) if count * p >= 5]
    rare = 1 - sum(weights[t] for t in common)
    pairs = [(seen[t], weights[t]) for t in common]
    pairs.append((count - sum(seen[t] for t in common), rare))
    statistic = sum((n - count * p) ** 2 / (count * p) for n, p in pairs)
    assert len(common) > 2
    # Its mean is len(pairs) - 1; this is some four deviations above.
    limit = len(pairs) - 1 + 4 * math.sqrt(2 * len(pairs))
    assert statistic < limit


# --- Requests that are refused ---------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "new", "options", "message"),
    [
        ([], 3, {}, "empty prompt"),
        ([1], 0, {}, "max_new_tokens must be >= 1, got 0"),
        ([1], 3, {"request_id": "used"}, "'used' was used before"),
        ([1, VOCAB], 3, {}, rf"prompt_token_ids has {VOCAB}, outside \[0, 24"),
        ([-1], 3, {}, r"prompt_token_ids has -1, outside \[0, 24\)"),
        ([1], 3, {"stop_token_ids": [99]}, "stop_token_ids has 99, outside"),
        ([1] * 65, 1, {}, "65 prompt tokens and 1 new.* context of 64"),
        ([1] * 60, 6, {}, "60 prompt tokens and 6 new.* context of 64"),
        ([1] * 30, 20, {}, "1 x 49 tokens can never fit in 40 slots"),
        ([1], 3, {"num_samples": 17}, "17 samples, at most 16"),
        ([1], 3, {"temperature": -1}, "temperature must be finite"),
        ([1], 3, {"seed": -1}, "seed must be >= 0, got -1"),
    ],
)
def test_a_bad_request_is_refused_and_the_engine_unchanged(
    prompt, new, options, message
):
    engine = Setup(num_blocks=10).make_engine()
    engine.add_request([1, 2], 3, request_id="used")
    before = state_of(engine)
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, new, **options)
    assert state_of(engine) == before
    assert drain(engine) == {("used", 0): (greedy([1, 2], 3), "length")}


def test_what_is_no_integer_is_a_type_error():
    engine = Setup().make_engine()
    before = state_of(engine)
    for prompt, new in (([1.5], 3), ([1], 3.0), ("text", 3)):
        with pytest.raises(TypeError):
            engine.add_request(prompt, new)
        assert state_of(engine) == before


def test_the_whole_context_can_be_used():
    engine = Setup().make_engine()
    engine.add_request([1] * 60, 5, request_id="a")
    tokens, reason = drain(engine)["a", 0]
    assert (len(tokens), reason) == (5, "length")


def test_ids_are_numbers_that_were_not_used():
    engine = Setup().make_engine()
    engine.add_request([1], 1, request_id=1)
    names = [engine.add_request([1], 1) for _ in range(3)]
    assert names == [0, 2, 3]
    finish(Run(engine))
    assert engine.generate([[2], [3]], 2) == [greedy([2], 2), greedy([3], 2)]
    assert engine.add_request([1], 1) == 6


@pytest.mark.parametrize("ended", ["finished", "aborted", "failed"])
def test_an_id_is_used_once_whatever_became_of_it(ended):
    model = Spoiled(0) if ended == "failed" else None
    engine = Setup().make_engine(model)
    engine.add_request([1], 1, request_id="a")
    if ended == "aborted":
        engine.abort("a")
    drain(engine)
    with pytest.raises(ValueError, match="'a' was used before"):
        engine.add_request([1], 1, request_id="a")


# --- Models that fail ------------------------------------------------------

# Only "long" ever has a token at position 9 or later.
REQUESTS = [
    Request("a", [1, 2, 3], 5),
    Request("long", [4, 5, 6, 7, 8, 9, 10, 11, 12, 13], 5),
    Request("b", [14, 15], 6, temperature=1.0, seed=3, num_samples=2),
]


def expected():
    return run(Setup(), Workload(REQUESTS, [0, 0, 0])).texts


SPOILS = {
    "raises": (None, r"RuntimeError: cannot stand position"),
    "NaN": (torch.nan, "logits are not usable"),
    "infinity": (torch.inf, "logits are not usable"),
    "minus infinity": (-torch.inf, "logits are not usable"),
}


@pytest.mark.parametrize(
    ("name", "position", "setup"),
    [
        *(
            (name, position, setup)
            for name in ("raises", "NaN")
            for position in (9, 10, 12)
            for setup in (
                Setup(),
                Setup(contiguous=True),
                Setup(max_num_batched_tokens=3),
                Setup(num_blocks=6, host_blocks=2, preemption="swap"),
            )
        ),
        ("infinity", 10, Setup()),
        ("minus infinity", 10, Setup()),
    ],
)
def test_only_the_request_fails_whose_fault_it_is(name, position, setup):
    spoil, message = SPOILS[name]
    model = Spoiled(position, spoil)
    result = run(setup, Workload(REQUESTS, [0, 0, 0]), model)
    exact = expected()
    tokens, reason = result.texts.pop(("long", 0)), "error"
    texts = result.texts
    assert tokens == (exact.pop(("long", 0))[0][: position - 9], reason)
    del texts["long", 0]
    assert texts == exact
    (failure,) = [o for o in result.outputs if o.reason == "error"]
    assert failure[:5] == ("long", None, True, "error", 0)
    assert message.split(":")[0] in failure.error
    assert str(position) in failure.error
    assert result.engine.scheduler.counts.aborted == 1


def test_each_live_sample_is_told_of_the_failure_and_no_more_follows():
    request = Request("x", [1, 2], 6, num_samples=3, temperature=1.0, seed=2)
    workload = Workload([request, Request("a", [3], 4)], [0, 0])
    for spoil in (None, torch.nan):
        result = run(Setup(), workload, Spoiled(4, spoil))
        failures = [o for o in result.outputs if o.error is not None]
        # Only "x" gets to position 4, with three samples.
        assert [(o.request_id, o.sample) for o in failures] == [
            ("x", 0),
            ("x", 1),
            ("x", 2),
        ]
        assert result.texts["a", 0] == (greedy([3], 4), "length")
        for i in range(3):
            assert len(result.texts["x", i][0]) == 3


def test_a_model_that_fails_on_many_tokens_is_run_on_few():
    """As when memory is short: nobody is at fault."""

    def refuse_many(logits, token_ids):
        if len(token_ids) > 10:
            raise MemoryError("too many")
        return logits

    workload = Workload(REQUESTS, [0, 0, 0])
    with pytest.warns(
        RuntimeWarning, match="a batch of 3 .* MemoryError: too many"
    ) as told:
        result = run(Setup(), workload, Wrapped(refuse_many))
    assert result.texts == expected()
    assert len(told) == 1


def test_an_error_of_batches_is_said_once_per_engine():
    """Also beside a request that ends for another reason, NaN."""

    def refuse_batches(logits, token_ids):
        if len(logits) > 1:
            raise LookupError("two rows")
        return logits if token_ids[0] == 1 else logits * torch.nan

    for _ in range(2):
        engine = Setup().make_engine(Wrapped(refuse_batches))
        for prompt in ([1], [1, 2], [3]):
            engine.add_request(prompt, 2)
        with pytest.warns(RuntimeWarning, match="LookupError: two rows"):
            outputs = engine.step()
        assert [o.reason for o in outputs] == ["error", None, None]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.step()


def test_an_error_of_one_request_is_said_with_it_and_not_as_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(Setup(), Workload(REQUESTS, [0, 0, 0]), Spoiled(9))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, _: x[:, :-1], "ValueError: the model returned .*, not"),
        (lambda x, _: x[:0], "ValueError: the model returned .*24"),
        (lambda x, _: x[None], "ValueError: the model returned .*, not"),
        (lambda x, _: None, "TypeError: the model returned NoneType, not"),
        (lambda x, _: x.tolist(), "TypeError: the model returned list, not"),
        (lambda x, _: x.numpy(), "TypeError: the model returned ndarray, not"),
        (lambda x, _: x > 0, "TypeError: the model returned torch.bool, not"),
        (
            lambda x, _: x.to(torch.complex64),
            "TypeError: the model returned torch.complex64, not",
        ),
        (
            lambda x, _: x.to_sparse(),
            "TypeError: the model returned a torch.sparse_coo tensor on cpu",
        ),
        (
            lambda x, _: x.to("meta"),
            "TypeError: the model returned a torch.strided tensor on meta",
        ),
        # Of the right kind, and yet PyTorch has no argmax of it.
        (lambda x, _: x.to(torch.float8_e4m3fn), ".*Float8"),
    ],
)
def test_what_is_no_logits_fails_every_request_and_leaves_nothing(
    change, message
):
    engine = Setup().make_engine(Wrapped(change))
    for request in REQUESTS:
        engine.add(request)
    outputs = engine.step()
    assert not engine.has_unfinished
    assert_whole(engine)
    assert [o.request_id for o in outputs] == ["a", "long", "b", "b"]
    for output in outputs:
        assert output.token_id is None
        assert output.reason == "error"
        assert re.match(message, output.error)


@pytest.mark.parametrize("contiguous", [False, True])
def test_both_caches_are_written_by_the_fastest_write(contiguous, monkeypatch):
    written = counted_calls(monkeypatch, cpu, "cpu_write")
    for forced, calls in (("cpu", 2), ("gather", 0)):
        monkeypatch.setenv("COOKBOOK_BACKEND", forced)
        written.clear()
        engine = Setup(contiguous=contiguous).make_engine()
        assert engine.generate([[1, 2, 3]], 1) == [greedy([1, 2, 3], 1)]
        assert len(written) == calls, "one call for each layer"


@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("attention.cpu.plan", "_cut"),
        ("attention.inputs", "_check_floats"),
        ("attention.write", "_check"),
        ("attention.write", "choose_backend"),
    ],
)
def test_what_a_step_does_once_it_does_not_do_in_each_layer(
    module, function, monkeypatch
):
    engine = Setup(backend="cpu").make_engine()
    home = importlib.import_module(f"llm_systems_cookbook.{module}")
    made = counted_calls(monkeypatch, home, function)
    assert engine.generate([[1, 2, 3]], 4) == [greedy([1, 2, 3], 4)]
    assert len(made) == 4, "one for each of four steps, with two layers each"


class FewerHeads(Wrapped):
    """A model whose second layer asks with two of its four heads."""

    def __init__(self):
        super().__init__(lambda logits, _: logits)

    def __call__(self, token_ids, positions, attention, rows):
        def fewer(layer, query, key, value):
            heads = 2 if layer == 1 else 4
            return attention(layer, query[:, :heads], key, value)

        return super().__call__(token_ids, positions, fewer, rows)


def test_a_layer_that_asks_with_other_heads_fails_its_requests():
    engine = Setup().make_engine(FewerHeads())
    engine.add(REQUESTS[0])
    (output,) = engine.step()
    assert re.match(
        r"ValueError: query is \[3, 2, 4\].*\[3, 4, 4\]", output.error
    )
    assert_whole(engine)


def test_an_engine_serves_on_after_a_failure():
    engine = Setup().make_engine(Spoiled(9))
    with pytest.raises(
        RuntimeError, match=r"requests failed: 1: .*position 9"
    ):
        engine.generate([[1, 2, 3], list(range(10))], 3)
    assert_whole(engine)
    assert engine.generate([[1, 2, 3]], 3) == [greedy([1, 2, 3], 3)]


# --- Interrupts ------------------------------------------------------------

PRESSED = Setup(num_blocks=7, block_size=2, host_blocks=3, preemption="swap")
PRESSING = Workload(
    [
        Request("a", [1, 2, 3], 7),
        Request("b", [4, 5, 6], 5, num_samples=2, temperature=1.0, seed=1),
        Request("c", [11], 6),
    ],
    [0, 0, 0],
)


def run_with_retries(engine, workload):
    """Serve a workload; a step that raises is simply taken again."""
    result, arrivals = Run(engine), list(workload.in_order())
    raised = 0
    for step in range(500):
        while arrivals and arrivals[0][0] <= step:
            engine.add(arrivals.pop(0)[1])
        if not engine.has_unfinished and not arrivals:
            break
        try:
            result.outputs += engine.step()
        except (KeyboardInterrupt, LookupError):
            raised += 1
        engine.scheduler.assert_consistent()
    assert not engine.has_unfinished
    assert_whole(engine)
    return result.texts, raised


def test_what_presses_does_fork_swap_and_copy():
    result = run(PRESSED, PRESSING)
    counts = result.engine.scheduler.counts
    assert 0 < counts.swaps < counts.preemptions
    assert result.copies > 0
    assert result.texts == run(Setup(), PRESSING).texts


@pytest.mark.parametrize("after", [False, True])
def test_after_an_interrupt_the_step_is_done_again(after):
    """At every call of the model, once."""
    exact = run(PRESSED, PRESSING)
    for call in range(1, len(exact.batches) + 1):
        model = Interrupted(call, KeyboardInterrupt(), after)
        texts, raised = run_with_retries(PRESSED.make_engine(model), PRESSING)
        assert raised == 1
        assert texts == exact.texts


def test_an_observer_that_raises_loses_no_copy_and_no_swap():
    """At every step, once."""
    exact = run(PRESSED, PRESSING)
    for step in range(1, len(exact.batches) + 1):
        engine = PRESSED.make_engine()
        left = iter(range(step - 1, -1, -1))

        def observe(batch, left=left):
            if next(left, None) == 0:
                raise LookupError("seen enough")

        engine.on_batch = observe
        texts, raised = run_with_retries(engine, PRESSING)
        assert raised == 1
        assert texts == exact.texts, f"raised before step {step}"


def test_an_interrupted_generate_can_be_done_again():
    engine = Setup().make_engine(Interrupted(2, KeyboardInterrupt(), False))
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2, 3]], 3)
    assert not engine.has_unfinished, "they are aborted"
    assert_whole(engine)
    assert engine.generate([[1, 2, 3]], 3) == [greedy([1, 2, 3], 3)]


def interrupt_at(line):
    """Return a trace function that presses Ctrl-C before such a line.

    Lines of the package are counted, but for the last ones of a step and the
    guard's: what they return may be lost on its way to the caller, as any
    return value.
    """
    seen = itertools.count(1)
    last = inspect.unwrap(Engine.step).__code__

    def trace(frame, event, _):
        code = frame.f_code
        ours = PACKAGE in code.co_filename and code.co_filename != GUARD
        if not ours or code is last:
            return None if event == "call" else trace
        if event == "line" and next(seen) == line:
            signal.raise_signal(signal.SIGINT)
        return trace

    return trace, seen


def trace_steps(engine, trace):
    """Let a trace function see the engine's steps, and nothing else."""
    step = engine.step

    def traced():
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return step()
        finally:
            sys.settrace(before)

    engine.step = traced
    return engine


@pytest.mark.parametrize("part", range(4))
def test_ctrl_c_at_any_line_loses_nothing(part):
    """One in so many lines of a run: schedule, moves, compute, update."""
    exact = run(PRESSED, PRESSING).texts
    trace, seen = interrupt_at(-1)
    engine = trace_steps(PRESSED.make_engine(), trace)
    assert run_with_retries(engine, PRESSING) == (exact, 0)
    lines = next(seen) - 1
    assert lines > 5_000
    for line in range(1 + part * 97, lines, 397):
        trace, _ = interrupt_at(line)
        engine = trace_steps(PRESSED.make_engine(), trace)
        texts, raised = run_with_retries(engine, PRESSING)
        assert raised == 1, f"line {line}"
        assert texts == exact, f"line {line}"


def step_with_ctrl_c_in_update(engine):
    update = engine.scheduler.update

    def pressed(*given):
        signal.raise_signal(signal.SIGINT)
        return update(*given)

    engine.scheduler.update = pressed
    with pytest.raises(KeyboardInterrupt):
        engine.step()


def test_ctrl_c_while_tokens_are_taken_keeps_them_for_the_next_call():
    engine = Setup().make_engine()
    engine.add_request([1, 2, 3], 1, request_id="a")
    step_with_ctrl_c_in_update(engine)
    assert not engine.scheduler.has_unfinished
    assert engine.has_unfinished, "there is something to be told"
    (output,) = engine.step()
    assert (output.token_id, output.finished) == (
        greedy([1, 2, 3], 1)[0],
        True,
    )
    assert not engine.has_unfinished


def test_who_aborts_is_told_no_kept_token():
    engine = Setup().make_engine()
    engine.add_request([1, 2, 3], 3, request_id="a")
    step_with_ctrl_c_in_update(engine)
    engine.abort("a")
    assert not engine.has_unfinished


def test_ctrl_c_in_generate_aborts_its_requests_and_is_raised(monkeypatch):
    """At every release of memory, once: also while they are aborted."""
    for at in (1, 2):
        engine = Setup().make_engine(
            Interrupted(2, KeyboardInterrupt(), False)
        )
        release, left = engine.scheduler.memory.release, [at]

        def pressed(name, release=release, left=left):
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGINT)
            release(name)

        monkeypatch.setattr(engine.scheduler.memory, "release", pressed)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[1, 2, 3], [4]], 3)
        assert not engine.has_unfinished
        assert_whole(engine)
        assert engine.generate([[1]], 2) == [greedy([1], 2)]


@pytest.mark.parametrize("calls", [1, 3])
def test_an_interrupt_that_compiled_code_reports_is_an_interrupt(calls):
    """Python makes it a SystemError when a function in C returns."""
    error = KeyboardInterrupt()
    for _ in range(calls):
        inner = error
        error = SystemError("returned a result with an exception set")
        error.__cause__ = inner
    engine = Setup().make_engine(Interrupted(1, error, False))
    engine.add_request([1, 2], 2, request_id="a")
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    result = Run(engine)
    finish(result)
    assert result.texts == {("a", 0): (greedy([1, 2], 2), "length")}


def test_ctrl_c_in_another_thread_is_left_alone():
    engine = Setup().make_engine()
    with ThreadPoolExecutor(1) as pool:
        texts = pool.submit(engine.generate, [[1, 2]], 3).result()
    assert texts == [greedy([1, 2], 3)]


def test_a_program_that_ignores_ctrl_c_is_left_to_it():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert Setup().make_engine().generate([[1]], 2) == [greedy([1], 2)]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# --- While generate runs ---------------------------------------------------


def test_no_request_comes_while_generate_runs():
    engine = Setup().make_engine()
    engine.on_batch = lambda _: engine.add_request([3], 2, request_id="x")
    with pytest.raises(RuntimeError, match="'x' comes while generate"):
        engine.generate([[1, 2]], 4)
    engine.on_batch = None
    assert not engine.has_unfinished
    assert engine.generate([[1, 2]], 4) == [greedy([1, 2], 4)]
    assert engine.add_request([3], 2, request_id="x") == "x"


# --- Abort -----------------------------------------------------------------


def test_an_unknown_id_cannot_be_aborted():
    engine = Setup().make_engine()
    engine.add_request([1], 2, request_id="a")
    before = state_of(engine)
    with pytest.raises(KeyError, match="'b' was never added"):
        engine.abort("b")
    assert state_of(engine) == before


@pytest.mark.parametrize("setup", [Setup(), PRESSED, Setup(contiguous=True)])
def test_abort_after_any_number_of_steps_concerns_nobody_else(setup):
    exact = run(Setup(), PRESSING).texts
    steps = len(run(setup, PRESSING).batches)
    seen = set()
    for victim in "abc":
        for moment in range(1, steps):
            engine = setup.make_engine()
            for request in PRESSING.requests:
                engine.add(request)
            result = Run(engine)
            for _ in range(moment):
                if engine.has_unfinished:
                    take_step(result)
            before = result.texts
            state = engine.scheduler._states.get(victim)
            seen.add(Status.FINISHED if state is None else state.status)
            for _ in range(2):  # idempotent
                engine.abort(victim)
                engine.scheduler.assert_consistent()
            finish(result)
            assert_whole(engine)
            for key, text in result.texts.items():
                if key[0] == victim:
                    assert text == before[key]
                else:
                    assert text == exact[key]
    assert {Status.RUNNING, Status.FINISHED} <= seen


def abort_once(engine, name):
    def abort(*_):
        engine.abort(name)

    return abort


def test_an_abort_by_the_observer_of_a_batch_concerns_nobody_else():
    for step in range(3):
        engine = Setup().make_engine()
        engine.add_request([1, 2, 3], 4, request_id="a", num_samples=2)
        engine.add_request([4, 5], 4, request_id="b")
        result = Run(engine)
        for _ in range(step):
            take_step(result)
        engine.on_batch = abort_once(engine, "a")
        outputs = finish(result)
        assert_whole(engine)
        tokens = [o.token_id for o in outputs if o.request_id == "b"]
        assert tokens == greedy([4, 5], 4)
        assert sum(o.request_id == "a" for o in outputs) == 2 * step


@pytest.mark.parametrize("spoil", [0.0, torch.nan])
def test_an_abort_while_the_model_runs_concerns_nobody_else(spoil):
    engine = Setup().make_engine()

    def abort(logits, token_ids):
        if engine.scheduler._states.get("a") is None:
            return logits
        engine.abort("a")
        logits = logits.clone()
        logits[0] += spoil
        return logits

    engine.model = Wrapped(abort)
    engine.add_request([1, 2, 3], 4, request_id="a")
    engine.add_request([4, 5], 4, request_id="b")
    outputs = finish(Run(engine))
    assert_whole(engine)
    assert [o.token_id for o in outputs] == greedy([4, 5], 4)
    assert {o.request_id for o in outputs} == {"b"}


# --- generate --------------------------------------------------------------


def test_generate_returns_a_text_for_each_prompt_in_order():
    engine = Setup(max_num_seqs=2).make_engine()
    texts = engine.generate(iter(PROMPTS), 4)
    assert texts == [greedy(prompt, 4) for prompt in PROMPTS]
    assert engine.generate([], 4) == []
    assert engine.generate([PROMPTS[0]] * 2, 2) == [greedy(PROMPTS[0], 2)] * 2
    assert_whole(engine)


def test_generate_asks_once_whether_a_request_is_admissible(monkeypatch):
    engine = Setup().make_engine()
    asked = counted_calls(monkeypatch, engine.scheduler.memory, "fits")
    suitable = counted_calls(monkeypatch, engine, "_require_suitable")
    engine.generate(PROMPTS, 1)
    assert len(asked) == len(suitable) == len(PROMPTS)


def test_generate_takes_the_options_of_a_request():
    engine = Setup().make_engine()
    options = {"temperature": 1.0, "seed": 4}
    assert engine.generate([[1, 2, 3]], 5, **options) == sampled(**options)
    stop = greedy([1, 2, 3], 1)
    texts = engine.generate([[1, 2, 3]], 5, stop_token_ids=stop)
    assert texts == [stop]


def test_generate_needs_an_engine_with_nothing_to_do():
    engine = Setup().make_engine()
    engine.add_request([1, 2], 3, request_id="a")
    before = state_of(engine)
    with pytest.raises(ValueError, match="an engine with nothing to do"):
        engine.generate([[1]], 3)
    assert state_of(engine) == before
    assert drain(engine)["a", 0] == (greedy([1, 2], 3), "length")


def test_generate_gives_one_sample_each():
    engine = Setup().make_engine()
    before = state_of(engine)
    with pytest.raises(ValueError, match="one sample each, not 2"):
        engine.generate([[1]], 3, num_samples=2)
    assert state_of(engine) == before


def broken_prompts():
    yield [1, 2]
    raise OSError("the file has ended")


@pytest.mark.parametrize(
    ("prompts", "error"),
    [
        ([[1, 2], [3], []], ValueError),
        ([[1, 2], [VOCAB]], ValueError),
        ([[1, 2], [1] * 99], ValueError),
        ([[1, 2], [1] * 19], ValueError),  # 21 tokens, 20 slots
        ([[1, 2], [1.5]], TypeError),
        (broken_prompts(), OSError),
    ],
)
def test_a_bad_prompt_leaves_nothing_of_the_others(prompts, error):
    engine = Setup(num_blocks=5).make_engine()
    before = state_of(engine)
    with pytest.raises(error):
        engine.generate(prompts, 3)
    assert state_of(engine) == before
    assert not engine.has_unfinished
    assert_whole(engine)
    assert engine.generate([[1, 2]], 3) == [greedy([1, 2], 3)]


# --- Corners ---------------------------------------------------------------


def test_an_iterator_of_stop_tokens_stops_every_prompt():
    prompts = [[1, 2, 3], [4, 5], [6]]
    texts = Setup().make_engine().generate(prompts, 8)
    stop = texts[1][2]
    expected = [t[: t.index(stop) + 1] if stop in t else t for t in texts]
    engine = Setup().make_engine()
    assert engine.generate(prompts, 8, stop_token_ids=iter([stop])) == expected
    assert len(expected[1]) < 8


def test_nan_for_all_samples_of_one_request_concerns_nobody_else():
    def spoil(logits, token_ids):
        logits = logits.clone()
        logits[0] = torch.nan
        return logits

    engine = Setup().make_engine(Wrapped(spoil))
    engine.add_request([1, 2], 3, request_id="a", num_samples=3)
    engine.add_request([4, 5], 1, request_id="b")
    outputs = engine.step()
    failed = [o.sample for o in outputs if o.reason == "error"]
    assert failed == [0, 1, 2]
    assert [o.token_id for o in outputs if o.request_id == "b"] == greedy(
        [4, 5], 1
    )
    assert_whole(engine)


def test_an_interrupt_while_blocks_are_copied_loses_no_copy(monkeypatch):
    request = Request("a", [1, 2, 3, 4, 5, 6], 5, num_samples=2, temperature=1)
    exact = run(Setup(), Workload([request], [0])).texts
    engine = Setup().make_engine()
    engine.add(request)
    copy_blocks, interrupts = engine.kv_cache.copy_blocks, [1]

    def interrupted(pairs):
        if interrupts:
            interrupts.pop()
            raise KeyboardInterrupt
        copy_blocks(pairs)

    monkeypatch.setattr(engine.kv_cache, "copy_blocks", interrupted)
    result = Run(engine)
    take_step(result)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    finish(result)
    assert result.texts == exact
    assert not interrupts


def test_a_table_with_too_few_blocks_is_an_error():
    """A narrower table would hide the missing block."""
    engine = Setup(block_size=4, num_blocks=8).make_engine()
    nothing = torch.empty(0, dtype=torch.int64)
    for block_ids, seq_lens in (([[1]], [8]), ([[1, 2], [3]], [8, 8])):
        inputs = StepInputs(
            nothing, nothing, nothing, block_ids, seq_lens, [], []
        )
        with pytest.raises(ValueError, match=r"reshape|inhomogeneous"):
            engine._block_tables(inputs)
