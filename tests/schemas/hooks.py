"""What schemathesis does not know of this API: the model's name, NDJSON, the JSON inside of events, who needs a key.

Loaded by schemathesis in its own environment: `tests/campaigns/schemas.py` sets the variables.
"""

import json
import os
import random
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import schemathesis
from schemathesis import GenerationMode

MODEL = os.environ["SCHEMAS_MODEL"]
STATUSES = Path(os.environ["SCHEMAS_STATUSES"])
"""File that gets the number of answers by operation and status."""
ADMIN_KEY = os.environ.get("SCHEMAS_ADMIN_KEY", "")
IS_KEYLESS = os.environ.get("SCHEMAS_KEYLESS") == "1"
"""Whether the server asks for a key and gets none."""
PROBES = ("/healthz", "/health", "/ping", "/version", "/load", "/readyz", "/metrics")
MESSAGES = [{"role": "user", "content": "hello"}]
ACCEPTED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "hello"},
    "/v1/chat/completions": {"model": MODEL, "messages": MESSAGES},
    "/v1/responses": {"model": MODEL, "input": "hello"},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 3},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": MESSAGES},
    "/v1/requests/{request_id}": {"model": MODEL, "prompt": "hello", "max_tokens": 3, "seed": 1},
    "/tokenize": {"model": MODEL, "prompt": "hello"},
    "/detokenize": {"model": MODEL, "tokens": [10, 11]},
}
"""Bodies by path."""
WHOLE = ("/v1/messages/count_tokens", "/tokenize", "/detokenize")
"""Paths whose answers can't be streamed."""
STREAMED = 0.4  # of the others
LINES, EVENTS = "application/x-ndjson", "text/event-stream"

_statuses: defaultdict[str, Counter[int]] = defaultdict(Counter)
_validators: dict[str, jsonschema_rs.Validator] = {}


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: dict[str, Any]) -> None:
    """Make most requests that the document allows ones that can succeed, and ask for lines of JSON in some.

    A body of random fields is nearly always refused, for one of them: most bodies get a few of their fields alone, on
    top of a body that is accepted.
    """
    draw = zlib.crc32(repr((case.operation.label, case.body, case.query)).encode())
    if draw % 16 < 4:
        case.headers = {**(case.headers or {}), "Accept": LINES}
    tried = getattr(getattr(case.meta, "phase", None), "data", None)  # of a case that tries one parameter
    if ADMIN_KEY and case.operation.path.startswith("/admin/") and getattr(tried, "parameter", "") != "Authorization":
        case.headers = {**(case.headers or {}), "Authorization": f"Bearer {ADMIN_KEY}"}
    if case.meta is None or case.meta.generation.mode is not GenerationMode.POSITIVE:
        return
    if "name" in (case.path_parameters or {}) and draw % 2:
        case.path_parameters["name"] = MODEL
    accepted = ACCEPTED.get(case.operation.path)
    if accepted is not None and isinstance(case.body, dict) and draw % 8:
        chance = random.Random(draw)
        names = sorted(set(case.body) - set(accepted)) or sorted(case.body)
        kept = chance.sample(names, min(len(names), chance.randrange(4)))
        case.body = {**accepted, **{name: case.body[name] for name in kept}}
        if chance.random() < STREAMED and case.operation.path not in WHOLE:
            case.body["stream"] = True


@schemathesis.hook
def after_call(_context: Any, case: Any, response: Any) -> None:
    """Count answers."""
    if case.method.upper() == case.operation.method.upper():
        _statuses[f"{case.method.upper()} {case.operation.path}"][response.status_code] += 1
    STATUSES.write_text(json.dumps(_statuses))


@schemathesis.deserializer(LINES)
def _lines(_context: Any, response: Any) -> Any:
    """Return the first line: what is declared is one line. `stream_conformance` reads all of them."""
    return json.loads(response.content.split(b"\n")[0])


@schemathesis.check
def stream_conformance(_context: Any, response: Any, case: Any) -> None:
    """Every line, and the data of every event, is as declared; a stream ends as its form says."""
    kind = response.headers.get("content-type", [""])[0].partition(";")[0]
    declared = case.operation.definition.raw["responses"].get(str(response.status_code), {}).get("content", {})
    if kind == LINES and LINES in declared:
        schema, texts = declared[LINES]["schema"], [line for line in response.content.splitlines() if line]
    elif kind == EVENTS and EVENTS in declared:
        data = declared[EVENTS]["schema"]["properties"]["data"]
        schema, texts = data.get("anyOf", [data])[0]["contentSchema"], list(_data_of(response.content))
    else:
        return
    validator = _validator(schema, case.operation.schema.raw_schema["components"])
    for text in texts:
        if text == b"[DONE]":
            continue
        error = next(iter(validator.iter_errors(json.loads(text))), None)
        if error is not None:
            raise AssertionError(f"{text[:300]!r} is not as declared: {str(error)[:600]}")


@schemathesis.check
def asks_for_a_key(_context: Any, response: Any, case: Any) -> None:
    """Without a key nothing but probes is answered."""
    is_refused = response.status_code in (401, 400, 405, 408, 413, 415, 431)
    if IS_KEYLESS and case.operation.path not in PROBES and not is_refused:
        raise AssertionError(f"{response.status_code} without a key")


def _data_of(stream: bytes) -> Iterator[bytes]:
    for line in stream.splitlines():
        if line.startswith(b"data:"):
            yield line[5:].strip()


def _validator(schema: dict[str, Any], components: dict[str, Any]) -> jsonschema_rs.Validator:
    key = json.dumps(schema)
    if key not in _validators:
        _validators[key] = jsonschema_rs.validator_for({**schema, "components": components})
    return _validators[key]
