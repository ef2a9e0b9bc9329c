"""An installed release answers: `helm test`, gRPC by two clients, and the `openai` client, all through its Service."""

from __future__ import annotations

import json
import shutil

import pytest
from cluster.load import Content, Question
from cluster.release import NAMESPACE, Times
from cluster.resources import Release, is_ready, seconds_to_ready
from google.protobuf import json_format
from openai import AuthenticationError, OpenAI
from pagestream.v1 import inference_pb2
from pagestream_client import AsyncClient, Unauthenticated
from support.kubernetes.api import run_tool
from support.processes.waiting import wait_until
from support.redis.servers import skip_for_want_of


@pytest.mark.short
def test_everything_is_ready(release: Release, times: Times) -> None:
    components = {"gateway": 2, "redis": 1, "operator": 2, "collector": 2}

    def all_there() -> bool:
        ready = {each: len(NAMESPACE.ready_pods(release.selector(each))) for each in components}
        return ready == components

    # The HPA brings the second gateway a moment after `helm --wait` has seen the first.
    wait_until(all_there, f"as many pods as {components}", 60)
    (engine,) = NAMESPACE.pods("pagestream.dev/pool=demo")
    times.note("an engine's start-up: pod created until ready, first on this node", seconds_to_ready(engine))
    pool = NAMESPACE.get("enginepool", "demo")
    assert is_ready(pool)
    assert not is_ready(pool, "Degraded")


@pytest.mark.short
def test_pods_have_no_rights(release: Release) -> None:
    """The namespace admits only what Pod Security calls restricted; beyond it, roots are read-only. The images run as a
    user whom they do not know, as on OpenShift.
    """
    pods = NAMESPACE.pods("")
    assert len(pods) >= 7
    for pod in pods:
        assert pod["spec"]["securityContext"]["runAsUser"] == 1_000_650_000
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True


@pytest.mark.short
def test_helm_test(release: Release, times: Times) -> None:
    with times.of("helm test"):
        said = release.helm("test", release.name, "--timeout", "120s")
    assert "Phase:          Succeeded" in said


@pytest.mark.short
async def test_a_stream_by_our_client(target: str, api_key: str) -> None:
    async with AsyncClient([target], api_key=api_key) as client:
        answer = await client.generate("demo", "The lighthouse", max_tokens=16, ignore_eos=True).collect()
    assert len(answer.choices[0].token_ids) == 16


@pytest.mark.short
async def test_without_a_key_nobody_is_served(release: Release, target: str) -> None:
    async with AsyncClient([target]) as client:
        with pytest.raises(Unauthenticated):
            await client.generate("demo", "The lighthouse", max_tokens=4).collect()
    url = f"http://{target.rpartition(':')[0]}:8000/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0) as client, pytest.raises(AuthenticationError):
        client.models.list()


def test_a_stream_by_grpcurl(target: str, api_key: str) -> None:
    if shutil.which("grpcurl") is None:
        skip_for_want_of("cluster", "grpcurl is not on the PATH")
    question = {"model": "demo", "prompt": "The lighthouse", "sampling": {"maxTokens": 8, "ignoreEos": True}}
    headers = ["-H", f"authorization: Bearer {api_key}"]
    said = run_tool(
        "grpcurl", "-plaintext", *headers, "-d", json.dumps(question), target, "pagestream.v1.Inference/Generate"
    )
    decoder, chunks, rest = json.JSONDecoder(), [], said.strip()
    while rest:
        response, end = decoder.raw_decode(rest)
        chunks.append(json_format.ParseDict(response, inference_pb2.GenerateResponse()).chunk)
        rest = rest[end:].lstrip()
    assert sum(len(chunk.token_ids) for chunk in chunks) == 8, said


@pytest.mark.short
def test_a_stream_by_the_openai_client(target: str, api_key: str) -> None:
    url = f"http://{target.rpartition(':')[0]}:8000/v1"
    with OpenAI(base_url=url, api_key=api_key, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["demo"]
        stream = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Tell me a story about the lighthouse."}],
            max_tokens=24,
            temperature=0,
            stream=True,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert len(text) > 10


@pytest.mark.short
def test_undisturbed_answers_are_long(answers: dict[int, Content], questions: list[Question]) -> None:
    """What all that follows is held against."""
    assert len(answers) == len(questions)
    assert len({str(answer) for answer in answers.values()}) == len(questions)
