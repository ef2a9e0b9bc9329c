"""Scores and reranks by a model that reads a query and a document together, against `transformers` on the same."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
import torch
from pagestream.v1 import inference_pb2 as api
from pagestream.v1.inference_pb2_grpc import InferenceStub
from pagestream_streams import Broker
from support.clients.gateway_clients import gateway_settings, running_address
from support.engines.arithmetic_worker import MODEL, running_worker
from support.engines.classifiers import make_classifier
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer

LIMIT_S = 60.0
TOLERANCE = 1e-5
QUERY = "Where do otters sleep?"
DOCUMENTS = ["Otters sleep afloat, hand in hand.", "A lighthouse keeper", "Ein Brot: süß & salzig", "otters"]
TEMPLATE = (
    "<q>{{ (messages | selectattr('role', 'eq', 'query') | first).content }}</q>"
    "<d>{{ (messages | selectattr('role', 'eq', 'document') | first).content }}</d>?"
)


def make_cross_encoder(folder: Path, **changes: Any) -> Path:
    """Write a model with one label, whose tokenizer puts special tokens around two texts and between them."""
    make_classifier(folder, "qwen3", 1, **changes)
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
    reference = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [reference(torch.tensor([ids])).logits[0, 0].item() for ids in encoded]


@asynccontextmanager
async def serving(redis_url: str, model: Path, **options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    async with (
        await Broker.connect(redis_url) as broker,
        running_worker(broker, model, None, dtype="float32", device="cpu", num_gpu_blocks_override=64, **options),
        running_address(gateway_settings(redis_url)) as address,
        httpx.AsyncClient(base_url=address.url, timeout=LIMIT_S) as client,
        grpc.aio.insecure_channel(address.target) as channel,
    ):
        yield client, InferenceStub(channel)


async def test_scores_are_those_of_transformers(redis_url: str, tmp_path: Path) -> None:
    model = make_cross_encoder(tmp_path / "model")
    pairs = AutoTokenizer.from_pretrained(model)([QUERY] * len(DOCUMENTS), DOCUMENTS)["input_ids"]
    expected = torch.sigmoid(torch.tensor(logits(model, pairs))).tolist()
    assert max(expected) - min(expected) > 100 * TOLERANCE
    async with serving(redis_url, model) as (client, stub):
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
        crossed = AutoTokenizer.from_pretrained(model)(DOCUMENTS[::-1], DOCUMENTS)["input_ids"]
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

        for path in ("/rerank", "/v2/rerank"):
            aliased = await client.post(path, json=body)
            assert [each["index"] for each in aliased.json()["results"]] == order

        events = await client.get(f"/v1/requests/{answer.headers['x-request-id']}/events")
        shown = [json.loads(line[6:]) for line in events.text.splitlines() if line.startswith("data: {")]
        assert next(each["data"] for each in shown if "data" in each) == answer.json()["data"]
        called = await stub.Score(api.ScoreRequest(model=MODEL, queries=[QUERY], documents=DOCUMENTS), timeout=LIMIT_S)
        assert list(called.scores) == pytest.approx(scores, abs=1e-6)


async def test_pairs_may_be_cut(redis_url: str, tmp_path: Path) -> None:
    model = make_cross_encoder(tmp_path / "model")
    tokenize = AutoTokenizer.from_pretrained(model)
    texts = [QUERY] * len(DOCUMENTS), DOCUMENTS
    pairs = tokenize(*texts, truncation=True, max_length=20)["input_ids"]
    short = tokenize([QUERY[:6]] * len(DOCUMENTS), [each[:4] for each in DOCUMENTS])["input_ids"]
    async with serving(redis_url, model) as (client, _):
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


async def test_a_template_with_roles_for_both_makes_the_prompt(redis_url: str, tmp_path: Path) -> None:
    model = make_cross_encoder(
        tmp_path / "model", sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"}
    )
    (model / "chat_template.jinja").write_text(TEMPLATE)
    texts = [f"<q>{QUERY}</q><d>{document}</d>?" for document in DOCUMENTS]
    expected = logits(model, AutoTokenizer.from_pretrained(model)(texts)["input_ids"])
    async with serving(redis_url, model) as (client, _):
        answer = await client.post("/v1/score", json={"model": MODEL, "text_1": QUERY, "text_2": DOCUMENTS})
        assert [each["score"] for each in answer.json()["data"]] == pytest.approx(expected, rel=TOLERANCE)


async def test_what_cannot_be_scored_is_refused(redis_url: str, tmp_path: Path) -> None:
    model = make_cross_encoder(tmp_path / "model")
    async with serving(redis_url, model, max_model_len=64) as (client, _):

        async def refusal(query: str, document: str) -> dict[str, Any]:
            body = {"model": MODEL, "text_1": query, "text_2": [document]}
            answer = await client.post(
                "/v1/score", content=json.dumps(body), headers={"content-type": "application/json"}
            )
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
        fits = await client.post("/v1/score", json={"model": MODEL, "text_1": "q" * 30, "text_2": ["d" * 29]})
        assert fits.status_code == 200
        assert fits.json()["usage"]["prompt_tokens"] == 63


async def test_a_model_with_more_labels_gives_no_score(redis_url: str, tmp_path: Path) -> None:
    async with serving(redis_url, make_classifier(tmp_path / "model", "llama", 3)) as (client, _):
        refused = await client.post("/v1/score", json={"model": MODEL, "text_1": "x", "text_2": ["y"]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        assert "scores of labels and no vectors" in refused.json()["error"]["message"]


@pytest.mark.parametrize("has_template", [True, False])
async def test_a_long_query_before_many_documents_is_refused_before_work(
    redis_url: str, tmp_path: Path, has_template: bool
) -> None:
    """It stands in the body once, and would be rendered for each document."""
    model = make_cross_encoder(tmp_path / "model", use_sep_token=has_template)
    if has_template:
        (model / "chat_template.jinja").write_text(TEMPLATE)
    async with serving(redis_url, model) as (client, _):
        body = {"model": MODEL, "query": "q" * 100_000, "documents": ["d"] * 2000}
        refused = await client.post("/v1/rerank", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents")
        assert "each document is read with its query: 200002000 characters" in refused.json()["error"]["message"]


async def test_a_template_that_refuses_a_pair_names_the_documents(redis_url: str, tmp_path: Path) -> None:
    model = make_cross_encoder(tmp_path / "model")
    (model / "chat_template.jinja").write_text('{{ raise_exception(\'no "query", no "document"\') }}')
    async with serving(redis_url, model) as (client, _):
        refused = await client.post("/v1/score", json={"model": MODEL, "text_1": "x", "text_2": ["y"]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text_2")
        assert "the model's chat template refuses them" in refused.json()["error"]["message"]


async def test_joined_texts(redis_url: str, tmp_path: Path) -> None:
    model = make_cross_encoder(tmp_path / "model", use_sep_token=False)
    expected = logits(model, AutoTokenizer.from_pretrained(model)([QUERY + each for each in DOCUMENTS])["input_ids"])
    async with serving(redis_url, model) as (client, _):
        answer = await client.post("/v1/score", json={"model": MODEL, "text_1": QUERY, "text_2": DOCUMENTS})
        wanted = torch.sigmoid(torch.tensor(expected)).tolist()
        assert [each["score"] for each in answer.json()["data"]] == pytest.approx(wanted, abs=TOLERANCE)
