"""Where a model lies: a local folder, or the Hugging Face cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pagestream_engine.errors import ModelNotFound
from pagestream_engine.models.defaults import extra_ends
from pagestream_engine.models.tokenizer import changed_tokenizer

_DECIDING = ("config.json", "generation_config.json", "tokenizer.json")
_SAMPLES, _SAMPLE_BYTES = 8, 1 << 10
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


def model_revision(folder: Path) -> str:
    """16 hexadecimal digits of a digest of what decides tokens and text: the configuration, the end tokens, the
    tokenizer, and of every tensor its file, name, dtype and shape, and 8 samples of 1 KiB, from its beginning to its
    end.

    It does not read the weights. Training changes almost every number of a tensor that it changes, and so the samples;
    an edit of some rows between them, such as those of 20 tokens of an embedding, leaves the digest as it was.
    """
    from pagestream_engine.models.safetensors_file import read_header  # needs torch

    extra = extra_ends(folder)

    digest = hashlib.sha256()
    for name in _DECIDING:
        path = folder / name
        if path.is_file():
            digest.update(f"{name}:{path.stat().st_size}".encode())
            digest.update(path.read_bytes())
    if extra:  # Releases that took the ends of one file alone go on without them.
        digest.update(f"ends:{extra}".encode())
    if (changed := changed_tokenizer(folder)) is not None:  # Likewise those that took tokenizer.json alone.
        added = sorted(changed.get_added_tokens_decoder().items())
        digest.update(f"tokens:{added}".encode())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            for name, entry in sorted(read_header(path).items()):
                digest.update(f"{path.name}:{name}:{entry.dtype}:{entry.shape}".encode())
                for sample in range(_SAMPLES):
                    file.seek(entry.begin + max(0, entry.num_bytes - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                    digest.update(file.read(min(_SAMPLE_BYTES, entry.num_bytes)))
    return digest.hexdigest()[:16]


def _could_be_repository(model: str) -> bool:
    return model.count("/") <= 1 and not model.startswith((".", "/", "~"))
