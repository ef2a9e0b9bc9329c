from pagestream.v1.inference_pb2 import SamplingParams
from pagestream.v1.records_pb2 import AnswerForm
from pagestream_gateway.core.drafts import Draft, TokenPrompt
from pagestream_gateway.core.preparation import PreparedRequest, build_spec


def seed(key: str, *, tenant: str = "t", digest: str = "d", given: int | None = None) -> int:
    asked = SamplingParams() if given is None else SamplingParams(seed=given)
    draft = Draft("m", [TokenPrompt([1])], "prompt", asked, AnswerForm(), idempotency_key=key, body_digest=digest)
    prepared = PreparedRequest([[1]], SamplingParams(seed=5 if given is None else given), [])
    spec = build_spec(draft, prepared, request_id="r", model="m", tenant=tenant, grace_ms=1)
    return spec.sampling.seed


def test_each_try_with_an_idempotency_key_has_one_seed() -> None:
    assert seed("k") == seed("k")
    others = {seed("k"), seed("other"), seed("k", tenant="u"), seed("k", digest="e")}
    assert len(others) == 4
    assert max(others) < 1 << 63


def test_a_given_seed_and_one_without_a_key_stay() -> None:
    assert seed("k", given=9) == 9
    assert seed("") == 5
