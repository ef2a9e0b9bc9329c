"""From the choices of a beam search, as a caller gives them, to a search that can be queued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pagestream_engine.errors import InvalidRequest
from pagestream_engine.plan import KVLayout
from pagestream_engine.request import Sibling, TokenSequence, choice_indexes, with_extra_ids
from pagestream_engine.step.beam_search import BeamSearch
from pagestream_engine.step.generation import Generation
from pagestream_engine.step.searches import Answer, RunningSearch

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

    def check(self, search: BeamSearch, seq: TokenSequence, max_total_tokens: int) -> None:
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
    make: Callable[[Sibling, int], Generation], siblings: Sequence[Sibling], first_arrival: int, limits: SearchLimits
) -> RunningSearch:
    """Make the beams of a search.

    Args:
        make: makes a choice of the prompt, with an arrival.
        siblings: the choices that are wanted of it, with equal parameters but for their seeds.
        first_arrival: of as many as there are beams.

    Raises:
        InvalidRequest: names what is wrong.
        PromptTooLong: the prompt leaves no room for a new token.
    """
    params = replace(siblings[0].params, seed=0)
    if any(replace(sibling.params, seed=0) != params for sibling in siblings):
        raise InvalidRequest("siblings: given different parameters, expected equal ones for the choices of one search")
    indexes = choice_indexes(siblings)
    if max(indexes) >= params.width:
        raise InvalidRequest(f"siblings: given choice {max(indexes)}, expected one of {params.width} beams")
    ids = with_extra_ids(siblings, params.width)
    made = [make(Sibling(seq_id, params), arrival) for arrival, seq_id in enumerate(ids, first_arrival)]
    beams = [generation.seq for generation in made]
    max_total_tokens = beams[0].max_total_tokens
    search = BeamSearch(params, beams[0].end_token_ids, max_total_tokens - beams[0].num_prompt_tokens)
    limits.check(search, beams[0], max_total_tokens)
    beam_params = replace(params, temperature=0.0, logprobs=search.num_reported)
    for seq in beams:
        seq.params = beam_params
    answers = [
        Answer(generation, index, sibling.output_token_ids)
        for generation, index, sibling in zip(made, indexes, siblings, strict=False)
    ]
    return RunningSearch(search, beams, answers)
