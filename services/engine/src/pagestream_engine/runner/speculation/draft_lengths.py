"""How many drafts each row gets: as many as are likely to give more tokens than their time is worth."""

from __future__ import annotations

import math

_LEARNING_RATE = 0.1
"""Of a row's acceptance with each draft that was checked, once there were a few."""
_PRIOR_CHECKS = 2
"""Checked drafts that the acceptance counts for which a row begins with."""
_FORGETTING = 0.98
"""Weight that the earlier steps keep with each new one."""
_FORGETTING_DRAFTS = 0.9
"""Likewise, of steps with drafts, of which there may be few."""
_PROBE_AFTER = 32
"""Steps after which a row without drafts gets one in two steps again, to see whether its text has changed. In the first
of them a draft model also computes what it lacks."""
_FIRST_ACCEPTANCE = 0.6
_MARGIN = 1.5
"""What a draft has to be worth, of its cost. Both are estimates, and a token that comes early is worth less than one
where a sequence that gets no drafts decides when a batch ends: with 8 of them drafts worth 1.1 of their cost lost."""
_UNKNOWN_COST = 0.2
"""Of a draft, in tokens of the same time, until steps of different sizes were measured."""


class StepCost:
    """What one more token of a step costs, by a line through the times of the steps so far; later ones count more."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = self._sampled = 0.0
        self._drafts = self._draft_seconds = self._all_seconds = 0.0
        self._of_a_token = self._of_a_draft = _UNKNOWN_COST

    def note(
        self, num_tokens: int, num_sampled: int, seconds: float, num_drafts: int = 0, draft_seconds: float = 0.0
    ) -> None:
        """Take a step of decodes.

        Args:
            num_tokens: that it has computed.
            num_sampled: that it gave.
            num_drafts: that were made for it; 0 where their time tells nothing.
        """
        if num_drafts:
            self._drafts = self._drafts * _FORGETTING_DRAFTS + num_drafts
            self._draft_seconds = self._draft_seconds * _FORGETTING_DRAFTS + draft_seconds
        self._weight = self._weight * _FORGETTING + 1
        self._tokens = self._tokens * _FORGETTING + num_tokens
        self._sampled = self._sampled * _FORGETTING + num_sampled
        self._seconds = self._seconds * _FORGETTING + seconds
        self._all_seconds = self._all_seconds * _FORGETTING + seconds + draft_seconds
        self._squares = self._squares * _FORGETTING + num_tokens * num_tokens
        self._products = self._products * _FORGETTING + num_tokens * seconds

        self._estimate()

    @property
    def of_a_draft(self) -> float:
        """Tokens that are given, on the average, in the time that one more draft takes: to make it, and to compute one
        more token in the step; in [0, 1]."""
        return self._of_a_draft

    @property
    def of_a_token(self) -> float:
        """Likewise, without making it."""
        return self._of_a_token

    def _estimate(self) -> None:
        """Settle the costs once a step: every row asks for them."""
        tokens_per_s = self._sampled / self._all_seconds if self._all_seconds else 0.0
        making = self._draft_seconds / self._drafts * tokens_per_s if self._drafts else 0.0
        spread = self._squares * self._weight - self._tokens * self._tokens
        self._of_a_token = _UNKNOWN_COST
        if spread > 1e-3 * self._tokens * self._tokens:
            slope = (self._products * self._weight - self._tokens * self._seconds) / spread
            self._of_a_token = min(1.0, max(0.0, slope * tokens_per_s))
        self._of_a_draft = min(1.0, self._of_a_token + making)


class DraftLengths:
    """The acceptance of each row's drafts, and what follows for their number.

    Args:
        most: drafts of a row in a step.
        are_made: whether making a draft takes time too.
    """

    def __init__(self, max_num_seqs: int, most: int, cost: StepCost, *, are_made: bool = True) -> None:
        self.cost = cost
        self._are_made = are_made
        self._most = most
        self._mean = _FIRST_ACCEPTANCE
        self._acceptance = [_FIRST_ACCEPTANCE] * max_num_seqs
        self._num_checked = [0] * max_num_seqs
        self._num_idle = [0] * max_num_seqs

    def start(self, row: int) -> None:
        """Take a sequence: it is expected to accept what others have accepted."""
        self._acceptance[row] = self._mean
        self._num_checked[row] = 0
        self._num_idle[row] = 0

    def wanted(self, row: int) -> int:
        """Return how many drafts a row should have.

        The j-th is accepted with probability p ** j, where p is the share of checked drafts that held. It is worth its
        time while that is more than the tokens that the step gives anyway in that time.
        """
        cost = min(1.0, _MARGIN * (self.cost.of_a_draft if self._are_made else self.cost.of_a_token))
        acceptance = self._acceptance[row]
        if acceptance <= cost:
            self._num_idle[row] += 1
            return int(self._num_idle[row] >= _PROBE_AFTER and self._num_idle[row] % _PROBE_AFTER < 2)
        if acceptance >= 1.0 or cost <= 0.0:
            return self._most
        return min(self._most, int(math.log(cost) / math.log(acceptance)))

    def note(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Learn from drafts that were checked: those up to the first that did not hold."""
        for index in range(min(num_drafts, num_accepted + 1)):
            held = float(index < num_accepted)
            self._num_checked[row] += 1
            rate = max(_LEARNING_RATE, 1 / (_PRIOR_CHECKS + self._num_checked[row]))
            self._acceptance[row] += rate * (held - self._acceptance[row])
            self._mean += _LEARNING_RATE / 10 * (held - self._mean)
