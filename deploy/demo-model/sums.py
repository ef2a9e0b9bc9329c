"""Small sums, little sums in the form of stories, and counting."""

from random import Random

from world import VILLAGERS

MAX_RESULT = 10
"""Largest sum and first term."""
MAX_COUNT = 12
"""Largest number that is counted to."""
MINUS_SHARE = 0.6
"""Of sums and differences, the latter, which are harder to learn."""
THINGS = ("apples", "shells", "letters", "fish", "buns", "pumpkins", "coins", "candles", "eggs", "ropes")
PLUS = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "How much is {a} + {b}?",
    "How much is {a} plus {b}?",
    "{a} + {b} = ?",
    "Add {a} and {b}.",
)
MINUS = (
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "How much is {a} - {b}?",
    "How much is {a} minus {b}?",
    "{a} - {b} = ?",
)
GAIN = (
    "{n} has {a} {t} and finds {b} more. How many {t} does {s} have?",
    "{n} has {a} {t} and gets {b} more. How many {t} are there?",
)
LOSS = (
    "{n} has {a} {t} and gives away {b}. How many {t} are left?",
    "{n} has {a} {t} and loses {b}. How many {t} does {s} have?",
)
COUNTING = ("Count from {a} to {b}.", "Can you count from {a} to {b}?", "Please count from {a} to {b}.")


def plain_sum(rng: Random) -> tuple[str, str]:
    """Return a sum or a difference between 0 and `MAX_RESULT`."""
    total = rng.randint(0, MAX_RESULT)
    a = rng.randint(0, total)
    b = total - a
    if rng.random() >= MINUS_SHARE:
        return rng.choice(PLUS).format(a=a, b=b), f"{a} + {b} = {a + b}."
    return rng.choice(MINUS).format(a=a + b, b=b), f"{a + b} - {b} = {a}."


def told_sum(rng: Random) -> tuple[str, str]:
    """Return a sum as something that happens to a villager."""
    person, thing = rng.choice(VILLAGERS), rng.choice(THINGS)
    total = rng.randint(3, MAX_RESULT)
    a = rng.randint(1, total - 1)
    b = total - a
    gains = rng.random() >= MINUS_SHARE
    first, result, sign = (a, a + b, "+") if gains else (a + b, a, "-")
    question = rng.choice(GAIN if gains else LOSS).format(n=person.name, s=person.pronoun, t=thing, a=first, b=b)
    return question, f"{first} {sign} {b} = {result}, so {person.name} has {result}."


def counting(rng: Random) -> tuple[str, str]:
    """Return a run of numbers, up to `MAX_COUNT` at most."""
    first = rng.randint(1, MAX_COUNT // 2)
    last = rng.randint(first + 2, MAX_COUNT)
    return rng.choice(COUNTING).format(a=first, b=last), ", ".join(map(str, range(first, last + 1))) + "."


def number_exchange(rng: Random) -> tuple[str, str]:
    """Return a question about numbers with its answer."""
    return rng.choices((plain_sum, told_sum, counting), (6, 2, 1))[0](rng)
