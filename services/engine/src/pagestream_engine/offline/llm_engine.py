"""An engine that is stepped by hand, by vLLM's names, with its metrics."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from pagestream_engine.config import EngineConfig
from pagestream_engine.engine import Engine
from pagestream_engine.errors import InvalidRequest
from pagestream_engine.offline.options import translate
from pagestream_engine.offline.outputs import OfflineRequest, RequestOutput
from pagestream_engine.offline.prompts import Prompt, encode_prompts
from pagestream_engine.request import LoRARequest
from pagestream_engine.sampling_params import SamplingParams
from pagestream_engine.stats import EngineStats


class LLMEngine:
    """Takes requests at any time, and brings their outputs so far after each step."""

    def __init__(self, engine: Engine) -> None:
        """Wrap an engine, which then has no other requests."""
        self.engine = engine
        self._requests: dict[str, OfflineRequest] = {}
        self._by_sequence: dict[str, OfflineRequest] = {}

    @classmethod
    def from_engine_args(cls, engine_args: Any, **_: Any) -> LLMEngine:
        """Load a model as `EngineArgs` say; raises as `LLM`."""
        model, options = translate(engine_args.model, engine_args.options())
        return cls(Engine(model, EngineConfig.from_options(options)))

    def get_tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer; None where its folder has none."""
        return self.engine.tokenizer

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
    ) -> None:
        """Queue a prompt; `arrival_time` is not read: requests stand in the order in which they are added.

        Raises:
            InvalidRequest: names what is wrong (a `ValueError`).
            AdapterError: the adapter can't be used (a `ValueError`).
        """
        if not isinstance(request_id, str) or request_id in self._requests:
            raise InvalidRequest(f"request_id: given {request_id!r:.80}, expected a string that no open request has")
        adapter = None if lora_request is None else self.engine.adapters.take(lora_request)
        (encoded,) = encode_prompts([prompt], self.engine.tokenizer)
        request = OfflineRequest.make(
            request_id, encoded, params.clone(), adapter=adapter, lora_request=lora_request, priority=priority
        )
        request.add_to(self.engine)
        self._requests[request_id] = request
        self._by_sequence.update(dict.fromkeys(request.choices, request))

    def step(self) -> list[RequestOutput]:
        """Run one step. Return the output so far of each request that it brought something for."""
        touched: dict[str, OfflineRequest] = {}
        for brought in self.engine.step():
            request = self._by_sequence.get(brought.seq_id)
            if request is not None:
                request.take(brought)
                touched[request.output.request_id] = request
        outputs = [request.snapshot() for request in touched.values()]
        for output in outputs:
            if output.finished:
                self._forget(output.request_id)
        return outputs

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests, which bring no further output; unknown ones are ignored."""
        for each in [request_id] if isinstance(request_id, str) else list(request_id):
            request = self._forget(each)
            if request is not None:
                request.abort_in(self.engine)

    def has_unfinished_requests(self) -> bool:
        """Return whether there is something to step for."""
        return bool(self._requests)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._requests)

    def _forget(self, request_id: str) -> OfflineRequest | None:
        request = self._requests.pop(request_id, None)
        for seq_id in request.choices if request is not None else ():
            del self._by_sequence[seq_id]
        return request


@dataclass
class Metric:
    """One metric."""

    name: str
    labels: dict[str, str] = field(default_factory=dict, kw_only=True)


@dataclass
class Counter(Metric):
    """Counts from the engine's start."""

    value: int


@dataclass
class Gauge(Metric):
    """A value of now."""

    value: float


@dataclass
class Vector(Metric):
    """Counts from the engine's start, by place."""

    values: list[int]


def metrics_of(stats: EngineStats) -> list[Metric]:
    """Return the metrics of a snapshot."""
    accepted = list(stats.accepted_by_position)
    return [
        Gauge("vllm:num_requests_running", float(stats.num_running)),
        Gauge("vllm:num_requests_waiting", float(stats.num_waiting)),
        Gauge("vllm:kv_cache_usage_perc", stats.kv_utilization),
        Counter("vllm:num_preemptions", stats.num_preemptions),
        Counter("vllm:prefix_cache_queries", stats.prefix_query_tokens),
        Counter("vllm:prefix_cache_hits", stats.prefix_hit_tokens),
        Counter("vllm:prompt_tokens", stats.num_prompt_tokens),
        Counter("vllm:generation_tokens", stats.num_generated_tokens),
        Counter("vllm:spec_decode_num_drafts", stats.num_drafts),
        Counter("vllm:spec_decode_num_draft_tokens", stats.num_draft_tokens),
        Counter("vllm:spec_decode_num_accepted_tokens", sum(accepted)),
        Vector("vllm:spec_decode_num_accepted_tokens_per_pos", accepted),
    ]


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of engines that nothing refers to, as vLLM's function of this name; there is no Ray to end."""
    del shutdown_ray
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
