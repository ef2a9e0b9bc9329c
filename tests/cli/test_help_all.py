"""`serve --help-all` names every variable that the processes read, each with its default and what it says."""

import pytest
from pagestream_cli.__main__ import main
from pagestream_cli.serve.help_all import NO_DEFAULT, groups, settings_of
from pagestream_engine.config import EngineOptions
from pagestream_gateway.configuration import load_settings as gateway_settings
from pagestream_telemetry.environment import fields_of
from pagestream_worker.settings import load_settings as worker_settings

SETTINGS = [setting for group, kinds in groups().items() for setting in settings_of(group, kinds)]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.variable)
def test_every_setting_says_what_it_does(setting: tuple[str, str, str]) -> None:
    variable, default, text = setting
    assert text, f"{variable} has no text below its field"
    assert default


def test_the_engines_options_are_all_there() -> None:
    listed = {setting.variable for setting in SETTINGS if "_ENGINE__" in setting.variable}
    assert listed == {f"PAGESTREAM_ENGINE__{name.upper()}" for name in fields_of(EngineOptions)}


def test_what_is_listed_is_what_the_processes_take() -> None:
    numbers = {s.variable: s.default for s in SETTINGS if s.default.replace(".", "", 1).isdecimal()}
    assert len(numbers) > 40
    gateway_settings([], numbers)
    worker_settings(["/model", "--redis", "redis://x"], numbers)


def test_what_is_required_is_all_that_has_to_be_given() -> None:
    required = {s.variable for s in SETTINGS if s.default == NO_DEFAULT}
    assert required == {"PAGESTREAM_WORKER__MODEL", "PAGESTREAM_WORKER__REDIS"}
    worker_settings([], dict.fromkeys(required, "redis://x"))


def test_the_command_prints_them_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help-all", "--data-dir", "/nowhere/at/all"]) == 0
    shown = capsys.readouterr().out
    assert all(setting.variable in shown for setting in SETTINGS)
