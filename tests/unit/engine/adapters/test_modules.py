"""What a rank takes of an adapter's matrices adds up to what one process computes with them."""

from __future__ import annotations

import torch
from pagestream_engine.adapters.modules import adaptable_modules
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.models.division.sharding import shard_weights
from pagestream_engine.models.families.llama import Llama
from pagestream_engine.models.families.phi3 import Phi3

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
