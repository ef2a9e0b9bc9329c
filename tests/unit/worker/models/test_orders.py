"""Operators' orders, read by engines one after the other."""

from dataclasses import replace

import pytest
from pagestream_streams.admin.roster import Order, RosterRow, RosterView, Verb
from pagestream_worker.models.orders import Duties, read_duties

MODELS = ("a", "b")


def beat(rows: dict[str, RosterRow], orders: dict[str, Order], engine_id: str) -> Duties:
    """Let an engine read its duties and do them: it loads a model until its next beat."""
    row = rows[engine_id] = replace(rows[engine_id], is_loading=False)
    duties = read_duties(row, RosterView(0, "", rows, {}, orders))
    for name in duties.done:
        del orders[name]
    if duties.wakes:
        rows[engine_id] = replace(row, serving=duties.wakes, is_loading=True, last="")
    return duties


@pytest.mark.parametrize("beats", ["xyz" * 3, "xxxyyyzzz", "zyx" * 3])
def test_all_engines_that_had_a_model_wake_by_one_order(beats: str) -> None:
    rows = {"x": RosterRow(MODELS, last="a"), "y": RosterRow(MODELS, last="a"), "z": RosterRow(MODELS, last="b")}
    orders = {name: Order(Verb.LOAD, 1) for name in MODELS}
    for engine_id in [*beats, *"xyz"]:
        beat(rows, orders, engine_id)
    assert [row.serving for row in rows.values()] == ["a", "a", "b"]
    assert not orders


def test_an_order_waits_for_no_engine_that_can_not_load() -> None:
    serving, failed = RosterRow(MODELS, serving="a"), RosterRow(MODELS, last="a", failed={"a": "it is cut off"})
    for broken in (failed, replace(failed, failed={}, postponed=("a",))):
        rows, orders = {"x": serving, "y": broken}, {"a": Order(Verb.LOAD, 1)}
        assert not beat(rows, orders, "y").wakes
        beat(rows, orders, "x")
        assert not orders


def test_an_engine_frees_what_it_serves_since_before_the_order() -> None:
    view = RosterView(0, "", {}, {}, {"a": Order(Verb.UNLOAD, 5)})
    row = RosterRow(MODELS, serving="a", since_ms=5)
    assert read_duties(row, view).frees
    for other in (replace(row, since_ms=6), replace(row, is_loading=True), replace(row, serving="b")):
        assert not read_duties(other, view).frees


def test_an_engine_sleeps_with_its_weights_until_it_is_to_free_them() -> None:
    view = RosterView(0, "", {}, {}, {"a": Order(Verb.SLEEP, 5)})
    row = RosterRow(MODELS, serving="a", since_ms=5)
    assert read_duties(row, view) == Duties(sleeps=True)
    asleep = RosterRow(MODELS, last="a", keeps="a", since_ms=5)
    assert read_duties(asleep, view) == Duties()
    assert read_duties(asleep, replace(view, orders={"a": Order(Verb.UNLOAD, 6)})) == Duties(frees=True)
    assert read_duties(replace(asleep, keeps=""), replace(view, orders={"a": Order(Verb.UNLOAD, 6)})) == Duties()
