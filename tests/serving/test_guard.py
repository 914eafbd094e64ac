"""One thread at a time, and no step within a step: engine and simulator."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread

import pytest
from cases.serving import Run, Setup, finish, small_model

from llm_systems_cookbook.serving import Request, Simulator
from llm_systems_cookbook.serving.guard import Guard

pytestmark = pytest.mark.usefixtures("one_thread")

A, B = Request("a", [1, 2, 3], 3), Request("b", [4, 5], 2)


def simulator():
    return Simulator(Setup().make_scheduler())


def engine():
    return Setup().make_engine()


def state_of(driver):
    scheduler = driver.scheduler
    return (
        list(scheduler._states),
        scheduler.memory.usage(),
        vars(scheduler.counts).copy(),
        set(getattr(driver, "_known", ())),
        list(getattr(driver, "_ready", ())),
    )


CALLS = {
    "add": lambda driver: driver.add(B),
    "step": lambda driver: driver.step(),
    "add_request": lambda driver: driver.add_request([1], 2),
    "abort": lambda driver: driver.abort("a"),
    "generate": lambda driver: driver.generate([[1, 2]], 2),
}


def elsewhere(function, *arguments):
    """Call a function in another thread; return or raise what it does."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()


def refused(function, *arguments):
    """Return what a call is told that is refused."""
    with pytest.raises(RuntimeError) as error:
        function(*arguments)
    return str(error.value)


def finish_any(driver):
    outputs = []
    while driver.has_unfinished:
        outputs += driver.step()
    return outputs


@pytest.mark.parametrize(
    ("make", "name"),
    [(engine, name) for name in CALLS]
    + [(simulator, "add"), (simulator, "step")],
)
def test_a_call_from_a_second_thread_during_a_step_is_refused(make, name):
    driver, told = make(), []

    def look(_):
        before = state_of(driver)
        told.append(refused(elsewhere, CALLS[name], driver))
        assert state_of(driver) == before

    driver.on_batch = look
    driver.add(A)
    outputs = finish_any(driver)
    assert [o.request_id for o in outputs] == ["a"] * 3
    assert len(told) == 3
    assert all("serve from one thread" in message for message in told)


def test_a_call_from_a_second_thread_while_generate_runs_is_refused():
    """Also between two of its steps; and generate returns all the same."""
    driver = engine()
    driver.on_batch = lambda _: refused(elsewhere, driver.add, B)
    alone = engine().generate([[1, 2, 3]], 4)
    assert elsewhere(driver.generate, [[1, 2, 3]], 4) == alone
    assert driver.scheduler.counts.finished == 1


@pytest.mark.parametrize("make", [engine, simulator])
def test_threads_may_take_turns(make):
    driver = make()
    elsewhere(driver.add, A)
    driver.step()
    elsewhere(driver.add, B)
    outputs = [*elsewhere(driver.step), *finish_any(driver)]
    assert [o.request_id for o in outputs] == ["a", "b", "a", "b"]


def test_the_observer_and_the_model_may_add_and_abort():
    class Aborting:
        def __getattr__(self, name):
            return getattr(small_model(), name)

        def __call__(self, *arguments):
            if "b" in driver._known:
                driver.abort("a")
            return small_model()(*arguments)

    driver, pending = Setup().make_engine(Aborting()), [B]
    driver.add(A)
    driver.step()

    def add(_):
        if pending:
            driver.add(pending.pop())

    driver.on_batch = add
    outputs = finish(Run(driver))
    assert [o.request_id for o in outputs] == ["b", "b"]


@pytest.mark.parametrize("make", [engine, simulator])
def test_a_step_within_a_step_is_refused(make):
    driver = make()
    told = []
    driver.on_batch = lambda _: told.append(refused(driver.step))
    driver.add(A)
    assert len(finish_any(driver)) == 3
    assert told == ["a step is running already"] * 3


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_call_that_raises_leaves_the_guard_open(error):
    guard = Guard()

    def fail():
        raise error

    def step(function):
        return guard.call(guard.step, function)

    for call in (guard.call, step):
        for _ in range(2):
            with pytest.raises(error):
                call(fail)
        with pytest.raises(error):
            elsewhere(call, fail)
    assert step(lambda: guard.call(int, "7")) == 7


def test_of_many_threads_at_once_one_is_served():
    guard, go, done = Guard(), Event(), Event()
    served, turned_away = [], []

    def work():
        go.wait()
        try:
            guard.call(lambda: (served.append(1), done.wait(10)))
        except RuntimeError:
            turned_away.append(1)
        if len(turned_away) == 7:
            done.set()

    threads = [Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join()
    assert (len(served), len(turned_away)) == (1, 7)
