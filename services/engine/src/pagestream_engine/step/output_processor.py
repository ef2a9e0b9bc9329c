"""From a step's tokens to outputs: text, log probabilities, and what ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pagestream_engine.request.generation import Generation
from pagestream_engine.request.logprob_row import LogprobRow
from pagestream_engine.request.outputs import StepOutput
from pagestream_engine.request.sequence import SequenceState, TokenSequence
from pagestream_engine.scheduler.scheduled_step import ScheduledStep
from pagestream_engine.scheduler.scheduler import Scheduler
from pagestream_engine.step.logprobs import logprob_rows, prompt_logprob_rows
from pagestream_engine.step.records import StepPromptLogprobs, StepResult
from pagestream_engine.text.detokenizer import Pieces
from pagestream_engine.text.faults import is_fault_of_request

_log = logging.getLogger(__name__)


class OutputProcessor:
    """Makes outputs of tokens that their sequences have got, and finishes the sequences that end with them.

    Args:
        scheduler: frees what a finished sequence holds.
        generations: the text and stop state of each unfinished sequence, by its seq_id; finished ones are taken out.
        pieces: makes the texts of log probabilities; None without a tokenizer.
    """

    def __init__(self, scheduler: Scheduler, generations: dict[str, Generation], pieces: Pieces | None) -> None:
        self._scheduler = scheduler
        self._generations = generations
        self._pieces = pieces

    def process(self, step: ScheduledStep, tokens: Sequence[Sequence[int]], result: StepResult) -> list[StepOutput]:
        """Return an output for each prompt whose log probabilities are complete, then one for each new token.

        What a step has sampled for a sequence past its end, or after it was aborted, is dropped.

        Args:
            step: a collected step, after `Scheduler.update_from_output`.
            tokens: `result.tokens()`.
            result: the step's.
        """
        outputs: list[StepOutput] = []
        if result.prompt_logprobs is not None:
            outputs += self._take_prompt_logprobs(step, result.prompt_logprobs)
        if result.has_one_each and result.logprobs is None:
            outputs += self._take_one_each(step.sampled(), tokens)
        else:
            outputs += self._take_tokens(step.sampled(), tokens, result)
        return outputs

    def _take_tokens(
        self, sampled: list[TokenSequence], tokens: Sequence[Sequence[int]], result: StepResult
    ) -> list[StepOutput]:
        """Return an output for each new token, up to the end of its sequence."""
        errors, logprobs = result.errors, logprob_rows(result.logprobs)
        outputs: list[StepOutput] = []
        ended: list[TokenSequence] = []
        for place, (seq, token_ids) in enumerate(zip(sampled, tokens, strict=True)):
            if seq.state is not SequenceState.RUNNING:
                continue  # It ended while the step was in flight.
            if place in errors:
                taken = [failed_output(seq, errors[place])]
            else:
                taken = self._take_some(seq, token_ids, logprobs.get(place))
            outputs += taken
            if taken and taken[-1].finish_reason is not None:
                ended.append(seq)
        self._finish(ended)
        return outputs

    def _take_some(
        self, seq: TokenSequence, token_ids: Sequence[int], logprobs: list[LogprobRow] | None
    ) -> list[StepOutput]:
        """Return the outputs of one sequence's new tokens, up to its end."""
        generation = self._generations[seq.seq_id]
        outputs: list[StepOutput] = []
        for index, token_id in enumerate(token_ids):
            output = _take(generation, token_id, seq.num_output_tokens - len(token_ids) + index + 1)
            if logprobs is not None:
                output = _with_logprobs(output, logprobs[index], seq, self._pieces)
            outputs.append(output)
            if output.finish_reason is not None:
                break
        return outputs

    def _take_one_each(self, sampled: list[TokenSequence], tokens: Sequence[Sequence[int]]) -> list[StepOutput]:
        """Do `_take_tokens` for a step without errors, drafts and log probabilities: most steps."""
        generations, running = self._generations, SequenceState.RUNNING
        outputs: list[StepOutput] = []
        ended: list[TokenSequence] = []
        for seq, (token_id,) in zip(sampled, tokens, strict=True):
            if seq.state is not running:
                continue  # It ended while the step was in flight.
            output = _take(generations[seq.seq_id], token_id, len(seq.token_ids) - seq.num_prompt_tokens)
            outputs.append(output)
            if output.finish_reason is not None:
                ended.append(seq)
        self._finish(ended)
        return outputs

    def _take_prompt_logprobs(self, step: ScheduledStep, given: StepPromptLogprobs) -> list[StepOutput]:
        """Keep what chunks report of their prompts. Return an output for each prompt that is complete."""
        outputs: list[StepOutput] = []
        for part in prompt_logprob_rows(given):
            seq = step.prefills[part.scheduled].seq
            if seq.state is not SequenceState.RUNNING:
                continue  # It ended while the step was in flight.
            rows = self._generations[seq.seq_id].prompt_rows
            rows[part.position - 1 :] = part.rows  # A preempted prompt is computed again, from its beginning.
            if len(rows) == seq.num_prompt_tokens - 1:
                for member in seq.group.members:
                    member.wants_prompt_logprobs = False
                outputs.append(_with_prompt_logprobs(seq, rows, self._pieces))
                rows.clear()
                if outputs[-1].finish_reason is not None:
                    self._finish([seq])
        return outputs

    def _finish(self, ended: list[TokenSequence]) -> None:
        for seq in ended:
            del self._generations[seq.seq_id]
        self._scheduler.finish_requests(ended)


def _take(generation: Generation, token_id: int, num_output_tokens: int) -> StepOutput:
    seq = generation.seq
    try:
        plain = generation.take_plain(token_id, num_output_tokens)
        if plain is not None:
            return StepOutput(seq.seq_id, token_id, plain, None, None, seq.num_cached_tokens)
        text, finish, stop = generation.take(token_id, num_output_tokens)
    except BaseException as error:  # noqa: BLE001 - what one request's text raises must not fail its neighbours
        return _failed_by(error, seq, token_id)
    return StepOutput(seq.seq_id, token_id, text, finish, stop, seq.num_cached_tokens)


def _with_logprobs(output: StepOutput, row: LogprobRow, seq: TokenSequence, pieces: Pieces | None) -> StepOutput:
    try:
        output.logprobs = row.with_texts(pieces)
    except BaseException as error:  # noqa: BLE001 - as for the text
        return _failed_by(error, seq, output.token_id)
    return output


def _with_prompt_logprobs(seq: TokenSequence, rows: list[LogprobRow], pieces: Pieces | None) -> StepOutput:
    try:
        prompt_logprobs = tuple(row.with_texts(pieces) for row in rows)
    except BaseException as error:  # noqa: BLE001 - as for the text
        return _failed_by(error, seq, None)
    return StepOutput(seq.seq_id, None, "", prompt_logprobs=prompt_logprobs)


def failed_output(seq: TokenSequence, error: str, token_id: int | None = None) -> StepOutput:
    """Return the end of a sequence that failed, with the token that it failed at, if there is one."""
    return StepOutput(seq.seq_id, token_id, "", "error", None, seq.num_cached_tokens, error)


def _failed_by(error: BaseException, seq: TokenSequence, token_id: int | None) -> StepOutput:
    """Return the end of a sequence whose text has raised; raise what is no request's fault."""
    if not is_fault_of_request(error):
        raise error
    _log.error("request %s failed", seq.seq_id, exc_info=error)
    return failed_output(seq, f"{type(error).__name__}: {error}", token_id)
