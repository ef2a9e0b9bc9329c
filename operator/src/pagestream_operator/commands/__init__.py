"""What a Helm hook runs once: `pagestream-operator apply-crd` and `pagestream-operator delete-pools`."""

from pagestream_operator.commands.apply_crd import apply_crd
from pagestream_operator.commands.delete_pools import delete_pools

__all__ = ["apply_crd", "delete_pools"]
