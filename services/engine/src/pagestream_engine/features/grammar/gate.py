"""Holds sequences back until their grammars are compiled, which happens beside the steps."""

from __future__ import annotations

import math
import time
from collections import abc
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice

from pagestream_engine.errors import RequestFault
from pagestream_engine.features.grammar.compiler import NUM_THREADS
from pagestream_engine.output import failed_output
from pagestream_engine.plan import LoadedAdapter, PreparedGrammar
from pagestream_engine.request import Sequence, SequenceOutput
from pagestream_engine.sampling_params import Grammar
from pagestream_engine.scheduler.scheduler import Scheduler
from pagestream_engine.steps import StepPipeline
from pagestream_engine.wire.executor import Prepared

COMPILE_LIMIT_S = 20.0
"""From when a thread begins with a grammar until it is compiled, with the wait for the tokenizer's tokens before the
first one; and of the wait for a thread. llguidance's own bounds end almost all work far sooner."""
IDLE_WAIT_S = 0.01
"""Longest wait for a grammar while there is nothing else to do: aborts and new requests wait for its end."""


@dataclass(slots=True)
class Held:
    """The choices of one prompt, and the grammars that they still lack."""

    seqs: list[Sequence]
    missing: set[Grammar]
    until: float
    """Seconds on time.monotonic(): the wait for a thread ends."""


class GrammarGate:
    """Passes sequences on to the scheduler, those with a grammar when it is compiled.

    A grammar that takes longer than `limit_s` can't be stopped. While each thread that compiles is held by one, others
    are refused at once, by an error that does not blame their requests.

    Args:
        scheduler: gets the sequences.
    """

    def __init__(self, steps: StepPipeline, scheduler: Scheduler, limit_s: float = COMPILE_LIMIT_S) -> None:
        self._steps = steps
        self._scheduler = scheduler
        self._limit_s = limit_s
        self._held: list[Held] = []
        self._compiling: dict[Grammar, float] = {}
        """Asked for and not replied to, in the order in which the compiler takes them, with the time limit of each:
        none before a thread has begun."""

    def __len__(self) -> int:
        """Sequences that are held back."""
        return sum(len(held.seqs) for held in self._held)

    def sequences(self) -> Iterator[Sequence]:
        """Those that are held back."""
        for held in self._held:
            yield from held.seqs

    def add(self, seqs: abc.Sequence[Sequence]) -> None:
        """Take the choices of one prompt."""
        missing = {
            seq.params.structured_outputs.compiled_from for seq in seqs if seq.params.structured_outputs is not None
        }
        if not missing:
            self._scheduler.add(*seqs)
            return
        self._held.append(Held(list(seqs), missing, time.monotonic() + self._limit_s))
        self._ask(missing)

    def abort(self, seq: Sequence) -> bool:
        """Forget a sequence; return whether it was held back."""
        for held in self._held:
            if seq in held.seqs:
                held.seqs.remove(seq)
                self._held = [each for each in self._held if each.seqs]
                return True
        return False

    def release(self) -> list[SequenceOutput]:
        """Pass on what has its grammars now, and let the scheduler know of adapters that were read. Return the ends of
        sequences whose grammar can't be compiled, or is not in time; they are forgotten.

        Where nothing else is there to be done, it waits a little.
        """
        scheduler = self._scheduler
        is_awaited = bool(self._held) or scheduler.residency.is_busy
        if not is_awaited and not self._compiling:
            return []
        has_work = (scheduler.num_running or scheduler.num_waiting) and not scheduler.waits_for_adapters
        is_idle = is_awaited and not self._steps.in_flight and not has_work
        errors: dict[Grammar, RequestFault] = {}
        for done in self._steps.executor.prepared(IDLE_WAIT_S if is_idle else 0.0):
            self.note(done)
            if not isinstance(done, PreparedGrammar):
                continue
            grammar, error = done
            if error is not None:
                errors[grammar] = error
            for held in self._held:
                if error is None:
                    held.missing.discard(grammar)
        # What was left out while no thread was free. It raises where the executor has died, and nothing has moved yet.
        self._ask({grammar for held in self._held for grammar in held.missing}.difference(errors))
        held_before, self._held = self._held, []
        ended: list[SequenceOutput] = []
        for held in held_before:
            failed = next((errors[grammar] for grammar in held.missing if grammar in errors), None)
            reason = self._late(held) if failed is None else failed
            if reason is not None:
                ended += [failed_output(seq, reason) for seq in held.seqs]
            elif held.missing:
                self._held.append(held)
            else:
                self._scheduler.add(*held.seqs)
        return ended

    def note(self, done: Prepared) -> None:
        """Note what the executor has prepared, also where nobody waits for it any more."""
        if isinstance(done, LoadedAdapter):
            self._scheduler.residency.note(done)
        elif isinstance(done, PreparedGrammar):
            self._compiling.pop(done.grammar, None)

    def prepare_again(self) -> None:
        """Ask another executor for what is missing."""
        self._compiling.clear()
        self._ask({grammar for held in self._held for grammar in held.missing})

    def _ask(self, missing: Collection[Grammar]) -> None:
        """Ask for grammars that are not being compiled yet, unless they would wait for what does not end."""
        self._begin_limits()
        if self._is_stuck():
            return
        for grammar in missing:
            if grammar not in self._compiling:
                self._compiling[grammar] = math.inf
                self._steps.executor.prepare(grammar)
        self._begin_limits()

    def _begin_limits(self) -> None:
        """Give a time limit to the grammars that threads have begun with since the last time."""
        for grammar in self._on_threads():
            if self._compiling[grammar] == math.inf:
                self._compiling[grammar] = time.monotonic() + self._limit_s

    def _on_threads(self) -> list[Grammar]:
        """Return the grammars that the compiler's threads have: those that were asked for first."""
        return list(islice(self._compiling, NUM_THREADS))

    def _is_stuck(self) -> bool:
        """Whether every thread that compiles has a grammar that is over its time limit."""
        on_threads, now = self._on_threads(), time.monotonic()
        return len(on_threads) == NUM_THREADS and all(now > self._compiling[grammar] for grammar in on_threads)

    def _late(self, held: Held) -> str | None:
        """Return why sequences don't wait any longer for their grammars: a RequestFault where it is one of theirs."""
        if not held.missing:
            return None
        now, begun = time.monotonic(), held.missing.intersection(self._on_threads())
        if any(now > self._compiling[grammar] for grammar in begun):
            return RequestFault(f"structured_outputs: not compiled after {self._limit_s:g} s; simplify it")
        if self._is_stuck() or (now > held.until and not begun):
            return (
                f"structured_outputs: grammars of other requests take longer than {self._limit_s:g} s to compile, and "
                "this one waits for them; send the request again later"
            )
        return None
