"""What the decision reads: the roster and the queues, in its own terms."""

from pagestream_streams import Broker
from pagestream_streams.admin.observation import QueueState, queue_states
from pagestream_streams.admin.roster import RosterView, Verb

from pagestream_worker.models.sharing import Demand, EngineState


def read_states(view: RosterView) -> list[EngineState]:
    """Return the engines of a roster."""
    return [
        EngineState(
            engine_id,
            frozenset(row.models) - set(row.failed) - set(row.postponed),
            serving=row.serving,
            is_loading=row.is_loading,
            served_s=(view.now_ms - row.since_ms) / 1000,
            active=row.active,
            owes=row.owes,
            keeps=row.keeps,
            wakes=row.wakes,
        )
        for engine_id, row in view.engines.items()
    ]


async def read_demands(broker: Broker, view: RosterView) -> dict[str, Demand]:
    """Return what waits for the models of a roster, and what operators ask for. Unavailable.

    What engines load that had it before they were put to sleep needs no other engine.
    """
    states = await queue_states(broker, view.loadable)
    ordered = {name for name, order in view.orders.items() if order.verb is Verb.LOAD and not view.is_to_wake(name)}
    return {
        name: _demand(states.get(name, []), view.served_ms.get(name, 0), is_ordered=name in ordered)
        for name in sorted(view.loadable)
    }


def _demand(partitions: list[QueueState], served_ms: int, *, is_ordered: bool) -> Demand:
    waiting = [queue for partition in partitions for queue in partition.waiting]
    return Demand(
        requests=sum(queue.requests for queue in waiting),
        tokens=sum(queue.tokens + queue.takeable_output_tokens for queue in waiting),
        served_ms=served_ms,
        is_ordered=is_ordered,
    )
