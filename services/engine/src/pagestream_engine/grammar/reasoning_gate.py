"""Where an output's reasoning ends and its grammar begins."""

from __future__ import annotations

from collections import deque
from copy import deepcopy
from enum import Enum, auto

from pagestream_engine.sampling_params import ReasoningMarks


class Phase(Enum):
    """What the next token belongs to."""

    BEGIN = auto()
    """The first token of an opening, or the grammar's first one."""
    OPENING = auto()
    """The rest of an opening: its first token has decided that there is reasoning."""
    REASONING = auto()
    """Reasoning, or the marks at its end."""
    GRAMMAR = auto()
    """The grammar; it stays so."""


class ReasoningGate:
    """A pure function of the marks and of an output's tokens. A token at a time, so that drafts can cross the end.

    Args:
        marks: of reasoning that may come first; None: the grammar holds from the first token.
    """

    def __init__(self, marks: ReasoningMarks | None) -> None:
        self._openings = () if marks is None else marks.openings
        self._end = () if marks is None else marks.end
        self._latest: deque[int] = deque(maxlen=len(self._end))
        """The last tokens of the reasoning."""
        self.phase = Phase.GRAMMAR if marks is None else Phase.BEGIN if marks.openings else Phase.REASONING

    def take(self, token_id: int) -> bool:
        """Take the output's next token; return whether it is the grammar's."""
        match self.phase:
            case Phase.GRAMMAR:
                return True
            case Phase.REASONING:
                self._latest.append(token_id)
                if tuple(self._latest) == self._end:
                    self.phase = Phase.GRAMMAR
                return False
        is_opening = self._narrow(token_id)
        if not is_opening:
            self.phase = Phase.GRAMMAR
        return not is_opening

    def expected(self) -> list[int]:
        """Return the tokens that an opening may have next; none outside of `BEGIN` and `OPENING`."""
        return sorted({opening[0] for opening in self._openings})

    def ahead(self) -> ReasoningGate:
        """Return a copy, to look ahead with."""
        return deepcopy(self)

    def _narrow(self, token_id: int) -> bool:
        """Keep the rest of the openings that go on with a token; return whether there are any."""
        self._openings = tuple(opening[1:] for opening in self._openings if opening[0] == token_id)
        if not self._openings:
            return False
        self.phase = Phase.OPENING
        if not all(self._openings):
            self._openings = ()
            self.phase = Phase.REASONING
        return True
