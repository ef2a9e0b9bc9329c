"""The engine's examples run; the custom family computes what `transformers` does, the custom policy is obeyed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pagestream_engine import Engine, EngineConfig, SamplingParams
from pagestream_engine.models import registry
from pagestream_engine.models.family_source import FamilySource
from pagestream_engine.models.registry import register_family
from pagestream_engine.models.select import open_model
from pagestream_engine.scheduler import policy
from support.engines.architectures import small_config, write_model
from support.engines.arithmetic_model import ArithmeticFacts, ArithmeticRunner, make_folder
from support.engines.general_parity import check_parity

EXAMPLES = Path(__file__).parents[3] / "services" / "engine" / "examples"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports an example by its name, until the end of the test."""

    def do(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(EXAMPLES)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return do


def test_offline_generation(load: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    example = load("offline_generation")
    example.main(str(example.DEMO_MODEL))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(example.PROMPTS)
    assert all("->" in line for line in lines)


def test_a_custom_family(load: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = {"residual_multiplier": 0.3, "attention_multiplier": 0.2, "embedding_multiplier": 4.0}
    config = small_config("granite", logits_scaling=2.0, **constants)
    config.save_pretrained(tmp_path)
    write_model(tmp_path, config)
    monkeypatch.setattr(registry, "_registered", {})
    register_family("GraniteForCausalLM", load("custom_family").Granite())
    assert isinstance(open_model(tmp_path), FamilySource)
    check_parity(tmp_path)


def test_a_custom_policy(load: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence at a time: short prompts overtake a long one, but not those that come AGEING tokens too late."""
    monkeypatch.setattr(policy, "_registered", {})
    load("custom_policy")
    lengths = [9, 40, 3, 30, 2, *[3] * 12]

    def order(**options: Any) -> list[str]:
        config = EngineConfig.from_options({"num_gpu_blocks_override": 32, "max_num_seqs": 1, **options})
        folder = make_folder(tmp_path / "model")
        engine = Engine(folder, config, make_runner=lambda _, config: ArithmeticRunner(config, ArithmeticFacts()))
        for number, length in enumerate(lengths):
            engine.add_request(str(number), [number + 1] * length, SamplingParams(temperature=0, max_tokens=2))
        ended = []
        while engine.has_unfinished_requests():
            ended += [output.seq_id for output in engine.step() if output.finish_reason is not None]
        return ended

    arrivals = [str(number) for number in range(len(lengths))]
    assert order() == arrivals
    by_rank = sorted(arrivals, key=lambda number: lengths[int(number)] + 4 * int(number))
    assert order(scheduling_policy="shortest_prompt_first") == by_rank
    assert by_rank.index("1") == 10, "the long prompt is overtaken by nine, not by all"
