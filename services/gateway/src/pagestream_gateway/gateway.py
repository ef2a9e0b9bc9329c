"""The gateway without its protocols: what all APIs call in a request's life.

A draft becomes a record (`preparation.py`) that is accepted durably (`Submission`). The salt of its prefix blocks
decides who may see, by a count or a time, that its prompt was computed before (`cache_salt`). Accepted requests are
looked up, followed and cancelled by their ids (`AcceptedRequests`); their answers end when the process stops
(`OpenStreams`). What large requests take before they are accepted is bounded (`PendingRequests`).
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace

from pagestream.v1.inference_pb2 import REQUEST_STATE_FINISHED, FinishReason
from pagestream.v1.records_pb2 import Adapter, LogEntry, RequestSpec
from pagestream_streams import Broker, GatewaySession, RequestPage, RequestView, discard_request, enlist, list_requests
from pagestream_streams.admin.queue_positions import QueuePosition
from pagestream_streams.errors import (
    DigestMismatch,
    LogsFull,
    ModelNotFound,
    OffsetOutOfRange,
    RateLimited,
    RequestNotFound,
    StreamsError,
    Unavailable,
)
from pagestream_streams.gateway.readers import Sink
from pagestream_streams.protocol.keys import model_tag, parse_request_id
from pagestream_streams.tasks import ByteBudget, Turns
from pagestream_telemetry import catalog
from pagestream_telemetry.process import Telemetry
from pagestream_telemetry.tracing import TraceContext

from pagestream_gateway.auth.audit import Audit
from pagestream_gateway.auth.authenticator import Authenticator, Reload
from pagestream_gateway.auth.identity import DEFAULT_TENANT, Administrator, Credentials, Identity
from pagestream_gateway.batches.uploads import Batches
from pagestream_gateway.calls import Call, Calls, Metrics, RedisTimeout
from pagestream_gateway.encoder import EncoderPool, TokenizePool
from pagestream_gateway.errors import (
    GatewayStopping,
    InvalidRequest,
    Overloaded,
    RequestDiffers,
    Unauthenticated,
    WrongCredential,
)
from pagestream_gateway.limits import NO_RULES, TenantLimits, TenantMetrics
from pagestream_gateway.models import LoadedModel, Models
from pagestream_gateway.monitors import EngineMonitor, MemoryMonitor, QueueMonitor
from pagestream_gateway.preparation import cuts_long_texts, prepare, preparing
from pagestream_gateway.request import ChatPrompt, Draft, TokenPrompt
from pagestream_gateway.settings import PREFIX_SHARING_ALL, PRIORITIES, CacheSettings, LimitSettings, Settings

logger = logging.getLogger(__name__)


_SALT_BYTES = 16


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
        tenant = identity.tenant
        try:
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
        except RateLimited as error:
            self.metrics.refused(tenant, error.rate.name)
            raise
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
        partitions = await self.limit.wait(self.broker.directory.partitions(model.name))
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
        is_cutting = draft.pooling is not None and cuts_long_texts(draft, draft.pooling)
        return model, await self.pool.prepare(preparation, model.encoder, cuts_long_texts=is_cutting)

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


def _seed_of_key(draft: Draft, tenant: str) -> int:
    """Return the same seed for each try with an idempotency key: one that runs again after a loss has the same tokens.

    A try may run under an earlier one's id after Redis has lost or dropped its record.
    """
    text = f"{len(tenant)}:{tenant}{len(draft.idempotency_key)}:{draft.idempotency_key}{draft.body_digest}"
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1


_POSITION_LIMIT_S = 0.25  # an answer does not wait for longer to say where its request stands


@dataclass(frozen=True)
class AcceptedRequests:
    """Requests by their ids. The id of another tenant's request raises RequestNotFound, as an unknown one does."""

    broker: Broker
    session: GatewaySession
    metrics: Metrics
    limit: RedisTimeout

    def follow(
        self,
        spec: RequestSpec,
        *,
        from_index: int = 0,
        digest: str = "",
        sink: Sink | None = None,
        on_engine: Callable[[str], None] | None = None,
    ) -> AsyncGenerator[list[LogEntry], None]:
        """Yield batches of log entries from `from_index` to the end of the log.

        Close the generator (`aclosing`): that removes the reader from the request. A request that Redis loses
        meanwhile is accepted again and goes on under the same id. `sink` takes live entries, and `on_engine` gets the
        fingerprint of their engine: see Readers.read.
        """
        return self.session.read(
            spec.request_id,
            tenant=spec.tenant,
            from_index=from_index,
            digest=digest,
            spec=spec,
            sink=sink,
            on_engine=on_engine,
        )

    async def resume(self, request_id: str, tenant: str, *, from_index: int, digest: str) -> tuple[RequestView, bool]:
        """Look up a request that a reader wants to read on from `from_index`.

        Returns the request, and whether its log has ended there. Raises RequestNotFound, also for one that was deleted,
        OffsetOutOfRange, DigestMismatch, Unavailable. The digest of a place that the log has not reached yet is checked
        by `follow`.
        """
        view = _kept(await self.limit.wait(self.broker.view(request_id, tenant, with_position=False)))
        if from_index > view.next_index and view.state == REQUEST_STATE_FINISHED:
            raise OffsetOutOfRange(request_id, from_index, view.next_index)
        if from_index == view.next_index and digest and digest != view.digest:
            raise DigestMismatch(request_id, from_index)
        if 0 < from_index < view.next_index and digest:
            await self._check_digest(view.spec, from_index, digest)
        return view, from_index == view.next_index and view.state == REQUEST_STATE_FINISHED

    async def view(self, request_id: str, tenant: str) -> RequestView:
        """Return a request's state. Raises RequestNotFound, also for one that was deleted; Unavailable."""
        return _kept(await self.limit.wait(self.broker.view(request_id, tenant)))

    async def queue_position(self, spec: RequestSpec) -> QueuePosition | None:
        """Return where a queued request stands; None where an engine has it, or Redis does not tell at once."""
        try:
            async with asyncio.timeout(_POSITION_LIMIT_S):
                return await self.broker.queue_position(spec.request_id, spec.tenant)
        except (TimeoutError, StreamsError):
            return None  # an answer is worth more than its position

    async def fingerprint(self, spec: RequestSpec) -> str:
        """Return the fingerprint of the engine that runs or ran a request; "" where Redis does not tell it now."""
        try:
            return await self.limit.wait(self.broker.fingerprint(spec.request_id, spec.tenant))
        except StreamsError:
            return ""  # an answer is worth more than this field

    async def list(self, tenant: str, *, limit: int, after: str) -> RequestPage:
        """Return a tenant's requests, newest first. Raises RequestNotFound for an `after` that is not listed."""
        return await self.limit.wait(list_requests(self.broker, tenant, limit=limit, after=after))

    async def cancel(self, request_id: str, tenant: str) -> FinishReason:
        """End a request in whatever state it is; return how it ended. Raises RequestNotFound, Unavailable."""
        reason = await self.limit.wait(self.broker.cancel(request_id, tenant))
        self.metrics.cancellations.series((await self.broker.directory.locate(request_id)).model).add()
        logger.info("cancelled", extra={"request_id": request_id, "tenant": tenant})
        return reason

    async def discard(self, request_id: str, tenant: str) -> None:
        """End a request, and let its record and log expire within a minute. Raises RequestNotFound, Unavailable."""
        await self.limit.wait(discard_request(self.broker, request_id, tenant))
        logger.info("discarded", extra={"request_id": request_id, "tenant": tenant})

    async def _check_digest(self, spec: RequestSpec, from_index: int, digest: str) -> None:
        async with aclosing(self.follow(spec, from_index=from_index, digest=digest)) as batches:
            await self.limit.wait(anext(batches))


def _kept(view: RequestView) -> RequestView:
    """Return a view. Raises RequestNotFound for a request that was deleted, whose record expires within a minute."""
    if view.is_discarded:
        raise RequestNotFound(view.request_id)
    return view


class OpenStreams:
    """The tasks that write answers.

    `drain` cancels those that don't end in time; `entered` turns that cancellation, and no other, into
    GatewayStopping, which each API reports to its client.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._tasks: set[asyncio.Task[object]] = set()
        self._ended: set[asyncio.Task[object]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.is_stopping = False

    def __len__(self) -> int:
        return len(self._tasks)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Register the running task while it writes an answer.

        Raises GatewayStopping where the process is stopping already, and when `drain` ends the answer.
        """
        task = asyncio.current_task()
        if task is None or self.is_stopping:
            raise GatewayStopping
        self._tasks.add(task)
        self._empty.clear()
        self._metrics.open_streams.add()
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ended:
                raise
            task.uncancel()
            raise GatewayStopping from None
        finally:
            self._tasks.discard(task)
            self._ended.discard(task)
            self._metrics.open_streams.add(-1)
            if not self._tasks:
                self._empty.set()

    async def drain(self, limit_s: float) -> None:
        """Refuse new answers, wait `limit_s` seconds for the open ones, then end these."""
        self.is_stopping = True
        try:
            async with asyncio.timeout(limit_s):
                await self._empty.wait()
        except TimeoutError:
            for task in tuple(self._tasks):
                self._ended.add(task)
                task.cancel()


SMALL_BYTES = 64 * 1024
"""Bytes of a request that is parsed in less time than a thread takes to answer."""


PATIENCE_S = 2.0
"""Seconds in which a body is received whole, unless its sender or the network is slow."""


TICKS = 20
"""Parts that a patience is measured in. A process that is late reads late, so each counts once however long it took."""


class PatientClock:
    """Seconds in which this process has had time to read: it stands while nothing waits, and slows while it is late."""

    def __init__(self) -> None:
        self.now_s = 0.0

    async def tick(self, period_s: float) -> None:
        """Wait for the period, and count it once."""
        await asyncio.sleep(period_s)
        self.now_s += period_s


class PendingRequest:
    """One request's place among the pending ones."""

    def __init__(self, patience_s: float, clock: PatientClock) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._scope: asyncio.Timeout | None = None
        self._began_at = 0.0

    @contextlib.asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Receive the body inside the block. Raises Overloaded where it takes long and others wait for its room."""
        self._began_at = self._clock.now_s
        try:
            async with asyncio.timeout(None) as self._scope:
                yield
        except TimeoutError as error:
            raise Overloaded("the body arrives slowly, and other large requests wait for its room", 5.0) from error
        finally:
            self._scope = None

    def give_way(self) -> bool:
        """End the receiving where others have waited for it for long; return whether they have."""
        # Half a tick less: the clock's sums are rounded.
        least_s = self._patience_s * (1 - 0.5 / TICKS)
        if self._scope is None or self._clock.now_s - self._began_at < least_s:
            return False
        self._scope.reschedule(0.0)
        self._scope = None
        return True


class PendingRequests:
    """Bounds the bytes of large requests that are read, parsed and tokenized at once; further ones wait in order.

    Where one has waited for the patience, the request whose body has been arriving for longest gives way.
    """

    def __init__(self, max_bytes: int, *, limit_s: float, patience_s: float | None = None) -> None:
        """`limit_s`: seconds that a request may wait; `patience_s`: PATIENCE_S where it is None."""
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self.parsing = asyncio.Lock()
        """Held while a large body is parsed. A parser holds Python's lock for tens of milliseconds at a time, and two
        would keep the event loop waiting twice as long.
        """
        self._budget = ByteBudget(max_bytes)
        self._limit_s = limit_s
        self._admitted: dict[PendingRequest, None] = {}  # in order
        self._clock = PatientClock()
        self._due_at: dict[object, float] = {}  # of those that wait, on the clock, in order
        self._impatience: asyncio.Task[None] | None = None  # while one waits

    @contextlib.asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[PendingRequest]:
        """Count a request of so many bytes as pending inside the block; small ones do not count. Raises Overloaded."""
        num_bytes = 0 if num_bytes <= SMALL_BYTES else min(num_bytes, self._budget.limit_bytes)
        if num_bytes and not self._budget.try_acquire(num_bytes):
            await self._wait(num_bytes)
        request = PendingRequest(self._patience_s, self._clock)
        if num_bytes:
            self._admitted[request] = None
        try:
            yield request
        finally:
            self._admitted.pop(request, None)
            self._budget.release(num_bytes)

    async def _wait(self, num_bytes: int) -> None:
        waiter = object()
        self._due_at[waiter] = self._clock.now_s + self._patience_s
        if self._impatience is None:
            self._impatience = asyncio.create_task(self._make_room(), name="impatience")
        try:
            async with asyncio.timeout(self._limit_s):
                await self._budget.acquire(num_bytes)
        except TimeoutError as error:
            raise Overloaded(
                f"large requests of {self._budget.limit_bytes} bytes together are being read", retry_after_s=5.0
            ) from error
        finally:
            del self._due_at[waiter]
            if not self._due_at:
                self._impatience.cancel()
                self._impatience = None

    async def _make_room(self) -> None:
        while True:
            await self._clock.tick(self._patience_s / TICKS)
            for waiter, due_at in list(self._due_at.items()):
                if due_at > self._clock.now_s:
                    break
                del self._due_at[waiter]
                self._due_at[waiter] = self._clock.now_s + self._patience_s
                any(request.give_way() for request in list(self._admitted))  # the first that can


_PUBLIC_METRICS = frozenset({catalog.STREAMS_OPEN})


@dataclass(frozen=True)
class Gateway:
    """One process' parts. Nothing that a stream needs is held here: all of it is in Redis."""

    settings: Settings
    broker: Broker
    limit: RedisTimeout
    authenticator: Authenticator
    models: Models
    submission: Submission
    requests: AcceptedRequests
    pool: TokenizePool
    pending: PendingRequests
    streams: OpenStreams
    calls: Calls
    queue: QueueMonitor
    memory: MemoryMonitor
    engines: EngineMonitor
    telemetry: Telemetry
    answer_budget: ByteBudget
    """Bytes of answers that are not streamed."""
    batches: Batches
    audit: Audit
    reloads: Sequence[Reload]
    """What is read again when an administrator asks for it."""
    turns: Turns
    """Of requests that are read and checked: a burst of them must not hold up the streams."""

    async def identify(self, credentials: Credentials) -> Identity:
        """Return who makes a call with these credentials.

        Raises GatewayStopping, Unauthenticated, WrongCredential, CredentialsUnavailable.
        """
        with self._checking(credentials):
            if self.authenticator.accepts_anybody:
                return Identity(DEFAULT_TENANT, peer=credentials.peer)
            return replace(await self.authenticator.identify(credentials), peer=credentials.peer)

    async def identify_administrator(self, credentials: Credentials) -> Administrator:
        """Return which administrator makes a call. Raises as `identify`."""
        with self._checking(credentials):
            return await self.authenticator.administrator(credentials)

    async def cancel(self, request_id: str, identity: Identity) -> FinishReason:
        """End a caller's request in whatever state it is; return how it ended. Raises RequestNotFound, Unavailable."""
        reason = await self.requests.cancel(request_id, identity.tenant)
        self.audit.cancelled(identity, request_id)
        return reason

    async def discard(self, request_id: str, identity: Identity) -> None:
        """End a caller's request, and let it expire within a minute. Raises RequestNotFound, Unavailable."""
        await self.requests.discard(request_id, identity.tenant)
        self.audit.cancelled(identity, request_id)

    @contextmanager
    def _checking(self, credentials: Credentials) -> Iterator[None]:
        if self.streams.is_stopping:
            raise GatewayStopping
        try:
            yield
        except (Unauthenticated, WrongCredential) as error:
            self.audit.failed(credentials.peer, str(error))
            raise

    async def is_ready(self) -> bool:
        """Return whether Redis answers, a model is known, and the process is not stopping."""
        try:
            await self.limit.wait(self.broker.ping())
            return await self.models.is_any_known() and not self.streams.is_stopping
        except Unavailable:
            return False

    async def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text form; those of the queue are absent where Redis does not answer."""
        await asyncio.gather(self.queue.refresh(), self.memory.refresh())
        return self.telemetry.render()

    def public_exposition(self) -> bytes:
        """Return what anyone may read, in the same form: what tells nothing of tenants, models and machines."""
        return self.telemetry.render_some(_PUBLIC_METRICS)
