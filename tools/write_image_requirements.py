"""Writes deploy/images/requirements/*.txt: what each image installs beside this project's packages.

The names come from the pyproject files, the versions from constraints.txt, so that an image's largest layer changes
only with that file or these lists. An engine on a CPU needs no Triton.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "deploy" / "images" / "requirements"
PACKAGES = (
    "proto",
    "kernels",
    *(f"services/{name}" for name in ("options", "scaling", "grammars", "telemetry", "streams", "batches")),
    *(f"services/{name}" for name in ("engine", "worker", "gateway")),
    "operator",
)
IMAGES: dict[str, tuple[str, frozenset[str]]] = {
    "gateway": ("pagestream-gateway", frozenset()),
    "operator": ("pagestream-operator", frozenset()),
    "engine": ("pagestream-worker", frozenset({"triton"})),
    "engine-cuda": ("pagestream-worker", frozenset()),
}
"""The packages that an image installs, and the requirements that it leaves out."""


def closure(wanted: str) -> tuple[set[str], set[str]]:
    """Return this project's packages that `wanted` needs, and their requirements of others."""
    projects = {}
    for package in PACKAGES:
        project = tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"]
        projects[canonicalize_name(project["name"])] = project
    own: set[str] = set()
    others: set[str] = set()
    waiting = [Requirement(wanted)]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name not in projects:
            others.add(name)
            continue
        own.add(name)
        project = projects[name]
        named = list(project["dependencies"])
        for extra in requirement.extras:
            named += project["optional-dependencies"][extra]
        found = (Requirement(each) for each in named)
        waiting += [each for each in found if each.marker is None or each.marker.evaluate()]
    return own, others


def text_of(image: str) -> str:
    """Return the content of an image's file."""
    wanted, left_out = IMAGES[image]
    _, others = closure(wanted)
    head = f"# Written by tools/write_image_requirements.py from the packages that {wanted} needs.\n"
    return head + "".join(f"{name}\n" for name in sorted(others - left_out))


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for image in IMAGES:
        (FOLDER / f"{image}.txt").write_text(text_of(image))


if __name__ == "__main__":
    sys.exit(main())
