"""How `pagestream top` shows a reading."""

from __future__ import annotations

import json

from pagestream.v1.records_pb2 import BlockHolders, BlockMap, RunningSequence
from pagestream_cli.block_rows import LEGEND, MOST_ROWS, WIDTH
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


def test_blocks_are_characters_of_the_requests_that_hold_them() -> None:
    found = BlockMap(
        cells=[0, 1, 2, 3, 4, 2],
        holders=[
            BlockHolders(sequences=[0], num_references=1),
            BlockHolders(sequences=[1], num_references=1),
            BlockHolders(sequences=[0, 1], num_references=2),
        ],
        sequences=[
            RunningSequence(request_id="first", num_tokens=40, num_blocks=3),
            RunningSequence(request_id="second", num_tokens=33, num_blocks=2, is_prefill=True),
        ],
    )
    engines = [EngineLoad("engine-0-12:ab", 2, 0, 0.5, 1024), EngineLoad("engine-1-12:cd", 0, 0, 0.0, 1024)]
    maps = {"engine-0-12:ab": found, "engine-1-12:cd": None}
    lines = picture([ModelRow("demo", 2, engines, [])], maps).splitlines()
    assert lines[3:6] == [
        "    ·░ab#a",
        "    a first  decode       40 tokens     3 blocks",
        "    b second  prefill      33 tokens     2 blocks",
    ]
    assert lines[7:] == ["    no map of its blocks", "", LEGEND]
    maps["engine-0-12:ab"] = BlockMap(cells=[0] * 4096)
    rows = picture([ModelRow("demo", 2, engines[:1], [])], maps).splitlines()[3:-2]
    assert [len(row) for row in rows] == [4 + WIDTH] * MOST_ROWS
