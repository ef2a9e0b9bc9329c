"""The plain tokens of a step as columns: bytes that go from the engine to the logs without an object for each token."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pagestream_engine.request import StepOutput


class TokenColumns(NamedTuple):
    """A token each of sequences that go on, in the machine's byte order."""

    logs: bytes
    """Handles of the logs that they belong to, int64."""
    token_ids: bytes
    """int32."""
    text_lengths: bytes
    """Bytes of each text, int32."""
    text: bytes
    """All texts, UTF-8."""

    @property
    def num_tokens(self) -> int:
        """Number of rows."""
        return len(self.logs) // 8

    def rows(self) -> Iterator[tuple[int, int, str]]:
        """Yield the handle, token id and text of each row."""
        start = 0
        lengths = array("i", self.text_lengths)
        for log, token_id, length in zip(array("q", self.logs), array("i", self.token_ids), lengths, strict=True):
            yield log, token_id, self.text[start : start + length].decode()
            start += length

    @classmethod
    def of(cls, logs: Iterable[int], token_ids: Iterable[int], texts: Sequence[str]) -> "TokenColumns":
        """Pack rows. UnicodeEncodeError for half a surrogate pair, which UTF-8 and JSON do not have."""
        joined = "".join(texts)
        text = joined.encode()
        lengths = map(len, texts) if len(text) == len(joined) else (len(each.encode()) for each in texts)
        return cls(array("q", logs).tobytes(), array("i", token_ids).tobytes(), array("i", lengths).tobytes(), text)


NO_TOKENS = TokenColumns(b"", b"", b"", b"")


class PlainSequences:
    """The sequences whose outputs go as columns: those whose group named a log, from their second token to the last but
    one. The first and the last one mean more than a token to a worker.
    """

    def __init__(self) -> None:
        self._logs: dict[str, int] = {}
        self._begun: dict[str, int] = {}

    def add(self, seq_id: str, log: int) -> None:
        """Add a sequence that has had no output yet, all of whose tokens are without logprobs."""
        self._logs[seq_id] = log

    def discard(self, seq_id: str) -> None:
        """Remove a sequence that has ended or was aborted, if it is one of these."""
        self._logs.pop(seq_id, None)
        self._begun.pop(seq_id, None)

    def split(self, outputs: Iterable[StepOutput]) -> tuple[TokenColumns, list[StepOutput]]:
        """Return the plain tokens of a step, and its other outputs.

        A sequence's plain tokens come before its other output: that is its last one.
        """
        begun, others = self._begun, list[StepOutput]()
        logs, token_ids, texts = list[int](), list[int](), list[str]()
        for output in outputs:
            log = begun.get(output.seq_id)
            if log is None or output.finish_reason is not None:
                others.append(output)
            else:
                logs.append(log)
                token_ids.append(output.token_id)  # type: ignore[arg-type]
                texts.append(output.text)
        for output in others:
            if output.token_id is not None and output.seq_id in self._logs:
                self._begun[output.seq_id] = self._logs.pop(output.seq_id)
        return (TokenColumns.of(logs, token_ids, texts) if logs else NO_TOKENS), others
