"""The metrics that a gateway records of its calls."""

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
        """Number of answers that are being written."""
        return int(self._streams_open.value or 0)

    def stream_opened(self) -> None:
        """Count an answer that begins to be written."""
        self._streams_open.add(1)

    def stream_closed(self) -> None:
        """Count the end of an answer, complete or not."""
        self._streams_open.add(-1)

    def count_request(self, api: str, outcome: str) -> None:
        """Count a call that ended.

        `api` is "chat", "completions", "resume", "grpc" or another name of a gRPC method, or "http" for a connection
        that is refused before there is a call; `outcome` is "ok", "disconnected" or an error's code.
        """
        self._requests.series(api, outcome).add()

    def count_tokens(self, number: int) -> None:
        """Count tokens that were written to a client."""
        self._tokens.add(number)

    def error(self, model: str, error_type: str) -> None:
        """Count a call that ended with an error."""
        self._errors.series(model, error_type).add()

    def cancelled(self, model: str) -> None:
        """Count a request that its client cancelled or left."""
        self._cancellations.series(model).add()

    def first_token(self, model: str, operation: str, seconds: float) -> None:
        """Record the seconds from a call's begin to its first token."""
        self._first_token.series(model, operation).record(seconds)

    def between_tokens(self, model: str, seconds: float) -> None:
        """Record the seconds between two batches of tokens of one call."""
        self._between_tokens.series(model).record(seconds)

    def per_token(self, model: str, operation: str, seconds: float) -> None:
        """Record the mean seconds per token after the first, of an answer that was written whole."""
        self._per_token.series(model, operation).record(seconds)

    def duration(self, model: str, operation: str, error_type: str, seconds: float) -> None:
        """Record the seconds that a call took; `error_type` is "" on success."""
        self._duration.series(model, operation, error_type).record(seconds)
