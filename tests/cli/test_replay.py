"""`pagestream replay` of requests that the demo model answered: by the running deployment, and in a process alone."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_cli.__main__ import main
from pagestream_client import Client, Generation
from support.processes.stack import DEMO_MODEL, Stack, running_stack

OFFLINE = ["--model", str(DEMO_MODEL), "--dtype", "float32"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack"), is_forked=True) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.gateways[0].grpc_target) as made:
        yield made


@dataclass(frozen=True)
class Done:
    """A command's status and output."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def replay(stack: Stack, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs the command in this process."""

    def run(request_id: str, *options: str) -> Done:
        capsys.readouterr()
        status = main(["replay", request_id, "--redis", stack.redis_url, *options])
        return Done(status, *capsys.readouterr())

    return run


def asked(client: Client, **options: Any) -> Generation:
    return client.generate("demo", "One evening", **options).collect()


@pytest.mark.parametrize("options", [[], OFFLINE], ids=["by the deployment", "offline"])
def test_a_sampled_answer_with_siblings_comes_again(
    stack: Stack, replay: Callable[..., Done], client: Client, options: list[str]
) -> None:
    answer = asked(client, n=2, temperature=0.9, top_p=0.9, max_tokens=24, stop=["the end"], logprobs=1)
    done = replay(answer.request_id, *options)
    assert done.returncode == 0, done.stderr
    count = sum(len(choice.token_ids) for choice in answer.choices)
    assert done.stdout == f"equal: {count} tokens in 2 choices\n"
    assert "log probabilities of the chosen tokens differ by at most" in done.stderr


@pytest.mark.parametrize("options", [[], OFFLINE], ids=["by the deployment", "offline"])
def test_a_record_that_says_something_else_is_found(
    stack: Stack, replay: Callable[..., Done], client: Client, options: list[str]
) -> None:
    answer = asked(client, temperature=1.0, max_tokens=24, seed=1, ignore_eos=True)
    with redis.Redis.from_url(stack.redis_url) as server:
        [key] = server.scan_iter(f"*:req:{answer.request_id}")
        spec = RequestSpec.FromString(server.hget(key, "spec"))
        spec.sampling.seed = 2
        server.hset(key, "spec", spec.SerializeToString())
    done = replay(answer.request_id, *options)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("different: choice 0, token ")


def test_what_was_cancelled_is_compared_as_far_as_it_went(
    stack: Stack, replay: Callable[..., Done], client: Client
) -> None:
    stream = client.generate("demo", "One evening", temperature=0.0, max_tokens=900, ignore_eos=True)
    for chunk in stream:
        if chunk.next_index >= 3 and not chunk.finish_reason:
            client.cancel(stream.request_id)
    done = replay(stream.request_id)
    assert done.returncode == 0, done.stderr
    assert "cut short" in done.stderr


def test_what_is_not_there_is_trouble(stack: Stack, replay: Callable[..., Done], client: Client) -> None:
    done = replay("nonsense")
    assert (done.returncode, done.stderr.splitlines()[0][:30]) == (2, "error: there is no request 'no")
    answer = asked(client, max_tokens=2)
    assert replay(answer.request_id, "--tenant", "stranger").returncode == 2
    assert replay(answer.request_id, "--model", "/nowhere").returncode == 2


def test_what_still_runs_is_trouble(stack: Stack, replay: Callable[..., Done], client: Client) -> None:
    with client.generate("demo", "One evening", max_tokens=900, ignore_eos=True) as stream:
        request_id = stream.accepted()
        stack.engines[0].signal(signal.SIGSTOP)
        try:
            done = replay(request_id)
            client.cancel(request_id)
        finally:
            stack.engines[0].signal(signal.SIGCONT)
    assert done.returncode == 2
    assert "has not ended yet" in done.stderr
