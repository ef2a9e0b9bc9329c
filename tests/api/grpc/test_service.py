"""The gRPC API of a gateway."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import grpc
import pytest
from campaigns.malformed_inputs.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    call_fields,
    field_of,
    frame,
    header_block,
    message,
    opening,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pagestream.v1 import inference_pb2 as api
from pagestream_gateway import Settings
from support.clients.gateway_clients import Address, grpc_stub, lose, refusal
from support.engines.synthetic_engine import MODEL, SyntheticEngine
from support.processes.waiting import LIMIT_S

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

Another = Callable[[Settings], AbstractAsyncContextManager[Address]]


def request(max_tokens: int = 12, **fields: object) -> api.GenerateRequest:
    sampling = api.SamplingParams(max_tokens=max_tokens, seed=0)
    return api.GenerateRequest(**{"model": MODEL, "prompt": "hello", "sampling": sampling, **fields})  # type: ignore[arg-type]


def text_of(chunks: Sequence[api.TokenChunk], choice: int = 0) -> str:
    return "".join(chunk.text for chunk in chunks if chunk.choice == choice)


async def test_generate_streams_a_whole_log(gateway: Address) -> None:
    async with grpc_stub(gateway) as stub:
        chunks = [answer.chunk async for answer in stub.Generate(request())]
    first, last = chunks[0], chunks[-1]
    assert first.request_id
    assert (first.next_index, first.digest, list(first.token_ids)) == (0, "", [])
    assert text_of(chunks) == "abcdefghijkl"
    assert [token for chunk in chunks for token in chunk.token_ids] == list(range(10, 22))
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [api.FINISH_REASON_LENGTH]
    assert (last.next_index, last.usage.completion_tokens, last.usage.prompt_tokens) == (14, 12, 6)


async def test_choices_are_told_apart(gateway: Address) -> None:
    sampling = api.SamplingParams(max_tokens=3, seed=0, n=2)
    async with grpc_stub(gateway) as stub:
        chunks = [answer.chunk async for answer in stub.Generate(request(sampling=sampling))]
    assert [text_of(chunks, choice) for choice in (0, 1)] == ["abc", "hij"]


async def test_resume_from_every_place_on_another_gateway(gateway: Address, other_gateway: Address) -> None:
    async with grpc_stub(gateway) as stub, grpc_stub(other_gateway) as other:
        chunks = [answer.chunk async for answer in stub.Generate(request())]
        for number, seen in enumerate(chunks):
            place = api.ResumeRequest(request_id=seen.request_id, next_index=seen.next_index, digest=seen.digest)
            more = [answer.chunk async for answer in other.Resume(place)]
            assert text_of(chunks[: number + 1]) + text_of(more) == "abcdefghijkl"
            if more:
                assert (more[-1].digest, more[-1].usage) == (chunks[-1].digest, chunks[-1].usage)


async def test_resume_refuses_what_it_cannot_continue(gateway: Address) -> None:
    async with grpc_stub(gateway) as stub:
        chunks = [answer.chunk async for answer in stub.Generate(request())]
        request_id = chunks[0].request_id
        cases = [
            (api.ResumeRequest(request_id=request_id, next_index=15), grpc.StatusCode.OUT_OF_RANGE, "next_index"),
            (
                api.ResumeRequest(request_id=request_id, next_index=2**63),
                grpc.StatusCode.INVALID_ARGUMENT,
                "next_index",
            ),
            (
                api.ResumeRequest(request_id=request_id, next_index=3, digest="0" * 16),
                grpc.StatusCode.DATA_LOSS,
                "digest",
            ),
            (
                api.ResumeRequest(request_id=request_id, next_index=14, digest="0" * 16),
                grpc.StatusCode.DATA_LOSS,
                "digest",
            ),
            (api.ResumeRequest(request_id=f"{request_id[:-4]}0000"), grpc.StatusCode.NOT_FOUND, "request_id"),
            (api.ResumeRequest(request_id="nonsense"), grpc.StatusCode.NOT_FOUND, "request_id"),
        ]
        for place, code, field in cases:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Resume(place):
                    pass
            said = refusal(caught.value)
            assert (said.code, said.fields) == (code, [field]), place


async def test_a_lost_request_is_accepted_again_and_goes_on_where_its_reader_is(
    gateway: Address, other_gateway: Address, redis_url: str
) -> None:
    async with grpc_stub(gateway) as stub, grpc_stub(other_gateway) as other:
        answers = [answer async for answer in stub.Generate(request())]
        chunks = [answer.chunk for answer in answers]
        assert answers[0].HasField("seed")
        assert not any(answer.HasField("seed") for answer in answers[1:])
        seen = chunks[5]
        place = api.ResumeRequest(request_id=seen.request_id, next_index=seen.next_index, digest=seen.digest)
        await lose(redis_url, seen.request_id)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await other.Resume(place).read()
        assert refusal(caught.value).code == grpc.StatusCode.NOT_FOUND
        place.request.CopyFrom(request())
        place.request.sampling.ClearField("seed")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await other.Resume(place).read()
        assert refusal(caught.value).fields == ["request.sampling.seed"]
        place.request.sampling.seed = answers[0].seed
        more = [answer.chunk async for answer in other.Resume(place)]
    assert text_of(chunks[:6]) + text_of(more) == "abcdefghijkl"
    assert (more[-1].digest, more[-1].next_index) == (chunks[-1].digest, chunks[-1].next_index)


async def test_another_answer_to_a_lost_request_is_data_loss(gateway: Address, redis_url: str) -> None:
    async with grpc_stub(gateway) as stub:
        chunks = [answer.chunk async for answer in stub.Generate(request())]
        await lose(redis_url, chunks[5].request_id)
        other_words = request(sampling=api.SamplingParams(max_tokens=4, seed=1, n=2))
        place = api.ResumeRequest(
            request_id=chunks[5].request_id, next_index=chunks[5].next_index, digest=chunks[5].digest
        )
        place.request.CopyFrom(other_words)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [answer async for answer in stub.Resume(place)]
    assert refusal(caught.value).code == grpc.StatusCode.DATA_LOSS


@pytest.mark.parametrize("wrong", ["nonsense", "00000000-0000-" + "0" * 32])
async def test_only_an_id_of_the_model_is_accepted_again(gateway: Address, wrong: str) -> None:
    async with grpc_stub(gateway) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Resume(api.ResumeRequest(request_id=wrong, request=request())).read()
    assert refusal(caught.value).code == grpc.StatusCode.NOT_FOUND


async def test_get_request_and_cancel(gateway: Address, engine: SyntheticEngine) -> None:
    engine.hold_at = 2
    async with grpc_stub(gateway) as stub:
        call = stub.Generate(request())
        chunks = []
        async for answer in call:
            chunks.append(answer.chunk)
            if answer.chunk.next_index == 2:
                request_id = answer.chunk.request_id
                view = await stub.GetRequest(api.GetRequestRequest(request_id=request_id))
                assert (view.state, view.next_index, view.model) == (api.REQUEST_STATE_RUNNING, 2, MODEL)
                done = await stub.Cancel(api.CancelRequest(request_id=request_id))
                assert done.finish_reason == api.FINISH_REASON_CANCELLED
        view = await stub.GetRequest(api.GetRequestRequest(request_id=request_id))
    assert (view.state, view.finish_reason) == (api.REQUEST_STATE_FINISHED, api.FINISH_REASON_CANCELLED)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [api.FINISH_REASON_CANCELLED]
    assert text_of(chunks) == "ab"


async def test_a_deadline_ends_the_request(gateway: Address, engine: SyntheticEngine) -> None:
    engine.hold_at = 1
    async with grpc_stub(gateway) as stub:
        call = stub.Generate(request(on_disconnect=api.ON_DISCONNECT_CONTINUE), timeout=3.0)
        request_id = (await call.read()).chunk.request_id
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest_of(call)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        chunks = [answer.chunk async for answer in stub.Resume(api.ResumeRequest(request_id=request_id))]
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [api.FINISH_REASON_DEADLINE]


async def test_list_models_and_a_model_that_needs_no_name(gateway: Address) -> None:
    async with grpc_stub(gateway) as stub:
        models = (await stub.ListModels(api.ListModelsRequest())).models
        assert [(model.name, model.max_model_len, model.engines) for model in models] == [(MODEL, 128, 1)]
        chunks = [answer.chunk async for answer in stub.Generate(request(model=""))]
    assert text_of(chunks) == "abcdefghijkl"


async def test_a_generation_that_failed_says_why(gateway: Address) -> None:
    failing = api.GenerateRequest(model=MODEL, prompt_token_ids=api.TokenIds(ids=[7]))
    async with grpc_stub(gateway) as stub:
        chunks = [answer.chunk async for answer in stub.Generate(failing)]
    assert (chunks[-1].finish_reason, chunks[-1].error.code) == (api.FINISH_REASON_ERROR, "engine_error")


async def test_an_idempotency_key_joins_a_retry(
    gateway: Address, other_gateway: Address, engine: SyntheticEngine
) -> None:
    engine.hold_at = 2
    keyed = request(idempotency_key="order-1")
    async with grpc_stub(gateway) as stub, grpc_stub(other_gateway) as other:
        first = stub.Generate(keyed)
        name = (await first.read()).chunk.request_id
        second = other.Generate(keyed)
        assert (await second.read()).chunk.request_id == name
        engine.go_on()
        texts = await asyncio.gather(*(rest_of(call) for call in (first, second)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await other.Generate(request(3, idempotency_key="order-1")).read()
    assert texts == ["abcdefghijkl"] * 2
    assert refusal(caught.value).code == grpc.StatusCode.ALREADY_EXISTS
    assert len(engine.claimed) == 1


async def rest_of(call: grpc.aio.UnaryStreamCall[api.GenerateRequest, api.GenerateResponse]) -> str:
    text = ""
    while (answer := await call.read()) is not grpc.aio.EOF:
        text += answer.chunk.text
    return text


async def test_health_and_reflection(gateway: Address) -> None:
    async with grpc.aio.insecure_channel(gateway.target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="pagestream.v1.Inference"))
        async with asyncio.timeout(LIMIT_S):
            async for answer in watch:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    break
        watch.cancel()
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        async for reply in reflection.ServerReflectionInfo(iter([asked])):
            names = [service.name for service in reply.list_services_response.service]
    assert "pagestream.v1.Inference" in names
    assert "grpc.health.v1.Health" in names


async def test_a_stopping_gateway_ends_streams_with_unavailable(
    gateway: Address, engine: SyntheticEngine, settings: Settings, another: Another
) -> None:
    engine.hold_at = 4
    chunks: list[api.TokenChunk] = []
    async with AsyncExitStack() as stack:
        async with another(settings) as address:
            stub = await stack.enter_async_context(grpc_stub(address))
            call = stub.Generate(request())
            while not chunks or chunks[-1].next_index < 4:
                chunks.append((await call.read()).chunk)
            rest = asyncio.create_task(rest_of(call))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest
    said = refusal(caught.value)
    assert said.code == grpc.StatusCode.UNAVAILABLE
    assert said.retry_after_s == 1.0
    engine.go_on()
    async with grpc_stub(gateway) as stub:
        place = api.ResumeRequest(request_id=chunks[0].request_id, next_index=4, digest=chunks[-1].digest)
        more = [answer.chunk async for answer in stub.Resume(place)]
    assert text_of(chunks) + text_of(more) == "abcdefghijkl"


@pytest.mark.parametrize(
    "service", ["grpc.health.v1.Health/Check", "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"]
)
async def test_undecodable_messages_of_other_services_are_refused_and_not_logged(
    gateway: Address, service: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with grpc.aio.insecure_channel(gateway.target) as channel:
        call = channel.stream_stream(f"/{service}")(iter([b"\n\xff"]))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


async def test_metadata_that_is_no_text_is_not_logged(gateway: Address, caplog: pytest.LogCaptureFixture) -> None:
    block = header_block(call_fields("/pagestream.v1.Inference/ListModels", (b"x-\xee", b"a")))
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.grpc_port)
    writer.write(opening() + frame(HEADERS, END_HEADERS, 1, block) + frame(DATA, END_STREAM, 1, message(b"")))
    answer = b""
    async with asyncio.timeout(LIMIT_S):
        while b"grpc-status" not in answer:
            answer += await reader.read(4096)
    writer.close()
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


async def test_a_method_whose_name_is_no_text_ends_no_server(gateway: Address) -> None:
    unknown = ("/pagestream.v1.Inference/\udcff", "/pagestream.v1.Inference/Nothing", "/\udcf6.Nothing/Check")
    for name in unknown:
        block = header_block(call_fields(name))
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.grpc_port)
        writer.write(opening() + frame(HEADERS, END_HEADERS, 1, block) + frame(DATA, END_STREAM, 1, message(b"")))
        answer = b""
        async with asyncio.timeout(LIMIT_S):
            while b"grpc-status" not in answer:
                answer += await reader.read(4096)
        assert field_of(answer, b"grpc-status") == b"12"  # UNIMPLEMENTED
        writer.close()
    async with grpc_stub(gateway) as stub:
        assert [each.name for each in (await stub.ListModels(api.ListModelsRequest())).models] == [MODEL]
