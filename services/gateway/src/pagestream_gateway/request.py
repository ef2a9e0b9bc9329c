"""What a caller asks for, before it is checked against a model: all APIs fill a `Draft`.

A chat's tools are part of it, and how a grammar forces calls of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pagestream.v1.inference_pb2 import ON_DISCONNECT_CANCEL, OnDisconnect, SamplingParams, StructuredOutputs
from pagestream.v1.records_pb2 import AnswerForm, ReasoningMarks
from pagestream_grammars.output_formats.declaration import call_schema

from pagestream_gateway.sampling import schema_text


@dataclass(frozen=True)
class Tools:
    """The tools of a chat, as its template takes them."""

    definitions: Sequence[Mapping[str, Any]] = ()
    """OpenAI's objects: {"type": "function", "function": {"name": ..., "parameters": ...}}."""
    is_forced: bool = False
    """Whether the output is made of calls alone."""
    forced_name: str = ""
    """The one tool that is called; "" where any may be."""
    one_call: bool = False
    """Whether an answer has one call at most."""

    @property
    def names(self) -> list[str]:
        """Of the tools that may be called."""
        return [self.forced_name] if self.forced_name else [each["function"]["name"] for each in self.definitions]

    @property
    def forced_format(self) -> str:
        """The format of an output that a grammar forces; "" where none does."""
        if not self.is_forced:
            return ""
        return "named" if self.forced_name else "required"

    def constraint(self) -> StructuredOutputs:
        """Return the grammar of forced calls. Raises InvalidRequest."""
        if self.forced_name:
            schemas = {each["function"]["name"]: each["function"].get("parameters") for each in self.definitions}
            schema: Any = schemas[self.forced_name] or {"type": "object"}
        else:
            call = call_schema(self.definitions, "parameters")
            most = {"maxItems": 1} if self.one_call else {}
            schema = {"type": "array", "minItems": 1, **most, "items": {"anyOf": call["anyOf"]}, "$defs": call["$defs"]}
        return StructuredOutputs(json=schema_text(schema, "tools"))


@dataclass(frozen=True)
class TextPrompt:
    """Text that the tokenizer turns into tokens."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True)
class TokenPrompt:
    """Token ids, taken as they are."""

    token_ids: Sequence[int]


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation that the model's chat template turns into text."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False
    tools: Tools = field(default_factory=Tools)
    documents: Sequence[Mapping[str, Any]] = ()
    """Documents that the template shows the model, to answer from."""
    separate_reasoning: bool = True
    """Whether reasoning is told from the answer, where the template knows any."""
    reasons: bool | None = None
    """Whether the template is to ask for reasoning; None leaves it to the template and `arguments`."""
    effort: str | None = None
    """How much reasoning the template is to ask for; None likewise."""
    shows_reasoning: bool = True
    """Whether answers show the reasoning that is told from them."""


Prompt = TextPrompt | TokenPrompt | ChatPrompt
WHAT_FITS = -1  # tokens of AskedTruncation


@dataclass(frozen=True)
class AskedTruncation:
    """To what a caller asks to cut each prompt, before its length is checked."""

    num_tokens: int
    """Most that are kept, special ones included; WHAT_FITS: as many as the model takes."""
    side: Literal["left", "right"] | None = None
    """Where tokens are cut off, be they special or not. None: within the special tokens, at the beginning of a text
    that an output goes on with, at the end of one that has none.
    """
    leaves_room: bool = False
    """Of WHAT_FITS: whether the output has the room that is asked for it; else it has one token."""


@dataclass(frozen=True)
class AskedPooling:
    """What a caller asks of vectors; None is as the model's files say."""

    dimensions: int | None = None
    """Leading numbers that are kept; None is all."""
    normalize: bool | None = None
    """Whether they are divided by their length."""
    classifies: bool = False
    """Whether probabilities of labels are asked for in place of vectors."""
    activates: bool | None = None
    """Whether scores of labels, or of pairs, go through the model's function: False gives the scores themselves."""
    num_query_tokens: int = 0
    """To which each query is cut before; 0: it is not."""
    num_doc_tokens: int = 0
    """To which each document is cut before; 0: it is not."""
    num_queries: int = 0
    """Prompts, from the first on, that the others are compared with; see `VectorForm`. They are texts."""
    query_field: str = ""
    """The field that holds these, for error messages."""


@dataclass(frozen=True)
class Draft:
    """A request as its caller spelled it."""

    model: str
    """Served name; empty for that of Models.default_name."""
    prompts: Sequence[Prompt]
    prompt_field: str
    """Field of the API that holds the prompts, for error messages."""
    sampling: SamplingParams
    answer: AnswerForm
    marks: ReasoningMarks = field(default_factory=ReasoningMarks)
    """Of reasoning before what a grammar holds. Set when its prompt is rendered, as `answer.output` is."""
    chosen_seed: int | None = None
    """Seed that a gateway chose when it accepted this request for the first time; None for a new request."""
    default_max_tokens: int | None = None
    """max_tokens where neither caller nor model give it; None is what the context leaves."""
    echo: bool = False
    is_prompt_alone: bool = False
    """Whether the echo is all that is asked for: the request ends as soon as it is accepted."""
    is_counted: bool = False
    """Whether its tokens are all that is asked for: it may be empty, and longer than the model's context."""
    truncation: AskedTruncation | None = None
    """Unset: a prompt that is too long is refused."""
    pooling: AskedPooling | None = None
    """Set where vectors of the prompts are asked for, and no output."""
    on_disconnect: OnDisconnect = ON_DISCONNECT_CANCEL
    priority: int = 0
    deadline_ms: int = 0
    """Milliseconds from acceptance; 0 is no deadline."""
    client_request_id: str = ""
    idempotency_key: str = ""
    cache_salt: str = ""
    """What the caller adds to the salt of the prefix cache."""
    is_listed: bool = True
    """Whether it stands in its tenant's list of requests. A batch's jobs don't: they would push all others out."""
    body_digest: str = ""
    """Digest of what was asked; set where there is an idempotency key."""
    is_streamed: bool = False
    """Whether the answer is wanted as a stream."""
    field_names: Mapping[str, str] = field(default_factory=dict)
    """Names in its body of sampling parameters that this calls otherwise, for error messages."""
