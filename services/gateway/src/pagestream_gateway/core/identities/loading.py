"""What callers are checked against, as the settings name it."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from pagestream_streams.tasks import Periodic

from pagestream_gateway.core.identities.api_keys import KeyFile
from pagestream_gateway.core.identities.authenticator import Authenticator, CertificateChecker, TokenChecker
from pagestream_gateway.settings import GatewaySettings


class Reload(NamedTuple):
    """Something that is read again when it changes."""

    name: str
    """The setting that names it."""
    run: Callable[[], Awaitable[bool]]
    """Reads it now; returns whether it has changed. What is wrong with it is logged."""


class Refreshable(Protocol):
    """A file that is read again when it changes."""

    def refresh(self) -> bool:
        """Read the file; return whether it has changed."""

    def watch(self) -> Periodic:
        """Return a task that calls `refresh` periodically, once it is started."""


class Identities:
    """The checks of a process' callers, and the tasks that keep them up to date once they are started."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Read the files that the settings name. Raises SettingsError for one that is wrong."""
        self.watches: list[Periodic] = []
        self.reloads: list[Reload] = []
        keys = None if settings.api_keys is None else KeyFile(settings.api_keys)
        administrators = None if settings.admin_keys is None else KeyFile(settings.admin_keys, "--admin-keys")
        for name, file in (("api_keys", keys), ("admin_keys", administrators)):
            if file is not None:
                self._watch(name, file)
        self.authenticator = Authenticator(
            None if keys is None else keys.keys,
            self._tokens(settings),
            self._certificates(settings),
            None if administrators is None else administrators.keys,
        )

    def _tokens(self, settings: GatewaySettings) -> TokenChecker | None:
        if settings.jwt_issuers is None:
            return None
        from pagestream_gateway.core.identities.issuers import read_issuers
        from pagestream_gateway.core.identities.tokens import Tokens

        tokens = Tokens(read_issuers(settings.jwt_issuers))
        self.watches += tokens.watches()
        self.reloads.append(Reload("jwt_issuers", tokens.reload))
        return tokens

    def _certificates(self, settings: GatewaySettings) -> CertificateChecker | None:
        if settings.tls_client_tenants is None:
            return None
        from pagestream_gateway.core.identities.certificates import CertificateRules

        rules = CertificateRules(settings.tls_client_tenants)
        self._watch("tls_client_tenants", rules)
        return rules

    def _watch(self, name: str, file: Refreshable) -> None:
        async def run() -> bool:
            return file.refresh()

        self.watches.append(file.watch())
        self.reloads.append(Reload(name, run))
