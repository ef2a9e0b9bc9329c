"""Types of JSON fields whose validation reports one mistake, whatever the size of the value.

pydantic collects the mistakes of every element, for each branch of a union: more memory than a gateway has, for a body
of a few megabytes. Hence no container here reports more than one.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

_HUGE = 1e300  # far beyond any bias; excludes infinity and NaN
HALF_SURROGATE = "string_unicode"
"""pydantic's error type for text that UTF-8 can't encode."""


def expects(message: str) -> WrapValidator:
    """Replace the errors of a union, one per branch, by one `message` that says what the field takes."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            kind = first["type"] if first["type"] == HALF_SURROGATE else "union"
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
