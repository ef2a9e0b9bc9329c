"""The engine's own scheduler and cache on virtual time: steps take what a linear model of their contents says."""

from collections import deque
from collections.abc import Callable, Iterable

from pagestream_engine.cache.manager import CacheManager
from pagestream_engine.config import SchedulerConfig
from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.request.sequence import TokenSequence
from pagestream_engine.scheduler.policy_registry import make_policy
from pagestream_engine.scheduler.scheduled_step import ScheduledStep
from pagestream_engine.scheduler.scheduler import Scheduler
from pagestream_simulator.fleet.profile import StepCost
from pagestream_simulator.traces.files import TraceRow

_PARAMS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


class VirtualEngine:
    """Serves a trace's requests, whose prompts have nothing in common and whose answers have the trace's length."""

    def __init__(self, cache: CacheManager, config: SchedulerConfig, cost: StepCost) -> None:
        self.cache = cache
        self.scheduler = Scheduler(config, cache, make_policy(config.scheduling_policy))
        self.now_s = 0.0
        self._cost = cost
        self._running: set[TokenSequence] = set()

    def run(self, rows: Iterable[TraceRow], on_step: Callable[[float], None]) -> None:
        """Serve all requests to their ends.

        Args:
            rows: in the order of their arrival.
            on_step: called in each step, when its blocks are taken, with its seconds.
        """
        coming = deque(enumerate(rows))
        while coming or self._running:
            while coming and coming[0][1].arrival_s <= self.now_s:
                self._add(*coming.popleft())
            step = self.scheduler.schedule()
            if step.is_empty:
                self.now_s = coming[0][1].arrival_s
                continue
            seconds = self._seconds(step)
            self.scheduler.update_after_schedule(step)
            on_step(seconds)
            self.now_s += seconds
            self.scheduler.update_from_output(step, [(0,)] * len(step.sampled()))
            self._end(step.sampled())

    def _add(self, index: int, row: TraceRow) -> None:
        seq = TokenSequence(
            str(index),
            [index + 1] + [0] * (row.input_tokens - 1),
            _PARAMS,
            seed=0,
            arrival=index,
            max_total_tokens=row.input_tokens + max(1, row.output_tokens),
        )
        self._running.add(seq)
        self.scheduler.add(seq)

    def _end(self, sampled: Iterable[TokenSequence]) -> None:
        ended = [seq for seq in sampled if len(seq.token_ids) >= seq.max_total_tokens]
        self._running.difference_update(ended)
        self.scheduler.finish_requests(ended)

    def _seconds(self, step: ScheduledStep) -> float:
        cost = self._cost
        tokens = sum(chunk.num_scheduled_tokens for chunk in step.prefills)
        pairs = sum(
            chunk.num_scheduled_tokens * (chunk.seq.num_sent_tokens + chunk.num_scheduled_tokens / 2)
            for chunk in step.prefills
        )
        context = sum(entry.seq.num_sent_tokens for entry in step.decodes)
        return (
            cost.fixed_s
            + tokens * cost.prefill_token_s
            + pairs * cost.prefill_pair_s
            + len(step.decodes) * cost.decode_s
            + context * cost.decode_context_s
        )
