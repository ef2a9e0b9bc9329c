"""What this replica sees: a watcher for each namespace, so that what is wrong in one of them concerns no other one."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import kopf

from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.kinds import WATCHED, Kind
from pagestream_operator.kube.lease import Sees
from pagestream_operator.kube.store import ObjectStore
from pagestream_operator.kube.watch import DEFAULT_WATCH_S, Watcher
from pagestream_operator.supervision import run_together

_MOST_HUNG = 3
"""Threads of kopf that hang at once, after which only a new process helps."""


class Sight:
    """Fills a store from all namespaces while `run` runs."""

    def __init__(
        self,
        client: KubeClient,
        store: ObjectStore,
        namespaces: tuple[str, ...] | None,
        registry: kopf.OperatorRegistry,
        *,
        resync_s: float,
        watch_s: float = DEFAULT_WATCH_S,
        on_sight: Callable[[], None] = lambda: None,
        ends: Counter[str] | None = None,
    ) -> None:
        """Prepare; nothing is watched yet.

        Args:
            namespaces: which to watch; None for all, by one watcher.
            ends: counts ends of watchers that nobody asked for.
        """
        self.watchers = {
            namespace: Watcher(
                client, store, namespace, registry, resync_s=resync_s, watch_s=watch_s, on_sight=on_sight, ends=ends
            )
            for namespace in namespaces or (None,)
        }
        """By namespace; None: of all."""
        self._ends = ends

    async def run(self, stop: asyncio.Event) -> None:
        """Watch until `stop` is set."""
        works = {f"watcher of {each.place}": partial(each.run, stop) for each in self.watchers.values()}
        await run_together(works, stop, ends=self._ends)

    def suspect(self, namespace: str, *kinds: Kind) -> None:
        """List these kinds of one namespace soon: the store was found to be wrong about them."""
        watcher = self.watchers.get(namespace) or self.watchers.get(None)
        if watcher is not None:
            watcher.suspect(*kinds, namespace=namespace)

    def shows(self, namespace: str) -> bool:
        """Whether the store shows a namespace as it is."""
        watcher = self.watchers.get(namespace) or self.watchers.get(None)
        return watcher is not None and watcher.sees

    @property
    def extent(self) -> Sees:
        """How much of its namespaces this replica sees."""
        seen = [watcher.sees for watcher in self.watchers.values()]
        if all(seen):
            return Sees.ALL
        return Sees.SOME if any(seen) else Sees.NOTHING

    def problem(self) -> str:
        """Why nothing is seen; "" where something is."""
        if self.extent is not Sees.NOTHING:
            return ""
        return "nothing is seen: " + "; ".join(map(_trouble, self.watchers.values()))

    def hang(self) -> str:
        """Why only a new process helps; "" where none is needed."""
        hung = sum(watcher.num_hung for watcher in self.watchers.values())
        return f"{hung} threads of kopf hang" if hung >= _MOST_HUNG else ""

    def report(self) -> Iterator[str]:
        """A line for each namespace: what was heard last of each kind, and how long ago; or what is wrong."""
        now = time.monotonic()
        for watcher in self.watchers.values():
            signs = [(kind.name, watcher.signs.get(kind)) for kind in WATCHED]
            heard = ", ".join(f"{name} {sign.what} {now - sign.at_s:.0f} s" for name, sign in signs if sign is not None)
            state = "seen" if watcher.sees else f"not seen ({_trouble(watcher)})"
            yield f"{watcher.place}: {state}; {heard or 'nothing heard'}"


def _trouble(watcher: Watcher) -> str:
    if watcher.trouble:
        return f"{watcher.place}: {watcher.trouble}"
    unheard = watcher.unheard()
    if unheard and all(age < float("inf") for age in unheard.values()):
        ages = ", ".join(f"{kind.plural} for {age:.0f} s" for kind, age in unheard.items())
        return f"{watcher.place}: nothing heard of {ages}"
    return f"{watcher.place}: starting"
