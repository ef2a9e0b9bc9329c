"""On PYTHONPATH, makes an engine process kill itself at a prompt that begins with the token POISON_TOKEN."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

POISON = int(os.environ.get("POISON_TOKEN", "-1"))
RUNNER = "pagestream_engine.runner.runner"


class Poisoner(Loader):
    """Loads the runner's module and wraps its `execute`."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        runner: Any = vars(module)["ModelRunner"]
        execute = runner.execute

        def poisoned(self: Any, plan: Any) -> Any:
            if any(new.token_ids[0] == POISON for new in plan.added):
                os.kill(os.getpid(), signal.SIGKILL)
            return execute(self, plan)

        runner.execute = poisoned


class Finder(MetaPathFinder):
    """Finds the runner's module."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != RUNNER:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = Poisoner(spec.loader)
        return spec


sys.meta_path.insert(0, Finder())
