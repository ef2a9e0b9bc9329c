import subprocess
import sys

import pagestream_engine

EXPORTED = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "Sibling",
    "StepOutput",
    "TokenLogprob",
]


def test_the_public_names() -> None:
    assert pagestream_engine.__all__ == EXPORTED
    assert all(hasattr(pagestream_engine, name) for name in EXPORTED)


def test_importing_it_is_light_and_offline() -> None:
    """The core must not need the worker's libraries, nor load heavy ones before a model is."""
    code = "import sys, pagestream_engine; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stdout.split())
    assert "tokenizers" in loaded
    assert not loaded & {"torch", "transformers", "redis", "grpc", "google", "opentelemetry", "pagestream_streams"}
