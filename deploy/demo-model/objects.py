"""Villagers and boats as JSON objects, with the keys that are asked for."""

import json
from dataclasses import dataclass
from random import Random

from world import BOATS, VILLAGERS, Boat, Villager

TENS = {"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70}
ONES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
USUAL_KEYS = ("name", "job", "home", "pet", "age")
BOAT_KEYS = ("name", "owner", "colour", "cargo")
REQUESTS = (
    "{n} as JSON.", "Give me {n} as JSON.", "Describe {n} in JSON.", "Describe {n} as JSON.",
    "Return {n} as a JSON object.", "Show me {n} as JSON.",
)  # fmt: skip
KEYED_REQUESTS = (
    "{n} as JSON with {k}.", "Give me {n} as JSON with {k}.", "Return a JSON object with {k} of {n}.",
    "Describe {n} in JSON with the keys {k}.", "Give me {k} of {n} as JSON.", "Answer in JSON: what are {k} of {n}?",
)  # fmt: skip
QUESTIONS = ("Who is {n}?", "Tell me about {n}.", "Describe {n}.", "What do you know about {n}?")
ANSWER_KEY = "answer"


@dataclass(frozen=True)
class JsonAnswer:
    """A question and the object that answers it. `spans`: where in its text a value stands, as (begin, end)."""

    question: str
    content: dict[str, object]

    @property
    def text(self) -> str:
        """The object as JSON."""
        return json.dumps(self.content, ensure_ascii=False)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Where the keys and brackets stand that a schema's grammar gives, as (begin, end) in `text`."""
        found, place = [], 0
        for number, (key, value) in enumerate(self.content.items()):
            begin = f"{'{' if number == 0 else ', '}{json.dumps(key)}: "
            found.append((place, place + len(begin)))
            place += len(begin) + len(json.dumps(value, ensure_ascii=False))
        return tuple(found)


def years(age: str) -> int:
    """Return an age in words ("forty-two") as a number."""
    tens, _, ones = age.partition("-")
    return TENS[tens] + (ONES.index(ones) + 1 if ones else 0)


def villager_object(person: Villager) -> dict[str, object]:
    """Return all that is known of a villager, by key."""
    return {
        "name": person.name,
        "job": person.job,
        "home": person.home,
        "pet": person.pet,
        "pet_name": person.pet_name,
        "coat": person.coat,
        "food": person.food,
        "tool": person.tool,
        "friend": person.friend,
        "age": years(person.age),
    }


def boat_object(boat: Boat) -> dict[str, object]:
    """Return all that is known of a boat, by key."""
    return {"name": boat.name, "owner": boat.owner, "colour": boat.colour, "cargo": boat.cargo}


def listed(keys: list[str]) -> str:
    """Return names as a sentence lists them."""
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"


def draw_object(rng: Random) -> JsonAnswer:
    """Return a request for a villager or a boat as JSON, with keys that it names or the usual ones."""
    if rng.random() < 0.2:
        boat = rng.choice(BOATS)
        name, content, usual = f"the {boat.name}", boat_object(boat), BOAT_KEYS
    else:
        person = rng.choice(VILLAGERS)
        name, content, usual = person.name, villager_object(person), USUAL_KEYS
    if rng.random() < 0.2:
        return JsonAnswer(rng.choice(REQUESTS).format(n=name), {key: content[key] for key in usual})
    keys = draw_keys(content, rng)
    question = rng.choice(KEYED_REQUESTS).format(n=name, k=listed(keys))
    return JsonAnswer(question, {key: content[key] for key in keys})


def draw_schema_object(rng: Random) -> JsonAnswer:
    """Return a plain question about a villager, with the object of a schema that the question does not mention."""
    person = rng.choice(VILLAGERS)
    content = villager_object(person)
    question = rng.choice(QUESTIONS).format(n=person.name)
    return JsonAnswer(question, {key: content[key] for key in draw_keys(content, rng)})


def draw_keys(content: dict[str, object], rng: Random) -> list[str]:
    """Return one to five keys, `name` first where it is among them, as most schemas have it."""
    keys = rng.sample(list(content), rng.randint(1, min(5, len(content))))
    return sorted(keys, key=lambda key: key != "name") if rng.random() < 0.7 else keys
