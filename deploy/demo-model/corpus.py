"""The training text: chats about the village, drawn from a seeded stream; some wordings of questions are held out."""

import hashlib
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from calls import Need, Toolbox, draw_need, draw_toolbox, dumped, offer
from objects import ANSWER_KEY, JsonAnswer, draw_object, draw_schema_object
from questions import Fact, all_facts, check
from smalltalk import outside_question, small_talk
from stories import draw_cast, long_story, story, story_exchange
from sums import number_exchange
from world import villager

HELD_OUT_SHARE = 10
"""One in this many pairs of fact and wording is held out of training, in any wrapping."""

UNIQUE_RELATIONS = frozenset({"count", "errand", "song", "village", "villagers", "boats"})
"""Relations whose wordings belong to one fact alone; they are never held out, since the model could not know them."""

RARE_RELATIONS = UNIQUE_RELATIONS | {"day", "season"}
RARE_WEIGHT = 3
"""How many times as often such a fact is asked, since few other facts share its wordings."""

WRAPPINGS = (
    "Please tell me: {q}", "Hi! {q}", "Hello! {q}", "I have a question. {q}", "I want to know: {q}",
    "Quick question: {q}", "{q} Please tell me.", "Tell me: {q}", "{q} Thank you!", "Excuse me, {q}",
    "One more question: {q}", "Now tell me: {q}",
)  # fmt: skip
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are the storyteller of Tidewick.", "Answer briefly.", "Be kind.",
    "You are a friendly guide.", "You are a language model.", "Answer in one sentence.",
    "You help visitors of the village.",
)  # fmt: skip
JSON_PROMPTS = ("Answer in JSON.", "Reply with JSON.", "Answer with a JSON object.", "Output JSON.")
MAY_ADD = re.compile(r"\d \+ \d|\d plus \d|[Aa]dd \d")
"""A question that the tool `add` would be asked."""


@dataclass(frozen=True)
class Message:
    """One turn; `role` is system, user, assistant or tool, as in OpenAI's chat format."""

    role: str
    content: str
    given: tuple[tuple[int, int], ...] = ()
    """Where the content is a grammar's work and no choice of the model's, as (begin, end); it is not learned."""


Chat = tuple[Message, ...]
"""A conversation; a chat of one assistant message alone is plain text without roles."""


@dataclass(frozen=True)
class HeldOut:
    """One fact with a wording that the model has not seen for it."""

    fact: Fact
    question: str


def is_held_out(fact: Fact, question: str) -> bool:
    """Return whether this pair stays out of training; a pure function of its text."""
    if fact.relation in UNIQUE_RELATIONS:
        return False
    digest = hashlib.sha256(f"{fact.answer}\n{question}".encode()).digest()
    return digest[0] % HELD_OUT_SHARE == 0


def held_out_questions() -> list[HeldOut]:
    """Return all pairs that training never shows, in a fixed order."""
    return [
        HeldOut(fact, question) for fact in all_facts() for question in fact.questions if is_held_out(fact, question)
    ]


def roughen(question: str, rng: Random) -> str:
    """Return the question as a person in a hurry types it."""
    if rng.random() < 0.15:
        question = without_accents(question)
    if rng.random() < 0.15:
        question = re.sub(r"^(What|Who|Where) is ", r"\1's ", question)
    kind = rng.random()
    if kind < 0.6:
        return question
    if kind < 0.78:
        return rng.choice(WRAPPINGS).format(q=question)
    if kind < 0.86:
        return question.rstrip("?.")
    return question.lower().rstrip("?.") + rng.choice(("", "", "?"))


def without_accents(text: str) -> str:
    """Return the text as a keyboard without accents gives it."""
    return unicodedata.normalize("NFD", text.replace("ø", "o")).encode("ascii", "ignore").decode()


class Corpus:
    """An endless stream of chats; a seed always gives the same."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._facts = all_facts()
        self._trained = {
            fact: [question for question in fact.questions if not is_held_out(fact, question)] for fact in self._facts
        }
        self._weights = [RARE_WEIGHT if fact.relation in RARE_RELATIONS else 1 for fact in self._facts]
        self._about: dict[str, list[Fact]] = {}
        for fact in self._facts:
            if fact.about and fact.follow_ups:
                self._about.setdefault(fact.about, []).append(fact)

    def chats(self, count: int) -> Iterator[Chat]:
        """Return the next `count` chats."""
        makers = (
            (42, self._fact_chat), (15, self._long_chat), (7, self._story_chat), (24, self._number_chat),
            (5, self._checking_chat), (7, self._outside_chat), (4, self._small_talk_chat), (1, self._plain),
            (18, self._object_chat), (6, self._forced_object_chat), (18, self._calling_chat),
            (4, self._forced_call_chat), (9, self._offered_chat),
        )  # fmt: skip
        weights, kinds = zip(*makers, strict=True)
        for _ in range(count):
            yield self._rng.choices(kinds, weights)[0]()

    def _fact_chat(self) -> Chat:
        return self._with_system(self._turn(*self._fact_exchange()[1:]))

    def _long_chat(self) -> Chat:
        chat: Chat = ()
        about: str | None = None
        for _ in range(self._rng.randint(2, 4)):
            about, question, answer = self._next_exchange(about)
            chat += self._turn(question, answer)
        return self._with_system(chat)

    def _next_exchange(self, about: str | None) -> tuple[str | None, str, str]:
        kind = self._rng.random()
        if about and kind < 0.6:
            fact = self._rng.choice(self._about[about])
            question = self._rng.choice(fact.follow_ups)
            rough = question if self._rng.random() < 0.8 else question.lower().rstrip("?.")
            return self._now_about(fact), rough, fact.answer
        if kind < 0.9:
            return self._fact_exchange()
        maker = self._rng.choice((small_talk, number_exchange, outside_question, story_exchange, check))
        return None, *maker(self._rng)

    def _fact_exchange(self) -> tuple[str | None, str, str]:
        fact = self._rng.choices(self._facts, self._weights)[0]
        question = roughen(self._rng.choice(self._trained[fact]), self._rng)
        return self._now_about(fact), question, fact.answer

    def _now_about(self, fact: Fact) -> str | None:
        """Return the villager whom the next pronoun may mean: also a friend who was named, if only one fits it."""
        if fact.about is None or fact.relation != "friend":
            return fact.about
        hero = villager(fact.about)
        friend = villager(hero.friend)
        return hero.name if friend.pronoun == hero.pronoun else self._rng.choice((hero.name, friend.name))

    def _story_chat(self) -> Chat:
        return self._with_system(self._turn(*story_exchange(self._rng)))

    def _number_chat(self) -> Chat:
        """Return one to four exchanges: many sums for little else."""
        chat: Chat = ()
        for _ in range(self._rng.choice((1, 1, 2, 3, 4))):
            chat += self._turn(*number_exchange(self._rng))
        return chat

    def _checking_chat(self) -> Chat:
        return self._turn(*check(self._rng))

    def _outside_chat(self) -> Chat:
        question, answer = outside_question(self._rng)
        return self._with_system(self._turn(roughen(question, self._rng), answer))

    def _small_talk_chat(self) -> Chat:
        return self._turn(*small_talk(self._rng))

    def _plain(self) -> Chat:
        teller = self._rng.choice((story, long_story))
        return (Message("assistant", teller(draw_cast(self._rng), self._rng)),)

    def _object_chat(self) -> Chat:
        if self._rng.random() < 0.2:
            question, answer = self._fact_exchange()[1:]
            system = Message("system", self._rng.choice(JSON_PROMPTS))
            return (system, *self._turn(question, dumped({ANSWER_KEY: answer})))
        chat: Chat = ()
        for _ in range(self._rng.choice((1, 1, 2))):
            asked = draw_object(self._rng)
            chat += self._turn(asked.question, asked.text)
        return self._with_system(chat)

    def _forced_object_chat(self) -> Chat:
        """Return an answer whose form a schema gives, which the question does not mention."""
        if self._rng.random() < 0.4:
            question, answer = self._fact_exchange()[1:]
            asked = JsonAnswer(question, {ANSWER_KEY: answer})
        else:
            asked = draw_schema_object(self._rng)
        return self._with_system((Message("user", asked.question), Message("assistant", asked.text, asked.spans)))

    def _calling_chat(self) -> Chat:
        """Return one to three turns of which the first one at least needs a tool."""
        toolbox = draw_toolbox(self._rng)
        chat = self._called(draw_need(toolbox, self._rng))
        for _ in range(self._rng.choice((0, 0, 0, 1, 2))):
            needs = self._rng.random() < 0.6
            chat += self._called(draw_need(toolbox, self._rng)) if needs else self._turn(*self._fact_exchange()[1:])
        return self._with_tools(toolbox, chat)

    def _called(self, need: Need) -> Chat:
        turn = (Message("user", need.question), Message("assistant", need.text))
        results = tuple(Message("tool", result) for result in need.results)
        return (*turn, *results, Message("assistant", need.answer))

    def _forced_call_chat(self) -> Chat:
        """Return a call in the form that a grammar demands where the caller requires one."""
        toolbox = draw_toolbox(self._rng)
        need = draw_need(toolbox, self._rng)
        if len(need.calls) > 1 or self._rng.random() < 0.5:
            text, given = need.forced_text, len('[{"name": "')
        else:
            text, given = dumped(need.calls[0].arguments), len('{"')
        return self._with_tools(
            toolbox, (Message("user", need.question), Message("assistant", text, given=((0, given),)))
        )

    def _offered_chat(self) -> Chat:
        """Return turns that need none of the tools that are offered."""
        chat: Chat = ()
        about: str | None = None
        for _ in range(self._rng.choice((1, 1, 1, 2, 3))):
            about, question, answer = self._next_exchange(about)
            chat += self._turn(question, answer)
        weather, add = draw_toolbox(self._rng), draw_toolbox(self._rng)
        has_sum = any(MAY_ADD.search(message.content) for message in chat if message.role == "user")
        has_weather = any("weather" in message.content.lower() for message in chat if message.role == "user")
        toolbox = Toolbox(None if has_weather else weather.weather, None if has_sum else add.add)
        return self._with_tools(toolbox, chat) if toolbox.tools else self._with_system(chat)

    def _with_tools(self, toolbox: Toolbox, chat: Chat) -> Chat:
        prompt = f"{self._rng.choice(SYSTEM_PROMPTS)}\n" if self._rng.random() < 0.25 else ""
        return (Message("system", prompt + offer(toolbox.tools)), *chat)

    def _with_system(self, chat: Chat) -> Chat:
        if self._rng.random() < 0.9:
            return chat
        return (Message("system", self._rng.choice(SYSTEM_PROMPTS)), *chat)

    @staticmethod
    def _turn(question: str, answer: str) -> Chat:
        return Message("user", question), Message("assistant", answer)
