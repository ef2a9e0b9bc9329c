"""What both APIs do, said once: take requests in, follow their logs, look them up, cancel them."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from pagestream.v1.inference_pb2 import REQUEST_STATE_FINISHED, FinishReason
from pagestream.v1.records_pb2 import LogEntry, ModelCard, RequestSpec
from pagestream_streams import Broker, GatewaySession, ModelInfo, RequestView
from pagestream_streams.errors import DigestMismatch, ModelNotFound, OffsetOutOfRange, RequestNotFound, Unavailable
from pagestream_streams.protocol import ids
from pagestream_telemetry.context import TraceContext
from pagestream_telemetry.process import Telemetry

from pagestream_gateway.core.calls import Call, Calls
from pagestream_gateway.core.models import LoadedModel, ModelCache
from pagestream_gateway.core.open_streams import OpenStreams
from pagestream_gateway.core.queue_monitor import QueueMonitor
from pagestream_gateway.core.submission import Draft, PreparedRequest, TokenPrompt, build_spec, check_draft, prepare
from pagestream_gateway.core.tokenization import TokenizePool
from pagestream_gateway.errors import InvalidRequest
from pagestream_gateway.metrics import Metrics
from pagestream_gateway.settings import Settings

logger = logging.getLogger(__name__)
T = TypeVar("T")

_FEW_TOKENS = 4096  # are checked in less time than a thread takes to answer


@dataclass(frozen=True)
class Frontend:
    """The gateway without its protocols. Holds nothing that a stream needs: all of it is in Redis."""

    broker: Broker
    session: GatewaySession
    pool: TokenizePool
    models: ModelCache
    streams: OpenStreams
    metrics: Metrics
    calls: Calls
    queue: QueueMonitor
    telemetry: Telemetry
    settings: Settings

    async def submit(self, draft: Draft, tenant: str, call: Call) -> RequestSpec:
        """Checks and durably accepts a request; the answer is what runs, which is an earlier request when the
        idempotency key says so.

        Raises InvalidRequest, ModelNotFound, QueueFull, IdempotencyConflict, Overloaded, Unavailable. An accepted
        request that nobody begins to follow counts as one without a reader.
        """
        model, prepared = await self._prepared(draft)
        request_id = await self._within_limit(self.session.place(model.name, prepared.prompts[0], tenant))
        spec = self._spec(draft, prepared, request_id, tenant=tenant, model=model, trace=call.context)
        if not draft.idempotency_key:
            await self._within_limit(self.session.accept(spec))
        else:
            spec = await self._within_limit(self.session.accept_once(spec, body_digest=draft.body_digest))
        call.accepted(spec)
        logger.info(
            "accepted",
            extra={
                "request_id": spec.request_id,
                "tenant": tenant,
                "model": model.name,
                "prompt_tokens": sum(len(ids) for ids in prepared.prompts),
                "choices": len(prepared.prompts) * prepared.sampling.n,
            },
        )
        return spec

    async def submit_again(self, draft: Draft, tenant: str, request_id: str, call: Call) -> RequestSpec:
        """Accepts a request that Redis has lost under the id that it had; one that is there stays as it is.

        The sampling must have the seed of the first time. Raises InvalidRequest, ModelNotFound, QueueFull, Unavailable,
        and RequestNotFound for an id that is malformed, of another model, or another tenant's.
        """
        if not draft.sampling.HasField("seed"):
            raise InvalidRequest("seed", "is needed: the one that the first message told")
        model, prepared = await self._prepared(draft)
        name = ids.parse(request_id)
        partitions = await self._within_limit(self.broker.partitions(model.name))
        if (
            name is None
            or name.model_tag != ids.model_tag(model.name)
            or name.partition >= partitions
            or not name.is_of(tenant)
        ):
            raise RequestNotFound(request_id)
        spec = self._spec(draft, prepared, request_id, tenant=tenant, model=model, trace=call.context)
        if not await self._within_limit(self.session.accept(spec)):
            return await self.spec(request_id, tenant)  # somebody was sooner
        logger.warning("accepted again", extra={"request_id": request_id, "tenant": tenant, "model": model.name})
        return spec

    async def _prepared(self, draft: Draft) -> tuple[LoadedModel, PreparedRequest]:
        limits = self.settings.limits
        check_draft(draft, limits)
        model = await self._model(draft.model)
        if _is_tokenized(draft):
            return model, prepare(draft, model, limits)
        return model, await self.pool.run(lambda: prepare(draft, model, limits))

    def _spec(
        self,
        draft: Draft,
        prepared: PreparedRequest,
        request_id: str,
        *,
        tenant: str,
        model: LoadedModel,
        trace: TraceContext,
    ) -> RequestSpec:
        return build_spec(
            draft,
            prepared,
            request_id=request_id,
            model=model.name,
            tenant=tenant,
            grace_ms=round(self.settings.stream.disconnect_grace_s * 1000),
            trace=trace,
        )

    def follow(
        self, spec: RequestSpec, *, from_index: int = 0, digest: str = ""
    ) -> AsyncGenerator[list[LogEntry], None]:
        """Batches of log entries from `from_index` to the end. Close it: that is how the request loses its reader.

        A request that Redis loses meanwhile is accepted again and goes on under the same id.
        """
        return self.session.read(spec.request_id, tenant=spec.tenant, from_index=from_index, digest=digest, spec=spec)

    async def reenter(self, request_id: str, tenant: str, *, from_index: int, digest: str) -> tuple[RequestView, bool]:
        """Looks up a request that a reader wants to go on with; the flag tells that the log has nothing more for it.

        Raises RequestNotFound, OffsetOutOfRange, DigestMismatch, Unavailable. A place that the log has not reached yet
        is checked by the reading itself.
        """
        view = await self.view(request_id, tenant)
        if from_index > view.next_index and view.state == REQUEST_STATE_FINISHED:
            raise OffsetOutOfRange(request_id, from_index, view.next_index)
        if from_index == view.next_index and digest and digest != view.digest:
            raise DigestMismatch(request_id, from_index)
        if 0 < from_index < view.next_index and digest:
            await self._check_digest(view.spec, from_index, digest)
        return view, from_index == view.next_index and view.state == REQUEST_STATE_FINISHED

    async def _check_digest(self, spec: RequestSpec, from_index: int, digest: str) -> None:
        async with aclosing(self.follow(spec, from_index=from_index, digest=digest)) as batches:
            await self._within_limit(anext(batches))

    async def view(self, request_id: str, tenant: str) -> RequestView:
        """Where a request stands. Raises RequestNotFound, Unavailable."""
        return await self._within_limit(self.broker.view(request_id, tenant))

    async def spec(self, request_id: str, tenant: str) -> RequestSpec:
        """A request as it was accepted. Raises RequestNotFound, Unavailable."""
        return await self._within_limit(self.broker.spec(request_id, tenant))

    async def cancel(self, request_id: str, tenant: str) -> FinishReason:
        """Ends a request in whatever state it is. Raises RequestNotFound, Unavailable."""
        reason = await self._within_limit(self.broker.cancel(request_id, tenant))
        self.metrics.cancelled((await self.broker.directory.locate(request_id)).model)
        logger.info("cancelled", extra={"request_id": request_id, "tenant": tenant})
        return reason

    async def list_models(self) -> list[tuple[ModelInfo, ModelCard]]:
        """All models by name. Raises Unavailable."""
        infos = await self._within_limit(self.broker.models())
        return [
            (info, await self._within_limit(self.broker.model_card(info.name)))
            for info in sorted(infos, key=lambda info: info.name)
        ]

    async def exposition(self) -> bytes:
        """All metrics in Prometheus' text form; those of the queue are absent where Redis does not answer."""
        await self.queue.refresh()
        return self.telemetry.render()

    async def is_ready(self) -> bool:
        """Whether Redis answers and a model is known."""
        try:
            await self._within_limit(self.broker.ping())
            return bool(await self._within_limit(self.broker.models())) and not self.streams.is_stopping
        except Unavailable:
            return False

    async def _model(self, name: str) -> LoadedModel:
        if not name:
            infos = await self._within_limit(self.broker.models())
            if not infos:
                raise ModelNotFound("")
            if len(infos) > 1:
                raise InvalidRequest("model", f"is needed, since {len(infos)} models are served")
            name = infos[0].name
        card = await self._within_limit(self.broker.model_card(name))
        return await self.models.load(card, self.pool.run)

    async def _within_limit(self, answer: Awaitable[T]) -> T:
        """Waits for Redis as long as a caller should."""
        try:
            async with asyncio.timeout(self.settings.gateway.answer_limit_s):
                return await answer
        except TimeoutError as error:
            logger.warning("Redis took longer to answer than %g s", self.settings.gateway.answer_limit_s)
            raise Unavailable("Redis took too long to answer") from error


def _is_tokenized(draft: Draft) -> bool:
    """Whether to prepare it is less work than to hand it to a thread."""
    if draft.echo or not all(isinstance(prompt, TokenPrompt) for prompt in draft.prompts):
        return False
    return sum(len(prompt.token_ids) for prompt in draft.prompts if isinstance(prompt, TokenPrompt)) <= _FEW_TOKENS


def now_s() -> int:
    """Unix seconds, for bodies that show when they were made; nothing is decided by it."""
    return int(time.time())
