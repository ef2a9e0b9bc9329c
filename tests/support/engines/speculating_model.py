"""The arithmetic model with drafts: a step gives a sample none, one or several tokens, as a test says."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
from numpy.typing import NDArray
from pagestream_engine import EngineConfig
from pagestream_engine.plan import StepLogprobs, StepPlan, StepResult
from support.engines.arithmetic_model import ArithmeticFacts, Row, SeededRunner, SlotError

WRONG = -1
"""A draft that does not hold: its slot is covered, and must not be read later."""


class SpeculatingRunner(SeededRunner):
    """Computes a decode's last token and drafts of the tokens after it, of which the first ones hold.

    Args:
        config: settings.
        facts: of the model.
        num_drafts: most of a sequence.
        rng: chooses how many tokens a sample gets of those that it may get.
    """

    def __init__(self, config: EngineConfig, facts: ArithmeticFacts, num_drafts: int, rng: Random) -> None:
        super().__init__(config, facts)
        self.num_speculative_tokens = num_drafts
        self._rng = rng

    def compute(self, plan: StepPlan) -> StepResult:
        rows, counts = plan.rows.tolist(), plan.num_new_tokens.tolist()
        for number, count in zip(rows[: plan.num_prefills], counts, strict=False):
            row = self.rows[number]
            self._write(row, count)
            self._read(row, count)
            row.num_computed_tokens += count
        logprobs = self.logprobs(plan, [None] * len(plan.sampled_rows))
        given = [
            self._sample(self.rows[number], counts[source] if source >= plan.num_prefills else 0)
            for number, source in zip(plan.sampled_rows.tolist(), plan.sampled_from.tolist(), strict=True)
        ]
        token_ids = np.full((len(given), 1 + self.num_speculative_tokens), WRONG, np.int32)
        for place, tokens in enumerate(given):
            token_ids[place, : len(tokens)] = tokens
        counts_given = np.array([len(tokens) for tokens in given], np.int32)
        return StepResult(plan.step_id, token_ids, counts_given, _of_those_with_tokens(logprobs, counts_given))

    def _sample(self, row: Row, num_decoded: int) -> list[int]:
        """Return a row's next tokens; `num_decoded` tokens are computed for them, 0 after a prefill."""
        tokens = list(row.token_ids)
        for _ in range(self._rng.randint(0, num_decoded) if num_decoded else 1):
            tokens.append(self.choose(row, tokens))
        new = tokens[len(row.token_ids) :]
        if num_decoded:
            drafts = [*new[:-1], *[WRONG] * num_decoded][: num_decoded - 1]
            decoded = replace(row, token_ids=[*row.token_ids, *drafts])
            self._write(decoded, num_decoded)
            self._read(decoded, num_decoded)
        row.token_ids = tokens
        row.num_computed_tokens = len(tokens) - 1
        return new

    def _check_limits(self, plan: StepPlan) -> None:
        limits, most = self._config.scheduler, 1 + self.num_speculative_tokens
        least = 0 if len(plan.loads) else 1
        if not least <= plan.num_tokens <= limits.max_num_batched_tokens or len(self.rows) > limits.max_num_seqs:
            raise SlotError(f"{plan.num_tokens} tokens and {len(self.rows)} rows in a step")
        for index, (number, count) in enumerate(zip(plan.rows.tolist(), plan.num_new_tokens.tolist(), strict=True)):
            row = self.rows[number]
            is_last = row.num_computed_tokens + count == len(row.token_ids)
            if index < plan.num_prefills and (index in plan.sampled_from) != is_last:
                raise SlotError("a chunk samples before its end, or not at it")
            if index >= plan.num_prefills and not 0 < count <= most:
                raise SlotError(f"a decode of {count} tokens")


def _of_those_with_tokens(given: StepLogprobs | None, counts: NDArray[np.int32]) -> StepLogprobs | None:
    """Without the samples that got no token. Those that ask for log probabilities have no drafts, so one at most."""
    if given is None:
        return None
    kept = counts[given.samples] > 0
    columns = (given.samples, given.counts, given.token_ids, given.logprobs, given.ranks)
    return StepLogprobs(*(column[kept] for column in columns))
