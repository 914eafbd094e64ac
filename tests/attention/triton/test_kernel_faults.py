"""Every faulty kernel of the list is noticed, and by what it says."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from cases.attention import (
    PAIRWISE,
    TOLERANCE,
    TRITON_DEVICE,
    Case,
    build,
    inputs_of,
    moved,
    poison_parts,
    poisoned_output,
    relative_error,
)
from cases.faults.kernels import FAULTS, KernelFault
from cases.write import Write, write_problem

from llm_systems_cookbook.attention.inputs import (
    FP8,
    AttentionInputs,
    checked_inputs,
)
from llm_systems_cookbook.attention.reference import reference_attention

pytest.importorskip("triton")
from llm_systems_cookbook.attention.triton import kernels, launch, rungs

SOURCE = Path(kernels.__file__).read_text()
RUNG_CASES = [Case(lengths="around"), Case(lengths="around", seed=1)]
WRITE_CASE = Write(
    layout="strided", rows="strided", padding=True, block_size=8, tokens=20
)


def faulty_file(fault: KernelFault, folder: Path) -> Path:
    assert SOURCE.count(fault.old) == 1, "the code to replace occurs once"
    path = folder / "faulty_kernels.py"
    path.write_text(SOURCE.replace(fault.old, fault.new))
    return path


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    def use(path: Path) -> None:
        spec = importlib.util.spec_from_file_location("faulty_kernels", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for user in (launch, rungs):
            monkeypatch.setattr(user, "kernels", module)
        poison_parts(monkeypatch, launch)
        poison_parts(monkeypatch, rungs)

    return use


def is_wrong(out: torch.Tensor, inputs: AttentionInputs) -> bool:
    error = relative_error(out, reference_attention(inputs))
    return not error < TOLERANCE[inputs.query.dtype]


@cache
def grid() -> list[tuple[AttentionInputs, int]]:
    """Return all cases, those of least work first: most faults end there."""
    cases = [(inputs_of(case), case.splits) for case in PAIRWISE]
    return sorted(cases, key=lambda case: work(case[0]))


def work(inputs: AttentionInputs) -> int:
    return inputs.query.numel() * int(inputs.seq_lens.sum())


def grid_notices() -> bool:
    return any(
        is_wrong(attend(inputs, splits), inputs) for inputs, splits in grid()
    )


def attend(inputs: AttentionInputs, splits: int) -> torch.Tensor:
    inputs = moved(inputs, TRITON_DEVICE)
    out = poisoned_output(inputs)
    return launch.triton_attention(inputs, out, splits)


def rungs_notice() -> bool:
    return any(
        is_wrong(rung(there, poisoned_output(there)), inputs)
        for inputs in map(inputs_of, RUNG_CASES)
        for there in [moved(inputs, TRITON_DEVICE)]
        for rung in rungs.RUNGS.values()
    )


def extremes_notice() -> bool:
    arguments = build(Case(lengths="many"))
    # Keys of one sign: all scores are far above 0, or all far below.
    arguments["key_cache"].abs_()
    for size, softcap in ((-6e4, None), (6e4, None), (6e4, 30.0)):
        arguments["query"] = torch.full_like(arguments["query"], size)
        inputs = checked_inputs(**arguments | {"softcap": softcap})
        if any(is_wrong(attend(inputs, s), inputs) for s in (1, 2)):
            return True
    small = inputs_of(Case(lengths="around", softcap=True))
    capped = replace(small, softcap=1e4)
    no_sink = replace(
        inputs_of(Case(lengths="zeros", sinks=True)),
        sinks=torch.full((8,), -torch.inf),
    )
    return any(
        is_wrong(attend(inputs, splits), inputs)
        for inputs in (capped, no_sink)
        for splits in (1, 2)
    )


def unvalidated_ids_notice() -> bool:
    """A block id just past the pool: memory that is there, but not ours."""
    arguments = build(Case(lengths="many"))
    for name in ("key_cache", "value_cache"):
        arguments[name] = arguments[name].nan_to_num(1.0)[:-1]
    last = arguments["key_cache"].shape[0]
    tables = arguments["block_tables"].clamp(max=last - 1)
    for bad in (-1, last):
        arguments["block_tables"] = tables.clone()
        arguments["block_tables"][0, 0] = bad
        inputs = checked_inputs(**arguments, validate=False)
        out = attend(inputs, splits=1)
        if not out[0].isnan().all():
            return True
    return False


def fp8_notices() -> bool:
    """Every byte of a float8 cache, as the value of a lone token."""
    bits = torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 256)
    for dtype in FP8:
        inputs = checked_inputs(
            torch.zeros(1, 1, 16),
            torch.zeros(1, 1, 1, 16).to(dtype),
            bits.view(dtype),
            torch.tensor([[0]]),
            torch.tensor([1]),
        )
        exact = bits.view(dtype).float().flatten()
        out = attend(inputs, splits=1).cpu().flatten()
        if not torch.equal(out.nan_to_num(1e9), exact.nan_to_num(1e9)):
            return True
    return False


def one_program_notices() -> bool:
    """A program of 28 rows in 32 must leave the next one's tokens alone."""
    arguments = build(Case(lengths="single", group=7, num_kv_heads=1))
    rows = torch.zeros(40, 7, 64)
    arguments |= {"query": rows, "query_start_loc": torch.tensor([0, 40])}
    inputs = checked_inputs(**arguments)

    def first_program(*args: object, **named: object) -> launch.Plan:
        plan = plan_launch(*args, **named)
        return plan._replace(grid=(1, 1, 1))

    plan_launch = launch.plan_launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "plan_launch", first_program)
        out = attend(inputs, splits=1)
    own = plan_launch(inputs, "interpreter", 1, 1).query_tile
    assert (out[:own] != 0).all()
    return not (out[own:] == 0).all()


NOTICES = {
    "fp8": fp8_notices,
    "one program": one_program_notices,
    "grid": grid_notices,
    "rungs": rungs_notice,
    "extremes": extremes_notice,
    "unvalidated": unvalidated_ids_notice,
    "write": lambda: write_problem(WRITE_CASE, "triton") != "",
}


def crashes_or_differs(what: str, path: Path) -> bool:
    done = subprocess.run(
        [sys.executable, "-m", "cases.edge_of_memory", what, "triton", path],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    # A crash by a signal, or the script's own verdict; not a Python error.
    return done.returncode < 0 or "relative error" in done.stderr


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_is_noticed(fault: KernelFault, tmp_path: Path, use: Callable):
    path = faulty_file(fault, tmp_path)
    if fault.noticed == "guard" and TRITON_DEVICE != "cpu":
        pytest.skip("a GPU has no guard pages")
    if fault.noticed in ("guard", "int32"):
        assert crashes_or_differs(fault.noticed, path)
        return
    use(path)
    if fault.noticed == "equivalent":
        assert fault.why
        assert not rungs_notice()
    else:
        assert NOTICES[fault.noticed]()


@pytest.mark.parametrize("name", [n for n in NOTICES if n != "grid"])
def test_the_package_s_own_kernels_pass(name: str, use: Callable):
    """And the grid: test_attention_backends.py runs it."""
    use(Path(kernels.__file__))
    assert not NOTICES[name]()


def test_fault_names_are_unique():
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
