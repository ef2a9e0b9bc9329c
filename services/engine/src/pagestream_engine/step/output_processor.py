"""From a step's tokens to outputs: text, log probabilities, and what ends."""

from __future__ import annotations

from collections.abc import Sequence

from pagestream_engine.plan import StepPromptLogprobs, StepResult
from pagestream_engine.request import LogprobRow, SequenceState, StepOutput, TokenSequence
from pagestream_engine.scheduler.scheduled_step import ScheduledStep
from pagestream_engine.scheduler.scheduler import Scheduler
from pagestream_engine.step.generation import Generation
from pagestream_engine.step.logprobs import logprob_rows, prompt_logprob_rows
from pagestream_engine.step.searches import RunningSearch, Searches
from pagestream_engine.step.texts import ended_prompt, failed_output, output_of, with_logprobs, with_prompt_logprobs
from pagestream_engine.text.detokenizer import Pieces


class OutputProcessor:
    """Makes outputs of tokens that their sequences have got, and finishes the sequences that end with them.

    Args:
        scheduler: frees what a finished sequence holds.
        generations: the text and stop state of each unfinished sequence, by its seq_id; finished ones are taken out.
        searches: the beam searches, whose beams have no text.
        pieces: makes the texts of log probabilities; None without a tokenizer.
    """

    def __init__(
        self, scheduler: Scheduler, generations: dict[str, Generation], searches: Searches, pieces: Pieces | None
    ) -> None:
        self._scheduler = scheduler
        self._generations = generations
        self._searches = searches
        self._pieces = pieces

    def process(self, step: ScheduledStep, tokens: Sequence[Sequence[int]], result: StepResult) -> list[StepOutput]:
        """Return an output for each prompt whose log probabilities are complete, then one for each new token.

        What a step has sampled for a sequence past its end, or after it was aborted, is dropped.

        Args:
            step: a collected step, after `Scheduler.update_from_output`.
            tokens: `result.tokens()`.
        """
        outputs: list[StepOutput] = []
        if result.prompt_logprobs is not None:
            outputs += self._take_prompt_logprobs(step, result.prompt_logprobs)
        if result.has_one_each and result.logprobs is None and not step.ends_prompts:
            outputs += self._take_one_each(step.sampled(), tokens)
        else:
            outputs += self._take_tokens(step.sampled(), tokens, result)
        return outputs

    def _take_tokens(
        self, sampled: list[TokenSequence], tokens: Sequence[Sequence[int]], result: StepResult
    ) -> list[StepOutput]:
        """Return an output for each new token, up to the end of its sequence."""
        errors, logprobs = result.errors, logprob_rows(result.logprobs)
        pooled = {} if result.pooled is None else result.pooled.by_sample()
        outputs: list[StepOutput] = []
        ended: list[TokenSequence] = []
        searches: dict[int, RunningSearch] = {}
        for place, (seq, token_ids) in enumerate(zip(sampled, tokens, strict=True)):
            if seq.state is not SequenceState.RUNNING:
                continue  # It ended while the step was in flight.
            if seq.params.use_beam_search:
                if place in errors:
                    outputs += self._searches.fail(seq.seq_id, errors[place])
                elif token_ids:
                    running = self._searches.note(seq, logprobs[place][0])
                    searches[id(running)] = running
                continue
            if seq.ends_with_prompt and place not in errors:
                taken = [ended_prompt(seq, pooled.get(place))]
            else:
                taken = self._take_some(seq, token_ids, logprobs.get(place))
            if place in errors and not (taken and taken[-1].finish_reason is not None):
                taken.append(failed_output(seq, errors[place]))
            outputs += taken
            if taken and taken[-1].finish_reason is not None:
                ended.append(seq)
        self._finish(ended)
        for running in searches.values():
            if running.is_due:
                outputs += self._searches.advance(running)
        return outputs

    def _take_some(
        self, seq: TokenSequence, token_ids: Sequence[int], logprobs: list[LogprobRow] | None
    ) -> list[StepOutput]:
        """Return the outputs of one sequence's new tokens, up to its end."""
        generation = self._generations[seq.seq_id]
        outputs: list[StepOutput] = []
        for index, token_id in enumerate(token_ids):
            output = output_of(generation, token_id, seq.num_output_tokens - len(token_ids) + index + 1)
            if logprobs is not None:
                output = with_logprobs(output, logprobs[index], seq, self._pieces)
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
            output = output_of(generations[seq.seq_id], token_id, len(seq.token_ids) - seq.num_prompt_tokens)
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
            if seq.state is not SequenceState.RUNNING or not seq.wants_prompt_logprobs:
                continue  # It ended while the step was in flight, or another choice has reported the prompt.
            rows = self._generations[seq.seq_id].prompt_rows
            rows[part.position - 1 :] = part.rows  # A preempted prompt is computed again, from its beginning.
            if len(rows) == seq.num_prompt_tokens - 1:
                for member in seq.choices.members:
                    member.wants_prompt_logprobs = False
                outputs.append(with_prompt_logprobs(seq, rows, self._pieces))
                rows.clear()
                if outputs[-1].finish_reason is not None:
                    self._finish([seq])
        return outputs

    def _finish(self, ended: list[TokenSequence]) -> None:
        for seq in ended:
            del self._generations[seq.seq_id]
        self._scheduler.finish_requests(ended)
