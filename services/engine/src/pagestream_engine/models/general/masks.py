"""Which tokens a layer's queries see, found out from the mask that its modelling code makes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagestream_engine.errors import UnsupportedModel
from pagestream_engine.models.general.interface import MaskFunction


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
