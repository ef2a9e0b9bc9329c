"""Kubernetes Events about pools."""

from __future__ import annotations

import logging
import secrets
from datetime import UTC, datetime
from typing import Any

from pagestream_operator.api import GROUP
from pagestream_operator.errors import ApiFailure, NotLeading
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.kinds import EVENT, LEASE, POOL, Kind
from pagestream_operator.kube.lease import Leadership

logger = logging.getLogger(__name__)

_NOTE_CHARACTERS = 1024  # the API server's own limit


class Recorder:
    """Publishes events about pools. One that can't be written is logged and lost: nothing depends on events."""

    def __init__(self, client: KubeClient, leadership: Leadership) -> None:
        self._client, self._leadership = client, leadership

    async def publish(
        self, pool: dict[str, Any], reason: str, note: str, *, action: str, warning: bool = False
    ) -> None:
        """Publish an event, and log its note.

        Args:
            action: what the operator did.
            warning: whether its type is Warning instead of Normal.
        """
        about = {"name": pool["name"], "uid": pool["uid"], "resourceVersion": pool["resourceVersion"]}
        await self._publish(pool["namespace"], POOL, about, reason, note, action=action, warning=warning)

    async def publish_at_lease(self, reason: str, note: str, *, action: str, warning: bool = False) -> None:
        """Publish an event about the operators' Lease: a namespace that is being deleted takes no events, and neither
        does one in which the operator has no rights.
        """
        namespace, name = self._leadership.lease
        await self._publish(namespace, LEASE, {"name": name}, reason, note, action=action, warning=warning)

    async def _publish(
        self, namespace: str, kind: Kind, about: dict[str, str], reason: str, note: str, *, action: str, warning: bool
    ) -> None:
        name = about["name"]
        logger.info(note, extra={"pool" if kind is POOL else "lease": f"{namespace}/{name}", "reason": reason})
        body = {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.name,
            "metadata": {"namespace": namespace, "name": f"{name}.{secrets.token_hex(8)}"},
            "eventTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": f"{GROUP}/operator",
            "reportingInstance": self._leadership.identity[:128],
            "action": action,
            "reason": reason,
            "note": note[:_NOTE_CHARACTERS],
            "type": "Warning" if warning else "Normal",
            "regarding": {"apiVersion": kind.api_version, "kind": kind.name, "namespace": namespace, **about},
        }
        try:
            async with self._leadership.act():
                await self._client.create(EVENT, body)
        except (ApiFailure, NotLeading) as error:
            logger.warning("an event can't be written: %s", error, extra={"reason": reason})
