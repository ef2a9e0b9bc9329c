"""Submit a request: check it, tokenize it, and write it durably into its model's queue.

The salt of its prefix blocks decides who may see, by a count or a time, that its prompt was computed before.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pagestream.v1.records_pb2 import Adapter, RequestSpec
from pagestream_streams import Broker, GatewaySession, enlist
from pagestream_streams.errors import LogsFull, ModelNotFound, RateLimited, RequestNotFound
from pagestream_streams.protocol.keys import model_tag, parse_request_id
from pagestream_telemetry.tracing import TraceContext

from pagestream_gateway.auth.identity import Identity
from pagestream_gateway.calls import Call
from pagestream_gateway.errors import InvalidRequest, RequestDiffers
from pagestream_gateway.limits import TenantLimits, TenantMetrics
from pagestream_gateway.models import LoadedModel, Models
from pagestream_gateway.preparation import EncoderPool, PreparedRequest, build_spec, prepare
from pagestream_gateway.redis_timeout import RedisTimeout
from pagestream_gateway.request import Draft, TokenPrompt, check_draft
from pagestream_gateway.settings import PREFIX_SHARING_ALL, CacheSettings, Settings

_SALT_BYTES = 16


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


logger = logging.getLogger(__name__)

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
        model, prepared = await self._prepare(draft, identity)
        salt = adapted_salt(cache_salt(tenant, draft.cache_salt, self.settings.cache), model.adapter)
        request_id = await self.limit.wait(self.session.place(model.name, prepared.prompts[0], tenant, cache_salt=salt))
        spec = self._spec(draft, prepared, request_id, identity=identity, model=model, trace=call.context)
        is_given, note = draft.sampling.HasField("max_tokens"), call.admitted
        if not draft.idempotency_key:
            await self.limit.wait(self.session.accept(spec, is_length_given=is_given, on_rates=note))
        else:
            accepting = self.session.accept_once(
                spec, body_digest=draft.body_digest, is_length_given=is_given, on_rates=note
            )
            spec = await self.limit.wait(accepting)
        call.accepted(spec)
        if draft.is_listed:
            await enlist(self.broker, spec.request_id, tenant)
        logger.info(
            "accepted",
            extra={
                "request_id": spec.request_id,
                "tenant": tenant,
                "key": identity.key,
                "model": model.name,
                "prompt_tokens": sum(len(ids) for ids in prepared.prompts),
                "choices": len(prepared.prompts) * prepared.sampling.n,
            },
        )
        return spec

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
        model, prepared = await self._prepare(draft, identity)
        name = parse_request_id(request_id)
        partitions = await self.limit.wait(self.broker.partitions(model.name))
        if (
            name is None
            or name.model_tag != model_tag(model.name)
            or name.partition >= partitions
            or not name.is_of(tenant)
        ):
            raise RequestNotFound(request_id)
        spec = self._spec(draft, prepared, request_id, identity=identity, model=model, trace=call.context)
        is_given = draft.sampling.HasField("max_tokens")
        accepting = self.session.accept(spec, is_length_given=is_given, on_rates=call.admitted)
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
        model, prepared = await self._prepare(replace(draft, is_counted=True), identity)
        return model, prepared.prompts[0]

    async def resolve(self, name: str, identity: Identity) -> LoadedModel:
        """Return a model that a caller may use. Raises as Models.resolve; ModelNotFound also where it may not."""
        served = self.models.aliases.get(name, name)
        if not name:
            served = await self.models.default_name(lambda each: self.tenants.allows(identity, each))
        elif not self.tenants.allows(identity, served):
            raise ModelNotFound(name)
        return await self.models.resolve(served)

    async def _prepare(self, draft: Draft, identity: Identity) -> tuple[LoadedModel, PreparedRequest]:
        limits = self.settings.limits
        check_draft(draft, limits)
        model = await self.resolve(draft.model, identity)
        if _is_quick(draft):
            return model, prepare(draft, model, limits)
        return model, await self.pool.prepare(
            draft, model, cache_salt(identity.tenant, draft.cache_salt, self.settings.cache)
        )

    async def _known(self, request_id: str, tenant: str) -> RequestSpec | None:
        try:
            return await self.limit.wait(self.broker.spec(request_id, tenant))
        except RequestNotFound:
            return None

    def _spec(
        self,
        draft: Draft,
        prepared: PreparedRequest,
        request_id: str,
        *,
        identity: Identity,
        model: LoadedModel,
        trace: TraceContext,
    ) -> RequestSpec:
        tenant = identity.tenant
        return build_spec(
            draft,
            prepared,
            request_id=request_id,
            model=model.name,
            adapter=model.adapter,
            tenant=tenant,
            credential=identity.key,
            grace_ms=round(self.settings.stream.disconnect_grace_s * 1000),
            priority=self.settings.classes.allowed(tenant, draft.priority, identity.best_class),
            cache_salt=adapted_salt(cache_salt(tenant, draft.cache_salt, self.settings.cache), model.adapter),
            trace=trace,
        )


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
