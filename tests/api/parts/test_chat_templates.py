import json
from typing import Any

import jinja2
import pytest
from pagestream_gateway.errors import InvalidRequest
from pagestream_gateway.models import ChatTemplate
from support.processes.waiting import LIMIT_S

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [
    {"role": "system", "content": "Be kind & <brief>."},
    {"role": "user", "content": "Grüß Gott"},
    {"role": "assistant", "content": "Hello "},
]
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\nU: {{ m['content'] | trim }}\n  {% else %}\n"
    "A: {{ m.content }}{{ eos_token }}\n  {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}A:{% endif %}",
    "{% for m in messages %}{{ m | tojson }}{% if loop.index == 2 %}{% continue %}{% endif %}"
    "{{ m | tojson(indent=2) }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% generation %}{{ ns.n }}{{ m.content }}{% endgeneration %}{% endfor %}{% if tools is none %}no tools{% endif %}",
    "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.role[0]|upper }}{{ m.content.strip() }}<end>{% endfor %}",
]


def rendered(source: str, **options: Any) -> str:
    """What `transformers` makes of the messages."""
    from transformers.utils.chat_template_utils import render_jinja_template  # takes a second

    [text], _ = render_jinja_template([MESSAGES], chat_template=source, **options, **TOKENS)
    return text


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("opens", [True, False])
def test_renders_as_transformers_does(source: str, opens: bool) -> None:
    expected = rendered(source, add_generation_prompt=opens)
    assert ChatTemplate(source, TOKENS).render(MESSAGES, add_generation_prompt=opens) == expected


@pytest.mark.parametrize("source", [TEMPLATES[0], TEMPLATES[3]])
def test_continues_as_transformers_does(source: str) -> None:
    expected = rendered(source, continue_final_message=True)
    template = ChatTemplate(source, TOKENS)
    assert template.render(MESSAGES, add_generation_prompt=False, continue_final_message=True) == expected


def test_the_models_refusal_reaches_the_caller() -> None:
    template = ChatTemplate("{{ raise_exception('user must come first') }}", {})
    with pytest.raises(InvalidRequest, match="user must come first") as caught:
        template.render(MESSAGES)
    assert caught.value.field == "messages"


def test_a_template_that_fails_is_an_error_of_the_messages() -> None:
    with pytest.raises(InvalidRequest, match="ZeroDivisionError"):
        ChatTemplate("{{ 1 / 0 }}", {}).render(MESSAGES)
    with pytest.raises(InvalidRequest, match="leaves out the final message"):
        ChatTemplate("nothing", {}).render(MESSAGES, continue_final_message=True)


def test_templates_are_in_a_sandbox() -> None:
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"):
        with pytest.raises(InvalidRequest):
            ChatTemplate(source, {}).render(MESSAGES)


def test_a_broken_template_is_not_taken() -> None:
    with pytest.raises(jinja2.TemplateError):
        ChatTemplate("{% for %}", {})


def test_arguments_reach_the_template_but_not_over_the_messages() -> None:
    template = ChatTemplate("{{ style }}{{ messages | tojson }}", {})
    assert template.render(MESSAGES, arguments={"style": "x", "messages": []}) == "x" + json.dumps(
        MESSAGES, ensure_ascii=False
    )


def test_what_a_template_makes_of_a_body_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: list[object] = []
    for _ in range(300):
        deep = [deep]
    for source in ("{{ tools | tojson(indent=4) }}", "{% for m in messages %}{{ messages }}{% endfor %}"):
        template = ChatTemplate(source, TOKENS)
        with monkeypatch.context() as patch:
            patch.setattr("pagestream_grammars.templates.rendering.MAX_CHARS", 10_000)
            with pytest.raises(InvalidRequest, match="more than 10000 characters"):
                template.render(MESSAGES * 30, arguments={"tools": deep})
        assert template.render(MESSAGES * 30, arguments={"tools": deep})


_WIDE = "{% set x = 'a' * 30000 %}"
_GROWING = "{% set ns = namespace(x=START) %}{% for i in range(40) %}{% set ns.x = MORE %}{% endfor %}{{ ns.x }}"


def growing(start: str, more: str) -> str:
    return _GROWING.replace("START", start).replace("MORE", more)


ENDLESS = {
    "loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loop into a variable": "{% set x %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% endset %}",
    "loop through itself": "{% for i in [[[], []]] recursive %}{{ loop([i, i]) }}{{ loop([i, i]) }}{% endfor %}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "filter": "{% for i in range(99999) %}{% set x = range(99999) | list | sum %}{% endfor %}",
}
LARGE = {
    "times": "{{ 'a' * 10 ** 12 }}",
    "list": "{{ ([1] * 10 ** 12) | length }}",
    "sum": growing("'aaaa'", "ns.x + ns.x"),
    "join": growing("'aaaa'", "ns.x ~ ns.x"),
    "sum of lists": growing("[1]", "ns.x + ns.x"),
    "power": "{{ 9 ** (9 ** 9) }}",
    "product": growing("9", "ns.x * ns.x"),
    "format": "{{ '%999999999999d' % 1 }}",
    "format of a given width": "{{ '%*d' % (10 ** 12, 1) }}",
    "format method": "{{ '{:>999999999999}'.format(1) }}",
    "format method of a given width": "{{ '{:>{w}}'.format(1, w=10 ** 12) }}",
    "format of many fields": _WIDE + "{{ ('{0}' * 30000).format(x) }}",
    "format filter": "{{ '%999999999999d' | format(1) }}",
    "centre": "{{ 'a' | center(10 ** 12) }}",
    "left": "{{ 'a'.ljust(10 ** 12) }}",
    "zeros": "{{ 'a'.zfill(10 ** 12) }}",
    "tabs": "{{ '\t'.expandtabs(10 ** 12) }}",
    "indent": "{{ 'a\nb' | indent(10 ** 12) }}",
    "indent of lines": "{{ ('\n' * 10 ** 6) | indent(9999) }}",
    "indented JSON": "{{ [[1]] | tojson(indent=10 ** 12) }}",
    "replace": _WIDE + "{{ x.replace('a', x) }}",
    "replace filter": _WIDE + "{{ x | replace('a', x) }}",
    "join of a text": _WIDE + "{{ x.join(x) }}",
    "join filter": _WIDE + "{{ range(30000) | join(x) }}",
    "join of a generator": _WIDE + "{{ range(30000) | map('string') | join(x) }}",
    "block": "{% set x %}{% for i in range(9999) %}" + 30_000 * "a" + "{% endfor %}{% endset %}",
    "outputs in a block": _WIDE + "{% set y %}{% for i in range(9999) %}{{ x }}{% endfor %}{% endset %}",
    "macro's text": _WIDE + "{% macro f() %}{{ x }}{% endmacro %}{% set y = [] %}"
    "{% for i in range(9999) %}{% set z = f() %}{% endfor %}",
    "list in itself": growing("[1]", "[ns.x, ns.x, ns.x]"),
    "list in itself, joined": growing("[1]", "[ns.x, ns.x, ns.x]").replace("{{ ns.x }}", "{{ ns.x ~ '' }}"),
    "list in itself, as JSON": growing("[1]", "[ns.x, ns.x, ns.x]").replace("{{ ns.x }}", "{{ ns.x | tojson }}"),
    "batches": growing("[1]", "(ns.x + ns.x) | batch(2) | list"),
    "dict": growing("1", "dict(a=ns.x, b=ns.x)"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_every_template_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagestream_grammars.templates.rendering.MAX_RENDER_S", 0.05)
    with pytest.raises(InvalidRequest, match=r"takes longer than 0\.05 s|RecursionError"):
        ChatTemplate(ENDLESS[name], {}).render(MESSAGES)


@pytest.mark.parametrize("name", LARGE)
def test_what_a_template_makes_is_small(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, value in (("MAX_CHARS", 2**18), ("_MAX_ITEMS", 2**15), ("MAX_RENDER_S", LIMIT_S)):
        monkeypatch.setattr(f"pagestream_grammars.templates.rendering.{limit}", value)
    with pytest.raises(InvalidRequest, match=r"more than \d+ (characters|items|bits)"):
        ChatTemplate(LARGE[name], {}).render(MESSAGES)


def test_bounds_change_no_text() -> None:
    source = (
        "{% set ns = namespace(last=none, n=[]) %}{% for m in messages if m.content %}{{ loop.index }}"
        "/{{ loop.length }}"
        "{{ loop.last }}{{ loop.previtem is defined }}{% set ns.n = ns.n + [m.role ~ '!' ~ loop.revindex] %}"
        "{% else %}none{% endfor %}{% for k, v in messages[0] | items %}{{ k }}={{ v }};{% endfor %}"
        "{{ ns.n }}{{ missing ~ 1 }}"
        "{% for x in missing %}{% else %}nothing{% endfor %}{{ '%s-%5.2f' | format('a', 2) }}{{ '{:>4}'.format(1) }}"
        "{% macro f(m) %}<{{ m.role | upper }}>{{ caller() if caller }}{% endmacro %}"
        "{{ messages | map(attribute='role') | join(', ') }}{% call f(messages[0]) %}in{% endcall %}{{ (1, 'b') }}"
        "{{ 2 ** 10 }}{{ 7 % 4 }}{{ [1] * 3 }}"
        "{{ 'a\nb' | indent(2) }}{{ 'x'.center(5) }}{{ 'abc' | replace('b', 'd') }}{{ [3, 1] | sort | first }}"
    )
    assert ChatTemplate(source, TOKENS).render(MESSAGES, add_generation_prompt=False) == rendered(source)
