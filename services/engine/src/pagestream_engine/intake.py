"""Intake: from what a caller gives to a sequence that can be queued."""

from __future__ import annotations

from array import array
from collections import abc
from collections.abc import Callable, Iterable
from itertools import chain

from tokenizers import Tokenizer

from pagestream_engine.errors import InvalidRequest, PromptTooLong
from pagestream_engine.output import IncrementalDetokenizer, Pieces, begin_text, is_fault_of_request
from pagestream_engine.request import Choice, Request, Sequence
from pagestream_engine.sampling_params import ALL_LOGPROBS, SamplingParams, checked_words


class Intake:
    """Checks the choices of requests against the model and the engine's limits, and makes their sequences.

    Args:
        tokenizer: of the model; None where it has none.
        eos_token_ids: end a sequence, unless its parameters ignore them.
        max_model_len: most tokens of a sequence.
        max_logprobs: most log probabilities that a request may ask for; ALL_LOGPROBS: any number.
        num_kv_groups: block tables of a sequence.
        can_pool: whether the runner can give hidden states.
        has_head: whether the model gives logits.
        draw_seed: gives the seed of a choice that has none.
        has_grammars: whether the executor compiles grammars.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        pieces: Pieces | None,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        max_logprobs: int,
        num_kv_groups: int,
        draw_seed: Callable[[], int],
        has_grammars: bool = False,
        can_pool: bool = False,
        has_head: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._pieces = pieces
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._max_logprobs = max_logprobs
        self._num_kv_groups = num_kv_groups
        self._draw_seed = draw_seed
        self._has_grammars = has_grammars and tokenizer is not None
        self._can_pool, self._has_head = can_pool, has_head
        self._num_arrivals = 0
        self._spelled: tuple[object, tuple[tuple[int, ...], ...]] = (None, ())
        """Bad words and all their tokens, of the latest choice that had some: its choices have the same ones."""
        self._checked: dict[str, object] = {}
        """By field the token ids of the request that is being added which are in the vocabulary: its choices share
        them, and a long list is checked once."""

    def take_arrivals(self, count: int) -> int:
        """Return the first of `count` arrival numbers, which no other sequence has: a request is about to be added."""
        self._checked.clear()
        self._num_arrivals += count
        return self._num_arrivals - count

    def make(self, request: Request, choice: Choice, arrival: int) -> Sequence:
        """Make a choice's sequence, whose former output tokens are to be replayed.

        Raises:
            InvalidRequest: names what is wrong.
            PromptTooLong: the prompt leaves no room for a new token.
        """
        prompt_token_ids = request.prompt_token_ids
        params = self._with_bad_words(choice.params)
        self._check(prompt_token_ids, choice.output_token_ids, params)
        max_total_tokens = self._max_model_len
        if params.max_tokens is not None:
            max_total_tokens = min(max_total_tokens, len(prompt_token_ids) + max(1, params.max_tokens))
        end_token_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos or params.structured_outputs is not None:
            end_token_ids |= self._eos_token_ids
        seq = Sequence(
            choice.seq_id,
            prompt_token_ids,
            params,
            seed=params.seed if params.seed is not None else self._draw_seed(),
            arrival=arrival,
            max_total_tokens=max_total_tokens,
            output_token_ids=choice.output_token_ids,
            request=request,
            end_token_ids=end_token_ids,
            num_kv_groups=self._num_kv_groups,
        )
        detokenizer = self._detokenizer(prompt_token_ids, params)
        hidden_stops = self._hidden_stops(params) if params.stop else {}
        begin_text(seq, detokenizer, self._eos_token_ids, hidden_stops)
        return seq

    def _detokenizer(self, prompt: abc.Sequence[int], params: SamplingParams) -> IncrementalDetokenizer | None:
        if self._pieces is None:
            return None
        try:
            return IncrementalDetokenizer(self._pieces, prompt, skip_special_tokens=params.skip_special_tokens)
        except BaseException as error:
            if not is_fault_of_request(error):
                raise
            raise InvalidRequest(f"prompt: given tokens that the tokenizer can't make text of: {error}") from error

    def _hidden_stops(self, params: SamplingParams) -> dict[int, str]:
        """Return the stop strings that are special tokens which the output's text doesn't show, by their tokens."""
        if self._pieces is None or not params.skip_special_tokens:
            return {}
        tokens = self._pieces.tokens
        found = ((tokens.added_id(stop), stop) for stop in params.stop_strings)
        return {token_id: stop for token_id, stop in found if token_id is not None and token_id in tokens.special_ids}

    def _with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the tokens of their bad words."""
        if not params.bad_words:
            return params
        words = (params.bad_words, params.bad_words_token_ids)
        if self._spelled[0] != words:
            self._spelled = (words, self._spell(params))
        return params.with_spelled_words(self._spelled[1])

    def _spell(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if self._tokenizer is None:
            raise InvalidRequest(
                "bad_words: given words, expected none without a tokenizer.json in the model folder; "
                "use bad_words_token_ids"
            )
        try:
            token_ids = bad_words_token_ids(params.bad_words or (), self._tokenizer)
        except BaseException as error:
            if not is_fault_of_request(error):
                raise
            raise InvalidRequest(f"bad_words: given words that the tokenizer can't encode: {error}") from error
        self._check_tokens("bad_words", tuple(chain.from_iterable(token_ids)))
        return checked_words("bad_words", (*params.bad_words_token_ids, *token_ids))

    def _check(self, prompt: abc.Sequence[int], outputs: abc.Sequence[int], params: SamplingParams) -> None:
        if params.n != 1:
            raise InvalidRequest(f"n: given {params.n}, expected 1; give a Request several choices")
        self._check_params(params)
        if params.stop and self._tokenizer is None:
            raise InvalidRequest(
                "stop: given strings, expected none without a tokenizer.json in the model folder; use stop_token_ids"
            )
        self._check_shared("prompt_token_ids", prompt)
        self._check_tokens("output_token_ids", outputs)
        if not prompt:
            raise InvalidRequest("prompt: given no tokens, expected at least one")
        if len(prompt) >= self._max_model_len:
            raise PromptTooLong(len(prompt), self._max_model_len)

    def _check_params(self, params: SamplingParams) -> None:
        most = self._max_logprobs
        for name, given in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if given is not None and most != ALL_LOGPROBS and not 0 <= given <= most:
                raise InvalidRequest(
                    f"{name}: given {given}, expected at most {most}; a higher max_logprobs (-1 for no limit) "
                    "allows more"
                )
        if params.structured_outputs is not None and not (self._has_grammars and self._eos_token_ids):
            raise InvalidRequest(
                "structured_outputs: given a constraint, expected none: the model has no tokenizer.json, or no "
                "end-of-sequence token, or its executor has no grammars"
            )
        if params.structured_outputs is not None and (marks := params.structured_outputs.reasoning) is not None:
            for mark in (marks.end, *marks.openings):
                self._check_tokens("structured_outputs.reasoning", mark)
        if params.pooling is not None and not self._can_pool:
            raise InvalidRequest(
                f"pooling: given {params.pooling!r}, expected none: the model runs by the modelling code of "
                "transformers, which gives logits and no hidden states"
            )
        if not self._has_head and (params.pooling is None or params.prompt_logprobs is not None):
            raise InvalidRequest(
                "pooling: given none, expected a request for vectors: the model's folder has no head (lm_head), which "
                "gives logits"
            )
        self._check_shared("logit_bias", params.logit_bias or ())
        self._check_shared("allowed_token_ids", params.allowed_token_ids or ())
        if self._checked.get("bad_words_token_ids") is not params.bad_words_token_ids:
            self._check_tokens("bad_words_token_ids", tuple(chain.from_iterable(params.bad_words_token_ids)))
            self._checked["bad_words_token_ids"] = params.bad_words_token_ids

    def _check_shared(self, field: str, token_ids: abc.Collection[int]) -> None:
        """Check token ids, once for the choices that share them."""
        if self._checked.get(field) is not token_ids:
            self._check_tokens(field, tuple(token_ids))
            self._checked[field] = token_ids

    def _check_tokens(self, field: str, token_ids: abc.Sequence[int]) -> None:
        try:
            low, high = min(array("q", token_ids), default=0), max(token_ids, default=0)
        except (TypeError, OverflowError) as error:
            raise InvalidRequest(f"{field}: given {token_ids!r:.80}, expected whole numbers: {error}") from error
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequest(f"{field}: given token {wrong}, expected 0 to {self._vocab_size - 1}, the vocabulary")


def bad_words_token_ids(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that spell `words`, each without and with a space before it.

    The second one is left out where it ends with the first: where that is banned, it is too. vLLM leaves it out also
    where it has another number of tokens, and lets such a word pass.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain, spaced = (_encoded(prefix + word.lstrip(), tokenizer) for prefix in ("", " "))
        found[plain] = None
        if spaced[len(spaced) - len(plain) :] != plain:
            found[spaced] = None
    found.pop((), None)
    return tuple(found)


def _encoded(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)
