"""The training script makes a complete model folder, and the same one for the same seed."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.waiting import LIMIT_S

pytestmark = pytest.mark.slow  # a short training takes half a minute

SCRIPT = Path(__file__).parents[2] / "deploy" / "demo-model" / "train.py"


def quick_model(folder: Path, *, seed: int) -> Path:
    command = [sys.executable, str(SCRIPT), "--out", str(folder), "--seed", str(seed), "--quick"]
    subprocess.run(command, check=True, timeout=LIMIT_S, capture_output=True, text=True)
    return folder


@pytest.fixture(scope="module")
def quick_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quick_model(tmp_path_factory.mktemp("quick"), seed=0)


def test_folder_loads_with_plain_transformers(quick_folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(quick_folder)
    model = AutoModelForCausalLM.from_pretrained(quick_folder)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who is Mara?"}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert output.shape[1] == inputs["input_ids"].shape[1] + 4
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_text_is_learned_as_the_chat_template_renders_it() -> None:
    """What the encoder makes of chats with tools and results has the tokens of the rendered conversation."""
    program = """
import json, sys
from random import Random
from corpus import Message
from evaluation import called
from tokens import Encoder
from calls import draw_need, draw_toolbox, offer
from train import make_tokenizer
tokenizer, rng = make_tokenizer(0), Random(0)
for number in range(20):
    toolbox = draw_toolbox(rng)
    need = draw_need(toolbox, rng)
    system = "Be kind." if number % 2 else None
    rendered = [*([{"role": "system", "content": system}] if system else []), *called(need)]
    tools = [tool.definition for tool in toolbox.tools]
    results = [Message("tool", result) for result in need.results]
    first = Message("system", (system + "\\n" if system else "") + offer(toolbox.tools))
    chat = (first, Message("user", need.question), Message("assistant", need.text), *results)
    text = tokenizer.apply_chat_template(rendered, tools=tools, tokenize=False)
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert Encoder(tokenizer.backend_tokenizer).encode(chat).token_ids == expected, text
"""
    run_beside_the_script(program)


def test_training_shows_no_city_that_the_examination_holds_back() -> None:
    program = """
import re
from corpus import Corpus
from evaluation import call_probes, result_probes
from places import HELD_OUT_CITIES
held_out = re.compile(r"\\b(" + "|".join(map(re.escape, HELD_OUT_CITIES)) + r")\\b")
assert len(HELD_OUT_CITIES) > 30
for chat in Corpus(0).chats(3000):
    for message in chat:
        assert not held_out.search(message.content), message.content
probes = [*call_probes(0, 100), *result_probes(0, 100)]
assert sum(bool(held_out.search(probe.messages[0]["content"])) for probe in probes) > 50
"""
    run_beside_the_script(program)


def run_beside_the_script(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], cwd=SCRIPT.parent, check=True, timeout=LIMIT_S)


def test_same_seed_gives_the_same_files(quick_folder: Path, tmp_path: Path) -> None:
    again = quick_model(tmp_path / "again", seed=0)
    names = sorted(path.name for path in quick_folder.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    for name in names:
        assert (again / name).read_bytes() == (quick_folder / name).read_bytes(), name


def test_another_seed_gives_other_weights(quick_folder: Path, tmp_path: Path) -> None:
    other = quick_model(tmp_path / "other", seed=1)
    assert (other / "model.safetensors").read_bytes() != (quick_folder / "model.safetensors").read_bytes()
