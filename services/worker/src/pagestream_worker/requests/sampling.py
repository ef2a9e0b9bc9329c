"""The engine's sampling parameters of a request from its wire message."""

from pagestream.v1.inference_pb2 import (
    EARLY_STOPPING_NEVER,
    EARLY_STOPPING_TRUE,
    EARLY_STOPPING_UNSPECIFIED,
    StructuredOutputs,
)
from pagestream.v1.inference_pb2 import SamplingParams as SamplingMessage
from pagestream.v1.records_pb2 import (
    POOLING_KIND_CLS,
    POOLING_KIND_LAST,
    POOLING_KIND_MEAN,
    POOLING_KIND_UNSPECIFIED,
    RequestSpec,
)
from pagestream.v1.records_pb2 import (
    ReasoningMarks as ReasoningMessage,
)
from pagestream_engine.errors import InvalidRequest
from pagestream_engine.sampling_params import ReasoningMarks, SamplingParams, StructuredOutputsParams, child_seed

FIELDS_WITH_PRESENCE = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "beam_width",
    "length_penalty",
)
_EARLY_STOPPING: dict[int, bool | str] = {
    EARLY_STOPPING_UNSPECIFIED: False,
    EARLY_STOPPING_TRUE: True,
    EARLY_STOPPING_NEVER: "never",
}
_POOLINGS: dict[int, str] = {
    POOLING_KIND_UNSPECIFIED: "last",
    POOLING_KIND_LAST: "last",
    POOLING_KIND_MEAN: "mean",
    POOLING_KIND_CLS: "cls",
}


def child_of(spec: RequestSpec, choice: int) -> int:
    """Return which child of the request's seed a choice gets.

    Siblings of a prompt always differ. Prompts differ where the gateway chose the seed; with a client's own seed each
    prompt gets what it would get alone.
    """
    return choice if spec.seed_for_each_prompt else choice % max(1, spec.sampling.n)


def sampling_of(spec: RequestSpec) -> SamplingParams:
    """Return the parameters that all choices of a request come from, see `sampling_of_child`.

    Raises:
        InvalidRequest: the request asks for what this engine doesn't support.
    """
    if not spec.HasField("pooling"):
        return _from_message(spec.sampling, _marks(spec.reasoning) if spec.HasField("reasoning") else None)
    kind = _POOLINGS.get(spec.pooling.kind)
    if kind is None:
        raise InvalidRequest(f"pooling: given kind {spec.pooling.kind}, which this engine does not know")
    return SamplingParams(max_tokens=0, temperature=0.0, seed=spec.sampling.seed, pooling=kind)


def sampling_of_child(params: SamplingParams, child: int) -> SamplingParams:
    """Return the parameters of one choice of a request: `n` is 1, the seed is that choice's own, or with `best_of` its
    prompt's. They are not checked again.

    Args:
        params: of the request, from `sampling_of`.
        child: see `child_of`.
    """
    if params.pooling is not None:
        return params
    if params.has_best_of:  # All choices of a prompt have its seed, from which those that take part get theirs.
        child -= child % params.n
    return params.for_child(child_seed(params.seed or 0, child), 0)


def _from_message(message: SamplingMessage, reasoning: ReasoningMarks | None) -> SamplingParams:
    given = {name: getattr(message, name) for name in FIELDS_WITH_PRESENCE if message.HasField(name)}
    if message.early_stopping not in _EARLY_STOPPING:
        raise InvalidRequest(f"early_stopping: given {message.early_stopping}, which this engine does not know")
    constraint = _constraint(message.structured_outputs, reasoning) if message.HasField("structured_outputs") else None
    return SamplingParams(
        n=max(1, message.n),
        seed=message.seed,
        best_of=message.best_of if message.HasField("best_of") else None,
        use_beam_search=message.use_beam_search,
        early_stopping=_EARLY_STOPPING[message.early_stopping],
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        allowed_token_ids=tuple(message.allowed_token_ids) or None,
        bad_words=tuple(message.bad_words) or None,
        ignore_eos=message.ignore_eos,
        include_stop_str_in_output=message.include_stop_str_in_output,
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
        logit_bias=dict(message.logit_bias) or None,
        structured_outputs=constraint,
        **given,
    )


def _constraint(message: StructuredOutputs, reasoning: ReasoningMarks | None) -> StructuredOutputsParams:
    given = message.WhichOneof("constraint")
    return StructuredOutputsParams(
        json=message.json if given == "json" else None,
        regex=message.regex if given == "regex" else None,
        choice=tuple(message.choice.texts) if given == "choice" else None,
        grammar=message.grammar if given == "grammar" else None,
        json_object=message.json_object if given == "json_object" else None,
        disable_any_whitespace=message.disable_any_whitespace,
        reasoning=reasoning,
    )


def _marks(message: ReasoningMessage) -> ReasoningMarks:
    return ReasoningMarks(tuple(message.end.ids), tuple(tuple(opening.ids) for opening in message.openings))
