"""A steady load of streams whose every answer is known beforehand: what the cluster tests disturb."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pagestream_client import AsyncClient, Chunk, Generation, put_together
from support.faults.workloads import QUESTIONS

Content = tuple[object, ...]
WATCH_S = 0.05
END_LIMIT_S = 150.0


@dataclass(frozen=True)
class Question:
    """One of the requests."""

    number: int
    max_tokens: int
    model: str = "demo"

    async def ask(self, client: AsyncClient, seen: list[Chunk], hear: Callable[[], object] = lambda: None) -> Content:
        """Asks it and reads the answer to its end, chunk by chunk into `seen`; returns what two runs must agree on.
        `hear` is called at each chunk."""
        words = f"{QUESTIONS[self.number % len(QUESTIONS)]} Number {self.number}."
        async for chunk in client.generate(
            self.model,
            messages=[{"role": "user", "content": words}],
            max_tokens=self.max_tokens,
            ignore_eos=True,
            temperature=0.8 if self.number % 2 else 0.0,
            seed=self.number,
        ):
            seen.append(chunk)
            hear()
        answer: Generation = put_together(seen)
        return answer.choices, seen[-1].next_index, seen[-1].digest


@dataclass
class Load:
    """What is going on."""

    answers: dict[int, Content] | None
    open_streams: dict[int, list[Chunk]] = field(default_factory=dict)
    finished: int = 0
    resumed: int = 0
    """Streams that were in their middle at the last `mark`, and have ended well since."""
    longest_silence_s: float = 0.0
    """Longest time between two chunks of a stream since the last `mark`."""
    stopping: bool = False
    marked: set[int] = field(default_factory=set)
    heard: dict[int, float] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Tokens that each open stream has so far."""
        return [sum(len(chunk.token_ids) for chunk in seen) for seen in list(self.open_streams.values())]

    async def until(self, what: str, condition: Callable[[Load], bool], *, limit_s: float = 60.0) -> None:
        """Waits until the load is as wanted. A stream that failed meanwhile fails this."""
        async with asyncio.timeout(limit_s):
            while not condition(self):
                self.check()
                await asyncio.sleep(WATCH_S)

    def mark(self) -> None:
        """From now on silences and streams that were cut count anew."""
        self.longest_silence_s, self.resumed = 0.0, 0
        self.marked = {user for user, seen in self.open_streams.items() if seen}

    def hear(self, user: int) -> None:
        """A chunk has come for a user."""
        now = time.monotonic()
        self.longest_silence_s = max(self.longest_silence_s, now - self.heard.get(user, now))
        self.heard[user] = now

    def end(self, user: int) -> None:
        """A user's answer has ended well."""
        self.finished += 1
        self.resumed += user in self.marked
        self.marked.discard(user)
        self.heard.pop(user, None)

    async def middle(self, streams: int = 3) -> None:
        """Waits until so many streams are in the middle of their answers, and marks the moment."""
        await self.until("streams under way", lambda load: sum(100 < each < 600 for each in load.tokens) >= streams)
        self.mark()

    async def whole(self, *, limit_s: float = 120.0) -> None:
        """Waits until all streams that were open at the mark have ended well."""
        await self.until("the open streams' ends", lambda load: not load.marked, limit_s=limit_s)

    async def progress(self, streams: int = 4, *, limit_s: float = 120.0) -> None:
        """Waits until so many more streams have ended well."""
        goal = self.finished + streams
        await self.until(f"{streams} more streams", lambda load: load.finished >= goal, limit_s=limit_s)

    def check(self) -> None:
        """Raises what a stream has raised."""
        for task in self.tasks:
            if task.done():
                task.result()


async def known_answers(targets: Sequence[str], api_key: str, questions: Sequence[Question]) -> dict[int, Content]:
    """The answers of an undisturbed run."""
    async with asyncio.timeout(END_LIMIT_S), AsyncClient(targets, api_key=api_key) as client:
        answers = await asyncio.gather(*(question.ask(client, []) for question in questions))
    return {question.number: answer for question, answer in zip(questions, answers, strict=True)}


@asynccontextmanager
async def steady_load(
    targets: Sequence[str],
    api_key: str,
    questions: Sequence[Question],
    answers: dict[int, Content] | None,
    *,
    width: int,
) -> AsyncIterator[Load]:
    """`width` users, each asking one question after another, for the length of a block; then until the last answer has
    ended. Each answer must be the known one, where answers are given: AssertionError otherwise, and what a stream
    raised."""
    load = Load(answers)
    waiting = asyncio.Queue[Question]()

    async def user(number: int) -> None:
        async with AsyncClient(targets, api_key=api_key) as client:
            while not load.stopping:
                if waiting.empty():
                    for each in questions:
                        waiting.put_nowait(each)
                question = waiting.get_nowait()
                seen = load.open_streams[number] = []
                try:
                    content = await question.ask(client, seen, lambda: load.hear(number))
                finally:
                    del load.open_streams[number]
                if load.answers is not None:
                    assert content == load.answers[question.number], f"question {question.number}: other tokens"
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
