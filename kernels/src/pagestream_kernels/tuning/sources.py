"""Digests of the kernels' sources, by which a table says which kernel its rows were built from."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
KERNELS: Mapping[str, tuple[str, ...]] = {
    "paged_decode": ("decode/attend.py", "decode/shares.py", "tiles.py", "runtime.py"),
    "paged_prefill": ("prefill/attend.py", "tiles.py", "runtime.py"),
}
"""By operator the modules whose compiled functions its rows cut."""


def source_hash(operator: str) -> str:
    """16 hexadecimal digits that change with the code of an operator's kernel, comments and docstrings left out."""
    texts = [text for module in KERNELS[operator] for text in _compiled_functions(PACKAGE / module)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _compiled_functions(path: Path) -> Iterator[str]:
    """The code of the functions of a module that Triton compiles."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and any(map(_is_compiled, node.decorator_list)):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
            yield ast.unparse(node)


def _is_compiled(decorator: ast.expr) -> bool:
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(function, ast.Name) and function.id in ("jit", "kernel")
