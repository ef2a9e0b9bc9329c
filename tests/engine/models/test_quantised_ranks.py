"""What ranks have of a quantised checkpoint's matrices stands for the weights that ranks have of the floats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pagestream_engine import ConfigError
from pagestream_engine.layers.quantised import QuantisedWeight, Storage
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.division.sharding import shard_weights
from pagestream_engine.models.families.qwen2 import Qwen2
from pagestream_engine.models.loader import load_parameters
from pagestream_engine.models.model import Target
from pagestream_engine.models.quantised.scheme import Scheme
from support.engines.quantised_checkpoints import FORMS, write

pytestmark = pytest.mark.served

SHAPE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192}


@pytest.fixture(scope="module")
def folder(model_of: Callable[..., Path]) -> Path:
    return model_of("qwen2", **SHAPE)


def weights_of(folder: Path, rank: int, size: int) -> dict[str, torch.Tensor]:
    """Return the weights of a rank's linears, transposed, by their products with the identity."""
    family, config = Qwen2(), Qwen2().read(ConfigFile.read(folder))
    weights = shard_weights(family.weights(config), config, rank, size)
    target = Target(torch.float32, torch.device("cpu"), max_model_len=64, exact_linears=True)
    scheme = Scheme.read(ConfigFile.read(folder))
    linears = load_parameters(folder, weights, target, scheme).named_linears()
    return {name: linear.method.product(torch.eye(linear.method.shape[1]), None) for name, linear in linears.items()}


@pytest.mark.parametrize("form", FORMS)
def test_ranks_of_a_quantised_checkpoint_have_its_weights(form: str, folder: Path, tmp_path: Path) -> None:
    """Heads have 32 channels, as groups have inputs; of four ranks each has one group and a half of the MLP's."""
    quantised, plain = write(folder, tmp_path, form)
    if form == "gptq, desc_act":
        refusal = r"tensor_parallel_size: given 2, expected 1 for model\.layers\.0\.self_attn\.o_proj; .*g_idx"
        with pytest.raises(ConfigError, match=refusal):
            weights_of(quantised, 0, 2)
        return
    for rank, size in ((1, 2), (2, 4)):
        expected = weights_of(plain, rank, size)
        for name, weight in weights_of(quantised, rank, size).items():
            assert torch.equal(weight, expected[name]), name


def test_groups_that_ranks_cut_become_smaller_ones() -> None:
    values = torch.arange(2 * 24, dtype=torch.int8).view(2, 24)
    weight = QuantisedWeight(Storage.INT8, values, torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), 8)
    for first, count, size in ((0, 24, 8), (8, 8, 8), (12, 4, 4), (12, 12, 4), (9, 5, 5)):
        part = weight.cut(slice(1, 2), slice(first, first + count))
        assert part is not None
        assert part.group_size == size
        assert torch.equal(part.dequantised(torch.float32), weight.dequantised(torch.float32)[1:, first:][:, :count])
    assert weight.cut(slice(0, 2), slice(5, 10)) is None
