"""A causal LM of `transformers` on the paged cache, and what of its modelling code is replaced.

`transformers` calls the attention function that is registered here, once in a process; each model's modules carry the
function that answers for them, and the mask that the code makes shows which tokens a layer's queries see. Linears and
norms are replaced by the engine's where nothing but their call is used or their code is known, and rotations are kept
from following the longest sequence of a batch.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor, nn

from pagestream_engine.attention import Operators, PagedAttention, StepContext
from pagestream_engine.errors import InvariantViolation, UnsupportedModel
from pagestream_engine.layers.linear import Linear, choose_method, lays_out_anew
from pagestream_engine.layers.quantised import QuantisedWeight, choose_quantised_method, quantise_int8
from pagestream_engine.layers.rope import RopeContext, rope_context
from pagestream_engine.models.config import ModelInfo
from pagestream_engine.models.general.experts import experts_of
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
        experts = sum(each.num_bytes for each in experts_of(self._module))
        return sum(plain.values()) + sum(linear.num_bytes for linear in self.linears()) + experts


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


ATTENTION = "pagestream"
"""Name of the attention implementation. No masks are made for it: who sees what is the paged cache's business."""
PROBED_ATTENTION = "pagestream_probe"
"""As ATTENTION, with masks, which the probe reads."""
MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""Batch, head, query and key index -> whether the query sees the key."""
MaskMaker = Callable[[MaskFunction, int], Tensor]
"""A mask function and the number of tokens -> the mask that the layers get."""
mask_maker: ContextVar[MaskMaker] = ContextVar("mask_maker")
"""What makes the masks while a model is probed."""
_ANSWERER = "pagestream_answerer"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What modelling code asks for."""

    module: nn.Module
    """The module that asks."""
    query: Tensor
    """(tokens, num_heads, head size)."""
    key: Tensor
    """(tokens, num_kv_heads, head size)."""
    value: Tensor
    """(tokens, num_kv_heads, its own head size)."""
    mask: Tensor | None
    """As the modelling code has made it."""
    options: Mapping[str, Any]
    """Further keyword arguments."""


Answerer = Callable[[AttentionCall], Tensor]
"""Attends once: returns (tokens, num_heads * head size of the value)."""


def register() -> None:
    """Make the implementations known to `transformers`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name in (ATTENTION, PROBED_ATTENTION):
        AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(PROBED_ATTENTION, _make_mask)


def set_answerer(model: nn.Module, answerer: Answerer) -> None:
    """Let a function answer the calls of all modules of a model."""
    for module in model.modules():
        module.__dict__[_ANSWERER] = answerer


def set_implementation(model: nn.Module, name: str) -> None:
    """Choose the attention implementation of all modules of a model."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = name


def call_packed(model: nn.Module, token_ids: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
    """Run a causal LM on packed tokens, without its own cache.

    Args:
        model: of `transformers`.
        token_ids: (tokens,) int64.
        positions: (tokens,) int64: place of each token in its sequence.
        rows: (rows,) int64: the tokens whose logits are wanted; None: all.

    Returns:
        (rows, vocab_size).
    """
    keeps = rows is not None and "logits_to_keep" in inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"logits_to_keep": rows} if keeps else {}
    output = model(
        input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True, **options
    )
    logits: Tensor = output.logits[0]
    return logits if rows is None or keeps else logits[rows]


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    answerer: Answerer = module.__dict__[_ANSWERER]
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    output = answerer(AttentionCall(module, query, key, value, attention_mask, options))
    return output.view(1, len(query), query.shape[1], -1), None


def _make_mask(*, q_length: int, mask_function: MaskFunction, **_: Any) -> Tensor:
    return mask_maker.get()(mask_function, q_length)


class EngineLinear(nn.Module):
    """A `torch.nn.Linear` that the engine computes."""

    def __init__(
        self,
        linear: nn.Linear,
        *,
        exact: bool,
        quantization: str | None = None,
        stored: QuantisedWeight | None = None,
    ) -> None:
        """Take a linear, whose weight is `stored` in fewer bits or rounded as `quantization` says."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        bias = None if linear.bias is None else linear.bias.detach()
        weight = linear.weight.detach()
        if stored is not None:
            method = choose_quantised_method(stored.to(weight.device), weight.dtype, exact=exact)
        elif quantization is None:
            method = choose_method(weight, exact=exact)
        else:
            method = choose_quantised_method(quantise_int8(weight), weight.dtype, exact=exact)
        self.linear = Linear(method, bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in features) -> (..., out features)."""
        return self.linear(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


_ROUTERS = ("gate", "router")
"""Names of linears that choose experts, which keep the model's dtype."""


def replace_linears(
    model: nn.Module,
    *,
    exact: bool = False,
    quantization: str | None = None,
    stored: Mapping[str, QuantisedWeight] | None = None,
) -> dict[str, nn.Linear]:
    """Replace every linear whose weight nothing else has, where that is faster or its weight is to be quantised.

    Args:
        model: modelling code with its weights.
        exact: as `choose_method` has it.
        quantization: `ModelConfig.quantization`.
        stored: weights of a quantised checkpoint by the names of their modules.

    Returns:
        The replaced modules by name, for `restore_linears`.
    """
    weight = next(model.parameters())
    lays_out = lays_out_anew(weight.device.type, weight.dtype, exact=exact)
    stored = stored or {}
    if not lays_out and quantization is None and not stored:
        return {}
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    found = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and owners[id(module.weight)] == 1 and not _has_hooks(module)
    }
    for name, module in list(found.items()):
        kept = name.rpartition(".")[2] in _ROUTERS
        changes = name in stored or (quantization is not None and not kept)
        if not changes and not lays_out:
            del found[name]
            continue
        rounding = None if kept else quantization
        _set(model, name, EngineLinear(module, exact=exact, quantization=rounding, stored=stored.get(name)))
    return found


def restore_linears(model: nn.Module, replaced: dict[str, nn.Linear]) -> None:
    """Undo `replace_linears`: the modelling code uses more of a linear than its call."""
    for name, module in replaced.items():
        _set(model, name, module)


def _set(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


_ARGUMENTS = ["self", "hidden_states"]
_KNOWN = """
input_dtype = hidden_states.dtype
hidden_states = hidden_states.to(torch.float32)
variance = hidden_states.pow(2).mean(-1, keepdim=True)
hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
return self.weight * hidden_states.to(input_dtype)
"""
"""The body that most architectures have, from Llama's. Others round elsewhere, or add one to the weight."""


class EngineNorm:
    """The forward of one RMS norm."""

    def __init__(self, norm: nn.Module, operators: Operators) -> None:
        """Take a norm that `is_known`."""
        self._weight = norm.get_parameter("weight").detach()
        self._eps = float(norm.variance_epsilon)  # type: ignore[arg-type]
        self._operators = operators
        self._original: Callable[[Tensor], Tensor] = norm.forward

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
        size = self._weight.shape[0]
        if hidden_states.dtype != self._weight.dtype or hidden_states.shape[-1] != size:
            return self._original(hidden_states)  # The product with the weight has another dtype or shape.
        rows = hidden_states.contiguous().view(-1, size)
        return self._operators.rms_norm(rows, self._weight, self._eps).view(hidden_states.shape)


def take_over_norms(model: nn.Module, operators: Operators) -> int:
    """Let `operators` compute every norm that `is_known`; the modules stay, with all that others may read of them.

    Returns:
        How many there are.
    """
    found = [module for module in model.modules() if is_known(module)]
    for module in found:
        module.forward = EngineNorm(module, operators)
    return len(found)


def is_known(module: nn.Module) -> bool:
    """Return whether a module computes x / rms(x), rounded, times a weight of one dimension."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or len(module._parameters) != 1 or not hasattr(module, "variance_epsilon"):
        return False
    return _is_known_forward(type(module).forward)


@cache
def _is_known_forward(forward: Callable[..., object]) -> bool:
    try:
        source = textwrap.dedent(inspect.getsource(forward))
    except (OSError, TypeError):  # The code has no file.
        return False
    function = ast.parse(source).body[0]
    if not isinstance(function, ast.FunctionDef) or [each.arg for each in function.args.args] != _ARGUMENTS:
        return False
    return list(map(ast.dump, function.body)) == list(map(ast.dump, ast.parse(_KNOWN).body))


_BY_LENGTH = ("dynamic", "longrope")
"""Scalings whose frequencies `transformers` chooses by the largest position of a call."""


def shortest_context(config: Any, max_position_embeddings: int) -> RopeContext:
    """Return the context that all rotations of a configuration have."""
    found = [RopeContext(max_position_embeddings, max_position_embeddings)]
    for scaling in _scalings(config).values():
        if scaling.get("rope_type") in _BY_LENGTH:
            found.append(rope_context(scaling["rope_type"], scaling, max_position_embeddings))
    return RopeContext(min(one.num_tokens for one in found), max(one.extended for one in found))


def fix_rotations(model: nn.Module, max_model_len: int) -> None:
    """Give every rotation the frequencies of a sequence of `max_model_len` tokens, whatever the batch.

    Raises:
        UnsupportedModel: modelling code chooses them in a way of its own.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_layer_type = kinds if isinstance(kinds, Mapping) else {None: kinds}
        for layer_type, kind in by_layer_type.items():
            if kind in _BY_LENGTH and hasattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"):
                _fix(module, kind, layer_type, max_model_len)


def _fix(module: Any, kind: str, layer_type: str | None, max_model_len: int) -> None:
    scaling = _scalings(module.config)[layer_type]
    context = rope_context(kind, scaling, module.config.max_position_embeddings)
    if max_model_len <= context.num_tokens:
        return  # no call's positions reach the change
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    prefix = "" if layer_type is None else f"{layer_type}_"
    current = getattr(module, prefix + "inv_freq")
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](
        module.config, current.device, seq_len=max_model_len, layer_type=layer_type
    )
    for name in ("inv_freq", "original_inv_freq"):
        getattr(module, prefix + name).copy_(frequencies)
    setattr(module, prefix + "long_inv_freq", frequencies)
    setattr(module, prefix + "max_seq_len_cached", max_model_len)
    module.original_max_seq_len = max_model_len
    positions = torch.tensor([[1, max_model_len - 1]], device=current.device)
    if not torch.equal(_cosines(module, positions[:, :1], layer_type), _cosines(module, positions, layer_type)[:, :1]):
        raise UnsupportedModel(
            f"max_model_len: given {max_model_len}, expected at most {context.num_tokens}: beyond it the modelling "
            f"code rotates all tokens of a batch by its longest sequence ({kind})"
        )


def _cosines(module: nn.Module, positions: Tensor, layer_type: str | None) -> Tensor:
    options = {} if layer_type is None else {"layer_type": layer_type}
    cosines: Tensor = module(torch.zeros(1, device=positions.device), positions, **options)[0]
    return cosines


def _scalings(config: Any) -> dict[str | None, Mapping[str, Any]]:
    """Parameters of each rotation by layer type; None where all layers have one."""
    given = getattr(config, "rope_parameters", None) or {}
    nested: dict[str | None, Mapping[str, Any]] = {key: x for key, x in given.items() if isinstance(x, Mapping)}
    return nested or {None: given}


@dataclass
class MaskRecorder:
    """Makes the masks of one forward pass, and tells the window of each afterwards."""

    max_model_len: int
    _windows: dict[int, int | None] = field(default_factory=dict)
    _masks: list[Tensor] = field(default_factory=list)

    def make(self, function: MaskFunction, tokens: int) -> Tensor:
        """Make the (1, 1, tokens, tokens) mask of a function: true where the query sees the key.

        Raises:
            UnsupportedModel: it is neither causal nor a window.
        """
        mask = visible(function, torch.arange(tokens), tokens)[None, None]
        self._windows[mask.untyped_storage().data_ptr()] = window_of(function, self.max_model_len)
        self._masks.append(mask)  # keeps the storage, which is the key, from being used again
        return mask

    def window(self, mask: Tensor | None, given: int | None, configured: int | None) -> int | None:
        """Return the window of a layer.

        Args:
            mask: that the layer got; a view of one that was made here, or one of the modelling code's own.
            given: the window that the layer passed on, which counts where the mask was not made here.
            configured: the window in the configuration of a model whose layers are all of one kind.

        Raises:
            UnsupportedModel: the mask is the modelling code's own, and not causal, or contradicts the configuration.
        """
        window = None if given is None or given >= self.max_model_len else given
        key = 0 if mask is None else mask.untyped_storage().data_ptr()
        if key in self._windows:
            window = self._windows[key]
        elif mask is not None:
            _check_causal(mask)
        if window is None and configured is not None and configured < self.max_model_len:
            raise UnsupportedModel(
                f"attention mask: given a causal one beside sliding_window {configured}, by which transformers' cache "
                "drops keys, expected both alike"
            )
        return window


def window_of(function: MaskFunction, max_model_len: int) -> int | None:
    """Return the window of a mask function, None where it is plainly causal for so many tokens.

    Raises:
        UnsupportedModel: it is neither.
    """
    last = visible(function, torch.tensor([max_model_len - 1]), max_model_len)
    window = int(last.sum())
    queries = torch.tensor(_sampled(window, max_model_len))
    keys = torch.arange(max_model_len)
    expected = (keys <= queries[:, None]) & (keys > queries[:, None] - window)
    if not torch.equal(visible(function, queries, max_model_len), expected):
        raise UnsupportedModel("attention mask: given neither a causal one nor a sliding window, expected one of them")
    return None if window >= max_model_len else window


def visible(function: MaskFunction, queries: Tensor, num_keys: int) -> Tensor:
    """Return (queries, num_keys) bool: whether each query of the first sequence and head sees each key.

    Raises:
        UnsupportedModel: the function knows fewer places.
    """
    zero = torch.zeros((), dtype=torch.int64)
    try:
        seen = function(zero, zero, queries[:, None], torch.arange(num_keys)[None])
    except IndexError as error:
        raise UnsupportedModel(
            "attention mask: given one that looks up a call's tokens, such as those of images, expected one of places"
        ) from error
    return torch.as_tensor(seen).broadcast_to(len(queries), num_keys).clone()


def _sampled(window: int, max_model_len: int) -> list[int]:
    """Queries to compare: the first ones, those around the window's and the context's end, and powers of two."""
    around = [window + offset for offset in (-2, -1, 0, 1)] + [max_model_len - 2, max_model_len - 1]
    powers = [1 << exponent for exponent in range(max_model_len.bit_length())]
    return sorted({index for index in (*range(40), *around, *powers) if 0 <= index < max_model_len})


def _check_causal(mask: Tensor) -> None:
    """Accept a mask of the modelling code's own if it is true, or zero, exactly where a query sees a key."""
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    tokens = mask.shape[-1]
    is_plain = mask.dtype == torch.bool or bool((mask[allowed] == 0).all())
    expected = torch.ones(mask.shape[-2], tokens, dtype=torch.bool).tril(tokens - mask.shape[-2])
    if not is_plain or not torch.equal(allowed, expected.expand_as(allowed)):
        raise UnsupportedModel("attention mask: given one that is not causal or has weights, expected a causal one")
