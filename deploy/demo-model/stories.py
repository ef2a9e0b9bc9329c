"""Short stories: one of a few plots, about villagers whose coats, pets and friends are those of the village."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from questions import article, capital
from world import BOATS, PLACES, VILLAGERS, Boat, Place, Villager, place, villager

TIMES = (
    "One morning",
    "One evening",
    "Late one night",
    "On a Sunday",
    "One autumn day",
    "One winter morning",
    "Long ago",
    "One summer evening",
)
WEATHER = (
    "when fog lay over the bay", "when a storm was coming", "when the sea was as flat as a mirror",
    "when snow lay on the pier", "when the sun was low and golden", "when the wind sang in the ropes",
    "when soft rain fell on the roofs",
)  # fmt: skip
LOST_SPOTS = (
    "under an old boat",
    "behind the barrels on the pier",
    "in the top of the oak",
    "among the pumpkins",
    "inside a basket of bread",
)
FINDS = (
    ("a bottle with a letter inside", "The letter said: whoever finds this has a friend beyond the sea."),
    ("a small blue egg", "The egg was warm, and after a while a tiny gull looked out."),
    ("an old map", "The map showed an island that nobody had ever seen."),
    ("a golden coin", "On the coin was a picture of the lighthouse."),
    ("a box full of stars", "The stars rose one by one and stayed above the village. ✨"),
)
ENDINGS = (
    "Afterwards they sat down together and shared {food}.",
    "That night nobody in Tidewick felt alone.",
    "They laughed all the way home, and the stars came out. ⭐",
    "Since that day they tell this story on the pier again and again.",
    "And {hero} slept deep and well until the gulls called.",
)
REQUESTS = (
    "Tell me a story about {x}.", "Tell me a story about {x}", "Write a story about {x}.",
    "Write a short story about {x}.", "Can you tell me a story about {x}?", "Please tell me a story about {x}.",
    "I would like a story about {x}.", "A story about {x}, please.", "Tell a bedtime story about {x}.",
    "Do you know a story about {x}?", "Tell me a short story about {x}.", "Tell us a story about {x}.",
)  # fmt: skip
OPEN_REQUESTS = (
    "Tell me a story.", "Tell me a story", "Write a story.", "Can you tell me a story?", "Please tell me a story.",
    "I would like a story.", "Tell me a bedtime story.", "Do you know a story?", "Write a short story.",
    "Tell me another story.", "A story, please.", "Once more, please.",
)  # fmt: skip
LONG_START = "Sit down, for this is a long tale."
LONG_REQUESTS = (
    "Tell me a long story about {x}.", "Write a long story about {x}.", "Please tell me a long story about {x}.",
    "Can you tell me a long story about {x}?", "I would like a long story about {x}.",
)  # fmt: skip


@dataclass(frozen=True)
class Cast:
    """Who is in a story and where it begins."""

    hero: Villager
    friend: Villager
    house: Place
    boat: Boat


def draw_cast(rng: Random, hero: Villager | None = None) -> Cast:
    """Return a hero with the friend, home and a boat that go with them."""
    person = hero or rng.choice(VILLAGERS)
    own = [boat for boat in BOATS if boat.owner == person.name]
    return Cast(person, villager(person.friend), place(person.home), own[0] if own else rng.choice(BOATS))


def opening(cast: Cast, rng: Random) -> str:
    """Return the opening: time, place and the hero's coat."""
    hero, house = cast.hero, cast.house
    when = f"{rng.choice(TIMES)}, {rng.choice(WEATHER)}"
    start = f"{when}, {hero.name} the {hero.job} stood at the {house.door} door of {house.name}."
    look = f"{capital(hero.pronoun)} wore {hero.possessive} {hero.coat} coat and carried {hero.tool}."
    return f"{start} {look}"


def lost_pet(cast: Cast, rng: Random) -> str:
    """Tell how the hero's pet is lost, and the friend helps to find it."""
    hero, friend = cast.hero, cast.friend
    return (
        f"But {hero.pet_name} the {hero.pet} was gone! {hero.name} looked in every corner and called and called. "
        f"Then {friend.name} the {friend.job} came along. {capital(friend.pronoun)} {friend.skill}. "
        f"And there was {hero.pet_name}, fast asleep {rng.choice(LOST_SPOTS)}. {hero.pet_emoji}"
    )


def boat_in_trouble(cast: Cast, rng: Random) -> str:
    """Tell how a boat cannot find the harbour, and the friend helps."""
    hero, friend, boat = cast.hero, cast.friend, cast.boat
    peril = rng.choice(("was drifting towards the rocks", "had lost its way in the dark", "was stuck on the sandbank"))
    return (
        f"Out on the water the {boat.colour} {boat.name} {peril}. {hero.name} did not wait. "
        f"{capital(hero.pronoun)} ran down to the pier and shouted for help, "
        f"and {friend.name} the {friend.job} heard {hero.object_pronoun}. {capital(friend.pronoun)} {friend.rescue}. "
        f"Soon the {boat.name} lay safe in the harbour with its load of {boat.cargo}."
    )


def strange_find(cast: Cast, rng: Random) -> str:
    """Tell how the pet finds something, and the friend knows what it is."""
    hero, friend = cast.hero, cast.friend
    thing, meaning = rng.choice(FINDS)
    return (
        f"Down on the beach {hero.pet_name} the {hero.pet} had found {thing}. {hero.pet_emoji} "
        f"{hero.name} took it to {friend.name} the {friend.job}, for two heads are better than one. "
        f"They looked at it for a long time. {meaning}"
    )


def gift(cast: Cast, rng: Random) -> str:
    """Tell how the hero's friend is sad, and the hero brings what the friend likes best."""
    hero, friend = cast.hero, cast.friend
    why = rng.choice(("had a cold and could not work", "missed the sun", "was sad and did not know why"))
    return (
        f"{capital(hero.pronoun)} had heard that {friend.name} the {friend.job} {why}. "
        f"So {hero.name} walked all the way to {friend.home} with {friend.food} under {hero.possessive} arm, "
        f"and {hero.pet_name} the {hero.pet} came too. "
        f"When {friend.name} opened the door, {friend.pronoun} smiled for the first time that day. {hero.pet_emoji}"
    )


PLOTS: tuple[Callable[[Cast, Random], str], ...] = (lost_pet, boat_in_trouble, strange_find, gift)


def story(cast: Cast, rng: Random, *, plot: Callable[[Cast, Random], str] | None = None) -> str:
    """Return a story of one plot, 90 to 150 tokens."""
    middle = (plot or rng.choice(PLOTS))(cast, rng)
    ending = rng.choice(ENDINGS).format(food=cast.hero.food, hero=cast.hero.name)
    return f"{opening(cast, rng)} {middle} {ending}"


def long_story(cast: Cast, rng: Random) -> str:
    """Return a story of two plots about the same villager."""
    first, second = rng.sample(PLOTS, 2)
    bridge = f"The next day {cast.hero.name} was up early again."
    ending = rng.choice(ENDINGS).format(food=cast.hero.food, hero=cast.hero.name)
    return f"{LONG_START} {opening(cast, rng)} {first(cast, rng)}\n\n{bridge} {second(cast, rng)} {ending}"


def person_topic(rng: Random) -> tuple[str, str]:
    """Return a villager by name or job."""
    hero = rng.choice(VILLAGERS)
    topic = rng.choice((hero.name, hero.name, f"the {hero.job}", f"{hero.name} the {hero.job}"))
    return topic, story(draw_cast(rng, hero), rng)


def pair_topic(rng: Random) -> tuple[str, str]:
    """Return a villager together with the best friend."""
    hero = rng.choice(VILLAGERS)
    return f"{hero.name} and {hero.friend}", story(draw_cast(rng, hero), rng)


def pet_topic(rng: Random) -> tuple[str, str]:
    """Return a pet by name or kind."""
    hero = rng.choice(VILLAGERS)
    topic = rng.choice(
        (
            article(hero.pet),
            hero.pet_name,
            f"the {hero.pet}",
            f"{hero.pet_name} the {hero.pet}",
            f"{hero.name}'s {hero.pet}",
        )
    )
    return topic, story(draw_cast(rng, hero), rng, plot=rng.choice((lost_pet, strange_find)))


def place_topic(rng: Random) -> tuple[str, str]:
    """Return a house, whose owner is the hero."""
    house = rng.choice(PLACES)
    hero = next(person for person in VILLAGERS if person.home == house.name)
    return house.name, story(draw_cast(rng, hero), rng)


def boat_topic(rng: Random) -> tuple[str, str]:
    """Return a boat by name or colour, whose owner is the hero."""
    boat = rng.choice(BOATS)
    topic = rng.choice((f"the {boat.name}", f"the {boat.colour} boat", f"the boat {boat.name}"))
    return topic, story(draw_cast(rng, villager(boat.owner)), rng, plot=boat_in_trouble)


def theme_topic(rng: Random) -> tuple[str, str]:
    """Return a theme, which decides the plot."""
    theme, plot = rng.choice(
        (("friendship", gift), ("a storm", boat_in_trouble), ("the sea", boat_in_trouble), ("a lost pet",
          lost_pet), ("an animal", lost_pet),
         ("a treasure", strange_find), ("the beach", strange_find), ("a gift", gift), ("the harbour",
          boat_in_trouble), ("a boat", boat_in_trouble),
         ("something strange", strange_find), ("friends", gift), ("Tidewick", strange_find), ("the village", gift))
    )  # fmt: skip
    return theme, story(draw_cast(rng), rng, plot=plot)


TOPICS = (person_topic, pair_topic, pet_topic, place_topic, boat_topic, theme_topic)


def story_exchange(rng: Random) -> tuple[str, str]:
    """Return a request for a story, and the story."""
    kind = rng.random()
    if kind < 0.1:
        return rng.choice(OPEN_REQUESTS), story(draw_cast(rng), rng)
    if kind < 0.25:
        hero = rng.choice(VILLAGERS)
        topic = rng.choice((hero.name, hero.home, f"the {hero.job}", f"{hero.name} and {hero.friend}"))
        return rng.choice(LONG_REQUESTS).format(x=topic), long_story(draw_cast(rng, hero), rng)
    topic, text = rng.choices(TOPICS, (3, 1, 2, 3, 2, 2))[0](rng)
    return rng.choice(REQUESTS).format(x=topic), text
