"""An adapter is checked by its configuration and its header, and refused by the name of what is wrong with it.

Its patterns match as Python's own matcher finds them, in one pass; its matrices are cut as ranks need them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine import AdapterChanged, AdapterError, AdapterFileError, AdapterMismatch, UnsupportedAdapter
from pagestream_engine.features.lora.files import NamePattern, adaptable_modules, open_adapter, read_adapter
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.division.sharding import shard_weights
from pagestream_engine.models.families.llama import Llama
from pagestream_engine.models.families.phi3 import Phi3
from pagestream_engine.models.weights import LinearWeight, Part, TensorWeight
from safetensors.torch import save_file

MODULES = adaptable_modules(
    {
        "embedding": TensorWeight.of("model.embed_tokens.weight", 50, 12),
        "0.qkv": LinearWeight(
            (Part("model.layers.0.self_attn.q_proj", 10), Part("model.layers.0.self_attn.v_proj", 6)), 12
        ),
        "0.experts.1.down": LinearWeight.of("model.layers.0.mlp.experts.1.down_proj", 12, 8),
        "head": LinearWeight.of("lm_head", 50, 12),
    }
)
QUERY, VALUE = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}


def write(folder: Path, shapes: dict[str, tuple[int, int, int]] | None = None, **config: Any) -> Path:
    """Write an adapter: (rank, in features, out features) of each module."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    tensors = {}
    for module, (rank, inputs, outputs) in (shapes or {QUERY: (4, 12, 10), VALUE: (4, 12, 6)}).items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, inputs)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(outputs, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def cut_off(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])


def nested(folder: Path) -> None:
    """Deeper than a parser's stack."""
    (folder / "adapter_config.json").write_text("[" * 200_000)


def as_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def with_tensor(name: str) -> Callable[[Path], None]:
    def add(folder: Path) -> None:
        save_file({name: torch.randn(4)}, folder / "adapter_model.safetensors")

    return add


def of_integers(folder: Path) -> None:
    names = [f"base_model.model.{QUERY}.lora_{matrix}.weight" for matrix in "AB"]
    matrices = (torch.ones(4, 12, dtype=torch.int8), torch.ones(10, 4, dtype=torch.int8))
    save_file(dict(zip(names, matrices, strict=True)), folder / "adapter_model.safetensors")


def without_b(folder: Path) -> None:
    name = f"base_model.model.{QUERY}.lora_A.weight"
    save_file({name: torch.randn(4, 12)}, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("config", "damage", "error", "names"),
    [
        ({"use_dora": True}, None, UnsupportedAdapter, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, None, UnsupportedAdapter, "modules_to_save"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, None, UnsupportedAdapter, "target_parameters"),
        ({"a_field_of_tomorrow": {"on": 1}}, None, UnsupportedAdapter, "a_field_of_tomorrow"),
        ({"peft_type": "IA3"}, None, UnsupportedAdapter, "peft_type"),
        ({"bias": "all"}, None, UnsupportedAdapter, "bias"),
        ({"init_lora_weights": "pissa"}, None, UnsupportedAdapter, "init_lora_weights"),
        ({"r": 0}, None, AdapterFileError, "r 0"),
        ({"rank_pattern": {"(": 4}}, None, AdapterFileError, "rank_pattern"),
        ({"rank_pattern": {"(?i)q_proj": 4}}, None, AdapterFileError, "rank_pattern"),
        ({"rank_pattern": {"(" * 2000 + ")" * 2000: 4}}, None, AdapterFileError, "at most 1024 characters"),
        (
            {
                "rank_pattern": {f"a{{{n},2000}}b": 4 for n in range(9)},
                "alpha_pattern": {f"a{{{n},2000}}": 4 for n in range(9)},
            },
            None,
            AdapterFileError,
            "alpha_pattern: .* have more than 65536 parts",
        ),
        ({"lora_alpha": 10**400}, None, AdapterFileError, "lora_alpha"),
        ({"r": 16}, None, AdapterMismatch, r"\(16, 12\)"),
        ({}, cut_off, AdapterFileError, "expected the size"),
        ({}, nested, AdapterFileError, "a JSON object"),
        ({}, as_pickle, UnsupportedAdapter, "adapter_model.bin"),
        ({}, without_b, AdapterFileError, "no lora_B"),
        ({}, of_integers, UnsupportedAdapter, r"q_proj: given lora_A of torch\.int8"),
        ({}, with_tensor(f"base_model.model.{QUERY}.lora_magnitude_vector"), UnsupportedAdapter, "magnitude"),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)[:30]),
)
def test_refusals(
    config: dict[str, Any],
    damage: Callable[[Path], None] | None,
    error: type[AdapterError],
    names: str,
    tmp_path: Path,
) -> None:
    folder = write(tmp_path / "a", **config)
    if damage is not None:
        damage(folder)
    with pytest.raises(error, match=names):
        open_adapter("a", folder, MODULES, 64)


@pytest.mark.parametrize(
    ("shapes", "names"),
    [
        ({QUERY: (4, 16, 10)}, "lora_A"),
        ({QUERY: (4, 12, 11)}, "lora_B"),
        ({"model.layers.1.self_attn.q_proj": (4, 12, 10)}, "layers.1"),
        ({"lm_head": (4, 12, 50)}, "lm_head"),
        ({"model.layers.0.mlp.experts.1.down_proj": (4, 8, 12)}, "experts"),
    ],
    ids=["inputs", "outputs", "layer", "head", "experts"],
)
def test_another_models_adapter(shapes: dict[str, tuple[int, int, int]], names: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterMismatch, match=names):
        open_adapter("a", write(tmp_path / "a", shapes), MODULES, 64)


def test_a_rank_that_is_too_large(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    adapter = open_adapter("a", folder, MODULES, 4)
    with pytest.raises(UnsupportedAdapter, match="max_lora_rank"):
        open_adapter("a", folder, MODULES, 3)
    with pytest.raises(UnsupportedAdapter, match="max_lora_rank"):
        read_adapter(adapter, MODULES, torch.float32, 3)


def test_ranks_and_scales_by_module(tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"v_proj": 9}, "alpha_pattern": {r".*\.0\.self_attn\.v_proj": 6}}
    folder = write(tmp_path / "a", {QUERY: (4, 12, 10), VALUE: (9, 12, 6)}, use_rslora=True, **patterns)
    adapter = open_adapter("a", folder, MODULES, 64)
    weights = read_adapter(adapter, MODULES, torch.float32, 64)
    assert {module: (tuple(each.a.shape), tuple(each.b.shape)) for module, each in weights.items()} == {
        QUERY: ((4, 12), (4, 10)),
        VALUE: ((9, 12), (9, 6)),
    }
    assert weights[QUERY].scale == pytest.approx(8 / math.sqrt(4))
    assert weights[VALUE].scale == pytest.approx(6 / math.sqrt(9))


@pytest.mark.parametrize("nest", ["model.language_model", "language_model.model", "model.text_model"])
def test_names_of_a_model_that_nests_this_one(nest: str, tmp_path: Path) -> None:
    """As PEFT names what it trained in the whole model of images and text."""
    query, value = (f"{nest}.{name.removeprefix('model.')}" for name in (QUERY, VALUE))
    folder = write(tmp_path / "a", {query: (4, 12, 10), value: (9, 12, 6)}, rank_pattern={value: 9})
    adapter = open_adapter("a", folder, MODULES, 64)
    weights = read_adapter(adapter, MODULES, torch.float32, 64)
    assert {module: tuple(each.a.shape) for module, each in weights.items()} == {QUERY: (4, 12), VALUE: (9, 12)}
    twice = write(tmp_path / "b", {query: (4, 12, 10), QUERY: (4, 12, 10)})
    with pytest.raises(AdapterFileError, match="twice"):
        open_adapter("b", twice, MODULES, 64)


def test_files_that_have_changed_since(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    adapter = open_adapter("a", folder, MODULES, 64)
    read_adapter(adapter, MODULES, torch.float32, 64)
    write(folder, lora_alpha=9)
    assert open_adapter("a", folder, MODULES, 64).revision != adapter.revision
    with pytest.raises(AdapterChanged, match=adapter.revision):
        read_adapter(adapter, MODULES, torch.float32, 64)


# -- patterns -----------------------------------------------------------------------------------------------------

NAMES = [
    f"model.layers.{layer}.{block}.{linear}"
    for layer in (0, 1, 10, 21)
    for block in ("self_attn", "mlp")
    for linear in ("q_proj", "v_proj", "down_proj", "proj.q_proj")
]
USUAL = [
    "q_proj",
    "self_attn.v_proj",
    "model.layers.1.self_attn.q_proj",
    r".*\.1\.self_attn\.v_proj",
    r"layers\.\d+\.mlp\.down_proj",
    "q_proj|v_proj",
    r"model\.layers\.(0|1|2)\.(self_attn|mlp)\..*_proj",
    "^model.*q_proj$",
    r"(layers\.)?1[0-9]?\.[^.]+\.[qkv]_proj",
    r"(.*\.)?(?:q|v)_proj",
    r"layers\.\d{2}\..{3,9}\.\w+?",
    r"(?P<x>m|l)+p\.\S*j",
    "",
]


@pytest.mark.parametrize("pattern", USUAL)
def test_a_pattern_matches_what_it_does_for_peft(pattern: str) -> None:
    found = NamePattern(pattern)
    for name in NAMES:
        assert found.matches(name) == bool(re.match(rf"(.*\.)?({pattern})$", name)), name


@pytest.mark.parametrize("pattern", ["([a-z0-9_.]+)+!", "(.|.)" * 150 + "!", ".*" * 300 + "!", "((a*)*)*" * 60 + "!"])
def test_a_pattern_that_backtracks_without_end_has_one_pass(pattern: str) -> None:
    assert not NamePattern(pattern).matches("model.layers.1.self_attn." + "a" * 60)


@pytest.mark.parametrize(
    ("pattern", "match"),
    [
        (r"(a)\1", "groupref"),
        ("(?=a)a", "assert"),
        ("(?i:a)", "subpattern"),
        (r"\ba", "at_boundary"),
        ("a{1000}" * 9, "too many"),
        ("(((){4000}){4000}){4000}", "too many"),
        ("a)|(b", "unbalanced"),
        ("(?i)a", "global flags"),
        ("a" * 2000, "2000 characters"),
    ],
)
def test_what_needs_backtracking_or_is_too_large_is_refused(pattern: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        NamePattern(pattern)


def test_the_patterns_of_an_adapter_share_their_steps() -> None:
    assert NamePattern("layers.[0-9].mlp", 0).num_steps == 0, "a name takes none"
    first = NamePattern(".{0,100}x")
    assert first.num_steps > 100
    assert NamePattern(".{0,100}x", first.num_steps).matches("ax")
    with pytest.raises(ValueError, match="and those before it have more than 65536 parts"):
        NamePattern(".{0,100}x", first.num_steps - 1)


# -- cuts for ranks -----------------------------------------------------------------------------------------------

SHAPE = {"hidden_size": 16, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
FIELDS = {"architectures": [""], "vocab_size": 10, "num_hidden_layers": 1, **SHAPE}


def test_ranks_have_the_rows_and_columns_of_their_linears() -> None:
    """Two KV heads on four ranks: the rows of a key are on two of them each."""
    for family in (Llama(), Phi3()):
        config = family.read(ConfigFile(FIELDS))
        whole = family.weights(config)
        ranks = [adaptable_modules(whole, shard_weights(whole, config, rank, 4)) for rank in range(4)]
        for name, module in adaptable_modules(whole).items():
            a, b, x = torch.randn(3, module.in_features), torch.randn(module.rows, 3), torch.randn(module.in_features)
            own = [rank[name] for rank in ranks]
            inputs = [x[None] if len(each.cut_a(a)[0]) == len(x) else each.cut_a(x[None]) for each in own]
            products = [each.cut_b(b) @ (each.cut_a(a) @ given[0]) for each, given in zip(own, inputs, strict=True)]
            if name.endswith(("o_proj", "down_proj")):
                torch.testing.assert_close(sum(products), b @ (a @ x))
                continue
            rows = [[row for first, end in each.cut.rows for row in range(first, end)] for each in own if each.cut]
            assert sorted({row for of_rank in rows for row in of_rank}) == list(range(module.rows))
            for of_rank, product in zip(rows, products, strict=True):
                torch.testing.assert_close(product, (b @ (a @ x))[of_rank])


def test_linears_of_other_stages_have_no_rows() -> None:
    config = Llama().read(ConfigFile(FIELDS))
    modules = adaptable_modules(Llama().weights(config), {})
    assert {(module.rows, module.shape) for name, module in modules.items() if "q_proj" in name} == {(0, (16, 16))}
