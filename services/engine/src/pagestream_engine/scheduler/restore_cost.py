"""Whether evicted blocks are copied back from host memory, or computed again."""

from __future__ import annotations

from pagestream_engine.scheduler.scheduled_step import ScheduledStep

MEMORY = 0.95
"""Weight of a step relative to the one after it."""
PROMPT_SHARE = 0.8
"""Of a step's tokens that prompts have at least, in steps that tell what a prompt's token takes."""


class RestoreCost:
    """Compares seconds that were measured on this machine: of copies when the executor has loaded, of prompts' tokens
    in the steps since.

    A mean over whole steps is taken, and no model of what they depend on: a fit to noisy steps may call tokens free.

    Args:
        load_page_s: seconds to copy one page to the device.
    """

    def __init__(self, load_page_s: float) -> None:
        self._load_page_s = load_page_s
        self._seconds = 0.0
        self._num_tokens = 0.0

    def note(self, step: ScheduledStep, seconds: float) -> None:
        """Learn from a step that has run."""
        num_prompt_tokens = sum(chunk.num_scheduled_tokens for chunk in step.prefills)
        if num_prompt_tokens and num_prompt_tokens >= PROMPT_SHARE * step.num_tokens:
            self._seconds = MEMORY * self._seconds + seconds
            self._num_tokens = MEMORY * self._num_tokens + num_prompt_tokens

    def pays(self, num_pages: int, num_tokens: int) -> bool:
        """Whether to copy so many pages takes less than to compute the tokens that they hold; yes, as long as no prompt
        was computed."""
        if not self._num_tokens:
            return True
        return num_pages * self._load_page_s < num_tokens * self._seconds / self._num_tokens
