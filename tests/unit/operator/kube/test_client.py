import httpx2
import pytest
from pagestream_operator.errors import ApiFailure, ApiUnavailable, Conflict, Gone, Rejected, SettingsError
from pagestream_operator.kube.client import KubeClient, failure_of


def refusal(status: int, message: str = "", **headers: str) -> httpx2.HTTPStatusError:
    request = httpx2.Request("GET", "https://kube")
    response = httpx2.Response(status, headers=headers, request=request)
    return httpx2.HTTPStatusError(message, request=request, response=response)


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (404, "", Gone),
        (409, "", Conflict),
        (408, "", ApiUnavailable),
        (429, "", ApiUnavailable),
        (500, "", ApiUnavailable),
        (503, "", ApiUnavailable),
        (504, "", ApiUnavailable),
        (401, "", ApiUnavailable),
        (400, "", Rejected),
        (403, "", Rejected),
        (422, "", Rejected),
        (500, "failed to create typed patch object (x): duplicate entries", Rejected),
    ],
)
def test_what_to_do_is_in_the_error(status: int, message: str, kind: type[ApiFailure]) -> None:
    failure = failure_of("get X", refusal(status, message))
    assert type(failure) is kind
    assert failure.status == status
    assert str(status) in str(failure)


@pytest.mark.parametrize(("given", "seconds"), [("7", 7.0), ("soon", None)])
def test_a_busy_server_says_how_long(given: str, seconds: float | None) -> None:
    assert failure_of("get X", refusal(429, **{"Retry-After": given})).retry_after_s == seconds


def test_no_access_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere/kubeconfig")
    with pytest.raises(SettingsError, match="set KUBECONFIG, or run in a pod"):
        KubeClient(1.0)
