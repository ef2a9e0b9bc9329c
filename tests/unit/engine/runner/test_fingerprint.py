"""The fingerprint is made of declared versions: no source may change, move or appear without them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pagestream_engine.runner.fingerprint import FINGERPRINTED_SOURCES

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "tools"))
import write_source_digests as digests  # noqa: E402

DECIDING_FOLDERS = (
    *(
        f"pagestream_engine.{name}"
        for name in (
            "adapters",
            "attention",
            "grammar",
            "layers",
            "models",
            "parallel",
            "request",
            "runner",
            "sampler",
            "text",
        )
    ),
    "pagestream_kernels",
)
NOT_DECIDING = {
    "pagestream_engine.adapters.loader": "reads when it is asked to; what is read is checked in files",
    "pagestream_engine.adapters.native.levels": "names how the kernel is compiled, with the same bits at each level",
    "pagestream_engine.adapters.registry": "names adapters; a request's revision is pinned with it",
    "pagestream_engine.attention.native.levels": "finds a library; its name is part of the fingerprint",
    "pagestream_engine.attention.native.library": "builds a library; compiler and flags are part of the fingerprint",
    "pagestream_engine.attention.select": "chooses a backend; its name is part of the fingerprint",
    "pagestream_engine.layers.linear_times": "measures time",
    "pagestream_engine.layers.native.levels": "names how kernels are compiled; the level is part of the fingerprint",
    "pagestream_engine.layers.select": "chooses linear methods; the mode and their level are part of the fingerprint",
    "pagestream_engine.models.offload.copier": "copies whole pages",
    "pagestream_engine.models.offload.layers": "copies whole pages before they are read",
    "pagestream_engine.models.offload.moving": "copies whole tensors to the host and back",
    "pagestream_engine.models.offload.plan": "chooses where weights wait, from which the same kernels compute",
    "pagestream_engine.models.stored_size": "counts bytes",
    "pagestream_engine.parallel.place": "says which rank a process is; their number is part of the fingerprint",
    "pagestream_engine.request.divisors": "refuses schemas before any work",
    "pagestream_engine.request.length_predictor": "expects lengths, for the order of requests",
    "pagestream_engine.request.logprob_row": "holds what was decided",
    "pagestream_engine.request.outputs": "holds what was decided",
    "pagestream_engine.request.pooling_kinds": "names what is pooled of prompts, which have no tokens then",
    "pagestream_engine.runner.fingerprint": "names the bits",
    "pagestream_engine.runner.allocations": "measures memory",
    "pagestream_engine.runner.memory": "sizes the cache, which changes no token",
    "pagestream_engine.runner.warm_up": "runs before any request, and leaves nothing that a request reads",
    "pagestream_engine.runner.profile": "sizes the cache, which changes no token",
    "pagestream_engine.runner.numerics": "chooses the mode, which is part of the fingerprint",
    "pagestream_engine.sampler.native.levels": "names how kernels are compiled, with the same bits at each level",
    "pagestream_engine.sampler.sampled": "holds what was sampled",
    "pagestream_engine.text.faults": "says which errors end a request",
    "pagestream_engine.runner.results": "copies what was decided",
    "pagestream_engine.runner.host_pages": "copies whole blocks",
    "pagestream_engine.runner.speculation.draft_lengths": "chooses how many drafts are checked",
    "pagestream_engine.runner.speculation.drafts": "holds drafts",
    "pagestream_engine.runner.speculation.ngram": "proposes drafts, of which only those that would be sampled hold",
    "pagestream_engine.runner.speculation.draft_model": "likewise",
    "pagestream_engine.runner.speculation.draft_source": "loads what proposes drafts",
    "pagestream_engine.runner.speculation.proposer": "an interface of what proposes drafts",
    "pagestream_engine.runner.speculation.select": "chooses what proposes drafts",
    "pagestream_engine.runner.speculation.speculation": "runs what proposes drafts, and checks them",
    "pagestream_engine.runner.speculation.followed": "takes drafts from the last stage of a pipeline",
    "pagestream_kernels.aot": "compiles kernels for tests",
    "pagestream_kernels.checks": "checks arguments",
    "pagestream_kernels.errors": "exceptions",
    "pagestream_kernels.prebuild": "calls operators to compile them",
    "pagestream_kernels.tuning.filter": "builds what tables are written from; they are declared",
    "pagestream_kernels.tuning.sources": "names the code that tables were written from",
    "pagestream_kernels.tuning.timing": "measures time",
    "pagestream_kernels.tuning.write": "writes the tables; they are declared",
}
"""Modules of the deciding folders that FINGERPRINTED_SOURCES leaves out, each with the reason."""


def _sources() -> set[str]:
    """Every module and C++ source of the deciding folders, packages themselves left out."""
    found = set()
    for dotted in DECIDING_FOLDERS:
        package, *names = dotted.split(".")
        root = digests.FOLDERS[package]
        paths = (path for path in root.joinpath(*names).rglob("*") if path.suffix in (".py", ".cpp", ".h", ".json"))
        found |= {".".join((package, *path.relative_to(root).with_suffix("").parts)) for path in paths}
    return {source for source in found if not source.endswith(".__init__")}


def test_every_source_is_declared_or_left_out_for_a_reason() -> None:
    declared, left_out = set(FINGERPRINTED_SOURCES), set(NOT_DECIDING)
    assert not declared & left_out
    assert _sources() - declared - left_out == set(), "add to FINGERPRINTED_SOURCES, or to NOT_DECIDING with a reason"
    assert declared | left_out <= _sources(), "these were moved or deleted"


def test_packages_decide_nothing() -> None:
    """Their `__init__` modules import and list names; anything else must be declared."""
    for dotted in DECIDING_FOLDERS:
        package, *names = dotted.split(".")
        for path in digests.FOLDERS[package].joinpath(*names).rglob("__init__.py"):
            lines = digests.python_syntax(path.read_text())
            assert "(FunctionDef" not in lines, path
            assert "(ClassDef" not in lines, path


def test_no_source_changed_without_its_version() -> None:
    now, before = digests.taken(), digests.recorded()
    assert digests.changed_without_version(now, before) == [], digests.HELP
    assert now == before, "run: .venv/bin/python tools/write_source_digests.py"


def test_a_change_without_a_version_is_found() -> None:
    before = {"one": {"version": 1, "digest": "a"}, "two": {"version": 1, "digest": "b"}}
    now = {"one": {"version": 1, "digest": "x"}, "two": {"version": 2, "digest": "y"}, "new": before["one"]}
    assert digests.changed_without_version(now, before) == ["one"]


def test_a_source_that_has_gone_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"pagestream_engine\.layers\.gone: no such source"):
        digests.taken({"pagestream_engine.layers.gone": 1})


PYTHON = """
def scaled(x: float) -> float:
    return x * 2.0
"""


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        (
            '"""A module."""\ndef scaled(\n    x: float,\n) -> float:\n    "Twice."\n    return (x*2.0) # so\n',
            True,
        ),
        (PYTHON.replace("2.0", "2.5"), False),
        (PYTHON.replace("2.0", "2"), False),
        (PYTHON.replace("x", "y"), False),
        (PYTHON.replace("2.0", "None"), False),
        (PYTHON + "scaled(1.0)\n", False),
        (PYTHON + '"""What it is."""\n', True),
    ],
)
def test_the_digest_of_python(other: str, is_same: bool) -> None:
    assert (digests.python_syntax(other) == digests.python_syntax(PYTHON)) is is_same


CPP = 'float twice(float x) { return x * 2.0f; }\nconst char* name = "a // b";\n'


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        ("/* Doubles\n it. */\n" + CPP.replace("; }", "; // fast\n}").replace("{ ", "{\n    "), True),
        (CPP.replace("2.0f", "2.5f"), False),
        (CPP.replace("// b", "// c"), False),
        (CPP.replace("float x", "floatx"), False),
    ],
)
def test_the_digest_of_cpp(other: str, is_same: bool) -> None:
    assert (digests.cpp_tokens(other) == digests.cpp_tokens(CPP)) is is_same
