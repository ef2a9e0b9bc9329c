"""Where the demo model lies."""

from __future__ import annotations

from pathlib import Path

from pagestream_cli.errors import UsageError

DEMO_MODEL_NAME = "demo"
"""Its served name."""


def demo_model_places() -> tuple[Path, ...]:
    """Folders that may hold it: inside an installed wheel, or in the checkout that this package is part of."""
    package = Path(__file__).resolve().parent
    checkout = package.parents[3]
    return (package / "demo_model", checkout / "deploy" / "demo-model" / "model")


def find_demo_model() -> Path:
    """The demo model's folder.

    Raises:
        UsageError: this installation came without it.
    """
    for place in demo_model_places():
        if (place / "config.json").is_file():
            return place
    raise UsageError(
        "this installation has no demo model",
        hint="name a model folder: pagestream serve MODEL; in a checkout, `make demo-model` makes the demo",
    )
