"""Drafts from a smaller model, which keeps its keys and values in the pages of the target's blocks.

Its layers are no KV groups of the layout: each block of the target has a page of the draft model's layers beside its
own (`KVStore.attach`), and the draft model reads the block tables of the target's first group with full attention. So
whatever becomes of a block (shared, copied, evicted, kept in host memory, found again by its content) becomes of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from pagestream_engine.attention import Backend, CacheShape, KVStore
from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import ConfigError
from pagestream_engine.features.speculation.drafts import RowCount
from pagestream_engine.models.config import ModelInfo
from pagestream_engine.models.folder import resolve_model
from pagestream_engine.models.model import Model, ModelSource, Target
from pagestream_engine.models.registry import open_model
from pagestream_engine.parallel.ranks import ONE_RANK
from pagestream_engine.parallel.stages import UndividedStage
from pagestream_engine.plan import Int32Array, KVLayout, NewSequence
from pagestream_engine.runner.backends import backend_for
from pagestream_engine.runner.batch import PersistentBatch, Spans

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


_OPTION = "speculative_model"


class TargetBlocks(NamedTuple):
    """The target's blocks, not allocated yet."""

    layout: KVLayout
    store: KVStore


class OpenedDraft(NamedTuple):
    """A draft model whose weights are not loaded."""

    folder: Path
    source: ModelSource
    weight_bytes: int


def open_draft(name: str | None, info: ModelInfo, target: Target) -> OpenedDraft | None:
    """Open a draft model. None without a name, and in the stages that don't have it, which refuse a wrong one as well.

    Args:
        name: of its folder or repository.
        target: what the target is loaded for.

    Raises:
        ModelError: there is none, the folder is incomplete, or holds a model that is not supported.
        ConfigError: its vocabulary is not the target's.
    """
    if name is None:
        return None
    folder = resolve_model(name)
    source = open_model(folder)
    if source.info.vocab_size != info.vocab_size:
        expected = f"a model with the target's vocabulary of {info.vocab_size} tokens"
        raise ConfigError(_OPTION, str(folder), expected, f"its own has {source.info.vocab_size}")
    return OpenedDraft(folder, source, source.weight_bytes(whole(target))) if target.stage.is_last else None


def load_draft(opened: OpenedDraft, config: EngineConfig, target: Target, blocks: TargetBlocks) -> LoadedDraft:
    """Load a draft model, and attach its pages to the target's blocks.

    Args:
        target: what the target was loaded for: the draft model computes in its dtype.

    Raises:
        ModelError: its weights are incomplete.
        ConfigError: the two models can't work together.
    """
    folder, source, _ = opened
    group = _full_group(blocks.layout, folder)
    max_model_len = min(target.max_model_len, source.info.max_position_embeddings)
    own_target = replace(whole(target), max_model_len=max_model_len)
    specs = source.attention_specs(own_target)
    if len({(spec.num_kv_heads, spec.head_dim) for spec in specs}) != 1:
        raise ConfigError(_OPTION, str(folder), "a model whose layers have caches of one shape")
    first = specs[0]
    block_size = blocks.layout.groups[group].block_size
    shape = CacheShape(tuple(range(len(specs))), first.num_kv_heads, first.head_dim, block_size, target.dtype)
    is_wanted = config.model.deterministic is True
    own = backend_for(config.model.attention_backend, specs, [shape], target.device, deterministic=is_wanted)
    blocks.store.attach(own.store)
    return LoadedDraft(source.load(own_target, own), own, group, max_model_len)


def whole(target: Target) -> Target:
    """Return what a draft model is loaded for: it is small, and runs more often, so that each rank has all of it."""
    return replace(target, offload=None, ranks=ONE_RANK, stage=UndividedStage(target.stage))


def _full_group(layout: KVLayout, folder: Path) -> int:
    """Return the first KV group of the target whose tables have a block for every token."""
    for index, group in enumerate(layout.groups):
        if group.spec.window is None:
            return index
    hint = "blocks behind a window are given back, and with them a draft model's keys and values"
    raise ConfigError(_OPTION, str(folder), "None for a model without a layer of full attention", hint)


_LEARNING_RATE = 0.1
"""Of a row's acceptance with each draft that was checked, once there were a few."""
_PRIOR_CHECKS = 2
"""Checked drafts that the acceptance counts for which a row begins with."""
_FORGETTING = 0.98
"""Weight that the earlier steps keep with each new one."""
_FORGETTING_DRAFTS = 0.9
"""Likewise, of steps with drafts, of which there may be few."""
_PROBE_AFTER = 32
"""Steps after which a row without drafts gets one in two steps again, to see whether its text has changed. In the first
of them a draft model also computes what it lacks."""
_FIRST_ACCEPTANCE = 0.6
_MARGIN = 1.5
"""What a draft has to be worth, of its cost. Both are estimates, and a token that comes early is worth less than one
where a sequence that gets no drafts decides when a batch ends: with 8 of them drafts worth 1.1 of their cost lost."""
_UNKNOWN_COST = 0.2
"""Of a draft, in tokens of the same time, until steps of different sizes were measured."""


class StepCost:
    """What one more token of a step costs, by a line through the times of the steps so far; later ones count more."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = self._sampled = 0.0
        self._drafts = self._draft_seconds = self._all_seconds = 0.0
        self._of_a_token = self._of_a_draft = _UNKNOWN_COST

    def note(
        self, num_tokens: int, num_sampled: int, seconds: float, num_drafts: int = 0, draft_seconds: float = 0.0
    ) -> None:
        """Take a step of decodes.

        Args:
            num_tokens: that it has computed.
            num_sampled: that it gave.
            num_drafts: that were made for it; 0 where their time tells nothing.
        """
        if num_drafts:
            self._drafts = self._drafts * _FORGETTING_DRAFTS + num_drafts
            self._draft_seconds = self._draft_seconds * _FORGETTING_DRAFTS + draft_seconds
        self._weight = self._weight * _FORGETTING + 1
        self._tokens = self._tokens * _FORGETTING + num_tokens
        self._sampled = self._sampled * _FORGETTING + num_sampled
        self._seconds = self._seconds * _FORGETTING + seconds
        self._all_seconds = self._all_seconds * _FORGETTING + seconds + draft_seconds
        self._squares = self._squares * _FORGETTING + num_tokens * num_tokens
        self._products = self._products * _FORGETTING + num_tokens * seconds

        self._estimate()

    @property
    def of_a_draft(self) -> float:
        """Tokens that are given, on the average, in the time that one more draft takes: to make it, and to compute one
        more token in the step; in [0, 1]."""
        return self._of_a_draft

    @property
    def of_a_token(self) -> float:
        """Likewise, without making it."""
        return self._of_a_token

    def _estimate(self) -> None:
        """Compute the costs once a step: every row asks for them."""
        tokens_per_s = self._sampled / self._all_seconds if self._all_seconds else 0.0
        making = self._draft_seconds / self._drafts * tokens_per_s if self._drafts else 0.0
        spread = self._squares * self._weight - self._tokens * self._tokens
        self._of_a_token = _UNKNOWN_COST
        if spread > 1e-3 * self._tokens * self._tokens:
            slope = (self._products * self._weight - self._tokens * self._seconds) / spread
            self._of_a_token = min(1.0, max(0.0, slope * tokens_per_s))
        self._of_a_draft = min(1.0, self._of_a_token + making)


class DraftLengths:
    """The acceptance of each row's drafts, and what follows for their number.

    Args:
        most: drafts of a row in a step.
        are_made: whether making a draft takes time too.
    """

    def __init__(self, max_num_seqs: int, most: int, cost: StepCost, *, are_made: bool = True) -> None:
        self.cost = cost
        self._are_made = are_made
        self._most = most
        self._mean = _FIRST_ACCEPTANCE
        self._acceptance = [_FIRST_ACCEPTANCE] * max_num_seqs
        self._num_checked = [0] * max_num_seqs
        self._num_idle = [0] * max_num_seqs

    def start(self, row: int) -> None:
        """Take a sequence: it is expected to accept what others have accepted."""
        self._acceptance[row] = self._mean
        self._num_checked[row] = 0
        self._num_idle[row] = 0

    def wanted(self, row: int) -> int:
        """Return how many drafts a row should have.

        The j-th is accepted with probability p ** j, where p is the share of checked drafts that held. It is worth its
        time while that is more than the tokens that the step gives anyway in that time.
        """
        cost = min(1.0, _MARGIN * (self.cost.of_a_draft if self._are_made else self.cost.of_a_token))
        acceptance = self._acceptance[row]
        if acceptance <= cost:
            self._num_idle[row] += 1
            return int(self._num_idle[row] >= _PROBE_AFTER and self._num_idle[row] % _PROBE_AFTER < 2)
        if acceptance >= 1.0 or cost <= 0.0:
            return self._most
        return min(self._most, int(math.log(cost) / math.log(acceptance)))

    def note(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Learn from drafts that were checked: those up to the first that did not hold."""
        for index in range(min(num_drafts, num_accepted + 1)):
            held = float(index < num_accepted)
            self._num_checked[row] += 1
            rate = max(_LEARNING_RATE, 1 / (_PRIOR_CHECKS + self._num_checked[row]))
            self._acceptance[row] += rate * (held - self._acceptance[row])
            self._mean += _LEARNING_RATE / 10 * (held - self._mean)
