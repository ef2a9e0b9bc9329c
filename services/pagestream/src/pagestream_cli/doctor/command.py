"""`pagestream doctor`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from pagestream_cli.console import has_colours
from pagestream_cli.datadir import DataDir
from pagestream_cli.doctor.finding import Finding, Verdict
from pagestream_cli.errors import UsageError

COLOURS = {Verdict.OK: "32", Verdict.WARNING: "33", Verdict.PROBLEM: "31"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of doctor."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="model folder to check (default: the demo model)")
    parser.add_argument("--model", dest="named_model", metavar="MODEL", help="the same; with --gpu also a repository")
    parser.add_argument(
        "--gpu",
        action="append",
        metavar="NAME",
        help="say what fits on such a card, such as H100, from the model's configuration alone; may be repeated",
    )
    parser.add_argument("--data-dir", metavar="DIR", help="the data folder that serve would use")
    parser.add_argument("--host", default="127.0.0.1", help="where gateways would listen (default: %(default)s)")
    parser.add_argument("--http-port", type=int, default=8000, metavar="PORT", help="default: %(default)s")
    parser.add_argument("--grpc-port", type=int, default=50051, metavar="PORT", help="default: %(default)s")
    parser.add_argument("--redis", metavar="URL", help="a Redis to check (default: that of the running serve)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Report on this machine, or on cards that are not here. Returns 1 when there is a problem."""
    if arguments.model and arguments.named_model:
        raise UsageError("two models are named", hint="give MODEL or --model, not both")
    arguments.model = arguments.model or arguments.named_model
    if arguments.gpu:
        from pagestream_cli.doctor import sizing

        found = sizing.size(arguments.model, arguments.gpu)
        print(json.dumps(found, indent=2) if arguments.json else sizing.as_text(found))
        return 0
    findings = list(examine(arguments))
    print(as_json(findings) if arguments.json else as_text(findings, coloured=has_colours(sys.stdout)))
    return 1 if any(finding.verdict is Verdict.PROBLEM for finding in findings) else 0


def examine(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Run all checks, in the order of the report."""
    from pagestream_cli.doctor import place, redis, software

    data_dir = DataDir.at(arguments.data_dir)
    ports = {"http": arguments.http_port, "grpc": arguments.grpc_port}
    checks: Iterable[Iterator[Finding]] = (
        software.check_python(),
        software.check_torch(),
        software.check_triton(),
        software.check_compiler(),
        software.check_logs(),
        software.check_determinism(),
        software.check_redis(data_dir),
        redis.check_running_redis(arguments.redis, data_dir),
        place.check_model(arguments.model),
        place.check_context(arguments.model, data_dir),
        place.check_data_dir(data_dir),
        place.check_serve(data_dir),
        place.check_ports(data_dir, arguments.host, ports),
    )
    return chain.from_iterable(checks)


def as_json(findings: Sequence[Finding]) -> str:
    """Format the findings as an array of objects."""
    return json.dumps(
        [{"subject": f.subject, "verdict": f.verdict.value, "found": f.found, "advice": f.advice} for f in findings],
        indent=2,
    )


def as_text(findings: Sequence[Finding], *, coloured: bool) -> str:
    """Format a line for each finding, and one more for its advice."""
    width = max(len(finding.subject) for finding in findings)
    lines: list[str] = []
    for finding in findings:
        word = f"{finding.verdict.value:<8}"
        shown = f"\x1b[{COLOURS[finding.verdict]}m{word}\x1b[0m" if coloured else word
        lines.append(f"{shown} {finding.subject:<{width}}  {finding.found}")
        if finding.advice:
            lines.append(f"{'':8} {'':<{width}}  -> {finding.advice}")
    return "\n".join(lines)
