"""What is pooled from a prompt, by vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

from pagestream_engine.errors import InvalidSamplingParams
from pagestream_engine.request import checks


@dataclass
class PoolingParams:
    """Parameters of `LLM.encode`, `embed`, `classify` and `score`.

    Raises:
        InvalidSamplingParams: a value is out of range or of a wrong type (a `ValueError`; `.field` names it).
    """

    truncate_prompt_tokens: int | None = None
    """Last tokens of a prompt that are kept; -1: what the context holds. None: all, and a longer prompt is refused."""
    dimensions: int | None = None
    """Leading numbers of a vector that are kept, of models whose files say that they may be; None: all."""
    normalize: bool | None = None
    """Whether a vector has length 1; None: as the model's files say."""
    use_activation: bool | None = None
    """Whether scores of labels become probabilities; None: yes."""
    task: str | None = None
    """As `LLM.encode`'s `pooling_task`."""

    def __post_init__(self) -> None:
        if self.truncate_prompt_tokens is not None:
            checks.whole("truncate_prompt_tokens", self.truncate_prompt_tokens, low=-1)
        if self.dimensions is not None:
            checks.whole("dimensions", self.dimensions, low=1)
        for name in ("normalize", "use_activation"):
            if not isinstance(getattr(self, name), bool | None):
                raise InvalidSamplingParams(name, getattr(self, name), "True, False or None")
