"""Mutants: small changes of Python and Lua sources that a test ought to notice, and their drawing by seed.

A mutant is known by its area, the name and text of its function, its operator and its place among that operator's in
the function: so it is drawn again, and found again, in a tree where its file has moved.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

FLIPS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
EXTREMES = {"min": "max", "max": "min"}
LARGE = 100
LOGS = re.compile(r"(self\.)?_?(log|logger|logging)\.")
LUA_FLIPS = {
    "==": ("~=",),
    "~=": ("==",),
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "and": ("or",),
    "or": ("and",),
    "not": ("",),
    "true": ("false",),
    "false": ("true",),
    "+": ("-",),
    "-": ("+",),
}
LUA_KEYWORDS = ("return", "and", "or", "not", "then", "if", "while", "until", "do", "in")
LUA_TOKEN = re.compile(
    r"(?P<skip>--\[\[.*?\]\]|--[^\n]*|'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\"|\s+)"
    r"|(?P<number>\d+(?:\.\d+)?)|(?P<word>[A-Za-z_][\w.:]*)|(?P<operator>[=~<>]=|\.\.|[^\s\w])",
    re.DOTALL,
)
LUA_CALL = re.compile(r"^[ \t]*(redis\.p?call\([^\n]*\))[ \t]*$", re.MULTILINE)
LUA_FUNCTION = re.compile(r"^local function ([\w.]+)\(.*?^end$", re.MULTILINE | re.DOTALL)


class Edit(NamedTuple):
    """A change of a source: the bytes from `start` to `end` become `text`."""

    operator: str
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Mutant:
    """A change of one function of a file."""

    area: str
    file: str
    """Below the checkout."""
    function: str
    """Its qualified name; `<script>` for what is in no function of a Lua script."""
    digest: str
    """Of the function's text, without comments."""
    operator: str
    index: int
    """Among the changes of this operator in the function."""
    line: int
    edit: Edit
    before: str

    @property
    def key(self) -> str:
        """What it is known by, wherever its file is."""
        return "|".join((self.area, self.function, self.digest, self.operator, str(self.index)))

    def rank(self, seed: int) -> str:
        """Return its place in the order of a drawing."""
        return _digest(f"{seed}|{self.key}")

    def applied(self, source: bytes) -> bytes:
        """Return the source with the change."""
        return source[: self.edit.start] + self.edit.text.encode() + source[self.edit.end :]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.operator}: {self.before!r} -> {self.edit.text!r}"


def mutants_of(area: str, file: str, source: bytes) -> list[Mutant]:
    """Return all mutants of a file."""
    functions = _lua_functions(source) if file.endswith(".lua") else _python_functions(source)
    result = []
    for name, digest, edits in functions:
        counts: dict[str, int] = {}
        for edit in sorted(edits, key=lambda each: (each.start, each.end, each.text)):
            index = counts[edit.operator] = counts.get(edit.operator, -1) + 1
            line = source.count(b"\n", 0, edit.start) + 1
            before = source[edit.start : edit.end].decode()
            result.append(Mutant(area, file, name, digest, edit.operator, index, line, edit, before))
    return result


def is_another_program(file: str, source: bytes, mutated: bytes) -> bool:
    """Whether a mutated source compiles, and to something else. The changes of Lua are such that it does."""
    if file.endswith(".lua"):
        return True
    try:
        tree = ast.parse(mutated)
        compile(mutated, "<mutant>", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return ast.dump(tree) != ast.dump(ast.parse(source))


def draw(candidates: list[Mutant], sources: Mapping[str, bytes], count: int, seed: int) -> list[Mutant]:
    """Draw mutants that are other programs, one of a function at most.

    Args:
        candidates: of all files.
        sources: of the files.
        count: of mutants; fewer where there are not so many functions.
        seed: of the order in which they are drawn.
    """
    drawn: dict[tuple[str, str], Mutant] = {}
    for mutant in sorted(candidates, key=lambda each: each.rank(seed)):
        place = mutant.function, mutant.digest
        source = sources[mutant.file]
        if place not in drawn and is_another_program(mutant.file, source, mutant.applied(source)):
            drawn[place] = mutant
            if len(drawn) == count:
                break
    return list(drawn.values())


def other_number(number: int | float) -> int | float:
    """Return a number one above; half of a large one, to which one more would make no difference."""
    if number < LARGE:
        return number + 1
    return number // 2 if isinstance(number, int) else number / 2


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# -- Python --


def _python_functions(source: bytes) -> Iterator[tuple[str, str, list[Edit]]]:
    """Yield name, digest and edits of each function and method that is in no other one."""
    starts = [0]
    for line in io.BytesIO(source):
        starts.append(starts[-1] + len(line))

    def inside(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str, list[Edit]]]:
        for node in body:
            match node:
                case ast.ClassDef():
                    yield from inside(node.body, f"{prefix}{node.name}.")
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    statements = _without_docstring(node.body)
                    digest = _digest("\n".join(map(ast.dump, statements)))
                    edits = [edit for statement in statements for edit in _Edits(starts, node.name).of(statement)]
                    yield f"{prefix}{node.name}", digest, edits
                case _:
                    pass

    yield from inside(ast.parse(source).body, "")


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    match body:
        case [ast.Expr(value=ast.Constant(value=str())), *rest]:
            return rest
    return body


class _Edits:
    """Finds the edits of a function's statements."""

    def __init__(self, starts: list[int], function: str) -> None:
        self._starts = starts
        self._function = function

    def of(self, node: ast.AST) -> Iterator[Edit]:
        """Yield the edits of a node and of what is in it."""
        if isinstance(node, ast.JoinedStr | ast.Assert) or _is_log(node):
            return
        yield from self._of_statement(node)
        yield from self._of_expression(node)
        if isinstance(node, ast.Raise):
            return
        for name, child in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list", "args") or isinstance(node, ast.Call):
                for each in child if isinstance(child, list) else [child]:
                    if isinstance(each, ast.AST):
                        yield from self.of(each)

    def _of_statement(self, node: ast.AST) -> Iterator[Edit]:
        match node:
            case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
                yield self._edit("removed call", node, "pass")
            case ast.AugAssign() | ast.Delete():
                yield self._edit("removed statement", node, "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if self._function != "__init__":
                yield self._edit("removed statement", node, "pass")
            case ast.Raise():
                yield self._edit("removed raise", node, "pass")
            case ast.Break():
                yield self._edit("break", node, "continue")
            case ast.Continue():
                yield self._edit("continue", node, "break")
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield self._edit("changed return", value, "None")
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                if not isinstance(test, ast.Compare) and not _is_not(test):
                    yield self._edit("negated condition", test, f"(not ({ast.unparse(test)}))")
            case _:
                pass

    def _of_expression(self, node: ast.AST) -> Iterator[Edit]:
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                for flipped in FLIPS[type(operator)]:
                    new = ast.Compare(left, [flipped()], [right])
                    yield self._edit("flipped comparison", node, f"({ast.unparse(new)})")
            case ast.BoolOp(op=boolean, values=values):
                other = ast.Or() if isinstance(boolean, ast.And) else ast.And()
                yield self._edit("and/or", node, f"({ast.unparse(ast.BoolOp(other, values))})")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._edit("removed not", node, f"({ast.unparse(operand)})")
            case ast.BinOp(left=left, op=arithmetic, right=right) if type(arithmetic) in ARITHMETIC:
                if not (_is_text(left) or _is_text(right)):
                    new_sum = ast.BinOp(left, ARITHMETIC[type(arithmetic)](), right)
                    yield self._edit("arithmetic", node, f"({ast.unparse(new_sum)})")
            case ast.Constant(value=bool() as truth):
                yield self._edit("constant", node, str(not truth))
            case ast.Constant(value=int() | float() as number):
                yield self._edit("constant", node, repr(other_number(number)))
            case ast.Call(func=ast.Name(id=name)) if name in EXTREMES:
                yield self._edit("min/max", node.func, EXTREMES[name])
            case _:
                pass

    def _edit(self, operator: str, node: ast.stmt | ast.expr, text: str) -> Edit:
        start = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        return Edit(operator, start, end, text)


def _is_not(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _is_log(node: ast.AST) -> bool:
    """Whether it is a statement that logs."""
    return isinstance(node, ast.Expr) and LOGS.match(ast.unparse(node)) is not None


# -- Lua --


def _lua_functions(source: bytes) -> Iterator[tuple[str, str, list[Edit]]]:
    """Yield name, digest and edits of each function on the top level of a script, and of what is in none."""
    text = source.decode("ascii", "replace")
    edits = list(_lua_edits(text))
    spans = [(each.start(), each.end(), each.group(1)) for each in LUA_FUNCTION.finditer(text)]
    outside = text
    for start, end, name in reversed(spans):
        outside = outside[:start] + outside[end:]
        yield name, _digest(_lua_code(text[start:end])), [each for each in edits if start <= each.start < end]
    rest = [each for each in edits if not any(start <= each.start < end for start, end, _ in spans)]
    yield "<script>", _digest(_lua_code(outside)), rest


def _lua_code(text: str) -> str:
    tokens = (each for each in LUA_TOKEN.finditer(text) if not each.group("skip") or each.group()[0] in "'\"")
    return " ".join(each.group() for each in tokens)


def _lua_edits(text: str) -> Iterator[Edit]:
    before = "("
    for token in LUA_TOKEN.finditer(text):
        if token.group("skip"):
            before = before if token.group().isspace() or token.group().startswith("--") else "text"
            continue
        word = token.group()
        is_unary = word == "-" and (before in LUA_KEYWORDS or not (before[-1].isalnum() or before[-1] in ")]_"))
        if token.group("number"):
            number = other_number(int(word) if word.isdigit() else float(word))
            yield Edit("constant", token.start(), token.end(), str(number))
        elif word in LUA_FLIPS and not is_unary:
            for flipped in LUA_FLIPS[word]:
                yield Edit(f"{word} flipped", token.start(), token.end(), flipped)
        before = word
    for call in LUA_CALL.finditer(text):
        if call.group(1).count("(") == call.group(1).count(")"):
            yield Edit("removed call", call.start(1), call.end(1), "do end")
