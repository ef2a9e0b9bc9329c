"""The flags of `vllm serve` (0.6.6 to 0.33.0): which are taken, which change nothing here, and why others are refused.

`vllm_line.py` reads command lines by this table, and `tools/write_vllm_flags.py` writes it to docs/coming-from.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple


class Arity(Enum):
    """How many values follow a flag."""

    SWITCH = ""
    """None; `--no-X` and, for `--enable-X`, `--disable-X` turn it off."""
    ONE = "="
    MANY = "=*"
    """At least one."""
    OPTIONAL = "=?"


class Taken(NamedTuple):
    """A flag that does here what it does there."""

    arity: Arity
    to: str
    """The flag of `pagestream serve`."""
    text: str
    """Cell of the table in docs/coming-from.md; empty: the same."""


class Idle(NamedTuple):
    """A flag that changes nothing here."""

    arity: Arity
    why: str
    """With links between pages of docs; `spoken` leaves their texts."""
    values: tuple[str, ...] | None
    """Values that are taken; None: any. Others are refused."""


class Refused(NamedTuple):
    """A flag that asks for what isn't here."""

    arity: Arity
    why: str


Flag = Taken | Idle | Refused


def spoken(why: str) -> str:
    """Return a reason as a terminal shows it: the texts of links alone."""
    return _LINK.sub(r"\1", why)


_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")

_TAKEN: tuple[tuple[str, str, str], ...] = (
    ("--model=", "MODEL", "`MODEL`, the first argument"),
    ("--served-model-name=*", "", "the same; requests may use each name, answers have the first"),
    ("--revision=", "", "the same, or `MODEL@REVISION`"),
    ("--tokenizer=", "", "only the model's own"),
    ("--config=", "", "the same: a YAML file of flags, vLLM's or these; flags of the command line win"),
    ("--host=", "", "the same, but 127.0.0.1 where it is left out"),
    ("--port=", "--http-port", "`--http-port`; gRPC has `--grpc-port`"),
    ("--api-key=*", "", "the same, and `VLLM_API_KEY`; keys with a tenant each: `pagestream keys`"),
    ("--ssl-certfile=", "--tls-certificate", "`--tls-certificate`"),
    ("--ssl-keyfile=", "--tls-key", "`--tls-key`"),
    ("--ssl-ca-certs=", "", "`PAGESTREAM_GATEWAY__TLS_CLIENT_CA`, with `--ssl-cert-reqs 1`"),
    ("--ssl-cert-reqs=", "", "0, or 1: clients may show a certificate"),
    ("--allowed-origins=", "", "`PAGESTREAM_GATEWAY__CORS_ORIGINS`"),
    ("--chat-template=", "", ""),
    ("--default-chat-template-kwargs=", "", ""),
    ("--tool-call-parser=", "", "the same; by default the format is read from the chat template"),
    ("--reasoning-parser=", "", "the same, likewise"),
    ("--lora-modules=*", "", "the same, `NAME=FOLDER` or JSON; further ones come [at run time](adapters.md)"),
    ("--enable-lora", "", ""),
    ("--max-loras=", "", ""),
    ("--max-lora-rank=", "", ""),
    ("--max-cpu-loras=", "", ""),
    ("--dtype=", "", ""),
    ("--quantization=/-q", "", "the checkpoint's own method, which needs no flag; or `int8`, while loading"),
    ("--max-model-len=", "", "the same, also `8k`, `8K` (8,192) and `auto`"),
    ("--max-num-batched-tokens=", "", "the same, also `8k`"),
    ("--max-num-seqs=", "", ""),
    ("--max-logprobs=", "", ""),
    ("--seed=", "", ""),
    ("--enforce-eager", "", ""),
    ("--async-scheduling", "", ""),
    ("--scheduling-policy=", "", "the same, and `shortest_first`, `round_robin`, `fair`"),
    ("--block-size=", "", ""),
    ("--gpu-memory-utilization=", "", ""),
    ("--device-memory-utilization=", "--gpu-memory-utilization", "`--gpu-memory-utilization`"),
    ("--num-gpu-blocks-override=", "", ""),
    ("--enable-prefix-caching", "", "the same; on by default"),
    ("--kv-cache-dtype=", "", "`auto`, `bfloat16`, `fp8`, `fp8_e4m3`"),
    ("--swap-space=", "", ""),
    ("--kv-offloading-size=", "--swap-space", "`--swap-space`, of each engine"),
    ("--cpu-offload-gb=", "", ""),
    ("--device=", "", "`auto`, `cpu`, `cuda`"),
    ("--attention-backend=", "", "`auto`, `torch`, `triton`; vLLM's names of kernels mean `auto`"),
    ("--tensor-parallel-size=/-tp", "", ""),
    ("--pipeline-parallel-size=/-pp", "", ""),
    ("--data-parallel-size=/-dp", "--engines", "`--engines N`: processes that share one queue"),
    ("--speculative-config=/-sc", "", "the same, with `ngram` or a `model`"),
    ("--spec-method=", "--speculative-method", "`--speculative-method`"),
    ("--spec-model=", "--speculative-model", "`--speculative-model`"),
    ("--spec-tokens=", "--num-speculative-tokens", "`--num-speculative-tokens`"),
    ("--speculative-model=", "", "the same; `[ngram]` is `--speculative-method ngram`"),
    ("--num-speculative-tokens=", "", ""),
    ("--ngram-prompt-lookup-min=", "--prompt-lookup-min", "`--prompt-lookup-min`"),
    ("--ngram-prompt-lookup-max=", "--prompt-lookup-max", "`--prompt-lookup-max`"),
    ("--enable-sleep-mode", "", ""),
    ("--download-dir=", "", "the same: the folder of Hugging Face's cache"),
    ("--hf-token=?", "", "the same, or `HF_TOKEN`"),
    ("--otlp-traces-endpoint=", "", "`PAGESTREAM_TELEMETRY__OTLP_ENDPOINT`, by OTLP/gRPC"),
    ("--sse-keep-alive-interval=", "", "`PAGESTREAM_STREAM__KEEP_ALIVE_S`; 15 seconds by default"),
)
"""vLLM's flag with its arity and short names; the flag here, where it has another name; the table's cell."""

_TEXT_ALONE = "models here read text alone"
_KERNELS = "kernels and graphs are chosen by device and model"
_FILES = "weights are mapped from safetensors files"
_ALWAYS = "always so"
_LOGS = "logs have no prompts or outputs"
_SCHEDULER = "the scheduler has no such setting"
_RECURRENT = "caches of recurrent state have no such setting"
_STRUCTURED = "one grammar engine does all forms"
_BY_CONFIG = "`config.json` says what a model does"
_ONE_QUEUE = "engines share one queue, in which any of them takes any request"

_IDLE: tuple[tuple[str, str, tuple[str, ...] | None], ...] = (
    ("no code of a model's is run", "--trust-remote-code --code-revision=", None),
    (
        _ALWAYS,
        "--enable-auto-tool-choice --enable-chunked-prefill --enable-request-id-headers --enable-reasoning "
        "--enable-prompt-tokens-details --enable-ssl-refresh --disable-async-output-proc --use-v2-block-manager",
        None,
    ),
    (
        _LOGS,
        "--disable-log-requests --enable-log-requests --enable-log-outputs --enable-log-deltas --max-log-len= "
        "--disable-uvicorn-access-log --disable-access-log-for-endpoints= --log-error-stack "
        "--aggregate-engine-logging --enable-logging-iteration-details",
        None,
    ),
    ("the terminal shows warnings, and everything with `--verbose`", "--log-level= --uvicorn-log-level=", None),
    (
        _TEXT_ALONE,
        "--limit-mm-per-prompt= --mm-processor-kwargs= --mm-processor-cache-gb= --mm-processor-cache-type= "
        "--mm-hasher-algorithm= --mm-shm-cache-max-object-size-mb= --mm-encoder-tp-mode= --mm-encoder-attn-backend= "
        "--mm-encoder-attn-dtype= --mm-encoder-fp8-scale-path= --mm-encoder-fp8-scale-save-path= --mm-tensor-ipc= "
        "--mm-encoder-fp8-scale-save-margin= --mm-ipc-gpu-memory-gb= --mm-device-do-normalize --mm-processor-device= "
        "--media-io-kwargs= --interleave-mm-strings --skip-mm-profiling --video-pruning-rate= --video-pruning-method= "
        "--allowed-local-media-path= --allowed-media-domains=* --disable-mm-preprocessor-cache --language-model-only "
        "--disable-chunked-mm-input --enable-multimodal-encoder-data-parallel --trust-request-mm-kwargs "
        "--default-mm-loras= --enable-tower-connector-lora",
        None,
    ),
    (
        _KERNELS,
        "--compilation-config=/-cc --optimization-level=/-O --kernel-config= --attention-config=/-ac "
        "--cudagraph-capture-sizes=* --max-cudagraph-capture-size= --cuda-graph-sizes=* --max-seq-len-to-capture= "
        "--disable-cascade-attn --moe-backend= --linear-backend= --ir-op-priority= --enable-flashinfer-autotune "
        "--monokernel --performance-mode= --enable-bf16x3-router-gemm --use-fp64-gumbel "
        "--sparse-indexer-topk-backend= --enable-shm-tensor-arena --enable-flash-late-interaction "
        "--override-attention-dtype= --calculate-kv-scales",
        None,
    ),
    (
        _FILES,
        "--safetensors-load-strategy= --safetensors-prefetch-num-threads= --safetensors-prefetch-block-size= "
        "--use-tqdm-on-load --pt-load-map-location= --max-parallel-loading-workers= --ignore-patterns=*",
        None,
    ),
    (_FILES, "--load-format=", ("auto", "safetensors", "hf")),
    ("`config.json` and `tokenizer.json` are read", "--config-format=", ("auto", "hf")),
    ("`config.json` and `tokenizer.json` are read", "--tokenizer-mode=", ("auto", "hf", "fast")),
    ("`config.json` chooses the code of the architecture", "--model-impl=", ("auto",)),
    (
        "`config.json` says what a model does",
        "--task=",
        ("auto", "generate", "embed", "embedding", "classify", "score"),
    ),
    ("`config.json` says what a model does", "--runner=", ("auto", "generate", "pooling")),
    ("`config.json` says what a model does", "--convert=", ("auto", "none", "embed", "classify")),
    ("the model's own defaults are used", "--generation-config=", ("auto",)),
    (
        _SCHEDULER,
        "--max-num-partial-prefills= --max-long-partial-prefills= --long-prefill-token-threshold= "
        "--long-prefill-token-threshold-adaptive --num-lookahead-slots= --scheduler-delay-factor= --watermark= "
        "--preemption-mode= --num-scheduler-steps= --multi-step-stream-outputs --prefill-schedule-interval= "
        "--scheduler-reserve-full-isl --max-num-scheduled-tokens=",
        None,
    ),
    (
        "prefixes are cached by blocks of the KV cache",
        "--prefix-caching-hash-algo= --prefix-match-unit= --prefix-cache-retention-interval= "
        "--disable-hybrid-kv-cache-manager --swa-bounded-replay --kv-sharing-fast-prefill",
        None,
    ),
    (
        _RECURRENT,
        "--mamba-backend= --mamba-ssu-algorithm= --enable-mamba-cache-stochastic-rounding "
        "--mamba-cache-philox-rounds= --mamba-cache-dtype= --mamba-ssm-cache-dtype= --mamba-block-size= "
        "--mamba-cache-mode= --enable-mamba-shared-prefix-checkpoint --replayssm-buffer-len= --use-replayssm "
        "--gdn-prefill-backend= --kda-prefill-backend= --kda-decode-backend=",
        None,
    ),
    (_STRUCTURED, "--guided-decoding-backend= --guided-decoding-disable-fallback", None),
    (_STRUCTURED, "--structured-outputs-config=", ("{}", '{"backend": ...}')),
    ("the shape of content is found by trying the chat template", "--chat-template-content-format=", None),
    ("the template names the role", "--response-role=", ("assistant",)),
    ("tokens are sent as they come", "--stream-interval=", None),
    ("ranks are processes of the engine", "--distributed-executor-backend=", ("mp", "uni")),
    (
        "ranks are placed by the operating system",
        "--numa-bind --numa-bind-nodes=* --numa-bind-cpus=* --disable-custom-all-reduce "
        "--distributed-timeout-seconds= --cpu-distributed-timeout-seconds= --enable-batch-sharded-sampling "
        "--enable-nccl-comm-suspend --disable-nccl-for-dp-synchronization",
        None,
    ),
    ("one machine, unless `pagestream-engine --nnodes` is used", "--nnodes=/-n", ("1",)),
    ("one machine, unless `pagestream-engine --nnodes` is used", "--node-rank=/-r", ("0",)),
    ("one machine, unless `pagestream-engine --nnodes` is used", "--master-addr= --master-port=", None),
    (
        "one gateway is one process; `--gateways N` starts more, on the ports that follow",
        "--api-server-count=/-asc",
        None,
    ),
    ("all engines are on this machine", "--data-parallel-size-local=/-dpl --data-parallel-backend=/-dpb", None),
    (
        "tokens are encoded and decoded by threads of the gateway",
        "--tokenizer-pool-size= --tokenizer-pool-type= --tokenizer-pool-extra-config= --renderer-num-workers= "
        "--disable-frontend-multiprocessing",
        None,
    ),
    ("adapters' matrices have the model's dtype", "--lora-dtype=", ("auto",)),
    ("adapters are divided as the layers are", "--fully-sharded-loras --specialize-active-lora", None),
    ("adapters with tokens of their own are refused when they are loaded", "--lora-extra-vocab-size=", None),
    (
        "weights go back to host memory",
        "--sleep-mode-backend= --sleep-mode-offload-cudagraph --enable-cumem-allocator",
        None,
    ),
    ("the model's layers are chosen by memory", "--offload-backend=", ("auto",)),
    ("blocks are kept by this process", "--kv-offloading-backend=", ("native",)),
    ("log probabilities are those before sampling", "--logprobs-mode=", ("raw_logprobs",)),
    ("the fingerprint names version and numerics", "--fingerprint-mode=", ("full", "hash")),
    ("there are no experimental settings", "--additional-config=", ("{}",)),
    ("variables that begin with PAGESTREAM_ are always checked", "--fail-on-environ-validation", None),
    (
        "[metrics and spans](telemetry.md) are always the same",
        "--disable-log-stats --show-hidden-metrics-for-version= --collect-detailed-traces=* --kv-cache-metrics "
        "--kv-cache-metrics-sample= "
        "--cudagraph-metrics --enable-mfu-metrics --per-request-spec-decode-metrics= --jit-monitor-mode= "
        "--jit-monitor-verbose --enable-layerwise-nvtx-tracing",
        None,
    ),
    ("headers have a bound of their own", "--h11-max-incomplete-event-size= --h11-max-header-count=", None),
    ("any page of an allowed origin may use any method and header", "--allowed-methods= --allowed-headers=", None),
    ("callers show a key or a token, never a cookie", "--allow-credentials", None),
    ("docs need no network", "--enable-offline-docs", None),
    ("paths are taken as they come", "--root-path=", None),
    ("drafts never change a token", "--spec-decoding-acceptance-method=", ("rejection_sampler",)),
    (
        "drafts never change a token",
        "--speculative-disable-mqa-scorer --speculative-disable-by-batch-size= --disable-logprobs-during-spec-decoding",
        None,
    ),
    ("there is no such API here", "--cohere-is-reasoning-model --cohere-format=", None),
)
"""Why flags change nothing, the flags, and the values that are taken; None: any."""

_REFUSED: tuple[tuple[str, str], ...] = (
    (
        "several machines share a model by `pagestream-engine --nnodes`, and a cluster by an EnginePool",
        "--headless --data-parallel-address=/-dpa --data-parallel-rank=/-dpn --data-parallel-start-rank=/-dpr "
        "--data-parallel-rpc-port=/-dpp --device-ids=",
    ),
    (
        f"{_ONE_QUEUE}; `--engines N` starts more",
        "--data-parallel-hybrid-lb/-dph --data-parallel-external-lb/-dpe --data-parallel-multi-port-external-lb/-dpm "
        "--data-parallel-supervisor-port= --dp-supervisor-probe-interval-s= --dp-supervisor-probe-timeout-s= "
        "--dp-supervisor-probe-failure-threshold= --dp-sync-interval= --enable-elastic-ep --elastic-ep-max-dp-size= "
        "--enable-fault-tolerance --fault-tolerance-config=",
    ),
    (
        "each layer is divided by `--tensor-parallel-size`, experts included",
        "--enable-expert-parallel/-ep --enable-eplb --eplb-config= --expert-placement-strategy= "
        "--enable-ep-weight-filter --all2all-backend= --eplb-log-balancedness --eplb-step-interval= "
        "--eplb-window-size= --num-redundant-experts=",
    ),
    (
        "layers are divided by `--tensor-parallel-size` and `--pipeline-parallel-size` alone",
        "--decode-context-parallel-size=/-dcp --dcp-comm-backend= --dcp-q-replicate --dcp-kv-cache-interleave-size= "
        "--cp-kv-cache-interleave-size= --prefill-context-parallel-size=/-pcp --enable-hc-sp --enable-dbo "
        "--ubatch-size= --dbo-decode-token-threshold= --dbo-prefill-token-threshold=",
    ),
    (
        "prefill and decode of a request stay in one engine",
        "--kv-transfer-config= --kv-events-config= --ec-transfer-config= --ec-manager-config= --tokens-only "
        "--enable-scale-out --weight-transfer-config=",
    ),
    (
        "the pool is sized by `--gpu-memory-utilization` or `--num-gpu-blocks-override`",
        "--kv-cache-memory-bytes=",
    ),
    ("ranks are processes of the engine", "--ray-workers-use-nsight --worker-use-ray"),
    ("all layers keep keys and values in one type, `--kv-cache-dtype`", "--kv-cache-dtype-skip-layers=*"),
    (
        "`--cpu-offload-gb` chooses the layers by itself",
        "--cpu-offload-params=* --offload-group-size= --offload-num-in-group= --offload-prefetch-step= "
        "--offload-params=*",
    ),
    (
        "a model is what its folder says; edit config.json",
        "--hf-overrides= --hf-config-path= --model-class-overrides= --rope-scaling= --rope-theta= "
        "--disable-sliding-window --override-neuron-config= --pooler-config= --override-pooler-config= "
        "--quantization-config= --quantization-param-path= --allow-deprecated-quantization "
        "--model-loader-extra-config=",
    ),
    ("a model has the tokenizer of its folder", "--tokenizer-revision= --skip-tokenizer-init"),
    (
        "defaults are those of the model's generation_config.json; edit it, or send the fields",
        "--override-generation-config=",
    ),
    (
        "prompts are texts, messages or token ids",
        "--enable-prompt-embeds --enable-mm-embeds --mm-encoder-only --io-processor-plugin= --prompt-adapters=* "
        "--enable-prompt-adapter --max-prompt-adapters= --max-prompt-adapter-token=",
    ),
    (
        "`--plugins` imports modules with policies and families; there are no others",
        "--middleware=* --logits-processors=* --logits-processor-pattern= --tool-parser-plugin= "
        "--reasoning-parser-plugin= --scheduler-cls= --worker-cls= --worker-extension-cls=",
    ),
    ("a request asks for it, in its body", "--return-tokens-as-token-ids --enable-force-include-usage"),
    (
        "the settings of gateways (docs/settings.md) bound the queue",
        "--max-num-queued-reqs= --max-num-queued-tokens= --max-num-active-seqs=",
    ),
    ("a chat's `chat_template` is refused, and so is this", "--trust-request-chat-template"),
    (
        "there is no such default for all requests",
        "--exclude-tools-when-tool-choice-none --tool-strict-level= --tool-server= --reasoning-effort-map= "
        "--reasoning-config= --anthropic-disabled-thinking-effort= --fingerprint-value= "
        "--guided-decoding-disable-any-whitespace --guided-decoding-disable-additional-properties",
    ),
    (
        "[gateways' metrics](telemetry.md) say how loaded they are",
        "--enable-server-load-tracking --enable-per-request-metrics --custom-histogram-buckets=",
    ),
    ("`/tokenize`, `/detokenize` and `/v1/models` are all there is", "--enable-tokenizer-info-endpoint"),
    ("gateways listen on TCP ports", "--uds="),
    ("gRPC is always there, with an API of its own, at `--grpc-port`", "--grpc"),
    ("the TLS library's own list is used", "--ssl-ciphers="),
    ("`/docs` and `/openapi.json` are always there", "--disable-fastapi-docs"),
    ("`PAGESTREAM_TELEMETRY__LOG_LEVEL` and `..._LOG_FORMAT` are all there is", "--logging-config= --log-config-file="),
    ("`PAGESTREAM_SHUTDOWN__DRAIN_S` and `PAGESTREAM_WORKER__DRAIN_TIMEOUT_S` say how long", "--shutdown-timeout="),
    ("`PAGESTREAM_WORKER__STALL_TIMEOUT_S` sets the watchdog", "--watchdog-config="),
    ("`PAGESTREAM_WORKER__PROFILE_DIR` turns profiles on", "--profiler-config="),
    (
        "adapters are taken in PEFT's form, with matrices alone",
        "--lora-target-modules=* --enable-lora-bias --long-lora-scaling-factors=* --qlora-adapter-name-or-path= "
        "--enable-mixed-moe-lora-format --enable-moe-shared-loras --max-lora-cls-labels=",
    ),
    ("all weights leave the device", "--sleep-preserve-parameter-names=*"),
    (
        "drafts come from `ngram`, a grammar or a draft model, checked exactly",
        "--speculative-draft-tensor-parallel-size=/-spec-draft-tp --speculative-max-model-len= "
        "--speculative-model-quantization= --typical-acceptance-sampler-posterior-alpha= "
        "--typical-acceptance-sampler-posterior-threshold=",
    ),
    (
        "it isn't implemented",
        "--enable-return-routed-experts --return-sampling-mask --enable-trace-replay --diffusion-config=/-dc "
        "--aux-output-config= --engram-config= --watermark-config=",
    ),
)
"""Why flags are refused, and the flags."""

_SPELLING = re.compile(r"(?P<name>--[a-z0-9-]+)(?P<arity>=[*?]?)?(?P<short>(?:/-[A-Za-z-]+)*)")


def _spelled(text: str) -> tuple[str, Arity, tuple[str, ...]]:
    """Read `--name=/-short`."""
    found = _SPELLING.fullmatch(text)
    if found is None:
        raise ValueError(text)
    return found["name"], Arity(found["arity"] or ""), tuple(filter(None, found["short"].split("/")))


def _read() -> tuple[dict[str, Flag], dict[str, str]]:
    flags: dict[str, Flag] = {}
    shorts: dict[str, str] = {}

    def add(text: str, make: type[Taken] | type[Idle] | type[Refused], *rest: object) -> None:
        name, arity, short = _spelled(text)
        flags[name] = make(arity, *rest)  # type: ignore[arg-type]
        shorts.update(dict.fromkeys(short, name))

    for text, to, cell in _TAKEN:
        add(text, Taken, to or _spelled(text)[0], cell)
    for why, names, values in _IDLE:
        for text in names.split():
            add(text, Idle, why, values)
    for why, names in _REFUSED:
        for text in names.split():
            add(text, Refused, why)
    return flags, shorts


_found, _shorts = _read()
FLAGS: Mapping[str, Flag] = _found
"""All flags of vLLM's by their long name."""
SHORT_NAMES: Mapping[str, str] = _shorts
"""Short name -> long name."""
