"""Publish the map of the engine's KV blocks while somebody looks at the model's engines."""

import asyncio
import logging
import time

from pagestream.v1.records_pb2 import BlockHolders, RunningSequence
from pagestream.v1.records_pb2 import BlockMap as Record
from pagestream_engine.kv_cache.inspection import BlockMap
from pagestream_engine.request import sibling_id
from pagestream_engine.stats import EngineStats
from pagestream_streams import EngineSession
from pagestream_streams.tasks import Periodic, within

from pagestream_worker.engine_core import EngineCore, EngineCoreError
from pagestream_worker.messages import request_id_of

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
"""Between two looks at whether somebody looks, one GET each, and between two maps."""
_ANSWER_S = 2.0
"""Seconds after which a map is given up: a step may take longer."""


def block_maps(core: EngineCore, session: EngineSession, block_size: int) -> Periodic:
    """Return the task that publishes maps while they are wanted, once it is started.

    Args:
        core: whose engine makes the maps.
        block_size: of the engine's blocks, in tokens.
    """
    return Periodic("block maps", PERIOD_S, lambda: _publish(core, session, block_size))


async def _publish(core: EngineCore, session: EngineSession, block_size: int) -> None:
    maps, identity = session.block_maps, session.identity
    async with within(_ANSWER_S, "a map of the blocks"):
        if not await maps.is_watched(identity.model):
            return
        try:
            found = await asyncio.shield(asyncio.wrap_future(core.read_blocks()))
        except EngineCoreError as error:
            logger.debug("no map of the blocks: %s", error)
            return
        await maps.publish(identity.engine_id, record_of(found, core.figures.stats, block_size))


def record_of(found: BlockMap, stats: EngineStats, block_size: int) -> Record:
    """Return a map as Redis gets it."""
    return Record(
        num_blocks=found.num_blocks,
        num_free=found.num_free,
        num_cached=found.num_cached,
        block_size=block_size,
        cells=found.cells,
        holders=[BlockHolders(sequences=each.sequences, num_references=each.num_references) for each in found.holders],
        sequences=[
            RunningSequence(
                request_id=request_id_of(each.seq_id),
                choice=_choice_of(each.seq_id),
                tenant=each.tenant,
                num_prompt_tokens=each.num_prompt_tokens,
                num_tokens=each.num_tokens,
                num_computed_tokens=each.num_computed_tokens,
                num_blocks=each.num_blocks,
                is_prefill=each.is_prefill,
            )
            for each in found.sequences
        ],
        num_running=found.num_running,
        num_waiting=found.num_waiting,
        num_prompt_tokens=stats.num_prompt_tokens,
        num_generated_tokens=stats.num_generated_tokens,
        at_ms=round(time.monotonic() * 1000),
    )


def _choice_of(seq_id: str) -> int:
    """Return the choice of `<request id>/<nonce>/<choice>`; a beam's is that of its search."""
    choice = sibling_id(seq_id).rpartition("/")[2]
    return int(choice) if choice.isdecimal() else 0
