"""The spec of an EnginePool: its models and where their files are, the engine's options, adapters, and how pods are
drained and replaced.

`pagestream_options.engine` declares the options, under the names of `pagestream-engine`'s flags.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pagestream_options.declaration import Option
from pagestream_options.engine import ENGINE_OPTIONS, POLICIES, SCALED_CACHE_DTYPES
from pydantic import Field, create_model
from pydantic.alias_generators import to_camel

from pagestream_operator.api.base import ApiModel, IntOrPercent, ObjectName, Rule, int_or_percent_rule
from pagestream_operator.api.scaling import Scaling
from pagestream_operator.api.template import PodTemplate

Path = Annotated[str, Field(max_length=512)]


class VolumeSource(ApiModel):
    """A model on a PersistentVolumeClaim of the pool's namespace. It is mounted read-only at /models/volume."""

    claim: ObjectName
    """Name of the PersistentVolumeClaim. Pods on several nodes need the access mode ReadOnlyMany."""
    path: Path = ""
    """Folder of the model inside the volume, such as `llama-3-8b`. Empty: the volume itself."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!self.path.startsWith('/') && !self.path.split('/').exists(part, part == '..')",
            "volume.path is relative to the volume and stays inside it: write `llama-3-8b`, not `/llama-3-8b` "
            "or `../x`",
            ".path",
        ),
    )


class HubSource(ApiModel):
    """A model of the Hugging Face hub. Every pod downloads it when it starts, so pods must be able to reach the hub."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    """Repository, such as `meta-llama/Llama-3.1-8B-Instruct`."""
    token_secret: ObjectName | None = None
    """Name of a Secret whose key `token` is an access token of the hub. Unset: the repository is public."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.name.matches('^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$')",
            "hub.name is a repository of the hub: write `organisation/name`, without an address and without a revision",
            ".name",
        ),
    )


class ModelSource(ApiModel):
    """Where the model's files are: exactly one of path, volume, hub."""

    path: Path | None = None
    """Folder in the engine's image, or in a volume of `template.volumes`, such as `/models/demo`."""
    volume: VolumeSource | None = None
    """Folder on a PersistentVolumeClaim."""
    hub: HubSource | None = None
    """Repository of the Hugging Face hub."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "[has(self.path), has(self.volume), has(self.hub)].filter(given, given).size() == 1",
            "model.source names exactly one of path, volume and hub: for example `source: {path: /models/demo}`",
        ),
        Rule(
            "!has(self.path) || self.path.startsWith('/')",
            "source.path is absolute: write `/models/demo`; for a name of the hub write `hub: {name: "
            "organisation/name}`",
            ".path",
        ),
    )


class ConfigMapKey(ApiModel):
    """A key of a ConfigMap in the pool's namespace."""

    name: ObjectName
    """Name of the ConfigMap."""
    key: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
    """The key whose value is the template."""


class ChatTemplate(ApiModel):
    """A Jinja chat template, in place of the one in the model's folder: exactly one of text and configMapKeyRef."""

    text: Annotated[str, Field(min_length=1, max_length=65_536)] | None = None
    """The template itself. A change replaces the pods, one by one."""
    config_map_key_ref: ConfigMapKey | None = None
    """Where it is. Pods read it when they start: after a change of its text, replace them, or name another key."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.text) != has(self.configMapKeyRef)",
            "chatTemplate has exactly one of text and configMapKeyRef: for example `chatTemplate: {configMapKeyRef: "
            "{name: templates, key: chat.jinja}}`",
        ),
    )


MOST_MODELS = 16
"""Beside the first: an engine reads the headers of all when it starts."""


class Model(ApiModel):
    """A model that a pool serves."""

    source: ModelSource
    """Where its files are."""
    served_name: Annotated[str, Field(min_length=1, max_length=63)]
    """The name that clients send in `model`. It names the model's queue as well, so it can't be changed."""
    revision: Annotated[str, Field(max_length=64)] | None = None
    """Revision of the model: a branch, tag or commit of a hub's repository; for paths and volumes any text. A change
    replaces the pods."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.servedName.matches('^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$')",
            "model.servedName has letters, digits, '.', '_' and '-', and begins and ends with a letter or digit: "
            "write `llama-3.1-8b`",
            ".servedName",
        ),
        Rule(
            "self.servedName == oldSelf.servedName",
            "model.servedName can't be changed, requests wait under it: make another EnginePool with the new name, "
            "then delete this one",
            ".servedName",
        ),
    )


_POLICIES, _SCALED = list(POLICIES), list(SCALED_CACHE_DTYPES)


class _EngineOptions(ApiModel):
    """Options of the engine. Each is the flag of `pagestream-engine` of that name; an unset one keeps the engine's
    default. A change replaces the pods, one by one."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.maxNumSeqs) || !has(self.maxNumBatchedTokens) || self.maxNumBatchedTokens >= self.maxNumSeqs",
            "engine.maxNumBatchedTokens is at least engine.maxNumSeqs, since every running sequence takes a token of "
            "each step: raise it, or lower maxNumSeqs",
            ".maxNumBatchedTokens",
        ),
        Rule(
            f"!has(self.schedulingPolicy) || has(self.plugins) || self.schedulingPolicy in {_POLICIES}",
            f"engine.schedulingPolicy is {', '.join(POLICIES)}, or a policy that a plugin registers: name its module "
            "in engine.plugins",
            ".schedulingPolicy",
        ),
        Rule(
            "!has(self.deterministic) || !self.deterministic || !has(self.kvCacheDtype) || "
            f"!(self.kvCacheDtype in {_SCALED})",
            "engine.kvCacheDtype is auto or bfloat16 with engine.deterministic: in fp8 a key is rounded to a scale "
            "that later tokens may raise",
            ".kvCacheDtype",
        ),
    )

    def to_environment(self) -> Mapping[str, str]:
        """`PAGESTREAM_ENGINE__<OPTION>` for each option that is set."""
        given = self.model_dump(exclude_none=True)
        return {f"PAGESTREAM_ENGINE__{name.upper()}": _text(value) for name, value in sorted(given.items())}

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def _text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _fields() -> Iterator[tuple[str, Any]]:
    for name, each in ENGINE_OPTIONS.items():
        if each.pool is not None:
            yield name, (Annotated[_type(each) | None, Field(description=_description(each))], None)


def _type(each: Option) -> Any:
    """The type that an API server checks, with its bounds."""
    if each.pool is None or each.kind is bool:
        return bool
    if each.choices is not None:
        return Literal[each.choices]
    most = each.pool.most if each.high is None else each.high
    if each.kind == Sequence[str]:
        item = Annotated[str, Field(max_length=200, pattern=each.pool.item_pattern)]
        return Annotated[list[item], Field(max_length=_whole(most))]
    if each.kind is str:
        return Annotated[str, Field(min_length=_whole(each.low), max_length=_whole(most))]
    low = Field(gt=each.low) if each.is_above else Field(ge=each.low)
    return Annotated[each.kind, low, Field(le=most)]


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)


def _description(each: Option) -> str:
    text = re.sub(r"`(\w+)`", _camel, each.text)
    added = each.pool.text if each.pool is not None else ""
    return " ".join(filter(None, (text, added, _default(each))))


def _camel(found: re.Match[str]) -> str:
    return f"`{to_camel(found[1])}`" if found[1] in ENGINE_OPTIONS else found[0]


def _default(each: Option) -> str:
    if each.default in (None, ()):
        return ""
    shown = str(each.default).lower() if each.kind is bool else each.default
    return f"Default {shown:g}." if each.kind is float else f"Default {shown}."


if TYPE_CHECKING:
    EngineOptions = _EngineOptions
else:
    EngineOptions = create_model(
        "EngineOptions", __base__=_EngineOptions, __doc__=_EngineOptions.__doc__, **dict(_fields())
    )


MOST_ADAPTERS = 24
"""Whose results fit into the 4096 bytes that a container may leave to Kubernetes."""
AdapterName = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class PoolAdapter(ApiModel):
    """A LoRA adapter of the pool's model."""

    name: AdapterName
    """What requests give as their `model`."""
    path: Annotated[str, Field(min_length=2, max_length=512, pattern=r"^/[^=]*$")]
    """Folder in PEFT's format, the same in all pods: in the image, on the model's volume (/models/volume), or in a
    volume that `template` mounts. Its files don't change: other files have another folder."""


class AdapterStatus(ApiModel):
    """What became of an adapter of the spec, or of one that has left it and could not be unloaded yet."""

    name: AdapterName
    """Its name."""
    path: Annotated[str, Field(max_length=512)]
    """Its folder."""
    revision: Annotated[str, Field(max_length=64)] = ""
    """Digest of its files, by which engines know them. Empty: it is not loaded."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Why the last try to load or unload it went wrong. Empty: it is loaded."""


class DrainPolicy(ApiModel):
    """How a pod ends: it hands its requests back to the queue, and other pods continue them at the same token."""

    grace_seconds: Annotated[int, Field(ge=10, le=3600)] = 30
    """Seconds from SIGTERM until the pod is killed. A pod needs about 10, however long its generations are. More are
    of use in a rollout to other numerics (block size, dtype, kernels): there the last old pod finishes the requests
    that have tokens, so allow as long as a generation takes."""
    deletion_timeout_seconds: Annotated[int, Field(ge=0, le=3600)] = 60
    """Seconds that the deletion of a pool waits for its pods to end. After them the pool is deleted, and its pods go
    on draining. 0 doesn't wait."""
    when_deleted: Literal["Unpublish", "EndRequests", "Keep"] = "Unpublish"
    """What becomes of the model when the pool is deleted and no other pool serves it. Unpublish: a Job of the engine's
    image removes it from the list of models, unless accepted requests still wait for it: both then stay for a later
    pool. EndRequests: such requests are ended with an error. Keep: nothing is removed."""
    max_unavailable: IntOrPercent = 1
    """Pods that voluntary disruptions, such as the drain of a node, may evict at once (the PodDisruptionBudget): a
    number or `25%`."""
    disruption_budget: bool = True
    """Whether the operator keeps that PodDisruptionBudget. False where another one selects these pods, such as one that
    a policy makes for each Deployment: Kubernetes evicts no pod that two of them select."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            int_or_percent_rule("maxUnavailable"),
            "drain.maxUnavailable is a number of pods without quotes, or a share of at most 100%: write `1` or `25%`",
            ".maxUnavailable",
        ),
    )


class RolloutPolicy(ApiModel):
    """How pods are replaced when their template or the engine's options change."""

    max_surge: IntOrPercent | None = None
    """Most pods above the desired number during a rollout: a number or `25%`. Unset: 1, and 0 for pods with GPUs, as
    there may be no spare one."""
    max_unavailable: IntOrPercent | None = None
    """Most pods below the desired number during a rollout: a number or `25%`. Unset: 0 where `maxSurge` adds pods, and
    1 where it doesn't."""
    progress_deadline_seconds: Annotated[int, Field(ge=60, le=86_400)] = 600
    """Seconds without progress after which the pool is Degraded. Allow for the load time of a large model."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            int_or_percent_rule("maxSurge", beyond_all=True),
            "rollout.maxSurge is a number of pods without quotes, or a share: write `1` or `25%`",
            ".maxSurge",
        ),
        Rule(
            int_or_percent_rule("maxUnavailable"),
            "rollout.maxUnavailable is a number of pods without quotes, or a share of at most 100%: write `1` or `25%`",
            ".maxUnavailable",
        ),
        Rule(
            "!has(self.maxSurge) || !has(self.maxUnavailable) || !string(self.maxSurge).matches('^0+%?$') || "
            "!string(self.maxUnavailable).matches('^0+%?$')",
            "rollout.maxSurge and rollout.maxUnavailable can't both be 0, no pod could ever be replaced: write "
            "`maxUnavailable: 1` where there is no room for a further pod",
        ),
    )

    def steps(self, *, has_gpus: bool) -> tuple[int | str, int | str]:
        """maxSurge and maxUnavailable of the Deployment. One of them at least is not 0."""
        surge, unavailable = self.max_surge, self.max_unavailable
        if surge is None:
            must_add = unavailable is not None and _is_zero(unavailable)
            surge = 0 if has_gpus and not must_add else 1
        if unavailable is None:
            unavailable = 1 if _is_zero(surge) else 0
        return surge, unavailable


def _is_zero(number: int | str) -> bool:
    return str(number).rstrip("%").strip("0") == ""


ControllerClass = Annotated[str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
Replicas = Annotated[int, Field(ge=0, le=10_000)]


class Parallel(ApiModel):
    """How many processes of a pod compute each step together."""

    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks among which each layer of the model is divided: a GPU each, or a part of the pod's processors each. It
    divides the model's attention heads and the width of its MLPs. A change replaces the pods, one by one."""
    pipeline: Annotated[int, Field(ge=1, le=64)] = 1
    """Stages of layers, each of `tensor` ranks: at most as many as the model has layers. A change replaces the pods,
    one by one."""


_SEVERAL = "has(self.models) && size(self.models) > 0"
_MODELS_RULES = (
    Rule(
        "!has(self.models) || self.models.all(each, each.servedName != self.model.servedName)",
        "models lists the models beside model: leave out the one with model's servedName",
        ".models",
    ),
    Rule(
        f"!({_SEVERAL}) || !has(self.adapters) || size(self.adapters) == 0",
        "adapters belong to one model, so a pool with models has none: leave out models, or load them by `pagestream "
        "adapters load --model NAME`",
        ".adapters",
    ),
    Rule(
        f"!({_SEVERAL}) || self.nodes == 1",
        "nodes is 1 with models, since a group of pods keeps its model: leave out one of them",
        ".nodes",
    ),
    Rule(
        "!has(self.models) || self.models.all(each, !(has(each.source.path) && each.source.path.contains(',')) && "
        "!(has(each.source.volume) && each.source.volume.path.contains(',')) && "
        "!(has(each.source.hub) && has(each.revision) && each.revision.contains(',')))",
        "models has paths and revisions without ',', which separates them in the engine's settings: rename the folder",
        ".models",
    ),
    Rule(
        "!has(self.models) || self.models.all(each, !has(each.source.hub) || !has(each.source.hub.tokenSecret) || "
        "(!has(self.model.source.hub) || !has(self.model.source.hub.tokenSecret) || "
        "self.model.source.hub.tokenSecret == each.source.hub.tokenSecret) && "
        "self.models.all(other, !has(other.source.hub) || !has(other.source.hub.tokenSecret) || "
        "other.source.hub.tokenSecret == each.source.hub.tokenSecret))",
        "models of the hub share one access token: name the same hub.tokenSecret for all that need one",
        ".models",
    ),
    Rule(
        "!has(self.models) || !has(self.template.volumeMounts) || "
        "!(has(self.model.source.volume) || self.models.exists(each, has(each.source.volume))) || "
        "self.template.volumeMounts.all(mount, !mount.mountPath.matches('^/models/volume(-[0-9]+)?/?$'))",
        "template.volumeMounts can't use /models/volume and /models/volume-2 to -17, the models' claims are mounted "
        "there: choose another mountPath",
        ".template.volumeMounts",
    ),
)


class EnginePoolSpec(ApiModel):
    """The desired state of a pool of engines."""

    model: Model
    """The model that the pool serves; of several, the one that a new engine loads first."""
    models: Annotated[
        list[Model],
        Field(
            max_length=MOST_MODELS,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["servedName"]},
        ),
    ] = Field(default_factory=list)
    """Further models, which the pool's engines share out by demand, one at a time each. All have the engine options of
    the pool. A change replaces the pods, one by one. One that leaves the list stays published, until `pagestream models
    rm` removes it."""
    chat_template: ChatTemplate | None = None
    """The chat template of `model`, in place of the one in its folder. Those of `models` are in their folders."""
    controller_class: ControllerClass | None = None
    """The release whose operator serves the pool, as NAMESPACE.RELEASE of its chart. Unset: the first operator that
    sees the pool, which is then in `status.controllerClass`."""
    engine: EngineOptions = Field(default_factory=EngineOptions)
    """Options of the engine, under the names of `pagestream-engine`'s flags."""
    adapters: Annotated[
        list[PoolAdapter],
        Field(
            max_length=MOST_ADAPTERS,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = Field(default_factory=list)
    """LoRA adapters of the model. One that leaves the list is unloaded: requests that were accepted go on with it.
    `status.adapters` has what became of each. Others may be loaded by hand beside them."""
    parallel: Parallel = Field(default_factory=Parallel)
    """How an engine is divided among processes, each with its own GPU."""
    nodes: Annotated[int, Field(ge=1, le=64)] = 1
    """Pods of an engine, which has as many processes in each: a group. The first one of a group serves requests, and
    counts as the pool's pod everywhere else in this spec and in the status; the others come and go with it. A change
    replaces the groups, one by one."""
    template: PodTemplate = Field(default_factory=PodTemplate)
    """The configurable parts of an engine pod: resources, GPUs, placement, volumes."""
    replicas: Replicas | None = None
    """Pins the pool at this number of pods; `kubectl scale` sets it. Unset, the pool scales with its load:
    `kubectl patch enginepool NAME --type=merge -p '{"spec":{"replicas":null}}'` unpins it."""
    min_replicas: Replicas = 1
    """Fewest pods while the pool scales with its load. 0: it goes to zero when idle, once an engine has published the
    model."""
    max_replicas: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Most pods, pinned or not."""
    warm_spares: Replicas = 0
    """Pods beyond what the load asks for, at most `maxReplicas` in all. They serve like the others, so that a lost
    engine, or a sudden need for more, finds them loaded. At zero engines they stay. A pinned pool has none."""
    scaling: Scaling = Field(default_factory=Scaling)
    """How the number of pods follows the load."""
    drain: DrainPolicy = Field(default_factory=DrainPolicy)
    """How pods are drained."""
    rollout: RolloutPolicy = Field(default_factory=RolloutPolicy)
    """How pods are replaced when something changes."""
    paused: bool = False
    """Whether the operator changes none of the pool's objects, for work on them by hand. The pool is Degraded
    meanwhile."""

    @property
    def all_models(self) -> tuple[Model, ...]:
        """The models that an engine may load, the first one first."""
        return (self.model, *self.models)

    @property
    def num_spares(self) -> int:
        """Pods beyond what the load asks for; a pinned pool has none."""
        return 0 if self.replicas is not None else self.warm_spares

    rules: ClassVar[tuple[Rule, ...]] = (
        *_MODELS_RULES,
        Rule(
            "!has(self.adapters) || size(self.adapters) == 0 || has(self.engine.enableLora) && self.engine.enableLora",
            "adapters need engine.enableLora: set it to true",
            ".adapters",
        ),
        Rule(
            "!has(self.adapters) || self.adapters.all(adapter, adapter.name != self.model.servedName)",
            "an adapter can't have the model's servedName, requests name the model by it: choose another name",
            ".adapters",
        ),
        Rule(
            "self.minReplicas <= self.maxReplicas",
            "minReplicas is at most maxReplicas: raise maxReplicas, or lower minReplicas",
            ".minReplicas",
        ),
        Rule(
            "self.minReplicas + self.warmSpares <= self.maxReplicas && self.warmSpares < self.maxReplicas",
            "minReplicas and warmSpares together are at most maxReplicas, and leave room for one engine: raise "
            "maxReplicas, or lower warmSpares",
            ".warmSpares",
        ),
        Rule(
            "!has(self.replicas) || self.replicas <= self.maxReplicas",
            "replicas is at most maxReplicas: raise maxReplicas first, or pin the pool at fewer pods",
            ".replicas",
        ),
        Rule(
            "!has(self.model.source.volume) || !has(self.template.volumeMounts) || "
            "self.template.volumeMounts.all(mount, mount.mountPath != '/models/volume')",
            "template.volumeMounts can't use /models/volume, model.source.volume is mounted there: choose "
            "another mountPath",
            ".template.volumeMounts",
        ),
        Rule(
            "!has(self.template.gpu) || self.template.gpu.count == 0 || "
            "self.template.gpu.count * self.nodes == self.parallel.tensor * self.parallel.pipeline",
            "template.gpu.count times nodes is parallel.tensor times parallel.pipeline, a GPU for each rank, or 0 for "
            "ranks on a CPU: set all alike",
            ".template.gpu.count",
        ),
        Rule(
            "self.parallel.tensor * self.parallel.pipeline <= 64",
            "parallel.tensor times parallel.pipeline is at most 64, the ranks of an engine: lower one of them",
            ".parallel",
        ),
        Rule(
            "self.parallel.tensor * self.parallel.pipeline % self.nodes == 0",
            "nodes divides parallel.tensor times parallel.pipeline, as each pod has as many ranks: with 4 ranks it is "
            "1, 2 or 4",
            ".nodes",
        ),
        Rule(
            "self.parallel.tensor * self.parallel.pipeline == 1 || "
            "!(has(self.engine.cpuOffloadGb) && self.engine.cpuOffloadGb > 0.0)",
            "parallel.tensor and parallel.pipeline are 1 with engine.cpuOffloadGb, which ranks don't have yet: leave "
            "that out, or parallel",
            ".parallel",
        ),
    )
