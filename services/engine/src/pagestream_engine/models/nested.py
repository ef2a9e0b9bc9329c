"""The language model within a checkpoint that has more: images, sound.

Such a checkpoint (`...ForConditionalGeneration`) nests the language model's configuration, and its tensors have names
of their own. It runs as text, by the family of its language model where there is one; the rest stays in the files. A
request with an image is refused at the door, as for any model of text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagestream_engine.errors import ModelError
from pagestream_engine.models.defaults import end_tokens
from pagestream_engine.models.published import read_by_transformers
from pagestream_engine.models.safetensors_file import Entry, read_folder

_NESTS = ("text_config", "vision_config", "audio_config", "thinker_config", "llm_config", "language_config")
_PLAIN = frozenset(
    {
        "deepseek_vl",
        "gemma3",
        "gemma3n",
        "got_ocr2",
        "idefics3",
        "internvl",
        "llava",
        "llava_onevision",
        "mistral3",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_vl",
        "smolvlm",
    }
)
"""Model types that compute text as their language model alone does (tests compare): a family may run them. Others may
have a part in it of their own, such as a factor of the logits, and run by their own code."""
_TEXT_OF = {
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
"""Language models without a class of their own, by the architecture that computes the same of text: the three axes of
their rotation count alike without images."""
_HEAD = "lm_head.weight"


def is_nested(fields: Mapping[str, Any]) -> bool:
    """Whether `config.json` may describe more than a language model."""
    return any(isinstance(fields.get(name), Mapping) for name in _NESTS)


def language_model(folder: Path, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields that the language model of a nested `config.json` would have alone; None where nothing nests.

    Published files leave out what their classes have as defaults: `transformers` fills that in.

    Raises:
        UnsupportedModel: the installed `transformers` does not read the configuration.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    whole = read_by_transformers(folder, fields)
    text = whole.get_text_config()
    if text is whole:
        return None
    kind = str(text.model_type)
    architecture = _TEXT_OF.get(kind) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    is_plain = architecture is not None and whole.model_type in _PLAIN
    own = text.to_dict()
    given = {name: fields.get(name) for name in ("dtype", "torch_dtype", "quantization_config") if fields.get(name)}
    is_tied = bool(getattr(whole, "tie_word_embeddings", False)) and not _has_head(folder)
    ends = [*end_tokens("config.json", fields), *end_tokens("config.json", own)]
    return {
        **own,
        **given,
        "architectures": [architecture] if is_plain else [],
        "tie_word_embeddings": is_tied,
        "eos_token_id": ends or None,
    }


def _has_head(folder: Path) -> bool:
    """Whether a head is stored: it counts, also where the configuration's class would tie one by default."""
    try:
        return _HEAD in text_tensors(read_folder(folder))
    except ModelError:
        return False  # there are no weights: the configuration is sized alone


_ROOTS = ("model.", "lm_head.")
_TEXT_NAMES = {
    r"^(model\.language_model|language_model\.model|model\.text_model)\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
"""Patterns of a nested model's names, and what stands there in the names of the model alone."""


def text_name(name: str) -> str | None:
    """Return the name that a nested model's tensor or module would have in the language model alone; None where it has
    no name of its own in one that nests."""
    for pattern, alone in _TEXT_NAMES.items():
        own, is_text = re.subn(pattern, alone, name)
        if is_text:
            return own
    return None


def text_tensors(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the language model's tensors among those of a checkpoint, by the names that they would have alone."""
    found = {own: entry for name, entry in entries.items() if (own := text_name(name)) is not None}
    heads = {name: entry for name, entry in entries.items() if name.startswith("lm_head.")}
    if found:
        return {**found, **heads}
    return {name: entry for name, entry in entries.items() if name.startswith(_ROOTS)}
