"""The pipe between a worker and its engine's process: any bytes are a record that was meant, or an error."""

import os
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from pagestream_engine import Choice, Engine, EngineConfig, EngineError, MessageError, SamplingParams, SequenceOutput
from pagestream_engine.request import TokenLogprob
from pagestream_engine.sampling_params import ReasoningMarks, StructuredOutputsParams
from pagestream_engine.stats import EngineStats
from pagestream_engine.wire.codec import Codec
from pagestream_engine.wire.worker import (
    COMMANDS,
    REPORTS,
    AbortSequences,
    AddGroup,
    Figures,
    Program,
    StepDone,
    TokenColumns,
)
from pagestream_worker import EngineCoreError, EngineProcess
from support.processes.waiting import LIMIT_S, is_running, until

FLOATS = ("kv_utilization", "kv_demand", "last_step_s", "last_schedule_s", "total_step_s", "total_schedule_s")
COUNTS = dict.fromkeys(EngineStats.__struct_fields__, 1)
STATS = EngineStats(**{**COUNTS, **dict.fromkeys(FLOATS, 0.5), "accepted_by_position": (3, 1)})  # type: ignore[arg-type]
ROW = (TokenLogprob(5, -0.5, 1, "a"), TokenLogprob(6, -1.5, 2, "b"))
PARAMS = SamplingParams(
    seed=-(2**63),
    stop=["half \ud800"],
    logit_bias={3: -1.0},
    structured_outputs=StructuredOutputsParams(
        json={"type": "integer", "maximum": 10**30, "minimum": -(10**30)}, reasoning=ReasoningMarks([1, 2], [[3]])
    ),
)
CONFIG = EngineConfig.from_options({"tensor_parallel_size": 2, "plugins": ["a", "b"], "swap_space": 0.5})
COMMANDED = [
    AbortSequences(["a", "b"]),
    AddGroup([1, 2, 70_000], [Choice("a", SamplingParams()), Choice("b", PARAMS, [7], 3)], b"salt", 2, 0.5, "t", 2.0),
    Program("module:name", "caf\udce9", CONFIG, "json", "INFO", "e", Path("caf\udce9")),
]
REPORTED = [
    StepDone(
        [
            SequenceOutput("a", 5, " w\u00f6rd", logprobs=ROW, prompt_logprobs=(ROW, ROW), cumulative_logprob=-1.0),
            SequenceOutput("b", None, "", "error", error="no such file: caf\udce9", is_request_fault=True),
            SequenceOutput("c", 1, "", "stop", 7, 3, pooled=b"\0\1"),
        ],
        0.5,
        3,
        True,
        Figures(STATS, 0.25, None, 5, True),
        TokenColumns.of([1, 2], [3, 4], ["a", "\u00f6"]),
    )
]
RECORDS = [(COMMANDS, each) for each in COMMANDED] + [(REPORTS, each) for each in REPORTED]


class Bomb:
    """A pickle of it makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def shown(record: object) -> str:
    """Return a record as text, its tuples as lists: those of a field that is any sequence come out as lists."""
    return repr(record).replace(",)", ")").translate({ord("("): "[", ord(")"): "]"})


@pytest.mark.parametrize(("codec", "record"), RECORDS)
def test_a_record_comes_out_as_it_went_in(codec: Codec, record: object) -> None:
    found = codec.decode(codec.encode(record))
    assert type(found) is type(record)
    assert shown(found) == shown(record)
    if isinstance(found, AddGroup):
        assert [each.params for each in found.choices] == [SamplingParams(), PARAMS]


def test_what_choices_share_is_sent_and_checked_once() -> None:
    """128 choices with a large schema were a frame of 45 MB, and its checks held the engine's process for 3.8 s."""
    params = SamplingParams(
        n=128,
        allowed_token_ids=list(range(4000)),
        structured_outputs=StructuredOutputsParams(
            json={"type": "object", "properties": {f"p{n}": {} for n in range(400)}}
        ),
    )
    choices = [Choice(f"r/n/{n}", params.for_child(7, n).with_max_tokens(n + 1), [n]) for n in range(128)]
    frames = [COMMANDS.encode(AddGroup([1, prompt], choices)) for prompt in range(2)]
    assert len(frames[0]) < 2 * len(COMMANDS.encode(AddGroup([1], choices[:1])))
    found = [each for frame in frames for each in COMMANDS.decode(frame).choices]
    assert found == choices * 2
    assert len({id(each.params.structured_outputs) for each in found}) == 1
    echoed = AddGroup([1, 2], [Choice("e", SamplingParams(max_tokens=0, prompt_logprobs=1), [])])
    assert COMMANDS.decode(COMMANDS.encode(echoed)).choices == echoed.choices


def hostile() -> Iterator[bytes]:
    """Yield frames of no record: lengths that are not there, wrong kinds and types, nesting, other formats."""
    yield b""
    yield b"\xff"
    yield b"\x00"
    yield b"\x00\xc1"
    for kind in (0, 1, 0x80, 0x81):
        for code in (0xDD, 0xDF, 0xDB, 0xC6):
            yield bytes((kind, code)) + b"\x7f\xff\xff\xff"
            yield bytes((kind, 0x91, code)) + b"\x7f\xff\xff\xff"
        yield bytes((kind,)) + b"\x91" * 200_000
        yield bytes((kind,)) + b"\xc7\x08\x05" + bytes(8)
    yield b"\x01\x91\x91\x07"
    yield b'{"seq_ids": []}'
    yield b"\x08\x90\x90"


def test_bytes_that_are_no_record_are_refused_and_run_nothing(tmp_path: Path) -> None:
    pickled = pickle.dumps(Bomb(tmp_path / "ran"))
    for frame in (*hostile(), pickled, b"\x00" + pickled, b"\x01" + pickled):
        with pytest.raises(MessageError):
            COMMANDS.decode(frame)
    assert not (tmp_path / "ran").exists()


def test_bytes_that_were_changed_are_a_record_of_known_kinds_or_refused() -> None:
    random = Random(7)
    frames = [
        (codec, codec.encode(each))
        for codec, records in ((COMMANDS, COMMANDED), (REPORTS, REPORTED))
        for each in records
    ]
    num_refused = 0
    for _ in range(4000):
        codec, frame = random.choice(frames)
        changed = bytearray(frame)
        for _ in range(random.randint(1, 4)):
            place = random.randrange(len(changed) + 1)
            match random.randrange(3):
                case 0:
                    changed[place : place + 1] = random.randbytes(1)
                case 1:
                    del changed[place : place + random.randint(1, 8)]
                case _:
                    changed[place:place] = random.randbytes(random.randint(1, 8))
        try:
            codec.encode(codec.decode(changed))
        except MessageError:
            num_refused += 1
    assert 2000 < num_refused < 4000


def test_what_is_no_message_of_the_connection_is_not_sent() -> None:
    for codec, record in ((COMMANDS, REPORTED[0]), (REPORTS, COMMANDED[0]), (COMMANDS, object()), (COMMANDS, "text")):
        with pytest.raises(MessageError, match="no message of this connection"):
            codec.encode(record)
    with pytest.raises(MessageError, match="can't be sent"):
        COMMANDS.encode(AddGroup([1], [object()]))  # type: ignore[list-item]
    with pytest.raises(MessageError, match="takes 108 bytes, expected at most 100"):
        Codec(AbortSequences, max_bytes=100).encode(AbortSequences(["x" * 103]))


BABBLE = {
    "a frame of 18446744073709551615 bytes": b"\xff" * 4096,
    "a frame of kind 127": b"\x01" + bytes(7) + b"\x7f",
    "a frame can't be read": b"\x02" + bytes(7) + b"\x00\xc1",
}


@pytest.fixture
def starts_by_itself() -> bool:
    """What babbles finds its connection in the arguments of an interpreter."""
    return True


def babbling_load(model: str, config: EngineConfig) -> Engine:
    """Send what is no report on the connection to the worker."""
    os.write(int(sys.argv[1]), BABBLE[model])
    time.sleep(LIMIT_S)
    raise TimeoutError


@pytest.mark.served
@pytest.mark.parametrize("words", BABBLE)
async def test_a_process_that_sends_no_reports_is_ended(words: str) -> None:
    process = EngineProcess(Program(f"{__name__}:babbling_load", words, EngineConfig(), "json", "INFO", "e"))
    await process.start()
    try:
        await until(process.loaded.done, "the error")
        for future in (process.loaded, process.ended):
            error = future.exception(0)
            assert isinstance(error, EngineCoreError)
            assert not isinstance(error, EngineError)
            assert words in str(error)
        await until(lambda: not is_running(process.pid), "its end")
    finally:
        process.close()
