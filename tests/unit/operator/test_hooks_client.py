import httpx2
import pagestream_operator.hooks
import pytest
from lightkube import ApiError
from pagestream_operator.errors import ApiFailure, ApiUnavailable, Conflict, Gone, Rejected
from pagestream_operator.hooks.client import open_client, told_as_exit, translated, wait_until


def test_exported_names() -> None:
    assert set(pagestream_operator.hooks.__all__) == {"apply_crd", "delete_pools"}


def refusal(status: int) -> ApiError:
    body = {"code": status, "message": "as the server says", "status": "Failure"}
    response = httpx2.Response(status, json=body, request=httpx2.Request("GET", "https://api/"))
    return ApiError(request=response.request, response=response)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, Gone), (409, Conflict), (403, Rejected), (422, Rejected), (429, ApiUnavailable), (503, ApiUnavailable)],
)
def test_the_servers_answers_as_errors_of_the_operator(status: int, kind: type[ApiFailure]) -> None:
    with pytest.raises(ApiFailure, match="listing: as the server says") as told, translated("listing"):
        raise refusal(status)
    assert type(told.value) is kind
    assert told.value.status == status


def test_no_answer_is_a_reason_to_ask_again() -> None:
    with pytest.raises(ApiUnavailable, match="listing: ConnectTimeout"), translated("listing"):
        raise httpx2.ConnectTimeout("")


def test_a_condition_is_asked_until_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagestream_operator.hooks.client.POLL_S", 0.0)
    answers = iter([False, ApiUnavailable("busy"), True])

    def ask() -> bool:
        answer = next(answers)
        if isinstance(answer, ApiUnavailable):
            raise answer
        return answer

    assert wait_until(ask, limit_s=10)


def test_after_the_limit_it_did_not_hold() -> None:
    assert not wait_until(lambda: False, limit_s=0)


def test_a_server_that_is_silent_to_the_end_is_told() -> None:
    def ask() -> bool:
        raise ApiUnavailable("busy")

    with pytest.raises(ApiUnavailable, match="busy"):
        wait_until(ask, limit_s=0)


def test_errors_end_the_process_with_a_sentence() -> None:
    with pytest.raises(SystemExit, match="pagestream-operator: not allowed"), told_as_exit():
        raise Rejected("not allowed", 403)


def test_without_a_way_to_the_server_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nothing/here")
    with pytest.raises(ApiUnavailable, match="neither a pod's account nor KUBECONFIG"):
        open_client()
