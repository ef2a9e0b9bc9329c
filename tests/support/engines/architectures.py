"""Every causal language model that the installed `transformers` registers, with a small random configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 131
WINDOW = 20
_SMALL: Mapping[str, Any] = {
    **dict.fromkeys(("vocab_size",), VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "dff"), 96),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "sliding_window": WINDOW,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Common names of sizes; a configuration takes those that it has."""
_DECODER = {"is_decoder": True}
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
_SAME_HEADS = {"num_key_value_heads": 4, "head_dim": 24}
_GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"],
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 0,
}
_PART_THAT_TURNS = {"rotary_dim": 8}
_NO_LAYER_INPUTS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_DRAFT = {**_GEMMA4, **_NO_LAYER_INPUTS, "num_kv_shared_layers": 2}
_TWO_ROPES = {
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e5},
    },
}
_CHANGES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie"), _DECODER),
    **dict.fromkeys(("roberta", "roberta-prelayernorm", "roc_bert", "xlm-roberta", "xlm-roberta-xl"), _DECODER),
    **dict.fromkeys(("axk1", "deepseek_v3", "longcat_flash", "youtu", "minicpm3", "glm4_moe_lite"), _LATENT),
    **dict.fromkeys(("deepseek_v2", "axk2", "deepseek_v32", "glm_moe_dsa"), _LATENT),
    "xmod": {**_DECODER, "languages": ["en_XX"], "default_language": "en_XX"},
    "jetmoe": {"num_key_value_heads": 2, "kv_channels": 16},
    "cohere_compass_text": _TWO_ROPES,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "hidden_size": 64},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": None,
        "laurel_rank": 4,
        "hidden_size_per_layer_input": 8,
    },
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    "lfm2": {"layer_types": ["full_attention", "conv"]},
    "roc_bert": {**_DECODER, "enable_pronunciation": False, "enable_shape": False},
    **dict.fromkeys(("gemma4_text", "gemma4_unified", "gemma4_unified_text"), _GEMMA4),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _DRAFT),
    **dict.fromkeys(("dots3_note", "dots3_note_text"), _SAME_HEADS),
    "zaya": {"num_experts_per_tok": 1},
    **dict.fromkeys(("gptj", "codegen"), _PART_THAT_TURNS),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
}
"""What a model type needs beyond the common names."""
_NEEDED: Mapping[str, Mapping[str, Any]] = {"gemma4_assistant": {"text_config": _NO_LAYER_INPUTS}}
"""Fields without which a configuration class can't be made."""


def all_types() -> dict[str, str]:
    """Model type -> class of every causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def model_types() -> dict[str, str]:
    """Model type -> class of every causal language model that counts: its code calls the attention interface, and it is
    no encoder-decoder.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return {
        kind: name
        for kind, name in all_types().items()
        if getattr(transformers, name)._supports_attention_backend
        and not getattr(CONFIG_MAPPING[kind], "is_encoder_decoder", False)
    }


def small_config(kind: str, **changes: Any) -> Any:
    """Return a small configuration of a model type."""
    import transformers

    # Of a model with further inputs the class of the language model alone, where it has one.
    config_class = getattr(transformers, all_types()[kind]).config_class
    default = config_class(**_NEEDED.get(kind, {}))
    fields = {**_known(default), **_CHANGES.get(kind, {}), **changes}
    text = getattr(default, "text_config", None)
    if text is not None:
        fields = {"text_config": {**_known(text), **_CHANGES.get(kind, {}), **changes}}
    config = config_class(**fields)
    config.architectures = [all_types()[kind]]
    return config


_SMALL_VISION: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "width"), 32),
    **dict.fromkeys(("num_hidden_layers", "depth", "layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "attention_heads"), 2),
    **dict.fromkeys(("intermediate_size",), 48),
    **dict.fromkeys(("projection_dim", "head_dim"), 16),
    **dict.fromkeys(("out_hidden_size", "vision_output_dim", "projector_input_dim", "projector_output_dim"), 64),
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
    "intermediate_layers_indices": [0],
    "num_global_layers": 1,
    "image_size": 28,
    "patch_size": 14,
}
"""As `_SMALL`, of the part that sees images, which no test runs."""
_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_THREE_AXES = {"rope_parameters": _AXES}
_TURNED = {"rope_parameters": {**_AXES, "mrope_interleaved": True}, "sliding_window": None}
_PART_OF_AXES = {"rope_parameters": {**_AXES, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}}
_NESTED_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "qwen2_vl": _THREE_AXES,
    "qwen2_5_vl": _THREE_AXES,
    "qwen3_vl": _TURNED,
    "qwen3_vl_moe": _TURNED,
    "qwen3_omni_moe_thinker": _TURNED,
    "glm4v": _PART_OF_AXES,
    "glm4v_moe": _PART_OF_AXES,
    "glm46v": _PART_OF_AXES,
    "glm_ocr": _PART_OF_AXES,
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"]},
    "mllama": {"num_hidden_layers": 4, "cross_attention_layers": [1]},
}
"""As `_CHANGES`, of the language model in a checkpoint that has more."""
_NESTED_VISION: Mapping[str, Mapping[str, Any]] = {"qwen2_vl": {"hidden_size": 64}}


def default_config(kind: str, architecture: str) -> Any:
    """Return the configuration that a model type has by default."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]()
    config.architectures = [architecture]
    return config


def nested_types() -> dict[str, str]:
    """Model type -> class of every model of images and text whose language model is a part of its own."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return dict(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def nested_config(kind: str, **changes: Any) -> Any:
    """Return a small configuration of a model of images and text.

    Args:
        changes: of its language model.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    default = CONFIG_MAPPING[kind]()
    text = default.get_text_config()
    own = {
        **_known(text),
        **_CHANGES.get(str(text.model_type), {}),
        **_NESTED_CHANGES.get(kind, {}),
        **changes,
    }
    fields: dict[str, Any] = own
    if text is not default:
        fields = {"text_config": {**({"model_type": text.model_type} if text.model_type else {}), **own}}
    vision = getattr(default, "vision_config", None)
    if vision is not None:
        small = {name: value for name, value in _SMALL_VISION.items() if _has(vision, name)}
        fields["vision_config"] = {"model_type": vision.model_type, **small, **_NESTED_VISION.get(kind, {})}
    tokens = [name for name in ("image_token_index", "image_token_id") if _has(default, name)]
    config = CONFIG_MAPPING[kind](**fields, **dict.fromkeys(tokens, 3))
    config.architectures = [nested_types()[kind]]
    return config


def write_model(folder: Path, config: Any, *, seed: int = 0) -> None:
    """Write random weights for a configuration beside it."""
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, config.architectures[0])._from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)


def _known(config: Any) -> dict[str, Any]:
    return {name: value for name, value in _SMALL.items() if _has(config, name) and not _is_derived(config, name)}


def _is_derived(config: Any, name: str) -> bool:
    """Whether a field follows from others, and can't be set."""
    found = getattr(type(config), name, None)
    return isinstance(found, property) and found.fset is None


def _has(config: Any, name: str) -> bool:
    from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError

    try:
        return hasattr(config, name)
    except AmbiguousGlobalPerLayerAttributeError:
        return True  # it differs by layer
