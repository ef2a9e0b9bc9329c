"""The gateway's certificate, reloaded when its files change, since certificates are renewed while a process runs.

Open connections keep the certificate that they began with.
"""

import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

import grpc
from pagestream_streams.tasks import Periodic

from pagestream_gateway.errors import SettingsError

logger = logging.getLogger(__name__)
_RELOAD_PERIOD_S = 10.0  # two small files; a renewed certificate is there days before the old one expires


class _Pair(NamedTuple):
    certificate: bytes
    key: bytes


class Certificate:
    """A certificate chain and its private key, in PEM files."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Load both files. Raises SettingsError where one can't be read, or they don't belong together."""
        self._certificate_file, self._key_file = certificate, key
        self._context = _server_context()
        try:
            self._pair = self._read()
            self._load(self._context)
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(f"--tls-certificate {certificate}, --tls-key {key}: {error}") from error

    @property
    def context(self) -> ssl.SSLContext:
        """The context for asyncio's servers; new connections get the certificate that was loaded last."""
        return self._context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for gRPC's server; new connections get the certificate that was loaded last."""
        used = self._pair

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """Return a new pair, None where there is none since the last handshake. Called from gRPC's own threads."""
            nonlocal used
            if used is self._pair:
                return None
            used = self._pair
            return _configuration(used)

        # gRPC documents None as an answer; its types leave it out.
        fetcher = cast(Callable[[], grpc.ServerCertificateConfiguration], fetch)
        return grpc.dynamic_ssl_server_credentials(_configuration(used), fetcher)

    def refresh(self) -> bool:
        """Load the files; return whether they hold a new certificate. One that can't be used is logged and ignored."""
        try:
            pair = self._read()
            if pair == self._pair:
                return False
            self._load(_server_context())
            if self._read() != pair:
                return False  # the files are being written: the next call finds both
            self._load(self._context)
        except (OSError, ssl.SSLError) as error:
            logger.warning("cannot use the certificate in %s: %s", self._certificate_file, error)
            return False
        self._pair = pair
        logger.info("loaded a new certificate from %s", self._certificate_file)
        return True

    def watch(self) -> Periodic:
        """Return a task that calls `refresh` periodically, once it is started."""

        async def work() -> None:
            self.refresh()

        return Periodic("certificate", _RELOAD_PERIOD_S, work)

    def _read(self) -> _Pair:
        return _Pair(self._certificate_file.read_bytes(), self._key_file.read_bytes())

    def _load(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self._certificate_file, self._key_file, password="")


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _configuration(pair: _Pair) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)])
