"""What engines and gateways share: the broker, the model directory, the sweeper, quarantine and queue figures."""

from pagestream_streams.admin.adapters import AdapterDirectory, Reload, adapter_revision, check_adapter_files
from pagestream_streams.admin.broker import Broker, discard_request, expire_engine, read_owners
from pagestream_streams.admin.ending import UnservedRequests, refuse_waiting
from pagestream_streams.admin.observation import EngineLoad, QueueState, queue_states, read_engine_loads
from pagestream_streams.admin.roster import Order, RosterRow, RosterView, Verb
from pagestream_streams.admin.sweeper import Sweeper

__all__ = [
    "AdapterDirectory",
    "Broker",
    "EngineLoad",
    "Order",
    "QueueState",
    "Reload",
    "RosterRow",
    "RosterView",
    "Sweeper",
    "UnservedRequests",
    "Verb",
    "adapter_revision",
    "check_adapter_files",
    "discard_request",
    "expire_engine",
    "queue_states",
    "read_engine_loads",
    "read_owners",
    "refuse_waiting",
]
