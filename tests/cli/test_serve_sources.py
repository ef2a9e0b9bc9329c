"""`pagestream serve` until it has answered a question: the demo model, a repository's, and a LoRA adapter of one."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from support.engines.lora_adapters import make_adapter
from support.processes.stack import DEMO_MODEL
from support.processes.waiting import LIMIT_S

pytestmark = pytest.mark.served
QUESTION = "Who lives in the lighthouse?"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A stand-in for the Hugging Face Hub: one repository out of a folder, by the routes that a download takes."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.paths: list[str] = []
        """Of all calls."""

    def find(self, path: str) -> tuple[bytes, str] | None:
        """Return the body and the kind of an answer; None for what is not there."""
        self.paths.append(path)
        files = sorted(each.name for each in self.folder.iterdir())
        if path.startswith(f"/api/models/{self.name}/revision/"):
            listed = {"id": self.name, "sha": COMMIT, "siblings": [{"rfilename": each} for each in files]}
            return json.dumps(listed).encode(), "application/json"
        if path == f"/api/models/{self.name}/tree/{COMMIT}":
            return json.dumps([self._entry(each) for each in files]).encode(), "application/json"
        revision, _, file = path.removeprefix(f"/{self.name}/resolve/").partition("/")
        if path.startswith(f"/{self.name}/resolve/") and revision == COMMIT and file in files:
            return (self.folder / file).read_bytes(), "application/octet-stream"
        return None

    def _entry(self, file: str) -> dict[str, object]:
        content = (self.folder / file).read_bytes()
        return {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}  # noqa: S324


@contextmanager
def running_hub(name: str, folder: Path) -> Iterator[tuple[Hub, str]]:
    """Serve a folder as a repository; yield the hub and its base URL."""
    hub = Hub(name, folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            found = hub.find(self.path.partition("?")[0])
            body, kind = found or (b'{"error": "not found"}', "application/json")
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            if not found:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join(LIMIT_S)
        server.server_close()


def greet(data_dir: Path, *source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Serve a source, or the demo model, until it has answered a question."""
    ports = ["--http-port", "0", "--grpc-port", "0", "--data-dir", str(data_dir), "--dtype", "float32"]
    command = [sys.executable, "-m", "pagestream_cli", "serve", *source, *ports, "--greet", QUESTION]
    return subprocess.run(
        [*command, "--exit-after-greet"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


FETCH = "import sys; from pagestream_engine.models.folder import resolve_model; print(resolve_model(sys.argv[1]))"


@pytest.mark.slow
def test_a_repository_is_fetched_once(tmp_path: Path) -> None:
    with running_hub("village/storyteller", DEMO_MODEL) as (hub, url):
        environment = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
        done = greet(tmp_path / "data", "village/storyteller@v1", **environment)
        assert done.returncode == 0, done.stderr
        assert "Mara" in done.stdout
        assert "ready: model 'village/storyteller'" in done.stderr
        assert "/api/models/village/storyteller/revision/v1" in hub.paths
        assert f"/village/storyteller/resolve/{COMMIT}/model.safetensors" in hub.paths
        hub.paths.clear()
        again = [sys.executable, "-c", FETCH, "village/storyteller@v1"]  # as the engine does at its next start
        found = subprocess.run(again, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
        assert (Path(found.stdout.strip()) / "model.safetensors").is_file()
        assert hub.paths
        assert not any("model.safetensors" in path for path in hub.paths)


@pytest.mark.slow
def test_a_repository_that_is_not_there_is_named(tmp_path: Path) -> None:
    with running_hub("village/storyteller", DEMO_MODEL) as (_, url):
        done = greet(tmp_path / "data", "village/other", HF_ENDPOINT=url, HF_HOME=str(tmp_path / "cache"))
    assert done.returncode != 0
    assert "village/other" in done.stderr


@pytest.mark.slow
def test_an_adapters_folder_serves_its_base_model_with_it(tmp_path: Path) -> None:
    folder = make_adapter(DEMO_MODEL, tmp_path / "dialect")
    config = folder / "adapter_config.json"
    assert str(DEMO_MODEL) in config.read_text()
    plain, adapted = greet(tmp_path / "data"), greet(tmp_path / "data", str(folder))
    assert (plain.returncode, adapted.returncode) == (0, 0), adapted.stderr
    assert "Mara" in plain.stdout
    assert "first token after" in plain.stderr
    assert "ready: model 'demo' at http://127.0.0.1:" in plain.stderr
    assert not (tmp_path / "data" / "serve.json").exists()
    assert adapted.stdout.strip() not in ("", plain.stdout.strip())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "adapter_config.json").write_text("{}")
    refused = greet(tmp_path / "data", str(tmp_path / "other"))
    assert refused.returncode == 2
    assert "names no base model" in refused.stderr


@pytest.mark.slow
def test_a_command_line_of_vllms_serves(tmp_path: Path) -> None:
    dialect, data = make_adapter(DEMO_MODEL, tmp_path / "dialect"), tmp_path / "data"
    settings = tmp_path / "serve.yaml"
    settings.write_text(f"model: {DEMO_MODEL}\nport: 1\nserved_model_name: [tale, story]\nmax-model-len: 0.5k\n")
    line = ["--config", str(settings), "--port", "0", "--grpc-port", "0", "--api-key", "one", "two", "--dtype", "float"]
    more = ["--lora-modules", f"dialect={dialect}", "--trust-remote-code", "--max_num_seqs=8", "-tp", "1", "-O3"]
    command = [sys.executable, "-m", "pagestream_cli", "serve", *line, *more, "--data-dir", str(data)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            said = []
            for text in process.stderr:
                said.append(text)
                if text.startswith("ready: model 'tale'"):
                    break
            assert process.poll() is None, said
            threading.Thread(target=process.stderr.read, daemon=True).start()
            [gateway] = [each for each in json.loads((data / "serve.json").read_text())["processes"] if each["ports"]]
            url = f"http://127.0.0.1:{gateway['ports']['http']}/v1"
            asked = {"model": "story", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8}
            with httpx.Client(timeout=LIMIT_S) as client:
                assert client.get(f"{url}/models").status_code == 401
                client.headers["Authorization"] = "Bearer two"
                models = client.get(f"{url}/models").json()["data"]
                assert sorted(each["id"] for each in models) == ["dialect", "story", "tale"]
                assert {each["max_model_len"] for each in models} == {500}
                answers = [
                    client.post(f"{url}/chat/completions", json={**asked, "model": each})
                    for each in ("story", "dialect")
                ]
            assert [answer.json()["model"] for answer in answers] == ["tale", "dialect"]
            assert sum("change nothing here" in text for text in said) == 1
        finally:
            process.send_signal(signal.SIGINT)
    assert process.returncode == 0
