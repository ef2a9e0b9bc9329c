"""The model card: everything a gateway needs to know about a model, read from the model's folder."""

import json
import logging
import zlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pagestream.v1.inference_pb2 import SamplingParams as SamplingMessage
from pagestream.v1.records_pb2 import (
    LABEL_ACTIVATION_IDENTITY,
    LABEL_ACTIVATION_SIGMOID,
    LABEL_ACTIVATION_SOFTMAX,
    POOLING_KIND_CLS,
    POOLING_KIND_LAST,
    POOLING_KIND_MEAN,
    EmbeddingCard,
    ModelCard,
    Pooling,
)
from pagestream.v1.records_pb2 import ChatShapes as ChatShapesMessage
from pagestream_engine.models.chat_template import folder_template as _chat_template
from pagestream_engine.models.chat_template import special_tokens
from pagestream_engine.models.defaults import read_generation_config, sampling_defaults
from pagestream_engine.models.pooling import IDENTITY, SIGMOID, SOFTMAX, read_pooling
from pagestream_engine.models.tokenizer import tokenizer_json
from pagestream_engine.wire.worker import ModelFacts
from pagestream_grammars.output_formats.registry import BY_TEMPLATE, OutputParsers

from pagestream_worker.settings import ChatTemplateOptions

logger = logging.getLogger(__name__)

POOLING_KINDS = {"last": POOLING_KIND_LAST, "mean": POOLING_KIND_MEAN, "cls": POOLING_KIND_CLS}
_ACTIVATIONS = {
    SOFTMAX: LABEL_ACTIVATION_SOFTMAX,
    SIGMOID: LABEL_ACTIVATION_SIGMOID,
    IDENTITY: LABEL_ACTIVATION_IDENTITY,
}


class ModelCardError(ValueError):
    """A model folder lacks a file that serving needs, or has one that can't be read."""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelCardError(f"{path}: JSON was expected: {error}") from error
    if not isinstance(loaded, dict):
        raise ModelCardError(f"{path}: a JSON object was expected, {type(loaded).__name__} was found")
    return loaded


def _default_sampling(generation_config: Mapping[str, Any]) -> SamplingMessage:
    """Return the defaults for requests that leave a field open: as in vLLM, those of generation_config.json."""
    message = SamplingMessage()
    for name, value in sampling_defaults(generation_config).items():
        setattr(message, name, value)
    return message


def _embedding(folder: Path, engine: ModelFacts) -> EmbeddingCard:
    """Return what vectors of the model are, by its files."""
    if not engine.pooled_size:
        reason = "the model runs by the modelling code of transformers, which gives logits and no hidden states"
        return EmbeddingCard(unsupported=reason)
    found = read_pooling(folder)
    return EmbeddingCard(
        size=engine.pooled_size,
        pooling=Pooling(
            kind=POOLING_KINDS[found.kind], normalize=found.normalize, activation=_ACTIVATIONS.get(found.activation)
        ),
        is_matryoshka=found.is_matryoshka,
        dimensions=found.dimensions,
        unsupported=found.unsupported,
        labels=found.labels,
        joins_pairs=found.joins_pairs,
    )


def build_card(
    folder: Path,
    name: str,
    engine: ModelFacts,
    parsers: OutputParsers = BY_TEMPLATE,
    chat: ChatTemplateOptions | None = None,
) -> ModelCard:
    """Build the card of a model that an engine has loaded, or may load.

    Args:
        folder: of the model's files.
        name: that clients ask for.
        engine: facts that the engine knows.
        parsers: of the model's outputs.
        chat: what options say of the chat template.

    Raises:
        ModelCardError: tokenizer.json is missing, or a JSON file can't be read.
        ModelFileError: generation_config.json, a chat template or a file of the tokenizer is malformed.
    """
    tokenizer = tokenizer_json(folder)
    if tokenizer is None:
        raise ModelCardError(
            f"{folder}: tokenizer.json was expected; make one with `PreTrainedTokenizerFast.save_pretrained`"
        )
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    chat = chat or ChatTemplateOptions()
    template = chat.text or _chat_template(folder, tokenizer_config)
    tokens = special_tokens(tokenizer_config, _read_json(folder / "special_tokens_map.json"))
    architectures = _read_json(folder / "config.json").get("architectures") or [""]
    return ModelCard(
        name=name,
        tokenizer_json_zlib=zlib.compress(tokenizer, level=6),
        chat_template=template,
        special_tokens=tokens,
        chat_shapes=_shapes_message(template, tokens, chat.arguments) if template else None,
        chat_template_kwargs=chat.arguments,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        eos_token_ids=sorted(engine.eos_token_ids),
        architecture=str(architectures[0]),
        revision=engine.revision,
        deterministic=engine.is_deterministic,
        takes_adapters=engine.takes_adapters,
        embedding=_embedding(folder, engine),
        tool_call_parser=parsers.tool_call_parser,
        reasoning_parser=parsers.reasoning_parser,
        takes_output_constraints=True,
        default_sampling=_default_sampling(read_generation_config(folder)),
    )


def _shapes_message(template: str, tokens: Mapping[str, str], arguments: str) -> ChatShapesMessage | None:
    """Return the shapes of messages that a template takes; None for one that is broken, which gateways will say."""
    from pagestream_grammars.templates import ChatShapes, Template, shapes_of, template_fault

    if (fault := template_fault(template)) is not None:
        logger.warning("the model's chat template is broken: %s", fault)
        return None
    shapes = shapes_of(Template(template, tokens), json.loads(arguments or "{}"))
    message = ChatShapesMessage()
    for name in (each.name for each in fields(ChatShapes)):
        value = getattr(shapes, name)
        if isinstance(value, frozenset):
            getattr(message, name).extend(sorted(value))
        else:
            setattr(message, name, value)
    return message
