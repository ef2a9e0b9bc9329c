"""Templates get messages in the shapes that they were written for; their prompts are those of `transformers`."""

from typing import Any

import pytest
from pagestream_grammars.templates import ChatShapes, Template, probe, shaped, shapes_of
from support.protocol.template_shapes import SHAPES, TEMPLATES, compared, has_all, takes

MOVED = {("Gemma 3", "later system")}
"""Which `transformers` shows as a turn of a role that the model does not know."""
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}],
}
USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_have_all_that_was_said_and_are_those_of_transformers(name: str) -> None:
    for shape_name, cell in compared(TEMPLATES[name]).items():
        shape = SHAPES[shape_name]
        if not takes(name, shape):
            continue
        assert has_all(cell.ours, shape), (shape_name, cell.ours)
        if (name, shape_name) in MOVED:
            continue
        if has_all(cell.theirs, shape):
            assert cell.ours == cell.theirs, shape_name
        elif cell.others:
            assert cell.ours in cell.others, shape_name


def prompt(source: str, *messages: dict[str, Any], **more: Any) -> str:
    template = Template(source, {})
    return template.render(shaped(messages, shapes_of(template, more.get("arguments"))), **more)


def test_arguments_stay_the_text_that_was_sent() -> None:
    joins = "{% for m in messages %}{% for c in m.tool_calls or () %}{{ c.function.name + c.function.arguments }}"
    joins += "{% endfor %}{% endfor %}"
    assert prompt(joins, CALLED) == 'f{"a":  1}'
    function = {"name": "f", "arguments": {"ä": "1"}}
    assert prompt(joins, {**CALLED, "tool_calls": [{"function": function}]}) == 'f{"ä": "1"}'
    asks = "{% for m in messages %}{% for c in m.tool_calls or () %}{{ c.function.name }}{{ c.function.arguments.a }}"
    asks += "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    assert prompt(asks, CALLED) == 'f1{"a": 1}'


@pytest.mark.parametrize("arguments", ["", "[1]", '{"a', None])
def test_arguments_that_are_no_object_are_an_empty_one(arguments: Any) -> None:
    call = {**CALLED, "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": arguments}}]}
    source = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name }}"
    source += "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    assert prompt(source, call) == "f{}"


def _turn(first: str, second: str, ids: tuple[str, str]) -> list[dict[str, Any]]:
    """Return two calls, of functions `f` and `g`, and their results."""
    calls = [{**CALLED["tool_calls"][0], "id": each} for each in ids]
    calls[1] = {**calls[1], "function": {"name": "g", "arguments": "{}"}}
    results = [("tool", ids[0], first), ("tool", ids[1], second)]
    shown = [{"role": role, "tool_call_id": call_id, "content": text} for role, call_id, text in results]
    return [{**CALLED, "tool_calls": calls}, *shown]


@pytest.mark.parametrize("ids", [("call_0", "call_1"), ("", ""), ("x", "x")])
def test_results_follow_their_calls_where_ids_are_used_again(ids: tuple[str, str]) -> None:
    one = "{% for m in messages %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
    one += "{% for c in m.tool_calls or () %}{{ c.function.name }}:{{ c.function.arguments | tojson }}{% endfor %}"
    one += "{{ m.content or '' }};{% endfor %}"
    chat = [USER, *_turn("r1", "r2", ids), USER, *_turn("r3", "r4", ids)]
    assert prompt(one, *chat) == 'Hi;f:{"a": 1};r1;g:{};r2;Hi;f:{"a": 1};r3;g:{};r4;'
    names = one.replace("> 1", "> 2").replace("{{ m.content", "{{ m.name or '' }}{{ m.content")
    assert prompt(names, *chat) == 'Hi;f:{"a": 1}g:{};fr1;gr2;Hi;f:{"a": 1}g:{};fr3;gr4;'


def test_instructions_are_joined_at_the_front_in_their_order() -> None:
    first = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}"
    first += "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    messages = [USER, {"role": "system", "content": "One."}, {"role": "system", "content": "Two."}]
    assert prompt(first, *messages) == "<system>One.\n\nTwo.<user>Hi"
    none = first.replace(" and not loop.first", "")
    assert prompt(none, *messages) == "<user>One.\n\nTwo.\n\nHi"
    assert prompt(none, messages[1]) == "<user>One."


def test_a_role_of_developers_is_told_from_one_that_is_left_out() -> None:
    users = "{% for m in messages %}{% if m.role in ['user', 'system'] %}{{ m.content }}{% endif %}{% endfor %}"
    assert shapes_of(Template(users + "For each developer.", {})).no_developer
    assert not shapes_of(Template(users.replace("'system'", "'developer'"), {})).no_developer


def test_values_that_a_template_always_gets_are_there_when_it_is_tried() -> None:
    source = "{{ functions + '' }}{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}"
    assert prompt(source + "{% endfor %}", USER, arguments={"functions": "F"}) == "FHi"


def test_a_template_that_takes_too_long_to_try_gets_what_most_take() -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    assert shapes_of(Template(endless, {}), limit_s=0.05) == ChatShapes()


def test_a_template_that_makes_no_prompt_gets_what_most_take() -> None:
    assert shapes_of(Template("{{ raise_exception('no') }}", {})) == ChatShapes()
    assert probe(lambda *_: 1 / 0) == ChatShapes()  # type: ignore[arg-type]
    assert shapes_of(Template("{{ missing.there }}", {})) == ChatShapes()
