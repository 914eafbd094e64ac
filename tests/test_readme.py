"""What the README shows runs, and what it names exists."""

import ast
import re
from importlib import import_module

import pytest
from cases.notebooks import NOTEBOOKS, ROOT

README = (ROOT / "README.md").read_text("utf-8")


def test_python_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    namespace, shown = {}, []
    for block in blocks:
        last = ast.parse(block).body[-1]
        assert isinstance(last, ast.Expr)
        exec(block, namespace)
        shown.append(eval(ast.unparse(last), namespace))
    slot, attended, texts = shown
    assert slot == 6 * 16 + 3
    assert attended.shape == (1, 8, 64)
    assert attended.isfinite().all()
    assert [len(text) for text in texts] == [20, 20]


def test_linked_files_exist():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert len(links) > 8
    for link in links:
        assert (ROOT / link).exists(), link


def test_every_notebook_is_in_the_table():
    for path in NOTEBOOKS:
        title = re.search(r'"# (.+?)(\\n)?"', path.read_text("utf-8"))[1]
        row = f"[{title}](notebooks/{path.name})"
        assert row in README, row


def test_the_table_of_rooms_names_each_and_what_it_offers():
    rows = re.findall(r"^\| `(\w+)` \|[^|]+\|([^|]+)\|$", README, re.MULTILINE)
    package = ROOT / "llm_systems_cookbook"
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    assert {room for room, _ in rows} == rooms
    for room, offers in rows:
        module = import_module(f"llm_systems_cookbook.{room}")
        names = re.findall(r"`(\w+)`", offers)
        missing = [n for n in names if n not in getattr(module, "__all__", n)]
        assert missing in ([], ["cpu"]), room


ROOMS = "memory|attention|serving|models|workloads|nb|plots|tools"


@pytest.mark.parametrize(
    "path",
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *NOTEBOOKS,
        *sorted((ROOT / "llm_systems_cookbook").rglob("*.py")),
    ],
    ids=lambda path: path.name,
)
def test_a_file_of_the_package_that_is_named_exists(path):
    text = path.read_text("utf-8")
    named = re.findall(rf"`((?:{ROOMS})(?:/\w+)+(?:\.py|/))`", text)
    gone = [
        n for n in named if not (ROOT / "llm_systems_cookbook" / n).exists()
    ]
    assert gone == []
