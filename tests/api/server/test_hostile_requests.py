"""The requests of `make hostile`: a gateway takes them or says why not, and a new field is among them by itself."""

import copy
import json
import logging
from typing import Any

import httpx
import pytest
from campaigns.hostile_requests.requests import HostileRequest, Requests
from campaigns.hostile_requests.sending import LEFT, Answer, sent
from campaigns.hostile_requests.values import CHAT, EMBEDDINGS, SCORE, Target
from support.clients.gateway_clients import Address
from support.engines.synthetic_engine import FAILING_TOKEN, MAX_MODEL_LEN, MODEL, synthetic_card
from support.processes.waiting import LIMIT_S

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

COUNT = 40
SEED = "1"
WORK = 64
NEW_FIELD = {"anyOf": [{"type": "integer", "minimum": 3, "maximum": 5}, {"type": "null"}]}
VECTORS = (EMBEDDINGS, SCORE)
"""The synthetic engine computes none."""


def target() -> Target:
    return Target((MODEL,), synthetic_card().vocab_size, MAX_MODEL_LEN, 12, FAILING_TOKEN + 1)


async def document_of(gateway: Address) -> Any:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        return (await client.get("/openapi.json")).json()


async def test_every_request_is_taken_or_refused_as_documented(
    gateway: Address, caplog: pytest.LogCaptureFixture
) -> None:
    requests = Requests(await document_of(gateway), target(), SEED, WORK)
    answers: list[tuple[HostileRequest, Answer]] = []
    async with httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S) as client:
        for number in range(COUNT):
            request = requests.request(number)
            if request.path not in VECTORS:
                answers.append((request, await sent(client, request, LIMIT_S)))
    wrong = [
        (request.number, answer)
        for request, answer in answers
        if answer.error
        or answer.status not in {LEFT, *requests.operations[request.path].statuses}
        or answer.status >= 500
        or (answer.status >= 400 and '"message"' not in answer.text)
    ]
    assert not wrong
    taken = [answer for _, answer in answers if answer.status == httpx.codes.OK]
    assert len(taken) > len(answers) / 2
    assert any(answer.status == httpx.codes.BAD_REQUEST for _, answer in answers)
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


async def test_a_number_gives_the_same_request_again_also_from_its_json(gateway: Address) -> None:
    document = await document_of(gateway)
    first, second = (Requests(document, target(), SEED, WORK) for _ in range(2))
    assert [first.request(number) for number in range(9)] == [second.request(number) for number in range(9)]
    request = first.request(4)
    assert HostileRequest(**json.loads(json.dumps(request.as_json()))) == request
    assert request != Requests(document, target(), SEED + "0", WORK).request(4)


async def test_a_field_that_only_the_document_has_is_drawn_within_its_bounds(gateway: Address) -> None:
    document = copy.deepcopy(await document_of(gateway))
    name = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    document["components"]["schemas"][name.rpartition("/")[2]]["properties"]["brand_new"] = NEW_FIELD
    requests = Requests(document, target(), SEED, WORK)
    found = {requests.request(number).body.get("brand_new") for number in range(300)} - {None}
    assert found
    assert found <= {3, 4, 5}
