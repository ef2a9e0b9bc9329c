"""Messages between a worker and its engine's process: a length, then a pickle of one command or report.

The two processes run the same code, started by the same program, over a socket that no other process has. A step's
report, the only message that is sent in each step, is flattened: its plain tokens are columns already, its figures and
other outputs become plain values.
"""

import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import fields
from operator import attrgetter
from typing import Any

from pagestream_engine.request import StepOutput, TokenLogprob
from pagestream_engine.stats import EngineStats

from pagestream_worker.messages import Figures, StepDone, TokenColumns

LENGTH = struct.Struct("<Q")
_PROTOCOL = 5
_STATS = tuple(field.name for field in fields(EngineStats))
_read_stats: Callable[[EngineStats], tuple[Any, ...]] = attrgetter(*_STATS)
_COLUMNS = ("seq_id", "token_id", "text", "num_cached_tokens")
"""What every output has."""
_REST = tuple(field.name for field in fields(StepOutput) if field.name not in _COLUMNS)
"""What an output has at its end, or where more was asked for."""
_read_rest: Callable[[StepOutput], tuple[Any, ...]] = attrgetter(*_REST)
_PLAIN_REST = _read_rest(StepOutput("", None, ""))


def pack(message: object) -> bytes:
    """Return the bytes of a message, with their length before them."""
    body = pickle.dumps(_flat(message) if isinstance(message, StepDone) else message, _PROTOCOL)
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes | bytearray | memoryview) -> Any:
    """Return the message of a body, without its length."""
    message = pickle.loads(body)  # noqa: S301 - from this process' own child or parent
    return _step_done(message) if type(message) is tuple else message


class Frames:
    """Cuts a stream of bytes into bodies of messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add what was received; yield each body that is complete."""
        self._data += data
        start, end = 0, len(self._data)
        while end - start >= LENGTH.size:
            [length] = LENGTH.unpack_from(self._data, start)
            first = start + LENGTH.size
            if end - first < length:
                break
            start = first + length
            yield bytes(self._data[first:start])
        del self._data[:start]


def _flat(report: StepDone) -> tuple[Any, ...]:
    outputs, figures = report.outputs, report.figures
    rest = {place: _flat_rest(each) for place, each in enumerate(outputs) if _read_rest(each) != _PLAIN_REST}
    return (
        [each.seq_id for each in outputs],
        [each.token_id for each in outputs],
        [each.text for each in outputs],
        [each.num_cached_tokens for each in outputs],
        rest,
        tuple(report.tokens),
        (report.duration_s, report.num_sequences, report.has_prompts),
        (_read_stats(figures.stats), figures.fragmentation, figures.gpu, figures.num_commands, figures.is_busy),
    )


def _step_done(flat: tuple[Any, ...]) -> StepDone:
    seq_ids, tokens, texts, cached, rest, columns, (duration_s, num_sequences, has_prompts), (stats, *figures) = flat
    outputs = [
        StepOutput(seq_id, token, text, None, None, num_cached)
        for seq_id, token, text, num_cached in zip(seq_ids, tokens, texts, cached, strict=True)
    ]
    for place, values in rest.items():
        for name, value in zip(_REST, values, strict=True):
            setattr(outputs[place], name, value)
        logprobs = outputs[place].logprobs
        outputs[place].logprobs = None if logprobs is None else tuple(map(TokenLogprob._make, logprobs))
    tokens = TokenColumns(*columns)
    return StepDone(outputs, duration_s, num_sequences, has_prompts, Figures(EngineStats(*stats), *figures), tokens)


def _flat_rest(output: StepOutput) -> list[Any]:
    values = list(_read_rest(output))
    if output.logprobs is not None:
        values[_REST.index("logprobs")] = [tuple(each) for each in output.logprobs]
    return values
