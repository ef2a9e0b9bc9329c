"""The tests of the durable streams, to be run again on other servers: a test module takes over their functions."""

import importlib.util
import inspect
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[1] / "integration" / "streams"
MODULES = ("test_accept", "test_append", "test_claim", "test_reading", "test_abandonment", "test_models")


def load(name: str) -> ModuleType:
    """A test module, imported once more under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"again_{name}", FOLDER / f"{name}.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{FOLDER / name}.py is not there")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def streams_tests(modules: Sequence[str] = MODULES, *, without: Sequence[str] = ()) -> dict[str, object]:
    """Test functions and classes of these modules by name, but for those that are named in `without`."""
    found: dict[str, object] = {}
    for name in modules:
        for member, value in inspect.getmembers(load(name)):
            if member.startswith(("test_", "Test")) and member not in without:
                found[f"{member}__{name}" if member in found else member] = value
    return found
