"""The gateway's certificate and the authorities of its clients', reloaded when their files change.

Open connections keep what they began with.
"""

import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import grpc
from pagestream_streams.tasks import Periodic

from pagestream_gateway.errors import SettingsError
from pagestream_gateway.settings import CERTIFICATES_REQUIRED, GatewaySettings

logger = logging.getLogger(__name__)
_RELOAD_PERIOD_S = 10.0  # two or three small files; a renewed certificate is there days before the old one expires
_UNUSABLE = (OSError, ssl.SSLError, ValueError)


class _Files(NamedTuple):
    certificate: bytes
    key: bytes
    client_ca: bytes | None


class _LatestContext(ssl.SSLContext):
    """Gives each new connection the context that was loaded last: authorities can't be taken out of one."""

    latest: ssl.SSLContext

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        """Return the connection's TLS object. Servers of asyncio and uvloop call this and nothing else."""
        return self.latest.wrap_bio(*args, **options)


class Certificate:
    """A certificate chain and its private key, and the authorities that clients' certificates come from: PEM files."""

    def __init__(
        self, certificate: Path, key: Path, client_ca: Path | None = None, *, requires_clients: bool = True
    ) -> None:
        """Load the files. Raises SettingsError where one can't be read, or they don't belong together.

        `requires_clients`: whether a client must have a certificate, where there is a `client_ca`.
        """
        self._certificate_file, self._key_file, self._ca_file = certificate, key, client_ca
        self._requires_clients = requires_clients
        self._context = _LatestContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            self._files = self._read()
            self._context.latest = self._loaded(self._files)
        except _UNUSABLE as error:
            named = f"--tls-certificate {certificate}, --tls-key {key}"
            if client_ca is not None:
                named += f", --tls-client-ca {client_ca}"
            raise SettingsError(f"{named}: {error}") from error

    @property
    def context(self) -> ssl.SSLContext:
        """The context for asyncio's servers; new connections get what was loaded last."""
        return self._context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for gRPC's server; new connections get what was loaded last.

        gRPC's server for Python asks for a client's certificate only where it is required.
        """
        used = self._files

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """Return new files, None where there are none since the last handshake. Called from gRPC's own threads."""
            nonlocal used
            if used is self._files:
                return None
            used = self._files
            return _configuration(used)

        # gRPC documents None as an answer; its types leave it out.
        fetcher = cast(Callable[[], grpc.ServerCertificateConfiguration], fetch)
        is_required = self._ca_file is not None and self._requires_clients
        return grpc.dynamic_ssl_server_credentials(_configuration(used), fetcher, is_required)

    def refresh(self) -> bool:
        """Load the files; return whether one is new. Files that can't be used are logged and ignored."""
        try:
            files = self._read()
            if files == self._files:
                return False
            context = self._loaded(files)
            if self._read() != files:
                return False  # the files are being written: the next call finds all
        except _UNUSABLE as error:
            logger.warning("cannot use the certificate in %s: %s", self._certificate_file, error)
            return False
        self._files, self._context.latest = files, context
        logger.info("loaded a new certificate from %s", self._certificate_file)
        return True

    def watch(self) -> Periodic:
        """Return a task that calls `refresh` periodically, once it is started."""

        async def work() -> None:
            self.refresh()

        return Periodic("certificate", _RELOAD_PERIOD_S, work)

    def _read(self) -> _Files:
        client_ca = None if self._ca_file is None else self._ca_file.read_bytes()
        return _Files(self._certificate_file.read_bytes(), self._key_file.read_bytes(), client_ca)

    def _loaded(self, files: _Files) -> ssl.SSLContext:
        # A new one for each load: OpenSSL adds authorities to a context and never removes one.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self._certificate_file, self._key_file, password="")
        if files.client_ca is not None:
            context.load_verify_locations(cadata=files.client_ca.decode("ascii"))
            context.verify_mode = ssl.CERT_REQUIRED if self._requires_clients else ssl.CERT_OPTIONAL
        return context


def load_certificate(settings: GatewaySettings) -> Certificate | None:
    """Return what the settings name, None where they ask for no TLS. Raises SettingsError."""
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    requires_clients = settings.tls_client_certificates == CERTIFICATES_REQUIRED
    return Certificate(
        settings.tls_certificate, settings.tls_key, settings.tls_client_ca, requires_clients=requires_clients
    )


def _configuration(files: _Files) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.certificate)], files.client_ca)
