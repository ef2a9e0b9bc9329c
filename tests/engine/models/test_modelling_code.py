"""Modelling code of `transformers` on the paged cache: what can't run is refused in one line that names it.

Norms whose source is known are computed by the engine; rotations that would follow a batch's longest sequence keep to
one length, or are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagestream_engine import ModelFileError, UnsupportedModel, WeightsError
from pagestream_engine.attention import CacheShape, Operators, select_backend
from pagestream_engine.layers import RopeContext
from pagestream_engine.models.general.model import EngineNorm, is_known, shortest_context, take_over_norms
from pagestream_engine.models.model import Target
from pagestream_engine.models.registry import open_model
from safetensors.torch import load_file, save_file
from support.engines.architectures import small_config, write_model
from support.pairwise import Case, pairwise
from torch import Tensor, nn

pytestmark = pytest.mark.served
_CPU = torch.device("cpu")
_TARGET = Target(torch.float32, torch.device("cpu"), 128)


def _folder(folder: Path, kind: str, **changes: Any) -> Path:
    config = small_config(kind, **changes)
    config.save_pretrained(folder)
    write_model(folder, config)
    return folder


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["NoSuchForCausalLM"], "model_type": "gpt2"}, "NoSuchForCausalLM"),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "no_such"}, "no_such"),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "recurrent state"),
        ({"architectures": ["XLNetLMHeadModel"], "model_type": "xlnet"}, "attention interface"),
        ({"architectures": ["BartForCausalLM"], "model_type": "bart"}, "encoder-decoder"),
        ({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}, "vision inputs"),
    ],
)
def test_an_architecture_that_does_not_run_is_named(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedModel, match=words):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("bert", {"is_decoder": False}, "neither a causal one nor a sliding window"),
        ("gemma4_unified", {}, "looks up a call's tokens"),
    ],
)
def test_layers_that_do_not_run_are_found_by_the_probe(
    tmp_path: Path, kind: str, changes: dict[str, Any], words: str
) -> None:
    source = open_model(_folder(tmp_path, kind, **changes))
    with pytest.raises(UnsupportedModel, match=words), torch.inference_mode():
        source.attention_specs(_TARGET)


def test_a_draft_model_is_refused_before_its_weights(tmp_path: Path) -> None:
    small_config("gemma4_assistant").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="draft model"):
        open_model(tmp_path)


def test_each_layers_attention_is_found(tmp_path: Path) -> None:
    with torch.inference_mode():
        specs = open_model(_folder(tmp_path, "gpt_oss")).attention_specs(_TARGET)
    found = [(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale, spec.window) for spec in specs]
    assert found == [(4, 2, 16, 0.25, 20), (4, 2, 16, 0.25, None)]
    assert all(spec.sinks is not None and spec.sinks.shape == (4,) for spec in specs)


def test_missing_and_corrupt_weights_are_named(tmp_path: Path) -> None:
    file = _folder(tmp_path, "gpt2") / "model.safetensors"
    tensors = load_file(file)
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"h\.1\.mlp\.c_fc\.weight"):
        open_model(tmp_path).attention_specs(_TARGET)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match=r"model\.safetensors: .*: given bytes \d+ to \d+, expected"):
        open_model(tmp_path).attention_specs(_TARGET)


# -- norms ------------------------------------------------------------------------------------------------------------

SIZE = 123


def operators(option: str, dtype: torch.dtype) -> Operators:
    """By C++ where there is a compiler, or by torch."""
    return select_backend(option, [CacheShape((0,), 1, 16, 16, dtype)], _CPU).operators


def granite_norm(dtype: torch.dtype) -> Any:
    from transformers.models.granite.modeling_granite import GraniteRMSNorm

    norm = GraniteRMSNorm(SIZE, eps=1e-5).to(dtype).requires_grad_(False)
    norm.weight.copy_(torch.randn(SIZE))
    return norm


NORMS = {
    "option": ("auto", "torch"),
    "dtype": (torch.float32, torch.bfloat16),
    "shape": ((1, 5, SIZE), (3, SIZE), (1, 4, 3, SIZE), (1, 0, SIZE)),
}


@pytest.mark.parametrize("case", pairwise(NORMS), ids=str)
def test_a_known_norm_gives_what_its_own_code_gives(case: Case) -> None:
    dtype, shape = case["dtype"], case["shape"]
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2**-7}[dtype]
    norm = granite_norm(dtype)
    x = torch.randn(shape).to(dtype)
    expected = norm(x)
    assert take_over_norms(norm, operators(case["option"], dtype)) == 1
    assert isinstance(norm.forward, EngineNorm)
    torch.testing.assert_close(norm(x), expected, rtol=tolerance, atol=1e-6)
    strided = torch.randn(*shape[:-1], 2 * SIZE).to(dtype)[..., ::2]
    torch.testing.assert_close(norm(strided), norm(strided.contiguous()), rtol=0, atol=0)


def test_another_dtype_than_the_weights_is_left_to_the_modelling_code() -> None:
    norm = granite_norm(torch.bfloat16)
    take_over_norms(norm, operators("auto", torch.bfloat16))
    assert norm(torch.randn(2, SIZE)).dtype is torch.float32
    assert norm(torch.randn(2, SIZE).bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize(("kind", "is_taken_over"), [("granite", True), ("olmo2", False), ("gemma", False)])
def test_what_rounds_elsewhere_or_offsets_its_weight_stays(kind: str, is_taken_over: bool) -> None:
    """Olmo2 multiplies with the weight before it rounds; Gemma adds one to it."""
    import transformers

    config = small_config(kind)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    assert norms
    assert {is_known(module) for module in norms} == {is_taken_over}


def test_a_subclass_with_a_forward_of_its_own_stays() -> None:
    from transformers.models.glm4.modeling_glm4 import Glm4RMSNorm

    class Doubled(Glm4RMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 2 * super().forward(hidden_states)

    assert is_known(Glm4RMSNorm(SIZE))
    assert not is_known(Doubled(SIZE))
    assert not is_known(nn.LayerNorm(SIZE))


# -- rotations --------------------------------------------------------------------------------------------------------

_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 32,
}


def test_the_context_is_that_of_the_shortest_rotation() -> None:
    nested = {"full_attention": _LONG_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert shortest_context(SimpleNamespace(rope_parameters=nested), 256) == RopeContext(32, 256)
    assert shortest_context(SimpleNamespace(rope_parameters=_LONG_ROPE), 256) == RopeContext(32, 256)
    assert shortest_context(SimpleNamespace(), 256) == RopeContext(256, 256)


def test_modelling_code_with_a_choice_of_its_own_ends_at_the_original_context(tmp_path: Path) -> None:
    scaling = {**_LONG_ROPE, "short_mscale": 1.0, "long_mscale": 1.5}
    config = small_config("phimoe", rope_parameters=scaling)
    config.save_pretrained(tmp_path)
    write_model(tmp_path, config)
    with torch.inference_mode():
        assert open_model(tmp_path).attention_specs(Target(torch.float32, _CPU, 32))
        with pytest.raises(UnsupportedModel, match="at most 32: beyond it the modelling code rotates all"):
            open_model(tmp_path).attention_specs(Target(torch.float32, _CPU, 64))
