"""The options of `pagestream bench`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from pagestream_cli.sampling import add_server_arguments

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
        help="speak gRPC instead of HTTP (without a value: the serve's port)",
    )
    _add_workload(parser.add_argument_group("what is asked (one of --prompts, --trace; default: random lengths)"))
    _add_arrivals(parser.add_argument_group("when"))
    out = parser.add_argument_group("results")
    out.add_argument("--output", type=Path, metavar="FILE", help="write all numbers as JSON")
    out.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG plot")


def _add_workload(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group()
    source.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt a line, or .jsonl: prompt, max_tokens")
    source.add_argument("--trace", metavar="FILE", help="Azure's csv or Mooncake's jsonl; `sample` is ours")
    group.add_argument("--random-input-len", type=parse_range, metavar="A[:B]", help="prompt tokens (default: 32:255)")
    group.add_argument("--random-output-len", type=parse_range, metavar="A[:B]", help="output tokens (default: 64)")
    group.add_argument("--num-requests", type=int, metavar="N", help="default: all of the file, 64 random ones")
    group.add_argument("--scale-to-context", type=int, nargs="?", const=0, metavar="N", help=SCALE_HELP)
    group.add_argument(
        "--vocab-size", type=int, default=256, metavar="N", help="random tokens are below (default: 256)"
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of lengths, tokens, arrivals (default: 0)")
    group.set_defaults(random_input_len=LengthRange(32, 255), random_output_len=LengthRange(64, 64))


def _add_arrivals(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--request-rate",
        type=float,
        metavar="R",
        help="Poisson arrivals, R a second (default: a trace's own arrivals, else all at once)",
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
        help="at most N at a time; alone: N clients that ask one after the other",
    )
    group.add_argument(
        "--request-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds for one request (default: %(default)s)",
    )


def parse_range(text: str) -> LengthRange:
    """`A` or `A:B`, at least 1, A not above B."""
    low, _, high = text.partition(":")
    try:
        found = LengthRange(int(low), int(high or low))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} was given, A or A:B in tokens is expected") from error
    if not 1 <= found.low <= found.high:
        raise argparse.ArgumentTypeError(f"{text} was given, 1 <= A <= B is expected")
    return found
