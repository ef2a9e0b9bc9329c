"""The load generator, against a real HTTP server."""

import json
from pathlib import Path

import pytest
from pagestream_cli.__main__ import main
from pagestream_cli.bench import (
    BenchRequest,
    HttpClient,
    Outcome,
    Run,
    as_json,
    as_text,
    run_load,
    summarize,
    write_plot,
)
from pagestream_cli.client import Endpoint
from support.clients.scripted_gateway import ScriptedGateway
from support.processes.stack import free_port

EXACT = BenchRequest(0.0, (1, 2, 3), max_tokens=4, ignore_eos=True)


async def load(url: str, requests: list[BenchRequest], concurrency: int | None = None) -> list[Outcome]:
    client = HttpClient(Endpoint((url,)), "demo", temperature=0.0)
    return await run_load(client, requests, concurrency=concurrency, timeout_s=20.0, on_done=lambda outcome: None)


async def test_an_answer_is_measured() -> None:
    async with ScriptedGateway() as gateway:
        (outcome,) = await load(gateway.url, [EXACT])
    assert (outcome.error, outcome.input_tokens, outcome.output_tokens) == ("", 3, 4)
    assert len(outcome.token_times_s) == 4
    assert 0 < outcome.token_times_s[0] <= outcome.token_times_s[-1] <= outcome.e2e_s
    assert gateway.calls[0].body == {
        "model": "demo",
        "prompt": [1, 2, 3],
        "max_tokens": 4,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_an_answer_of_another_length_is_an_error() -> None:
    async with ScriptedGateway(tokens=["only", " two"]) as gateway:
        (outcome,) = await load(gateway.url, [EXACT])
    assert (outcome.error, outcome.message) == ("wrong length", "2 tokens instead of 4")


@pytest.mark.parametrize(
    ("gateway", "kind"),
    [
        (ScriptedGateway(refusals=[(429, "full")]), "http 429"),
        (ScriptedGateway(breaks=[2]), "connection"),
        (ScriptedGateway(breaks=["engine_error"]), "stream error"),
    ],
)
async def test_errors_by_their_kind(gateway: ScriptedGateway, kind: str) -> None:
    async with gateway:
        bad, good = await load(gateway.url, [EXACT, EXACT], concurrency=1)
    assert bad.error == kind
    assert bad.message
    assert good.error == ""


async def test_a_server_that_is_not_there_is_an_outcome() -> None:
    (outcome,) = await load(f"http://127.0.0.1:{free_port()}", [EXACT])
    assert outcome.error == "connection"


async def test_a_closed_loop_never_has_more_than_its_clients() -> None:
    async with ScriptedGateway() as gateway:
        outcomes = await load(gateway.url, [EXACT] * 12, concurrency=3)
    moments = sorted([(o.sent_s, 1) for o in outcomes] + [(o.ended_s, -1) for o in outcomes])
    running, most = 0, 0
    for _, change in moments:
        running += change
        most = max(most, running)
    assert most == 3
    assert len(gateway.calls) == 12


async def test_requests_are_sent_in_their_order_and_never_early() -> None:
    due = [0.2, 0.0, 0.1]
    async with ScriptedGateway() as gateway:
        outcomes = await load(gateway.url, [BenchRequest(at, (1,), 4, ignore_eos=True) for at in due])
    assert [outcome.due_s for outcome in outcomes] == sorted(due)
    assert all(outcome.sent_s >= outcome.due_s for outcome in outcomes)


def run_of(outcomes: list[Outcome]) -> Run:
    return Run("pagestream bench --seed 0", {"model": "demo", "api": "http"}, summarize(outcomes), outcomes)


OUTCOMES = [
    Outcome(0.0, 0.1, 1.1, 10, 3, (0.5, 0.7, 0.9)),
    Outcome(0.5, 0.5, 0.6, 10, 0, (), "http 429", "full"),
]


def test_the_table_shows_what_people_compare() -> None:
    text = as_text(run_of(OUTCOMES))
    assert "1 of 2 succeeded" in text
    assert "3.0 output tok/s" in text
    assert text.count("500.0") == 5  # TTFT: mean, percentiles and maximum of one request
    assert "1 x http 429" in text
    assert "http 429: full" in text


def test_the_table_of_failures_alone() -> None:
    assert "0 of 1 succeeded" in as_text(run_of(OUTCOMES[1:]))


def test_the_json_has_the_command_the_summary_and_each_request() -> None:
    content = json.loads(as_json(run_of(OUTCOMES)))
    assert content["command"] == "pagestream bench --seed 0"
    assert content["settings"] == {"model": "demo", "api": "http"}
    assert content["summary"]["errors"] == {"http 429": 1}
    assert content["summary"]["ttft"]["p50"] == 500.0
    assert content["requests"][0]["tpot"] == 0.2
    assert content["requests"][1]["error"] == "http 429"
    assert content["machine"]["cpus"] >= 1


@pytest.mark.served
@pytest.mark.parametrize("outcomes", [OUTCOMES, pytest.param(OUTCOMES[1:], marks=pytest.mark.slow)])
def test_a_plot_is_a_png(tmp_path: Path, outcomes: list[Outcome]) -> None:
    write_plot(run_of(outcomes), tmp_path / "deep" / "plot.png")
    assert (tmp_path / "deep" / "plot.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--request-rate", "0"], "--request-rate"),
        (["--concurrency", "-1"], "--concurrency"),
        (["--num-requests", "0"], "--num-requests"),
        (["--scale-to-context", "64"], "--scale-to-context needs --trace"),
        (["--trace", "/no/such.csv", "--url", "http://127.0.0.1:1", "--model", "m"], "/no/such.csv"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert named in capsys.readouterr().err


async def test_waiting_for_an_answer_is_no_lateness() -> None:
    """In a closed loop of one, each request waits for those before it: the generator is on time all the same."""
    async with ScriptedGateway() as gateway:
        outcomes = await load(gateway.url, [EXACT] * 4, concurrency=1)
    summary = summarize(outcomes)
    assert summary.late is not None
    assert outcomes[-1].waited_s > 0
    assert max(outcome.sent_s for outcome in outcomes) >= sum(outcome.e2e_s for outcome in outcomes[:-1])
    assert summary.late.max < max(outcome.sent_s - outcome.due_s for outcome in outcomes) * 1000
