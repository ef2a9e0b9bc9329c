"""Read a docker archive: `archive.py ARCHIVE PATH` writes a file of the image to standard output."""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_WHITEOUT = ".wh."


@dataclass(frozen=True)
class Layer:
    """One layer."""

    diff_id: str
    """Digest of its content: equal layers of two images have the same."""
    members: tuple[tarfile.TarInfo, ...]


class ImageArchive:
    """An image as `docker save` or `buildah push docker-archive:` writes it."""

    def __init__(self, archive: tarfile.TarFile) -> None:
        self._archive = archive
        (self._manifest,) = json.loads(self._read("manifest.json"))
        self.config: dict[str, Any] = json.loads(self._read(self._manifest["Config"]))

    @property
    def tags(self) -> list[str]:
        """Names that the image has, such as `localhost/pagestream-engine:0.1.0`."""
        return list(self._manifest["RepoTags"])

    def _read(self, name: str) -> bytes:
        return self._file(name).read()

    def _file(self, name: str) -> IO[bytes]:
        member = self._archive.getmember(name)
        if member.issym():  # equal layers are written once
            folder = Path(name).parent
            return self._file(str(Path(*_normal(folder / member.linkname))))
        found = self._archive.extractfile(member)
        if found is None:
            raise ValueError(f"{name} is no file in this archive")
        return found

    def layers(self) -> Iterator[Layer]:
        """The layers, the base's first."""
        for name, diff_id in zip(self._manifest["Layers"], self.config["rootfs"]["diff_ids"], strict=True):
            with tarfile.open(fileobj=self._file(name), mode="r:*") as layer:
                yield Layer(diff_id, tuple(layer.getmembers()))

    def files(self) -> dict[str, tarfile.TarInfo]:
        """The image's files by path without a leading slash, upper layers over lower ones."""
        found: dict[str, tarfile.TarInfo] = {}
        for layer in self.layers():
            for member in layer.members:
                path = Path(*_normal(Path(member.name)))
                if path.name.startswith(_WHITEOUT):
                    gone = str(path.with_name(path.name.removeprefix(_WHITEOUT)))
                    found = {
                        each: info for each, info in found.items() if each != gone and not each.startswith(gone + "/")
                    }
                elif not member.isdir():
                    found[str(path)] = member
        return found

    def read(self, path: str) -> bytes:
        """The content of a file, as the topmost layer that has it says.

        Raises:
            FileNotFoundError: no layer has it.
        """
        for name in reversed(self._manifest["Layers"]):
            with tarfile.open(fileobj=self._file(name), mode="r:*") as layer:
                for member in layer.getmembers():
                    if str(Path(*_normal(Path(member.name)))) == path and (found := layer.extractfile(member)):
                        return found.read()
        raise FileNotFoundError(path)


def _normal(path: Path) -> list[str]:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        elif part not in (".", "/"):
            parts.append(part)
    return parts or ["."]


@contextmanager
def open_archive(path: Path) -> Iterator[ImageArchive]:
    """The image in a docker archive."""
    with tarfile.open(path) as archive:
        yield ImageArchive(archive)


def main() -> None:
    """Write one file to standard output."""
    archive, path = sys.argv[1:]
    with open_archive(Path(archive)) as image:
        sys.stdout.buffer.write(image.read(path))


if __name__ == "__main__":
    main()
