"""What an installation runs around the operator's life: `pagestream-operator apply-crd` and `delete-pools`."""

from pagestream_operator.hooks.crd import apply_crd
from pagestream_operator.hooks.pools import delete_pools

__all__ = ["apply_crd", "delete_pools"]
