"""Messages between a worker and its engine's process: equal after the way, however the stream is cut."""

from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st
from pagestream_engine import SamplingParams, Sibling, StepOutput, TokenLogprob
from pagestream_engine.request.outputs import EngineStats
from pagestream_worker.logs.token_columns import NO_TOKENS, TokenColumns
from pagestream_worker.stepping import wire
from pagestream_worker.stepping.commands import AbortSequences, AddGroup
from pagestream_worker.stepping.reports import Figures, GpuUse, StepDone

STATS = EngineStats(**{field.name: number for number, field in enumerate(fields(EngineStats))})
FIGURES = Figures(STATS, 0.25, GpuUse(1 << 36, None), 3, is_busy=True)

floats = st.floats(allow_nan=False)
logprobs = st.builds(TokenLogprob, st.integers(0, 2**31), floats, st.integers(1, 2**31), st.text(max_size=3))
outputs = st.builds(
    StepOutput,
    st.text(max_size=9),
    st.none() | st.integers(0, 2**31),
    st.text(max_size=5),
    st.none() | st.sampled_from(["stop", "length", "error"]),
    st.none() | st.integers(0, 99) | st.text(max_size=3),
    st.integers(0, 2**20),
    st.none() | st.text(max_size=5),
    st.none() | st.lists(logprobs, max_size=3).map(tuple),
)
characters = st.characters(exclude_categories=("Cs",))
rows = st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1), st.text(characters, max_size=4))
columns = st.lists(rows, max_size=4).map(lambda each: TokenColumns.of(*zip(*each, strict=True)) if each else NO_TOKENS)
steps = st.builds(
    StepDone, st.lists(outputs, max_size=5), floats, st.integers(0, 9), st.booleans(), st.just(FIGURES), columns
)
groups = st.builds(
    AddGroup,
    st.lists(st.integers(0, 2**31), max_size=5),
    st.just([Sibling("a/1/0", SamplingParams(stop=("x",), logit_bias={3: 1.0}), [4, 5])]),
    st.binary(max_size=4),
    st.just(2),
    st.just("t"),
    st.booleans(),
)
messages = steps | groups | st.just(FIGURES) | st.builds(AbortSequences, st.lists(st.text(max_size=3), max_size=3))


@given(st.lists(messages, max_size=4), st.lists(st.integers(1, 40), min_size=1))
def test_messages_are_equal_after_the_way(sent: list[object], cuts: list[int]) -> None:
    stream, frames, received = b"".join(map(wire.pack, sent)), wire.Frames(), []
    place = number = 0
    while place < len(stream):
        size = cuts[number % len(cuts)]
        received += [wire.unpack(body) for body in frames.feed(stream[place : place + size])]
        place, number = place + size, number + 1
    assert received == sent
