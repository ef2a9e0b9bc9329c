"""Beam search: its beams are sequences of one group, and its outputs come when it has ended.

`BeamSearch` goes from each beam's likeliest next tokens to the beams that go on, and the outputs that are complete.
`Searches` runs them as sequences; `make_search` makes one of the choices that a caller gives.

The rules are those of `transformers`' `generate(num_beams=..., do_sample=False)`, for one prompt:

* The candidates of a step are all beams, each with every token; their score is the sum of log probabilities.
* Of the best `width` candidates those that end become hypotheses, which rank by score / length ** length_penalty. The
  best `width` hypotheses are kept. Candidates further down that end are dropped.
* The best `width` candidates that do not end go on.
* At the longest length all of the best `width` candidates end.
* `early_stopping` says when the open beams are given up: see `SamplingParams.early_stopping`.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pagestream_engine.errors import InvalidRequest, RequestFault
from pagestream_engine.kv_cache.manager import CacheManager
from pagestream_engine.output import Pieces, output_of, with_logprobs
from pagestream_engine.plan import KVLayout
from pagestream_engine.request import (
    NO_ROW,
    Choice,
    LogprobRow,
    Request,
    Sequence,
    SequenceOutput,
    choice_indexes,
    with_extra_ids,
)
from pagestream_engine.sampling_params import ALL_LOGPROBS, SamplingParams
from pagestream_engine.scheduler.scheduler import Scheduler


@dataclass(slots=True)
class Answer:
    """A choice of a request, whose output is a hypothesis of its search."""

    seq: Sequence
    """Gives it its id and makes its text; otherwise a beam like others."""
    index: int
    """The rank of its hypothesis, from 0."""
    given: abc.Sequence[int]
    """Tokens that an earlier run has put out: they are found again, and not put out again."""


@dataclass(slots=True)
class RunningSearch:
    """A search, and the sequences that compute it.

    The number of beams never changes: a beam that no candidate continues becomes a fork of one that several continue.
    Each may have one token more than was settled: what the sampler gave it, which its search replaces by its choice.
    """

    search: BeamSearch
    beams: list[Sequence]
    """In the order of the search's beams."""
    answers: list[Answer]
    rows: dict[int, LogprobRow] = field(default_factory=dict)
    """Likeliest tokens of the beams, by the id of their objects, of this step and of former ones."""

    @property
    def is_due(self) -> bool:
        """Whether each beam has been sampled."""
        return all(len(seq.token_ids) == seq.max_total_tokens for seq in self.beams)


class Searches:
    """The searches of an engine.

    Args:
        cache: of the scheduler; forks them.
        pieces: makes the texts of log probabilities; None without a tokenizer.
    """

    def __init__(self, scheduler: Scheduler, cache: CacheManager, pieces: Pieces | None) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._pieces = pieces
        self._by_beam: dict[str, RunningSearch] = {}

    def __len__(self) -> int:
        return len(set(map(id, self._by_beam.values())))

    def __contains__(self, seq_id: object) -> bool:
        return seq_id in self._by_beam

    def beam_ids(self) -> Iterable[str]:
        """The ids of all sequences of all searches: first those of the answers, then others."""
        return self._by_beam.keys()

    def add(self, running: RunningSearch) -> None:
        """Start a search; its beams are new, have equal tokens, and are not queued yet."""
        for seq in running.beams:
            seq.max_total_tokens = len(seq.token_ids) + 1
            self._by_beam[seq.seq_id] = running
        self._scheduler.add(*running.beams)

    def abort(self, seq_id: str) -> None:
        """Put out nothing for one choice; the search ends with its last one."""
        running = self._by_beam[seq_id]
        running.answers = [answer for answer in running.answers if answer.seq.seq_id != seq_id]
        if not running.answers:
            self._forget(running)
            for seq in running.beams:
                self._scheduler.abort(seq)

    def fail(self, seq_id: str, error: str) -> list[SequenceOutput]:
        """End the search of a beam. Return the ends of its answers."""
        running = self._by_beam[seq_id]
        self._forget(running)
        for seq in running.beams:
            self._scheduler.abort(seq)
        return [_failed(answer, error) for answer in running.answers]

    def note(self, seq: Sequence, row: LogprobRow) -> RunningSearch:
        """Take the likeliest tokens of a beam that was sampled. Return its search."""
        running = self._by_beam[seq.seq_id]
        running.rows[id(seq)] = row
        return running

    def advance(self, running: RunningSearch) -> list[SequenceOutput]:
        """Choose what each beam of a search that is due goes on with. Return the answers if it has ended."""
        rows = [running.rows[id(seq)] for seq in running.beams]
        is_first = len(running.beams[0].token_ids) == running.beams[0].num_prompt_tokens + 1
        steps = running.search.advance(rows)
        running.rows.clear()
        if not steps:
            self._forget(running)
            self._scheduler.finish_requests(running.beams)
            return [output for answer in running.answers for output in self._outputs(running, answer)]
        parents = range(len(steps)) if is_first else [step.parent for step in steps]  # At first all are alike.
        running.beams = self._fork(running.beams, parents)
        for seq, step in zip(running.beams, steps, strict=True):
            if seq.token_ids[-1] != step.token_id:
                seq.token_ids[-1] = step.token_id
                seq.row = NO_ROW  # The runner has the token that it sampled: it gets the sequence anew.
            seq.max_total_tokens += 1
        return []

    def _fork(self, beams: list[Sequence], parents: abc.Sequence[int]) -> list[Sequence]:
        """Return a sequence for each new beam: its parent's own for the first child, a fork for each other."""
        idle = [seq for place, seq in enumerate(beams) if place not in set(parents)]
        taken = set[int]()
        children = []
        for parent in parents:
            child = beams[parent]
            if parent in taken:
                child = idle.pop()
                self._replace(child, beams[parent])
            taken.add(parent)
            children.append(child)
        return children

    def _replace(self, child: Sequence, parent: Sequence) -> None:
        """Make a beam a copy of another. They share all blocks; one that is not full is copied before the next step.

        No step in flight computes either: a beam waits for its search after each token.
        """
        self._cache.free(child)
        child.token_ids[:] = parent.token_ids
        child.block_hashes[:] = parent.block_hashes
        self._cache.fork(parent, child, parent.num_computed_tokens)
        child.row = NO_ROW

    def _forget(self, running: RunningSearch) -> None:
        for seq in running.beams:
            del self._by_beam[seq.seq_id]

    def _outputs(self, running: RunningSearch, answer: Answer) -> list[SequenceOutput]:
        """Return the outputs of one answer, a token each, without those that an earlier run has put out."""
        hypothesis: Hypothesis = running.search.hypotheses[answer.index]
        path = hypothesis.beam.path()
        token_ids = [beam.token_id for beam in path]
        if list(answer.given) != token_ids[: len(answer.given)]:
            error = "the search found another output than the earlier run that has put out a part of it"
            return [_failed(answer, error)]
        outputs = []
        for count, beam in enumerate(path, 1):
            output = output_of(answer.seq, beam.token_id, count)
            if beam.row is not None:
                output = with_logprobs(output, beam.row, answer.seq, self._pieces)
            outputs.append(output)
        outputs[-1].cumulative_logprob = hypothesis.beam.score
        return outputs[len(answer.given) :]


def _failed(answer: Answer, error: str) -> SequenceOutput:
    seq = answer.seq
    is_fault = isinstance(error, RequestFault)
    return SequenceOutput(seq.seq_id, None, "", "error", None, seq.num_cached_tokens, error, is_fault)


MAX_END_TOKENS = 64
"""Of a search. Each step ranks them with the candidates of each beam."""


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """What an engine has for a search."""

    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    num_blocks: int
    layout: KVLayout

    def check(self, search: BeamSearch, seq: Sequence, max_total_tokens: int) -> None:
        """Check that a search fits into an engine that runs nothing else: its beams are never parted.

        Args:
            search: whose beams are like `seq`.
            seq: not queued yet.
            max_total_tokens: of the longest output, with its prompt.

        Raises:
            InvalidRequest: names what is too much.
        """
        width = search.width
        if width > self.max_num_seqs:
            raise InvalidRequest(f"beam_width: given {width}, expected at most {self.max_num_seqs}, max_num_seqs")
        if search.num_candidates > self.vocab_size:
            raise InvalidRequest(
                f"beam_width: given {width} and {len(seq.end_token_ids)} tokens that end an output, expected together "
                f"at most {self.vocab_size}, the vocabulary"
            )
        num_ends = len(seq.end_token_ids)
        if num_ends > MAX_END_TOKENS:
            raise InvalidRequest(
                f"stop_token_ids: given {num_ends} tokens that end an output, expected at most {MAX_END_TOKENS} with "
                "use_beam_search: each step ranks them for each beam"
            )
        num_blocks = self._most_blocks(width, seq.num_prompt_tokens, max_total_tokens)
        if num_blocks > self.num_blocks:
            raise InvalidRequest(
                f"beam_width: given {width} beams of up to {max_total_tokens} tokens, which take {num_blocks} blocks "
                f"where they share nothing but the prompt, expected at most {self.num_blocks}; lower max_tokens"
            )

    def _most_blocks(self, width: int, num_prompt_tokens: int, num_tokens: int) -> int:
        """Blocks that the beams hold where they share full blocks of their prompt alone, and each is being parted; one
        beam has none to part from."""
        layout, chunk = self.layout, self.max_num_batched_tokens
        own = 0
        for group in layout.groups:
            held = group.max_blocks_held(num_tokens, chunk)
            own += held if group.spec.window is not None else held - num_prompt_tokens // group.block_size
        parting = width * len(layout.groups) if width > 1 else 0
        return layout.num_blocks_for(num_tokens, chunk) + (width - 1) * own + parting


def make_search(
    make: Callable[[Request, Choice, int], Sequence], request: Request, first_arrival: int, limits: SearchLimits
) -> RunningSearch:
    """Make the beams of a search.

    Args:
        make: makes a choice of the prompt, with an arrival.
        request: its choices are what is wanted, with equal parameters but for their seeds.
        first_arrival: of as many as there are beams.

    Raises:
        InvalidRequest: names what is wrong.
        PromptTooLong: the prompt leaves no room for a new token.
    """
    choices = request.choices
    params = replace(choices[0].params, seed=0)
    if any(replace(choice.params, seed=0) != params for choice in choices):
        raise InvalidRequest("choices: given different parameters, expected equal ones for the choices of one search")
    indexes = choice_indexes(choices)
    if max(indexes) >= params.width:
        raise InvalidRequest(f"choices: given choice {max(indexes)}, expected one of {params.width} beams")
    ids = with_extra_ids(choices, params.width)
    beams = [make(request, Choice(seq_id, params), arrival) for arrival, seq_id in enumerate(ids, first_arrival)]
    max_total_tokens = beams[0].max_total_tokens
    search = BeamSearch(params, beams[0].end_token_ids, max_total_tokens - beams[0].num_prompt_tokens)
    limits.check(search, beams[0], max_total_tokens)
    beam_params = replace(params, temperature=0.0, logprobs=search.num_reported)
    for seq in beams:
        seq.params = beam_params
    answers = [
        Answer(seq, index, choice.output_token_ids) for seq, index, choice in zip(beams, indexes, choices, strict=False)
    ]
    return RunningSearch(search, beams, answers)


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

    def advance(self, rows: abc.Sequence[LogprobRow]) -> list[Step]:
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

    def _candidates(self, rows: abc.Sequence[LogprobRow]) -> list[_Candidate]:
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

    def _extended(self, candidate: _Candidate, rows: abc.Sequence[LogprobRow]) -> Beam:
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
