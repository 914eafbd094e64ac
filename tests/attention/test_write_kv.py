"""Keys and values go into their slots, on every backend, and nowhere else."""

import importlib.util
from collections.abc import Sequence

import pytest
import torch
from cases.attention import Case, build, device_of, inputs_of, moved
from cases.write import WRITES, Write, write_problem

from llm_systems_cookbook.attention.cpu import launch
from llm_systems_cookbook.attention.dispatch import attend
from llm_systems_cookbook.attention.inputs import FP8, checked_inputs
from llm_systems_cookbook.attention.reference import reference_attention
from llm_systems_cookbook.attention.write import CacheWrite, write_kv

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed",
)
# "gather" is the write without numba and without Triton.
BACKENDS = ["cpu", "gather", pytest.param("triton", marks=needs_triton)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", WRITES, ids=str)
def test_every_token_lies_in_its_slot_and_nothing_else_changed(
    case: Write, backend: str
):
    assert write_problem(case, backend) == ""


def caches(
    backend: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    shape, device = (3, 2, 4, 8), device_of(backend)
    return (
        torch.zeros(shape, device=device).to(dtype),
        torch.zeros(shape, device=device).to(dtype),
    )


def rows(
    count: int, backend: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    device = device_of(backend)
    return (
        torch.ones(count, 2, 8, device=device),
        torch.ones(count, 2, 8, device=device),
    )


def refused(
    slots: Sequence[int], match: str, backend: str = "cpu", **options: object
) -> None:
    keys, values = caches(backend)
    with pytest.raises(ValueError, match=match):
        write_kv(
            *rows(len(slots), backend),
            keys,
            values,
            torch.tensor(slots, device=keys.device),
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
@pytest.mark.parametrize("slot", [0, 3])
def test_a_slot_for_two_tokens_is_refused(slot: int, backend: str):
    match = f"slot {slot} is given to two tokens"
    refused([slot, -1, -1, slot], match, backend)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_no_number_survives_is_refused(name: str, scale: float):
    refused([0], f"{name} must be above 0", **{name: scale})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_one_scale_is_enough(name: str, backend: str):
    keys, values = caches(backend, torch.float8_e4m3fn)
    slots = torch.tensor([1], device=keys.device)
    write_kv(
        *rows(1, backend), keys, values, slots, backend=backend, **{name: 0.5}
    )
    scaled = {"k_scale": (2.0, 1.0), "v_scale": (1.0, 2.0)}[name]
    stored = keys[0, 0, 1, 0].float(), values[0, 0, 1, 0].float()
    assert tuple(map(float, stored)) == scaled


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_other_entry_of_a_mapping_is_a_mapping(backend: str):
    keys, values = caches(backend)
    slots = torch.tensor([1, -1, 5, -1], device=keys.device)[::2]
    write_kv(*rows(2, backend), keys, values, slots, backend=backend)
    assert keys.any(dim=3)[:, 0].nonzero().tolist() == [[0, 1], [1, 1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_gradient_reaches_the_cache(backend: str):
    keys, values = caches(backend)
    key, value = rows(1, backend)
    slots = torch.tensor([0], device=keys.device)
    values = torch.nn.Parameter(values)
    write_kv(key.requires_grad_(), value, keys, values, slots, backend=backend)
    assert not keys.requires_grad
    assert values.grad_fn is None
    assert (values[0, :, 0] == 1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_pass_notices_that_the_cache_was_written(backend: str):
    keys, values = caches(backend)
    weight = torch.ones_like(keys, requires_grad=True)
    loss = (weight * keys).sum() + (weight * values).sum()
    slots = torch.tensor([0], device=keys.device)
    write_kv(*rows(1, backend), keys, values, slots, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("backend", ["cpu", "gather"])
def test_a_cache_of_inference_mode_is_written_in_it_only(backend: str):
    with torch.inference_mode():
        keys, values = caches(backend)
        slots = torch.tensor([1])
        write_kv(*rows(1, backend), keys, values, slots, backend=backend)
    assert (keys[0, :, 1] == 1).all()
    with pytest.raises(ValueError, match="made in inference mode"):
        write_kv(*rows(1, backend), keys, values, slots + 1, backend=backend)
    assert not keys[0, :, 2].any()


@pytest.mark.parametrize("backend", ["cpu", "gather"])
def test_rows_that_torch_has_only_marked_as_negative_are_written(backend: str):
    keys, values = caches(backend)
    key, value = rows(1, backend)
    slots = torch.tensor([1])
    write_kv(torch._neg_view(key), value, keys, values, slots, backend=backend)
    assert (keys[0, :, 1] == -1).all()


@pytest.mark.parametrize("backend", ["cpu", "gather"])
@pytest.mark.parametrize("dtype", [torch.float32, *FP8], ids=str)
def test_torchs_default_device_does_not_matter(
    dtype: torch.dtype, backend: str
):
    keys, values = caches(backend, dtype)
    key, value = rows(1, backend)
    slots = torch.tensor([1])
    if backend == "cpu":
        launch._meanings.cache_clear()
    with torch.device("meta"):
        write_kv(key, value, keys, values, slots, backend=backend)
    assert (keys[0, :, 1].float() == 1).all()


def test_int32_slots_serve_a_cache_that_outgrows_them():
    """The limit, 2**32 slots, does not fit the slots' own dtype."""
    keys = torch.empty(2**28, 1, 16, 1, dtype=torch.float8_e5m2)
    values = torch.empty(2**28, 1, 16, 1, dtype=torch.float8_e5m2)
    slots = torch.tensor([2**31 - 1, -1, 3], dtype=torch.int32)
    row = torch.ones(3, 1, 1)
    write_kv(row, 2 * row, keys, values, slots)
    assert float(keys[2**27 - 1, 0, 15, 0]) == 1
    assert float(values[0, 0, 3, 0]) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bad_slot_writes_nothing_where_nothing_was_validated(backend: str):
    keys, values = caches(backend)
    slots = torch.tensor([12, -2, 5, 2**40], device=keys.device)
    write_kv(
        *rows(4, backend),
        keys,
        values,
        slots,
        validate=False,
        backend=backend,
    )
    for cache in (keys, values):
        written = cache.any(dim=3).nonzero().tolist()
        assert written == [[1, 0, 1], [1, 1, 1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_write_is_checked_once_and_then_writes_any_layer(
    backend: str, monkeypatch: pytest.MonkeyPatch
):
    layers = [caches(backend) for _ in range(3)]
    key, value = rows(2, backend)
    slots = torch.tensor([1, 6], device=key.device)
    write = CacheWrite(key, value, *layers[0], slots, backend)
    assert not layers[0][0].any(), "nothing is written before it is called"
    for name in ("_check", "_check_slots", "choose_backend"):
        monkeypatch.delattr(f"llm_systems_cookbook.attention.write.{name}")
    for nth, (keys, values) in enumerate(layers):
        write((nth + 1) * key, -(nth + 1) * value, keys, values)
    for nth, (keys, values) in enumerate(layers):
        assert keys.sum() == 2 * 2 * 8 * (nth + 1)
        assert (keys[[0, 1], :, [1, 2]] == nth + 1).all()
        assert (values[[0, 1], :, [1, 2]] == -(nth + 1)).all()


@pytest.mark.parametrize("nth", range(4))
def test_a_layer_that_is_not_like_the_first_is_refused(nth: int):
    first = [*rows(2), *caches()]
    write = CacheWrite(*first, torch.tensor([1, 6]))
    changes = [
        lambda x: x[:-1],
        lambda x: x[..., :-1],
        lambda x: x.half(),
        lambda x: x.to("meta"),
    ]
    if nth > 1:  # of the caches only: rows may have any strides
        changes.append(lambda x: x[:1].expand_as(x))
    name = ("key", "value", "key_cache", "value_cache")[nth]
    for change in changes:
        given = list(first)
        given[nth] = change(first[nth])
        with pytest.raises(ValueError, match=f"^{name} is .*in another layer"):
            write(*given)
    assert not any(cache.any() for cache in first[2:])


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
        (
            (
                key.half(),
                value.half(),
                keys.bfloat16(),
                values.bfloat16(),
                slots,
            ),
            "its cache",
        ),
        ((key, value, keys, values, slots.short()), "slot_mapping must be"),
        ((key, value, keys, keys, slots), "are the same memory"),
        (
            (key, value, keys[:, :1].expand_as(keys), values, slots),
            "key_cache is expanded",
        ),
        (
            (key, value, keys, values[:1].expand_as(values), slots),
            "value_cache is expanded",
        ),
        ((key, value.to("meta"), keys, values, slots), "value is on meta"),
        ((key, value, keys, values, slots.to("meta")), "slot_mapping is on"),
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
    keys, values = caches(backend, dtype)
    key, value = rows(2, backend)
    key[0], value[0] = 1e6, -1e6
    slots = torch.tensor([0, 5], device=keys.device)
    write_kv(key, value, keys, values, slots, backend=backend)
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
    device = device_of(backend)
    keys, values = caches(backend, dtype)
    key = torch.randn(6, 2, 8, generator=generator).to(device) * 3000
    value = torch.randn(6, 2, 8, generator=generator).to(device) * 0.001
    query = torch.randn(1, 4, 8, generator=generator).to(device)
    scales = {
        "k_scale": torch.tensor([20.0, 10.0], device=device),
        "v_scale": 1e-5,
    }
    slots = torch.arange(4, 10, device=device)
    write_kv(key, value, keys, values, slots, backend=backend, **scales)

    def attended(*caches: torch.Tensor, **scales: object) -> torch.Tensor:
        blocks = 2 if caches[0] is keys else 1
        inputs = checked_inputs(
            query,
            *caches,
            torch.arange(2, device=device)[None, :blocks] + (blocks - 1),
            torch.tensor([6], device=device),
            scale=1e-4,
            **scales,
        )
        return attend(inputs, backend, inputs.output())

    exact = attended(key.transpose(0, 1)[None], value.transpose(0, 1)[None])
    error = (attended(keys, values, **scales) - exact).norm() / exact.norm()
    assert error < 0.2, "float8 keeps two or three binary digits"
    error = (attended(keys, values) - exact).norm() / exact.norm()
    assert error > 10


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cache_written_token_by_token_serves_attention(backend: str):
    """Slots -> blocks -> attention: the two ends agree on what a slot is."""
    arguments = build(Case(block_size=5, lengths="around", seed=2))
    inputs = inputs_of(Case(block_size=5, lengths="around", seed=2))
    device = device_of(backend)
    keys = torch.full_like(arguments["key_cache"], torch.nan).to(device)
    values = torch.full_like(arguments["value_cache"], torch.nan).to(device)
    for row, length in zip(
        arguments["block_tables"].tolist(),
        arguments["seq_lens"].tolist(),
        strict=True,
    ):
        where = [(row[p // 5], p % 5) for p in range(length)]
        ids, offsets = torch.tensor(where).T
        write_kv(
            arguments["key_cache"][ids, :, offsets].to(device),
            arguments["value_cache"][ids, :, offsets].to(device),
            keys,
            values,
            (ids * 5 + offsets).to(device),
            backend=backend,
        )
    arguments |= {"key_cache": keys.cpu(), "value_cache": values.cpu()}
    written = moved(checked_inputs(**arguments), device)
    out = attend(written, backend, written.output()).cpu()
    exact = reference_attention(inputs)
    assert (out - exact).norm() / exact.norm() < 1e-5


def test_a_cache_without_blocks_takes_what_writes_nothing():
    cache = torch.empty(0, 2, 16, 32)
    key, slots = torch.ones(2, 2, 32), torch.tensor([-1, -1])
    write_kv(key, key, cache, cache.clone(), slots)
    with pytest.raises(ValueError, match="outside"):
        write_kv(key, key, cache, cache.clone(), slots + 1)


def test_a_single_head_may_be_expanded():
    """Its stride of 0 is never taken."""
    keys = torch.zeros(3, 16, 32).unsqueeze(1).expand(3, 1, 16, 32)
    keys = keys.as_strided(keys.shape, (512, 0, 32, 1))
    values = torch.zeros(3, 1, 16, 32)
    key = torch.ones(1, 1, 32)
    write_kv(key, 2 * key, keys, values, torch.tensor([17]))
    assert keys.sum() == 32
    assert (keys[1, 0, 1] == 1).all()
    assert (values[1, 0, 1] == 2).all()


@pytest.mark.parametrize("backend", ["cpu", "gather"])
def test_no_later_layer_may_be_what_the_first_may_not(backend: str):
    caches = [torch.zeros(2, 1, 4, 8) for _ in range(2)]
    rows = torch.ones(1, 1, 8)
    write = CacheWrite(rows, rows, *caches, torch.tensor([0]), backend)
    with pytest.raises(ValueError, match="the memory of both caches"):
        write(rows, rows, caches[0], caches[0])
    with torch.inference_mode():
        frozen = torch.zeros(2, 1, 4, 8)
    with pytest.raises(ValueError, match="made in inference mode"):
        write(rows, rows, frozen, caches[1])
    assert not caches[0].any()
