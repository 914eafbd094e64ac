"""Four memories, one protocol: room, refusals, and where the slots are."""

import inspect
import random

import pytest

from llm_systems_cookbook import validate
from llm_systems_cookbook.memory import (
    BlockAllocator,
    FirstFitRegions,
    MemoryManager,
    PagedMemory,
    ReservedMemory,
    SharingMemory,
    Usage,
)


def paged(num_blocks=4, block_size=4):
    return PagedMemory(BlockAllocator(num_blocks, block_size))


def every_memory():
    return {
        "max": ReservedMemory(64, 16),
        "pow2": ReservedMemory(64, 16, "pow2"),
        "oracle": ReservedMemory(64, 16, "oracle"),
        "first_fit": ReservedMemory(64, 16, "oracle", FirstFitRegions),
        "paged": paged(16, 4),
    }


names = pytest.mark.parametrize("name", every_memory())


@names
def test_usage_adds_up_to_the_capacity_and_release_empties_it(name):
    memory = every_memory()[name]
    rng = random.Random(1)
    running, refused = {}, 0
    for step in range(2_000):
        if running and rng.random() < 0.5:
            request_id = rng.choice(sorted(running))
            held, final = running[request_id]
            if held == final:
                memory.release(request_id)
                del running[request_id]
            elif memory.grow(request_id):
                running[request_id] = held + 1, final
            else:
                refused += 1
        else:
            prompt = rng.randint(1, 12)
            final = rng.randint(prompt, 16)
            if memory.admit(step, prompt, final):
                running[step] = prompt, final
            else:
                refused += 1
        usage = memory.usage()
        assert sum(usage) == memory.capacity == 64
        assert min(usage) >= 0
        assert usage.token_states == sum(h for h, _ in running.values())
    assert refused > 100
    for request_id in running:
        memory.release(request_id)
    assert memory.usage() == Usage(0, 0, 0, 64)


@names
def test_refused_admission_changes_nothing(name):
    memory = every_memory()[name]
    admitted = 0
    while memory.admit(admitted, 12, 16):
        admitted += 1
    assert admitted == (5 if name == "paged" else 4)
    before = memory.usage()
    assert not memory.admit("late", 12, 16)
    assert memory.usage() == before
    with pytest.raises(KeyError, match="late"):
        memory.release("late")


@names
def test_ids_in_use_and_unknown_ids_are_refused(name):
    memory = every_memory()[name]
    memory.admit("a", 3, 9)
    before = memory.usage()
    with pytest.raises(ValueError, match="'a' is already in memory"):
        memory.admit("a", 3, 9)
    for call in (memory.grow, memory.release):
        with pytest.raises(KeyError, match="'b' is not in memory"):
            call("b")
    assert memory.usage() == before


@names
def test_lengths_out_of_order_are_refused(name):
    memory = every_memory()[name]
    for prompt, final in [(0, 4), (-1, 4), (5, 4)]:
        with pytest.raises(ValueError, match="must be >="):
            memory.admit("a", prompt, final)
    memory.admit("a", 3, 9)
    with pytest.raises(ValueError, match="must be >= 0, got -1"):
        memory.grow("a", -1)
    with pytest.raises(ValueError, match="num_tokens must be >= 1"):
        memory.fits(0)
    assert memory.usage().token_states == 3


@names
def test_growth_by_no_token_changes_nothing(name):
    memory = every_memory()[name]
    memory.admit("a", 4, 9)
    before = memory.usage()
    assert memory.grow("a", 0)
    assert memory.usage() == before


@names
@pytest.mark.parametrize("n", [1.0, 2.5, float("nan")])
def test_lengths_that_are_no_integers_are_refused(name, n):
    memory = every_memory()[name]
    memory.admit("a", 3, 9)
    before = memory.usage()
    for call in (
        lambda: memory.admit("b", n, 9),
        lambda: memory.admit("b", 1, n),
        lambda: memory.grow("a", n),
        lambda: memory.fits(n),
    ):
        with pytest.raises(TypeError, match=f"must be an integer, got {n}"):
            call()
    assert memory.usage() == before


def test_only_paged_memory_says_that_it_shares():
    assert paged().shares_blocks
    assert not ReservedMemory(8, 8).shares_blocks


def test_admission_checks_each_number_once(monkeypatch):
    checked, check = [], validate._count

    def counted(minimum, name, value):
        checked.append((name, value))
        return check(minimum, name, value)

    for memory in (paged(), ReservedMemory(32, 16, "pow2")):
        monkeypatch.setattr(validate, "_count", counted)
        checked.clear()
        assert memory.admit("a", 5, 9, keep_free=4)
        monkeypatch.undo()
        assert {("num_tokens", 5), ("final_tokens", 9)} <= set(checked)
        assert len(checked) == len(set(checked)), checked


def test_paged_memory_is_what_the_protocols_say():
    for protocol in (MemoryManager, SharingMemory):
        for name, method in vars(protocol).items():
            if inspect.isfunction(method) and not name.startswith("_"):
                told = inspect.signature(method)
                for memory in (PagedMemory, ReservedMemory):
                    if protocol is MemoryManager or memory.shares_blocks:
                        found = inspect.signature(getattr(memory, name))
                        assert found.parameters == told.parameters, name


def test_samples_that_share_nothing_need_a_region_each():
    memory = ReservedMemory(32, 8)
    assert memory.fits(8, samples=4, shared_tokens=8)
    assert not memory.fits(8, samples=5, shared_tokens=8)
    for call in (memory.fits, paged().fits):
        with pytest.raises(ValueError, match="samples must be >= 1, got 0"):
            call(8, 0)
        with pytest.raises(ValueError, match="shared_tokens must be >= 0"):
            call(8, 1, -1)
