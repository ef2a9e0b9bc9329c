from pagestream.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ApiForm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    API_FORM_UNSPECIFIED: _ClassVar[ApiForm]
    API_FORM_GRPC: _ClassVar[ApiForm]
    API_FORM_COMPLETIONS: _ClassVar[ApiForm]
    API_FORM_CHAT_COMPLETIONS: _ClassVar[ApiForm]
    API_FORM_EMBEDDINGS: _ClassVar[ApiForm]
    API_FORM_SCORE: _ClassVar[ApiForm]
    API_FORM_RERANK: _ClassVar[ApiForm]
    API_FORM_RESPONSES: _ClassVar[ApiForm]
    API_FORM_MESSAGES: _ClassVar[ApiForm]
    API_FORM_CLASSIFY: _ClassVar[ApiForm]

class PoolingKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_KIND_UNSPECIFIED: _ClassVar[PoolingKind]
    POOLING_KIND_LAST: _ClassVar[PoolingKind]
    POOLING_KIND_MEAN: _ClassVar[PoolingKind]
    POOLING_KIND_CLS: _ClassVar[PoolingKind]

class LabelActivation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LABEL_ACTIVATION_UNSPECIFIED: _ClassVar[LabelActivation]
    LABEL_ACTIVATION_SOFTMAX: _ClassVar[LabelActivation]
    LABEL_ACTIVATION_SIGMOID: _ClassVar[LabelActivation]
    LABEL_ACTIVATION_IDENTITY: _ClassVar[LabelActivation]

class TextBesideCalls(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TEXT_BESIDE_CALLS_UNSPECIFIED: _ClassVar[TextBesideCalls]
    TEXT_BESIDE_CALLS_BEFORE: _ClassVar[TextBesideCalls]
    TEXT_BESIDE_CALLS_LEFT_OUT: _ClassVar[TextBesideCalls]

class SystemPlace(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SYSTEM_PLACE_UNSPECIFIED: _ClassVar[SystemPlace]
    SYSTEM_PLACE_FIRST: _ClassVar[SystemPlace]
    SYSTEM_PLACE_NOWHERE: _ClassVar[SystemPlace]
API_FORM_UNSPECIFIED: ApiForm
API_FORM_GRPC: ApiForm
API_FORM_COMPLETIONS: ApiForm
API_FORM_CHAT_COMPLETIONS: ApiForm
API_FORM_EMBEDDINGS: ApiForm
API_FORM_SCORE: ApiForm
API_FORM_RERANK: ApiForm
API_FORM_RESPONSES: ApiForm
API_FORM_MESSAGES: ApiForm
API_FORM_CLASSIFY: ApiForm
POOLING_KIND_UNSPECIFIED: PoolingKind
POOLING_KIND_LAST: PoolingKind
POOLING_KIND_MEAN: PoolingKind
POOLING_KIND_CLS: PoolingKind
LABEL_ACTIVATION_UNSPECIFIED: LabelActivation
LABEL_ACTIVATION_SOFTMAX: LabelActivation
LABEL_ACTIVATION_SIGMOID: LabelActivation
LABEL_ACTIVATION_IDENTITY: LabelActivation
TEXT_BESIDE_CALLS_UNSPECIFIED: TextBesideCalls
TEXT_BESIDE_CALLS_BEFORE: TextBesideCalls
TEXT_BESIDE_CALLS_LEFT_OUT: TextBesideCalls
SYSTEM_PLACE_UNSPECIFIED: SystemPlace
SYSTEM_PLACE_FIRST: SystemPlace
SYSTEM_PLACE_NOWHERE: SystemPlace

class AnswerForm(_message.Message):
    __slots__ = ("api", "created", "include_usage", "echo_texts", "top_logprobs", "echo_logprobs", "vectors", "prompt_logprobs", "first_tokens", "output", "response", "continuous_usage", "token_ids", "tokens_by_id", "constraint_field")
    API_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_USAGE_FIELD_NUMBER: _ClassVar[int]
    ECHO_TEXTS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ECHO_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    CONTINUOUS_USAGE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_BY_ID_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_FIELD_NUMBER: _ClassVar[int]
    api: ApiForm
    created: int
    include_usage: bool
    echo_texts: _containers.RepeatedScalarFieldContainer[str]
    top_logprobs: int
    echo_logprobs: bool
    vectors: VectorForm
    prompt_logprobs: int
    first_tokens: _containers.RepeatedScalarFieldContainer[str]
    output: OutputForm
    response: ResponseForm
    continuous_usage: bool
    token_ids: bool
    tokens_by_id: bool
    constraint_field: str
    def __init__(self, api: _Optional[_Union[ApiForm, str]] = ..., created: _Optional[int] = ..., include_usage: _Optional[bool] = ..., echo_texts: _Optional[_Iterable[str]] = ..., top_logprobs: _Optional[int] = ..., echo_logprobs: _Optional[bool] = ..., vectors: _Optional[_Union[VectorForm, _Mapping]] = ..., prompt_logprobs: _Optional[int] = ..., first_tokens: _Optional[_Iterable[str]] = ..., output: _Optional[_Union[OutputForm, _Mapping]] = ..., response: _Optional[_Union[ResponseForm, _Mapping]] = ..., continuous_usage: _Optional[bool] = ..., token_ids: _Optional[bool] = ..., tokens_by_id: _Optional[bool] = ..., constraint_field: _Optional[str] = ...) -> None: ...

class ResponseForm(_message.Message):
    __slots__ = ("members_zlib", "input_zlib", "background", "unstored")
    MEMBERS_ZLIB_FIELD_NUMBER: _ClassVar[int]
    INPUT_ZLIB_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    UNSTORED_FIELD_NUMBER: _ClassVar[int]
    members_zlib: bytes
    input_zlib: bytes
    background: bool
    unstored: bool
    def __init__(self, members_zlib: _Optional[bytes] = ..., input_zlib: _Optional[bytes] = ..., background: _Optional[bool] = ..., unstored: _Optional[bool] = ...) -> None: ...

class OutputForm(_message.Message):
    __slots__ = ("tool_format", "tool_names", "one_call", "reasoning_format", "opening", "typed_tools", "hides_reasoning", "keeps_blanks", "reasoning_marks", "own_format")
    TOOL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    TOOL_NAMES_FIELD_NUMBER: _ClassVar[int]
    ONE_CALL_FIELD_NUMBER: _ClassVar[int]
    REASONING_FORMAT_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    TYPED_TOOLS_FIELD_NUMBER: _ClassVar[int]
    HIDES_REASONING_FIELD_NUMBER: _ClassVar[int]
    KEEPS_BLANKS_FIELD_NUMBER: _ClassVar[int]
    REASONING_MARKS_FIELD_NUMBER: _ClassVar[int]
    OWN_FORMAT_FIELD_NUMBER: _ClassVar[int]
    tool_format: str
    tool_names: _containers.RepeatedScalarFieldContainer[str]
    one_call: bool
    reasoning_format: str
    opening: str
    typed_tools: _containers.RepeatedCompositeFieldContainer[TypedTool]
    hides_reasoning: bool
    keeps_blanks: bool
    reasoning_marks: str
    own_format: str
    def __init__(self, tool_format: _Optional[str] = ..., tool_names: _Optional[_Iterable[str]] = ..., one_call: _Optional[bool] = ..., reasoning_format: _Optional[str] = ..., opening: _Optional[str] = ..., typed_tools: _Optional[_Iterable[_Union[TypedTool, _Mapping]]] = ..., hides_reasoning: _Optional[bool] = ..., keeps_blanks: _Optional[bool] = ..., reasoning_marks: _Optional[str] = ..., own_format: _Optional[str] = ...) -> None: ...

class TypedTool(_message.Message):
    __slots__ = ("name", "parameters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    parameters: _containers.RepeatedCompositeFieldContainer[TypedParameter]
    def __init__(self, name: _Optional[str] = ..., parameters: _Optional[_Iterable[_Union[TypedParameter, _Mapping]]] = ...) -> None: ...

class TypedParameter(_message.Message):
    __slots__ = ("name", "types")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPES_FIELD_NUMBER: _ClassVar[int]
    name: str
    types: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., types: _Optional[_Iterable[str]] = ...) -> None: ...

class VectorForm(_message.Message):
    __slots__ = ("base64", "num_queries", "top_n", "documents", "labels")
    BASE64_FIELD_NUMBER: _ClassVar[int]
    NUM_QUERIES_FIELD_NUMBER: _ClassVar[int]
    TOP_N_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    base64: bool
    num_queries: int
    top_n: int
    documents: _containers.RepeatedScalarFieldContainer[str]
    labels: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, base64: _Optional[bool] = ..., num_queries: _Optional[int] = ..., top_n: _Optional[int] = ..., documents: _Optional[_Iterable[str]] = ..., labels: _Optional[_Iterable[str]] = ...) -> None: ...

class RequestSpec(_message.Message):
    __slots__ = ("request_id", "model", "tenant", "prompts", "sampling", "priority", "deadline_ms", "on_disconnect", "disconnect_grace_ms", "answer", "client_request_id", "traceparent", "tracestate", "idempotency_key", "seed_for_each_prompt", "cache_salt", "ends_when_accepted", "adapter", "pooling", "credential", "reasoning", "max_total_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    ON_DISCONNECT_FIELD_NUMBER: _ClassVar[int]
    DISCONNECT_GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    CLIENT_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    SEED_FOR_EACH_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ENDS_WHEN_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    tenant: str
    prompts: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenIds]
    sampling: _inference_pb2.SamplingParams
    priority: int
    deadline_ms: int
    on_disconnect: _inference_pb2.OnDisconnect
    disconnect_grace_ms: int
    answer: AnswerForm
    client_request_id: str
    traceparent: str
    tracestate: str
    idempotency_key: str
    seed_for_each_prompt: bool
    cache_salt: bytes
    ends_when_accepted: bool
    adapter: Adapter
    pooling: Pooling
    credential: str
    reasoning: ReasoningMarks
    max_total_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., prompts: _Optional[_Iterable[_Union[_inference_pb2.TokenIds, _Mapping]]] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., on_disconnect: _Optional[_Union[_inference_pb2.OnDisconnect, str]] = ..., disconnect_grace_ms: _Optional[int] = ..., answer: _Optional[_Union[AnswerForm, _Mapping]] = ..., client_request_id: _Optional[str] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., idempotency_key: _Optional[str] = ..., seed_for_each_prompt: _Optional[bool] = ..., cache_salt: _Optional[bytes] = ..., ends_when_accepted: _Optional[bool] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., pooling: _Optional[_Union[Pooling, _Mapping]] = ..., credential: _Optional[str] = ..., reasoning: _Optional[_Union[ReasoningMarks, _Mapping]] = ..., max_total_tokens: _Optional[int] = ...) -> None: ...

class ReasoningMarks(_message.Message):
    __slots__ = ("end", "openings")
    END_FIELD_NUMBER: _ClassVar[int]
    OPENINGS_FIELD_NUMBER: _ClassVar[int]
    end: _inference_pb2.TokenIds
    openings: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenIds]
    def __init__(self, end: _Optional[_Union[_inference_pb2.TokenIds, _Mapping]] = ..., openings: _Optional[_Iterable[_Union[_inference_pb2.TokenIds, _Mapping]]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "model", "path", "revision", "created")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    path: str
    revision: str
    created: int
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., path: _Optional[str] = ..., revision: _Optional[str] = ..., created: _Optional[int] = ...) -> None: ...

class Pooling(_message.Message):
    __slots__ = ("kind", "dimensions", "normalize", "activation")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    kind: PoolingKind
    dimensions: int
    normalize: bool
    activation: LabelActivation
    def __init__(self, kind: _Optional[_Union[PoolingKind, str]] = ..., dimensions: _Optional[int] = ..., normalize: _Optional[bool] = ..., activation: _Optional[_Union[LabelActivation, str]] = ...) -> None: ...

class EmbeddingCard(_message.Message):
    __slots__ = ("size", "pooling", "is_matryoshka", "dimensions", "unsupported", "labels", "joins_pairs")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    IS_MATRYOSHKA_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    UNSUPPORTED_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    JOINS_PAIRS_FIELD_NUMBER: _ClassVar[int]
    size: int
    pooling: Pooling
    is_matryoshka: bool
    dimensions: _containers.RepeatedScalarFieldContainer[int]
    unsupported: str
    labels: _containers.RepeatedScalarFieldContainer[str]
    joins_pairs: bool
    def __init__(self, size: _Optional[int] = ..., pooling: _Optional[_Union[Pooling, _Mapping]] = ..., is_matryoshka: _Optional[bool] = ..., dimensions: _Optional[_Iterable[int]] = ..., unsupported: _Optional[str] = ..., labels: _Optional[_Iterable[str]] = ..., joins_pairs: _Optional[bool] = ...) -> None: ...

class ModelCard(_message.Message):
    __slots__ = ("name", "tokenizer_json_zlib", "chat_template", "special_tokens", "max_model_len", "vocab_size", "eos_token_ids", "architecture", "revision", "default_sampling", "default_model_len", "deterministic", "embedding", "takes_adapters", "tool_call_parser", "reasoning_parser", "takes_output_constraints", "chat_shapes", "chat_template_kwargs")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_JSON_ZLIB_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    TAKES_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_PARSER_FIELD_NUMBER: _ClassVar[int]
    REASONING_PARSER_FIELD_NUMBER: _ClassVar[int]
    TAKES_OUTPUT_CONSTRAINTS_FIELD_NUMBER: _ClassVar[int]
    CHAT_SHAPES_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    tokenizer_json_zlib: bytes
    chat_template: str
    special_tokens: _containers.ScalarMap[str, str]
    max_model_len: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    architecture: str
    revision: str
    default_sampling: _inference_pb2.SamplingParams
    default_model_len: int
    deterministic: bool
    embedding: EmbeddingCard
    takes_adapters: bool
    tool_call_parser: str
    reasoning_parser: str
    takes_output_constraints: bool
    chat_shapes: ChatShapes
    chat_template_kwargs: str
    def __init__(self, name: _Optional[str] = ..., tokenizer_json_zlib: _Optional[bytes] = ..., chat_template: _Optional[str] = ..., special_tokens: _Optional[_Mapping[str, str]] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., architecture: _Optional[str] = ..., revision: _Optional[str] = ..., default_sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., default_model_len: _Optional[int] = ..., deterministic: _Optional[bool] = ..., embedding: _Optional[_Union[EmbeddingCard, _Mapping]] = ..., takes_adapters: _Optional[bool] = ..., tool_call_parser: _Optional[str] = ..., reasoning_parser: _Optional[str] = ..., takes_output_constraints: _Optional[bool] = ..., chat_shapes: _Optional[_Union[ChatShapes, _Mapping]] = ..., chat_template_kwargs: _Optional[str] = ...) -> None: ...

class ChatShapes(_message.Message):
    __slots__ = ("parts_only", "takes_part", "takes_parts", "text_arguments", "null_beside_calls", "no_blank_beside_calls", "text_beside_calls", "one_call", "named_results", "system", "alternates", "no_user_after_result", "refused_efforts", "no_developer")
    PARTS_ONLY_FIELD_NUMBER: _ClassVar[int]
    TAKES_PART_FIELD_NUMBER: _ClassVar[int]
    TAKES_PARTS_FIELD_NUMBER: _ClassVar[int]
    TEXT_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    NULL_BESIDE_CALLS_FIELD_NUMBER: _ClassVar[int]
    NO_BLANK_BESIDE_CALLS_FIELD_NUMBER: _ClassVar[int]
    TEXT_BESIDE_CALLS_FIELD_NUMBER: _ClassVar[int]
    ONE_CALL_FIELD_NUMBER: _ClassVar[int]
    NAMED_RESULTS_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FIELD_NUMBER: _ClassVar[int]
    ALTERNATES_FIELD_NUMBER: _ClassVar[int]
    NO_USER_AFTER_RESULT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_EFFORTS_FIELD_NUMBER: _ClassVar[int]
    NO_DEVELOPER_FIELD_NUMBER: _ClassVar[int]
    parts_only: _containers.RepeatedScalarFieldContainer[str]
    takes_part: _containers.RepeatedScalarFieldContainer[str]
    takes_parts: _containers.RepeatedScalarFieldContainer[str]
    text_arguments: bool
    null_beside_calls: bool
    no_blank_beside_calls: bool
    text_beside_calls: TextBesideCalls
    one_call: bool
    named_results: bool
    system: SystemPlace
    alternates: bool
    no_user_after_result: bool
    refused_efforts: _containers.RepeatedScalarFieldContainer[str]
    no_developer: bool
    def __init__(self, parts_only: _Optional[_Iterable[str]] = ..., takes_part: _Optional[_Iterable[str]] = ..., takes_parts: _Optional[_Iterable[str]] = ..., text_arguments: _Optional[bool] = ..., null_beside_calls: _Optional[bool] = ..., no_blank_beside_calls: _Optional[bool] = ..., text_beside_calls: _Optional[_Union[TextBesideCalls, str]] = ..., one_call: _Optional[bool] = ..., named_results: _Optional[bool] = ..., system: _Optional[_Union[SystemPlace, str]] = ..., alternates: _Optional[bool] = ..., no_user_after_result: _Optional[bool] = ..., refused_efforts: _Optional[_Iterable[str]] = ..., no_developer: _Optional[bool] = ...) -> None: ...

class LogSlice(_message.Message):
    __slots__ = ("request_id", "first_index", "entries", "previous_digest", "fingerprint")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    first_index: int
    entries: _containers.RepeatedCompositeFieldContainer[LogEntry]
    previous_digest: str
    fingerprint: str
    def __init__(self, request_id: _Optional[str] = ..., first_index: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[LogEntry, _Mapping]]] = ..., previous_digest: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class LogEntry(_message.Message):
    __slots__ = ("choice", "digest", "text", "token_id", "finish", "end", "prompt_part", "logprobs")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PROMPT_PART_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    digest: str
    text: str
    token_id: int
    finish: ChoiceFinish
    end: LogEnd
    prompt_part: PromptPart
    logprobs: _inference_pb2.TokenLogprobs
    def __init__(self, choice: _Optional[int] = ..., digest: _Optional[str] = ..., text: _Optional[str] = ..., token_id: _Optional[int] = ..., finish: _Optional[_Union[ChoiceFinish, _Mapping]] = ..., end: _Optional[_Union[LogEnd, _Mapping]] = ..., prompt_part: _Optional[_Union[PromptPart, _Mapping]] = ..., logprobs: _Optional[_Union[_inference_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...

class PromptPart(_message.Message):
    __slots__ = ("end", "logprobs", "embedding")
    END_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    end: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    embedding: bytes
    def __init__(self, end: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., embedding: _Optional[bytes] = ...) -> None: ...

class ChoiceFinish(_message.Message):
    __slots__ = ("reason", "stop_reason")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    reason: _inference_pb2.FinishReason
    stop_reason: str
    def __init__(self, reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., stop_reason: _Optional[str] = ...) -> None: ...

class LogEnd(_message.Message):
    __slots__ = ("reason", "usage", "error", "ended_at")
    REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    reason: _inference_pb2.FinishReason
    usage: _inference_pb2.Usage
    error: _inference_pb2.RequestError
    ended_at: int
    def __init__(self, reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_inference_pb2.Usage, _Mapping]] = ..., error: _Optional[_Union[_inference_pb2.RequestError, _Mapping]] = ..., ended_at: _Optional[int] = ...) -> None: ...

class WakeUp(_message.Message):
    __slots__ = ("slices",)
    SLICES_FIELD_NUMBER: _ClassVar[int]
    slices: _containers.RepeatedCompositeFieldContainer[LogSlice]
    def __init__(self, slices: _Optional[_Iterable[_Union[LogSlice, _Mapping]]] = ...) -> None: ...

class PackedWakeUp(_message.Message):
    __slots__ = ("slices",)
    SLICES_FIELD_NUMBER: _ClassVar[int]
    slices: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, slices: _Optional[_Iterable[bytes]] = ...) -> None: ...

class BlockMap(_message.Message):
    __slots__ = ("num_blocks", "num_free", "num_cached", "block_size", "cells", "holders", "sequences", "num_running", "num_waiting", "num_prompt_tokens", "num_generated_tokens", "at_ms")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_free: int
    num_cached: int
    block_size: int
    cells: _containers.RepeatedScalarFieldContainer[int]
    holders: _containers.RepeatedCompositeFieldContainer[BlockHolders]
    sequences: _containers.RepeatedCompositeFieldContainer[RunningSequence]
    num_running: int
    num_waiting: int
    num_prompt_tokens: int
    num_generated_tokens: int
    at_ms: int
    def __init__(self, num_blocks: _Optional[int] = ..., num_free: _Optional[int] = ..., num_cached: _Optional[int] = ..., block_size: _Optional[int] = ..., cells: _Optional[_Iterable[int]] = ..., holders: _Optional[_Iterable[_Union[BlockHolders, _Mapping]]] = ..., sequences: _Optional[_Iterable[_Union[RunningSequence, _Mapping]]] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_generated_tokens: _Optional[int] = ..., at_ms: _Optional[int] = ...) -> None: ...

class BlockHolders(_message.Message):
    __slots__ = ("sequences", "num_references")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_REFERENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedScalarFieldContainer[int]
    num_references: int
    def __init__(self, sequences: _Optional[_Iterable[int]] = ..., num_references: _Optional[int] = ...) -> None: ...

class RunningSequence(_message.Message):
    __slots__ = ("request_id", "choice", "tenant", "num_prompt_tokens", "num_tokens", "num_computed_tokens", "num_blocks", "is_prefill")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IS_PREFILL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    tenant: str
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_blocks: int
    is_prefill: bool
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ..., tenant: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., is_prefill: _Optional[bool] = ...) -> None: ...
