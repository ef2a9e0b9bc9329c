"""A causal LM of `transformers` on the paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor, nn

from pagestream_engine.attention import StepContext
from pagestream_engine.errors import InvariantViolation
from pagestream_engine.layers.attention import PagedAttention
from pagestream_engine.layers.linear import Linear
from pagestream_engine.models.config import ModelInfo
from pagestream_engine.models.general.interface import (
    ATTENTION,
    AttentionCall,
    call_packed,
    set_answerer,
    set_implementation,
)
from pagestream_engine.models.general.linears import EngineLinear
from pagestream_engine.models.model import Model


class GeneralModel(Model):
    """Runs the modelling code on packed tokens; its n-th call of attention is layer n of the cache."""

    can_be_deterministic = False
    forward_gives_logits = True

    def __init__(self, info: ModelInfo, module: nn.Module, attentions: Sequence[PagedAttention]) -> None:
        """Take a loaded module, and the attention of each of its calls."""
        super().__init__(info)
        self._module = module
        self._calls = PagedCalls(attentions)
        set_implementation(module, ATTENTION)
        set_answerer(module, self._calls.attend)

    def forward(self, token_ids: Tensor, wanted: Tensor, context: StepContext) -> Tensor:
        """Return the wanted tokens' logits: the modelling code has no seam between layers and head."""
        self._calls.begin(context)
        logits = call_packed(self._module, token_ids, context.positions, wanted)
        self._calls.end()
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def linears(self) -> Sequence[Linear]:
        return [module.linear for module in self._module.modules() if isinstance(module, EngineLinear)]

    def weight_bytes(self) -> int:
        plain = {id(x): x.nbytes for x in (*self._module.parameters(), *self._module.buffers())}
        return sum(plain.values()) + sum(linear.num_bytes for linear in self.linears())


class PagedCalls:
    """Answers the attention calls of one forward pass after another, in their order."""

    def __init__(self, attentions: Sequence[PagedAttention]) -> None:
        self._attentions = attentions
        self._context: StepContext | None = None
        self._num_calls = 0

    def begin(self, context: StepContext) -> None:
        """Start a forward pass."""
        self._context, self._num_calls = context, 0

    def end(self) -> None:
        """Raise InvariantViolation if the pass had fewer calls than the probe."""
        if self._num_calls != len(self._attentions):
            raise InvariantViolation(
                f"attention: given {self._num_calls} calls in a step, expected {len(self._attentions)} as in the probe"
            )
        self._context = None

    def attend(self, call: AttentionCall) -> Tensor:
        """As `Answerer`. Heads that a layer lacks beside the cache's are zeros, which change no other head."""
        if self._context is None or self._num_calls == len(self._attentions):
            raise InvariantViolation(f"attention: given call {self._num_calls + 1}, expected as many as in the probe")
        attention = self._attentions[self._num_calls]
        self._num_calls += 1
        num_heads, value_dim = call.query.shape[1], call.value.shape[2]
        spec = attention.spec
        query = _with_heads(call.query, spec.num_heads)
        key, value = _with_heads(call.key, spec.num_kv_heads), _with_heads(call.value, spec.num_kv_heads)
        output = attention(query.contiguous(), key.contiguous(), value.contiguous(), self._context)
        return output[:, : num_heads * value_dim]


def _with_heads(x: Tensor, num_heads: int) -> Tensor:
    """(tokens, fewer heads, size) -> (tokens, num_heads, size)."""
    missing = num_heads - x.shape[1]
    return F.pad(x, (0, 0, 0, missing)) if missing else x
