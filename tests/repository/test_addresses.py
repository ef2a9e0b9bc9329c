"""Each place that reads a tensor's address is known, with what becomes of the address when an engine sleeps.

A sleeping engine's tensors leave a GPU and come back elsewhere. `tests/engine/attention/test_sleep_on_triton.py` looks
for addresses that have outlived them; a new table has to be served there, and to be named here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.served

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "pagestream_engine": ROOT / "services/engine/src/pagestream_engine",
    "pagestream_kernels": ROOT / "kernels/src/pagestream_kernels",
}
READERS = {"data_ptr", "addressof", "__cuda_array_interface__", "__dlpack__", "CUDAGraph", "graph_pool_handle"}
"""Attributes that give an address, or make what holds some."""

KEPT = {
    "pagestream_engine/features/lora/additions.py NativeAdditions.put": "a CPU's matrices; AdapterPool.empty_slots",
    "pagestream_engine/layers/linear.py PackedGroup.__init__": "a CPU's weights, which it holds",
    "pagestream_engine/models/general/model.py MaskRecorder.make": "for one pass of the probe, which holds the tensors",
    "pagestream_engine/runner/graphs.py CudaGraphRecorder.__init__": "as `begin`",
    "pagestream_engine/runner/graphs.py CudaGraphRecorder.begin": "ModelRunner.sleep drops the graphs of a pool",
    "pagestream_engine/runner/graphs.py CudaGraphRecorder.record": "ModelRunner.sleep drops the graphs",
    "pagestream_kernels/lora.py LoraTable.put": "AdapterPool.empty_slots",
}
"""Who keeps addresses beyond a call, and what empties it."""
PASSED = {
    "pagestream_engine/features/lora/additions.py NativeLora.add",
    "pagestream_engine/attention/native/attention.py NativeKernels.activate",
    "pagestream_engine/attention/native/attention.py NativeKernels.add_rms_norm",
    "pagestream_engine/attention/native/attention.py NativeKernels.attend",
    "pagestream_engine/attention/native/attention.py NativeKernels.gate_and_mul",
    "pagestream_engine/attention/native/attention.py NativeKernels.layer_norm",
    "pagestream_engine/attention/native/attention.py NativeKernels.rms_norm",
    "pagestream_engine/attention/native/attention.py NativeKernels.rope_and_cache",
    "pagestream_engine/attention/native/attention.py _scale_arguments",
    "pagestream_engine/layers/experts.py _stacked",
    "pagestream_engine/layers/linear.py NativeLinears.multiply",
    "pagestream_engine/layers/linear.py NativeLinears.multiply_groups",
    "pagestream_engine/layers/linear.py NativeLinears.pack",
    "pagestream_engine/layers/quantised.py QuantisedLinears.multiply",
    "pagestream_engine/layers/quantised.py QuantisedLinears.multiply_groups",
    "pagestream_engine/layers/quantised.py QuantisedLinears.pack",
    "pagestream_engine/models/general/model.py MaskRecorder.window",
    "pagestream_engine/models/offload.py MovedTensors.__init__",
    "pagestream_engine/sampler/draw.py NativeDraws.draw",
    "pagestream_engine/sampler/draw.py NativeDraws.largest",
    "pagestream_kernels/launcher.py",
    "pagestream_kernels/lora.py LoraTable._check",
}
"""Who passes them on within a call, and forgets them."""


def _readers(tree: ast.AST, name: str) -> Iterator[str]:
    """Yield the name of each function with an attribute of `READERS`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Attribute) and child.attr in READERS:
            yield name
        is_scope = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from _readers(child, f"{name}.{child.name}".lstrip(".") if is_scope else name)


def test_each_reader_of_an_address_is_known() -> None:
    found = set()
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            place = f"{package}/{path.relative_to(folder).as_posix()}"
            names = _readers(ast.parse(path.read_text(encoding="utf-8")), "")
            found |= {f"{place} {name}".rstrip() for name in names}
    assert found == PASSED | KEPT.keys()
