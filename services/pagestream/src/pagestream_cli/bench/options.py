"""The options of `pagestream bench`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from pagestream_cli.generate import add_server_arguments

SCALE_HELP = "shrink a trace's lengths to a context of N tokens (without a value: the model's)"


class LengthRange(NamedTuple):
    """Lengths in tokens, both ends included."""

    low: int
    high: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of bench."""
    add_server_arguments(parser)
    parser.add_argument(
        "--grpc",
        metavar="HOST:PORT",
        nargs="?",
        const="",
        help="use gRPC instead of HTTP (without a value: the ports of the running serve)",
    )
    _add_workload(parser.add_argument_group("requests (one of --prompts, --trace; default: random lengths)"))
    _add_arrivals(parser.add_argument_group("arrivals"))
    out = parser.add_argument_group("results")
    out.add_argument("--output", type=Path, metavar="FILE", help="write all numbers as JSON")
    out.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG plot")


def _add_workload(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--prompts", type=Path, metavar="FILE", help="one prompt per line, or .jsonl with prompt and max_tokens"
    )
    source.add_argument("--trace", metavar="FILE", help="Azure's csv or Mooncake's jsonl; `sample` is the packaged one")
    group.add_argument("--random-input-len", type=parse_range, metavar="A[:B]", help="prompt tokens (default: 32:255)")
    group.add_argument("--random-output-len", type=parse_range, metavar="A[:B]", help="output tokens (default: 64)")
    group.add_argument(
        "--num-requests", type=int, metavar="N", help="number of requests (default: all of the file, or 64 random ones)"
    )
    group.add_argument("--scale-to-context", type=int, nargs="?", const=0, metavar="N", help=SCALE_HELP)
    group.add_argument(
        "--vocab-size", type=int, default=256, metavar="N", help="random token ids are below N (default: 256)"
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="sampling temperature (default: 0, greedy)"
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of lengths, tokens and arrivals (default: 0)"
    )
    group.set_defaults(random_input_len=LengthRange(32, 255), random_output_len=LengthRange(64, 64))


def _add_arrivals(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--request-rate",
        type=float,
        metavar="R",
        help="Poisson arrivals, R per second (default: a trace's own arrivals, else all at once)",
    )
    group.add_argument(
        "--time-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="play a trace's arrivals X times as fast (default: %(default)s)",
    )
    group.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="at most N requests at a time; without --request-rate: N clients in a closed loop",
    )
    group.add_argument(
        "--request-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="longest time for one request (default: %(default)s)",
    )


def parse_range(text: str) -> LengthRange:
    """Parse `A` or `A:B`, with 1 <= A <= B."""
    low, _, high = text.partition(":")
    try:
        found = LengthRange(int(low), int(high or low))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} was given, A or A:B in tokens is expected") from error
    if not 1 <= found.low <= found.high:
        raise argparse.ArgumentTypeError(f"{text} was given, 1 <= A <= B is expected")
    return found
