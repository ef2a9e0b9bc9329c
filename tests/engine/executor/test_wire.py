"""Frames between an engine and the processes that compute: what they carry, and bytes that are none."""

import pickle
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from pagestream_engine import (
    ConfigError,
    ExecutorDied,
    ExecutorError,
    MessageError,
    OutOfMemory,
    RequestFault,
    SamplingParams,
    UnsupportedModel,
)
from pagestream_engine.plan import BlockEdits, NewSequence, PreparedGrammar, StepLogprobs, StepPlan, StepResult
from pagestream_engine.request import Adapter
from pagestream_engine.sampling_params import Grammar
from pagestream_engine.wire.codec import Codec
from pagestream_engine.wire.executor import ANSWERS, PLANS, Failure, SleepChange


def int32(*values: int) -> Any:
    return np.array(values, np.int32)


NEW = NewSequence(
    1, int32(5, 6, 7), 2, 0, SamplingParams(stop=["a"]), -(2**63), (0,), (int32(4), int32()), 3, Adapter("a", "/a", "0")
)
EDITS = BlockEdits(int32(1, 2), int32(0, 5), int32(9, 8))
PLAN = StepPlan(
    7,
    True,
    int32(3),
    (NEW,),
    (EDITS, EDITS),
    np.arange(6, dtype=np.int32).reshape(3, 2),
    *map(int32, (1, 2)),
    1,
    int32(1),
    int32(0),
)
LOGPROBS = StepLogprobs(
    int32(0), int32(1), np.array([[1, 2]], np.int32), np.array([[-0.1, -np.inf]], np.float32), int32(1)
)
RESULT = StepResult(
    7,
    np.array([[1, 2], [3, 0]], np.int32),
    int32(2, 1),
    LOGPROBS,
    {0: "broken", 1: RequestFault("too much is banned")},
    num_drafts=int32(1, 0),
)
MESSAGES = [
    (PLANS, PLAN),
    (PLANS, SleepChange(is_asleep=True)),
    (ANSWERS, RESULT),
    (ANSWERS, PreparedGrammar(Grammar("regex", "["), RequestFault("what"))),
    (ANSWERS, Failure.of(ConfigError("device", "cuda", "cpu"), 3)),
]


def parts(record: Any) -> list[Any]:
    """Return what a record holds, with the type, shape and bits of its arrays."""
    if isinstance(record, np.ndarray):
        return [record.dtype, record.shape, record.tobytes()]
    if isinstance(record, StepPlan | StepResult | NewSequence | BlockEdits | StepLogprobs):
        return [parts(getattr(record, each.name)) for each in fields(record)]
    if isinstance(record, tuple | list):
        return [parts(each) for each in record]
    if isinstance(record, dict):
        return [(place, type(each), each) for place, each in record.items()]
    return [record]


@pytest.mark.parametrize(("codec", "message"), MESSAGES)
def test_a_message_comes_out_as_it_went_in(codec: Codec, message: object) -> None:
    found = codec.decode(codec.encode(message))
    assert type(found) is type(message)
    assert parts(found) == parts(message)


def test_arrays_can_be_edited_where_they_arrive() -> None:
    """A runner keeps them."""
    strided = replace(PLAN, rows=np.arange(8, dtype=np.int32)[::2], copies=np.asfortranarray(PLAN.copies))
    found = PLANS.decode(PLANS.encode(strided))
    assert found.rows.tolist() == [0, 2, 4, 6]
    assert found.copies.tolist() == PLAN.copies.tolist()
    for array in (found.rows, found.copies, found.added[0].token_ids):
        assert array.flags.writeable
        assert array.flags.aligned


def test_whose_fault_an_error_is_arrives() -> None:
    found = ANSWERS.decode(ANSWERS.encode(RESULT))
    assert [isinstance(found.errors[place], RequestFault) for place in (0, 1)] == [False, True]
    assert isinstance(replace(found, step_id=8).errors[1], RequestFault)
    [answer] = [ANSWERS.decode(ANSWERS.encode(each)) for _, each in MESSAGES if isinstance(each, PreparedGrammar)]
    assert isinstance(answer.error, RequestFault)


class OwnError(Exception):
    """Of a plugin."""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConfigError("device", "cuda", "cpu"), "device: given 'cuda', expected cpu"),
        (OutOfMemory("too large"), "too large"),
        (UnsupportedModel("caf\udce9"), "caf\udce9"),
        (ExecutorDied(-9), "the executor's process was killed by signal 9; restart_executor() starts another"),
        (FileNotFoundError(2, "No such file"), "[Errno 2] No such file"),
        (RuntimeError(), ""),
    ],
)
def test_an_error_comes_through_as_what_it_is(error: Exception, text: str) -> None:
    error.add_note("where it was")
    found = ANSWERS.decode(ANSWERS.encode(Failure.of(error, 3))).error
    assert type(found) is type(error)
    assert (str(found), found.args, found.__notes__) == (text, error.args, ["where it was"])
    assert vars(found) == vars(error)


@pytest.mark.parametrize("error", [OwnError("what"), KeyError(object), SystemExit("what"), KeyboardInterrupt()])
def test_another_error_is_described(error: BaseException) -> None:
    found = ANSWERS.decode(ANSWERS.encode(Failure.of(error, 3))).error
    assert type(found) is ExecutorError
    assert str(found) == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("kind", "arguments", "state"),
    [
        ("SystemExit", [], {}),
        ("eval", ["1"], {}),
        ("os.system", ["true"], {}),
        ("UnicodeDecodeError", ["a"], {}),
        ("ConfigError", [1, 2, 3, 4, 5], {"__notes__": "text"}),
    ],
)
def test_a_made_up_error_is_an_error_of_ours(kind: str, arguments: list[Any], state: dict[str, Any]) -> None:
    found = ANSWERS.decode(ANSWERS.encode(Failure(3, kind, arguments, state, ["note"]))).error
    assert type(found) in (ExecutorError, ConfigError)


class Bomb:
    """A pickle of it makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_bytes_that_are_no_message_are_refused_and_run_nothing(tmp_path: Path) -> None:
    pickled = pickle.dumps(Bomb(tmp_path / "ran"))
    for frame in (b"", b"\xff", pickled, *(bytes((kind,)) + pickled for kind in (*range(6), *range(0x80, 0x86)))):
        for codec in (PLANS, ANSWERS):
            with pytest.raises(MessageError):
                codec.decode(frame)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"\xa4rows\xc4\x05i", b"\xa4rows\xc4\x05f"),
        (b"\xa4rows\xc4\x05i", b"\xa4rows\xc4\x05O"),
        (b"\xa4rows\xc4\x05i\x01", b"\xa4rows\xc4\x04i"),
        (b"\xa4rows\xc4\x05i\x01\0\0\0", b"\xa4rows\xc4\x00"),
        (b"\xa4rows\xc4\x05i\x01\0\0\0", b"\xa4rows\x93\x01\x02\x03"),
        (b"\x92\x92\x03\x02", b"\x92\x92\x03\x03"),
        (b"\x92\x92\x03\x02", b"\x92\x92\xff\x02"),
        (b"\x92\x92\x03\x02", b"\x92\x92\xa1\x02"),
        (b"\xa7step_id", b"\xa7step_ie"),
    ],
)
def test_an_array_that_is_not_what_was_declared_is_refused(old: bytes, new: bytes) -> None:
    frame = bytes(PLANS.encode(PLAN))
    assert old in frame
    with pytest.raises(MessageError):
        PLANS.decode(frame.replace(old, new))


def test_bytes_that_were_changed_are_a_message_or_refused() -> None:
    random = Random(7)
    frames = [(codec, codec.encode(each)) for codec, each in MESSAGES]
    for _ in range(4000):
        codec, frame = random.choice(frames)
        changed = bytearray(frame)
        for _ in range(random.randint(1, 4)):
            place = random.randrange(len(changed) + 1)
            changed[place : place + random.randint(0, 4)] = random.randbytes(random.randint(0, 4))
        try:
            found = codec.decode(changed)
        except MessageError:
            continue
        if isinstance(found, Failure):
            assert isinstance(found.error, Exception)


def test_what_is_no_message_is_not_sent() -> None:
    for codec, message in ((PLANS, RESULT), (ANSWERS, PLAN), (PLANS, object())):
        with pytest.raises(MessageError, match="no message of this connection"):
            codec.encode(message)
    with pytest.raises(MessageError, match="an array of object"):
        PLANS.encode(replace(PLAN, rows=np.array([None])))


def test_both_ends_can_compare_what_they_carry() -> None:
    assert PLANS.schema == Codec(*PLANS.kinds).schema
    assert "NewSequence" in PLANS.schema
    assert "RequestFault" in ANSWERS.schema
    assert " at 0x" not in PLANS.schema + ANSWERS.schema
