"""The chat template of a model's folder, wherever it stands, as `transformers` finds it, and what a card says of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pagestream.v1.records_pb2 import SystemPlace
from pagestream_engine import ModelFileError
from pagestream_grammars.templates import Template
from pagestream_worker import build_card
from support.engines.tiny_models import write_tokenizer

pytestmark = pytest.mark.served

FACTS: Any = SimpleNamespace(
    max_model_len=64,
    vocab_size=384,
    eos_token_ids=frozenset({2}),
    is_deterministic=False,
    pooled_size=0,
    revision="",
    takes_adapters=False,
)
ASKED = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CHAT = "{{ bos_token }}chat\n{% for m in messages %}\n  {{ m.content }}\n{% endfor %}  \n"
USES = "\n  {%- if true %}uses{% endif %} {{ tools[0].function.name }}\n{% for m in messages %}{{ m.content }}"
USES += "{% endfor %}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def write(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def configure(folder: Path, **fields: Any) -> None:
    file = folder / "tokenizer_config.json"
    write(file, {**json.loads(file.read_text()), **fields})


def card_of(folder: Path) -> Any:
    return build_card(folder, "m", FACTS)


def prompt(folder: Path, tools: list[dict[str, Any]] | None = None) -> str:
    card = card_of(folder)
    return Template(card.chat_template, card.special_tokens).render(ASKED, tools=tools or ())


def of_transformers(folder: Path, tools: list[dict[str, Any]] | None = None) -> str:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return str(tokenizer.apply_chat_template(ASKED, tools=tools, tokenize=False, add_generation_prompt=True))


def in_the_configuration(folder: Path) -> None:
    templates = [{"name": "default", "template": CHAT}, {"name": "tool_use", "template": USES}]
    configure(folder, chat_template=templates)


def in_files(folder: Path) -> None:
    configure(folder, chat_template="not this one")
    write(folder / "chat_template.jinja", CHAT)
    write(folder / "additional_chat_templates" / "tool_use.jinja", USES)


@pytest.mark.parametrize("place", [in_the_configuration, in_files], ids=lambda place: place.__name__)
def test_the_template_for_tools_is_taken_where_there_are_tools(folder: Path, place: Any) -> None:
    place(folder)
    for tools in (None, TOOLS):
        assert prompt(folder, tools) == of_transformers(folder, tools)
    assert prompt(folder) == "<s>chat\n  Hi\n  "


def test_one_for_documents_is_taken_where_there_are_documents(folder: Path) -> None:
    templates = {"default": "chat", "rag": "{{ documents[0].title }}", "tool_use": "tools"}
    configure(folder, chat_template=[{"name": name, "template": text} for name, text in templates.items()])
    template = Template(card_of(folder).chat_template, {})
    assert template.render(ASKED) == "chat"
    assert template.render(ASKED, arguments={"documents": [{"title": "A"}]}) == "A"
    assert template.render(ASKED, tools=TOOLS, arguments={"documents": [{"title": "A"}]}) == "tools"


@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json"])
def test_a_processors_template_is_taken_where_there_is_no_other(folder: Path, file: str) -> None:
    write(folder / file, {"chat_template": "processor"})
    assert prompt(folder) == "processor"
    configure(folder, chat_template="tokenizer")
    assert prompt(folder) == "tokenizer"


def test_special_tokens_of_older_files_count(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    fields = json.loads(file.read_text())
    tokens = {name: fields.pop(name) for name in ("bos_token", "eos_token")}
    write(file, {**fields, "chat_template": "{{ bos_token }}{{ cls_token }}{{ eos_token }}", "cls_token": "<s>"})
    write(folder / "special_tokens_map.json", {**tokens, "bos_token": {"content": tokens["bos_token"]}})
    assert prompt(folder) == of_transformers(folder) == "<s><s></s>"


@pytest.mark.parametrize("given", [["x"], [{"name": "default"}], 5, {"default": 1}])
def test_what_is_no_template_is_an_error_that_names_its_file(folder: Path, given: object) -> None:
    configure(folder, chat_template=given)
    with pytest.raises(ModelFileError, match=r"tokenizer_config\.json: chat_template"):
        card_of(folder)


def test_a_card_says_what_its_template_takes(folder: Path) -> None:
    source = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    source += "{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    configure(folder, chat_template=source)
    shapes = card_of(folder).chat_shapes
    assert list(shapes.parts_only) == list(shapes.takes_parts) == ["assistant", "user"]
    assert shapes.system == SystemPlace.SYSTEM_PLACE_NOWHERE
    configure(folder, chat_template="")
    assert not card_of(folder).HasField("chat_shapes")
    configure(folder, chat_template="{% for %}")  # which gateways say where requests come
    assert not card_of(folder).HasField("chat_shapes")
