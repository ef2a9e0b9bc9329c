import hashlib
import json
from pathlib import Path

import pytest
from pagestream_gateway.core.identities.api_keys import KeyFile, read_key_file
from pagestream_gateway.core.identities.identity import Identity
from pagestream_gateway.errors import SettingsError, Unauthenticated


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.mark.parametrize(
    "text",
    [
        f"# ours\n{sha256('ka')} -> a\n\nsha256:{sha256('kb').upper()} b  # theirs\n",
        json.dumps({sha256("ka"): "a", f"sha256:{sha256('kb')}": "b"}),
    ],
)
def test_lines_and_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    keys = KeyFile(path).keys
    assert keys.identity("ka") == Identity("a", sha256("ka")[:12])
    assert keys.identity("kb") == Identity("b", sha256("kb")[:12])
    for wrong in ("", "kA", sha256("ka"), "\xff", "\udcff"):
        with pytest.raises(Unauthenticated):
            keys.identity(wrong)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no key"),
        ("secret tenant", ":1: expected the 64 hexadecimal"),
        (f"{sha256('k')}", ":1: expected '<sha256> -> <tenant>'"),
        (f"{sha256('k')} bad/name", "not a tenant name"),
        (f"{sha256('k')} a\n{sha256('k')} b", ":2: the same key"),
        ("{", "not valid JSON"),
        (json.dumps({f"{sha256('k')}\n": "a"}), "expected the 64 hexadecimal"),
        (json.dumps({sha256("k"): "a\n"}), "not a tenant name"),
        (json.dumps({sha256("k"): "\N{CYRILLIC SMALL LETTER A}cme"}), "not a tenant name"),
        ('{"x": 5}', "must be an object"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(SettingsError, match="--api-keys") as caught:
        KeyFile(path)
    assert expected in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read"):
        read_key_file(tmp_path / "none")


def test_a_changed_file_holds_at_once_and_a_wrong_one_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{sha256('a')} -> a\n")
    file = KeyFile(path)

    def tenant(key: str) -> str:
        return file.keys.identity(key).tenant

    path.write_text(f"{sha256('b')} -> b\n")
    assert tenant("a") == "a"
    assert file.refresh()
    assert tenant("b") == "b"
    with pytest.raises(Unauthenticated):
        tenant("a")
    for wrong in ("no hash -> x\n", "{"):
        path.write_text(wrong)
        assert not file.refresh()
        assert tenant("b") == "b"
    path.unlink()
    assert not file.refresh()
    assert tenant("b") == "b"
    path.write_text("# the last key was revoked\n")
    assert file.refresh()
    with pytest.raises(Unauthenticated):
        tenant("b")
