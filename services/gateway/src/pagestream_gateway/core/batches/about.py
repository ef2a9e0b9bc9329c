"""What is kept with a batch of the call that created it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from pagestream_gateway.core.identities.identity import Identity


@dataclass(frozen=True)
class BatchAbout:
    """A batch as its creator asked for it."""

    endpoint: str
    """Path of the API that its jobs are bodies of."""
    window: str
    """The completion window as it was given, such as "24h"."""
    identity: Identity
    """Whose requests its jobs are."""
    output_lifetime_s: int
    """Seconds for which its output is kept."""
    metadata: Mapping[str, str] | None = None

    def dumped(self) -> str:
        """Return it as the text that Redis keeps."""
        return json.dumps(asdict(self))


def about_of(text: str) -> BatchAbout:
    """Return what `dumped` has written; members that a later version has added are ignored."""
    given = json.loads(text)
    caller = given["identity"]
    return BatchAbout(
        endpoint=given["endpoint"],
        window=given["window"],
        identity=Identity(**{each.name: caller[each.name] for each in fields(Identity) if each.name in caller}),
        output_lifetime_s=given["output_lifetime_s"],
        metadata=given.get("metadata"),
    )
