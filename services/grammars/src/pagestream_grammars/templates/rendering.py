"""Render a model's Jinja chat template into a prompt, in a sandbox, by the conventions of Hugging Face's tokenizers.

A template comes with a model, so its loops, macros and paddings are a stranger's, and what it loops over is a caller's.
Jinja's sandbox keeps it from the process' objects, and bounds `range` alone. Here seconds, and the size of the texts
and lists that it makes, are bounded: loops, calls, filters and operators are counted, and what multiplies is checked
before it is computed.

Callers send OpenAI's messages: a content is a text, a list of text parts or null, arguments of calls are JSON text, and
a system message may stand anywhere. Templates were each written for some of that. What they are given beyond it they
refuse, or leave out of the prompt without a word: `shaped` brings a conversation into the shapes that one takes.
"""

import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

# Twice the characters of the largest body by default. What a caller sends can grow in a template: indented JSON by the
# square of its depth.
MAX_CHARS = 2**24
MAX_RENDER_S = 10.0
_MAX_WRITTEN = 8
"""Times MAX_CHARS: of all that is written into the prompt, into variables and by macros."""
_MAX_ITEMS = 2**20
"""Of a list that an operator makes."""
_MAX_BITS = 2**14
"""Of a number that an operator makes. Python writes out those of 4,300 digits at most."""
_MAX_WIDTH = 9_999
"""Of a padding, an indentation, or a field of a format."""
_LOOP, _JOIN = " loop", " join"
"""Filters that a template can't name."""
_WIDE, _TOO_WIDE, _GIVEN_WIDTH = re.compile(r"\d\d|:[^{}]*\{"), re.compile(r"\d{5}|\*"), re.compile(r":[^{}]*\{")
_PADDINGS = ("center", "expandtabs", "indent", "ljust", "rjust", "tojson", "zfill")


class TemplateTooExpensive(jinja2.TemplateError):
    """A bound is reached."""


class _Namespace(Namespace):
    """What templates keep values in. Its text doesn't spell them: they may hold each other many times."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Usage(threading.local):
    """What the rendering in this thread has used."""

    ends_at = float("inf")
    limit_s = MAX_RENDER_S
    num_written = 0
    shares = False
    """Whether a list may hold another one several times: its text is longer than all that is in memory."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of one template, which ends."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._write, **options)
        self._usage = _Usage()
        self._shares = False
        del self.globals["lipsum"]  # any number of random words
        self.globals["namespace"] = _Namespace
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)
        self.filters[_LOOP], self.filters[_JOIN] = self._loop, self._join

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Set a filter, within the bounds."""
        num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._check_time()
            value, *others = args[num_passed:]
            if name == "join" and not hasattr(value, "__len__"):
                value = list(value)
                args = (*args[:num_passed], value, *others)
            self._check_growth(name, value, [*others, *kwargs.values()])
            return function(*args, **kwargs)

        self.filters[name] = bounded

    def compile_counted(self, source: str) -> jinja2.Template:
        """Compile a template so that its loops count. Raises jinja2.TemplateError where it is broken."""
        tree = self.parse(source)
        literals = [each for each in tree.find_all((nodes.List, nodes.Tuple, nodes.Dict)) if not _is_target(each)]
        self._shares = any(not isinstance(part, nodes.Const) for each in literals for part in each.find_all(nodes.Expr))
        return self.template_class.from_code(self, self.compile(_Counting().visit(tree)), self.make_globals(None))

    def render_bounded(self, template: jinja2.Template, values: Mapping[str, Any], limit_s: float | None = None) -> str:
        """Render a template, in `limit_s` seconds at most, or MAX_RENDER_S.

        Raises jinja2.TemplateError, and whatever the template's own faults raise.
        """
        usage = self._usage
        usage.limit_s = MAX_RENDER_S if limit_s is None else limit_s
        usage.ends_at, usage.num_written, usage.shares = time.monotonic() + usage.limit_s, 0, self._shares
        try:
            return bounded_text(template.generate(dict(values)))
        finally:
            usage.ends_at = float("inf")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `+`, `*`, `**` or `%`, where the result is small enough."""
        if operator == "%" and isinstance(left, str):
            self._check_format(left, list(right) if isinstance(right, tuple) else [right])
        elif operator == "+" and isinstance(left, str | list | tuple):
            self._check_length(left, len(left) + (len(right) if isinstance(right, str | list | tuple) else 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _bounded(left.bit_length() * right, _MAX_BITS, "a number", "bits")
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            _bounded(left.bit_length() + right.bit_length(), _MAX_BITS, "a number", "bits")
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                    self._check_length(sequence, len(sequence) * count)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call what a template calls, within the bounds."""
        __self._check_time()
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            __self._check_growth(__obj.__name__, owner, [*args, *kwargs.values()])
        __self._usage.shares |= __obj is dict
        result = super().call(__context, __obj, *args, **kwargs)
        __self._count(len(result) if isinstance(result, str) else 1)
        return result

    def _check_time(self) -> None:
        if time.monotonic() > self._usage.ends_at:
            raise self._too_late()

    def _too_late(self) -> TemplateTooExpensive:
        return TemplateTooExpensive(f"rendering takes longer than {self._usage.limit_s:g} s")

    def _count(self, num_chars: int) -> None:
        usage = self._usage
        usage.num_written += num_chars
        if time.monotonic() > usage.ends_at:
            raise self._too_late()
        if usage.num_written > _MAX_WRITTEN * MAX_CHARS:
            raise TemplateTooExpensive(f"all that is rendered has more than {_MAX_WRITTEN * MAX_CHARS} characters")

    def _check_length(self, sequence: Any, length: int) -> None:
        if isinstance(sequence, str):
            _bounded_chars(length)
        else:
            self._usage.shares = True
            _bounded(length, _MAX_ITEMS, "a list", "items")

    def _check_growth(self, name: str, value: Any, given: list[Any]) -> None:
        """Check what a filter, or a method of a text, makes of `value`."""
        # A new filter or method that multiplies its input needs a branch below.
        size, sizes = self._size(value), [self._size(each) for each in given]
        most = max(sizes, default=0)
        _bounded_chars(size + sum(sizes))
        if name in _PADDINGS:
            width = max((each for each in given if isinstance(each, int)), default=0)
            _bounded(width, _MAX_WIDTH, "a width", "characters")
            places = sum(map(value.count, "\n\t")) if isinstance(value, str) else 0
            _bounded_chars(size + (1 + places) * (width + most))
        elif name == "replace" and isinstance(value, str) and given:
            _bounded_chars(size + value.count(str(given[0])) * most)
        elif name == "join":
            texts = [len(each) for each in (value, *given) if isinstance(each, str)]
            num_parts = max(len(each) for each in (value, *given) if hasattr(each, "__len__"))
            _bounded_chars(size + num_parts * max(texts, default=0) if given else size)
        elif name in ("format", "format_map") and isinstance(value, str):
            self._check_format(value, given)

    def _check_format(self, text: str, given: list[Any]) -> None:
        numbers = [each for each in given if isinstance(each, int)]
        if _TOO_WIDE.search(text) or (_GIVEN_WIDTH.search(text) and any(each > _MAX_WIDTH for each in numbers)):
            raise TemplateTooExpensive(f"a format has a width of more than {_MAX_WIDTH} characters")
        each_field = max(map(self._size, given), default=0) + (_MAX_WIDTH if _WIDE.search(text) else 0)
        _bounded_chars(len(text) + sum(map(text.count, "%{")) * each_field)

    def _size(self, value: Any) -> int:
        """Return the characters of a text; of a list or dict where that can be more than its memory, else 0."""
        if isinstance(value, str):
            return len(value)
        if not self._usage.shares:
            return 0
        size, waiting = 0, [value]
        while waiting:
            each = waiting.pop()
            size += len(each) if isinstance(each, str) else 1
            if isinstance(each, dict):
                waiting += [*each.keys(), *each.values()]
            elif isinstance(each, list | tuple | set):
                waiting += each
            if not size % 1024:
                self._check_time()
            _bounded_chars(size + len(waiting))
        return size

    def _write(self, value: Any) -> Any:
        """Count what a template writes."""
        self._count(len(value) if type(value) is str else self._size(value))
        return value

    def _loop(self, items: Any, num_chars: int) -> Any:
        """Return what a loop runs over, counted."""
        return _Turns(items, lambda: self._count(num_chars)) if items else items

    def _join(self, parts: list[Any]) -> str:
        """Do what `~` does."""
        _bounded_chars(sum(map(self._size, parts)))
        return "".join(map(str, parts))


class _Turns:
    """The items of a loop; calls `count` before each."""

    def __init__(self, items: Iterable[Any], count: Callable[[], None]) -> None:
        self._items, self._count = items, count

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._count()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # TypeError for an iterator, as Jinja expects


class _Counting(NodeTransformer):
    """Puts `_LOOP` around what loops run over, with the characters that a turn may write, and `_JOIN` for `~`."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        num_chars = nodes.Const(1 + sum(map(_written_chars, (*node.body, *node.else_))))
        node.iter = nodes.Filter(node.iter, _LOOP, [num_chars], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, _JOIN, [], [], None, None, lineno=node.lineno)


def bounded_text(parts: Iterable[str]) -> str:
    """Join parts of a text. Raises jinja2.TemplateError where it gets too long, or takes too long to make."""
    kept, num_chars, end = [], 0, time.monotonic() + MAX_RENDER_S
    for part in parts:
        num_chars = _bounded_chars(num_chars + len(part))
        if time.monotonic() > end:
            raise TemplateTooExpensive(f"rendering takes longer than {MAX_RENDER_S:g} s")
        kept.append(part)
    return "".join(kept)


def _written_chars(node: nodes.Node) -> int:
    """Return the characters of a node's own text, without those of loops and macros within it."""
    if isinstance(node, nodes.TemplateData):
        return len(node.data)
    if isinstance(node, nodes.For | nodes.Macro):
        return 0
    return sum(map(_written_chars, node.iter_child_nodes()))


def _is_target(node: nodes.Node) -> bool:
    """Whether a tuple names what is assigned to."""
    return isinstance(node, nodes.Tuple) and node.ctx == "store"


def _bounded_chars(num_chars: int) -> int:
    return _bounded(num_chars, MAX_CHARS, "the rendered prompt", "characters")


def _bounded(number: int, most: int, what: str, unit: str) -> int:
    if number > most:
        raise TemplateTooExpensive(f"{what} has more than {most} {unit}")
    return number


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replace Jinja's filter, which escapes HTML: no model was trained on that."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return encoder.encode(value) if indent is None else bounded_text(encoder.iterencode(value))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.add_filter("tojson", _tojson)
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    return environment


class Template:
    """A compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a template.

        Args:
            source: its text.
            special_tokens: texts by the names that templates have for them, such as `bos_token`.

        Raises:
            jinja2.TemplateError: it is broken.
        """
        self.source = source
        self._environment = _environment()
        self._template = self._environment.compile_counted(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        limit_s: float | None = None,
    ) -> str:
        """Return the prompt's text. Rendering is pure Python and may take milliseconds.

        Args:
            messages: of the conversation, in the shapes that the template takes.
            add_generation_prompt: whether to open the assistant's turn.
            arguments: further values; they go before special tokens, and not before messages.
            tools: that the template shows to the model.
            limit_s: seconds that it may take.

        Raises:
            jinja2.TemplateError: the template refuses the messages, or reaches a bound.
            Exception: whatever a fault of the template raises.
        """
        values = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **(arguments or {}),
            **({"tools": list(tools)} if tools else {}),
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        return self._environment.render_bounded(self._template, values, limit_s)


def template_fault(source: str) -> str | None:
    """Return why a text is no Jinja template; None where it is one."""
    try:
        Template(source, {})
    except jinja2.TemplateError as error:
        return error.message or type(error).__name__
    return None


ROLES = ("system", "user", "assistant", "tool")
Message = Mapping[str, Any]
Chat = list[dict[str, Any]]
Content = str | list[dict[str, Any]] | None
_CALLS = "tool_calls"
_INSTRUCTING = ("system", "developer")
_BETWEEN_INSTRUCTIONS = "\n\n"


class SystemPlace(IntEnum):
    """Where a template shows messages of the system."""

    ANYWHERE = 0
    FIRST = 1
    """One, at the front: later ones are joined to it."""
    NOWHERE = 2
    """In no message of its own: the first message of the user begins with it."""


class TextBesideCalls(IntEnum):
    """What a template makes of an assistant's message with a text and calls."""

    KEPT = 0
    """It shows the calls. Some leave the text out, as they were written to."""
    BEFORE = 1
    """It leaves out the calls: the text becomes a message before theirs."""
    LEFT_OUT = 2
    """Likewise, and takes no such message."""


@dataclass(frozen=True)
class ChatShapes:
    """The shapes that a template takes. The defaults are of one that takes what most do."""

    parts_only: frozenset[str] = frozenset()
    """Roles whose content is shown as a part, and is not as a text."""
    takes_part: frozenset[str] = frozenset()
    """Roles whose content may be a list of one part."""
    takes_parts: frozenset[str] = frozenset()
    """Roles whose content may be a list of several, all of which are shown."""
    text_arguments: bool = False
    """Whether arguments of calls are JSON text, not objects."""
    null_beside_calls: bool = False
    """Whether a content beside calls may be null."""
    no_blank_beside_calls: bool = False
    """Whether calls are shown beside null alone, and not beside an empty text."""
    text_beside_calls: TextBesideCalls = TextBesideCalls.KEPT
    one_call: bool = False
    """Whether a message has one call, which its result follows."""
    named_results: bool = False
    """Whether it shows the name of the function in the message of its result."""
    system: SystemPlace = SystemPlace.ANYWHERE
    alternates: bool = False
    """Whether neighbours of one role are refused."""
    no_user_after_result: bool = False
    """Whether a user's message is refused right after the result of a call."""
    refused_efforts: frozenset[str] = frozenset()
    """Values of `reasoning_effort` that it refuses."""
    no_developer: bool = False
    """Whether messages of the role `developer` are not shown."""


def text_of(content: Any) -> str:
    """Return the text of a content; parts are joined as lines."""
    if isinstance(content, list | tuple):
        return "\n".join(str(part.get("text") or "") for part in content)
    return str(content or "")


def shaped(messages: Sequence[Message], shapes: ChatShapes) -> Chat:
    """Return a conversation in the shapes of its template.

    Args:
        messages: OpenAI's; arguments of calls may be objects as well.
        shapes: of the template.
    """
    chat = [dict(message) for message in messages]
    if shapes.system is not SystemPlace.ANYWHERE:
        chat = _with_system_first(chat)
    if shapes.system is SystemPlace.NOWHERE:
        chat = _with_system_in_user(chat)
    if shapes.alternates:
        chat = _merged(chat)
    if shapes.no_user_after_result:
        chat = _with_users_in_results(chat)
    if shapes.named_results:
        chat = _with_names(chat)
    if shapes.one_call:
        chat = _one_call_each(chat)
    return [each for message in chat for each in _of_message(message, shapes)]


def _with_system_first(chat: Chat) -> Chat:
    found = [each for each in chat if each.get("role") in _INSTRUCTING]
    if not found or (len(found) == 1 and chat[0] is found[0]):
        return chat
    others = [each for each in chat if each.get("role") not in _INSTRUCTING]
    content = found[0].get("content") if len(found) == 1 else _joined(found)
    return [{**found[0], "content": content}, *others]


def _joined(messages: Chat) -> str:
    texts = [text_of(each.get("content")) for each in messages]
    return _BETWEEN_INSTRUCTIONS.join(text for text in texts if text)


def _with_system_in_user(chat: Chat) -> Chat:
    """Write the system's message, which is the first one, at the beginning of the user's."""
    if not chat or chat[0].get("role") != "system":
        return chat
    system, *others = chat
    if not others or others[0].get("role") != "user":
        return [{**system, "role": "user"}, *others]
    return [{**others[0], "content": _joined([system, others[0]])}, *others[1:]]


def _merged(chat: Chat) -> Chat:
    """Make one message of neighbours of the user, and of the assistant, but for a text that follows calls."""
    found: Chat = []
    for message in chat:
        last, role = found[-1] if found else {}, message.get("role")
        if last.get("role") == role == "user":
            found[-1] = {**last, "content": _added(last.get("content"), message.get("content"))}
        elif last.get("role") == role == "assistant" and (not last.get("tool_calls") or message.get("tool_calls")):
            one = {**last, **message, "content": _added(last.get("content"), message.get("content"))}
            for name in ("reasoning", "reasoning_content"):
                if last.get(name) and message.get(name):
                    one[name] = f"{last[name]}\n{message[name]}"
            if calls := [*(last.get("tool_calls") or ()), *(message.get("tool_calls") or ())]:
                one["tool_calls"] = calls
            found[-1] = one
        else:
            found.append(message)
    return found


def _added(first: Any, second: Any) -> Content:
    """Return the parts of two contents; one alone stays as it is."""
    if not first or not second:
        return first or second  # type: ignore[no-any-return]
    return [*_parts_of(first), *_parts_of(second)]


def _parts_of(content: Any) -> list[dict[str, Any]]:
    return list(content) if isinstance(content, list | tuple) else [{"type": "text", "text": str(content)}]


def _with_users_in_results(chat: Chat) -> Chat:
    """Add what a user says right after results of calls to the last of these."""
    found: Chat = []
    for message in chat:
        last = found[-1] if found else {}
        if last.get("role") == "tool" and message.get("role") == "user":
            found[-1] = {**last, "content": _joined([last, message])}
        else:
            found.append(message)
    return found


def _with_names(chat: Chat) -> Chat:
    """Name the function in each result that has no name."""
    results = results_of_calls(chat)
    names = {place: _name_of(chat[of][_CALLS][number]) for (of, number), place in results.items()}
    return [
        {**each, "name": name} if not each.get("name") and (name := names.get(place)) else each
        for place, each in enumerate(chat)
    ]


def _name_of(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _one_call_each(chat: Chat) -> Chat:
    """Give each call a message of its own, which its result follows."""
    results = results_of_calls(chat)
    moved: set[int] = set()
    found: Chat = []
    for place, message in enumerate(chat):
        calls = message.get(_CALLS) or ()
        if place in moved:
            continue
        if len(calls) < 2:
            found.append(message)
            continue
        for number, call in enumerate(calls):
            found.append({**(message if not number else {"role": "assistant", "content": None}), _CALLS: [call]})
            if (result := results.get((place, number))) is not None:
                found.append(chat[result])
                moved.add(result)
    return found


def results_of_calls(messages: Sequence[Message]) -> dict[tuple[int, int], int]:
    """Return the places of the messages that are results, by the place of a message with calls and a call's number.

    Many servers number calls anew in each turn, or leave ids empty: a result is of the last call before it that has its
    id, and of calls of one message with the same id the first one without a result.
    """
    found: dict[tuple[int, int], int] = {}
    waiting: dict[Any, deque[tuple[int, int]]] = {}
    for place, message in enumerate(messages):
        own: dict[Any, deque[tuple[int, int]]] = {}
        for number, call in enumerate(message.get(_CALLS) or ()):
            if isinstance(call, dict):
                own.setdefault(call.get("id"), deque()).append((place, number))
        waiting |= own
        if message.get("role") == "tool" and (calls := waiting.get(message.get("tool_call_id"))):
            found[calls.popleft()] = place
    return found


def _of_message(message: dict[str, Any], shapes: ChatShapes) -> Chat:
    """Return a message in its shape, which may be two."""
    calls, role = message.get("tool_calls"), str(message.get("role"))
    if not calls:
        return [{**message, "content": _content(role, message.get("content"), shapes)}]
    message["tool_calls"] = [_call(each, as_text=shapes.text_arguments) for each in calls]
    text = text_of(message.get("content"))
    is_null = shapes.null_beside_calls and (message.get("content") is None or shapes.no_blank_beside_calls)
    blank = None if is_null else _content(role, "", shapes)
    if not text or shapes.text_beside_calls is TextBesideCalls.LEFT_OUT:
        return [{**message, "content": blank}]
    content = _content(role, message["content"], shapes)
    if shapes.text_beside_calls is TextBesideCalls.KEPT:
        return [{**message, "content": content}]
    said = {name: each for name, each in message.items() if name != "tool_calls"}
    return [{**said, "content": content}, {"role": role, "content": blank, "tool_calls": message["tool_calls"]}]


def _content(role: str, content: Any, shapes: ChatShapes) -> Content:
    if isinstance(content, list | tuple):
        taken = shapes.takes_parts if len(content) > 1 else shapes.takes_part if content else ()
        if role in taken:
            return list(content)
    text = text_of(content)
    return [{"type": "text", "text": text}] if role in shapes.parts_only else text


def _call(call: Any, *, as_text: bool) -> Any:
    """Return a call with its arguments as text or as an object; an empty one for what is none."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = (_as_text if as_text else _as_object)(function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def _as_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments or "{}"
    return json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)


def _as_object(arguments: Any) -> Any:
    if isinstance(arguments, dict):
        return arguments
    try:
        read = json.loads(arguments or "{}")
    except (TypeError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}
