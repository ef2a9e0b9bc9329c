"""What a model's files say of requests that leave it open: ends of an output, and sampling."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pagestream_engine import LLM, ModelFileError, SamplingParams
from pagestream_engine.models import model_revision
from pagestream_worker import build_card
from support.engines.tiny_models import write_tokenizer

pytestmark = pytest.mark.served

SMALL: dict[str, Any] = {"num_gpu_blocks_override": 32, "max_num_seqs": 2, "max_num_batched_tokens": 32}
FACTS: Any = SimpleNamespace(
    max_model_len=64,
    vocab_size=128,
    eos_token_ids=frozenset({2}),
    is_deterministic=False,
    pooled_size=0,
    revision="",
    takes_adapters=False,
)


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A copy of a tiny model with a tokenizer, whose files a test changes."""
    copied = Path(shutil.copytree(llama, tmp_path / "model"))
    config = json.loads((copied / "config.json").read_text())
    write_tokenizer(copied, config["vocab_size"])
    write(copied / "config.json", {**config, "eos_token_id": None})
    (copied / "generation_config.json").unlink(missing_ok=True)
    return copied


def write(path: Path, content: object) -> None:
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def change(path: Path, **fields: Any) -> None:
    before = json.loads(path.read_text()) if path.is_file() else {}
    write(path, {**before, **fields})


def tokens_of(folder: Path) -> dict[str, int]:
    vocab: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return {token: token_id for token, token_id in vocab.items() if token_id > 10}


def ends_with(llm: LLM, token_id: int) -> bool:
    """Return whether an output ends with a token where it comes."""
    params = SamplingParams(max_tokens=4, temperature=0, logit_bias={token_id: 100})
    (output,) = llm.generate([5, 6, 7], params, use_tqdm=False)
    choice = output.outputs[0]
    assert choice.token_ids[0] == token_id
    return choice.finish_reason == "stop" and len(choice.token_ids) == 1


# -- ends -------------------------------------------------------------------------------------------------------------


def in_tokenizer_config(folder: Path, token: str, _: int) -> None:
    change(folder / "tokenizer_config.json", eos_token=token)


def as_an_added_token(folder: Path, token: str, token_id: int) -> None:
    added = {str(token_id): {"content": token, "special": True}}
    change(folder / "tokenizer_config.json", eos_token={"content": token, "lstrip": False}, added_tokens_decoder=added)


def in_special_tokens_map(folder: Path, token: str, _: int) -> None:
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    write(folder / "special_tokens_map.json", {"eos_token": {"content": token}})


def in_config(folder: Path, _: str, token_id: int) -> None:
    change(folder / "config.json", eos_token_id=token_id)


def in_generation_config(folder: Path, _: str, token_id: int) -> None:
    change(folder / "generation_config.json", eos_token_id=[token_id])


PLACES = [in_tokenizer_config, as_an_added_token, in_special_tokens_map, in_config, in_generation_config]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_an_end_counts_wherever_it_is_named(folder: Path, place: Callable[[Path, str, int], None]) -> None:
    token, token_id = max(tokens_of(folder).items(), key=lambda item: item[1])
    change(folder / "config.json", eos_token_id=3)
    change(folder / "generation_config.json", eos_token_id=[3, 4])
    before = model_revision(folder)
    place(folder, token, token_id)
    assert model_revision(folder) != before, "engines that end elsewhere would continue each other's streams"
    llm = LLM(folder, **SMALL)
    assert token_id in llm.engine.eos_token_ids
    assert ends_with(llm, token_id)


def test_they_are_the_union(folder: Path) -> None:
    token, token_id = max(tokens_of(folder).items(), key=lambda item: item[1])
    change(folder / "config.json", eos_token_id=[3, -1])
    change(folder / "generation_config.json", eos_token_id=[7, 9, 7])
    change(folder / "tokenizer_config.json", eos_token=token)
    llm = LLM(folder, **SMALL)
    assert llm.engine.eos_token_ids == {3, 7, 9, token_id}
    assert not ends_with(llm, 8)


def test_a_token_that_the_tokenizer_lacks_is_no_end(folder: Path) -> None:
    change(folder / "tokenizer_config.json", eos_token="<|no such token|>")
    assert not LLM(folder, **SMALL).engine.eos_token_ids


# -- sampling ---------------------------------------------------------------------------------------------------------

GIVEN = {"do_sample": True, "temperature": 0.25, "min_p": 0.125, "top_k": 20, "top_p": 0.5, "repetition_penalty": 1.25}


@pytest.mark.parametrize("do_sample", [True, False])
def test_engine_and_gateway_have_the_same_defaults(folder: Path, do_sample: bool) -> None:
    write(folder / "generation_config.json", {**GIVEN, "do_sample": do_sample, "max_new_tokens": 3, "num_beams": 4})
    llm = LLM(folder, **SMALL)
    defaults = llm.get_default_sampling_params()
    card = build_card(folder, "model", FACTS).default_sampling
    for name in ("temperature", "min_p", "top_k", "top_p", "repetition_penalty", "max_tokens"):
        assert card.HasField(name), name
        assert getattr(defaults, name) == getattr(card, name) == GIVEN.get(name, 3), name
    (output,) = llm.generate([5, 6, 7], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
    (output,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5


@pytest.mark.parametrize("content", [None, {}, {"temperature": None, "min_p": None, "max_new_tokens": None}])
def test_what_is_not_there_leaves_vllms_defaults(folder: Path, content: object) -> None:
    if content is not None:
        write(folder / "generation_config.json", content)
    assert LLM(folder, **SMALL).get_default_sampling_params() == SamplingParams()
    assert not build_card(folder, "model", FACTS).default_sampling.ListFields()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "generation_config.json: unreadable"),
        ("[]", "generation_config.json: given a list"),
        ("\ufeff{}", "generation_config.json: unreadable"),
        ({"temperature": "hot"}, "temperature: given 'hot'"),
        ({"temperature": True}, "temperature: given True"),
        ({"temperature": -0.1}, "temperature: given -0.1"),
        ('{"temperature": NaN}', "temperature: given nan"),
        ('{"temperature": Infinity}', "temperature: given inf"),
        ({"top_p": 0}, "top_p: given 0"),
        ({"top_p": 1.5}, "top_p: given 1.5"),
        ({"min_p": [0.1]}, r"min_p: given \[0.1\]"),
        ({"top_k": 1.5}, "top_k: given 1.5"),
        ({"top_k": -2}, "top_k: given -2"),
        ({"top_k": 1 << 40}, "top_k: given 1099511627776"),
        ({"repetition_penalty": 0}, "repetition_penalty: given 0"),
        ({"max_new_tokens": 0}, "max_new_tokens: given 0"),
        ({"max_new_tokens": False}, "max_new_tokens: given False"),
        ({"max_new_tokens": 1 << 70}, "max_new_tokens: given"),
        ({"eos_token_id": "</s>"}, "eos_token_id: given '</s>'"),
        ({"eos_token_id": [1, None]}, r"eos_token_id: given \[1, None\]"),
        ({"eos_token_id": True}, "eos_token_id: given True"),
    ],
)
def test_a_malformed_file_is_one_error_before_weights_are_read(folder: Path, content: object, words: str) -> None:
    write(folder / "generation_config.json", content)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelFileError, match=words):
        LLM(folder, **SMALL)


def test_a_tokenizers_end_that_is_no_token(folder: Path) -> None:
    change(folder / "tokenizer_config.json", eos_token=7)
    with pytest.raises(ModelFileError, match="eos_token: given 7"):
        LLM(folder, **SMALL)
