"""Writes the exact versions of the running environment to constraints.txt.

Local version suffixes (torch's "+cpu") are cut off, so that the file installs elsewhere; this project's packages and
the libraries that only a CUDA build of torch needs are left out.
"""

from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = "pagestream"
VENDOR_PREFIXES = ("nvidia-", "cuda-")
HEADER = "# Exact versions of the whole environment; written by `make constraints`.\n"


def pinned_versions() -> list[str]:
    """Return one `name==version` for each installed distribution, sorted by name."""
    pins: dict[str, str] = {}
    for distribution in distributions():
        name = distribution.metadata["Name"].lower().replace("_", "-")
        if name == PROJECT or name.startswith((PROJECT + "-", *VENDOR_PREFIXES)):
            continue
        pins[name] = distribution.version.split("+", 1)[0]
    return [f"{name}=={version}" for name, version in sorted(pins.items())]


def main() -> None:
    """Write the file at the repository's root."""
    (ROOT / "constraints.txt").write_text(HEADER + "\n".join(pinned_versions()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
