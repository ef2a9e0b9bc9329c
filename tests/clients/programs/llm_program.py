"""The `llm` command against a gateway: `llm_program.py URL`, with the results as JSON on stdout."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

QUESTION = "Who lives in the lighthouse?"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "job": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "job", "age"],
    "additionalProperties": False,
}


def main(url: str) -> dict[str, object]:
    """Make the calls; return what they brought."""
    with tempfile.TemporaryDirectory() as folder:
        listed = [
            {
                "model_id": "village",
                "model_name": "demo",
                "api_base": f"{url}/v1",
                "supports_schema": True,
            }
        ]
        (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps(listed))

        def ask(*options: str, question: str = QUESTION) -> str:
            command = [str(Path(sys.executable).with_name("llm")), "-m", "village", *options, question]
            settings = ["-o", "temperature", "0", "-o", "max_tokens", "200", "--key", "none"]
            environment = {**os.environ, "LLM_USER_PATH": folder}
            done = subprocess.run(
                [*command, *settings], env=environment, capture_output=True, text=True, timeout=60, check=False
            )
            if done.returncode:
                raise RuntimeError(done.stderr)
            return done.stdout.strip()

        return {
            "text": ask("--no-stream"),
            "streamed": ask(),
            "structured": json.loads(ask("--schema", json.dumps(SCHEMA), question="Who is Mara?")),
        }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
