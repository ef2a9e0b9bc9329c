"""What a model's files say of requests that leave it open: which tokens end an output, and how tokens are sampled.

As in vLLM: ends are those of `generation_config.json`, of `config.json` and of the tokenizer together; sampling is by
`generation_config.json`, whatever its `do_sample`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagestream_options.sampling import SAMPLING_PARAMETERS

from pagestream_engine.errors import DOWNLOAD_AGAIN, ModelFileError

GENERATION_CONFIG = "generation_config.json"
_MOST = (1 << 31) - 1
_MOST_TEMPERATURE = 1e6
_NUMBERS: Mapping[str, tuple[float, float, bool]] = {
    name: (each.low or 0.0, _MOST_TEMPERATURE if each.high is None else each.high, each.is_above)
    for name, each in SAMPLING_PARAMETERS.items()
    if each.kind is float and each.body is not None and each.body.has_model_default
}
"""Least and most of a field, and whether it must lie above the least: limits of `SamplingParams`."""
_WHOLES: Mapping[str, tuple[str, int]] = {"top_k": ("top_k", -1), "max_new_tokens": ("max_tokens", 1)}
"""Field of `SamplingParams`, and the least value."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file of a model's folder.

    Raises:
        ModelFileError: the file is missing, unreadable, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFileError(f"{path}: no such file, expected a Hugging Face model folder; check its path") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: unreadable, expected a JSON object: {error}; {DOWNLOAD_AGAIN}") from error
    if not isinstance(content, dict):
        raise ModelFileError(f"{path}: given a {type(content).__name__}, expected a JSON object; {DOWNLOAD_AGAIN}")
    return content


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return the contents of `generation_config.json`; {} where there is no such file.

    Raises:
        ModelFileError: the file is malformed.
    """
    return read_if_there(folder / GENERATION_CONFIG)


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float | int]:
    """Return the values of `generation_config.json` by their names in `SamplingParams`.

    Raises:
        ModelFileError: a value is none that `SamplingParams` takes.
    """
    found: dict[str, float | int] = {}
    for name, (low, high, above) in _NUMBERS.items():
        if (value := generation.get(name)) is not None:
            found[name] = _number(name, value, low, high, above=above)
    for name, (field, least) in _WHOLES.items():
        if (value := generation.get(name)) is not None:
            found[field] = _whole(name, value, least)
    return found


def end_tokens(file: str, fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Return `eos_token_id` of a file's fields: a token id, a list of them, or none.

    Raises:
        ModelFileError: it is something else.
    """
    value = fields.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise ModelFileError(f"{file}: eos_token_id: given {value!r:.80}, expected a token id or a list of them")
    return tuple(dict.fromkeys(ids))


def tokenizer_end(folder: Path) -> int | None:
    """Return the token id of the tokenizer's `eos_token`; None where the folder names none.

    Raises:
        ModelFileError: a file of the tokenizer is malformed.
    """
    settings = read_if_there(folder / "tokenizer_config.json")
    given = settings.get("eos_token") or read_if_there(folder / "special_tokens_map.json").get("eos_token")
    token = given.get("content") if isinstance(given, dict) else given
    if token is None:
        return None
    if not isinstance(token, str):
        raise ModelFileError(f"tokenizer_config.json: eos_token: given {given!r:.80}, expected a token")
    added = settings.get("added_tokens_decoder")
    if isinstance(added, dict):
        for token_id, entry in added.items():
            if isinstance(entry, dict) and entry.get("content") == token and token_id.isdecimal():
                return int(token_id)
    return _token_id(read_if_there(folder / "tokenizer.json"), token)


def extra_ends(folder: Path) -> tuple[int, ...]:
    """Return the end tokens beside those of the first file that has any, `generation_config.json` or `config.json`."""
    generation = end_tokens(GENERATION_CONFIG, read_generation_config(folder))
    config = end_tokens("config.json", read_if_there(folder / "config.json"))
    last = tokenizer_end(folder)
    others = {*config, *(() if last is None else (last,))}
    return tuple(sorted(others - set(generation or config)))


def read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_id(tokenizer: Mapping[str, Any], token: str) -> int | None:
    for entry in tokenizer.get("added_tokens") or ():
        if isinstance(entry, dict) and entry.get("content") == token and isinstance(entry.get("id"), int):
            return int(entry["id"])
    model = tokenizer.get("model")
    words = model.get("vocab") if isinstance(model, dict) else None
    found = words.get(token) if isinstance(words, dict) else None
    return found if isinstance(found, int) else None


def _number(name: str, value: object, low: float, high: float, *, above: bool) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high or (above and value == low):  # type: ignore[arg-type,operator]
        expected = f"a number {'above' if above else 'of at least'} {low:g} and at most {high:g}"
        raise ModelFileError(f"{GENERATION_CONFIG}: {name}: given {value!r:.80}, expected {expected}")
    return float(value)  # type: ignore[arg-type]


def _whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        expected = f"a whole number from {least} to {_MOST}"
        raise ModelFileError(f"{GENERATION_CONFIG}: {name}: given {value!r:.80}, expected {expected}")
    return value
