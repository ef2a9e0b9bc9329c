"""What OpenAI's resources share: fields of their bodies, drafts of them, their answers, and the handling of a call.

The JSON of generated answers is what completions and chats write alike, in events (`AnswerWriter`) and as a whole body
(`WholeBody`). Log probabilities have OpenAI's two forms: the chat's list of tokens, and the four columns of
completions, of which `text_offset` says where tokens begin in the text that an answer shows, in characters. Embeddings,
scores, responses and Anthropic's messages are handled by `generate` too.
"""

import asyncio
import hashlib
import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pagestream.v1.inference_pb2 import (
    ON_DISCONNECT_CANCEL,
    ON_DISCONNECT_CONTINUE,
    FinishReason,
    LogprobEntry,
    SamplingParams,
    TokenLogprobs,
    Usage,
)
from pagestream.v1.records_pb2 import AnswerForm, ApiForm, ChoiceFinish, LogEnd, RequestSpec
from pagestream_grammars import TokenTable
from pagestream_streams.protocol.records import finish_reason_name
from pydantic import BaseModel, Field, create_model
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from pagestream_gateway.calls import DISCONNECTED, Call, now_s
from pagestream_gateway.error_codes import error_report
from pagestream_gateway.errors import InvalidRequest, UnsupportedField
from pagestream_gateway.gateway import SMALL_BYTES, Gateway
from pagestream_gateway.http.body import (
    Body,
    BodyModel,
    Items,
    Token,
    collecting,
    current_warnings,
    expects,
    parse_json,
    read_body,
)
from pagestream_gateway.http.callers import identify
from pagestream_gateway.models import check_unicode
from pagestream_gateway.request import AskedTruncation, Draft, Prompt, TextPrompt, TokenPrompt
from pagestream_gateway.sampling import (
    PARAMETERS,
    UNSUPPORTED_PARAMETERS,
    ResponseFormat,
    constraint_of,
    sampling_from_json,
)
from pagestream_gateway.streams.events import (
    START,
    AnswerBody,
    EventStream,
    Logprobs,
    LogWriter,
    Position,
    Reading,
    Run,
    accepts_lines,
    position_after,
)
from pagestream_gateway.streams.whole_answer import WholeAnswer

_MAX_TIMEOUT_S = 7 * 24 * 3600.0

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **UNSUPPORTED_PARAMETERS,
    "return_token_offsets": (False,),
    "return_mm_kwargs": (False,),
    "mm_payload": ("tensors",),
    "routed_experts_prompt_start": (0,),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": (),
}
"""Fields of OpenAI's and vLLM's bodies that are not supported, each with the values that ask for nothing.

Client libraries send those values unasked. Any other is refused with the field's name: ignoring it silently would
answer another question than the one that was asked.
"""
OF_CHATS_AND_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
}
"""Likewise, for bodies other than those of completions and chats, which take them."""


SERVED_NAME = "Served name; left out: what `pagestream serve` was started with, or the only model with engines."

Prompts = Annotated[
    str | Items[str] | Items[Token] | Items[Items[Token]],
    expects("must be a string, a list of strings, a list of token ids or a list of lists of token ids"),
]
"""A completion's prompt, an embedding's input."""

NumKeptTokens = Annotated[int, Field(ge=-1, lt=2**31)]
"""Tokens to which a prompt is cut; -1: as many as fit."""

Side = Literal["left", "right"]
"""Where it is cut."""


class PromptedBody(Body):
    """The fields that change no answer, and that all bodies with a prompt take, whatever their API."""

    user: Any = None
    metadata: Any = None
    client_metadata: Any = None
    safety_identifier: Any = None
    session_id: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None


class QueuedBody(PromptedBody):
    """The fields of all bodies that become requests in a queue. Null is the same as leaving a field out."""

    model: str | None = Field(None, description=SERVED_NAME)
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer adds its special tokens to the prompt."
    )
    priority: int | None = Field(None, description="0 (default) is served first, then 1, then 2.")
    on_disconnect: Literal["cancel", "continue"] | None = Field(
        None,
        description='Without a reader: "cancel" after the disconnect grace (default), or "continue".',
    )
    request_id: str | None = Field(None, description="The caller's own id, kept as metadata.")
    cache_salt: str | None = Field(
        None, min_length=1, description="Only requests with the same salt share computed prefixes."
    )
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = Field(
        None, description='There is one tier: answers say "default".'
    )


def with_sampling_parameters(kind: type[BodyModel]) -> type[BodyModel]:
    """Add a field for each sampling parameter that OpenAI bodies share."""
    return with_parameters()(kind)


def with_parameters(without: Container[str] = ()) -> Callable[[type[BodyModel]], type[BodyModel]]:
    """Return what adds a field for each sampling parameter that OpenAI bodies share, but for those of `without`."""
    return lambda kind: _with_parameters(kind, without)


def _with_parameters(kind: type[BodyModel], without: Container[str]) -> type[BodyModel]:
    fields: dict[str, Any] = {
        parameter.name: (parameter.json_type | None, Field(None, description=parameter.description))
        for parameter in PARAMETERS
        if parameter.json_type is not None and parameter.name not in without
    }
    return create_model(kind.__name__, __base__=kind, __module__=kind.__module__, __doc__=kind.__doc__, **fields)


def prompts_of(given: str | list[str] | list[int] | list[list[int]], add_special_tokens: bool) -> list[Prompt]:
    """Return the prompts of such a field."""
    if isinstance(given, str):
        return [TextPrompt(given, add_special_tokens)]
    if given and isinstance(given[0], int):
        return [TokenPrompt(given)]
    return [
        TextPrompt(item, add_special_tokens) if isinstance(item, str) else TokenPrompt(item)
        for item in given
        if not isinstance(item, int)
    ]


NAMES_BY_FORMAT: Mapping[str, str] = {"structured_outputs": "response_format"}
"""What a body with a `response_format` calls sampling parameters that have another name in it."""


class StreamOptions(Body):
    """OpenAI's and vLLM's stream_options; include_obfuscation changes no token and is ignored."""

    include_usage: bool | None = None
    continuous_usage_stats: Annotated[bool | None, Field(description="With include_usage: in each chunk.")] = None
    include_obfuscation: bool | None = None


class GenerationBody(QueuedBody):
    """The fields of both bodies beside the sampling parameters."""

    stream: bool | None = Field(
        None, description="Answer as a stream: server-sent events, or NDJSON where Accept says so."
    )
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = Field(None, description="text, json_object or json_schema.")
    return_token_ids: bool | None = Field(None, description="Show the ids of the prompt's and the output's tokens.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description='Log probabilities name tokens "token_id:<id>" in place of their text.'
    )
    truncate_prompt_tokens: NumKeptTokens | None = Field(
        None, description="Most tokens that are kept of each prompt; -1: what leaves one for the output."
    )
    truncation_side: Side | None = Field(
        None, description="Where they are cut off. Default: at the beginning, after the special tokens there."
    )
    # Known fields that can't change the output.
    spaces_between_special_tokens: Any = None
    """Each token's text is what it adds to a text, which has no blanks between special tokens."""
    stream_interval: Any = None
    store: Any = None
    prediction: Any = None
    parallel_tool_calls: Any = None


Parsed = TypeVar("Parsed")
BodyParser = Callable[[dict[str, Any], Headers], Parsed]
Parser = BodyParser[Draft]


def without_unsupported(document: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return a body without the fields of `unsupported`. Raises UnsupportedField where one asks for something."""
    kept = {}
    for name, value in document.items():
        neutral = unsupported.get(name)
        if neutral is None:
            kept[name] = value
        elif value is not None and not any(type(value) is type(nothing) and value == nothing for nothing in neutral):
            raise UnsupportedField(name)
    return kept


def shared_draft(
    body: GenerationBody, headers: Mapping[str, str], document: Mapping[str, Any], api: ApiForm, **own: int | None
) -> dict[str, Any]:
    """Return the arguments of a Draft that both resources fill alike.

    `own` are sampling parameters that the resource has in a form of its own. Raises InvalidRequest.
    """
    shared = {each.name: getattr(body, each.name) for each in PARAMETERS if each.json_type is not None}
    sampling = sampling_from_json(shared | own)
    if body.response_format is not None:
        _set_response_format(sampling, body.response_format)
    options = body.stream_options or StreamOptions()
    return {
        **queued_arguments(body, headers, document, api),
        "sampling": sampling,
        "is_streamed": bool(body.stream),
        "truncation": None
        if body.truncate_prompt_tokens is None
        else AskedTruncation(body.truncate_prompt_tokens, body.truncation_side),
        "answer": AnswerForm(
            api=api,
            created=now_s(),
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
            token_ids=bool(body.return_token_ids),
            tokens_by_id=bool(body.return_tokens_as_token_ids),
            top_logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        ),
    }


def queued_arguments(
    body: QueuedBody, headers: Mapping[str, str], document: Mapping[str, Any], api: ApiForm
) -> dict[str, Any]:
    """Return the arguments of a Draft that all resources fill alike. Raises InvalidRequest."""
    key, timeout = headers.get("idempotency-key", ""), headers.get("x-request-timeout")
    check_unicode(body.request_id or "", "request_id")
    check_unicode(body.cache_salt or "", "cache_salt")
    return {
        "model": body.model or "",
        "on_disconnect": ON_DISCONNECT_CONTINUE if body.on_disconnect == "continue" else ON_DISCONNECT_CANCEL,
        "priority": body.priority or 0,
        "deadline_ms": 0 if timeout is None else _deadline_ms(timeout),
        "client_request_id": body.request_id or headers.get("x-client-request-id") or headers.get("x-request-id", ""),
        "idempotency_key": key,
        "cache_salt": body.cache_salt or "",
        "body_digest": _digest(api, document) if key else "",
    }


def _set_response_format(sampling: SamplingParams, form: ResponseFormat) -> None:
    constraint = constraint_of(form)
    if constraint is None:
        return
    if sampling.HasField("structured_outputs"):
        raise InvalidRequest("response_format", "excludes structured_outputs")
    sampling.structured_outputs.CopyFrom(constraint)


def _deadline_ms(text: str) -> int:
    try:
        seconds = float(text)
    except ValueError as error:
        raise InvalidRequest("X-Request-Timeout", f"must be a number of seconds, got {text!r}") from error
    if not 0.001 <= seconds <= _MAX_TIMEOUT_S:
        raise InvalidRequest("X-Request-Timeout", f"must be from 0.001 to {_MAX_TIMEOUT_S:g} seconds, got {text}")
    return round(seconds * 1000)


def _digest(api: ApiForm, document: Mapping[str, Any]) -> str:
    """Return a digest that is equal for bodies that say the same, whatever the order of their fields."""
    text = json.dumps(document, sort_keys=True)
    return hashlib.sha256(f"{api}:{text}".encode()).hexdigest()


_NEAR_BYTES = 64
"""How far a token is looked for in a prompt that the tokenizer has normalized."""


def _num_begun(data: bytes) -> int:
    """Return how many characters begin in a part of UTF-8."""
    return sum(byte & 0xC0 != 0x80 for byte in data)


class EchoOffsets:
    """Of a prompt's tokens, in the text that is echoed.

    That has no special tokens that the tokenizer has put around it, and no space that it has put before it. A token
    within a character, or of no text, is where that character, or the next token, begins.
    """

    def __init__(self, text: str) -> None:
        self._text = text.encode("utf-8", "replace")
        self._byte = 0
        self._begun = 0

    def next(self, entry: LogprobEntry, table: TokenTable | None) -> int:
        """Return the place of the next token."""
        text, place = self._text, self._byte
        spelled = entry.text.encode() if table is None else table.spelled(entry.token_id)
        length = len(spelled)
        if not text.startswith(spelled, place):
            if spelled[:1] == b" " and text.startswith(spelled[1:], place):
                length -= 1
            elif table is not None and entry.token_id in table.special_ids:
                length = 0
            elif (found := text.find(spelled, place, place + _NEAR_BYTES)) >= 0:
                self._advance(found - place)
            else:
                changed = text[place : place + 4 * len(entry.text)].decode(errors="ignore")[: len(entry.text)]
                length = len(changed.encode())
        within = self._text[self._byte : self._byte + 1]
        offset = self._begun - (bool(within) and not _num_begun(within))
        self._advance(length)
        return offset

    def _advance(self, length: int) -> None:
        self._begun += _num_begun(self._text[self._byte : self._byte + length])
        self._byte += length


class OutputOffsets:
    """Of an output's tokens, in the text that is generated.

    By their own bytes, whenever these are shown: a character may come with a later token.

    Args:
        begin: characters before it.
        hides_special: whether special tokens are not shown.
    """

    def __init__(self, begin: int, *, hides_special: bool) -> None:
        self._begun = begin
        self._hides_special = hides_special
        self._ends_word = False

    def next(self, entry: LogprobEntry, table: TokenTable | None) -> int:
        """Return the place of the next token."""
        if table is None:
            offset, self._begun = self._begun, self._begun + len(entry.text)
            return offset
        if self._hides_special and entry.token_id in table.special_ids:
            return self._begun
        spelled = table.spelled(entry.token_id)
        self._begun += self._ends_word
        self._ends_word = table.ends_word(entry.token_id)
        is_within = self._begun and spelled and not _num_begun(spelled[:1])
        offset = self._begun - bool(is_within)
        self._begun += _num_begun(spelled)
        return offset


_REPLACEMENT = "\ufffd"
_LEAST = -9999.0  # JSON has no infinity; vLLM's stand-in


class ChatLogprobs(Logprobs):
    """A list of tokens, each with the likeliest ones at its place."""

    needs_tokens = True
    list_names = ("content",)
    other_members: ClassVar[Mapping[str, Any]] = {"refusal": None}

    def _write(self, run: Run) -> dict[str, Any]:
        content = []
        for token in run.logprobs:
            chosen, best = self._split(token)
            content.append({**self._token(chosen), "top_logprobs": [self._token(entry) for entry in best]})
        return {"content": content, **self.other_members}

    def _token(self, entry: LogprobEntry) -> dict[str, Any]:
        # The text of a part of a character has U+FFFD in place of its bytes.
        own: bytes | None = entry.text.encode()
        if _REPLACEMENT in entry.text:
            own = None if self.tokens is None else self.tokens.bytes_of(entry.token_id)
        return {"token": self._name(entry), "logprob": _finite(entry), "bytes": None if own is None else list(own)}


class CompletionLogprobs(Logprobs):
    """Columns: one holds the character of the choice's text at which each token begins, hence the history."""

    depends_on_history = True
    needs_tokens = True
    list_names = ("text_offset", "token_logprobs", "tokens", "top_logprobs")

    def __init__(self, spec: RequestSpec) -> None:
        super().__init__(spec)
        siblings = max(1, spec.sampling.n)
        echoes = list(spec.answer.echo_texts) or [""] * len(spec.prompts)
        hides = spec.sampling.skip_special_tokens or not spec.sampling.HasField("skip_special_tokens")
        self._offsets = [OutputOffsets(len(text), hides_special=hides) for text in echoes for _ in range(siblings)]
        self._echo_offsets = [EchoOffsets(text) for text in echoes for _ in range(siblings)]
        firsts = zip(spec.prompts, spec.answer.first_tokens, strict=False)
        self._first_tokens = [
            LogprobEntry(token_id=prompt.ids[0], text=text) for prompt, text in firsts for _ in range(siblings)
        ]
        """Of the choices' prompts, where those are echoed."""
        self._has_begun = [False] * len(self._first_tokens)

    def first(self, choice: int) -> dict[str, Any] | None:
        if not self._first_tokens:
            return None
        first = self._first_tokens[choice]
        return {
            "text_offset": [0],
            "token_logprobs": [None],
            "tokens": [self._name(first)],
            "top_logprobs": [None],
        }

    def echoed(self, run: Run, choice: int) -> dict[str, Any] | None:
        if not self._first_tokens:
            return None
        offsets = self._echo_offsets[choice]
        if not self._has_begun[choice]:
            self._has_begun[choice] = True
            offsets.next(self._first_tokens[choice], self.tokens)
        return self._columns(run.prompt_logprobs, offsets)

    def _write(self, run: Run) -> dict[str, Any]:
        return self._columns(run.logprobs, self._offsets[run.choice])

    def _columns(self, tokens: Sequence[TokenLogprobs], offsets: EchoOffsets | OutputOffsets) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {name: [] for name in self.list_names}
        for token in tokens:
            chosen, best = self._split(token)
            columns["text_offset"].append(offsets.next(chosen, self.tokens))
            columns["token_logprobs"].append(_finite(chosen))
            columns["tokens"].append(self._name(chosen))
            columns["top_logprobs"].append({self._name(entry): _finite(entry) for entry in (*best, chosen)})
        return columns


def prompt_logprobs_body(run: Run, num_best: int) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs` for a run's tokens of a prompt, which begin with null for its first token.

    Each is an object of the token's own entry, then those of the likeliest ones, by their ids.
    """
    is_begin = run.prompt_end == len(run.prompt_logprobs)
    rows: list[dict[str, Any] | None] = [None] if is_begin else []
    for token in run.prompt_logprobs:
        rows.append(
            {
                str(entry.token_id): {"logprob": _finite(entry), "rank": entry.rank, "decoded_token": entry.text}
                for entry in token.entries[: 1 + num_best]
            }
        )
    return rows


def _finite(entry: LogprobEntry) -> float:
    return max(entry.logprob, _LEAST)


def finish_reason_body(reason: FinishReason) -> str | None:
    """Return the name of a finish reason; None while there is none."""
    return finish_reason_name(reason) if reason else None


def usage_body(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class AnswerWriter(LogWriter):
    """Writes generated answers.

    Methods: one for each part of a chunk or a whole answer that completions and chats spell differently.
    """

    chunk_object: ClassVar[str]
    """OpenAI's `object` of a chunk."""
    whole_object: ClassVar[str]
    """OpenAI's `object` of a whole answer."""
    shows_prompts_by_choice: ClassVar[bool] = True
    """Whether each choice has `prompt_logprobs`, or the answer has them once."""

    def __init__(self, spec: RequestSpec) -> None:
        super().__init__(spec)
        answer = spec.answer
        self._counts = answer.continuous_usage
        self._echoes_logprobs = bool(answer.first_tokens)
        self.needs_history = self._counts or (self.logprobs.is_asked and self.logprobs.depends_on_history)
        self._num_tokens = [0] * (self.num_choices if self._counts else 0)
        self._head = self._chunk_head()
        # With include_usage each chunk says that its usage is still to come.
        self._tail = '],"usage":null' if answer.include_usage else "]"

    def set_fingerprint(self, fingerprint: str) -> None:
        super().set_fingerprint(fingerprint)
        self._head = self._chunk_head()

    def skip(self, run: Run) -> None:
        if self._counts:
            self._num_tokens[run.choice] += len(run.token_ids)
        if not self.logprobs.is_asked:
            return
        if not run.prompt_end:
            self.logprobs.write(run)
            return
        for choice in self.choices_of(run):
            self.logprobs.echoed(run, choice)

    def count_usage(self, run: Run) -> None:
        """Count what a run of a whole answer adds to its usage."""

    def prompt_ids(self, choice: int) -> list[int]:
        """Return the token ids of a choice's prompt."""
        return list(self.spec.prompts[choice // max(1, self.spec.sampling.n)].ids)

    @abstractmethod
    def opening_parts(self) -> list[str]:
        """Return what each choice shows before the first entry, as members of a JSON object; [] for no opening."""

    around_delta: ClassVar[tuple[str, str]]
    """What stands before and after a text in `delta`."""

    def delta(self, run: Run) -> str:
        """Return a run's text as a member of a JSON object."""
        before, after = self.around_delta
        return f"{before}{encode_basestring_ascii(run.text)}{after}"

    @abstractmethod
    def message(self, choice: int, text: str) -> dict[str, Any]:
        """Return the members of a whole choice that hold its text."""

    def opening(self) -> str | None:
        choices = [
            f'{{"index":{number},{part},"logprobs":{self._first_logprobs(number)},"finish_reason":null}}'
            for number, part in enumerate(self.opening_parts())
        ]
        if not choices:
            return None
        more = self._opening_members() if self.spec.answer.token_ids else ""
        return f"{self._head}{','.join(choices)}{self._tail_of(0)}{more}{self._position(START)}"

    def around_text(self, choice: int) -> tuple[str, str] | None:
        if self._counts or self.logprobs.is_asked or self.spec.answer.token_ids:
            return None
        before, after = self.around_delta
        return (
            f'{self._head}{{"index":{choice},{before}',
            f'{after},"logprobs":null,"finish_reason":null}}{self._tail},"stream_position":"{self.spec.request_id}/',
        )

    def chunk(self, run: Run) -> str:
        if run.prompt_end:
            return self._prompt_chunk(run)
        if self._counts:
            self._num_tokens[run.choice] += len(run.token_ids)
        logprobs = "null"
        if self.logprobs.is_asked:
            logprobs = _compact(self.logprobs.write(run))
        delta, finish = self.delta(run), '"finish_reason":null'
        if run.finish is not None:
            stop = json.dumps(self._stop_reason(run.finish))
            finish = f'"finish_reason":"{self.finish_reason(run.choice, run.finish)}","stop_reason":{stop}'
        ids = self._token_ids(run) if self.spec.answer.token_ids else ""
        choice = f'{{"index":{run.choice},{delta},"logprobs":{logprobs},{finish}{ids}}}'
        return f"{self._head}{choice}{self._tail_of(run.choice)}{self._position(position_after(run))}"

    def _token_ids(self, run: Run) -> str:
        """Return the members of a chunk's choice that show token ids."""
        return f',"token_ids":{_compact(run.token_ids)}'

    def _opening_members(self) -> str:
        """Return what the chunk before the first entry shows beside its choices, of an answer with token ids."""
        return ""

    def _first_logprobs(self, choice: int) -> str:
        """Return the log probabilities of the first token of a choice's prompt, as JSON."""
        return _compact(self.logprobs.first(choice)) if self._echoes_logprobs else "null"

    def _tail_of(self, choice: int) -> str:
        """Return what follows the choices in a chunk of one choice."""
        if not self._counts:
            return self._tail
        prompt = self.spec.prompts[choice // max(1, self.spec.sampling.n)]
        usage = Usage(prompt_tokens=len(prompt.ids), completion_tokens=self._num_tokens[choice])
        body = self.usage_body(usage, (choice,))
        del body["prompt_tokens_details"]  # known at the end
        return f'],"usage":{_compact(body)}'

    def _prompt_chunk(self, run: Run) -> str:
        """Return the chunk of log probabilities of a prompt, for all choices of it."""
        choices, empty = [], self.delta(Run(run.choice, run.next_index, run.digest))
        shown = _compact(self.prompt_logprobs(run))
        in_choice = f',"prompt_logprobs":{shown}' if self.shows_prompts_by_choice and self.shows_prompts else ""
        for choice in self.choices_of(run):
            logprobs = _compact(self.logprobs.echoed(run, choice))
            choices.append(f'{{"index":{choice},{empty},"logprobs":{logprobs},"finish_reason":null{in_choice}}}')
        outside = f',"prompt_logprobs":{shown}' if self.shows_prompts and not in_choice else ""
        return (
            f"{self._head}{','.join(choices)}{self._tail_of(run.choice)}{outside}{self._position(position_after(run))}"
        )

    @property
    def shows_prompts(self) -> bool:
        """Whether prompts' log probabilities are shown in vLLM's form."""
        return self.spec.answer.HasField("prompt_logprobs")

    def prompt_logprobs(self, run: Run) -> list[dict[str, Any] | None]:
        """Return vLLM's `prompt_logprobs` for a run's tokens of a prompt; [] where they are not shown."""
        return prompt_logprobs_body(run, self.spec.answer.prompt_logprobs) if self.shows_prompts else []

    def choices_of(self, run: Run) -> range:
        """Return the choices whose prompt a run's tokens of a prompt are of."""
        return range(run.choice, run.choice + max(1, self.spec.sampling.n))

    def usage(self, end: LogEnd, position: Position) -> str | None:
        """Return the chunk with the usage, where it was asked for."""
        if not self.spec.answer.include_usage:
            return None
        return f'{self._head}],"usage":{_compact(self.usage_body(end.usage))}{self._position(position)}'

    def usage_body(self, usage: Usage, choices: Iterable[int] | None = None) -> dict[str, Any]:
        """Return the usage of what has been written, as bodies show it; of some choices, or of all."""
        return usage_body(usage)

    def whole(self, usage: Usage) -> dict[str, Any]:
        """Return the members of an answer that is not streamed, without its choices."""
        return {
            "id": self.spec.request_id,
            "object": self.whole_object,
            **self._shared(),
            "choices": [],
            "usage": self.usage_body(usage),
        }

    def whole_choice(self, number: int, text: str, finish: ChoiceFinish) -> dict[str, Any]:
        """Return the members of a choice that is not streamed, without its log probabilities."""
        return {
            "index": number,
            **self.message(number, text),
            "logprobs": None,
            "finish_reason": finish_reason_body(finish.reason),
            "stop_reason": self._stop_reason(finish),
        }

    def whole_prompt_ids(self, choice: int) -> dict[str, Any]:
        """Return the members of a whole choice that show its prompt's token ids; {} where the answer shows them."""
        return {}

    def _shared(self) -> dict[str, Any]:
        """Return the members that chunks and whole answers have alike."""
        return {
            "created": self.spec.answer.created,
            "model": self.spec.adapter.name or self.spec.model,
            "system_fingerprint": self._fingerprint,
            "service_tier": "default",
        }

    def _chunk_head(self) -> str:
        members = {"id": self.spec.request_id, "object": self.chunk_object, **self._shared()}
        return _compact(members)[:-1] + ',"choices":['

    def finish_reason(self, choice: int, finish: ChoiceFinish) -> str:
        """Return the name of the reason; `choice` has been written up to its end."""
        return finish_reason_name(finish.reason)

    def _stop_reason(self, finish: ChoiceFinish) -> str | int | None:
        """Return the stop string that ended a choice, or the stop token's id; None where neither did."""
        text = finish.stop_reason
        is_token = text not in self.spec.sampling.stop and text.isdecimal()
        return int(text) if is_token else text or None

    def _position(self, position: Position) -> str:
        """Return the end of a chunk: the position after it, from which a reader resumes."""
        return f',"stream_position":"{position.event_id(self.spec.request_id)}"}}'


def _compact(body: dict[str, Any] | list[Any] | None) -> str:
    return json.dumps(body, separators=(",", ":"))


_CHOICE_BYTES = 512  # of an empty choice's buffers, and of its members' names in the body
# Most bytes of JSON for packed log probabilities: for each token, and for each of their bytes (a text is also a list).
_TOKEN_BYTES, _JSON_FACTOR = 32, 8
_ID_BYTES = 8  # of a token id in a list


@dataclass
class _Choice:
    text: bytearray = field(default_factory=bytearray)
    logprobs: dict[str, bytearray] = field(default_factory=dict)
    """The items of each list, as JSON without its brackets."""
    prompt_logprobs: bytearray = field(default_factory=lambda: bytearray(b"null"))
    """The items of the list, likewise; those of a prompt of one token are these."""
    token_ids: bytearray = field(default_factory=bytearray)
    """The items of the list, likewise."""
    finish: ChoiceFinish = field(default_factory=ChoiceFinish)


class WholeBody:
    """Collects runs, and gives the body back in parts."""

    def __init__(self, writer: AnswerWriter) -> None:
        """`writer`: has written nothing yet."""
        self._writer = writer
        self._choices = [_Choice() for _ in range(writer.num_choices)]
        self.num_bytes = self.empty_bytes(writer)
        """Held, about."""
        if writer.spec.answer.first_tokens:
            for number, choice in enumerate(self._choices):
                self._add_logprobs(choice, writer.logprobs.first(number))

    @staticmethod
    def empty_bytes(writer: AnswerWriter) -> int:
        """Return the bytes that a body has before any run: each choice repeats what it echoes."""
        siblings = max(1, writer.spec.sampling.n)
        echoes = siblings * sum(len(text.encode()) for text in writer.spec.answer.echo_texts)
        ids = sum(len(prompt.ids) for prompt in writer.spec.prompts) if writer.spec.answer.token_ids else 0
        return writer.num_choices * _CHOICE_BYTES + echoes + siblings * ids * _ID_BYTES

    @staticmethod
    def size_of(writer: AnswerWriter, run: Run) -> int:
        """See AnswerBody. Choices of a prompt each show its log probabilities, maybe in two forms."""
        logprobs = sum(_TOKEN_BYTES + _JSON_FACTOR * token.ByteSize() for token in run.logprobs)
        of_prompt = sum(_TOKEN_BYTES + _JSON_FACTOR * token.ByteSize() for token in run.prompt_logprobs)
        ids = _ID_BYTES * len(run.token_ids) if writer.spec.answer.token_ids else 0
        return len(run.text.encode()) + ids + logprobs + 2 * max(1, writer.spec.sampling.n) * of_prompt

    def set_fingerprint(self, fingerprint: str) -> None:
        """Set what the body shows as `system_fingerprint`; "" for unknown."""
        self._writer.set_fingerprint(fingerprint)

    def add(self, run: Run) -> None:
        """Add a run that is not the log's end."""
        if run.prompt_end:
            self._add_prompt(run)
            return
        choice = self._choices[run.choice]
        text = run.text.encode()
        choice.text += text
        self.num_bytes += len(text)
        self._writer.count_usage(run)
        if self._writer.spec.answer.token_ids and run.token_ids:
            ids = _json(run.token_ids)[1:-1]
            choice.token_ids += b"," + ids if choice.token_ids else ids
            self.num_bytes += len(ids) + 1
        if run.finish is not None:
            choice.finish = run.finish
        self._add_logprobs(choice, self._writer.logprobs.write(run))

    def _add_prompt(self, run: Run) -> None:
        shown = _json(self._writer.prompt_logprobs(run))[1:-1]
        for number in self._writer.choices_of(run):
            choice = self._choices[number]
            self._add_logprobs(choice, self._writer.logprobs.echoed(run, number))
            if shown and (self._writer.shows_prompts_by_choice or number == 0):
                is_begin = run.prompt_end == len(run.prompt_logprobs)
                choice.prompt_logprobs = bytearray(shown) if is_begin else choice.prompt_logprobs + b"," + shown
                self.num_bytes += len(shown) + 1

    def _add_logprobs(self, choice: _Choice, written: dict[str, Any] | None) -> None:
        for name, items in self._writer.logprobs.lists(written).items():
            column = choice.logprobs.setdefault(name, bytearray())
            text = _json(items)[1:-1]
            column += b"," + text if column else text
            self.num_bytes += len(text) + 1

    def serialize(self, end: LogEnd) -> Iterator[bytes]:
        """Yield the body, choice by choice; what is yielded is no longer held here."""
        of_prompt = b"[" + self._choices[0].prompt_logprobs + b"]"
        self._choices.reverse()
        opening = b"{"
        for name, value in self._writer.whole(end.usage).items():
            yield opening + _json(name) + b":"
            opening = b","
            if name != "choices":
                yield _json(value)
                continue
            for number in range(self._writer.num_choices):
                yield (b"," if number else b"[") + self._choice(number, self._choices.pop())
            yield b"]"
        if self._writer.shows_prompts and not self._writer.shows_prompts_by_choice:
            yield b',"prompt_logprobs":' + of_prompt
        yield b"}"

    def _choice(self, number: int, choice: _Choice) -> bytes:
        members = self._writer.whole_choice(number, choice.text.decode(), choice.finish)
        written = {name: _json(value) for name, value in members.items()}
        form = self._writer.logprobs
        if form.is_asked:
            lists = {name: b"[" + choice.logprobs.get(name, b"") + b"]" for name in form.list_names}
            written["logprobs"] = _object(lists | {name: _json(value) for name, value in form.other_members.items()})
        if self._writer.shows_prompts and self._writer.shows_prompts_by_choice:
            written["prompt_logprobs"] = b"[" + choice.prompt_logprobs + b"]"
        if self._writer.spec.answer.token_ids:
            of_prompt = self._writer.whole_prompt_ids(number)
            written |= {name: _json(ids) for name, ids in of_prompt.items()}
            written["token_ids"] = b"[" + choice.token_ids + b"]"
        return _object(written)


def _object(members: Mapping[str, bytes]) -> bytes:
    return b"{" + b",".join(_json(name) + b":" + value for name, value in members.items()) + b"}"


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class UsageSchema(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class AnswerSchema(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str | None = Field(description="Numerics fingerprint of the engine: equal ones compute alike.")
    service_tier: Literal["default"]


class ChoiceSchema(BaseModel):
    index: int
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls", "cancelled", "deadline", "error"] | None
    stop_reason: str | int | None = Field(None, description="The stop string or stop token that ended the choice.")


class ChunkSchema(AnswerSchema):
    stream_position: str = Field(
        description="`<request id>/<next index>/<digest>`: the Last-Event-ID with which a reader goes on after this."
    )
    usage: UsageSchema | None = None


def switch(given: Mapping[str, str], name: str) -> bool:
    """Return a header's or a query parameter's value: true, or false where it is not given. Raises InvalidRequest."""
    text = given.get(name, "false")
    if text.lower() not in ("true", "false"):
        raise InvalidRequest(name, f"must be true or false, got {text[:40]!r}")
    return text.lower() == "true"


@contextmanager
def named_as(field_names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name the fields as a body does, by the names of sampling parameters."""
    try:
        yield
    except InvalidRequest as error:
        if error.field is not None:
            error.field = field_names.get(error.field, error.field)
        raise


async def generate(
    gateway: Gateway,
    request: Request,
    call: Call,
    parse: Parser,
    *,
    writer: type[LogWriter],
    body: type[AnswerBody] = WholeBody,
    stream: type[EventStream] = EventStream,
    whole: type[WholeAnswer] = WholeAnswer,
) -> Response:
    """Answer a POST whose answer is made of a request's log.

    Ends the call where it is refused before there is an answer; the answer ends its own.
    """
    try:
        identity = await identify(gateway, request)
        call.identified(identity)
        with_ids = switch(request.headers, "X-Stream-Ids")
        with_comments = switch(request.headers, "X-Queue-Comments")
        async with parsed_request(gateway, request, parse) as draft:
            spec = await gateway.submission.submit(draft, identity, call)
        reading = Reading(
            spec,
            identity,
            call,
            writer(spec),
            body,
            with_ids=with_ids,
            as_lines=accepts_lines(request.headers.get("accept")),
            with_queue_comments=with_comments,
        )
        return stream(gateway, reading) if draft.is_streamed else whole(gateway, reading)
    except asyncio.CancelledError:
        call.end(DISCONNECTED)
        raise
    except Exception as error:
        call.end(error_report(error).code)
        raise


@asynccontextmanager
async def parsed_request(gateway: Gateway, request: Request, parse: BodyParser[Parsed]) -> AsyncIterator[Parsed]:
    """Read and parse the body, and hold room for it until the block ends, in which the request is accepted.

    Errors of the draft name its fields as the body does. Raises InvalidRequest, Overloaded.
    """
    max_bytes = gateway.settings.limits.max_body_bytes
    async with gateway.pending.hold(_num_bytes(request, max_bytes)) as pending:
        async with pending.receiving():
            data = await read_body(request, max_bytes)
        await gateway.turns.wait()
        warnings = current_warnings()

        def work() -> Parsed:
            with collecting(warnings):  # also in a thread, which has a context of its own
                return parse(parse_json(data), request.headers)

        if len(data) <= SMALL_BYTES:
            parsed = work()
        else:  # outside the event loop
            async with gateway.pending.parsing:
                parsed = await gateway.pool.run(work)
        own_names = parsed.field_names if isinstance(parsed, Draft) else {}
        with named_as({**_names_of_headers(request.headers), **own_names}):
            yield parsed


def _names_of_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return what an HTTP call names the fields of a draft that come from its headers."""
    own = next((name for name in ("X-Client-Request-Id", "X-Request-Id") if name.lower() in headers), "request_id")
    return {"idempotency_key": "Idempotency-Key", "client_request_id": own}


def _num_bytes(request: Request, most: int) -> int:
    """Return how many bytes the body has, before it is read: `most` where the header does not say."""
    announced = request.headers.get("content-length", "")
    return min(int(announced), most) if announced.isdecimal() else most
