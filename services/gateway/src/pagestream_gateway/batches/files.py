"""/v1/files: upload, list, read and delete the files of batches.

Multipart bodies are taken apart while they arrive; `expires_after` says how long a file is kept.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Literal

from fastapi import APIRouter
from pagestream_batches.errors import FileNotFound, FileTooLarge
from pagestream_batches.files import StoredFile
from pagestream_streams.protocol.keys import tenant_tag
from pydantic import BaseModel, Field
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from pagestream_gateway.errors import InvalidRequest, UnknownField, WrongContentType
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.body import IGNORED, Body, current_warnings, discard_body, parse_body, within
from pagestream_gateway.http.callers import identify
from pagestream_gateway.http.documents import Answers, AnswersByPath
from pagestream_gateway.http.server import EXTEND_BODY_TIME

LEAST_S, MOST_S = 3600, 30 * 24 * 3600


class ExpiresAfter(Body):
    """When a file expires."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=LEAST_S, le=MOST_S, description="From its creation: an hour to 30 days.")


_FORM_DATA = b"multipart/form-data"
_MAX_PARTS = 16
_MAX_FIELD_BYTES = 1024  # of all that is not the file
_MAX_NAME_CHARS = 512
FORM_BYTES = 16 * 1024
"""Bytes that a form may have beside its file: boundaries, headers, fields."""


class UploadForm:
    """Takes a body's bytes; the parts of its field `file` are given back, the other fields are kept."""

    def __init__(self, content_type: str) -> None:
        """Raises WrongContentType, InvalidRequest."""
        kind, options = parse_options_header(content_type)
        if kind.lower() != _FORM_DATA or b"boundary" not in options:
            shown = content_type[:100] or "missing"
            raise WrongContentType(f"Content-Type is {shown}; send multipart/form-data with a boundary")
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None
        """None until the file's part begins."""
        self.is_complete = False
        self._found = bytearray()
        self._name = ""
        self._value = bytearray()
        self._header, self._header_value = bytearray(), bytearray()
        self._disposition = b""
        self._num_parts = 0
        callbacks = {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._take,
            "on_part_end": self._end,
            "on_end": self._complete,
        }
        try:
            self._parser = MultipartParser(options[b"boundary"], callbacks)  # type: ignore[arg-type]
        except FormParserError as error:
            raise InvalidRequest(None, f"the body is no multipart/form-data: {error}") from error

    def feed(self, data: bytes) -> bytes:
        """Take some of the body; return what of it is the file's. Raises InvalidRequest."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequest(None, f"the body is no multipart/form-data: {error}") from error
        found = bytes(self._found)
        self._found.clear()
        return found

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise InvalidRequest(None, f"the form has more than {_MAX_PARTS} fields")
        self._value.clear()
        self._disposition = b""

    def _end_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header.clear()
        self._header_value.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = _text(options.get(b"name", b""), "the name of a field")
        if not self._name:
            raise InvalidRequest(None, "a field of the form has no name")
        if self._name == "file":
            if self.file_name is not None:
                raise InvalidRequest("file", "one file is expected, and the form has two")
            self.file_name = _text(options.get(b"filename", b""), "file")[:_MAX_NAME_CHARS] or "file"

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._found += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > _MAX_FIELD_BYTES:
            raise InvalidRequest(self._name[:100], f"is longer than {_MAX_FIELD_BYTES} bytes")

    def _end(self) -> None:
        if self._name != "file":
            self.fields[self._name] = _text(bytes(self._value), self._name)

    def _complete(self) -> None:
        self.is_complete = True


async def file_parts(request: Request, form: UploadForm) -> AsyncGenerator[bytes, None]:
    """Yield the file's bytes as they arrive. Raises InvalidRequest, also for a body without a whole file."""
    try:
        async for data in request.stream():
            if data and (found := form.feed(data)):
                yield found
    except ClientDisconnect as error:
        raise InvalidRequest(None, "the body ended early") from error
    if not form.is_complete:
        raise InvalidRequest(None, "the form ends without its last boundary")
    if form.file_name is None:
        raise InvalidRequest("file", "is needed")


def _text(data: bytes, field: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(field[:100], "is not valid UTF-8") from error


PURPOSE = "batch"
_SLICE_BYTES = 64 * 1024  # of a file that is read, for each of many slow readers
_MOST_LISTED = 10_000  # OpenAI's bound and default
_FILE = "/v1/files/{file_id}"
_PREFIX = "expires_after["
_UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary", "description": "A job in each line, as JSON."},
                        "purpose": {"type": "string", "enum": [PURPOSE]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": LEAST_S,
                            "maximum": MOST_S,
                            "examples": [7 * 24 * 3600],
                            "description": "From its creation, with the anchor; both may be left out.",
                        },
                    },
                }
            }
        },
    }
}
_LIST_PARAMETERS: dict[str, Any] = {
    "parameters": [
        {
            "name": "limit",
            "in": "query",
            "schema": {"type": "integer", "minimum": 1, "maximum": _MOST_LISTED, "default": _MOST_LISTED},
            "description": "Most files of the page.",
        },
        {
            "name": "after",
            "in": "query",
            "schema": {"type": "string"},
            "description": "The id of the last file of the page before.",
        },
        {
            "name": "order",
            "in": "query",
            "schema": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
            "description": "By the time of their creation.",
        },
        {
            "name": "purpose",
            "in": "query",
            "schema": {"type": "string"},
            "description": "Only files with this purpose.",
        },
    ]
}


class FileAnswer(BaseModel):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class FileList(BaseModel):
    """A page of a tenant's files."""

    object: Literal["list"]
    data: list[FileAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    """The end of a file."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


ANSWERS: AnswersByPath = {
    ("post", "/v1/files"): Answers(FileAnswer, errors=(401, 413, 415, 429)),
    ("get", "/v1/files"): Answers(FileList, errors=(401,)),
    ("get", "/v1/files/{file_id}"): Answers(FileAnswer, errors=(401, 404)),
    ("get", "/v1/files/{file_id}/content"): Answers(lines=(200,), errors=(401, 404)),
    ("delete", "/v1/files/{file_id}"): Answers(FileDeleted, errors=(401, 404, 409)),
}
"""By method and path."""


def router(gateway: Gateway) -> APIRouter:
    """Return the resource's routes. The id of another tenant's file is answered as an unknown one: 404."""
    routes = APIRouter(tags=["batches"])

    @routes.post("/v1/files", openapi_extra=_UPLOAD, summary="Upload a file of jobs")
    async def upload(request: Request) -> Response:
        tenant = (await identify(gateway, request)).tenant
        return JSONResponse(file_body(await _upload(gateway, request, tenant)))

    @routes.get("/v1/files", openapi_extra=_LIST_PARAMETERS, summary="The caller's files")
    async def list_files(request: Request) -> Response:
        tenant, query = (await identify(gateway, request)).tenant, request.query_params
        order, after = query.get("order", "desc"), query.get("after", "")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order", f"must be asc or desc, got {order[:40]!r}")
        limit = listed(query.get("limit"), _MOST_LISTED, _MOST_LISTED)
        try:
            page = await gateway.limit.wait(
                gateway.batches.files.page(
                    tenant,
                    limit=limit,
                    after=after,
                    purpose=query.get("purpose", ""),
                    newest_first=order == "desc",
                )
            )
        except FileNotFound as error:
            raise InvalidRequest("after", f"{after[:100]!r} is not in the list; begin with its first page") from error
        return JSONResponse(list_body([file_body(each) for each in page.files], has_more=page.has_more))

    @routes.get(_FILE, summary="What is known of a file")
    async def retrieve(request: Request, file_id: str) -> Response:
        tenant = (await identify(gateway, request)).tenant
        return JSONResponse(file_body(await gateway.limit.wait(gateway.batches.files.get(tenant, file_id))))

    @routes.get(f"{_FILE}/content", summary="The bytes of a file")
    async def content(request: Request, file_id: str) -> Response:
        tenant = (await identify(gateway, request)).tenant
        file = await gateway.limit.wait(gateway.batches.files.get(tenant, file_id))
        headers = {"Content-Length": str(file.num_bytes)}
        return StreamingResponse(_content(gateway, tenant, file), headers=headers, media_type="application/jsonl")

    @routes.delete(_FILE, summary="Delete a file")
    async def delete(request: Request, file_id: str) -> Response:
        tenant = (await identify(gateway, request)).tenant
        await gateway.limit.wait(gateway.batches.files.delete(tenant, file_id))
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    return routes


def file_body(file: StoredFile) -> dict[str, Any]:
    """Return OpenAI's object of a file."""
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_s,
        "expires_at": file.expires_ms // 1000,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }


def list_body(data: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return OpenAI's page of a list."""
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": has_more}


def listed(text: str | None, default: int, most: int) -> int:
    """Return the number of items that a page may have. Raises InvalidRequest."""
    if text is None:
        return default
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(most)) else 0
    if not 1 <= number <= most:
        raise InvalidRequest("limit", f"expected a number from 1 to {most}, got {text[:40]!r}")
    return number


async def _upload(gateway: Gateway, request: Request, tenant: str) -> StoredFile:
    settings = gateway.settings.batches
    form = UploadForm(request.headers.get("content-type", ""))
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > settings.max_file_bytes + FORM_BYTES:
        if "expect" not in request.headers:
            await discard_body(request)
        raise FileTooLarge(settings.max_file_bytes)
    async with gateway.batches.uploads.begun(tenant) as upload:
        if extend := request.scope.get("extensions", {}).get(EXTEND_BODY_TIME):
            extend(settings.upload_timeout_s)
        async with aclosing(file_parts(request, form)) as parts:
            async for part in parts:
                await upload.write(part)
        lifetime_s = _lifetime_s(form, settings.file_lifetime_s)
        purpose = form.fields.get("purpose", "")
        if purpose != PURPOSE:
            raise InvalidRequest("purpose", f"must be {PURPOSE!r}, got {purpose[:40]!r}")
        return await upload.end(name=form.file_name or "file", purpose=purpose, lifetime_s=lifetime_s)


def _lifetime_s(form: UploadForm, default_s: int) -> int:
    for name in form.fields:
        if name != "purpose" and not name.startswith(_PREFIX):
            if not current_warnings().ignores_unknown:
                raise UnknownField(name[:100])
            current_warnings().add(name[:100], IGNORED)
    given: dict[str, Any] = {
        name[len(_PREFIX) :].rstrip("]"): value for name, value in form.fields.items() if name.startswith(_PREFIX)
    }
    if not given:
        return default_s
    seconds = given.get("seconds", "")
    if seconds.isascii() and seconds.isdigit() and len(seconds) <= 10:
        given["seconds"] = int(seconds)
    with within("expires_after"):
        return parse_body(ExpiresAfter, given).seconds


async def _content(gateway: Gateway, tenant: str, file: StoredFile) -> AsyncIterator[bytes]:
    """Yield a file; it ends early, and with it the connection, where the file is deleted meanwhile."""
    offset, tag = 0, tenant_tag(tenant)
    while offset < file.num_bytes:
        part = await gateway.limit.wait(gateway.batches.files.read(tag, file.file_id, offset, _SLICE_BYTES))
        if not part:
            raise FileNotFound(file.file_id)
        offset += len(part)
        yield part
