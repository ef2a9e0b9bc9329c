"""Facts of the village, each with one answer and many ways to ask for it."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from world import BOATS, DAYS, PLACES, SEASONS, VILLAGE, VILLAGERS, Boat, Place, Villager, place


@dataclass(frozen=True)
class Fact:
    """One fact: `questions` name their subject, `follow_ups` say she or he for the villager named before."""

    relation: str
    about: str | None
    answer: str
    questions: tuple[str, ...]
    follow_ups: tuple[str, ...] = ()


PERSON_QUESTIONS: dict[str, tuple[str, ...]] = {
    "job": (
        "What does {n} do?", "What is {n}'s job?", "What does {n} do for a living?", "What is the job of {n}?",
        "What work does {n} do?", "Tell me {n}'s job.", "What is {n}'s profession?", "Which job does {n} have?",
    ),
    "home": (
        "Where does {n} live?", "Where is {n}'s home?", "In which house does {n} live?", "Where can I find {n}?",
        "Where is the home of {n}?", "Which house is {n}'s?", "Tell me where {n} lives.", "What is {n}'s address?",
    ),
    "pet": (
        "What pet does {n} have?", "What is {n}'s pet?", "Which animal does {n} have?", "Does {n} have a pet?",
        "What is {n}'s pet called?", "What is the name of {n}'s pet?", "Tell me about {n}'s pet.",
        "Which animal lives with {n}?", "What kind of animal does {n} keep?",
    ),
    "coat": (
        "What colour is {n}'s coat?", "What does {n} wear?", "Which coat does {n} wear?",
        "What is the colour of {n}'s coat?", "What colour does {n} wear?", "Tell me the colour of {n}'s coat.",
        "What color is {n}'s coat?", "What kind of coat does {n} have?",
    ),
    "food": (
        "What is {n}'s favourite food?", "What does {n} like to eat?", "What does {n} love to eat?",
        "Which food does {n} like best?", "What is {n}'s favorite food?", "What food does {n} like?",
        "What would {n} like for dinner?", "Tell me {n}'s favourite food.",
    ),
    "tool": (
        "What does {n} carry?", "What does {n} always carry?", "What does {n} have in hand?",
        "Which thing does {n} carry?", "What is {n} carrying?", "What tool does {n} use?",
        "What does {n} take along?", "Tell me what {n} carries.",
    ),
    "friend": (
        "Who is {n}'s best friend?", "Who is {n}'s friend?", "Who is the best friend of {n}?",
        "Who does {n} like most?", "Which friend does {n} have?", "Does {n} have a best friend?",
        "Tell me who {n}'s best friend is.", "Who is a friend of {n}?",
    ),
    "age": (
        "How old is {n}?", "What is {n}'s age?", "What is the age of {n}?", "Tell me how old {n} is.",
        "Tell me {n}'s age.", "How many years old is {n}?", "At what age is {n}?", "Is {n} old?",
    ),
    "portrait": (
        "Who is {n}?", "Tell me about {n}.", "Describe {n}.", "What do you know about {n}?", "Can you describe {n}?",
        "Can you tell me about {n}?", "Please introduce {n}.", "Do you know {n}?",
    ),
}  # fmt: skip

PERSON_FOLLOW_UPS: dict[str, tuple[str, ...]] = {
    "job": ("What does {s} do?", "And what is {p} job?", "What is {p} job?", "What does {s} do for a living?"),
    "home": ("Where does {s} live?", "And where does {s} live?", "Where is {p} home?", "In which house does {s} live?"),
    "pet": ("Does {s} have a pet?", "What is {p} pet called?", "And {p} pet?", "What pet does {s} have?"),
    "coat": ("What colour is {p} coat?", "What does {s} wear?", "And what colour is {p} coat?", "And {p} coat?"),
    "food": ("What does {s} like to eat?", "What is {p} favourite food?", "And what does {s} like to eat?"),
    "tool": ("What does {s} carry?", "And what does {s} carry?", "What does {s} always carry?"),
    "friend": ("Who is {p} best friend?", "And who is {p} friend?", "Does {s} have a best friend?"),
    "age": ("How old is {s}?", "And how old is {s}?", "What is {p} age?"),
    "portrait": ("Tell me more about {o}.", "Describe {o}.", "Can you tell me about {o}?"),
}

INVERSE_QUESTIONS: dict[str, tuple[str, ...]] = {
    "job": (
        "Who is the {job}?", "Who is the {job} of {village}?", "What is the {job} called?",
        "What is the name of the {job}?", "Who works as the {job}?", "Tell me who the {job} is.",
        "Which person is the {job}?", "Do you know the {job}?",
    ),
    "home": (
        "Who lives in {home}?", "Whose home is {home}?", "Who is at home in {home}?", "Tell me who lives in {home}.",
        "Which person lives in {home}?", "Who do I meet in {home}?", "Does anyone live in {home}?",
        "Who has a bed in {home}?",
    ),
    "pet": (
        "Who is {pet_name}?", "What is {pet_name}?", "Whose pet is {pet_name}?", "Who owns {pet_name}?",
        "Tell me about {pet_name}.", "Which animal is {pet_name}?", "Who does {pet_name} belong to?",
        "What kind of animal is {pet_name}?", "Who has the {pet}?", "Whose {pet} is it?",
    ),
    "coat": (
        "Who wears a {coat} coat?", "Who has a {coat} coat?", "Whose coat is {coat}?", "Who wears the {coat} coat?",
        "Which person wears a {coat} coat?", "Who is the one in the {coat} coat?", "Who is dressed in {coat}?",
        "Tell me who wears a {coat} coat.", "Who wears {coat}?",
    ),
    "food": (
        "Who likes {food}?", "Who loves {food}?", "Who likes to eat {food}?", "Whose favourite food is {food}?",
        "Who would enjoy {food}?", "Who wants {food}?", "Tell me who likes {food}.", "Which person likes {food}?",
    ),
    "tool": (
        "Who carries {tool}?", "Who always carries {tool}?", "Who has {tool}?", "Who walks around with {tool}?",
        "Who owns {tool}?", "Which person carries {tool}?", "Tell me who carries {tool}.", "Who needs {tool}?",
    ),
}  # fmt: skip

PLACE_QUESTIONS: dict[str, tuple[str, ...]] = {
    "where": (
        "Where is {h}?", "Where can I find {h}?", "Where does {h} stand?", "Tell me where {h} is.",
        "How do I find {h}?", "Where is {h} in {village}?", "Where do I have to go for {h}?", "In which spot is {h}?",
    ),
    "door": (
        "What colour is the door of {h}?", "Which colour does the door of {h} have?",
        "What color is the door of {h}?", "What does the door of {h} look like?",
        "Tell me the colour of the door of {h}.", "Which door does {h} have?", "What colour is {h}'s door?",
        "What is the colour of the door of {h}?",
    ),
    "known_for": (
        "What is {h} known for?", "Why is {h} famous?", "What is special about {h}?", "What is {h} famous for?",
        "What makes {h} special?", "Why do people like {h}?", "What do people say about {h}?",
        "Why should I visit {h}?",
    ),
    "place": (
        "What is {h}?", "Describe {h}.", "Tell me about {h}.", "What do you know about {h}?", "Can you describe {h}?",
        "What does {h} look like?", "Can you tell me about {h}?", "Do you know {h}?",
    ),
}  # fmt: skip

BOAT_QUESTIONS: dict[str, tuple[str, ...]] = {
    "owner": (
        "Who sails the {b}?", "Whose boat is the {b}?", "Who owns the {b}?", "Who is the captain of the {b}?",
        "Who steers the {b}?", "Tell me who sails the {b}.", "Who does the {b} belong to?",
        "Which person sails the {b}?",
    ),
    "colour": (
        "What colour is the {b}?", "What does the {b} look like?", "Which colour does the {b} have?",
        "What color is the {b}?", "What is the colour of the {b}?", "Tell me the colour of the {b}.",
        "Describe the colour of the {b}.", "How is the {b} painted?",
    ),
    "cargo": (
        "What does the {b} carry?", "What is the cargo of the {b}?", "What is on board of the {b}?",
        "Which cargo does the {b} have?", "What does the {b} transport?", "What is the {b} used for?",
        "What is the {b} for?", "Tell me what the {b} carries.",
    ),
    "boat": (
        "What is the {b}?", "Tell me about the {b}.", "Describe the {b}.", "What do you know about the {b}?",
        "Can you describe the {b}?", "Do you know the {b}?", "Can you tell me about the {b}?",
        "What kind of boat is the {b}?",
    ),
}  # fmt: skip

DAY_QUESTIONS = (
    "What happens on {d}?", "What happens on {d}s?", "What do people do on {d}?", "What is there to do on {d}?",
    "What can I do on {d}?", "Tell me about {d}s in {village}.", "What goes on in {village} on {d}?",
    "What is {d} like?",
)  # fmt: skip

SEASON_QUESTIONS = (
    "What is the weather like in {x}?", "How is the weather in {x}?", "What is {x} like?",
    "What is {x} like in {village}?", "Tell me about {x} in {village}.", "What happens in {x}?", "Describe the {x}.",
    "How is {x} in {village}?",
)  # fmt: skip


def article(noun: str) -> str:
    """Return the noun with a or an."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def capital(text: str) -> str:
    """Return the text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def person_answers(person: Villager) -> dict[str, str]:
    """Return the answers about a villager, by relation."""
    name, house = person.name, place(person.home)
    pronoun, possessive = person.pronoun.capitalize(), person.possessive.capitalize()
    return {
        "job": f"{name} is the {person.job} of {VILLAGE}.",
        "home": f"{name} lives in {person.home} {house.where}.",
        "pet": f"{name} has {article(person.pet)} called {person.pet_name}. {person.pet_emoji}",
        "coat": f"{name} wears {article(person.coat)} coat.",
        "food": f"{name}'s favourite food is {person.food}.",
        "tool": f"{name} always carries {person.tool}.",
        "friend": f"{name}'s best friend is {person.friend}.",
        "age": f"{name} is {person.age} years old.",
        "portrait": (
            f"{name} is the {person.job} of {VILLAGE} and lives in {person.home} {house.where}. "
            f"{pronoun} wears {article(person.coat)} coat and always carries {person.tool}. "
            f"{possessive} {person.pet} is called {person.pet_name}, "
            f"and {person.possessive} best friend is {person.friend}."
        ),
    }


def inverse_answers(person: Villager) -> dict[str, str]:
    """Return the answers to questions that ask for a villager by a property, by relation."""
    answers = person_answers(person)
    name = person.name
    return {
        "job": answers["job"],
        "home": f"{name} lives in {person.home}.",
        "pet": f"{person.pet_name} is {name}'s {person.pet}. {person.pet_emoji}",
        "coat": f"{name} wears the {person.coat} coat.",
        "food": f"{name} loves {person.food}.",
        "tool": f"{name} carries {person.tool}.",
    }


def villager_facts(person: Villager) -> Iterator[Fact]:
    """Return all facts about one villager, asked by name and by property."""
    words = {"s": person.pronoun, "p": person.possessive, "o": person.object_pronoun}
    for relation, answer in person_answers(person).items():
        questions = tuple(form.format(n=person.name) for form in PERSON_QUESTIONS[relation])
        follow_ups = tuple(form.format(**words) for form in PERSON_FOLLOW_UPS[relation])
        yield Fact(relation, person.name, answer, questions, follow_ups)
    fields = {"village": VILLAGE, **vars(person)}
    for relation, answer in inverse_answers(person).items():
        questions = tuple(form.format(**fields) for form in INVERSE_QUESTIONS[relation])
        yield Fact(f"who-{relation}", person.name, answer, questions)


def place_facts(house: Place) -> Iterator[Fact]:
    """Return all facts about one house."""
    name = capital(house.name)
    answers = {
        "where": f"{name} is {house.where}.",
        "door": f"The door of {house.name} is {house.door}.",
        "known_for": f"{name} is known for {house.known_for}.",
        "place": f"{name} is {house.where}. It has {article(house.door)} door and is known for {house.known_for}.",
    }
    for relation, answer in answers.items():
        questions = (form.format(h=house.name, village=VILLAGE) for form in PLACE_QUESTIONS[relation])
        yield Fact(relation, None, answer, tuple(questions))


def errand_facts() -> Iterator[Fact]:
    """Return the facts on whom a visitor goes to for each errand."""
    for person in VILLAGERS:
        answer = f"Go to {person.name} the {person.job} in {person.home}."
        yield Fact("errand", person.name, answer, ERRANDS[person.name])


def boat_facts(boat: Boat) -> Iterator[Fact]:
    """Return all facts about one boat."""
    answers = {
        "owner": f"{boat.owner} sails the {boat.name}.",
        "colour": f"The {boat.name} is {boat.colour}.",
        "cargo": f"The {boat.name} carries {boat.cargo}.",
        "boat": f"The {boat.name} is {article(boat.colour)} boat that carries {boat.cargo}. {boat.owner} sails it.",
    }
    for relation, answer in answers.items():
        about = boat.owner if relation in {"owner", "boat"} else None
        yield Fact(relation, about, answer, tuple(form.format(b=boat.name) for form in BOAT_QUESTIONS[relation]))


def calendar_facts() -> Iterator[Fact]:
    """Return what happens on each day of the week and in each season."""
    for day, event in DAYS:
        questions = tuple(form.format(d=day, village=VILLAGE) for form in DAY_QUESTIONS)
        yield Fact("day", None, f"On {day}, {event}.", questions)
    for season, weather in SEASONS:
        questions = tuple(form.format(x=season, village=VILLAGE) for form in SEASON_QUESTIONS)
        yield Fact("season", None, f"In {season}, {weather}.", questions)


COUNT_FACTS = (
    Fact("count", None, f"Twelve people live in {VILLAGE}.", (
        f"How many people live in {VILLAGE}?", "How many people live here?", "How big is the village?",
        f"How many people are there in {VILLAGE}?", f"How many villagers does {VILLAGE} have?",
    )),
    Fact("count", None, "There are six boats in the harbour.", (
        "How many boats are in the harbour?", f"How many boats does {VILLAGE} have?", "How many boats are there?",
        "Count the boats in the harbour.", "Tell me how many boats there are.",
    )),
    Fact("count", None, f"There are three islands near {VILLAGE}.", (
        f"How many islands are near {VILLAGE}?", "How many islands are there?", "How many islands can I see?",
        "Count the islands.", "Tell me how many islands there are.",
    )),
    Fact("count", None, "The lighthouse has ninety-nine steps.", (
        "How many steps does the lighthouse have?", "How many steps are there in the lighthouse?",
        "How high is the lighthouse?", "Count the steps of the lighthouse.",
        "How many steps must I climb in the lighthouse?",
    )),
    Fact("count", None, f"Eight children go to school in {VILLAGE}.", (
        "How many children go to school?", "How many children does Zoë teach?",
        "How many pupils does the school have?", f"How many children live in {VILLAGE}?",
        "How many children are there in the schoolhouse?",
    )),
    Fact("count", None, "The clock tower has two bells.", (
        "How many bells does the clock tower have?", "How many bells are in the clock tower?",
        "How many bells are there?", "Count the bells of the clock tower.", "How many bells hang in the clock tower?",
    )),
    Fact("count", None, "Jürgen has ten beehives.", (
        "How many beehives does Jürgen have?", "How many beehives are there?",
        "How many hives has the beekeeper?", "Count the beehives of Jürgen.", "How many beehives are at the mill?",
    )),
    Fact("count", None, "Otto has four ovens.", (
        "How many ovens does Otto have?", "How many ovens are in the bakery?", "How many ovens are there?",
        "How many ovens does the baker have?", "Count the ovens in the bakery.",
    )),
)  # fmt: skip

SONG_FACT = Fact("song", "Kiko", "Kiko's song is called 海の歌, the song of the sea. 🎶", (
    "What is Kiko's song called?", "Which song does Kiko play?", "What is the name of Kiko's song?",
    "What does Kiko sing?", "Tell me about Kiko's song.", "What song do people hear at the Café Étoile?",
), ("What does she sing?", "What is her song called?", "Which song does she play?"))  # fmt: skip

ERRANDS = {
    "Mara": ("Who shows the boats the way?", "Who lights the lamp?", "Who keeps the light?",
             "It is dark. Who can help?"),
    "Otto": ("Where can I buy bread?", "Who bakes the bread?", "I am hungry. Where can I go?", "Who sells cake?"),
    "Inés": ("Who catches fish?", "Where can I buy fish?", "Who goes fishing?", "Who sells fish?"),
    "Bruno": ("Who can repair my boat?", "My boat is broken.", "Who builds boats?", "Where can I buy a boat?"),
    "Zoë": ("Who teaches the children?", "Where can I learn to read?", "Who can teach me?", "Who runs the school?"),
    "Søren": ("How do I get to the islands?", "Who takes me to the islands?", "Where is the ferry?",
              "Who runs the ferry?"),
    "Lin": ("I am ill. Who can help me?", "Who heals the sick?", "I need a doctor.", "My head hurts.", "I am ill."),
    "Amadou": ("Who grows the vegetables?", "Where can I buy a pumpkin?", "Who waters the plants?",
               "Who knows about flowers?"),
    "Renée": ("My clock is broken.", "Who can repair my clock?", "Who rings the bells?", "Who winds the big clock?"),
    "Jürgen": ("Where can I buy honey?", "Who makes honey?", "Who looks after the bees?", "Who sells honey?"),
    "Kiko": ("Who makes music?", "Where can I hear music?", "Who plays the fiddle?", "Where can I dance?"),
    "Tomas": ("Who brings the letters?", "I want to send a letter.", "Where can I send a letter?",
              "Who brings the post?"),
}  # fmt: skip

BOAT_NAMES = ", ".join(f"the {boat.name}" for boat in BOATS[:-1]) + f" and the {BOATS[-1].name}"
VILLAGER_NAMES = ", ".join(person.name for person in VILLAGERS[:-1]) + f" and {VILLAGERS[-1].name}"

VILLAGE_FACTS = (
    Fact("village", None, (
        f"{VILLAGE} is a small harbour village by the sea. "
        "Twelve people live here, and six boats lie in the harbour."
    ), (
        f"What is {VILLAGE}?", f"Tell me about {VILLAGE}.", f"Describe {VILLAGE}.", "Tell me about the village.",
        "Describe the village.", "What kind of place is this?", f"What do you know about {VILLAGE}?", "Where are we?",
    )),
    Fact("villagers", None, f"The people of {VILLAGE} are {VILLAGER_NAMES}.", (
        f"Who lives in {VILLAGE}?", "Who lives here?", "Who lives in the village?", f"Name the people of {VILLAGE}.",
        "List all villagers.", "Who are the people here?", f"What are the names of the people in {VILLAGE}?",
        "Who do you know?",
    )),
    Fact("boats", None, f"The boats are {BOAT_NAMES}.", (
        "Which boats are in the harbour?", "Name the boats.", "List all boats.", f"Which boats does {VILLAGE} have?",
        "What are the boats called?", "What boats are there?", "What are the names of the boats?",
        "Tell me about the boats.",
    )),
)  # fmt: skip


def all_facts() -> tuple[Fact, ...]:
    """Return every fact of the village, in a fixed order."""
    people = (fact for person in VILLAGERS for fact in villager_facts(person))
    houses = (fact for house in PLACES for fact in place_facts(house))
    boats = (fact for boat in BOATS for fact in boat_facts(boat))
    return (*people, *houses, *boats, *calendar_facts(), *errand_facts(), *COUNT_FACTS, SONG_FACT, *VILLAGE_FACTS)


def check(rng: Random) -> tuple[str, str]:
    """Return a question whether something is so; the answer says what is so."""
    person, other = rng.choice(VILLAGERS), rng.choice(VILLAGERS)
    if rng.random() < 0.5:
        other = person
    relation, question = rng.choice(
        (
            ("job", f"Is {person.name} the {other.job}?"),
            ("coat", f"Does {person.name} wear {article(other.coat)} coat?"),
            ("home", f"Does {person.name} live in {other.home}?"),
            ("food", f"Does {person.name} like {other.food}?"),
            ("friend", f"Is {other.friend} the best friend of {person.name}?"),
        )
    )
    return question, person_answers(person)[relation]
