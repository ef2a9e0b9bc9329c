"""How a Job's own container has ended, where another container of its pod runs on.

A sidecar that is injected as an ordinary container doesn't end when the Job's container does, so that the pod never
succeeds and the Job is never complete.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagestream_operator.fields import mapping, mappings, part, text
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.kinds import POD


@dataclass(frozen=True, slots=True)
class Success:
    """A container that has ended with exit code 0. `message` is what it has left."""

    message: str


async def success_of(client: KubeClient, namespace: str, job: str, container: str) -> Success | None:
    """Look at a Job's pods for one whose container `container` has succeeded.

    Raises:
        ApiFailure: the call failed.
    """
    for pod in await client.list(POD, namespace, selector=f"batch.kubernetes.io/job-name={job}"):
        for each in mappings(part(pod, "status", "containerStatuses")):
            ended = mapping(part(each, "state", "terminated"))
            if each.get("name") == container and ended.get("exitCode") == 0:
                return Success(text(ended.get("message")))
    return None
