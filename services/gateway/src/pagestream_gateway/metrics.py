"""What a gateway counts."""

from pagestream_telemetry import catalog
from pagestream_telemetry.instruments import Registry


class Metrics:
    """Counters and gauges of one gateway process. All use is from the event loop."""

    def __init__(self, registry: Registry) -> None:
        self._streams_open = registry.number(catalog.STREAMS_OPEN).series()
        self._streams_open.set(0)
        self._tokens = registry.number(catalog.GATEWAY_TOKENS).series()
        self._requests = registry.number(catalog.GATEWAY_REQUESTS)
        self._errors = registry.number(catalog.ERRORS)
        self._cancellations = registry.number(catalog.CANCELLATIONS)
        self._first_token = registry.distribution(catalog.TIME_TO_FIRST_TOKEN)
        self._per_token = registry.distribution(catalog.TIME_PER_OUTPUT_TOKEN)
        self._duration = registry.distribution(catalog.REQUEST_DURATION)
        self._between_tokens = registry.distribution(catalog.INTER_TOKEN_LATENCY)

    @property
    def streams_open(self) -> int:
        """Answers that are being written now."""
        return int(self._streams_open.value or 0)

    def stream_opened(self) -> None:
        """An answer begins to be written."""
        self._streams_open.add(1)

    def stream_closed(self) -> None:
        """It was written, or given up."""
        self._streams_open.add(-1)

    def count_request(self, api: str, outcome: str) -> None:
        """One call of `api` ("chat", "completions", "grpc", "resume") ended: "ok", or the error's code."""
        self._requests.series(api, outcome).add()

    def count_tokens(self, number: int) -> None:
        """Tokens were written to a client."""
        self._tokens.add(number)

    def error(self, model: str, error_type: str) -> None:
        """A call ended with an error."""
        self._errors.series(model, error_type).add()

    def cancelled(self, model: str) -> None:
        """A client left, or said that it no longer wants what it asked for."""
        self._cancellations.series(model).add()

    def first_token(self, model: str, operation: str, seconds: float) -> None:
        """A call got its first token, so long after its begin."""
        self._first_token.series(model, operation).record(seconds)

    def between_tokens(self, model: str, seconds: float) -> None:
        """Tokens came, so long after those before them."""
        self._between_tokens.series(model).record(seconds)

    def per_token(self, model: str, operation: str, seconds: float) -> None:
        """A whole answer was written; after its first token each took so long on average."""
        self._per_token.series(model, operation).record(seconds)

    def duration(self, model: str, operation: str, error_type: str, seconds: float) -> None:
        """A call has ended; `error_type` "" is success."""
        self._duration.series(model, operation, error_type).record(seconds)
