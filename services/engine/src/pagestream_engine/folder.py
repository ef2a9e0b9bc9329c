"""Where a model lies: a local folder, or the Hugging Face cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tokenizers import Tokenizer

from pagestream_engine.errors import ModelNotFound

_HASH_CHUNK_BYTES = 1 << 20
_WANTED = ["*.safetensors", "*.json", "*.jinja"]


def resolve_model(model: str | Path) -> Path:
    """The folder of a model: `model` itself, or the snapshot of the Hugging Face repository of that name; with
    `name@revision`, of that branch, tag or commit.

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

    name, _, revision = model.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=_WANTED))
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


def model_revision(folder: Path) -> str:
    """16 hexadecimal digits of a digest of the configuration and of the weights' headers, sizes, and ends: cheap, and
    different for other weights.

    A safetensors header names every tensor with its shape and place; the first chunk of data after it tells apart
    checkpoints of one architecture.
    """
    digest = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HASH_CHUNK_BYTES))
            file.seek(-min(path.stat().st_size, _HASH_CHUNK_BYTES), 2)
            digest.update(file.read(_HASH_CHUNK_BYTES))
    return digest.hexdigest()[:16]


def _could_be_repository(model: str) -> bool:
    return model.count("/") <= 1 and not model.startswith((".", "/", "~"))
