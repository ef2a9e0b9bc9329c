"""What the API of batches calls."""

import asyncio

from pagestream_batches.batches import BatchRegistry
from pagestream_batches.files import FileBounds, FileStore
from pagestream_streams import Broker

from pagestream_gateway.core.batches.uploads import Uploads
from pagestream_gateway.core.redis_timeout import RedisTimeout
from pagestream_gateway.settings import BatchSettings


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
