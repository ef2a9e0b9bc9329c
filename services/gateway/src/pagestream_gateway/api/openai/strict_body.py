"""Strict request bodies: how the bodies of all resources are declared, validated, and their mistakes reported."""

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from pagestream_gateway.core.sampling.json_types import HALF_SURROGATE
from pagestream_gateway.core.sampling.parameters import PARAMETERS
from pagestream_gateway.errors import InvalidRequest

BodyModel = TypeVar("BodyModel", bound="Body")


class Body(BaseModel):
    """Strict: unknown fields, numbers as strings, NaN and infinity are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, values: object) -> object:
        """Drop all unknown fields but the first: each would become an error that takes memory."""
        if not isinstance(values, dict) or len(values.keys() - cls.model_fields.keys()) < 2:
            return values
        first = next(name for name in values if name not in cls.model_fields)
        return {name: value for name, value in values.items() if name in cls.model_fields or name == first}


def with_sampling_parameters(kind: type[BodyModel]) -> type[BodyModel]:
    """Add a field for each sampling parameter that OpenAI bodies share."""
    fields: dict[str, Any] = {
        parameter.name: (parameter.json_type | None, Field(None, description=parameter.description))
        for parameter in PARAMETERS
        if parameter.json_type is not None
    }
    return create_model(kind.__name__, __base__=kind, __module__=kind.__module__, __doc__=kind.__doc__, **fields)


def parse_body(kind: type[BodyModel], document: dict[str, Any]) -> BodyModel:
    """Return the body as a model. Raises InvalidRequest that names the field."""
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _invalid(first["type"], first["loc"], first["msg"]) from error


_MESSAGES = {
    "extra_forbidden": "unknown field",
    "missing": "is needed",
    HALF_SURROGATE: "half of a surrogate pair is not text",
}


def _invalid(kind: str, location: tuple[int | str, ...], message: str) -> InvalidRequest:
    path = ".".join(str(step)[:80] or '""' for step in location)
    return InvalidRequest(path or None, _MESSAGES.get(kind, message[:1].lower() + message[1:]))
