"""Types of JSON fields whose validation reports one mistake, whatever the size of the value.

pydantic collects the mistakes of every element, for each branch of a union: more memory than a gateway has, for a body
of a few megabytes. Hence no container here reports more than one.
"""

from collections.abc import Set
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

_HUGE = 1e300  # far beyond any bias; excludes infinity and NaN
HALF_SURROGATE = "string_unicode"
"""pydantic's error type for text that UTF-8 can't encode."""
UNION = "union"
"""The error type of `expects`."""


def expects(message: str) -> WrapValidator:
    """Replace the errors of a union, one per branch, by one `message` that says what the field takes."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            kind = first["type"] if first["type"] == HALF_SURROGATE else UNION
            raise PydanticCustomError(kind, message) from error

    return WrapValidator(validate)


def _first_wrong_bias(value: object) -> object:
    """Reduce a mapping with a wrong bias to that one."""
    if isinstance(value, dict):
        for name, bias in value.items():
            if type(bias) not in (int, float) or not -_HUGE < bias < _HUGE:
                return {name: bias}
    return value


Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
Token = Annotated[int, Field(ge=0, lt=2**32)]
Strings = Annotated[str | Items[str], expects("must be a string or a list of strings")]
Biases = Annotated[dict[str, float], BeforeValidator(_first_wrong_bias)]
EarlyStops = Annotated[bool | Literal["never"], expects('must be true, false or "never"')]
_MOST_EXACT = 2**53  # up to which each whole number is a float of its own


class StrictModel(BaseModel):
    """Strict: unknown fields, numbers as strings, NaN and infinity are errors.

    An unknown field that is null asks for nothing, and 16.0 is the same number as 16.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, values: object) -> object:
        """Drop all unknown fields but the first that asks for something: each would become an error that takes memory.

        Whole numbers become integers.
        """
        if not isinstance(values, dict):
            return values
        own = _names(cls)
        if not (values.keys() <= own):
            first = next((name for name, value in values.items() if name not in own and value is not None), None)
            values = {name: value for name, value in values.items() if name in own or name == first}
        if any(type(value) is float for value in values.values()):
            values = {name: _whole(value) for name, value in values.items()}
        return values


@cache
def _names(kind: type[StrictModel]) -> Set[str]:
    """Return the names of a model's fields in JSON."""
    return {field.alias or name for name, field in kind.model_fields.items()}


def _whole(value: object) -> object:
    return int(value) if type(value) is float and value.is_integer() and abs(value) < _MOST_EXACT else value
