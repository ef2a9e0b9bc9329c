"""What the gateway refuses, and why.

    GatewayError
    |- InvalidRequest         a field of the request is wrong
    |  |- PromptTooLong       prompt and output don't fit the model's context
    |  `- UnsupportedField    the field is known, but nothing here honours it yet
    |- Unauthenticated        no API key, or an unknown one
    |- BodyTooLarge           more bytes than the gateway reads
    |- WrongContentType       the body is not said to be JSON
    |- Overloaded             too much work of the gateway's own waits
    |- GatewayStopping        this process is about to end; another one serves the same ids
    |- GenerationFailed       the log of an accepted request ended with an error
    |- SettingsError          a flag, variable or file that the process was started with is wrong
    `- StartupError           something that the process needs to start is not there

What the durable stream refuses has its own tree in `pagestream_streams.errors`; `problems.py` gives both their HTTP
and gRPC forms.
"""

# ruff: noqa: N818 -- these say what is wrong with a request, not that an error occurred


class GatewayError(Exception):
    """Something that the gateway refuses; the message is meant for the caller."""


class InvalidRequest(GatewayError):
    """A field of the request is wrong.

    Attributes:
        field: where in the request, such as "temperature" or "messages.0.role"; None for the request as a whole. An
            API that has
            another name for it sets that.
        message: what was given and what was expected.
    """

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(field, message)
        self.field = field
        self.message = message

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class PromptTooLong(InvalidRequest):
    """Prompt and output together don't fit the model's context; the message has the numbers."""


class UnsupportedField(InvalidRequest):
    """The field is OpenAI's or vLLM's and would change the output, but nothing here honours it yet."""

    def __init__(self, field: str, hint: str = "") -> None:
        super().__init__(field, "is not supported" + (f"; {hint}" if hint else ""))


class Unauthenticated(GatewayError):
    """The call carries no API key, or one that is not known."""


class BodyTooLarge(GatewayError):
    """The body has more bytes than the gateway reads."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the request body is larger than the limit of {limit_bytes} bytes")
        self.limit_bytes = limit_bytes


class WrongContentType(GatewayError):
    """The body is not said to be JSON."""

    def __init__(self, given: str) -> None:
        super().__init__(f"Content-Type is {given or 'missing'}; send application/json")


class Overloaded(GatewayError):
    """Too much work of the gateway's own waits; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class GatewayStopping(GatewayError):
    """This process is about to end. Accepted requests go on; any other gateway serves their ids."""

    def __init__(self) -> None:
        super().__init__(
            "this gateway is shutting down; resume the request on another one from the last offset you have"
        )


class GenerationFailed(GatewayError):
    """The log of an accepted request ended with an error.

    Attributes:
        code: the stable word that the log carries, such as "engine_error".
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message or "the generation failed")
        self.code = code or "engine_error"


class SettingsError(GatewayError):
    """A flag, variable or file that the process was started with is wrong; the message names it."""


class StartupError(GatewayError):
    """Something that the process needs to start is not there: a port, Redis."""
