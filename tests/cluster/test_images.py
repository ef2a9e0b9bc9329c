"""What is in the images, and what isn't."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.release import IMAGES, archive
from support.redis.servers import skip_for_want_of

MB = 1_000_000
MOST_ABOVE_BASE = 200 * MB
OURS = ("pagestream-gateway", "pagestream-operator", "pagestream-engine")
COMPILERS = re.compile(r"(^|/)(gcc|g\+\+|cc1(plus)?|clang|as|ld)(-\d+)?$")
NO_TORCH = ("torch", "triton", "transformers", "pagestream_kernels", "pagestream_engine")


@pytest.fixture(scope="module", params=OURS)
def image(request: pytest.FixtureRequest) -> Iterator[archive.ImageArchive]:
    path = IMAGES / f"{request.param}.tar"
    if not path.is_file():
        skip_for_want_of("cluster", f"{path.name} is not built: make images")
    with archive.open_archive(path) as opened:
        yield opened


@pytest.fixture
def name(image: archive.ImageArchive) -> str:
    return str(image.tags[0].rpartition("/")[2].partition(":")[0])


def test_it_runs_as_a_user_without_rights(image: archive.ImageArchive) -> None:
    assert image.config["config"]["User"] == "65532:65532"
    passwd = image.read("etc/passwd").decode()
    assert "pagestream:x:65532:65532:" in passwd


def test_there_is_no_compiler(image: archive.ImageArchive) -> None:
    assert not [path for path in image.files() if COMPILERS.search(path)]


def test_gateway_and_operator_are_small(image: archive.ImageArchive, name: str) -> None:
    if name == "pagestream-engine":
        paths = [path for path in image.files() if "site-packages/triton/" in path]
        assert not paths, "a CPU needs no Triton"
        return
    packages = {
        Path(path).parts[5] for path in image.files() if path.startswith("opt/venv/lib/") and path.count("/") > 5
    }
    ours = {Path(path).parts[2] for path in image.files() if path.startswith("opt/pagestream/") and path.count("/") > 2}
    assert "grpc" in packages
    assert name.replace("-", "_") in ours
    assert not (packages | ours) & set(NO_TORCH)
    base, *layers = list(image.layers())
    with archive.open_archive(IMAGES / "pagestream-test-redis.tar") as other:
        assert next(iter(other.layers())).diff_id == base.diff_id
    above = sum(member.size for layer in layers for member in layer.members)
    assert above <= MOST_ABOVE_BASE


def test_the_engine_brings_kernels_for_each_level(image: archive.ImageArchive, name: str) -> None:
    if name != "pagestream-engine":
        return
    folder = "opt/pagestream/pagestream_engine/attention/native/prebuilt/"
    libraries = [path.removeprefix(folder) for path in image.files() if path.startswith(folder)]
    for level in ("x86-64-v3", "x86-64-v4"):
        assert any(each.startswith(f"kernels-64-{level}-") for each in libraries)
    assert "models/demo/config.json" in image.files()


def test_the_list_of_contents_is_complete(image: archive.ImageArchive, name: str) -> None:
    text = image.read("usr/share/pagestream/sbom.cdx.json").decode()
    assert (IMAGES / f"{name}.cdx.json").read_text() == text
    components = json.loads(text)["components"]
    listed = {each["purl"].partition("@")[0] for each in components if "purl" in each}
    assert {f"pkg:pypi/{name}", "pkg:deb/debian/libc6"} <= listed
    pattern = re.compile(r"opt/(?:venv/lib/python3\.\d+/site-packages|pagestream)/([^/]+)-[^/-]+\.dist-info/METADATA$")
    installed = [found.group(1) for path in image.files() if (found := pattern.match(path))]
    assert {f"pkg:pypi/{each.lower().replace('_', '-')}" for each in installed} <= listed


def test_versions_are_the_pinned_ones(image: archive.ImageArchive) -> None:
    of_other_interpreters = {"async-timeout"}  # what Python 3.11 before 3.11.3 needs beside
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text()
    pins = dict(line.split("==") for line in constraints.splitlines() if "==" in line)
    for each in json.loads(image.read("usr/share/pagestream/sbom.cdx.json"))["components"]:
        if each.get("purl", "").startswith("pkg:pypi/") and not each["name"].startswith("pagestream"):
            if each["name"] in of_other_interpreters:
                continue
            assert each["version"].partition("+")[0] == pins[each["name"]]


def test_shell_scripts_parse() -> None:
    for script in (Path(__file__).parent / "prepare.sh", Path(__file__).parents[2] / "deploy" / "images" / "build.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
