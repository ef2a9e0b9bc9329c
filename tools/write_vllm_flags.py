"""Write the lists of docs/coming-from.md: what becomes of each flag of `vllm serve`.

    python tools/write_vllm_flags.py [--check]
    python tools/write_vllm_flags.py --source FOLDER

The data are those that `pagestream serve` reads command lines by. With --source it is compared with a source tree
of vLLM's (its sdist, unpacked): flags that it lacks, or that take another number of values, are printed.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from pagestream_cli.serve.vllm_flags import FLAGS, SHORT_NAMES, Arity, Idle, Refused, Taken

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coming-from.md"
BEGIN, END = "<!-- flags of vLLM -->", "<!-- end of flags -->"
_WIDTH = 118
_KNOWN = {"--allowed-headers", "--allowed-methods", "--allowed-origins", "--grpc-port"}
"""Flags that vLLM's code adjusts after their types, and one that is ours as well."""


def lists() -> str:
    """Return the table of flags that are taken, and the lists of others by reason."""
    idle = (
        (f"{name} {' | '.join(flag.values)}" if flag.values else name, flag.why)
        for name, flag in FLAGS.items()
        if isinstance(flag, Idle)
    )
    refused = ((name, flag.why) for name, flag in FLAGS.items() if isinstance(flag, Refused))
    return "\n".join(
        [
            "| `vllm serve` | `pagestream serve` |",
            "|---|---|",
            *_taken_rows(),
            "",
            "These are accepted and change nothing, which one line of warning says; `|` stands between the values that",
            "are taken:",
            "",
            *_by_reason(idle),
            "",
            "All others are refused by name, unless their value asks for nothing (`None`, `{}`, a division into one):",
            "",
            *_by_reason(refused),
        ]
    )


def _taken_rows() -> Iterator[str]:
    """Yield a row for each cell; flags that are the same share rows."""
    same: list[str] = []
    for name, flag in FLAGS.items():
        if not isinstance(flag, Taken):
            continue
        shorts = [short for short, long in SHORT_NAMES.items() if long == name]
        shown = ", ".join(f"`{each}`" for each in (name, *shorts))
        if flag.text:
            yield f"| {shown} | {flag.text} |"
        else:
            same.append(shown)
    for line in _packed(same, _WIDTH - len("|  | the same |")):
        yield f"| {line.removesuffix(',')} | the same |"


def _by_reason(flags: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a list item for each reason."""
    by_reason: dict[str, list[str]] = {}
    for shown, why in flags:
        by_reason.setdefault(why, []).append(f"`{shown}`")
    for why, names in by_reason.items():
        yield f"- {why[0].upper() if why[0].isalpha() else why[0]}{why[1:]}:"
        yield from (f"  {line}" for line in _packed(names, _WIDTH - 2))


def _packed(cells: list[str], width: int) -> Iterator[str]:
    """Yield lines with as many of the cells as fit."""
    line = ""
    for index, cell in enumerate(cells):
        ended = f"{cell}," if index + 1 < len(cells) else cell
        if line and len(line) + 1 + len(ended) > width:
            yield line
            line = ended
        else:
            line = f"{line} {ended}".strip()
    yield line


def page(text: str) -> str:
    """Return the page with the lists of now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{lists()}\n\n{END}{after}"


def flags_of_source(root: Path) -> dict[str, Arity]:
    """Return the flags of `vllm serve` in a source tree, with the number of their values."""
    configs = [*root.glob("vllm/config/*.py"), *root.glob("vllm/config.py")]
    parsers = [root / "vllm/engine/arg_utils.py", *root.glob("vllm/entrypoints/**/cli_args.py")]
    types = {name: kind for file in (*configs, *parsers) for _, name, kind in _fields(file)}
    found: dict[str, Arity] = {}
    for file in parsers:
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
                for name, arity in _declared(call, types):
                    found.setdefault(name, arity)
        if file.name == "cli_args.py":
            frontend = [each for each in _fields(file) if each[0].endswith("FrontendArgs")]
            found |= {f"--{name.replace('_', '-')}": _arity(kind) for _, name, kind in frontend}
    return found


def _fields(file: Path) -> Iterator[tuple[str, str, str]]:
    """Yield class, name and type of each annotated field."""
    for node in ast.walk(ast.parse(file.read_text())):
        for field in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                yield node.name, field.target.id, ast.unparse(field.annotation)  # type: ignore[attr-defined]


def _declared(call: ast.Call, types: dict[str, str]) -> Iterator[tuple[str, Arity]]:
    names = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    if not names or not names[0].startswith("-"):
        return
    name = max(names, key=len)
    given = {each.arg or "": ast.unparse(each.value) for each in call.keywords}
    if re.search("store_|StoreBoolean|BooleanOptional", given.get("action", "")):
        yield name, Arity.SWITCH
    elif field := re.search(r"kwargs\['(\w+)'\]", given.get("", "")):
        yield name, _arity(types.get(field[1], ""))
    else:
        yield name, {"'+'": Arity.MANY, "'*'": Arity.MANY, "'?'": Arity.OPTIONAL}.get(given.get("nargs", ""), Arity.ONE)


def _arity(kind: str) -> Arity:
    words = set(re.findall(r"\w+", kind))
    if "bool" in words:
        return Arity.OPTIONAL if "str" in words else Arity.SWITCH
    if "dict" in words:
        return Arity.ONE
    is_list = bool({"list", "List", "tuple", "set"} & words) and "Literal" not in words
    return Arity.MANY if is_list else Arity.ONE


def main() -> int:
    """Write the page, check it, or compare with a source. Returns 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--source", type=Path, metavar="FOLDER", help="source tree of vLLM to compare with")
    options = parser.parse_args()
    if options.source is not None:
        found = flags_of_source(options.source)
        known = {name for name, flag in FLAGS.items() if found.get(name) is flag.arity} | _KNOWN
        differing = sorted(set(found) - known)
        print(f"{len(found)} flags; these differ: {', '.join(differing) or 'none'}")
        return int(bool(differing))
    text = PAGE.read_text()
    wanted = page(text)
    if options.check:
        return int(text != wanted)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
