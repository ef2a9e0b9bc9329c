"""What an engine imports first, and what it says where it can't."""

import sys
from pathlib import Path

import pytest
from pagestream_engine import ConfigError, Engine, EngineConfig, ModelNotFound

POLICY = """
from pagestream_engine import SchedulingPolicy, register_policy

class LastComeFirstServed(SchedulingPolicy):
    def rank(self, seq):
        return -seq.arrival

register_policy("lcfs", LastComeFirstServed)
"""
MODULES = {
    "__init__": "",
    "policies": POLICY,
    "families": "",
    "lacking": "import nowhere_to_be_found",
    "failing": "raise OSError('no licence\\nfor this machine')",
    "exiting": "raise SystemExit(0)",
}


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of plugins on Python's path."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)


def test_an_engine_finds_what_its_plugins_register(tmp_path: Path) -> None:
    """The policy is looked up before the model, which is not there."""
    options = {"scheduling_policy": "lcfs", "plugins": ["mine.families", "mine.policies"]}
    with pytest.raises(ModelNotFound):
        Engine(tmp_path / "nowhere", EngineConfig.from_options(options))
    assert "mine.families" in sys.modules


def test_a_policy_that_no_plugin_registers_is_refused(tmp_path: Path) -> None:
    options = {"scheduling_policy": "lottery", "plugins": ["mine.families"]}
    with pytest.raises(
        ConfigError, match=r"scheduling_policy: given 'lottery', expected one of fcfs, .*; a module that"
    ):
        Engine(tmp_path / "nowhere", EngineConfig.from_options(options))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.nothing", "expected a module on Python's path; install its package, or name its folder in PYTHONPATH"),
        ("nowhere.at.all", "expected a module on Python's path; install"),
        ("mine.lacking", "expected a module that can be imported, not ModuleNotFoundError: No module named 'nowhere_"),
        ("mine.failing", "expected a module that can be imported, not OSError: no licence for this machine"),
        ("mine.exiting", "expected a module that can be imported, not SystemExit: 0"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_named(name: str, message: str, tmp_path: Path) -> None:
    config = EngineConfig.from_options({"plugins": ["mine.policies", name]})
    with pytest.raises(ConfigError, match=f"^plugins: given '{name}', {message}") as caught:
        Engine(tmp_path / "nowhere", config)
    assert caught.value.field == "plugins"
    assert caught.value.__cause__ is not None
    assert "\n" not in str(caught.value)
