"""The API of the operator: `EnginePool`, typed. `pagestream_operator.crd` makes the definition from these models."""

from pagestream_operator.api.base import API_VERSION, GROUP, KIND, PLURAL, VERSION
from pagestream_operator.api.pool import EnginePool
from pagestream_operator.api.spec import EnginePoolSpec
from pagestream_operator.api.status import Condition, ConditionType, EnginePoolStatus, ScalingStatus

__all__ = [
    "API_VERSION",
    "GROUP",
    "KIND",
    "PLURAL",
    "VERSION",
    "Condition",
    "ConditionType",
    "EnginePool",
    "EnginePoolSpec",
    "EnginePoolStatus",
    "ScalingStatus",
]
