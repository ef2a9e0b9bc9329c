"""Outputs with a grammar match it where they end by themselves, with the same tokens in any batch and after any stop.

The model's weights are random, so that nothing but the grammar keeps its outputs in form; the tokenizer is the demo
model's, whose tokens are parts of words.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pagestream_engine import (
    LLM,
    CompletionOutput,
    ReasoningMarks,
    RequestFault,
    SamplingParams,
    StructuredOutputsParams,
)
from support.engines.json_schemas import schemas
from support.engines.tiny_models import make_model

pytestmark = [pytest.mark.served, pytest.mark.usefixtures("ranks")]

DEMO_TOKENIZER = Path(__file__).parents[2] / "deploy" / "demo-model" / "model" / "tokenizer.json"
VOCAB_SIZE = 1536
MAX_TOKENS = 120
SCHEMAS = schemas()
OPENING, NEWLINE, END = 1534, 205, (1532, 1533)
"""Marks of reasoning, as tokens. With `MARK_BIAS` its end comes by chance."""
MARK_BIAS = {END[0]: 8.0, END[1]: 9.0}
WIDE = f"""start: "x" ({" | ".join(f"/{place}a+/" for place in range(2100))})"""
"""Has more ways to go on after its first character than the parser keeps."""
EXPLODING = "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"
"""Is compiled in milliseconds, and needs more states than allowed after some tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_model(tmp_path_factory.mktemp("model"), "llama", vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=1)
    shutil.copy(DEMO_TOKENIZER, made)
    return made


def make_llm(folder: Path, **options: Any) -> LLM:
    settings = {"device": "cpu", "block_size": 4, "num_gpu_blocks_override": 4000, "max_num_seqs": 64, **options}
    return LLM(folder, deterministic=True, **settings)


def schema_params(schema: Any, **fields: Any) -> SamplingParams:
    given = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "seed": 7, **fields}
    constraint = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    return SamplingParams(**given, structured_outputs=constraint)


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"Down on the beach, for the {place}. time. " * (1 + place % 3)} for place in range(count)]


def generate(llm: LLM, params: Sequence[SamplingParams]) -> list[CompletionOutput]:
    answers = llm.generate(prompts(len(params)), list(params))
    llm.engine.check_invariants()
    return [output for answer in answers for output in answer.outputs]


def text_params(min_tokens: int = 0, **constraint: Any) -> SamplingParams:
    return SamplingParams(
        temperature=1.0,
        max_tokens=MAX_TOKENS,
        min_tokens=min_tokens,
        seed=3,
        structured_outputs=StructuredOutputsParams(**constraint),
    )


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[CompletionOutput]:
    """To all schemas, in one batch after the other."""
    return generate(make_llm(folder), [schema_params(schema) for schema in SCHEMAS.values()])


def test_what_ends_by_itself_validates(answers: list[CompletionOutput]) -> None:
    assert len(SCHEMAS) >= 100
    num_ended = 0
    for (name, schema), answer in zip(SCHEMAS.items(), answers, strict=True):
        assert answer.error is None, name
        if answer.finish_reason == "stop":
            num_ended += 1
            jsonschema.validate(json.loads(answer.text), schema, jsonschema.Draft202012Validator)
    assert num_ended > 0.8 * len(SCHEMAS)


SOME = slice(0, None, 5)
PREEMPTING = {"num_gpu_blocks_override": 100, "max_num_seqs": 16}
CHUNKS_AND_TWO_STEPS_IN_FLIGHT = {"max_num_batched_tokens": 17, "max_num_seqs": 5, "async_scheduling": True}
DRAFTS = {"speculative_method": "ngram", "prompt_lookup_min": 1}
LATE_MASKS = {"mask_wait_ms": 1e-4, "num_gpu_blocks_override": 100, "max_num_seqs": 16, "async_scheduling": True}
"""Most steps leave rows out, and sequences are preempted, so that outputs are replayed."""


@pytest.mark.usefixtures("most_drafts")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(PREEMPTING, id="preempting"),
        pytest.param(CHUNKS_AND_TWO_STEPS_IN_FLIGHT, id="chunks, two steps in flight"),
        pytest.param(LATE_MASKS, id="late masks"),
        pytest.param({**DRAFTS, "mask_wait_ms": 1e-4}, id="drafts, late masks"),
        pytest.param(DRAFTS, id="drafts", marks=pytest.mark.slow),
    ],
)
def test_tokens_depend_on_the_request_alone(
    folder: Path, answers: list[CompletionOutput], options: dict[str, Any]
) -> None:
    llm = make_llm(folder, **options)
    all_prompts = prompts(len(SCHEMAS))[SOME]
    found = llm.generate(all_prompts, [schema_params(schema) for schema in list(SCHEMAS.values())[SOME]])
    llm.engine.check_invariants()
    stats = llm.engine.stats()
    llm.engine.close()
    assert [answer.outputs[0].token_ids for answer in found] == [answer.token_ids for answer in answers[SOME]]
    assert (stats.num_preemptions > 0) == ("num_gpu_blocks_override" in options)
    assert (stats.num_accepted_tokens > 0) == ("speculative_method" in options)


def test_a_resumed_output_goes_on_in_its_grammar(folder: Path, answers: list[CompletionOutput]) -> None:
    engine = make_llm(folder).engine
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    expected = {}
    some = list(zip(prompts(len(SCHEMAS)), SCHEMAS.values(), answers, strict=True))[SOME]
    for place, (prompt, schema, answer) in enumerate(some):
        cut = place % len(answer.token_ids)
        engine.add_request(
            str(place),
            tokenizer.encode(prompt["prompt"]).ids,
            schema_params(schema),
            output_token_ids=answer.token_ids[:cut],
        )
        expected[str(place)] = answer.token_ids[cut:]
    found: dict[str, list[int]] = {seq_id: [] for seq_id in expected}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.token_id is not None, output.error
            found[output.seq_id].append(output.token_id)
    assert found == expected


def test_choices_have_matchers_of_their_own(folder: Path) -> None:
    schema = SCHEMAS["tree of integer"]
    [answer] = make_llm(folder).generate(prompts(1), schema_params(schema, n=4, logprobs=2))
    texts = [output.text for output in answer.outputs]
    assert len(set(texts)) > 1
    for output in answer.outputs:
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), schema)
        assert output.logprobs is not None
        chosen = [of[token].logprob for of, token in zip(output.logprobs, output.token_ids, strict=True)]
        assert all(map(math.isfinite, chosen))


@pytest.mark.parametrize(
    ("constraint", "matches"),
    [
        ({"regex": r"[a-f]{3}-\d{2}"}, r"[a-f]{3}-\d{2}"),
        ({"choice": ["yes", "no", "größer 日"]}, "yes|no|größer 日"),
        ({"grammar": 'start: A ("," A)~0..3\nA: /[xy]/'}, "[xy](,[xy]){0,3}"),
        ({"grammar": 'root ::= "(" root ")" | "ab"'}, r"\(*ab\)*"),
        ({"json": True, "disable_any_whitespace": True}, r"[\s\S]*"),
        ({"json_object": True}, r"\{[\s\S]*\}"),
    ],
)
def test_each_form_of_a_constraint(folder: Path, constraint: dict[str, Any], matches: str) -> None:
    for answer in generate(make_llm(folder), [text_params(**constraint)] * 3):
        assert answer.error is None
        assert answer.finish_reason == "length" or re.fullmatch(matches, answer.text)


@pytest.mark.parametrize(
    ("constraint", "fields", "text"),
    [
        ({"choice": ["a", "ab", "abc"]}, {"ignore_eos": True}, "abc"),
        ({"regex": "b{1,9}"}, {"min_tokens": 50}, "b" * 9),
        ({"choice": ["a"]}, {"min_tokens": 50, "ignore_eos": True}, "a"),
        ({"choice": ["one,two"]}, {"stop": [","]}, "one"),
    ],
)
def test_ends_that_are_put_off_come_where_nothing_else_is_allowed(
    folder: Path, constraint: dict[str, Any], fields: dict[str, Any], text: str
) -> None:
    params = SamplingParams(
        temperature=1.0, seed=2, max_tokens=60, structured_outputs=StructuredOutputsParams(**constraint), **fields
    )
    [answer] = generate(make_llm(folder), [params])
    assert (answer.text, answer.finish_reason, answer.error) == (text, "stop", None)


@pytest.mark.parametrize(
    ("constraint", "error"),
    [
        ({"regex": "a(b"}, "unclosed group"),
        ({"json": {"type": "nothing"}}, "Invalid type"),
        ({"json": {"not": {"type": "string"}}}, "Unimplemented"),
        ({"grammar": 'start: "a" missing'}, "unknown name"),
        ({"grammar": "start: a0\n" + "\n".join(f"a{n}: A{n} A{n}\nA{n}: A{n + 1} A{n + 1}" for n in range(60))}, "A60"),
        ({"regex": EXPLODING, "min_tokens": MAX_TOKENS}, "can't go on after"),
        ({"grammar": WIDE}, "max is 2000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_grammar_fails_alone(folder: Path, constraint: dict[str, Any], error: str) -> None:
    neighbours = [SamplingParams(temperature=1.0, seed=1, max_tokens=20), text_params(regex="[ab]{30}")]
    llm = make_llm(folder)
    alone = generate(llm, neighbours)
    *others, failed = generate(llm, [*neighbours, text_params(**constraint)])
    assert isinstance(failed.error, RequestFault)
    assert error in failed.error
    assert [other.token_ids for other in others] == [other.token_ids for other in alone]


@pytest.mark.parametrize(
    ("fields", "named", "count"),
    [
        ({"allowed_token_ids": [5], "structured_outputs": StructuredOutputsParams(choice=["yes"])}, 2, 0),
        ({"allowed_token_ids": [1], "min_tokens": 2}, 2, 0),
        ({"allowed_token_ids": [300], "bad_words_token_ids": [[300]]}, 2, 0),
        ({"allowed_token_ids": [300], "bad_words_token_ids": [[300, 300]]}, 2, 1),
        ({"allowed_token_ids": [300, 1], "bad_words_token_ids": [[300]], "min_tokens": 2}, 3, 0),
        ({"bad_words_token_ids": [[token] for token in range(VOCAB_SIZE)]}, 1, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("speculative_method", [None, "ngram"])
def test_fields_that_leave_no_token_are_the_requests_own_fault(
    folder: Path, fields: dict[str, Any], named: int, count: int, speculative_method: str | None
) -> None:
    neighbour = SamplingParams(temperature=1.0, seed=1, max_tokens=20)
    llm = make_llm(folder, speculative_method=speculative_method)
    wrong = SamplingParams(max_tokens=4, seed=1, **fields)
    other, *failed = generate(llm, [neighbour, wrong, replace(wrong, temperature=0.0), replace(wrong, n=2)])
    assert other.finish_reason == "length"
    for choice in failed:
        assert isinstance(choice.error, RequestFault)
        fields_named = choice.error.partition(":")[0].split(", ")
        assert sorted(fields_named) == sorted(
            {name.removesuffix("_token_ids") if "bad" in name else name for name in fields}
        )
        assert len(fields_named) == named
        assert len(choice.token_ids) == count


def test_a_grammar_that_exploded_in_one_output_is_whole_for_the_next(folder: Path) -> None:
    llm = make_llm(folder)
    first, second = (generate(llm, [text_params(MAX_TOKENS, regex=EXPLODING)])[0] for _ in range(2))
    assert first.error == second.error
    assert first.token_ids == second.token_ids != []


def test_the_threads_that_compile_end_with_the_engine(folder: Path) -> None:
    before = set(threading.enumerate())
    llm = make_llm(folder)
    generate(llm, [text_params(regex="[ab]{3}")])
    compiling = [each for each in threading.enumerate() if each not in before and each.name == "grammars"]
    assert len(compiling) == 2
    llm.engine.close()
    assert not any(each.is_alive() for each in compiling)


def test_a_model_without_a_tokenizer_has_no_grammars(folder: Path, tmp_path: Path) -> None:
    tokenless = shutil.copytree(folder, tmp_path / "tokenless")
    (tokenless / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"^structured_outputs: given a constraint, expected none"):
        make_llm(tokenless).engine.add_request("a", [5], text_params(regex="a"))


def reasoning_params(seed: int, **fields: Any) -> SamplingParams:
    """Parameters of reasoning, whose end is likely enough to come by chance, and a small object."""
    marks = ReasoningMarks(END, openings=((OPENING,), (NEWLINE, OPENING)) if seed % 2 else ())
    schema = {"type": "object", "properties": {"a": {"enum": ["red", "blue"]}, "b": {"type": "integer"}}}
    constraint = StructuredOutputsParams(
        json={**schema, "required": ["a", "b"], "additionalProperties": False},
        disable_any_whitespace=True,
        reasoning=marks,
    )
    given = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "seed": seed, "logit_bias": MARK_BIAS, **fields}
    return SamplingParams(**given, structured_outputs=constraint, skip_special_tokens=False)


def after_reasoning(token_ids: Sequence[int]) -> int | None:
    """Return the place behind the first end of reasoning; None where it has not ended."""
    pairs = pairwise(token_ids)
    return next((place for place, pair in enumerate(pairs, 2) if pair == END), None)


@pytest.fixture(scope="module")
def reasoned(folder: Path) -> list[CompletionOutput]:
    return generate(make_llm(folder), [reasoning_params(seed) for seed in range(24)])


def test_the_grammar_begins_behind_the_reasoning(folder: Path, reasoned: list[CompletionOutput]) -> None:
    tokenizer = make_llm(folder).engine.tokenizer
    assert tokenizer is not None
    kinds = set()
    for seed, answer in enumerate(reasoned):
        assert answer.error is None
        begins = answer.token_ids[0] in (OPENING, NEWLINE)
        start = after_reasoning(answer.token_ids) if begins or seed % 2 == 0 else 0
        kinds.add((seed % 2 == 0, begins, answer.finish_reason, start is None))
        if begins and seed % 2:
            assert OPENING in answer.token_ids[:2]
        if answer.finish_reason == "stop" and start is not None:
            found = json.loads(tokenizer.decode(answer.token_ids[start:]))
            assert set(found) == {"a", "b"}
    assert {(True, False, "stop", False), (False, True, "stop", False), (False, False, "stop", False)} <= kinds


@pytest.mark.usefixtures("most_drafts")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_gpu_blocks_override": 60, "max_num_seqs": 16}, id="preempting"),
        pytest.param(CHUNKS_AND_TWO_STEPS_IN_FLIGHT, id="chunks, two steps in flight", marks=pytest.mark.slow),
        pytest.param(DRAFTS, id="n-grams", marks=pytest.mark.slow),
        pytest.param({"speculative_method": "grammar"}, id="what the grammar forces"),
        pytest.param(
            {"speculative_method": "grammar", "pipeline_parallel_size": 2},
            id="likewise, in stages",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_tokens_around_the_end_of_reasoning_depend_on_the_request_alone(
    folder: Path, reasoned: list[CompletionOutput], options: dict[str, Any]
) -> None:
    llm = make_llm(folder, **options)
    found = generate(llm, [reasoning_params(seed) for seed in range(24)])
    stats = llm.engine.stats()
    llm.engine.close()
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in reasoned]
    assert (stats.num_preemptions > 0) == ("num_gpu_blocks_override" in options)
    assert (stats.num_accepted_tokens > 0) == ("speculative_method" in options)


def test_an_output_is_resumed_at_each_place_around_the_end_of_reasoning(
    folder: Path, reasoned: list[CompletionOutput]
) -> None:
    engine = make_llm(folder).engine
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    ended = [
        (seed, answer.token_ids)
        for seed, answer in enumerate(reasoned)
        if answer.finish_reason == "stop" and (after_reasoning(answer.token_ids) or 99) < 30
    ]
    expected = {}
    for seed, token_ids in (ended[0], next(each for each in ended if each[0] % 2 != ended[0][0] % 2)):
        for cut in range(len(token_ids)):
            prompt = tokenizer.encode(prompts(seed + 1)[seed]["prompt"]).ids
            engine.add_request(f"{seed} {cut}", prompt, reasoning_params(seed), output_token_ids=token_ids[:cut])
            expected[f"{seed} {cut}"] = token_ids[cut:]
    found: dict[str, list[int]] = {seq_id: [] for seq_id in expected}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.token_id is not None, output.error
            found[output.seq_id].append(output.token_id)
    assert found == expected


def test_ends_within_reasoning(folder: Path) -> None:
    """An end-of-sequence token ends the output there, and min_tokens and ignore_eos put it off."""
    bias = {1: 100.0}
    ended, late, endless = generate(
        make_llm(folder),
        [
            reasoning_params(0, logit_bias=bias),
            reasoning_params(0, logit_bias=bias, min_tokens=9),
            reasoning_params(0, logit_bias=bias, ignore_eos=True, max_tokens=20),
        ],
    )
    assert (len(ended.token_ids), ended.finish_reason) == (1, "stop")
    assert (len(late.token_ids), late.finish_reason) == (10, "stop")
    assert (len(endless.token_ids), endless.finish_reason) == (20, "length")


def test_the_text_of_a_special_token_is_text(folder: Path) -> None:
    """It is spelled by other tokens; that token itself would end the output, or be hidden."""
    one_name = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
        "patternProperties": {"^a$": {"maximum": 9, "minimum": 7}},
    }
    texts = ["x<|end|>y", "<|bos|>", "<tool_call>", "</tools> <|user|>"]
    constraints: list[dict[str, Any]] = [
        *({"choice": [text]} for text in texts),
        {"grammar": 'start: <tool_call> "<|end|>"'},
        {"grammar": 'start: "a" <|end|>'},
        {"json": {"enum": ["x<|end|>y"]}},
        {"json": one_name, "disable_any_whitespace": True},
    ]
    answers = generate(make_llm(folder), [text_params(**constraint) for constraint in constraints])
    assert [answer.finish_reason for answer in answers] == ["stop"] * len(answers)
    *others, last = [answer.text for answer in answers]
    assert others == [*texts, "<tool_call><|end|>", "a", '"x<|end|>y"']
    assert json.loads(last)["a"] in (7, 8, 9)


def test_no_end_before_the_grammars_is_a_success(folder: Path) -> None:
    """Rules may name a token that ends outputs, and go on behind it."""
    rules = ['start: "a" <|end|> "b"', 'start: "a" (<[1]> "b" | "c")', "start: <|end|> A\nA: /[ab]/"]
    half, others, nothing = generate(make_llm(folder), [text_params(grammar=each) for each in rules])
    assert (half.text, half.finish_reason) == ("a", "error")
    assert "ends an output" in (half.error or "")
    assert (others.text, others.finish_reason) == ("ac", "stop")
    assert nothing.finish_reason == "error"
    assert isinstance(nothing.error, RequestFault)
