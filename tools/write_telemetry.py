"""Write the lists of metrics in docs/telemetry.md from telemetry's catalog.

python tools/write_telemetry.py [--check]
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from pagestream_telemetry import ENGINE_METRICS, GATEWAY_METRICS, Kind, Metric, exposed_name

PAGE = Path(__file__).resolve().parents[1] / "docs" / "telemetry.md"
_WIDTH = 119


def page(before: str) -> str:
    """Return the page with the lists below its two headings written anew."""
    for heading, metrics in (("### Engine", ENGINE_METRICS), ("### Gateway", GATEWAY_METRICS)):
        written = f"{heading}\n\n{''.join(map(_item, metrics))}\n"
        start = before.index(f"{heading}\n\n")
        end = before.index("\n\n", start + len(heading) + 2) + 2
        before = before[:start] + written + before[end:]
    return before


def _item(metric: Metric) -> str:
    exposed = exposed_name(metric) + ("_total" if metric.kind is Kind.COUNTER else "")
    by = f" by {', '.join(f'`{name}`' for name in metric.attributes)}" if metric.attributes else ""
    text = f"- `{metric.name}`: {metric.kind.value} in `{metric.unit}`{by}. {metric.text} Prometheus: `{exposed}`."
    return textwrap.fill(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) + "\n"


def main() -> int:
    """Write the page, or with --check return 1 where it is not what it would be."""
    before = PAGE.read_text()
    if "--check" in sys.argv[1:]:
        return int(page(before) != before)
    PAGE.write_text(page(before))
    return 0


if __name__ == "__main__":
    sys.exit(main())
