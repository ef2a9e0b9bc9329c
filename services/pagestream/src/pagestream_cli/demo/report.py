"""What a demonstration shows: while it runs, and in the end."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pagestream_cli.demo.streams import FINISHED, NO_OWNER, UNKNOWN, DemoStream, Timeline

if TYPE_CHECKING:
    from rich.text import Text

WIDTH = 60
_LEGEND = (
    f"0, 1: engine of the stream   {NO_OWNER}: none   {UNKNOWN}: Redis is away   "
    "E, G, R: kill -9 of an engine, a gateway, Redis"
)

_ENGINES = ("blue", "yellow", "magenta", "cyan")
_STYLES = (
    (r"\bidentical\b", "green"),
    (r"\bDIFFERENT\b", "bold red"),
    (r"(?m)^ {10}[ EGR]+(?= +[\d.]+ s$)", "bold red"),
    (r"^\d+ of \d+ streams are identical.*$", "bold"),
)


def picture(streams: Sequence[DemoStream], timeline: Timeline, width: int = WIDTH) -> str:
    """Return a row for each stream: which engine ran it when, and the percentage of its tokens."""
    end_s = timeline.times_s[-1] if timeline.times_s else 0.0
    lines = [f"{'':>8}  {timeline.marks(width)}  {end_s:.1f} s"]
    for number, stream in enumerate(streams):
        row = timeline.row(number, width) if timeline.times_s else FINISHED * width
        done = 100 if stream.is_finished else min(99, 100 * stream.next_index // stream.max_tokens)
        lines.append(f"stream {number + 1:>2} {row}  {done:>3} %")
    return "\n".join([*lines, _LEGEND])


def styled(text: str) -> Text:
    """Return a picture, a table or a verdict for a terminal, with engines, kills and ends in colours."""
    from rich.text import Text

    found = Text(text, no_wrap=True, overflow="crop")
    for row in re.finditer(r"(?m)^stream .. (.*)(?= +\d+ %$)", text):
        for run in re.finditer(r"(\d)\1*", row[1]):
            found.stylize(_ENGINES[int(run[1]) % len(_ENGINES)], row.start(1) + run.start(), row.start(1) + run.end())
    for pattern, style in _STYLES:
        found.highlight_regex(pattern, style)
    return found


def table(undisturbed: Sequence[DemoStream], killed: Sequence[DemoStream]) -> str:
    """Return a row for each stream, with both digests."""
    lines = [f"{'stream':>6}{'tokens':>8}{'attempts':>10}{'longest gap':>13}  {'undisturbed':<16}  {'with kills':<16}"]
    for number, (first, second) in enumerate(zip(undisturbed, killed, strict=True), 1):
        same = "identical" if is_identical(first, second) else "DIFFERENT"
        gap = f"{second.longest_gap_s * 1000:.0f} ms"
        counts = f"{number:>6}{second.completion_tokens:>8}{second.attempts:>10}{gap:>13}"
        lines.append(f"{counts}  {first.digest}  {second.digest}  {same}")
    return "\n".join(lines)


def verdict(undisturbed: Sequence[DemoStream], killed: Sequence[DemoStream], timeline: Timeline) -> str:
    """Return the last line."""
    same = sum(is_identical(*pair) for pair in zip(undisturbed, killed, strict=True))
    died = ", ".join(kill.part for kill in timeline.kills) or "nothing"
    return f"{same} of {len(killed)} streams are identical to the undisturbed ones; killed: {died}"


def as_json(undisturbed: Sequence[DemoStream], killed: Sequence[DemoStream], timeline: Timeline) -> str:
    """Return everything as JSON."""
    streams: list[dict[str, Any]] = [
        {
            "request_id": second.request_id,
            "seed": second.seed,
            "tokens": second.completion_tokens,
            "attempts": second.attempts,
            "longest_gap_s": round(second.longest_gap_s, 4),
            "undisturbed_digest": first.digest,
            "digest": second.digest,
            "identical": is_identical(first, second),
            "owners": timeline.row(number, WIDTH) if timeline.times_s else "",
        }
        for number, (first, second) in enumerate(zip(undisturbed, killed, strict=True))
    ]
    return json.dumps({"streams": streams, "kills": [asdict(kill) for kill in timeline.kills]}, indent=2)


def is_identical(first: DemoStream, second: DemoStream) -> bool:
    """Whether two streams have ended with the same text and as many tokens."""
    ended = first.is_finished and second.is_finished
    return ended and (first.digest, first.completion_tokens) == (second.digest, second.completion_tokens)
