"""A rolling upgrade: engines and gateways of the last release and of this commit share a Redis.

The two compute alike and have the same fingerprint: streams begun on an engine of the last release go on at this
commit's at once, with the same tokens. Each side's gateway reads what the other side's engine writes. Where the
numerics differ, an engine finishes what it has begun.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from pagestream.v1 import inference_pb2 as pb
from pagestream.v1.inference_pb2_grpc import InferenceStub
from pagestream_client import AsyncClient
from support.clients.readers import Reader, question
from support.processes.part import Part
from support.processes.stack import DEMO_MODEL, MODEL, ROOT, Gateway, Stack
from support.processes.waiting import LIMIT_S, wait_until
from support.redis.servers import skip_for_want_of

pytestmark = [pytest.mark.served, pytest.mark.timeout(600)]

LAST_RELEASE = "671c594d36ff67a8fac9d72fc6dd9b1a8fa57554"
PACKAGES = ("proto", "kernels", "operator", "services")
ROOM = 4
"""Streams that an engine runs at once: of twice as many, each of two engines has half."""
OPTIONS = ("--dtype", "float32", "--max-num-seqs", str(ROOM))
OTHER_NUMERICS = ("--block-size", "32")
LONG_GRACE_MS = 3_600_000
"""Longer than the test may take: a stream that waited for an engine of its fingerprint would fail it."""
LONG, SHORT = 200, 16
"""Tokens of a stream; and of its part before the engine is told to end, or of one that only shows who runs it."""


@pytest.fixture
def earlier(tmp_path: Path) -> dict[str, str]:
    """Variables of processes that run the last release's packages, unpacked. Their dependencies are this environment's.

    Skips the test where this checkout has no git or not so much history.
    """
    folder = tmp_path / "earlier"
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        skip_for_want_of("history", "this is no git checkout, so that there is no earlier commit to run")
    command = [str(git), "-C", str(ROOT), "archive", "--format=tar", LAST_RELEASE, *PACKAGES]
    archive = subprocess.run(command, capture_output=True, check=False, timeout=LIMIT_S)
    if archive.returncode:
        skip_for_want_of("history", f"git has no commit {LAST_RELEASE} here: {archive.stderr.decode().strip()}")
    folder.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True, timeout=LIMIT_S)
    sources = [str(path) for path in sorted(folder.glob("*/src")) + sorted(folder.glob("services/*/src"))]
    return {"PYTHONPATH": os.pathsep.join(sources)}


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """Redis alone; the parts that a test adds inherit its grace."""
    monkeypatch.setenv("PAGESTREAM_BROKER__FINGERPRINT_GRACE_MS", str(LONG_GRACE_MS))
    running = Stack(tmp_path / "stack", model=DEMO_MODEL, engine_options=OPTIONS, is_forked=True)
    running.redis.start()
    try:
        yield running
    except Exception as error:
        for part in running.parts:
            error.add_note(f"--- {part.name}\n{part.log_tail()}")
        raise
    finally:
        running.stop()


async def read_all(targets: Sequence[str], count: int, *, max_tokens: int = SHORT) -> list[Reader]:
    """Read so many streams, each of a client that chooses its gateway."""

    async def read(number: int) -> Reader:
        async with AsyncClient(targets) as client:
            return await Reader().read(client, MODEL, **question(number, max_tokens))

    return list(await asyncio.gather(*map(read, range(count))))


def has_begun(stack: Stack, engine: Part) -> bool:
    """Whether an engine has as many streams as it has room for, and all of them have tokens."""
    lengths = stack.log_lengths()[engine.name].values()
    return len(lengths) == ROOM and min(lengths) >= SHORT


def attempts(gateway: Gateway, outcomes: Sequence[Reader]) -> list[int]:
    with grpc.insecure_channel(gateway.grpc_target) as channel:
        stub = InferenceStub(channel)
        return [stub.GetRequest(pb.GetRequestRequest(request_id=each.request_id)).attempts for each in outcomes]


def claimed(engine: Part, outcomes: Sequence[Reader]) -> int:
    lines = [line for line in engine.log.read_text(errors="replace").splitlines() if '"claimed"' in line]
    return sum(any(f'"{each.request_id}"' in line for line in lines) for each in outcomes)


def test_begun_streams_go_on_at_once_on_this_commits_engine(stack: Stack, earlier: dict[str, str]) -> None:
    asyncio.run(_upgrade(stack, earlier))


@pytest.mark.slow
def test_begun_streams_end_where_they_are_before_other_numerics(stack: Stack, earlier: dict[str, str]) -> None:
    asyncio.run(_upgrade(stack, earlier, *OTHER_NUMERICS))


async def _upgrade(stack: Stack, earlier: dict[str, str], *options: str) -> None:
    """Upgrade to an engine with further options, which have other numerics."""
    is_alike = not options
    old_engine = stack.add_engine(environment={**earlier, "PAGESTREAM_WORKER__FINISH_TIMEOUT_S": "120"})
    old_gateway = stack.add_gateway(environment=earlier)
    new_gateway = stack.add_gateway()
    await asyncio.to_thread(stack.wait_ready)
    # Requests that this commit's gateway accepts run on the earlier engine.
    undisturbed = await read_all([new_gateway.grpc_target], 2 * ROOM, max_tokens=LONG)
    assert claimed(old_engine, undisturbed) == len(undisturbed)

    new_engine = stack.add_engine(*options)
    await asyncio.to_thread(wait_until, new_engine.has_said_ready, limit_s=LIMIT_S, what=new_engine.name)
    both = [old_gateway.grpc_target, new_gateway.grpc_target]
    reading = asyncio.create_task(read_all(both, len(undisturbed), max_tokens=LONG))
    await asyncio.to_thread(wait_until, lambda: has_begun(stack, old_engine), limit_s=120.0, what="its streams")
    old_engine.signal(signal.SIGTERM)
    later = await read_all([old_gateway.grpc_target], 2)
    assert claimed(new_engine, later) == len(later)
    old_gateway.signal(signal.SIGTERM)
    outcomes = await reading

    begun = [each for each in outcomes if claimed(old_engine, [each])]
    assert len(begun) == ROOM
    assert attempts(new_gateway, begun) == [2 if is_alike else 1] * ROOM
    assert claimed(new_engine, outcomes) == (2 * ROOM if is_alike else ROOM)
    for outcome, whole in zip(outcomes, undisturbed, strict=True):
        assert outcome.content() == whole.content() or not (is_alike or outcome in begun)
    assert await asyncio.to_thread(old_engine.wait) == 0
    assert await asyncio.to_thread(old_gateway.wait) == 0
