"""What the files around the package promise, and that they agree."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import yaml
from nbconvert.exporters import ScriptExporter
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import llm_systems_cookbook

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
EXTRAS = ("notebooks", "test")
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
COLAB = {
    "python": "3.13",
    "torch": "2.11",
    "numpy": "2.1",
    "numba": "0.61",
}

needs_make = pytest.mark.skipif(
    shutil.which("make") is None or os.name == "nt",
    reason="needs make and a POSIX shell",
)
needs_bash = pytest.mark.skipif(
    shutil.which("bash") is None or os.name == "nt",
    reason="needs bash",
)


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def project():
    return tomllib.loads(read("pyproject.toml"))["project"]


def direct_requirements(project):
    lines = list(project["dependencies"])
    for extra in EXTRAS:
        lines += project["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def run(*command, **options):
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, **options
    )


def assert_succeeds(*command):
    done = run(*command, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


# Versions and ranges


def conda_ranges(environment):
    plain = [d for d in environment["dependencies"] if isinstance(d, str)]
    found = {r.name: r.specifier for r in map(Requirement, plain)}
    found.pop("pip")
    return found


def expected_conda_ranges(project):
    python = Requirement("python" + project["requires-python"])
    expected = {"python": python.specifier}
    for requirement in direct_requirements(project):
        if requirement.marker is None:
            name = CONDA_NAMES.get(requirement.name, requirement.name)
            expected[name] = requirement.specifier
    return expected


def test_environment_has_the_names_and_ranges_of_pyproject():
    environment = yaml.safe_load(read("environment.yml"))
    assert conda_ranges(environment) == expected_conda_ranges(project())


def test_environment_reads_conda_forge_and_installs_the_package():
    environment = yaml.safe_load(read("environment.yml"))
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    assert {"pip": ["-e ."]} in environment["dependencies"]


def constraints():
    lines = read("constraints.txt").splitlines()
    return [Requirement(line) for line in lines if line[:1] not in ("", "#")]


def test_constraints_pin_every_direct_dependency_and_nothing_else():
    pinned = [canonicalize_name(c.name) for c in constraints()]
    requirements = direct_requirements(project())
    direct = {canonicalize_name(r.name) for r in requirements}
    assert sorted(pinned) == sorted(direct)


def test_constraints_are_exact_and_within_the_ranges():
    ranges = {r.name: r.specifier for r in direct_requirements(project())}
    for constraint in constraints():
        (pin,) = constraint.specifier
        assert pin.operator == "=="
        assert pin.version in ranges[constraint.name], constraint


def test_the_floor_is_the_lowest_version_of_each_range():
    script = str(ROOT / "scripts" / "floors.py")
    done = run(sys.executable, script, "torch==2.13.0")
    found = {r.name: r for r in map(Requirement, done.stdout.splitlines())}
    ranges = [r for r in direct_requirements(project()) if r.marker is None]
    assert sorted(found) == sorted(r.name for r in ranges)
    for requirement in ranges:
        (pin,) = found[requirement.name].specifier
        (lowest,) = requirement.specifier
        torch = requirement.name == "torch"
        assert pin.version == ("2.13.0" if torch else lowest.version)


def test_the_versions_on_colab_are_within_the_ranges():
    ranges = {r.name: r.specifier for r in direct_requirements(project())}
    ranges["python"] = Requirement(
        "python" + project()["requires-python"]
    ).specifier
    outside = [n for n, v in COLAB.items() if not ranges[n].contains(v)]
    assert outside == []


def test_versions_agree():
    version = project()["version"]
    assert llm_systems_cookbook.__version__ == version
    assert yaml.safe_load(read("CITATION.cff"))["version"] == version


def test_citation_names_the_repository_and_licence_of_pyproject():
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["repository-code"] == project()["urls"]["Repository"]
    assert citation["license"] == project()["license"]


# What the commands do


@pytest.mark.parametrize("command", ["make run", "make test"])
def test_readme_names_the_command(command):
    assert command in read("README.md")


def environment_without_make(**changes):
    """Drop what an outer make hands to an inner one."""
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "COOKBOOK_TRACES")
    kept = {k: v for k, v in os.environ.items() if k not in outer}
    return kept | changes


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


@needs_make
@pytest.mark.parametrize(
    ("target", "part"),
    [
        ("run", "cookbook run"),
        ("test", "--nbmake --nbmake-timeout=120 notebooks tests"),
        ("lab", "cookbook lab"),
        ("lint", "nbstripout --verify"),
        ("floor", "scripts/floors.py torch=="),
        ("clean", "rm -rf .venv"),
    ],
)
def test_make_has_the_target(target, part):
    done = run("make", "-n", target, cwd=ROOT, env=environment_without_make())
    assert done.returncode == 0, done.stderr
    assert part in done.stdout


@needs_make
def test_make_alone_shows_the_help():
    done = run("make", cwd=ROOT, env=environment_without_make())
    assert done.returncode == 0, done.stderr
    assert "make run" in done.stdout
    assert "make test" in done.stdout


FAKE_PYTHON = """#!/bin/sh
# Stands in for Python: writes down its arguments and builds a .venv whose
# Python and cookbook are itself. Installing fails while the file `offline`
# exists.
echo "$*" >> calls
case "$*" in
    *"-m venv"*)
        mkdir -p .venv/bin
        cp fake .venv/bin/python
        cp fake .venv/bin/cookbook ;;
    *"pip install"*) test ! -e offline ;;
esac
"""
# Says it is Python of one version, and can build nothing.
FAKE_VERSION = """#!/bin/sh
if [ "$1" = -c ]; then
    exec "{python}" -c "import sys; sys.version_info = {version}
exec(sys.argv[1])" "$2"
fi
echo "$*" >> calls
exit 1
"""


class Checkout:
    """A copy of the build files with a stand-in for Python and cookbook."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder)
        self.stamp = folder / ".venv" / ".installed"
        executable(folder / "fake", FAKE_PYTHON)
        (folder / "notebooks").mkdir()

    def make(self, *arguments):
        return run(
            "make",
            *arguments,
            cwd=self.folder,
            env=environment_without_make(),
        )

    def calls(self, part):
        log = self.folder / "calls"
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        return [line for line in text.splitlines() if part in line]


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


@needs_make
def test_make_installs_once_with_the_constraints_and_extra_arguments(checkout):
    arguments = ("lab", "PYTHON=./fake", "PIP_ARGS=--pre")
    first = checkout.make(*arguments)
    assert checkout.stamp.exists(), first.stderr
    checkout.make(*arguments)
    (install,) = checkout.calls("pip install")
    assert "-c constraints.txt -e .[notebooks,test] --pre" in install


@needs_make
def test_make_installs_again_when_the_constraints_change(checkout):
    checkout.make("lab", "PYTHON=./fake")
    newer = checkout.stamp.stat().st_mtime + 10
    os.utime(checkout.folder / "constraints.txt", (newer, newer))
    checkout.make("lab", "PYTHON=./fake")
    assert len(checkout.calls("pip install")) == 2
    assert len(checkout.calls("-m venv")) == 1


@needs_make
def test_a_failed_install_leaves_no_stamp_and_is_tried_again(checkout):
    offline = checkout.folder / "offline"
    offline.touch()
    failed = checkout.make("lab", "PYTHON=./fake")
    assert failed.returncode != 0
    assert not checkout.stamp.exists()
    assert checkout.calls("lab --") == []
    offline.unlink()
    checkout.make("lab", "PYTHON=./fake")
    assert checkout.stamp.exists()


@needs_make
def test_an_install_that_fails_on_new_constraints_drops_the_stamp(checkout):
    checkout.make("lab", "PYTHON=./fake")
    newer = checkout.stamp.stat().st_mtime + 10
    os.utime(checkout.folder / "constraints.txt", (newer, newer))
    (checkout.folder / "offline").touch()
    checkout.make("lab", "PYTHON=./fake")
    assert not checkout.stamp.exists()


@needs_make
@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        ((2, 7, 18), False),
        ((3, 10, 9), False),
        ((3, 11, 0), True),
        ((3, 12, 4), True),
        ((3, 13, 9), True),
        ((3, 14, 0), False),
    ],
)
def test_make_refuses_an_unsupported_python(checkout, version, accepted):
    program = FAKE_VERSION.format(python=sys.executable, version=version)
    executable(checkout.folder / "other", program)
    done = checkout.make("run", "PYTHON=./other")
    refused = '"./other" is none of them' in done.stderr
    assert done.returncode != 0
    assert refused is not accepted
    assert bool(checkout.calls("-m venv")) is accepted


@needs_make
def test_clean_removes_what_was_built_and_keeps_the_rest(checkout):
    folder = checkout.folder
    built = [".venv/x", "results/x", "build/x", "notebooks/__pycache__/x"]
    kept = ["benchmarks/results/x", ".git/__pycache__/x", "notebooks/x"]
    for name in built + kept:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    assert checkout.make("clean").returncode == 0
    assert [n for n in built if (folder / n).exists()] == []
    assert [n for n in kept if not (folder / n).exists()] == []


@needs_bash
@pytest.mark.parametrize("with_traces", [True, False])
def test_ci_runs_make_test_with_the_traces_beside_it(tmp_path, with_traces):
    executable(tmp_path / "clone" / ".ci" / "run", read(".ci/run"))
    report = 'echo "make $* in $PWD, traces ${COOKBOOK_TRACES-unset}"'
    executable(tmp_path / "bin" / "make", f"#!/bin/sh\n{report}\n")
    traces = tmp_path.resolve() / "shared" / "traces"
    if with_traces:
        traces.mkdir(parents=True)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    # With it, cd would go to another folder of that name, and say so.
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "clone" / ".ci").mkdir(parents=True)
    done = run(
        "bash",
        "clone/.ci/run",
        cwd=tmp_path,
        env=environment_without_make(PATH=path, CDPATH=str(elsewhere)),
        stdin=subprocess.DEVNULL,
    )
    clone = tmp_path.resolve() / "clone"
    named = traces if with_traces else "unset"
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"make test in {clone}, traces {named}\n"


@needs_bash
def test_ci_fails_when_the_tests_fail(tmp_path):
    script = executable(tmp_path / ".ci" / "run", read(".ci/run"))
    executable(tmp_path / "bin" / "make", "#!/bin/sh\nexit 3\n")
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = run("bash", str(script), env=environment_without_make(PATH=path))
    assert done.returncode == 3


@needs_bash
def test_the_ci_script_is_executable():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


# What the tree holds

# Imports a module and, where it is a package, each module in it.
IMPORT_ALL = """
import importlib, pkgutil, sys
module = importlib.import_module("{module}")
for found in pkgutil.iter_modules(getattr(module, "__path__", [])):
    importlib.import_module("{module}." + found.name)
print("torch imported:", "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    "module",
    ["memory", "nb", "workloads", "plots", "tools.cli", "attention.backends"],
)
def test_importing_the_module_leaves_torch_unimported(module):
    program = IMPORT_ALL.format(module=f"llm_systems_cookbook.{module}")
    done = run(sys.executable, "-c", program, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch imported: False\n"


def tracked_texts():
    """Yield path and text of the files that git holds or would add."""
    listed = run(
        "git",
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "-z",
        cwd=ROOT,
    )
    if listed.returncode != 0:
        pytest.skip("needs a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file():
            data = path.read_bytes()
            if b"\0" not in data:
                yield name, data.decode("utf-8")


# Written in pieces, so this file does not hold what it looks for.
REGISTRY_HOSTS = re.compile(
    "|".join([r"pypi\." + "org", "python" + "hosted", r"npmjs\." + "org"])
)
HOME_FOLDERS = "|".join(["home", "Users", "root"])
LOCAL_PATHS = re.compile(rf"(?<![\w.~/-])/(?:{HOME_FOLDERS})/\w")


def files_matching(pattern):
    return [
        f"{name}: {match.group()}"
        for name, text in tracked_texts()
        for match in pattern.finditer(text)
    ]


def test_no_file_names_the_host_of_a_package_registry():
    assert files_matching(REGISTRY_HOSTS) == []


def test_no_file_holds_a_path_of_somebodys_machine():
    assert files_matching(LOCAL_PATHS) == []


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (REGISTRY_HOSTS, "see https://" + "pypi" + ".org/simple"),
        (LOCAL_PATHS, "open('/" + "home/ada/x')"),
        (LOCAL_PATHS, "cd /" + "root/main"),
    ],
)
def test_the_patterns_find_what_they_are_for(pattern, text):
    assert pattern.search(text)


def test_ruff_finds_nothing():
    assert_succeeds(sys.executable, "-m", "ruff", "check", ".")


def test_the_tree_is_formatted():
    assert_succeeds(sys.executable, "-m", "ruff", "format", "--check", ".")


def test_nbstripout_finds_no_output():
    paths = map(str, NOTEBOOKS)
    command = (sys.executable, "-m", "nbstripout", "--verify", "--keep-id")
    assert_succeeds(*command, *paths)


@pytest.mark.parametrize("arguments", [("lint",), ("sync", "--check")])
def test_cookbook_finds_nothing_to_change(arguments):
    cookbook = shutil.which("cookbook", path=sysconfig.get_path("scripts"))
    assert cookbook is not None, "the package is not installed"
    assert_succeeds(cookbook, *arguments, "--root", str(ROOT))


# What Colab and Kaggle have, and must not be replaced under a reader's feet.
PRESENT = {"numpy", "matplotlib", "torch", "numba"}


def test_a_notebook_becomes_a_script_of_python():
    exporter = ScriptExporter()
    endings = [exporter.from_filename(str(p))[1] for p in NOTEBOOKS]
    assert {e["output_extension"] for e in endings} == {".py"}


# Links to this repository. [project.urls] alone says its name.
OURS = re.compile(
    r"(?:colab\.research\.google\.com/github/|git clone https://github\.com/"
    r"|git\+https://github\.com/)([^\s)\"'\\]+)"
)


def slug():
    return project()["urls"]["Repository"].removeprefix("https://github.com/")


def addresses():
    """Return what a link to us may name: the whole, or one notebook."""
    files = {f"{slug()}/blob/main/notebooks/{p.name}": p for p in NOTEBOOKS}
    return {slug(): None} | files


def test_the_readme_links_to_this_repository_and_to_every_notebook():
    assert set(OURS.findall(read("README.md"))) == set(addresses())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_opens_itself_on_colab_and_installs_this_package(path):
    cells = json.loads(path.read_text("utf-8"))["cells"]
    links = {c["id"]: OURS.findall("".join(c["source"])) for c in cells}
    own = [link for link, file in addresses().items() if file == path]
    assert links["badges"] == own
    assert links["set-up"] == [slug()]
    assert {link for ls in links.values() for link in ls} <= set(addresses())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_set_up_installs_the_other_dependencies(path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    needed = project["project"]["dependencies"]
    names = {re.match(r"[\w-]+", line)[0] for line in needed}
    cells = json.loads(path.read_text("utf-8"))["cells"]
    (set_up,) = ["".join(c["source"]) for c in cells if c["id"] == "set-up"]
    installed = re.search(r"%pip install -q ([\w ]+)$", set_up, re.MULTILINE)
    assert set(installed[1].split()) == names - PRESENT
