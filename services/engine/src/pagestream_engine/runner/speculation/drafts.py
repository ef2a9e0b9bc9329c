"""The drafts of a step."""

from __future__ import annotations

from dataclasses import dataclass

from pagestream_engine.step.records import Int32Array, Int64Array

NO_TOKEN = -1


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Drafts of the decodes of a plan, whose `num_new_tokens` count them."""

    token_ids: Int32Array
    """(decodes, most) of each decode the tokens after its last one, then `NO_TOKEN`."""

    @property
    def counts(self) -> Int64Array:
        """(decodes,): how many each has."""
        counts: Int64Array = (self.token_ids != NO_TOKEN).sum(1)
        return counts

    def packed(self) -> Int32Array:
        """(drafts,): all of them, decode by decode."""
        drafts: Int32Array = self.token_ids[self.token_ids != NO_TOKEN]
        return drafts
