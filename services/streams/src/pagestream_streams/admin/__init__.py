"""What engines and gateways share: the broker, the model directory, the sweeper, quarantine and queue figures."""

from pagestream_streams.admin.adapters import AdapterDirectory, Reload, adapter_revision
from pagestream_streams.admin.broker import Broker, discard_request, expire_engine
from pagestream_streams.admin.engine_loads import EngineLoad, read_engine_loads
from pagestream_streams.admin.ownership import read_owners
from pagestream_streams.admin.queues import QueueState, queue_states
from pagestream_streams.admin.roster import Order, RosterRow, RosterView, Verb
from pagestream_streams.admin.sweeper import Sweeper
from pagestream_streams.admin.unserved import UnservedRequests, refuse_waiting

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
    "discard_request",
    "expire_engine",
    "queue_states",
    "read_engine_loads",
    "read_owners",
    "refuse_waiting",
]
