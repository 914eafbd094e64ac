"""Hold every notebook to the template, rule by rule.

What any notebook should be is for others: reading one checks its format and
ids (nbformat), `make lint` its outputs (nbstripout) and its code (ruff).
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llm_systems_cookbook.tools.notebooks import (
    MAX_COLUMNS,
    Cell,
    Notebook,
    read_all,
)

SECTIONS = (
    "Problem",
    "Idea",
    "Build",
    "Measure",
    "The cost",
    "What breaks",
    "In vLLM and SGLang",
    "Exercises",
    "Recap",
    "Next",
    "References",
)
TITLE_WORDS = ("minutes", "Prerequisites", "Hardware", "Paper")
GOALS = ("You will build", "You will learn")
MIN_CODE_CELLS, MAX_CODE_CELLS = 15, 30
LONG_CELL, TOO_LONG_CELL, MAX_SOURCE_LINES = 25, 32, 70
MIN_EXERCISES, MIN_WRONG_ANSWERS = 3, 2

STEM = re.compile(r"\d{2}(_[a-z0-9]+)+")
EXERCISE_NAME = re.compile(r"[a-z][a-z0-9_]*")
ID = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
# Ids that a tool made up: cell-12, and hexadecimal with or without dashes.
MADE_UP_ID = re.compile(r"cell(-?\d+)?|[0-9a-f]{8,}|[0-9a-f]{8}(-[0-9a-f]+)+")
EDITABLE = re.compile(r"\bpip\b.*\binstall\b.*(?<![\w-])(-e|--editable)\b")
LINK_LINE = re.compile(r"\]\(|\]:|https?://|<img")
# A line for a shell, a magic that has one, a function that starts one.
_MAGICS = r"(?:sx|system|bash|sh|script|cmd|powershell)\b"
SHELL = re.compile(
    r"^\s*(?:[\w, ]+=\s*)?(?:![^=\s]|%%!"
    rf"|%%?{_MAGICS})"
    rf"|run_(?:line|cell)_magic\(\s*['\"]{_MAGICS}"
    # platform.system() has no argument.
    r"|\b(?:system|popen|getoutput|getstatusoutput)\(\s*[^)\s]"
    r"|\bshell\s*=\s*(?!False\b)\S"
    r"|\[\s*['\"](?:bash|sh|zsh|cmd|powershell)['\"]"
)
LOOPS = (ast.For, ast.While, ast.ListComp, ast.GeneratorExp)

# The path that save returns is no reader's business.
LAST_CELLS = ("s.summary()", "s.save();")
QUIET_CALLS = ("s.check", "s.check_close", "s.exercise", "s.measure")
CHECK_CALLS = ("check", "check_close", "exercise")


@dataclass(frozen=True)
class Problem:
    """One violation of one rule.

    Attributes:
        notebook: stem of the notebook's file name.
        cell: id of the cell, or `notebook`.
        message: what is wrong, with the limit.
        rule: name of the rule.
        is_warning: it is shown, and fails nothing.
    """

    notebook: str
    cell: str
    message: str
    rule: str
    is_warning: bool = False

    def __str__(self) -> str:
        warning = "warning: " if self.is_warning else ""
        return f"{self.notebook}: {self.cell}: {warning}{self.message}"


# A rule yields (cell, message); without a cell it is about the notebook.
Findings = Iterator[tuple[Cell | None, str]]
Rule = Callable[[Notebook], Findings]
RULES: list[Rule] = []
WARNINGS: list[Rule] = []


def _rule(rule: Rule) -> Rule:
    RULES.append(rule)
    return rule


def _warning(rule: Rule) -> Rule:
    WARNINGS.append(rule)
    return rule


def lint(root: Path) -> list[Problem]:
    """Return every violation in every notebook of a repository.

    Raises:
        CookbookError: a file is not a notebook, or an extra is missing.
    """
    notebooks = read_all(root)
    problems = [
        problem
        for notebook in notebooks
        for problem in lint_notebook(notebook)
    ]
    return problems + _solutions_without_notebook(root, notebooks)


def lint_notebook(notebook: Notebook) -> list[Problem]:
    """Return every violation in one notebook."""
    return [
        Problem(
            notebook.stem,
            cell.label if cell else "notebook",
            message,
            rule.__name__,
            rule in WARNINGS,
        )
        for rule in RULES + WARNINGS
        for cell, message in rule(notebook)
    ]


def _solutions_without_notebook(
    root: Path, notebooks: list[Notebook]
) -> list[Problem]:
    stems = {notebook.stem for notebook in notebooks}
    return [
        Problem(
            name,
            "notebook",
            f"solutions/{name} has no notebook",
            "solutions_have_a_notebook",
        )
        for name in _visible(root / "solutions")
        if name not in stems
    ]


def _visible(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    names = sorted(path.name for path in folder.iterdir())
    return [n for n in names if n[0] != "." and n != "__pycache__"]


# The file


@_rule
def file_name_is_a_slug(notebook: Notebook) -> Findings:
    """The file is called NN_name; the name becomes that of its record."""
    if not STEM.fullmatch(notebook.stem):
        yield None, "file name is not NN_name in lower case"


@_rule
def kernel_is_python3(notebook: Notebook) -> Findings:
    """Any Jupyter has a kernel of that name, Colab's too."""
    spec = notebook.data["metadata"].get("kernelspec")
    name = spec.get("name") if isinstance(spec, dict) else None
    if name != "python3":
        yield None, f"kernelspec name is {name!r}, expected 'python3'"


@_rule
def no_allowed_errors(notebook: Notebook) -> Findings:
    """An allowed error hides every other error of its cell."""
    if _allows_errors(notebook.data["metadata"]):
        yield None, "metadata allows errors"
    for cell in notebook.cells:
        tags = cell.metadata.get("tags") or []
        if "raises-exception" in tags or _allows_errors(cell.metadata):
            yield cell, "allows errors"
        if "skip-execution" in tags:
            yield cell, "is never run"


def _allows_errors(metadata: object) -> bool:
    if not isinstance(metadata, dict):
        return False
    return any(
        key.endswith("allow_errors") or _allows_errors(value)
        for key, value in metadata.items()
    )


# The cells


@_rule
def ids_are_meaningful(notebook: Notebook) -> Findings:
    """An id says what its cell does: words, joined by dashes."""
    for cell in notebook.cells:
        if not ID.fullmatch(cell.id) or MADE_UP_ID.fullmatch(cell.id):
            yield cell, "id is not words in lower case joined by dashes"


@_rule
def no_shell_lines(notebook: Notebook) -> Findings:
    """A shell line installs into another Python, or runs on one system."""
    for cell in notebook.code_cells:
        for line in cell.lines:
            if SHELL.search(line):
                yield cell, f"runs a shell: {line.strip()}"


@_rule
def no_editable_install(notebook: Notebook) -> Findings:
    """An editable install needs a checkout, which Colab has not."""
    for cell in notebook.code_cells:
        if any(EDITABLE.search(line) for line in cell.lines):
            yield cell, "installs in editable mode"


@_rule
def prose_fits_the_width(notebook: Notebook) -> Findings:
    """Prose breaks anywhere; tables, links, pictures and headings do not."""
    for cell in notebook.markdown_cells:
        for number, line in enumerate(cell.lines, start=1):
            unbreakable = line.lstrip().startswith(("|", "#"))
            if unbreakable or LINK_LINE.search(line):
                continue
            if len(line) > MAX_COLUMNS:
                yield (
                    cell,
                    f"line {number} has {len(line)} columns, "
                    f"limit {MAX_COLUMNS}",
                )


@_rule
def code_cells_are_short(notebook: Notebook) -> Findings:
    """What does not fit on a screen is not read as one thought."""
    for cell in notebook.code_cells:
        count = _filled_lines(cell)
        if "source" not in cell.metadata and count > TOO_LONG_CELL:
            yield cell, f"has {count} lines of code, limit {TOO_LONG_CELL}"


@_warning
def code_cells_are_not_long(notebook: Notebook) -> Findings:
    """Beyond this length, a cell should say why it is not two."""
    for cell in notebook.code_cells:
        count = _filled_lines(cell)
        is_source = "source" in cell.metadata
        if not is_source and LONG_CELL < count <= TOO_LONG_CELL:
            yield cell, f"has {count} lines of code, aim for {LONG_CELL}"


def _filled_lines(cell: Cell) -> int:
    """Count the lines with code: no blank ones, no one-line docstrings."""
    lines = [line.strip() for line in cell.lines]
    return sum(bool(line) and not line.startswith('"""') for line in lines)


@_rule
def source_cells_are_short(notebook: Notebook) -> Findings:
    """A longer class is shown method by method, not pasted."""
    for cell in notebook.code_cells:
        count = _filled_lines(cell)
        if "source" in cell.metadata and count > MAX_SOURCE_LINES:
            yield cell, f"has {count} lines, limit {MAX_SOURCE_LINES}"


@_rule
def enough_code_cells(notebook: Notebook) -> Findings:
    """Fewer cells would each do too much."""
    count = len(notebook.code_cells)
    if count < MIN_CODE_CELLS:
        yield None, f"has {count} code cells, at least {MIN_CODE_CELLS}"


@_rule
def not_too_many_code_cells(notebook: Notebook) -> Findings:
    """Exercises, from stub to grading, and the fixed cells come on top."""
    fixed = [*_exercise_cells(notebook), *_frame(notebook)]
    excepted = {cell.index for cell in fixed}
    count = len({c.index for c in notebook.code_cells} - excepted)
    if count > MAX_CODE_CELLS:
        yield (
            None,
            f"has {count} code cells beside exercises and the fixed ones, "
            f"at most {MAX_CODE_CELLS}",
        )


def _exercise_cells(notebook: Notebook) -> Iterator[Cell]:
    inside = False
    for cell in notebook.code_cells:
        inside = inside or "exercise" in cell.metadata
        if inside:
            yield cell
        inside = inside and not _session_calls(cell, "exercise")


def _frame(notebook: Notebook) -> list[Cell]:
    return [
        cell
        for cell in notebook.code_cells
        if cell.id == "set-up" or cell.source.strip() in LAST_CELLS
    ]


# Names of checks and measures


@dataclass(frozen=True)
class Call:
    """A call of a method of the notebook session.

    Attributes:
        method: name of the method.
        name: the name it records; None when it is no literal.
        is_f_string: the name is an f-string.
        in_loop: the call stands in a loop.
    """

    method: str
    name: str | None
    is_f_string: bool
    in_loop: bool


def _session_calls(cell: Cell, *methods: str) -> list[Call]:
    """Return the calls of the session's methods in a cell, in order."""
    calls = []
    for node, around in cell.nodes:
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="s"), attr=method)
            ) if method in methods:
                in_loop = any(isinstance(outer, LOOPS) for outer in around)
                name = _name_argument(node)
                literal = name.value if _is_text(name) else None
                is_f_string = isinstance(name, ast.JoinedStr)
                calls.append(Call(method, literal, is_f_string, in_loop))
    return calls


def _name_argument(call: ast.Call) -> ast.expr | None:
    if call.args:
        return call.args[0]
    named = [word.value for word in call.keywords if word.arg == "name"]
    return named[0] if named else None


def _is_text(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@_rule
def check_names_are_literal(notebook: Notebook) -> Findings:
    """A name that the code makes up cannot be looked for."""
    for cell in notebook.code_cells:
        for call in _session_calls(cell, *CHECK_CALLS):
            if call.name is None:
                yield cell, f"s.{call.method}: its name is not a literal"
            elif call.in_loop:
                yield cell, f"{call.name}: each turn replaces the last one's"


@_rule
def measure_names_are_literal(notebook: Notebook) -> Findings:
    """An f-string names the measures of a loop, and nothing else."""
    for cell in notebook.code_cells:
        for call in _session_calls(cell, "measure"):
            loop_name = call.is_f_string and call.in_loop
            if call.name is None and not loop_name:
                yield cell, "s.measure: its name is not a literal"


@_rule
def check_names_are_unique(notebook: Notebook) -> Findings:
    """The second record of a name would replace the first."""
    yield from _repeated(notebook, *CHECK_CALLS)


@_rule
def measure_names_are_unique(notebook: Notebook) -> Findings:
    """The second record of a name would replace the first."""
    yield from _repeated(notebook, "measure")


def _repeated(notebook: Notebook, *methods: str) -> Findings:
    seen: set[str] = set()
    for cell in notebook.code_cells:
        for call in _session_calls(cell, *methods):
            if call.name in seen:
                yield cell, f"s.{call.method}: {call.name!r} is used before"
            if call.name is not None:
                seen.add(call.name)


# The template, from top to bottom


@_rule
def first_cell_holds_the_badges(notebook: Notebook) -> Findings:
    """The badge is the way in; tests/test_repository.py reads its link."""
    first = notebook.cells[0] if notebook.cells else None
    if first is None or first.id != "badges" or not first.is_markdown:
        yield first, "first cell is not the markdown cell 'badges'"


@_rule
def second_cell_is_the_title(notebook: Notebook) -> Findings:
    """The title says what it takes, in time and otherwise."""
    cell = notebook.cells[1] if len(notebook.cells) > 1 else None
    if cell is None or not _is_title(cell):
        yield cell, "second cell is not a markdown title ('# …')"
        return
    for word in TITLE_WORDS:
        if word not in cell.source:
            yield cell, f"title cell does not say {word!r}"


def _is_title(cell: Cell) -> bool:
    return cell.is_markdown and cell.source.startswith("# ")


@_rule
def goals_follow_the_title(notebook: Notebook) -> Findings:
    """What you will build and learn comes before any code."""
    cells = [cell for cell in notebook.cells[1:3] if cell.is_markdown]
    if not any(all(goal in c.source for goal in GOALS) for c in cells):
        yield (
            None,
            f"neither the title nor the next cell says {GOALS[0]!r} and "
            f"{GOALS[1]!r}",
        )


@_rule
def set_up_comes_before_the_problem(notebook: Notebook) -> Findings:
    """The first code cell, `set-up`, makes the rest runnable."""
    code = notebook.code_cells
    if not code or code[0].id != "set-up":
        yield None, "first code cell is not 'set-up'"
        return
    headings = _headings(notebook)
    if headings and headings[0][0].index < code[0].index:
        yield code[0], "comes after the first section"


@_rule
def set_up_installs_when_needed(notebook: Notebook) -> Findings:
    """Colab installs the package; a reader who has it keeps it."""
    for cell in notebook.code_cells:
        if cell.id != "set-up":
            continue
        installs = list(_pip_installs(cell))
        if not installs:
            yield cell, "has no %pip install"
        elif not all(installs):
            yield cell, "runs %pip install outside an if or a try"


def _pip_installs(cell: Cell) -> Iterator[bool]:
    """Yield, for every %pip install, whether something guards it."""
    for node, around in cell.nodes:
        if isinstance(node, ast.Constant) and node.value == "pip":
            yield any(isinstance(n, ast.If | ast.Try) for n in around)


@_rule
def bootstrap_names_the_notebook(notebook: Notebook) -> Findings:
    """The session's name becomes the record's."""
    calls = [
        (cell, node)
        for cell in notebook.code_cells
        for node, _ in cell.nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "bootstrap"
    ]
    if len(calls) != 1 or calls[0][0].id != "set-up":
        yield None, "bootstrap is not called once, in the set-up cell"
        return
    cell, call = calls[0]
    first = call.args[0] if call.args else None
    if not _is_text(first) or first.value != notebook.stem:
        yield cell, f"bootstrap is not given {notebook.stem!r}"


def _headings(notebook: Notebook) -> list[tuple[Cell, str]]:
    """Return the sections: (cell, text of the heading up to a colon)."""
    headings = []
    for cell in notebook.markdown_cells:
        fenced = False
        for line in cell.lines:
            if line.startswith("```"):
                fenced = not fenced
            elif not fenced and line.startswith("## "):
                text = line[3:].partition(":")[0].strip()
                headings.append((cell, text))
    return headings


@_rule
def sections_are_present(notebook: Notebook) -> Findings:
    """Every notebook answers the same questions."""
    texts = [text for _, text in _headings(notebook)]
    for section in SECTIONS:
        if section not in texts:
            yield None, f"section {section!r} is missing"


@_rule
def sections_are_known(notebook: Notebook) -> Findings:
    """Smaller steps are headings of the third level."""
    for cell, text in _headings(notebook):
        if text not in SECTIONS:
            yield cell, f"section {text!r} is not in the template"


@_rule
def sections_are_in_order(notebook: Notebook) -> Findings:
    """The order is the template's, and each section comes once."""
    last = -1
    for cell, text in _headings(notebook):
        if text not in SECTIONS:
            continue
        place = SECTIONS.index(text)
        if place == last:
            yield cell, f"section {text!r} is repeated"
        elif place < last:
            yield cell, f"section {text!r} comes after {SECTIONS[last]!r}"
        last = place


@_rule
def problem_has_a_picture(notebook: Notebook) -> Findings:
    """The problem is seen before it is explained away."""
    starts = {text: cell for cell, text in reversed(_headings(notebook))}
    if "Problem" not in starts:
        return
    later = [c.index for t, c in starts.items() if t != "Problem"]
    begin = starts["Problem"].index
    end = min([i for i in later if i > begin], default=len(notebook.cells))
    if not any(_draws(cell) for cell in notebook.cells[begin:end]):
        yield starts["Problem"], "the section has no picture"


def _draws(cell: Cell) -> bool:
    marks = ("plots.", "plt.") if cell.is_code else ("![", "<img")
    return any(mark in cell.source for mark in marks)


@_rule
def ends_with_summary_and_save(notebook: Notebook) -> Findings:
    """What was checked is shown, and then recorded."""
    last = notebook.cells[-2:]
    sources = [cell.source.strip() for cell in last if cell.is_code]
    if sources != list(LAST_CELLS):
        yield None, f"last two cells are not {' and '.join(LAST_CELLS)}"


# Exercises


def _stubs(notebook: Notebook) -> list[Cell]:
    return [c for c in notebook.code_cells if "exercise" in c.metadata]


def _graders(notebook: Notebook) -> list[Cell]:
    return [c for c in notebook.code_cells if _session_calls(c, "exercise")]


def _exercise_names(notebook: Notebook) -> list[str]:
    """Return the names that can be file names, in order."""
    names = [cell.metadata["exercise"] for cell in _stubs(notebook)]
    return [name for name in names if _is_exercise_name(name)]


def _is_exercise_name(name: object) -> bool:
    return isinstance(name, str) and bool(EXERCISE_NAME.fullmatch(name))


@_rule
def enough_exercises(notebook: Notebook) -> Findings:
    """What was read is not yet understood."""
    count = len(_stubs(notebook))
    if count < MIN_EXERCISES:
        yield None, f"has {count} exercises, at least {MIN_EXERCISES}"


@_rule
def exercise_names_are_slugs(notebook: Notebook) -> Findings:
    """The name of an exercise names the files of its answers."""
    for cell in _stubs(notebook):
        name = cell.metadata["exercise"]
        if not _is_exercise_name(name):
            yield cell, f"exercise {name!r} is not a name in lower case"


@_rule
def stubs_are_not_implemented(notebook: Notebook) -> Findings:
    """An exercise counts as to do while its stub says so."""
    for cell in _stubs(notebook):
        if not any(_raises_not_implemented(node) for node, _ in cell.nodes):
            yield cell, "stub does not raise NotImplementedError"


def _raises_not_implemented(node: ast.AST) -> bool:
    if not isinstance(node, ast.Raise):
        return False
    raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"


@_rule
def graders_follow_their_stubs(notebook: Notebook) -> Findings:
    """A stub is graded before the next stub comes."""
    waiting: Cell | None = None
    for cell in notebook.code_cells:
        graded = [call.name for call in _session_calls(cell, "exercise")]
        if waiting and waiting.metadata["exercise"] in graded:
            waiting = None
        if "exercise" in cell.metadata:
            yield from _not_graded(waiting)
            waiting = cell
    yield from _not_graded(waiting)


def _not_graded(stub: Cell | None) -> Findings:
    if stub is not None:
        name = stub.metadata["exercise"]
        yield stub, f"no s.exercise({name!r}) before the next stub"


@_rule
def returned_values_are_not_shown(notebook: Notebook) -> Findings:
    """A check has printed its line: showing `True` below it is noise."""
    for cell in notebook.code_cells:
        last = _last_call(cell)
        shown = last.startswith("plots.") or last in QUIET_CALLS
        if shown and not cell.source.rstrip().endswith(";"):
            yield cell, f"end the cell with ; after {last}()"


@_rule
def listings_are_shown(notebook: Notebook) -> Findings:
    """Jupyter shows the value of a cell's last line, and of no other."""
    for cell in notebook.code_cells:
        statements = cell.tree.body if cell.tree else []
        if not cell.source.rstrip().endswith(";"):
            statements = statements[:-1]
        if any(_call(line) == "s.show_source" for line in statements):
            yield cell, "s.show_source shows nothing but on the last line"


def _last_call(cell: Cell) -> str:
    """Return what the cell's last line calls, or nothing."""
    return _call(cell.tree.body[-1]) if cell.tree and cell.tree.body else ""


def _call(statement: ast.stmt) -> str:
    """Return what a statement calls, if it is a call and no more."""
    if isinstance(statement, ast.Expr) and isinstance(
        statement.value, ast.Call
    ):
        return ast.unparse(statement.value.func)
    return ""


@_rule
def graders_have_a_stub(notebook: Notebook) -> Findings:
    """A grader without a stub has nothing to grade."""
    names = [cell.metadata["exercise"] for cell in _stubs(notebook)]
    for cell in _graders(notebook):
        for call in _session_calls(cell, "exercise"):
            if call.name is not None and call.name not in names:
                yield cell, f"no stub has the exercise {call.name!r}"


@_rule
def exercises_have_a_solution(notebook: Notebook) -> Findings:
    """A grader that no answer passes is broken."""
    files = _answers(notebook)
    for name in _exercise_names(notebook):
        if f"{name}.py" not in files:
            yield None, f"no solutions/{notebook.stem}/{name}.py"


@_rule
def exercises_have_wrong_answers(notebook: Notebook) -> Findings:
    """A grader that every answer passes is broken, too."""
    for name in _exercise_names(notebook):
        count = sum(_is_wrong_answer(f, name) for f in _answers(notebook))
        if count < MIN_WRONG_ANSWERS:
            yield (
                None,
                f"solutions/{notebook.stem}: {count} wrong answers "
                f"({name}.wrong_*.py), at least {MIN_WRONG_ANSWERS}",
            )


@_rule
def answers_have_an_exercise(notebook: Notebook) -> Findings:
    """An answer to no question is never run."""
    names = _exercise_names(notebook)
    for file in _answers(notebook):
        known = any(
            file == f"{name}.py" or _is_wrong_answer(file, name)
            for name in names
        )
        if not known:
            yield None, f"solutions/{notebook.stem}/{file} has no exercise"


def _answers(notebook: Notebook) -> list[str]:
    return _visible(notebook.root / "solutions" / notebook.stem)


def _is_wrong_answer(file: str, name: str) -> bool:
    return file.startswith(f"{name}.wrong_") and file.endswith(".py")
