"""Python's garbage collector, as the worker's and the engine's process set it."""

import gc

YOUNG_OBJECTS = 20_000
"""Between two collections; a few MB. Python's 700 are less than a step of 256 sequences makes."""


def spare_what_lives() -> None:
    """Exclude all objects from garbage collection that there are now, and collect young ones less often.

    Call it when what lives as long as the process has been loaded: a collection that walks it would be a pause between
    two tokens. A step makes few cycles, but thousands of short-lived objects a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
