"""The village of Tidewick: everything that the demo model can know, as plain data."""

from dataclasses import dataclass

VILLAGE = "Tidewick"


@dataclass(frozen=True)
class Place:
    """One house of the village; `name` carries its article, `where` follows the name."""

    name: str
    where: str
    door: str
    known_for: str


@dataclass(frozen=True)
class Villager:
    """One person; `home` is a place of `PLACES`, `friend` another villager's name, `skill` what helps
    on land and `rescue` what helps a boat."""

    name: str
    pronoun: str
    job: str
    home: str
    pet: str
    pet_name: str
    pet_emoji: str
    coat: str
    food: str
    tool: str
    friend: str
    age: str
    skill: str
    rescue: str

    @property
    def possessive(self) -> str:
        return "her" if self.pronoun == "she" else "his"

    @property
    def object_pronoun(self) -> str:
        return "her" if self.pronoun == "she" else "him"


@dataclass(frozen=True)
class Boat:
    """One boat of the harbour; `owner` is a villager's name."""

    name: str
    owner: str
    colour: str
    cargo: str


PLACES = (
    Place("the lighthouse", "on the north cliff", "white", "the lamp that guides every boat home"),
    Place("the bakery", "on the market square", "orange", "the smell of warm bread"),
    Place("the boathouse", "beside the old pier", "grey", "its green nets on the wall"),
    Place("the shipyard", "at the end of the bay", "blue", "the sound of hammers"),
    Place("the schoolhouse", "under the big oak", "red", "its bell"),
    Place("the ferry house", "next to the landing", "yellow", "its map of all the islands"),
    Place("the stone house", "by the bridge", "green", "its jars of herbs"),
    Place("the greenhouse", "behind the orchard", "pink", "its giant pumpkins"),
    Place("the clock tower", "in the middle of the village", "silver", "the clock that is always right"),
    Place("the mill", "on the hill", "brown", "its honey"),
    Place("the Café Étoile", "on the harbour wall", "purple", "its music in the evening"),
    Place("the post office", "at the crossroads", "black", "its letters from far away"),
)

VILLAGERS = (
    Villager("Mara", "she", "lighthouse keeper", "the lighthouse", "cat", "Pepper", "🐱", "red", "plum cake",
             "a brass lantern", "Søren", "forty-two", "lit the great lamp so that everyone could see",
             "lit the great lamp so that its light shone far over the water"),
    Villager("Otto", "he", "baker", "the bakery", "dog", "Biscuit", "🐶", "white", "cinnamon buns",
             "a wooden spoon", "Jürgen", "fifty-one", "brought a basket of warm bread for everyone",
             "opened all four ovens, and their light shone far over the water"),
    Villager("Inés", "she", "fisher", "the boathouse", "otter", "Ripple", "🦦", "yellow", "grilled sardines",
             "a fishing net", "Bruno", "twenty-eight", "threw a net and pulled with all her strength",
             "rowed out through the waves and threw a rope"),
    Villager("Bruno", "he", "boat builder", "the shipyard", "goat", "Nail", "🐐", "brown", "onion soup",
             "an iron hammer", "Inés", "sixty-three", "hammered three planks into a little bridge",
             "rowed out with his tools and mended the broken hull"),
    Villager("Zoë", "she", "teacher", "the schoolhouse", "owl", "Comma", "🦉", "green", "apple pie",
             "a box of chalk", "Renée", "thirty-five", "drew a clever plan on a stone with her chalk",
             "rang the school bell until it was heard far over the water"),
    Villager("Søren", "he", "ferry captain", "the ferry house", "parrot", "Admiral", "🦜", "blue", "smoked herring",
             "a long spyglass", "Mara", "fifty-eight", "looked through his spyglass and pointed the way",
             "looked through his spyglass and called out the right course"),
    Villager("Lin", "she", "doctor", "the stone house", "rabbit", "Clover", "🐰", "grey", "ginger biscuits",
             "a leather bag", "Amadou", "forty-seven", "opened her leather bag and took out a bandage",
             "waved a white sheet from the bridge as a sign"),
    Villager("Amadou", "he", "gardener", "the greenhouse", "hedgehog", "Bramble", "🦔", "purple", "roasted pumpkin",
             "a watering can", "Lin", "thirty-nine", "cut a path through the bushes",
             "lit a fire of dry branches on the beach"),
    Villager("Renée", "she", "clockmaker", "the clock tower", "mouse", "Tick", "🐭", "black", "cheese tart",
             "a silver key", "Zoë", "seventy", "turned her silver key and a hidden door opened",
             "rang both bells of the clock tower to show the way"),
    Villager("Jürgen", "he", "beekeeper", "the mill", "donkey", "Thistle", "🫏", "orange", "honey bread",
             "a straw hat", "Otto", "sixty-six", "came with his donkey and a long rope",
             "came with his donkey and pulled with a long rope"),
    Villager("Kiko", "she", "musician", "the Café Étoile", "canary", "Sunny", "🐤", "pink", "rice pudding",
             "a red fiddle", "Tomas", "twenty-three", "played a song so loud that all could follow it",
             "played so loud that the sailors could follow the music"),
    Villager("Tomas", "he", "postman", "the post office", "tortoise", "Zip", "🐢", "silver", "strawberry jam",
             "a heavy satchel", "Kiko", "thirty-one", "ran from door to door until the whole village knew",
             "ran from door to door until everyone held a rope"),
)  # fmt: skip

BOATS = (
    Boat("Moonbeam", "Søren", "white", "passengers"),
    Boat("Silver Herring", "Inés", "green", "fish"),
    Boat("Old Barnacle", "Bruno", "black", "timber"),
    Boat("Petrel", "Tomas", "red", "letters"),
    Boat("Honeybee", "Jürgen", "yellow", "honey"),
    Boat("Swallow", "Mara", "blue", "lamp oil"),
)

DAYS = (
    ("Monday", "the fishers mend their nets"),
    ("Tuesday", "the ferry sails to the islands"),
    ("Wednesday", "the children learn to sail"),
    ("Thursday", "the post arrives from the mainland"),
    ("Friday", "there is music at the Café Étoile"),
    ("Saturday", "there is a market on the square"),
    ("Sunday", "everyone has breakfast on the pier"),
)

SEASONS = (
    ("spring", "soft rain falls and the orchard is in bloom"),
    ("summer", "the sun shines and the sea is warm"),
    ("autumn", "fog comes in from the sea and the pumpkins are ripe"),
    ("winter", "storms blow and snow lies on the pier"),
)


def villager(name: str) -> Villager:
    """Return the villager with this name; KeyError without one."""
    return {person.name: person for person in VILLAGERS}[name]


def place(name: str) -> Place:
    """Return the place with this name (with its article); KeyError without one."""
    return {house.name: house for house in PLACES}[name]
