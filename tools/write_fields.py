"""Write docs/fields.md: what becomes of each field of a request's body.

    python tools/write_fields.py [--check]

The fields come from the gateway's own declarations; the names of those that it does not know from the parameters of
OpenAI's and Anthropic's Python clients.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import batch_create_params, completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pagestream_gateway.anthropic import body as messages
from pagestream_gateway.batches import routes as batches
from pagestream_gateway.openai import chat as chat_completions
from pagestream_gateway.openai import completions, embeddings, scoring, tokens
from pagestream_gateway.openai.responses import body as responses
from pydantic import BaseModel
from pydantic.fields import FieldInfo

PAGE = Path(__file__).resolve().parents[1] / "docs" / "fields.md"
_HEAD = """\
# Fields of requests

Written by `python tools/write_fields.py`. A field *works*, or is *ignored* because it can't change the output, or is
*refused* with an error that names it: nothing that was asked for is dropped silently, but for advice that a model can't
take (an effort that its template does not know, a budget of its thinking). Values that ask for nothing are always
taken, since client libraries send them unasked. What stands inside of fields is in [responses.md](responses.md) for
`/v1/responses`, in [messages.md](messages.md) for `/v1/messages`.

## Fields that are on no list

They are refused by name with 400, at any depth of the body: `unknown_parameter` and `Unknown parameter: 'name'.` in
OpenAI's APIs, `name: Extra inputs are not permitted` in Anthropic's. A field that is null asks for nothing and is
taken.

A client that is newer than the server may send fields that the server doesn't know yet. With
`PAGESTREAM_GATEWAY__UNKNOWN_FIELDS=ignore` all gateways leave such fields out, and name them in the header
`X-Request-Warnings` of the answer:

```text
X-Request-Warnings: messages.0.annotation: unknown field, which was ignored
```

The setting is for such clients alone. A misspelt `temprature` then has no effect, and only the header says so; jobs of
a batch have no header. Fields that are *refused* below stay refused, since they would change the answer.
"""

_ORDER = ("works", "ignored", "refused")
_IGNORED, _REFUSED = (_ORDER[1], ""), _ORDER[2]


class Resource(NamedTuple):
    """A body."""

    title: str
    body: type[BaseModel]
    refused: Mapping[str, tuple[Any, ...]]
    """With the values that ask for nothing."""
    known_elsewhere: frozenset[str]
    """Names of OpenAI's, or Anthropic's, own fields."""


def _names(*declared: Any) -> frozenset[str]:
    return frozenset(name for each in declared for name in each.__annotations__)


RESOURCES = (
    Resource(
        "POST /v1/chat/completions",
        chat_completions.ChatBody,
        chat_completions.UNSUPPORTED,
        _names(chat_create_params.CompletionCreateParamsBase, chat_create_params.CompletionCreateParamsStreaming),
    ),
    Resource(
        "POST /v1/completions",
        completions.CompletionBody,
        completions.UNSUPPORTED,
        _names(completion_create_params.CompletionCreateParamsBase),
    ),
    Resource(
        "POST /v1/responses",
        responses.ResponseBody,
        responses.UNSUPPORTED,
        _names(response_create_params.ResponseCreateParamsBase, response_create_params.ResponseCreateParamsStreaming),
    ),
    Resource(
        "POST /v1/messages",
        messages.MessageBody,
        messages.UNSUPPORTED,
        _names(message_create_params.MessageCreateParamsBase, message_create_params.MessageCreateParamsStreaming),
    ),
    Resource(
        "POST /v1/messages/count_tokens",
        messages.CountBody,
        messages.UNSUPPORTED,
        _names(message_count_tokens_params.MessageCountTokensParams),
    ),
    Resource(
        "POST /v1/embeddings",
        embeddings.EmbeddingBody,
        getattr(embeddings, "UNSUPPORTED", {}),
        _names(embedding_create_params.EmbeddingCreateParams),
    ),
    Resource("POST /classify, /v1/classify", scoring.ClassificationBody, embeddings.UNSUPPORTED, frozenset()),
    Resource("POST /score, /v1/score", scoring.ScoreBody, embeddings.UNSUPPORTED, frozenset()),
    Resource("POST /rerank, /v1/rerank, /v2/rerank", scoring.RerankBody, embeddings.UNSUPPORTED, frozenset()),
    Resource("POST /v1/batches", batches.BatchBody, {}, _names(batch_create_params.BatchCreateParams)),
    Resource("POST /tokenize", tokens.TokenizeBody, tokens.UNSUPPORTED, frozenset()),
    Resource("POST /detokenize", tokens.DetokenizeBody, {}, frozenset()),
)


def page() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *(_section(resource) for resource in RESOURCES)])


def _section(resource: Resource) -> str:
    rows = {name: _row(field) for name, field in resource.body.model_fields.items()}
    rows |= {name: (_REFUSED, _neutral(values)) for name, values in resource.refused.items()}
    for name in resource.known_elsewhere:
        rows.setdefault(name, (_REFUSED, ""))
    lines = [f"## {resource.title}", "", "| field | | |", "|---|---|---|"]
    for name, (status, text) in sorted(rows.items(), key=lambda row: (_ORDER.index(row[1][0]), row[0])):
        lines.append(f"| `{name}` | {status} | {text} |")
    return "\n".join([*lines, ""])


def _row(field: FieldInfo) -> tuple[str, str]:
    return _IGNORED if field.annotation is Any else (_ORDER[0], (field.description or "").replace("|", "\\|"))


def _neutral(values: tuple[Any, ...]) -> str:
    said = " or ".join(f"`{json.dumps(value)}`" for value in values)
    return f"accepted if {said}" if said else ""


def main() -> int:
    """Write the page, or check that it is as it would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where the page differs")
    text = page()
    if parser.parse_args().check:
        return int(PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
