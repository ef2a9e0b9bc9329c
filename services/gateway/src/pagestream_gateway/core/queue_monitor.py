"""The queue's figures, the same from every gateway: so that somebody tells them when no engine lives."""

import asyncio
import logging
import time

from pagestream_streams import Broker
from pagestream_streams.admin.queues import QueueState, queue_states
from pagestream_streams.errors import StreamsError
from pagestream_streams.tasks import Periodic
from pagestream_telemetry import catalog
from pagestream_telemetry.instruments import Registry

logger = logging.getLogger(__name__)

_FRESH_S = 1.0  # a scrape within so long of a look at Redis costs none of its own
_LIMIT_S = 2.0  # after which the figures are unknown: nobody can use old ones


class QueueMonitor:
    """Reads the queue from Redis, and sets the gauges. What is not known is not told: an old figure would look true."""

    def __init__(self, broker: Broker, registry: Registry) -> None:
        self._broker = broker
        self._depth = registry.number(catalog.QUEUE_DEPTH)
        self._age = registry.number(catalog.QUEUE_AGE)
        self._by_model = {
            metric: registry.number(metric)
            for metric in (catalog.QUEUE_TOKENS, catalog.QUEUE_DRAIN_RATE, catalog.QUEUE_RUNNING)
        }
        self._read_at = float("-inf")

    async def refresh(self, fresh_s: float = _FRESH_S) -> None:
        """Looks, unless somebody has done so in the last `fresh_s` seconds.

        No figures follow from Redis being away, nor from its having come back without the models that it had.
        """
        if time.monotonic() - self._read_at < fresh_s:
            return
        try:
            async with asyncio.timeout(_LIMIT_S):
                states = await queue_states(self._broker)
        except (TimeoutError, StreamsError) as error:
            logger.debug("the queue can't be read: %s", error)
            states = {}
        except Exception:
            self._set({})  # a defect, which is its caller's to tell; old figures must not outlive it
            raise
        self._read_at = time.monotonic()
        self._set(states)

    def watch(self, period_s: float) -> Periodic:
        """Looks every `period_s` seconds, once it is started."""
        return Periodic("queue figures", period_s, lambda: self.refresh(period_s / 2))

    def _set(self, states: dict[str, list[QueueState]]) -> None:
        told: set[tuple[str, ...]] = set()
        for model, partitions in states.items():
            for state in partitions:
                for waiting in state.waiting:
                    values = (model, str(state.partition), waiting.queue)
                    told.add(values)
                    self._depth.series(*values).set(waiting.requests)
                    self._age.series(*values).set(waiting.oldest_s)
            self._set_sums(model, partitions)
        self._depth.forget_others(told)
        self._age.forget_others(told)
        for instrument in self._by_model.values():
            instrument.forget_others({(model,) for model in states})

    def _set_sums(self, model: str, partitions: list[QueueState]) -> None:
        sums = {
            catalog.QUEUE_TOKENS: sum(waiting.tokens for state in partitions for waiting in state.waiting),
            catalog.QUEUE_DRAIN_RATE: sum(state.drain_rate for state in partitions),
            catalog.QUEUE_RUNNING: sum(state.running for state in partitions),
        }
        for metric, value in sums.items():
            self._by_model[metric].series(model).set(value)
