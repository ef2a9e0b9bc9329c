"""Write the SBOM of an image as CycloneDX 1.6: Debian packages and Python distributions.

`sbom.py NAME VERSION FOLDER... > bom.json`, run in the image that it describes, by any Python >= 3.11 without packages.
FOLDER: folders with installed distributions.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from email.parser import HeaderParser
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

DPKG_STATUS = Path("/var/lib/dpkg/status")
MOST_LICENSE_LENGTH = 100
"""Characters. Some packages have the whole text in place of the name."""


def python_components(folders: list[str]) -> Iterator[dict[str, Any]]:
    """A component for each distribution installed in `folders`."""
    for distribution in distributions(path=folders):
        name = distribution.metadata["Name"].lower().replace("_", "-")
        component: dict[str, Any] = {
            "type": "library",
            "name": name,
            "version": distribution.version,
            "purl": f"pkg:pypi/{quote(name)}@{quote(distribution.version)}",
        }
        license_name = license_of(distribution)
        if license_name:
            component["licenses"] = [{"license": {"name": license_name}}]
        yield component


def license_of(distribution: Distribution) -> str:
    """The name of its licence as the distribution says it; empty where it doesn't."""
    metadata = distribution.metadata.json
    said = metadata.get("license_expression") or metadata.get("license") or ""
    if said and len(str(said)) <= MOST_LICENSE_LENGTH:
        return str(said)
    classifiers = metadata.get("classifier") or []
    return next((str(each).rpartition(" :: ")[2] for each in classifiers if str(each).startswith("License ::")), "")


def debian_components() -> Iterator[dict[str, Any]]:
    """A component for each of Debian's packages; none where the base image is no Debian."""
    if not DPKG_STATUS.is_file():
        return
    for text in DPKG_STATUS.read_text().split("\n\n"):
        package = HeaderParser().parsestr(text)
        if "installed" not in (package["Status"] or "").split():
            continue
        name, version, architecture = package["Package"], package["Version"], package["Architecture"]
        yield {
            "type": "library",
            "name": name,
            "version": version,
            "purl": f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={architecture}",
        }


def bill(name: str, version: str, folders: list[str]) -> dict[str, Any]:
    """The whole document."""
    components = [*python_components(folders), *debian_components()]
    components.sort(key=lambda each: str(each["purl"]))
    for component in components:
        component["bom-ref"] = component["purl"]
    interpreter = {"type": "platform", "name": "python", "version": platform.python_version(), "bom-ref": "python"}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": name, "version": version, "bom-ref": name}},
        "components": [interpreter, *components],
    }


def main() -> None:
    """Write the document to standard output."""
    name, version, *folders = sys.argv[1:]
    json.dump(bill(name, version, folders), sys.stdout, indent=1)


if __name__ == "__main__":
    main()
