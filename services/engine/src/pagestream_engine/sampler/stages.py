"""What changes a row's logits before the draw, in order: a token mask, then `STAGES`.

First stands what the stages share: their state is in slots, of which only the rows that use a stage have one
(`RowSlots`), and `LogitsStage` is what each of them does. Then one class for each stage, in their order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagestream_engine.errors import InvariantViolation
from pagestream_engine.sampling_params import SamplingParams
from pagestream_engine.transfers import to_device

_NONE = -1


class RowSlots:
    """Slots for the rows that use a stage, so that its arrays are as long as most such rows at a time."""

    def __init__(self, max_rows: int) -> None:
        self.version = 0
        """Rises whenever a row gets or loses its slot."""
        self._slot_of_row = np.full(max_rows, _NONE, dtype=np.int64)
        self._row_of_slot: list[int] = []
        self._free: list[int] = []

    def take(self, row: int) -> int:
        """Return a slot for `row`.

        Raises:
            InvariantViolation: it has one.
        """
        if self._slot_of_row[row] != _NONE:
            raise InvariantViolation(f"row {row} of the sampling batch is taken")
        if not self._free:
            self._free.append(len(self._row_of_slot))
            self._row_of_slot.append(_NONE)
        slot = self._free.pop()
        self._slot_of_row[row] = slot
        self._row_of_slot[slot] = row
        self.version += 1
        return slot

    def free(self, row: int) -> None:
        """Give back the slot of `row`, if it has one."""
        slot = int(self._slot_of_row[row])
        if slot != _NONE:
            self._slot_of_row[row] = _NONE
            self._row_of_slot[slot] = _NONE
            self._free.append(slot)
            self.version += 1

    def free_slots(self, slots: NDArray[np.int64]) -> None:
        """Give back slots that are taken."""
        for slot in slots.tolist():
            self.free(self._row_of_slot[slot])

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slot of each row; -1 for those without."""
        return self._slot_of_row[rows]

    @property
    def num_taken(self) -> int:
        """Rows that have a slot."""
        return len(self._row_of_slot) - len(self._free)

    def __len__(self) -> int:
        """Return how many slots there are, free ones included."""
        return len(self._row_of_slot)


def grown(table: Tensor, *shape: int) -> Tensor:
    """Return a table of at least `shape` that begins with `table`'s entries, the rest zeros: itself if it is as large.

    A size that grows becomes a power of two, so that a table that is filled row by row is seldom copied.
    """
    pairs = list(zip(table.shape, shape, strict=True))
    if all(have >= want for have, want in pairs):
        return table
    sizes = [have if have >= want else 1 << (want - 1).bit_length() for have, want in pairs]
    larger = torch.zeros(sizes, dtype=table.dtype, device=table.device)
    larger[tuple(slice(0, size) for size in table.shape)] = table
    return larger


TokenIds = Sequence[int] | NDArray[np.int32] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NewRow:
    """What is known of a sequence when it gets a row."""

    params: SamplingParams
    end_token_ids: Collection[int]
    """Tokens that end it: not to be chosen before `min_tokens`."""
    prompt_token_ids: TokenIds
    output_token_ids: TokenIds
    """What it has generated already."""


@dataclass(frozen=True, slots=True)
class StageRows:
    """The rows of one step that use a stage."""

    copies: Tensor
    """(rows,) int64: their rows among the copied logits, which the stages change."""
    samples: Tensor
    """(rows,) int64: their places among all rows that are sampled."""
    slots: Tensor
    """(rows,) int64: where the stage keeps their state, on its device."""
    host_slots: NDArray[np.int64]
    """`slots` on the host."""


class LogitsStage(ABC):
    """Base of the stages. A row that does not use one takes neither memory nor time of it.

    Everything that a stage computes in `apply` and `advance` has shapes that the host knows without reading from the
    device: no call waits for it.
    """

    asked_by: ClassVar[str]
    """What of a request's parameters is false where it does not use the stage."""
    bans_by: ClassVar[str | None] = None
    """The field of a request by which it bans tokens; None where it bans none."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self.slots = RowSlots(max_rows)

    def add(self, row: int, new: NewRow) -> None:
        """Take the state of a new row, if its request uses this stage."""
        if self._is_used_by(new):
            self._fill(self.slots.take(row), new)

    def remove(self, row: int) -> None:
        """Forget a row; one that does not use the stage is ignored."""
        self.slots.free(row)

    def _is_used_by(self, new: NewRow) -> bool:
        """Whether the stage can change this row's logits."""
        return bool(getattr(new.params, self.asked_by))

    @abstractmethod
    def _fill(self, slot: int, new: NewRow) -> None:
        """Write a new row's state to a slot, whatever an earlier row has left there."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: StageRows) -> None:
        """Change `logits` (rows, vocab_size) float32, contiguous, in place."""

    def advance(self, token_ids: Tensor, rows: StageRows) -> None:  # noqa: B027 - most stages keep no count
        """Take the tokens (rows,) int64 that were sampled for `rows`."""


class TokenTable:
    """Lists of different token ids, padded by their first entry: what is written twice has the same value twice."""

    def __init__(self, device: torch.device) -> None:
        self._ids = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._values = torch.zeros(0, 0, dtype=torch.float32, device=device)
        self._lengths = np.zeros(0, dtype=np.int64)

    def write(self, slot: int, token_ids: TokenIds, values: Iterable[float] | None = None) -> None:
        """Store a slot's list, with a float32 value for each token or without.

        Args:
            slot: a slot of the table's stage.
            token_ids: at least one, all different.
        """
        length = len(token_ids)
        self._ids = _widened(self._ids, slot + 1, length)
        self._lengths = np.pad(self._lengths, (0, len(self._ids) - len(self._lengths)))
        self._lengths[slot] = length
        self._ids[slot] = _padded(np.asarray(token_ids, dtype=np.int64), self._ids)
        if values is not None:
            self._values = _widened(self._values, *self._ids.shape)
            self._values[slot] = _padded(np.fromiter(values, dtype=np.float32, count=length), self._values)

    def token_ids(self, rows: StageRows) -> Tensor:
        """Return (rows, longest list of these rows) int64."""
        return self._ids[rows.slots, : self._width(rows)]

    def values(self, rows: StageRows) -> Tensor:
        """Return (rows, longest list of these rows) float32."""
        return self._values[rows.slots, : self._width(rows)]

    def _width(self, rows: StageRows) -> int:
        return int(self._lengths[rows.host_slots].max())


def _widened(table: Tensor, num_slots: int, width: int) -> Tensor:
    """Return a table of at least this size, its lists padded as before."""
    before = table.shape[1]
    table = grown(table, num_slots, width)
    if 0 < before < table.shape[1]:
        table[:, before:] = table[:, :1]
    return table


def _padded(entries: NDArray[np.int64] | NDArray[np.float32], table: Tensor) -> Tensor:
    width = table.shape[1]
    padded = np.concatenate((entries, np.full(width - len(entries), entries[0], entries.dtype)))
    return to_device(torch.from_numpy(padded), table.device)


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


class AllowedTokens(LogitsStage):
    """Bans every token that is not among `allowed_token_ids`."""

    asked_by = bans_by = "allowed_token_ids"

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_rows, vocab_size, device)
        self._allowed = TokenTable(device)
        self._last: tuple[object, NDArray[np.int64]] = (None, np.zeros(0, np.int64))
        """A request's list and its different ids: its choices share the list, and 256 of them come at once."""

    def _fill(self, slot: int, new: NewRow) -> None:
        given = new.params.allowed_token_ids or ()
        if self._last[0] is not given:
            self._last = given, np.unique(np.asarray(given, dtype=np.int64))
        self._allowed.write(slot, self._last[1])

    def apply(self, logits: Tensor, rows: StageRows) -> None:
        """Set what is not allowed to -inf."""
        places = rows.copies[:, None], self._allowed.token_ids(rows)
        kept = logits[places]
        logits.index_fill_(0, rows.copies, -torch.inf)
        logits[places] = kept


_ANY = -1
"""In a word's prefix: no token is asked for at this place."""
_NO_TOKEN = -2
"""In an output's tail: there was no token yet."""


class BadWords(LogitsStage):
    """Bans what would complete one of `bad_words_token_ids`, as vLLM: within the output alone."""

    asked_by, bans_by = "bad_words_token_ids", "bad_words"

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_rows, vocab_size, device)
        none = np.zeros(0, np.int64)
        self._last_words: tuple[object, NDArray[np.int64], NDArray[np.int64]] = (None, none, none)
        """A request's words, which its choices share, with the prefixes and last tokens of them."""
        self._clear()

    def remove(self, row: int) -> None:
        """Forget a row; the tables, which are as wide as the longest words were, are dropped with the last one."""
        super().remove(row)
        if not self.slots.num_taken:
            self._clear()

    def _clear(self) -> None:
        device = self._device
        self._prefixes = torch.zeros(0, 0, 0, dtype=torch.int64, device=device)
        """(slots, words, tokens before a word's last one), aligned to the right."""
        self._last = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._tails = torch.zeros(0, 0, dtype=torch.int64, device=device)
        """(slots, longest prefix): the last tokens of each output, the newest at the right."""
        self._is_word = torch.zeros(0, 0, dtype=torch.bool, device=device)
        """(slots, words): whether there is a word at this place."""

    def _fill(self, slot: int, new: NewRow) -> None:
        words = new.params.bad_words_token_ids
        self._reserve(slot + 1, len(words), max(len(word) for word in words) - 1)
        longest = self._tails.shape[1]
        of, prefixes, last = self._last_words
        if of is not words or prefixes.shape != self._prefixes.shape[1:]:
            prefixes = np.full(self._prefixes.shape[1:], _ANY, dtype=np.int64)
            last = np.zeros(self._last.shape[1], dtype=np.int64)
            for index, word in enumerate(words):
                prefixes[index, longest - (len(word) - 1) :] = word[:-1]
                last[index] = word[-1]
            self._last_words = words, prefixes, last
        tail = np.full(longest, _NO_TOKEN, dtype=np.int64)
        outputs = np.asarray(new.output_token_ids[-longest:] if longest else (), dtype=np.int64)
        tail[longest - len(outputs) :] = outputs
        is_word = np.arange(len(last)) < len(words)
        tables = (self._prefixes, self._last, self._tails, self._is_word)
        for table, entries in zip(tables, (prefixes, last, tail, is_word), strict=True):
            table[slot] = to_device(torch.from_numpy(entries), self._device)

    def apply(self, logits: Tensor, rows: StageRows) -> None:
        """Set the last token of each word whose others stand at the output's end to -inf."""
        prefixes, tails = self._prefixes[rows.slots], self._tails[rows.slots][:, None]
        completes = ((prefixes == tails) | (prefixes == _ANY)).all(dim=-1) & self._is_word[rows.slots]
        # Words may have one last token in common: the lowest ceiling holds.
        ceilings = torch.where(completes, -torch.inf, torch.inf)
        places = rows.copies[:, None] * self._vocab_size + self._last[rows.slots]
        logits.view(-1).scatter_reduce_(0, places.flatten(), ceilings.flatten(), "amin")

    def advance(self, token_ids: Tensor, rows: StageRows) -> None:
        """Shift the sampled tokens into the tails."""
        if self._tails.shape[1]:
            self._tails[rows.slots] = torch.cat((self._tails[rows.slots, 1:], token_ids[:, None]), dim=-1)

    def _reserve(self, num_slots: int, num_words: int, longest: int) -> None:
        """Make room. Longer prefixes and tails move to the right, where the newest tokens stand."""
        shift = longest - self._tails.shape[1]
        if shift > 0:
            self._prefixes = torch.nn.functional.pad(self._prefixes, (shift, 0), value=_ANY)
            self._tails = torch.nn.functional.pad(self._tails, (shift, 0), value=_NO_TOKEN)
        self._tails = grown(self._tails, num_slots, self._tails.shape[1])
        self._prefixes = grown(self._prefixes, num_slots, num_words, self._tails.shape[1])
        self._last = grown(self._last, *self._prefixes.shape[:2])
        self._is_word = grown(self._is_word, *self._prefixes.shape[:2])


class MinTokens(LogitsStage):
    """Bans a row's end tokens until it has `min_tokens`; then the row leaves the stage.

    The host counts along: a row gets one token each time that it is sampled.
    """

    asked_by = bans_by = "min_tokens"

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_rows, vocab_size, device)
        self._ends = TokenTable(device)
        self._num_left = np.zeros(0, dtype=np.int64)
        """By slot: tokens that the row lacks."""

    def _is_used_by(self, new: NewRow) -> bool:
        if new.params.structured_outputs is not None:
            return False  # Its grammar's mask does it, as far as the grammar allows another token.
        return len(new.output_token_ids) < new.params.min_tokens and bool(self._bannable(new))

    def _fill(self, slot: int, new: NewRow) -> None:
        self._ends.write(slot, self._bannable(new))
        if slot >= len(self._num_left):
            self._num_left = np.pad(self._num_left, (0, slot + 1 - len(self._num_left)))
        self._num_left[slot] = new.params.min_tokens - len(new.output_token_ids)

    def _bannable(self, new: NewRow) -> list[int]:
        return sorted(token_id for token_id in new.end_token_ids if token_id < self._vocab_size)

    def apply(self, logits: Tensor, rows: StageRows) -> None:
        """Set the end tokens to -inf."""
        logits[rows.copies[:, None], self._ends.token_ids(rows)] = -torch.inf

    def advance(self, token_ids: Tensor, rows: StageRows) -> None:
        """Count one token for each row."""
        self._num_left[rows.host_slots] -= 1
        reached = rows.host_slots[self._num_left[rows.host_slots] <= 0]
        if len(reached):
            self.slots.free_slots(reached)


class LogitBias(LogitsStage):
    """Adds `logit_bias`."""

    asked_by = "logit_bias"

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_rows, vocab_size, device)
        self._biases = TokenTable(device)

    def _fill(self, slot: int, new: NewRow) -> None:
        biases = new.params.logit_bias or {}
        self._biases.write(slot, list(biases), biases.values())

    def apply(self, logits: Tensor, rows: StageRows) -> None:
        """Add the bias of each row."""
        places = rows.copies[:, None], self._biases.token_ids(rows)
        logits[places] = logits[places] + self._biases.values(rows)


class Penalties(LogitsStage):
    """Lowers (or raises) the logits of tokens that the row has.

    As vLLM: repetition penalty (Keskar et al. 2019, arXiv:1909.05858) on every token of prompt and output; frequency
    and presence penalty on the output's.

    A slot holds the row's different tokens and how often each is in the output, in order of appearance, beyond which
    its entries mean nothing: memory and time grow with the tokens of a row, not with the vocabulary.
    """

    asked_by = "has_penalties"

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_rows, vocab_size, device)
        self._token_ids = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._counts = torch.zeros(0, 0, dtype=torch.float32, device=device)
        self._lengths = torch.zeros(0, dtype=torch.int64, device=device)
        """Different tokens of each slot."""
        self._factors = torch.zeros(0, 3, dtype=torch.float32, device=device)
        """Repetition, frequency and presence penalty."""
        self._most = np.zeros(0, dtype=np.int64)
        """By slot: no less than its length, as far as the host knows without reading it."""

    def _fill(self, slot: int, new: NewRow) -> None:
        token_ids, counts = _counted(new)
        length = len(token_ids)
        self._reserve(slot + 1, length + 1)
        params = new.params
        factors = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._token_ids[slot, :length] = to_device(torch.from_numpy(token_ids), self._device)
        self._counts[slot, :length] = to_device(torch.from_numpy(counts), self._device)
        self._factors[slot] = to_device(torch.tensor(factors), self._device)
        self._lengths[slot].fill_(length)
        self._most[slot] = length

    def apply(self, logits: Tensor, rows: StageRows) -> None:
        """Apply the three penalties, in this order."""
        width = self._width(rows)
        if width == 0:
            return
        token_ids, counts, is_entry = self._entries(rows, width)
        repetition, frequency, presence = self._factors[rows.slots].unsqueeze(-1).unbind(1)
        places = rows.copies[:, None], token_ids
        logits_before = logits[places]
        values = torch.where(logits_before > 0, logits_before / repetition, logits_before * repetition)
        values -= frequency * counts
        values -= presence * (counts > 0)
        logits[places] = torch.where(is_entry, values, logits_before)

    def advance(self, token_ids: Tensor, rows: StageRows) -> None:
        """Count the sampled tokens."""
        width = self._width(rows)
        self._reserve(len(self.slots), width + 1)
        lengths = self._lengths[rows.slots]
        is_entry = torch.arange(width, device=self._device) < lengths[:, None]
        found = (self._token_ids[rows.slots, :width] == token_ids[:, None]) & is_entry
        is_known = found.any(dim=-1)
        entry = torch.where(is_known, found.view(torch.uint8).argmax(dim=-1), lengths) if width else lengths
        self._counts[rows.slots, entry] = torch.where(is_known, self._counts[rows.slots, entry], 0.0) + 1.0
        self._token_ids[rows.slots, entry] = token_ids
        self._lengths[rows.slots] = lengths + ~is_known
        self._most[rows.host_slots] += 1

    def _entries(self, rows: StageRows, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids and counts, (rows, width), padded by the last entry of each row, and (rows, width or 1) whether an
        entry means something: the padding of a row that has no token at all does not."""
        lengths = self._lengths[rows.slots][:, None]
        index = torch.arange(width, device=self._device).minimum((lengths - 1).clamp_(min=0))
        token_ids = self._token_ids[rows.slots[:, None], index]
        return token_ids, self._counts[rows.slots[:, None], index], lengths > 0

    def _width(self, rows: StageRows) -> int:
        """Entries that hold the tokens of all rows. A CPU reads the lengths: the host's bound also counts repeats."""
        if self._device.type == "cpu":
            self._most[rows.host_slots] = self._lengths[rows.slots].numpy()
        return int(self._most[rows.host_slots].max())

    def _reserve(self, num_slots: int, width: int) -> None:
        self._token_ids = grown(self._token_ids, num_slots, width)
        self._counts = grown(self._counts, num_slots, width)
        self._lengths = grown(self._lengths, num_slots)
        self._factors = grown(self._factors, num_slots, 3)
        if num_slots > len(self._most):
            self._most = np.pad(self._most, (0, num_slots - len(self._most)))


def _counted(new: NewRow) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """A row's different tokens, and how often each is in its output. Only the repetition penalty needs the prompt's."""
    outputs, counts = np.unique(np.asarray(new.output_token_ids, dtype=np.int64), return_counts=True)
    if new.params.repetition_penalty == 1.0:
        return outputs, counts.astype(np.float32)
    prompt = np.setdiff1d(np.asarray(new.prompt_token_ids, dtype=np.int64), outputs)
    return np.concatenate((outputs, prompt)), np.concatenate((counts, np.zeros(len(prompt)))).astype(np.float32)


STAGES: tuple[type[LogitsStage], ...] = (AllowedTokens, BadWords, MinTokens, LogitBias, Penalties)
"""In the order in which they are applied: vLLM's. A token mask comes before them."""
