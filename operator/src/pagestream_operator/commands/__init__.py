"""What a Helm hook runs once: `pagestream-operator apply-crd`, `delete-pools` and `release-pools`."""

from pagestream_operator.commands.apply_crd import apply_crd, apply_definition
from pagestream_operator.commands.delete_pools import delete_pools, remove_pools
from pagestream_operator.commands.once import run_once, wait_until
from pagestream_operator.commands.release_pools import release_pools, remove_finalizers

__all__ = [
    "apply_crd",
    "apply_definition",
    "delete_pools",
    "release_pools",
    "remove_finalizers",
    "remove_pools",
    "run_once",
    "wait_until",
]
