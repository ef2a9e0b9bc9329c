"""pagestream.v1.Inference over grpc.aio.

Messages are taken as bytes and parsed here, and every error leaves as a status with details: by itself grpc.aio
answers both an undecodable message and an unexpected error with INTERNAL or UNKNOWN.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import grpc
from pagestream.v1 import inference_pb2 as api
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams.errors import RequestNotFound, StreamsError

from pagestream_gateway.api.grpc.chunks import fill_chunk
from pagestream_gateway.api.grpc.drafts import generate_draft, name_as_in_message
from pagestream_gateway.api.grpc.status import abort
from pagestream_gateway.api.grpc.wire import parse_message
from pagestream_gateway.core.auth import KeyRing
from pagestream_gateway.core.calls import CHAT, DISCONNECTED, OK, RESUME, TEXT_COMPLETION, Call
from pagestream_gateway.core.frontend import Frontend
from pagestream_gateway.core.problems import problem_of
from pagestream_gateway.core.runs import split_runs
from pagestream_gateway.errors import GatewayError, GatewayStopping, InvalidRequest

logger = logging.getLogger(__name__)

_MAX_INDEX = 2**63
_OPERATIONS = {"grpc": TEXT_COMPLETION, "grpc_resume": RESUME}
SERVICE_NAME = api.DESCRIPTOR.services_by_name["Inference"].full_name
Context = grpc.aio.ServicerContext[bytes, bytes]
Method = Callable[[bytes, Context, str, Call], Awaitable[Any]]


class InferenceService:
    """The service's methods, each on the caller's tenant."""

    def __init__(self, frontend: Frontend, keys: KeyRing) -> None:
        self._frontend = frontend
        self._keys = keys

    def handler(self) -> grpc.GenericRpcHandler:
        """What a server is given."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": stream(self._guarded("grpc", self.generate), None, api.GenerateResponse.SerializeToString),
            "Resume": stream(self._guarded("grpc_resume", self.resume), None, api.ResumeResponse.SerializeToString),
            "Cancel": unary(self._guarded("grpc_cancel", self.cancel), None, api.CancelResponse.SerializeToString),
            "GetRequest": unary(
                self._guarded("grpc_get_request", self.get_request), None, api.GetRequestResponse.SerializeToString
            ),
            "ListModels": unary(
                self._guarded("grpc_list_models", self.list_models), None, api.ListModelsResponse.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    async def generate(self, data: bytes, context: Context, tenant: str, call: Call) -> None:
        """Accepts a request and streams its log. The first message has the request id and no token."""
        request = parse_message(api.GenerateRequest, data)
        try:
            draft = generate_draft(request, deadline_ms=_deadline_ms(context))
            call.name_operation(CHAT if request.HasField("chat") else TEXT_COMPLETION)
            spec = await self._frontend.submit(draft, tenant, call)
        except InvalidRequest as error:
            raise name_as_in_message(error) from error.__cause__
        first = api.GenerateResponse(chunk=api.TokenChunk(request_id=spec.request_id), seed=spec.sampling.seed)
        await context.write(first)  # type: ignore[arg-type]
        await self._stream(context, spec, call, message=api.GenerateResponse)

    async def resume(self, data: bytes, context: Context, tenant: str, call: Call) -> None:
        """Streams a log from an offset."""
        request = parse_message(api.ResumeRequest, data)
        request_id, index, digest = request.request_id, request.next_index, request.digest
        if index >= _MAX_INDEX:
            raise InvalidRequest("next_index", f"{index} is no index of a log")
        try:
            view, is_complete = await self._frontend.reenter(request_id, tenant, from_index=index, digest=digest)
        except RequestNotFound:
            if not request.HasField("request"):
                raise
            spec, is_complete = await self._accept_again(request, context, tenant, call), False
        else:
            spec = view.spec
        call.resumed(spec)
        if not is_complete:
            await self._stream(context, spec, call, next_index=index, digest=digest, message=api.ResumeResponse)

    async def _accept_again(self, request: api.ResumeRequest, context: Context, tenant: str, call: Call) -> RequestSpec:
        try:
            draft = generate_draft(request.request, deadline_ms=_deadline_ms(context))
            return await self._frontend.submit_again(draft, tenant, request.request_id, call)
        except InvalidRequest as error:
            named = name_as_in_message(error)
            named.field = f"request.{named.field}"
            raise named from error.__cause__

    async def cancel(self, data: bytes, context: Context, tenant: str, call: Call) -> api.CancelResponse:
        """Ends a request; idempotent."""
        request = parse_message(api.CancelRequest, data)
        return api.CancelResponse(finish_reason=await self._frontend.cancel(request.request_id, tenant))

    async def get_request(self, data: bytes, context: Context, tenant: str, call: Call) -> api.GetRequestResponse:
        """Where a request stands."""
        view = await self._frontend.view(parse_message(api.GetRequestRequest, data).request_id, tenant)
        return api.GetRequestResponse(
            request_id=view.request_id,
            model=view.model,
            state=view.state,
            queue_position=view.queue_position,
            finish_reason=view.finish_reason,
            next_index=view.next_index,
            usage=view.usage,
            attempts=view.attempts,
        )

    async def list_models(self, data: bytes, context: Context, tenant: str, call: Call) -> api.ListModelsResponse:
        """All models by name."""
        parse_message(api.ListModelsRequest, data)
        models = [
            api.Model(name=info.name, max_model_len=card.max_model_len, created=info.created, engines=info.engines)
            for info, card in await self._frontend.list_models()
        ]
        return api.ListModelsResponse(models=models)

    async def _stream(
        self,
        context: Context,
        spec: RequestSpec,
        call: Call,
        *,
        next_index: int = 0,
        digest: str = "",
        message: type[api.GenerateResponse] | type[api.ResumeResponse],
    ) -> None:
        with self._frontend.streams.entered():
            async with aclosing(self._frontend.follow(spec, from_index=next_index, digest=digest)) as batches:
                async for batch in batches:
                    runs = split_runs(next_index, batch)
                    call.tokens(sum(len(run.token_ids) for run in runs))
                    for run in runs:
                        response: Any = message()
                        fill_chunk(response.chunk, spec.request_id, run)
                        await context.write(response)
                        next_index = run.next_index

    def _guarded(self, name: str, method: Method) -> Callable[[bytes, Context], Awaitable[Any]]:
        async def answered(data: bytes, context: Context) -> Any:
            outcome = DISCONNECTED
            metadata = _metadata(context)
            call = self._frontend.calls.begin(name, _OPERATIONS.get(name, ""), metadata)
            try:
                answer = await method(data, context, self._enter(metadata), call)
                outcome = OK
            except (GatewayError, StreamsError) as error:
                problem = problem_of(error)
                outcome = problem.code
                await abort(context, problem)
            except Exception as error:
                logger.exception("call failed", extra={"method": name})
                outcome = "internal_error"
                await abort(context, problem_of(error))
            finally:
                call.end(outcome)
            return answer

        return answered

    def _enter(self, metadata: Mapping[str, str]) -> str:
        if self._frontend.streams.is_stopping:
            raise GatewayStopping
        return self._keys.tenant(metadata.get("authorization"))


def _metadata(context: Context) -> dict[str, str]:
    given = dict(context.invocation_metadata() or ())
    return {name: value.decode("latin-1") if isinstance(value, bytes) else value for name, value in given.items()}


def _deadline_ms(context: Context) -> int:
    remaining_s = context.time_remaining()
    return 0 if remaining_s is None else max(1, round(remaining_s * 1000))
