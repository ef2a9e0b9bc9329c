import gc
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import numpy as np
import pytest
from pagestream_engine import (
    Choice,
    ConfigError,
    Engine,
    EngineConfig,
    InvalidRequest,
    InvariantViolation,
    ModelNotFound,
    PromptTooLong,
    SamplingParams,
    Sequence,
    SequenceOutput,
)
from pagestream_engine.intake import bad_words_token_ids
from pagestream_engine.output import IncrementalDetokenizer
from pagestream_engine.plan import PendingResult, StepLogprobs, StepPlan, StepResult
from pagestream_engine.request import Request
from support.engines.arithmetic_model import (
    EOS,
    ArithmeticFacts,
    ArithmeticRunner,
    SeededRunner,
    as_result,
    byte_level_tokenizer,
    make_folder,
    searched,
    undisturbed,
)
from support.engines.speculating_model import SpeculatingRunner
from tokenizers import Tokenizer, decoders, models

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEARCH = SamplingParams(
    use_beam_search=True, beam_width=3, max_tokens=12, ignore_eos=True, stop_token_ids=list(range(20, 36))
)
TEXT_FACTS = ArithmeticFacts(vocab_size=257)


def make_engine(tmp_path: Path, *, facts: ArithmeticFacts | None = None, text: bool = False, **options: Any) -> Engine:
    facts = facts or (TEXT_FACTS if text else ArithmeticFacts())
    folder = make_folder(tmp_path / "model", byte_level_tokenizer() if text else None)
    config = EngineConfig.from_options({"block_size": 4, "num_gpu_blocks_override": 32, **options})
    return Engine(folder, config, make_runner=lambda _, config: ArithmeticRunner(config, facts))


def run(engine: Engine, limit: int = 2000) -> dict[str, list[SequenceOutput]]:
    outputs: dict[str, list[SequenceOutput]] = {}
    for _ in range(limit):
        if not engine.has_unfinished_requests():
            return outputs
        for output in engine.step():
            outputs.setdefault(output.seq_id, []).append(output)
        engine.check_invariants()
    raise AssertionError("the engine does not come to an end")


def tokens(outputs: list[SequenceOutput]) -> list[int]:
    return [output.token_id for output in outputs if output.token_id is not None]


def text(outputs: list[SequenceOutput]) -> str:
    return "".join(output.text for output in outputs)


def expected(prompt: list[int], params: SamplingParams = GREEDY, **facts: Any) -> list[int]:
    return undisturbed(prompt, params, ArithmeticFacts(**facts), 128)


def test_an_idle_engine_has_nothing_to_do(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    assert not engine.has_unfinished_requests()
    assert engine.step() == []


def test_one_request(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.add_request("a", [1, 2, 3], GREEDY)
    outputs = run(engine)["a"]
    assert tokens(outputs) == expected([1, 2, 3])
    assert [output.finish_reason for output in outputs] == [None] * 11 + ["length"]
    assert engine.stats().num_free_blocks == 32


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [3, 8, 64])
def test_a_batch_equals_each_alone(tmp_path: Path, caching: bool, budget: int) -> None:
    engine = make_engine(tmp_path, max_num_batched_tokens=budget, max_num_seqs=3, enable_prefix_caching=caching)
    prompts = {str(length): list(range(1, length + 1)) for length in (1, 4, 5, 13, 20, 31)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, GREEDY)
    outputs = run(engine)
    assert {name: tokens(outputs[name]) for name in prompts} == {name: expected(p) for name, p in prompts.items()}


def test_preemption_changes_no_token(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, num_gpu_blocks_override=9)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = {str(first): [first, *range(7)] for first in range(5)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    outputs = run(engine)
    assert engine.stats().num_preemptions > 0
    assert {name: tokens(outputs[name]) for name in prompts} == {
        name: expected(p, params) for name, p in prompts.items()
    }


def test_a_lowered_limit_stops_nothing_and_admits_nothing_more(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, max_num_seqs=3)
    for name in "abc":
        engine.add_request(name, [1, 2, 3], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    engine.step()
    engine.set_limits(1)
    engine.add_request("d", [4, 5], GREEDY)
    engine.add_request("e", [5, 6], GREEDY)
    engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (3, 2)
    while engine.stats().num_running == 3:
        engine.step()
    running = {engine.stats().num_running for _ in iter(engine.step, [])}
    assert running == {0, 1}
    engine.set_limits(99)
    for name in "fghi":
        engine.add_request(name, [1, 2, 3], GREEDY)
    engine.step()
    assert engine.stats().num_running == 3, "the configured limit holds again"


def test_a_search_wider_than_a_lowered_limit_runs_alone(tmp_path: Path) -> None:
    engine, free = make_engine(tmp_path / "limited"), make_engine(tmp_path / "free")
    engine.set_limits(1)
    for each in (engine, free):
        each.add_request("before", [4, 5], GREEDY)
        each.add_request("search", [1, 2, 3], SEARCH)
        each.add_request("after", [5, 6], GREEDY)
    assert run(engine) == run(free)


def test_a_displaced_search_needs_its_prompt_once(tmp_path: Path) -> None:
    """Of 16 beams over 1,000 tokens: what would run again fits, so memory is not short."""
    engine = make_engine(tmp_path, num_gpu_blocks_override=400, max_num_seqs=16, scheduling_policy="priority")
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, use_beam_search=True, n=16)
    beams = [Choice(f"search/{place}", params.for_child(1, place), (), place) for place in range(16)]
    engine.add(Request([7] * 1000, beams, priority=2))
    for _ in range(5):
        engine.step()
    engine.add_request("urgent", [1, 2, 3], GREEDY)
    for _ in range(3):
        engine.step()
    stats = engine.stats()
    assert stats.num_displaced == 1
    assert 0.5 < stats.kv_demand < 1.0


@pytest.mark.parametrize("use_beam_search", [False, True])
def test_the_shortest_goes_first_and_a_search_is_as_long_as_it_may_get(tmp_path: Path, use_beam_search: bool) -> None:
    engine = make_engine(
        tmp_path, max_num_seqs=1, num_gpu_blocks_override=64, max_model_len=200, scheduling_policy="shortest_first"
    )
    engine.add_request("first", [1], replace(GREEDY, max_tokens=100))
    engine.step()
    params = replace(GREEDY, max_tokens=300, use_beam_search=use_beam_search)
    engine.add(Request([1, 2], [Choice("long", params.for_child(1, 0))]))
    engine.add_request("short", [1, 2], replace(GREEDY, max_tokens=4))
    assert list(run(engine)) == ["first", "short", "long"]


def test_a_search_with_many_tokens_that_end_it_is_refused(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, text=True)
    params = replace(GREEDY, use_beam_search=True, stop_token_ids=list(range(3, 70)))
    with pytest.raises(InvalidRequest, match="stop_token_ids: given 67 tokens that end an output, expected at most 64"):
        engine.add(Request([1, 2], [Choice("search", params.for_child(1, 0))]))


def test_a_repeated_prompt_is_found_in_the_cache(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    prompt = list(range(1, 18))
    engine.add_request("a", prompt, GREEDY)
    run(engine)
    engine.add_request("b", prompt, GREEDY)
    outputs = run(engine)["b"]
    assert tokens(outputs) == expected(prompt)
    assert {output.num_cached_tokens for output in outputs} == {16}
    stats = engine.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (34, 16)
    assert stats.num_prompt_tokens == 18


def test_the_models_end_token_ends_it(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, facts=ArithmeticFacts(vocab_size=5))
    params = SamplingParams(max_tokens=100)
    engine.add_request("a", [1, 2, 3], params)
    outputs = run(engine)["a"]
    assert tokens(outputs) == expected([1, 2, 3], params, vocab_size=5)
    assert tokens(outputs)[-1] == EOS
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", None)


def test_max_model_len_ends_it_with_length(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, max_model_len=10)
    engine.add_request("a", [1] * 9, SamplingParams(max_tokens=None, ignore_eos=True))
    engine.add_request("b", [1] * 4, SamplingParams(max_tokens=50, ignore_eos=True))
    outputs = run(engine)
    assert [len(outputs[name]) for name in "ab"] == [1, 6]
    assert {outputs[name][-1].finish_reason for name in "ab"} == {"length"}


def test_the_pool_limits_the_context_where_nothing_else_does(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, num_gpu_blocks_override=5)
    assert engine.max_model_len == 20
    engine.add_request("a", [1] * 3, SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(run(engine)["a"]) == 17


@pytest.mark.parametrize(
    ("asked", "match"), [(5000, "the model's positions end there"), (2000, "what 32 KV blocks hold")]
)
def test_a_context_that_can_never_fit_is_refused(tmp_path: Path, asked: int, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_engine(tmp_path, max_model_len=asked)


def test_an_unknown_policy_is_refused_before_the_model_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="scheduling_policy: given 'lottery'"):
        Engine(tmp_path / "nowhere", EngineConfig.from_options({"scheduling_policy": "lottery"}))


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"given .*nowhere.*, expected a folder with config\.json"):
        Engine(tmp_path / "nowhere", EngineConfig())


@pytest.mark.parametrize(
    ("prompt", "outputs", "params", "match"),
    [
        ([], (), GREEDY, "prompt: given no tokens"),
        ([1] * 128, (), GREEDY, "prompt: given 128 tokens, expected at most 127"),
        ([1, 47], (), GREEDY, "prompt_token_ids: given token 47, expected 0 to 46"),
        ([1, -1], (), GREEDY, "prompt_token_ids: given token -1"),
        ([1, "a"], (), GREEDY, r"prompt_token_ids: given \(1, .*, expected whole numbers"),
        ([1, 2.0], (), GREEDY, r"prompt_token_ids: given \(1, .*, expected whole numbers"),
        ([1], [99], GREEDY, "output_token_ids: given token 99"),
        ([1], [5] * 13, GREEDY, "output_token_ids: given 13 tokens, expected at most 12"),
        ([1], (), SamplingParams(n=2), "n: given 2, expected 1"),
        ([1], (), SamplingParams(stop="x"), "stop: given strings, expected none without a tokenizer"),
        ([2], (), GREEDY, None),
    ],
)
def test_a_bad_request_is_refused_and_others_go_on(
    tmp_path: Path, prompt: list[Any], outputs: list[int], params: SamplingParams, match: str | None
) -> None:
    engine = make_engine(tmp_path)
    engine.add_request("good", [1, 2, 3], GREEDY)
    engine.step()
    if match is None:
        engine.add_request("bad", prompt, params, output_token_ids=outputs)
    else:
        with pytest.raises(InvalidRequest, match=match):
            engine.add_request("bad", prompt, params, output_token_ids=outputs)
    engine.check_invariants()
    outputs_by_name = run(engine)
    assert ("bad" in outputs_by_name) == (match is None)
    assert tokens(outputs_by_name["good"]) == expected([1, 2, 3])[1:]


def test_a_prompt_too_long_has_its_own_type(tmp_path: Path) -> None:
    with pytest.raises(PromptTooLong) as caught:
        make_engine(tmp_path).add_request("a", [1] * 500, GREEDY)
    assert (caught.value.num_prompt_tokens, caught.value.max_model_len) == (500, 128)


def test_an_id_is_unique_while_it_runs(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.add_request("a", [1], GREEDY)
    with pytest.raises(InvalidRequest, match="seq_id: given 'a', which is running"):
        engine.add_request("a", [2], GREEDY)
    run(engine)
    engine.add_request("a", [2], GREEDY)
    assert tokens(run(engine)["a"]) == expected([2])


def test_ids_that_are_added_while_a_group_is_are_found(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    adding = engine.adding(Request([1], [Choice("a", GREEDY)]))
    next(adding)
    engine.add_request("a", [2], GREEDY)
    with pytest.raises(InvalidRequest, match="seq_id: given 'a', which is running"):
        list(adding)
    assert tokens(run(engine)["a"]) == expected([2])


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_aborted_request_is_gone(tmp_path: Path, num_steps: int) -> None:
    engine = make_engine(tmp_path, max_num_batched_tokens=6, max_num_seqs=2)
    for name, prompt in {"a": [1] * 10, "b": [2] * 10, "c": [3] * 10}.items():
        engine.add_request(name, prompt, GREEDY)
    for _ in range(num_steps):
        engine.step()
    engine.abort_request("a")
    engine.abort_request("c")
    engine.abort_request("never seen")
    engine.check_invariants()
    outputs = run(engine)
    assert set(outputs) == {"b"}
    assert tokens(outputs["b"]) == expected([2] * 10)
    assert engine.stats().num_free_blocks == 32


@pytest.mark.parametrize("cut", [0, 1, 6, 11, 12])
def test_a_resumed_request_goes_on_exactly(tmp_path: Path, cut: int) -> None:
    engine = make_engine(tmp_path, text=True)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop="zz")
    engine.add_request("a", [5, 6], params)
    undisturbed_run = run(engine)["a"]
    done = tokens(undisturbed_run)[:cut]
    engine.add_request("a", [5, 6], params, output_token_ids=done)
    resumed = run(engine)["a"]
    if cut < 12:
        assert [(o.token_id, o.text, o.finish_reason) for o in resumed] == [
            (o.token_id, o.text, o.finish_reason) for o in undisturbed_run[cut:]
        ]
    else:
        (end,) = resumed
        assert (end.token_id, end.text, end.finish_reason) == (None, undisturbed_run[-1].text, "length")


def test_a_resumed_request_that_had_ended_can_be_aborted(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.add_request("a", [1], SamplingParams(max_tokens=1), output_token_ids=[5])
    assert engine.has_unfinished_requests()
    engine.abort_request("a")
    assert not engine.has_unfinished_requests()


def test_text_streams_and_a_stop_string_ends_it(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, text=True)
    engine.add_request("all", [5, 6], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    outputs = run(engine)["all"]
    assert engine.tokenizer is not None
    whole = engine.tokenizer.decode(tokens(outputs), skip_special_tokens=True)
    assert text(outputs) == whole
    stop = whole[8:11]
    engine.add_request("cut", [5, 6], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=stop))
    cut = run(engine)["cut"]
    assert text(cut) == whole[: whole.index(stop)]
    assert (cut[-1].finish_reason, cut[-1].stop_reason) == ("stop", stop)
    assert engine.stats().num_free_blocks == 32


def panicking_tokenizer(bad: int) -> Tokenizer:
    """Return a tokenizer whose decoder panics at one token: it strips two of its characters, and finds one."""
    tokenizer = Tokenizer(models.WordLevel({f"t{index}" if index != bad else "x": index for index in range(47)}, "t0"))
    tokenizer.decoder = decoders.Strip("x", 0, 2)
    return tokenizer


LIKELIEST = 1


class LogprobRunner(ArithmeticRunner):
    """Reports the chosen token and one that nobody gets as likeliest, for those that ask."""

    def compute(self, plan: StepPlan) -> StepResult:
        result = super().compute(plan)
        asked = np.array([i for i, row in enumerate(plan.sampled_rows.tolist()) if self.rows[row].params.logprobs])
        token_ids = np.array([[result.token_ids[place, 0], LIKELIEST] for place in asked], np.int32).reshape(-1, 2)
        ones = np.ones(len(asked), np.int32)
        return replace(result, logprobs=StepLogprobs(asked, ones, token_ids, -ones[:, None] - [0.0, 1.0], ones))


def test_a_panic_of_the_tokenizer_fails_its_request_alone(tmp_path: Path) -> None:
    logged = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    bad = next(token_id for token_id in expected([7, 8]) if token_id not in {*expected([1, 2, 3]), *expected([5])})
    config = EngineConfig.from_options({"block_size": 4, "num_gpu_blocks_override": 32})
    engine = Engine(
        make_folder(tmp_path / "text", panicking_tokenizer(bad)),
        config,
        make_runner=lambda _, config: LogprobRunner(config, ArithmeticFacts()),
    )
    engine.add_request("good", [1, 2, 3], GREEDY)
    engine.add_request("bad", [7, 8], GREEDY)
    with pytest.raises(InvalidRequest, match="the tokenizer can't make text of"):
        engine.add_request("refused", [1, bad], GREEDY)
    outputs = run(engine)
    assert tokens(outputs["good"]) == expected([1, 2, 3])
    assert (outputs["bad"][-1].token_id, outputs["bad"][-1].finish_reason) == (bad, "error")
    assert "PanicException: index out of bounds" in str(outputs["bad"][-1].error)

    engine = Engine(
        make_folder(tmp_path / "logprobs", panicking_tokenizer(LIKELIEST)),
        config,
        make_runner=lambda _, config: LogprobRunner(config, ArithmeticFacts()),
    )
    engine.add_request("bad", [5], logged)
    engine.add_request("good", [1, 2, 3], GREEDY)
    outputs = run(engine)
    assert tokens(outputs["good"]) == expected([1, 2, 3])
    (end,) = outputs["bad"]
    assert (end.token_id, end.finish_reason) == (expected([5])[0], "error")
    assert "PanicException: index out of bounds" in str(end.error)


def test_an_interrupt_is_no_fault_of_the_request_that_it_meets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tmp_path, text=True)
    engine.add_request("a", [1], GREEDY)

    def interrupt(_: IncrementalDetokenizer, token_id: int) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(IncrementalDetokenizer, "push", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(engine)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        {"max_tokens": 1},
        {"max_tokens": 7},
        {"max_tokens": 40, "stop": ["zz", "\x08", "u"]},
        {"max_tokens": 40, "stop": "u", "include_stop_str_in_output": True, "min_tokens": 9},
        {"max_tokens": 40, "stop_token_ids": list(range(1, 257, 9))},
    ],
)
def test_several_tokens_of_a_step_end_where_they_end_one_by_one(
    tmp_path: Path, ahead: bool, given: dict[str, Any]
) -> None:
    def outputs(num_drafts: int) -> dict[str, list[SequenceOutput]]:
        def make_runner(_: Path, config: EngineConfig) -> ArithmeticRunner:
            if not num_drafts:
                return ArithmeticRunner(config, TEXT_FACTS)
            return SpeculatingRunner(config, TEXT_FACTS, num_drafts, Random(num_drafts))

        config = EngineConfig.from_options(
            {"block_size": 4, "num_gpu_blocks_override": 64, "async_scheduling": ahead and bool(num_drafts)}
        )
        engine = Engine(make_folder(tmp_path / "model", byte_level_tokenizer()), config, make_runner=make_runner)
        for first in range(6):
            engine.add_request(str(first), [first, 50], SamplingParams(temperature=0, ignore_eos=True, **given))
        done = run(engine)
        assert engine.stats().num_free_blocks == 64
        return done

    assert outputs(1) == outputs(2) == outputs(0)


def test_more_tokens_than_a_step_has_computed_are_a_bug(tmp_path: Path) -> None:
    class Runner(ArithmeticRunner):
        def compute(self, plan: StepPlan) -> StepResult:
            one = super().compute(plan)
            return StepResult(plan.step_id, one.token_ids.repeat(2, axis=1), 2 * one.counts)

    config = EngineConfig.from_options({"num_gpu_blocks_override": 9})
    engine = Engine(make_folder(tmp_path), config, make_runner=lambda _, config: Runner(config, ArithmeticFacts()))
    engine.add_request("a", [1], GREEDY)
    with pytest.raises(InvariantViolation, match="sample 0 2 tokens, expected 1 to 1"):
        engine.step()


def test_a_request_whose_text_can_not_be_replayed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: IncrementalDetokenizer, token_id: int) -> str:
        raise RuntimeError(f"no piece for {token_id}")

    engine = make_engine(tmp_path, text=True)
    with monkeypatch.context() as patched:
        patched.setattr(IncrementalDetokenizer, "push", fail)
        with pytest.raises(InvalidRequest, match="expected ids of its vocabulary: no piece for 7"):
            engine.add_request("a", [5, 6], GREEDY, output_token_ids=[7])
    engine.check_invariants()
    assert not engine.has_unfinished_requests()


def siblings(n: int, params: SamplingParams, outputs: dict[int, list[int]] | None = None) -> list[Choice]:
    return [Choice(str(child), params.for_child(7, child), (outputs or {}).get(child, [])) for child in range(n)]


def test_the_choices_of_a_prompt_are_one_group(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    prompt = list(range(1, 11))
    engine.add(Request(prompt, siblings(4, GREEDY)))
    engine.step()
    assert engine.stats().num_prompt_tokens == 10
    outputs = run(engine)
    assert {name: tokens(outputs[name]) for name in "0123"} == dict.fromkeys("0123", expected(prompt)[1:])
    assert engine.stats().num_prompt_tokens == 10


@pytest.mark.parametrize("cut", [0, 1, 6, 11, 12])
def test_a_resumed_group_goes_on_exactly(tmp_path: Path, cut: int) -> None:
    engine = make_engine(tmp_path)
    whole = expected([5, 6])
    done = {0: whole[:cut], 1: whole[: cut // 2], 2: whole[: max(0, cut - 1)]}
    engine.add(Request([5, 6], siblings(3, GREEDY, done)))
    outputs = run(engine)
    for child, before in done.items():
        assert before + tokens(outputs[str(child)]) == whole
        assert outputs[str(child)][-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ([], "choices: given sequence ids"),
        ([Choice("a", GREEDY), Choice("a", GREEDY)], "choices: given sequence ids"),
        ([Choice("a", GREEDY), Choice("good", GREEDY)], "seq_id: given 'good', which is running"),
        ([Choice("a", GREEDY), Choice("b", GREEDY, [99])], "output_token_ids: given token 99"),
        ([Choice("a", GREEDY), Choice("b", SamplingParams(n=2))], "n: given 2"),
        ([Choice("a", SamplingParams(best_of=2))], "best_of .2., and a seed"),
        ([Choice("a", SamplingParams(best_of=2, seed=1), index=2)], "choices: given choice 2, expected one of best"),
        ([Choice("a", SEARCH), Choice("b", GREEDY)], "choices: given different parameters"),
        ([Choice("a", SEARCH, index=3)], "choices: given choice 3, expected one of 3 beams"),
        ([Choice("a", replace(SEARCH, beam_width=32))], "beam_width: given 32 and 16 tokens that end an output, exp"),
        ([Choice("a", replace(SEARCH, max_tokens=90))], "beam_width: given 3 beams of up to 9. tokens, which take"),
        ([Choice("a", SamplingParams(logprobs=21))], "logprobs: given 21, expected at most 20"),
        ([Choice("a", SamplingParams(logit_bias={47: 1}))], "logit_bias: given token 47, expected 0 to 46"),
        ([Choice("a", SamplingParams(allowed_token_ids=[3, 47]))], "allowed_token_ids: given token 47, expected 0 to"),
        ([Choice("a", SamplingParams(bad_words_token_ids=[[1], [47]]))], "bad_words_token_ids: given token 47, exp"),
        ([Choice("a", SamplingParams(bad_words=["a"]))], "bad_words: given words, expected none without a tokenizer"),
    ],
)
def test_a_group_is_added_whole_or_not_at_all(tmp_path: Path, bad: list[Choice], match: str) -> None:
    engine = make_engine(tmp_path)
    engine.add_request("good", [1, 2, 3], GREEDY)
    with pytest.raises(InvalidRequest, match=match):
        engine.add(Request([5], bad))
    engine.check_invariants()
    assert set(run(engine)) == {"good"}


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["x" * 512], None),
        (["x" * 600], "bad_words: .*a word of 600 tokens"),
        (["x" * 500, *map(str, range(999))], "bad_words: .*1000 words of up to 500 tokens"),
    ],
)
def test_the_limits_of_words_are_named_as_they_were_given(tmp_path: Path, words: list[str], match: str | None) -> None:
    engine = make_engine(tmp_path, text=True)
    with pytest.raises(InvalidRequest, match=match) if match else nullcontext():
        engine.add(Request([5], [Choice("a", SamplingParams(bad_words=words))]))


class FailingRunner(ArithmeticRunner):
    """Fails at chosen steps before it has computed anything, or gives too few tokens."""

    fail_at: tuple[int, ...] = ()
    short = False

    def execute(self, plan: StepPlan) -> PendingResult:
        if self.num_steps in self.fail_at:
            self.num_steps += 1
            raise MemoryError("no room for activations")
        given = super().execute(plan)
        return (lambda: as_result(plan, [])) if self.short else given


def test_a_step_that_failed_can_be_run_again(tmp_path: Path) -> None:
    class Runner(FailingRunner):
        fail_at = (0, 1, 4)

    folder = make_folder(tmp_path)
    config = EngineConfig.from_options({"block_size": 4, "num_gpu_blocks_override": 9, "max_num_batched_tokens": 7})
    engine = Engine(folder, config, make_runner=lambda _, config: Runner(config, ArithmeticFacts()))
    engine.add_request("done", [1], SamplingParams(max_tokens=1), output_token_ids=[5])
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.add_request("b", [2] * 9, GREEDY)
    collected: dict[str, list[int]] = {"a": [], "b": [], "done": []}
    failures = 0
    while engine.has_unfinished_requests():
        try:
            for output in engine.step():
                collected[output.seq_id] += tokens([output]) or [-1]
        except MemoryError:
            failures += 1
        engine.check_invariants()
    assert failures == 3
    assert (engine.stats().num_preemptions, engine.num_requeues) == (0, 6)
    assert collected == {"a": expected([1, 2, 3]), "b": expected([2] * 9), "done": [-1]}


@pytest.mark.parametrize("ends_by", ["abort", "stop token"])
def test_the_failure_of_a_step_that_nothing_waits_for_is_nobodys(tmp_path: Path, ends_by: str) -> None:
    class Runner(FailingRunner):
        fail_at = (2,)

    config = EngineConfig.from_options({"num_gpu_blocks_override": 9, "async_scheduling": True})
    engine = Engine(make_folder(tmp_path), config, make_runner=lambda _, config: Runner(config, ArithmeticFacts()))
    stop = replace(GREEDY, stop_token_ids=(expected([1])[1],))
    engine.add_request("a", [1], stop if ends_by == "stop token" else GREEDY)
    outputs = [output for _ in range(3) for output in engine.step()]
    assert tokens(outputs) == expected([1])[:2]
    engine.abort_request("a")
    engine.add_request("b", [2], GREEDY)
    assert tokens(run(engine)["b"]) == expected([2])
    assert engine.stats().num_generated_tokens == 2 + len(expected([2]))


def test_an_answer_to_another_plan_is_a_bug(tmp_path: Path) -> None:
    class Runner(ArithmeticRunner):
        def execute(self, plan: StepPlan) -> PendingResult:
            given = super().execute(plan)
            return lambda: replace(given(), step_id=plan.step_id - 1)

    config = EngineConfig.from_options({"num_gpu_blocks_override": 9})
    engine = Engine(make_folder(tmp_path), config, make_runner=lambda _, config: Runner(config, ArithmeticFacts()))
    engine.add_request("a", [1], GREEDY)
    with pytest.raises(InvariantViolation, match=r"answered plan -?\d+, expected plan"):
        engine.step()


def test_a_runner_that_answers_too_little_is_a_bug(tmp_path: Path) -> None:
    class Runner(FailingRunner):
        short = True

    config = EngineConfig.from_options({"num_gpu_blocks_override": 9})
    engine = Engine(make_folder(tmp_path), config, make_runner=lambda _, config: Runner(config, ArithmeticFacts()))
    engine.add_request("a", [1], GREEDY)
    with pytest.raises(InvariantViolation, match="0 samples for 1 sequences"):
        engine.step()


def test_an_error_of_a_row_ends_its_request_alone(tmp_path: Path) -> None:
    class Runner(ArithmeticRunner):
        def execute(self, plan: StepPlan) -> PendingResult:
            given = super().execute(plan)
            if self.num_steps != 4:
                return given
            return lambda: replace(given(), errors={1: "no token may be chosen"}, counts=np.array([1, 0, 1], np.int32))

    config = EngineConfig.from_options({"block_size": 4, "num_gpu_blocks_override": 32})
    engine = Engine(make_folder(tmp_path), config, make_runner=lambda _, config: Runner(config, ArithmeticFacts()))
    prompts = {"a": [1, 2, 3], "b": [4, 5], "c": [6]}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, GREEDY)
    outputs = run(engine)
    failed = outputs["b"][-1]
    assert (failed.token_id, failed.finish_reason, failed.error) == (None, "error", "no token may be chosen")
    assert tokens(outputs["b"]) == expected([4, 5])[:3]
    for name in ("a", "c"):
        assert tokens(outputs[name]) == expected(prompts[name])


def test_seeds_are_drawn_from_the_engines_own(tmp_path: Path) -> None:
    drawn: list[int] = []

    class Runner(ArithmeticRunner):
        def execute(self, plan: StepPlan) -> PendingResult:
            drawn.extend(new.seed for new in plan.added)
            return super().execute(plan)

    def seeds(seed: int) -> list[int]:
        config = EngineConfig.from_options({"num_gpu_blocks_override": 9, "seed": seed})
        engine = Engine(make_folder(tmp_path), config, make_runner=lambda _, config: Runner(config, ArithmeticFacts()))
        drawn.clear()
        for name in "ab":
            engine.add_request(name, [1], SamplingParams())
        run(engine)
        return list(drawn)

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 4


def test_waste_is_the_share_of_held_slots_without_a_token(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    assert engine.fragmentation() == 0.0
    engine.add_request("a", [1] * 9, GREEDY)
    engine.step()
    assert engine.fragmentation() == 3 / 12
    engine.add_request("b", [*[1] * 8, 2], GREEDY)
    engine.step()
    assert engine.fragmentation() == 5 / 16, "two blocks are shared"
    for name in "ab":
        engine.abort_request(name)
    assert engine.fragmentation() == 0.0
    engine.add(Request([3] * 10, siblings(3, GREEDY)))
    engine.step()
    assert engine.fragmentation() == 2 / 12
    engine.step()
    assert engine.fragmentation() == 3 / 20, "each has its third block"


def test_the_map_of_a_large_pool_is_sampled_and_every_list_has_a_bound(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, num_gpu_blocks_override=12_288, max_num_seqs=300, max_num_batched_tokens=30_000)
    for number in range(260):
        engine.add_request(str(number), [*[1] * 400, number % 47, 0], replace(GREEDY, max_tokens=50))
    for _ in range(3):
        engine.step()
    found = engine.block_map()
    assert (len(found.cells), len(found.sequences), found.num_running) == (4096, 256, 260)
    assert max(len(each.sequences) for each in found.holders) == 8
    assert max(each.num_references for each in found.holders) == 260


def test_statistics(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, max_num_seqs=1)
    engine.add_request("a", [1] * 5, GREEDY)
    engine.add_request("b", [2] * 5, GREEDY)
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks, stats.num_free_blocks) == (1, 1, 32, 30)
    assert stats.kv_utilization == pytest.approx(2 / 32)
    assert (stats.num_steps, stats.num_prompt_tokens, stats.num_generated_tokens) == (1, 5, 1)
    assert 0 < stats.last_schedule_s <= stats.last_step_s
    run(engine)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_utilization) == (0, 0, 0.0)
    assert (stats.num_steps, stats.num_prompt_tokens, stats.num_generated_tokens) == (24, 10, 24)


def test_the_scheduler_is_not_charged_with_the_models_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor in this process computes a step when it is submitted."""
    now_s = [0.0]

    class SlowRunner(ArithmeticRunner):
        def execute(self, plan: StepPlan) -> PendingResult:
            now_s[0] += 1.0
            return super().execute(plan)

    monkeypatch.setattr(sys.modules[Engine.__module__], "perf_counter", lambda: now_s[0])
    monkeypatch.setattr("pagestream_engine.steps.perf_counter", lambda: now_s[0])
    config = EngineConfig.from_options({"block_size": 4, "num_gpu_blocks_override": 32})
    facts = ArithmeticFacts()
    engine = Engine(make_folder(tmp_path / "model"), config, make_runner=lambda _, config: SlowRunner(config, facts))
    engine.add_request("a", [1] * 5, GREEDY)
    engine.step()
    stats = engine.stats()
    assert (stats.last_schedule_s, stats.last_step_s) == (0.0, 1.0)


def test_a_search_goes_on_after_what_an_earlier_run_has_put_out(tmp_path: Path) -> None:
    """Its answers come whole at its end; a log may have a part of them when an engine dies between two appends."""
    prompt, params = [1, 2, 3], replace(SEARCH, stop_token_ids=[])
    best = searched(prompt, params, ArithmeticFacts(), 128)
    engine = make_engine(tmp_path)
    given = [Choice("b", params, best[1][:5], index=1), Choice("c", params, [1, 1], index=2)]
    engine.add(Request(prompt, given))
    outputs = run(engine)
    assert tokens(outputs["b"]) == best[1][5:]
    assert outputs["b"][-1].finish_reason == "length"
    assert [output.error is not None for output in outputs["c"]] == [True], "it has put out other tokens"
    assert engine.stats().num_free_blocks == 32


def test_a_search_whose_only_wanted_choices_are_aborted_ends(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.add(Request([1, 2, 3], [Choice("a", SEARCH), Choice("b", SEARCH)]))
    engine.step()
    engine.abort_request("a")
    assert engine.has_unfinished_requests()
    engine.abort_request("b")
    assert not engine.has_unfinished_requests()
    engine.check_invariants()
    assert engine.stats().num_free_blocks == 32


@pytest.mark.parametrize("ahead", [False, True])
def test_the_likeliest_of_best_of_come_at_the_end(tmp_path: Path, ahead: bool) -> None:
    params = SamplingParams(best_of=4, seed=7, max_tokens=6, ignore_eos=True)
    engine = make_engine(tmp_path, async_scheduling=ahead)
    engine.add(Request([5], [Choice("a", params), Choice("b", params)]))
    while not (outputs := engine.step()):
        engine.check_invariants()
    assert [output.seq_id for output in outputs] == ["a"] * 6 + ["b"] * 6
    assert all(output.logprobs is None for output in outputs)
    first, second = (outputs[place].cumulative_logprob for place in (5, 11))
    assert first is not None
    assert second is not None
    assert first >= second
    assert engine.stats().num_free_blocks == 32
    engine.add(Request([5], [Choice("c", params, tokens(outputs)[6:9], index=1)]))
    assert tokens(run(engine)["c"]) == tokens(outputs)[9:]


def test_a_choice_that_has_ended_is_not_new_before_its_best_of_has(tmp_path: Path) -> None:
    class Runner(ArithmeticRunner):
        def execute(self, plan: StepPlan) -> PendingResult:
            given = super().execute(plan)
            if self.num_steps != 2:
                return given
            return lambda: replace(
                given(), errors={0: "no token may be chosen"}, counts=np.array([0, 1, 1, 1], np.int32)
            )

    config = EngineConfig.from_options({"block_size": 4, "num_gpu_blocks_override": 32})
    engine = Engine(make_folder(tmp_path), config, make_runner=lambda _, config: Runner(config, ArithmeticFacts()))
    engine.add(Request([5], [Choice("a", SamplingParams(best_of=4, seed=7, max_tokens=6, ignore_eos=True))]))
    for _ in range(3):
        engine.step()
    with pytest.raises(InvalidRequest, match="seq_id: given 'a', which is running"):
        engine.add_request("a", [9], GREEDY)
    assert tokens(run(engine)["a"]) == expected([5])[:6]
    engine.add_request("a", [9], GREEDY)
    assert tokens(run(engine)["a"]) == expected([9])


def test_one_beam_takes_what_a_sequence_takes(tmp_path: Path) -> None:
    options = {"block_size": 1, "num_gpu_blocks_override": 24, "max_num_seqs": 2, "max_num_batched_tokens": 2}
    engine = Engine(
        make_folder(tmp_path),
        EngineConfig.from_options(options),
        make_runner=lambda _, config: SeededRunner(config, ArithmeticFacts()),
    )
    params = SamplingParams(use_beam_search=True, beam_width=1, max_tokens=9, ignore_eos=True)
    engine.add_request("fits", [1] * 15, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert len(outputs) == 9
    with pytest.raises(InvalidRequest, match="given 2 beams of up to 24 tokens, which take 35 blocks"):
        engine.add_request("does not", [1] * 15, SamplingParams(use_beam_search=True, beam_width=2, max_tokens=9))


def test_the_words_of_a_group_are_spelled_once(tmp_path: Path) -> None:
    """Its siblings are added between two steps of all that runs; spelling 128 words takes longer than a step."""
    engine = make_engine(tmp_path, text=True)
    params = SamplingParams(max_tokens=2, bad_words=["ab"], bad_words_token_ids=[[1]])
    spelled: list[object] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is bad_words_token_ids.__code__:
            spelled.append(frame.f_locals["words"])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        engine.add(Request([5], siblings(3, params)))
        engine.add(Request([5], [Choice("other", replace(params, bad_words=["b"]))]))
    finally:
        sys.setprofile(before)
    assert spelled == [("ab",), ("b",)]
    assert set(run(engine)) == {"0", "1", "2", "other"}


def test_what_has_ended_is_freed_without_the_garbage_collector(tmp_path: Path) -> None:
    """However it ends. A cycle through a sequence would keep a prompt of 100,000 tokens for seconds or longer."""

    def living() -> int:
        return sum(type(each) in (Sequence, Request) for each in gc.get_objects())

    engine = make_engine(tmp_path, text=True, max_num_seqs=4)
    left = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            engine.add(Request([5, 6], siblings(3, GREEDY)))
            engine.add_request("stopped", [7], SamplingParams(max_tokens=50, stop=["a", "b", "c"]))
            engine.add_request("aborted", [8] * 9, GREEDY)
            engine.add_request("waiting", [9] * 9, GREEDY)
            engine.step()
            engine.abort_request("aborted")
            engine.abort_request("waiting")
            run(engine)
            left.append(living())
        assert left[1:] == left[:1] * 2, "at most what the last step and the queue refer to, until the next one"
    finally:
        gc.enable()
