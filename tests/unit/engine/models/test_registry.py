"""Of which code a family is."""

import importlib
import sys
import zipfile
from pathlib import Path

import pytest
from pagestream_engine.models.families.llama import Llama
from pagestream_engine.models.registry import find_family, plugin_digest


class Mine(Llama):
    architecture = "MineForCausalLM"


def test_only_a_family_of_the_users_has_a_digest() -> None:
    family = find_family("LlamaForCausalLM")
    assert family is not None
    assert plugin_digest(family) == ""
    assert len(plugin_digest(Mine())) == 64


def test_a_family_in_a_zip_archive_has_a_digest_of_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for version in range(2):
        archive = tmp_path / f"{version}.zip"
        with zipfile.ZipFile(archive, "w") as file:
            text = f"from {Llama.__module__} import Llama\nclass Mine(Llama): version = {version}\n"
            file.writestr("zipped_family.py", text)
        monkeypatch.syspath_prepend(archive)
        digests.append(plugin_digest(importlib.import_module("zipped_family").Mine()))
        del sys.modules["zipped_family"]
    assert digests[0] != digests[1]
    assert all(len(digest) == 64 for digest in digests)
