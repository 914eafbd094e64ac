"""Reading what notebooks recorded, whatever lies under a record's name."""

import json

import pytest

from llm_systems_cookbook.tools.results import load_record, load_records

NESTED = 100_000


def write_record(folder, stem, **values):
    record = {
        "schema_version": 1,
        "notebook": stem,
        "status": "passed",
        "checks": [entry("one", "passed")],
        "measures": [],
        "exercises": [],
        "conditions": {},
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"{stem}.json"
    path.write_text(json.dumps(record | values), encoding="utf-8")
    return path


def entry(name, status, message=""):
    return {"name": name, "status": status, "message": message}


def measure(**values):
    return {"name": "time", "value": 1, "unit": "s", "context": {}} | values


@pytest.mark.parametrize("status", ["passed", "failed", "incomplete"])
def test_a_record_has_the_status_it_says(tmp_path, status):
    write_record(tmp_path, "a", status=status)
    record = load_record(tmp_path, "a")
    assert record.status == status
    assert record.ok == (status == "passed")


def test_a_record_counts_checks_and_exercises_by_status(tmp_path):
    write_record(
        tmp_path,
        "a",
        status="failed",
        checks=[
            entry("a", "passed"),
            entry("b", "failed"),
            entry("c", "skipped"),
        ],
        exercises=[
            entry("d", "passed"),
            entry("e", "failed"),
            entry("f", "todo"),
        ],
    )
    record = load_record(tmp_path, "a")
    assert record.counts() == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "solved": 1,
        "todo": 1,
    }
    assert record.remarks() == [
        "a: check b: failed",
        "a: check c: skipped",
        "a: exercise e: failed",
    ]


def test_an_incomplete_record_says_what_that_means(tmp_path):
    write_record(tmp_path, "a", status="incomplete")
    (remark,) = load_record(tmp_path, "a").remarks()
    assert "stopped before it saved" in remark


def test_an_absent_record_is_missing(tmp_path):
    assert load_record(tmp_path, "a").status == "missing"


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_schema_is_said_to_be_wrong(tmp_path, version):
    write_record(tmp_path, "a", schema_version=version)
    record = load_record(tmp_path, "a")
    assert record.status == "wrong schema"
    assert repr(version) in record.note


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b'"x"', b"\xff", b"[" * NESTED + b"]" * NESTED, None],
    ids=["empty", "cut", "list", "text", "no UTF-8", "nested", "a folder"],
)
def test_what_is_no_record_is_unreadable(tmp_path, content):
    path = tmp_path / "a.json"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    record = load_record(tmp_path, "a")
    assert record.status == "unreadable"
    (remark,) = record.remarks()
    assert str(path) in remark


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "values",
    [
        {"notebook": "b"},
        {"notebook": ["a"]},
        {"status": "fine"},
        {"status": ["passed"]},
        {"checks": None},
        {"checks": ["one"]},
        {"checks": [{"status": "passed"}]},
        {"checks": [{"name": ["one"], "status": "passed"}]},
        {"checks": [entry("one", "todo")]},
        {"checks": [entry("one", {})]},
        {"checks": [entry("one", "passed", message=3)]},
        {"exercises": [entry("one", "skipped")]},
        {"measures": {}},
        {"measures": [{}]},
        {"measures": [measure(context=["n", 1])]},
        {"measures": [measure(unit=2)]},
        {"measures": [measure(non_finite=["value"])]},
        {"measures": [measure(value=nested(900))]},
        {"measures": [measure(non_finite={"context.n": nested(900)})]},
        {"checks": []},
        {"checks": [entry("one", "failed")]},
        {"exercises": [entry("one", "failed")]},
    ],
)
def test_a_record_that_contradicts_the_schema_is_unreadable(tmp_path, values):
    write_record(tmp_path, "a", **values)
    record = load_record(tmp_path, "a")
    assert record.status == "unreadable"
    assert record.note


def test_records_come_in_the_order_of_the_notebooks(tmp_path):
    (tmp_path / "notebooks").mkdir()
    for stem in ("02_block_tables", "01_kv_cache", "10_free"):
        (tmp_path / "notebooks" / f"{stem}.ipynb").touch()
    results = tmp_path / "results"
    write_record(results, "10_free")
    write_record(results, "99_gone")
    records, ignored = load_records(tmp_path)
    assert [(r.notebook, r.status) for r in records] == [
        ("01_kv_cache", "missing"),
        ("02_block_tables", "missing"),
        ("10_free", "passed"),
    ]
    assert ignored == ["99_gone.json"]
