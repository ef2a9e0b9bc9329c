"""Log probabilities in OpenAI's two forms: the chat's list of tokens, and the four columns of completions.

The column `text_offset` says where tokens begin in the text that an answer shows, in characters.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pagestream.v1.inference_pb2 import LogprobEntry, TokenLogprobs
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_grammars import TokenTable

from pagestream_gateway.streams.runs import Run

_NEAR_BYTES = 64
"""How far a token is looked for in a prompt that the tokenizer has normalized."""


def _num_begun(data: bytes) -> int:
    """Return how many characters begin in a part of UTF-8."""
    return sum(byte & 0xC0 != 0x80 for byte in data)


class EchoOffsets:
    """Of a prompt's tokens, in the text that is echoed.

    That has no special tokens that the tokenizer has put around it, and no space that it has put before it. A token
    within a character, or of no text, is where that character, or the next token, begins.
    """

    def __init__(self, text: str) -> None:
        self._text = text.encode("utf-8", "replace")
        self._byte = 0
        self._begun = 0

    def next(self, entry: LogprobEntry, table: TokenTable | None) -> int:
        """Return the place of the next token."""
        text, place = self._text, self._byte
        spelled = entry.text.encode() if table is None else table.spelled(entry.token_id)
        length = len(spelled)
        if not text.startswith(spelled, place):
            if spelled[:1] == b" " and text.startswith(spelled[1:], place):
                length -= 1
            elif table is not None and entry.token_id in table.special_ids:
                length = 0
            elif (found := text.find(spelled, place, place + _NEAR_BYTES)) >= 0:
                self._advance(found - place)
            else:
                changed = text[place : place + 4 * len(entry.text)].decode(errors="ignore")[: len(entry.text)]
                length = len(changed.encode())
        within = self._text[self._byte : self._byte + 1]
        offset = self._begun - (bool(within) and not _num_begun(within))
        self._advance(length)
        return offset

    def _advance(self, length: int) -> None:
        self._begun += _num_begun(self._text[self._byte : self._byte + length])
        self._byte += length


class OutputOffsets:
    """Of an output's tokens, in the text that is generated.

    By their own bytes, whenever these are shown: a character may come with a later token.

    Args:
        begin: characters before it.
        hides_special: whether special tokens are not shown.
    """

    def __init__(self, begin: int, *, hides_special: bool) -> None:
        self._begun = begin
        self._hides_special = hides_special
        self._ends_word = False

    def next(self, entry: LogprobEntry, table: TokenTable | None) -> int:
        """Return the place of the next token."""
        if table is None:
            offset, self._begun = self._begun, self._begun + len(entry.text)
            return offset
        if self._hides_special and entry.token_id in table.special_ids:
            return self._begun
        spelled = table.spelled(entry.token_id)
        self._begun += self._ends_word
        self._ends_word = table.ends_word(entry.token_id)
        is_within = self._begun and spelled and not _num_begun(spelled[:1])
        offset = self._begun - bool(is_within)
        self._begun += _num_begun(spelled)
        return offset


_REPLACEMENT = "\ufffd"
_LEAST = -9999.0  # JSON has no infinity; vLLM's stand-in


class Logprobs:
    """Writes the log probabilities of one request's runs, in order."""

    depends_on_history = False
    """Whether what is written of a run depends on the runs before it."""
    list_names: ClassVar[tuple[str, ...]]
    """Members of `logprobs` that are lists with an item for each token."""
    other_members: ClassVar[Mapping[str, Any]] = {}
    """Its other members."""

    needs_tokens = False
    """Whether what is written depends on what the tokenizer says of tokens."""

    def __init__(self, spec: RequestSpec) -> None:
        self.is_asked = spec.sampling.HasField("logprobs")
        self.tokens: TokenTable | None = None
        """Of the model; None where that is not known."""
        self._num_best = spec.answer.top_logprobs
        self._by_id = spec.answer.tokens_by_id

    def write(self, run: Run) -> dict[str, Any] | None:
        """Return the `logprobs` of a run's chunk; None where they were not asked for or the run has no token."""
        return self._write(run) if self.is_asked and run.logprobs else None

    def first(self, choice: int) -> dict[str, Any] | None:
        """Return the `logprobs` of the first token of a choice's prompt, where those of prompts are echoed."""
        return None

    def echoed(self, run: Run, choice: int) -> dict[str, Any] | None:
        """Return the `logprobs` of a choice for a run's tokens of its prompt; None where they are not echoed."""
        return None

    def lists(self, written: dict[str, Any] | None) -> dict[str, list[Any]]:
        """Return the members of `logprobs` that are lists, one item a token; {} for None."""
        return {name: written[name] for name in self.list_names if written and name in written}

    def _write(self, run: Run) -> dict[str, Any]:
        raise NotImplementedError

    def _name(self, entry: LogprobEntry) -> str:
        """Return what a token is called."""
        return f"token_id:{entry.token_id}" if self._by_id else entry.text

    def _split(self, token: TokenLogprobs) -> tuple[LogprobEntry, Sequence[LogprobEntry]]:
        """Return the entry of the chosen token, and those of the likeliest ones that were asked for."""
        return token.entries[0], token.entries[1 : 1 + self._num_best]


class ChatLogprobs(Logprobs):
    """A list of tokens, each with the likeliest ones at its place."""

    needs_tokens = True
    list_names = ("content",)
    other_members: ClassVar[Mapping[str, Any]] = {"refusal": None}

    def _write(self, run: Run) -> dict[str, Any]:
        content = []
        for token in run.logprobs:
            chosen, best = self._split(token)
            content.append({**self._token(chosen), "top_logprobs": [self._token(entry) for entry in best]})
        return {"content": content, **self.other_members}

    def _token(self, entry: LogprobEntry) -> dict[str, Any]:
        # The text of a part of a character has U+FFFD in place of its bytes.
        own: bytes | None = entry.text.encode()
        if _REPLACEMENT in entry.text:
            own = None if self.tokens is None else self.tokens.bytes_of(entry.token_id)
        return {"token": self._name(entry), "logprob": _finite(entry), "bytes": None if own is None else list(own)}


class CompletionLogprobs(Logprobs):
    """Columns: one holds the character of the choice's text at which each token begins, hence the history."""

    depends_on_history = True
    needs_tokens = True
    list_names = ("text_offset", "token_logprobs", "tokens", "top_logprobs")

    def __init__(self, spec: RequestSpec) -> None:
        super().__init__(spec)
        siblings = max(1, spec.sampling.n)
        echoes = list(spec.answer.echo_texts) or [""] * len(spec.prompts)
        hides = spec.sampling.skip_special_tokens or not spec.sampling.HasField("skip_special_tokens")
        self._offsets = [OutputOffsets(len(text), hides_special=hides) for text in echoes for _ in range(siblings)]
        self._echo_offsets = [EchoOffsets(text) for text in echoes for _ in range(siblings)]
        firsts = zip(spec.prompts, spec.answer.first_tokens, strict=False)
        self._first_tokens = [
            LogprobEntry(token_id=prompt.ids[0], text=text) for prompt, text in firsts for _ in range(siblings)
        ]
        """Of the choices' prompts, where those are echoed."""
        self._has_begun = [False] * len(self._first_tokens)

    def first(self, choice: int) -> dict[str, Any] | None:
        if not self._first_tokens:
            return None
        first = self._first_tokens[choice]
        return {
            "text_offset": [0],
            "token_logprobs": [None],
            "tokens": [self._name(first)],
            "top_logprobs": [None],
        }

    def echoed(self, run: Run, choice: int) -> dict[str, Any] | None:
        if not self._first_tokens:
            return None
        offsets = self._echo_offsets[choice]
        if not self._has_begun[choice]:
            self._has_begun[choice] = True
            offsets.next(self._first_tokens[choice], self.tokens)
        return self._columns(run.prompt_logprobs, offsets)

    def _write(self, run: Run) -> dict[str, Any]:
        return self._columns(run.logprobs, self._offsets[run.choice])

    def _columns(self, tokens: Sequence[TokenLogprobs], offsets: EchoOffsets | OutputOffsets) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {name: [] for name in self.list_names}
        for token in tokens:
            chosen, best = self._split(token)
            columns["text_offset"].append(offsets.next(chosen, self.tokens))
            columns["token_logprobs"].append(_finite(chosen))
            columns["tokens"].append(self._name(chosen))
            columns["top_logprobs"].append({self._name(entry): _finite(entry) for entry in (*best, chosen)})
        return columns


def prompt_logprobs_body(run: Run, num_best: int) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs` for a run's tokens of a prompt, which begin with null for its first token.

    Each is an object of the token's own entry, then those of the likeliest ones, by their ids.
    """
    is_begin = run.prompt_end == len(run.prompt_logprobs)
    rows: list[dict[str, Any] | None] = [None] if is_begin else []
    for token in run.prompt_logprobs:
        rows.append(
            {
                str(entry.token_id): {"logprob": _finite(entry), "rank": entry.rank, "decoded_token": entry.text}
                for entry in token.entries[: 1 + num_best]
            }
        )
    return rows


def _finite(entry: LogprobEntry) -> float:
    return max(entry.logprob, _LEAST)
