"""Labels of texts through a gateway and a real engine: whole, read again as events, and refused by other models."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from pagestream_engine import LLM
from pagestream_streams import Broker
from support.clients.gateway_clients import gateway_settings, running_address
from support.engines.arithmetic_worker import MODEL, running_worker
from support.engines.classifiers import make_classifier
from support.engines.tiny_models import make_model

LIMIT_S = 60.0
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 64}
TEXTS = ["one", "the second text", "3"]
LABELS = {0: "sad", 1: "glad", 2: 'so "so"'}


@asynccontextmanager
async def serving(redis_url: str, model: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        await Broker.connect(redis_url) as broker,
        running_worker(broker, model, None, **OPTIONS),
        running_address(gateway_settings(redis_url)) as address,
        httpx.AsyncClient(base_url=address.url, timeout=LIMIT_S) as client,
    ):
        yield client


async def test_labels_are_those_of_the_engine(redis_url: str, tmp_path: Path) -> None:
    model = make_classifier(tmp_path / "model", "llama", 3, id2label=LABELS, label2id={})
    expected = LLM(model, **OPTIONS).classify(TEXTS)
    async with serving(redis_url, model) as client:
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


async def test_a_model_without_labels_is_refused(redis_url: str, tmp_path: Path) -> None:
    async with serving(redis_url, make_model(tmp_path / "model", "llama")) as client:
        refused = await client.post("/v1/classify", json={"model": MODEL, "input": "x"})
        assert refused.status_code == 400
        assert "has no labels" in refused.json()["error"]["message"]
        assert "x-request-id" not in refused.headers
