"""Where an issuer's keys come from: a file, or an address that is asked now and then."""

import asyncio
import hashlib
import logging
import ssl
import time
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import httpx2
from pagestream_streams.tasks import Periodic, wait_for_event

from pagestream_gateway.core.identities.issuers import Issuer
from pagestream_gateway.core.identities.key_sets import MAX_SET_BYTES, KeySet, KeySetError, parse_key_set
from pagestream_gateway.errors import SettingsError

logger = logging.getLogger(__name__)

_FILE_PERIOD_S = 5.0
_URL_PERIOD_S = 300.0
"""Between two fetches. Issuers keep a key in the set for hours after they have ceased to use it."""
_FETCH_LIMIT_S = 10.0
_REFETCH_S = 30.0
"""Between two fetches for a key that is not in the set: anybody can send tokens that name one."""
_RETRY_S = 5.0
"""Between two fetches while there has been no set at all."""
_WAIT_S = 5.0
"""That a call waits for such a fetch."""


class KeySource(Protocol):
    """An issuer's keys, kept up to date while `watch`'s task runs."""

    @property
    def current(self) -> KeySet | None:
        """The keys; None while there have been none since the start."""

    async def renewed(self) -> KeySet | None:
        """Return the keys after a try to renew them, for a token whose key is not there."""

    async def reload(self) -> None:
        """Read or fetch the keys now. A failure is logged, and leaves them."""

    def watch(self) -> Periodic:
        """Return the task that keeps them up to date, once it is started."""


class FileSource:
    """Keys in a file, read again when it changes."""

    def __init__(self, path: Path) -> None:
        """Read it. Raises SettingsError where that fails."""
        self._path = path
        try:
            self._set = parse_key_set(_read(path))
        except (OSError, KeySetError) as error:
            raise SettingsError(f"--jwt-issuers: jwks_file {path}: {error}") from error

    @property
    def current(self) -> KeySet:
        """The keys."""
        return self._set

    async def renewed(self) -> KeySet:
        """Return the keys; the file is read periodically alone."""
        return self._set

    async def reload(self) -> None:
        """Read the file now."""
        self.refresh()

    def refresh(self) -> bool:
        """Read the file; return whether it has changed. A file that can't be used is logged, and leaves the keys."""
        try:
            data = _read(self._path)
            if hashlib.sha256(data).digest() == self._set.digest:
                return False
            self._set = parse_key_set(data)
        except (OSError, KeySetError) as error:
            logger.warning("the keys of %s stay as they were: %s", self._path, error)
            return False
        logger.info("loaded %d keys from %s", len(self._set.keys), self._path)
        return True

    def watch(self) -> Periodic:
        """Return a task that calls `refresh` periodically, once it is started."""

        async def work() -> None:
            self.refresh()

        return Periodic("JWKS file", _FILE_PERIOD_S, work)


class UrlSource:
    """Keys at an address. They are kept while it can't be reached, or answers with something else."""

    def __init__(self, url: str, ca: Path | None = None) -> None:
        """`ca`: PEM file of the authorities for it. Raises SettingsError where that can't be read."""
        self._url = url
        self._is_local = urlsplit(url).scheme == "http"
        self._ca = ca
        self._context()
        self._set: KeySet | None = None
        self._fetched = asyncio.Event()
        self._asked_at = -_REFETCH_S
        self._task = Periodic("JWKS", _URL_PERIOD_S, self.reload)

    @property
    def current(self) -> KeySet | None:
        """The keys; None while none have been fetched."""
        return self._set

    async def renewed(self) -> KeySet | None:
        """Return the keys after a fetch, or as they are where the last one for an unknown key was short ago."""
        if time.monotonic() - self._asked_at >= (_RETRY_S if self._set is None else _REFETCH_S):
            self._asked_at = time.monotonic()
            self._fetched = asyncio.Event()
            self._task.nudge()
        await wait_for_event(self._fetched, _WAIT_S)  # calls that come meanwhile wait for the same fetch
        return self._set

    async def reload(self) -> None:
        """Fetch the keys once. A failure is logged."""
        fetched = self._fetched
        try:
            data = await self._read()
            if self._set is None or hashlib.sha256(data).digest() != self._set.digest:
                found = await asyncio.to_thread(parse_key_set, data)
                if self._set is None:
                    self._asked_at = -_REFETCH_S  # calls asked for the first set, not for a new key
                self._set = found
                logger.info("loaded %d keys from %s", len(self._set.keys), self._url)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, TimeoutError, KeySetError, SettingsError) as error:
            logger.warning("cannot load keys from %s: %s: %s", self._url, type(error).__name__, error)
        finally:
            fetched.set()

    def watch(self) -> Periodic:
        """Return the task that fetches periodically, once it is started."""
        return self._task

    async def _read(self) -> bytes:
        context = await asyncio.to_thread(self._context)  # reads the system's authorities
        async with (
            asyncio.timeout(_FETCH_LIMIT_S),
            httpx2.AsyncClient(
                verify=context, timeout=_FETCH_LIMIT_S, follow_redirects=False, trust_env=not self._is_local
            ) as client,
            client.stream("GET", self._url, headers={"Accept-Encoding": "identity"}) as answer,
        ):
            if answer.status_code != httpx2.codes.OK:
                raise KeySetError(f"status {answer.status_code}")
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise KeySetError("the answer is compressed")
            data = bytearray()
            async for part in answer.aiter_raw():
                data += part
                if len(data) > MAX_SET_BYTES:
                    raise KeySetError(f"more than {MAX_SET_BYTES} bytes")
            return bytes(data)

    def _context(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=None if self._ca is None else str(self._ca))
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(f"--jwt-issuers: jwks_ca {self._ca}: {error}") from error


def source_of(issuer: Issuer) -> KeySource:
    """Return where an issuer's keys come from. Raises SettingsError where its files can't be read."""
    if issuer.jwks_file is not None:
        return FileSource(Path(issuer.jwks_file))
    return UrlSource(issuer.jwks_url or "", None if issuer.jwks_ca is None else Path(issuer.jwks_ca))


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_SET_BYTES + 1)
