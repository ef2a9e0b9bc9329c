"""The core is imported where there is no torch: by the simulator, and before a model is loaded."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "triton", "transformers", "redis", "grpc", "google", "opentelemetry", "pagestream_streams"}
CORE = "kv_cache", "engine", "native_build", "models.folder", "request", "scheduler", "steps", "output"


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (["pagestream_engine"], {"numpy", "tokenizers", *HEAVY}),
        ([f"pagestream_engine.{name}" for name in CORE], {"pagestream_kernels", *HEAVY}),
    ],
    ids=["the package alone", "its core"],
)
def test_a_fresh_process_imports_nothing_heavy(modules: list[str], absent: set[str]) -> None:
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "pagestream_engine" in loaded
    assert not loaded & absent
