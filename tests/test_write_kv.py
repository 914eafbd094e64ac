"""Keys and values go into their slots, on every backend, and nowhere else."""

import importlib.util
from collections.abc import Sequence

import pytest
import torch
from attention_cases import Case, build, inputs_of
from write_cases import WRITES, Write, write_problem

from llm_systems_cookbook.attention.cache_write import write_kv
from llm_systems_cookbook.attention.dispatch import attend
from llm_systems_cookbook.attention.inputs import FP8, checked_inputs
from llm_systems_cookbook.attention.reference import reference_attention

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed",
)
BACKENDS = ["cpu", pytest.param("triton", marks=needs_triton)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", WRITES, ids=str)
def test_every_token_lies_in_its_slot_and_nothing_else_changed(
    case: Write, backend: str
):
    assert write_problem(case, backend) == ""


def caches(
    dtype: torch.dtype = torch.float32, blocks: int = 3, size: int = 4
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = blocks, 2, size, 8
    return torch.zeros(shape).to(dtype), torch.zeros(shape).to(dtype)


def rows(
    count: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(count, 2, 8).to(dtype), torch.ones(count, 2, 8).to(dtype)


def refused(
    slots: Sequence[int], match: str, backend: str = "cpu", **options: object
) -> None:
    keys, values = caches()
    with pytest.raises(ValueError, match=match):
        write_kv(
            *rows(len(slots)),
            keys,
            values,
            torch.tensor(slots),
            backend=backend,
            **options,
        )
    assert not keys.any(), "nothing was written"
    assert not values.any(), "nothing was written"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [12, 13, -2, 2**40])
def test_a_slot_outside_the_cache_is_refused(bad: int, backend: str):
    refused(
        [0, bad], rf"slot_mapping\[1\] is {bad}, outside \[0, 12\)", backend
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slot_for_two_tokens_is_refused(backend: str):
    refused([3, -1, -1, 3], "slot 3 is given to two tokens", backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bad_slot_writes_nothing_where_nothing_was_validated(backend: str):
    keys, values = caches()
    slots = torch.tensor([12, -2, 5, 2**40])
    write_kv(*rows(4), keys, values, slots, validate=False, backend=backend)
    for cache in (keys, values):
        written = cache.any(dim=3).nonzero().tolist()
        assert written == [[1, 0, 1], [1, 1, 1]]


def test_shapes_that_do_not_fit_are_refused():
    keys, values = caches()
    key, value = rows(2)
    slots = torch.tensor([0, 1])
    for bad, match in (
        ((key[:1], value, keys, values, slots), "value must be"),
        ((key[:, :1], value, keys, values, slots), "key must be"),
        ((key, value[..., :4], keys, values, slots), "value must be"),
        ((key, value, keys, values, slots[:1]), "slot_mapping must be"),
        ((key, value, keys, values, slots.float()), "slot_mapping must be"),
        ((key, value, keys[:2], values, slots), "differ before head_dim"),
        ((key, value, keys.half(), values, slots), "value_cache"),
        ((key.half(), value.half(), keys, values, slots), "its cache"),
        ((key.int(), value.int(), keys, values, slots), "key must be one of"),
        ((key, value.half(), keys, values, slots), "value is"),
    ):
        with pytest.raises(ValueError, match=match):
            write_kv(*bad)
    assert not keys.any()


def test_an_unknown_backend_is_refused():
    refused([0], "backend must be one of", backend="numpy")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_a_float8_cache_saturates(dtype: torch.dtype, backend: str):
    keys, values = caches(dtype)
    key, value = rows(2)
    key[0], value[0] = 1e6, -1e6
    write_kv(key, value, keys, values, torch.tensor([0, 5]), backend=backend)
    largest = torch.finfo(dtype).max
    assert (keys[0, :, 0].float() == largest).all()
    assert (values[0, :, 0].float() == -largest).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_what_is_written_with_scales_is_read_with_them(
    dtype: torch.dtype, backend: str
):
    """A cache of float8 and its scales hold numbers far from 1."""
    generator = torch.Generator().manual_seed(0)
    keys, values = caches(dtype)
    key = torch.randn(6, 2, 8, generator=generator) * 3000
    value = torch.randn(6, 2, 8, generator=generator) * 0.001
    k_scale, v_scale = torch.tensor([20.0, 10.0]), 1e-5
    write_kv(
        key,
        value,
        keys,
        values,
        torch.arange(4, 10),
        k_scale=k_scale,
        v_scale=v_scale,
        backend=backend,
    )
    inputs = checked_inputs(
        torch.randn(1, 4, 8, generator=generator),
        keys,
        values,
        torch.tensor([[1, 2]]),
        torch.tensor([6]),
        scale=1e-4,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    plain = checked_inputs(
        inputs.query,
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        torch.tensor([[0]]),
        torch.tensor([6]),
        scale=1e-4,
    )
    exact = reference_attention(plain)
    out = attend(inputs, backend, inputs.output())
    error = (out - exact).norm() / exact.norm()
    assert error < 0.2, "float8 keeps two or three binary digits"
    wrong = attend(
        checked_inputs(
            inputs.query,
            keys,
            values,
            inputs.block_tables,
            inputs.seq_lens,
            scale=1e-4,
        ),
        backend,
        inputs.output(),
    )
    assert (wrong - exact).norm() / exact.norm() > 10


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cache_written_token_by_token_serves_attention(backend: str):
    """Slots -> blocks -> attention: the two ends agree on what a slot is."""
    arguments = build(Case(block_size=5, lengths="around", seed=2))
    inputs = inputs_of(Case(block_size=5, lengths="around", seed=2))
    keys = torch.full_like(arguments["key_cache"], torch.nan)
    values = torch.full_like(arguments["value_cache"], torch.nan)
    for row, length in zip(
        arguments["block_tables"].tolist(),
        arguments["seq_lens"].tolist(),
        strict=True,
    ):
        where = [(row[p // 5], p % 5) for p in range(length)]
        ids, offsets = torch.tensor(where).T
        write_kv(
            arguments["key_cache"][ids, :, offsets],
            arguments["value_cache"][ids, :, offsets],
            keys,
            values,
            ids * 5 + offsets,
            backend=backend,
        )
    arguments |= {"key_cache": keys, "value_cache": values}
    written = checked_inputs(**arguments)
    out = attend(written, backend, written.output())
    exact = reference_attention(inputs)
    assert (out - exact).norm() / exact.norm() < 1e-5
