"""What callers are checked against, as the settings name it."""

from dataclasses import dataclass, field

from pagestream_streams.tasks import Periodic

from pagestream_gateway.core.identities.api_keys import KeyFile
from pagestream_gateway.core.identities.authenticator import Authenticator, CertificateChecker, TokenChecker
from pagestream_gateway.settings import GatewaySettings


@dataclass(frozen=True)
class Identities:
    """The checks of a process' callers, and the tasks that keep them up to date once they are started."""

    authenticator: Authenticator
    watches: list[Periodic] = field(default_factory=list)


def load_identities(settings: GatewaySettings) -> Identities:
    """Read the files that the settings name. Raises SettingsError for one that is wrong."""
    watches: list[Periodic] = []
    key_file = None if settings.api_keys is None else KeyFile(settings.api_keys)
    if key_file is not None:
        watches.append(key_file.watch())
    tokens: TokenChecker | None = None
    if settings.jwt_issuers is not None:
        from pagestream_gateway.core.identities.issuers import read_issuers
        from pagestream_gateway.core.identities.tokens import Tokens

        tokens = Tokens(read_issuers(settings.jwt_issuers))
        watches += tokens.watches()
    certificates: CertificateChecker | None = None
    if settings.tls_client_tenants is not None:
        from pagestream_gateway.core.identities.certificates import CertificateRules

        rules = CertificateRules(settings.tls_client_tenants)
        watches.append(rules.watch())
        certificates = rules
    return Identities(Authenticator(None if key_file is None else key_file.keys, tokens, certificates), watches)
