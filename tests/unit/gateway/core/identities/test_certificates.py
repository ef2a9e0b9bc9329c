from pathlib import Path

import pytest
from pagestream_gateway.core.identities.certificates import CertificateRules
from pagestream_gateway.core.identities.identity import Identity
from pagestream_gateway.errors import SettingsError, Unauthenticated
from support.network.authority import Authority

RULES = """
# ours
URI:spiffe://prod.test/ns/{tenant}/sa/* -> k8s.{tenant}
DNS:{tenant}.Clients.test -> {tenant}
CN:batch runner -> research
CN:* -> others
"""


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


@pytest.fixture
def rules(tmp_path: Path) -> CertificateRules:
    path = tmp_path / "rules"
    path.write_text(RULES)
    return CertificateRules(path)


def test_the_first_rule_that_fits_a_name_holds(authority: Authority, rules: CertificateRules) -> None:
    def identity(**names: list[str]) -> Identity:
        return rules.identity(authority.client("client", **names).pem)  # type: ignore[arg-type]

    uri = "spiffe://prod.test/ns/team-a/sa/web"
    assert identity(uris=[uri], common_names=["batch runner"]) == Identity("k8s.team-a", f"URI:{uri}")
    assert identity(hosts=["Team-B.clients.TEST"]) == Identity("team-b", "DNS:team-b.clients.test")
    assert identity(common_names=["batch runner"]) == Identity("research", "CN:batch runner")
    assert identity(common_names=["Batch runner"]) == Identity("others", "CN:Batch runner")


@pytest.mark.parametrize(
    "names",
    [
        {},
        {"uris": ["spiffe://prod.test/ns/a/sa/web/x"]},
        {"uris": ["spiffe://prod.test/ns/a/b/sa/web"]},
        {"uris": ["spiffe://prod.test.evil/ns/a/sa/web"]},
        {"uris": ["spiffe://prodXtest/ns/a/sa/web"]},
        {"uris": ["SPIFFE://PROD.TEST/ns/a/sa/web"]},
        {"uris": ["spiffe://prod.test/ns/%61/sa/web"]},
        {"hosts": ["a.b.clients.test"]},
        {"hosts": ["clients.test"]},
        {"common_names": ["batch runner", "x"]},
        {"common_names": ["a.b"]},
        {"common_names": ["a\nb"]},
    ],
)
def test_other_names_are_no_tenants(authority: Authority, rules: CertificateRules, names: dict[str, list[str]]) -> None:
    with pytest.raises(Unauthenticated, match="no tenant is known"):
        rules.identity(authority.client("client", **names).pem)  # type: ignore[arg-type]


def test_what_is_no_certificate_is_refused(rules: CertificateRules) -> None:
    with pytest.raises(Unauthenticated, match="can't be read"):
        rules.identity("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# nothing\n", "holds no rule"),
        ("CN:a b", ":1: 'URI:pattern"),
        ("\nIP:1.2.3.4 -> a", ":2: 'URI:pattern"),
        ("CN: -> a", "is expected"),
        ("CN:{tenant} -> a", "stands once"),
        ("CN:a -> {tenant}", "stands once"),
        ("CN:{tenant}{tenant} -> {tenant}", "stands once"),
        ("CN:a -> b/c", "not a tenant name"),
    ],
)
def test_a_wrong_rule_is_named(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "rules"
    path.write_text(text)
    with pytest.raises(SettingsError, match="tls_client_tenants") as caught:
        CertificateRules(path)
    assert expected in str(caught.value)


def test_changed_rules_hold_at_once_and_wrong_ones_not_at_all(authority: Authority, tmp_path: Path) -> None:
    path = tmp_path / "rules"
    path.write_text("CN:x -> a")
    rules, pem = CertificateRules(path), authority.client("client", common_names=["x"]).pem
    for text, is_taken, tenant in (("CN:x -> b", True, "b"), ("CN:x", False, "b"), ("CN:x -> b", True, "b")):
        path.write_text(text)
        assert rules.refresh() is is_taken
        assert rules.identity(pem).tenant == tenant
