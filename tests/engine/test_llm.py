import os
import pty
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pagestream_engine import LLM, ConfigError, InvalidRequest, ModelNotFound, SamplingParams
from pagestream_engine.plan import PendingResult, StepPlan
from pagestream_engine.sampling_params import child_seed
from support.engines.arithmetic_model import (
    ArithmeticFacts,
    ArithmeticRunner,
    byte_level_tokenizer,
    make_folder,
    undisturbed,
)
from support.processes.waiting import LIMIT_S
from tokenizers import AddedToken

FACTS = ArithmeticFacts(vocab_size=257)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def make_llm(
    tmp_path: Path, *, tokenizer: bool = True, runner: type[ArithmeticRunner] = ArithmeticRunner, **options: Any
) -> LLM:
    folder = make_folder(tmp_path / "model", byte_level_tokenizer() if tokenizer else None)
    return LLM(folder, make_runner=lambda _, config: runner(config, FACTS), **options)


def expected(prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return undisturbed(prompt, params, FACTS, 1024)


def test_one_text(tmp_path: Path) -> None:
    llm = make_llm(tmp_path)
    (output,) = llm.generate("hello", GREEDY)
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    assert output.prompt == "hello"
    assert output.prompt_token_ids == tokenizer.encode("hello").ids
    assert output.finished
    (choice,) = output.outputs
    assert choice.token_ids == expected(output.prompt_token_ids)
    assert choice.text == tokenizer.decode(choice.token_ids)
    assert (choice.index, choice.finish_reason, choice.stop_reason, choice.logprobs) == (0, "length", None, None)


@pytest.mark.parametrize("includes", [False, True])
def test_a_stop_string_may_be_a_special_token_that_the_text_hides(tmp_path: Path, includes: bool) -> None:
    tokens, tokenizer = expected([5, 6]), byte_level_tokenizer()
    name = tokenizer.id_to_token(tokens[3])
    tokenizer.add_special_tokens([AddedToken(name, special=True)])
    llm = LLM(make_folder(tmp_path / "model", tokenizer), make_runner=lambda _, config: ArithmeticRunner(config, FACTS))
    params = replace(GREEDY, stop=["zz", name], include_stop_str_in_output=includes)
    (whole,) = llm.generate([[5, 6]], replace(params, stop=["zz"]))
    (cut,) = llm.generate([[5, 6]], params)
    count = 1 + tokens.index(tokens[3])
    assert cut.outputs[0].token_ids == tokens[:count]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", name)
    assert cut.outputs[0].text == tokenizer.decode(tokens[:count]) + (name if includes else "")
    assert whole.outputs[0].token_ids == tokens


def test_every_form_of_a_prompt_in_order(tmp_path: Path) -> None:
    llm = make_llm(tmp_path)
    prompts: list[Any] = ["b", [5, 6], {"prompt_token_ids": [7]}, {"prompt": "c"}, (8, 9), "é"]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == ["b", None, None, "c", None, "é"]
    assert [output.prompt_token_ids for output in outputs[1:3]] == [[5, 6], [7]]
    for output in outputs:
        assert output.outputs[0].token_ids == expected(output.prompt_token_ids)
    assert len({output.request_id for output in outputs}) == 6


def test_a_list_of_token_ids_is_one_prompt(tmp_path: Path) -> None:
    (output,) = make_llm(tmp_path).generate([5, 6, 7], GREEDY)
    assert output.prompt_token_ids == [5, 6, 7]


def test_no_prompts_make_no_outputs(tmp_path: Path) -> None:
    assert make_llm(tmp_path).generate([], GREEDY) == []


def test_parameters_for_each_prompt(tmp_path: Path) -> None:
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in (1, 3)]
    outputs = make_llm(tmp_path).generate(["a", "b"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 3]


def test_the_default_parameters_are_vllms(tmp_path: Path) -> None:
    (output,) = make_llm(tmp_path).generate("a")
    assert output.outputs[0].token_ids == expected(output.prompt_token_ids, SamplingParams())


def test_choices_have_seeds_of_their_own(tmp_path: Path) -> None:
    seeds: list[int] = []

    class Runner(ArithmeticRunner):
        def execute(self, plan: StepPlan) -> PendingResult:
            seeds.extend(new.seed for new in plan.added)
            return super().execute(plan)

    llm = make_llm(tmp_path, runner=Runner)
    (output,) = llm.generate("a", SamplingParams(n=3, seed=7, max_tokens=4))
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert all(choice.token_ids == expected(output.prompt_token_ids)[:4] for choice in output.outputs)
    assert seeds == [7, child_seed(7, 1), child_seed(7, 2)]


def test_cached_prompt_tokens_are_told(tmp_path: Path) -> None:
    llm = make_llm(tmp_path)
    counts = [llm.generate([list(range(40))], GREEDY)[0].num_cached_tokens for _ in range(2)]
    assert counts == [0, 32]


@pytest.mark.parametrize(
    ("prompts", "params", "match"),
    [
        ([[1, 2], []], GREEDY, "prompt: given no tokens"),
        (["a", ""], GREEDY, "prompt: given no tokens"),
        ([[1], [999]], GREEDY, "given token 999"),
        ([[1], [1] * 5000], GREEDY, "prompt: given 5000 tokens"),
        ([[1], {"prompt_embeds": 1}], GREEDY, "prompt: given {'prompt_embeds': 1}, expected a string"),
        ([[1], {"prompt": "a", "prompt_token_ids": 5}], GREEDY, "prompt: given "),
        (5, GREEDY, "prompt: given 5"),
        ([[1], None], GREEDY, "prompt: given None"),
        (["a", "b"], [GREEDY], "sampling_params: given 1, expected one, or one for each of 2"),
        (["a"], {"temperature": 0}, "sampling_params: given {'temperature': 0}, expected SamplingParams"),
        (["a"], [{"temperature": 0}], "sampling_params: given .*, expected SamplingParams"),
    ],
)
def test_a_bad_prompt_stops_all_before_anything_runs(tmp_path: Path, prompts: Any, params: Any, match: str) -> None:
    llm = make_llm(tmp_path)
    with pytest.raises(InvalidRequest, match=match):
        llm.generate(prompts, params)
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.stats().num_steps == 0
    assert llm.generate("a", GREEDY)[0].finished


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    llm = make_llm(tmp_path, tokenizer=False)
    with pytest.raises(InvalidRequest, match="text needs a tokenizer"):
        llm.generate("a", GREEDY)
    (output,) = llm.generate([[5]], GREEDY)
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", expected([5]))


def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path) -> None:
    class Runner(ArithmeticRunner):
        def execute(self, plan: StepPlan) -> PendingResult:
            if self.num_steps == 3:
                self.num_steps += 1
                raise KeyboardInterrupt
            return super().execute(plan)

    llm = make_llm(tmp_path, runner=Runner)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], GREEDY)
    assert not llm.engine.has_unfinished_requests()
    llm.engine.check_invariants()
    assert llm.generate("a", GREEDY)[0].outputs[0].finish_reason == "length"


def test_unknown_options_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel: given 2"):
        make_llm(tmp_path, tensor_parallel=2)
    make_llm(tmp_path, swap_space=0, cpu_offload_gb=0)


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ModelNotFound, match=r"expected a folder with config\.json"):
        LLM("./no/such/folder")


def test_progress_shows_on_a_terminal_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = make_llm(tmp_path)
    llm.generate("a", GREEDY)
    assert capsys.readouterr().err == ""
    shown = on_a_terminal(monkeypatch, lambda: llm.generate(["a", "b"], GREEDY))
    assert "2/2 prompts, 12 tokens" in shown
    assert on_a_terminal(monkeypatch, lambda: llm.generate("a", GREEDY, use_tqdm=False)) == ""


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, action: Any) -> str:
    """What the action writes to a stderr that is a real terminal."""
    reader, writer = pty.openpty()
    chunks: list[bytes] = []

    def collect() -> None:
        try:
            while chunk := os.read(reader, 4096):
                chunks.append(chunk)
        except OSError:  # the terminal is closed
            return

    thread = threading.Thread(target=collect)
    thread.start()
    with os.fdopen(writer, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr("sys.stderr", terminal)
        action()
    thread.join(timeout=LIMIT_S)
    os.close(reader)
    return b"".join(chunks).decode()
