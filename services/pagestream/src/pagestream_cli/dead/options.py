"""The options of `pagestream dead`."""

from __future__ import annotations

import argparse

from pagestream_cli import store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of dead."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listing = actions.add_parser("list", help="name the quarantined requests, the oldest first")
    listing.add_argument("--model", metavar="NAME", help="of this model only")
    listing.add_argument("--json", action="store_true", help="for programs")
    store.add_arguments(listing)

    showing = actions.add_parser("show", help="tell all about one of them")
    showing.add_argument("request_id", metavar="ID")
    showing.add_argument("--json", action="store_true", help="for programs, with the whole request")
    store.add_arguments(showing)

    requeueing = actions.add_parser(
        "requeue", help="let it go on from where it stood, under a new id that is printed (again: the same id)"
    )
    requeueing.add_argument("request_id", metavar="ID", nargs="+")
    store.add_arguments(requeueing)
