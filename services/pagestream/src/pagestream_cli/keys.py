"""`pagestream keys`: make, list and revoke API keys in the file that gateways read."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pagestream_cli.console import say
from pagestream_cli.datadir import DataDir
from pagestream_cli.errors import NotFoundError, UsageError

FILE_NAME = "api-keys"
_GIVEN_FILE, _GIVEN_TENANT = "given-api-keys", "default"
KEY_BYTES = 32
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")
_DIGEST = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
_SHORTEST_PREFIX = 8  # hexadecimal digits of a hash that name a key
_SHOWN_DIGITS = 12


class KeyLine(NamedTuple):
    """A line of the file with a key."""

    number: int
    digest: str
    tenant: str
    note: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of keys."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="make a key, print it once, and add its hash to the file")
    new.add_argument("tenant", metavar="TENANT", help="whose requests are made with it")
    new.add_argument("--note", default="", metavar="TEXT", help="what it is for, kept as a comment")
    listing = actions.add_parser("list", help="show the keys' hashes, tenants and notes")
    revoke = actions.add_parser("revoke", help="remove a key: gateways refuse it within seconds")
    revoke.add_argument(
        "key", metavar="KEY", help=f"the key, or at least {_SHORTEST_PREFIX} digits of its hash as `list` shows them"
    )
    for action in (new, listing, revoke):
        action.add_argument("--file", type=Path, metavar="FILE", help=f"file of keys (default: DIR/{FILE_NAME})")
        action.add_argument("--data-dir", metavar="DIR", help="data folder of serve")


def run(arguments: argparse.Namespace) -> int:
    """Run the action. Returns 0.

    Raises:
        UsageError: the tenant's name, the key or the file is malformed.
        NotFoundError: the file has no such key.
    """
    file: Path = arguments.file or DataDir.at(arguments.data_dir).path / FILE_NAME
    try:
        file = file.expanduser().resolve()  # a link to the file stays one
    except (OSError, RuntimeError) as error:
        raise UsageError(f"{file} can't be read: {error}") from error
    if arguments.action == "list":
        for line in _keys(_lines(file)):
            print(f"{line.digest[:_SHOWN_DIGITS]}  {line.tenant}  {line.note}".rstrip())
        return 0
    with _locked(file):
        if arguments.action == "new":
            _new(file, arguments.tenant, arguments.note)
        else:
            _revoke(file, arguments.key)
    return 0


def write_given_keys(data_dir: DataDir, keys: Sequence[str]) -> Path:
    """Write the hashes of keys that serve was given on its command line; return the file for its gateways.

    They are keys of the tenant of a deployment without keys, so that its requests stay readable.

    Raises:
        UsageError: the file can't be written.
    """
    file = data_dir.path / _GIVEN_FILE
    digests = dict.fromkeys(hashlib.sha256(key.encode()).hexdigest() for key in keys)
    _write(file, [f"{digest} -> {_GIVEN_TENANT}" for digest in digests])
    return file


def _new(file: Path, tenant: str, note: str) -> None:
    if not _TENANT.fullmatch(tenant):
        raise UsageError(
            f"{tenant!r} is not a tenant's name", hint="letters, digits and . _ @ -, up to 128, a letter or digit first"
        )
    if not note.isprintable():
        raise UsageError("--note: a line of text is expected")
    lines = _lines(file)
    _keys(lines)  # a file that gateways would refuse is not added to
    key = f"ps-{secrets.token_urlsafe(KEY_BYTES)}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    made = time.strftime("%Y-%m-%d", time.gmtime())
    _write(file, [*lines, f"{digest} -> {tenant}  # {made}{' ' if note else ''}{note}"])
    print(key)
    say(f"added to {file} for tenant {tenant!r}; the key itself is not kept. A gateway with --api-keys {file} takes it")


def _revoke(file: Path, key: str) -> None:
    lines = _lines(file)
    digest = hashlib.sha256(key.encode()).hexdigest()
    known = _keys(lines)
    found = [line for line in known if line.digest == digest]
    if not found and re.fullmatch(rf"[0-9a-f]{{{_SHORTEST_PREFIX},64}}", key):
        found = [line for line in known if line.digest.startswith(key)]
    if not found:
        raise NotFoundError(f"{file} has no such key", hint="`pagestream keys list` shows the hashes of all")
    if len({line.digest for line in found}) > 1:
        raise UsageError(f"{len(found)} hashes begin with {key}", hint="give more digits")
    gone = {line.number for line in found}
    _write(file, [text for number, text in enumerate(lines) if number not in gone])
    say(f"revoked {found[0].digest[:_SHOWN_DIGITS]} of tenant {found[0].tenant!r}")


def _lines(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} can't be read: {error}") from error
    if text.lstrip().startswith("{"):
        raise UsageError(
            f"{file} is a JSON object", hint="edit it yourself, or write a line `<sha256> -> <tenant>` a key"
        )
    return text.splitlines()


def _keys(lines: Sequence[str]) -> list[KeyLine]:
    found = []
    for number, text in enumerate(lines):
        body, _, note = text.partition("#")
        words = body.replace("->", " ").split()
        if not words:
            continue
        digest = _DIGEST.fullmatch(words[0].lower())
        if len(words) != 2 or digest is None or not _TENANT.fullmatch(words[1]):
            raise UsageError(f"line {number + 1} is not `<sha256> -> <tenant>`", hint="correct it first")
        found.append(KeyLine(number, digest.group(1), words[1], note.strip()))
    return found


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Keep other calls from changing the file until the block ends: each writes the whole of it."""
    lock = file.with_name(f"{file.name}.lock")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"{lock} can't be opened: {error}") from error
    try:
        if file.exists():
            _give(lock, file.stat())  # so that its owner can lock it as well
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(file: Path, lines: Sequence[str]) -> None:
    """Replace the file as a whole: a gateway may read it at any moment. Owner, group and mode stay; a new file is
    readable by its owner alone.
    """
    scratch: Path | None = None
    try:
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as opened:
            scratch = Path(opened.name)
            opened.write("".join(f"{line}\n" for line in lines))
            opened.flush()
            os.fsync(opened.fileno())
        if file.exists():
            former = file.stat()
            _give(scratch, former)
            scratch.chmod(stat.S_IMODE(former.st_mode))
        scratch.replace(file)
        scratch = None
    except OSError as error:
        raise UsageError(f"{file} can't be written: {error}") from error
    finally:
        if scratch is not None:
            scratch.unlink(missing_ok=True)


def _give(path: Path, former: os.stat_result) -> None:
    """Give a new file the owner and group of the file of keys, which a gateway of another user reads."""
    now = path.stat()
    if (now.st_uid, now.st_gid) == (former.st_uid, former.st_gid):
        return
    try:
        os.chown(path, former.st_uid, former.st_gid)
    except PermissionError as error:
        raise UsageError(
            f"the file of keys belongs to user {former.st_uid}, group {former.st_gid}, and would be yours",
            hint="run the command as that user, or as root",
        ) from error
