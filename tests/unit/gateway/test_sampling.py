import pytest
from pagestream.v1.inference_pb2 import SamplingParams
from pagestream_gateway.errors import InvalidRequest, UnsupportedField
from pagestream_gateway.sampling import resolve_sampling, to_sampling
from pagestream_gateway.settings import LimitSettings


def resolve(given: SamplingParams, defaults: SamplingParams | None = None) -> SamplingParams:
    return resolve_sampling(given, defaults or SamplingParams(), limits=LimitSettings(), vocab_size=100)


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


def test_neutral_values_of_what_is_not_supported_pass_and_vanish() -> None:
    sampling = resolve(SamplingParams(presence_penalty=0, frequency_penalty=0, repetition_penalty=1, best_of=1))
    assert not any(sampling.HasField(name) for name in ("presence_penalty", "repetition_penalty", "best_of"))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (SamplingParams(presence_penalty=1), "presence_penalty"),
        (SamplingParams(best_of=2), "best_of"),
        (SamplingParams(logprobs=0), "logprobs"),
        (SamplingParams(prompt_logprobs=1), "prompt_logprobs"),
        (SamplingParams(logit_bias={1: 1.0}), "logit_bias"),
    ],
)
def test_what_is_not_supported_is_refused(given: SamplingParams, field: str) -> None:
    with pytest.raises(UnsupportedField) as caught:
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
    ],
)
def test_ranges(given: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve(given)
    assert caught.value.field == field


def test_values_that_a_field_cannot_hold_are_named() -> None:
    assert to_sampling({"n": 2, "stop": ["a"], "seed": None}) == SamplingParams(n=2, stop=["a"])
    for name, value in (("n", -1), ("seed", 2**63), ("top_k", 2**40), ("stop", ["\ud800"]), ("max_tokens", -5)):
        with pytest.raises(InvalidRequest) as caught:
            to_sampling({name: value})
        assert caught.value.field == name
