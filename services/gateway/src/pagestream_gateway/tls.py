"""The gateway's certificate: read from files, and read again when they change, since certificates are renewed while a
process runs. Open connections keep the one that they began with.
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
_LOOK_PERIOD_S = 10.0  # two small files; a renewed certificate is there days before the old one ends


class _Pair(NamedTuple):
    certificate: bytes
    key: bytes


class Certificate:
    """A certificate chain and its private key, in PEM files."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises SettingsError where a file can't be read, or they don't belong together."""
        self._certificate_file, self._key_file = certificate, key
        self._context = _server_context()
        try:
            self._pair = self._read()
            self._load(self._context)
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(f"--tls-certificate {certificate}, --tls-key {key}: {error}") from error

    @property
    def context(self) -> ssl.SSLContext:
        """For servers of asyncio: new connections get what was read last."""
        return self._context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For gRPC's server: new connections get what was read last."""
        told = self._pair

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """None: nothing new since the last handshake. Called from gRPC's own threads."""
            nonlocal told
            if told is self._pair:
                return None
            told = self._pair
            return _configuration(told)

        # None is an answer that gRPC documents, and its types leave out.
        fetcher = cast(Callable[[], grpc.ServerCertificateConfiguration], fetch)
        return grpc.dynamic_ssl_server_credentials(_configuration(told), fetcher)

    def refresh(self) -> bool:
        """Takes what is in the files now; False where that is nothing new, or nothing that works (which is logged)."""
        try:
            pair = self._read()
            if pair == self._pair:
                return False
            self._load(_server_context())
            if self._read() != pair:
                return False  # they are being written just now: the next look finds both
            self._load(self._context)
        except (OSError, ssl.SSLError) as error:
            logger.warning("the certificate in %s is not taken: %s", self._certificate_file, error)
            return False
        self._pair = pair
        logger.info("the certificate in %s is another one", self._certificate_file)
        return True

    def watch(self) -> Periodic:
        """Looks at the files again and again, once it is started."""

        async def look() -> None:
            self.refresh()

        return Periodic("certificate", _LOOK_PERIOD_S, look)

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
