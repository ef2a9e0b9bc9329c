import kopf
from pagestream_operator import handlers
from pagestream_operator.kube.kinds import POD, POOL


class FakeWatcher:
    """Notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def store_object(self, *arguments: object) -> None:
        self.calls.append(arguments)

    def observe_event(self, *arguments: object) -> None:
        self.calls.append(arguments)


async def test_objects_and_events_reach_the_watcher() -> None:
    watcher, body = FakeWatcher(), {"kind": "Pod"}
    await handlers.store_object(body=body, param=POD, memo=kopf.Memo(watcher=watcher), patch={}, logger=None)
    await handlers.observe_event(event={"type": "DELETED", "object": body}, param=POD, memo=kopf.Memo(watcher=watcher))
    assert watcher.calls == [(POD, body), (POD, "DELETED", body)]


async def test_kopf_writes_nothing_and_watches_by_label() -> None:
    settings = kopf.OperatorSettings()
    await handlers.configure(settings=settings)
    assert not settings.posting.enabled
    selectors = settings.watching.label_selectors
    assert selectors["", "v1", "pods"] == POD.label_selector
    assert (POOL.group, POOL.version, POOL.plural) not in selectors
