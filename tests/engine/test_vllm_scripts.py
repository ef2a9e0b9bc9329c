"""Scripts for vLLM's offline API run with the import replaced: what its examples call, on small models."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from pagestream_engine import LLM, ConfigError, EngineArgs, InvalidRequest, InvalidSamplingParams, SamplingParams
from support.engines.lora_adapters import make_adapter
from support.engines.tiny_models import make_classifier
from support.processes.stack import DEMO_MODEL
from tokenizers import Tokenizer

pytestmark = pytest.mark.served

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_gpu_blocks_override": 200,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
}


def run(script: str, **names: Any) -> dict[str, Any]:
    """Run a script with these names, every import from vllm replaced, and return its names."""
    replaced = re.sub(r"^from vllm(\.\w+)* import", "from pagestream_engine import", dedent(script), flags=re.M)
    assert "vllm" not in replaced.replace("vllm:", "")
    found = {"MODEL": str(DEMO_MODEL), "SMALL": SMALL, **names}
    exec(compile(replaced, "script", "exec"), found)  # noqa: S102 - the scripts are below
    return found


# -- texts ------------------------------------------------------------------------------------------------------------


def test_generate_by_a_command_line() -> None:
    found = run(
        """
        from vllm import LLM, EngineArgs, RequestOutput
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = FlexibleArgumentParser()
        group = parser.add_argument_group("engine")
        EngineArgs.add_cli_args(group)
        parser.set_defaults(model=MODEL)
        parser.add_argument("--temperature", type=float)
        arguments = ["--max_num_seqs", "4", "--max-num-batched-tokens=128", "--num-gpu-blocks-override", "100",
                     "--dtype", "float32", "--device", "cpu", "--no-enable-prefix-caching", "--temperature", "0",
                     "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}']
        args = vars(parser.parse_args(arguments))
        temperature = args.pop("temperature")
        llm = LLM(**args)
        params = llm.get_default_sampling_params()
        params.temperature = temperature
        params.max_tokens = 5
        params.top_k = 3
        params.ignore_eos = True
        prompts = ["The mill stands", "Who lives"]
        outputs: list[RequestOutput] = llm.generate(prompts, params)
        """
    )
    assert [output.prompt for output in found["outputs"]] == found["prompts"]
    assert [len(output.outputs[0].token_ids) for output in found["outputs"]] == [5, 5]
    assert all(output.outputs[0].text and output.outputs[0].finished() for output in found["outputs"])
    config = found["llm"].engine.config
    assert (config.scheduler.max_num_seqs, config.cache.enable_prefix_caching) == (4, False)
    assert (config.speculation.method, config.speculation.most_drafts) == ("ngram", 2)


def test_chats() -> None:
    found = run(
        """
        from vllm import LLM, SamplingParams

        llm = LLM(model=MODEL, trust_remote_code=True, enable_chunked_prefill=True, **SMALL)
        params = SamplingParams(temperature=0.0, max_tokens=8)
        conversation = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "again"}]},
        ]
        one = llm.chat(conversation, params, use_tqdm=False)
        many = llm.chat([conversation] * 3, params)
        template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
        other = llm.chat(conversation, sampling_params=params, chat_template=template)
        tools = [{"type": "function", "function": {"name": "wind", "parameters": {"properties": {"city": {}}}}}]
        calling = llm.chat(conversation, params, tools=tools)
        call = {"type": "function", "id": "1", "function": {"name": "wind", "arguments": '{"city": "Ulm"}'}}
        called = [*conversation, {"role": "assistant", "content": None, "tool_calls": [call]},
                  {"role": "tool", "content": "calm", "tool_call_id": "1"}]
        answered = llm.chat(called, params, tools=tools)
        parts = "{% for m in messages %}{% for part in m.content %}{{ part.text }}.{% endfor %}{% endfor %}"
        in_parts = llm.chat(conversation, params, chat_template=parts)
        joins = "{% for m in messages %}{% for c in m.tool_calls or () %}{{ 'call: ' + c.function.arguments }}"
        as_text = llm.chat(called, params, chat_template=joins + "{% endfor %}{% endfor %}")
        begun = llm.chat([*conversation, {"role": "assistant", "content": "We"}], params,
                         add_generation_prompt=False, continue_final_message=True)
        """
    )
    (one,) = found["one"]
    assert one.prompt.endswith("<|user|>Hello\nagain<|end|><|assistant|>")
    assert (
        one.prompt_token_ids
        == Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(one.prompt, add_special_tokens=False).ids
    )
    assert [output.outputs[0].token_ids for output in found["many"]] == [one.outputs[0].token_ids] * 3
    assert found["other"][0].prompt == "Be brief. Hello\nagain "
    assert "<tools>wind(city)</tools>" in found["calling"][0].prompt
    assert '"arguments": {"city": "Ulm"}' in found["answered"][0].prompt
    assert found["begun"][0].prompt.endswith("<|assistant|>We")
    assert found["in_parts"][0].prompt == "Be brief..Hello.again."
    assert found["as_text"][0].prompt == 'call: {"city": "Ulm"}'


def test_prefix_caching() -> None:
    found = run(
        """
        from vllm import LLM, SamplingParams
        from vllm.distributed import cleanup_dist_env_and_memory

        prefix = "The miller lives where the river bends, and every morning before the sun is up he goes "
        prompts = [prefix + end for end in ("to the mill", "to the well", "for bread")]
        params = SamplingParams(temperature=0.0)
        plain = LLM(model=MODEL, enable_prefix_caching=False, gpu_memory_utilization=0.4, **SMALL)
        expected = [output.outputs[0].text for output in plain.generate(prompts, params)]
        del plain
        cleanup_dist_env_and_memory()
        cached = LLM(model=MODEL, enable_prefix_caching=True, gpu_memory_utilization=0.4, **SMALL)
        cached.generate(prompts[0], params)
        outputs = cached.generate(prompts, params)
        apart = cached.generate({"prompt": prompts[0], "cache_salt": "mine"}, params)
        """
    )
    assert [output.outputs[0].text for output in found["outputs"]] == found["expected"]
    assert all(output.num_cached_tokens > 0 for output in found["outputs"])
    assert found["apart"][0].num_cached_tokens == 0


def test_structured_outputs() -> None:
    found = run(
        """
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        llm = LLM(model=MODEL, max_model_len=200, structured_outputs_config={"backend": "auto"}, **SMALL)

        def ask(**constraint):
            stop = constraint.pop("stop", None)
            params = SamplingParams(
                structured_outputs=StructuredOutputsParams(**constraint), stop=stop, max_tokens=60, temperature=0.0
            )
            return llm.generate(prompts="Say", sampling_params=params)[0].outputs[0].text

        choice = ask(choice=["Positive", "Negative"])
        regex = ask(regex=r"[a-z]{1,5}@[a-z]{1,5}\\.com\\n", stop=["\\n"])
        schema = {"type": "object", "properties": {"kind": {"enum": ["sedan", "SUV"]}}, "required": ["kind"],
                  "additionalProperties": False}
        document = ask(json=schema, disable_any_whitespace=True)
        grammar = ask(grammar='root ::= "SELECT " ("a" | "b") " from " ("t" | "u")')
        """
    )
    assert found["choice"] in ("Positive", "Negative")
    assert re.fullmatch(r"[a-z]{1,5}@[a-z]{1,5}\.com", found["regex"])
    assert json.loads(found["document"])["kind"] in ("sedan", "SUV")
    assert re.fullmatch("SELECT [ab] from [tu]", found["grammar"])


@pytest.mark.parametrize(
    "speculation",
    [
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        {"model": str(DEMO_MODEL), "num_speculative_tokens": 2},
    ],
    ids=["ngram", "draft_model"],
)
def test_speculation(speculation: dict[str, Any], most_drafts: None) -> None:
    del most_drafts
    found = run(
        """
        from vllm import LLM, SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.v1.metrics.reader import Counter, Vector

        ids = LLM(model=MODEL, **SMALL).get_tokenizer().encode("the mill, the mill, the mill, the").ids
        llm = LLM(model=MODEL, speculative_config=SPECULATION, disable_log_stats=False, **SMALL)
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        outputs = llm.generate([TokensPrompt(prompt_token_ids=ids)], sampling_params=params)
        num_drafts = num_accepted = 0
        by_place = [0] * SPECULATION["num_speculative_tokens"]
        for metric in llm.get_metrics():
            if metric.name == "vllm:spec_decode_num_drafts":
                assert isinstance(metric, Counter)
                num_drafts += metric.value
            elif metric.name == "vllm:spec_decode_num_accepted_tokens":
                num_accepted += metric.value
            elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
                assert isinstance(metric, Vector)
                for place, count in enumerate(metric.values):
                    by_place[place] += count
        plain = LLM(model=MODEL, **SMALL).generate({"prompt_token_ids": ids}, params)
        """,
        SPECULATION=speculation,
    )
    assert found["outputs"][0].outputs[0].token_ids == found["plain"][0].outputs[0].token_ids
    assert 0 < found["num_drafts"] <= 60
    assert sum(found["by_place"]) == found["num_accepted"] > 0


def test_beam_search() -> None:
    found = run(
        """
        from vllm import LLM
        from vllm.sampling_params import BeamSearchParams

        llm = LLM(model=MODEL, **SMALL)
        prompts = [{"prompt": "Who lives"}, {"prompt": "The mill"}]
        outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True))
        """
    )
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    for prompt, output in zip(found["prompts"], found["outputs"], strict=True):
        ids = tokenizer.encode(prompt["prompt"]).ids
        assert len(output.sequences) == 3
        assert [len(each.tokens) for each in output.sequences] == [len(ids) + 6] * 3
        assert all(
            each.tokens[: len(ids)] == ids and each.text == tokenizer.decode(each.tokens) for each in output.sequences
        )
        scores = [each.cum_logprob for each in output.sequences]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(each.tokens) for each in output.sequences}) == 3


def test_several_adapters_by_hand(model_of: Callable[..., Path], tmp_path: Path) -> None:
    base = model_of("llama")
    folders = [str(make_adapter(base, tmp_path / str(seed), seed=seed)) for seed in (1, 2)]
    found = run(
        """
        from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
        from vllm.lora.request import LoRARequest

        args = EngineArgs(model=BASE, enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=2, max_num_seqs=8,
                          max_num_batched_tokens=64, num_gpu_blocks_override=64, dtype="float32", device="cpu")
        engine = LLMEngine.from_engine_args(args)
        greedy = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=6, ignore_eos=True)
        waiting = [
            ({"prompt_token_ids": IDS}, greedy, None),
            ({"prompt_token_ids": IDS}, SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, n=2), None),
            ({"prompt_token_ids": IDS}, greedy, LoRARequest("first", 1, ADAPTERS[0])),
            ({"prompt_token_ids": IDS}, greedy, LoRARequest("second", 2, ADAPTERS[1])),
        ]
        number, finished, seen = 0, {}, []
        while waiting or engine.has_unfinished_requests():
            if waiting:
                prompt, params, adapter = waiting.pop(0)
                engine.add_request(str(number), prompt, params, lora_request=adapter)
                number += 1
            outputs: list[RequestOutput] = engine.step()
            for output in outputs:
                seen.append(len(output.outputs[0].token_ids))
                if output.finished:
                    finished[output.request_id] = output
        """,
        BASE=str(base),
        ADAPTERS=folders,
        IDS=list(range(5, 25)),
    )
    finished = found["finished"]
    assert sorted(finished) == ["0", "1", "2", "3"]
    assert len({tuple(finished[key].outputs[0].token_ids) for key in "023"}) > 1
    assert [finished[key].lora_request and finished[key].lora_request.lora_name for key in "023"] == [
        None,
        "first",
        "second",
    ]
    assert len(finished["1"].outputs) == 2
    assert found["seen"].count(1) >= 3, "outputs of earlier steps change later"
    first = finished["0"].outputs[0]
    assert len(first.logprobs) == 6
    chosen = [row[token].logprob for row, token in zip(first.logprobs, first.token_ids, strict=True)]
    assert math.isclose(sum(chosen), first.cumulative_logprob, rel_tol=1e-6)
    assert len(finished["0"].prompt_logprobs) == 20


# -- prompts without a text -------------------------------------------------------------------------------------------


def test_embeddings() -> None:
    found = run(
        """
        from vllm import LLM, PoolingParams

        llm = LLM(model=MODEL, runner="pooling", enforce_eager=True, **SMALL)
        prompts = ["Hello, my name is", "The mill stands by the river"]
        outputs = llm.embed(prompts)
        vectors = [output.outputs.embedding for output in outputs]
        tensors = [output.outputs.data for output in llm.encode(prompts, pooling_task="embed")]
        raw = llm.embed(prompts, pooling_params=PoolingParams(normalize=False))
        cut = llm.embed(prompts, truncate_prompt_tokens=2)
        scores = llm.score(prompts[0], prompts)
        """
    )
    vectors = found["vectors"]
    assert all(math.isclose(math.hypot(*vector), 1.0, rel_tol=1e-4) for vector in vectors)
    assert [tensor.tolist() for tensor in found["tensors"]] == vectors
    assert all(output.outputs.hidden_size == len(vectors[0]) for output in found["outputs"])
    assert math.hypot(*found["raw"][0].outputs.embedding) > 1.5
    assert [output.prompt_token_ids for output in found["cut"]] == [
        output.prompt_token_ids[-2:] for output in found["outputs"]
    ]
    cosine = sum(one * other for one, other in zip(*vectors, strict=True))
    scores = [output.outputs.score for output in found["scores"]]
    assert scores == pytest.approx([1.0, cosine], abs=1e-5)


def test_labels_and_scores(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    labels, scorer = (make_classifier(tmp_path / str(number), "llama", number) for number in (3, 1))
    found = run(
        """
        from vllm import LLM

        llm = LLM(model=LABELS, runner="pooling", convert="classify", **SMALL)
        outputs = llm.classify(["a text", "another one"])
        probs = [output.outputs.probs for output in outputs]
        encoded = [output.outputs.data.tolist() for output in llm.encode(["a text", "another one"])]
        scorer = LLM(model=SCORER, runner="pooling", **SMALL)
        documents = ["of a mill", "of a river"]
        scores = [output.outputs.score for output in scorer.score("a query", documents)]
        pairs = scorer.score(["a query", "a query"], documents)
        """,
        LABELS=str(labels),
        SCORER=str(scorer),
    )
    assert [len(probs) for probs in found["probs"]] == [3, 3]
    assert all(math.isclose(sum(probs), 1.0, rel_tol=1e-5) for probs in found["probs"])
    assert found["encoded"] == found["probs"]
    assert [output.outputs.score for output in found["pairs"]] == found["scores"]
    model = AutoModelForSequenceClassification.from_pretrained(scorer).eval()
    tokenizer = Tokenizer.from_file(str(scorer / "tokenizer.json"))
    for document, score in zip(found["documents"], found["scores"], strict=True):
        ids = tokenizer.encode("a query", document).ids
        with torch.inference_mode():
            logit = float(model(torch.tensor([ids])).logits[0, 0])
        assert math.isclose(score, 1 / (1 + math.exp(-logit)), abs_tol=1e-4)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"speculative_config": {"method": "eagle", "model": "x"}}, "speculative_method"),
        ({"speculative_config": {"method": "ngram", "spec_token_tree": "[]"}}, "speculative_config"),
        ({"speculative_config": "{"}, "speculative_config"),
        ({"speculative_config": [1]}, "speculative_config"),
        ({"speculative_config": {"method": "ngram"}, "speculative_method": "grammar"}, "speculative_config"),
        ({"load_format": "gguf"}, "load_format"),
        ({"skip_tokenizer_init": True}, "skip_tokenizer_init"),
        ({"tokenizer": "another"}, "tokenizer"),
        ({"revision": "main"}, "revision"),
        ({"hf_overrides": {"a": 1}}, "hf_overrides"),
        ({"quantization": "awq"}, "quantization"),
        ({"generation_config": "vllm"}, "generation_config"),
        ({"data_parallel_size": 2}, "data_parallel_size"),
        ({"no_such_option": None}, "no_such_option"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
    ],
)
def test_an_option_that_asks_for_more_is_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(DEMO_MODEL), **options)
    assert caught.value.field == field


def test_arguments_that_are_none_are_left_out() -> None:
    args = EngineArgs(model=str(DEMO_MODEL), max_num_seqs=None, seed=None, quantization=None, tokenizer_mode="auto")
    options = args.options()
    llm = LLM(str(DEMO_MODEL), **{**options, "num_gpu_blocks_override": 64, "revision": None})
    assert llm.engine.config.scheduler.max_num_seqs == 256


def test_a_field_of_parameters_that_is_set_is_checked() -> None:
    params = SamplingParams(stop="a", max_tokens=8)
    params.stop, params.min_tokens, params.presence_penalty = ["b", "c"], 8, 1
    assert (params.stop_strings, params.has_penalties) == (("b", "c"), True)
    copied = params.clone()
    for name, value in [("temperature", -1.0), ("max_tokens", 7), ("top_p", "x"), ("n", 0)]:
        with pytest.raises(InvalidSamplingParams, match=r"\w: given"):
            setattr(params, name, value)
    with pytest.raises(AttributeError, match="temprature"):
        params.temprature = 1.0
    assert params == copied
    assert SamplingParams.from_optional(top_p=None, temperature=0.0, max_tokens=None).max_tokens is None


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "expected a list of messages"),
        ("Hello", "expected a list of messages"),
        ([{"content": "Hello"}], "expected a role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "models are of text alone"),
        ([{"role": "narrator", "content": "x"}], "can't render"),
    ],
)
def test_messages_that_are_no_chat(messages: Any, words: str) -> None:
    llm = LLM(str(DEMO_MODEL), **SMALL)
    with pytest.raises(InvalidRequest, match=words):
        llm.chat(messages)


def test_scores_of_texts_that_make_no_pairs() -> None:
    llm = LLM(str(DEMO_MODEL), **SMALL)
    for first, second in ((["a", "b"], ["c"]), ([], ["c"]), ("a", []), ("a", [5])):
        with pytest.raises(InvalidRequest, match="score: given"):
            llm.score(first, second)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="pooling_task: given 'token_embed'"):
        llm.encode("a", pooling_task="token_embed")
