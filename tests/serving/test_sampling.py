"""A draw follows the softmax, and depends on what it should alone."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from llm_systems_cookbook.serving import Request
from llm_systems_cookbook.serving.sampling import draw_token, unusable

LOGITS = torch.tensor([0.0, 1.5, -1.0, 0.7, 3.0, -2.0], dtype=torch.float64)


def request(temperature=1.0, **options):
    return Request("a", [1, 2], 4, temperature=temperature, **options)


def draws(logits, given, sample=0, count=4000):
    return Counter(
        draw_token(logits, given, sample, position)
        for position in range(count)
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
@pytest.mark.parametrize(("seed", "sample"), [(0, 0), (77, 3)])
def test_draws_follow_the_softmax(temperature, seed, sample):
    """Pearson's statistic of 4,000 draws, far out in its distribution."""
    count = 4000
    seen = draws(LOGITS, request(temperature, seed=seed), sample, count)
    weights = (LOGITS / temperature).softmax(0).tolist()
    statistic = sum(
        (seen[token] - count * p) ** 2 / (count * p)
        for token, p in enumerate(weights)
    )
    assert statistic < 20.5, "above that in one case of 1,000"


@pytest.mark.parametrize("temperature", [0.5, 2.5])
def test_another_temperature_would_be_noticed(temperature):
    seen = draws(LOGITS, request(1.0))
    wrong = (LOGITS / temperature).softmax(0).tolist()
    statistic = sum(
        (seen[token] - 4000 * p) ** 2 / (4000 * p)
        for token, p in enumerate(wrong)
    )
    assert statistic > 200


def test_a_draw_is_the_same_again():
    first = [draw_token(LOGITS, request(seed=5), 1, p) for p in range(50)]
    again = [draw_token(LOGITS, request(seed=5), 1, p) for p in range(50)]
    assert first == again
    assert len(set(first)) > 2


def test_a_draw_depends_on_seed_sample_and_position():
    def text(seed=5, sample=0, shift=0):
        given = request(seed=seed)
        return [
            draw_token(LOGITS, given, sample, p + shift) for p in range(60)
        ]

    texts = [text(), text(seed=6), text(sample=1), text(shift=1000)]
    assert len({tuple(t) for t in texts}) == 4
    # Neighbours are not one stream, shifted.
    assert text(sample=1)[1:] != text()[:-1]


def test_a_draw_depends_on_nothing_else_of_the_request():
    given = request(seed=5)
    others = [
        replace(given, request_id="b"),
        replace(given, prompt_token_ids=(9,) * 7, max_new_tokens=99),
        replace(given, arrival=3.5, num_samples=4, stop_token_ids=[1]),
    ]
    for position in range(40):
        token = draw_token(LOGITS, given, 1, position)
        for other in others:
            assert draw_token(LOGITS, other, 1, position) == token


def test_adding_to_all_logits_changes_nothing():
    given = request(seed=3)
    for shift in (-4.0, 8.0, 1024.0):
        for position in range(40):
            assert draw_token(LOGITS + shift, given, 0, position) == (
                draw_token(LOGITS, given, 0, position)
            )


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_a_tiny_temperature_takes_the_likeliest(temperature):
    assert draws(LOGITS, request(temperature), count=300) == {4: 300}


def test_a_tiny_temperature_draws_between_equals():
    logits = torch.tensor([2.0, -1.0, 2.0])
    seen = draws(logits, request(1e-300), count=300)
    assert seen[1] == 0
    assert min(seen[0], seen[2]) > 100


def test_a_huge_temperature_draws_any_token_alike():
    seen = draws(LOGITS, request(1e300), count=3000)
    assert min(seen[token] for token in range(6)) > 400


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.full((9,), -torch.inf)
    logits[4], logits[6] = 1.0, 1.0
    seen = draws(logits, request(3.0), count=1000)
    assert set(seen) == {4, 6}
    # So small that its weight is 0 in float64.
    assert set(draws(torch.tensor([-900.0, 0.0]), request())) == {1}


class Extreme:
    """A generator that draws one number."""

    def __init__(self, number):
        self.number = number

    def random(self):
        return self.number


@pytest.mark.parametrize("number", [0.0, math.nextafter(1.0, 0.0)])
def test_the_smallest_and_the_largest_draw_are_tokens(number, monkeypatch):
    monkeypatch.setattr(
        "numpy.random.default_rng", lambda seed: Extreme(number)
    )
    for size in (1, 2, 7, 1000):
        logits = torch.full((size + 2,), -torch.inf)
        logits[1 : size + 1] = torch.linspace(0, 2, size)
        expected = 1 if number == 0.0 else size
        assert draw_token(logits, request(), 0, 0) == expected


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16]
)
def test_logits_of_any_dtype_are_drawn_from_in_float64(dtype):
    logits = LOGITS.to(dtype)
    for position in range(40):
        assert draw_token(logits, request(), 0, position) == draw_token(
            logits.double(), request(), 0, position
        )


def test_drawing_leaves_the_logits_and_torchs_generator_alone():
    logits, state = LOGITS.clone(), torch.get_rng_state()
    draw_token(logits, request(), 0, 0)
    assert torch.equal(logits, LOGITS)
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_without_a_largest_number_are_unusable():
    inf, nan = torch.inf, torch.nan
    rows = torch.tensor(
        [
            [0.0, 1.0, -5.0],
            [nan, 1.0, 2.0],
            [1.0, 2.0, nan],
            [inf, 1.0, 2.0],
            [inf, -inf, inf],
            [-inf, -inf, -inf],
            [-inf, 3.0, -inf],
            [inf, nan, 0.0],
        ]
    )
    expected = [False, True, True, True, True, True, False, True]
    for dtype in (torch.float64, torch.float32, torch.float16):
        assert unusable(rows.to(dtype)).tolist() == expected
    assert unusable(rows[:0]).tolist() == []
