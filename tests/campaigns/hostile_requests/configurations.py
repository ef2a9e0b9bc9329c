"""The engines that are attacked: `pagestream serve` with the demo model, each with another mechanism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from campaigns.hostile_requests.values import Target
from support.processes.served import Served, running_serve
from support.processes.stack import DEMO_MODEL, MODEL

DRAFT_MODEL = DEMO_MODEL.parent / "draft"
SEATS = 12
CONTEXT, VOCAB_SIZE = 1024, 1536
ADAPTERS = ("first", "second", "third", "fourth")
_RANKS = (8, 4, 16, 8)


class Configuration(NamedTuple):
    """How an engine is started."""

    options: Sequence[str]
    adapters: Sequence[str] = ()
    """Names of adapters that are loaded."""


CONFIGURATIONS: Mapping[str, Configuration] = {
    "n-gram drafts": Configuration(("--speculative-method", "ngram", "--num-speculative-tokens", "4")),
    "draft model": Configuration(("--speculative-model", str(DRAFT_MODEL), "--num-speculative-tokens", "3")),
    "grammar drafts": Configuration(("--speculative-method", "grammar", "--num-speculative-tokens", "8")),
    "fp8 cache": Configuration(("--kv-cache-dtype", "fp8")),
    "adapters": Configuration(
        ("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "16"), ADAPTERS
    ),
    "swap": Configuration(("--num-gpu-blocks-override", "160", "--swap-space", "0.05")),
    "priority": Configuration(("--scheduling-policy", "priority", "--num-gpu-blocks-override", "200")),
}
"""By name. A block has 16 tokens, so that a small pool holds two or three contexts of the twelve."""


class Attacked(NamedTuple):
    """A running deployment."""

    served: Served
    url: str
    target: Target


@contextmanager
def running(name: str, folder: Path, adapters: Path) -> Iterator[Attacked]:
    """Run a configuration below a folder, with the adapters that `make_adapters` wrote."""
    configuration = CONFIGURATIONS[name]
    folder.mkdir()
    with running_serve(folder, "--max-num-seqs", str(SEATS), *configuration.options) as served:
        url = served.record.http_urls()[0]
        for each in configuration.adapters:
            body = {"lora_name": each, "lora_path": str(adapters / each)}
            httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=60.0).raise_for_status()
        yield Attacked(served, url, Target((MODEL, *configuration.adapters), VOCAB_SIZE, CONTEXT, SEATS))


def make_adapters(folder: Path) -> None:
    """Write the adapters, which differ in rank."""
    from support.engines.lora_adapters import make_adapter

    for number, (name, rank) in enumerate(zip(ADAPTERS, _RANKS, strict=True)):
        changed: dict[str, Any] = {"r": rank}
        make_adapter(DEMO_MODEL, folder / name, seed=number, **changed)
