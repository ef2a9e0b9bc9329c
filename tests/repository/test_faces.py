"""Tests enter a package by its door: what its `__init__` exports, so that a file inside can be merged or renamed.

`python tests/repository/test_faces.py` lists the imports that don't.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.served

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
LEFT_OUT = ("benchmarks", "campaigns", "gpu")
"""Folders of programs that measure or look inside."""

PARTS = {
    "pagestream_client.sse": "the parser of server-sent events",
    "pagestream_cli.page": "what the page at / may do",
    "pagestream_cli.replay": "answers compared token by token",
    "pagestream_client.retry": "the delays between tries",
    "pagestream_engine.features.lora.scheduling": "as the engine's admission, which it is a part of",
    "pagestream_engine.features.lora.native": "native CPU code, beside the same in torch",
    "pagestream_engine.attention.native": "native CPU code, beside the same in torch",
    "pagestream_engine.cpu": "what the processor can do, and C++ for each instruction set",
    "pagestream_engine.features.beams": "the search itself, beside transformers'",
    "pagestream_engine.features.grammar": "grammars, compiled and walked",
    "pagestream_engine.intake": "the tokens that spell a banned word",
    "pagestream_engine.layers": "layers in each number format, beside the same in torch",
    "pagestream_engine.models": "architectures and the readers of their files, beside transformers",
    "pagestream_engine.native_build": "C++ that is compiled once by its content",
    "pagestream_engine.native_prebuild": "the program that compiles the C++ for images",
    "pagestream_engine.numerics_versions": "the five versions of numerics, which people raise by hand",
    "pagestream_engine.output": "text and ends of a sequence, a function of its tokens as they come",
    "pagestream_engine.plan": "the ground: what scheduler and executor say to each other, and KV groups",
    "pagestream_engine.request": "the ground: requests, their sequences and outputs",
    "pagestream_engine.sampling_params": "the ground: parameters",
    "pagestream_engine.sampler.native": "native CPU code, beside the same in torch",
    "pagestream_engine.sampler.stages": "the stages of a sampled row, beside vLLM's",
    "pagestream_engine.scheduler.admission": "the count at admission that the claim budget has to match",
    "pagestream_engine.scheduler.policies": "the length that shortest_first expects",
    "pagestream_engine.stats": "the ground: the figures of an engine",
    "pagestream_engine.steps": "plans from scheduled steps",
    "pagestream_engine.wire": "records as bytes, and back",
    "pagestream_gateway.error_codes": "the table of error codes, of which alerts and clients tell the kinds apart",
    "pagestream_gateway.auth": "readers of the files of keys, issuers and tenants, which the chart writes",
    "pagestream_gateway.output_formats": "the format of an answer, by its record",
    "pagestream_gateway.encoder": "texts to tokens and back",
    "pagestream_gateway.preparation": "how prompts are rendered and cut",
    "pagestream_grammars.compiling": "verdicts on grammars, each found once",
    "pagestream_grammars.output_formats": "parsers of what models write: calls, reasoning, formats",
    "pagestream_kernels": "kernels: an operator is a file, with its kernel, launcher and variants",
    "pagestream_operator.app": "the tasks of one replica, which a test ends one by one",
    "pagestream_operator.commands": "what the chart's hooks run",
    "pagestream_operator.instruments": "the operator's list of metrics, which alerts and dashboards name",
    "pagestream_operator.manager": "the pools' tasks, which outlive some of their pools",
    "pagestream_operator.supervision": "tasks that run for as long as the process does",
    "pagestream_scaling.memory": "the law: its memory's windows",
    "pagestream_scaling.terms": "the law: whole pods of an amount, requests that miss an objective, by buckets",
    "pagestream_scaling.workload": "the law: tokens that can be divided between pods, weights of priority classes",
    "pagestream_streams.admin.queue_positions": "the estimate of places in a queue",
    "pagestream_streams.connection.connection": "durability, lost connections, wake-ups on their way",
    "pagestream_streams.connection.topologies": "commands that share a round trip; less work than redis-py's",
    "pagestream_streams.engine.claim": "the merge of partitions' heads",
    "pagestream_streams.engine.session": "the fence of claims, compared with what Redis shows",
    "pagestream_streams.fault_points": "where the kill matrix ends a process",
    "pagestream_streams.gateway.accept": "which partition a prompt gets, and which engines hold which beginnings",
    "pagestream_streams.gateway.readers": "open reads: bounds of a buffer, polls for lost wake-ups, partitions away",
    "pagestream_streams.limits": "what tenants may use, and what they have used",
    "pagestream_streams.rates": "limits, and how far they are used",
    "pagestream_streams.scripts": "the steps of the protocol, run one by one",
    "pagestream_streams.tasks": "periodic work, cancellation, a budget without overtaking",
    "pagestream_telemetry.catalog": "the list of all metrics, which docs/telemetry.md and the chart follow",
    "pagestream_worker.gpu": "readings of GPUs, which the machines of the tests have not",
    "pagestream_worker.logs": "token logs in C++, beside the same in Python",
}
"""Modules, and packages of modules, that are tested by themselves: hard parts that keep their place and name."""

LEFT = {
    "tests/api/access/test_certificates.py",
    "tests/api/openai/test_whole_answers.py",
    "tests/api/parts/test_answer_writers.py",
    "tests/api/parts/test_chat_templates.py",
    "tests/api/parts/test_frames.py",
    "tests/api/parts/test_message_writer.py",
    "tests/api/parts/test_pending_requests.py",
    "tests/api/parts/test_request_bodies.py",
    "tests/api/parts/test_truncation.py",
    "tests/client/test_retry.py",
    "tests/client/test_stream_state.py",
    "tests/engine/adapters/test_additions.py",
    "tests/engine/adapters/test_files.py",
    "tests/engine/attention/test_backends.py",
    "tests/engine/attention/test_float16.py",
    "tests/engine/attention/test_triton.py",
    "tests/engine/conftest.py",
    "tests/engine/executor/test_nodes.py",
    "tests/engine/executor/test_process.py",
    "tests/engine/executor/test_replies.py",
    "tests/engine/models/test_weights.py",
    "tests/engine/runner/test_decode_graphs.py",
    "tests/engine/runner/test_drafts.py",
    "tests/engine/runner/test_memory.py",
    "tests/engine/runner/test_numerics.py",
    "tests/engine/runner/test_persistent_batch.py",
    "tests/engine/sampler/test_draws.py",
    "tests/engine/sampler/test_sampling.py",
    "tests/engine/test_adapters.py",
    "tests/engine/test_deterministic.py",
    "tests/engine/test_speculation.py",
    "tests/engine/test_transfers.py",
}
"""Files that still enter modules. Whoever moves such a module rewrites its tests to a door, and takes them out here."""

_PATCHED = re.compile(r"(pagestream_\w+(?:\.\w+)+)\.\w+")


class Entry(NamedTuple):
    """A place where a test enters a package elsewhere than by a door."""

    file: Path
    line: int
    module: str
    names: str

    @property
    def place(self) -> str:
        """The file, from the repository's root."""
        return self.file.relative_to(ROOT).as_posix()

    def __str__(self) -> str:
        return f"{self.place}:{self.line}: {self.module}: {self.names}"


@cache
def sources() -> dict[str, Path]:
    """Return the folder of each product's package."""
    folders = [path for pattern in ("*/src/*", "services/*/src/*") for path in ROOT.glob(pattern) if path.is_dir()]
    return {path.name: path for path in folders if path.name != "pagestream"}


@cache
def exported(package: str) -> frozenset[str] | None:
    """Return the names of a package's `__all__`, and of sub-packages that have one; None for a module."""
    top, *parts = package.split(".")
    init = sources()[top].joinpath(*parts, "__init__.py")
    if not init.is_file():
        return None
    names: set[str] = set()
    for node in ast.parse(init.read_text(encoding="utf-8")).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(each, ast.Name) and each.id == "__all__" for each in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            assert node.value is not None
            names |= set(ast.literal_eval(node.value))
    names |= {each.parent.name for each in init.parent.glob("*/__init__.py") if "__all__" in each.read_text("utf-8")}
    return frozenset(names)


def is_door(module: str) -> bool:
    """Whether a module may be entered as a whole: a package that exports names, a command, or a part of the table."""
    is_command = module.rpartition(".")[2] == "__main__"
    return is_command or bool(exported(module)) or any(f"{module}.".startswith(f"{part}.") for part in PARTS)


def entered(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield line, module and names of each import, and of each string that names something to patch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, each.name, "") for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for each in node.names:
                yield node.lineno, node.module, each.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            patched = _PATCHED.fullmatch(node.value)
            if patched:
                yield node.lineno, patched[1], f"patched: {node.value.rpartition('.')[2]}"


def is_by_a_door(module: str, name: str) -> bool:
    """Whether a module, or a name of it, is entered by a door."""
    if module.split(".", maxsplit=1)[0] not in sources():
        return True
    if not name or name.startswith("patched"):
        return is_door(module)
    return (
        name in (exported(module) or ())
        or is_door(f"{module}.{name}")
        or (exported(module) is None and is_door(module))
    )


def offenders() -> list[Entry]:
    """Return every import of a test, or of its support, that enters a package elsewhere than by a door."""
    found = []
    for file in sorted(TESTS.rglob("*.py")):
        if file != Path(__file__).resolve() and file.relative_to(TESTS).parts[0] not in LEFT_OUT:
            tree = ast.parse(file.read_text(encoding="utf-8"))
            found += [Entry(file, *each) for each in sorted(entered(tree)) if not is_by_a_door(*each[1:])]
    return found


def test_tests_enter_by_doors() -> None:
    found = offenders()
    assert [str(each) for each in found if each.place not in LEFT] == []
    assert set() == LEFT - {each.place for each in found}, "take these out of LEFT"


def test_every_part_of_the_table_is_there() -> None:
    for part, why in PARTS.items():
        top, *parts = part.split(".")
        place = sources()[top].joinpath(*parts)
        assert place.is_dir() or place.with_suffix(".py").is_file(), part
        assert why


if __name__ == "__main__":
    wrong = offenders()
    print(*wrong, sep="\n")
    sys.exit(f"{len(wrong)} imports in {len({each.file for each in wrong})} files")
