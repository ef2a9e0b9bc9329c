import json
from pathlib import Path
from typing import Any

import pytest
from pagestream_gateway.core.identities.issuers import claim, read_issuers
from pagestream_gateway.errors import SettingsError

GOOD: dict[str, Any] = {
    "issuer": "https://issuer.test",
    "audiences": ["inference"],
    "jwks_url": "https://issuer.test/keys",
    "tenant_claim": "tenant",
}


def read(path: Path, *issuers: dict[str, Any]) -> None:
    path.write_text(json.dumps({"issuers": issuers}))
    read_issuers(path)


def test_addresses_that_are_read(tmp_path: Path) -> None:
    for url in ("https://x/keys", "http://127.0.0.1:80/keys", "http://[::1]/keys", "http://localhost/keys"):
        read(tmp_path / "issuers", GOOD | {"jwks_url": url})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"jwks_url": "http://issuer.test/keys"}, "must be https"),
        ({"jwks_url": "http://127.0.0.1.evil.test/keys"}, "must be https"),
        ({"jwks_url": "file:///etc/passwd"}, "must be https"),
        ({"jwks_url": "https://user:password@issuer.test/keys"}, "without a password"),
        ({"jwks_file": "keys"}, "either jwks_url or jwks_file"),
        ({"jwks_url": None}, "either jwks_url or jwks_file"),
        ({"algorithms": ["HS256"]}, "issuers.0.algorithms.0"),
        ({"algorithms": ["none"]}, "issuers.0.algorithms.0"),
        ({"algorithms": []}, "issuers.0.algorithms"),
        ({"audiences": []}, "issuers.0.audiences"),
        ({"audience": "x"}, "issuers.0.audience"),
        ({"tenant_claim": ""}, "issuers.0.tenant_claim"),
        ({"tenants": {"x": "a/b"}}, "not a tenant name"),
        ({"tenant_prefix": "-"}, "can't begin"),
        ({"class_claim": "c", "classes": {"gold": 3}}, "got 3"),
        ({"classes": {"gold": 0}}, "goes with class_claim"),
        ({"leeway_s": 3600}, "issuers.0.leeway_s"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    with pytest.raises(SettingsError, match="--jwt-issuers") as caught:
        read(tmp_path / "issuers", GOOD | change)
    assert expected in str(caught.value)


def test_no_issuer_is_there_twice(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="twice"):
        read(tmp_path / "issuers", GOOD, GOOD)


def test_claims_have_paths() -> None:
    claims = {"a": {"b": "nested", "c.d": {"e": "inner"}}, "a.b": "own", "https://x.test/t": "url", "k": "text"}
    for path, expected in (
        ("a.b", "own"),
        ("a.c.d.e", "inner"),
        ("https://x.test/t", "url"),
        ("k.l", None),
        ("", None),
    ):
        assert claim(claims, path) == expected
