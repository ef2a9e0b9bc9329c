"""The second source of metrics: a Prometheus server that scrapes engines and gateways, or a collector.

It is queried for raw samples (a range selector), since these carry the time of their scrape: what is missing or old
stays so. They go into the same store as OTLP exports.
The protocol: https://prometheus.io/docs/prometheus/latest/querying/api/
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import ssl
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from pagestream_operator.errors import SourceUnavailable
from pagestream_operator.metrics.points import (
    ENGINE_COUNTERS,
    MODEL_ATTRIBUTE,
    Attributes,
    Engine,
    Histogram,
    Number,
    Queue,
    Source,
)
from pagestream_operator.metrics.store import MetricsStore

_NAMES: dict[str, str] = {
    "pagestream_kv_utilization_ratio": Engine.KV_UTILIZATION,
    "pagestream_requests_running": Engine.RUNNING,
    "pagestream_requests_waiting": Engine.WAITING,
    "pagestream_engine_draining_ratio": Engine.DRAINING,
    "pagestream_engine_startup_duration_seconds": Engine.STARTUP,
    "pagestream_tokens_prompt_total": Engine.PROMPT_TOKENS,
    "pagestream_tokens_generated_total": Engine.GENERATED_TOKENS,
    "pagestream_queue_depth": Queue.DEPTH,
    "pagestream_queue_tokens": Queue.TOKENS,
    "pagestream_queue_age_seconds": Queue.AGE,
    "pagestream_queue_drain_rate_per_second": Queue.DRAIN_RATE,
    "pagestream_queue_running": Queue.RUNNING,
    "pagestream_queue_takeable_tokens": Queue.TAKEABLE_TOKENS,
    "pagestream_queue_takeable_age_seconds": Queue.TAKEABLE_AGE,
    "pagestream_queue_takeable_longest": Queue.TAKEABLE_LONGEST,
    "pagestream_queue_takeable_output": Queue.TAKEABLE_OUTPUT,
    "pagestream_queue_claimed_rate_per_second": Queue.CLAIMED_RATE,
    "pagestream_queue_claimed_longest_per_second": Queue.CLAIMED_LONGEST,
}
_OK = 200
_LATENCY = "gen_ai_server_time_to_first_token_seconds_bucket"
_MODEL_LABEL = "gen_ai_request_model"
_KEPT_LABELS = frozenset({"partition", "class", "gen_ai_operation_name", "error_type"})
"""Labels that distinguish series of one source; the others name the source."""
_logger = logging.getLogger(__name__)

Labels = Mapping[str, str]
Sample = tuple[float, float]


@dataclass(frozen=True, slots=True)
class PrometheusSettings:
    """Where Prometheus is, and its label names: of several names the first that a series has counts."""

    url: str
    """Base URL, without /api/v1."""
    interval_s: float = 2.0
    """Seconds between queries; scrapes should be as frequent."""
    range_s: float = 15.0
    """Seconds that a query covers, so that no scrape is missed when an answer is lost."""
    timeout_s: float = 5.0
    max_answer_bytes: int = 64 * 1024 * 1024
    bearer_token_file: Path | None = None
    """Read again for each query: tokens of a cluster expire."""
    ca_file: Path | None = None
    matchers: str = ""
    """Further label matchers, in PromQL: k8s_namespace_name=~"a|b"."""
    namespace_labels: tuple[str, ...] = ("k8s_namespace_name", "namespace")
    pool_labels: tuple[str, ...] = ("pagestream_pool",)
    pod_labels: tuple[str, ...] = ("k8s_pod_name", "pod")
    instance_labels: tuple[str, ...] = ("service_instance_id", "instance")
    release_labels: tuple[str, ...] = ("pagestream_release",)


class PrometheusSource:
    """Queries Prometheus, and fills `store`. Run `run` as a task."""

    def __init__(self, store: MetricsStore, settings: PrometheusSettings) -> None:
        """Prepare; nothing is queried yet."""
        self._store = store
        self._settings = settings
        self._query = _query_of(settings)

    async def run(self, stopping: asyncio.Event) -> None:
        """Query every `interval_s` until `stopping` is set. Of consecutive failures the first is logged."""
        failures = 0
        while not stopping.is_set():
            try:
                failures = await self._poll_until(stopping, failures)
            except SourceUnavailable as error:
                failures += 1
                if failures == 1:
                    _logger.warning("no metrics from Prometheus, will retry: %s", error)
                await _wait(stopping, self._settings.interval_s)

    async def _poll_until(self, stopping: asyncio.Event, failures: int) -> int:
        """Query with one client, until `stopping` is set or a query fails; a new client reads the CA's file again."""
        async with self._client() as client:
            while not stopping.is_set():
                await self._poll(client)
                if failures:
                    _logger.info("metrics from Prometheus again after %d failures", failures)
                failures = 0
                await _wait(stopping, self._settings.interval_s)
        return failures

    async def poll(self) -> None:
        """Query once.

        Raises:
            SourceUnavailable: there was no valid answer.
        """
        async with self._client() as client:
            await self._poll(client)

    def _client(self) -> aiohttp.ClientSession:
        settings = self._settings
        ca_file = None if settings.ca_file is None else str(settings.ca_file)
        try:
            verify = ssl.create_default_context(cafile=ca_file) if settings.url.startswith("https:") else True
        except OSError as error:
            raise SourceUnavailable(f"{settings.url}: the CA in {ca_file} can't be used: {error}") from error
        timeout = aiohttp.ClientTimeout(
            total=2 * settings.timeout_s, connect=settings.timeout_s, sock_read=settings.timeout_s
        )
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=verify), timeout=timeout, trust_env=True)

    async def _poll(self, client: aiohttp.ClientSession) -> None:
        try:
            series = _series_of(json.loads(await self._post_query(client)))
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            raise SourceUnavailable(f"{self._settings.url}: {error or type(error).__name__}") from error
        self._take(series)
        self._store.sweep()

    async def _post_query(self, client: aiohttp.ClientSession) -> bytes:
        token = self._settings.bearer_token_file
        headers = {} if token is None else {"Authorization": f"Bearer {token.read_text().strip()}"}
        url = f"{self._settings.url.rstrip('/')}/api/v1/query"
        body = bytearray()
        async with client.post(url, data={"query": self._query}, headers=headers, allow_redirects=False) as answer:
            async for part in answer.content.iter_any():
                body += part
                if len(body) > self._settings.max_answer_bytes:
                    raise ValueError(f"the answer has more than {self._settings.max_answer_bytes} bytes")
            if answer.status != _OK:
                raise ValueError(f"HTTP {answer.status}: {body[:200].decode(errors='replace')}")
        return bytes(body)

    # -- from series to points

    def _take(self, series: Iterable[tuple[Labels, Sequence[Sample]]]) -> None:
        buckets: dict[tuple[Source, Attributes], dict[float, dict[float, float]]] = defaultdict(dict)
        for labels, samples in series:
            source = self._source(labels)
            if source is None:
                self._store.outcomes["anonymous"] += len(samples)
            elif labels.get("__name__") == _LATENCY:
                key, bound = (source, _attributes(labels)), _bound(labels)
                for time_s, value in samples:
                    buckets[key].setdefault(time_s, {})[bound] = value
            else:
                self._take_numbers(source, labels, samples)
        for (source, attributes), by_time in buckets.items():
            for time_s in sorted(by_time):
                self._take_latency(source, attributes, time_s, by_time[time_s])

    def _take_numbers(self, source: Source, labels: Labels, samples: Sequence[Sample]) -> None:
        name = _NAMES.get(labels.get("__name__", ""))
        if name is None:
            self._store.outcomes["unknown"] += len(samples)
            return
        delta = False if name in ENGINE_COUNTERS else None
        attributes = _attributes(labels)
        for time_s, value in samples:
            taken = self._store.take_number(source, name, Number(attributes, 0.0, time_s, value), delta=delta)
            self._store.outcomes[taken.value] += 1

    def _take_latency(self, source: Source, attributes: Attributes, time_s: float, counts: dict[float, float]) -> None:
        """Store a histogram. Prometheus' buckets are cumulative."""
        bounds = sorted(counts)
        if not math.isinf(bounds[-1]) or not all(map(math.isfinite, counts.values())):
            self._store.outcomes["absurd"] += 1
            return
        below = [0.0, *(counts[bound] for bound in bounds)]
        each = tuple(max(0, round(high - low)) for low, high in pairwise(below))
        point = Histogram(attributes, 0.0, time_s, tuple(bounds[:-1]), each)
        self._store.outcomes[self._store.take_latency(source, point, delta=False).value] += 1

    def _source(self, labels: Labels) -> Source | None:
        settings = self._settings
        source = Source(
            namespace=_first(labels, settings.namespace_labels),
            pool=_first(labels, settings.pool_labels),
            pod=_first(labels, settings.pod_labels),
            uid="",
            instance=_first(labels, settings.instance_labels),
            release=_first(labels, settings.release_labels),
        )
        return source if source.name else None


def _query_of(settings: PrometheusSettings) -> str:
    names = "|".join([*_NAMES, _LATENCY])
    further = f",{settings.matchers}" if settings.matchers else ""
    return f'{{__name__=~"{names}"{further}}}[{max(1, math.ceil(settings.range_s))}s]'


def _first(labels: Labels, names: Sequence[str]) -> str:
    return next((labels[name] for name in names if labels.get(name)), "")


def _attributes(labels: Labels) -> Attributes:
    kept = [(name, value) for name, value in labels.items() if name in _KEPT_LABELS]
    model = [(MODEL_ATTRIBUTE, labels[_MODEL_LABEL])] if _MODEL_LABEL in labels else []
    return tuple(sorted([*kept, *model]))


def _bound(labels: Labels) -> float:
    try:
        return float(labels.get("le", "nan"))
    except ValueError:
        return math.nan


def _series_of(answer: Any) -> list[tuple[Labels, list[Sample]]]:
    """Return the labels and samples of an answer. Raises ValueError if it isn't one."""
    try:
        if answer["status"] != "success" or answer["data"]["resultType"] != "matrix":
            raise ValueError(f"Prometheus answers {answer.get('error') or answer['data']['resultType']!r}")
        return [
            (series["metric"], [(float(time_s), float(value)) for time_s, value in series["values"]])
            for series in answer["data"]["result"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the answer isn't that of a Prometheus query ({error!r})") from error


async def _wait(stopping: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stopping.wait()
    except TimeoutError:
        return
