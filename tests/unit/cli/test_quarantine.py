"""Quarantined requests as a person and as a program see them."""

import dataclasses
import json

from pagestream.v1.inference_pb2 import SamplingParams, TokenIds
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_cli.quarantine import description, line, summary, whole
from pagestream_streams import QuarantinedRequest

DEAD = QuarantinedRequest(
    request_id="2a97516c-0000-0123456789abcdef0123456789abcdef",
    model="demo",
    tenant="acme",
    reason="4 engines died while they computed entry 7",
    next_index=7,
    attempts=5,
    engines=("engine-0:a", "engine-1:b"),
    quarantined_at=1_700_000_000.25,
    requeued_as=None,
    spec=RequestSpec(
        prompts=[TokenIds(ids=[1, 2, 3])], sampling=SamplingParams(n=2, max_tokens=16, temperature=0.5, seed=9)
    ),
)


def test_a_line_names_what_one_looks_for() -> None:
    shown = line(DEAD)
    assert shown.startswith(DEAD.request_id)
    assert all(word in shown for word in ("2023-11-14 22:13:20 UTC", "demo", "acme", "at 7", DEAD.reason))
    assert "requeued" not in shown
    assert line(dataclasses.replace(DEAD, requeued_as="new")).endswith("requeued as new")


def test_the_description_leaves_out_what_is_empty_and_the_prompt() -> None:
    shown = description(DEAD)
    assert "engine-0:a, engine-1:b" in shown
    assert "prompts:            3 tokens" in shown
    assert "n 2, max_tokens 16, temperature 0.5, seed 9" in shown
    assert "requeued as" not in shown
    assert "client's own id" not in shown


def test_programs_get_json() -> None:
    row = json.loads(json.dumps(summary(DEAD)))
    assert row["request_id"] == DEAD.request_id
    assert (row["next_index"], row["engines"], row["requeued_as"]) == (7, ["engine-0:a", "engine-1:b"], None)
    assert json.loads(json.dumps(whole(DEAD)))["spec"]["prompts"] == [{"ids": [1, 2, 3]}]
