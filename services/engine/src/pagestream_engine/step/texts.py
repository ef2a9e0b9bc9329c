"""From tokens to outputs with texts; what one request's text raises is its own end."""

from __future__ import annotations

import logging

import numpy as np

from pagestream_engine.plan import Float32Array
from pagestream_engine.request import LogprobRow, StepOutput, TokenLogprob, TokenSequence
from pagestream_engine.sampling_params import STATES_DTYPE
from pagestream_engine.step.generation import Generation
from pagestream_engine.text.detokenizer import Pieces
from pagestream_engine.text.faults import is_fault_of_request

_log = logging.getLogger(__name__)


def output_of(generation: Generation, token_id: int, num_output_tokens: int) -> StepOutput:
    """Return the output of a sequence's next token, the `num_output_tokens`-th of its output."""
    seq = generation.seq
    try:
        plain = generation.take_plain(token_id, num_output_tokens)
        if plain is not None:
            return StepOutput(seq.seq_id, token_id, plain, None, None, seq.num_cached_tokens)
        text, finish, stop = generation.take(token_id, num_output_tokens)
    except BaseException as error:  # noqa: BLE001 - what one request's text raises must not fail its neighbours
        return _failed_by(error, seq, token_id)
    return StepOutput(seq.seq_id, token_id, text, finish, stop, seq.num_cached_tokens)


def token_logprobs(row: LogprobRow, pieces: Pieces | None) -> tuple[TokenLogprob, ...]:
    """Return what an output has of a row; without `pieces` the tokens' texts are empty."""
    return tuple(
        TokenLogprob(token_id, logprob, index or row.rank, pieces.shown(token_id) if pieces is not None else "")
        for index, (token_id, logprob) in enumerate(zip(row.token_ids, row.logprobs, strict=True))
    )


def with_logprobs(output: StepOutput, row: LogprobRow, seq: TokenSequence, pieces: Pieces | None) -> StepOutput:
    """Return a token's output with its log probabilities."""
    try:
        output.logprobs = token_logprobs(row, pieces)
    except BaseException as error:  # noqa: BLE001 - as for the text
        return _failed_by(error, seq, output.token_id)
    return output


def with_prompt_logprobs(seq: TokenSequence, rows: list[LogprobRow], pieces: Pieces | None) -> StepOutput:
    """Return the output of a prompt whose log probabilities are complete."""
    try:
        prompt_logprobs = tuple(token_logprobs(row, pieces) for row in rows)
    except BaseException as error:  # noqa: BLE001 - as for the text
        return _failed_by(error, seq, None)
    return StepOutput(seq.seq_id, None, "", prompt_logprobs=prompt_logprobs)


def ended_prompt(seq: TokenSequence, states: Float32Array | None) -> StepOutput:
    """Return the end of a sequence that ends with its prompt, with the (hidden_size,) states pooled from it."""
    if states is None:
        return StepOutput(seq.seq_id, None, "", "length", None, seq.num_cached_tokens)
    if not np.isfinite(states).all():
        return failed_output(seq, "the hidden states of the prompt are not finite")
    pooled = states.astype(STATES_DTYPE).tobytes()
    return StepOutput(seq.seq_id, None, "", "stop", None, seq.num_cached_tokens, pooled=pooled)


def failed_output(seq: TokenSequence, error: str, token_id: int | None = None) -> StepOutput:
    """Return the end of a sequence that failed, with the token that it failed at, if there is one."""
    return StepOutput(seq.seq_id, token_id, "", "error", None, seq.num_cached_tokens, error)


def _failed_by(error: BaseException, seq: TokenSequence, token_id: int | None) -> StepOutput:
    """Return the end of a sequence whose text has raised; raise what is no request's fault."""
    if not is_fault_of_request(error):
        raise error
    _log.error("request %s failed", seq.seq_id, exc_info=error)
    return failed_output(seq, f"{type(error).__name__}: {error}", token_id)
