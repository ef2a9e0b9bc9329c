"""The images' build files, and what deploy/images/build.sh asks its builder for."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from support.processes.waiting import LIMIT_S

# -- The images' build files: what a builder would refuse, and what must not be in an image


ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "images"
IMAGES = ("gateway", "operator", "engine", "engine-cuda")
WORDS = {"ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "LABEL", "RUN", "USER", "WORKDIR"}

sys.path.insert(0, str(ROOT / "tools"))
import write_image_requirements  # noqa: E402


@dataclass(frozen=True)
class Instruction:
    """One line, its continuations joined."""

    word: str
    text: str


def instructions(image: str) -> list[Instruction]:
    text = (FOLDER / f"{image}.Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [Instruction(*line.split(None, 1)) for line in joined.splitlines()]


def stages(image: str) -> list[list[Instruction]]:
    """The instructions of each stage, its FROM first."""
    found: list[list[Instruction]] = []
    for each in instructions(image):
        if each.word == "FROM":
            found.append([])
        if found:
            found[-1].append(each)
    return found


@pytest.mark.parametrize("image", IMAGES)
class TestEachImage:
    def test_it_has_only_known_instructions(self, image: str) -> None:
        assert {each.word for each in instructions(image)} <= WORDS - {"ADD"}

    def test_every_stage_begins_at_the_base_or_an_earlier_stage(self, image: str) -> None:
        first = instructions(image)[0]
        assert (first.word, first.text.split("=")[0]) == ("ARG", "BASE_IMAGE")
        names: list[str] = []
        for stage in stages(image):
            source, *name = re.split(r"\s+AS\s+", stage[0].text)
            assert source == "${BASE_IMAGE}" or source in names
            for each in stage[1:]:
                given = re.search(r"--from=(\S+)", each.text)
                assert given is None or given.group(1) in names
            names += name

    def test_what_it_copies_is_there_and_not_ignored(self, image: str) -> None:
        kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
        for each in instructions(image):
            if each.word == "COPY" and "--from=" not in each.text:
                for source in each.text.split()[:-1]:
                    assert (ROOT / source).exists()
                    assert Path(source).parts[0] in kept

    def test_it_ends_as_a_user_without_rights(self, image: str) -> None:
        final = stages(image)[-1]
        assert [each.text for each in final if each.word == "USER"] == ["65532:65532"]
        assert all(each.word != "RUN" for each in final[[each.word for each in final].index("USER") :])

    def test_it_runs_as_a_user_whom_it_does_not_know(self, image: str) -> None:
        """On OpenShift: who asks for the user's name (kopf, torch) is answered by the environment."""
        environment = " ".join(each.text for each in stages(image)[-1] if each.word == "ENV").split()
        assert {"USER=pagestream", "HOME=/tmp"} <= set(environment)

    def test_the_largest_layer_changes_with_versions_alone(self, image: str) -> None:
        copied = [each.text.split()[0] for each in stages(image)[0] if each.word == "COPY"]
        assert copied == ["constraints.txt", f"deploy/images/requirements/{image}.txt"]
        first_copy = next(each for each in stages(image)[-1] if each.word == "COPY")
        assert first_copy.text == "--from=thirdparty /opt/venv /opt/venv"

    def test_its_requirements_are_those_of_its_packages(self, image: str) -> None:
        path = FOLDER / "requirements" / f"{image}.txt"
        assert path.read_text() == write_image_requirements.text_of(image), "run tools/write_image_requirements.py"

    def test_it_installs_the_packages_that_it_needs(self, image: str) -> None:
        ours, _ = write_image_requirements.closure(write_image_requirements.IMAGES[image][0])
        (stage,) = (stage for stage in stages(image) if stage[0].text.endswith(" AS ours"))
        copied = {each.text.split()[0] for each in stage if each.word == "COPY" and "--from=" not in each.text}
        names = {canonicalize_name(f"pagestream-{Path(source).name}") for source in copied}
        assert names == ours
        (run,) = (each.text for each in stage if each.word == "RUN")
        assert {source.removeprefix("./") for source in re.findall(r"\./\S+", run)} == copied

    def test_its_command_is_a_list(self, image: str) -> None:
        (command,) = (each.text for each in stages(image)[-1] if each.word == "CMD")
        assert json.loads(command)[0] == f"pagestream-{image.removesuffix('-cuda')}"


@pytest.mark.parametrize("image", ["gateway", "operator", "engine"])
def test_no_compiler_in_the_last_stage(image: str) -> None:
    assert not [each for each in stages(image)[-1] if each.word == "RUN" and "apt-get" in each.text]


def test_gateway_and_operator_need_no_torch() -> None:
    for image in ("gateway", "operator"):
        assert not {"torch", "triton", "transformers"} & set(write_image_requirements.text_of(image).split())


def test_a_list_of_contents_of_this_environment() -> None:
    folders = [path for path in sys.path if path.endswith("site-packages")]
    command = [sys.executable, str(FOLDER / "sbom.py"), "here", "1.0", *folders]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout
    bill = json.loads(said)
    assert bill["specVersion"] == "1.6"
    (numpy,) = (each for each in bill["components"] if each.get("purl", "").startswith("pkg:pypi/numpy@"))
    assert numpy["licenses"]
    references = [each["bom-ref"] for each in bill["components"]]
    assert len(references) == len(set(references))


# -- What deploy/images/build.sh asks its builder for: images, base image, indexes. The builder notes its arguments


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
    subprocess.run(command, env={**base, **variables}, check=True, capture_output=True, text=True, timeout=LIMIT_S)
    return calls.read_text().splitlines()


def test_the_base_image_is_pinned_to_the_digest_that_its_index_names(checkout: Path) -> None:
    program(checkout, "skopeo", f"echo {DIGEST}")
    calls = build(checkout)
    assert {call.split(":")[0] for call in calls} == {
        f"pagestream-{name}" for name in ("gateway", "operator", "engine")
    }
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
    calls = build(checkout, "--cuda", TORCH_INDEX="https://cpu", TORCH_INDEX_CUDA="https://cuda")
    (cuda,) = (call for call in calls if call.startswith("pagestream-engine-cuda:"))
    others = [call for call in calls if call != cuda]
    assert "TORCH_INDEX=https://cuda" in cuda
    assert "engine-cuda.Dockerfile" in cuda
    assert all("TORCH_INDEX=https://cpu" in call for call in others)
