"""Of which code a family is."""

from pagestream_engine.models.families.llama import Llama
from pagestream_engine.models.registry import find_family, plugin_digest


class Mine(Llama):
    architecture = "MineForCausalLM"


def test_only_a_family_of_the_users_has_a_digest() -> None:
    family = find_family("LlamaForCausalLM")
    assert family is not None
    assert plugin_digest(family) == ""
    assert len(plugin_digest(Mine())) == 64
