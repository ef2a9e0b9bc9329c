"""Find out by its operations whether modelling code lets tokens meet outside the attention interface.

A TorchDispatchMode sees every operation of a forward pass. It refuses those that join tokens by what they are (a
convolution, a scan, a reduction over tokens), whatever numbers they give; and it can put NaN in place of some tokens'
embeddings, which reaches every token that depends on them by arithmetic, however weakly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from pagestream_engine.errors import UnsupportedModel

_SMALLEST_COUNT = 61
"""Sizes that are sums of others, and no size of a weight, are hardly ever a multiple of so large a prime."""
_HALVES = (torch.float16, torch.bfloat16)
_SCANS = frozenset({"cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "roll", "flip"})
"""Operations along a dimension that join its entries by their places."""
_REDUCTIONS = frozenset(
    [
        "sum",
        "nansum",
        "mean",
        "nanmean",
        "prod",
        "var",
        "std",
        "var_mean",
        "std_mean",
        "amax",
        "amin",
        "aminmax",
        "max",
        "min",
        "argmax",
        "argmin",
        "norm",
        "linalg_vector_norm",
        "frobenius_norm",
        "nuclear_norm",
        "logsumexp",
        "median",
        "nanmedian",
        "mode",
        "kthvalue",
        "quantile",
        "nanquantile",
        "softmax",
        "_softmax",
        "_safe_softmax",
        "log_softmax",
        "_log_softmax",
        "sort",
        "argsort",
        "msort",
        "topk",
        "dist",
        "renorm",
        "_fft_r2c",
        "_fft_c2c",
        "_fft_c2r",
    ]
)
"""Operations along dimensions that join the numbers of all entries. Experts may be counted and sorted: not numbers."""
_ALONG_THE_LAST = frozenset({"sort", "argsort", "topk", "median", "nanmedian", "mode", "kthvalue"})
"""Of both, those that go along the last dimension where none is named. Others go along all."""
_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "mv", "addmv", "dot", "vdot", "_int_mm"})
_LAYER_NORMS = frozenset({"native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm"})
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "rnn_layer", "_rnn")
_ATTENTIONS = (
    "scaled_dot_product",
    "flash_attention",
    "efficient_attention",
    "multi_head_attention",
    "flex_attention",
    "transformer_encoder_layer",
)


def count_of_tokens(model: nn.Module) -> int:
    """Return a number of tokens by which the dimension of tokens is known: a prime that divides no size of a weight."""
    sizes = {size for parameter in model.parameters() for size in parameter.shape if size}
    count = _SMALLEST_COUNT
    while any(count % factor == 0 for factor in range(2, count)) or any(size % count == 0 for size in sizes):
        count += 1
    return count


class TokenMixing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs modelling code in float32, whatever dtype its weights have, and refuses operations that join tokens.

    A weight of 16 bits becomes float32 for the operation that reads it, so that no second copy of the model is needed.
    """

    def __init__(self, num_tokens: int, token_ids: Tensor, poisoned: Tensor | None = None) -> None:
        """Watch one pass.

        Args:
            num_tokens: of the pass, from `count_of_tokens`; 0: nothing is refused.
            token_ids: that the pass gets.
            poisoned: (tokens,) bool: those whose embeddings are replaced by NaN.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_tokens = num_tokens
        self._poisoned = poisoned
        self._is_paused = False
        self._content: dict[int, Tensor] = {id(token_ids): token_ids}
        self.kept_halves = False
        """Whether an operation had to run in 16 bits."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Nothing is compiled here, and the import takes seconds.

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let operations run as they are: those of attention, in which tokens meet."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        args, kwargs = tree_map(_full_dtype, args), tree_map(_full_dtype, kwargs)
        given = _named(func, args, kwargs)
        if self._num_tokens:
            self._check(func, given)
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        result = self._in_float32(func, args, kwargs)
        if func is torch.ops.aten.embedding.default:
            self._poison(result, given["indices"])
        if self._num_tokens:
            self._note(given, result)
        return result

    # -- float32 --------------------------------------------------------------------------------------------------

    def _in_float32(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        aliases = [argument.alias_info for argument in func._schema.arguments if argument.alias_info is not None]
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        if not any(x.dtype in _HALVES for x in tensors):
            return func(*args, **kwargs)
        if any(alias.is_write for alias in aliases):  # Into a tensor of 16 bits: it keeps its dtype.
            return self._in_halves(func, args, kwargs)
        if aliases:  # A view of a weight; the operation that reads it converts it.
            return func(*args, **kwargs)
        if func is torch.ops.aten.embedding.default:
            return func(*args, **kwargs).float()  # Its rows alone, not the table.
        try:
            return func(*tree_map(_full, args), **tree_map(_full, kwargs))
        except (RuntimeError, NotImplementedError):  # A kernel for 16 bits alone.
            return tree_map(_full, self._in_halves(func, args, kwargs))

    def _in_halves(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.kept_halves = True
        flat = tree_flatten((args, kwargs))[0]
        half = next(x.dtype for x in flat if isinstance(x, Tensor) and x.dtype in _HALVES)

        def narrow(x: Any) -> Any:
            return x.to(half) if isinstance(x, Tensor) and x.dtype == torch.float32 else x

        return func(*tree_map(narrow, args), **tree_map(narrow, kwargs))

    # -- poison ---------------------------------------------------------------------------------------------------

    def _poison(self, embeddings: Tensor, indices: Tensor) -> None:
        if self._poisoned is not None and indices.numel() == len(self._poisoned):
            embeddings.view(len(self._poisoned), -1)[self._poisoned] = torch.nan

    # -- structure ------------------------------------------------------------------------------------------------

    def _note(self, given: Mapping[str, Any], result: Any) -> None:
        """Keep in mind whole numbers that follow from tokens; positions, masks and experts' numbers do not."""
        if any(map(self._is_content, _tensors(given.values()))):
            for x in _tensors([result]):
                if not x.is_floating_point():
                    self._content[id(x)] = x

    def _is_content(self, x: Tensor) -> bool:
        if x.is_floating_point() or x.is_complex():
            return not isinstance(x, nn.Parameter) and any(map(self._is_of_tokens, x.shape))
        return id(x) in self._content

    def _is_of_tokens(self, size: int) -> bool:
        return size > 0 and size % self._num_tokens == 0

    def _check(self, func: Any, given: Mapping[str, Any]) -> None:
        name = func._schema.name.partition("::")[2].rstrip("_")
        kind = self._joins(name, given)
        if kind:
            raise UnsupportedModel(
                f"layers: given {kind} (torch's {name}), expected tokens that meet in attention alone: others' tokens "
                "are beside them in a step"
            )

    def _joins(self, name: str, given: Mapping[str, Any]) -> str:
        """Return what joins tokens by this operation, or nothing."""
        if any(each in name for each in _ATTENTIONS):
            return "attention that does not call transformers' attention interface"
        if any(name == each or name.endswith(each) for each in _RECURRENT):
            return "a recurrent layer"
        if "conv" in name and isinstance(given.get("weight"), Tensor):
            return "a convolution over neighbouring tokens" if any(n > 1 for n in given["weight"].shape[2:]) else ""
        names = ("mat1", "batch1", "mat") if name.startswith(("addm", "baddb")) else ("self", "input")
        x = next((given[key] for key in names if key in given), None)
        if not isinstance(x, Tensor) or not self._is_content(x):
            return ""
        return self._joins_along(name, given, x)

    def _joins_along(self, name: str, given: Mapping[str, Any], x: Tensor) -> str:
        is_number = x.is_floating_point() or x.is_complex()
        dims = _dims(name, given, x)
        is_reduction = name in _REDUCTIONS and "other" not in given
        by_batch = ("batch_norm" in name or "instance_norm" in name) and _uses_batch(given)
        normalised = range(-len(given.get("normalized_shape", ())), 0)
        kinds: list[tuple[bool, Sequence[int], str]] = [
            (name in _SCANS, dims, "a scan or a shift over tokens"),
            (is_reduction and is_number, dims, "a reduction or a choice over tokens"),
            (name in _PRODUCTS and is_number, [-1], "a product over tokens"),
            ("pool" in name and is_number, _pooled(name), "pooling over tokens"),
            (name in _LAYER_NORMS, normalised, "a norm over tokens"),
            ("group_norm" in name, range(1, x.dim()), "a norm over tokens"),
            (by_batch, [0, *range(2, x.dim())], "a norm by the statistics of a batch"),
        ]
        return next((words for applies, dims, words in kinds if applies and self._any_of_tokens(x, dims)), "")

    def _any_of_tokens(self, x: Tensor, dims: Sequence[int]) -> bool:
        return any(self._is_of_tokens(x.shape[dim]) for dim in dims if -x.dim() <= dim < x.dim())


def _named(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _tensors(values: Any) -> Iterator[Tensor]:
    return (x for x in tree_flatten(list(values))[0] if isinstance(x, Tensor))


def _dims(name: str, given: Mapping[str, Any], x: Tensor) -> Sequence[int]:
    """Return the dimensions that an operation names."""
    dim = given.get("dim", given.get("dims"))
    if isinstance(dim, int):
        return [dim]
    if dim is not None and len(dim):
        return list(dim)
    return [-1] if name in _ALONG_THE_LAST else range(x.dim())


def _pooled(name: str) -> range:
    digits = [int(letter) for letter in name if letter.isdigit()]
    return range(-digits[0] if digits else -1, 0)


def _uses_batch(given: Mapping[str, Any]) -> bool:
    options = [given.get(key) for key in ("training", "train", "use_input_stats")]
    return True in options or given.get("running_mean") is None


def _full_dtype(x: Any) -> Any:
    return torch.float32 if isinstance(x, torch.dtype) and x in _HALVES else x


def _full(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype in _HALVES else x
