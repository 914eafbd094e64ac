"""The `cookbook` command: run the notebooks, and keep them in step."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from llm_systems_cookbook.nb.environment import checkout_above, find_checkout
from llm_systems_cookbook.nb.record import results_folder
from llm_systems_cookbook.nb.values import shown_measure, shown_value
from llm_systems_cookbook.tools import lab as laboratory
from llm_systems_cookbook.tools import run as runner
from llm_systems_cookbook.tools import sync as syncing
from llm_systems_cookbook.tools import template
from llm_systems_cookbook.tools.notebooks import (
    CookbookError,
    select_notebooks,
)
from llm_systems_cookbook.tools.results import Record, load_records

if TYPE_CHECKING:
    from llm_systems_cookbook.tools.bench import Timing

SHA256_DIGITS = 64

app = typer.Typer(
    help="Run the notebooks, and keep them in step with the package.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _say_what_the_output_can() -> None:
    """Run the notebooks, and keep them in step with the package."""
    # A Windows pipe lacks characters that names and messages may have.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


Root = Annotated[
    Path | None,
    typer.Option(
        help="The repository; without it, the checkout you are in.",
        file_okay=False,
        exists=True,
    ),
]
Check = Annotated[
    bool,
    typer.Option("--check", help="Change nothing; fail if anything differs."),
]


@contextmanager
def _errors() -> Iterator[None]:
    """Turn an error the reader can put right into one line and status 2."""
    try:
        yield
    except (CookbookError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


def _repository(root: Path | None) -> Path:
    # The checkout you are in comes before the one that the package is from.
    found = root or checkout_above(Path.cwd()) or find_checkout()
    if found is None:
        raise CookbookError(
            "this is no checkout of the cookbook; name one with --root"
        )
    return found.resolve()


def _fail_if(failed: bool) -> None:
    if failed:
        raise typer.Exit(1)


@app.command()
def run(
    notebooks: Annotated[
        list[str] | None,
        typer.Argument(
            help="02, 02_block_allocator or a path; all without any.",
            show_default=False,
        ),
    ] = None,
    root: Root = None,
    jobs: Annotated[
        int, typer.Option("-j", "--jobs", min=1, help="Run so many at once.")
    ] = 1,
    timeout: Annotated[
        int, typer.Option(min=1, help="Seconds one cell may take.")
    ] = 120,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail on an exercise to do.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Keep the executed copies in this folder."),
    ] = None,
) -> None:
    """Run notebooks from top to bottom, and show what they found."""
    with _errors():
        repository = _repository(root)
        paths = select_notebooks(repository, notebooks or [])
        folder = results_folder(repository)
        settings = runner.Settings(folder, timeout, jobs, strict, output)
        runs = runner.run_notebooks(paths, settings, typer.echo)
    records = [one.record for one in runs]
    _print_results(records, [one.status for one in runs])
    _print_measures(records)
    failures = [line for one in runs for line in one.failures()]
    skipped = [
        line
        for record in records
        for line in record.remarks()
        if line not in failures
    ]
    for line in skipped + failures:
        typer.echo(line)
    _fail_if(bool(failures))


@app.command()
def results(
    root: Root = None,
    measures: Annotated[
        bool, typer.Option("--measures", help="Show what was measured, too.")
    ] = False,
) -> None:
    """Show what the last run of every notebook found."""
    with _errors():
        repository = _repository(root)
        records, ignored = load_records(repository)
    _print_results(records, [record.status for record in records])
    if measures:
        _print_measures(records)
    for record in records:
        for line in record.remarks():
            typer.echo(line)
    for name in ignored:
        typer.echo(f"ignored {name}: no notebook of that name")
    _fail_if(not all(record.ok for record in records))


@app.command()
def lab(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="For Jupyter Lab, after --: -- --no-browser",
            show_default=False,
        ),
    ] = None,
    root: Root = None,
) -> None:
    """Open copies of the notebooks, in lab/, in Jupyter Lab."""
    with _errors():
        repository = _repository(root)
        for remark in laboratory.copy_notebooks(repository):
            typer.echo(remark)
        laboratory.open_lab(repository, arguments or [])


@app.command()
def sync(root: Root = None, check: Check = False) -> None:
    """Fill the cells that show the package's source from the package."""
    with _errors():
        changes = syncing.sync(_repository(root), check)
    for change in changes:
        typer.echo(change.diff() if check else f"filled {change.where}")
    if check and changes:
        typer.echo(f"differ: {len(changes)}; `cookbook sync` fills them")
    _fail_if(check and bool(changes))


@app.command()
def lint(root: Root = None) -> None:
    """Check every notebook against the template."""
    with _errors():
        problems = template.lint(_repository(root))
    for problem in problems:
        typer.echo(str(problem))
    _fail_if(any(not problem.is_warning for problem in problems))


# --- Benchmarks -----------------------------------------------------------

bench_app = typer.Typer(
    help="Time the package's code on this machine.", no_args_is_help=True
)
app.add_typer(bench_app, name="bench")


@bench_app.callback()
def _bench() -> None:
    """Time the package's code on this machine."""


@bench_app.command("attention")
def bench_attention(
    length: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens in each sequence; repeatable."),
    ] = None,
    mixed: Annotated[
        bool,
        typer.Option(help="Lengths drawn from the Azure trace as well."),
    ] = True,
    longest: Annotated[
        int | None, typer.Option(min=1, help="Cut mixed lengths off here.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 16,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = 8,
    head_dim: Annotated[
        list[int] | None, typer.Option(min=1, help="Repeatable.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1)] = 16,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="float32, float16 or bfloat16; repeatable."),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Candidates; all that fit the device without."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; a GPU where there is one.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of numbers and lengths.")] = 0,
) -> None:
    """Time decode attention against what else could compute it."""
    # torch takes a second to import: only this command needs it.
    import torch

    from llm_systems_cookbook.tools import bench

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = [
        (f"{n} tokens each", (n,) * batch) for n in length or (512, 1024, 2048)
    ]
    if mixed:
        lengths, trace = bench.mixed_lengths(batch, seed, longest)
        mean = sum(lengths) / batch
        cases.append((f"{mean:.0f} tokens on average: {trace.label}", lengths))
    try:
        for name in dtype or ["float32"]:
            for dim in head_dim or [128]:
                for title, lengths in cases:
                    shape = bench.Shape(
                        lengths, heads, kv_heads, dim, block_size, name, device
                    )
                    timings = bench.measure(
                        shape, backend, rounds=rounds, seed=seed
                    )
                    what = f"{batch} x {title}, {name}, head_dim {dim}"
                    _print(_timings_table(f"{what}, {device}", timings))
                    typer.echo(
                        f"minimal bytes: {shape.minimal_bytes():,}; a copy: "
                        f"{bench.copy_rate(timings) / 1e9:.1f} GB/s"
                    )
    except (AssertionError, RuntimeError, ValueError) as error:
        # A wrong result, a device that is not here, an option out of range.
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


@app.command()
def gpu() -> None:
    """Try the kernels on this machine's GPU, and time them; 5 minutes."""
    # Only this command may start a GPU; it runs without the rest of this
    # file's imports, too: `python -m llm_systems_cookbook.tools.gpu`.
    from llm_systems_cookbook.tools.gpu import main

    raise typer.Exit(main())


# --- Tables ---------------------------------------------------------------


def _print(table: Table) -> None:
    # Names and messages are text to show, never markup to obey.
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        # A pipe has no width: rather a long line than a broken one.
        wide = console.options.update(max_width=10_000)
        console.width = Measurement.get(console, wide, table).maximum
    console.print(table)


def _print_results(records: list[Record], statuses: list[str]) -> None:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("notebook", no_wrap=True)
    for heading in Record("", "").counts():
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for record, status in zip(records, statuses, strict=True):
        counts = map(str, record.counts().values())
        table.add_row(record.notebook, *counts, status)
    _print(table)


def _print_measures(records: list[Record]) -> None:
    for record in records:
        if record.measures:
            _print(_measures_table(record))


def _timings_table(title: str, timings: list["Timing"]) -> Table:
    from llm_systems_cookbook.tools.bench import rows_of

    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("candidate", no_wrap=True)
    for heading in ("time", "rate", "of copy", "spread", "over sdpa"):
        table.add_column(heading, justify="right", overflow="fold")
    for row in rows_of(timings):
        table.add_row(*row)
    return table


def _measures_table(record: Record) -> Table:
    # One table for each notebook leaves its columns the room they need.
    title = f"{record.notebook}: measured"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("measure", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("with", overflow="fold")
    for measure in record.measures:
        table.add_row(*_measure_row(measure))
    return table


def _measure_row(measure: dict[str, Any]) -> list[str]:
    context = measure.get("context") or {}
    non_finite = measure.get("non_finite") or {}
    with_ = [
        f"{key}={_short(non_finite.get(f'context.{key}', value))}"
        for key, value in context.items()
        # The spread is shown with the value; tables are in the record.
        if key not in ("lowest", "highest")
        and not isinstance(value, dict | list)
    ]
    return [str(measure["name"]), shown_measure(measure), ", ".join(with_)]


def _short(value: object) -> str:
    text = shown_value(value)
    return f"{text[:12]}…" if len(text) == SHA256_DIGITS else text
