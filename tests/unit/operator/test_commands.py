from pathlib import Path

import pagestream_operator.commands
import pytest
from pagestream_operator.commands import delete_pools
from pagestream_operator.commands.once import run_once, wait_until
from pagestream_operator.errors import ApiUnavailable, Rejected
from pagestream_operator.kube.client import KubeClient
from support.kubernetes.api import write_kubeconfig


def test_exported_names() -> None:
    assert set(pagestream_operator.commands.__all__) == {"apply_crd", "delete_pools"}


async def test_a_condition_is_asked_until_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagestream_operator.commands.once.POLL_S", 0.0)
    answers = iter([False, ApiUnavailable("busy"), True])

    async def ask() -> bool:
        answer = next(answers)
        if isinstance(answer, ApiUnavailable):
            raise answer
        return answer

    assert await wait_until(ask, limit_s=10)


async def test_after_the_limit_it_did_not_hold() -> None:
    async def ask() -> bool:
        return False

    assert not await wait_until(ask, limit_s=0)


async def test_a_server_that_is_silent_to_the_end_is_an_error() -> None:
    async def ask() -> bool:
        raise ApiUnavailable("busy")

    with pytest.raises(ApiUnavailable, match="busy"):
        await wait_until(ask, limit_s=0)


def test_errors_end_the_process_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kubeconfig(tmp_path / "kubeconfig", "https://127.0.0.1:1", token="none")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))

    async def act(_: KubeClient) -> None:
        raise Rejected("not allowed", 403)

    with pytest.raises(SystemExit, match="pagestream-operator: not allowed"):
        run_once(act)


def test_without_access_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(_: KubeClient) -> None:
        raise AssertionError

    monkeypatch.setenv("KUBECONFIG", "/nothing/here")
    with pytest.raises(SystemExit, match="set KUBECONFIG, or run in a pod"):
        run_once(act)


@pytest.mark.parametrize("namespaces", ["", ","])
def test_pools_are_deleted_in_named_namespaces_alone(namespaces: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        delete_pools(["--namespaces", namespaces])
    assert "names no namespace" in capsys.readouterr().err
