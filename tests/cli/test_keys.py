"""`pagestream keys` on the file that a gateway reads."""

import os
import stat
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from pagestream_cli.__main__ import main
from pagestream_gateway import GatewayError
from pagestream_gateway.auth.authenticator import KeyFile

pytestmark = pytest.mark.served


def keys(file: Path, *arguments: str) -> int:
    action, *others = arguments
    return main(["keys", action, "--file", str(file), *others])


def test_a_key_is_made_listed_used_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "folder" / "keys"
    made = []
    for tenant in ("a", "b"):
        assert keys(file, "new", tenant, "--note", f"of {tenant}") == 0
        made.append(capsys.readouterr().out.strip())
    assert file.stat().st_mode & 0o777 == 0o600
    assert not any(key in file.read_text() for key in made)
    gateway = KeyFile(file)
    assert [gateway.keys.identity(key).tenant for key in made] == ["a", "b"]
    assert keys(file, "list") == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in shown] == ["a", "b"]
    assert keys(file, "revoke", made[0]) == 0
    assert gateway.refresh()
    with pytest.raises(GatewayError):
        gateway.keys.identity(made[0])
    assert keys(file, "revoke", shown[1].split()[0]) == 0
    assert gateway.refresh()
    with pytest.raises(GatewayError):
        gateway.keys.identity(made[1])


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        ("", ("new", "a/b"), "not a tenant's name"),
        ("nonsense\n", ("new", "a"), "line 1 is not"),
        ("{}", ("new", "a"), "is a JSON object"),
        (f"{'a' * 64} -> a\n{'a' * 63}b -> b\n", ("revoke", "a" * 8), "2 hashes begin with"),
        (f"{'a' * 64} -> a\n", ("revoke", "b" * 8), "has no such key"),
    ],
)
def test_what_is_wrong_is_said_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, arguments: tuple[str, ...], expected: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    assert keys(file, *arguments) != 0
    assert expected in capsys.readouterr().err
    assert file.read_text() == text


def make(file: Path, tenant: str) -> int:
    return keys(file, "new", tenant)


def test_keys_that_are_made_at_once_are_all_kept(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    tenants = [f"tenant-{number}" for number in range(32)]
    with ProcessPoolExecutor(8, mp_context=get_context("fork")) as pool:
        assert not any(pool.map(make, [file] * len(tenants), tenants))
    assert sorted(line.split()[2] for line in file.read_text().splitlines()) == sorted(tenants)


def test_owner_group_mode_and_link_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, link = tmp_path / "keys", tmp_path / "link"
    link.symlink_to(file)
    assert keys(link, "new", "a") == 0
    file.chmod(0o640)
    own = Path.stat
    given: list[tuple[str, int, int]] = []

    def of_another(path: Path, **options: Any) -> os.stat_result:
        found = own(path, **options)
        fields = list(found)
        if path == file:
            fields[stat.ST_UID], fields[stat.ST_GID] = 4711, 4712
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "stat", of_another)
    monkeypatch.setattr(os, "chown", lambda path, uid, gid: given.append((Path(path).name, uid, gid)))
    assert keys(link, "new", "b") == 0
    assert [owner for _, *owner in given] == [[4711, 4712]] * 2
    assert link.is_symlink()
    assert len(file.read_text().splitlines()) == 2
    assert own(file).st_mode & 0o777 == 0o640


def test_a_file_that_would_change_its_owner_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    assert keys(file, "new", "a") == 0
    text, own = file.read_text(), Path.stat

    def of_another(path: Path, **options: Any) -> os.stat_result:
        fields = list(own(path, **options))
        fields[stat.ST_UID] = 4711 if path == file else fields[stat.ST_UID]
        return os.stat_result(fields)

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "stat", of_another)
    monkeypatch.setattr(os, "chown", refuse)
    assert keys(file, "new", "b") == 2
    assert "belongs to user 4711" in capsys.readouterr().err
    assert file.read_text() == text
    assert {each.name for each in tmp_path.iterdir()} == {"keys", "keys.lock"}
