"""Beam search: from each beam's likeliest next tokens to the beams that go on, and the outputs that are complete.

The rules are those of `transformers`' `generate(num_beams=..., do_sample=False)`, for one prompt:

* The candidates of a step are all beams, each with every token; their score is the sum of log probabilities.
* Of the best `width` candidates those that end become hypotheses, which rank by score / length ** length_penalty. The
  best `width` hypotheses are kept. Candidates further down that end are dropped.
* The best `width` candidates that do not end go on.
* At the longest length all of the best `width` candidates end.
* `early_stopping` says when the open beams are given up: see `SamplingParams.early_stopping`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pagestream_engine.request import LogprobRow
from pagestream_engine.sampling_params import ALL_LOGPROBS, SamplingParams


class Beam(NamedTuple):
    """An output so far: a path of tokens back to the prompt, which its forks share."""

    before: Beam | None
    """None: it is the first token."""
    token_id: int
    row: LogprobRow | None
    """Its log probabilities, where they are reported."""
    score: float
    """Sum of the log probabilities of all its tokens."""
    length: int
    """Number of its tokens."""

    def path(self) -> list[Beam]:
        """Return the beam of each token, the first one's first."""
        beams, beam = list[Beam](), self
        while True:
            beams.append(beam)
            if beam.before is None:
                return beams[::-1]
            beam = beam.before


class Hypothesis(NamedTuple):
    """A complete output."""

    beam: Beam
    rank_score: float
    """Score over length to the power of the length penalty."""


class Step(NamedTuple):
    """One candidate that goes on."""

    parent: int
    """Which of the former beams it continues."""
    token_id: int


class _Candidate(NamedTuple):
    """Sorts by how good it is."""

    loss: float
    """The score's negative."""
    parent: int
    place: int
    """Among its parent's likeliest tokens."""
    token_id: int
    is_end: bool


class BeamSearch:
    """The beams and hypotheses of one prompt. Equal scores rank by beam, then as the beam's tokens do, so that the
    outcome is a function of the log probabilities alone.

    Args:
        end_token_ids: tokens that end an output.
        max_output_tokens: tokens of the longest output.
    """

    def __init__(self, params: SamplingParams, end_token_ids: frozenset[int], max_output_tokens: int) -> None:
        self.width = params.width
        self.num_candidates = self.width + len(end_token_ids)
        """Likeliest tokens of each beam that are needed: at least `width` of them do not end it."""
        self.hypotheses: list[Hypothesis] = []
        """At most `width`, the best first."""
        self._beams: list[Beam] = []
        """Those that go on, the best first; none before the first step."""
        self._params = params
        self._end_token_ids = end_token_ids
        self._max_output_tokens = max_output_tokens
        self._num_tokens = 0

    @property
    def num_reported(self) -> int:
        """`SamplingParams.logprobs` of the beams: what the search needs, and what the request asked for."""
        asked = -1 if self._params.logprobs is None else self._params.logprobs
        return asked if self._params.logprobs == ALL_LOGPROBS else max(self.num_candidates, asked)

    def advance(self, rows: Sequence[LogprobRow]) -> list[Step]:
        """Choose the beams that go on.

        Args:
            rows: of each beam, the token that was sampled, which means nothing here, then its `num_candidates`
                likeliest ones. Before the first step all beams are the prompt, and only the first row counts.

        Returns:
            `width` steps, the best first. Empty: the search has ended, with `hypotheses`.
        """
        self._num_tokens += 1
        is_last = self._num_tokens >= self._max_output_tokens
        ranked = self._candidates(rows)
        for candidate in ranked[: self.width]:
            if candidate.is_end or is_last:
                self._complete(self._extended(candidate, rows))
        if is_last:
            return []
        chosen = [candidate for candidate in ranked if not candidate.is_end][: self.width]
        self._beams = [self._extended(candidate, rows) for candidate in chosen]
        if self._has_ended():
            return []
        return [Step(candidate.parent, candidate.token_id) for candidate in chosen]

    def _candidates(self, rows: Sequence[LogprobRow]) -> list[_Candidate]:
        """All candidates, the best first."""
        scores = [beam.score for beam in self._beams] or [0.0]
        may_end = self._num_tokens > self._params.min_tokens
        candidates: list[_Candidate] = []
        for parent, (score, row) in enumerate(zip(scores, rows, strict=False)):
            num_open = 0
            for place, (token_id, logprob) in enumerate(zip(row.token_ids[1:], row.logprobs[1:], strict=False)):
                if num_open == self.width:
                    break  # What comes after `width` better ones of the same beam can't be chosen.
                is_end = token_id in self._end_token_ids
                num_open += not is_end
                if may_end or not is_end:
                    candidates.append(_Candidate(-score - logprob, parent, place, token_id, is_end))
        return sorted(candidates)

    def _extended(self, candidate: _Candidate, rows: Sequence[LogprobRow]) -> Beam:
        before = self._beams[candidate.parent] if self._num_tokens > 1 else None
        row = None
        if self._params.logprobs is not None:
            given, place = rows[candidate.parent], candidate.place + 1
            token_ids = [candidate.token_id, *given.token_ids[1:]]
            logprobs = [given.logprobs[place], *given.logprobs[1:]]
            most = len(token_ids) if self._params.logprobs < 0 else self._params.logprobs + 1
            row = LogprobRow(token_ids[:most], logprobs[:most], place)
        return Beam(before, candidate.token_id, row, -candidate.loss, self._num_tokens)

    def _complete(self, beam: Beam) -> None:
        """Keep an output that is complete, if it is among the best."""
        hypothesis = Hypothesis(beam, beam.score / float(beam.length) ** self._params.length_penalty)
        self.hypotheses.append(hypothesis)
        self.hypotheses.sort(key=lambda other: -other.rank_score)
        del self.hypotheses[self.width :]

    def _has_ended(self) -> bool:
        """Whether the open beams are given up."""
        params = self._params
        if len(self.hypotheses) < self.width:
            return False
        if params.early_stopping is True:
            return True
        length = self._num_tokens
        if params.early_stopping == "never" and params.length_penalty > 0.0:
            length = self._max_output_tokens
        best: float = self._beams[0].score / float(length) ** params.length_penalty
        return best <= self.hypotheses[-1].rank_score
