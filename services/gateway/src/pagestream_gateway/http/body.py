"""Read request bodies (bounded, UTF-8, strict JSON), and declare, validate and report them strictly.

A field that no body declares is refused by name, or left out with a warning in a header of the answer where the server
is set to. Types of fields report one mistake, whatever the size of the value: pydantic collects the mistakes of every
element, for each branch of a union, which is more memory than a gateway has, for a body of a few megabytes.
"""

import asyncio
import json
import re
import types
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import accumulate, islice
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from starlette.requests import ClientDisconnect, Request

from pagestream_gateway.errors import BodyTooLarge, InvalidRequest, UnknownField, WrongContentType

# A client that is still sending sees the refusal only once it is done, so the rest of a body that is too large is read
# and dropped, for this many seconds.
_DISCARD_LIMIT_S = 5.0

# Lists, objects and members of objects in one body. They take far more time and memory than the bytes that spell them,
# and Python's parser lets no other thread run meanwhile. A conversation of many thousand messages has fewer.
_MAX_PARTS = 2**18
MAX_DEPTH = 256
"""Levels of lists and objects in one body, the body's own among them.

Python's parser has a limit too, which each version draws elsewhere: what reads and writes a body's parts counts on
this one.
"""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
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
    most_parts = _most_parts(data)
    if most_parts > _MAX_PARTS and count_parts(data, _MAX_PARTS + 1) > _MAX_PARTS:
        raise InvalidRequest(None, f"the body has more than {_MAX_PARTS} lists, objects and fields")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(_find_bad_text(data), f"is not valid UTF-8 (byte {error.start} of the body)") from error
    try:
        document = _load(text)
    except RecursionError as error:
        raise _too_deep(data) from error
    if not isinstance(document, dict):
        raise InvalidRequest(None, f"the body must be a JSON object, got {_json_kind(document)}")
    if most_parts > MAX_DEPTH and is_deeper(document, MAX_DEPTH):
        raise _too_deep(data)
    if _SURROGATE.search(data) and (field := _find_text(document, _has_half_pair)) is not None:
        raise InvalidRequest(field or None, "half of a surrogate pair is not text")
    return document


def count_parts(data: bytes, limit: int) -> int:
    """Return the number of lists, objects and members of objects in JSON, or `limit` where there are more."""
    return sum(bool(part[1]) for part in islice(_TO_NEXT_PART.finditer(data), min(limit, _most_parts(data))))


def _most_parts(data: bytes) -> int:
    """Return what count_parts does, with what stands in strings."""
    return data.count(b"[") + data.count(b"{") + data.count(b":")


def is_deeper(document: dict[str, Any] | list[Any], limit: int) -> bool:
    """Return whether a document has more than `limit` levels of lists and objects, its own among them."""
    level: list[dict[str, Any] | list[Any]] = [document]
    for _ in range(limit):
        level = [
            child
            for part in level
            for child in (part.values() if isinstance(part, dict) else part)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _too_deep(data: bytes) -> InvalidRequest:
    brackets = _STRING.sub(b"", data).translate(None, _NO_BRACKETS)
    steps = (1 if each in b"[{" else -1 for each in islice(brackets, 2 * _MAX_PARTS))
    depth = max(accumulate(steps), default=0)
    return InvalidRequest(None, f"the body is nested {depth} levels deep; at most {MAX_DEPTH} are allowed")


def _load(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
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


BodyModel = TypeVar("BodyModel", bound="Body")


_HUGE = 1e300  # far beyond any bias; excludes infinity and NaN
HALF_SURROGATE = "string_unicode"
"""pydantic's error type for text that UTF-8 can't encode."""
UNION = "union"
"""The error type of `expects`."""


def expects(message: str) -> WrapValidator:
    """Replace the errors of a union, one per branch, by one `message` that says what the field takes."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            kind = first["type"] if first["type"] == HALF_SURROGATE else UNION
            raise PydanticCustomError(kind, message) from error

    return WrapValidator(validate)


def _first_wrong_bias(value: object) -> object:
    """Reduce a mapping with a wrong bias to that one."""
    if isinstance(value, dict):
        for name, bias in value.items():
            if type(bias) not in (int, float) or not -_HUGE < bias < _HUGE:
                return {name: bias}
    return value


Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
Token = Annotated[int, Field(ge=0, lt=2**32)]
Strings = Annotated[str | Items[str], expects("must be a string or a list of strings")]
Biases = Annotated[dict[str, float], BeforeValidator(_first_wrong_bias)]
EarlyStops = Annotated[bool | Literal["never"], expects('must be true, false or "never"')]
_MOST_EXACT = 2**53  # up to which each whole number is a float of its own


class Body(BaseModel):
    """A body, or a part of one. Strict: unknown fields, numbers as strings, NaN and infinity are errors.

    An unknown field that is null asks for nothing, and 16.0 is the same number as 16.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, values: object) -> object:
        """Drop all unknown fields but the first that asks for something: each would become an error that takes memory.

        Whole numbers become integers.
        """
        if not isinstance(values, dict):
            return values
        own = _names(cls)
        if not (values.keys() <= own):
            first = next((name for name, value in values.items() if name not in own and value is not None), None)
            values = {name: value for name, value in values.items() if name in own or name == first}
        if any(type(value) is float for value in values.values()):
            values = {name: _whole(value) for name, value in values.items()}
        return values


@cache
def _names(kind: type[Body]) -> Set[str]:
    """Return the names of a model's fields in JSON."""
    return {field.alias or name for name, field in kind.model_fields.items()}


def _whole(value: object) -> object:
    return int(value) if type(value) is float and value.is_integer() and abs(value) < _MOST_EXACT else value


HEADER = "X-Request-Warnings"
_MOST = 16
_MAX_CHARS = 240  # of one warning: proxies bound a header by some kilobytes


class RequestWarnings:
    """What was left out of one request's body, and whether its unknown fields are."""

    def __init__(self, *, ignores_unknown: bool = False) -> None:
        self.ignores_unknown = ignores_unknown
        """Whether fields that nothing declares are left out; otherwise they are refused."""
        self._places: list[str] = []
        self._texts: list[str] = []
        self._num_left = 0

    @contextmanager
    def within(self, place: str) -> Iterator[None]:
        """Let warnings name fields by their path in the whole body, of which `place` is a part."""
        self._places.append(place)
        try:
            yield
        finally:
            self._places.pop()

    def add(self, field: str, text: str) -> None:
        """Add a warning about a field of the part that is being read."""
        if len(self._texts) == _MOST:
            self._num_left += 1
            return
        path = ".".join((*self._places, field))
        self._texts.append(f"{path}: {text}"[:_MAX_CHARS])

    @property
    def header(self) -> str:
        """The header's value, printable ASCII; "" without a warning."""
        more = [f"{self._num_left} more"] if self._num_left else []
        return json.dumps("; ".join((*self._texts, *more)))[1:-1]


_CURRENT: ContextVar[RequestWarnings] = ContextVar("pagestream_request_warnings")


def current_warnings() -> RequestWarnings:
    """Return the warnings of the request that is being read; outside of one, some that nothing shows."""
    return _CURRENT.get(None) or RequestWarnings()


@contextmanager
def collecting(warnings: RequestWarnings) -> Iterator[None]:
    """Let what is read in a block add to `warnings`."""
    token = _CURRENT.set(warnings)
    try:
        yield
    finally:
        _CURRENT.reset(token)


IGNORED = "unknown field, which was ignored"
"""The warning of one."""
Document = dict[str, Any]


def unknown_fields(kind: type[Body], document: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Yield the paths of the fields that a body, or parts of it, have and `kind` doesn't declare."""
    fields = _fields(kind)
    for name, value in document.items():
        path = place + (name[:80] or '""')
        if name not in fields:
            if value is not None:
                yield path
            continue
        for part_place, part in _parts(value, path):
            if (declared := _declared(fields[name], part)) is not None:
                yield from unknown_fields(declared, part, f"{part_place}.")


def without_unknown(kind: type[Body], document: Mapping[str, Any]) -> Document:
    """Return a body without these fields."""
    fields = _fields(kind)
    return {name: _kept(fields[name], value) for name, value in document.items() if name in fields}


def _kept(kinds: Sequence[type[Body]], value: Any) -> Any:
    if not kinds:
        return value
    if isinstance(value, list):
        return [_kept(kinds, each) for each in value]
    declared = _declared(kinds, value) if isinstance(value, dict) else None
    return value if declared is None else without_unknown(declared, value)


def _parts(value: Any, path: str) -> Iterator[tuple[str, Document]]:
    if isinstance(value, dict):
        yield path, value
    elif isinstance(value, list):
        for number, each in enumerate(value):
            if isinstance(each, dict):
                yield f"{path}.{number}", each


def _declared(kinds: Sequence[type[Body]], part: Document) -> type[Body] | None:
    """Return the one of several kinds that a part is of, by its literal fields such as `type`; None for none."""
    return next((kind for kind in kinds if _is_of(kind, part)), None)


def _is_of(kind: type[Body], part: Document) -> bool:
    for name, field in kind.model_fields.items():
        values = _literals(field.annotation)
        if name in part and values and part[name] not in values:
            return False
    return True


@cache
def _fields(kind: type[Body]) -> Mapping[str, Sequence[type[Body]]]:
    """Return the fields of a kind by their names in JSON, each with the kinds of objects that it may hold."""
    return {field.alias or name: tuple(_kinds(field.annotation)) for name, field in kind.model_fields.items()}


def _kinds(annotation: Any) -> Iterator[type[Body]]:
    if isinstance(annotation, type) and issubclass(annotation, Body):
        yield annotation
    elif get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType, list):
        for each in get_args(annotation):
            yield from _kinds(each)


def _literals(annotation: Any) -> tuple[Any, ...]:
    """Return the values that a field may have, where it has a list of them; with None where it may be left out."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        parts = [each for each in get_args(annotation) if each is not type(None)]
        if len(parts) == 1 and (values := _literals(parts[0])):
            return (*values, None)
    return ()


@contextmanager
def within(place: str) -> Iterator[None]:
    """Let errors and warnings name the fields of a part of the body by their path in all of it."""
    try:
        with current_warnings().within(place):
            yield
    except InvalidRequest as error:
        error.field = f"{place}.{error.field}" if error.field else place
        raise


def parse_body(kind: type[BodyModel], document: dict[str, Any]) -> BodyModel:
    """Return the body as a model. Raises InvalidRequest that names the field.

    Of unknown fields see `unknown_fields`.
    """
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        warnings = current_warnings()
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if warnings.ignores_unknown and _warn_of_unknown(kind, document):
            return parse_body(kind, without_unknown(kind, document))
        if first["type"] in _OF_UNKNOWN and (path := _unknown_at(kind, document, first["loc"])) is not None:
            raise UnknownField(path) from error
        raise _invalid(first["type"], first["loc"], first["msg"]) from error


_OF_UNKNOWN = ("extra_forbidden", UNION)
"""Kinds of mistakes behind which there may be an unknown field: a union says only what it takes."""
_MESSAGES = {
    "missing": "is needed",
    HALF_SURROGATE: "half of a surrogate pair is not text",
}


def _warn_of_unknown(kind: type[Body], document: dict[str, Any]) -> bool:
    """Add a warning for each unknown field; return whether there is one."""
    path = None
    for path in unknown_fields(kind, document):
        current_warnings().add(path, IGNORED)
    return path is not None


def _unknown_at(kind: type[Body], document: dict[str, Any], location: tuple[int | str, ...]) -> str | None:
    """Return the path of the first unknown field in the part of a body where a mistake is; None where there is none.

    A location has names of a union's branches, which the path doesn't: the first step is one of both.
    """
    path, place = _path(location), _path(location[:1])
    unknown = [each for each in islice(unknown_fields(kind, document), 64) if f"{each}.".startswith(f"{place}.")]
    return next((each for each in unknown if each.startswith(path)), unknown[0] if unknown else None)


def _invalid(kind: str, location: tuple[int | str, ...], message: str) -> InvalidRequest:
    return InvalidRequest(_path(location) or None, _MESSAGES.get(kind, message[:1].lower() + message[1:]))


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(str(step)[:80] or '""' for step in location)
