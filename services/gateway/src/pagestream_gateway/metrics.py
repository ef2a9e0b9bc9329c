"""The process' own counters, in Prometheus' text form."""

from collections import Counter
from collections.abc import Iterable


class Metrics:
    """Counters of one gateway process. All use is from the event loop."""

    def __init__(self) -> None:
        self.streams_open = 0
        self.tokens_out = 0
        self._requests: Counter[tuple[str, str]] = Counter()

    def count_request(self, api: str, outcome: str) -> None:
        """One call of `api` ("chat", "completions", "grpc", "resume") ended: "ok", or the error's code."""
        self._requests[api, outcome] += 1

    def render(self) -> str:
        """The exposition, version 0.0.4."""
        lines = [
            *_family(
                "pagestream_gateway_streams_open",
                "gauge",
                "Answers that are being written now.",
                [("", self.streams_open)],
            ),
            *_family(
                "pagestream_gateway_tokens_total", "counter", "Tokens written to clients.", [("", self.tokens_out)]
            ),
            *_family(
                "pagestream_gateway_requests_total",
                "counter",
                "Calls that ended, by API and outcome.",
                [
                    (f'{{api="{api}",outcome="{outcome}"}}', count)
                    for (api, outcome), count in sorted(self._requests.items())
                ],
            ),
        ]
        return "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str, samples: Iterable[tuple[str, int]]) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *(f"{name}{labels} {value}" for labels, value in samples)]
