"""What docstrings and comments of the product name in backticks exists.

- A path (`scheduler/budget.py`, `kv_cache/`, `append.lua`) is the end of a file's or folder's path.
- A dotted name (`Scheduler.schedule`, `kv_cache.manager`) is an attribute of that class, or a name of that module.
  Where its first part is neither, some code has this attribute of a variable of that name.
- Any other name is an identifier of the code, or a word of its strings, scripts and schemas.

What stands in a string of the code, such as a key or another program's file, may be named too, and what other packages
define.
"""

import ast
import builtins
import importlib.util
import io
import os
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    Path(folder, file).relative_to(ROOT).as_posix()
    for top in ("services", "operator", "tools", "tests", "proto", "helm", "docs", "research")
    for folder, _, files in os.walk(ROOT / top)
    for file in files
    if "__pycache__" not in folder
]
FILES += [path.name for path in ROOT.iterdir() if path.is_file()]
ENDS = {name[place:] for name in FILES for place, before in enumerate("/" + name) if before == "/"}
"""All files, by their whole path and by each end of it that begins with a folder or file."""
PRODUCT = [
    name
    for name in FILES
    if name.endswith(".py") and name.startswith(("services/", "operator/", "tools/")) and "_pb2" not in name
]
OTHERS = (".py", ".lua", ".proto", ".toml", ".yaml", ".cpp", ".h", ".tpl")
FOLDERS = {end[: place + 1] for end in ENDS for place, letter in enumerate(end) if letter == "/"}
"""As `ENDS`, with a slash behind."""
PACKAGES = {Path(name).parent.name for name in PRODUCT if name.endswith("__init__.py")}
FOREIGN = {
    *("LlamaModel", "QuantLinear", "WQLinear_GEMM", "compressed_tensors", "pack_to_int32"),  # of other engines
    *("cooldownPeriod", "pollingInterval"),  # of KEDA
    *("Tokenizer.decode", "Tokenizer.encode", "writelines"),  # of tokenizers, of asyncio
    "use_experts_implementation",  # of transformers
    *("example.com/name", "functions.NAME", "leaseMs", "model.safetensors"),
}
"""Names of other projects that no code of ours has."""

SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
PATH = re.compile(r"(?:[\w.*-]+/)+[\w*-]*(?:\.\w+)?|[\w*-]+\.(?:py|lua|cpp|proto|sh|toml|yaml|md|json)")
DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?")
SIMPLE = re.compile(r"([A-Za-z_]\w*)(?:\(\))?")


@cache
def nodes(name: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse((ROOT / name).read_text())))


def docstrings(name: str) -> list[ast.Constant]:
    """Those of modules, classes, functions and attributes."""
    return [
        node.value
        for node in nodes(name)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


def spans(name: str) -> Iterator[tuple[int, str]]:
    """Line and text of each span in backticks."""
    texts = [(node.lineno, str(node.value)) for node in docstrings(name)]
    tokens = tokenize.generate_tokens(io.StringIO((ROOT / name).read_text()).readline)
    texts += [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    for line, text in texts:
        for span in SPAN.finditer(text):
            yield line + text.count("\n", 0, span.start()), span[1]


class Code:
    """Every name that the code has."""

    def __init__(self) -> None:
        self.words = set(dir(builtins))
        self.strings: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        """Variable, or attribute of one, without leading underscores; and an attribute that is read or set of it."""
        self.classes: dict[str, set[str]] = defaultdict(set)
        self.bases: dict[str, set[str]] = defaultdict(set)
        self.modules: dict[str, set[str]] = defaultdict(set)
        products = frozenset(PRODUCT)
        for name in FILES:
            if name in products:
                self._read(name)
            elif name.endswith(OTHERS):
                lines = (ROOT / name).read_text(errors="ignore").splitlines()
                is_lua = name.endswith(".lua")
                for line in lines:
                    self.words |= set(re.findall(r"\w+", line.partition("--")[0] if is_lua else line))

    def _read(self, name: str) -> None:
        path = Path(name)
        module = path.parent.name if path.name == "__init__.py" else path.stem
        self.words |= {*path.parts, path.stem}
        self.modules[path.parent.name].add(path.stem)
        if path.name == "__init__.py":
            self.modules[path.parent.parent.name].add(module)
        skipped = {id(node) for node in docstrings(name)}
        for node in nodes(name):
            match node:
                case ast.Name(id=word) | ast.arg(arg=word) | ast.keyword(arg=str(word)):
                    self.words.add(word)
                case ast.Attribute(value=of, attr=word):
                    self.words.add(word)
                    last = str(getattr(of, "id", None) or getattr(of, "attr", ""))
                    self.attributes.add((last.lstrip("_"), word))
                case ast.FunctionDef(name=word) | ast.AsyncFunctionDef(name=word):
                    self.words.add(word)
                    self.modules[module].add(word)
                case ast.ClassDef():
                    self.words.add(node.name)
                    self.modules[module].add(node.name)
                    self._read_class(node)
                case ast.Assign(targets=[ast.Name(id=word)]) | ast.AnnAssign(target=ast.Name(id=word)):
                    self.modules[module].add(word)
                case ast.alias(name=imported, asname=given):
                    self.words |= {*imported.split("."), given or imported}
                    self.modules[module].add(given or imported)
                case ast.Constant(value=str(text)) if id(node) not in skipped:
                    self.words |= set(re.findall(r"\w+", text))
                    self.strings.add(text)

    def _read_class(self, node: ast.ClassDef) -> None:
        names = self.classes[node.name]
        for inner in ast.walk(node):
            match inner:
                case ast.FunctionDef(name=word) | ast.AsyncFunctionDef(name=word):
                    names.add(word)
                case ast.AnnAssign(target=ast.Name(id=word)) | ast.Attribute(value=ast.Name(id="self"), attr=word):
                    names.add(word)
                case ast.Assign():
                    names |= {target.id for target in inner.targets if isinstance(target, ast.Name)}
        for base in node.bases:
            of = base.value if isinstance(base, ast.Subscript) else base
            self.bases[node.name].add(str(getattr(of, "id", None) or getattr(of, "attr", "")))

    def has_attribute(self, name: str, attribute: str) -> bool:
        """Whether a class or one of its bases has it; a base of another package has everything."""
        if name not in self.classes:
            return name not in {"ABC", "Protocol", "Generic", "Struct", "NamedTuple", "object", "StrEnum"}
        others = self.bases[name] - {name}
        return attribute in self.classes[name] or any(self.has_attribute(base, attribute) for base in others)

    def has_path(self, path: str) -> bool:
        domain, _, key = path.partition("/")
        if "." in domain:  # a label or an annotation
            return self.words.issuperset(re.findall(r"\w+", key))
        if "*" in path:
            pattern = re.compile(re.escape(path).replace(r"\*", "[^/]*"))
            return any(pattern.fullmatch(end) for end in ENDS)
        return path in ENDS or path in FOLDERS

    def has_dotted(self, dotted: str) -> bool:
        first, *rest = dotted.split(".")
        while rest and first in self.modules and rest[0] in self.modules[first] and len(rest) > 1:
            first, *rest = rest
        if len(rest) > 1 and first not in self.classes:
            return is_foreign(first) or self.has_dotted(".".join(rest))
        name = rest[0]
        if first in self.classes:
            return self.has_attribute(first, name)
        if name in self.modules.get(first, ()) or (first.lstrip("_"), name) in self.attributes or is_foreign(first):
            return True
        classes = [each for each in self.classes if re.sub(r"(?<!^)(?=[A-Z])", "_", each).lower() == first]
        return any(self.has_attribute(each, name) for each in classes)


@cache
def is_foreign(name: str) -> bool:
    """Whether a package of others, or Python's own, has this name."""
    is_ours = name in PACKAGES or name in {"tests", "support"}
    return name in sys.stdlib_module_names or (not is_ours and importlib.util.find_spec(name) is not None)


def is_key(dotted: str, words: set[str]) -> bool:
    """Whether it is a path in a custom resource or in the chart's values: one part at least is in camel case."""
    parts = dotted.split(".")
    has_key = any(re.fullmatch(r"[a-z]+(?:[A-Z]\w*)+", part) for part in parts)
    return words.issuperset(parts) and (has_key or parts[0] in {"error", "operator", "template"})


def test_what_docstrings_and_comments_name_exists() -> None:
    code = Code()
    wrong = []
    for name in PRODUCT:
        for line, span in spans(name):
            if span in code.strings or span in FOREIGN:
                continue
            if PATH.fullmatch(span):
                is_there = code.has_path(span)
            elif dotted := DOTTED.fullmatch(span):
                is_there = code.has_dotted(dotted[1]) or is_key(dotted[1], code.words)
            elif simple := SIMPLE.fullmatch(span):
                is_there = simple[1] in code.words
            else:
                continue
            if not is_there:
                wrong.append(f"{name}:{line} names {span}")
    assert wrong == [], "\n".join(wrong)


def test_scripts_name_the_modules_that_run_them() -> None:
    wrong = []
    for name in FILES:
        if name.endswith(".lua") and name.startswith("services/"):
            named = re.findall(
                r"[\w/]+\.py", "".join(re.findall(r"^-- Run by: (.*)$", (ROOT / name).read_text(), re.M))
            )
            package = "/".join(name.split("/")[:4])
            wrong += [f"{name} names {each}" for each in named if f"{package}/{each}" not in ENDS]
    assert wrong == [], "\n".join(wrong)
