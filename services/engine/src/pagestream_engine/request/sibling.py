"""One choice among several of one prompt, as it is handed to the engine."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from pagestream_engine.request.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Sibling:
    """A sequence that shares its prompt with others: see `Engine.add_group`."""

    request_id: str
    """Unique among the unfinished ones; its outputs carry it."""
    params: SamplingParams
    """With `n` 1 and a seed of its own (see `SamplingParams.for_child`)."""
    output_token_ids: Tokens[int] = ()
    """What an earlier run has generated: its next output is the token after them."""
