"""Send the same requests to `pagestream serve` and `vllm serve` with the demo model, and compare the answers.

Compared are the status, the text, the finish reason and the calls of greedy answers, and the members of bodies and
events: each one that vLLM's has with a value must be in ours. What differs by intent is in `KNOWN`.

    PYTHONPATH=tests python tests/campaigns/beside_vllm.py --vllm /path/to/vllm

An environment with vLLM's CPU build: docs/benchmarks/vllm-bench.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from support.processes.served import running_serve
from support.processes.stack import DEMO_MODEL, free_port
from support.processes.waiting import wait_until

READY_LIMIT_S = 300.0
CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
ASKED = [{"role": "user", "content": "Which job does Mara have?"}]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": "demo", "messages": ASKED, "temperature": 0, "max_tokens": 12},
    TEXT: {"model": "demo", "prompt": "The lighthouse", "temperature": 0, "max_tokens": 8},
    MESSAGES: {"model": "demo", "messages": ASKED, "temperature": 0, "max_tokens": 12},
    RESPONSES: {"model": "demo", "input": ASKED[0]["content"], "temperature": 0, "max_output_tokens": 20},
    "/v1/messages/count_tokens": {"model": "demo", "messages": ASKED},
    "/tokenize": {"model": "demo"},
    "/detokenize": {"model": "demo"},
}
CITY = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": CITY}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
FLAG = {"type": "object", "properties": {"a": {"const": True}}, "required": ["a"], "additionalProperties": False}
USAGE = {"include_usage": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {}),
    (CHAT, {"logprobs": True, "top_logprobs": 2}),
    (CHAT, {"stop": ["keeper"]}),
    (CHAT, {"stream": True}),
    (CHAT, {"stream": True, "stream_options": USAGE}),
    (CHAT, {"stream": True, "stream_options": {**USAGE, "continuous_usage_stats": True}}),
    (CHAT, {"stream": True, "logprobs": True, "top_logprobs": 1}),
    (CHAT, {"tools": [TOOL], "max_tokens": 40}),
    (CHAT, {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}),
    (CHAT, {"tools": [TOOL], "tool_choice": NAMED, "max_tokens": 60}),
    (CHAT, {"tools": [TOOL], "tool_choice": NAMED, "max_tokens": 60, "stream": True}),
    (
        CHAT,
        {
            "messages": [
                *ASKED,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "1", "content": "7"},
            ],
            "tools": [TOOL],
        },
    ),
    (
        CHAT,
        {
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": FLAG}},
            "structured_outputs": None,
            "max_tokens": 60,
        },
    ),
    (CHAT, {"structured_outputs": {"choice": ["yes", "no"]}}),
    (CHAT, {"structured_outputs": {"regex": "[0-9]{3}"}}),
    (CHAT, {"max_tokens": 5000}),
    (CHAT, {"max_tokens": 1020, "stop": ["."]}),
    (CHAT, {"max_completion_tokens": 3}),
    (CHAT, {"max_tokens": 12.0}),
    *(
        (CHAT, wrong)
        for wrong in (
            {"max_tokens": 0},
            {"max_tokens": -1},
            {"temperature": -1},
            {"top_p": 0},
            {"n": 0},
            {"messages": []},
            {"messages": None},
            {"messages": [{"role": "x", "content": "a"}]},
            {"model": "none"},
            {"seed": "x"},
        )
    ),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]}),
    (CHAT, {"messages": [{"role": "system", "content": "Be brief."}, *ASKED]}),
    (CHAT, {"messages": [{"role": "developer", "content": "Be brief."}, *ASKED]}),
    (
        CHAT,
        {
            "messages": [*ASKED, {"role": "assistant", "content": "Mara is"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ),
    (CHAT, {"return_token_ids": True}),
    (CHAT, {"return_token_ids": True, "stream": True}),
    (CHAT, {"return_tokens_as_token_ids": True, "logprobs": True}),
    (CHAT, {"prompt_logprobs": 1}),
    (CHAT, {"logit_bias": {"5": 100}}),
    (CHAT, {"allowed_token_ids": [5, 6, 7]}),
    (CHAT, {"bad_words": ["Tide"]}),
    (CHAT, {"min_tokens": 5, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5}),
    (CHAT, {"reasoning_effort": "low"}),
    (CHAT, {"reasoning_effort": "none", "include_reasoning": False}),
    (CHAT, {"user": "u", "metadata": {"a": "b"}, "store": True, "cache_salt": "s", "priority": 1}),
    (CHAT, {"use_beam_search": True, "n": 2}),
    (CHAT, {"spaces_between_special_tokens": False, "skip_special_tokens": False, "stream_interval": 4}),
    (CHAT, {"stream": True, "stream_interval": 4}),
    *(
        (CHAT, {"return_token_ids": True, **cut})
        for cut in (
            {"truncate_prompt_tokens": 8},
            {"truncate_prompt_tokens": 8, "truncation_side": "left"},
            {"truncate_prompt_tokens": 8, "truncation_side": "right"},
            {"truncate_prompt_tokens": -1, "messages": [{"role": "user", "content": "word " * 2000}]},
            {"truncate_prompt_tokens": 0},
            {"truncate_prompt_tokens": -2},
            {"truncate_prompt_tokens": 2000},
        )
    ),
    (TEXT, {}),
    (TEXT, {"stream": True, "stream_options": USAGE}),
    (TEXT, {"echo": True}),
    (TEXT, {"echo": True, "max_tokens": 0}),
    (TEXT, {"logprobs": 2}),
    (TEXT, {"prompt": ["The baker", "The lighthouse"]}),
    (TEXT, {"prompt": [5, 6, 7]}),
    (TEXT, {"prompt": [[5, 6], [7]]}),
    (TEXT, {"prompt_logprobs": 0}),
    (TEXT, {"truncate_prompt_tokens": 2, "return_token_ids": True}),
    (TEXT, {"truncate_prompt_tokens": 2, "truncation_side": "right", "return_token_ids": True, "stream": True}),
    (TEXT, {"truncate_prompt_tokens": 2, "prompt_logprobs": 0}),
    (TEXT, {"truncate_prompt_tokens": 2, "prompt": [5, 6, 7]}),
    (TEXT, {"truncate_prompt_tokens": -1, "prompt": "word " * 2000, "logit_bias": {"5": 100}}),
    (TEXT, {"return_token_ids": True, "stream": True}),
    (TEXT, {"stop_token_ids": [5]}),
    (TEXT, {"max_tokens": None}),
    (TEXT, {"suffix": "x"}),
    (TEXT, {"prompt": ""}),
    ("/tokenize", {"prompt": "Hello there"}),
    ("/tokenize", {"prompt": "Hello there", "return_token_strs": True}),
    ("/tokenize", {"messages": ASKED}),
    ("/tokenize", {"prompt": ""}),
    ("/tokenize", {"prompt": "word " * 2000}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    (MESSAGES, {}),
    (MESSAGES, {"stream": True}),
    (
        MESSAGES,
        {"tools": [{"name": "get_weather", "input_schema": CITY}], "tool_choice": {"type": "any"}, "max_tokens": 60},
    ),
    ("/v1/messages/count_tokens", {}),
    (RESPONSES, {}),
    (RESPONSES, {"stream": True}),
    (RESPONSES, {"include_reasoning": False}),
    (RESPONSES, {"truncation": "auto"}),
    (RESPONSES, {"truncation": "auto", "input": "word " * 2000}),
    (RESPONSES, {"instructions": "Be brief", "input": [{"role": "user", "content": "Hello"}]}),
]
KNOWN = {
    "choices.stop_reason": "of a beam, vLLM shows the end-of-sequence token; other ends are compared by their reason",
    "system_fingerprint": "no engine runs a request that has no output",
    "choices.message.content": "null beside forced calls, as OpenAI has it, in place of an empty text",
    "usage.completion_tokens_details": "without a reasoning parser there is nothing to count",
    "context_management": "conversations are not edited",
    "usage.input_tokens_details": "of one turn",
    "usage.output_tokens_details": "of one turn",
    "response.usage.input_tokens_details": "of one turn",
    "response.usage.output_tokens_details": "of one turn",
    "frequency_penalty": "a response's parameters",
    "presence_penalty": "a response's parameters",
    "response.frequency_penalty": "a response's parameters",
    "response.presence_penalty": "a response's parameters",
}
"""Members that are in vLLM's answers alone, by the beginning of their path."""


class Answer(NamedTuple):
    """What came of a request."""

    status: int
    body: Any
    """JSON, or the list of a stream's events."""


def asked(url: str, path: str, body: dict[str, Any]) -> Answer:
    """Send a request."""
    answer = httpx.post(url + path, json=body, timeout=120.0)
    if answer.status_code != 200 or not body.get("stream"):
        return Answer(answer.status_code, answer.json())
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return Answer(answer.status_code, [json.loads(line) for line in data])


def members(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the members that have a value."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if inner is not None and inner != []:
                here = f"{path}.{name}".removeprefix(".")
                # What follows is a mapping by the client's own names, or by tokens.
                yield here
                if name not in ("prompt_logprobs", "top_logprobs", "metadata"):
                    yield from members(inner, here)
    elif isinstance(value, list):
        for inner in value:
            yield from members(inner, path)


def said(answer: Answer) -> Any:
    """Return what an answer says: its text, its calls and its end, of each choice."""
    events = answer.body if isinstance(answer.body, list) else [answer.body]
    found: dict[int, list[Any]] = {}
    for event in events:
        for choice in event.get("choices", ()) if isinstance(event, dict) else ():
            part = choice.get("delta") or choice.get("message") or choice
            text, arguments, end = found.setdefault(choice["index"], ["", "", None])
            text += part.get("content") or part.get("text") or ""
            arguments += "".join(each["function"].get("arguments") or "" for each in part.get("tool_calls") or ())
            found[choice["index"]] = [text, arguments, choice.get("finish_reason") or end]
    return found


def differences(path: str, ours: Answer, theirs: Answer, *, is_forced: bool) -> list[str]:
    """Return in what two answers differ.

    `is_forced`: a grammar of JSON holds them. Where blanks may stand is left to its library, and what follows from it.
    """
    if ours.status != theirs.status:
        return [f"status {ours.status}, vLLM's {theirs.status}: {json.dumps(ours.body)[:160]}"]
    if ours.status != 200:
        return []
    missing = sorted(set(members(theirs.body)) - set(members(ours.body)))
    found = [f"no member {name}" for name in missing if not any(name.startswith(known) for known in KNOWN)]
    if not is_forced and said(ours) != said(theirs):
        found.append(f"{said(ours)}, vLLM's {said(theirs)}")
    if path.endswith("tokenize") and ours.body != theirs.body:
        found.append(f"{json.dumps(ours.body)[:80]}, vLLM's {json.dumps(theirs.body)[:80]}")
    return found


@contextmanager
def running_vllm(command: str, log: Path) -> Iterator[str]:
    """Run `vllm serve` with the demo model; yield its address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    arguments = [command, "serve", str(DEMO_MODEL), "--served-model-name", "demo", "--port", str(port)]
    arguments += ["--max-model-len", "1024", "--dtype", "float32", "--enforce-eager"]
    arguments += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_until(lambda: is_healthy(url), limit_s=READY_LIMIT_S, what="vllm serve")
        yield url
    finally:
        process.terminate()
        process.wait(30)


def is_healthy(url: str) -> bool:
    """Whether a server answers."""
    try:
        return httpx.get(f"{url}/health", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


def main() -> int:
    """Print what differs; the exit status says whether anything did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="the command of an environment with vLLM's CPU build")
    options = parser.parse_args()
    count = 0
    with tempfile.TemporaryDirectory() as folder, running_vllm(options.vllm, Path(folder) / "vllm.log") as theirs:
        with running_serve(Path(folder)) as served:
            ours = served.record.http_urls()[0]
            for path, more in CASES:
                body = {name: value for name, value in {**BASE[path], **more}.items() if value is not None}
                is_forced = "response_format" in body or body.get("tool_choice", "auto") != "auto"
                found = differences(path, asked(ours, path, body), asked(theirs, path, body), is_forced=is_forced)
                count += bool(found)
                for each in found:
                    print(f"{path} {json.dumps(more)[:120]}: {each}", flush=True)
    print(f"{len(CASES)} requests, {len(CASES) - count} answered alike")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
