"""Beam searches that run: their beams are sequences of one group, and their outputs come when they have ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pagestream_engine.cache.manager import CacheManager
from pagestream_engine.request import NO_ROW, LogprobRow, StepOutput, TokenSequence
from pagestream_engine.scheduler.scheduler import Scheduler
from pagestream_engine.step.beam_search import BeamSearch, Hypothesis
from pagestream_engine.step.generation import Generation
from pagestream_engine.step.texts import output_of, with_logprobs
from pagestream_engine.text.detokenizer import Pieces


@dataclass(slots=True)
class Answer:
    """A choice of a request, whose output is a hypothesis of its search."""

    generation: Generation
    """Makes its text. Its sequence is a beam like others, and gives it its id alone."""
    index: int
    """The rank of its hypothesis, from 0."""
    given: Sequence[int]
    """Tokens that an earlier run has put out: they are found again, and not put out again."""


@dataclass(slots=True)
class RunningSearch:
    """A search, and the sequences that compute it.

    The number of beams never changes: a beam that no candidate continues becomes a fork of one that several continue.
    Each may have one token more than was settled: what the sampler gave it, which its search replaces by its choice.
    """

    search: BeamSearch
    beams: list[TokenSequence]
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

    def __contains__(self, seq_id: str) -> bool:
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
        running.answers = [answer for answer in running.answers if answer.generation.seq.seq_id != seq_id]
        if not running.answers:
            self._forget(running)
            for seq in running.beams:
                self._scheduler.abort(seq)

    def fail(self, seq_id: str, error: str) -> list[StepOutput]:
        """End the search of a beam. Return the ends of its answers."""
        running = self._by_beam[seq_id]
        self._forget(running)
        for seq in running.beams:
            self._scheduler.abort(seq)
        return [_failed(answer, error) for answer in running.answers]

    def note(self, seq: TokenSequence, row: LogprobRow) -> RunningSearch:
        """Take the likeliest tokens of a beam that was sampled. Return its search."""
        running = self._by_beam[seq.seq_id]
        running.rows[id(seq)] = row
        return running

    def advance(self, running: RunningSearch) -> list[StepOutput]:
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

    def _fork(self, beams: list[TokenSequence], parents: Sequence[int]) -> list[TokenSequence]:
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

    def _replace(self, child: TokenSequence, parent: TokenSequence) -> None:
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

    def _outputs(self, running: RunningSearch, answer: Answer) -> list[StepOutput]:
        """Return the outputs of one answer, a token each, without those that an earlier run has put out."""
        hypothesis: Hypothesis = running.search.hypotheses[answer.index]
        path = hypothesis.beam.path()
        token_ids = [beam.token_id for beam in path]
        if list(answer.given) != token_ids[: len(answer.given)]:
            error = "the search found another output than the earlier run that has put out a part of it"
            return [_failed(answer, error)]
        outputs = []
        for count, beam in enumerate(path, 1):
            output = output_of(answer.generation, beam.token_id, count)
            if beam.row is not None:
                output = with_logprobs(output, beam.row, answer.generation.seq, self._pieces)
            outputs.append(output)
        outputs[-1].cumulative_logprob = hypothesis.beam.score
        return outputs[len(answer.given) :]


def _failed(answer: Answer, error: str) -> StepOutput:
    seq = answer.generation.seq
    return StepOutput(seq.seq_id, None, "", "error", None, seq.num_cached_tokens, error)
