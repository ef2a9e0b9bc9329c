"""What published checkpoints call by names of their own: model types and classes of code in their folders that
`transformers` has under another name, and quantisation that stands in other files or lacks its method's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagestream_engine.errors import UnsupportedModel
from pagestream_engine.models.defaults import read_if_there

_KINDS = {"kimi_k2": "deepseek_v3"}
"""Model types that no class has, by the type whose fields and computation are the same."""
_CAUSAL = "ForCausalLM"
_MODELOPT = "hf_quant_config.json"
_FLOAT8 = {"float8_e4m3fn": "e4m3"}
"""Names of formats of 8 bits, and the usual ones."""


def common_fields(folder: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a `config.json` by the usual names.

    Raises:
        ModelFileError: a file that is read for it is malformed.
    """
    common = dict(fields)
    kind, names = fields.get("model_type"), fields.get("architectures")
    if isinstance(kind, str):
        common["model_type"] = _KINDS.get(kind, kind)
        if not names or "auto_map" in fields:
            common["architectures"] = _classes(common["model_type"], names)
    given = quantization_of(folder, fields)
    if given is not None:
        common["quantization_config"] = given
    return common


def _classes(kind: str, names: Any) -> Any:
    """Return names of classes; for none, and for those of code in the model's folder that `transformers` has by now,
    the one that `transformers` has for a model type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    if kind not in CLASSES:
        return names
    if not names:
        return [CLASSES[kind]]
    own = kind.replace("_", "").replace("-", "") + _CAUSAL.lower()
    known = CLASSES.values()
    is_own = isinstance(names, list) and [str(name).lower() for name in names] == [own]
    return [CLASSES[kind]] if is_own and names[0] not in known else names


def quantization_of(folder: Path, fields: Mapping[str, Any]) -> Any:
    """Return the `quantization_config` of a `config.json` by the usual names; None where there is none.

    Raises:
        ModelFileError: a file that is read for it is malformed.
    """
    given = fields.get("quantization_config") or fields.get("compression_config")
    text = fields.get("text_config")
    if given is None and isinstance(text, Mapping):
        given = text.get("quantization_config")
    if given is None:
        found = read_if_there(folder / _MODELOPT).get("quantization")
        return {"quant_method": "modelopt", **found} if isinstance(found, Mapping) else None
    if not isinstance(given, Mapping):
        return given
    named = dict(given)
    producer = given.get("producer")
    if "quant_method" not in given and isinstance(producer, Mapping) and producer.get("name") == "modelopt":
        named["quant_method"] = "modelopt"
    if given.get("fmt") in _FLOAT8:
        named["fmt"] = _FLOAT8[given["fmt"]]
    return named


def read_by_transformers(folder: Path, fields: Mapping[str, Any]) -> Any:
    """Return the configuration as `transformers` reads it, without code of the folder's own.

    Args:
        fields: of `config.json`, by the usual names.

    Raises:
        UnsupportedModel: the installed `transformers` does not.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = fields.get("model_type")
    if isinstance(fields.get("auto_map"), Mapping) and kind not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"config.json: model_type: given {kind!r}, whose code is in the model's own folder, where none is run; "
            "expected one that the installed transformers has"
        )
    try:
        if kind in _KINDS.values():
            return CONFIG_MAPPING[str(kind)].from_dict(dict(fields))
        # Without it a terminal is asked whether to run the folder's own code.
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UnsupportedModel(
            f"config.json: model_type: given {kind!r}, expected one that the installed "
            f"transformers reads: {' '.join(str(error).split())[:200]}"
        ) from error
