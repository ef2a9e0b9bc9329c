"""Loads models into engine processes, and ends those processes, each within a limit."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace

from pagestream.v1.records_pb2 import ModelCard
from pagestream_engine.models.folder import resolve_model
from pagestream_telemetry.process import process_age_s

from pagestream_worker.card import build_card
from pagestream_worker.models.cores import Cores
from pagestream_worker.models.serving import LoadedModel
from pagestream_worker.settings import WorkerSettings
from pagestream_worker.stepping.engine_core import EngineCore, EngineCoreError
from pagestream_worker.stepping.engine_process import EngineProcess
from pagestream_worker.stepping.reports import EngineFacts, ModelFacts

logger = logging.getLogger(__name__)

CARD_LIMIT_S = 30.0
"""To read a model's configuration, tokenizer and template, whose storage may hang."""


class LoadTimeoutError(EngineCoreError):
    """A model was not loaded within its limit: its storage may hang."""


class EngineStuckError(EngineCoreError):
    """A killed engine process has not ended, so that its memory is not free. This process has to end."""


class Loader:
    """Gives each model that follows the first an engine.

    Args:
        cores: starts engines.
        settings: limits, and the folders of the models.
    """

    def __init__(self, cores: Cores, settings: WorkerSettings) -> None:
        self._cores = cores
        self._folders: Mapping[str, str] = settings.folders
        self._settings = settings
        self._load_timeout_s = settings.load_timeout_s
        self._kill_timeout_s = settings.kill_timeout_s

    async def load(self, name: str, began_s: float) -> LoadedModel:
        """Load a model.

        Args:
            began_s: age of the process when the change to it began, in seconds.

        Raises:
            LoadTimeoutError: it took longer than `load_timeout_s`.
            EngineError: files or options are at fault.
            ModelCardError: the folder lacks what the card needs.
            EngineCoreError: the engine's process ended.
        """
        core = await self._cores.load(self._folders[name])
        loaded = asyncio.wrap_future(core.loaded)
        try:
            await asyncio.wait([loaded], timeout=self._load_timeout_s)
        finally:
            if not loaded.done():
                loaded.cancel()
                core.close()  # at once: it must not answer any more
        if loaded.cancelled():
            raise LoadTimeoutError(
                f"the model was not loaded in {self._load_timeout_s:g} s; look at its storage, or raise load_timeout_s"
            )
        facts = loaded.result()
        card = await self.card(name, facts)
        return LoadedModel(name, core, facts, card, began_s, process_age_s())

    async def fell_asleep(self, model: LoadedModel) -> bool:
        """Wait until an engine that was told to sleep does; False where it can't be used any more."""
        process = process_of(model)
        try:
            async with asyncio.timeout(self._load_timeout_s):
                await asyncio.wrap_future(process.asleep)
        except (TimeoutError, EngineCoreError) as error:
            logger.warning("the model %s does not sleep, and is unloaded: %r", model.name, error)
            return False
        return True

    async def wake(self, model: LoadedModel, began_s: float) -> LoadedModel | None:
        """Wake an engine that sleeps; None where it can't be used any more.

        Args:
            model: what it has.
            began_s: as for `load`.
        """
        try:
            async with asyncio.timeout(self._load_timeout_s):
                duration_s = await asyncio.wrap_future(process_of(model).wake_up())
        except (TimeoutError, EngineCoreError) as error:
            logger.warning("the model %s does not wake up, and is loaded anew: %r", model.name, error)
            return None
        load_s = {**dict.fromkeys(model.facts.load_s, 0.0), "wake_up": duration_s}
        return replace(
            model, facts=replace(model.facts, load_s=load_s), began_s=began_s, loaded_s=process_age_s(), stood_by_s=0.0
        )

    async def card(self, name: str, facts: EngineFacts | ModelFacts) -> ModelCard:
        """Return the card of a model. Raises LoadTimeoutError, EngineError, ModelCardError, OSError."""
        try:
            async with asyncio.timeout(CARD_LIMIT_S):
                return await asyncio.to_thread(_card, self._settings, name, facts)
        except TimeoutError as error:
            raise LoadTimeoutError(f"its tokenizer was not read in {CARD_LIMIT_S:g} s; look at its storage") from error

    async def end(self, core: EngineCore | None) -> None:
        """Kill what is left of an engine, and wait until its memory is free.

        Raises:
            EngineStuckError: it has not ended within `kill_timeout_s`.
        """
        if core is not None:
            core.close()
        if isinstance(core, EngineProcess):
            try:
                async with asyncio.timeout(self._kill_timeout_s):
                    await core.exited.wait()
            except TimeoutError as error:
                raise EngineStuckError(
                    f"the engine's process {core.pid} has not ended {self._kill_timeout_s:g} s after SIGKILL, and its "
                    "memory is not free; look at the storage and the devices that it waits for"
                ) from error


def _card(settings: WorkerSettings, name: str, facts: EngineFacts | ModelFacts) -> ModelCard:
    folder = resolve_model(settings.folders[name])
    return build_card(folder, name, facts, settings.parsers_of(name), settings.chat_of(name))


def process_of(model: LoadedModel) -> EngineProcess:
    """Return the process of a model's engine."""
    if not isinstance(model.core, EngineProcess):
        raise TypeError("models change in processes alone, as the settings have been checked for")
    return model.core
