import json

import jinja2
import pytest
from pagestream_gateway.core.chat_templates import ChatTemplate
from pagestream_gateway.errors import InvalidRequest
from transformers.utils.chat_template_utils import render_jinja_template

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


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("opens", [True, False])
def test_renders_as_transformers_does(source: str, opens: bool) -> None:
    expected, _ = render_jinja_template([MESSAGES], chat_template=source, add_generation_prompt=opens, **TOKENS)
    assert ChatTemplate(source, TOKENS).render(MESSAGES, add_generation_prompt=opens) == expected[0]


@pytest.mark.parametrize("source", [TEMPLATES[0], TEMPLATES[3]])
def test_continues_as_transformers_does(source: str) -> None:
    expected, _ = render_jinja_template([MESSAGES], chat_template=source, continue_final_message=True, **TOKENS)
    template = ChatTemplate(source, TOKENS)
    assert template.render(MESSAGES, add_generation_prompt=False, continue_final_message=True) == expected[0]


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
            patch.setattr("pagestream_gateway.core.chat_templates._MAX_CHARS", 10_000)
            with pytest.raises(InvalidRequest, match="more than 10000 characters"):
                template.render(MESSAGES * 30, arguments={"tools": deep})
        assert template.render(MESSAGES * 30, arguments={"tools": deep})
