"""The errors of the gateway.

    GatewayError
    |- InvalidRequest         a field of the request is wrong
    |  |- PromptTooLong       more tokens than are read, or
    |  |  `- ContextExceeded  prompt and output don't fit the model's context
    |  |- UnknownField        nothing declares the field
    |  `- UnsupportedField    the field is known, but not supported
    |     `- UnsupportedThread  it asks Anthropic's API to keep the conversation
    |- RequestDiffers         an id stands for a request with another body
    |- Unauthenticated        no credential, or one that is not good
    |- WrongCredential        a good credential that does not open this
    |- CredentialsUnavailable what a credential is checked against is not there yet
    |- HostNotAllowed         the Host header is not a name of this server
    |- OriginNotAllowed       a web page of this origin may not do this
    |- BodyTooLarge           more bytes than the gateway reads
    |- WrongContentType       the body is of another type, or compressed
    |- HeaderTooLarge         more bytes or fields in a request's header than the gateway reads
    |- RequestTimeout         a request's header or body took too long to arrive
    |- MalformedHttp          the bytes of a connection are not HTTP/1.1
    |- TooManyConnections     this process has as many connections as it keeps
    |- Overloaded             too many requests wait for the tokenizer
    |- AnswerTooLarge         an answer that is not streamed takes more memory than all may
    |- GatewayStopping        this process is stopping; any other gateway serves the same ids
    |- GenerationFailed       the log of an accepted request ended with an error
    |  |- NoEngine            no engine has taken it
    |  `- RequestFailed       its own parameters are at fault, as an engine found out
    |- SettingsError          a flag, variable or file that the process was started with is wrong
    `- StartupError           a port or Redis, which the process needs to start, is not there

The durable streams have their own tree in `pagestream_streams.errors`; `error_codes.py` gives the errors of both
their HTTP and gRPC codes.
"""

# ruff: noqa: N818 -- names say what is wrong with a request


class GatewayError(Exception):
    """The root. Messages are written for the caller."""


class InvalidRequest(GatewayError):
    """A field of the request is wrong."""

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(field, message)
        self.field = field
        """Path in the request, such as "temperature" or "messages.0.role"; None for the request as a whole. An API
        that spells the field otherwise replaces it.
        """
        self.message = message
        """What was given and what was expected."""

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class PromptTooLong(InvalidRequest):
    """The prompt has more tokens than are read, or than fit the model's context."""


class ContextExceeded(PromptTooLong):
    """Prompt and output don't fit the context, in OpenAI's sentences: clients read the numbers, and then compact."""

    def __init__(
        self, field: str, *, prompt_field: str, max_model_len: int, num_tokens: int, max_tokens: int | None = None
    ) -> None:
        """`num_tokens`: of the prompt; `max_tokens`: of the output, where it is too long whatever the prompt is."""
        self.max_model_len, self.num_tokens, self.max_tokens = max_model_len, num_tokens, max_tokens
        super().__init__(field, _context_sentence(prompt_field, max_model_len, num_tokens, max_tokens))

    def __str__(self) -> str:
        return self.message if self.max_tokens is None else f"{self.message} {self.field} is {self.max_tokens}."


def _context_sentence(prompt_field: str, limit: int, num_tokens: int, max_tokens: int | None) -> str:
    opening = f"This model's maximum context length is {limit} tokens"
    asked = max_tokens or 1  # a prompt that fills the context leaves no room for one
    if prompt_field == "input":
        opening = (
            f"Your input exceeds the context window of this model. Please adjust your input and try again. {opening}"
        )
    what = prompt_field if prompt_field in ("messages", "input") else "prompt"
    if max_tokens is None and num_tokens > limit:
        return (
            f"{opening}. However, your {what} resulted in {num_tokens} tokens. Please reduce the length of the {what}."
        )
    return (
        f"{opening}. However, you requested {num_tokens + asked} tokens ({num_tokens} in the {what}, {asked} in the "
        f"completion). Please reduce the length of the {what} or completion."
    )


class UnsupportedField(InvalidRequest):
    """The field is OpenAI's or vLLM's and would change the output, but is not supported."""

    def __init__(self, field: str, hint: str = "") -> None:
        super().__init__(field, "is not supported" + (f"; {hint}" if hint else ""))


class UnsupportedThread(UnsupportedField):
    """The server is asked to keep the conversation; clients that know the error's code send all of it instead."""

    error_code = "thread_unsupported_request"
    """Anthropic's `error.details.error_code`."""


class UnknownField(InvalidRequest):
    """The body has a field that is on no list."""

    def __init__(self, field: str) -> None:
        super().__init__(field, "unknown field")

    def __str__(self) -> str:
        return f"Unknown parameter: {self.field!r}."  # OpenAI's sentence


class RequestDiffers(GatewayError):
    """The id stands for a request with other prompts or sampling parameters."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"request {request_id} is there, with other prompts or sampling parameters than these, and is left "
            "as it is; read it, or send a new request"
        )


class Unauthenticated(GatewayError):
    """The call carries no credential, or one that is not good. The message never holds any of it."""


class WrongCredential(GatewayError):
    """The credential is good, and does not open this: a tenant's key for administration, or the other way round."""


class CredentialsUnavailable(GatewayError):
    """The keys that a token is checked with have not been loaded yet; try again."""


class HostNotAllowed(GatewayError):
    """The request is for a host that this server does not serve."""

    def __init__(self, host: str) -> None:
        super().__init__(
            f"{host[:100]!r} is not a name of this server, which asks for no credential and so answers to localhost "
            "alone; let it ask for credentials (--api-keys, --jwt-issuers), or name the host in "
            "PAGESTREAM_GATEWAY__ALLOWED_HOSTS"
        )


class OriginNotAllowed(GatewayError):
    """A web page of another origin asks for what browsers do not hold to CORS: a WebSocket, or a form's effect."""

    def __init__(self, origin: str) -> None:
        super().__init__(
            f"pages of {origin[:100]!r} may not open a WebSocket here, nor change anything without a key; "
            "PAGESTREAM_GATEWAY__CORS_ORIGINS lists those that may"
        )


class BodyTooLarge(GatewayError):
    """The body has more bytes than the gateway reads."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the request body is larger than the limit of {limit_bytes} bytes")
        self.limit_bytes = limit_bytes


class WrongContentType(GatewayError):
    """The body is not application/json as it is: another type, or compressed. The message says which."""


class HeaderTooLarge(GatewayError):
    """A request's header has more bytes or fields than the gateway reads."""

    def __init__(self, limit_bytes: int, limit_fields: int | None = None) -> None:
        limit = f"{limit_bytes} bytes" if limit_fields is None else f"{limit_fields} fields"
        super().__init__(f"the request's header is larger than the limit of {limit}")


class RequestTimeout(GatewayError):
    """A request's header or body took longer to arrive than the gateway waits."""


class MalformedHttp(GatewayError):
    """What came over a connection is not HTTP/1.1, or not in a form that the gateway reads."""

    def __init__(self) -> None:
        super().__init__("this is not an HTTP/1.1 request that the gateway can read")


class TooManyConnections(GatewayError):
    """This process has as many connections as it keeps; try again, or on another gateway."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"this gateway has {limit} open connections, its limit; try again")


class Overloaded(GatewayError):
    """Too many requests wait for the tokenizer; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class AnswerTooLarge(GatewayError):
    """An answer that is not streamed takes more memory than all of them may."""

    def __init__(self, request_id: str, limit_bytes: int) -> None:
        super().__init__(
            f"the answer is larger than the {limit_bytes} bytes that this gateway holds of answers that are not "
            f"streamed; read it as events from GET /v1/requests/{request_id}/events, or ask with stream: true"
        )


class GatewayStopping(GatewayError):
    """This process is stopping. Accepted requests go on; any other gateway serves their ids."""

    def __init__(self) -> None:
        super().__init__(
            "this gateway is shutting down; resume the request on another one from the last offset you have"
        )


class GenerationFailed(GatewayError):
    """The log of an accepted request ended with an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message or "the generation failed")
        self.code = code or "engine_error"
        """The code that the log carries, such as "engine_error"."""


class NoEngine(GenerationFailed):
    """No engine has taken an accepted request, and none has served its model for long."""


class RequestFailed(GenerationFailed):
    """An engine could not go on with an accepted request, and the request is at fault."""

    def __init__(self, code: str, message: str, field: str | None = None) -> None:
        super().__init__(code, message)
        self.field = field
        """The field of the body that is at fault; None where none is known."""


class SettingsError(GatewayError):
    """A flag, variable or file that the process was started with is wrong; the message names it."""


class StartupError(GatewayError):
    """A port or Redis, which the process needs to start, is not there; the message names it."""
