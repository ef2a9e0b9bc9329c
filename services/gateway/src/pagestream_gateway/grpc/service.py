"""pagestream.v1.Inference over grpc.aio.

Messages are received in turn, taken as bytes and parsed here, and every error leaves as a status with details: grpc.aio
itself answers an undecodable message and an unexpected error alike, with INTERNAL or UNKNOWN.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from pagestream.v1 import inference_pb2 as api
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams.errors import RequestNotFound, StreamsError

from pagestream_gateway.auth.identity import Credentials, Identity
from pagestream_gateway.calls import CHAT, DISCONNECTED, EMBEDDINGS, OK, RESUME, TEXT_COMPLETION, Call
from pagestream_gateway.error_codes import INTERNAL_ERROR, error_report, rate_headers
from pagestream_gateway.errors import GatewayError, InvalidRequest
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.grpc.messages import (
    ChunkStream,
    Context,
    embed_draft,
    embed_response,
    generate_draft,
    score_draft,
    score_response,
    with_message_path,
)
from pagestream_gateway.grpc.receiving import Receiver, abort, drop_frames, parse_message

logger = logging.getLogger(__name__)

_MAX_INDEX = 2**63
_OPERATIONS = {"grpc": TEXT_COMPLETION, "grpc_resume": RESUME, "grpc_embed": EMBEDDINGS, "grpc_score": EMBEDDINGS}
SERVICE_NAME = api.DESCRIPTOR.services_by_name["Inference"].full_name
Method = Callable[[Context, Identity, Call], Awaitable[Any]]


class InferenceServicer:
    """The service's methods, each called with the caller's identity."""

    def __init__(self, gateway: Gateway, receiver: Receiver) -> None:
        self._gateway = gateway
        self._receiver = receiver

    def handlers(self) -> dict[str, "grpc.RpcMethodHandler[Any, Any]"]:
        """Return the methods' handlers by their names, as a server registers them."""
        # Methods of one message: as handlers of streams they receive it when they ask for it.
        unary, stream = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        return {
            "Generate": stream(self._guarded("grpc", self.generate), None, api.GenerateResponse.SerializeToString),
            "Resume": stream(self._guarded("grpc_resume", self.resume), None, api.ResumeResponse.SerializeToString),
            "Cancel": unary(self._guarded("grpc_cancel", self.cancel), None, api.CancelResponse.SerializeToString),
            "GetRequest": unary(
                self._guarded("grpc_get_request", self.get_request), None, api.GetRequestResponse.SerializeToString
            ),
            "Embed": unary(self._guarded("grpc_embed", self.embed), None, api.EmbedResponse.SerializeToString),
            "Score": unary(self._guarded("grpc_score", self.score), None, api.ScoreResponse.SerializeToString),
            "ListModels": unary(
                self._guarded("grpc_list_models", self.list_models), None, api.ListModelsResponse.SerializeToString
            ),
        }

    async def generate(self, context: Context, identity: Identity, call: Call) -> None:
        """Accept a request and stream its log. The first message has the request id, its place, and no token."""
        await self._gateway.turns.take()
        spec = await self._accept(context, identity, call)
        await _send_rates(context, call)
        place = await self._gateway.requests.place(spec)
        first = api.GenerateResponse(
            chunk=api.TokenChunk(request_id=spec.request_id),
            seed=spec.sampling.seed,
            queue_position=None if place is None else place.position,
            expected_wait_ms=None if place is None else place.expected_wait_ms,
        )
        await context.write(first)  # type: ignore[arg-type]
        stream = ChunkStream(self._gateway, context, spec, call, next_index=0, message=api.GenerateResponse)
        await stream.write("")

    async def resume(self, context: Context, identity: Identity, call: Call) -> None:
        """Stream a log from an offset; accept the request again where Redis has lost it and the caller repeats it."""
        spec, is_complete, index, digest = await self._resumed(context, identity, call)
        call.resumed(spec)
        if not is_complete:
            stream = ChunkStream(self._gateway, context, spec, call, next_index=index, message=api.ResumeResponse)
            await stream.write(digest)

    async def _accept(self, context: Context, identity: Identity, call: Call) -> RequestSpec:
        """Accept a request. Its message is not kept for its stream's life."""
        async with self._receiver.message(context) as data:
            request = parse_message(api.GenerateRequest, data)
            try:
                draft = generate_draft(request, deadline_ms=_deadline_ms(context))
                call.name_operation(CHAT if request.HasField("chat") else TEXT_COMPLETION)
                return await self._gateway.submission.submit(draft, identity, call)
            except InvalidRequest as error:
                raise with_message_path(error) from error.__cause__

    async def _resumed(self, context: Context, identity: Identity, call: Call) -> tuple[RequestSpec, bool, int, str]:
        """Return the request, whether the caller has all of its log, and the position to go on from."""
        async with self._receiver.message(context) as data:
            request = parse_message(api.ResumeRequest, data)
            index, digest = request.next_index, request.digest
            if index >= _MAX_INDEX:
                raise InvalidRequest("next_index", f"expected the index of a log entry, got {index}")
            try:
                view, is_complete = await self._gateway.requests.resume(
                    request.request_id, identity.tenant, from_index=index, digest=digest
                )
            except RequestNotFound:
                if not request.HasField("request"):
                    raise
                return await self._accept_again(request, context, identity, call), False, index, digest
            return view.spec, is_complete, index, digest

    async def _accept_again(
        self, request: api.ResumeRequest, context: Context, identity: Identity, call: Call
    ) -> RequestSpec:
        try:
            draft = generate_draft(request.request, deadline_ms=_deadline_ms(context))
            return await self._gateway.submission.submit_again(draft, identity, request.request_id, call)
        except InvalidRequest as error:
            named = with_message_path(error)
            named.field = f"request.{named.field}"
            raise named from error.__cause__

    async def cancel(self, context: Context, identity: Identity, call: Call) -> api.CancelResponse:
        """End a request; idempotent."""
        async with self._receiver.message(context) as data:
            request = parse_message(api.CancelRequest, data)
        return api.CancelResponse(
            finish_reason=await self._gateway.requests.cancel(request.request_id, identity.tenant)
        )

    async def get_request(self, context: Context, identity: Identity, call: Call) -> api.GetRequestResponse:
        """Return a request's state."""
        async with self._receiver.message(context) as data:
            request = parse_message(api.GetRequestRequest, data)
        view = await self._gateway.requests.view(request.request_id, identity.tenant)
        return api.GetRequestResponse(
            request_id=view.request_id,
            model=view.model,
            state=view.state,
            queue_position=view.queue_position,
            expected_wait_ms=view.expected_wait_ms,
            finish_reason=view.finish_reason,
            next_index=view.next_index,
            usage=view.usage,
            attempts=view.attempts,
        )

    async def embed(self, context: Context, identity: Identity, call: Call) -> api.EmbedResponse:
        """Accept a request for vectors, and return them when all are known."""
        await self._gateway.turns.take()
        async with self._receiver.message(context) as data:
            draft = embed_draft(parse_message(api.EmbedRequest, data), deadline_ms=_deadline_ms(context))
            spec = await self._gateway.submission.submit(draft, identity, call)
        await _send_rates(context, call)
        return await embed_response(self._gateway, spec)

    async def score(self, context: Context, identity: Identity, call: Call) -> api.ScoreResponse:
        """Accept a request for scores, and return them when all are known."""
        await self._gateway.turns.take()
        async with self._receiver.message(context) as data:
            draft = score_draft(parse_message(api.ScoreRequest, data), deadline_ms=_deadline_ms(context))
            spec = await self._gateway.submission.submit(draft, identity, call)
        await _send_rates(context, call)
        return await score_response(self._gateway, spec)

    async def list_models(self, context: Context, identity: Identity, call: Call) -> api.ListModelsResponse:
        """Return all models by name."""
        async with self._receiver.message(context) as data:
            parse_message(api.ListModelsRequest, data)
        models = [
            api.Model(name=info.name, max_model_len=card.max_model_len, created=info.created, engines=info.engines)
            for info, card in await self._gateway.models.list_models()
            if self._gateway.submission.tenants.allows(identity, info.name)
        ]
        return api.ListModelsResponse(models=models)

    def _guarded(self, name: str, method: Method) -> Callable[[Any, Context], Awaitable[Any]]:
        """Return `method` with authentication before it, and its errors as statuses; its outcome is measured."""

        async def answered(_: Any, context: Context) -> Any:
            outcome, answer, report = DISCONNECTED, None, None
            metadata = _metadata(context)
            call = self._gateway.calls.begin(name, _OPERATIONS.get(name, ""), metadata)
            try:
                identity = await self._gateway.identify(_credentials(context, metadata))
                call.identified(identity)
                answer = await method(context, identity, call)
                outcome = OK
            except (GatewayError, StreamsError) as error:
                report = error_report(error)
                outcome = report.code
                drop_frames(error)
            except Exception as error:
                logger.exception("call failed", extra={"method": name})
                outcome, report = INTERNAL_ERROR, error_report(error)
                drop_frames(error)
            finally:
                call.end(outcome)
            if report is not None:
                await abort(context, report)
            return answer

        return answered


async def _send_rates(context: Context, call: Call) -> None:
    """Send how far the caller's limits are used, where it has any, as initial metadata."""
    if call.rates:
        await context.send_initial_metadata(tuple(rate_headers(call.rates).items()))


def _metadata(context: Context) -> dict[str, str]:
    given = dict(context.invocation_metadata() or ())
    return {name: value.decode("latin-1") if isinstance(value, bytes) else value for name, value in given.items()}


def _credentials(context: Context, metadata: Mapping[str, str]) -> Credentials:
    certificates = context.auth_context().get("x509_pem_cert", ())  # is there where one is required and checked
    certificate = next(iter(certificates), None)
    return Credentials(
        metadata.get("authorization"), None if certificate is None else certificate.decode("ascii"), context.peer()
    )


def _deadline_ms(context: Context) -> int:
    """Return the milliseconds that the call's deadline leaves; 0 where it has none."""
    remaining_s = context.time_remaining()
    return 0 if remaining_s is None else max(1, round(remaining_s * 1000))
