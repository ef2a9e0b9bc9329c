"""What a beam search looks for, by vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

from pagestream_engine.request.sampling_params import SamplingParams


@dataclass
class BeamSearchParams:
    """Parameters of `LLM.beam_search`."""

    beam_width: int
    """Beams that are open at once, and outputs of each prompt."""
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """0 and 1 are the model's own probabilities, by which a search goes; others are refused."""
    length_penalty: float = 1.0
    """A beam's score is its cumulative log probability over its length to the power of this."""
    include_stop_str_in_output: bool = False

    def sampling_params(self) -> SamplingParams:
        """Return the same as `SamplingParams`.

        Raises:
            InvalidSamplingParams: a value is out of range or of a wrong type.
        """
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=True,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )
