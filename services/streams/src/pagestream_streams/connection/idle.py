"""Connections that nothing waits on."""

from __future__ import annotations

import asyncio
from collections.abc import MutableSequence
from typing import Any


async def close_idle(idle: MutableSequence[Any]) -> None:
    """Closes redis-py's connections in a list, which has them again afterwards: nobody may take one meanwhile.

    What is sent on one of them next connects it anew. Not politely: the other side may be silent, and TLS would wait
    for its word.
    """
    taken = list(idle)
    idle.clear()
    try:
        await asyncio.gather(*(connection.disconnect(nowait=True) for connection in taken), return_exceptions=True)
    finally:
        idle.extend(taken)
