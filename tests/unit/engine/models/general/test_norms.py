"""Norms of modelling code whose source is known are computed by the engine; all others stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from pagestream_engine.attention.native.calls import NativeKernels
from pagestream_engine.attention.native.library import load_library
from pagestream_engine.attention.native.operators import NativeOperators
from pagestream_engine.attention.operators import Operators
from pagestream_engine.attention.torch.operators import TorchOperators
from pagestream_engine.models.general.norms import EngineNorm, is_known, take_over_norms
from support.engines.architectures import small_config
from torch import Tensor, nn
from transformers.models.glm4.modeling_glm4 import Glm4RMSNorm
from transformers.models.granite.modeling_granite import GraniteRMSNorm

SIZE = 123


class CountingOperators(TorchOperators):
    """Counts the norms that it computes."""

    num_norms = 0

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        self.num_norms += 1
        return super().rms_norm(x, weight, eps)


def operators(name: str, dtype: torch.dtype) -> Operators:
    if name == "torch":
        return TorchOperators(dtype)
    library = load_library(16)
    if library is None:
        pytest.skip("no C++ compiler")
    return NativeOperators(dtype, NativeKernels(library, dtype))


def granite_norm(dtype: torch.dtype) -> Any:
    norm = GraniteRMSNorm(SIZE, eps=1e-5).to(dtype).requires_grad_(False)
    norm.weight.copy_(torch.randn(SIZE))
    return norm


@pytest.mark.parametrize("name", ["native", "torch"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("shape", [(1, 5, SIZE), (3, SIZE), (1, 4, 3, SIZE), (1, 0, SIZE)])
def test_a_known_norm_gives_what_its_own_code_gives(
    name: str, dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]
) -> None:
    norm = granite_norm(dtype)
    x = torch.randn(shape).to(dtype)
    expected = norm(x)
    assert take_over_norms(norm, operators(name, dtype)) == 1
    assert isinstance(norm.forward, EngineNorm)
    torch.testing.assert_close(norm(x), expected, rtol=tolerance, atol=1e-6)
    strided = torch.randn(*shape[:-1], 2 * SIZE).to(dtype)[..., ::2]
    torch.testing.assert_close(norm(strided), norm(strided.contiguous()), rtol=0, atol=0)


def test_another_dtype_than_the_weights_is_left_to_the_modelling_code() -> None:
    norm, counting = granite_norm(torch.bfloat16), CountingOperators(torch.bfloat16)
    take_over_norms(norm, counting)
    assert norm(torch.randn(2, SIZE)).dtype is torch.float32
    assert counting.num_norms == 0
    assert norm(torch.randn(2, SIZE).bfloat16()).dtype is torch.bfloat16
    assert counting.num_norms == 1


@pytest.mark.parametrize(("kind", "is_taken_over"), [("granite", True), ("olmo2", False), ("gemma", False)])
def test_what_rounds_elsewhere_or_offsets_its_weight_stays(kind: str, is_taken_over: bool) -> None:
    """Olmo2 multiplies with the weight before it rounds; Gemma adds one to it."""
    config = small_config(kind)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    assert norms
    assert {is_known(module) for module in norms} == {is_taken_over}


def test_a_subclass_with_a_forward_of_its_own_stays() -> None:
    class Doubled(Glm4RMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 2 * super().forward(hidden_states)

    assert is_known(Glm4RMSNorm(SIZE))
    assert not is_known(Doubled(SIZE))
    assert not is_known(nn.LayerNorm(SIZE))
