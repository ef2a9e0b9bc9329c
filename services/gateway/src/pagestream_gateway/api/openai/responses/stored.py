"""Stored responses: their conversation, and the items that later ones refer to by their ids."""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple

from pagestream.v1.inference_pb2 import REQUEST_STATE_FINISHED
from pagestream.v1.records_pb2 import API_FORM_RESPONSES, RequestSpec
from pagestream_streams import RequestView
from pagestream_streams.errors import RequestNotFound

from pagestream_gateway.api.openai.responses.items import REFERENCE, Item, items_of
from pagestream_gateway.api.openai.responses.output import ITEM_PREFIXES, ResponseOutput, item_id
from pagestream_gateway.api.runs import split_runs
from pagestream_gateway.core.gateway import Gateway
from pagestream_gateway.errors import InvalidRequest

_INPUT_PREFIX = "item"
_MOST_RESPONSES, _MOST_ENTRIES = 512, 2**18  # that one request refers to: each log is read


class _Place(NamedTuple):
    """The part of a response that an item stands in."""

    response_id: str
    is_input: bool


async def stored_response(gateway: Gateway, response_id: str, tenant: str) -> RequestView:
    """Return the request of a response. Raises RequestNotFound, also for a request of another API."""
    view = await gateway.requests.view(response_id, tenant)
    answer = view.spec.answer
    if answer.api != API_FORM_RESPONSES or answer.response.unstored:
        raise RequestNotFound(response_id)
    return view


def input_of(spec: RequestSpec) -> list[Item]:
    """Return the conversation before a response's output, each item with an id."""
    items: list[Item] = json.loads(zlib.decompress(spec.answer.response.input_zlib))
    return [{"id": item_id(_INPUT_PREFIX, spec.request_id, number), **item} for number, item in enumerate(items)]


async def output_of(gateway: Gateway, view: RequestView) -> list[Item]:
    """Return the output of a response that has ended, as items of an input."""
    output = ResponseOutput(view.spec)
    with gateway.streams.entered():
        async with aclosing(gateway.requests.follow(view.spec)) as batches:
            async for batch in batches:
                for run in split_runs(0, batch):
                    if run.end is None:
                        output.feed(run)
    output.end()
    return items_of(output.items)


async def conversation_of(gateway: Gateway, response_id: str, tenant: str) -> list[Item]:
    """Return the input and output of a response that has ended. Raises InvalidRequest."""
    field = "previous_response_id"
    try:
        view = await stored_response(gateway, response_id, tenant)
    except RequestNotFound as error:
        raise InvalidRequest(field, f"{response_id[:200]!r} does not exist, or its log has expired") from error
    if view.state != REQUEST_STATE_FINISHED:
        raise InvalidRequest(field, "is of a response that has not ended")
    output = await output_of(gateway, view)
    return [*await gateway.pool.run(lambda: input_of(view.spec)), *output]


async def with_referred(gateway: Gateway, items: Sequence[Item], tenant: str) -> list[Item]:
    """Return items with those in place of the references that these stand for.

    The id of an item names its response, whose log is read: no index is kept. Raises InvalidRequest for an item that
    is not there, and for more responses or longer ones than one request may read.
    """
    places = {number: _place(number, item["id"]) for number, item in enumerate(items) if item["type"] == REFERENCE}
    wanted: dict[str, set[bool]] = {}
    for place in places.values():
        wanted.setdefault(place.response_id, set()).add(place.is_input)
    if len(wanted) > _MOST_RESPONSES:
        raise InvalidRequest("input", f"refers to items of {len(wanted)} responses, at most {_MOST_RESPONSES}")
    found: dict[_Place, dict[str, Item]] = {}
    num_entries = 0
    for response_id, kinds in wanted.items():
        try:
            view = await stored_response(gateway, response_id, tenant)
        except RequestNotFound:
            continue
        num_entries += view.next_index if False in kinds else 0
        if num_entries > _MOST_ENTRIES:
            raise InvalidRequest("input", f"refers to items of responses that have more than {_MOST_ENTRIES} tokens")
        if False in kinds and view.state == REQUEST_STATE_FINISHED:
            found[_Place(response_id, False)] = _by_id(await output_of(gateway, view))
        if True in kinds:
            asked = await gateway.pool.run(lambda spec=view.spec: input_of(spec))  # type: ignore[misc]
            found[_Place(response_id, True)] = _by_id(asked)
    return [
        _referred(number, item["id"], found.get(places[number], {})) if number in places else item
        for number, item in enumerate(items)
    ]


def _by_id(items: Iterable[Item]) -> dict[str, Item]:
    return {item["id"]: item for item in items}


def _referred(number: int, name: str, items: Mapping[str, Item]) -> Item:
    if name not in items:
        raise _not_found(number, name)
    return items[name]


def _place(number: int, name: str) -> _Place:
    """Return where an item stands by its id. Raises InvalidRequest for one that no response here has."""
    prefix, _, rest = name.partition("_")
    response_id, _, place = rest.rpartition("_")
    if prefix not in (*ITEM_PREFIXES.values(), _INPUT_PREFIX) or not response_id or not place.isdecimal():
        raise _not_found(number, name)
    return _Place(response_id, prefix == _INPUT_PREFIX)


def _not_found(number: int, name: str) -> InvalidRequest:
    return InvalidRequest(
        f"input.{number}.id",
        f"Item with id {name[:100]!r} not found: it is of no response that has ended and is stored. Send the item "
        "itself in place of the reference",
    )
