"""Files of limits: what they say, and what is wrong with them."""

from pathlib import Path

import pytest
from pagestream_gateway.core.identities.identity import Identity
from pagestream_gateway.core.tenants.limits import TenantLimits, parse_rules
from pagestream_gateway.errors import SettingsError
from pagestream_streams.rates import NO_LIMITS, Limits

PATH = Path("limits.yaml")
TEXT = """
default: {requests_per_minute: 60, tokens_per_day: 1000, models: ["llama-*", qwen]}
tenants:
  a: {requests_per_minute: null, concurrent_requests: 4}
  b: {models: null}
keys:
  "0123456789ab": {queued_tokens: 10, models: [qwen]}
"""


def test_an_entry_has_what_it_leaves_out_from_the_default() -> None:
    limits = TenantLimits(parse_rules(PATH, TEXT))
    assert limits.of("other", "") == (Limits(requests_per_minute=60, tokens_per_day=1000), NO_LIMITS)
    own = Limits(tokens_per_day=1000, concurrent_requests=4), Limits(queued_tokens=10)
    assert limits.of("a", "0123456789ab") == own


def test_models_must_be_allowed_to_tenant_and_key() -> None:
    limits = TenantLimits(parse_rules(PATH, TEXT))
    for tenant, key, expected in (("a", "", {"llama-8b", "qwen"}), ("b", "", {"llama-8b", "qwen", "gpt"})):
        found = {name for name in ("llama-8b", "qwen", "gpt") if limits.allows(Identity(tenant, key), name)}
        assert found == expected
    assert [limits.allows(Identity("b", "0123456789ab"), name) for name in ("qwen", "gpt")] == [True, False]


def test_an_empty_file_limits_nothing() -> None:
    assert TenantLimits(parse_rules(PATH, "")).of("a", "b") == (NO_LIMITS, NO_LIMITS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[", "neither YAML nor JSON"),
        ("- a", "limits.yaml: expected an object"),
        ("tenant: {}", r"limits.yaml.tenant: is not known; expected one of default"),
        ("tenants: {a: {tokens: 1}}", r"tenants.a.tokens: is not known; expected one of requests_per_minute"),
        ("tenants: {a: {tokens_per_day: -1}}", r"tenants.a.tokens_per_day: expected a whole number from 1 on.*-1"),
        ("default: {tokens_per_day: true}", r"default.tokens_per_day: expected a whole number"),
        ("keys: {123456789012: {}}", r"keys: expected a name as text: put it in quotes, got 123456789012"),
        ("tenants: {a: {models: llama}}", r"tenants.a.models: expected a list of names or patterns"),
    ],
)
def test_what_is_wrong_is_named(text: str, expected: str) -> None:
    with pytest.raises(SettingsError, match=expected):
        parse_rules(PATH, text)
