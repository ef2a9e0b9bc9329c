"""Profiles of steps that compute something, by torch's real profiler."""

import json
from pathlib import Path

import pytest
import torch
from pagestream_worker.stepping.profiler import StepProfiler
from support.processes.waiting import wait_until

LIMIT_S = 60.0


def run_steps(profiler: StepProfiler, most: int = 50) -> int:
    """Steps while a profile is wanted; how many there were."""
    steps = 0
    while profiler.is_wanted and steps < most:
        profiler.before_step()
        torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.after_step()
        steps += 1
    return steps


def products(path: Path) -> int:
    wait_until(path.exists, limit_s=LIMIT_S, what="the profile")
    events = json.loads(path.read_text())["traceEvents"]
    return sum(event.get("name") == "aten::mm" for event in events)


def test_a_profile_has_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path / "profiles", "engine-1")
    assert not profiler.is_wanted
    path = Path(profiler.request(3))
    assert (path.parent, path.suffix) == (tmp_path / "profiles", ".json")
    assert path.name.startswith("engine-1-")
    with pytest.raises(RuntimeError, match=path.name):
        profiler.request(1)
    assert run_steps(profiler) == 3
    assert products(path) == 3
    assert list(path.parent.iterdir()) == [path]


def test_there_can_be_one_after_another(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, "engine-1")
    paths = []
    for steps in (1, 2):
        paths.append(Path(asked_until_free(profiler, steps)))
        assert run_steps(profiler) == steps
        assert products(paths[-1]) == steps
    assert paths[0] != paths[1]


def asked_until_free(profiler: StepProfiler, steps: int) -> str:
    """The first one is forgotten a moment after its file is there."""
    got: list[str] = []

    def ask() -> bool:
        try:
            got.append(profiler.request(steps))
        except RuntimeError:
            return False
        return True

    wait_until(ask, limit_s=LIMIT_S, what="the profiler")
    return got[0]


def test_a_folder_that_cannot_be_written_harms_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    profiler = StepProfiler(tmp_path / "file" / "profiles", "engine-1")
    profiler.request(1)
    assert run_steps(profiler) == 1
    wait_until(lambda: "can't be written" in caplog.text, limit_s=LIMIT_S, what="a word about it")
    assert asked_until_free(profiler, 1)
