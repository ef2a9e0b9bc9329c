"""The engine's examples run; the custom family computes what `transformers` does, the custom policy is obeyed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pagestream_engine import LLM, ConfigError, Engine, EngineConfig, SamplingParams
from support.engines.architectures import small_config, write_model
from support.engines.arithmetic_model import ArithmeticFacts, ArithmeticRunner, make_folder
from support.engines.general_parity import check_parity

pytestmark = pytest.mark.served

EXAMPLES = Path(__file__).parents[2] / "services" / "engine" / "examples"


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


@pytest.fixture
def granite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model of the custom family, which is not registered yet."""
    monkeypatch.setattr("pagestream_engine.models.registry._registered", {})
    constants = {"residual_multiplier": 0.3, "attention_multiplier": 0.2, "embedding_multiplier": 4.0}
    config = small_config("granite", logits_scaling=2.0, **constants)
    config.save_pretrained(tmp_path)
    write_model(tmp_path, config)
    return tmp_path


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("executor", ["inline", pytest.param("process", marks=pytest.mark.slow)])
def test_a_custom_family(granite: Path, load: Callable[[str], ModuleType], executor: str) -> None:
    """In deterministic mode, which the modelling code of `transformers` refuses: the family has run."""
    options: Any = {"dtype": "float32", "device": "cpu", "deterministic": True, "num_gpu_blocks_override": 80}
    with pytest.raises(ConfigError, match="deterministic: given True, expected False or None for Granite"):
        LLM(granite, **options)
    load("custom_family")
    llm = check_parity(granite, executor=executor, plugins=["custom_family"], **options)
    llm.engine.close()


def test_another_version_of_a_family_has_another_fingerprint(
    granite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    monkeypatch.syspath_prepend(plugins)

    def fingerprint(version: int) -> str:
        text = (EXAMPLES / "custom_family.py").read_text()
        (plugins / "versioned_family.py").write_text(f"{text}\nVERSION = {version}\n")
        monkeypatch.delitem(sys.modules, "versioned_family", raising=False)
        monkeypatch.setattr("pagestream_engine.models.registry._registered", {})
        options: Any = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 8}
        return LLM(granite, plugins=["versioned_family"], **options).engine.fingerprint

    first = fingerprint(1)
    assert fingerprint(20) != first
    assert fingerprint(1) == first


def test_a_custom_policy(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """One sequence at a time: short prompts overtake a long one, but not those that come AGEING tokens too late."""
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
