"""Sampling of rows of which some have a grammar: the mask of each is made just before its token is chosen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from pagestream_engine.grammar.compiler import GrammarCompiler
from pagestream_engine.grammar.row_matcher import WORD_BITS, RowMatcher, bits_of
from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.sampler import Sampled, SamplingBatch, TokenMasks
from pagestream_engine.sampler.stages.stage import TokenIds
from pagestream_engine.transfers import download, to_device


class ConstrainedSampling:
    """A sampling batch, and the matchers of its rows.

    A row's mask depends on its last token. On a CPU that is there when the next step is sampled. A GPU may compute that
    next step already when the host asks for the token: then the masks are made while the model runs, and only sampling
    waits for them. Steps without grammars wait for nothing, and have no operation more.
    """

    def __init__(self, batch: SamplingBatch, compiler: GrammarCompiler, vocab_size: int, device: torch.device) -> None:
        self._batch = batch
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // WORD_BITS)
        self._device = device
        self._matchers: dict[int, RowMatcher] = {}
        self._unseen: tuple[list[tuple[int, RowMatcher]], Callable[[], list[Tensor]]] | None = None
        """Matchers by the places of their tokens in the last step that had any, and what waits for these."""

    def add(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        end_token_ids: Collection[int],
        prompt_token_ids: TokenIds,
        output_token_ids: TokenIds,
    ) -> None:
        """As `SamplingBatch.add`; the output's tokens are replayed through the row's matcher."""
        self._batch.add(
            row,
            params,
            seed=seed,
            end_token_ids=end_token_ids,
            prompt_token_ids=prompt_token_ids,
            output_token_ids=output_token_ids,
        )
        if params.structured_outputs is not None:
            self._matchers[row] = RowMatcher(
                self._compiler,
                params.structured_outputs,
                bits_of(end_token_ids, self._vocab_size),
                np.asarray(output_token_ids).tolist(),
                min_tokens=params.min_tokens,
                ends_late=params.ignore_eos,
            )

    def remove(self, row: int) -> None:
        """As `SamplingBatch.remove`."""
        self._batch.remove(row)
        self._matchers.pop(row, None)

    def sample(self, logits: Tensor, rows: ArrayLike) -> Sampled:
        """As `SamplingBatch.sample`, with the masks of the rows' grammars."""
        if not self._matchers:
            return self._batch.sample(logits, rows)
        self._settle()
        held = [
            (place, self._matchers[row]) for place, row in enumerate(np.asarray(rows).tolist()) if row in self._matchers
        ]
        if not held:
            return self._batch.sample(logits, rows)
        sampled = self._batch.sample(logits, rows, self._masks(held))
        errors = {place: error for place, matcher in held if (error := matcher.error) is not None}
        self._unseen = held, download([sampled.token_ids])
        return replace(sampled, errors={**sampled.errors, **errors}) if errors else sampled

    def guess(self, logits: Tensor, rows: ArrayLike, num_ahead: int) -> Tensor:
        """As `SamplingBatch.guess`, without masks: `allowed` drops what a grammar forbids."""
        return self._batch.guess(logits, rows, num_ahead)

    @property
    def has_grammars(self) -> bool:
        """Whether some row has one."""
        return bool(self._matchers)

    def forced(self, row: int) -> list[int]:
        """Return the tokens after the row's last one where its grammar leaves one text; see `RowMatcher.forced`."""
        self._settle()
        return self._matchers[row].forced() if row in self._matchers else []

    def allowed(self, row: int, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the leading tokens that the row's grammar allows after its last one."""
        self._settle()
        if row not in self._matchers:
            return token_ids
        return token_ids[: self._matchers[row].num_allowed(token_ids)]

    def _masks(self, held: list[tuple[int, RowMatcher]]) -> TokenMasks | None:
        masked = [(place, matcher) for place, matcher in held if not matcher.allows_all]
        if not masked:
            return None
        bits = np.empty((len(masked), self._num_words), np.int32)
        for index, (_, matcher) in enumerate(masked):
            matcher.fill(bits[index])
        places = np.array([place for place, _ in masked], np.int64)
        return TokenMasks(places, to_device(torch.from_numpy(bits), self._device))

    def _settle(self) -> None:
        """Take the tokens of the last step that had rows with a grammar."""
        if self._unseen is None:
            return
        (held, wait), self._unseen = self._unseen, None
        token_ids = wait()[0].tolist()
        for place, matcher in held:
            matcher.take(token_ids[place])
