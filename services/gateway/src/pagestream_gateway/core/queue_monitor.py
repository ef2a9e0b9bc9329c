"""Metrics of the queue, exported by every gateway alike, so that they exist while no engine runs."""

import asyncio
import logging
import time

from pagestream_streams import Broker
from pagestream_streams.admin.observation import QueueDepth, QueueState, queue_states
from pagestream_streams.errors import StreamsError
from pagestream_streams.tasks import Periodic
from pagestream_telemetry import catalog
from pagestream_telemetry.catalog import Metric
from pagestream_telemetry.instruments import Registry

logger = logging.getLogger(__name__)

_QUEUE_FRESH_S = 1.0  # a scrape this soon after a read of Redis uses what was read
_LIMIT_S = 2.0  # after which the values count as unknown


class QueueMonitor:
    """Reads the queue from Redis and sets the gauges. Unknown values are not exported: old ones would look current."""

    def __init__(self, broker: Broker, registry: Registry) -> None:
        self._broker = broker
        self._by_class = {
            metric: registry.number(metric)
            for metric in (
                catalog.QUEUE_DEPTH,
                catalog.QUEUE_AGE,
                catalog.QUEUE_TAKEABLE_TOKENS,
                catalog.QUEUE_TAKEABLE_AGE,
                catalog.QUEUE_TAKEABLE_LONGEST,
                catalog.QUEUE_TAKEABLE_OUTPUT,
                catalog.QUEUE_CLAIMED_RATE,
            )
        }
        self._by_model = {
            metric: registry.number(metric)
            for metric in (
                catalog.QUEUE_TOKENS,
                catalog.QUEUE_DRAIN_RATE,
                catalog.QUEUE_CLAIMED_LONGEST,
                catalog.QUEUE_RUNNING,
            )
        }
        self._read_at = float("-inf")

    async def refresh(self, fresh_s: float = _QUEUE_FRESH_S) -> None:
        """Read the queue, unless it was read in the last `fresh_s` seconds.

        Removes all values where Redis does not answer, and those of models that Redis no longer has.
        """
        if time.monotonic() - self._read_at < fresh_s:
            return
        try:
            async with asyncio.timeout(_LIMIT_S):
                states = await queue_states(self._broker)
        except (TimeoutError, StreamsError) as error:
            logger.debug("cannot read the queue: %s", error)
            states = {}
        except Exception:
            self._set({})  # a defect, which the caller reports; old values must not outlive it
            raise
        self._read_at = time.monotonic()
        self._set(states)

    def watch(self, period_s: float) -> Periodic:
        """Return a task that reads the queue every `period_s` seconds, once it is started."""
        return Periodic("queue metrics", period_s, lambda: self.refresh(period_s / 2))

    def _set(self, states: dict[str, list[QueueState]]) -> None:
        known: set[tuple[str, ...]] = set()
        for model, partitions in states.items():
            for queue, waiting in _by_queue(partitions).items():
                known.add((model, queue))
                for metric, value in _figures(waiting).items():
                    self._by_class[metric].series(model, queue).set(value)
            self._set_sums(model, partitions)
        for instrument in self._by_class.values():
            instrument.forget_others(known)
        for instrument in self._by_model.values():
            instrument.forget_others({(model,) for model in states})

    def _set_sums(self, model: str, partitions: list[QueueState]) -> None:
        sums = {
            catalog.QUEUE_TOKENS: sum(waiting.tokens for state in partitions for waiting in state.waiting),
            catalog.QUEUE_DRAIN_RATE: sum(state.drain_rate for state in partitions),
            catalog.QUEUE_CLAIMED_LONGEST: max((state.drain_longest_rate for state in partitions), default=0.0),
            catalog.QUEUE_RUNNING: sum(state.running for state in partitions),
        }
        for metric, value in sums.items():
            self._by_model[metric].series(model).set(value)


def _figures(waiting: list[QueueDepth]) -> dict[Metric, float]:
    """Return one queue's figures over all partitions."""
    return {
        catalog.QUEUE_DEPTH: sum(each.requests for each in waiting),
        catalog.QUEUE_AGE: max(each.oldest_s for each in waiting),
        catalog.QUEUE_TAKEABLE_TOKENS: sum(each.takeable_tokens for each in waiting),
        catalog.QUEUE_TAKEABLE_AGE: max(each.takeable_oldest_s for each in waiting),
        catalog.QUEUE_TAKEABLE_LONGEST: max(each.takeable_longest for each in waiting),
        catalog.QUEUE_TAKEABLE_OUTPUT: sum(each.takeable_output_tokens for each in waiting),
        catalog.QUEUE_CLAIMED_RATE: sum(each.drain_rate for each in waiting),
    }


def _by_queue(partitions: list[QueueState]) -> dict[str, list[QueueDepth]]:
    """What waits by class over all partitions: a series for each of a thousand partitions would tell no more."""
    found: dict[str, list[QueueDepth]] = {}
    for state in partitions:
        for waiting in state.waiting:
            found.setdefault(waiting.queue, []).append(waiting)
    return found
