"""Reads the PTX of one kernel as Triton writes it: parameters, registers, labels and instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from support.kernels.emulator.faults import Fault

_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\{", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+\.\w+\s+(?:\.ptr[^,]*?\s)?(\w+)\s*(?:,|$)")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)$")
_LABEL = re.compile(r"^(\$?[\w$]+):\s*")


@dataclass(frozen=True, slots=True)
class Instruction:
    """`@!%p1 ld.shared.v2.b32 {%r1, %r2}, [%r3+8];`"""

    text: str
    opcode: str
    """`ld`"""
    modifiers: tuple[str, ...]
    """`shared`, `v2`, `b32`"""
    operands: tuple[str, ...]
    predicate: str | None
    """`!%p1`: the lanes that take part."""

    @property
    def type(self) -> str:
        """The last modifier: of a type, or `f32` of `cvt.f16.f32`, the source's."""
        return self.modifiers[-1]


@dataclass(slots=True)
class Program:
    """One kernel."""

    name: str
    parameters: tuple[str, ...]
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    """Of an instruction: its place."""
    widths: dict[str, int] = field(default_factory=dict)
    """Bits of registers, by the name without its number: 1 for predicates."""

    def width(self, register: str) -> int:
        """Return the bits of a register.

        Raises:
            Fault: it isn't declared.
        """
        width = self.widths.get(register) or self.widths.get(register.rstrip("0123456789"))
        if width is None:
            raise Fault(f"{self.name}: no register {register}")
        return width


def parse(text: str) -> Program:
    """Read the only kernel of a module of PTX.

    Raises:
        Fault: there is none.
    """
    text = re.sub(r"//[^\n]*", "", text)
    entry = _ENTRY.search(text)
    if entry is None:
        raise Fault("the PTX has no kernel")
    program = Program(entry[1], tuple(_PARAMETER.findall(entry[2].strip() + ",")))
    scopes: list[dict[str, str]] = []
    num_scopes = 0
    for statement in _statements(text[entry.end() :]):
        if statement == "{":  # of inline assembly, with registers of its own
            scopes.append({})
            num_scopes += 1
        elif statement == "}":
            scopes.pop()
        elif statement.startswith(".reg"):
            _declare(program, statement, scopes, num_scopes)
        elif label := _LABEL.match(statement):
            program.labels[label[1]] = len(program.instructions)
        elif not statement.startswith("."):
            for scope in scopes:
                for name, unique in scope.items():
                    statement = re.sub(rf"(?<![%\w$.]){name}\b(?![.\w])", unique, statement)  # noqa: PLW2901
            program.instructions.append(_instruction(statement))
    return program


def split_operands(text: str) -> tuple[str, ...]:
    """Split at commas outside of braces and brackets: `{%r1, %r2}, [%r3]`."""
    return tuple(part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text) if part.strip())


def _statements(body: str) -> Iterator[str]:
    depth = 1
    for raw in re.split(r"[;\n]", body):
        rest = " ".join(raw.split())
        while rest:
            if rest[0] in "{}":
                depth += 1 if rest[0] == "{" else -1
                if depth == 0:
                    return
                yield rest[0]
                rest = rest[1:].strip()
            elif label := _LABEL.match(rest):
                yield label[0].strip()
                rest = rest[label.end() :]
            else:
                inner = rest.endswith("}") and rest.count("}") > rest.count("{")
                yield rest.removesuffix("}").strip() if inner else rest
                rest = "}" if inner else ""


def _declare(program: Program, statement: str, scopes: list[dict[str, str]], num_scopes: int) -> None:
    declared = _REGISTERS.match(statement)
    if declared is None:
        raise Fault(f"{program.name}: {statement}")
    width = 1 if declared[1] == "pred" else int(declared[1][1:])
    for each in declared[2].split(","):
        name, _, count = each.strip().partition("<")
        if not scopes:
            program.widths[name] = width
            continue
        for given in [f"{name}{number}" for number in range(int(count.rstrip(">")))] if count else [name]:
            unique = f"%{given}_of_scope_{num_scopes}_"
            scopes[-1][re.escape(given)] = unique
            program.widths[unique] = width


def _instruction(text: str) -> Instruction:
    rest, predicate = text, None
    if rest.startswith("@"):
        predicate, rest = rest[1:].split(None, 1)
    name, _, operands = rest.partition(" ")
    opcode, *modifiers = name.split(".")
    modifiers = [part for each in modifiers for part in each.split("::") if part]
    return Instruction(text, opcode, tuple(modifiers), split_operands(operands), predicate)
