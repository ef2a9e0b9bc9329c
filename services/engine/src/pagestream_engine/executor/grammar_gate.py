"""Holds sequences back until their grammars are compiled, which happens beside the steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pagestream_engine.errors import RequestFault
from pagestream_engine.executor.pipeline import StepPipeline
from pagestream_engine.request.adapter import LoadedAdapter
from pagestream_engine.request.grammars import Grammar, PreparedGrammar
from pagestream_engine.request.outputs import StepOutput
from pagestream_engine.request.sequence import TokenSequence
from pagestream_engine.scheduler.scheduler import Scheduler
from pagestream_engine.step.texts import failed_output

COMPILE_LIMIT_S = 20.0
"""From a request's arrival until its grammar is compiled, with the wait for others and, before the first, for the
tokenizer's tokens. llguidance's own bounds end almost all work far sooner."""
IDLE_WAIT_S = 0.01
"""Longest wait for a grammar while there is nothing else to do: aborts and new requests wait for its end."""


@dataclass(slots=True)
class Held:
    """The choices of one prompt, and the grammars that they still lack."""

    seqs: list[TokenSequence]
    missing: set[Grammar]
    until: float
    """On time.monotonic()."""


class GrammarGate:
    """Passes sequences on to the scheduler, those with a grammar when it is compiled.

    Args:
        steps: whose executor compiles.
        scheduler: gets the sequences.
        limit_s: see COMPILE_LIMIT_S.
    """

    def __init__(self, steps: StepPipeline, scheduler: Scheduler, limit_s: float = COMPILE_LIMIT_S) -> None:
        self._steps = steps
        self._scheduler = scheduler
        self._limit_s = limit_s
        self._held: list[Held] = []

    def __len__(self) -> int:
        """Sequences that are held back."""
        return sum(len(held.seqs) for held in self._held)

    def sequences(self) -> Iterator[TokenSequence]:
        """Those that are held back."""
        for held in self._held:
            yield from held.seqs

    def add(self, seqs: Sequence[TokenSequence]) -> None:
        """Take the choices of one prompt."""
        missing = {
            seq.params.structured_outputs.compiled_from for seq in seqs if seq.params.structured_outputs is not None
        }
        if not missing:
            self._scheduler.add(*seqs)
            return
        self._held.append(Held(list(seqs), missing, time.monotonic() + self._limit_s))
        for grammar in missing:
            self._steps.executor.prepare(grammar)

    def abort(self, seq: TokenSequence) -> bool:
        """Forget a sequence; return whether it was held back."""
        for held in self._held:
            if seq in held.seqs:
                held.seqs.remove(seq)
                self._held = [each for each in self._held if each.seqs]
                return True
        return False

    def release(self) -> list[StepOutput]:
        """Pass on what has its grammars now, and let the scheduler know of adapters that were read. Return the ends of
        sequences whose grammar can't be compiled, or is not in time; they are forgotten.

        Where nothing else is there to be done, it waits a little.
        """
        scheduler = self._scheduler
        if not self._held and not scheduler.residency.is_busy:
            return []
        has_work = (scheduler.num_running or scheduler.num_waiting) and not scheduler.waits_for_adapters
        is_idle = self._steps.is_empty and not has_work
        errors: dict[Grammar, RequestFault] = {}
        for done in self._steps.executor.prepared(IDLE_WAIT_S if is_idle else 0.0):
            if isinstance(done, LoadedAdapter):
                scheduler.residency.note(done)
                continue
            if not isinstance(done, PreparedGrammar):
                continue
            grammar, error = done
            if error is not None:
                errors[grammar] = error
            for held in self._held:
                if error is None:
                    held.missing.discard(grammar)
        held_before, self._held = self._held, []
        ended: list[StepOutput] = []
        now = time.monotonic()
        for held in held_before:
            error = next((errors[grammar] for grammar in held.missing if grammar in errors), None)
            if error is None and held.missing and now > held.until:
                error = RequestFault(f"structured_outputs: not compiled after {self._limit_s:g} s; simplify it")
            if error is not None:
                ended += [failed_output(seq, error) for seq in held.seqs]
            elif held.missing:
                self._held.append(held)
            else:
                self._scheduler.add(*held.seqs)
        return ended

    def prepare_again(self) -> None:
        """Ask another executor for what is missing."""
        for grammar in {grammar for held in self._held for grammar in held.missing}:
            self._steps.executor.prepare(grammar)
