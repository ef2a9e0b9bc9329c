"""Where a model lies: a local folder, or the Hugging Face cache."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from pagestream_engine.errors import ModelNotFound

_WANTED = ["*.safetensors", "*.json", "*.jinja"]


def resolve_model(model: str | Path) -> Path:
    """The folder of a model: `model` itself, or the snapshot of the Hugging Face repository of that name.

    Raises:
        ModelNotFound: there is neither.
    """
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if folder.exists() or isinstance(model, Path) or not _could_be_repository(model):
        raise ModelNotFound(str(model), "a folder with config.json, model.safetensors and tokenizer.json")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(model, allow_patterns=_WANTED))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise ModelNotFound(model, "a folder, or a Hugging Face repository that can be reached or is cached") from error


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's `tokenizer.json`, without padding and truncation; None where there is none (tokens in, tokens out).

    Raises:
        ModelNotFound: the file is malformed.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelNotFound(str(path), "a tokenizer that `tokenizers` can read") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _could_be_repository(model: str) -> bool:
    return model.count("/") <= 1 and not model.startswith((".", "/", "~"))
