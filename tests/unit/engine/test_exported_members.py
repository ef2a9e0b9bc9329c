import subprocess
import sys

import pagestream_engine
import pytest

EXPORTED = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "SchedulingPolicy",
    "Sibling",
    "StepOutput",
    "StructuredOutputsParams",
    "TokenLogprob",
    "TokenSequence",
    "register_policy",
]


WITHOUT_TORCH = [
    "pagestream_engine",
    "pagestream_engine.native_build",
    "pagestream_engine.models.folder",
    "pagestream_engine.scheduler.scheduler",
    "pagestream_engine.cache.manager",
    "pagestream_engine.request.sampling_params",
    "pagestream_engine.request.sequence",
    "pagestream_engine.text.detokenizer",
    "pagestream_engine.engine",
]
"""Modules that are used where there is no torch (the simulator), or before a model is loaded."""


def _packages_after(module: str) -> set[str]:
    """Top-level packages that a fresh process has imported after a module."""
    code = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_the_public_names() -> None:
    assert pagestream_engine.__all__ == EXPORTED
    assert all(getattr(pagestream_engine, name).__name__ == name for name in EXPORTED)
    assert set(EXPORTED) <= set(dir(pagestream_engine))
    with pytest.raises(AttributeError, match="has no attribute 'Enigne'"):
        _ = pagestream_engine.Enigne


def test_importing_the_package_alone_is_light() -> None:
    assert not _packages_after("pagestream_engine") & {"torch", "tokenizers", "numpy", "transformers"}


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_no_torch_before_a_model_is_loaded(module: str) -> None:
    """Nor any of the worker's libraries."""
    loaded = _packages_after(module)
    assert "pagestream_engine" in loaded
    assert not loaded & {"torch", "triton", "transformers", "redis", "grpc", "google", "opentelemetry"}
    assert not loaded & {"pagestream_kernels", "pagestream_streams"}
