"""POST /classify, which is vLLM's, and POST /v1/classify: their body, their routes and their answers.

An engine computes the probabilities.
"""

import json
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from pagestream.v1.records_pb2 import API_FORM_CLASSIFY, VectorForm
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from pagestream_gateway.calls import EMBEDDINGS
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.body import Prompts, parse_body, prompts_of
from pagestream_gateway.http.documents import body_of
from pagestream_gateway.openai import generation
from pagestream_gateway.openai.embeddings import UNSUPPORTED, EmbeddingList, EmbeddingWriter, VectorBody, vector_request
from pagestream_gateway.openai.generation import ParsedRequest, without_unsupported
from pagestream_gateway.request import AskedPooling
from pagestream_gateway.similarities import numbers_of
from pagestream_gateway.streams.runs import Run


class ClassificationBody(VectorBody):
    """POST /classify."""

    input: Prompts = Field(description="Text, token ids, or a list of either; each gets a label.")


class ClassificationWriter(EmbeddingWriter):
    """Writes probabilities of labels; those of an input are an event of a stream."""

    def item(self, run: Run) -> str:
        """Return an input's classification, without its last brace: the likeliest label, and all probabilities."""
        probabilities = numbers_of(run.embedding)
        labels = self.spec.answer.vectors.labels
        best = max(range(len(labels)), key=lambda number: (probabilities[number], -number))
        shown = ",".join(f"{number:.9g}" for number in probabilities)
        label = json.dumps(labels[best])
        return f'{{"index":{run.choice},"label":{label},"probs":[{shown}],"num_classes":{len(labels)}'


def parse(document: dict[str, Any], headers: Mapping[str, str]) -> ParsedRequest:
    """Read a body and its headers. Raises InvalidRequest."""
    body = parse_body(ClassificationBody, without_unsupported(document, UNSUPPORTED))
    return vector_request(
        body,
        headers,
        document,
        API_FORM_CLASSIFY,
        prompts=prompts_of(body.input, body.add_special_tokens is not False),
        prompt_field="input",
        form=VectorForm(),
        pooling=AskedPooling(classifies=True, activates=body.use_activation),
    )


def router(gateway: Gateway) -> APIRouter:
    """Return the resource's route."""
    routes = APIRouter(tags=["vectors"])

    @routes.post("/classify", openapi_extra=body_of(ClassificationBody), summary="Give texts labels")
    @routes.post("/v1/classify", openapi_extra=body_of(ClassificationBody), summary="Give texts labels")
    async def classify(request: Request) -> Response:
        call = gateway.calls.begin("classify", EMBEDDINGS, request.headers)
        return await generation.generate(gateway, request, call, parse, writer=ClassificationWriter, body=EmbeddingList)

    return routes
