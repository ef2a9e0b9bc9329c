"""EnginePool as pydantic models. `pagestream_operator.crd` generates the CustomResourceDefinition from them."""

from pagestream_operator.api.base import API_VERSION, GROUP, KIND, PLURAL, VERSION, ApiModel
from pagestream_operator.api.pool import (
    Condition,
    ConditionType,
    EnginePool,
    EnginePoolStatus,
    LearnedStatus,
    ScalingStatus,
)
from pagestream_operator.api.spec import AdapterStatus, EnginePoolSpec, PoolAdapter

__all__ = [
    "API_VERSION",
    "GROUP",
    "KIND",
    "PLURAL",
    "VERSION",
    "AdapterStatus",
    "ApiModel",
    "Condition",
    "ConditionType",
    "EnginePool",
    "EnginePoolSpec",
    "EnginePoolStatus",
    "LearnedStatus",
    "PoolAdapter",
    "ScalingStatus",
]
