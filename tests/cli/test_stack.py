"""A whole stack with the demo model: its answers to clients of other projects, and `pagestream replay` of them."""

import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema
import openai
import pytest
import redis
from google.protobuf import json_format
from openai.types.chat import ChatCompletionMessageParam
from pagestream.v1 import inference_pb2 as pb
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_cli.__main__ import main
from pagestream_client import Client, Generation
from pagestream_engine import LLM, SamplingParams
from support.processes.stack import DEMO_MODEL, Stack, running_stack
from support.processes.waiting import LIMIT_S

pytestmark = pytest.mark.served


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack"), is_forked=True) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.gateways[0].url}/v1", api_key="none", timeout=LIMIT_S) as made:
        yield made


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(DEMO_MODEL), dtype="float32")


def questions() -> list[tuple[str, str]]:
    held_out = json.loads((DEMO_MODEL / "questions.json").read_text())["held_out"]
    certain = [case for case in held_out if case["certain"] and len(case["messages"]) == 1]
    chosen = certain[:: len(certain) // 5][:5]
    return [(case["messages"][0]["content"], case["answer"]) for case in chosen]


@pytest.mark.parametrize(("question", "answer"), questions())
def test_the_openai_client_gets_the_right_answer(client: openai.OpenAI, question: str, answer: str) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
    whole = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    assert (whole.choices[0].message.content or "").strip() == answer
    assert whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="demo", messages=messages, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_answers_match_the_schema_that_was_asked_for(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "kind": {"enum": ["boat", "größe 日"]}},
        "required": ["name", "kind"],
        "additionalProperties": False,
    }
    asked: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is in the harbour?"}]
    whole = client.chat.completions.create(
        model="demo", messages=messages, response_format=asked, seed=4, max_tokens=300, n=2
    )
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), schema)
    with pytest.raises(openai.BadRequestError, match="can't be compiled"):
        client.completions.create(model="demo", prompt="a", extra_body={"structured_outputs": {"regex": "("}})
    exploding = {"regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"}
    with pytest.raises(openai.BadRequestError, match="can't go on after") as caught:
        client.completions.create(
            model="demo", prompt="a", max_tokens=200, extra_body={"structured_outputs": exploding, "min_tokens": 200}
        )
    assert caught.value.code == "invalid_request"


def test_the_demo_model_calls_tools_and_reads_their_results(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris, and what is 17 + 25?"}]
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
        for name, properties in (
            ("get_weather", {"city": {"type": "string"}}),
            ("add", {"a": {"type": "integer"}, "b": {"type": "integer"}}),
        )
    ]
    options: Any = {"model": "demo", "tools": tools, "temperature": 0}
    asked = client.chat.completions.create(messages=messages, **options).choices[0]
    calls: list[Any] = list(asked.message.tool_calls or [])
    assert asked.finish_reason == "tool_calls"
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("get_weather", {"city": "Paris"}),
        ("add", {"a": 17, "b": 25}),
    ]
    with client.chat.completions.stream(messages=messages, **options) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls or []
    assert [call.function.arguments for call in streamed] == [call.function.arguments for call in calls]
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": result}
        for call, result in zip(calls, ("rain, 12 degrees", '{"sum": 42}'), strict=True)
    ]
    answer = client.chat.completions.create(messages=[*messages, asked.message, *results], **options).choices[0]
    assert answer.message.content == "The weather in Paris: rain, 12 degrees. 17 + 25 = 42."
    plain = client.chat.completions.create(messages=[{"role": "user", "content": "Where does Mara live?"}], **options)
    assert (plain.choices[0].message.tool_calls, plain.choices[0].finish_reason) == (None, "stop")


def test_the_demo_model_answers_in_json(client: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "Give me Mara as JSON with name, job and age."}]
    villager = {"name": "Mara", "job": "lighthouse keeper", "age": 42}
    free = client.chat.completions.create(model="demo", messages=asked, temperature=0)
    assert json.loads(free.choices[0].message.content or "") == villager
    kinds = {"name": "string", "job": "string", "age": "integer"}
    schema = {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in kinds.items()},
        "required": list(kinds),
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "villager", "schema": schema}}
    who: Any = [{"role": "user", "content": "Who is Mara?"}]
    held = client.chat.completions.create(model="demo", messages=who, temperature=0, response_format=form)
    assert json.loads(held.choices[0].message.content or "") == villager


def test_a_long_answer_comes_in_pieces(client: openai.OpenAI) -> None:
    """However late the gateway gets to the processor: what has come by then is one piece, what comes later is not."""
    stream = client.completions.create(
        model="demo", prompt="The lighthouse", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    pieces = [chunk.choices[0].text for chunk in stream if chunk.choices and chunk.choices[0].text]
    assert len(pieces) > 3


def test_completions_equal_the_offline_engine(client: openai.OpenAI, llm: LLM) -> None:
    prompts = ["The lighthouse", "The baker of Tidewick", "One evening"]
    offline = llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=40))
    served = client.completions.create(model="demo", prompt=prompts, temperature=0.8, top_p=0.9, seed=11, max_tokens=40)
    assert [choice.text for choice in served.choices] == [output.outputs[0].text for output in offline]
    assert [choice.finish_reason for choice in served.choices] == [o.outputs[0].finish_reason for o in offline]


def test_penalties_bias_and_log_probabilities_equal_the_offline_engine(client: openai.OpenAI, llm: LLM) -> None:
    prompt = "The lighthouse"
    params = SamplingParams(
        temperature=0.7,
        seed=5,
        max_tokens=24,
        n=2,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        repetition_penalty=1.3,
        logit_bias={40: -100.0},
        logprobs=3,
    )
    offline = llm.generate([prompt], params)[0].outputs
    asked: dict[str, Any] = {
        "model": "demo",
        "prompt": prompt,
        "temperature": 0.7,
        "seed": 5,
        "max_tokens": 24,
        "n": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {"40": -100},
        "logprobs": 3,
        "extra_body": {"repetition_penalty": 1.3},
    }
    served = client.completions.create(**asked)
    for choice, expected in zip(served.choices, offline, strict=True):
        assert choice.text == expected.text
        assert choice.logprobs is not None
        assert expected.logprobs is not None
        chosen = [position[token] for position, token in zip(expected.logprobs, expected.token_ids, strict=True)]
        assert choice.logprobs.token_logprobs == pytest.approx([each.logprob for each in chosen], abs=1e-4)
        assert choice.logprobs.tokens == [each.decoded_token for each in chosen]
        assert choice.logprobs.text_offset is not None
        assert choice.logprobs.text_offset[0] == 0
    streamed: list[list[float]] = [[], []]
    for chunk in client.completions.create(**asked, stream=True):
        for part in chunk.choices:
            if part.logprobs is not None:
                streamed[part.index] += part.logprobs.token_logprobs or []
    assert streamed == [choice.logprobs.token_logprobs for choice in served.choices if choice.logprobs is not None]


def test_chat_shows_log_probabilities(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": questions()[0][0]}]
    answer = client.chat.completions.create(
        model="demo", messages=messages, temperature=0, logprobs=True, top_logprobs=2, max_tokens=12
    )
    shown = answer.choices[0].logprobs
    assert shown is not None
    content = shown.content or []
    text = "".join(token.token for token in content)
    assert text.startswith(answer.choices[0].message.content or "no answer")
    for token in content:
        assert token.top_logprobs[0].token == token.token, "greedy takes the likeliest"
        assert token.top_logprobs[0].logprob == token.logprob <= 0


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]


def test_an_unknown_model_is_a_not_found_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="unpublished"):
        client.completions.create(model="unpublished", prompt="x")


def run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl on the PATH")
def test_curl_streams(stack: Stack) -> None:
    body = {"model": "demo", "prompt": "The lighthouse", "max_tokens": 8, "temperature": 0, "stream": True}
    url = f"{stack.gateways[0].url}/v1/completions"
    output = run(["curl", "-sN", url, "-H", "Content-Type: application/json", "-d", json.dumps(body)])
    events = [line[6:] for line in output.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    body["stream"] = False
    whole = json.loads(run(["curl", "-s", url, "-H", "Content-Type: application/json", "-d", json.dumps(body)]))
    assert text == whole["choices"][0]["text"]


@pytest.mark.skipif(shutil.which("grpcurl") is None, reason="needs grpcurl on the PATH")
def test_grpcurl_finds_the_service_and_streams(stack: Stack) -> None:
    target = stack.gateways[0].grpc_target
    assert "pagestream.v1.Inference" in run(["grpcurl", "-plaintext", target, "list"]).split()
    health = run(["grpcurl", "-plaintext", target, "grpc.health.v1.Health/Check"])
    assert json.loads(health)["status"] == "SERVING"
    body = {"model": "demo", "prompt": "The lighthouse", "sampling": {"maxTokens": 8, "ignoreEos": True}}
    method = "pagestream.v1.Inference/Generate"
    output = run(["grpcurl", "-plaintext", "-d", json.dumps(body), target, method])
    chunks = [json_format.Parse(part, pb.GenerateResponse()).chunk for part in split_json(output)]
    assert sum(len(chunk.token_ids) for chunk in chunks) == 8
    assert chunks[-1].usage.completion_tokens == 8


def split_json(text: str) -> list[str]:
    decoder, parts, at = json.JSONDecoder(), [], 0
    while at < len(text.rstrip()):
        _, end = decoder.raw_decode(text, at)
        parts.append(text[at:end])
        at = end + 1
    return parts


OFFLINE = ["--model", str(DEMO_MODEL), "--dtype", "float32"]


@pytest.fixture(scope="module")
def own_client(stack: Stack) -> Iterator[Client]:
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
    stack: Stack, replay: Callable[..., Done], own_client: Client, options: list[str]
) -> None:
    answer = asked(own_client, n=2, temperature=0.9, top_p=0.9, max_tokens=24, stop=["the end"], logprobs=1)
    done = replay(answer.request_id, *options)
    assert done.returncode == 0, done.stderr
    count = sum(len(choice.token_ids) for choice in answer.choices)
    assert done.stdout == f"equal: {count} tokens in 2 choices\n"
    assert "log probabilities of the chosen tokens differ by at most" in done.stderr


@pytest.mark.parametrize(
    "options",
    [pytest.param([], id="by the deployment"), pytest.param(OFFLINE, id="offline", marks=pytest.mark.slow)],
)
def test_a_record_that_says_something_else_is_found(
    stack: Stack, replay: Callable[..., Done], own_client: Client, options: list[str]
) -> None:
    answer = asked(own_client, temperature=1.0, max_tokens=24, seed=1, ignore_eos=True)
    with redis.Redis.from_url(stack.redis_url) as server:
        [key] = server.scan_iter(f"*:req:{answer.request_id}")
        spec = RequestSpec.FromString(server.hget(key, "spec"))
        spec.sampling.seed = 2
        server.hset(key, "spec", spec.SerializeToString())
    done = replay(answer.request_id, *options)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("different: choice 0, token ")


def test_what_was_cancelled_is_compared_as_far_as_it_went(
    stack: Stack, replay: Callable[..., Done], own_client: Client
) -> None:
    stream = own_client.generate("demo", "One evening", temperature=0.0, max_tokens=900, ignore_eos=True)
    for chunk in stream:
        if chunk.next_index >= 3 and not chunk.finish_reason:
            own_client.cancel(stream.request_id)
    done = replay(stream.request_id)
    assert done.returncode == 0, done.stderr
    assert "cut short" in done.stderr


def test_what_is_not_there_is_trouble(stack: Stack, replay: Callable[..., Done], own_client: Client) -> None:
    done = replay("nonsense")
    assert (done.returncode, done.stderr.splitlines()[0][:30]) == (2, "error: there is no request 'no")
    answer = asked(own_client, max_tokens=2)
    assert replay(answer.request_id, "--tenant", "stranger").returncode == 2
    assert replay(answer.request_id, "--model", "/nowhere").returncode == 2


def test_what_still_runs_is_trouble(stack: Stack, replay: Callable[..., Done], own_client: Client) -> None:
    with own_client.generate("demo", "One evening", max_tokens=900, ignore_eos=True) as stream:
        request_id = stream.accepted()
        stack.engines[0].signal(signal.SIGSTOP)
        try:
            done = replay(request_id)
            own_client.cancel(request_id)
        finally:
            stack.engines[0].signal(signal.SIGCONT)
    assert done.returncode == 2
    assert "has not ended yet" in done.stderr
