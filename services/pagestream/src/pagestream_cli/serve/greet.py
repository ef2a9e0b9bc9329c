"""The first request of a deployment that has just started, and commands for more."""

from __future__ import annotations

import json
import shlex
import time

from pagestream_cli.client.endpoint import Endpoint
from pagestream_cli.client.gateways import stream_answer
from pagestream_cli.console import say, show
from pagestream_cli.datadir import ServeRecord

MAX_TOKENS = 160


async def greet(record: ServeRecord, prompt: str, *, api_key: str | None) -> float:
    """Send `prompt` as a chat message and stream the answer to stdout. Returns the seconds to the first token.

    Raises:
        RequestRejectedError: the deployment refuses the request.
        StreamLostError: it does not answer.
    """
    say(f"\n> {prompt}")
    asked = time.monotonic()
    first: float | None = None
    request = {
        "model": record.default_model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    tokens = 0
    async for piece in stream_answer(Endpoint(record.http_urls(), api_key, record.tls_certificate or None), request):
        if piece.text and first is None:
            first = time.monotonic() - asked
        show(piece.text)
        tokens = piece.completion_tokens or tokens
    took = time.monotonic() - asked
    show("\n")
    first = took if first is None else first
    say(f"\n[first token after {first * 1000:.0f} ms, {tokens} tokens in {took:.2f} s]")
    return first


def examples(record: ServeRecord, *, command: str, has_keys: bool) -> str:
    """Format commands to paste into a shell.

    Args:
        record: what is served.
        command: that talks to it in a terminal.
        has_keys: whether it asks for a key.
    """
    url, target = record.http_urls()[0], record.grpc_targets()[0]
    certificate = shlex.quote(record.tls_certificate)
    authority = f"--cacert {certificate} " if record.tls_certificate else ""
    grpc_authority = f"-cacert {certificate}" if record.tls_certificate else "-plaintext"
    messages = [{"role": "user", "content": "Who lives in the lighthouse?"}]
    key = "-H 'Authorization: Bearer KEY' " if has_keys else ""
    chat = json.dumps({"model": record.default_model, "stream": True, "messages": messages})
    generate = json.dumps({"model": record.default_model, "prompt": "Once upon a time"})
    lines = (
        "\nTry it:",
        f"  curl -N {authority}{url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{chat}'",
        f"  grpcurl {grpc_authority} {key}-d '{generate}' {target} pagestream.v1.Inference/Generate",
        f"  {command}",
        f"API pages: {url}/docs   Ctrl-C stops everything.",
    )
    return "\n".join(lines)
