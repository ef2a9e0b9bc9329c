import hashlib

import pytest
from pagestream_gateway.core.identities.api_keys import ApiKeys
from pagestream_gateway.core.identities.authenticator import Authenticator
from pagestream_gateway.core.identities.identity import Credentials, Identity
from pagestream_gateway.errors import Unauthenticated

DIGEST = hashlib.sha256(b"key").hexdigest()


@pytest.mark.parametrize("given", [None, "Bearer anything"])
async def test_where_no_credential_is_asked_for_every_caller_is_the_default_tenant(given: str | None) -> None:
    assert await Authenticator(None).identify(Credentials(given)) == Identity("default")


async def test_a_key_comes_as_a_bearer() -> None:
    authenticator = Authenticator(ApiKeys({DIGEST: "a"}))
    for given in ("Bearer key", "bearer  key "):
        assert await authenticator.identify(Credentials(given)) == Identity("a", DIGEST[:12])
    for wrong in (None, "", "Bearer", "Bearer ", "Basic key", "key", f"Bearer {DIGEST}", "Bearer \xff"):
        with pytest.raises(Unauthenticated):
            await authenticator.identify(Credentials(wrong))
