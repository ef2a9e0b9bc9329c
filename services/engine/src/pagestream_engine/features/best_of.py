"""`best_of`: of so many choices of a prompt the likeliest ones are put out, when all have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from pagestream_engine.errors import InvalidRequest
from pagestream_engine.request import Choice, SequenceOutput, choice_indexes, with_extra_ids
from pagestream_engine.sampling_params import child_seed


@dataclass(slots=True)
class Entry:
    """One choice that takes part."""

    outputs: list[SequenceOutput] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        """Whether its last output has come."""
        return bool(self.outputs) and self.outputs[-1].finish_reason is not None

    @property
    def cumulative_logprob(self) -> float:
        """Sum over its tokens."""
        return sum(output.logprobs[0].logprob for output in self.outputs if output.logprobs)

    @property
    def rank(self) -> tuple[bool, float]:
        """Sorts the likeliest first, and one that failed last."""
        return self.outputs[-1].error is not None, -self.cumulative_logprob


@dataclass(slots=True)
class Candidates:
    """The choices that take part, and those that are wanted."""

    entries: dict[str, Entry]
    """By the id of its sequence, in the order of the seeds."""
    answers: dict[str, tuple[int, Sequence[int]]]
    """Ids of outputs: the rank of each, and the tokens that an earlier run has put out."""
    reports_logprobs: bool
    has_reported_prompt: bool = False


class BestOf:
    """The requests of an engine that have `best_of`. Their sequences run as any choices do; here their outputs
    are held back."""

    def __init__(self) -> None:
        self._by_entry: dict[str, Candidates] = {}

    def __contains__(self, seq_id: object) -> bool:
        """Whether a sequence takes part, also where it has ended: one that is wanted is put out under such an id."""
        return seq_id in self._by_entry

    def add(self, candidates: Candidates) -> None:
        """Hold back the outputs of its choices, which are about to be queued."""
        self._by_entry.update(dict.fromkeys(candidates.entries, candidates))

    def take(self, outputs: Iterable[SequenceOutput]) -> list[SequenceOutput]:
        """Return a step's outputs, those of candidates in the place of the ones that end them."""
        passed: list[SequenceOutput] = []
        for output in outputs:
            candidates = self._by_entry.get(output.seq_id)
            if candidates is None:
                passed.append(output)
            elif output.prompt_logprobs is not None:
                output.seq_id = next(iter(candidates.answers))
                if not candidates.has_reported_prompt:  # Choices that do not run together compute it once more.
                    passed.append(output)
                candidates.has_reported_prompt = True
            else:
                candidates.entries[output.seq_id].outputs.append(output)
                if all(entry.has_ended for entry in candidates.entries.values()):
                    self._forget(candidates)
                    passed += _answers(candidates)
        return passed

    def abort(self, seq_id: str, abort: Callable[[str], None]) -> bool:
        """Put out nothing for one choice; the others end, by `abort`, with the last that is wanted.

        Return whether it is one of candidates.
        """
        candidates = self._by_entry.get(seq_id)
        if candidates is None:
            return False
        candidates.answers.pop(seq_id, None)
        if not candidates.answers:
            self._forget(candidates)
            for entry in candidates.entries:
                abort(entry)
        return True

    def _forget(self, candidates: Candidates) -> None:
        for seq_id in candidates.entries:
            del self._by_entry[seq_id]


def make_candidates(choices: Sequence[Choice]) -> tuple[Candidates, list[Choice]]:
    """Return candidates, and the choices that take part.

    Args:
        choices: the choices that are wanted of a prompt, with equal parameters, the seed included; `best_of` is how
            many take part.

    Raises:
        InvalidRequest: the parameters differ, or a choice is wanted that can't come out.
    """
    params = choices[0].params
    count, indexes = params.best_of or 1, choice_indexes(choices)
    if any(choice.params != params for choice in choices):
        raise InvalidRequest("choices: given different parameters, expected equal ones with best_of")
    if max(indexes) >= count or params.seed is None:
        raise InvalidRequest(f"choices: given choice {max(indexes)}, expected one of best_of ({count}), and a seed")
    ids = with_extra_ids(choices, count)
    answers = {choice.seq_id: (index, choice.output_token_ids) for choice, index in zip(choices, indexes, strict=True)}
    candidates = Candidates({seq_id: Entry() for seq_id in ids}, answers, params.logprobs is not None)
    own = replace(params, best_of=None, logprobs=params.logprobs or 0)
    return candidates, [
        Choice(seq_id, own.with_seed(child_seed(params.seed, place))) for place, seq_id in enumerate(ids)
    ]


def _answers(candidates: Candidates) -> list[SequenceOutput]:
    """The outputs of the choices that won, under the ids that are wanted."""
    ranked = sorted(candidates.entries.values(), key=lambda entry: entry.rank)
    outputs: list[SequenceOutput] = []
    for seq_id, (index, given) in candidates.answers.items():
        own = ranked[index].outputs
        own[-1].cumulative_logprob = ranked[index].cumulative_logprob
        if list(given) != [output.token_id for output in own[: len(given)]]:
            error = "other choices are the likeliest than in the earlier run that has put out a part of this one"
            outputs.append(SequenceOutput(seq_id, None, "", "error", error=error))
            continue
        for output in own[len(given) :]:
            output.seq_id = seq_id
            if not candidates.reports_logprobs:
                output.logprobs = None
            outputs.append(output)
    return outputs
