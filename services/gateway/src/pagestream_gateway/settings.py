"""Settings of a gateway process, in groups, with their defaults; `configuration.py` reads them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pagestream_grammars.output_formats.registry import OutputParsers
from pagestream_streams import StreamsSettings
from pagestream_telemetry.settings import TelemetrySettings

LOCALHOST = "localhost"
"""In `cors_origins`: pages of this machine, on any port."""
CERTIFICATES_REQUIRED, CERTIFICATES_OPTIONAL = "required", "optional"
UNKNOWN_REFUSED, UNKNOWN_IGNORED = "refuse", "ignore"


@dataclass(frozen=True)
class GatewaySettings:
    """The process' name, the addresses that it serves, and its Redis."""

    id: str | None = None
    """Name of the channel by which engines wake this process, and the instance id of its metrics. None: a random name,
    and host name and process id.
    """
    redis: str = "redis://127.0.0.1:6379"
    """Address: redis://, rediss:// (TLS), unix://, redis+sentinel:// or redis+cluster://; see docs/durability.md."""
    answer_limit_s: float = 8.0
    """Seconds that a call may wait for Redis before it is answered with UNAVAILABLE, so that the client can retry.
    Above the 5 s after which a single command counts as lost, since a burst of calls waits for connections as well.
    """
    host: str = "127.0.0.1"
    """Name or address to bind; :: binds all of this machine, IPv4 and IPv6, and localhost both loopback addresses.
    Loopback by default, since API keys are optional."""
    http_port: int = 8000
    """TCP port of the OpenAI HTTP API; 0 binds a free one."""
    grpc_port: int = 50051
    """TCP port of the gRPC API; 0 binds a free one."""
    metrics_port: int | None = None
    """A second TCP port that serves only /metrics, /healthz and /readyz, to anyone who reaches it. The HTTP port serves
    them too, but where callers need credentials its /metrics is for administrators. None: no second port.
    """
    metrics_host: str | None = None
    """Address of that port. None: that of `host`."""
    start_file: Path | None = None
    """File that exists before any port is bound; the process waits for it. `pagestream serve` makes it when an engine
    has loaded its model. None: ports are bound at once."""
    default_model: str | None = None
    """The model, or the adapter, of requests that name none. `pagestream serve` sets what it serves. None, or a name
    that is not known: the only model, else the only one with engines."""
    cors_origins: str = "localhost"
    """Web pages that may call the HTTP API from a browser: origins separated by commas. "localhost" is every page of
    this machine, "*" every page; empty: none.
    """
    allowed_hosts: str = ""
    """Further names, separated by commas, that a request's Host header may have where no API key is asked for and the
    address is loopback: those under which a proxy on this machine is reached. "*" is every name, also a web page's that
    resolves to this machine.
    """
    allow_runtime_lora: bool = False
    """Whether callers, and not administrators alone, may load and unload LoRA adapters: each who may call this gateway
    may then let engines read any folder that holds one."""
    allow_model_changes: bool = False
    """Whether callers, and not administrators alone, may have engines load and unload the models of their lists, sleep
    and wake."""
    unknown_fields: str = UNKNOWN_REFUSED
    """"refuse": a body's field that is on no list of docs/fields.md is refused by its name. "ignore": it is left out,
    with a warning in the header X-Request-Warnings; for clients that are newer than this server. Equal in all gateways
    of a deployment."""
    model_aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of models, such as "gpt-4o=llama,gpt-4o-mini=llama": requests with them are of the model, whose own
    name is in the answers. Equal in all gateways of a deployment."""
    page: bool = True
    """Whether `/` is a page to chat with the models; it needs a key where keys are asked for."""
    api_keys: Path | None = None
    """File of `sha256 of the key -> tenant`, read again when it changes. None: no key is accepted; where tokens are not
    either, every caller is the tenant "default"."""
    jwt_issuers: Path | None = None
    """JSON file of the issuers whose JSON Web Tokens are accepted; docs/identities.md has its fields. None: no token.
    """
    admin_keys: Path | None = None
    """File of `sha256 of the key -> name of the administrator`, read again when it changes: these keys open /admin/v1,
    and nothing that tenants' keys do. None: there is no such API."""
    admin_port: int | None = None
    """A further TCP port that serves /admin/v1, which the HTTP port then does not. None: the HTTP port serves it."""
    limits: Path | None = None
    """YAML or JSON file of what tenants and keys may use, read again when it changes; docs/limits.md has its fields.
    Equal in all gateways of a deployment. None: no limits."""
    metric_tenants: int = 100
    """Tenants that have series of their own in the metrics of what tenants use; all further ones share one."""
    tls_certificate: Path | None = None
    """PEM file of the certificate chain for both APIs, reloaded when it changes. None: no TLS."""
    tls_key: Path | None = None
    """PEM file of the certificate's private key, without a passphrase."""
    tls_client_ca: Path | None = None
    """PEM file of the authorities whose certificates clients have, reloaded when it changes. None: clients are not
    asked for any.
    """
    tls_client_certificates: str = CERTIFICATES_REQUIRED
    """"required": a client without one can't connect. "optional": one that has none needs a key or a token; over gRPC
    clients are then not asked for certificates.
    """
    tls_client_tenants: Path | None = None
    """File of rules that map the names in certificates to tenants, such as `URI:spiffe://example.org/ns/{tenant}/sa/*
    -> {tenant}`, read again when it changes. None: a certificate lets a client connect, and names no tenant.
    """

    @property
    def asks_for_credentials(self) -> bool:
        """Whether a caller has to show who it is."""
        return any(each is not None for each in (self.api_keys, self.jwt_issuers, self.tls_client_tenants))

    @property
    def ignores_unknown_fields(self) -> bool:
        """Whether fields of bodies that nothing declares are left out."""
        return self.unknown_fields == UNKNOWN_IGNORED

    @property
    def metrics_address(self) -> str:
        """Address of the metrics port."""
        return self.host if self.metrics_host is None else self.metrics_host

    @property
    def origins(self) -> list[str]:
        """The parts of `cors_origins`."""
        return _parts(self.cors_origins)

    @property
    def hosts(self) -> list[str]:
        """The parts of `allowed_hosts`."""
        return _parts(self.allowed_hosts)


def _parts(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


@dataclass(frozen=True)
class LimitSettings:
    """Bounds on one request, and on the tokenizer's work of one process."""

    max_body_bytes: int = 8 * 1024 * 1024
    """Bytes of a request. At four bytes a token this is two million tokens, more than any context length."""
    max_pending_bytes: int = 16 * 1024 * 1024
    """Bytes of the large bodies that are being read, parsed and tokenized at once; further ones wait, unread. One byte
    can take thirteen: as a character of four bytes in the text, in what was parsed, and in the rendered prompt.
    """
    max_arriving_bytes: int = 64 * 1024 * 1024
    """Bytes of gRPC messages that arrive at once, each counted as one of `max_body_bytes` since its size is not known
    before; half as many large ones may wait to be parsed.
    """
    max_messages: int = 4096
    """Messages of a conversation. Some chat templates look back from each message over all before it."""
    max_prompts: int = 128
    """Prompts of one completions request."""
    max_inputs: int = 2048
    """Inputs of one request for vectors, as in OpenAI's API; of a score or rerank with its queries."""
    max_input_tokens: int = 300_000
    """Tokens of all these inputs together, likewise. Calls that count tokens take a text of as many, or of twice the
    model's context length where that is more.
    """
    max_vector_bytes: int = 64 * 1024 * 1024
    """Bytes of the vectors in an answer: as JSON about 12 for each number, as base64 about 6."""
    max_n: int = 128
    """Choices for each prompt, as in OpenAI's API."""
    max_choices: int = 256
    """Prompts times n. One request is one unit of scheduling and of recovery, so it stays small."""
    max_stop: int = 64
    """Stop strings; each is searched for in each token's text."""
    max_stop_chars: int = 1024
    """Characters of one stop string. That much text is held back while it may still match."""
    max_stop_token_ids: int = 1024
    """Stop token ids."""
    max_allowed_token_ids: int = 16_384
    """Tokens that an output may have, where it is held to some."""
    max_bad_words: int = 128
    """Words that an output must not have; each is looked for at each token."""
    max_bad_word_chars: int = 128
    """Characters of one of them."""
    max_logprobs: int = 20
    """Likeliest tokens shown at each position, as in OpenAI's API. Each takes room in the log."""
    max_prompt_logprobs: int = 2**18
    """Log probabilities of a request's prompts: tokens times one more than `prompt_logprobs`. Each takes about 24 bytes
    of the log.
    """
    max_logit_bias: int = 1024
    """Tokens with a bias."""
    max_grammar_bytes: int = 256 * 1024
    """Bytes of a JSON schema without its descriptions, which is also the most that engines take. Of a regular
    expression, a grammar beside the schemas in it, or all choices it is a quarter at most."""
    max_id_chars: int = 512
    """Characters of a caller's own request id, and of an idempotency key."""
    no_engine_deadline_s: float = 600.0
    """Seconds after which a request without a deadline is ended where its model has had no engine for as long. Longer
    than an engine needs to start on a new node, since a request may be what starts it.
    """
    tokenize_workers: int = 2
    """Threads that render and tokenize. The tokenizer releases Python's lock."""
    tokenize_queue: int = 512
    """Requests that may run in the threads or wait for one. Further ones are refused with RESOURCE_EXHAUSTED."""
    encoding_cache_bytes: int = 64 * 1024 * 1024
    """Bytes of token ids of messages and other parts of prompts that came before: about 15 million tokens."""
    tokenize_limit_s: float = 30.0
    """Seconds that rendering and tokenizing one request may take, its wait included; and those that a large body may
    wait to be read.
    """


@dataclass(frozen=True)
class ConnectionSettings:
    """Bounds on a connection: what a client may send before the gateway works for it, and how long that may take."""

    max_header_bytes: int = 32 * 1024
    """Bytes of a request's line and header; of a gRPC call's metadata."""
    max_header_fields: int = 128
    """Fields of an HTTP request's header. Each takes far more memory than its bytes."""
    header_timeout_s: float = 10.0
    """Seconds from a connection's begin, or from a further request's first byte, until the header is complete; and
    for the handshake of TLS or HTTP/2.
    """
    body_timeout_s: float = 60.0
    """Seconds from the header's end until the body is complete. The largest body then needs 140 kB a second."""
    idle_timeout_s: float = 75.0
    """Seconds that an HTTP connection without a request stays open after an answer. Above the 60 s of many proxies: who
    closes first must be the side that sends the requests.
    """
    max_connections: int = 8192
    """Open connections of each port. One more is answered with 503, or closed on the gRPC port. Fewer are kept where
    the process may not open as many files.
    """
    max_grpc_streams: int = 8192
    """Calls that are open at once on one gRPC connection; further ones wait in the client."""


PREFIX_SHARING_TENANT, PREFIX_SHARING_ALL = "tenant", "all"
PRIORITIES = (0, 1, 2)
"""The classes; 0 is served first."""


@dataclass(frozen=True)
class CacheSettings:
    """Who shares computed prompt prefixes. `cached_tokens` and the time to the first token tell of it. Equal in all
    gateways of a deployment.
    """

    prefix_sharing: str = PREFIX_SHARING_TENANT
    """"tenant": requests of one tenant, or of one of `prefix_groups`. "all": those of all tenants, which must trust
    each other; worth it where their prompts begin alike.
    """
    prefix_groups: Mapping[str, int] = field(default_factory=dict)
    """Tenants that share with others: a number for each; those with the same number share."""


@dataclass(frozen=True)
class ClassSettings:
    """Which priority classes callers may use. Equal in all gateways of a deployment."""

    first: int = 0
    """The best class of a tenant that is not named below: a request that asks for a better one, or for none, gets it.
    Above 0 where engines have the policy `priority`, so that class 0 interrupts others only for tenants named here."""
    first_of: Mapping[str, int] = field(default_factory=dict)
    """The best class of a tenant: "tenant=0,other=2"."""

    def allowed(self, tenant: str, asked: int, best: int | None = None) -> int:
        """Return the class that a tenant's request gets; `best` is the best that its credential allows, None any."""
        return max(asked, self.first_of.get(tenant, self.first), best or 0)


@dataclass(frozen=True)
class FormatSettings:
    """In which formats models write tool calls and reasoning, in place of what their cards and chat templates say."""

    tool_call_parser_of: Mapping[str, str] = field(default_factory=dict)
    """By a model's name the name of vLLM's parser: "llama=pythonic,other=none". "none": calls are content."""
    reasoning_parser_of: Mapping[str, str] = field(default_factory=dict)
    """Likewise: "llama=deepseek_r1"."""

    def parsers_of(self, model: str) -> OutputParsers:
        """Return the parsers of a model; empty names where none are set."""
        return OutputParsers(self.tool_call_parser_of.get(model, ""), self.reasoning_parser_of.get(model, ""))


@dataclass(frozen=True)
class AuditSettings:
    """The audit log: who asked for what, without prompts, outputs and credentials."""

    enabled: bool | None = None
    """Whether it is written. None: where callers need a credential, or administrators have keys."""
    file: Path | None = None
    """File of JSON lines of this process alone. None: they go to stderr with the other logs, by the logger
    `pagestream.audit`."""
    max_file_bytes: int = 64 * 1024 * 1024
    """Bytes after which a file is closed and numbered, and the next one begins."""
    max_files: int = 8
    """Files that are kept, the one that is written among them."""
    max_failures_per_minute: int = 60
    """Calls with wrong credentials that are noted; of further ones their number is."""
    max_refusals_per_minute: int = 600
    """Refused calls of callers with good credentials, likewise."""


@dataclass(frozen=True)
class StreamSettings:
    """How answers are streamed."""

    keep_alive_s: float = 15.0
    """Seconds of silence after which an empty line is sent: proxies drop connections that are silent for 30 s to 60 s.
    """
    queue_comments_s: float = 1.0
    """Seconds between the comments that say where a queued request stands, in streams that ask for them."""
    unserved_s: float = 2.0
    """Seconds without an entry after which a comment in a stream says that no engine runs its model now."""
    disconnect_grace_s: float = 10.0
    """Seconds without a reader after which a request is cancelled, unless its `on_disconnect` is "continue"."""
    whole_answers_bytes: int = 128 * 1024 * 1024
    """Bytes that all answers that are not streamed may take in memory: about 25 million tokens without log
    probabilities. Beyond, an answer is read again from its log when it has ended and others are done.
    """
    whole_answer_wait_s: float = 60.0
    """Seconds that such an answer, once complete, waits for that memory."""
    whole_answer_blanks_after_s: float | None = None
    """Seconds of silence after which an answer that is not streamed begins, with its status and headers; a line feed,
    which JSON allows before a value, then follows every `keep_alive_s`. A failure after that can't change the status
    any more and closes the connection. None: nothing is sent before the end."""


@dataclass(frozen=True)
class BatchSettings:
    """Batches and the files that they read and write, which Redis keeps in its memory. Equal in all gateways."""

    max_file_bytes: int = 64 * 1024 * 1024
    """Bytes of an uploaded file: 50,000 lines of 1.3 kB."""
    max_tenant_bytes: int = 128 * 1024 * 1024
    """Bytes of all files of a tenant. Once they are reached no file is taken, and no further job of its batches begins:
    the answers of those in flight may pass them."""
    max_bytes: int = 256 * 1024 * 1024
    """The same of all tenants together: a third of the memory that the chart gives Redis."""
    max_files: int = 1000
    """Files of a tenant."""
    max_batches: int = 200
    """Batches of a tenant that are kept; the oldest that has ended gives way to a new one."""
    max_lines: int = 50_000
    """Jobs of a batch, as in OpenAI's API."""
    max_answer_bytes: int = 4 * 1024 * 1024
    """Bytes of one job's answer. A larger one is an error of its job."""
    jobs_in_flight: int = 64
    """Jobs of a batch that are in the queue or run at once: enough for an engine, and few beside the queue's bounds."""
    driven: int = 8
    """Batches that a gateway drives at once; further ones wait, unless other gateways take them."""
    lease_s: float = 4.0
    """Seconds after which another gateway goes on with a batch whose gateway has died."""
    file_lifetime_s: int = 7 * 24 * 3600
    """Seconds for which a file is kept where its upload, or its batch, does not say; and a batch that has ended."""
    max_uploads: int = 8
    """Files that a gateway receives at once; each takes about 0.5 MiB. A tenant has three quarters of them at most."""
    upload_timeout_s: float = 600.0
    """Seconds from an upload's header until its body is complete: the largest file then needs 112 kB a second."""


@dataclass(frozen=True)
class ShutdownSettings:
    """How the process ends on SIGTERM or SIGINT."""

    drain_s: float = 2.0
    """Seconds that open streams get to finish. After that they end with an error that asks the client to resume on
    another gateway.
    """
    close_limit_s: float = 5.0
    """Seconds that each server gets to close its connections."""


@dataclass(frozen=True)
class Settings:
    """All settings of a gateway process, in groups."""

    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    connections: ConnectionSettings = field(default_factory=ConnectionSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    classes: ClassSettings = field(default_factory=ClassSettings)
    formats: FormatSettings = field(default_factory=FormatSettings)
    audit: AuditSettings = field(default_factory=AuditSettings)
    stream: StreamSettings = field(default_factory=StreamSettings)
    batches: BatchSettings = field(default_factory=BatchSettings)
    shutdown: ShutdownSettings = field(default_factory=ShutdownSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    broker: StreamsSettings = field(default_factory=StreamsSettings)
    """Settings of the durable streams: queue bounds, leases, retention. Equal in all processes of a deployment."""

    @property
    def audits(self) -> bool:
        """Whether the audit log is written."""
        if self.audit.enabled is not None:
            return self.audit.enabled
        return self.gateway.asks_for_credentials or self.gateway.admin_keys is not None


OWN_GROUPS = {
    "gateway": GatewaySettings,
    "limits": LimitSettings,
    "connections": ConnectionSettings,
    "cache": CacheSettings,
    "classes": ClassSettings,
    "formats": FormatSettings,
    "audit": AuditSettings,
    "stream": StreamSettings,
    "batches": BatchSettings,
    "shutdown": ShutdownSettings,
}
