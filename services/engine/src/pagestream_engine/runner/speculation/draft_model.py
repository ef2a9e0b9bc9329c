"""Drafts from a smaller model, which keeps its keys and values in the pages of the target's blocks.

Its layers are no KV groups of the layout: each block of the target has a page of the draft model's layers beside its
own (`KVStore.attach`), and the draft model reads the block tables of the target's first group with full attention. So
whatever becomes of a block (shared, copied, evicted, kept in host memory, found again by its content) becomes of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from pagestream_engine.attention import Backend
from pagestream_engine.models.model import Model
from pagestream_engine.plan import Int32Array, NewSequence
from pagestream_engine.runner.persistent_batch import PersistentBatch, Spans
from pagestream_engine.runner.speculation.proposer import RowCount

Guess = Callable[[Tensor, ArrayLike, int], Tensor]
"""As `SamplingBatch.guess`."""
Agree = Callable[[Sequence[int]], list[int]]
MOST_TOKENS_OF_DECODE = 16
"""Of a row: what one pass of attention over a decode takes; more are a prefill."""
MAX_LAG = 1024
"""Tokens that a row may be behind the target and still catch up: a row in which drafts have not paid for so long gets
no more of them."""


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model's weights and how it computes."""

    model: Model
    backend: Backend
    group: int
    """KV group of the target whose block tables it reads."""
    max_model_len: int
    """Tokens of the longest sequence that it has positions for."""


class DraftModel:
    """A `Proposer` that decodes by a second model.

    It computes the chunks of prompts that the target computes. Of outputs it computes what it lacks when drafts are
    wanted: mostly the last token, or two where all drafts have held. What becomes of keys and values of drafts that do
    not hold is as with the target: later tokens are written over them.

    Its next token is chosen as the target's is: by the request's parameters, with the noise of the token's position.
    Where both models are nearly sure of a distribution, they draw the same token from it.

    Args:
        batch: whose block tables it reads.
        guess: chooses tokens by the rows' sampling state.
        agree: returns the first rank's tokens for all ranks of a stage. Each has the whole model, and computes the same
            drafts but for bits of different machines; ranks that verify different drafts would wait for each other for
            ever.
    """

    def __init__(
        self, loaded: LoadedDraft, batch: PersistentBatch, max_num_seqs: int, guess: Guess, agree: Agree
    ) -> None:
        self._loaded = loaded
        self._batch = batch
        self._guess = guess
        self._agree = agree
        self._tokens: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._num_computed = [0] * max_num_seqs
        """Of each row its leading tokens whose keys and values this model has written."""

    def start(self, new: NewSequence) -> None:
        """Take a sequence; what the target has of it, this model has too."""
        self._tokens[new.row] = new.token_ids.tolist()
        self._num_computed[new.row] = new.num_computed_tokens

    def extend(self, row: int, token_ids: Sequence[int]) -> None:
        """Append what was sampled; of drafts that were computed those that held stay."""
        tokens = self._tokens[row]
        tokens += token_ids
        self._num_computed[row] = min(self._num_computed[row], len(tokens) - 1)

    def propose(self, chunks: Sequence[RowCount], wanted: Sequence[RowCount]) -> Sequence[Sequence[int]]:
        """Compute the chunks, and return drafts: none for a row that is too long for this model, or too far behind."""
        ends = [(row, self._num_computed[row] + count) for row, count in chunks]
        spans = [(row, end, False) for row, end in ends if end <= self._loaded.max_model_len]
        able = [index for index, each in enumerate(wanted) if self._can_draft(each)]
        spans += [(wanted[index].row, len(self._tokens[wanted[index].row]), True) for index in able]
        drafts: list[list[int]] = [[] for _ in wanted]
        if not spans:
            return drafts
        # Long ones first: attention takes them as prefills.
        spans.sort(key=lambda span: span[1] - self._num_computed[span[0]] <= MOST_TOKENS_OF_DECODE)
        order = {row: place for place, (row, _, _) in enumerate(span for span in spans if span[2])}
        able.sort(key=lambda index: order[wanted[index].row])
        logits = self._compute(spans)
        num_ahead = 0
        while able:
            rows = [wanted[index].row for index in able]
            token_ids = self._agree(self._guess(logits, rows, num_ahead).tolist())
            for index, token_id in zip(able, token_ids, strict=True):
                drafts[index].append(token_id)
            num_ahead += 1
            going = [place for place, index in enumerate(able) if wanted[index].num_tokens > num_ahead]
            able, token_ids = [able[place] for place in going], [token_ids[place] for place in going]
            if able:
                logits = self._decode([wanted[index].row for index in able], token_ids)
        return drafts

    def _can_draft(self, wanted: RowCount) -> bool:
        num_tokens = len(self._tokens[wanted.row])
        lag = num_tokens - self._num_computed[wanted.row]
        return 0 < lag <= MAX_LAG and num_tokens + wanted.num_tokens <= self._loaded.max_model_len

    def _compute(self, spans: Sequence[tuple[int, int, bool]]) -> Tensor:
        """Compute rows up to an end each; return (wanted, vocab_size) logits of those whose last token's are wanted."""
        starts = [self._num_computed[row] for row, _, _ in spans]
        counts = [end - start for (_, end, _), start in zip(spans, starts, strict=True)]
        tokens = [self._tokens[row][start:end] for (row, end, _), start in zip(spans, starts, strict=True)]
        for row, end, _ in spans:
            self._num_computed[row] = end
        return self._forward(
            Spans(
                rows=_int64(row for row, _, _ in spans),
                starts=_int64(starts),
                counts=_int64(counts),
                token_ids=np.concatenate([np.array(each, np.int32) for each in tokens]),
                num_prefills=sum(count > MOST_TOKENS_OF_DECODE for count in counts),
                is_wanted=np.array([is_wanted for _, _, is_wanted in spans], np.bool_),
            )
        )

    def _decode(self, rows: Sequence[int], token_ids: Sequence[int]) -> Tensor:
        """Compute a draft of each row. Return (rows, vocab_size) logits of the token after it."""
        starts = [self._num_computed[row] for row in rows]
        for row in rows:
            self._num_computed[row] += 1
        num_rows = len(rows)
        drafts: Int32Array = np.array(token_ids, np.int32)
        ones = np.ones(num_rows, np.int64)
        return self._forward(Spans(_int64(rows), _int64(starts), ones, drafts, 0, np.ones(num_rows, np.bool_)))

    def _forward(self, spans: Spans) -> Tensor:
        token_ids, wanted, attention = self._batch.span_inputs(spans, self._loaded.group)
        context = self._loaded.backend.prepare_step([attention])
        hidden = self._loaded.model.forward(token_ids, wanted, context)
        return self._loaded.model.logits(hidden) if len(wanted) else torch.empty(0)


def _int64(numbers: Iterable[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.fromiter(numbers, np.int64)
