"""The command as a person types it."""

import json
import pkgutil
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pagestream_cli
import pytest
from pagestream_cli.__main__ import COMMANDS, main
from support.clients.scripted_gateway import ScriptedGateway, served
from support.processes.command import run
from support.processes.waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.served

HEAVY = ("torch", "transformers", "httpx2", "grpc", "matplotlib", "redis", "rich", "numpy", "kopf")


def test_help_and_options_load_nothing_heavy() -> None:
    code = "import sys; from pagestream_cli.__main__ import build_parser; build_parser(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert not set(HEAVY) & set(loaded.stdout.split())


def test_no_module_needs_kopf_and_none_imports_matplotlib_before_it_draws() -> None:
    code = "import sys\nfor name in sys.argv[1:]: __import__(name)\nprint(*sys.modules)"
    names = [each.name for each in pkgutil.walk_packages(pagestream_cli.__path__, "pagestream_cli.")]
    names.remove("pagestream_cli.__main__")
    loaded = subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert len(names) > 40
    assert not {"kopf", "matplotlib", "torch"} & set(loaded.stdout.split())


def test_a_plot_without_matplotlib_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["simulate", "sample", "--plot", "x.png"]) == 2
    assert "pip install 'pagestream[plot]'" in capsys.readouterr().err


def test_the_supervisor_of_serve_never_loads_torch() -> None:
    code = "import sys, pagestream_cli.serve.command, pagestream_streams.connection.embedded; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert not {"torch", "transformers", "grpc", "matplotlib"} & set(loaded.stdout.split())


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["help"]) == 0
    shown = capsys.readouterr().out
    shown_verbs = {line.split()[0] for line in shown.splitlines() if line.startswith("    ") and line[4] != " "}
    assert shown_verbs >= {command.verb for command in COMMANDS}


@pytest.mark.parametrize("verb", [command.verb for command in COMMANDS])
def test_each_command_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["help", verb])
    assert ended.value.code == 0
    assert f"usage: pagestream {verb}" in capsys.readouterr().out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pagestream {version('pagestream')}\n"


def test_an_unknown_option_is_refused() -> None:
    done = run("serve", "--no-such-option")
    assert done.returncode == 2
    assert "--no-such-option" in done.stderr


def test_generate_streams_a_completion_into_a_pipe() -> None:
    with served(ScriptedGateway(breaks=[2])) as gateway:
        command = ["generate", "Tell", "--url", gateway.url, "--seed", "3", "--stop", "x", "--stop", "y"]
        done = subprocess.run(
            [sys.executable, "-m", "pagestream_cli", *command],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "Once upon a time\n", "")
    body = next(call.body for call in gateway.calls if call.method == "POST")
    assert body == {
        "model": "demo",
        "prompt": "Tell",
        "max_tokens": 128,
        "seed": 3,
        "stop": ["x", "y"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_generate_takes_its_prompt_from_a_pipe() -> None:
    with served(ScriptedGateway()) as gateway:
        done = run("generate", "--url", gateway.url, "--model", "other", stdin="from stdin")
    assert done.stdout == "Once upon a time\n"
    assert gateway.calls[0].body["prompt"] == "from stdin"
    assert gateway.calls[0].body["model"] == "other"


def test_chat_answers_a_pipe_once() -> None:
    with served(ScriptedGateway(breaks=[1])) as gateway:
        done = run("chat", "--url", gateway.url, "--system", "Be brief.", stdin="Hello\n")
    assert (done.returncode, done.stdout) == (0, "Once upon a time\n")
    body = next(call.body for call in gateway.calls if call.method == "POST")
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def test_a_refusal_is_printed_on_stderr() -> None:
    with served(ScriptedGateway(refusals=[(400, "temperature: must not be negative")])) as gateway:
        done = run("generate", "Tell", "--url", gateway.url, "--temperature", "-1")
    assert done.returncode == 1
    assert done.stderr == "error: the server answered 400: temperature: must not be negative\n"


@pytest.mark.parametrize("verb", [["generate", "Tell"], ["chat"], ["bench"]])
def test_without_a_server_the_way_out_is_named(tmp_path: Path, verb: list[str]) -> None:
    done = run(*verb, "--data-dir", str(tmp_path), stdin="x")
    assert done.returncode == 1
    assert "start one with `pagestream serve`" in done.stderr


def test_bench_from_end_to_end(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    with served(ScriptedGateway()) as gateway:
        lengths = ["--num-requests", "5", "--random-input-len", "3:6", "--random-output-len", "4"]
        files = ["--output", str(output)]
        done = run("bench", "--url", gateway.url, *lengths, "--concurrency", "2", *files)
    assert done.returncode == 0, done.stderr
    assert "5 of 5 succeeded" in done.stdout
    assert done.stderr == ""  # no progress in a pipe
    assert json.loads(output.read_text())["summary"]["succeeded"] == 5


def test_ctrl_c_in_bench_prints_what_was_measured(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    with served(ScriptedGateway(breaks=[None, None, 120.0])) as gateway:
        requests = ["--num-requests", "9", "--random-output-len", "4", "--concurrency", "1", "--output", str(output)]
        command = [sys.executable, "-m", "pagestream_cli", "bench", "--url", gateway.url, *requests]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as bench:
            wait_until(lambda: sum(call.method == "POST" for call in gateway.calls) == 3, "the third is under way")
            bench.send_signal(signal.SIGINT)
            out, said = bench.communicate(timeout=LIMIT_S)
    assert bench.returncode == 130
    assert "Traceback" not in said
    assert "interrupted: 3 of 9 requests were sent" in said
    assert "2 of 3 succeeded" in out
    assert "1 under way" in out
    summary = json.loads(output.read_text())["summary"]
    assert (summary["succeeded"], summary["interrupted"], summary["output_tokens"]) == (2, 1, 8)


MOMENTS = [
    "argparse",
    *(
        pytest.param(module, marks=pytest.mark.slow)
        for module in ("pagestream_cli.console", "pagestream_cli.serve.plan")
    ),
    "pagestream_worker.settings",
]


@pytest.mark.parametrize("module", MOMENTS)
def test_ctrl_c_while_modules_are_imported_says_nothing(module: str, tmp_path: Path) -> None:
    arguments = ["-X", "importtime", "-m", "pagestream_cli", "serve", "--data-dir", str(tmp_path), "--grpc-port", "0"]
    command = [sys.executable, *arguments, "--http-port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as serve:
        assert serve.stderr is not None
        for line in serve.stderr:
            if line.rstrip().endswith(f" {module}"):
                break
        serve.send_signal(signal.SIGINT)
        rest = serve.stderr.read()
        assert serve.wait(LIMIT_S) in (-signal.SIGINT, 130, 0)
    assert "Traceback" not in rest
    assert "KeyboardInterrupt" not in rest


def test_bench_fails_when_a_request_fails() -> None:
    with served(ScriptedGateway(refusals=[(429, "full")])) as gateway:
        done = run("bench", "--url", gateway.url, "--num-requests", "2", "--random-output-len", "4")
    assert done.returncode == 1
    assert "1 x http 429" in done.stdout


def test_bench_shrinks_a_trace_to_the_servers_context() -> None:
    with served(ScriptedGateway()) as gateway:
        arguments = ["--trace", "sample", "--num-requests", "40", "--scale-to-context", "--time-scale", "1000"]
        run("bench", "--url", gateway.url, *arguments)
    bodies = [call.body for call in gateway.calls if call.method == "POST"]
    totals = [len(body["prompt"]) + body["max_tokens"] for body in bodies]
    assert len(totals) == 40
    assert max(totals) <= 128
    assert max(totals) > 100
