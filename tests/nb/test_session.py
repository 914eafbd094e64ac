import contextlib
import html
import json
import math
import os
import re
import runpy
import subprocess
import sys
import textwrap
import threading
import warnings
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import llm_systems_cookbook
from llm_systems_cookbook.attention.backends import attention_runs_on
from llm_systems_cookbook.memory.allocator import BlockAllocator
from llm_systems_cookbook.nb import ChecksFailed, bootstrap
from llm_systems_cookbook.nb import environment as conditions
from llm_systems_cookbook.nb import session as nb
from llm_systems_cookbook.nb.environment import Conditions

NAN, INF = math.nan, math.inf


@pytest.fixture
def results(tmp_path, monkeypatch):
    folder = tmp_path / "results"
    monkeypatch.setenv("COOKBOOK_RESULTS", str(folder))
    monkeypatch.delenv("COOKBOOK_STRICT", raising=False)
    # Asking git twice per write is most of what these tests would do.
    monkeypatch.setattr(conditions, "_commit", lambda: None)
    return folder


@pytest.fixture
def s(results, capsys):
    session = bootstrap("02_block_allocator")
    capsys.readouterr()
    return session


@pytest.fixture
def lines(capsys):
    """Return what was printed since the last call, line by line."""
    return lambda: capsys.readouterr().out.splitlines()


def strict_json(path):
    def refuse(constant):
        raise AssertionError(f"not strict JSON: {constant}")

    return json.loads(path.read_text(), parse_constant=refuse)


def saved(s):
    """Save, whether or not the run has passed, and return the record."""
    with contextlib.suppress(ChecksFailed):
        s.save()
    return strict_json(s.path)


def checks(s):
    return {check["name"]: check for check in saved(s)["checks"]}


def measures(s):
    return {measure["name"]: measure for measure in saved(s)["measures"]}


def raiser(error):
    def raise_it():
        raise error

    return raise_it


# --- check -----------------------------------------------------------------


def boolean_likes(value):
    return [
        value,
        np.bool_(value),
        np.array(value),
        torch.tensor(value),
        lambda: value,
        lambda: np.bool_(value),
        lambda: torch.tensor(value),
    ]


@pytest.mark.parametrize("predicate", boolean_likes(True))
def test_true_passes_as_bool_or_callable(s, lines, predicate):
    assert s.check("name", predicate) is True
    assert lines() == ["✓ name"]
    assert checks(s)["name"] == {
        "name": "name",
        "status": "passed",
        "message": "",
    }


@pytest.mark.parametrize("predicate", boolean_likes(False))
def test_false_fails_as_bool_or_callable(s, lines, predicate):
    assert s.check("name", predicate) is False
    assert lines() == ["✗ name — returned False"]
    assert checks(s)["name"]["status"] == "failed"


def test_failing_line_shows_the_message_and_the_reason(s, lines):
    s.check("name", raiser(KeyError(7)), "every id is known")
    assert lines() == ["✗ name — every id is known (KeyError: 7)"]
    assert checks(s)["name"]["message"] == "every id is known (KeyError: 7)"


def test_passing_line_leaves_the_message_out(s, lines):
    s.check("name", True, "shown when it fails")
    assert lines() == ["✓ name"]
    assert checks(s)["name"]["message"] == ""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("bad value"), "ValueError: bad value"),
        (ValueError(), "ValueError"),
        (AssertionError(), "AssertionError"),
        (NotImplementedError("later"), "NotImplementedError: later"),
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit(), "GeneratorExit"),
    ],
)
def test_any_exception_is_a_failure_with_its_message(s, error, message):
    assert s.check("name", raiser(error)) is False
    assert checks(s)["name"] == {
        "name": "name",
        "status": "failed",
        "message": message,
    }


def test_exception_that_cannot_be_shown_is_a_failure(s):
    class Broken(Exception):
        def __str__(self):
            raise RuntimeError

    assert s.check("name", raiser(Broken())) is False
    assert checks(s)["name"]["message"].startswith("Broken: ")


def test_keyboard_interrupt_propagates_and_records_nothing(s, lines):
    with pytest.raises(KeyboardInterrupt):
        s.check("name", raiser(KeyboardInterrupt()))
    assert lines() == []
    assert checks(s) == {}


@pytest.mark.parametrize("predicate", [None, lambda: None])
def test_none_is_a_failure_that_asks_for_the_return(s, predicate):
    assert s.check("name", predicate) is False
    message = checks(s)["name"]["message"]
    assert message == "returned None: forgotten return?"


@pytest.mark.parametrize(
    ("array", "shape"),
    [
        (np.array([True, True]), "(2,)"),
        (np.ones((2, 3), dtype=bool), "(2, 3)"),
        (np.array([True]), "(1,)"),
        (np.array([], dtype=bool), "(0,)"),
        (torch.tensor([True, True]), "(2,)"),
        (torch.tensor([[True]]), "(1, 1)"),
    ],
)
def test_array_with_a_dimension_is_a_failure_that_says_so(s, array, shape):
    assert s.check("name", lambda: array) is False
    message = checks(s)["name"]["message"]
    assert f"of shape {shape}, not one boolean" in message
    assert ".all()" in message


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1, "returned int 1, not a boolean"),
        (1.0, "returned float 1.0, not a boolean"),
        ("text", "returned str 'text', not a boolean"),
        ([True], "returned list [True], not a boolean"),
        (np.int64(1), "returned int64"),
        (np.array(1), "returned ndarray of int64, not a boolean"),
        (torch.tensor(1), "returned Tensor of torch.int64, not a boolean"),
        (len, "returned a function: forgotten call?"),
    ],
)
def test_value_that_is_no_boolean_is_a_failure_that_says_so(s, value, said):
    assert s.check("name", lambda: value) is False
    assert checks(s)["name"]["message"].startswith(said)


def test_tensor_without_a_value_is_a_failure(s):
    nothing = torch.empty((), dtype=torch.bool, device="meta")
    assert s.check("name", nothing) is False
    assert checks(s)["name"]["status"] == "failed"


def test_predicate_that_needs_arguments_is_a_failure(s):
    assert s.check("name", lambda x: True) is False
    assert checks(s)["name"]["message"].startswith("TypeError: ")


def test_long_message_of_many_lines_prints_as_one_short_line(s, lines):
    text = "one\ntwo\r\n\tthree \x1b[31m " + "x" * 10_000
    s.check("name", raiser(ValueError(text)), "why\nnot " + "y" * 10_000)
    (line,) = lines()
    assert line.startswith("✗ name — why not yyy")
    assert "(ValueError: one two three �[31m xxx" in line
    assert len(line) < 300


def test_name_of_two_lines_prints_on_one(s, lines):
    s.check("two\nlines", True)
    assert lines() == ["✓ two lines"]
    assert list(checks(s)) == ["two\nlines"]


def test_line_prints_where_the_encoding_lacks_its_characters(results):
    code = (
        "from llm_systems_cookbook.nb import bootstrap;"
        "s = bootstrap('a'); s.check('name', True); s.save()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "? name" in done.stdout


def test_running_a_check_again_replaces_its_record(s):
    s.check("first", False)
    s.check("second", True)
    s.check("first", True)
    record = saved(s)
    assert record["status"] == "passed"
    assert [(c["name"], c["status"]) for c in record["checks"]] == [
        ("first", "passed"),
        ("second", "passed"),
    ]


BY_NAME = {
    "check": lambda s, name: s.check(name, True),
    "check_close": lambda s, name: s.check_close(name, 1, 1),
    "skip": lambda s, name: s.skip(name, "reason"),
    "measure": lambda s, name: s.measure(name, 1, "s"),
    "exercise": lambda s, name: s.exercise(name, lambda: True),
}


@pytest.mark.parametrize("record_it", BY_NAME.values(), ids=BY_NAME)
@pytest.mark.parametrize(
    ("name", "error"),
    [("", ValueError), (" \n", ValueError), (3, TypeError), (None, TypeError)],
)
def test_name_must_be_a_string_that_is_not_empty(s, record_it, name, error):
    with pytest.raises(error, match=r"^name must"):
        record_it(s, name)
    record = saved(s)
    assert record["checks"] == []
    assert record["measures"] == []
    assert record["exercises"] == []


# --- raises ----------------------------------------------------------------


def test_raises_tells_whether_a_call_raises_the_error():
    assert nb.raises(ValueError, int, "x") is True
    assert nb.raises(LookupError, [].pop) is True
    assert nb.raises(ValueError, int, "7") is False


def test_raises_lets_other_errors_through():
    with pytest.raises(TypeError):
        nb.raises(ValueError, int, [])


# --- check_close -----------------------------------------------------------


def test_check_close_says_how_close_or_how_far(s, lines):
    assert s.check_close("near", [10.0, 20.5], [10.0, 20.0], atol=1) is True
    assert s.check_close("far", [1, 3], [1, 2]) is False
    far = "largest absolute error 1 at [1], relative 0.5 at [1]"
    assert lines() == ["✓ near — off by at most 0.5", f"✗ far — {far}"]
    assert checks(s)["near"]["status"] == "passed"
    assert checks(s)["far"]["status"] == "failed"
    assert checks(s)["far"]["message"] == far


def test_default_tolerance_is_one_in_a_million(s):
    assert s.check_close("within", 1 + 0.9e-6, 1) is True
    assert s.check_close("beyond", 1 + 1.1e-6, 1) is False
    assert s.check_close("nothing absolute", 1e-12, 0) is False


def test_values_that_cannot_be_compared_are_a_failure_that_says_why(s):
    assert s.check_close("type", "1", 1) is False
    assert s.check_close("bytes", torch.empty(2, device="meta"), 1) is False
    found = checks(s)
    assert found["type"]["status"] == found["bytes"]["status"] == "failed"
    assert found["type"]["message"].endswith("actual is not numeric: str")
    assert found["bytes"]["message"].startswith("NotImplementedError: ")


@pytest.mark.parametrize("tolerance", ["rtol", "atol"])
def test_tolerance_that_is_negative_raises_and_records_nothing(s, tolerance):
    with pytest.raises(ValueError, match=f"{tolerance}.*-1"):
        s.check_close("name", 1, 1, **{tolerance: -1})
    assert checks(s) == {}


def test_check_close_lets_keyboard_interrupt_through(s):
    class Interrupting:
        def __array__(self, *args, **kwargs):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        s.check_close("name", Interrupting(), 1)
    assert checks(s) == {}


def test_running_check_close_again_replaces_its_record(s):
    s.check_close("name", 1, 2)
    s.check_close("name", 2, 2)
    assert checks(s)["name"]["status"] == "passed"


# --- skip ------------------------------------------------------------------


def test_skip_records_and_prints_the_reason(s, lines):
    s.skip("kernel", "no Triton\nhere")
    assert lines() == ["– kernel — skipped: no Triton here"]
    assert checks(s)["kernel"] == {
        "name": "kernel",
        "status": "skipped",
        "message": "no Triton here",
    }


def test_skip_replaces_and_is_replaced(s):
    s.check("name", False)
    s.skip("name", "reason")
    assert checks(s)["name"]["status"] == "skipped"
    s.check("name", True)
    assert checks(s)["name"]["status"] == "passed"


@pytest.mark.parametrize(
    ("reason", "error"), [("", ValueError), (None, TypeError)]
)
def test_skip_without_a_reason_raises(s, reason, error):
    with pytest.raises(error, match=r"^reason must"):
        s.skip("name", reason)
    assert checks(s) == {}


def test_skipped_checks_do_not_fail_a_run(s):
    s.check("one", True)
    s.skip("two", "reason")
    assert strict_json(s.save())["status"] == "passed"


# --- exercise --------------------------------------------------------------


def exercises(s):
    return {e["name"]: e for e in saved(s)["exercises"]}


@pytest.mark.parametrize(
    ("grader", "status", "line"),
    [
        (raiser(NotImplementedError()), "todo", "○ fork — todo"),
        (lambda: True, "passed", "✓ fork — passed"),
        (lambda: np.bool_(True), "passed", "✓ fork — passed"),
        (lambda: False, "failed", "✗ fork — returned False"),
        (
            lambda: None,
            "failed",
            "✗ fork — returned None: forgotten return?",
        ),
        (raiser(KeyError("x")), "failed", "✗ fork — KeyError: 'x'"),
        (raiser(SystemExit(0)), "failed", "✗ fork — SystemExit: 0"),
        (raiser(RuntimeError("a\nb")), "failed", "✗ fork — RuntimeError: a b"),
    ],
)
def test_exercise_is_todo_passed_or_failed(s, lines, grader, status, line):
    assert s.exercise("fork", grader) == status
    assert lines() == [line]
    assert exercises(s)["fork"]["status"] == status


def test_a_hint_is_shown_with_what_was_expected_and_cut_only_far_behind(
    s, lines
):
    hint = f"step 3: {list(range(40))}, not {list(range(1, 41))}"
    s.exercise("name", raiser(AssertionError(hint)))
    s.exercise("long", raiser(AssertionError("x" * 10_000)))
    short, long = lines()
    assert short.endswith(hint)
    assert len(long) < 520


def test_running_an_exercise_again_replaces_its_record(s):
    s.exercise("first", raiser(NotImplementedError()))
    s.exercise("second", lambda: False)
    s.exercise("first", lambda: True)
    assert [(e["name"], e["status"]) for e in saved(s)["exercises"]] == [
        ("first", "passed"),
        ("second", "failed"),
    ]


def test_exercise_lets_keyboard_interrupt_through(s):
    with pytest.raises(KeyboardInterrupt):
        s.exercise("fork", raiser(KeyboardInterrupt()))
    assert exercises(s) == {}


def test_grader_that_is_not_callable_raises(s):
    with pytest.raises(TypeError, match="callable, got bool"):
        s.exercise("fork", True)
    assert exercises(s) == {}


def test_todo_does_not_fail_a_run(s):
    s.check("one", True)
    s.exercise("fork", raiser(NotImplementedError()))
    assert strict_json(s.save())["status"] == "passed"


def test_todo_fails_a_run_in_strict_mode_read_at_save(s, monkeypatch):
    s.check("one", True)
    s.exercise("fork", raiser(NotImplementedError()))
    monkeypatch.setenv("COOKBOOK_STRICT", "1")
    with pytest.raises(ChecksFailed, match=r"exercises to do: fork$"):
        s.save()
    assert strict_json(s.path)["status"] == "failed"


@pytest.mark.parametrize("value", ["", "0"])
def test_strict_mode_can_be_switched_off(s, monkeypatch, value):
    s.check("one", True)
    s.exercise("fork", raiser(NotImplementedError()))
    monkeypatch.setenv("COOKBOOK_STRICT", value)
    assert strict_json(s.save())["status"] == "passed"


def test_strict_mode_passes_a_run_without_todos(s, monkeypatch):
    s.check("one", True)
    s.exercise("fork", lambda: True)
    monkeypatch.setenv("COOKBOOK_STRICT", "1")
    assert strict_json(s.save())["status"] == "passed"


# --- measure ---------------------------------------------------------------


def test_measure_prints_records_and_returns_the_value(s, lines):
    given = {16: np.array([0.5, NAN])}
    returned = s.measure("two\nlines", given, "x", rounds=np.int64(5))
    assert lines() == ["two lines = 16: 0.5, None x"]
    assert str(returned) == "{16: [0.5, nan]}"
    assert measures(s)["two\nlines"] == {
        "name": "two\nlines",
        "value": {"16": [0.5, None]},
        "unit": "x",
        "context": {"rounds": 5},
        "non_finite": {"value.16[1]": "nan"},
    }


@pytest.mark.parametrize(
    ("value", "context", "error"),
    [
        (object(), {}, TypeError),
        (1, {"given": object()}, TypeError),
        ({16: 1, "16": 2}, {}, ValueError),
        ([10**10_000], {}, ValueError),  # too long to write
    ],
)
def test_measure_refuses_at_once_what_cannot_be_saved(
    s, lines, value, context, error
):
    with pytest.raises(error):
        s.measure("name", value, "s", **context)
    assert lines() == []
    assert measures(s) == {}


def test_measure_prints_a_long_list_short(s, lines):
    s.measure("name", list(range(10_000)), "blocks")
    (line,) = lines()
    assert len(line) < 200


def test_measure_that_raises_keeps_the_record_before(s):
    s.measure("name", 1, "s")
    with pytest.raises(TypeError, match="object"):
        s.measure("name", object(), "s")
    assert measures(s)["name"]["value"] == 1


def test_unit_must_be_a_string(s):
    with pytest.raises(TypeError, match="unit must be str, got NoneType"):
        s.measure("name", 1, None)
    assert measures(s) == {}


def test_running_a_measure_again_replaces_its_record(s):
    s.measure("first", 1, "s", old=1)
    s.measure("second", 2, "s")
    s.measure("first", 3, "ms")
    assert [(m["name"], m["value"]) for m in saved(s)["measures"]] == [
        ("first", 3),
        ("second", 2),
    ]
    assert measures(s)["first"]["context"] == {}


def test_changing_a_value_later_leaves_its_record_alone(s):
    value = [1, 2]
    returned = s.measure("name", value, "s")
    value.append(3)
    returned.append(4)
    assert measures(s)["name"]["value"] == [1, 2]


def test_check_measure_and_exercise_may_share_a_name(s):
    s.check("name", True)
    s.measure("name", 1, "s")
    s.exercise("name", lambda: True)
    record = saved(s)
    assert len(record["checks"]) == 1
    assert len(record["measures"]) == 1
    assert len(record["exercises"]) == 1


# --- show_source -----------------------------------------------------------


def test_source_reads_as_plain_text(s):
    text = repr(s.show_source(BlockAllocator))
    assert text.startswith("class BlockAllocator:\n")
    assert "    def alloc(self) -> int:" in text


def test_source_of_a_method_is_not_indented(s):
    source = s.show_source(BlockAllocator.alloc)
    assert repr(source).startswith("def alloc(self) -> int:\n    ")


def test_source_of_a_property_is_shown(s):
    text = repr(s.show_source(BlockAllocator.free_blocks))
    assert text.startswith("@property\ndef free_blocks(self) -> int:")


def test_source_in_html_is_escaped_and_keeps_its_lines(s):
    source = s.show_source(nb._line)
    page = source._repr_html_()
    assert page.startswith("<pre")
    assert page.endswith("</pre>")
    assert html.unescape(page[page.index(">") + 1 : -6]) == repr(source)


def test_several_sources_are_shown_in_order(s):
    one, two = BlockAllocator.alloc, BlockAllocator.allocate
    both = repr(s.show_source(one, two))
    assert both == f"{s.show_source(one)!r}\n\n{s.show_source(two)!r}"


def test_source_of_a_builtin_raises(s):
    with pytest.raises(TypeError):
        s.show_source(len)


# --- summary ---------------------------------------------------------------


def fill(s):
    s.check("short", True)
    s.check("a_longer_name", False, "a < b & c")
    s.skip("kernel", "no Triton")
    s.measure("waste", NAN, "%")
    s.exercise("fork", raiser(NotImplementedError()))


def test_summary_reads_as_an_aligned_table(s):
    fill(s)
    text = repr(s.summary())
    *table, last = text.splitlines()
    assert table == [
        "02_block_allocator: checks 1 passed, 1 failed, 1 skipped; "
        "exercises 0 passed, 0 failed, 1 todo",
        "what      name           result",
        "check     a_longer_name  failed: a < b & c (returned False)",
        "check     short          passed",
        "check     kernel         skipped: no Triton",
        "measure   waste          nan %",
        "exercise  fork           todo",
    ]
    assert last.startswith("llm-systems-cookbook ")
    assert "Python" in last


class Cells(HTMLParser):
    """Collect the text of each cell, and every tag and attribute."""

    def __init__(self, text):
        super().__init__()
        self.cells, self.tags, self.attributes = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data):
        if self.tags[-1:] == ["td"]:
            self.cells[-1] += data.strip("\n")


def test_summary_in_html_has_the_same_cells(s):
    fill(s)
    summary = s.summary()
    parsed = Cells(summary._repr_html_())
    assert parsed.tags.count("tr") == 1 + 5
    assert parsed.tags.count("th") == 3
    assert parsed.cells == [cell for row in summary.rows for cell in row]
    assert "a_longer_name" in parsed.cells
    assert summary.conditions in summary._repr_html_()
    assert summary.title in summary._repr_html_()


def test_summary_in_html_is_escaped(s):
    hostile = "<script>alert(1)</script>"
    s.check(hostile, False, hostile)
    s.measure(hostile, hostile, hostile)
    s.exercise(hostile, raiser(ValueError(hostile)))
    parsed = Cells(s.summary()._repr_html_())
    assert "script" not in parsed.tags
    assert hostile in parsed.cells


def test_summary_in_html_sets_no_colour(s):
    fill(s)
    parsed = Cells(s.summary()._repr_html_())
    assert {name for name, _ in parsed.attributes} <= {"style"}
    styles = " ".join(value for _, value in parsed.attributes)
    assert not re.search(r"colou?r|background|#|rgb", styles)


def test_summary_keeps_what_was_known_when_it_was_made(s):
    s.check("name", False)
    summary = s.summary()
    s.check("name", True)
    s.check("other", True)
    assert [row.result for row in summary.rows] == ["failed: returned False"]
    assert "0 passed, 1 failed" in repr(summary)


def test_summary_of_nothing_is_a_title_and_conditions(s):
    assert len(repr(s.summary()).splitlines()) == 3
    assert Cells(s.summary()._repr_html_()).cells == []


# --- save ------------------------------------------------------------------


def test_save_writes_the_whole_record(s, lines, results):
    s.check("one", True)
    s.measure("waste", 5.91, "%", seed=0)
    s.exercise("fork", lambda: True)
    lines()
    path = s.save()
    assert path == results / "02_block_allocator.json"
    record = strict_json(path)
    here = record.pop("conditions")
    assert record == {
        "schema_version": 1,
        "notebook": "02_block_allocator",
        "status": "passed",
        "checks": [{"name": "one", "status": "passed", "message": ""}],
        "measures": [
            {
                "name": "waste",
                "value": 5.91,
                "unit": "%",
                "context": {"seed": 0},
            }
        ],
        "exercises": [{"name": "fork", "status": "passed", "message": ""}],
    }
    expected = Conditions.here().as_dict()
    assert list(here) == list(expected)
    assert here["package"] == expected["package"]
    assert here["python"] == expected["python"]


def test_save_prints_one_line_with_the_path(s, lines, results, monkeypatch):
    monkeypatch.chdir(results.parent)
    s.check("one", True)
    lines()
    s.save()
    (line,) = lines()
    assert line.startswith("Saved results/02_block_allocator.json: ")
    assert "1 passed" in line


def test_failed_checks_and_exercises_are_named_after_writing(s, lines):
    s.check("good", True)
    s.check("bad", False)
    s.check_close("worse", 1, 2)
    s.exercise("fork", lambda: False)
    s.exercise("later", raiser(NotImplementedError()))
    lines()
    with pytest.raises(ChecksFailed) as caught:
        s.save()
    assert str(caught.value) == (
        "02_block_allocator: failed checks: bad, worse; failed exercises: fork"
    )
    assert len(lines()) == 1
    assert strict_json(s.path)["status"] == "failed"


def test_failed_exercise_alone_fails_a_run(s):
    s.check("good", True)
    s.exercise("fork", lambda: False)
    with pytest.raises(ChecksFailed, match="failed exercises: fork"):
        s.save()
    assert strict_json(s.path)["status"] == "failed"


def test_no_checks_at_all_fail_a_run(s):
    s.measure("name", 1, "s")
    s.exercise("fork", lambda: True)
    with pytest.raises(ChecksFailed, match=r"no checks were recorded$"):
        s.save()
    assert strict_json(s.path)["status"] == "failed"


def test_run_that_was_put_right_passes_when_saved_again(s):
    s.check("name", False)
    with pytest.raises(ChecksFailed):
        s.save()
    s.check("name", True)
    assert strict_json(s.save())["status"] == "passed"


def test_checks_failed_is_a_runtime_error_of_one_line():
    error = ChecksFailed("a: failed checks: b")
    assert isinstance(error, RuntimeError)
    assert error._render_traceback_() == ["ChecksFailed: a: failed checks: b"]


def test_names_of_two_lines_leave_the_error_on_one(s):
    s.check("two\nlines", False)
    with pytest.raises(ChecksFailed) as caught:
        s.save()
    assert "\n" not in str(caught.value)


def test_saved_file_can_be_read_by_others(s):
    s.check("one", True)
    assert s.save().stat().st_mode & 0o444 == 0o444


def execute(code, folder):
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in code],
        metadata={"kernelspec": {"name": "python3", "display_name": "P"}},
    )
    client = NotebookClient(
        notebook, timeout=60, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    return notebook


def test_notebook_shows_a_failed_check_as_one_line(results, tmp_path):
    cells = [
        "from llm_systems_cookbook.nb import bootstrap\n"
        "s = bootstrap('02_block_allocator')",
        "s.check('bad', False);",
        "s.save()",
    ]
    with pytest.raises(CellExecutionError) as caught:
        execute(cells, tmp_path)
    error = caught.value
    assert error.ename == "ChecksFailed"
    assert error.evalue == "02_block_allocator: failed checks: bad"
    assert error.traceback.splitlines()[-1] == (
        "ChecksFailed: 02_block_allocator: failed checks: bad"
    )
    assert "Traceback" not in error.traceback
    assert "session.py" not in error.traceback
    record = strict_json(results / "02_block_allocator.json")
    assert record["status"] == "failed"


def test_notebook_shows_source_and_summary_as_text_and_rich(results, tmp_path):
    cells = [
        "from llm_systems_cookbook.nb import bootstrap\n"
        "s = bootstrap('02_block_allocator')\n"
        "s.check('good', True)\n"
        "s.show_source(s.check)",
        "s.summary()",
        "s.save();",
    ]
    executed = execute(cells, tmp_path)
    source = executed.cells[0].outputs[-1].data
    assert source["text/plain"].startswith("def check(")
    assert "def check(" in source["text/html"]
    table = executed.cells[1].outputs[-1].data
    assert "good" in table["text/plain"]
    assert "<table>" in table["text/html"]


# --- Atomic writes ---------------------------------------------------------


def test_failed_write_keeps_the_old_file_and_leaves_no_other(
    s, results, monkeypatch
):
    s.check("one", True)
    before = s.save().read_text()

    def broken(source, destination):
        raise KeyboardInterrupt

    monkeypatch.setattr(nb.os, "replace", broken)
    s.check("two", True)
    with pytest.raises(KeyboardInterrupt):
        s.save()
    assert s.path.read_text() == before
    assert list(results.iterdir()) == [s.path]


def test_file_is_whole_before_it_takes_its_name(s, monkeypatch):
    seen = []
    replace = os.replace

    def watch(source, destination):
        seen.append((strict_json(Path(source)), Path(source).parent))
        replace(source, destination)

    monkeypatch.setattr(nb.os, "replace", watch)
    s.check("one", True)
    s.save()
    ((record, folder),) = seen
    assert record["status"] == "passed"
    assert folder == s.path.parent


def test_concurrent_saves_of_threads_leave_whole_json(s, results):
    s.check("one", True)
    s.save()
    errors = []
    done = threading.Event()

    def write(thread):
        try:
            for i in range(15):
                s.check(f"{thread} {i}", True)
                s.save()
        except BaseException as error:
            errors.append(error)

    def read():
        try:
            while not done.is_set():
                assert strict_json(s.path)["status"] == "passed"
        except BaseException as error:
            errors.append(error)

    writers = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    reader = threading.Thread(target=read)
    for thread in [*writers, reader]:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert errors == []
    s.save()
    assert len(strict_json(s.path)["checks"]) == 61
    assert list(results.iterdir()) == [s.path]


def test_concurrent_saves_of_processes_leave_whole_json(results):
    code = textwrap.dedent(
        """
        from llm_systems_cookbook.nb import bootstrap
        for i in range(8):
            s = bootstrap("02_block_allocator")
            for j in range(50 * i):
                s.measure(f"m{j}", j, "")
            s.check("one", True)
            s.save()
        """
    )
    path = results / "02_block_allocator.json"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    statuses = set()
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            statuses.add(strict_json(path)["status"])
    errors = [writer.communicate()[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0], errors
    assert statuses <= {"incomplete", "passed"}
    assert strict_json(path)["status"] == "passed"
    assert list(results.iterdir()) == [path]


# --- bootstrap -------------------------------------------------------------


def test_bootstrap_writes_an_incomplete_record_first(s):
    record = strict_json(s.path)
    assert record["status"] == "incomplete"
    assert record["notebook"] == "02_block_allocator"
    assert record["checks"] == []
    assert record["conditions"]["python"] == Conditions.here().python


def test_bootstrap_refuses_an_interpreter_without_assertions(
    results, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    cell = "from llm_systems_cookbook.nb import bootstrap; bootstrap('a')"
    with pytest.raises(CellExecutionError) as caught:
        execute([cell], tmp_path)
    assert caught.value.ename == "AssertionsOff"
    assert "PYTHONOPTIMIZE" in caught.value.evalue
    assert "\n" not in caught.value.evalue
    assert "session.py" not in caught.value.traceback
    assert not results.exists()


def test_crash_before_save_leaves_the_record_incomplete(results):
    code = (
        "from llm_systems_cookbook.nb import bootstrap; import os;"
        "s = bootstrap('02_block_allocator');"
        "s.check('one', True); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.returncode == 9
    record = strict_json(results / "02_block_allocator.json")
    assert record["status"] == "incomplete"


def test_crash_hides_the_pass_of_an_earlier_run(s):
    s.check("one", True)
    s.save()
    bootstrap("02_block_allocator")
    assert strict_json(s.path)["status"] == "incomplete"


def test_bootstrap_again_starts_anew(s):
    s.check("old", False)
    s.measure("old", 1, "s")
    s.exercise("old", lambda: False)
    again = bootstrap("02_block_allocator")
    again.check("new", True)
    record = strict_json(again.save())
    assert [check["name"] for check in record["checks"]] == ["new"]
    assert record["measures"] == record["exercises"] == []


def test_bootstrap_prints_the_name_the_version_and_where(
    results, lines, monkeypatch
):
    monkeypatch.chdir(results.parent)
    bootstrap("02_block_allocator")
    version = llm_systems_cookbook.__version__
    assert lines() == [
        f"02_block_allocator · llm-systems-cookbook {version}",
        "Results go to results/02_block_allocator.json",
        f"Attention runs on: {attention_runs_on()}",
    ]


@pytest.mark.parametrize(
    "name", ["a", "7", "02_block_allocator", "a-b_c", "x" * 100]
)
def test_plain_slug_names_the_file(results, name):
    assert bootstrap(name).path == results / f"{name}.json"
    assert [path.name for path in results.iterdir()] == [f"{name}.json"]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "A",
        "_a",
        "-a",
        "a b",
        "a.b",
        "a/b",
        "../a",
        "a\\b",
        "a\n",
        "é",
        "x" * 101,
        "a\0",
        None,
        2,
        Path("a"),
    ],
)
def test_name_that_is_not_a_plain_slug_raises_naming_it(
    results, tmp_path, name
):
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        bootstrap(name)
    assert list(tmp_path.iterdir()) == []


# --- Where results go ------------------------------------------------------


@pytest.fixture
def no_results_variable(tmp_path, monkeypatch):
    monkeypatch.delenv("COOKBOOK_RESULTS", raising=False)
    monkeypatch.setattr(conditions, "_PACKAGE_FOLDER", tmp_path / "package")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def make_checkout(folder):
    (folder / "notebooks").mkdir(parents=True)
    pyproject = '[project]\nname = "llm-systems-cookbook"\n'
    (folder / "pyproject.toml").write_text(pyproject)
    return folder


def test_results_go_to_the_checkout(no_results_variable, monkeypatch, lines):
    root = make_checkout(no_results_variable / "root")
    monkeypatch.chdir(root / "notebooks")
    session = bootstrap("a")
    assert session.path == root / "results" / "a.json"
    assert strict_json(session.path)["status"] == "incomplete"
    assert "Results go to results/a.json" in lines()


def test_results_go_to_the_working_directory_without_a_checkout(
    no_results_variable,
):
    session = bootstrap("a")
    assert session.path == no_results_variable / "results" / "a.json"
    assert session.path.exists()


def test_variable_goes_before_the_checkout(
    no_results_variable, monkeypatch, tmp_path
):
    root = make_checkout(no_results_variable / "root")
    monkeypatch.chdir(root)
    monkeypatch.setenv("COOKBOOK_RESULTS", str(tmp_path / "chosen"))
    assert bootstrap("a").path == tmp_path / "chosen" / "a.json"
    assert not (root / "results").exists()


def test_empty_variable_counts_as_none(no_results_variable, monkeypatch):
    monkeypatch.setenv("COOKBOOK_RESULTS", "")
    session = bootstrap("a")
    assert session.path == no_results_variable / "results" / "a.json"


def test_results_stay_where_they_were_when_the_directory_changes(
    no_results_variable, monkeypatch, tmp_path
):
    monkeypatch.setenv("COOKBOOK_RESULTS", "chosen")
    session = bootstrap("a")
    monkeypatch.chdir(tmp_path)
    session.check("one", True)
    assert session.save() == no_results_variable / "chosen" / "a.json"
    assert strict_json(session.path)["status"] == "passed"


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Make temporary directories inside this test's own."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(nb.tempfile, "tempdir", str(folder))
    return folder


def test_unwritable_directory_gives_a_warning_and_a_temporary_one(
    tmp_path, monkeypatch, temporary, lines
):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("COOKBOOK_RESULTS", str(tmp_path / "file" / "results"))
    with pytest.warns(UserWarning, match="cannot write results to .*file"):
        session = bootstrap("a")
    assert session.path.is_relative_to(temporary)
    assert strict_json(session.path)["status"] == "incomplete"
    assert f"Results go to {session.path}" in lines()
    session.check("one", True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = session.save()
    assert path == session.path
    assert strict_json(path)["status"] == "passed"
    assert (tmp_path / "file").read_text() == "in the way"


def test_directory_that_becomes_unwritable_loses_nothing(
    s, results, temporary, lines
):
    s.check("one", False)
    s.path.unlink()
    results.rmdir()
    results.write_text("in the way")
    lines()
    with (
        pytest.warns(UserWarning, match="cannot write results"),
        pytest.raises(ChecksFailed),
    ):
        s.save()
    assert s.path.is_relative_to(temporary)
    record = strict_json(s.path)
    assert [check["name"] for check in record["checks"]] == ["one"]
    (line,) = lines()
    assert str(s.path) in line


def test_warning_points_at_the_caller(tmp_path, monkeypatch, temporary):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("COOKBOOK_RESULTS", str(tmp_path / "file" / "results"))
    with pytest.warns(UserWarning, match="cannot write") as caught:
        bootstrap("a")
    assert caught[0].filename == __file__


def test_file_name_taken_by_a_folder_counts_as_unwritable(results, temporary):
    (results / "a.json").mkdir(parents=True)
    with pytest.warns(UserWarning, match="cannot write results"):
        session = bootstrap("a")
    assert session.path.is_relative_to(temporary)
    assert [path.name for path in results.iterdir()] == ["a.json"]


# --- Torch stays out -------------------------------------------------------


def test_a_whole_session_does_not_import_torch(results):
    code = textwrap.dedent(
        """
        import sys
        import numpy as np
        from llm_systems_cookbook.nb import bootstrap
        s = bootstrap("a")
        s.check("a", np.bool_(True))
        s.check_close("b", np.ones(3), [1, 1, 1])
        s.measure("c", np.float32(1), "s")
        s.exercise("d", lambda: True)
        s.summary()
        s.save()
        print("torch" in sys.modules)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr


def test_a_bare_assert_shows_its_line(s, lines, tmp_path):
    file = tmp_path / "grading.py"  # pytest rewrites the asserts of this one
    file.write_text("def grader():\n    assert 1 + 1 == 3\n")
    s.exercise("addition", runpy.run_path(str(file))["grader"])
    assert lines() == ["✗ addition — AssertionError: assert 1 + 1 == 3"]


def test_a_generated_trace_shows_wherever_the_figure_does(s, lines):
    s.measure("waste", 1.5, "%", trace="azure (generated from quantiles)")
    assert lines() == ["waste = 1.5 %, azure (generated from quantiles)"]
    assert "(generated" in repr(s.summary())


def test_an_older_record_does_not_stay_when_this_run_cannot_write(
    results, monkeypatch
):
    bootstrap("02_block_allocator").check("good", True)
    old = results / "02_block_allocator.json"
    assert old.exists()
    real = nb.write_atomic

    def refuse(path, text):
        if path == old:
            raise PermissionError("read-only")
        real(path, text)

    monkeypatch.setattr(nb, "write_atomic", refuse)
    with pytest.warns(UserWarning, match="cannot write results"):
        bootstrap("02_block_allocator")
    assert not old.exists()
