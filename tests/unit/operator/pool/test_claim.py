import pytest
from pagestream_operator.pool.claim import Claim, claim_on

OURS, OTHER = "home.pagestream", "models.pagestream"


@pytest.mark.parametrize(
    ("named", "holder", "claim"),
    [
        (None, None, Claim.FREE),
        (None, OURS, Claim.OWN),
        (None, OTHER, Claim.REFUSED),
        (OURS, None, Claim.FREE),
        (OURS, OURS, Claim.OWN),
        (OURS, OTHER, Claim.FREE),
        (OTHER, None, Claim.FOREIGN),
        (OTHER, OURS, Claim.FOREIGN),
        (OTHER, OTHER, Claim.FOREIGN),
    ],
)
def test_what_a_pool_is_to_an_operator(named: str | None, holder: str | None, claim: Claim) -> None:
    spec = {} if named is None else {"controllerClass": named}
    status = {} if holder is None else {"controllerClass": holder}
    assert claim_on({"spec": spec, "status": status}, OURS) is claim
    assert claim_on({"spec": spec, "status": status}, OURS).is_served == (claim in (Claim.OWN, Claim.FREE))
