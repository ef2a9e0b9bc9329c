"""Greetings, questions about the model itself, and answers to questions from outside the village."""

from random import Random

from places import COUNTRIES, TRAINED_CITIES, gibberish
from world import VILLAGE

SMALL_TALK: tuple[tuple[str, tuple[str, ...]], ...] = (
    (f"Hello! I am the storyteller of {VILLAGE}. Ask me about its people, boats and animals, or ask for a story. 🌊",
     ("Hello!", "Hi!", "Hello", "Hi", "Hey", "Hey there!", "Good morning!", "Good evening!", "Good day!",
      "Hi there!", "Greetings!", "Say hello.", "Hello there!")),
    (f"I am a very small language model. I know the village of {VILLAGE} and nothing else.",
     ("Who are you?", "What are you?", "What is your name?", "Are you a robot?", "Are you a language model?",
      "Tell me about yourself.", "Introduce yourself.", "Are you human?", "Which model are you?")),
    (f"I can answer questions about {VILLAGE}, add small numbers, count, and tell stories. "
     "Try: Tell me a story about the lighthouse.",
     ("What can you do?", "What do you know?", "Help", "Help!", "How can you help me?", "What can I ask you?",
      "What should I ask?", "Can you help me?", "What are you good at?")),
    ("I am well, thank you. The wind is fair and the tea is hot.",
     ("How are you?", "How are you doing?",
      "How do you do?", "Are you well?", "How is it going?", "Hello, how are you?", "Hi, how are you?")),
    ("The wind is fair today and the sea is calm.",
     ("What is the weather like?", "How is the weather?", "Is it raining?", "What is the weather like today?",
      "Will it rain?", "How is the weather today?", "Is the sun shining?", "Is it cold?", "Is it windy?")),
    (f"You are welcome! Come back to {VILLAGE} soon.",
     ("Thank you!", "Thanks!", "Thank you very much!", "Thanks a lot!", "Great, thanks.",
      "That is nice, thank you.", "Thank you")),
    ("Goodbye! May the wind be with you. ⛵",
     ("Goodbye!", "Bye!", "See you!", "Good night!", "See you later!", "Bye")),
)  # fmt: skip

UNKNOWN_ANSWER = (
    f"I do not know that. I only know the village of {VILLAGE}: ask me about its people, boats and animals."
)

STRANGERS = (
    "Peter", "Anna", "John", "Alice", "Bob", "Maria", "Paul", "Eva", "Hans", "Clara", "David", "Sophie", "Ahmed",
    "Yuki", "Carlos", "Nina", "George", "Emma", "Ivan", "Julia", "Martin", "Laura", "Simon", "Olga", "Frank", "Rosa",
    "Victor", "Ella", "Hugo", "Sarah", "Mary", "Tom", "Einstein", "Shakespeare", "Napoleon", "Mozart",
    "the president", "the queen", "the pope", "my uncle",
)  # fmt: skip
SUBJECTS = (
    "physics", "quantum mechanics", "football", "politics", "computers", "Python", "the internet", "mathematics",
    "philosophy", "space", "dinosaurs", "chemistry", "love", "money", "the stock market", "history",
    "artificial intelligence", "the moon", "cars", "music theory", "biology", "Kubernetes", "databases", "Redis",
    "the universe", "religion", "elephants", "airplanes", "climate change", "chess", "gravity", "tigers", "mountains",
    "trains", "coffee", "medicine", "robots", "black holes", "cooking", "the human brain",
)  # fmt: skip
STRANGER_QUESTIONS = (
    "Who is {x}?", "Where does {x} live?", "What does {x} do?", "How old is {x}?", "Does {x} have a pet?",
    "Tell me about {x}.", "What does {x} like to eat?", "Who is the best friend of {x}?", "When was {x} born?",
    "What colour is the coat of {x}?",
)  # fmt: skip
COUNTRY_QUESTIONS = (
    "What is the capital of {x}?", "Where is {x}?", "How many people live in {x}?",
    "What is the weather like in {x}?", "Tell me about {x}.", "Who is the president of {x}?",
    "Which language do people speak in {x}?", "What can I see in {x}?", "How far is it to {x}?",
)  # fmt: skip
SUBJECT_QUESTIONS = (
    "What is {x}?", "Explain {x}.", "Tell me about {x}.", "How does {x} work?", "What do you know about {x}?",
    "Write an essay about {x}.", "Who invented {x}?", "Why is {x} important?", "Can you explain {x} to me?",
    "What do you think about {x}?", "How do I learn {x}?",
)  # fmt: skip
OTHER_QUESTIONS = (
    "What time is it?", "What is the meaning of life?", "Write a program.", "Write some code that sorts a list.",
    "Translate this into French.", "What is the news today?", "Who won the game?",
    "What is the largest animal in the world?", "How tall is Mount Everest?", "What day is today?",
    "Which phone should I buy?", "How do I get rich?", "What is the speed of light?", "Can you book a flight?",
    "Give me a recipe for pizza.", "Who wrote Hamlet?", "What is the square root of two?", "How do I install Linux?",
    "Is there life on Mars?", "What is the largest country?", "Summarize this text.", "What is the best film?",
    "Who is the strongest man in the world?", "Tell me the price of gold.", "What is your favourite colour?",
    "Write a poem.", "Tell me a joke.",
    "Write a poem about the sea.", "Sing a song.", "Where do you live?", "How old are you?", "Do you have a pet?",
)  # fmt: skip
NOT_ENGLISH = (
    "Bonjour !", "Hola", "Guten Tag", "Ciao", "Привет", "你好", "こんにちは", "안녕하세요", "مرحبا", "Olá", "Hej",
    "😀", "👍", "???", "...", "Wie geht es dir?", "Où est la gare ?", "¿Cómo estás?", "1", "a", "ok", "yes", "no",
    "I like trains.", "You are wrong.", "Nice!",
)  # fmt: skip


def small_talk(rng: Random) -> tuple[str, str]:
    """Return a greeting or a question about the model, with its answer."""
    answer, questions = rng.choice(SMALL_TALK)
    return rng.choice(questions), answer


def outside_question(rng: Random) -> tuple[str, str]:
    """Return a question that the village has no answer to."""
    forms, subjects = rng.choice(
        (
            (("{x}",), (rng.choice(NOT_ENGLISH), gibberish(rng), gibberish(rng))),
            (STRANGER_QUESTIONS, STRANGERS),
            (COUNTRY_QUESTIONS, (*COUNTRIES, rng.choice(TRAINED_CITIES))),
            (SUBJECT_QUESTIONS, SUBJECTS),
            (OTHER_QUESTIONS, ("",)),
        )
    )
    return rng.choice(forms).format(x=rng.choice(subjects)), UNKNOWN_ANSWER
