"""Finds assignments in loops of kernels that Triton's compiler loses.

Triton compiles a loop's body once for trial and carries the names whose value is another one than before the loop. It
compares values, not names: where `before` and `now` are one value before the loop, and the body says `before = now` and
then gives `now` a new value, `before` ends the trial with the value it began with, and keeps it for ever. The
interpreter runs the Python as it stands and shows nothing (`docs/kernels.md`, "What Triton does").
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import NamedTuple, TypeAlias

Value: TypeAlias = "frozenset[object] | tuple[Value, ...]"
"""What an expression may be: any of some values of before, or a tuple."""
Names: TypeAlias = dict[str, Value]

_ENTRY = "entry"
_SAME_VALUE = frozenset(
    ("abs", "assume", "broadcast_to", "cast", "max_constancy", "max_contiguous", "multiple_of", "reshape", "to")
)
"""Functions and methods that may return their argument itself."""


class LostCarry(NamedTuple):
    """An assignment that a compiled loop may lose."""

    function: str
    line: int
    """Of the loop."""
    name: str
    source: str
    """The name whose value of before it gets."""


def lost_carries(source: str) -> list[LostCarry]:
    """Find the assignments in a module's loops that Triton may lose.

    Whether two names may be one value is judged by the text: by assignments, tuples, both branches of each condition,
    and operations that may return their argument. Calls of other kernels and all other operations give new values.
    """
    found: set[LostCarry] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            found.update(_Function(node.name).run(node))
    return sorted(found)


def in_package(folder: Path) -> dict[str, list[LostCarry]]:
    """The same of all modules of a package, by path; modules without any are left out."""
    paths = sorted(folder.rglob("*.py"))
    by_path = {str(path.relative_to(folder)): lost_carries(path.read_text(encoding="utf-8")) for path in paths}
    return {path: found for path, found in by_path.items() if found}


class _Function:
    """One function, executed on sets of possible values."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._numbers = count()
        self._found: list[LostCarry] = []

    def run(self, function: ast.FunctionDef) -> list[LostCarry]:
        self._execute(function.body, {each.arg: self._new() for each in function.args.args})
        return self._found

    def _new(self) -> Value:
        return frozenset({next(self._numbers)})

    # -- statements --

    def _execute(self, statements: Iterable[ast.stmt], names: Names) -> None:
        for statement in statements:
            match statement:
                case ast.Assign(targets=targets, value=value):
                    result = self._value(value, names)
                    for target in targets:
                        self._assign(target, result, names)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self._assign(target, self._value(value, names), names)
                case ast.AugAssign(target=target):
                    self._assign(target, self._new(), names)
                case ast.If(body=body, orelse=orelse):
                    branches = [dict(names), dict(names)]
                    self._execute(body, branches[0])
                    self._execute(orelse, branches[1])
                    for name in {*branches[0], *branches[1]}:
                        either = [branch[name] for branch in branches if name in branch]
                        names[name] = either[0] if either[0] == either[-1] else _any_of(either)
                case ast.For(target=target, body=body):
                    self._loop(statement, target, body, names)
                case ast.While(body=body):
                    self._loop(statement, None, body, names)
                case ast.With(body=body):
                    self._execute(body, names)

    def _assign(self, target: ast.expr, value: Value, names: Names) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            for index, each in enumerate(target.elts):
                self._assign(each, _element(value, index), names)

    def _loop(self, loop: ast.stmt, target: ast.expr | None, body: Iterable[ast.stmt], names: Names) -> None:
        before = dict(names)
        assigned = {name for name in _assigned(body) if name in before}
        inner = dict(names)
        for name in assigned:
            inner[name] = _with_entry(before[name], name)
        if target is not None:
            self._assign(target, self._new(), inner)
        entries = dict(inner)
        self._execute(body, inner)
        for name in assigned:
            for other in sorted(assigned - {name}):
                gets_it = (other, _ENTRY) in _leaves(inner[name])
                if gets_it and _leaves(before[name]) & _leaves(before[other]) and inner[other] != entries[other]:
                    self._found.append(LostCarry(self._name, loop.lineno, name, other))
        for name in _assigned(body):
            names[name] = self._new()

    # -- expressions --

    def _value(self, node: ast.expr, names: Mapping[str, Value]) -> Value:  # noqa: PLR0911 - one a kind
        match node:
            case ast.Name(id=name) if name in names:
                return names[name]
            case ast.Tuple(elts=elements):
                return tuple(self._value(each, names) for each in elements)
            case ast.IfExp(body=body, orelse=orelse):
                return _any_of([self._value(body, names), self._value(orelse, names)])
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self._value(operand, names)
            case ast.Subscript(value=value, slice=ast.Constant(value=int() as index)):
                return _element(self._value(value, names), index)
            case ast.Call(func=ast.Attribute(value=owner, attr=attribute), args=arguments) if attribute in _SAME_VALUE:
                given = [self._value(each, names) for each in (owner, *arguments[:1])]
                return _any_of([*given, self._new()])
            case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in _SAME_VALUE:
                return _any_of([self._value(first, names), self._new()])
        return self._new()


def _assigned(body: Iterable[ast.stmt]) -> set[str]:
    nodes = (node for statement in body for node in ast.walk(statement))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _element(value: Value, index: int) -> Value:
    if isinstance(value, tuple):
        return value[index]
    return frozenset((each, index) for each in value)


def _with_entry(value: Value, name: str) -> Value:
    """Mark a value as that of a name where a loop's body begins."""
    if isinstance(value, tuple):
        return tuple(_with_entry(each, name) for each in value)
    return value | {(name, _ENTRY)}


def _any_of(values: Iterable[Value]) -> Value:
    return frozenset(leaf for value in values for leaf in _leaves(value))


def _leaves(value: Value) -> frozenset[object]:
    return value if isinstance(value, frozenset) else frozenset(_leaf_of(value))


def _leaf_of(value: tuple[Value, ...]) -> Iterator[object]:
    for each in value:
        yield from _leaves(each)
