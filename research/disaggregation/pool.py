"""Several engines on one virtual clock: a mixed pool, or prefill engines that hand over to decode engines."""

from __future__ import annotations

import heapq
import random
from array import array
from collections import abc, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np
from pagestream_engine.kv_cache.block_pool import BlockPool
from pagestream_engine.kv_cache.host_tier import HostTier
from pagestream_engine.request import Sequence
from pagestream_simulator.errors import SettingInvalidError
from pagestream_simulator.virtual_engine import Floats, VirtualEngine, VirtualRequest


class ReceivedBlocks(HostTier):
    """A tier whose pages other engines fill. A prompt that finds its blocks here loads them, and computes the rest."""

    def __init__(self, pool: BlockPool, num_pages: int) -> None:
        super().__init__(pool, num_pages, num_ahead=0)
        self.saves_blocks = False

    def receive(self, block_hashes: abc.Sequence[bytes]) -> None:
        """Keep the blocks of a prompt, in its order; where pages are short, the least recently used are dropped."""
        pages = []
        for block_hash in block_hashes[: self._pages.num_free]:
            if block_hash not in self._pages.by_hash:
                pages.append(self._pages.allocate())
                self._pages.cache_full_block(pages[-1], block_hash)
        for page in reversed(pages):  # The end of a prefix is lost before its beginning.
            self._pages.release(page)


class Handover(NamedTuple):
    """How prompts' keys and values go from one engine to another."""

    token_bytes: int
    """Keys and values of a token."""
    bytes_per_s: float
    """Of an engine's link, each way; prompts pass it one after the other."""
    lost_share: float = 0.0
    """Of prompts whose blocks don't arrive, and are computed again; which do is drawn."""


@dataclass(slots=True, eq=False)
class PooledEngine:
    """An engine, and what the pool knows of it."""

    engine: VirtualEngine
    is_busy: bool = False
    link_free_s: float = 0.0
    """When its link has sent or received all that it has to."""
    held_tokens: int = 0
    """Of the prompts that it decodes, or will when they have arrived."""


class VirtualPool:
    """Serves requests by engines that claim from one queue, in order of arrival, as engines of a pool do.

    An engine claims before a step while it holds less than a step of uncomputed tokens. With `decoding` engines the
    others compute prompts alone: at the first token, which the client gets at once, a prompt's full blocks pass the
    links of both engines, and the request waits at the decode engine that holds least. Its scheduler loads the blocks
    as from host memory when it admits the request, and computes what is behind the last full block.

    Args:
        claiming: without steps ahead; with prefix caching, where there are decode engines.
        decoding: each with a tier of `ReceivedBlocks`.
        handover: needed with decode engines, and only there.
        claim_tokens: uncomputed tokens with which an engine claims no more.

    Raises:
        SettingInvalidError: decode engines without a handover or a tier to receive blocks.
    """

    def __init__(
        self,
        claiming: abc.Sequence[VirtualEngine],
        *,
        claim_tokens: int,
        decoding: abc.Sequence[VirtualEngine] = (),
        handover: Handover | None = None,
    ) -> None:
        if decoding and handover is None:
            raise SettingInvalidError("decode engines are given, and no handover: how fast do blocks get there?")
        if not all(isinstance(engine.cache.tier, ReceivedBlocks) for engine in decoding):
            raise SettingInvalidError("a decode engine has no tier of ReceivedBlocks")
        self._claiming = [PooledEngine(engine) for engine in claiming]
        self._decoding = [PooledEngine(engine) for engine in decoding]
        self._handover = handover or Handover(0, 1.0)  # Of a mixed pool, which hands nothing over.
        self._claim_tokens = claim_tokens
        self._queue: deque[int] = deque()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = count()
        self._rng = random.Random(0)
        self._requests: abc.Sequence[VirtualRequest] = ()
        self._last_s: list[float] = []
        self._owner: dict[int, PooledEngine] = {}
        self.now_s = 0.0
        self.first_s: Floats = np.zeros(0)
        """When each request's first token came."""
        self.end_s: Floats = np.zeros(0)
        """When each request's last token came."""
        self.gaps_s = array("d")
        """Seconds between two tokens of a request, of all requests."""

    def run(self, requests: abc.Sequence[VirtualRequest]) -> None:
        """Serve all requests to their ends."""
        self._requests = requests
        self.first_s, self.end_s = np.full((2, len(requests)), np.inf)
        self._last_s = [0.0] * len(requests)
        for number, request in enumerate(requests):
            self._at(request.arrival_s, partial(self._arrive, number))
        while self._events:
            self.now_s, _, action = heapq.heappop(self._events)
            action()

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._ties), action))

    def _arrive(self, number: int) -> None:
        self._queue.append(number)
        for place in self._claiming:
            if not self._queue:
                break
            self._start(place)

    def _start(self, place: PooledEngine) -> None:
        """Begin an engine's next step, if it has one and none runs."""
        if place.is_busy:
            return
        if place not in self._decoding:
            self._claim(place.engine)
        place.engine.now_s = self.now_s
        seconds = place.engine.launch()
        if seconds is not None:
            place.is_busy = True
            self._at(self.now_s + seconds, partial(self._end_step, place))

    def _claim(self, engine: VirtualEngine) -> None:
        if not self._queue:
            return
        uncomputed = sum(len(seq.token_ids) - seq.num_sent_tokens for seq in engine.scheduler.sequences())
        while self._queue and uncomputed < self._claim_tokens:
            number = self._queue.popleft()
            request = self._requests[number]
            engine.add(number, request._replace(output_tokens=1) if self._decoding else request)
            uncomputed += request.prompt_tokens

    def _end_step(self, place: PooledEngine) -> None:
        place.is_busy = False
        collected = place.engine.collect()
        for seq in collected.sampled:
            self._note_token(seq.arrival)
        for seq in collected.ended:
            number = seq.arrival
            if self._decoding and number not in self._owner and self._requests[number].output_tokens > 1:
                self._hand_over(place, seq)
            else:
                self.end_s[number] = self.now_s
                if number in self._owner:
                    self._owner.pop(number).held_tokens -= self._requests[number].prompt_tokens
        self._start(place)

    def _note_token(self, number: int) -> None:
        if self._last_s[number]:
            self.gaps_s.append(self.now_s - self._last_s[number])
        else:
            self.first_s[number] = self.now_s
        self._last_s[number] = self.now_s

    def _hand_over(self, sender: PooledEngine, seq: Sequence) -> None:
        receiver = min(self._decoding, key=lambda place: place.held_tokens)
        self._owner[seq.arrival] = receiver
        receiver.held_tokens += seq.num_prompt_tokens
        block_hashes = list(seq.block_hashes)
        if self._rng.random() < self._handover.lost_share:
            block_hashes = []
        num_bytes = len(block_hashes) * sender.engine.cache.block_size * self._handover.token_bytes
        done_s = max(self.now_s, sender.link_free_s, receiver.link_free_s) + num_bytes / self._handover.bytes_per_s
        sender.link_free_s = receiver.link_free_s = done_s
        self._at(done_s, partial(self._receive, receiver, seq.arrival, block_hashes))

    def _receive(self, place: PooledEngine, number: int, block_hashes: list[bytes]) -> None:
        tier = place.engine.cache.tier
        if isinstance(tier, ReceivedBlocks):
            tier.receive(block_hashes)
        request = self._requests[number]
        prompt_tokens = request.prompt_tokens + 1  # And the first token of the answer.
        place.engine.add(number, request._replace(prompt_tokens=prompt_tokens, output_tokens=request.output_tokens - 1))
        self._start(place)
