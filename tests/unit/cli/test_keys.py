"""`pagestream keys` on the file that a gateway reads."""

from pathlib import Path

import pytest
from pagestream_cli.__main__ import main
from pagestream_gateway.core.auth import KeyFile
from pagestream_gateway.errors import Unauthenticated


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
    assert [gateway.authenticator.tenant(f"Bearer {key}") for key in made] == ["a", "b"]
    assert keys(file, "list") == 0
    shown = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in shown] == ["a", "b"]
    assert keys(file, "revoke", made[0]) == 0
    assert gateway.refresh()
    with pytest.raises(Unauthenticated):
        gateway.authenticator.tenant(f"Bearer {made[0]}")
    assert keys(file, "revoke", shown[1].split()[0]) == 0
    assert gateway.refresh()
    with pytest.raises(Unauthenticated):
        gateway.authenticator.tenant(f"Bearer {made[1]}")


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
