"""Leadership by a Lease, and the fence of every write.

The leader renews the lease and counts itself as leading until `lease_margin_s` before it ends, by its own clock, from
the moment *before* it sent the request that renewed it. The others take the lease when they have seen it unchanged for
its whole duration, by their own clock. So clocks need only run at the same speed, not show the same time.

Time alone can't stop a process that freezes between reading its clock and sending a request: it wakes up, and sends.
Hence every write carries the version of the object that it was derived from, and a new leader first writes its term
into each pool's status and Deployment: the API server refuses what an old leader still sends.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pagestream_operator.errors import ApiFailure, Conflict, Gone, NotLeading
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.kinds import LEASE

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseSettings:
    """Times in seconds; see `OperatorVariables`."""

    namespace: str
    name: str
    duration_s: float
    renew_s: float
    margin_s: float
    look_s: float


@dataclass(frozen=True)
class _Sight:
    """A lease as it was read, and when this process first read that version."""

    version: str
    holder: str
    transitions: int
    duration_s: float
    since: float


class Leadership:
    """Leader election. Run it as a task; check `is_leading`, and write inside `act()`."""

    def __init__(
        self,
        client: KubeClient,
        settings: LeaseSettings,
        name: str,
        *,
        on_change: Callable[[bool], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name` is this replica's; a nonce is added to it, since a restarted pod has the same name."""
        self.identity = f"{name}_{secrets.token_hex(4)}"
        self.term = 0
        """The lease's number of changes when this process took it: the fencing number."""
        self._client, self._settings, self._clock = client, settings, clock
        self._on_change = on_change
        self._valid_until = float("-inf")
        self._led = False
        self._seen: _Sight | None = None
        self._body: dict[str, Any] = {}

    @property
    def is_leading(self) -> bool:
        """Whether this process may write now."""
        return self.remaining_s > 0

    @property
    def remaining_s(self) -> float:
        """Seconds for which it may write; below 0 if it may not."""
        return self._valid_until - self._clock()

    @asynccontextmanager
    async def act(self) -> AsyncIterator[None]:
        """Guard a write: `async with leadership.act()`.

        Raises:
            NotLeading: this process doesn't lead, or leadership ended before the API server answered.
        """
        remaining = self.remaining_s
        if remaining <= 0:
            raise NotLeading("this replica does not lead")
        try:
            async with asyncio.timeout(remaining):
                yield
        except TimeoutError as error:
            raise NotLeading("leadership ended before the API server had answered") from error

    async def run(self, stop: asyncio.Event) -> None:
        """Take and renew the lease whenever possible, until `stop` is set; then release it for the next leader."""
        try:
            while not stop.is_set():
                await self._step()
                self._notify()
                await self._pause(stop)
        finally:
            await self._release()
            self._notify()

    async def _step(self) -> None:
        try:
            if self.is_leading:
                await self._write(self.term)
            else:
                await self._try_to_lead()
        except Conflict:
            self._seen = None
            await self._look_again()
        except ApiFailure as error:
            logger.warning("can't reach the lease: %s", error)

    async def _look_again(self) -> None:
        """Read the lease again after a conflict: another replica may have taken it."""
        try:
            seen = await self._look()
        except ApiFailure as error:
            logger.warning("can't reach the lease: %s", error)
            return
        if seen is not None and seen.holder != self.identity:
            self._valid_until = float("-inf")

    async def _try_to_lead(self) -> None:
        seen = await self._look()
        if seen is None:
            await self._create()
        elif seen.holder == self.identity:
            # Late, but not taken. It is a new term all the same: another replica may have read the lease as lapsed.
            await self._write(seen.transitions + 1)
        elif not seen.holder or self._clock() - seen.since >= seen.duration_s:
            await self._write(seen.transitions + 1)

    async def _look(self) -> _Sight | None:
        try:
            body = await self._client.get(LEASE, self._settings.namespace, self._settings.name)
        except Gone:
            self._seen, self._body = None, {}
            return None
        spec, version = body.get("spec") or {}, body["metadata"]["resourceVersion"]
        self._body = body
        if self._seen is None or self._seen.version != version:
            self._seen = _Sight(
                version,
                spec.get("holderIdentity") or "",
                spec.get("leaseTransitions") or 0,
                float(spec.get("leaseDurationSeconds") or self._settings.duration_s),
                self._clock(),
            )
        return self._seen

    async def _create(self) -> None:
        before = self._clock()
        self._body = await self._client.create(LEASE, self._lease(1))
        self._won(before, 1)

    async def _write(self, term: int) -> None:
        before = self._clock()
        lease = self._next(term)
        if self._led and term == self.term:
            lease["spec"]["acquireTime"] = (self._body.get("spec") or {}).get("acquireTime")
        self._body = await self._client.replace(LEASE, lease)
        self._won(before, term)

    def _won(self, before: float, term: int) -> None:
        self.term = term
        self._valid_until = before + self._settings.duration_s - self._settings.margin_s

    def _lease(self, term: int) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.name,
            "metadata": {"name": self._settings.name, "namespace": self._settings.namespace},
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": max(1, round(self._settings.duration_s)),
                "acquireTime": now,
                "renewTime": now,
                "leaseTransitions": term,
            },
        }

    def _next(self, term: int) -> dict[str, Any]:
        """The lease that follows the one read last, with its labels, annotations and owner."""
        lease, seen = self._lease(term), self._body["metadata"]
        kept = ("resourceVersion", "labels", "annotations", "ownerReferences")
        lease["metadata"] |= {key: seen[key] for key in kept if key in seen}
        return lease

    async def _release(self) -> None:
        if not self.is_leading:
            return
        self._valid_until = float("-inf")
        lease = self._next(self.term)
        lease["spec"]["holderIdentity"] = ""
        lease["spec"]["leaseDurationSeconds"] = 1
        try:
            await self._client.replace(LEASE, lease)
        except ApiFailure as error:
            logger.warning("can't release the lease, it will lapse: %s", error)

    async def _pause(self, stop: asyncio.Event) -> None:
        pause = self._settings.look_s
        if self.is_leading:
            failed = self.remaining_s < self._settings.duration_s - self._settings.margin_s - self._settings.renew_s
            pause = min(1.0, self._settings.renew_s) if failed else self._settings.renew_s
            pause = min(pause, max(self.remaining_s, 0.05))
        try:
            async with asyncio.timeout(pause):
                await stop.wait()
        except TimeoutError:
            return

    def _notify(self) -> None:
        if self.is_leading != self._led:
            self._led = self.is_leading
            logger.info("leads" if self._led else "does not lead", extra={"identity": self.identity, "term": self.term})
            self._on_change(self._led)
