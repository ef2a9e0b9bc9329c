"""Which executor a configuration asks for."""

from __future__ import annotations

from pathlib import Path

from pagestream_engine.config import EngineConfig
from pagestream_engine.executor.base import Executor, RunnerFactory
from pagestream_engine.executor.inline import InlineExecutor
from pagestream_engine.executor.process import ProcessExecutor
from pagestream_engine.executor.rank_group import RankGroup
from pagestream_engine.preflight import check_options


def make_executor(make_runner: RunnerFactory, folder: Path, config: EngineConfig) -> Executor:
    """Load a model into an executor of the configured kind."""
    if config.parallel.num_ranks > 1:
        check_options(folder, config)  # before each rank's process has imported torch
        return RankGroup(make_runner, folder, config)
    kind = ProcessExecutor if config.executor.executor == "process" else InlineExecutor
    return kind(make_runner, folder, config)
