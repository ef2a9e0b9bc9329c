"""What a benchmark measured beside what is wanted, in a form that `run.py` gathers at its end."""

MARK = "goal |"


def tell(what: str, wanted: str, measured: str) -> None:
    """Print one line."""
    print(f"{MARK} {what} | {wanted} | {measured} |", flush=True)
