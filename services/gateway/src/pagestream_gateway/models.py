"""Models as a gateway knows them: tokenizer, chat template and limits, all from the model card in Redis.

A conversation becomes the messages that a kind of template takes; what the template refuses is an error of the
request's messages.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import zlib
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import jinja2
from pagestream.v1.inference_pb2 import SamplingParams
from pagestream.v1.records_pb2 import Adapter, ModelCard
from pagestream_grammars import TokenTable
from pagestream_grammars.output_formats.registry import BY_TEMPLATE, OutputParsers
from pagestream_grammars.templates import (
    ChatShapes,
    SystemPlace,
    Template,
    TextBesideCalls,
    results_of_calls,
    shapes_of,
    text_of,
)
from pagestream_streams import Broker, ModelInfo
from pagestream_streams.errors import ModelNotFound, ModelUnavailable
from tokenizers import Tokenizer

from pagestream_gateway.calls import RedisTimeout
from pagestream_gateway.encoder import (
    MAX_RUN_CHARS,
    Encoded,
    EncodingJob,
    TextEncoder,
    TokenizePool,
    TooManyTokensError,
    UnbrokenTextError,
    is_for_pairs,
)
from pagestream_gateway.errors import ContextExceeded, InvalidRequest, Overloaded, PromptTooLong
from pagestream_gateway.settings import FormatSettings

# Appended to the message that the model continues, so that its end is found in the rendered text whatever the template
# puts after it.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """A compiled chat template. Rendering is pure Python and may take milliseconds: call it in a thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a template. Raises jinja2.TemplateError where it is broken."""
        self._template = Template(source, special_tokens)

    def shapes(self, arguments: Mapping[str, Any]) -> ChatShapes:
        """Try which shapes of messages the template takes, with values that it always gets; 10 to 60 ms."""
        return shapes_of(self._template, arguments)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the prompt's text. Raises InvalidRequest for "messages" where the template refuses them."""
        chat = [dict(message) for message in messages]
        if continue_final_message:
            chat[-1]["content"] = _tagged(chat[-1].get("content"))
        try:
            text = self._template.render(
                chat, add_generation_prompt=add_generation_prompt, arguments=arguments, tools=tools
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest("messages", f"the model's chat template refuses them: {error.message}") from error
        except Exception as error:
            raise InvalidRequest(
                "messages", f"the model's chat template fails on them: {type(error).__name__}"
            ) from error
        return _cut_at_tag(text) if continue_final_message else text


def _tagged(content: Any) -> Any:
    """Return a content with the tag at the end of its last text."""
    if not isinstance(content, list) or not content:
        return f"{content or ''}{_CONTINUE_TAG}"
    *before, last = content
    return [*before, {**last, "text": f"{last.get('text') or ''}{_CONTINUE_TAG}"}]


def _cut_at_tag(text: str) -> str:
    place = text.rfind(_CONTINUE_TAG.strip())
    if place < 0:
        raise InvalidRequest(
            "continue_final_message",
            "the model's chat template leaves out the final message, so nothing can be continued",
        )
    if text.startswith(_CONTINUE_TAG, place):
        return text[:place]
    return text[:place].rstrip()


Message = Mapping[str, Any]
INSTRUCTING = ("system", "developer")
"""Roles of instructions."""


def with_system_first(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages for a template that knows no `developer`: instructions are of the system then.

    All of the system's become one message at the front, where templates look for it. Without such a message nothing
    changes. Most templates leave out a role that they don't know, and with it what was asked of the model.
    """
    if not any(each.get("role") == "developer" for each in messages):
        return messages
    is_instruction = [each.get("role") in INSTRUCTING for each in messages]
    found = [each for each, is_one in zip(messages, is_instruction, strict=True) if is_one]
    others = [each for each, is_one in zip(messages, is_instruction, strict=True) if not is_one]
    text = "\n\n".join(text_of(each["content"]) for each in found if each.get("content"))
    return [{"role": "system", "content": text}, *others]


def harmony_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as the template of gpt-oss takes them.

    Reasoning is the member `thinking`. A message has one call, which its result follows: further calls become messages
    of their own. Beside a call the template takes one text, so that what was said is added to the reasoning.
    """
    results = results_of_calls(messages)
    moved: set[int] = set()
    found: list[dict[str, Any]] = []
    for place, given in enumerate(messages):
        if place in moved:
            continue
        message = dict(given)
        if isinstance(message.get("content"), list):
            message["content"] = text_of(message["content"])
        thinking = message.pop("reasoning_content", None)
        message.pop("reasoning", None)
        calls = message.get("tool_calls") or ()
        if calls:
            thinking = "\n".join(each for each in (thinking, message.get("content")) if each)
            message["content"] = ""
        if thinking:
            message["thinking"] = thinking
        if len(calls) < 2:
            found.append(message)
            continue
        for number, call in enumerate(calls):
            found.append({**(message if not number else {"role": "assistant", "content": ""}), "tool_calls": [call]})
            if (result := results.get((place, number))) is not None:
                found.append(dict(messages[result]))
                moved.add(result)
    return found


logger = logging.getLogger(__name__)
_MOST_PRELOADED = 4  # tokenizers of 10 to 60 MB each
_MOST_NAMED = 8  # models in one message
_COUNTED_S = 1.0  # a thousand waiting streams count engines once

T = TypeVar("T")
Runner = Callable[[Callable[[], "LoadedModel"]], Awaitable["LoadedModel"]]


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model card with its tokenizer and chat template built.

    Encoding and decoding are CPU work: let the pool's threads do it.
    """

    card: ModelCard
    tokenizer: Tokenizer
    encoder: TextEncoder
    chat_template: ChatTemplate | None
    parsers: OutputParsers = BY_TEMPLATE
    """Of its outputs, as this gateway's settings have them, else the card; empty names are as the template says."""
    adapter: Adapter | None = None
    """The LoRA adapter that a request has named in place of the model."""
    shapes: ChatShapes = field(default_factory=ChatShapes)
    """Of the messages that the chat template takes."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Values that the template gets where a request gives none."""

    found: dict[Callable[[LoadedModel], Any], Any] = field(default_factory=dict, init=False, repr=False)
    """See `once`."""

    def once(self, find: Callable[[LoadedModel], T]) -> T:
        """Return what a function finds out about this model; it is called once."""
        if find not in self.found:
            self.found[find] = find(self)
        value: T = self.found[find]
        return value

    @cached_property
    def tokens(self) -> TokenTable:
        """What the tokenizer says of its tokens."""
        return TokenTable(self.tokenizer)

    @property
    def special_tokens(self) -> frozenset[str]:
        """What prompts spell the special tokens with."""
        return self.tokens.special_contents

    @cached_property
    def has_pair_template(self) -> bool:
        """Whether the chat template makes prompts of a query and a document."""
        return self.chat_template is not None and is_for_pairs(self.card.chat_template)

    @property
    def name(self) -> str:
        """The served name."""
        return self.card.name

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        return self.card.max_model_len

    @property
    def default_sampling(self) -> SamplingParams:
        """The model's own sampling defaults; fields that it leaves open are unset."""
        return self.card.default_sampling

    def check(self, job: EncodingJob) -> EncodingJob:
        """Return a job whose text can be encoded. Raises InvalidRequest for half of a surrogate pair."""
        most = self.encoder.most_chars(job.limit)
        if not job.text.isascii() and (most is None or len(job.text) <= most):
            check_unicode(job.text, job.field)
        return job

    def ids_of(self, job: EncodingJob, found: Encoded) -> array[int]:
        """Return the ids that came of a job.

        Raises PromptTooLong where they are too many, InvalidRequest for a million letters in a row.
        """
        match found:
            case TooManyTokensError() if job.limit >= self.max_model_len and job.max_fitting is None:
                raise PromptTooLong(job.field, f"has {found.found}, at most {job.limit} are read") from found
            case TooManyTokensError():
                raise self.too_long(job.field, found.num_tokens) from found
            case UnbrokenTextError():
                most = None if job.max_fitting is None else self.encoder.most_chars(job.max_fitting)
                if most is not None and len(job.text) > most:
                    raise self.too_long(job.field, self.max_model_len) from found
                raise unbroken_text(job.field) from found
            case ids if job.max_fitting is not None and len(ids) > job.max_fitting:
                raise self.too_long(job.field, len(ids))
        return found

    def too_long(self, field: str, num_tokens: int) -> ContextExceeded:
        """Return the error of a prompt of so many tokens, or of more where they were not all counted."""
        return ContextExceeded(field, prompt_field=field, max_model_len=self.max_model_len, num_tokens=num_tokens)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, special tokens included."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


def load_model(card: ModelCard) -> LoadedModel:
    """Build tokenizer and template, in milliseconds to a second of CPU. Raises ValueError for a broken card."""
    try:
        tokenizer = Tokenizer.from_str(zlib.decompress(card.tokenizer_json_zlib).decode())
        template = ChatTemplate(card.chat_template, card.special_tokens) if card.chat_template else None
        arguments = json.loads(card.chat_template_kwargs or "{}")
        shapes = ChatShapes() if template is None else _shapes_of(card) or template.shapes(arguments)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template of model {card.name!r} is broken: {error.message}") from error
    except BaseException as error:  # a panic in its Rust is no Exception
        raise ValueError(f"the tokenizer of model {card.name!r} is broken: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    parsers = OutputParsers(card.tool_call_parser, card.reasoning_parser)
    return LoadedModel(
        card,
        tokenizer,
        TextEncoder(tokenizer),
        template,
        parsers,
        shapes=shapes,
        template_arguments=arguments,
    )


def _shapes_of(card: ModelCard) -> ChatShapes | None:
    """Return the shapes that an engine has found; None where it tried none, or knows some that are not known here."""
    if not card.HasField("chat_shapes"):
        return None
    given = {each.name: getattr(card.chat_shapes, each.name) for each in fields(ChatShapes)}
    values: dict[str, Any] = {name: each if isinstance(each, int) else frozenset(each) for name, each in given.items()}
    try:
        values["system"] = SystemPlace(values["system"])
        values["text_beside_calls"] = TextBesideCalls(values["text_beside_calls"])
    except ValueError:
        return None
    return ChatShapes(**values)


def _without_contexts(card: ModelCard) -> ModelCard:
    """Return a copy without what changes as engines come and go."""
    copy = ModelCard()
    copy.CopyFrom(card)
    copy.ClearField("max_model_len")
    copy.ClearField("default_model_len")
    copy.ClearField("deterministic")
    return copy


def unbroken_text(field: str) -> InvalidRequest:
    """Return the error of a field whose text can't be encoded piece by piece."""
    return InvalidRequest(
        field, f"has more than {MAX_RUN_CHARS} letters in a row; put a space or a line end between them"
    )


def check_unicode(text: str, field: str) -> None:
    """Raise InvalidRequest for half of a surrogate pair, which JSON can spell and UTF-8 can't encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, "holds half of a surrogate pair, which is not text") from error


class ModelCache:
    """Loaded models by name; one is loaded again only when its card changes."""

    def __init__(self) -> None:
        self._loaded: dict[str, LoadedModel] = {}
        self._loading: dict[str, tuple[ModelCard, asyncio.Task[LoadedModel]]] = {}

    async def load(self, card: ModelCard, run: Runner) -> LoadedModel:
        """Return the model of `card`, loaded by `run` outside the event loop where it is not held.

        Callers that come during a load wait for the same one; cancelling one of them does not cancel the load.
        """
        held = self._loaded.get(card.name)
        if held is not None and (held.card is card or held.card == card):
            return held
        if held is not None and _without_contexts(held.card) == _without_contexts(card):
            self._loaded[card.name] = held = replace(held, card=card)
            return held
        begun = self._loading.get(card.name)
        if begun is not None and (begun[0] is card or begun[0] == card) and not begun[1].done():
            return await asyncio.shield(begun[1])
        task = asyncio.create_task(self._load(card, run))
        self._loading[card.name] = card, task
        task.add_done_callback(lambda _: self._end(card.name, task))
        return await asyncio.shield(task)

    async def _load(self, card: ModelCard, run: Runner) -> LoadedModel:
        loaded = await run(lambda: load_model(card))
        self._loaded[card.name] = loaded
        return loaded

    def _end(self, name: str, task: asyncio.Task[LoadedModel]) -> None:
        if name in self._loading and self._loading[name][1] is task:
            del self._loading[name]
        if not task.cancelled():
            task.exception()  # marks it as retrieved: those who wait get it, and without them it matters to none


class Models:
    """The models that a deployment serves."""

    def __init__(
        self,
        broker: Broker,
        pool: TokenizePool,
        limit: RedisTimeout,
        formats: FormatSettings | None = None,
        aliases: Mapping[str, str] | None = None,
        *,
        default: str | None = None,
    ) -> None:
        """Make the view.

        Args:
            aliases: further names of models, `GatewaySettings.model_aliases`.
            default: the model or adapter of requests without a name.
        """
        self.aliases = aliases or {}
        self._broker = broker
        self._pool = pool
        self._limit = limit
        self._formats = formats or FormatSettings()
        self._names_parsers = bool(self._formats.tool_call_parser_of or self._formats.reasoning_parser_of)
        self._default = default
        self._cache = ModelCache()
        self._broken: dict[str, ModelCard] = {}
        self._counting = asyncio.Lock()
        self._counted_at = float("-inf")
        self._with_engines: frozenset[str] = frozenset()

    async def resolve(self, name: str) -> LoadedModel:
        """Return the model of that name or alias, or of the adapter of that name; without a name the `default_name`.

        | in the view of models | an adapter has the name | the model is there | result |
        |---|---|---|---|
        | yes | not asked | yes | the model |
        | yes, withdrawn since | yes | the adapter's | the adapter's model, with it |
        | yes, withdrawn since | no | | ModelNotFound, or ModelUnavailable where engines can't load it |
        | no | yes | yes | the adapter's model, with it |
        | no | yes | no | ModelNotFound |
        | no | no | published since | the model |
        | no | no | no | ModelNotFound, or ModelUnavailable where engines can't load it |

        Raises ModelNotFound, ModelUnavailable, InvalidRequest where a name is needed or an adapter can't be used,
        Overloaded, Unavailable.
        """
        name = name or await self.default_name(lambda _: True)
        name = self.aliases.get(name, name)
        # A name that is not in the view of the models is an adapter's, where there is one: no model is read for it.
        adapter = None if self._broker.directory.knows(name) else await self._adapter(name)
        try:
            card = await self._limit.wait(self._broker.directory.card(name if adapter is None else adapter.model))
        except ModelNotFound:
            if adapter is not None:
                raise
            adapter = await self._adapter(name)
            if adapter is None:
                await self._check_loadable(name)
                raise
            card = await self._limit.wait(self._broker.directory.card(adapter.model))
        if adapter is not None and card.HasField("takes_adapters") and not card.takes_adapters:
            raise InvalidRequest(
                "model", f"{name!r} is an adapter of {card.name!r}, whose engines take none: enable_lora is off"
            )
        model = await self._cache.load(card, self._pool.run)
        if adapter is not None:
            model = replace(model, adapter=adapter)
        if self._names_parsers and (named := self._formats.parsers_of(card.name)) != BY_TEMPLATE:
            model = replace(model, parsers=named.over(model.parsers))
        return model

    async def default_name(self, allows: Callable[[str], bool]) -> str:
        """Return the model of a request that names none: the setting's, else the only one, else the only one with
        engines. Those that `allows` refuses don't count.

        Raises ModelNotFound where there is none, InvalidRequest where a name is needed, Unavailable.
        """
        infos = [info for info in await self._limit.wait(self._broker.models()) if allows(info.name)]
        default = self._default
        is_known = any(info.name == default for info in infos)
        if default and allows(default) and (is_known or await self._adapter(default) is not None):
            return default
        running = [info for info in infos if info.engines]
        for found in (infos, running):
            if len(found) == 1:
                return found[0].name
        if not infos:
            raise ModelNotFound("")
        names = ", ".join(repr(info.name) for info in running[:_MOST_NAMED]) or "none"
        raise InvalidRequest("model", f"is needed, since {len(infos)} models are known; with engines: {names}")

    async def has_engines(self, name: str) -> bool:
        """Return whether an engine runs a model, to within a second. Raises Unavailable."""
        async with self._counting:
            if time.monotonic() - self._counted_at > _COUNTED_S:
                infos = await self._limit.wait(self._broker.models())
                self._with_engines = frozenset(info.name for info in infos if info.engines)
                self._counted_at = time.monotonic()
            return name in self._with_engines

    async def _adapter(self, name: str) -> Adapter | None:
        return (await self._limit.wait(self._broker.adapters.all())).get(name)

    async def _check_loadable(self, name: str) -> None:
        """Raise ModelUnavailable where engines list a model and none of them can load it."""
        reason = (await self._limit.wait(self._broker.engine_models.read())).reason(name)
        if reason is not None:
            raise ModelUnavailable(name, reason)

    async def list_adapters(self) -> list[Adapter]:
        """Return all LoRA adapters by name. Raises Unavailable."""
        return list((await self._limit.wait(self._broker.adapters.all())).values())

    async def list_models(self) -> list[tuple[ModelInfo, ModelCard]]:
        """Return all models: the default, those with engines, the others, each by name: clients take the first.

        Raises Unavailable.
        """
        infos = await self._limit.wait(self._broker.models())
        default = self._default
        if default is not None and not self._broker.directory.knows(default):
            adapter = await self._adapter(default)
            default = None if adapter is None else adapter.model
        return [
            (info, await self._limit.wait(self._broker.directory.card(info.name)))
            for info in sorted(infos, key=lambda info: (info.name != default, not info.engines, info.name))
        ]

    async def preload(self) -> None:
        """Load the tokenizers of a few models, so that no first request waits for them. Raises Unavailable.

        A broken card is logged once; requests for its model are told what is wrong.
        """
        infos = await self._limit.wait(self._broker.models())
        for info in sorted(infos, key=lambda info: info.name)[:_MOST_PRELOADED]:
            try:
                card = await self._limit.wait(self._broker.directory.card(info.name))
                if self._broken.get(card.name) is not card:
                    await self._cache.load(card, self._pool.run)
            except (ModelNotFound, Overloaded):
                continue  # removed meanwhile, or there is other work: the next call tries again
            except ValueError as error:
                self._broken[card.name] = card
                logger.warning("cannot load the model card of %s: %s", card.name, error)

    async def is_any_known(self) -> bool:
        """Return whether Redis has a model. Raises Unavailable."""
        return bool(await self._limit.wait(self._broker.models()))
