"""What the Job of a deleted pool runs, with the environment that the operator gives it, against a real Redis."""

import asyncio
import sys
import tomllib
from typing import Any

import pytest
from pagestream_operator import EngineDefaults
from pagestream_operator.children import children, unpublish_job
from pagestream_streams import Broker, StreamsSettings
from support.kubernetes.pool_objects import DEFAULTS, pool
from support.processes.stack import ROOT
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import MODEL, card

pytestmark = pytest.mark.served

PREFIX = "llm.pagestream"


def environment(container: dict[str, Any], variables: dict[str, str], redis_url: str) -> dict[str, str]:
    """What a kubelet makes of the container's variables."""
    given = dict(variables)
    for each in container["env"]:
        source = each.get("valueFrom", {})
        given[each["name"]] = redis_url if "secretKeyRef" in source else each.get("value", "x")
    return given


async def test_the_job_removes_the_model_of_its_release(redis_url: str) -> None:
    defaults = EngineDefaults(**{**vars(DEFAULTS), "shared": {"PAGESTREAM_BROKER__KEY_PREFIX": PREFIX}})
    demo = pool(model={"source": {"path": "/m"}, "servedName": MODEL}, engine={"maxNumSeqs": 8})
    (container,) = unpublish_job(demo, defaults, ["gone", MODEL])["spec"]["template"]["spec"]["containers"]
    (options,) = (made["data"] for made in children(demo, defaults) if made["kind"] == "ConfigMap")
    given = environment(container, options, redis_url)
    scripts = tomllib.loads((ROOT / "services" / "worker" / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts[container["command"][0]].partition(":")
    program = f"import sys; from {module} import {function} as run; sys.exit(run())"
    settings = StreamsSettings(key_prefix=PREFIX)
    await publish(redis_url, settings)
    await publish(redis_url, StreamsSettings())
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, *container["args"], env=given)
    assert await asyncio.wait_for(process.wait(), LIMIT_S) == 0
    assert await models(redis_url, settings) == []
    assert await models(redis_url, StreamsSettings()) == [MODEL]


async def publish(redis_url: str, settings: StreamsSettings) -> None:
    async with await Broker.connect(redis_url, settings) as broker:
        await broker.publish_model(card(MODEL), partitions=1)


async def models(redis_url: str, settings: StreamsSettings) -> list[str]:
    async with await Broker.connect(redis_url, settings) as broker:
        return await broker.directory.names()
