"""Strict request bodies: how the bodies of all resources are declared, validated, and their mistakes reported."""

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError, create_model

from pagestream_gateway.api.request_warnings import current_warnings
from pagestream_gateway.api.unknown_fields import IGNORED, unknown_fields, without_unknown
from pagestream_gateway.core.drafts import AskedTruncation, Prompt, TextPrompt, TokenPrompt
from pagestream_gateway.core.sampling.json_types import HALF_SURROGATE, UNION, Items, StrictModel, Token, expects
from pagestream_gateway.core.sampling.parameters import PARAMETERS
from pagestream_gateway.errors import InvalidRequest, UnknownField

SERVED_NAME = "Served name; left out: what `pagestream serve` was started with, or the only model with engines."
BodyModel = TypeVar("BodyModel", bound="Body")
Prompts = Annotated[
    str | Items[str] | Items[Token] | Items[Items[Token]],
    expects("must be a string, a list of strings, a list of token ids or a list of lists of token ids"),
]
"""A completion's prompt, an embedding's input."""
NumKeptTokens = Annotated[int, Field(ge=-1, lt=2**31)]
"""Tokens to which a prompt is cut; -1: as many as fit."""
Side = Literal["left", "right"]
"""Where it is cut."""


class Body(StrictModel):
    """A body, or a part of one."""


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


def asked_truncation(num_kept: int | None, side: Side | None) -> AskedTruncation | None:
    """Return to what a body asks to cut its prompts; None: they are not cut, whatever side it names."""
    return None if num_kept is None else AskedTruncation(num_kept, side)


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


@contextmanager
def within(place: str) -> Iterator[None]:
    """Let errors and warnings name the fields of a part of the body by their path in all of it."""
    try:
        with current_warnings().within(place):
            yield
    except InvalidRequest as error:
        error.field = f"{place}.{error.field}" if error.field else place
        raise


def parse_body(kind: type[BodyModel], document: dict[str, Any]) -> BodyModel:
    """Return the body as a model. Raises InvalidRequest that names the field.

    Of unknown fields see `api.unknown_fields`.
    """
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        warnings = current_warnings()
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if warnings.ignores_unknown and _warn_of_unknown(kind, document):
            return parse_body(kind, without_unknown(kind, document))
        if first["type"] in _OF_UNKNOWN and (path := _unknown_at(kind, document, first["loc"])) is not None:
            raise UnknownField(path) from error
        raise _invalid(first["type"], first["loc"], first["msg"]) from error


_OF_UNKNOWN = ("extra_forbidden", UNION)
"""Kinds of mistakes behind which there may be an unknown field: a union says only what it takes."""
_MESSAGES = {
    "missing": "is needed",
    HALF_SURROGATE: "half of a surrogate pair is not text",
}


def _warn_of_unknown(kind: type[Body], document: dict[str, Any]) -> bool:
    """Add a warning for each unknown field; return whether there is one."""
    path = None
    for path in unknown_fields(kind, document):
        current_warnings().add(path, IGNORED)
    return path is not None


def _unknown_at(kind: type[Body], document: dict[str, Any], location: tuple[int | str, ...]) -> str | None:
    """Return the path of the first unknown field in the part of a body where a mistake is; None where there is none.

    A location has names of a union's branches, which the path doesn't: the first step is one of both.
    """
    path, place = _path(location), _path(location[:1])
    unknown = [each for each in islice(unknown_fields(kind, document), 64) if f"{each}.".startswith(f"{place}.")]
    return next((each for each in unknown if each.startswith(path)), unknown[0] if unknown else None)


def _invalid(kind: str, location: tuple[int | str, ...], message: str) -> InvalidRequest:
    return InvalidRequest(_path(location) or None, _MESSAGES.get(kind, message[:1].lower() + message[1:]))


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(str(step)[:80] or '""' for step in location)


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
