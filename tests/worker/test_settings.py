from pathlib import Path

import pytest
from pagestream_engine import ConfigError
from pagestream_worker import ProcessSettings, build_parser, load_settings

POD = {
    "PAGESTREAM_WORKER__REDIS": "redis://there:6379/0",
    "PAGESTREAM_WORKER__SERVED_MODEL_NAME": "demo",
    "PAGESTREAM_WORKER__METRICS_PORT": "9400",
    "PAGESTREAM_WORKER__ENGINE_ID": "demo-engine-1",
    "PAGESTREAM_ENGINE__MAX_NUM_SEQS": "8",
    "PAGESTREAM_ENGINE__NUM_GPU_BLOCKS_OVERRIDE": "64",
    "PAGESTREAM_ENGINE__DTYPE": "float32",
    "PAGESTREAM_ENGINE__ENABLE_PREFIX_CACHING": "false",
    "PAGESTREAM_BROKER__RETENTION_S": "60",
    "PAGESTREAM_TELEMETRY__OTLP_ENDPOINT": "http://collector:4317",
    "PAGESTREAM_OPERATOR__NAMESPACES": "all",
    "PAGESTREAM_REQUIRE": "gpu",
}


def load(*arguments: str, **variables: str) -> ProcessSettings:
    return load_settings(arguments, variables)


def test_all_settings_can_come_from_the_environment() -> None:
    process = load("/models/demo", **POD)
    worker = process.worker
    assert (worker.model, worker.redis_url, worker.served_model_name) == (
        "/models/demo",
        "redis://there:6379/0",
        "demo",
    )
    assert (worker.metrics_port, worker.engine_id, worker.partitions) == (9400, "demo-engine-1", 4)
    assert (process.engine.scheduler.max_num_seqs, process.engine.model.dtype) == (8, "float32")
    assert (process.engine.cache.num_gpu_blocks_override, process.engine.cache.enable_prefix_caching) == (64, False)
    assert process.streams.retention_s == 60
    assert process.telemetry.otlp_endpoint == "http://collector:4317"


def test_flags_override_variables() -> None:
    flags = ("--redis", "redis://flag", "--metrics-port", "1", "--max-num-seqs", "4", "--dtype", "auto")
    process = load("/models/demo", *flags, "--log-level", "DEBUG", "--otlp-endpoint", "http://flag:1", **POD)
    assert (process.worker.redis_url, process.worker.metrics_port) == ("redis://flag", 1)
    assert (process.engine.scheduler.max_num_seqs, process.engine.model.dtype) == (4, "auto")
    assert (process.telemetry.log_level, process.telemetry.otlp_endpoint) == ("DEBUG", "http://flag:1")


def test_plugins_come_from_a_flag_or_a_variable() -> None:
    given = {"PAGESTREAM_ENGINE__PLUGINS": "mine.policies, mine.families"}
    by_variable = load("m", "--redis", "redis://x", **given)
    assert by_variable.engine.extensions.plugins == ("mine.policies", "mine.families")
    by_flag = load("m", "--redis", "redis://x", "--plugins", "other,mine.families", **given)
    assert by_flag.engine.extensions.plugins == ("other", "mine.families")


def test_the_model_may_come_from_the_environment_and_names_have_defaults() -> None:
    worker = load(PAGESTREAM_WORKER__MODEL="/models/demo", PAGESTREAM_WORKER__REDIS="redis://x").worker
    assert (worker.model, worker.served_model_name, worker.profile_dir) == ("/models/demo", "demo", None)
    assert worker.engine_id
    with_folder = load("m", "--redis", "redis://x", PAGESTREAM_WORKER__PROFILE_DIR="/profiles").worker
    assert with_folder.profile_dir == Path("/profiles")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PAGESTREAM_WORKER__REDIS_URL", "redis://x"),
        ("PAGESTREAM_WORKER__METRICS_PORT", "tcp://10.0.0.1:80"),
        ("PAGESTREAM_WORKER__METRICS_PORT", "0"),
        ("PAGESTREAM_WORKER__PARTITIONS", "1025"),
        ("PAGESTREAM_WORKER__STALL_TIMEOUT_S", "-1"),
        ("PAGESTREAM_WORKER__FINISH_TIMEOUT_S", "-1"),
        ("PAGESTREAM_WORKER__FINISH_TIMEOUT_S", "inf"),
        ("PAGESTREAM_WORKER__ENGINE_ID", "a b"),
        ("PAGESTREAM_WORKER__TOOL_CALL_PARSER", "herms"),
        ("PAGESTREAM_ENGINE__MAX_NUM_SEQ", "8"),
        ("PAGESTREAM_ENGINE__MAX_NUM_SEQS", "eight"),
        ("PAGESTREAM_ENGINE__MAX_NUM_SEQS", "0"),
        ("PAGESTREAM_ENGINE__KV_CACHE_DTYPE", "int8"),
        ("PAGESTREAM_ENGINE__PLUGINS", "my-module"),
        ("PAGESTREAM_BROKER__NOTHING", "8"),
        ("PAGESTREAM_WROKER__REDIS", "redis://x"),
        ("PAGESTREAM_TELEMETRY__LOG_FORMAT", "xml"),
    ],
)
def test_unknown_and_malformed_variables_are_named(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^{variable}: "):
        load("m", "--redis", "redis://x", **{variable: value})


def test_a_missing_option_is_named_with_its_variable() -> None:
    with pytest.raises(ValueError, match="PAGESTREAM_WORKER__REDIS"):
        load("m")
    with pytest.raises(ValueError, match="PAGESTREAM_WORKER__MODEL"):
        load("--redis", "redis://x")


def test_a_flag_out_of_range_is_the_engines_own_error() -> None:
    with pytest.raises(ConfigError, match=r"^max_num_seqs: "):
        load("m", "--redis", "redis://x", "--max-num-seqs", "0", PAGESTREAM_ENGINE__MAX_NUM_SEQS="4")


def test_more_partitions_than_one_round_can_sweep_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--partitions", "1025"])
    assert "'1025' was given, a whole number from 1 to 1024 is expected" in capsys.readouterr().err
    assert build_parser().parse_args(["--partitions", "1024"]).partitions == 1024


def test_a_chat_template_is_a_file_or_its_text(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages }}\n")
    base = ("/models/demo", "--redis", "redis://x", "--models", "other=/models/other")
    worker = load(*base, "--chat-template", str(file)).worker
    assert (worker.chat_of("demo").text, worker.chat_of("other").text) == ("{{ messages }}\n", "")
    assert load(*base, "--chat-template", "{{ tools }}").worker.chat_of("demo").text == "{{ tools }}"
    by_variable = load(*base, PAGESTREAM_WORKER__CHAT_TEMPLATE="{% if tools %}\n{% endif %}").worker
    assert by_variable.chat_of("demo").text == "{% if tools %}\n{% endif %}"
    values = '{"enable_thinking": false}'
    assert load(*base, "--default-chat-template-kwargs", values).worker.chat_of("demo").arguments == values


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("chat-template", "/no/such.jinja", "'/no/such.jinja' was given, a file with a Jinja template is expected"),
        ("chat-template", "{% for %}", "no Jinja template"),
        ("default-chat-template-kwargs", "[1]", "a JSON object like"),
        ("default-chat-template-kwargs", "enable_thinking=false", "a JSON object like"),
    ],
)
def test_what_is_no_chat_template_is_refused_by_its_option(option: str, value: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"^--{option}: .*{words}"):
        load("m", "--redis", "redis://x", f"--{option}", value)
    variable = f"PAGESTREAM_WORKER__{option.replace('-', '_').upper()}"
    with pytest.raises(ValueError, match=f"^{variable}: .*{words}"):
        load("m", "--redis", "redis://x", **{variable: value})
