"""What an engine has to do because of what operators ask for: a function of its row and of the roster."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagestream_streams.admin.roster import Order, RosterRow, RosterView, Verb


@dataclass(frozen=True)
class Duties:
    """Of one engine, now."""

    frees: bool = False
    """It gives up the model that it serves, or whose weights it keeps."""
    sleeps: bool = False
    """It gives up the model that it serves, and keeps its weights."""
    wakes: str = ""
    """The model that it had when it was put to sleep, and loads again; "" for none."""
    done: Mapping[str, Order] = field(default_factory=dict)
    """Orders to settle."""


def read_duties(row: RosterRow, view: RosterView) -> Duties:
    """Return what an engine has to do.

    An order to load a model is for each engine that had it when it was put to sleep, and stays until all of these have
    read it. Where there is none, `plan_changes` finds an engine.

    Args:
        row: its own, as it is in the roster.
    """
    frees, sleeps, wakes, done = False, False, "", {}
    serves = "" if row.is_loading else row.serving
    for name, order in view.orders.items():
        is_for_it = name in (serves, row.keeps) and order.at_ms >= row.since_ms
        if order.verb is Verb.UNLOAD:
            frees = frees or is_for_it
        elif order.verb is Verb.SLEEP:
            sleeps = sleeps or (is_for_it and name == serves)
        elif row.last == name and not row.is_loading and name not in (*row.failed, *row.postponed):
            wakes = name
        elif (name == serves or name in row.failed) and not view.is_to_wake(name):
            done[name] = order
    return Duties(frees, sleeps, wakes, done)
