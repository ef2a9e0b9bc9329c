"""`pagestream serve` takes command lines that were written for `vllm serve`."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from pagestream_cli import UsageError
from pagestream_cli.__main__ import build_parser, main
from pagestream_cli.serve import FLAGS, Idle, Refused, ServeOptions, Taken, find_demo_model, parse_options

MODEL = "some-org/Some-Model-1B"


def read(line: str) -> ServeOptions:
    return parse_options(build_parser().parse_args(["serve", *shlex.split(line)]))


@pytest.fixture
def quantised(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    return tmp_path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-tp 2 -pp=3", ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "3"]),
        ("--max_model_len 8k", ["--max-model-len", "8000"]),
        ("--max-model-len=8K", ["--max-model-len", "8192"]),
        ("--max-model-len auto --max-num-batched-tokens 1.5k", ["--max-num-batched-tokens", "1500"]),
        ("--dtype half --kv_cache_dtype fp8", ["--dtype", "float16", "--kv-cache-dtype", "fp8"]),
        ("--max-logprobs -1 --seed None", ["--max-logprobs", "-1"]),
        ("--disable-prefix-caching", ["--no-enable-prefix-caching"]),
        ("--no-enable-prefix-caching --enforce-eager", ["--enforce-eager", "--no-enable-prefix-caching"]),
        ("--attention-backend FLASH_ATTN", []),
        ("-q awq", []),
        ("--quantization int8", ["--quantization", "int8"]),
        ("--speculative-config.method ngram -sc.num_speculative_tokens=4", ["ngram", "4"]),
        ('--speculative-config \'{"model": "d", "num_speculative_tokens": 3}\'', ["d", "3"]),
        ("--speculative-model [ngram] --ngram-prompt-lookup-max 4", ["ngram", "4"]),
        ("--spec-method ngram --spec-tokens 2", ["ngram", "2"]),
        ("--structured-outputs-config.reasoning_parser qwen3", ["--reasoning-parser", "qwen3"]),
        ("--kv-offloading-size 4", ["--swap-space", "4"]),
    ],
)
def test_engine_options(line: str, expected: list[str]) -> None:
    found = [*read(f"{MODEL} {line}").engine_arguments]
    assert found == expected or [each for each in found if not each.startswith("--")] == expected


def test_options_of_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(f"--model {MODEL} --port 9000 --served-model-name a b --api-key one two -dp 3 --revision v1")
    assert (found.model, found.http_port, found.engines) == (f"{MODEL}@v1", 9000, 3)
    assert (found.served_model_name, found.aliases, found.given_keys) == ("a", ("b",), ("one", "two"))
    tls = read(
        f'{MODEL} --ssl-certfile c --ssl-keyfile k --ssl-ca-certs ca --ssl-cert-reqs 1 --allowed-origins [\\"*\\"]'
    )
    assert (tls.tls_certificate, tls.tls_key) == (Path("c"), Path("k"))
    assert {*tls.environment.values()} == {str(Path("ca").absolute()), "optional", "*"}
    assert read("--grpc_port=7 --data_dir=x").grpc_port == read("--grpc-port 7 -v").grpc_port == 7
    assert read(f"--served-model-name a {MODEL}").model == read(f"--engines 2 -- {MODEL}").model == MODEL
    monkeypatch.setenv("VLLM_API_KEY", "three")
    assert read(MODEL).given_keys == ("three",)
    assert read(f"{MODEL} --api-keys file").given_keys == ()
    assert read(f"{MODEL} --api-key four").given_keys == ("four",)


def test_a_file_of_flags_gives_way_to_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"model: {MODEL}\nport: 1\ntensor-parallel-size: 2\nserved_model_name: [a, b]\nenable-prefix-caching: false\n"
        "speculative-config:\n  method: ngram\ndemo: false\nverbose: true\ntrust-remote-code: false\n"
    )
    found = read(f"--config {file} -tp 4")
    assert (found.model, found.http_port, found.aliases) == (MODEL, 1, ("b",))
    assert (found.demo, found.verbose) == (False, True)
    assert {"4", "ngram", "--no-enable-prefix-caching"} < {*found.engine_arguments}
    assert read(f"other/model --config={file} --port 2").model == "other/model"


def test_what_changes_nothing_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    read(f"{MODEL} --trust-remote-code --enable_auto_tool_choice -O3 --task generate --enable-chunked-prefill False")
    said = capsys.readouterr().err
    flags = ("--trust-remote-code", "--enable-auto-tool-choice", "--optimization-level", "--task")
    assert all(flag in said for flag in (*flags, "--enable-chunked-prefill"))
    assert said.count("\n") == 1
    read(f"{MODEL} --hf-overrides {{}} --no-enable-expert-parallel -dcp 1")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--enable-expert-parallel", "vLLM's --enable-expert-parallel isn't here: "),
        ('--kv_transfer_config {\\"a\\":1}', "vLLM's --kv-transfer-config isn't here: "),
        ("--enable-server-load-tracking", "isn't here: gateways' metrics say how loaded they are"),
        ("--load-format dummy", "vLLM's --load-format dummy isn't here: "),
        ("--structured-outputs-config.disable_any_whitespace true", "disable_any_whitespace isn't here"),
        ("--max-model 5", "--max-model: there is no such option; did you mean --max-model-len?"),
        ("--gpu-memory-utilisation 0.5", "did you mean --gpu-memory-utilization?"),
        ("--port", "--port needs a value"),
        ("other/model", "two models were given"),
        ("--config none.yaml", "--config none.yaml can't be read"),
    ],
)
def test_what_is_not_here_is_refused_by_name(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", MODEL, *shlex.split(line)])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "{folder} --quantization gptq",
        "{folder} --revision main",
        "{folder} --tokenizer other/model",
        "{folder} --lora-modules a={folder}",
        "{folder} --lora-modules a",
        "{folder} --api-key one --api-keys file",
        "{folder} --served-model-name a b,c",
        "{folder} --ssl-cert-reqs 2",
        "{folder} --speculative-config.method eagle3",
        "{folder} --speculative-config.draft_tensor_parallel_size 2",
        "{folder} --quantization bitsandbytes",
        "--quantization awq",
    ],
)
def test_what_contradicts_the_model_is_refused(line: str, quantised: Path) -> None:
    with pytest.raises(UsageError):
        read(line.format(folder=quantised))
    assert read(f"{quantised} -q awq_marlin --tokenizer {quantised}").engine_arguments == ()
    assert read(f"--tokenizer {find_demo_model()}").model is None


_NVFP4 = {"quant_algo": "NVFP4", "producer": {"name": "modelopt"}}


@pytest.mark.parametrize(
    ("file", "given", "names", "others"),
    [
        ("config.json", {"quantization_config": _NVFP4}, "modelopt modelopt_fp4 petit_nvfp4", "fp8 awq"),
        ("config.json", {"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors", "gptq"),
        ("config.json", {"quantization_config": {"quant_method": "gptq"}}, "gptq gptq_marlin moe_wna16", "awq_marlin"),
        ("config.json", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4 gpt_oss_mxfp4", "modelopt_fp4"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "modelopt", "modelopt_fp4 fp8"),
        ("config.json", {}, "", "fp8 modelopt_fp4 gguf"),
    ],
)
def test_vllms_names_of_a_checkpoints_method(
    file: str, given: dict[str, Any], names: str, others: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps(given))
    for name in names.split():
        assert read(f"{tmp_path} --quantization {name}").engine_arguments == ()
    for name in others.split():
        with pytest.raises(UsageError, match=name):
            read(f"{tmp_path} --quantization {name}")


def test_no_command_takes_abbreviations(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (["keys", "list", "--data", "x"], ["chat", "--mod", "x"], ["generate", "x", "--max-tok", "1"]):
        with pytest.raises(SystemExit):
            main(line)
    assert capsys.readouterr().err.count("unrecognized arguments") == 3


def test_flags_that_are_taken_are_options_here(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = {*re.findall(r"(?<![\w-])--[a-z-]+", capsys.readouterr().out), "--tokenizer"}
    assert {flag.to for flag in FLAGS.values() if isinstance(flag, Taken)} - shown == {"MODEL"}
    assert {name for name in shown if isinstance(FLAGS.get(name), Idle | Refused)} == set()
