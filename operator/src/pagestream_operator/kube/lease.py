"""Leadership by a Lease, and the fence of every write.

The leader renews the lease and counts itself as leading until `lease_margin_s` before it ends, by its own clock, from
the moment *before* it sent the request that renewed it. The others take the lease when they have seen it unchanged for
its whole duration, by their own clock. So clocks need only run at the same speed, not show the same time.

Time alone can't stop a process that freezes between reading its clock and sending a request: it wakes up, and sends.
Hence every write carries the version of the object that it was derived from, and a new leader first writes its term
into each pool's status and Deployment: the API server refuses what an old leader still sends.

A replica leads only while it sees something, and one that sees all of its namespaces goes before one that sees some:

- One that sees nothing takes no lease, and releases its own.
- One that sees some takes a free lease only when nobody else has taken it for a lease's duration, and writes into it
  (annotation `pagestream.dev/sees`) that it sees only some.
- One that sees all asks the holder of such a lease to release it (`pagestream.dev/preferred-holder`, as the field of
  that name in Kubernetes' own coordinated elections, which API servers drop where these are off).
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
from enum import IntEnum
from typing import Any

from pagestream_operator.api import GROUP
from pagestream_operator.errors import ApiFailure, Conflict, Gone, NotLeading
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.kinds import LEASE

logger = logging.getLogger(__name__)

SEES = f"{GROUP}/sees"
"""Annotation of a lease whose holder sees only some of its namespaces."""
PREFERRED = f"{GROUP}/preferred-holder"
"""Annotation with a replica that sees all of them, and waits for the lease."""
_BLIND_LOOK_S = 0.2
"""Between two looks at what this replica sees, while that is nothing: they make no call."""


class Sees(IntEnum):
    """How much of its namespaces a replica sees."""

    NOTHING = 0
    SOME = 1
    ALL = 2


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
class _Seen:
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
        sees: Callable[[], Sees] = lambda: Sees.ALL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            name: of this replica; a nonce is added to it, since a restarted pod has the same name.
            on_change: called with whether it leads.
            sees: returns how much it sees now.
        """
        self.identity = f"{name}_{secrets.token_hex(4)}"
        self.term = 0
        """The lease's number of changes when this process took it: the fencing number."""
        self._client, self._settings, self._clock = client, settings, clock
        self._on_change, self._sees = on_change, sees
        self._valid_until = float("-inf")
        self._led = False
        self._seen: _Seen | None = None
        self._body: dict[str, Any] = {}
        self._free_since: float | None = None
        """Since when the lease could be taken; None while another replica holds it."""

    @property
    def lease(self) -> tuple[str, str]:
        """Namespace and name of the lease."""
        return self._settings.namespace, self._settings.name

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
        sees = self._sees()
        if sees is Sees.NOTHING:
            if self.is_leading:
                logger.warning("releases the lease, since it sees nothing", extra={"identity": self.identity})
                await self._release()
            self._free_since = None
            return
        try:
            if self.is_leading:
                await self._write(self.term)
            else:
                await self._try_to_lead(sees)
        except Conflict:
            self._seen = None
            await self._look_again()
        except ApiFailure as error:
            logger.warning("can't reach the lease: %s", error)

    async def _look_again(self) -> None:
        """Read the lease again after a conflict: another replica may have taken it, or asked for it."""
        try:
            seen = await self._look()
        except ApiFailure as error:
            logger.warning("can't reach the lease: %s", error)
            return
        if seen is None or seen.holder != self.identity:  # without a lease, whoever makes it leads
            self._valid_until = float("-inf")
        elif self.is_leading and self._sees() is not Sees.ALL and self._annotation(PREFERRED):
            logger.warning("releases the lease to a replica that sees more", extra={"identity": self.identity})
            await self._release()

    async def _try_to_lead(self, sees: Sees) -> None:
        seen = await self._look()
        if not self._is_free(seen):
            self._free_since = None
            if sees is Sees.ALL and self._annotation(SEES) and not self._annotation(PREFERRED):
                await self._ask_for_it()
            return
        if self._free_since is None:
            self._free_since = self._clock()
        is_own = seen is not None and seen.holder == self.identity
        if sees is not Sees.ALL and not is_own and self._clock() - self._free_since < self._settings.duration_s:
            return  # one that sees more goes first
        if seen is None:
            await self._create()
        else:
            # Its own is late, but not taken. It is a new term all the same: another replica may have read the lease as
            # lapsed.
            await self._write(seen.transitions + 1)

    def _is_free(self, seen: _Seen | None) -> bool:
        if seen is None or not seen.holder or seen.holder == self.identity:
            return True
        return self._clock() - seen.since >= seen.duration_s

    async def _ask_for_it(self) -> None:
        """Ask the holder, which sees less, to release the lease."""
        metadata = self._body["metadata"]
        annotations = {**(metadata.get("annotations") or {}), PREFERRED: self.identity}
        await self._client.replace(LEASE, {**self._body, "metadata": {**metadata, "annotations": annotations}})
        logger.info("asks for the lease, since it sees more than its holder", extra={"identity": self.identity})

    def _annotation(self, name: str) -> str:
        return str(((self._body.get("metadata") or {}).get("annotations") or {}).get(name) or "")

    async def _look(self) -> _Seen | None:
        try:
            body = await self._client.get(LEASE, self._settings.namespace, self._settings.name)
        except Gone:
            self._seen, self._body = None, {}
            return None
        spec, version = body.get("spec") or {}, body["metadata"]["resourceVersion"]
        self._body = body
        if self._seen is None or self._seen.version != version:
            self._seen = _Seen(
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
        self.term, self._free_since = term, None
        self._valid_until = before + self._settings.duration_s - self._settings.margin_s

    def _lease(self, term: int) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.name,
            "metadata": {
                "name": self._settings.name,
                "namespace": self._settings.namespace,
                "annotations": {SEES: "some"} if self._sees() is Sees.SOME else {},
            },
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
        kept = ("resourceVersion", "labels", "ownerReferences")
        lease["metadata"] |= {key: seen[key] for key in kept if key in seen}
        others = {key: value for key, value in (seen.get("annotations") or {}).items() if key not in (SEES, PREFERRED)}
        lease["metadata"]["annotations"] = others | lease["metadata"]["annotations"]
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
        pause = self._settings.look_s if self._sees() is not Sees.NOTHING else min(self._settings.look_s, _BLIND_LOOK_S)
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
