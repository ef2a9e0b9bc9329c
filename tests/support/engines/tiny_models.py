"""Small model folders with random weights, made with `transformers`, whose results the engine is compared with."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support.engines.tokenizers import byte_level

VOCAB_SIZE = 331
"""Not a multiple of any vector width, so that tails of vectorised loops run."""
_INIT_STD = 0.15
"""Large enough that the next token depends on all earlier ones: with the usual 0.02 greedy output is one token."""
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": _INIT_STD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

_UPPER_WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
_QUARTER = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
_GEMMA3_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]


@dataclass(frozen=True)
class TinyModel:
    """A configuration class of `transformers` by name, and how it differs from the common shape."""

    config_class: str
    changes: dict[str, Any] = field(default_factory=dict)


TINY_MODELS: dict[str, TinyModel] = {
    "llama": TinyModel("LlamaConfig"),
    "llama-tied": TinyModel("LlamaConfig", {"tie_word_embeddings": True, "head_dim": 24, "attention_bias": True}),
    "llama3-rope": TinyModel(
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-linear-rope": TinyModel(
        "LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}
    ),
    "qwen2": TinyModel("Qwen2Config", {"num_key_value_heads": 3}),
    "qwen3": TinyModel("Qwen3Config", {"head_dim": 32, "num_key_value_heads": 1}),
    "mistral": TinyModel("MistralConfig", {"num_attention_heads": 4, "num_key_value_heads": 4, "sliding_window": 24}),
    "qwen3-window": TinyModel("Qwen3Config", {"head_dim": 32, "num_key_value_heads": 1, **_UPPER_WINDOWS}),
    "mixtral": TinyModel(
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 72, "sliding_window": 28},
    ),
    "qwen2-window": TinyModel("Qwen2Config", {"head_dim": 16, **_UPPER_WINDOWS}),
    "qwen3-moe": TinyModel(
        "Qwen3MoeConfig",
        {
            "head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 20,
        },
    ),
    "gemma2": TinyModel("Gemma2Config", {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 24}),
    "gemma3": TinyModel(
        "Gemma3TextConfig",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24, "layer_types": _GEMMA3_LAYERS},
    ),
    "gptj": TinyModel("GPTJConfig", {"rotary_dim": 8}),
    "codegen": TinyModel("CodeGenConfig", {"rotary_dim": 24, "num_attention_heads": 4}),
    "bloom": TinyModel("BloomConfig"),
    "bloom-normed": TinyModel("BloomConfig", {"apply_residual_connection_post_layernorm": True}),
    "mpt": TinyModel("MptConfig", {"max_seq_len": 512, "attn_config": {"clip_qkv": 1.5}}),
    "falcon": TinyModel("FalconConfig"),
    "falcon-new": TinyModel("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-rw": TinyModel("FalconConfig", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "xglm": TinyModel("XGLMConfig", {"ffn_dim": 136, "init_std": _INIT_STD, "pad_token_id": 5}),
    "biogpt": TinyModel("BioGptConfig"),
    "gpt-neo": TinyModel(
        "GPTNeoConfig", {"attention_types": [[["global", "local"], 1], [["local"], 1]], "window_size": 24}
    ),
    "gpt-neox-japanese": TinyModel("GPTNeoXJapaneseConfig", {"rope_parameters": _QUARTER}),
    "stablelm": TinyModel("StableLmConfig", {"qk_layernorm": True, "use_qkv_bias": True, "rope_parameters": _QUARTER}),
    "stablelm-parallel": TinyModel("StableLmConfig", {"use_parallel_residual": True, "rope_parameters": _QUARTER}),
    "phi3": TinyModel(
        "Phi3Config",
        {"sliding_window": 40, "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
}


def make_model(folder: Path, name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a model folder (config, generation config, safetensors, tokenizer) unless it exists; return it.

    Args:
        folder: where; taken as it is if it already holds a model.
        name: key of `TINY_MODELS`.
        seed: of the weights.
        dtype: that the weights are stored in.
        changes: configuration fields that differ further.
    """
    if (folder / "config.json").is_file():
        return folder
    import transformers

    tiny = TINY_MODELS[name]
    config = getattr(transformers, tiny.config_class)(**{**_SHAPE, **tiny.changes, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomise_vectors(model)
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    return folder


def make_classifier(folder: Path, name: str, num_labels: int, **changes: Any) -> Path:
    """Write a tiny model of a family with scores of labels."""
    import transformers

    make_model(folder, name)
    config = getattr(transformers, TINY_MODELS[name].config_class).from_pretrained(folder)
    config.num_labels, config.pad_token_id = num_labels, 0
    config.update(changes)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with torch.no_grad():
        model.score.weight.mul_(20)
    model.save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Write a byte-level BPE tokenizer without merges: a token for each byte; ids beyond the bytes are words."""
    specials, num_bytes = ["<unk>", "<s>", "</s>"], 256
    words = [f"Ġw{index}" for index in range(vocab_size - len(specials) - num_bytes)]
    byte_level(specials, last=words).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def reference_model(folder: Path) -> Any:
    """Load the folder with `transformers`."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def random_prompts(lengths: list[int], *, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    """Return random prompts of these lengths, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def _randomise_vectors(model: Any) -> None:
    """Randomise norm weights and biases: as the ones and zeros that `transformers` starts with, an error in them would
    not show.
    """
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
