"""Print what a GPU run needs to know of its machine: the card, the driver, and the modules that are there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

WANTED = ("torch", "triton", "numpy", "pytest")
OTHERS = ("xdist", "transformers", "tokenizers", "safetensors", "peft", "llguidance", "pynvml", "redis", "grpc")
PACKAGES = {"xdist": "pytest-xdist", "pynvml": "nvidia-ml-py", "grpc": "grpcio"}


def found(module: str) -> str:
    """Return a module's version, or why it can't be imported."""
    try:
        import_module(module)
    except Exception as error:  # noqa: BLE001 - whatever a module raises is what is to be known
        return f"missing ({type(error).__name__}: {error})"
    try:
        return version(PACKAGES.get(module, module))
    except PackageNotFoundError:
        return "there"


def main() -> int:
    print("python", sys.version.replace("\n", " "), sys.executable)
    results = {module: found(module) for module in (*WANTED, *OTHERS)}
    for module, what in results.items():
        print(module, what)
    if shutil.which("nvidia-smi"):
        query = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,power.limit"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv"]
        print(subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout)
    if any(results[module].startswith("missing") for module in WANTED):
        return 1
    import torch

    print("cuda", torch.version.cuda, "hip", torch.version.hip, "gpu", torch.cuda.is_available())
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        print(properties)
        values = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
        print("a product of matrices:", torch.isfinite(values @ values).all().item())
    return 0


if __name__ == "__main__":
    sys.exit(main())
