"""Read request bodies: bounded, UTF-8, strict JSON."""

import asyncio
import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from pagestream_gateway.errors import BodyTooLarge, InvalidRequest, WrongContentType

# A client that is still sending sees the refusal only once it is done, so the rest of a body that is too large is read
# and dropped, for this many seconds.
_DISCARD_LIMIT_S = 5.0

# Lists, objects and members of objects in one body. They take far more time and memory than the bytes that spell them,
# and Python's parser lets no other thread run meanwhile. A conversation of many thousand messages has fewer.
_MAX_PARTS = 2**18
# From anywhere outside a string to behind the next character that begins a part, or to the end. The quantifiers are
# possessive: nothing is matched twice, so that the time is linear whatever the bytes are.
_TO_NEXT_PART = re.compile(rb'[^"\[{:]*+(?:"(?:[^"\\]++|\\.)*+"?[^"\[{:]*+)*+([\[{:]|\Z)', re.DOTALL)


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""The escape of a half of a surrogate pair, as JSON spells characters beyond the first 65,536."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the bytes of a JSON body. Raises BodyTooLarge, WrongContentType or InvalidRequest."""
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise WrongContentType(f"Content-Type is {content_type or 'missing'}; send application/json")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise WrongContentType(f"Content-Encoding {encoding[:40]!r} is not supported; send the body without it")
    return await _read(request, max_bytes)


def parse_json(data: bytes) -> dict[str, Any]:
    """Return a JSON object from its bytes, behind UTF-8's mark of byte order where there is one.

    Raises InvalidRequest, with the field for text that UTF-8 does not have.
    """
    data = data.removeprefix(BOM_UTF8)
    # The exact count lets no other thread run while it passes over a string: 50 ms for one of 7 MiB.
    if _most_parts(data) > _MAX_PARTS and count_parts(data, _MAX_PARTS + 1) > _MAX_PARTS:
        raise InvalidRequest(None, f"the body has more than {_MAX_PARTS} lists, objects and fields")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(_find_bad_text(data), f"is not valid UTF-8 (byte {error.start} of the body)") from error
    document = _load(text)
    if not isinstance(document, dict):
        raise InvalidRequest(None, f"the body must be a JSON object, got {_json_kind(document)}")
    if _SURROGATE.search(data) and (field := _find_text(document, _has_half_pair)) is not None:
        raise InvalidRequest(field or None, "half of a surrogate pair is not text")
    return document


def count_parts(data: bytes, limit: int) -> int:
    """Return the number of lists, objects and members of objects in JSON, or `limit` where there are more."""
    return sum(bool(part[1]) for part in islice(_TO_NEXT_PART.finditer(data), min(limit, _most_parts(data))))


def _most_parts(data: bytes) -> int:
    """Return what count_parts does, with what stands in strings."""
    return data.count(b"[") + data.count(b"{") + data.count(b":")


def _load(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise InvalidRequest(None, "the body is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            None, f"the body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    except ValueError as error:  # an integer of thousands of digits
        raise InvalidRequest(None, "the body has a number that is too long") from error


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(None, f"the body is not valid JSON: {name} is no JSON number")


async def _read(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > max_bytes:
        if "expect" not in request.headers:
            await discard_body(request)
        raise BodyTooLarge(max_bytes)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                body.clear()
                await discard_body(request)
                raise BodyTooLarge(max_bytes)
    except ClientDisconnect as error:
        raise InvalidRequest(None, "the body ended early") from error
    return bytes(body)


async def discard_body(request: Request) -> None:
    """Read and drop the rest of a body, for a few seconds: its client sees the refusal once it has sent it."""
    try:
        async with asyncio.timeout(_DISCARD_LIMIT_S):
            while True:
                message = await request.receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _find_bad_text(data: bytes) -> str | None:
    """Return the path of the string that holds bytes which are not UTF-8."""
    try:
        document = json.loads(data.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        return None
    return _find_text(document, _has_escapes) or None


def _find_text(document: object, is_wanted: Callable[[str], bool]) -> str | None:
    """Return the path of the first such string, of an object for its keys; "" for the document, None for none."""
    # Iterators, not lists of what is still to see: there may be millions of ids.
    open_parts: list[Iterator[tuple[str, object]]] = [iter([("", document)])]
    while open_parts:
        child = next(open_parts[-1], None)
        if child is None:
            open_parts.pop()
            continue
        path, value = child
        if isinstance(value, str) and is_wanted(value):
            return path
        if isinstance(value, dict) and any(is_wanted(key) for key in value):
            return path
        if isinstance(value, dict | list):
            open_parts.append(_children(path, value))
    return None


def _children(path: str, value: object) -> Iterator[tuple[str, object]]:
    prefix = f"{path}." if path else ""
    if isinstance(value, dict):
        return ((f"{prefix}{key}", item) for key, item in value.items())
    if isinstance(value, list):
        return ((f"{prefix}{index}", item) for index, item in enumerate(value))
    return iter(())


def _has_escapes(text: str) -> bool:
    return not text.isascii() and any("\udc80" <= letter <= "\udcff" for letter in text)


def _has_half_pair(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _json_kind(document: object) -> str:
    kinds = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number", type(None): "null"}
    return kinds.get(type(document), "something else")
