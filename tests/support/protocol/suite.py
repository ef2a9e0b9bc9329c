"""On which servers the tests of the durable streams run: all in `make topologies`, a selection in `make test`.

And which tests are left out on which servers, with the reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass

OLDEST, NEWEST, CLUSTER, SENTINELS = "oldest", "newest", "cluster", "sentinels"
PLACES = (OLDEST, NEWEST, CLUSTER, SENTINELS)
"""The oldest and the newest server of this machine, three masters with replicas, a master that Sentinels name."""

CROWDS = (CLUSTER, SENTINELS)
"""Places with several servers."""

COVER: Mapping[str, tuple[str, ...]] = {
    "test_scripts": (OLDEST, NEWEST, CLUSTER, SENTINELS),
    "test_append": (NEWEST,),
    "test_models": (CLUSTER,),
    "test_policies": (CLUSTER,),
    "test_reading": (SENTINELS,),
}
"""Where a module's tests run in `make test`; those of other modules run on the oldest server.

All scripts run on every server; the rest once, where most differs: each type of reply on the newest, keys of several
partitions on a cluster, connections and readers behind Sentinels. `make topologies` runs all others, and CI does on
every third day.
"""


@dataclass(frozen=True)
class Omission:
    """Tests that are left out on some servers."""

    places: tuple[str, ...]
    why: str


OMITTED: Mapping[str, Omission] = {
    "test_model_check": Omission(CROWDS, "drives scripts on one connection and in virtual time, without a topology"),
    "test_limits_machine": Omission(CROWDS, "drives scripts on one connection and in virtual time, without a topology"),
    "test_storm_recovery": Omission(CROWDS, "drives scripts on one connection and in virtual time, without a topology"),
    "test_model_mutants": Omission(PLACES, "starts a server of its own: broken scripts are caught once"),
    "test_machine_loss": Omission(PLACES, "starts servers of its own: it cuts their append-only files by hand"),
    "test_outage": Omission(PLACES, "starts a server of its own: it kills and starts it by hand"),
    "test_partitions::test_a_round_goes_on_behind_what_failed": Omission((CLUSTER,), "its rounds have one part"),
    "test_reads_of_accepted::test_nothing_is_asked_for": Omission(
        (CLUSTER,), "its servers pass messages on only once they know of the subscription: the first may be lost"
    ),
    "test_embedded": Omission(PLACES, "starts servers of its own: it is about starting one"),
}
"""By module, or by module and test as pytest names them."""


def places(module: str, test: str) -> tuple[str, ...]:
    """Return where a test runs in `make topologies`. `test`: its name, with its class before it."""
    omitted = {place for name in (module, f"{module}::{test}") if name in OMITTED for place in OMITTED[name].places}
    return tuple(place for place in PLACES if place not in omitted)


def is_in_cover(module: str, place: str) -> bool:
    """Return whether `make test` runs a module's tests in a place."""
    return place in COVER.get(module, (OLDEST,))
