"""Serve one loaded model: publish its card, join its queue, run the worker."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from pagestream.v1.records_pb2 import ModelCard
from pagestream_streams import Broker, EngineSession
from pagestream_telemetry.process import Telemetry

from pagestream_worker.gauges import EngineGauges, EngineReaders
from pagestream_worker.health import Health
from pagestream_worker.models.waiting import unless_stopped, when_redis_answers
from pagestream_worker.settings import ProcessSettings
from pagestream_worker.stepping.engine_core import EngineCore
from pagestream_worker.stepping.reports import EngineFacts
from pagestream_worker.telemetry import WorkerTelemetry
from pagestream_worker.worker import Worker

logger = logging.getLogger(__name__)

EXIT_FAILED = 1


@dataclass(frozen=True)
class Instruments:
    """What observes a worker from outside."""

    health: Health
    telemetry: Telemetry
    open_port: Callable[[], None]
    """Opens the metrics port; nothing where there is none."""


@dataclass(frozen=True)
class LoadedModel:
    """A model with the engine that has loaded it."""

    name: str
    core: EngineCore
    facts: EngineFacts
    card: ModelCard
    began_s: float
    """Age of the process when its loading began, in seconds."""
    loaded_s: float
    """Likewise, when it was loaded, less what it had stood by until then."""
    stood_by_s: float = 0.0
    """Seconds that the process had stood by before it joined."""


@dataclass(frozen=True)
class ModelService:
    """What a process serves its models with."""

    process: ProcessSettings
    broker: Broker
    instruments: Instruments
    stop: asyncio.Event
    """The process ends."""

    async def serve(
        self,
        model: LoadedModel,
        leave: asyncio.Event,
        on_ready: Callable[[Worker], None] = lambda _: None,
        keeps_weights: Callable[[], bool] = lambda: False,
    ) -> None:
        """Serve a model until the process is stopped or `leave` is set.

        Args:
            model: what is served.
            leave: the process goes on with another model.
            on_ready: gets the worker before it claims.
            keeps_weights: see `Worker.run`.

        Raises:
            Stopped: the process was stopped before the worker ran.
            EngineFailed: the engine ended by an error, or its process was ended.
        """
        settings = replace(self.process.worker, served_model_name=model.name)
        broker, registry = self.broker, self.instruments.telemetry.registry
        publishing = when_redis_answers(lambda: broker.publish_model(model.card, partitions=settings.partitions))
        await unless_stopped(publishing, self.stop)
        telemetry = WorkerTelemetry(self.instruments.telemetry, model.name, settings.engine_id, began_s=model.began_s)
        telemetry.loaded(model.loaded_s, model.facts.load_s, stood_by_s=model.stood_by_s)
        health = self.instruments.health
        worker = Worker(model.core, settings, health, telemetry, degradation=self.process.degradation)
        async with AsyncExitStack() as stack:
            session = self._session(model, worker)
            await unless_stopped(when_redis_answers(lambda: stack.enter_async_context(session)), self.stop)
            gauges = EngineGauges(registry, model.name, _readers(model, worker, session), health)
            registry.on_collect(gauges.update)
            logger.info(
                "ready",
                extra={
                    "model": model.name,
                    "engine_id": session.engine_id,
                    "max_model_len": model.facts.max_model_len,
                },
            )
            on_ready(worker)
            try:
                await worker.run(session, self.stop, leave, keeps_weights)
            finally:
                if leave.is_set() and not self.stop.is_set():
                    registry.off_collect(gauges.update)
                    gauges.retire()
                else:
                    limit_exit(settings.exit_timeout_s)

    def _session(self, model: LoadedModel, worker: Worker) -> EngineSession:
        return EngineSession(
            self.broker,
            model=model.name,
            engine_id=self.process.worker.engine_id,
            on_lost=worker.drop,
            load=worker.load,
            fingerprint=model.facts.fingerprint,
            on_hand_back_all=worker.hand_all_back,
            card=model.card,
            max_model_len=model.facts.max_model_len,
            policy=model.facts.queue_order,
        )


def _readers(model: LoadedModel, worker: Worker, session: EngineSession) -> EngineReaders:
    ladder = worker.degradation
    return EngineReaders(
        lambda: model.core.figures,
        model.facts.memory_bytes,
        lambda: session.num_reclaimed,
        lambda: (ladder.rung, ladder.shares),
    )


def limit_exit(seconds: float) -> None:
    """Exit the process after `seconds`, whatever still hangs: the lease then lapses, and the sweep hands back."""
    timer = threading.Timer(seconds, os._exit, [EXIT_FAILED])
    timer.daemon = True
    timer.start()
