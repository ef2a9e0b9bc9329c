"""Put the demo model into the wheel, so that `pagestream serve` works without a checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class DemoModelHook(BuildHookInterface):
    """Include the model's folder of the checkout; an editable installation finds the folder itself."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it builds; `version` is "standard" or "editable"."""
        model = Path(self.root).parents[1] / "deploy" / "demo-model" / "model"
        if version == "standard" and model.is_dir():
            build_data["force_include"][str(model)] = "pagestream_cli/demo_model"
