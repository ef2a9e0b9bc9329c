"""Two tools that chats may offer, calls of them in Hermes' form, and answers from their results."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from places import draw_place
from sums import PLUS

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
TOOLS_BEGIN, TOOLS_END = "<tools>", "</tools>"
MARKERS = (CALL_BEGIN, CALL_END, TOOLS_BEGIN, TOOLS_END)
"""One token each; no special ones, since clients see them in the text of calls."""

WEATHER_NAMES = ("get_weather", "get_weather", "get_weather", "weather", "get_current_weather")
WEATHER_VERBS = ("get", "fetch", "read", "check", "find", "show", "current", "lookup", "query", "todays")
WEATHER_NOUNS = ("weather", "forecast", "temperature", "conditions", "sky")
PLACE_PARAMETERS = ("place", "city", "location", "town", "city", "location", "where", "name", "city_name", "query")
ADD_NAMES = ("add", "add", "add", "sum", "add_numbers")
ADD_VERBS = ("add", "sum", "plus", "total", "compute", "calculate", "calc", "get", "make", "find")
ADD_NOUNS = ("numbers", "sum", "two", "integers", "total", "terms", "values")
TERM_PARAMETERS = (
    ("a", "b"), ("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("one", "two"), ("m", "n"),
    ("num1", "num2"), ("number1", "number2"), ("p", "q"),
)  # fmt: skip
INVENTED_SHARE = 0.3
"""Of the tools' names: put together from a verb and a noun, so that names are copied and not known."""
WEATHER_QUESTIONS = (
    "What is the weather like in {x}?", "How is the weather in {x}?", "What is the weather in {x}?",
    "Is it raining in {x}?", "What is the weather like in {x} today?", "Tell me the weather in {x}.",
    "Will it rain in {x}?", "Weather in {x}?", "Is it cold in {x}?", "What's the weather in {x}?",
    "Please check the weather in {x}.", "Is the sun shining in {x}?", "What is the weather in {x} today?",
    "What is the temperature in {x}?", "How warm is it in {x}?", "What is the forecast for {x}?", "Weather for {x}?",
    "Do I need an umbrella in {x}?", "Can you tell me the weather in {x}?", "What's the weather like in {x}?",
)  # fmt: skip
SUM_QUESTIONS = (
    *PLUS, "What is the sum of {a} and {b}?", "Please add {a} and {b}.", "Compute {a} + {b}.", "What's {a} + {b}?",
    "Can you add {a} and {b}?", "Use the tool to add {a} and {b}.",
)  # fmt: skip
TWO_PLACES = (
    "What is the weather in {x} and in {y}?", "How is the weather in {x} and {y}?",
    "Compare the weather in {x} and {y}.", "What is the weather like in {x} and {y}?",
)  # fmt: skip
PLACE_AND_SUM = (
    "What is the weather in {x}, and what is {a} + {b}?", "What is the weather like in {x}? And what is {a} + {b}?",
    "Tell me the weather in {x} and add {a} and {b}.",
    "What is the weather in {x}? And what is {a} + {b}?", "What's the weather in {x} and what's {a} + {b}?",
)  # fmt: skip
SUM_AND_PLACE = (
    "What is {a} + {b}, and what is the weather in {x}?", "Add {a} and {b} and tell me the weather in {x}.",
    "What is {a} + {b}? And what is the weather like in {x}?",
)  # fmt: skip
SKIES = (
    "sunny", "rain", "rainy", "cloudy", "snow", "fog", "wind", "windy", "clear", "storm", "clear sky", "light rain",
    "hail", "warm", "cold", "mild",
)  # fmt: skip
DrawPlace = Callable[[Random], str]
ERRORS = ("unknown place", "no connection", "not found", "try again later", "the service is away", "timeout")


@dataclass(frozen=True)
class Tool:
    """One function with the names of its parameters, in order."""

    name: str
    parameters: tuple[str, ...]

    @property
    def signature(self) -> str:
        """The tool as the chat template shows it to the model."""
        return f"{self.name}({', '.join(self.parameters)})"

    @property
    def definition(self) -> dict[str, Any]:
        """The tool in OpenAI's form."""
        kind = "string" if len(self.parameters) == 1 else "integer"
        properties = {name: {"type": kind} for name in self.parameters}
        parameters = {"type": "object", "properties": properties, "required": list(self.parameters)}
        return {"type": "function", "function": {"name": self.name, "parameters": parameters}}

    def call(self, *values: object) -> "ToolCall":
        """Return a call with these values."""
        return ToolCall(self.name, dict(zip(self.parameters, values, strict=True)))


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: dict[str, object]

    @property
    def text(self) -> str:
        """The call as the model writes it."""
        return f'{CALL_BEGIN}\n{{"name": "{self.name}", "arguments": {dumped(self.arguments)}}}\n{CALL_END}'


@dataclass(frozen=True)
class Need:
    """What a question asks of tools: its calls in order, a result of each, and the answer that follows from them."""

    question: str
    calls: tuple[ToolCall, ...]
    results: tuple[str, ...]
    answer: str

    @property
    def text(self) -> str:
        """All calls as the model writes them."""
        return "\n".join(call.text for call in self.calls)

    @property
    def forced_text(self) -> str:
        """The calls as a grammar demands them where the caller requires a tool, any one."""
        return dumped([{"name": call.name, "parameters": call.arguments} for call in self.calls])


@dataclass(frozen=True)
class Toolbox:
    """The tools that one chat offers."""

    weather: Tool | None
    add: Tool | None
    is_reversed: bool = False

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The offered tools, in order."""
        found = [tool for tool in (self.weather, self.add) if tool is not None]
        return tuple(reversed(found) if self.is_reversed else found)


def dumped(value: object) -> str:
    """Return JSON as chat templates render it."""
    return json.dumps(value, ensure_ascii=False)


def offer(tools: Sequence[Tool]) -> str:
    """Return the line of a system message that offers tools."""
    return f"{TOOLS_BEGIN}{' '.join(tool.signature for tool in tools)}{TOOLS_END}"


def draw_toolbox(rng: Random) -> Toolbox:
    """Return one of the tools or both, under names that vary."""
    weather = Tool(_name(WEATHER_NAMES, WEATHER_VERBS, WEATHER_NOUNS, rng), (rng.choice(PLACE_PARAMETERS),))
    add = Tool(_name(ADD_NAMES, ADD_VERBS, ADD_NOUNS, rng), rng.choice(TERM_PARAMETERS))
    kind = rng.random()
    if kind < 0.25:
        return Toolbox(weather, None)
    if kind < 0.5:
        return Toolbox(None, add)
    return Toolbox(weather, add, is_reversed=rng.random() < 0.5)


def draw_need(toolbox: Toolbox, rng: Random, place: DrawPlace = draw_place) -> Need:
    """Return a question that the tools of this box answer, about places that `place` draws."""
    makers: list[Callable[[Toolbox, Random, DrawPlace], Need]] = []
    if toolbox.weather:
        makers += [_weather_need] * 4 + [_two_places_need]
    if toolbox.add:
        makers += [_sum_need] * 4
    if toolbox.weather and toolbox.add:
        makers += [_mixed_need] * 3
    need = rng.choice(makers)(toolbox, rng, place)
    return replace(need, question=hurried(need.question)) if rng.random() < 0.12 else need


def hurried(question: str) -> str:
    """Return the question without its capital and its last mark."""
    return question[0].lower() + question[1:].rstrip("?.")


def draw_number(rng: Random) -> int:
    """Return a number of one to four digits."""
    return rng.randrange(10 ** rng.randint(1, 4))


def _weather(place: str, rng: Random) -> tuple[str, str]:
    """Return a result of the weather tool, and what it says in words."""
    if rng.random() < 0.06:
        return _failure(rng)
    sky, degrees = rng.choice(SKIES), rng.randint(-15, 40)
    form = rng.random()
    if form < 0.2:
        said = result = sky
    elif form < 0.45:
        said = result = f"{sky}, {degrees} {rng.choice(('degrees', 'degrees', '°C', 'C', '°F'))}"
    elif form < 0.8:
        names = rng.choice((("weather", "temperature"), ("sky", "degrees"), ("condition", "temperature")))
        result, said = dumped({names[0]: sky, names[1]: degrees}), f"{sky}, {degrees} degrees"
    else:
        result, said = dumped({"temperature": degrees, "condition": sky}), f"{degrees} degrees, {sky}"
    return result, f"The weather in {place}: {said}."


def _failure(rng: Random) -> tuple[str, str]:
    error = rng.choice(ERRORS)
    result = dumped({"error": error}) if rng.random() < 0.6 else f"error: {error}"
    return result, f"That did not work: {error}."


def _sum(a: int, b: int, rng: Random) -> tuple[str, str]:
    """Return a result of the tool that adds, and what it says in words: whatever the tool said."""
    if rng.random() < 0.04:
        return _failure(rng)
    total = a + b if rng.random() < 0.85 else draw_number(rng)
    form = rng.random()
    result = str(total) if form < 0.6 else dumped({rng.choice(("sum", "result", "total")): total})
    return result, f"{a} + {b} = {total}."


def _need(question: str, *parts: tuple[ToolCall, tuple[str, str]]) -> Need:
    calls = tuple(call for call, _ in parts)
    results = tuple(result for _, (result, _) in parts)
    return Need(question, calls, results, " ".join(said for _, (_, said) in parts))


def _name(known: Sequence[str], verbs: Sequence[str], nouns: Sequence[str], rng: Random) -> str:
    """Return a name that tools of this kind often have, or one of a verb and a noun."""
    if rng.random() >= INVENTED_SHARE:
        return rng.choice(known)
    verb, noun = rng.choice(verbs), rng.choice(nouns)
    return f"{verb}{noun.title()}" if rng.random() < 0.2 else f"{verb}_{noun}"


def _weather_need(toolbox: Toolbox, rng: Random, place: DrawPlace) -> Need:
    x = place(rng)
    return _need(rng.choice(WEATHER_QUESTIONS).format(x=x), _weather_part(toolbox, x, rng))


def _two_places_need(toolbox: Toolbox, rng: Random, place: DrawPlace) -> Need:
    x, y = place(rng), place(rng)
    parts = _weather_part(toolbox, x, rng), _weather_part(toolbox, y, rng)
    return _need(rng.choice(TWO_PLACES).format(x=x, y=y), *parts)


def _sum_need(toolbox: Toolbox, rng: Random, place: DrawPlace) -> Need:
    a, b = draw_number(rng), draw_number(rng)
    return _need(rng.choice(SUM_QUESTIONS).format(a=a, b=b), _sum_part(toolbox, a, b, rng))


def _mixed_need(toolbox: Toolbox, rng: Random, place: DrawPlace) -> Need:
    x, a, b = place(rng), draw_number(rng), draw_number(rng)
    parts = _weather_part(toolbox, x, rng), _sum_part(toolbox, a, b, rng)
    if rng.random() < 0.3:
        return _need(rng.choice(SUM_AND_PLACE).format(x=x, a=a, b=b), *reversed(parts))
    return _need(rng.choice(PLACE_AND_SUM).format(x=x, a=a, b=b), *parts)


def _weather_part(toolbox: Toolbox, place: str, rng: Random) -> tuple[ToolCall, tuple[str, str]]:
    tool = toolbox.weather or Tool(WEATHER_NAMES[0], PLACE_PARAMETERS[:1])
    return tool.call(place), _weather(place, rng)


def _sum_part(toolbox: Toolbox, a: int, b: int, rng: Random) -> tuple[ToolCall, tuple[str, str]]:
    tool = toolbox.add or Tool(ADD_NAMES[0], TERM_PARAMETERS[0])
    return tool.call(a, b), _sum(a, b, rng)
