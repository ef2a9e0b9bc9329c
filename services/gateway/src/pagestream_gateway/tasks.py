"""Ending tasks."""

import asyncio

_AGAIN_S = 1.0


async def end_tasks(*tasks: asyncio.Task[None]) -> None:
    """Cancels tasks and waits for their end. Raises what one of them failed with.

    A cancellation can be lost: a library that turns it into its own timeout swallows it. So it is repeated.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
