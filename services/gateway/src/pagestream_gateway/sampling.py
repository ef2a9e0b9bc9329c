"""The sampling parameters in bodies and messages: from their declarations follow schemas, defaults, checks, refusals.

To add one: a field in `SamplingFields` (pagestream_options/sampling.py) and one of the same name in `SamplingParams`
(proto/pagestream/v1/inference.proto). One that is not supported yet: an entry in `UNSUPPORTED_PARAMETERS` alone.

What an output must match has forms of its own: vLLM's and OpenAI's, and its message.
"""

import json
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from google.protobuf.message import Message
from pagestream.v1.inference_pb2 import (
    EARLY_STOPPING_NEVER,
    EARLY_STOPPING_TRUE,
    EARLY_STOPPING_UNSPECIFIED,
    Choices,
    EarlyStopping,
    SamplingParams,
    StructuredOutputs,
)
from pagestream_grammars import (
    Grammar,
    GrammarError,
    choice_grammar,
    fault,
    json_grammar,
    regex_grammar,
    rules_grammar,
)
from pagestream_options import declaration
from pagestream_options.declaration import MAX_FLOAT32, Option
from pagestream_options.sampling import SAMPLING_PARAMETERS
from pydantic import Field

from pagestream_gateway.errors import ContextExceeded, InvalidRequest
from pagestream_gateway.http.body import Biases, Body, EarlyStops, Items, Strings, Token, expects
from pagestream_gateway.settings import LimitSettings

_HALF_PAIR = "holds half of a surrogate pair, which is not text"
_NAMES = ("json", "regex", "choice", "grammar", "json_object")

Schema = Annotated[dict[str, Any] | str | bool, expects("must be a JSON schema: an object, a boolean, or text of one")]


class StructuredOutputsBody(Body):
    """vLLM's structured_outputs, of which exactly one constraint is given."""

    json_: Schema | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = Field(None, description="A regular expression for the whole output.")
    choice: Items[str] | None = Field(None, description="The output is one of these.")
    grammar: str | None = Field(None, description="Rules in EBNF: Lark's syntax, or GBNF.")
    json_object: bool | None = Field(None, description="true: any JSON object.")
    disable_any_whitespace: bool | None = Field(None, description="JSON without spaces between its parts.")
    # What else vLLM's has, and its client sends with the values that ask for nothing.
    disable_additional_properties: Literal[False] | None = None


def constraint_message(body: StructuredOutputsBody) -> StructuredOutputs:
    """Return the message of a body. Raises InvalidRequest unless exactly one constraint is given."""
    schema, choice = body.json_, body.choice
    given = sum(each is not None for each in (schema, body.regex, choice, body.grammar)) + bool(body.json_object)
    if given != 1:
        raise InvalidRequest("structured_outputs", f"must have exactly one of {', '.join(_NAMES)}, got {given}")
    try:
        return StructuredOutputs(
            json=schema
            if schema is None or isinstance(schema, str)
            else schema_text(schema, "structured_outputs.json"),
            regex=body.regex,
            choice=None if choice is None else Choices(texts=choice),
            grammar=body.grammar,
            json_object=body.json_object or None,
            disable_any_whitespace=bool(body.disable_any_whitespace),
        )
    except UnicodeEncodeError as error:
        raise InvalidRequest("structured_outputs", _HALF_PAIR) from error


def schema_text(schema: object, field: str) -> str:
    """Return a schema as text. Raises InvalidRequest where it is not text."""
    try:
        text = json.dumps(schema, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, _HALF_PAIR) from error
    return text


def constraint_fault(value: StructuredOutputs, max_bytes: int) -> str | None:
    """Return what keeps engines from holding an output to a constraint; None where nothing does.

    This is CPU work where its like has not been asked for before: some milliseconds, up to seconds for the largest
    schemas.
    """
    kind = value.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not value.json_object):
        return f"must have one of {', '.join(_NAMES)}"
    if kind == "json_object":
        return None
    try:
        grammar = _grammar(value, kind)
    except GrammarError as error:
        return str(error)
    num_bytes = len(grammar.text.encode())
    if num_bytes > max_bytes:
        return f"{kind} has {num_bytes} bytes, must have at most {max_bytes}"
    found = fault(grammar)
    return None if found is None else str(found)


def _grammar(value: StructuredOutputs, kind: str) -> Grammar:
    match kind:
        case "json":
            return json_grammar(value.json, is_compact=value.disable_any_whitespace)
        case "regex":
            return regex_grammar(value.regex)
        case "choice":
            return choice_grammar(list(value.choice.texts))
        case _:
            return rules_grammar(value.grammar)


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    """A schema; name and description are for the reader. The output matches it whatever `strict` says."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema", description="None: any JSON object.")
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """JSON that validates against a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


def constraint_of(form: ResponseFormat | None) -> StructuredOutputs | None:
    """Return what the output must match; None for any text. Raises InvalidRequest."""
    match form:
        case JsonSchemaFormat(json_schema=JsonSchema(schema_=schema)) if schema is not None:
            return StructuredOutputs(json=schema_text(schema, "response_format"))
        case JsonSchemaFormat() | JsonObjectFormat():
            return StructuredOutputs(json_object=True)
    return None


@dataclass(frozen=True)
class CheckContext:
    """What a value is checked against."""

    sampling: SamplingParams
    """All parameters of the request, with defaults filled in."""
    limits: LimitSettings
    vocab_size: int
    """Number of the model's tokens; 0 where the model card does not have it."""


Check = Callable[[Any, CheckContext], str | None]


def anything(_: Option) -> Check:
    """Accept every value of the type."""
    return lambda value, context: None


def in_range(each: Option) -> Check:
    """Accept finite numbers of a parameter's range, within a gateway's limit where it has one."""
    low = each.low if each.body is None or each.body.low is None else each.body.low
    low = 0 if low is None else low

    def check(value: float, context: CheckContext) -> str | None:
        most = _most(each, context) or each.high
        is_low = value > low if each.is_above else value >= low
        if abs(value) <= MAX_FLOAT32 and is_low and (most is None or value <= most):
            return None
        if each.expected:
            expected = each.expected
        elif each.is_above:
            expected = f"above {low:g}" + ("" if most is None else f" and at most {most:g}")
        else:
            expected = f"{low:g} or more" if most is None else f"from {low:g} to {most:g}"
        return f"must be {expected}, got {value:{'' if isinstance(value, int) else 'g'}}"

    return check


def _most(each: Option, context: CheckContext, *, of_chars: bool = False) -> int:
    """The gateway's bound of a parameter; 0 where it has none."""
    name = "" if each.body is None else each.body.most_chars if of_chars else each.body.most
    return getattr(context.limits, name) if name else 0


def most_tokens(value: int, context: CheckContext) -> str | None:
    """Accept a number of tokens; 0 where only the prompt's log probabilities are wanted."""
    least = 0 if context.sampling.HasField("prompt_logprobs") else 1
    return None if value >= least else f"must be 1 or more, got {value}"


def at_most_max_tokens(_: int, context: CheckContext) -> str | None:
    """Accept a minimum that the maximum leaves room for; a maximum that is wrong by itself is named for itself."""
    sampling = context.sampling
    if sampling.HasField("max_tokens") and most_tokens(sampling.max_tokens, context) is not None:
        return None
    return min_tokens_fault(sampling)


def min_tokens_fault(sampling: SamplingParams) -> str | None:
    """Return what is wrong where min_tokens is more than max_tokens."""
    if sampling.HasField("max_tokens") and sampling.min_tokens > sampling.max_tokens:
        return f"{sampling.min_tokens} is more than max_tokens, {sampling.max_tokens}"
    return None


def at_least_n(value: int, context: CheckContext) -> str | None:
    """Accept as many sequences as there are choices, or more, within the limit for choices."""
    n, most = context.sampling.n, context.limits.max_n
    return None if n <= value <= most else f"must be from n ({n}) to {most}, got {value}"


MAX_BEAM_WIDTH = 64
"""Engines take no more."""


def beam_search_fault(sampling: SamplingParams, context: CheckContext) -> tuple[str, str] | None:
    """Return the field, and what is wrong with it, where it does not go with a beam search, or needs one."""
    if not sampling.use_beam_search:
        for name, each in SAMPLING_PARAMETERS.items():
            is_given = each.is_of_search and (name == "early_stopping" or sampling.HasField(name))
            if is_given and getattr(sampling, name) != (each.default or 0):
                return name, "needs use_beam_search"
        return None
    if sampling.HasField("structured_outputs"):
        return "structured_outputs", "is not supported with use_beam_search"
    for name in ("beam_width", "best_of", "n"):
        if getattr(sampling, name) > MAX_BEAM_WIDTH:
            return name, f"must be at most {MAX_BEAM_WIDTH} with use_beam_search, got {getattr(sampling, name)}"
    for name, each in SAMPLING_PARAMETERS.items():
        if each.in_search is not None and each.body is not None and (fault := _fault_in_search(sampling, each)):
            return name, fault
    return None


def _fault_in_search(sampling: SamplingParams, each: Option) -> str | None:
    name: Any = each.name
    value = getattr(sampling, name)
    if each.kind in (int, float):
        is_given = not SamplingParams.DESCRIPTOR.fields_by_name[name].has_presence or sampling.HasField(name)
        if not is_given or value in (each.in_search or ()):
            return None
        expected: str = " or ".join(map(str, each.in_search or ()))
    elif not isinstance(value, Sequence | Mapping) or not value:
        return None
    else:
        value = dict(value) if isinstance(value, Mapping) else list(value)
        expected = "{}" if isinstance(value, dict) else "[]"
    return f"must be {expected} with use_beam_search, got {str(value)[:40]}"


def biases(each: Option) -> Check:
    """Accept numbers of a parameter's range for a bounded number of the model's tokens."""

    def check(values: dict[int, float], context: CheckContext) -> str | None:
        if len(values) > _most(each, context):
            return f"at most {_most(each, context)} tokens, got {len(values)}"
        for token_id, bias in values.items():
            if not (each.low or 0) <= bias <= (each.high or 0):
                return f"must be from {each.low:g} to {each.high:g}, got {bias:g} for token {token_id}"
        return _in_vocabulary(list(values), context)

    return check


def texts(each: Option) -> Check:
    """Accept a bounded number of texts that are neither blank nor too long."""
    item = "" if each.body is None else each.body.item

    def check(values: Sequence[str], context: CheckContext) -> str | None:
        most, most_chars = _most(each, context), _most(each, context, of_chars=True)
        if len(values) > most:
            return f"at most {most} {item.rpartition(' ')[2]}s, got {len(values)}"
        for text in values:
            if not text or (each.kind == Sequence[str] and not text.strip()):
                return f"a {item} must not be {'blank' if each.kind == Sequence[str] else 'empty'}"
            if len(text) > most_chars:
                return f"a {item} has at most {most_chars} characters, got {len(text)}"
        return None

    return check


def tokens(each: Option) -> Check:
    """Accept a bounded number of tokens of the model."""

    def check(values: Sequence[int], context: CheckContext) -> str | None:
        if len(values) > _most(each, context):
            return f"at most {_most(each, context)} ids, got {len(values)}"
        return _in_vocabulary(values, context)

    return check


def _in_vocabulary(token_ids: Sequence[int], context: CheckContext) -> str | None:
    for token_id in token_ids:
        if context.vocab_size and token_id >= context.vocab_size:
            return f"{token_id} is not a token of the model (0 to {context.vocab_size - 1})"
    return None


@dataclass(frozen=True)
class Parameter:
    """A sampling parameter of both APIs."""

    name: str
    """The field of `SamplingParams`, and of the OpenAI bodies that share `json_type`."""
    json_type: Any = None
    """Type in OpenAI bodies, beside null. None: each resource has its own form of it, or none."""
    description: str | None = None
    """Meaning, for the OpenAPI document."""
    default: Callable[[], Any] | None = None
    """Value where neither the caller nor the model gives one. None: the field stays unset."""
    has_model_default: bool = False
    """Whether the model card's value comes before `default`."""
    check: Check | None = None
    """What is wrong with a value."""
    from_json: Callable[[Any], Any] | None = None
    """Conversion from `json_type` to what the field of the message takes."""


def _always(value: object) -> Callable[[], Any]:
    return lambda: value


def _texts(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _biases_by_token(values: Mapping[str, float]) -> dict[int, float]:
    for token in values:
        if not (token.isascii() and token.isdigit()) or len(token) > 10:
            raise InvalidRequest("logit_bias", f"expected token ids as names, got {token[:40]!r}")
    return {int(token): bias for token, bias in values.items()}


def _early_stopping(value: bool | str) -> EarlyStopping:
    if isinstance(value, str):
        return EARLY_STOPPING_NEVER
    return EARLY_STOPPING_TRUE if value else EARLY_STOPPING_UNSPECIFIED


_OWN_CHECKS: Mapping[str, Check] = {
    "max_tokens": most_tokens,
    "min_tokens": at_most_max_tokens,
    "best_of": at_least_n,
    "beam_width": at_least_n,
}
"""Of parameters that are bounded by others."""


def _structured(_: Option) -> Check:
    return lambda value, context: constraint_fault(value, context.limits.max_grammar_bytes)


class _Form(NamedTuple):
    """A type of parameters, in bodies."""

    json_type: Any
    check: Callable[[Option], Check]
    from_json: Callable[[Any], Any] | None = None


_FORMS: tuple[tuple[Any, _Form], ...] = (
    (int, _Form(int, in_range)),
    (float, _Form(float, in_range)),
    (bool, _Form(bool, anything)),
    (Sequence[int], _Form(Items[Token], tokens)),
    (Sequence[str], _Form(Items[str], texts)),
    (str | Sequence[str], _Form(Strings, texts, _texts)),
    (Mapping[int, float], _Form(Biases, biases, _biases_by_token)),
    (bool | str, _Form(EarlyStops, anything, _early_stopping)),
    (Any, _Form(StructuredOutputsBody, _structured, constraint_message)),
)
"""By the types of `SamplingFields`."""


def _parameter(each: Option, body: declaration.Body) -> Parameter:
    form = next(form for kind, form in _FORMS if each.kind == kind)
    default = _always(each.default) if body.is_filled else None
    return Parameter(
        each.name,
        None if body.is_own_form else form.json_type,
        each.help,
        default=_drawn_seed if each.name == "seed" else default,
        has_model_default=body.has_model_default,
        check=_OWN_CHECKS.get(each.name) or form.check(each),
        from_json=form.from_json,
    )


def _drawn_seed() -> int:
    return secrets.randbits(63)


PARAMETERS = tuple(_parameter(each, each.body) for each in SAMPLING_PARAMETERS.values() if each.body is not None)
"""Defaults are vLLM's. max_tokens has none here: it depends on the API and on the prompt."""

PARAMETER_NAMES = frozenset(parameter.name for parameter in PARAMETERS)

UNSUPPORTED_PARAMETERS: Mapping[str, tuple[Any, ...]] = {
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "logprob_token_ids": ([],),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "watermarking": (False,),
    "logits_processors": ([],),
}
"""Parameters of vLLM's HTTP API that are refused, each with the values that ask for nothing beside null."""


_FIELDS = SamplingParams.DESCRIPTOR.fields_by_name


def sampling_from_json(values: Mapping[str, Any]) -> SamplingParams:
    """Return the message with these parameters set; None is unset.

    Raises InvalidRequest for a value that the field's type can't hold.
    """
    sampling = SamplingParams()
    for parameter in PARAMETERS:
        name, value = parameter.name, values.get(parameter.name)
        if value is None:
            continue
        if parameter.from_json is not None:
            value = parameter.from_json(value)
        try:
            if isinstance(value, list | tuple):
                getattr(sampling, name).extend(value)
            elif isinstance(value, Message):
                getattr(sampling, name).CopyFrom(value)
            elif isinstance(value, Mapping):
                getattr(sampling, name).update(value)
            else:
                setattr(sampling, name, value)
        except (ValueError, TypeError) as error:
            raise InvalidRequest(name, f"{_short(value)} is out of range") from error
    return sampling


def resolve_sampling(
    given: SamplingParams, defaults: SamplingParams, *, limits: LimitSettings, vocab_size: int
) -> SamplingParams:
    """Return a complete copy of `given`: unset fields take the model's default, then vLLM's; the seed is always set.

    max_tokens stays unset where neither the caller nor the model gives one. Raises InvalidRequest with the field's
    name.
    """
    sampling = SamplingParams()
    sampling.CopyFrom(given)
    for parameter in PARAMETERS:
        _set_default(sampling, parameter, defaults)
    context = CheckContext(sampling, limits, vocab_size)
    for parameter in PARAMETERS:
        _check(parameter, context)
    if (found := beam_search_fault(sampling, context)) is not None:
        raise InvalidRequest(*found)
    if sampling.best_of == sampling.n:
        sampling.ClearField("best_of")
    return sampling


def fit_context(
    sampling: SamplingParams,
    *,
    is_given: bool,
    prompt_lengths: Collection[int],
    max_model_len: int,
    default_model_len: int,
    default: int | None,
    prompt_field: str,
) -> int:
    """Set max_tokens to what the context leaves where it is open or only a default.

    Returns the most tokens of a prompt and its output together, where long prompts leave less than max_tokens; else 0.

    Args:
        sampling: resolved parameters; changed in place.
        is_given: whether the caller gave max_tokens: more than the context has is an error then; more than the prompt
            leaves of it is cut, as a default is.
        prompt_lengths: in tokens; at least one.
        max_model_len: tokens of prompt and output together.
        default_model_len: likewise where max_tokens is open and the prompt leaves half of it; 0: max_model_len.
        default: max_tokens where the caller has none, and the model none or a larger one; None is what the model has,
            or what the context leaves.
        prompt_field: that errors name.

    Raises ContextExceeded, and InvalidRequest where min_tokens no longer fits.
    """
    longest, shortest, total = max(prompt_lengths), min(prompt_lengths), max_model_len
    if is_given and sampling.max_tokens > max_model_len:
        raise ContextExceeded(
            "max_tokens",
            prompt_field=prompt_field,
            max_model_len=max_model_len,
            num_tokens=longest,
            max_tokens=sampling.max_tokens,
        )
    wanted = sampling.max_tokens if sampling.HasField("max_tokens") else default
    if wanted is not None and default is not None and not is_given:
        wanted = min(wanted, default)
    if wanted is None and default_model_len - longest >= max(longest, sampling.min_tokens):
        total = default_model_len
    least, most = (min(total - length, total if wanted is None else wanted) for length in (longest, shortest))
    sampling.max_tokens = least
    if (fault := min_tokens_fault(sampling)) is not None:
        raise InvalidRequest("min_tokens", fault)
    sampling.max_tokens = most
    return total if most > least else 0


def _set_default(sampling: SamplingParams, parameter: Parameter, defaults: SamplingParams) -> None:
    name: Any = parameter.name
    if not _FIELDS[name].has_presence or sampling.HasField(name):
        return
    # A model's defaults are for sampling; a search takes its own probabilities.
    is_of_search = sampling.use_beam_search and name != "max_tokens"
    if parameter.has_model_default and defaults.HasField(name) and not is_of_search:
        setattr(sampling, name, getattr(defaults, name))
    elif parameter.default is not None:
        setattr(sampling, name, parameter.default())


def _check(parameter: Parameter, context: CheckContext) -> None:
    name: Any = parameter.name
    field = _FIELDS[name]
    if field.has_presence and not context.sampling.HasField(name):
        return
    value = getattr(context.sampling, name)
    if field.is_repeated and not value:
        return
    if parameter.check is not None and (fault := parameter.check(value, context)) is not None:
        raise InvalidRequest(name, fault)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
