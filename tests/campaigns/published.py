"""Starts the published checkpoints that most people deploy, made small from their real configuration, and writes what
came of it as a table.

Each is written to disk as it is published, by its real `config.json` with few layers and small widths: same nesting,
same `quantization_config`, same names of tensors. Greedy tokens must equal those that `transformers` generates with the
same weights in floats, log probabilities nearly. What is refused must be so before a weight is read. Exits with 1 where
fewer than MIN_EQUAL are equal, one differs, or one is refused late.

    .venv/bin/python tests/campaigns/published.py [--write docs/models.md] [NAME...]
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from pagestream_engine import LLM, EngineError
from pagestream_engine.models.registry import FamilySource, open_model
from pagestream_gateway.output_formats import reasoning_format
from pagestream_grammars.output_formats.reasoning import REASONING_PARSERS
from pagestream_grammars.output_formats.registry import TOOL_CALL_PARSERS, tool_format
from support.engines.general_parity import GREEDY, check_parity, mixed_prompts, references
from support.engines.published import BEGIN, CONTEXT, END, Published, published, small, write_small

MIN_EQUAL = 50
NUM_BLOCKS = 400
"""Enough for all prompts at once, however many groups layers of several kinds make."""
MAX_BYTES = 12 << 30
"""Of address space."""
BEFORE = "## Rope scalings\n"
"""What the table is put before on a page that has none yet."""
HEAD = """
## Published checkpoints

Written by `make deep PARTS=published`. Each of these is made small by rule from its real `config.json`: few layers that
keep the pattern of layer types, small widths that keep ratios of heads and shapes of blocks and groups, random weights
by the names of the published index, the same nesting and `quantization_config`. "equal" is: it starts as it is
published, and its greedy tokens and log probabilities are those of `transformers` {version} with the same weights in
floats. "tools" and "reasoning" are the formats that a gateway recognises by the chat template, or the parser to name
where the template is not among llama.cpp's, whose marks are kept here; "no" is a format that has no parser. "c-t" is
compressed-tensors.

{equal} of {total} are equal; {refused} are refused before a weight is read, in {seconds:.2f} s at most after imports.
Layers with a recurrent state and attention to selected tokens are "coming".

| checkpoint | form | result | tools | reasoning |
|---|---|---|---|---|
"""
COMING = ("recurrent state", "index_topk")
"""What refusals name that is not built yet."""
SOURCES = """
Configurations are facts as stated in `tests/campaigns/published/checkpoints.json`, with the source of each; `*` marks
those with a field that no source at hand states.
"""


@dataclass(frozen=True)
class Row:
    """What came of one checkpoint."""

    facts: Published
    text: str
    seconds: float = 0.0
    """Until it was refused."""

    @property
    def is_equal(self) -> bool:
        """Whether it runs as `transformers` does."""
        return self.text.startswith("equal")

    @property
    def is_refused(self) -> bool:
        """Whether it was refused before its weights were read."""
        return self.text.startswith("refused")


def main(arguments: Sequence[str]) -> int:
    """Run the campaign; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="part of a checkpoint's name; default: all")
    parser.add_argument("--write", type=Path, help="page for the table")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="keep rows here, and go on after an interruption")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    kept = {} if options.rows is None or not options.rows.is_file() else json.loads(options.rows.read_text())
    rows = []
    for name, facts in published().items():
        if options.names and not any(each in name for each in options.names):
            continue
        row = Row(facts, *kept[name]) if name in kept else run_one(facts)
        rows.append(row)
        kept[name] = (row.text, row.seconds)
        if options.rows is not None:
            options.rows.write_text(json.dumps(kept))
        print(f"{name}: {row.text}", flush=True)
    if options.write is not None:
        options.write.write_text(page(options.write.read_text(), rows))
    num_equal = sum(row.is_equal for row in rows)
    print(f"{num_equal} of {len(rows)} are equal, {sum(row.is_refused for row in rows)} refused")
    is_whole = bool(options.names) or num_equal >= MIN_EQUAL
    return 0 if is_whole and all(row.is_equal or row.is_refused for row in rows) else 1


def run_one(facts: Published) -> Row:
    """Start one, and compare it."""
    with tempfile.TemporaryDirectory() as scratch:
        if (refused := _refused(facts, Path(scratch) / "unreadable")) is not None:
            return refused
        try:
            folder, plain = write_small(facts, Path(scratch))
            way = "fused" if isinstance(open_model(folder), FamilySource) else "general"
            _check_start(folder)
            llm = check_parity(folder, references(plain), max_model_len=CONTEXT, num_gpu_blocks_override=NUM_BLOCKS)
            (again,) = llm.generate([mixed_prompts()[1]], GREEDY, use_tqdm=False)
            assert again.num_cached_tokens, "a prompt that was computed before found no cached prefix"
        except AssertionError as error:
            return Row(facts, f"differs: {_one_line(error)}")
        except Exception as error:  # noqa: BLE001 - a row of the table, like any other
            return Row(facts, f"fails: {type(error).__name__}: {_one_line(error)}")
    return Row(facts, f"equal ({way})")


def _refused(facts: Published, folder: Path) -> Row | None:
    """Return the refusal of a checkpoint whose weights can't be read at all; None where it is not refused."""
    folder.mkdir()
    config = small(facts)
    for name, content in {"config.json": config, **facts.files}.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "model.safetensors").write_bytes(b"no weights")
    try:
        open_model(folder)
    except EngineError as error:
        return Row(facts, f"refused: {_one_line(error)}", _seconds_to_refuse(folder))
    return None


def _seconds_to_refuse(folder: Path) -> float:
    """Return how long a refusal takes where modules are imported already."""
    began = time.perf_counter()
    with suppress(EngineError):
        open_model(folder)
    return time.perf_counter() - began


def _check_start(folder: Path) -> None:
    """Start an engine with nothing but the checkpoint, as its user does."""
    LLM(folder, device="cpu", num_gpu_blocks_override=CONTEXT)


def page(text: str, rows: Sequence[Row]) -> str:
    """Return a page with the table, and the reasons of those that are not equal."""
    counts = {
        "version": transformers.__version__,
        "equal": sum(row.is_equal for row in rows),
        "total": len(rows),
        "refused": sum(row.is_refused for row in rows),
        "seconds": max((row.seconds for row in rows if row.is_refused), default=0.0),
    }
    table = HEAD.format(**counts)
    for row in rows:
        name = row.facts.name + ("*" if row.facts.unverified else "")
        cells = (name, form_of(row.facts), result_of(row), tools_of(row.facts), reasoning_of(row.facts))
        table += f"| {' | '.join(cells)} |\n"
    table += SOURCES
    reasons = [row for row in rows if not row.is_equal]
    table += "\nReasons:\n\n" if reasons else ""
    for row in reasons:
        table += textwrap.fill(f"- `{row.facts.name}`: {row.text}", 100, subsequent_indent="  ") + "\n"
    before, found, rest = text.partition(BEGIN)
    after = rest.partition(END)[2] if found else ""
    if not found:
        before, heading, rest = text.partition(BEFORE)
        after = "\n" + heading + rest
    return f"{before}{BEGIN}{table}\n{END}{after}"


def result_of(row: Row) -> str:
    """Return the result in a word or two."""
    is_coming = row.is_refused and any(each in row.text for each in COMING)
    return row.text.partition(":")[0] + (", coming" if is_coming else "")


def form_of(facts: Published) -> str:
    """Return how the weights are stored, and whether the language model is nested."""
    given = facts.config.get("quantization_config") or (facts.files.get("hf_quant_config.json") or {}).get(
        "quantization"
    )
    nested = "nested, " if "vision_config" in facts.config or "text_config" in facts.config else ""
    if given is None:
        places: list[Mapping[str, object]] = [facts.config, facts.config.get("text_config") or {}]
        dtypes = [place.get(name) for place in places for name in ("torch_dtype", "dtype")]
        return nested + str(next((dtype for dtype in dtypes if dtype), "float32"))
    method = given.get("quant_method", "modelopt")
    details = {
        "fp8": lambda: "blocks" if given.get("weight_block_size") else "a scale a matrix",
        "gptq": lambda: f"{given['bits']} bits" + (", desc_act" if given.get("desc_act") else ""),
        "awq": lambda: "4 bits",
        "bitsandbytes": lambda: given["bnb_4bit_quant_type"],
        "modelopt": lambda: given["quant_algo"],
    }
    if method == "compressed-tensors":
        return nested + _compressed(given)
    detail = details[method]() if method in details else ""
    return f"{nested}{method}" + (f", {detail}" if detail else "")


def _compressed(given: Mapping[str, Any]) -> str:
    (group,) = given["config_groups"].values()
    weights = group["weights"]
    return f"{weights['type']}{weights['num_bits']} by {weights['strategy']} (c-t)"


def tools_of(facts: Published) -> str:
    """Return the format of tool calls that is recognised."""
    if facts.marks:
        template = " ".join(facts.marks)
        found = tool_format(template)
        return found or ("no" if "tools" in facts.marks else "")
    return f"`{facts.tools}`" if facts.tools in TOOL_CALL_PARSERS else "no" if facts.tools else ""


def reasoning_of(facts: Published) -> str:
    """Return whether reasoning is recognised."""
    if facts.marks:
        return "yes" if reasoning_format(" ".join(facts.marks), "") else ""
    return f"`{facts.reasoning}`" if facts.reasoning in REASONING_PARSERS else "no" if facts.reasoning else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
