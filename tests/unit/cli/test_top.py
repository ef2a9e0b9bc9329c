"""How `pagestream top` shows a reading."""

from __future__ import annotations

import json

from pagestream_cli.top import MOST_ENGINES_SHOWN, as_json, picture
from pagestream_streams.admin.engine_loads import EngineLoad
from pagestream_streams.observation.model_states import ModelRow, QueueRow


def test_engines_caches_and_queues_are_rows() -> None:
    engines = [EngineLoad("engine-0-12:ab", 3, 1, 0.5, 1024), EngineLoad("engine-1-12:cd", None, None, None, None)]
    queues = [QueueRow("0", 2, 50, 1.25, 100.0), QueueRow("1", 0, 0, 0.0, 0.0), QueueRow("resume", 1, 9, 0.5, 0.0)]
    lines = picture([ModelRow("demo", 3, engines, queues)]).splitlines()
    assert lines[0] == "demo: 2 engines, 3 requests running, 3 queued"
    assert lines[2].split() == ["engine-0-12", "█" * 10 + "░" * 10, "50%", "3", "1", "1024"]
    assert lines[3].split() == ["engine-1-12", "not", "known", "yet", "-", "-", "-"]
    assert [line.split()[:3] for line in lines[5:]] == [["class", "0", "2"], ["resume", "1", "9"]]


def test_many_engines_are_counted() -> None:
    engines = [EngineLoad(f"engine-{i}:a", 0, 0, 0.0, 0) for i in range(MOST_ENGINES_SHOWN + 5)]
    assert picture([ModelRow("demo", 0, engines, [])]).splitlines()[-1] == "  and 5 more engines"
    assert len(json.loads(as_json([ModelRow("demo", 0, engines, [])]))[0]["engines"]) == MOST_ENGINES_SHOWN + 5
    assert picture([]) == "no model is published"
