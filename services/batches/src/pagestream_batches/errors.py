"""What is refused of files and batches, and why: part of the tree of the streams' errors."""

# ruff: noqa: N818 -- the names say what has happened, as the API's error codes do

from __future__ import annotations

from pagestream_streams.errors import StreamsError


class FileNotFound(StreamsError):
    """This tenant has no such file: never uploaded, another tenant's, removed or expired."""

    def __init__(self, file_id: str) -> None:
        """`file_id`: as given."""
        super().__init__(f"there is no file {file_id[:100]!r}: it was never uploaded, was deleted, or has expired")
        self.file_id = file_id


class FileTooLarge(StreamsError):
    """A file has more bytes than one may have."""

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes`: most bytes of a file."""
        super().__init__(f"a file may have {limit_bytes} bytes, and this one has more; divide it")
        self.limit_bytes = limit_bytes


class FilesFull(StreamsError):
    """There is no room for a further file, or for more of one. The message says which bound is reached."""


class FileInUse(StreamsError):
    """A batch that has not ended reads the file."""

    def __init__(self, file_id: str) -> None:
        """`file_id`: as given."""
        super().__init__(f"a batch that has not ended reads {file_id}; wait for its end, or cancel it")


class FilePurposeDiffers(StreamsError):
    """The file was not uploaded for batches."""

    def __init__(self, file_id: str) -> None:
        """`file_id`: as given."""
        super().__init__(f"{file_id} is no input of batches; upload it with the purpose 'batch'")


class BatchNotFound(StreamsError):
    """This tenant has no such batch: never created, another tenant's, or expired."""

    def __init__(self, batch_id: str) -> None:
        """`batch_id`: as given."""
        super().__init__(f"there is no batch {batch_id[:100]!r}: it was never created, or was removed after its end")
        self.batch_id = batch_id


class BatchEnded(StreamsError):
    """The batch has ended."""

    def __init__(self, batch_id: str) -> None:
        """`batch_id`: as given."""
        super().__init__(f"{batch_id} has ended already")


class BatchesFull(StreamsError):
    """There are as many batches as there may be."""

    def __init__(self, whose: str, bound: int) -> None:
        """`whose`: what is counted; `bound`: how many there may be."""
        super().__init__(f"{whose} {bound} batches that have not ended, and no more are taken; wait for one, or cancel")
