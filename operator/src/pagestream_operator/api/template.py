"""User-configurable fields of engine pods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from pagestream_operator.api.base import (
    QUALIFIED_NAME,
    ApiModel,
    LabelValue,
    ObjectName,
    QualifiedName,
    Quantity,
    ResourceName,
    Rule,
    VariableName,
)

Text = Annotated[str, Field(max_length=4096)]
LabelMap = Annotated[dict[str, LabelValue], Field(max_length=64)]
PodFragment = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]
"""An object that is passed on to the pod as it is, and checked by the API server there."""


_IS_DIVISIBLE = "name in ['cpu', 'memory', 'ephemeral-storage']"
_IS_RESOURCE = f"({_IS_DIVISIBLE} || name.startsWith('hugepages-') || name.contains('/'))"


class Resources(ApiModel):
    """Requests and limits of the engine's container, as in a pod. GPUs are better written in `gpu`."""

    requests: Annotated[dict[str, Quantity], Field(max_length=32)] | None = None
    """Reserved resources, such as `{cpu: "4", memory: 16Gi}`."""
    limits: Annotated[dict[str, Quantity], Field(max_length=32)] | None = None
    """Upper limits, such as `{memory: 16Gi}`. An engine without a CPU limit isn't throttled in the middle
    of a step."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"(!has(self.requests) || self.requests.all(name, {_IS_RESOURCE})) && "
            f"(!has(self.limits) || self.limits.all(name, {_IS_RESOURCE}))",
            "template.resources names cpu, memory, ephemeral-storage, hugepages-SIZE, or a resource of a domain: "
            "write `nvidia.com/gpu`",
        ),
        Rule(
            "!has(self.requests) || !has(self.limits) || self.requests.all(name, !(name in self.limits) || "
            "quantity(string(self.requests[name])).compareTo(quantity(string(self.limits[name]))) <= 0)",
            "template.resources.requests are at most the limits: raise the limit, or lower the request",
        ),
        Rule(
            f"!has(self.limits) || self.limits.all(name, {_IS_DIVISIBLE} || "
            "quantity(string(self.limits[name])).isInteger())",
            "template.resources gives a resource of a domain as a whole number: write `limits: {nvidia.com/gpu: 1}`",
            ".limits",
        ),
    )


class Gpu(ApiModel):
    """GPUs of each pod."""

    count: Annotated[int, Field(ge=0, le=64)] = 1
    """Number of GPUs: `parallel.tensor` times `parallel.pipeline` of the pool, one for each rank. 0: the engine runs on
    the CPU."""
    type: LabelValue | None = None
    """GPU product, such as `NVIDIA-H200`: pods run on nodes whose label `typeLabel` has this value."""
    type_label: QualifiedName = "nvidia.com/gpu.product"
    """Label of nodes that names their GPU product."""
    resource_name: ResourceName = "nvidia.com/gpu"
    """Resource name of the device plugin's GPUs."""


class EnvironmentVariable(ApiModel):
    """A variable of the engine's container, as in a pod."""

    name: VariableName
    """Its name, such as `PAGESTREAM_WORKER__PARTITIONS`."""
    value: Annotated[str, Field(max_length=32_768)] | None = None
    """Its value. `$(NAME)` is replaced by the value of an earlier variable."""
    value_from: PodFragment | None = None
    """Where its value comes from, as in a pod: secretKeyRef, configMapKeyRef, fieldRef or resourceFieldRef."""


class VolumeMount(ApiModel):
    """A volume in the engine's container, as in a pod."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    """Name of one of `volumes`."""
    mount_path: Annotated[str, Field(min_length=1, max_length=512, pattern="^[^:]+$")]
    """Folder in the container."""
    sub_path: Annotated[str, Field(max_length=512)] | None = None
    """Folder of the volume that is mounted instead of the whole."""
    read_only: bool | None = None
    """Whether nothing may be written to it."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.subPath) || "
            "!self.subPath.startsWith('/') && !self.subPath.split('/').exists(part, part == '..')",
            "subPath is relative to the volume and stays inside it: write `llama`, not `/llama` or `../x`",
            ".subPath",
        ),
    )


class Toleration(ApiModel):
    """A taint of nodes that pods tolerate, as in a pod."""

    key: QualifiedName | None = None
    """Key of the taint. Unset with `operator: Exists`: every taint."""
    operator: Literal["Exists", "Equal"] | None = None
    """Equal, the default, compares the taint's value; Exists doesn't."""
    value: LabelValue | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint. Unset: every effect."""
    toleration_seconds: int | None = None
    """With NoExecute: seconds that a pod stays on a tainted node."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.key) || has(self.operator) && self.operator == 'Exists'",
            "a toleration without a key has `operator: Exists`, and tolerates every taint: write that, or a key",
        ),
        Rule(
            "!has(self.operator) || self.operator != 'Exists' || !has(self.value) || self.value == ''",
            "a toleration with `operator: Exists` has no value: leave it out, or write `operator: Equal`",
            ".value",
        ),
        Rule(
            "!has(self.tolerationSeconds) || has(self.effect) && self.effect == 'NoExecute'",
            "tolerationSeconds needs `effect: NoExecute`: write that, or leave the seconds out",
            ".tolerationSeconds",
        ),
    )


_OWN_VARIABLE = (
    "variable.name.startsWith('PAGESTREAM_ENGINE__') || variable.name in ['PAGESTREAM_WORKER__REDIS', "
    "'PAGESTREAM_WORKER__SERVED_MODEL_NAME', 'PAGESTREAM_WORKER__MODELS', 'PAGESTREAM_WORKER__METRICS_PORT', "
    "'PAGESTREAM_WORKER__ENGINE_ID', 'OTEL_RESOURCE_ATTRIBUTES', 'POD_NAME', 'POD_NAMESPACE', 'POD_UID']"
)


class PodTemplate(ApiModel):
    """The configurable parts of an engine pod. The operator sets the rest: command, probes, ports. A change
    replaces the pods, one by one."""

    image: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^\S+$")] | None = None
    """Image of the engine. Unset: the operator's default."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When the image is pulled. Unset: the operator's default."""
    image_pull_secrets: Annotated[list[ObjectName], Field(max_length=16)] | None = None
    """Names of Secrets to pull the image with. Unset: the operator's default."""
    resources: Resources = Field(default_factory=Resources)
    """Requests and limits of the engine's container."""
    gpu: Gpu | None = None
    """GPUs of each pod. Unset: none."""
    node_selector: LabelMap | None = None
    """Labels that nodes must have."""
    tolerations: Annotated[list[Toleration], Field(max_length=64)] | None = None
    """Taints that pods tolerate."""
    affinity: PodFragment | None = None
    """Affinity to nodes and other pods, as in a pod."""
    topology_spread_constraints: Annotated[list[PodFragment], Field(max_length=16)] | None = None
    """Spread over nodes and zones, as in a pod. Unset: over nodes as far as possible."""
    priority_class_name: ObjectName | None = None
    """Priority class of the pods."""
    runtime_class_name: ObjectName | None = None
    """Runtime class of the pods, such as `nvidia`."""
    volumes: Annotated[list[PodFragment], Field(max_length=64)] | None = None
    """Further volumes, as in a pod."""
    volume_mounts: Annotated[list[VolumeMount], Field(max_length=64)] | None = None
    """Where `volumes` are mounted."""
    env: Annotated[list[EnvironmentVariable], Field(max_length=64)] | None = None
    """Further variables of the engine's container, such as PAGESTREAM_BROKER__RETENTION_S."""
    pod_security_context: PodFragment | None = None
    """Fields of the pods' security context, over the operator's own; null takes one away."""
    security_context: PodFragment | None = None
    """Fields of the container's security context, over the operator's own; null takes one away."""
    service_account_annotations: Annotated[dict[str, Text], Field(max_length=64)] | None = None
    """Annotations of the pods' ServiceAccount, such as a cloud's role with which they read the model."""
    labels: LabelMap | None = None
    """Further labels of the pods."""
    annotations: Annotated[dict[str, Annotated[str, Field(max_length=32_768)]], Field(max_length=64)] | None = None
    """Further annotations of the pods."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"!has(self.env) || self.env.all(variable, !({_OWN_VARIABLE}))",
            "template.env can't set variables that the operator sets: options of the engine are written in "
            "`spec.engine`, such as `engine: {maxNumSeqs: 64}`, and further models in `spec.models`",
            ".env",
        ),
        Rule(
            f"!has(self.resources.requests) || self.resources.requests.all(name, {_IS_DIVISIBLE} || "
            "(has(self.gpu) && self.gpu.count > 0 && name == self.gpu.resourceName ? "
            "string(self.resources.requests[name]) == string(self.gpu.count) : has(self.resources.limits) && "
            "name in self.resources.limits && "
            "string(self.resources.limits[name]) == string(self.resources.requests[name])))",
            "template.resources.requests gives a resource of a domain as its limit does, or as template.gpu.count: "
            "write `limits: {nvidia.com/gpu: 1}` alone",
            ".resources",
        ),
        Rule(
            "!has(self.volumeMounts) || self.volumeMounts.all(mount, "
            "self.volumeMounts.exists_one(other, other.mountPath == mount.mountPath) && "
            "!(mount.mountPath in ['/tmp', '/etc/pagestream-nodes', '/etc/pagestream/chat-template']))",
            "template.volumeMounts has each mountPath once, and neither /tmp nor the engine's own in /etc: choose "
            "another mountPath",
            ".volumeMounts",
        ),
        Rule(
            "!has(self.labels) || self.labels.all(key, !key.startsWith('pagestream.dev/') && "
            "!key.startsWith('app.kubernetes.io/'))",
            "template.labels can't begin with pagestream.dev/ or app.kubernetes.io/, pods are found by those: "
            "choose another prefix",
            ".labels",
        ),
        *(
            Rule(
                f"!has(self.{field}) || self.{field}.all(key, key.matches('{QUALIFIED_NAME}'))",
                f"template.{field} has keys of letters, digits, '-', '_' and '.', with or without a domain: write "
                "`team` or `example.com/team`",
                f".{field}",
            )
            for field in ("labels", "annotations", "nodeSelector", "serviceAccountAnnotations")
        ),
    )

    @property
    def pull_secrets(self) -> tuple[str, ...] | None:
        """Names of the Secrets to pull with, None where the operator's default holds."""
        return None if self.image_pull_secrets is None else tuple(self.image_pull_secrets)

    @property
    def extra_labels(self) -> Mapping[str, str]:
        """Further labels of the pods."""
        return self.labels or {}
