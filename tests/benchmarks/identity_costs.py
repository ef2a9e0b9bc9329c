"""What checking a JSON Web Token costs the gateway's event loop: for the first time, and again.

PYTHONPATH=tests python tests/benchmarks/token_checks.py [--tokens 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from contextlib import closing
from pathlib import Path
from time import perf_counter

from pagestream.v1.records_pb2 import RequestSpec
from pagestream_gateway.auth.audit import Audit
from pagestream_gateway.auth.identity import Identity
from pagestream_gateway.auth.tokens import Issuer, Tokens
from pagestream_gateway.settings import AuditSettings
from support.network.token_issuer import AUDIENCE, ISSUER, Signer, key_set

ALGORITHMS = ("RS256", "PS256", "ES256", "ES384", "EdDSA")


async def microseconds(tokens: Tokens, texts: list[str]) -> float:
    """Return the mean time of a check."""
    start = perf_counter()
    for text in texts:
        await tokens.identity(text)
    return (perf_counter() - start) / len(texts) * 1e6


async def measure(folder: Path, num_tokens: int) -> None:
    """Print a row for each algorithm."""
    print("| algorithm | first, us | again, us |\n|---|---|---|")
    for algorithm in ALGORITHMS:
        signer, file = Signer(algorithm=algorithm), folder / algorithm
        file.write_bytes(key_set(signer))
        given = {"issuer": ISSUER, "audiences": [AUDIENCE], "tenant_claim": "tenant", "algorithms": [algorithm]}
        tokens = Tokens([Issuer.model_validate({**given, "jwks_file": str(file)})])
        texts = [signer.token(jti=str(number)) for number in range(num_tokens)]
        first = await microseconds(tokens, texts)
        print(f"| {algorithm} | {first:.0f} | {await microseconds(tokens, texts):.1f} |")


def audit_microseconds(num_requests: int) -> float:
    """Return the mean time of the lines of one request."""
    with closing(Audit(AuditSettings(file=Path(os.devnull)))) as audit:
        caller = Identity("a", "0123456789ab", peer="10.0.0.1")
        spec = RequestSpec(request_id="r" * 42, model="demo", prompts=[{"ids": range(1000)}])
        start = perf_counter()
        for _ in range(num_requests):
            audit.accepted(caller, spec)
            audit.ended(caller, "completions", spec, "ok", 100)
        return (perf_counter() - start) / num_requests * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000, help="different tokens, at most 4096")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), options.tokens))
    print(f"\naudit log: {audit_microseconds(5000):.0f} us a request")


if __name__ == "__main__":
    main()
