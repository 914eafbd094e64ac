"""What paged attention refuses, and how it chooses a backend."""

import math
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch
from cases.attention import Case, build, inputs_of

from llm_systems_cookbook import attention
from llm_systems_cookbook.attention import backends, paged_attention
from llm_systems_cookbook.attention.backends import (
    BACKENDS,
    choose_backend,
    why_not,
)
from llm_systems_cookbook.attention.inputs import AttentionInputs

PREFILL = Case(mode="prefill", lengths="around", seed=4)


PLAIN = Case()


def call(case: Case = PLAIN, **changes: object) -> torch.Tensor:
    arguments = build(case) | changes
    tensors = ("query", "key_cache", "value_cache")
    tables = ("block_tables", "seq_lens")
    positional = [arguments.pop(name) for name in (*tensors, *tables)]
    return paged_attention(*positional, **arguments)


def changed(case: Case, name: str, at: object, value: object) -> dict:
    tensor = build(case)[name].clone()
    tensor[at] = value
    return {name: tensor}


@pytest.mark.parametrize("backend", ["auto", "reference", "gather", "cpu"])
def test_backends_agree_through_the_public_call(backend: str):
    out = call(PREFILL, backend=backend)
    exact = call(PREFILL, backend="reference")
    assert (out - exact).norm() / exact.norm() < 1e-5


def test_an_unknown_option_is_named():
    with pytest.raises(TypeError, match=r"unknown options \['windows'\]"):
        call(PLAIN, windows=3)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (-1, r"block_tables\[3, 0\] is -1, outside \[0, 6\)"),
        (6, r"block_tables\[3, 0\] is 6, outside \[0, 6\)"),
        (2**31 - 1, r"block_tables\[3, 0\] is 2147483647"),
    ],
)
def test_a_live_block_id_out_of_range_is_refused(bad: int, match: str):
    case = Case(table="exact")
    with pytest.raises(ValueError, match=match):
        call(case, **changed(case, "block_tables", (3, 0), bad))


def test_ids_past_the_end_or_before_the_window_are_not_looked_at():
    case = Case(lengths="many", window="block", table="stale")
    tables = build(case)["block_tables"]
    assert (tables == -1).any(), "given back, before the window"
    assert (tables >= build(case)["key_cache"].shape[0]).any(), "stale"
    assert call(case).isfinite().all()


def test_an_id_inside_the_window_is_looked_at():
    case = Case(lengths="many", window="block")
    last = -(-int(build(case)["seq_lens"][0]) // case.block_size) - 1
    for column in (last, last - 1):
        with pytest.raises(ValueError, match=rf"block_tables\[0, {column}\]"):
            call(case, **changed(case, "block_tables", (0, column), -1))


def test_an_id_that_only_the_first_query_row_sees_is_looked_at():
    case = Case(mode="prefill", lengths="single", window="one")
    tables = torch.tensor([[0, 1, -1, -1, -1]])
    starts, query = torch.tensor([0, 40]), torch.zeros(40, 8, 64)
    changes = {"query": query, "query_start_loc": starts}
    changes |= {"seq_lens": torch.tensor([70]), "block_tables": tables}
    with pytest.raises(ValueError, match=r"block_tables\[0, 2\] is -1"):
        call(case, **changes)
    with pytest.raises(ValueError, match=r"block_tables\[0, 1\] is -1"):
        call(case, **changes | {"block_tables": tables.clamp(max=0) * 0 - 1})


def test_without_validation_ids_lengths_and_scales_are_not_looked_at():
    bad = changed(PLAIN, "block_tables", (3, 0), -1)
    for backend in ("reference", "gather", "cpu"):
        out = call(**bad, v_scale=2.0, validate=False, backend=backend)
        assert out[3].isnan().all()
        assert out[:3].isfinite().all()
    call(k_scale=math.inf, validate=False)


def test_lengths_out_of_range_are_refused():
    case = Case(table="exact")
    with pytest.raises(ValueError, match=r"seq_lens\[1\] is negative: -3"):
        call(case, **changed(case, "seq_lens", 1, -3))
    with pytest.raises(ValueError, match=r"seq_lens\[2\] is 17, but .* = 16"):
        call(case, **changed(case, "seq_lens", 2, 17))


@pytest.mark.parametrize(
    ("starts", "match"),
    [
        ([1, 2, 3, 11], "must rise from 0 to"),
        ([0, 2**31 - 1, -2, 11], "must rise from 0 to"),
        ([0, 2, 1, 11], "must rise from 0 to"),
        ([0, 1, 2, 9], "must rise from 0 to"),
        ([0, 1, 11], "has 3 entries for 3 sequences, needs 4"),
    ],
)
def test_starts_that_do_not_fit_are_refused(starts: list[int], match: str):
    query = torch.zeros(11, 8, 64)
    with pytest.raises(ValueError, match=match):
        call(PREFILL, query=query, query_start_loc=torch.tensor(starts).int())


def test_more_rows_than_tokens_are_refused():
    starts = torch.tensor([0, 18, 18, 18])
    with pytest.raises(ValueError, match="sequence 0 has 18 query rows, more"):
        call(PREFILL, query=torch.zeros(18, 8, 64), query_start_loc=starts)


def test_several_rows_need_their_starts():
    with pytest.raises(ValueError, match="5 rows for 4 sequences"):
        call(query=torch.zeros(5, 8, 64))


ZEROS = torch.zeros


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"query": ZEROS(4, 8)}, "query must be"),
        ({"query": ZEROS(4, 7, 64)}, "7 query heads are not a multiple of 2"),
        ({"query": ZEROS(4, 0, 64)}, "num_heads must be >= 1, got 0"),
        ({"query": ZEROS(4, 8, 32)}, "head_dim 32, key_cache 64"),
        ({"query": ZEROS(4, 8, 64).int()}, "query must be one of"),
        ({"query": ZEROS(4, 8, 64).half()}, "query is torch.float16"),
        ({"query": [[0.0]]}, "query must be a tensor"),
        ({"key_cache": ZEROS(7, 2, 16)}, "key_cache must be"),
        ({"value_cache": ZEROS(7, 2, 8, 64)}, "differ before head_dim"),
        ({"value_cache": ZEROS(7, 2, 16, 64).half()}, "value_cache"),
        ({"value_cache": ZEROS(6, 2, 16, 0)}, "head_dim_v must be >= 1"),
        ({"block_tables": ZEROS(4).int()}, "block_tables must be"),
        ({"block_tables": ZEROS(4, 3)}, "block_tables must be int32"),
        ({"block_tables": ZEROS(3, 3).int()}, "3 rows, seq_lens 4"),
        ({"seq_lens": ZEROS(4)}, "seq_lens must be int32 or int64"),
        ({"seq_lens": ZEROS(4).short()}, "seq_lens must be int32 or int64"),
        ({"seq_lens": ZEROS(4, 1).int()}, "seq_lens must be"),
        ({"scale": math.nan}, "scale must be finite in float32, got nan"),
        ({"scale": math.inf}, "scale must be finite in float32, got inf"),
        ({"scale": 1e39}, "scale must be finite in float32"),
        ({"softcap": math.inf}, "softcap must be > 0 and finite"),
        ({"softcap": 1e-46}, "softcap must be > 0 and finite in float32"),
        ({"k_scale": 0.0}, "k_scale must be above 0 and finite, got 0"),
        ({"v_scale": math.nan}, "v_scale must be above 0 and finite, got nan"),
        ({"v_scale": torch.tensor([1.0, math.inf])}, "v_scale must be above"),
        ({"k_scale": ZEROS(1, 2)}, "k_scale must be one number or"),
        ({"value_cache": ZEROS(6, 2, 16, 64).bfloat16()}, "value_cache"),
        ({"window": 0}, "window must be >= 1, got 0"),
        ({"softcap": 0.0}, "softcap must be > 0 and finite in float32, got 0"),
        ({"softcap": math.nan}, "softcap must be > 0"),
        ({"alibi_slopes": ZEROS(7)}, "alibi_slopes has 7 of 8 heads"),
        ({"sinks": ZEROS(8, 1)}, "sinks must be"),
        ({"k_scale": ZEROS(3)}, "k_scale must be one number or"),
        ({"v_scale": ZEROS(2, 2)}, "v_scale must be one number or"),
        ({"backend": "cuda"}, "backend must be one of"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_what_does_not_fit_is_refused(changes: dict, match: str):
    with pytest.raises(ValueError, match=match):
        call(**changes)


def test_a_window_that_is_no_whole_number_is_refused():
    with pytest.raises(TypeError):
        call(window=2.5)


@pytest.mark.parametrize(
    "name", ["key_cache", "value_cache", "block_tables", "seq_lens"]
)
def test_tensors_on_two_devices_are_refused(name: str):
    with pytest.raises(ValueError, match=f"{name} is on meta"):
        call(**{name: build(Case())[name].to("meta")})


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
def test_options_on_another_device_are_refused(name: str):
    with pytest.raises(ValueError, match=f"{name} is on meta"):
        call(**{name: torch.zeros(8, device="meta")})


def test_half_and_bfloat16_do_not_mix():
    case = Case(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"query is torch\.float16"):
        call(case, query=build(case)["query"].half())


@pytest.mark.parametrize("window", [2**31, 2**63, 2**70])
@pytest.mark.parametrize("backend", ["reference", "gather", "cpu"])
def test_a_window_of_any_size_is_a_window(window: int, backend: str):
    out = call(window=window, backend=backend)
    assert torch.equal(out, call(backend=backend))


@pytest.mark.parametrize("backend", ["reference", "gather", "cpu"])
def test_no_gradient_passes(backend: str):
    query = build(Case())["query"].requires_grad_()
    assert not call(query=query, backend=backend).requires_grad


def test_without_validation_shapes_are_still_checked():
    with pytest.raises(ValueError, match="not a multiple"):
        call(query=torch.zeros(4, 7, 64), validate=False)


@pytest.mark.parametrize("scale", [None, 0.3, -1.0, 0.0])
def test_scale_multiplies_the_scores(scale: float | None):
    exact = call(Case(lengths="around"), scale=scale, backend="reference")
    for backend in ("gather", "cpu"):
        out = call(Case(lengths="around"), scale=scale, backend=backend)
        assert (out - exact).norm() / exact.norm() < 1e-5


# --- The choice ------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COOKBOOK_BACKEND", raising=False)


# --- The layers of a step ----------------------------------------------------


OF_A_LAYER = "query", "key_cache", "value_cache"


def prefill_with_every_option() -> AttentionInputs:
    options = {"window": "block", "softcap": True, "alibi": True}
    inputs = inputs_of(replace(PREFILL, sinks=True, **options))
    scales = {"k_scale": torch.ones(2), "v_scale": torch.ones(2)}
    return replace(inputs, plan={}, **scales)


def test_the_inputs_of_another_layer_differ_in_three_things_only():
    first = prefill_with_every_option()
    given = {name: getattr(first, name).clone() for name in OF_A_LAYER}
    second = first.for_layer(**given)
    for field in fields(AttentionInputs):
        old, new = (getattr(x, field.name) for x in (first, second))
        assert old is not None, "the case has all there is"
        assert new is given.get(field.name, old), field.name


@pytest.mark.parametrize("name", OF_A_LAYER)
def test_another_layer_of_another_shape_dtype_or_device_is_refused(name: str):
    first = prefill_with_every_option()
    given = {n: getattr(first, n) for n in OF_A_LAYER}
    for change in (
        lambda x: x[:-1],
        lambda x: x[..., :-1],
        lambda x: x.half(),
        lambda x: x.to("meta"),
    ):
        changed = change(given[name])
        with pytest.raises(ValueError, match=f"{name} is .*, in another"):
            first.for_layer(**given | {name: changed})


CPU = torch.zeros(1)


def test_a_cpu_tensor_takes_numba_else_gather(monkeypatch):
    assert choose_backend(CPU) == "cpu"
    monkeypatch.setattr(backends, "installed", lambda name: name != "numba")
    assert choose_backend(CPU) == "gather"


def test_the_interpreter_runs_only_when_asked_for():
    assert choose_backend(CPU, "auto") != "triton"


def test_the_choice_can_be_forced(monkeypatch):
    monkeypatch.setenv("COOKBOOK_BACKEND", "reference")
    assert choose_backend(CPU) == "reference"
    assert choose_backend(CPU, "gather") == "gather"
    monkeypatch.setenv("COOKBOOK_BACKEND", "abacus")
    with pytest.raises(ValueError, match="got 'abacus'"):
        choose_backend(CPU)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(backends, "installed", lambda name: False)
    with pytest.raises(ValueError, match="numba is not installed"):
        choose_backend(CPU, "cpu")
    with pytest.raises(ValueError, match="Triton is not installed"):
        choose_backend(CPU, "triton")


def test_triton_refuses_float64_and_the_cpu_without_its_interpreter(
    monkeypatch,
):
    kernels = pytest.importorskip(
        "llm_systems_cookbook.attention.triton.kernels"
    )
    assert "float32" in why_not("triton", CPU.double())
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr(backends, "interpreting", lambda: False)
    assert "TRITON_INTERPRET=1" in why_not("triton", CPU)


class OnGPU:
    """Stand in for a tensor on a GPU."""

    is_cuda = True

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        self.dtype, self.device = dtype, torch.device("cuda:0")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Return a function that pretends that there is a GPU."""
    kernels = pytest.importorskip(
        "llm_systems_cookbook.attention.triton.kernels"
    )

    def pretend(capability: tuple[int, int], interpreting: bool = False):
        monkeypatch.setattr(kernels, "INTERPRETED", interpreting)
        monkeypatch.setattr(backends, "interpreting", lambda: interpreting)
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device: capability
        )

    return pretend


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((9, 0), torch.float16, "triton"),
        ((8, 0), torch.bfloat16, "triton"),
        ((7, 5), torch.float16, "triton"),
        ((7, 5), torch.bfloat16, "gather"),
        ((9, 0), torch.float64, "gather"),
        ((7, 0), torch.float16, "gather"),
        ((6, 0), torch.float32, "gather"),
    ],
)
def test_a_gpu_tensor_takes_triton_where_it_can(
    gpu, capability, dtype, expected
):
    gpu(capability)
    assert choose_backend(OnGPU(dtype)) == expected


def test_a_dtype_that_this_gpu_lacks_is_refused_by_name(gpu):
    gpu((7, 5))
    with pytest.raises(ValueError, match="this GPU has no bfloat16"):
        choose_backend(OnGPU(torch.bfloat16), "triton")


def test_a_gpu_tensor_is_interpreted_only_when_asked_for(gpu):
    gpu((9, 0), interpreting=True)
    assert choose_backend(OnGPU()) == "gather"
    assert choose_backend(OnGPU(), "triton") == "triton"


def test_an_interpreter_switched_after_the_import_is_told(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(backends, "interpreting", lambda: False)
    assert "was changed after" in why_not("triton", CPU)


def test_numba_refuses_another_device():
    assert "meta" in why_not("cpu", CPU.to("meta"))


def test_backends_that_need_nothing_can_run():
    assert attention.BACKENDS == ("reference", "gather", "cpu", "triton")
    assert [why_not(b, CPU) for b in BACKENDS[:3]] == ["", "", ""]


# --- Layers ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("llm_systems_cookbook.memory", ("torch", "triton", "numba")),
        ("llm_systems_cookbook.nb", ("torch", "triton", "numba")),
        ("llm_systems_cookbook.tools.cli", ("torch", "triton", "numba")),
        ("llm_systems_cookbook.attention", ("triton", "numba")),
    ],
)
def test_importing_leaves_the_heavy_libraries_out(
    module: str, absent: tuple[str, ...]
):
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not set(absent) & set(done.stdout.split())
