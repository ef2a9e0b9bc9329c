"""Which libraries stay out of a process that imports a part: those that it may lack, or that would slow its start."""

from __future__ import annotations

import subprocess
import sys

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
