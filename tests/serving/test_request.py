"""A request refuses what cannot be meant; a sample knows its tokens."""

import copy
import math
import pickle
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch

from llm_systems_cookbook.serving import Request, TokenOutput
from llm_systems_cookbook.serving.request import RequestState, Sample

# --- A request -------------------------------------------------------------


def test_a_request_needs_a_prompt_and_a_length_and_has_plain_defaults():
    request = Request("a", [5, 6], 3)
    assert request.prompt_token_ids == (5, 6)
    assert request.max_new_tokens == 3
    assert (request.arrival, request.output_len) == (0.0, None)
    assert (request.num_samples, request.temperature) == (1, 0.0)
    assert (request.seed, request.stop_token_ids) == (0, frozenset())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_token_ids": []}, "request 'a': empty prompt"),
        ({"prompt_token_ids": range(0)}, "request 'a': empty prompt"),
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1, got 0"),
        ({"max_new_tokens": -3}, "max_new_tokens must be >= 1, got -3"),
        ({"num_samples": 0}, "num_samples must be >= 1, got 0"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
        ({"arrival": -0.5}, "arrival must be finite, >= 0, got -0.5"),
        ({"arrival": math.inf}, "arrival must be finite, >= 0, got inf"),
        ({"arrival": math.nan}, "arrival must be finite, >= 0, got nan"),
        ({"temperature": -1}, r"temperature must be finite, >= 0, got -1\.0"),
        ({"temperature": math.inf}, "temperature must be finite.*got inf"),
        ({"temperature": math.nan}, "temperature must be finite.*got nan"),
        ({"output_len": 0}, "output_len must be >= 1, got 0"),
        ({"output_len": 5}, "output_len 5 is above max_new_tokens 4"),
    ],
)
def test_a_value_outside_its_limit_is_refused_and_named(change, message):
    arguments = {
        "request_id": "a",
        "prompt_token_ids": [1, 2],
        "max_new_tokens": 4,
    }
    Request(**arguments)
    with pytest.raises(ValueError, match=message):
        Request(**arguments | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 2.0}, "max_new_tokens must be an integer"),
        ({"num_samples": 1.5}, "num_samples must be an integer, got 1.5"),
        ({"seed": "one"}, "seed must be an integer, got 'one'"),
        ({"seed": None}, "seed must be an integer, got None"),
        ({"output_len": 1.0}, "output_len must be an integer, got 1.0"),
        (
            {"prompt_token_ids": [1, 2.5]},
            "prompt_token_ids must be integers, got 2.5",
        ),
        (
            {"prompt_token_ids": "text"},
            "prompt_token_ids must be integers, got 't'",
        ),
        ({"prompt_token_ids": {1, 2}}, "must be in order, got a set"),
        ({"prompt_token_ids": {1: 2}}, "must be in order, got a dict"),
        ({"prompt_token_ids": 7}, "must be a list of tokens, got 7"),
        ({"stop_token_ids": [None]}, "stop_token_ids must be integers, got N"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a list of tokens"),
        ({"stop_token_ids": None}, "must be a list of tokens, got None"),
        ({"arrival": "3"}, "arrival must be a number, got '3'"),
        ({"temperature": None}, "temperature must be a number, got None"),
        ({"request_id": []}, "unhashable"),
    ],
)
def test_what_is_no_integer_is_a_type_error(change, message):
    arguments = {
        "request_id": "a",
        "prompt_token_ids": [1, 2],
        "max_new_tokens": 4,
    }
    with pytest.raises(TypeError, match=message):
        Request(**arguments | change)


def test_numpy_integers_become_plain_ones():
    request = Request(
        "a",
        np.arange(3),
        np.int16(4),
        num_samples=np.uint8(2),
        output_len=np.int32(3),
        stop_token_ids=np.array([1]),
        seed=np.int64(9),
    )
    values = [
        *request.prompt_token_ids,
        *request.stop_token_ids,
        request.max_new_tokens,
        request.num_samples,
        request.output_len,
        request.seed,
    ]
    assert {type(value) for value in values} == {int}
    # Narrow integers would overflow here.
    long = Request("b", range(200), np.uint8(200))
    assert long.max_tokens == 399


def test_a_range_stays_a_range_so_a_simulated_prompt_takes_no_memory():
    request = Request("a", range(10**12), 4)
    assert request.prompt_token_ids == range(10**12)
    assert request.num_prompt_tokens == 10**12


def test_a_request_keeps_its_own_copy_of_the_prompt_and_never_changes():
    prompt, stops = [1, 2], [7]
    request = Request("a", prompt, 4, stop_token_ids=stops)
    prompt.append(3)
    stops.append(8)
    assert request.prompt_token_ids == (1, 2)
    assert request.stop_token_ids == {7}
    with pytest.raises(FrozenInstanceError):
        request.max_new_tokens = 5
    assert request.max_new_tokens == 4


def test_requests_can_be_hashed_copied_and_pickled():
    request = Request("a", [1, 2], 4, stop_token_ids=[3], temperature=0.5)
    for twin in (copy.copy(request), pickle.loads(pickle.dumps(request))):
        assert twin == request
        assert hash(twin) == hash(request)
    assert request != Request("b", [1, 2], 4, stop_token_ids=[3])


@pytest.mark.parametrize(
    ("prompt", "max_new", "output", "longest", "final"),
    [
        (1, 1, None, 1, 1),  # the last sampled token is never written
        (5, 1, None, 5, 5),
        (5, 4, None, 8, 8),
        (5, 4, 4, 8, 8),
        (5, 4, 1, 8, 5),
        (5, 4, 2, 8, 6),
    ],
)
def test_the_last_sampled_token_is_not_counted(
    prompt, max_new, output, longest, final
):
    request = Request("a", range(prompt), max_new, output_len=output)
    assert request.max_tokens == longest
    assert request.final_tokens == final


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_a_prompt_of_more_dimensions_is_refused(kind):
    assert Request("a", kind([1, 2]), 1).prompt_token_ids == (1, 2)
    with pytest.raises(ValueError, match=r"one sequence, got \[2, 1\]"):
        Request("a", kind([[1], [2]]), 1)


# --- A sample --------------------------------------------------------------


def test_a_sample_reads_its_prompt_and_output_as_one_text():
    sample = Sample(Request("a", [10, 11, 12], 5), 2)
    assert sample.sequence_id == ("a", 2)
    for token in (20, 21, 22):
        sample.take(token)
    text = [10, 11, 12, 20, 21, 22]
    assert sample.num_tokens == 6
    for start in range(7):
        for end in range(start, 7):
            assert sample.token_ids(start, end) == text[start:end]


@pytest.mark.parametrize("span", [(-1, 2), (2, 1), (0, 4), (4, 4)])
def test_positions_outside_the_text_are_refused(span):
    sample = Sample(Request("a", [10, 11], 5), 0)
    sample.take(20)
    start, end = span
    message = rf"positions {start} to {end} are outside \[0, 3\]"
    with pytest.raises(IndexError, match=message):
        sample.token_ids(*span)


def test_a_sample_ends_at_its_length():
    sample = Sample(Request("a", [1], 3), 1)
    assert sample.take(4) == TokenOutput("a", 4, False, None, 1)
    assert sample.take(5) == TokenOutput("a", 5, False, None, 1)
    assert sample.reason is None
    assert sample.take(6) == TokenOutput("a", 6, True, "length", 1)
    assert sample.reason == "length"
    assert sample.output_token_ids == [4, 5, 6]


def test_a_known_output_length_ends_before_the_most_tokens():
    sample = Sample(Request("a", [1], 9, output_len=2), 0)
    assert not sample.take(0).finished
    assert sample.take(0) == TokenOutput("a", 0, True, "length", 0)


def test_a_stop_token_is_output_and_wins_over_the_length():
    request = Request("a", [1, 7], 2, stop_token_ids=[7, 8])
    sample = Sample(request, 0)
    assert not sample.take(5).finished  # 7 in the prompt stops nothing
    assert sample.take(8) == TokenOutput("a", 8, True, "stop", 0)
    assert sample.output_token_ids == [5, 8]


def test_until_its_fork_one_sample_computes_the_prompt_for_all():
    state = RequestState(Request("a", [1, 2, 3], 4, num_samples=3))
    assert [sample.index for sample in state.unfinished] == [0, 1, 2]
    assert [sample.index for sample in state.with_tables] == [0]
    state.unfinished[0].take(9)
    assert state.target(state.unfinished[0]) == 3
    state.forked = True
    assert [sample.index for sample in state.with_tables] == [0, 1, 2]
    assert state.target(state.unfinished[0]) == 4
