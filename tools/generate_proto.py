"""Generate the Python code of the wire contract beside its .proto files.

`generate(target)` writes below any folder, so that a test can compare with what is committed.
"""

import sys
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "proto" / "src"
MESSAGES = ("pagestream/v1/inference.proto", "pagestream/v1/records.proto")
SERVICES = ("pagestream/v1/inference.proto",)


class GenerationError(RuntimeError):
    """protoc refused its input; its own message is on stderr."""


def _protoc(*arguments: str) -> None:
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    if protoc.main(["protoc", f"-I{SOURCE}", f"-I{well_known}", *arguments]) != 0:
        raise GenerationError(f"protoc failed on {arguments}")


def generate(target: Path) -> None:
    """Write messages, type stubs and service code below `target`."""
    _protoc(f"--python_out={target}", f"--pyi_out={target}", *MESSAGES)
    _protoc(f"--grpc_python_out={target}", *SERVICES)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE)
