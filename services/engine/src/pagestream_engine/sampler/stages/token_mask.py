"""Token masks: which tokens a grammar allows next, as bits that a caller brings to each step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BITS = 32


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Masks for some of the rows of one step."""

    places: NDArray[np.int64]
    """(masks,): places among the rows that are sampled, all different."""
    bits: Tensor
    """(masks, ceil(vocab_size / 32)) int32 on the logits' device: token i is allowed if bit i % 32 of word i // 32 is
    set, as in xgrammar and vLLM."""

    def of(self, places: NDArray[np.int64]) -> TokenMasks:
        """Return the masks of some of the sampled rows, as if these were all; `places` ascend."""
        kept = np.isin(self.places, places).nonzero()[0]
        return TokenMasks(np.searchsorted(places, self.places[kept]), self.bits[torch.from_numpy(kept)])


def apply_token_masks(logits: Tensor, places: Tensor, bits: Tensor) -> None:
    """Set what the masks do not allow to -inf, in place.

    Args:
        logits: (rows, vocab_size) float32.
        places: (masks,) int64: the row of each mask.
        bits: see `TokenMasks`.
    """
    shifts = torch.arange(_BITS, dtype=torch.int32, device=logits.device)
    allowed = ((bits[:, :, None] >> shifts) & 1).bool().flatten(1)[:, : logits.shape[-1]]
    logits[places] = logits[places].masked_fill_(~allowed, -torch.inf)
