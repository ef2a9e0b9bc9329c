"""tools/structure.py on a small package."""

from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "tools"
PACKAGE = "structure_sample"
FILES = {
    "__init__.py": "from structure_sample.api import serve\n",
    "__main__.py": "import structure_sample.api\n",
    "errors.py": "",
    "api/__init__.py": "from structure_sample.api.serve import serve\n",
    "api/serve.py": "from structure_sample.store import read\n\n\ndef serve() -> None:\n    read()\n",
    "store.py": (
        "from typing import TYPE_CHECKING\n\nfrom structure_sample.errors import *\n\n"
        "if TYPE_CHECKING:\n    from structure_sample import errors\n\n\ndef read() -> None: ...\n"
    ),
}


@pytest.fixture
def structure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TOOLS)
    import structure

    return structure


def write(root: Path, files: dict[str, str]) -> Path:
    folder = root / "services" / "sample" / "src" / PACKAGE
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def class_with(methods: int, docstring: str = "A class.") -> str:
    body = "\n".join(f"    def method_{number}(self) -> None: ..." for number in range(methods))
    return f'class Big:\n    """{docstring}"""\n\n{body}\n'


def test_rooms_arrows_and_floors(structure: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, FILES)
    [(name, folder)] = structure.find_packages(tmp_path).items()
    package = structure.measure(name, folder)
    assert package.rooms == {
        "__main__": frozenset({"api"}),
        "api": frozenset({"store"}),
        "store": frozenset({"errors"}),
        "errors": frozenset(),
    }
    assert package.num_arrows == 3
    assert structure.floors(package.rooms) == {"errors": 0, "store": 1, "api": 2, "__main__": 3}
    assert {folder.name: folder.count for folder in package.folders} == {".": 2, "api": 1}
    assert len(package.modules) == 4
    assert list(structure.problems(package)) == []


def test_a_circle_of_modules_is_a_problem(structure: ModuleType, tmp_path: Path) -> None:
    """An import for type checkers closes it, and so does one in a function."""
    lazy = "def fail() -> None:\n    from structure_sample.api.serve import serve\n"
    package = structure.measure(PACKAGE, write(tmp_path, FILES | {"errors.py": lazy}))
    assert package.module_circles == [["api.serve", "errors", "store"]]
    assert package.room_circles == [["api", "errors", "store"]]
    found = list(structure.problems(package))
    assert len(found) == 2
    assert all("import each other" in line and "errors" in line for line in found)


def test_rooms_can_be_in_a_circle_without_their_modules(structure: ModuleType, tmp_path: Path) -> None:
    files = FILES | {"store.py": "import structure_sample.api.names\n\n\ndef read() -> None: ...\n", "api/names.py": ""}
    package = structure.measure(PACKAGE, write(tmp_path, files))
    assert package.module_circles == []
    assert package.room_circles == [["api", "store"]]


def test_members_of_a_circle_share_a_floor(structure: ModuleType) -> None:
    arrows = {"top": {"left"}, "left": {"right"}, "right": {"left", "low"}, "low": set()}
    arrows = {name: frozenset(imported) for name, imported in arrows.items()}
    assert structure.circles(arrows) == [["left", "right"]]
    assert structure.floors(arrows) == {"low": 0, "left": 1, "right": 1, "top": 2}


def test_a_folder_may_have_fifteen_modules(structure: ModuleType, tmp_path: Path) -> None:
    files = FILES | {f"wide/module_{number}.py": "" for number in range(15)}
    files |= {"wide/__init__.py": "", "wide/__main__.py": ""}
    assert list(structure.problems(structure.measure(PACKAGE, write(tmp_path, files)))) == []
    [problem] = structure.problems(structure.measure(PACKAGE, write(tmp_path, {"wide/one_more.py": ""})))
    assert problem == f"{PACKAGE}/wide: 16 modules in a folder, at most 15 are expected"


@pytest.mark.parametrize(
    ("methods", "docstring", "is_problem"),
    [
        (20, "A class.", False),
        (21, "A class.", True),
        (21, "A class.\n\n    Methods: one for each verb of the protocol.\n    ", False),
        (21, "A class.\n\n    Methods:\n    ", True),
    ],
)
def test_a_class_may_have_twenty_methods_or_a_reason(
    structure: ModuleType, tmp_path: Path, methods: int, docstring: str, is_problem: bool
) -> None:
    folder = write(tmp_path, FILES | {"errors.py": class_with(methods, docstring)})
    found = list(structure.problems(structure.measure(PACKAGE, folder)))
    assert len(found) == is_problem
    assert all(f"{PACKAGE}.errors.Big: 21 methods" in line for line in found)


def test_a_property_with_a_setter_is_one_method(structure: ModuleType, tmp_path: Path) -> None:
    accessors = "    @property\n    def size(self): ...\n    @size.setter\n    def size(self, value): ...\n"
    text = f"class Small:\n{accessors}"
    package = structure.measure(PACKAGE, write(tmp_path, FILES | {"errors.py": text}))
    assert [(each.name, each.count) for each in package.classes] == [("errors.Small", 1)]


def test_the_command_prints_a_table_checks_and_draws(
    structure: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, FILES)
    assert structure.main(["--root", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"| {PACKAGE} | 4 | 3 | 4 | 0, 0 | 4 | . 2 |" in printed
    assert structure.main(["--root", str(tmp_path), "--check"]) == 0
    write(tmp_path, {"errors.py": class_with(30)})
    assert structure.main(["--root", str(tmp_path), "--check"]) == 1
    assert "30 methods" in capsys.readouterr().err
    drawing = tmp_path / "rooms.svg"
    assert structure.main(["--root", str(tmp_path), "--draw", str(drawing)]) == 0
    text = drawing.read_text()
    assert all(f">{room}</text>" in text for room in ("__main__", "api", "store", "errors"))
    assert text.count('class="arrow"') == 3


def test_what_the_command_can_not_measure_is_named(
    structure: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        structure.main(["--root", str(tmp_path)])
    assert "no package" in capsys.readouterr().err
    write(tmp_path, FILES)
    with pytest.raises(SystemExit):
        structure.main(["--root", str(tmp_path), "--package", "other"])
    assert PACKAGE in capsys.readouterr().err
