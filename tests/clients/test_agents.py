"""Coding agents as they are published, each with a task of several turns and a gateway that dies in the midst of it.

The model is a script behind the real queue (`support.engines.scripted_agent_model`), so that the agents run the
commands that stand here and no others, in a temporary folder that is their home, too.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pagestream.v1.records_pb2 import RequestSpec
from support.engines.scripted_agent_model import NAME, Script, call, card, num_results, prompt_of, shows_tools
from support.engines.synthetic_engine import Says, SyntheticEngine, running_engine
from support.processes.stack import Stack
from support.processes.waiting import until, wait_until

FOLDER = Path(os.environ.get("PAGESTREAM_CLIENTS", Path(__file__).parents[2] / ".clients"))
PROGRAMS = FOLDER / "agents" / "node_modules" / ".bin"
LIMIT_S = 120.0
TASK = "Write a note about the lighthouse, and read it."
NOTE = "Mara lives in the lighthouse.\n"
TOLD = "The note says that Mara lives in the lighthouse."
THOUGHT = "<think>A file will do.</think>"
HELD_AT = 12
"""The entry of the second turn's log before which the gateway dies."""
ROOMY, TIGHT = 2**20, {"codex": 48_000, "claude": 112_000}
"""Tokens of contexts, a byte each: 28,000 are Codex' own prompt, 79,000 Claude Code's."""
PART = "The lighthouse stands on the rock.\n" * 260
ASKS_FOR_SUMMARY = ("CONTEXT CHECKPOINT COMPACTION", "create a detailed summary")
SUMMARY = "<summary>They read parts of a story about a lighthouse.</summary>"

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PROGRAMS.exists(), reason="the agents are not installed: `make clients`"),
]


class Agent:
    """One of the programs, with a home and a working folder of its own."""

    def __init__(self, name: str, folder: Path, url: str, context: int) -> None:
        self.name = name
        self.work = folder / "work"
        self.work.mkdir()
        home = folder / "home"
        (home / ".codex").mkdir(parents=True)
        (home / ".codex" / "config.toml").write_text(_CODEX.format(model=NAME, context=context, url=url))
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": NAME,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        }
        self._has_begun = False

    def calls(self, cat: str) -> tuple[str, str]:
        """Return the turns that write the note, and that read a file."""
        if self.name == "codex":
            write = call("exec_command", {"cmd": f"printf '{NOTE[:-1]}\\n' > note.txt"}, f"{THOUGHT}I write it. ")
            return write, call("exec_command", {"cmd": f"cat {cat}"})
        write = call("Write", {"file_path": str(self.work / "note.txt"), "content": NOTE}, f"{THOUGHT}I write it. ")
        return write, call("Bash", {"command": f"cat {cat}", "description": "Read it"})

    async def run(self, prompt: str) -> str:
        """Let it work until it is done, within the conversation that it had; return what it says at the end."""
        if self.name == "codex":
            command = ["codex", "exec", *(["resume", "--last"] if self._has_begun else []), "--json"]
            command += ["--skip-git-repo-check", "-c", 'sandbox_mode="workspace-write"', prompt]
        else:
            command = ["claude", "-p", prompt, *(["--continue"] if self._has_begun else [])]
            command += ["--output-format", "json", "--permission-mode", "acceptEdits", "--allowedTools", "Bash(cat:*)"]
        self._has_begun = True
        process = await asyncio.create_subprocess_exec(
            PROGRAMS / command[0],
            *command[1:],
            cwd=self.work,
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                out, err = await process.communicate()
        except BaseException:
            process.kill()
            await process.wait()
            raise
        assert process.returncode == 0, (out.decode()[-3000:], err.decode()[-3000:])
        return _last_message([json.loads(line) for line in out.splitlines()])


_CODEX = """\
model = "{model}"
model_provider = "pagestream"
model_context_window = {context}
check_for_update_on_startup = false

[model_providers.pagestream]
name = "Pagestream"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 20

[analytics]
enabled = false
"""


def _last_message(events: Sequence[dict[str, Any]]) -> str:
    if events[-1].get("type") == "result":  # Claude Code's one
        return str(events[-1]["result"])
    items = [event["item"] for event in events if event.get("type") == "item.completed"]
    return str([item["text"] for item in items if item["type"] == "agent_message"][-1])


@asynccontextmanager
async def deployment(folder: Path, says: Says, context: int) -> AsyncIterator[tuple[Stack, SyntheticEngine]]:
    """Run Redis, the scripted model and a gateway."""
    stack = Stack(folder / "stack")
    try:
        stack.redis.start()
        async with running_engine(stack.redis_url, card(context), says=says) as engine:
            stack.add_gateway()
            await asyncio.to_thread(stack.wait_ready)
            yield stack, engine
    finally:
        stack.stop()


@pytest.mark.parametrize("name", ["codex", "claude"])
async def test_a_task_ends_over_a_gateways_death(tmp_path: Path, report: list[str], name: str) -> None:
    turns: list[str] = []
    script, second = Script(turns), asyncio.Event()

    def says(spec: RequestSpec) -> str:
        if shows_tools(spec) and num_results(spec) == 1 and not second.is_set():
            engine.hold_at = HELD_AT
            second.set()
        return script(spec)

    async with deployment(tmp_path, says, ROOMY) as (stack, engine):
        gateway = stack.gateways[0]
        agent = Agent(name, tmp_path, gateway.url, ROOMY)
        turns += [*agent.calls("note.txt"), TOLD]
        working = asyncio.create_task(agent.run(TASK))
        await asyncio.wait([working, asyncio.create_task(second.wait())], return_when=asyncio.FIRST_COMPLETED)
        assert not working.done(), await working
        await until(lambda: engine.num_held > 0, "the second turn")
        gateway.kill()
        gateway.start()
        await asyncio.to_thread(wait_until, gateway.has_become_ready, gateway.name, LIMIT_S)
        engine.go_on()
        assert await working == TOLD
        assert (agent.work / "note.txt").read_text() == NOTE
        of_task = [spec for spec in engine.claimed if shows_tools(spec)]
        asked = [num_results(spec) for spec in of_task]
    # Claude Code asks for answers that don't show their reasoning; what it is sent back for is within signatures, which
    # it leaves out when it asks again after a break.
    assert THOUGHT in prompt_of(of_task[asked.index(1)]), "the model is not shown what it thought"
    assert asked.count(1) > 1, "the second turn was not asked for again"
    report.append(f"{name}: a task of 3 turns in {len(asked)} requests, over the death of its gateway")


@pytest.mark.parametrize("name", ["codex", "claude"])
async def test_a_full_context_is_compacted(tmp_path: Path, report: list[str], name: str) -> None:
    """Each turn reads a file of 9,000 tokens. Codex compacts by its setting, Claude Code by what the server refuses."""

    def says(spec: RequestSpec) -> str:
        *_, last, _ = latest = prompt_of(spec).rsplit("</s>[", 4)
        if any(words in said for said in latest[1:] for words in ASKS_FOR_SUMMARY):
            summaries.append(spec.request_id)
            return SUMMARY
        return "Noted." if last.startswith("tool]") else reads

    summaries: list[str] = []
    async with deployment(tmp_path, says, TIGHT[name]) as (stack, engine):
        agent = Agent(name, tmp_path, stack.gateways[0].url, TIGHT[name])
        (agent.work / "part.txt").write_text(PART)
        _, reads = agent.calls("part.txt")
        for number in range(5):
            assert await agent.run(f"Read part {number} of the story.") == "Noted."
        async with httpx.AsyncClient(base_url=stack.gateways[0].url) as client:
            metrics = (await client.get("/metrics")).text
        refused = sum(float(line.split()[-1]) for line in metrics.splitlines() if "context_length_exceeded" in line)
        longest = max(len(spec.prompts[0].ids) for spec in engine.claimed)
    assert summaries
    assert longest < TIGHT[name]
    assert refused or name == "codex"
    report.append(f"{name}: 5 turns of 9,000 tokens in a context of {TIGHT[name]}, compacted {len(summaries)} times")
