"""Clients that others wrote, against the processes of a deployment with the demo model; see prepare.sh."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

ANSWER = "Mara lives in the lighthouse."
VILLAGER = {"name": "Mara", "job": "lighthouse keeper", "age": 42}
CALLS = [["get_weather", {"city": "Paris"}], ["add", {"a": 17, "b": 25}]]
TOLD = "The weather in Paris: rain, 12 degrees. 17 + 25 = 42."
Results = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("name", ["langchain_program.py", "litellm_program.py", "ai_sdk.mjs", "openai_node.mjs"])
def test_libraries(url: str, results: Results, name: str) -> None:
    found = results(name, url)
    assert (found["text"], found["streamed"], found["tokens"]) == (ANSWER, ANSWER, 7)
    assert found["num_chunks"] > 1  # of seven tokens, some of which may come together
    assert (found["forced"], found["calls"], found["answer"]) == (CALLS[:1], CALLS, TOLD)
    assert found["structured"] == VILLAGER
    assert found.get("response", ANSWER) == ANSWER


def test_the_llm_command(url: str, results: Results) -> None:
    assert results("llm_program.py", url) == {"text": ANSWER, "streamed": ANSWER, "structured": VILLAGER}


@pytest.mark.parametrize("name", ["second_turns.py", "second_turns.mjs", "ai_sdk_turns.mjs"])
def test_what_a_client_was_given_is_taken_back(url: str, results: Results, report: list[str], name: str) -> None:
    """Each helper's first answer, as it gives it, in the conversation of a second request."""
    found = results(name, url)
    helpers = Counter(each.rsplit(", ", 1)[0] for each in found)
    report += [f"{name}: {len(found)} second turns", *(f"  {each}: {count}" for each, count in helpers.items())]
    assert {each: said for each, said in found.items() if said not in (ANSWER, TOLD)} == {}


FAILING = {
    "open-responses": {"image-input"},
    "openai-chat": {"chat-image-input", "chat-error-handling"},
    "anthropic": {"anth-image-input"},
}
"""Of each suite: no model here sees images, and a chat may leave out `model`."""


@pytest.mark.parametrize("form", FAILING)
def test_compliance(url: str, results: Results, report: list[str], form: str) -> None:
    """The suites of llm-comply, which validate answers and events against the published schemas."""
    arguments = ["--format", form, "-u", f"{url}/v1", "-k", "none", "-m", "demo", "--json"]
    found = results("llm-comply", *arguments, exit_codes=(0, 1))
    report += [f"llm-comply, {form}: {found['summary']}"]
    report += [f"  {each['id']}: {each['status']}" for each in found["results"] if each["status"] != "passed"]
    assert {each["id"] for each in found["results"] if each["status"] == "failed"} == FAILING[form], found


def test_the_fields_of_clients_types(url: str, results: Results, report: list[str]) -> None:
    """A field of the pinned clients' requests is taken or refused for what it asks; one that answers need is there."""
    found = results("sdk_fields.py", url)
    requests, answers = found["requests"], found["answers"]
    report.append(f"fields of the clients' requests: {dict(Counter(requests.values()))}")
    report += [f"  {said}: {name}" for name, said in sorted(requests.items()) if said != "known"]
    report.append(f"fields of the clients' answers that are not written: {dict(Counter(answers.values()))}")
    report += [f"  {said}: {name}" for name, said in sorted(answers.items())]
    assert [name for name, said in requests.items() if said == "unknown"] == []
    assert [name for name, said in answers.items() if said == "needed"] == []
