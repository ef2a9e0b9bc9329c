"""A scheduling policy of one's own: the shortest prompt first, with ageing.

.venv/bin/python services/engine/examples/custom_policy.py MODEL_FOLDER
PYTHONPATH=services/engine/examples .venv/bin/pagestream serve --plugins custom_policy \
    --scheduling-policy shortest_prompt_first
"""

from __future__ import annotations

import sys

from pagestream_engine import LLM, SchedulingPolicy, Sequence, register_policy

AGEING = 4
"""Prompt tokens that one arrival is worth: a prompt of n tokens is overtaken by fewer than n / AGEING later ones."""


class ShortestPromptFirst(SchedulingPolicy):
    """Ranks by the prompt's length, and by arrival so that a long prompt is not overtaken for ever."""

    def rank(self, seq: Sequence) -> float:
        """Return the prompt's tokens, plus AGEING for each sequence that came before."""
        return seq.num_prompt_tokens + AGEING * seq.arrival


register_policy("shortest_prompt_first", ShortestPromptFirst)

if __name__ == "__main__":
    llm = LLM(sys.argv[1], scheduling_policy="shortest_prompt_first", max_num_seqs=1)
    llm.engine.on_schedule = lambda step: print([entry.seq for entry in step.prefills or step.decodes])
    llm.generate([[1] * 30, [1] * 3, [1] * 6])
