"""Ids of calls: those of our answers, and those that a conversation brings along."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pagestream.v1.records_pb2 import OutputForm

from pagestream_gateway.core.output.formats import FORCED

_LENGTH = 9
_TAKEN_BY_MISTRAL = re.compile(rf"[A-Za-z0-9]{{{_LENGTH}}}")
"""Its templates refuse any other id, as mistral-common does."""


def call_id(place: str, form: OutputForm) -> str:
    """Return the id of a call at a place: a request, its choice, and the call's number.

    It is as long as the model's template takes it; where a record doesn't say whose calls a grammar forces, so short
    that each template does.
    """
    own = form.own_format if form.tool_format in FORCED else form.tool_format
    digest = _digest(place)
    return digest[:_LENGTH] if own in ("", "mistral") else f"call_{digest[:24]}"


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a conversation whose calls and results have ids that Mistral's templates take.

    Those of other servers become their last nine characters, as in vLLM; where that is none, or another call's, they
    become others that depend on the id alone. A call and its result stay together.
    """
    given = [each["id"] for message in messages for each in message.get("tool_calls") or ()]
    given += [each for message in messages if (each := message.get("tool_call_id")) is not None]
    short = {each: each for each in given if _TAKEN_BY_MISTRAL.fullmatch(each)}
    taken = set(short)
    for each in given:
        if each not in short:
            end = each[-_LENGTH:]
            is_free = _TAKEN_BY_MISTRAL.fullmatch(end) and end not in taken
            short[each] = end if is_free else _digest(each)[:_LENGTH]
            taken.add(short[each])
    return [_with_ids(message, short) for message in messages]


def _with_ids(message: Mapping[str, Any], short: Mapping[str, str]) -> Mapping[str, Any]:
    found = dict(message)
    if message.get("tool_calls"):
        found["tool_calls"] = [{**each, "id": short[each["id"]]} for each in message["tool_calls"]]
    if message.get("tool_call_id") is not None:
        found["tool_call_id"] = short[message["tool_call_id"]]
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
