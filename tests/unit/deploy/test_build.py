"""What deploy/images/build.sh asks its builder for: images, base image, indexes. The builder notes its arguments."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DIGEST = "sha256:" + "ab" * 32
TAG = (ROOT / "deploy" / "images" / "base-image.txt").read_text().splitlines()[-1]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The part of the repository that the script reads, so that it writes nothing into ours."""
    for path in ("deploy/images", "services/engine/pyproject.toml"):
        source, target = ROOT / path, tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
    (tmp_path / "bin").mkdir()
    return tmp_path


def program(checkout: Path, name: str, text: str) -> None:
    file = checkout / "bin" / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def build(checkout: Path, *arguments: str, **environment: str) -> list[str]:
    """The calls of the builder, one a line."""
    calls = checkout / "calls"
    program(checkout, "builder", f'echo "$@" >> {calls}; : > "$2"')
    variables = {"PATH": f"{checkout / 'bin'}:/usr/bin:/bin", "PAGESTREAM_IMAGE_BUILDER": "builder", **environment}
    base = {name: value for name, value in os.environ.items() if name not in ("BASE_IMAGE", "TORCH_INDEX")}
    command = ["bash", str(checkout / "deploy" / "images" / "build.sh"), *arguments]
    subprocess.run(command, env={**base, **variables}, check=True, capture_output=True, text=True, timeout=60)
    return calls.read_text().splitlines()


def test_the_base_image_is_pinned_to_the_digest_that_its_index_names(checkout: Path) -> None:
    program(checkout, "skopeo", f"echo {DIGEST}")
    calls = build(checkout)
    assert [call.split(":")[0] for call in calls] == [
        f"pagestream-{name}" for name in ("gateway", "operator", "engine")
    ]
    for call in calls:
        assert f"--build-arg BASE_IMAGE={TAG}@{DIGEST} " in call
        assert f"--label org.opencontainers.image.base.digest={DIGEST} " in call


def test_a_digest_in_the_file_is_taken_without_asking(checkout: Path) -> None:
    program(checkout, "skopeo", "exit 9")
    (checkout / "deploy" / "images" / "base-image.txt").write_text(f"# why\n{TAG}@{DIGEST}\n")
    assert f"BASE_IMAGE={TAG}@{DIGEST} " in build(checkout, "pagestream-gateway")[0]


def test_without_an_index_the_tag_is_taken(checkout: Path) -> None:
    program(checkout, "skopeo", "exit 1")
    (call,) = build(checkout, "pagestream-gateway")
    assert "BASE_IMAGE" not in call  # the Dockerfile's own
    for file in (ROOT / "deploy" / "images").glob("*.Dockerfile"):
        assert f"\nARG BASE_IMAGE={TAG}\n" in file.read_text()


def test_a_switch_builds_the_image_for_gpus_with_its_own_torch(checkout: Path) -> None:
    program(checkout, "skopeo", "exit 1")
    *others, cuda = build(checkout, "--cuda", TORCH_INDEX="https://cpu", TORCH_INDEX_CUDA="https://cuda")
    assert "TORCH_INDEX=https://cuda" in cuda
    assert "engine-cuda.Dockerfile" in cuda
    assert all("TORCH_INDEX=https://cpu" in call for call in others)
