"""Prints a benchmark's figure beside its goal, in a form that `run.py` collects for its summary."""

MARK = "goal |"


def print_goal(what: str, wanted: str, measured: str) -> None:
    """Print one line."""
    print(f"{MARK} {what} | {wanted} | {measured} |", flush=True)
