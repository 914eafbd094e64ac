"""What a scheduler and an engine must do: each check raises where they don't.

Small enough to be run on every faulty version: see test_serving_faults.py.
"""

import random
from collections.abc import Callable
from dataclasses import asdict, replace

from cases.serving import (
    CONFIG,
    MAX_STEPS,
    Run,
    Setup,
    Workload,
    assert_whole,
    finish,
    random_workload,
    run,
    smallest_pool,
    take_step,
)

from llm_systems_cookbook.serving import Request, Simulator

SEEDS = range(24)
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def requests(*lengths: tuple[int, int], **options: object) -> list[Request]:
    """Return requests "a", "b", … of (prompt, output) tokens."""
    return [
        Request(
            chr(ord("a") + i),
            [(7 * i + j) % CONFIG.vocab_size for j in range(prompt)],
            output,
            **options,
        )
        for i, (prompt, output) in enumerate(lengths)
    ]


def together(*lengths: tuple[int, int], **options: object) -> Workload:
    asked = requests(*lengths, **options)
    return Workload(asked, [0] * len(asked))


def assert_same_texts(
    setup_for: Callable[[int, Workload], Setup], **kind: object
) -> None:
    for seed in SEEDS:
        workload = random_workload(seed, **kind)
        plain = run(Setup(contiguous=True), workload).texts
        assert run(setup_for(seed, workload), workload).texts == plain, seed


@check
def paged_is_contiguous() -> None:
    assert_same_texts(lambda seed, _: Setup())


@check
def preempted_is_unpreempted() -> None:
    assert_same_texts(
        lambda seed, w: Setup(num_blocks=smallest_pool(w, 4)), tight=True
    )


@check
def swapped_is_recomputed() -> None:
    assert_same_texts(
        lambda seed, w: Setup(
            num_blocks=smallest_pool(w, 4), host_blocks=64, preemption="swap"
        ),
        tight=True,
    )


@check
def chunked_is_unchunked() -> None:
    assert_same_texts(
        lambda seed, _: Setup(max_num_batched_tokens=1 + seed % 5)
    )


@check
def forked_is_independent() -> None:
    assert_same_texts(lambda seed, _: Setup(), samples=3)


@check
def forked_under_pressure_is_independent() -> None:
    def tight(seed: int, workload: Workload) -> Setup:
        return Setup(
            num_blocks=smallest_pool(workload, 4),
            host_blocks=[0, 60][seed % 2],
            preemption=["recompute", "swap"][seed % 2],
            max_num_batched_tokens=[1024, 5][seed // 2 % 2],
        )

    assert_same_texts(tight, samples=3, tight=True)


@check
def batched_is_one_at_a_time() -> None:
    for seed in SEEDS:
        workload = random_workload(seed)
        texts = run(Setup(), workload).texts
        for request in workload.requests:
            alone = run(Setup(), Workload([request], [0])).texts
            key = request.request_id, 0
            assert alone[key] == texts[key], seed


@check
def a_request_that_just_fits_is_served() -> None:
    """5 + 4 - 1 = 8 tokens: two blocks of 4, and not one more."""
    for setup, options in (
        (Setup(num_blocks=2), {}),
        # Two samples: one full block shared, one more each.
        (Setup(num_blocks=3), {"num_samples": 2}),
    ):
        result = run(setup, together((5, 4), **options))
        for tokens, reason in result.texts.values():
            assert (len(tokens), reason) == (4, "length")


@check
def a_request_that_never_fits_is_refused_and_blocks_nobody() -> None:
    engine = Setup(num_blocks=2).make_engine()
    for lengths in ((5, 5), (9, 1)):
        message = "accepted"
        try:
            engine.add(requests(lengths)[0])
        except ValueError as error:
            message = str(error)
        assert "can never fit in 8 slots" in message
    engine.add(Request("small", [1, 2], 3))
    result = Run(engine)
    finish(result)
    assert len(result.texts["small", 0][0]) == 3
    assert_whole(engine)


@check
def running_requests_ignore_the_watermark() -> None:
    """Half the pool is kept free at admission, and then grown into."""
    result = run(Setup(num_blocks=8, watermark=0.5), together((4, 24)))
    assert result.engine.scheduler.counts.preemptions == 0
    both = run(Setup(num_blocks=8, watermark=0.5), together((4, 9), (4, 9)))
    assert both.engine.scheduler.counts.preemptions == 0
    assert [len(batch.admitted) for batch in both.batches][:1] == [2]


@check
def admission_leaves_the_watermark() -> None:
    """Of 8 blocks, 4 stay free: the second prompt of 4 blocks must wait."""
    setup = Setup(num_blocks=8, watermark=0.5)
    result = run(setup, together((16, 2), (16, 2)))
    assert [len(batch.admitted) for batch in result.batches] == [1, 0, 1, 0]
    without = run(replace(setup, watermark=0.0), together((16, 1), (16, 1)))
    assert [len(batch.admitted) for batch in without.batches] == [2]


@check
def what_admission_promises_is_taken() -> None:
    """A prompt of 3 chunks holds its 3 blocks from its first chunk on."""
    engine = Setup(num_blocks=4, max_num_batched_tokens=6).make_engine()
    for request in requests((12, 2), (5, 1)):
        engine.add(request)
    take_step(Run(engine))
    memory = engine.scheduler.memory
    assert memory.length(("a", 0)) == 12
    assert [e.request.request_id for e in engine.last_batch.entries] == ["a"]
    assert engine.scheduler.usage().token_states == 6
    take_step(Run(engine))
    assert memory.request_ids == {("a", 0)}, "the last block is not enough"


@check
def finished_requests_leave() -> None:
    result = run(Setup(), together((3, 2), (3, 5), (2, 1)))
    counts = asdict(result.engine.scheduler.counts)
    assert counts.pop("finished") == 3
    assert set(counts.values()) == {0}
    assert sum(len(t) for t, _ in result.texts.values()) == 8


@check
def samples_compute_their_prompt_once() -> None:
    """12 tokens of the prompt, and two of each sample's three outputs."""
    for budget in (1024, 5):
        setup = Setup(max_num_batched_tokens=budget)
        result = run(setup, together((12, 3), num_samples=3))
        computed = sum(batch.num_tokens for batch in result.batches)
        assert computed == 12 + 3 * 2
        assert max(result.used_blocks) == (3 + 3) * 4


def abort_after(
    setup: Setup, workload: Workload, name: str, ready: Callable[[Run], bool]
) -> None:
    """Abort a request once it is where it should be; serve the others."""
    plain = run(Setup(contiguous=True), workload).texts
    engine = setup.make_engine()
    result = Run(engine)
    for request in workload.requests:
        engine.add(request)
    for _ in range(100):
        if ready(result):
            break
        take_step(result)
    assert ready(result), "the case is met"
    for _ in range(2):  # the second time does nothing
        engine.abort(name)
        engine.scheduler.assert_consistent()
    assert engine.scheduler.counts.aborted == 1
    told = len(result.outputs)
    finish(result)
    assert_whole(engine)
    assert name not in {o.request_id for o in result.outputs[told:]}
    for (other, sample), text in plain.items():
        if other != name:
            assert result.texts[other, sample] == text


@check
def abort_while_queued_leaves_nothing() -> None:
    abort_after(
        Setup(max_num_seqs=1),
        together((4, 3), (5, 3), (6, 2)),
        "b",
        lambda r: r.engine.last_batch is not None,
    )


def computed(result: Run, name: str) -> int:
    return result.engine.scheduler.state(name).unfinished[0].num_computed


@check
def abort_in_the_middle_of_a_prompt_leaves_nothing() -> None:
    abort_after(
        Setup(max_num_batched_tokens=4),
        together((3, 6), (16, 3)),
        "b",
        lambda r: 0 < computed(r, "b") < 16,
    )


@check
def abort_while_preempted_leaves_nothing() -> None:
    for preemption in ("recompute", "swap"):
        abort_after(
            Setup(num_blocks=5, host_blocks=8, preemption=preemption),
            together((7, 9), (7, 9)),
            "b",
            lambda r: any(b.preempted for b in r.batches),
        )


@check
def abort_of_forked_samples_leaves_nothing() -> None:
    abort_after(
        Setup(),
        together((6, 8), (5, 4), num_samples=3),
        "a",
        lambda r: r.copies > 2,
    )


@check
def preempted_requests_resume_before_new_ones() -> None:
    """A new request that would fit waits behind one that does not."""
    workload = together((7, 9), (7, 9), (1, 2))
    workload.steps[2] = 4  # after the preemption at the third step
    result = run(Setup(num_blocks=5), workload)
    order = [
        request.request_id
        for batch in result.batches
        for request in [*batch.resumed, *batch.admitted]
    ]
    assert order == ["a", "b", "b", "c"]


@check
def simulator_is_the_engine() -> None:
    for seed in SEEDS:
        assert_simulator_agrees(seed)


def assert_simulator_agrees(seed: int) -> Run:
    """Compare every step: who, which tokens, which blocks."""
    rng = random.Random(seed)
    samples, tight = rng.choice([1, 1, 3]), rng.random() < 0.85
    workload = random_workload(seed, samples=samples, tight=tight)
    if samples > 1:  # a simulator has one length for all samples
        asked = [replace(r, stop_token_ids=()) for r in workload.requests]
        workload = Workload(asked, workload.steps)
    setup = Setup(
        num_blocks=smallest_pool(workload, 4) + rng.randint(0, 1),
        host_blocks=rng.choice([0, 4, 64, 64]),
        preemption=rng.choice(["recompute", "swap", "swap"]),
        max_num_batched_tokens=rng.choice([1024, 1024, 6]),
        watermark=rng.choice([0.0, 0.1]),
    )
    engine = run(setup, workload)
    told = workload.with_output_len(engine.texts)
    simulator = Simulator(setup.make_scheduler())
    simulated: list[tuple] = []
    arrivals = list(told.in_order())
    for step in range(MAX_STEPS):
        while arrivals and arrivals[0][0] <= step:
            simulator.add(arrivals.pop(0)[1])
        if simulator.has_unfinished:
            simulator.step()
            usage = simulator.scheduler.memory.usage()
            used = simulator.scheduler.memory.capacity - usage.external
            simulated.append(summary(simulator.last_batch, used))
    expected = [
        summary(batch, used)
        for batch, used in zip(engine.batches, engine.used_blocks, strict=True)
    ]
    assert simulated == expected, seed
    return engine


def summary(batch: object, used_slots: int) -> tuple:
    """Return what two runs of a workload must agree on, step for step."""
    return (
        [
            (e.request.request_id, e.sample.index, e.start, e.num_tokens)
            for e in batch.entries
        ],
        [[r.request_id for r in rs] for rs in (
            batch.admitted, batch.resumed, batch.preempted
        )],
        [batch.copies, batch.swap_in, batch.swap_out],
        used_slots,
    )  # fmt: skip


@check
def tokens_are_told_once_and_in_order() -> None:
    """The stream of a preempted request repeats nothing."""
    for seed in SEEDS:
        workload = random_workload(seed, tight=True)
        pool = smallest_pool(workload, 4)
        result = run(Setup(num_blocks=pool), workload)
        for request in workload.requests:
            tokens, reason = result.texts[request.request_id, 0]
            assert len(tokens) <= request.max_new_tokens
            ends = [
                o.finished
                for o in result.outputs
                if o.request_id == request.request_id
            ]
            assert ends == [False] * (len(tokens) - 1) + [True]
            assert reason is not None
