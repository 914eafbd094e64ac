"""Print the lowest version of each dependency, as requirements for pip.

    python scripts/floors.py torch==2.13.0

A name given with a version takes it instead. What only some platforms need,
Triton, is left out.
"""

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def floors(chosen: list[str]) -> list[str]:
    """Return `name==version` for each, of every extra too."""
    project = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    ranges = [*project["dependencies"], *(r for e in extras for r in e)]
    versions = dict(pin.split("==") for pin in chosen)
    found = [re.fullmatch(r"([\w-]+)>=([\w.]+)", line) for line in ranges]
    return [
        f"{match[1]}=={versions.get(match[1], match[2])}"
        for match in found
        if match
    ]


if __name__ == "__main__":
    print("\n".join(floors(sys.argv[1:])))
