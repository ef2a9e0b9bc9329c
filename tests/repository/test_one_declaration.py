"""Options and sampling parameters are declared once, in `services/options`; everything else follows from there."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from pagestream.v1.inference_pb2 import SamplingParams as SamplingMessage
from pagestream_client import SamplingOptions
from pagestream_options import ENGINE_OPTIONS, SAMPLING_PARAMETERS, WORKER_OPTIONS

ROOT = Path(__file__).resolve().parents[2]
MOST_NAMED_TOGETHER = 6
"""Of one declaration in a list, a class or a parser: more is a list by hand."""
ALLOWED = {
    "services/options/src/pagestream_options",
    "services/engine/src/pagestream_engine/runner/numerics.py",  # hashes what was settled, not what was given
    "services/pagestream/src/pagestream_cli/serve/vllm_flags.py",  # flags of vLLM's, with what becomes of each
    "services/gateway/src/pagestream_gateway/anthropic/body.py",  # what messages don't have
    "services/gateway/src/pagestream_gateway/openai/responses/body.py",  # what responses don't have
    "services/client/src/pagestream_client/requests.py",  # needs the wire contract alone; compared below
}


def _spelled(node: ast.AST) -> Iterator[str]:
    """Yield the names that a list, a dictionary, a class or a function's calls of add_argument spell out."""
    match node:
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            for item in items:
                yield from _first_text(item)
        case ast.Dict(keys=keys):
            for key in keys:
                yield from _first_text(key)
        case ast.ClassDef(body=body):
            yield from (each.target.id for each in body if isinstance(each, ast.AnnAssign) and _is_name(each.target))
        case ast.FunctionDef():
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument" and call.args:
                    yield from _first_text(call.args[0])


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name)


def _first_text(node: ast.AST | None) -> Iterator[str]:
    """Yield a text, or that which a tuple or a call begins with."""
    if isinstance(node, ast.Tuple | ast.Call):
        items = node.elts if isinstance(node, ast.Tuple) else node.args
        node = items[0] if items else None
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value.removeprefix("--").replace("-", "_")


def _sources() -> Iterator[Path]:
    for pattern in ("services/*/src/**/*.py", "operator/src/**/*.py", "tools/*.py"):
        for path in ROOT.glob(pattern):
            name = str(path.relative_to(ROOT))
            if not any(name.startswith(each) for each in ALLOWED) and "_pb2" not in name:
                yield path


@cache
def _named_together() -> list[tuple[str, frozenset[str]]]:
    """Return where many names are spelled out, and the names."""
    return [
        (f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", names)
        for path in _sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if len(names := frozenset(_spelled(node))) > MOST_NAMED_TOGETHER
    ]


def _lists(declared: frozenset[str]) -> list[str]:
    return [
        f"{place} names {', '.join(sorted(found))}"
        for place, names in _named_together()
        if len(found := declared & names) > MOST_NAMED_TOGETHER
    ]


@pytest.mark.parametrize(
    "options", [ENGINE_OPTIONS, WORKER_OPTIONS, SAMPLING_PARAMETERS], ids=["engine", "worker", "sampling"]
)
def test_no_options_are_listed_by_hand(options: dict[str, object]) -> None:
    assert _lists(frozenset(options)) == []


def test_every_option_says_what_it_means() -> None:
    for each in (*ENGINE_OPTIONS.values(), *WORKER_OPTIONS.values()):
        assert each.text.endswith((".", ")")), each.name
        assert not each.help.endswith("."), each.name
        assert not each.has_default or each.default in ("", None) or each.accepts(each.default), each.name


def test_every_engine_option_has_a_flag_and_is_served_or_says_where() -> None:
    for each in ENGINE_OPTIONS.values():
        assert each.help, each.name
        assert each.pool is not None or each.elsewhere or each.name.endswith("_parallel_size"), each.name


def test_every_parameter_of_a_body_is_a_field_of_the_message() -> None:
    declared = {name for name, each in SAMPLING_PARAMETERS.items() if each.body is not None}
    assert declared == set(SamplingMessage.DESCRIPTOR.fields_by_name)
    assert declared == set(SamplingOptions.__annotations__)
