"""The stored form: digests, entries, ids, keys and adapters' files. What is in Redis must stay readable."""

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream.v1.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
    FinishReason,
    LogprobEntry,
    RequestError,
    SamplingParams,
    TokenIds,
    TokenLogprobs,
    Usage,
)
from pagestream.v1.records_pb2 import Adapter, ChoiceFinish, LogEnd, LogEntry, PromptPart, RequestSpec
from pagestream_streams import AdapterRefused
from pagestream_streams.admin import check_adapter_files
from pagestream_streams.gateway import most_bytes
from pagestream_streams.protocol import (
    FINISH_REASONS,
    MAX_PARTITIONS,
    chain,
    chained,
    finish_reason_name,
    from_stream_fields,
    model_tag,
    most_output_tokens,
    new_request_id,
    output_bounds,
    ownership,
    parse_finish_reason,
    parse_request_id,
    partitions_of,
    prefixes_of,
    to_entry_values,
    to_log_entry,
)


def sha(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()[:16]  # noqa: S324


def test_chain_is_the_stored_form() -> None:
    """Lua scripts compute the same: this form can't be changed."""
    first = chain("", LogEntry(choice=2, token_id=77))
    assert first == sha(":c:2:t:77")
    second = chain(first, LogEntry(choice=2, finish=ChoiceFinish(reason=FINISH_REASON_LENGTH)))
    assert second == sha(f"{first}:c:2:f:length")
    assert chain(second, LogEntry(end=LogEnd(reason=FINISH_REASON_STOP))) == sha(f"{second}:end:stop")


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_equal_digests_mean_equal_tokens(one: list[int], other: list[int]) -> None:
    last = [chained("", [LogEntry(token_id=token) for token in each])[-1].digest for each in (one, other)]
    assert (last[0] == last[1]) == (one == other)


def test_an_entry_without_a_body_is_refused() -> None:
    with pytest.raises(ValueError, match="no body"):
        chain("", LogEntry(text="x"))


def test_a_finish_without_a_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="finish reason"):
        chain("", LogEntry(finish=ChoiceFinish()))


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.integers(0, 2**32 - 1)
REASONS = st.sampled_from(sorted(FINISH_REASONS.values()))
LOGPROBS = st.none() | st.builds(
    TokenLogprobs, entries=st.lists(st.builds(LogprobEntry, token_id=NUMBERS, rank=NUMBERS, text=TEXTS), max_size=3)
)
TOKENS = st.builds(LogEntry, choice=NUMBERS, digest=TEXTS, text=TEXTS, token_id=NUMBERS, logprobs=LOGPROBS)
FINISHES = st.builds(ChoiceFinish, reason=REASONS, stop_reason=TEXTS)
ERRORS = st.none() | st.builds(RequestError, code=st.sampled_from(["engine_error", "deadline"]), message=TEXTS)
USAGES = st.builds(Usage, prompt_tokens=NUMBERS, completion_tokens=NUMBERS, cached_tokens=NUMBERS)
ENDS = st.builds(LogEnd, reason=REASONS, usage=USAGES, error=ERRORS, ended_at=NUMBERS)
PARTS = st.builds(
    PromptPart,
    end=NUMBERS,
    embedding=st.binary(max_size=8),
    logprobs=st.lists(LOGPROBS.filter(lambda each: each is not None), max_size=2),
)
ENTRIES = (
    TOKENS
    | st.builds(LogEntry, choice=NUMBERS, digest=TEXTS, prompt_part=PARTS)
    | st.builds(LogEntry, choice=NUMBERS, digest=TEXTS, text=TEXTS, finish=FINISHES)
    | st.builds(LogEntry, digest=TEXTS, end=ENDS)
)


def test_token_has_six_values_in_the_script_s_order() -> None:
    entry = LogEntry(choice=1, token_id=5, text="é", digest="d")
    assert to_entry_values(entry) == ("t", "1", "5", "é", "d", "")


def test_fields_give_the_entry() -> None:
    fields = {b"c": b"1", b"t": b"5", b"x": "é".encode(), b"d": b"d"}
    assert from_stream_fields(fields) == LogEntry(choice=1, token_id=5, text="é", digest="d")


@given(ENTRIES)
def test_values_give_the_entry(entry: LogEntry) -> None:
    assert to_log_entry(to_entry_values(entry)) == entry


def test_an_entry_without_a_body_is_refused_entries() -> None:
    with pytest.raises(ValueError, match="no body"):
        to_entry_values(LogEntry(text="x"))


def test_a_finish_without_a_reason_is_refused_entries() -> None:
    with pytest.raises(ValueError, match="finish reason"):
        to_entry_values(LogEntry(finish=ChoiceFinish(reason=FinishReason.FINISH_REASON_UNSPECIFIED)))


# -- Names of finish reasons, derived from the proto enum.


@pytest.mark.parametrize("reason", [value for value in FinishReason.values() if value])
def test_every_reason_of_the_proto_enum_has_a_name_that_is_read_back(reason: FinishReason) -> None:
    name = finish_reason_name(reason)
    assert f"FINISH_REASON_{name.upper()}" == FinishReason.Name(reason)
    assert parse_finish_reason(name) == reason


def test_the_stored_names_stay_what_they_are() -> None:
    """They are in Redis, in digests, in Lua scripts, and in the HTTP API."""
    assert list(FINISH_REASONS) == ["stop", "length", "cancelled", "deadline", "error"]


def test_an_unfinished_request_has_no_name_and_is_read_from_the_empty_one() -> None:
    assert parse_finish_reason("") == FINISH_REASON_UNSPECIFIED
    with pytest.raises(ValueError, match="expected one of stop, length"):
        finish_reason_name(FINISH_REASON_UNSPECIFIED)
    with pytest.raises(ValueError, match="unknown finish reason 'ended'"):
        parse_finish_reason("ended")


@given(model=st.text(max_size=50), partition=st.integers(0, MAX_PARTITIONS - 1), tenants=st.sets(st.text(), min_size=2))
def test_an_id_finds_its_parts(model: str, partition: int, tenants: set[str]) -> None:
    tenant, *others = tenants
    parts = parse_request_id(new_request_id(model, partition, tenant))
    assert parts is not None
    assert (parts.model_tag, parts.partition) == (model_tag(model), partition)
    assert parts.is_of(tenant)
    assert not any(parts.is_of(other) for other in others)


def test_ids_differ_and_do_not_show_which_are_one_tenants() -> None:
    made = [new_request_id("m", 0, "t") for _ in range(100)]
    assert len(set(made)) == 100
    assert len({each[-8:] for each in made}) == 100


@pytest.mark.parametrize("text", ["", "a", "0" * 46, "ABCDEF01-0000-" + "0" * 32, "00000000-0000-" + "0" * 32 + "\n"])
def test_what_is_no_id_has_no_parts(text: str) -> None:
    assert parse_request_id(text) is None


@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
    parts = parse_request_id(text)
    assert parts is None or str(parts) == text


FIRST = 4
PROMPTS = st.lists(st.integers(0, 3), max_size=400)


@given(PROMPTS, PROMPTS, PROMPTS)
def test_prompts_share_exactly_the_digests_of_what_they_begin_with_alike(
    head: list[int], one: list[int], other: list[int]
) -> None:
    first, second = [*head, *one], [*head, *other]
    pairs = enumerate(zip(first, second, strict=False))
    alike = next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))
    for mine, yours in zip(prefixes_of(first, FIRST), prefixes_of(second, FIRST), strict=False):
        assert mine.num_tokens == yours.num_tokens
        assert (mine.digest == yours.digest) == (mine.num_tokens <= alike)


@given(st.integers(0, 40_000))
def test_beginnings_are_few_and_no_step_is_longer_than_an_eighth(length: int) -> None:
    ends = [0, *(each.num_tokens for each in prefixes_of([1] * length, 64))]
    assert len(ends) <= 90
    assert all(end - start <= max(64, start // 8) for start, end in pairwise(ends))
    assert min(length, 32_768) - ends[-1] < max(64, ends[-1] / 8 + 1)


def test_salts_are_apart() -> None:
    assert prefixes_of(range(64), 64, b"a") != prefixes_of(range(64), 64, b"b") != prefixes_of(range(64), 64)


ENGINES = st.frozensets(st.text(min_size=1, max_size=8), min_size=1, max_size=8)


@given(ENGINES, st.integers(1, 64))
def test_engines_own_all_partitions_equally_many_or_one_more(engines: frozenset[str], partitions: int) -> None:
    owned = ownership(partitions, engines)
    assert sorted(number for numbers in owned.values() for number in numbers) == list(range(partitions))
    assert max(map(len, owned.values())) - min(map(len, owned.values())) <= 1
    assert {each: partitions_of(each, partitions, engines) for each in engines} == owned


def test_an_engine_that_comes_takes_its_share_and_little_else_moves() -> None:
    """Counted over many fleets of 8: 28 of 256 partitions have to move, and as many again may."""
    moved = []
    for fleet in range(20):
        engines = frozenset(f"{fleet}-{number}" for number in range(8))
        before, after = (ownership(256, each) for each in (engines, engines | {"new"}))
        owner = {number: engine for engine, numbers in before.items() for number in numbers}
        moved.append(sum(owner[number] != engine for engine, numbers in after.items() for number in numbers))
    assert min(moved) >= 28
    assert sum(moved) / len(moved) < 56


def test_without_engines_nobody_owns() -> None:
    assert ownership(4, frozenset()) == {}


# -- What records say of a request's size.


@pytest.mark.parametrize(
    ("total", "bounds", "most"), [(0, [50, 50, 50], 300), (100, [50, 10, 50], 220), (140, [50, 50, 50], 300)]
)
def test_a_prompt_and_its_output_may_be_bounded_together(total: int, bounds: list[int], most: int) -> None:
    prompts = [TokenIds(ids=[1] * length) for length in (1, 90, 40)]
    spec = RequestSpec(prompts=prompts, sampling=SamplingParams(n=2, max_tokens=50), max_total_tokens=total)
    assert output_bounds(spec) == bounds
    assert most_output_tokens(spec) == most


def test_prompts_alone_count_one_token_each() -> None:
    spec = RequestSpec(prompts=[TokenIds(ids=[1])] * 3, sampling=SamplingParams(max_tokens=0))
    assert (output_bounds(spec), most_output_tokens(spec)) == ([0, 0, 0], 3)


# -- Adapters' files that are refused when they are loaded, before a request meets them.


A, B = "base_model.model.layers.0.q_proj.lora_A.weight", "base_model.model.layers.0.q_proj.lora_B.weight"


def tensor(shape: list[int], begin: int, dtype: str = "F32", *, num_bytes: int | None = None) -> dict[str, Any]:
    size = 4 * shape[0] * shape[1] if num_bytes is None else num_bytes
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size]}


SOUND = {"__metadata__": {"format": "pt"}, A: tensor([2, 3], 0), B: tensor([5, 2], 24)}


def write(folder: Path, header: Any = SOUND, *, config: Any = "", num_bytes: int = 64) -> Path:
    (folder / "adapter_config.json").write_text(config or json.dumps({"peft_type": "LORA", "r": 2}))
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))
    return folder


def test_sound_files_pass(tmp_path: Path) -> None:
    check_adapter_files(write(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bytes": 63}, "lora_B.weight: given .* may be cut off"),
        ({"header": {A: SOUND[A]}}, "given ranks {'A': 2}, expected one of lora_A and lora_B"),
        ({"header": {A: SOUND[A], B: tensor([5, 1], 24)}}, "given ranks {'A': 2, 'B': 1}"),
        ({"header": {A: SOUND[A], "lm_head.weight": tensor([1, 1], 24)}}, "neither lora_A nor lora_B"),
        ({"header": {A: tensor([2, 3], 0, "I64")}}, "a matrix of F64"),
        ({"header": {A: tensor([2, 3], 0, num_bytes=23)}}, "bytes lie within"),
        ({"header": {A: [1]}}, "bytes lie within"),
        ({"header": {A: tensor([-2, -3], 0)}}, "bytes lie within"),
        ({"header": {}}, "given no tensors"),
        ({"header": []}, "given a list, expected a JSON object"),
        ({"config": "["}, "adapter_config.json: unreadable"),
        ({"config": "[" * 100_000}, "adapter_config.json: unreadable"),
        ({"config": '{"peft_type": "IA3"}'}, "peft_type: given 'IA3', expected LORA"),
        ({"config": " " * (1 << 20) + "{}"}, "given more than 1048576 bytes"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterRefused, match=message):
        check_adapter_files(write(tmp_path, **changes))


def test_files_that_are_missing_or_no_safetensors(tmp_path: Path) -> None:
    with pytest.raises(AdapterRefused, match=r"adapter_config.json: No such file .* or its revision beside its path"):
        check_adapter_files(tmp_path)
    (write(tmp_path) / "adapter_model.safetensors").write_bytes(b"PK\3\4" * 4)
    with pytest.raises(AdapterRefused, match=r"given a header of .* in a file of 16, expected a safetensors file"):
        check_adapter_files(tmp_path)


# -- What a request may take of its tenant's room for logs.


def test_a_grammar_and_an_adapter_are_counted() -> None:
    plain, full = RequestSpec(), RequestSpec(adapter=Adapter(name="a", path="/" * 4000))
    full.sampling.structured_outputs.json = "x" * 60_000
    assert most_bytes(full) - most_bytes(plain) >= 64_000


def test_what_a_record_repeats_of_its_body_counts() -> None:
    plain, full = RequestSpec(), RequestSpec()
    full.answer.response.members_zlib = b"m" * 100_000
    full.answer.response.input_zlib = b"i" * 50_000
    full.answer.echo_texts.append("e" * 25_000)
    assert most_bytes(full) - most_bytes(plain) >= 175_000
