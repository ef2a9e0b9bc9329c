"""Bodies of multipart/form-data with one file, taken apart while they arrive."""

from collections.abc import AsyncGenerator

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect, Request

from pagestream_gateway.errors import InvalidRequest, WrongContentType

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
