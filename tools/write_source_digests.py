"""Writes the digest of each source in the engine's FINGERPRINTED_SOURCES, beside the version that it was taken at.

A digest is of the syntax: comments, docstrings and formatting don't count. The command refuses to record a source that
has changed under an unchanged version; increase its version in `runner/fingerprint.py` first.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from pagestream_engine.runner.fingerprint import FINGERPRINTED_SOURCES

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "pagestream_engine": ROOT / "services" / "engine" / "src" / "pagestream_engine",
    "pagestream_kernels": ROOT / "kernels" / "src" / "pagestream_kernels",
}
DIGESTS = ROOT / "tests" / "unit" / "engine" / "runner" / "source_digests.json"
HELP = "increase its version in runner/fingerprint.py, then run: .venv/bin/python tools/write_source_digests.py"
_CPP = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|\w+|[^\w\s])', re.DOTALL)
"""Comments, or (as group 1) tokens of C++."""


def path_of(source: str) -> Path:
    """Return the file of a declared source.

    Raises:
        FileNotFoundError: there is none: it was moved or deleted.
    """
    package, *names = source.split(".")
    path = FOLDERS[package].joinpath(*names)
    for suffix in (".py", ".cpp", ".h", ".json"):
        if path.with_suffix(suffix).is_file():
            return path.with_suffix(suffix)
    raise FileNotFoundError(
        f"{source}: no such source; FINGERPRINTED_SOURCES in runner/fingerprint.py must name it anew"
    )


def digest_of(path: Path) -> str:
    """Return 16 hexadecimal digits that change with the meaning of a Python, C++ or JSON source."""
    text = path.read_text()
    if path.suffix == ".json":
        syntax = json.dumps(json.loads(text), sort_keys=True)
    else:
        syntax = python_syntax(text) if path.suffix == ".py" else cpp_tokens(text)
    return hashlib.sha256(syntax.encode()).hexdigest()[:16]


def python_syntax(text: str) -> str:
    """Return the syntax tree of Python code as a text without docstrings, equal under all versions of Python."""
    return "\n".join(_nodes(ast.parse(text)))


def cpp_tokens(text: str) -> str:
    """Return the tokens of C++ code, a line each, without comments."""
    return "\n".join(match[1] for match in _CPP.finditer(text) if match[1])


def _nodes(value: object) -> Iterator[str]:
    """Empty fields are left out: later versions of Python have more of them (`type_params`)."""
    if isinstance(value, ast.Constant):
        yield repr(value.value)
    elif isinstance(value, ast.AST):
        yield f"({type(value).__name__}"
        for name, field in ast.iter_fields(value):
            if field not in (None, []) and name not in ("ctx", "type_comment"):
                yield name
                yield from _nodes(field)
        yield ")"
    elif isinstance(value, list):
        for item in value:
            if not _is_text_alone(item):
                yield from _nodes(item)
        yield ";"
    else:
        yield repr(value)


def _is_text_alone(node: object) -> bool:
    """Return whether a statement is a string: the documentation of a module, class, function or field."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def recorded() -> dict[str, dict[str, object]]:
    """Return what the committed file says of each source: its version and digest."""
    entries: dict[str, dict[str, object]] = json.loads(DIGESTS.read_text()) if DIGESTS.is_file() else {}
    return entries


def taken(versions: Mapping[str, int] = FINGERPRINTED_SOURCES) -> dict[str, dict[str, object]]:
    """Return version and digest of each source as it is now."""
    return {
        source: {"version": version, "digest": digest_of(path_of(source))}
        for source, version in sorted(versions.items())
    }


def changed_without_version(
    now: Mapping[str, Mapping[str, object]], before: Mapping[str, Mapping[str, object]]
) -> list[str]:
    """Return the sources whose digest has changed while their version has not."""
    return [
        source
        for source, entry in now.items()
        if source in before and entry["version"] == before[source]["version"] and entry != before[source]
    ]


def main() -> int:
    """Write the file; return the exit status."""
    now = taken()
    changed = changed_without_version(now, recorded())
    for source in changed:
        print(f"{source} has changed: {HELP}", file=sys.stderr)
    if changed:
        return 1
    DIGESTS.write_text(json.dumps(now, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
