"""Who may export to the sink: a certificate and a token in files, which are read again when they change."""

from __future__ import annotations

import hmac
import logging
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc

from pagestream_operator.errors import SinkFileInvalid

_READ_AGAIN_S = 1.0
_PREFIX = "Bearer "
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SinkAccessSettings:
    """Files of the sink's certificate and token; None where it has none."""

    certificate_file: Path | None = None
    """PEM, with the chain. Each connection gets the certificate that is in the file then."""
    key_file: Path | None = None
    token_file: Path | None = None
    """The token that senders must have, one or several, one a line."""
    rotation_s: float = 600.0
    """Seconds for which a replaced token still counts: senders get the new one at another time than the sink, a mounted
    Secret within about a minute and some only by a restart."""


class SinkAccess:
    """Credentials for the server, and the check of each export's token."""

    def __init__(self, settings: SinkAccessSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the files.

        Raises:
            SinkFileInvalid: a file can't be read, or has no token in it.
        """
        self._settings, self._clock = settings, clock
        self._pair = self._read_pair()
        self._tokens: frozenset[bytes] = frozenset()
        self._until: dict[bytes, float] = {}
        """Replaced tokens, and when they cease to count."""
        self._read_s = clock()
        if settings.token_file is not None:
            self._tokens = _tokens_in(settings.token_file)

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """TLS credentials that follow the files; None without a certificate."""
        if self._pair is None:
            return None
        first = grpc.ssl_server_certificate_configuration([self._pair])
        return grpc.dynamic_ssl_server_credentials(first, self._renewed)  # type: ignore[arg-type]

    def admits(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
        """Whether an export with these headers may be stored."""
        if self._settings.token_file is None:
            return True
        self._read_token_again()
        given = next((value for name, value in metadata or () if name == "authorization"), "")
        text = given if isinstance(given, str) else given.decode(errors="replace")
        if not text.startswith(_PREFIX):
            return False
        token = text.removeprefix(_PREFIX).strip().encode()
        return any(hmac.compare_digest(token, known) for known in (*self._tokens, *self._until))

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """The certificate for a new connection; None: as before. Called by gRPC, in a thread of its own."""
        try:
            found = self._read_pair()
        except SinkFileInvalid as error:
            _logger.warning("the sink keeps its certificate: %s", error)
            return None
        if found is None or found == self._pair:
            return None
        self._pair = found
        _logger.info("the sink has a new certificate")
        return grpc.ssl_server_certificate_configuration([found])

    def _read_pair(self) -> tuple[bytes, bytes] | None:
        certificate, key = self._settings.certificate_file, self._settings.key_file
        if certificate is None or key is None:
            return None
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, "")  # the two belong together
            return key.read_bytes(), certificate.read_bytes()
        except OSError as error:
            raise SinkFileInvalid(
                f"the certificate of the metrics sink ({certificate}, {key}) can't be used: {error}"
            ) from error

    def _read_token_again(self) -> None:
        file, now = self._settings.token_file, self._clock()
        if file is None or now - self._read_s < _READ_AGAIN_S:
            return
        self._read_s = now
        self._until = {token: until for token, until in self._until.items() if until > now}
        try:
            found = _tokens_in(file)
        except SinkFileInvalid as error:
            _logger.warning("the sink keeps its token: %s", error)
            return
        if found != self._tokens:
            replaced = self._tokens - found
            self._until |= dict.fromkeys(replaced, now + self._settings.rotation_s)
            self._tokens = found
            _logger.info("the sink has a new token", extra={"seconds": self._settings.rotation_s})


def _tokens_in(file: Path) -> frozenset[bytes]:
    try:
        found = frozenset(file.read_bytes().split())
    except OSError as error:
        raise SinkFileInvalid(f"the token of the metrics sink can't be read: {error}") from error
    if not found:
        raise SinkFileInvalid(f"{file} has no token: write one or several, one a line")
    return found
