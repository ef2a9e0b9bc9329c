"""The committed code is what the .proto files say, and the contract keeps its shape."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from pagestream.v1 import inference_pb2, records_pb2

ROOT = Path(__file__).resolve().parents[3]
GENERATED = [
    "inference_pb2.py",
    "inference_pb2.pyi",
    "inference_pb2_grpc.py",
    "inference_pb2_grpc.pyi",
    "records_pb2.py",
    "records_pb2.pyi",
]


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_proto", ROOT / "tools" / "generate_proto.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError("tools/generate_proto.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("proto")
    _generator().generate(target)
    return target / "pagestream" / "v1"


@pytest.mark.parametrize("name", GENERATED)
def test_committed_code_equals_generated_code(generated: Path, name: str) -> None:
    committed = ROOT / "proto" / "src" / "pagestream" / "v1" / name
    assert committed.read_text() == (generated / name).read_text(), "run `make proto` and commit the result"


def test_nothing_else_is_generated(generated: Path) -> None:
    assert sorted(path.name for path in generated.iterdir()) == sorted(GENERATED)


def test_the_service_has_its_fixed_methods() -> None:
    service = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
    streams = {method.name: (method.client_streaming, method.server_streaming) for method in service.methods}
    assert streams == {
        "Generate": (False, True),
        "Resume": (False, True),
        "Cancel": (False, False),
        "GetRequest": (False, False),
        "Embed": (False, False),
        "Score": (False, False),
        "ListModels": (False, False),
    }


def test_both_stream_responses_hold_a_token_chunk() -> None:
    for response in (inference_pb2.GenerateResponse, inference_pb2.ResumeResponse):
        assert response.DESCRIPTOR.fields_by_name["chunk"].message_type.full_name == "pagestream.v1.TokenChunk"


def test_an_enum_starts_with_its_unspecified_value() -> None:
    files = (inference_pb2.DESCRIPTOR, records_pb2.DESCRIPTOR)
    for enum in (enum for file in files for enum in file.enum_types_by_name.values()):
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")


def test_an_older_reader_keeps_fields_it_does_not_know() -> None:
    newer = records_pb2.LogEntry(choice=1, digest="d", token_id=5)
    unknown_field = bytes([(15 << 3) | 0, 42])  # number 15 is reserved for later
    entry = records_pb2.LogEntry.FromString(newer.SerializeToString() + unknown_field)
    assert entry.token_id == newer.token_id
    assert entry.SerializeToString().endswith(unknown_field)
