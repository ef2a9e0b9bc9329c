"""Labels of texts, and scores and reranks of a model that reads a query and a document together.

One worker serves a classifier, another a cross encoder. Of models with other templates only cards are known, and the
records of what was asked are read from Redis.
"""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
import pytest_asyncio
import torch
from pagestream.v1 import inference_pb2 as api
from pagestream.v1.inference_pb2_grpc import InferenceStub
from pagestream.v1.records_pb2 import ModelCard
from pagestream_engine import LLM
from pagestream_streams import Broker, EmbeddedRedis, StreamsSettings, list_requests
from support.clients.gateway_clients import gateway_settings, running_address
from support.engines.arithmetic_worker import MODEL, running_worker
from support.engines.tiny_models import make_classifier
from support.processes.waiting import LIMIT_S
from support.redis.servers import emptied
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]
TOLERANCE = 1e-5
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 64, "max_model_len": 64}
TEXTS = ["one", "the second text", "3"]
LABELS = {0: "sad", 1: "glad", 2: 'so "so"'}
QUERY = "Where do otters sleep?"
DOCUMENTS = ["Otters sleep afloat, hand in hand.", "A lighthouse keeper", "Ein Brot: süß & salzig", "otters"]
TEMPLATE = (
    "<q>{{ (messages | selectattr('role', 'eq', 'query') | first).content }}</q>"
    "<d>{{ (messages | selectattr('role', 'eq', 'document') | first).content }}</d>?"
)


def make_cross_encoder(folder: Path) -> Path:
    """Write a model with one label, whose tokenizer puts special tokens around two texts and between them."""
    make_classifier(folder, "qwen3", 1)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A </s> <s> $B:1 </s>:1", special_tokens=ids
    )
    tokenizer.save(path)
    return folder


def logits(model: Path, encoded: list[list[int]]) -> list[float]:
    """Return the scores of prompts by `transformers`, without a function over them."""
    from transformers import AutoModelForSequenceClassification  # takes a second

    reference = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [reference(torch.tensor([ids])).logits[0, 0].item() for ids in encoded]


def tokenizer_of(model: Path) -> Any:
    """Return a folder's tokenizer as `transformers` has it."""
    from transformers import AutoTokenizer  # takes a second

    return AutoTokenizer.from_pretrained(model)


@dataclass(frozen=True)
class Served:
    """A model that is served, and clients of both APIs."""

    model: Path
    client: httpx.AsyncClient
    stub: Any
    broker: Broker

    async def with_card(self, name: str, change: Callable[[ModelCard], None]) -> None:
        """Make another model known, whose card is this one's with a change; no engine has it."""
        card = ModelCard()
        card.CopyFrom(await self.broker.directory.card(MODEL))
        card.name = name
        change(card)
        await self.broker.publish_model(card, partitions=1)

    async def prompts(self, path: str, body: dict[str, Any]) -> list[list[int]]:
        """Return the prompts of a request that waits for an engine."""
        answer = await self.client.post(path, json=body, headers={"X-Request-Timeout": "0.5"})
        assert answer.json()["error"]["code"] == "deadline", answer.text
        [newest] = (await list_requests(self.broker, "default", limit=1)).requests
        return [list(each.ids) for each in (await self.broker.spec(newest.request_id, "default")).prompts]


@asynccontextmanager
async def serving(redis_url: str, model: Path) -> AsyncIterator[Served]:
    settings = replace(gateway_settings(redis_url), broker=StreamsSettings(directory_ttl_s=0.0))
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(await Broker.connect(redis_url))
        await stack.enter_async_context(running_worker(broker, model, None, **OPTIONS))
        address = await stack.enter_async_context(running_address(settings))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=address.url, timeout=LIMIT_S))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address.target))
        yield Served(model, client, InferenceStub(channel), broker)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def classifier(redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    model = make_classifier(tmp_path_factory.mktemp("classifier"), "llama", 3, id2label=LABELS, label2id={})
    async with serving(emptied(redis_server), model) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scorer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    model = make_cross_encoder(tmp_path_factory.mktemp("scorer"))
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    await server.start()
    try:
        async with serving(server.url, model) as served:
            yield served
    finally:
        await server.stop()


async def test_labels_are_those_of_the_engine(classifier: Served) -> None:
    client, expected = classifier.client, LLM(classifier.model, **OPTIONS).classify(TEXTS)
    answer = await client.post("/v1/classify", json={"model": MODEL, "input": TEXTS})
    whole = answer.json()
    assert answer.status_code == 200, whole
    assert [each["index"] for each in whole["data"]] == [0, 1, 2]
    for each, other in zip(whole["data"], expected, strict=True):
        assert each["probs"] == pytest.approx(other.probs, abs=1e-6)
        assert each["label"] == LABELS[max(range(3), key=other.probs.__getitem__)]
        assert each["num_classes"] == 3
    assert whole["usage"]["prompt_tokens"] == sum(len(each.prompt_token_ids) for each in expected)
    asked = {"model": MODEL, "input": TEXTS, "use_activation": False}
    for each, other in zip((await client.post("/classify", json=asked)).json()["data"], expected, strict=True):
        assert torch.tensor(each["probs"]).softmax(0).tolist() == pytest.approx(other.probs, abs=1e-5)
        assert abs(sum(each["probs"]) - 1) > 1e-3
        assert each["label"] == LABELS[max(range(3), key=other.probs.__getitem__)]
    aliased = await client.post("/classify", json={"model": MODEL, "input": TEXTS})
    assert [each["label"] for each in aliased.json()["data"]] == [each["label"] for each in whole["data"]]
    events = await client.get(f"/v1/requests/{answer.headers['x-request-id']}/events")
    lines = [line[6:] for line in events.text.splitlines() if line.startswith("data: {")]
    shown = [json.loads(line) for line in lines if "label" in json.loads(line)]
    assert [{name: each[name] for name in whole["data"][0]} for each in shown] == whole["data"]
    refused = await client.post("/v1/embeddings", json={"model": MODEL, "input": "x"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert "scores of labels and no vectors" in refused.json()["error"]["message"]
    refused = await client.post("/v1/score", json={"model": MODEL, "text_1": "x", "text_2": ["y"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert "scores of labels and no vectors" in refused.json()["error"]["message"]


async def test_a_model_without_labels_is_refused(classifier: Served) -> None:
    await classifier.with_card("plain", lambda card: card.embedding.ClearField("labels"))
    refused = await classifier.client.post("/v1/classify", json={"model": "plain", "input": "x"})
    assert refused.status_code == 400
    assert "has no labels" in refused.json()["error"]["message"]
    assert "x-request-id" not in refused.headers


async def test_scores_are_those_of_transformers(scorer: Served) -> None:
    model, client, stub = scorer.model, scorer.client, scorer.stub
    pairs = tokenizer_of(model)([QUERY] * len(DOCUMENTS), DOCUMENTS)["input_ids"]
    expected = torch.sigmoid(torch.tensor(logits(model, pairs))).tolist()
    assert max(expected) - min(expected) > 100 * TOLERANCE
    answer = await client.post("/v1/score", json={"model": MODEL, "text_1": QUERY, "text_2": DOCUMENTS})
    assert answer.status_code == 200, answer.text
    scores = [each["score"] for each in answer.json()["data"]]
    assert scores == pytest.approx(expected, abs=TOLERANCE)
    assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, pairs))
    many = await client.post("/v1/score", json={"model": MODEL, "data_1": DOCUMENTS[::-1], "data_2": DOCUMENTS})
    again = {"data_1": DOCUMENTS[::-1], "data_2": DOCUMENTS, "model": MODEL}
    put = await client.put(f"/v1/requests/{many.headers['x-request-id']}", json=again)
    assert put.status_code == 200, put.text
    assert put.json()["state"] == "finished"
    crossed = tokenizer_of(model)(DOCUMENTS[::-1], DOCUMENTS)["input_ids"]
    wanted = torch.sigmoid(torch.tensor(logits(model, crossed))).tolist()
    assert [each["score"] for each in many.json()["data"]] == pytest.approx(wanted, abs=TOLERANCE)

    aliased = await client.post("/score", json={"model": MODEL, "text_1": QUERY, "text_2": DOCUMENTS})
    assert [each["score"] for each in aliased.json()["data"]] == pytest.approx(expected, abs=TOLERANCE)

    raw = {"model": MODEL, "text_1": QUERY, "text_2": DOCUMENTS, "use_activation": False}
    unbounded = [each["score"] for each in (await client.post("/score", json=raw)).json()["data"]]
    assert unbounded == pytest.approx(logits(model, pairs), rel=1e-4)

    body = {"model": MODEL, "query": QUERY, "documents": DOCUMENTS, "top_n": 3}
    ranked = await client.post("/v1/rerank", json=body)
    order = sorted(range(len(DOCUMENTS)), key=lambda number: -scores[number])[:3]
    results = ranked.json()["results"]
    assert [each["index"] for each in results] == order
    assert [each["document"]["text"] for each in results] == [DOCUMENTS[number] for number in order]
    assert [each["relevance_score"] for each in results] == pytest.approx(
        [scores[number] for number in order], rel=1e-4
    )

    as_objects = {"query": {"text": QUERY}, "documents": [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]]}
    assert (await client.post("/v1/rerank", json={**body, **as_objects})).json()["results"] == results
    for path in ("/rerank", "/v2/rerank"):
        aliased = await client.post(path, json=body)
        assert [each["index"] for each in aliased.json()["results"]] == order

    events = await client.get(f"/v1/requests/{answer.headers['x-request-id']}/events")
    shown = [json.loads(line[6:]) for line in events.text.splitlines() if line.startswith("data: {")]
    assert next(each["data"] for each in shown if "data" in each) == answer.json()["data"]
    called = await stub.Score(api.ScoreRequest(model=MODEL, queries=[QUERY], documents=DOCUMENTS), timeout=LIMIT_S)
    assert list(called.scores) == pytest.approx(scores, abs=1e-6)


async def test_pairs_may_be_cut(scorer: Served) -> None:
    model, client = scorer.model, scorer.client
    tokenize = tokenizer_of(model)
    texts = [QUERY] * len(DOCUMENTS), DOCUMENTS
    pairs = tokenize(*texts, truncation=True, max_length=20)["input_ids"]
    short = tokenize([QUERY[:6]] * len(DOCUMENTS), [each[:4] for each in DOCUMENTS])["input_ids"]
    for asked, kept in (
        ({"truncate_prompt_tokens": 20}, pairs),
        ({"max_tokens_per_query": 6, "max_tokens_per_doc": 4}, short),
    ):
        body = {"model": MODEL, "queries": QUERY, "items": DOCUMENTS, **asked}
        answer = (await client.post("/score", json=body)).json()
        expected = torch.sigmoid(torch.tensor(logits(model, kept))).tolist()
        assert [each["score"] for each in answer["data"]] == pytest.approx(expected, abs=TOLERANCE)
        assert answer["usage"]["prompt_tokens"] == sum(map(len, kept))
    body = {"model": MODEL, "query": QUERY, "documents": DOCUMENTS[0], **asked}
    (result,) = (await client.post("/rerank", json=body)).json()["results"]
    assert result["document"] == {"text": DOCUMENTS[0]}
    assert result["relevance_score"] == pytest.approx(expected[0], abs=TOLERANCE)
    refused = await client.post("/rerank", json={**body, "max_tokens_per_doc": 10**6})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens_per_doc")


async def test_a_template_with_roles_for_both_makes_the_prompt_and_without_one_texts_are_joined(scorer: Served) -> None:
    tokenize = tokenizer_of(scorer.model)
    documents = ["A lighthouse keeper", "otters"]
    body = {"text_1": QUERY, "text_2": documents}
    await scorer.with_card("roles", lambda card: setattr(card, "chat_template", TEMPLATE))
    texts = [f"<q>{QUERY}</q><d>{document}</d>?" for document in documents]
    assert await scorer.prompts("/v1/score", {"model": "roles", **body}) == tokenize(texts)["input_ids"]
    await scorer.with_card("joined", lambda card: setattr(card.embedding, "joins_pairs", True))
    joined = tokenize([QUERY + each for each in documents])["input_ids"]
    assert await scorer.prompts("/v1/score", {"model": "joined", **body}) == joined


async def test_what_cannot_be_scored_is_refused(scorer: Served) -> None:
    client = scorer.client
    await scorer.with_card("short", lambda card: setattr(card, "max_model_len", 64))

    async def refusal(query: str, document: str) -> dict[str, Any]:
        body = {"model": "short", "text_1": query, "text_2": [document]}
        answer = await client.post("/v1/score", content=json.dumps(body), headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert "x-request-id" not in answer.headers
        return dict(answer.json()["error"])

    assert (await refusal("", "x"))["param"] == "text_1"
    assert (await refusal("x", ""))["param"] == "text_2"
    # Each fits, and so do both; it is the special tokens that are too many.
    long = await refusal("q" * 30, "d" * 30)
    assert (long["param"], "document 0 and its query are 64 tokens" in long["message"]) == ("text_2", True)
    assert "half of a surrogate pair" in (await refusal("\ud800", "x"))["message"]
    assert "half of a surrogate pair" in (await refusal("x", "\ud800"))["message"]
    fits = {"model": "short", "text_1": "q" * 30, "text_2": ["d" * 29]}
    assert [len(prompt) for prompt in await scorer.prompts("/v1/score", fits)] == [63]


async def test_a_long_query_before_many_documents_is_refused_before_work(scorer: Served) -> None:
    """It stands in the body once, and would be rendered for each document."""
    await scorer.with_card("long", lambda card: setattr(card, "chat_template", TEMPLATE))
    await scorer.with_card("long-joined", lambda card: setattr(card.embedding, "joins_pairs", True))
    for model in ("long", "long-joined"):
        body = {"model": model, "query": "q" * 100_000, "documents": ["d"] * 2000}
        refused = await scorer.client.post("/v1/rerank", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents")
        assert "each document is read with its query: 200002000 characters" in refused.json()["error"]["message"]


async def test_a_template_that_refuses_a_pair_names_the_documents(scorer: Served) -> None:
    template = '{{ raise_exception(\'no "query", no "document"\') }}'
    await scorer.with_card("refusing", lambda card: setattr(card, "chat_template", template))
    refused = await scorer.client.post("/v1/score", json={"model": "refusing", "text_1": "x", "text_2": ["y"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text_2")
    assert "the model's chat template refuses them" in refused.json()["error"]["message"]
