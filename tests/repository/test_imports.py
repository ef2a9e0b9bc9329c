"""Which libraries stay out of a process that imports a part: those that it may lack, or that would slow its start.

And that any module can be the first: none imports itself by others, as its own import runs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from pathlib import Path

import pytest
from support.processes.waiting import LIMIT_S

pytestmark = pytest.mark.served

MODELS = {"torch", "triton", "transformers", "pagestream_kernels", "pagestream_engine"}
EXPORTERS = {"opentelemetry.exporter", "pagestream_telemetry.otlp"}
LEFT_OUT = {
    "pagestream_gateway.__main__": MODELS | EXPORTERS,
    "pagestream_worker.process": EXPORTERS,
    "pagestream_streams.protocol.keys": {"redis"},
    "pagestream_simulator.comparison pagestream_simulator.virtual_engine": {
        *("torch", "triton", "transformers", "matplotlib", "kopf", "pagestream_cli", "pagestream_operator")
    },
}
ROOT = Path(__file__).resolve().parents[2]
IMPORT = re.compile(r"^(?:from ([\w.]+) import (\([^)]*\)|.*)|import (.*))", re.MULTILINE)
"""One that runs when its module does: those within functions, and for type checkers, are indented."""
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # an import of it fails as where it is not installed
import torch, pagestream_kernels as kernels
gate_up = torch.ones(2, 8)
assert kernels.silu_and_mul_reference(gate_up).shape == (2, 4)
try:
    kernels.silu_and_mul(gate_up)
except kernels.KernelUnavailableError as error:
    assert "Triton is not installed; use silu_and_mul_reference" in str(error), error
else:
    raise SystemExit("the kernel ran without Triton")
"""


def output_of(program: str) -> str:
    """Run a program in a fresh process; return what it prints."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("modules", LEFT_OUT)
def test_a_part_loads_no_library_that_it_does_without(modules: str) -> None:
    loaded = set(output_of(f"import sys, {modules.replace(' ', ', ')}; print(*sys.modules)").split())
    assert set(modules.split()) <= loaded | {"pagestream_gateway.__main__"}
    assert not loaded & LEFT_OUT[modules]


def test_the_kernels_references_work_without_triton() -> None:
    output_of(WITHOUT_TRITON)


def modules() -> dict[str, Path]:
    """All modules of the packages, by their names."""
    folders = "services/*/src", "operator/src", "kernels/src"
    files = [file for folder in folders for file in ROOT.glob(f"{folder}/**/*.py")]
    names = (file.as_posix().rpartition("/src/")[2].removesuffix(".py").removesuffix("/__init__") for file in files)
    return dict(zip((name.replace("/", ".") for name in names), files, strict=True))


def imported_by(module: str, text: str, known: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules that a module's import runs, but for the packages that it is in, which have begun before it."""
    for package, names, plain in IMPORT.findall(text):
        words = re.findall(r"[\w.]+", re.sub(r" as \w+", "", names or plain))
        for word in words:
            full = f"{package}.{word}" if package else word
            prefixes = accumulate(full.split("."), "{}.{}".format)
            yield from (name for name in prefixes if name in known and not f"{module}.".startswith(f"{name}."))


def test_any_module_can_be_imported_first() -> None:
    known = modules()
    assert len(known) > 400
    imports = {module: list(imported_by(module, file.read_text(), known)) for module, file in known.items()}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"modules import one another in a circle: {' <- '.join(error.args[1])}")
