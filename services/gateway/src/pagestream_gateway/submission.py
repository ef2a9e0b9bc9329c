"""Submit a request: turn its draft into the record that its model's queue carries, and write that durably.

A draft is checked, rendered and tokenized for its model; both APIs fill one, so that they can't disagree about what is
allowed. The salt of its prefix blocks decides who may see, by a count or a time, that its prompt was computed before.
"""

import hashlib
import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from pagestream.v1.inference_pb2 import ON_DISCONNECT_CANCEL, ON_DISCONNECT_UNSPECIFIED, SamplingParams, TokenIds
from pagestream.v1.records_pb2 import API_FORM_GRPC, Adapter, Pooling, RequestSpec
from pagestream_streams import Broker, GatewaySession, enlist
from pagestream_streams.errors import LogsFull, ModelNotFound, RateLimited, RequestNotFound
from pagestream_streams.protocol.keys import model_tag, parse_request_id
from pagestream_streams.protocol.records import num_sequences
from pagestream_telemetry.tracing import TraceContext

from pagestream_gateway.auth.identity import Identity
from pagestream_gateway.calls import Call, RedisTimeout
from pagestream_gateway.errors import InvalidRequest, RequestDiffers, UnsupportedField
from pagestream_gateway.limits import NO_RULES, TenantLimits, TenantMetrics
from pagestream_gateway.models import LoadedModel, Models
from pagestream_gateway.output_formats import may_call, shows_special_tokens, with_calls
from pagestream_gateway.pooling import (
    check_inputs,
    is_cross_encoder,
    resolve_pooling,
    sampling_of_vectors,
)
from pagestream_gateway.request import AskedPooling, ChatPrompt, Draft, TextPrompt, TokenPrompt
from pagestream_gateway.sampling import fit_context, resolve_sampling
from pagestream_gateway.settings import PREFIX_SHARING_ALL, PRIORITIES, CacheSettings, LimitSettings, Settings
from pagestream_gateway.text.encoder import PIECE_CHARS, Encoded, EncoderPool, EncodingCache, EncodingJob, Preparation
from pagestream_gateway.text.prompts import (
    cut_prompts,
    echo_of,
    encoding_pairs,
    job_or_ids,
    most_tokens,
    truncation_of,
    with_short_texts,
)

logger = logging.getLogger(__name__)

_SALT_BYTES = 16
_NEW_CONSTRAINTS = ("allowed_token_ids", "bad_words")
"""Parameters that engines would skip whose card has no `takes_output_constraints`."""
_MOST_SHOWN_IDS = 2**20  # of prompts in an answer: about 7 MB
_FEW_TOKENS = 4096  # are checked in less time than a thread takes to answer


@dataclass(frozen=True)
class Submission:
    """Accepts requests. Nothing of an accepted request stays here: all of it is in Redis."""

    broker: Broker
    session: GatewaySession
    models: Models
    pool: EncoderPool
    limit: RedisTimeout
    settings: Settings
    tenants: TenantLimits
    metrics: TenantMetrics

    async def submit(self, draft: Draft, identity: Identity, call: Call) -> RequestSpec:
        """Check a request and accept it durably.

        Returns what runs: an earlier request where the idempotency key joins this one to it. Raises InvalidRequest,
        ModelNotFound, QueueFull, RateLimited, IdempotencyConflict, Overloaded, Unavailable. An accepted request that is
        never followed counts as one without a reader.
        """
        try:
            return await self._submit(draft, identity, call)
        except RateLimited as error:
            self.metrics.refused(identity.tenant, error.rate.name)
            raise

    async def _submit(self, draft: Draft, identity: Identity, call: Call) -> RequestSpec:
        tenant = identity.tenant
        if self.session.rate_limiter.held and not draft.idempotency_key:  # else it may join an earlier request
            self.session.rate_limiter.check(tenant, identity.key)
        model, spec = await self._prepared(draft, identity)
        self._set_caller(spec, draft, identity, call.context)
        placing = self.session.place(model.name, spec.prompts[0].ids, tenant, cache_salt=spec.cache_salt)
        spec.request_id = await self.limit.wait(placing)
        is_given, note = draft.sampling.HasField("max_tokens"), call.set_rates
        if not draft.idempotency_key:
            await self.limit.wait(self.session.accept(spec, is_length_given=is_given, on_rates=note))
            accepted = spec
        else:
            accepting = self.session.accept_once(
                spec, body_digest=draft.body_digest, is_length_given=is_given, on_rates=note
            )
            accepted = await self.limit.wait(accepting)
        call.accepted(accepted)
        if draft.is_listed:
            await enlist(self.broker, accepted.request_id, tenant)
        logger.info(
            "accepted",
            extra={
                "request_id": accepted.request_id,
                "tenant": tenant,
                "key": identity.key,
                "model": model.name,
                "prompt_tokens": sum(len(prompt.ids) for prompt in spec.prompts),
                "choices": len(spec.prompts) * spec.sampling.n,
            },
        )
        return accepted

    async def submit_again(
        self, draft: Draft, identity: Identity, request_id: str, call: Call, *, is_compared: bool = False
    ) -> RequestSpec:
        """Accept a request that Redis has lost, under the id that it had; one that is there stays as it is.

        The draft must have the seed of the first time, its own or the chosen one, so that the same tokens follow.
        Raises InvalidRequest, ModelNotFound, QueueFull, Unavailable, RequestNotFound for an id that is malformed, of
        another model, or another tenant's, and where `is_compared` is set RequestDiffers for one that is there with
        other prompts or sampling parameters.
        """
        if not draft.sampling.HasField("seed") and draft.chosen_seed is None:
            raise InvalidRequest("seed", "is needed: repeat the seed that the first answer gave")
        tenant = identity.tenant
        model, spec = await self._prepared(draft, identity)
        name = parse_request_id(request_id)
        partitions = await self.limit.wait(self.broker.partitions(model.name))
        if (
            name is None
            or name.model_tag != model_tag(model.name)
            or name.partition >= partitions
            or not name.is_of(tenant)
        ):
            raise RequestNotFound(request_id)
        self._set_caller(spec, draft, identity, call.context)
        spec.request_id = request_id
        is_given = draft.sampling.HasField("max_tokens")
        accepting = self.session.accept(spec, is_length_given=is_given, on_rates=call.set_rates)
        found: RequestSpec | None = None
        try:
            if not await self.limit.wait(accepting):  # another reader was sooner
                found = await self.limit.wait(self.broker.spec(request_id, tenant))
        except (RateLimited, LogsFull) as error:  # bounds of new requests, which don't concern one that is there
            found = await self._known(request_id, tenant)
            if found is None:
                if isinstance(error, RateLimited):
                    self.metrics.refused(tenant, error.rate.name)
                raise
        if found is not None:
            if is_compared and _asked(found) != _asked(spec):
                raise RequestDiffers(request_id)
            return found
        call.accepted(spec)
        await enlist(self.broker, request_id, tenant)
        logger.warning("accepted again", extra={"request_id": request_id, "tenant": tenant, "model": model.name})
        return spec

    async def tokens(self, draft: Draft, identity: Identity) -> tuple[LoadedModel, Sequence[int]]:
        """Return the model and the tokens of a draft's one prompt, also where they are more than fit it.

        Nothing is accepted. Raises as `submit` does.
        """
        model, spec = await self._prepared(replace(draft, is_counted=True), identity)
        return model, spec.prompts[0].ids

    async def resolve(self, name: str, identity: Identity) -> LoadedModel:
        """Return a model that a caller may use. Raises as Models.resolve; ModelNotFound also where it may not."""
        served = self.models.aliases.get(name, name)
        if not name:
            served = await self.models.default_name(lambda each: self.tenants.allows(identity, each))
        elif self.tenants.rules is not NO_RULES and not self.tenants.allows(identity, served):
            raise ModelNotFound(name)
        return await self.models.resolve(served)

    async def _prepared(self, draft: Draft, identity: Identity) -> tuple[LoadedModel, RequestSpec]:
        """Return the model and the record of a request, without what its caller and its call decide."""
        limits = self.settings.limits
        model = await self.resolve(checked_draft(draft, limits).model, identity)
        if _is_quick(draft):
            return model, prepare(draft, model, limits)
        scope = cache_salt(identity.tenant, draft.cache_salt, self.settings.cache)
        preparation = preparing(draft, model, limits, scope)
        cuts_long_texts = draft.pooling is not None and _cuts_long_texts(draft, draft.pooling)
        return model, await self.pool.prepare(preparation, model.encoder, cuts_long_texts=cuts_long_texts)

    async def _known(self, request_id: str, tenant: str) -> RequestSpec | None:
        try:
            return await self.limit.wait(self.broker.spec(request_id, tenant))
        except RequestNotFound:
            return None

    def _set_caller(self, spec: RequestSpec, draft: Draft, identity: Identity, trace: TraceContext) -> None:
        """Set what the caller and the call of a request decide: whose it is, its class, its salt, its trace."""
        tenant, settings = identity.tenant, self.settings
        spec.tenant = tenant
        spec.credential = " ".join(identity.key.split())
        spec.disconnect_grace_ms = round(settings.stream.disconnect_grace_s * 1000)
        classes, spec.priority = settings.classes, draft.priority
        if classes.first or classes.first_of or identity.best_class:
            spec.priority = classes.allowed(tenant, draft.priority, identity.best_class)
        salt = cache_salt(tenant, draft.cache_salt, settings.cache)
        spec.cache_salt = adapted_salt(salt, spec.adapter if spec.HasField("adapter") else None)
        spec.traceparent, spec.tracestate = trace.traceparent, trace.tracestate
        if draft.idempotency_key and not draft.sampling.HasField("seed"):
            spec.sampling.seed = _seed_of_key(draft, tenant)


def _asked(spec: RequestSpec) -> tuple[object, ...]:
    """Return what determines the tokens, or the vectors, of a request."""
    what = spec.prompts, spec.sampling, spec.max_total_tokens, spec.reasoning, spec.ends_when_accepted, spec.pooling
    return *what, spec.adapter.name, spec.adapter.revision


def _is_quick(draft: Draft) -> bool:
    """Return whether preparing a draft is less work than handing it to a thread."""
    if draft.echo or not all(isinstance(prompt, TokenPrompt) for prompt in draft.prompts):
        return False
    if draft.sampling.HasField("structured_outputs"):
        return False
    return sum(len(prompt.token_ids) for prompt in draft.prompts if isinstance(prompt, TokenPrompt)) <= _FEW_TOKENS


def checked_draft(draft: Draft, limits: LimitSettings) -> Draft:
    """Return a draft of which what needs no model is within bounds. Raises InvalidRequest."""
    if not draft.prompts:
        raise InvalidRequest(draft.prompt_field, "must not be empty")
    most = limits.max_prompts if draft.pooling is None else limits.max_inputs
    if len(draft.prompts) > most:
        name = "prompts" if draft.pooling is None else "inputs"
        raise InvalidRequest(draft.prompt_field, f"at most {most} {name}, got {len(draft.prompts)}")
    for prompt in draft.prompts:
        if isinstance(prompt, ChatPrompt) and len(prompt.messages) > limits.max_messages:
            raise InvalidRequest(
                draft.prompt_field, f"at most {limits.max_messages} messages, got {len(prompt.messages)}"
            )
    for name in ("client_request_id", "idempotency_key", "cache_salt"):
        if len(getattr(draft, name)) > limits.max_id_chars:
            raise InvalidRequest(name, f"at most {limits.max_id_chars} characters, got {len(getattr(draft, name))}")
    if draft.priority not in PRIORITIES:
        raise InvalidRequest("priority", f"must be 0 (first), 1 or 2, got {draft.priority}")
    return draft


def cache_salt(tenant: str, caller_salt: str, settings: CacheSettings) -> bytes:
    """Return the salt of a tenant's request; `caller_salt` is the API's field, "" for none.

    Equal at all gateways with equal settings. Empty where all tenants share and the caller gives none: as in records of
    gateways that know no salts.
    """
    if settings.prefix_sharing == PREFIX_SHARING_ALL:
        scope = "all", ""
        if not caller_salt:
            return b""
    elif tenant in settings.prefix_groups:
        scope = "group", str(settings.prefix_groups[tenant])
    else:
        scope = "tenant", tenant
    return _digest(*(part.encode() for part in (*scope, caller_salt)))


def adapted_salt(salt: bytes, adapter: Adapter | None) -> bytes:
    """Return the salt of a request with an adapter: its blocks are those of the adapter's revision alone."""
    return salt if adapter is None else _digest(b"adapter", adapter.revision.encode(), salt)


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_SALT_BYTES, person=b"prefix-salt")
    for data in parts:
        digest.update(len(data).to_bytes(4, "big") + data)
    return digest.digest()


def prepare(draft: Draft, model: LoadedModel, limits: LimitSettings) -> RequestSpec:
    """Do all that `preparing` does, and encode without a cache."""
    preparation = preparing(draft, model, limits, b"")
    jobs = next(preparation)
    try:
        preparation.send(model.encoder.encode_batch(jobs, EncodingCache(0)))
    except StopIteration as done:
        spec: RequestSpec = done.value
        return spec
    raise RuntimeError("a preparation yields once")


def preparing(draft: Draft, model: LoadedModel, limits: LimitSettings, scope: bytes) -> Preparation:
    """Render a draft and check it against its model; yield once, the texts to encode, and get what came of them.

    Returns the record of the request, without what its caller and its call decide. `scope`: the request's cache salt,
    see EncodingJob. This is CPU work: the pool does it. Raises InvalidRequest.
    """
    if (asked := draft.pooling) is not None:
        pooling = resolve_pooling(asked, model.card)
        reads_pairs = is_cross_encoder(asked, model.card)
        draft.answer.vectors.num_queries = 0 if reads_pairs else asked.num_queries
        draft = with_short_texts(draft, asked, model)
        if reads_pairs:
            prompts = yield from encoding_pairs(draft, asked, model, limits, scope)
        else:
            prompts = cut_prompts(draft, (yield from _encoding(draft, model, limits, scope)), model)
        check_inputs(prompts, draft.prompt_field, pooling, draft.answer, limits)
        draft.answer.vectors.labels[:] = model.card.embedding.labels if asked.classifies else []
        return _spec_of(draft, model, prompts, sampling_of_vectors(), pooling=pooling)
    sampling = _sampling_of(draft, model, limits)
    truncation_of(draft, model)  # refuses a wrong one before its prompts are encoded
    whole = yield from _encoding(draft, model, limits, scope)
    if draft.is_counted:
        return _spec_of(draft, model, whole, sampling)
    prompts = cut_prompts(draft, whole, model)
    is_divided = draft.answer.HasField("output") and draft.answer.api != API_FORM_GRPC
    if is_divided and shows_special_tokens(draft.answer.output, model):
        sampling.skip_special_tokens = False
    num_tokens = sum(map(len, prompts))
    if sampling.HasField("prompt_logprobs"):
        _check_prompt_logprobs(sampling, num_tokens, limits)
    total = fit_context(
        sampling,
        is_given=draft.sampling.HasField("max_tokens"),
        prompt_lengths=[len(ids) for ids in prompts],
        max_model_len=model.max_model_len,
        default_model_len=model.card.default_model_len,
        default=draft.default_max_tokens,
        prompt_field=draft.prompt_field,
    )
    if draft.answer.token_ids:
        _check_shown_ids(sampling, num_tokens)
    cuts = zip(draft.prompts, whole, prompts, strict=True)
    spec = _spec_of(draft, model, prompts, sampling, max_total_tokens=total)
    if draft.echo:
        spec.answer.echo_texts.extend(echo_of(prompt, all_ids, ids, model) for prompt, all_ids, ids in cuts)
    if draft.answer.echo_logprobs:
        spec.answer.first_tokens.extend(model.tokens.spelled(ids[0]).decode(errors="replace") for ids in prompts)
    return spec


def check_parameters(draft: Draft, model: LoadedModel, limits: LimitSettings) -> None:
    """Check what a draft asks for, but not whether its prompts fit the model. Raises InvalidRequest."""
    truncation_of(draft, model)
    if draft.pooling is not None:
        resolve_pooling(draft.pooling, model.card)
    else:
        _sampling_of(draft, model, limits)


def _sampling_of(draft: Draft, model: LoadedModel, limits: LimitSettings) -> SamplingParams:
    given = _constrained(draft, model)
    for name in _NEW_CONSTRAINTS:
        if getattr(given, name) and not model.card.takes_output_constraints:
            raise UnsupportedField(name, f"the engines of model {model.name} are of an earlier version")
    sampling = resolve_sampling(given, model.default_sampling, limits=limits, vocab_size=model.card.vocab_size)
    if draft.chosen_seed is not None:
        sampling.seed = draft.chosen_seed
    num_choices = len(draft.prompts) * num_sequences(sampling)
    if num_choices > limits.max_choices:
        field = next((name for name in ("beam_width", "best_of") if getattr(sampling, name) > sampling.n), "n")
        raise InvalidRequest(
            field, f"prompts times {field} is {num_choices}, at most {limits.max_choices} are served at once"
        )
    return sampling


def _constrained(draft: Draft, model: LoadedModel) -> SamplingParams:
    """Return what the caller asks for; where a form is asked for beside tools that may be called, a grammar of both."""
    for prompt in draft.prompts:
        has_form = draft.sampling.HasField("structured_outputs")
        if has_form and isinstance(prompt, ChatPrompt) and may_call(prompt, model):
            both = with_calls(draft.sampling.structured_outputs, prompt.tools, model, "structured_outputs")
            given = SamplingParams()
            given.CopyFrom(draft.sampling)
            given.structured_outputs.CopyFrom(both)
            return given
    return draft.sampling


def _encoding(
    draft: Draft, model: LoadedModel, limits: LimitSettings, scope: bytes
) -> Generator[list[EncodingJob], list[Encoded], list[Sequence[int]]]:
    """Yield the texts to encode, get what came of them, and return the prompts' token ids."""
    most = most_tokens(draft, model.max_model_len, limits)
    begun = [job_or_ids(prompt, draft, model, scope, most) for prompt in draft.prompts]
    found = iter((yield [each for each in begun if isinstance(each, EncodingJob)]))
    prompts = [model.ids_of(each, next(found)) if isinstance(each, EncodingJob) else each for each in begun]
    if not all(prompts) and not draft.is_counted:
        raise InvalidRequest(draft.prompt_field, "has no token")
    return prompts


def _spec_of(
    draft: Draft,
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    pooling: Pooling | None = None,
    max_total_tokens: int = 0,
) -> RequestSpec:
    """Return the record of a request, without what its caller and its call decide.

    `max_total_tokens`: of a prompt and its output together, where prompts leave less than sampling.max_tokens.
    """
    return RequestSpec(
        model=model.name,
        adapter=model.adapter,
        prompts=[TokenIds(ids=ids) for ids in prompts],
        sampling=sampling,
        max_total_tokens=max_total_tokens,
        reasoning=draft.marks if draft.marks.HasField("end") else None,
        pooling=pooling,
        deadline_ms=draft.deadline_ms,
        on_disconnect=ON_DISCONNECT_CANCEL if draft.on_disconnect == ON_DISCONNECT_UNSPECIFIED else draft.on_disconnect,
        answer=draft.answer,
        client_request_id=draft.client_request_id,
        idempotency_key=draft.idempotency_key,
        ends_when_accepted=draft.is_prompt_alone,
        seed_for_each_prompt=len(prompts) > 1 and not draft.sampling.HasField("seed"),
    )


def _seed_of_key(draft: Draft, tenant: str) -> int:
    """Return the same seed for each try with an idempotency key: one that runs again after a loss has the same tokens.

    A try may run under an earlier one's id after Redis has lost or dropped its record.
    """
    text = f"{len(tenant)}:{tenant}{len(draft.idempotency_key)}:{draft.idempotency_key}{draft.body_digest}"
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1


def _check_shown_ids(sampling: SamplingParams, num_tokens: int) -> None:
    """Refuse more token ids of prompts than an answer may show; each choice repeats them. Raises InvalidRequest."""
    shown = num_tokens * max(1, sampling.n)
    if shown > _MOST_SHOWN_IDS:
        raise InvalidRequest(
            "return_token_ids", f"choices would show {shown} ids of prompts, at most {_MOST_SHOWN_IDS} are shown"
        )


def _check_prompt_logprobs(sampling: SamplingParams, num_tokens: int, limits: LimitSettings) -> None:
    """Refuse more log probabilities of prompts than a log may have. Raises InvalidRequest."""
    wanted = num_tokens * (1 + sampling.prompt_logprobs)
    if wanted > limits.max_prompt_logprobs:
        raise InvalidRequest(
            "prompt_logprobs",
            f"{num_tokens} tokens of prompts and {sampling.prompt_logprobs} likeliest ones at each are {wanted} log "
            f"probabilities, at most {limits.max_prompt_logprobs} are given at once",
        )


def _cuts_long_texts(draft: Draft, asked: AskedPooling) -> bool:
    """Whether texts are encoded already while they are rendered, to be cut, and long ones."""
    if not (asked.num_query_tokens or asked.num_doc_tokens):
        return False
    return sum(len(prompt.text) for prompt in draft.prompts if isinstance(prompt, TextPrompt)) > PIECE_CHARS
