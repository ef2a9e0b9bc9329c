from pathlib import Path

import kopf
import pytest
from pagestream_operator.errors import SettingsError
from pagestream_operator.kube.access import find_access
from pagestream_operator.kube.client import KubeClient
from support.kubernetes.api import write_kubeconfig


@pytest.fixture(autouse=True)
def nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a service account nor a kubeconfig."""
    monkeypatch.setattr(kopf, "login_with_service_account", lambda **_: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)


@pytest.mark.parametrize(
    ("host", "server"),
    [
        ("10.0.0.1", "https://10.0.0.1:6443"),
        ("fd00::1", "https://[fd00::1]:6443"),
        ("", "https://kubernetes.default.svc"),
    ],
)
def test_a_pod_reaches_the_server_by_its_address(host: str, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    account = kopf.ConnectionInfo(server="https://kubernetes.default.svc", token="t")
    monkeypatch.setattr(kopf, "login_with_service_account", lambda **_: account)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    found = find_access()
    assert found.server == server
    assert found.as_http_headers() == {"Authorization": "Bearer t"}


def test_a_kubeconfig_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kubeconfig(tmp_path / "config", "https://kube", token="secret")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    found = find_access()
    assert (found.server, found.token) == ("https://kube", "secret")


def test_no_access_is_an_error_that_says_what_to_set() -> None:
    with pytest.raises(SettingsError, match="set KUBECONFIG, or run in a pod"):
        find_access()


@pytest.mark.parametrize("text", ["", "x: [", "contexts: []", "current-context: none"])
def test_a_kubeconfig_that_is_none_is_named(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(SettingsError, match="can't be read"):
        find_access()


def test_a_user_without_credentials_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kopf knows no exec plugins: their users would call anonymously."""
    write_kubeconfig(tmp_path / "config", "https://kube", token="")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(SettingsError, match="exec plugins and tokenFile are not supported"):
        find_access()


async def test_certificates_that_are_not_there_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    account = kopf.ConnectionInfo(server="https://kube", token="t", ca_path=str(tmp_path / "none.crt"))
    monkeypatch.setattr(kopf, "login_with_service_account", lambda **_: account)
    with pytest.raises(SettingsError, match="certificates of the access"):
        async with KubeClient(1.0):
            pass
