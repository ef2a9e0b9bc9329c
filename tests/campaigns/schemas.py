"""Call every operation of the OpenAPI document with generated requests, and compare each answer with the document.

    make deep PARTS=schemas ARGS="--examples 200"

A real gateway and a real Redis, with all calls that settings can allow; an engine without a model answers. schemathesis
makes requests that the document allows and requests that it forbids, and calls operations in sequences that share ids.
Wanted: no 5xx, no undeclared status, media type, body or header, no error event or line that is not as declared; what
the document forbids is refused; and each operation that can succeed has succeeded at least once. A second, short run
calls a gateway that asks for keys, without one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.engines import synthetic_engine
from support.processes.part import Part
from support.processes.stack import Gateway, Stack
from support.processes.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "schemas"
DEFAULT_EXAMPLES = 20
KEYLESS_EXAMPLES = 5
ADMIN_KEY = "sk-admin"
MAX_MODEL_LEN = 64  # tokens; an answer without max_tokens is as long
REQUEST_LIMIT_S = 20
RUN_LIMIT_S = 3600.0
KEYLESS_CHECKS = ("not_a_server_error", "status_code_conformance", "response_schema_conformance", "asks_for_a_key")
EVERYTHING = {
    "PAGESTREAM_GATEWAY__ALLOW_RUNTIME_LORA": "true",
    "PAGESTREAM_GATEWAY__ALLOW_MODEL_CHANGES": "true",
}
UNSUCCESSFUL = (
    "POST /admin/v1/quarantine/{request_id}/release",  # needs a quarantined request
    "POST /v1/batches/{batch_id}/cancel",  # needs a batch that goes on
    "POST /v1/load_lora_adapter",  # need a folder with an adapter
    "POST /v1/unload_lora_adapter",
    "PUT /v1/requests/{request_id}",  # needs the id of a request that Redis has lost, with its body and seed
    "POST /v1/models/load",  # need an engine with a list of models
    "POST /v1/models/unload",
    "POST /v1/embeddings",  # need an engine that computes vectors
    "POST /v1/classify",
    "POST /classify",
    "POST /v1/score",
    "POST /score",
    "POST /v1/rerank",
    "POST /v2/rerank",
    "POST /rerank",
)
"""Operations that can't succeed here, for want of what stands beside them."""


def run(
    gateway: Gateway, options: argparse.Namespace, *, is_keyless: bool
) -> tuple[bool, Mapping[str, dict[str, int]]]:
    """Run schemathesis against a gateway; return whether it found nothing, and the answers by operation and status."""
    statuses = gateway.log.with_suffix(".statuses")
    environment = {
        **os.environ,
        "SCHEMATHESIS_HOOKS": "hooks",
        "PYTHONPATH": str(FOLDER),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(gateway.log.with_suffix(".hypothesis")),
        "SCHEMAS_MODEL": synthetic_engine.MODEL,
        "SCHEMAS_STATUSES": str(statuses),
        "SCHEMAS_ADMIN_KEY": "" if is_keyless else ADMIN_KEY,
        "SCHEMAS_KEYLESS": str(int(is_keyless)),
    }
    call = [str(options.program), "--config-file", str(FOLDER / "schemathesis.toml"), "run"]
    call += [f"{gateway.url}/openapi.json", "--seed", str(options.seed), "--continue-on-failure", "--no-shrink"]
    call += ["--request-timeout", str(REQUEST_LIMIT_S)]
    if is_keyless:
        call += ["--phases", "fuzzing", "--max-examples", str(KEYLESS_EXAMPLES), "--checks", ",".join(KEYLESS_CHECKS)]
    else:
        call += ["--phases", "coverage,fuzzing,stateful", "--max-examples", str(options.examples)]
    ended = subprocess.run(call, env=environment, cwd=gateway.log.parent, timeout=RUN_LIMIT_S, check=False)
    counts: dict[str, dict[str, int]] = json.loads(statuses.read_text())
    return ended.returncode == 0, counts


def has_no_defect(gateway: Gateway) -> bool:
    """Print the gateway's errors; return whether it runs and has logged none."""
    errors = [line for line in gateway.log.read_text(errors="replace").splitlines() if '"level": "ERROR"' in line]
    for line in errors[:5]:
        print(line[:2000])
    return gateway.is_alive() and not errors


def report(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Print the answers; return the operations that can succeed and have not."""
    failed = []
    for operation, by_status in sorted(counts.items()):
        print(f"{operation}: {', '.join(f'{count} x {status}' for status, count in sorted(by_status.items()))}")
        if operation not in UNSUCCESSFUL and not any(status.startswith("2") for status in by_status):
            failed.append(operation)
    print(f"{sum(sum(each.values()) for each in counts.values())} answers of {len(counts)} operations")
    if failed:
        print(f"never answered with success: {', '.join(failed)}")
    return failed


def campaign(options: argparse.Namespace, folder: Path) -> bool:
    """Start all processes and call them; return whether nothing was found."""
    os.environ.update(EVERYTHING)
    stack = Stack(folder, model=Path(), engine_options=())
    engine_command = [sys.executable, "-m", "support.engines.synthetic_engine", "--redis", stack.redis_url]
    engine_command += ["--rate", "100000", "--max-model-len", str(MAX_MODEL_LEN), "--report-s", "60"]
    paths = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    engine = Part("engine", engine_command, folder / "engine.log", {"PYTHONPATH": os.pathsep.join(filter(None, paths))})
    keys, admin_keys = folder / "keys", folder / "admin-keys"
    keys.write_text(f"{sha256(b'a key that no one sends').hexdigest()} somebody\n")
    admin_keys.write_text(f"{sha256(ADMIN_KEY.encode()).hexdigest()} root\n")
    try:
        stack.redis.start()
        engine.start()
        wait_until(engine.has_said_ready, limit_s=30, what="engine")
        is_right = True
        for is_keyless in (False, True):
            more = ("--api-keys", str(keys)) if is_keyless else ()
            gateway = stack.add_gateway("--admin-keys", str(admin_keys), *more)
            wait_until(gateway.has_become_ready, limit_s=30, what="gateway")
            found_nothing, counts = run(gateway, options, is_keyless=is_keyless)
            failed = [] if is_keyless else report(counts)
            is_right = found_nothing and not failed and has_no_defect(gateway) and is_right
            gateway.stop()
    finally:
        for part in (engine, *stack.parts):
            part.stop()
    return is_right


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=DEFAULT_EXAMPLES, help="requests of each kind and operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--program", type=Path, default=ROOT / ".schemas/python/bin/schemathesis")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        is_right = campaign(options, Path(folder))
    print(f"as declared: {'yes' if is_right else 'NO'} ({os.cpu_count()} cores)")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
