"""Published checkpoints, made small by rule from their real `config.json`, and written to disk as they are published.

A few layers keep the pattern of layer types; widths shrink so that heads, groups of queries, partial rotations and
sections of axes keep their ratios, and groups and blocks of quantised weights stay valid. Names of tensors are those of
the published index; `quantization_config` stays as it is. Weights are random.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from re import match
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.engines.published_forms import PACKERS, Tensors, packer_of

FACTS = Path(__file__).parents[2] / "campaigns" / "published" / "checkpoints.json"
BEGIN, END = "<!-- published.py -->\n", "<!-- end of published.py -->\n"
"""What stands around their table on the page of models."""
VOCAB_SIZE = 160
"""Above the tokens of prompts, whose end is for images."""
CONTEXT, WINDOW = 128, 20
_HEAD = 32
"""Of a small head; more where groups of a quantised weight ask for it."""
_MOST_HEADS = 16
_GROUP = 128
"""What the inputs of quantised weights are a multiple of."""
Fields = dict[str, Any]


@dataclass(frozen=True)
class Published:
    """What is known of a published checkpoint."""

    name: str
    """Of its repository."""
    source: str
    """Where its configuration was read."""
    config: Mapping[str, Any]
    """Its `config.json`: what decides how it loads."""
    unverified: tuple[str, ...] = ()
    """Fields that are stated without a source."""
    tokenizer: str = ""
    names: tuple[str, ...] = ()
    """Some of its index."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of `transformers`' names, and what is published in their place."""
    files: Mapping[str, Any] = field(default_factory=dict)
    """Further files of JSON."""
    template: str = ""
    """File name of its chat template among llama.cpp's."""
    marks: tuple[str, ...] = ()
    """What a format is told by, as the template has it."""
    tools: str = ""
    """Parser of tool calls that its card, or vLLM's documentation, names."""
    reasoning: str = ""


def published() -> dict[str, Published]:
    """Return all by name."""
    found = json.loads(FACTS.read_text(encoding="utf-8"))
    rows = [Published(**{name: tuple(v) if isinstance(v, list) else v for name, v in each.items()}) for each in found]
    return {row.name: row for row in rows}


def write_small(facts: Published, folder: Path) -> tuple[Path, Path]:
    """Write a small checkpoint as it is published, and one in floats that computes the same; return both folders.

    Raises:
        AssertionError: a name of the published index is missing.
    """
    config = small(facts)
    plain, target = folder / "plain", folder / "published"
    for place in (plain, target):
        place.mkdir(parents=True)
    quantization = facts.config.get("quantization_config") or _of_modelopt(facts.files)
    floats = {name: value for name, value in config.items() if name != "quantization_config"}
    write_floats(plain, floats, facts)
    tensors = {name: tensor for file in sorted(plain.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    extra = _predicting_layers(config, tensors)
    stored: Tensors = {}
    for name, tensor in {**tensors, **extra}.items():
        packer = None if quantization is None else packer_of(quantization, name, tensor)
        if packer is None or is_left_out(name, quantization):
            stored[_published_name(name, facts)] = tensor
            continue
        packed, restored = PACKERS[packer](name, tensor.float(), quantization)
        stored.update(packed)
        if name in tensors:
            tensors[name] = restored.to(torch.float32)
    for file in plain.glob("*.safetensors*"):
        file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, plain / "model.safetensors", _METADATA)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, target / "model.safetensors", _METADATA)
    missing = [name for name in facts.names if name not in stored]
    assert not missing, f"given {sorted(stored)[:40]}, expected {missing} as published"
    (target / "config.json").write_text(json.dumps(config))
    for name, content in facts.files.items():
        (target / name).write_text(json.dumps(content))
    return target, plain


_METADATA = {"format": "pt"}


def _published_name(name: str, facts: Published) -> str:
    if facts.config["model_type"] in _TEXT_ALONE:
        return name.replace("model.", "model.language_model.", 1)
    for begin, other in facts.renames.items():
        if name.startswith(begin):
            return other + name.removeprefix(begin)
    return name


def _predicting_layers(config: Fields, tensors: Tensors) -> Tensors:
    """Return the layers behind the last, which predict further tokens, as DeepSeek V3 and GLM-4.5 have them: what
    generates one token after the other reads none of them.
    """
    if not config.get("num_nextn_predict_layers") or "moe_layer_start_index" in config:
        return {}
    count, width = config["num_hidden_layers"], config["hidden_size"]
    last, own = f"model.layers.{count - 1}.", f"model.layers.{count}."
    found = {own + name.removeprefix(last): each.clone() for name, each in tensors.items() if name.startswith(last)}
    found[f"{own}eh_proj.weight"] = torch.randn(width, 2 * width).bfloat16()
    for name in ("enorm", "hnorm", "shared_head.norm"):
        found[f"{own}{name}.weight"] = torch.ones(width).bfloat16()
    for name in ("embed_tokens", "shared_head.head"):
        found[f"{own}{name}.weight"] = torch.randn(config["vocab_size"], width).bfloat16()
    return found


def write_floats(folder: Path, config: Fields, facts: Published) -> None:
    """Write random weights in bfloat16 by the names of the published index, and a configuration that is read."""
    import transformers

    config = readable(config)
    if any(name.endswith("lm_head.weight") for name in facts.names):
        config["tie_word_embeddings"] = False  # a head that is stored counts, whatever a class has as default
    (folder / "config.json").write_text(json.dumps(config))
    read = transformers.AutoConfig.from_pretrained(folder)
    architecture, is_alone = config["architectures"][0], False
    if config["model_type"] in _TEXT_ALONE:
        architecture, is_alone, read = _TEXT_ALONE[config["model_type"]], True, read.get_text_config()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, architecture)._from_config(read, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
            elif "conv" not in name:
                parameter.data.normal_(std=0.15 if "embed" in name else 1.2 / math.sqrt(min(parameter.shape[-2:])))
    model.to(torch.bfloat16).save_pretrained(folder)
    if not is_alone:
        (folder / "config.json").write_text(json.dumps(config))


_TEXT_ALONE = {"gemma3n": "Gemma3nForCausalLM"}
"""Classes of language models of those whose own class needs packages that aren't here."""
_KNOWN_KINDS = {"kimi_k2": "deepseek_v3"}
_KNOWN_CLASSES = {"PhiMoEForCausalLM": "PhimoeForCausalLM", "MPTForCausalLM": "MptForCausalLM"}


def readable(config: Fields) -> Fields:
    """Return a configuration by the names that `transformers` has for what is published under others."""
    kind = config["model_type"]
    names = [_KNOWN_CLASSES.get(name, name) for name in config["architectures"]]
    if kind == "internlm3":
        names = ["LlamaForCausalLM"]
    return {**config, "model_type": _KNOWN_KINDS.get(kind, kind), "architectures": names}


def is_left_out(name: str, quantization: Mapping[str, Any]) -> bool:
    """Whether a published checkpoint keeps a tensor in floats."""
    left = [*(quantization.get("modules_to_not_convert") or ()), *(quantization.get("ignore") or ())]
    left += quantization.get("exclude_modules") or ()
    module = name.rpartition(".")[0]
    for each in left:
        if each.startswith("re:"):
            if match(each[3:], module):
                return True
        elif module == each or module.endswith(f".{each}") or module.startswith(f"{each}.") or fnmatch(module, each):
            return True
    return False


def _of_modelopt(files: Mapping[str, Any]) -> Mapping[str, Any] | None:
    given = files.get("hf_quant_config.json")
    return None if given is None else {"quant_method": "modelopt", **given["quantization"]}


def small(facts: Published) -> Fields:
    """Return the configuration made small."""
    config = json.loads(json.dumps(facts.config))
    is_quantised = bool(config.get("quantization_config") or facts.files)
    text = config.get("text_config", config)
    _shrink_text(text, _GROUP if is_quantised else 16)
    if text is not config:
        config.update(_ends({name: config[name] for name in config if name in _ENDS}))
    numbers = iter(range(VOCAB_SIZE - 20, VOCAB_SIZE))
    for name in config:
        if name.endswith(("_token_id", "_token_index")) and name not in _ENDS and config[name] is not None:
            config[name] = next(numbers)
    if isinstance(config.get("vision_config"), dict):
        _shrink_vision(config["vision_config"], _width(text))
    return config


_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "unk_token_id": 0}
_HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_INNER = ("intermediate_size", "ffn_dim", "intermediate_size_mlp", "shared_intermediate_size", "moe_intermediate_size")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "experts_per_token", "moe_k", "top_k_experts", "moe_topk")


_LATENT = {"kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}


def _ends(found: Mapping[str, Any]) -> Fields:
    return {name: None if value is None else _ENDS[name] for name, value in found.items()}


def _name(fields: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if fields.get(name) is not None), None)


def _width(fields: Mapping[str, Any]) -> int:
    name = _name(fields, _HIDDEN)
    return 64 if name is None else int(fields[name])


def _shrink_text(fields: Fields, step: int) -> None:
    fields.update(_ends({name: fields[name] for name in fields if name in _ENDS}))
    fields["vocab_size"] = VOCAB_SIZE
    if "vocab_size_per_layer_input" in fields:
        fields["vocab_size_per_layer_input"] = VOCAB_SIZE
    _shrink_layers(fields)
    _shrink_widths(fields, step)
    _shrink_experts(fields)
    _shrink_positions(fields)


def _shrink_layers(fields: Fields) -> None:
    name = _name(fields, _LAYERS)
    if name is None:
        return
    types, count = fields.get("layer_types"), 2
    if types:
        count = max(types.index(each) for each in types) + 1
    for period in ("sliding_window_pattern", "no_rope_layer_interval", "full_attention_interval"):
        if fields.get(period) is not None and "layer_types" not in fields:
            count = fields[period] if isinstance(fields[period], int) else len(fields[period])
    if "interleave_moe_layer_step" in fields or "no_rope_layer_interval" in fields:
        count = 4
    if "cross_attention_layers" in fields:
        count, fields["cross_attention_layers"] = 3, [1]
    if "first_k_dense_replace" in fields:
        count, fields["first_k_dense_replace"] = 3, 1
    if fields.get("num_kv_shared_layers"):
        kinds = len(dict.fromkeys(types))
        count, fields["num_kv_shared_layers"] = 2 * count, count
        assert kinds <= count
    if "hybrid_override_pattern" in fields:
        count = len(fields["hybrid_override_pattern"])
    for each in [key for key, value in fields.items() if isinstance(value, list) and len(value) == fields[name] > 4]:
        fields[each] = fields[each][:count]
    if types and len(fields["layer_types"]) != count:
        fields["layer_types"] = (types * count)[:count]
    if "moe_layer_end_index" in fields:
        fields["moe_layer_end_index"] = count - 1
    if "max_window_layers" in fields:
        fields["max_window_layers"] = count
    fields[name] = count


def _up(value: float, step: int) -> int:
    return max(step, math.ceil(value / step) * step)


def _shrink_widths(fields: Fields, step: int) -> None:
    hidden, heads_name = _name(fields, _HIDDEN), _name(fields, _HEADS)
    if hidden is None or heads_name is None:
        return
    width, heads = fields[hidden], fields[heads_name]
    kv_heads = fields.get("num_key_value_heads") or heads
    group = heads // kv_heads
    few = 1 if kv_heads == 1 or group > _MOST_HEADS else 2
    few_heads = few * group if group > 1 else 4
    if "multi_query" in fields:
        few_heads = 4
    head = fields.get("head_dim") or width // heads
    small_head = _HEAD
    while few_heads * small_head % step:
        small_head *= 2
    if fields.get("num_key_value_heads") is not None:
        fields["num_key_value_heads"] = 4 if group == 1 else few
    if fields.get("num_global_key_value_heads") is not None:
        fields["num_global_key_value_heads"] = 1
    fields[heads_name] = few_heads
    ratio = small_head / head
    if fields.get("head_dim") is not None or "kv_lora_rank" in fields:
        small_width = min(_up(width / (heads * head) * few_heads * small_head, step), 4 * _GROUP)
        if "head_dim" in fields:
            fields["head_dim"] = small_head
    else:
        small_width = few_heads * small_head
    for name in ("global_head_dim", "attention_head_dim", "rotary_dim", "query_pre_attn_scalar"):
        if fields.get(name) is not None:
            fields[name] = int(fields[name] * ratio)
    for name in _INNER:
        if fields.get(name):
            fields[name] = _scaled(fields[name], small_width / width, step)
    if "kv_lora_rank" in fields:
        ranks = {
            "kv_lora_rank": 64,
            "q_lora_rank": 96,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
        }
        fields.update({name: value for name, value in ranks.items() if fields.get(name) is not None})
    for name, value in {"hidden_size_per_layer_input": 32, "laurel_rank": 16}.items():
        if fields.get(name):
            fields[name] = value
    if "word_embed_proj_dim" in fields:
        fields["word_embed_proj_dim"] = small_width
    fields[hidden] = small_width
    _shrink_rotation(fields, ratio)


def _scaled(given: Any, ratio: float, step: int) -> Any:
    if isinstance(given, list):
        return [_scaled(each, ratio, step) for each in given]
    return min(_up(given * ratio, step), 8 * _GROUP)


def _shrink_rotation(fields: Fields, ratio: float) -> None:
    """Keep the share of each axis, and a factor for each pair of a head's numbers."""
    for name in ("rope_scaling", "rope_parameters"):
        given = fields.get(name)
        for each in [given, *(given or {}).values()] if isinstance(given, dict) else ():
            if not isinstance(each, dict):
                continue
            if "mrope_section" in each:
                each["mrope_section"] = [round(part * ratio) for part in each["mrope_section"]]
            for factors in ("long_factor", "short_factor"):
                if factors in each:
                    each[factors] = each[factors][:: round(1 / ratio)]


def _shrink_experts(fields: Fields) -> None:
    for name in _EXPERTS:
        if fields.get(name):
            fields[name] = 8
    for name in _CHOSEN:
        if fields.get(name):
            given = fields[name]
            fields[name] = [min(2, each) for each in given] if isinstance(given, list) else min(2, given)
    if fields.get("n_group", 1) > 1:
        fields["n_group"], fields["topk_group"] = 4, 2
    if "moe_capacity" in fields:
        fields["moe_capacity"] = [8] * len(fields["moe_capacity"])


def _shrink_positions(fields: Fields) -> None:
    name = _name(fields, _POSITIONS)
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    for each in _POSITIONS:
        if each in fields:
            fields[each] = CONTEXT
    original = scaling.get("original_max_position_embeddings") if isinstance(scaling, dict) else None
    if "original_max_position_embeddings" in fields:
        fields["original_max_position_embeddings"] = CONTEXT
        if scaling:
            fields[name or _POSITIONS[0]] = 32 * CONTEXT
    if original is not None:
        scaling["original_max_position_embeddings"] = CONTEXT
        fields[name or _POSITIONS[0]] = max(CONTEXT, int(CONTEXT * scaling.get("factor", 32)))
    for window in ("sliding_window", "sliding_window_size"):
        if fields.get(window) is not None:
            fields[window] = WINDOW
    if fields.get("attention_chunk_size") is not None:
        fields["attention_chunk_size"] = CONTEXT


_VISION = {
    **dict.fromkeys(("hidden_size", "embed_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_global_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "attention_heads"), 2),
    "intermediate_size": 48,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
    "intermediate_layers_indices": [0],
    "num_position_embeddings": 16,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}


def _shrink_vision(fields: Fields, width: int) -> None:
    """Make what sees images tiny: it isn't run."""
    fields.update({name: value for name, value in _VISION.items() if name in fields})
    if "out_hidden_size" in fields:
        fields["out_hidden_size"] = width
    if fields.get("model_type") == "llama4_vision_model":
        fields.update(vision_output_dim=32, intermediate_size=128)
    if fields.get("model_type") == "mllama_vision_model":
        fields["vision_output_dim"] = 64
