"""Models as a gateway knows them: tokenizer, chat template and limits, all from the model card."""

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import jinja2
from pagestream.v1.inference_pb2 import SamplingParams
from pagestream.v1.records_pb2 import ModelCard
from tokenizers import Tokenizer

from pagestream_gateway.core.chat_templates import ChatTemplate
from pagestream_gateway.errors import InvalidRequest, PromptTooLong

Runner = Callable[[Callable[[], "LoadedModel"]], Awaitable["LoadedModel"]]


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model card made ready for use.

    `encode` and `decode` are CPU work: call them through the tokenizing pool.
    """

    card: ModelCard
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

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

    def encode(self, text: str, *, add_special_tokens: bool, limit: int, field: str) -> list[int]:
        """Token ids of `text`. Raises PromptTooLong for `field` when there are more than `limit`.

        `Tokenizer.encode` holds Python's lock for as long as it works; `encode_batch_fast` lets go of it.
        """
        if not text.isascii():
            check_unicode(text, field)
        encoding = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        num_tokens = len(encoding)
        if num_tokens > limit:
            raise PromptTooLong(
                field,
                f"the prompt has {num_tokens} tokens, but the model's context length is {self.max_model_len} tokens, "
                "prompt and output together",
            )
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens included."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


def load_model(card: ModelCard) -> LoadedModel:
    """Builds tokenizer and template; takes from milliseconds to a second of CPU. Raises ValueError for a card that is
    broken.
    """
    try:
        tokenizer = Tokenizer.from_str(zlib.decompress(card.tokenizer_json_zlib).decode())
        template = ChatTemplate(card.chat_template, card.special_tokens) if card.chat_template else None
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template of model {card.name!r} is broken: {error.message}") from error
    except Exception as error:
        raise ValueError(f"the tokenizer of model {card.name!r} is broken: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return LoadedModel(card, tokenizer, template)


def check_unicode(text: str, field: str) -> None:
    """Raises InvalidRequest for half of a surrogate pair, which JSON can spell."""
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
        """The model of `card`. `run` executes the loading function outside the event loop.

        Callers that come while it is loaded wait for the same load; one that leaves takes nothing from the others.
        """
        held = self._loaded.get(card.name)
        if held is not None and (held.card is card or held.card == card):
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
            task.exception()  # is told to those who wait; where nobody does any more, nobody needs it
