"""A steady load of streams whose answers are known in advance, for tests that disturb what serves them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pagestream_client import AsyncClient
from support.clients.readers import Content, Reader, question

WATCH_S = 0.05
END_LIMIT_S = 150.0


@dataclass(frozen=True)
class Question:
    """One request of the load."""

    number: int
    max_tokens: int
    model: str = "demo"

    async def ask(
        self, client: AsyncClient, reader: Reader | None = None, on_chunk: Callable[[], object] = lambda: None
    ) -> Content:
        """Ask by way of a reader, calling `on_chunk` for each chunk; return what is equal in all runs."""
        reader = reader or Reader()
        request = question(self.number, self.max_tokens)
        return (await reader.read(client, self.model, on_chunk=on_chunk, **request)).content()


@dataclass
class Load:
    """The state of a running load."""

    answers: dict[int, Content] | None
    open_streams: dict[int, Reader] = field(default_factory=dict)
    finished: int = 0
    resumed: int = 0
    """Streams that were open at the last `mark` and have ended without an error since."""
    longest_silence_s: float = 0.0
    """Longest time between two chunks of a stream since the last `mark`."""
    stopping: bool = False
    marked: set[int] = field(default_factory=set)
    last_chunk_s: dict[int, float] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The number of tokens of each open stream so far."""
        return [reader.num_tokens for reader in list(self.open_streams.values())]

    async def until(self, what: str, condition: Callable[[Load], bool], *, limit_s: float = 60.0) -> None:
        """Wait for a condition; raise what a stream has raised. TimeoutError names `what`."""
        try:
            async with asyncio.timeout(limit_s):
                while not condition(self):
                    self.check()
                    await asyncio.sleep(WATCH_S)
        except TimeoutError as error:
            raise TimeoutError(f"{what}: not within {limit_s:g} s") from error

    def mark(self) -> None:
        """Mark the streams that are open now, and measure silences from now on."""
        self.longest_silence_s, self.resumed = 0.0, 0
        self.marked = {user for user, reader in self.open_streams.items() if reader.chunks}

    def note_chunk(self, user: int) -> None:
        """Record the arrival of a user's chunk."""
        now = time.monotonic()
        self.longest_silence_s = max(self.longest_silence_s, now - self.last_chunk_s.get(user, now))
        self.last_chunk_s[user] = now

    def end(self, user: int) -> None:
        """Record that a user's answer has ended without an error."""
        self.finished += 1
        self.resumed += user in self.marked
        self.marked.discard(user)
        self.last_chunk_s.pop(user, None)

    async def wait_under_way(self) -> None:
        """Wait until three streams have 100 to 600 tokens, then mark."""
        await self.until("streams under way", lambda load: sum(100 < each < 600 for each in load.tokens) >= 3)
        self.mark()

    async def wait_marked(self) -> None:
        """Wait until all streams that were open at the mark have ended without an error."""
        await self.until("the open streams' ends", lambda load: not load.marked, limit_s=120.0)

    async def wait_finished(self, streams: int) -> None:
        """Wait until this many more streams have ended without an error."""
        goal = self.finished + streams
        await self.until(f"{streams} more streams", lambda load: load.finished >= goal, limit_s=120.0)

    def check(self) -> None:
        """Raise what a stream has raised."""
        for task in self.tasks:
            if task.done():
                task.result()


async def known_answers(targets: Sequence[str], api_key: str, questions: Sequence[Question]) -> dict[int, Content]:
    """Return the answers of an undisturbed run, by the questions' numbers."""
    async with asyncio.timeout(END_LIMIT_S), AsyncClient(targets, api_key=api_key) as client:
        answers = await asyncio.gather(*(each.ask(client) for each in questions))
    return {each.number: answer for each, answer in zip(questions, answers, strict=True)}


@asynccontextmanager
async def steady_load(
    targets: Sequence[str],
    api_key: str,
    questions: Sequence[Question],
    answers: dict[int, Content] | None,
    *,
    width: int,
) -> AsyncIterator[Load]:
    """Run `width` users, each asking one question after another; at the block's end, wait for their last answers.

    Where answers are given, a different one is an AssertionError. Raises what a stream has raised.
    """
    load = Load(answers)
    waiting = asyncio.Queue[Question]()

    async def user(number: int) -> None:
        async with AsyncClient(targets, api_key=api_key) as client:
            while not load.stopping:
                if waiting.empty():
                    for each in questions:
                        waiting.put_nowait(each)
                asked = waiting.get_nowait()
                load.open_streams[number] = reader = Reader()
                try:
                    content = await asked.ask(client, reader, lambda: load.note_chunk(number))
                finally:
                    del load.open_streams[number]
                if load.answers is not None:
                    assert content == load.answers[asked.number], f"question {asked.number}: other tokens"
                load.end(number)

    load.tasks = [asyncio.create_task(user(number)) for number in range(width)]
    try:
        yield load
        load.stopping = True
        async with asyncio.timeout(END_LIMIT_S):
            await asyncio.gather(*load.tasks)
    finally:
        for task in load.tasks:
            task.cancel()
        await asyncio.gather(*load.tasks, return_exceptions=True)
