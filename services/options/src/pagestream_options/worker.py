"""Options of an engine process: what it serves, where its Redis is, and its time limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagestream_options.declaration import REQUIRED, Option, declared, option

ENGINE_CORES = ("process", "inline")
STANDBY_STATES = ("imported", "loaded")


@dataclass(frozen=True)
class WorkerOptions:
    """The group WORKER: what the process serves, where its Redis is, and its time limits."""

    model: str = option(
        REQUIRED, "Folder with config.json, *.safetensors and tokenizer.json, or a Hugging Face repository."
    )
    redis_url: str = option(
        REQUIRED,
        "Address of the Redis: redis://, rediss:// (TLS), unix://, redis+sentinel:// or redis+cluster://.",
        "address of the Redis, such as redis://127.0.0.1:6379/0",
        spelled="redis",
        metavar="URL",
    )
    served_model_name: str = option(
        REQUIRED,
        "What clients ask for; not given: the folder's name.",
        "model's name in the API (default: the folder's)",
        metavar="NAME",
        shown_default="the folder's name",
    )
    engine_id: str = option(
        REQUIRED,
        "Name in leases and logs; leases add a boot nonce to it. Not given: host name and process id.",
        "name in leases and logs (default: host name and process id)",
        metavar="ID",
        pattern=r"([^\s:]+)?",
        expected="a name without spaces and colons",
        shown_default="host name and process id",
    )
    engine_core: str = option(
        "process",
        """Deprecated: an engine (scheduler, model) has a process of its own, apart from the event loop that talks to
        Redis. "inline" still runs it on a thread of this process. Where the model runs below the scheduler is the
        engine's `executor`.""",
        "deprecated: where the engine runs, in a process of its own (default) or on a thread; see --executor",
        choices=ENGINE_CORES,
    )
    standby: str = option(
        "",
        """How far to start before waiting for a line on standard input, and only then joining: "imported": the modules
        are imported; "loaded": the model is loaded too. Not given: join at once.""",
        "start this far, and join after a line on standard input (default: join at once)",
        choices=STANDBY_STATES,
    )
    tool_call_parser: str = option(
        "",
        """Format of the model's tool calls, by the name of vLLM's parser; "none": calls are content. Not given: as the
        chat template says. Models of `models` have what their templates say.""",
        "format of the model's tool calls, such as hermes (default: as its chat template says)",
        metavar="NAME",
        is_served=True,
    )
    reasoning_parser: str = option(
        "",
        "Format of its reasoning, likewise.",
        "format of its reasoning, such as deepseek_r1 (default: as its chat template says)",
        metavar="NAME",
        is_served=True,
    )
    chat_template: str = option(
        "",
        """File with the model's chat template, or its text, in place of what its folder has. Models of `models` have
        those of their folders.""",
        "Jinja template of chats, or its text (default: the model's own)",
        metavar="FILE",
        is_served=True,
    )
    default_chat_template_kwargs: str = option(
        "",
        "Values for the model's chat template where a request gives none, as a JSON object; likewise.",
        "values for the chat template where a request gives none, such as '{\"enable_thinking\": false}'",
        metavar="JSON",
        is_served=True,
    )
    partitions: int = option(
        4,
        "Partitions of a model that Redis does not know yet; a published number stays.",
        "partitions of a model new to this Redis, at most 1024 (default 4)",
        metavar="N",
        low=1,
        high=1024,
        is_served=True,
    )
    metrics_port: int | None = option(
        None,
        "TCP port of /healthz, /readyz and /metrics; None: no endpoint.",
        "serve /healthz, /readyz and /metrics",
        metavar="PORT",
        low=1,
    )
    metrics_host: str = option(
        "::",
        """Address of that port; ::, all of this machine, IPv4 and IPv6: probes and scrapers come from other
        machines.""",
        "where that port listens (default ::, all addresses)",
        metavar="HOST",
    )
    profile_dir: Path | None = option(
        None,
        "Folder for torch profiler traces, which SIGUSR2 or POST /debug/profile asks for; None: there are none.",
        "folder for profiles on demand (default: none)",
        metavar="DIR",
    )
    profile_steps: int = option(10, "Steps of a profile that a signal asks for.", low=1)
    idle_poll_s: float = option(
        0.1,
        "Seconds between claims without a doorbell message: the delay that a lost message costs.",
        low=0,
        is_above=True,
    )
    finish_timeout_s: float = option(
        0.0,
        """Seconds after SIGTERM for which requests with tokens go on here, where all other engines have another
        numerics fingerprint (a rollout). In every other case, and after that, they are handed back.""",
        low=0,
    )
    drain_timeout_s: float = option(
        8.0, "Seconds for the last appends and the hand-back after that.", low=0, is_above=True
    )
    exit_timeout_s: float = option(
        9.5,
        "Seconds from the end of serving after which the process exits, whatever still hangs.",
        low=0,
        is_above=True,
    )
    stall_timeout_s: float = option(
        120.0,
        """Seconds that one step may run before the watchdog exits the process, so that its requests go on
        elsewhere.""",
        low=0,
        is_above=True,
    )
    retry_delay_s: float = option(0.1, "Seconds between retries while Redis is away.", low=0, is_above=True)
    append_limit: int = option(
        256,
        "Most entries of one request in one append, so that a backlog after an outage does not block Redis.",
        low=1,
    )
    models: Sequence[str] = option(
        (),
        "Further models that this engine may serve, one at a time, as NAME=FOLDER: see docs/model-changes.md.",
        "further models that it may serve, one at a time, by demand: NAME=FOLDER,NAME=FOLDER",
        metavar="LIST",
        is_served=True,
    )
    enable_sleep_mode: bool = option(
        False,
        """Whether operators may put this engine to sleep, have it unload its model, and have it load one. So they may
        where it has `models`.""",
        "let operators put this engine to sleep, and load and unload its model",
        is_served=True,
    )
    wake_on_demand: bool = option(True, "Whether requests wake it; False: an operator does.")
    min_serve_s: float = option(
        10.0,
        "Seconds for which a model is served before another, for which requests wait, takes its engine.",
        low=0,
    )
    max_serve_s: float = option(
        60.0,
        """Seconds after which it takes it although requests that the engine has begun have no token yet; twice as many
        the next times, where they have none then, up to 16 times as many.""",
        low=0,
        is_above=True,
    )
    switch_finish_s: float = option(
        2.0,
        "Seconds in which running requests may end before an engine changes its model. The others are handed back.",
        low=0,
    )
    load_timeout_s: float = option(
        600.0,
        """Seconds in which a model has to be loaded that takes the place of another. Then the engine goes back to the
        one that it had, and tries again later.""",
        low=0,
        is_above=True,
    )
    kill_timeout_s: float = option(
        60.0,
        """Seconds in which a killed engine has to end and free its memory before a model is loaded. Then this process
        ends as well.""",
        low=0,
        is_above=True,
    )
    kept_log_bytes: int = option(
        128 * 1024 * 1024,
        """Bytes of written entries that are kept to be sent again where Redis has lost them: about 3 million tokens
        without log probabilities, the last minutes of any engine.""",
        low=1,
    )


WORKER_OPTIONS: Mapping[str, Option] = declared(WorkerOptions)
"""By the names of their fields."""
