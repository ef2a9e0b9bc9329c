"""What engines and gateways share: the broker, the model directory, the sweeper, quarantine and queue figures."""

from pagestream_streams.admin.adapters import AdapterDirectory, Reload, adapter_revision, check_adapter_files
from pagestream_streams.admin.broker import Broker, discard_request, expire_engine, read_owners
from pagestream_streams.admin.engine_models import EngineModelsView, EngineRow, Order, Verb
from pagestream_streams.admin.observation import (
    KEPT_MS,
    WATCHED_MS,
    BlockMaps,
    EngineLoad,
    ModelRow,
    QueueRow,
    QueueState,
    queue_states,
    read_engine_loads,
    read_models,
)
from pagestream_streams.admin.sweeper import Sweeper, UnservedRequests, refuse_waiting

__all__ = [
    "KEPT_MS",
    "WATCHED_MS",
    "AdapterDirectory",
    "BlockMaps",
    "Broker",
    "EngineLoad",
    "EngineModelsView",
    "EngineRow",
    "ModelRow",
    "Order",
    "QueueRow",
    "QueueState",
    "Reload",
    "Sweeper",
    "UnservedRequests",
    "Verb",
    "adapter_revision",
    "check_adapter_files",
    "discard_request",
    "expire_engine",
    "queue_states",
    "read_engine_loads",
    "read_models",
    "read_owners",
    "refuse_waiting",
]
