"""Files on their way into Redis, in parts: none of them is whole in a gateway's memory."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pagestream_batches.batches import BatchRegistry
from pagestream_batches.files import FileBounds, FileStore, StoredFile
from pagestream_streams import Broker
from pagestream_streams.errors import Unavailable

from pagestream_gateway.calls import RedisTimeout
from pagestream_gateway.errors import Overloaded
from pagestream_gateway.settings import BatchSettings

logger = logging.getLogger(__name__)
_PART_BYTES = 256 * 1024  # a script of Redis copies so much in well below a millisecond
_RETRY_AFTER_S = 2.0


class Upload:
    """A file that is being written."""

    def __init__(self, files: FileStore, limit: RedisTimeout, tenant: str, file_id: str) -> None:
        self.file_id = file_id
        self.has_ended = False
        self._files = files
        self._limit = limit
        self._tenant = tenant
        self._part = bytearray()
        self._offset = 0

    async def write(self, data: bytes) -> None:
        """Add data. Raises FileTooLarge, FilesFull, FileNotFound, Unavailable."""
        self._part += data
        while len(self._part) >= _PART_BYTES:
            await self._append(_PART_BYTES)

    async def end(self, *, name: str, purpose: str, lifetime_s: int) -> StoredFile:
        """Let readers see the file, for `lifetime_s` seconds. Raises as `write`."""
        if self._part:
            await self._append(len(self._part))
        ending = self._files.complete(self._tenant, self.file_id, name=name, purpose=purpose, lifetime_s=lifetime_s)
        found = await self._limit.wait(ending)
        self.has_ended = True
        return found

    async def _append(self, num_bytes: int) -> None:
        part = bytes(self._part[:num_bytes])
        await self._limit.wait(self._files.append(self._tenant, self.file_id, self._offset, part))
        del self._part[:num_bytes]
        self._offset += num_bytes


class Uploads:
    """The uploads of one gateway."""

    def __init__(self, files: FileStore, limit: RedisTimeout, settings: BatchSettings) -> None:
        self._files = files
        self._limit = limit
        self._settings = settings
        self._open = Counter[str]()
        """Uploads by tenant."""

    @asynccontextmanager
    async def begun(self, tenant: str) -> AsyncIterator[Upload]:
        """Write a file inside the block; one that is not ended there is removed.

        A tenant may use three quarters of the places: one that sends slowly leaves room for others. Raises Overloaded
        for too many at once, FilesFull, Unavailable.
        """
        most = self._settings.max_uploads
        own = most - most // 4
        if self._open.total() >= most:
            raise Overloaded(f"this gateway receives {most} files now, its limit; try again", _RETRY_AFTER_S)
        if self._open[tenant] >= own:
            raise Overloaded(f"this gateway receives {own} files of this tenant now, its limit", _RETRY_AFTER_S)
        self._open[tenant] += 1
        try:
            limit_ms = round(self._settings.upload_timeout_s * 2000)
            file_id = await self._limit.wait(self._files.create(tenant, limit_ms))
            upload = Upload(self._files, self._limit, tenant, file_id)
            try:
                yield upload
            finally:
                if not upload.has_ended:
                    await self._abandon(tenant, file_id)
        finally:
            self._open[tenant] -= 1
            self._open += Counter()  # drops tenants without uploads

    async def _abandon(self, tenant: str, file_id: str) -> None:
        try:
            await self._limit.wait(self._files.abandon(tenant, file_id))
        except Unavailable as error:
            logger.info("a part of a file stays in Redis until it expires: %s", error, extra={"file_id": file_id})


class Batches:
    """The files and batches of all tenants, as one gateway reaches them."""

    def __init__(self, broker: Broker, limit: RedisTimeout, settings: BatchSettings) -> None:
        bounds = FileBounds(
            settings.max_file_bytes, settings.max_tenant_bytes, settings.max_bytes, num_files=settings.max_files
        )
        self.files = FileStore(broker.connection, bounds)
        self.registry = BatchRegistry(broker.connection, most_batches=settings.max_batches)
        self.uploads = Uploads(self.files, limit, settings)
        self.changed = asyncio.Event()
        """Set when a batch is created or cancelled here, so that its jobs need not wait for the next look."""
