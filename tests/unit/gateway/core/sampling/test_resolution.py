import pytest
from pagestream.v1.inference_pb2 import EARLY_STOPPING_NEVER, SamplingParams
from pagestream_gateway.core.sampling.resolution import fit_context, resolve_sampling, sampling_from_json
from pagestream_gateway.errors import InvalidRequest, PromptTooLong
from pagestream_gateway.settings import LimitSettings

LIMITS = LimitSettings()


def resolve(given: SamplingParams, defaults: SamplingParams | None = None) -> SamplingParams:
    return resolve_sampling(given, defaults or SamplingParams(), limits=LIMITS, vocab_size=100)


def test_unset_fields_take_vllms_defaults() -> None:
    sampling = resolve(SamplingParams())
    assert (sampling.n, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert sampling.skip_special_tokens
    assert not sampling.HasField("max_tokens")


def test_the_models_defaults_stand_between() -> None:
    defaults = SamplingParams(temperature=0.5, top_k=20, top_p=0.9, max_tokens=7)
    sampling = resolve(SamplingParams(top_k=3), defaults)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0.5, 3, 0.9, 7)


def test_a_seed_is_always_set_and_a_given_one_kept() -> None:
    seeds = {resolve(SamplingParams()).seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert resolve(SamplingParams(seed=0)).seed == 0
    assert resolve(SamplingParams(seed=-(2**63))).seed == -(2**63)


def test_the_given_message_is_not_changed() -> None:
    given = SamplingParams(n=2)
    resolve(given)
    assert given == SamplingParams(n=2)


def test_penalties_and_bias_pass() -> None:
    given = SamplingParams(
        presence_penalty=-2, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={5: -100, 99: 3.5}, logprobs=0
    )
    sampling = resolve(given)
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs"):
        assert getattr(sampling, name) == getattr(given, name)
    assert resolve(SamplingParams()).repetition_penalty == 1.0
    assert not resolve(SamplingParams()).HasField("logprobs")


def test_best_of_is_at_least_n_and_recorded_where_it_is_more() -> None:
    assert not resolve(SamplingParams(n=2, best_of=2)).HasField("best_of")
    assert resolve(SamplingParams(n=2, best_of=3)).best_of == 3
    for best_of in (1, LIMITS.max_n + 1):
        with pytest.raises(InvalidRequest, match=r"must be from n \(2\) to") as caught:
            resolve(SamplingParams(n=2, best_of=best_of))
        assert caught.value.field == "best_of"


def test_a_beam_search_takes_no_defaults_of_the_model_for_sampling() -> None:
    defaults = SamplingParams(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1, max_tokens=7)
    found = resolve(SamplingParams(use_beam_search=True, n=2, beam_width=4), defaults)
    assert (found.temperature, found.top_p, found.top_k, found.repetition_penalty) == (1.0, 1.0, 0, 1.0)
    assert (found.beam_width, found.max_tokens) == (4, 7)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("temperature", SamplingParams(use_beam_search=True, temperature=0.7)),
        ("top_k", SamplingParams(use_beam_search=True, top_k=5)),
        ("presence_penalty", SamplingParams(use_beam_search=True, presence_penalty=0.5)),
        ("logit_bias", SamplingParams(use_beam_search=True, logit_bias={3: 1.0})),
        ("stop", SamplingParams(use_beam_search=True, stop=["x"])),
        ("beam_width", SamplingParams(use_beam_search=True, n=3, beam_width=2)),
        ("length_penalty", SamplingParams(use_beam_search=True, length_penalty=11)),
        ("length_penalty", SamplingParams(length_penalty=2)),
        ("beam_width", SamplingParams(beam_width=2)),
        ("early_stopping", SamplingParams(early_stopping=EARLY_STOPPING_NEVER)),
    ],
)
def test_what_does_not_go_with_a_beam_search_is_refused_by_its_name(field: str, given: SamplingParams) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve(given)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (SamplingParams(temperature=float("inf")), "temperature"),
        (SamplingParams(top_p=float("nan")), "top_p"),
        (SamplingParams(min_p=-0.1), "min_p"),
        (SamplingParams(max_tokens=2, min_tokens=3), "min_tokens"),
        (SamplingParams(stop=["x" * 2000]), "stop"),
        (SamplingParams(stop_token_ids=[100]), "stop_token_ids"),
        (SamplingParams(stop_token_ids=[1] * 2000), "stop_token_ids"),
        (SamplingParams(presence_penalty=2.1), "presence_penalty"),
        (SamplingParams(frequency_penalty=float("nan")), "frequency_penalty"),
        (SamplingParams(repetition_penalty=0), "repetition_penalty"),
        (SamplingParams(repetition_penalty=1e-7), "repetition_penalty"),
        (SamplingParams(repetition_penalty=2e6), "repetition_penalty"),
        (SamplingParams(repetition_penalty=float("inf")), "repetition_penalty"),
        (SamplingParams(logprobs=21), "logprobs"),
        (SamplingParams(logit_bias={100: 1.0}), "logit_bias"),
        (SamplingParams(logit_bias={1: 101.0}), "logit_bias"),
        (SamplingParams(logit_bias={1: float("nan")}), "logit_bias"),
    ],
)
def test_ranges(given: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve(given)
    assert caught.value.field == field


def test_values_that_a_field_cannot_hold_are_named() -> None:
    assert sampling_from_json({"n": 2, "stop": ["a"], "seed": None}) == SamplingParams(n=2, stop=["a"])
    for name, value in (("n", -1), ("seed", 2**63), ("top_k", 2**40), ("stop", ["\ud800"]), ("max_tokens", -5)):
        with pytest.raises(InvalidRequest) as caught:
            sampling_from_json({name: value})
        assert caught.value.field == name


def test_what_is_asked_for_is_cut_where_the_context_ends() -> None:
    for asked, expected in ((70, 70), (100, 70)):
        sampling = SamplingParams(max_tokens=asked)
        room = {"prompt_lengths": [30], "max_model_len": 100, "default_model_len": 60}
        fit_context(sampling, is_given=True, default=None, **room)
        assert sampling.max_tokens == expected
    with pytest.raises(PromptTooLong, match=r"maximum context length is 100 tokens.*101"):
        fit_context(SamplingParams(max_tokens=101), is_given=True, default=None, **room)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "min_tokens", "default", "expected"),
    [(30, 0, None, 30), (31, 0, None, 69), (10, 51, None, 90), (10, 0, 80, 80)],
    ids=["half is left", "less is left", "less than is asked for", "not open"],
)
def test_an_open_answer_ends_where_most_engines_contexts_do(
    num_prompt_tokens: int, min_tokens: int, default: int | None, expected: int
) -> None:
    sampling = SamplingParams(min_tokens=min_tokens)
    fit_context(
        sampling,
        is_given=False,
        prompt_lengths=[num_prompt_tokens],
        max_model_len=100,
        default_model_len=60,
        default=default,
    )
    assert sampling.max_tokens == expected


@pytest.mark.parametrize(
    ("wanted", "lengths", "expected"),
    [
        (30, [10, 20], (30, 0)),
        (75, [10, 20], (75, 0)),
        (30, [10, 80], (30, 100)),
        (95, [10, 80], (90, 100)),
        (None, [10, 20], (50, 60)),
        (None, [10, 40], (90, 100)),
        (None, [20, 20], (40, 0)),
    ],
)
def test_each_prompt_of_a_list_has_its_own_room(
    wanted: int | None, lengths: list[int], expected: tuple[int, int]
) -> None:
    sampling = SamplingParams() if wanted is None else SamplingParams(max_tokens=wanted)
    total = fit_context(
        sampling,
        is_given=wanted is not None,
        prompt_lengths=lengths,
        max_model_len=100,
        default_model_len=60,
        default=None,
    )
    assert (sampling.max_tokens, total) == expected


def test_the_least_tokens_fit_behind_the_longest_prompt() -> None:
    sampling = SamplingParams(min_tokens=21, max_tokens=50)
    with pytest.raises(InvalidRequest, match="21 is more than max_tokens, 20") as caught:
        fit_context(
            sampling, is_given=True, prompt_lengths=[10, 80], max_model_len=100, default_model_len=60, default=None
        )
    assert caught.value.field == "min_tokens"


@pytest.mark.parametrize("field", ["beam_width", "best_of", "n"])
def test_a_beam_search_has_at_most_the_beams_that_engines_take(field: str) -> None:
    assert resolve(SamplingParams(use_beam_search=True, **{field: 64}))
    with pytest.raises(InvalidRequest, match="at most 64 with use_beam_search, got 65") as caught:
        resolve(SamplingParams(use_beam_search=True, **{field: 65}))
    assert caught.value.field == field
