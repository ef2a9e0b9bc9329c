import shutil
from pathlib import Path

import pytest
from pagestream_engine import ModelFileError, ModelNotFound
from pagestream_engine.models import load_tokenizer, model_revision, resolve_model
from safetensors.torch import load_file, save_file
from support.engines.arithmetic_model import byte_level_tokenizer, make_folder

pytestmark = pytest.mark.served


def test_a_folder_is_itself(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    assert resolve_model(folder) == folder
    assert resolve_model(str(folder)) == folder


@pytest.mark.parametrize("given", ["./missing", "/missing/model", "a/b/c"])
def test_a_missing_folder_is_no_repository(given: str) -> None:
    with pytest.raises(ModelNotFound, match=f"given '{given}', expected a folder"):
        resolve_model(given)


def test_a_revision_is_of_all_that_decides_tokens_and_text(llama: Path, tmp_path: Path) -> None:
    """Of weights also where a few layers in the middle of a large file are others."""
    folder = shutil.copytree(llama, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    first = model_revision(folder)
    assert model_revision(folder) == first
    seen = {first}
    for number, (name, weight) in enumerate(sorted(weights.items()), start=1):
        save_file({**weights, name: weight * 0.5 + 0.01}, folder / "model.safetensors")
        seen.add(model_revision(folder))
        assert len(seen) == number + 1, name
    save_file(weights, folder / "model.safetensors")
    assert model_revision(folder) == first
    for file in ("config.json", "generation_config.json", "tokenizer.json"):
        original = (folder / file).read_bytes()
        (folder / file).write_bytes(original + b"\n")
        assert model_revision(folder) != first, file
        (folder / file).write_bytes(original)
    assert model_revision(folder) == first


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"expected a folder with config\.json"):
        resolve_model(str(tmp_path))


def test_a_repository_that_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match="a Hugging Face repository that can be reached or is cached"):
        resolve_model("nobody/no-such-model")


def test_a_revision_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    for reference, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        (cached / "refs" / reference).write_text(commit)
        (cached / "snapshots" / commit).mkdir(parents=True)
    assert resolve_model("org/name").name == "a" * 40
    assert resolve_model("org/name@v2").name == "b" * 40
    with pytest.raises(ModelNotFound):
        resolve_model("org/name@v3")


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(make_folder(tmp_path)) is None


def test_a_tokenizer_neither_pads_nor_cuts(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    loaded = load_tokenizer(make_folder(tmp_path, tokenizer))
    assert loaded is not None
    assert len(loaded.encode("abc").ids) == 3


def test_a_malformed_tokenizer_is_named(tmp_path: Path) -> None:
    (make_folder(tmp_path) / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json.*expected a tokenizer"):
        load_tokenizer(tmp_path)
