"""Runs every model that the installed `transformers` registers as causal or as one of images and text, and writes what
came of it as two tables.

Each gets a small random configuration. Its greedy tokens in the engine (several requests in one batch, prompts in
chunks, prefix cache, a second pass over cached prefixes) must equal those of `generate`, its log probabilities nearly.
Exits with 1 if fewer than MIN_SHARE of the model types pass.

    .venv/bin/python tests/campaigns/families.py [--write docs/models.md] [MODEL_TYPE...]
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from pagestream_engine import EngineError
from pagestream_engine.models.registry import FamilySource, open_model
from support.engines.architectures import (
    all_types,
    default_config,
    model_types,
    nested_config,
    nested_types,
    small_config,
    write_model,
)
from support.engines.general_parity import check_parity
from support.engines.published import BEGIN, END

MIN_SHARE = 0.8
MAX_BYTES = 12 << 30
"""Of address space."""
HEAD = """# Models

Written by `make deep PARTS=families`, which runs each of these with a small random configuration and compares tokens
and log probabilities with `transformers` {version}. "fused" is a family of the engine's own layers, "general" is
`transformers`' own modelling code on the paged cache. These are all types that are registered as causal language
models.

{passed} of {total} model types pass; of the {attention} whose code calls the attention interface, {calling}.

| model type | architecture | result |
|---|---|---|
"""
NESTED_HEAD = """
## Models of images and text

Their language model runs, as text: a request with an image is refused. "fused" and "general" are as above; of the
general ones the whole class is loaded, and what sees images is dropped.

{passed} of {total} model types pass as text.

| model type | architecture | result |
|---|---|---|
"""
TAIL = """
## Rope scalings

Every scaling of `transformers` runs, on both ways. Two of them choose frequencies by a request's length, and
`transformers` rotates cached keys by others than new ones, or computes them anew, when a request outgrows its original
context. Here a model's frequencies depend on `max_model_len` alone: every sequence rotates as `transformers` rotates
one of `max_model_len` tokens, so tokens depend neither on chunks nor on where a sequence resumes.

| scaling | context where `max_model_len` is left out | at most |
|---|---|---|
| `longrope` | `original_max_position_embeddings`, short factors | `max_position_embeddings`, long factors |
| `dynamic` | `max_position_embeddings`, unscaled | that times `factor`, scaled for `max_model_len` |
| `yarn` | the original context times `factor` | the same |
| others | `max_position_embeddings` | the same |

Modelling code that chooses its frequencies by itself (`phimoe`) ends at the default. Where layers attend within chunks
of the context (Llama 4), `max_model_len` is at most `attention_chunk_size`.
"""


@dataclass(frozen=True)
class Row:
    """What came of one model type."""

    kind: str
    architecture: str
    passed: bool
    text: str


def main(arguments: Sequence[str]) -> int:
    """Run the campaign; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="MODEL_TYPE")
    parser.add_argument("--write", type=Path, help="file for the table")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="keep rows here, and go on after an interruption")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    # Some have parts that no field makes small.
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    causal, nested = all_types(), nested_types()
    kinds = dict.fromkeys(options.kinds or [*causal, *nested])
    kept = {} if options.rows is None or not options.rows.is_file() else json.loads(options.rows.read_text())

    def row(kind: str, architecture: str, *, is_nested: bool = False) -> Row:
        name = f"{kind} {architecture} {is_nested}"
        if name not in kept:
            kept[name] = astuple(report(run_one(kind, architecture, is_nested=is_nested)))
            if options.rows is not None:
                options.rows.write_text(json.dumps(kept))
        return Row(*kept[name])

    rows = [row(kind, causal[kind]) for kind in kinds if kind in causal]
    nested_rows = [row(kind, nested[kind], is_nested=True) for kind in kinds if kind in nested]
    if options.write is not None:
        options.write.write_text(page(rows, nested_rows) + published_part(options.write) + TAIL)
    counted = [row for row in rows if row.kind in model_types()]
    return 0 if sum(row.passed for row in counted) >= MIN_SHARE * len(counted) else 1


def report(row: Row) -> Row:
    print(f"{'passes' if row.passed else 'FAILS '} {row.kind}: {row.text}", flush=True)
    return row


def run_one(kind: str, architecture: str, *, is_nested: bool = False) -> Row:
    """Run one model type, or the language model of one of images and text."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        try:
            try:
                config = nested_config(kind) if is_nested else small_config(kind)
            except Exception:
                default_config(kind, architecture).save_pretrained(folder)
                open_model(folder)  # it may be refused whatever its sizes are
                raise
            config.save_pretrained(folder)
            source = open_model(folder)  # what is refused needs no weights
            way = "fused" if isinstance(source, FamilySource) else "general"
            write_model(folder, config)
            check_parity(folder)
        except EngineError as error:
            return Row(kind, architecture, False, f"refused: {_one_line(error)}")
        except AssertionError as error:
            return Row(kind, architecture, False, f"differs: {_one_line(error)}")
        except Exception as error:  # noqa: BLE001 - a row of the table, like any other
            return Row(kind, architecture, False, f"not run: {type(error).__name__}: {_one_line(error)}")
    return Row(kind, architecture, True, f"passes{' as text' if is_nested else ''} ({way})")


def page(rows: Sequence[Row], nested: Sequence[Row]) -> str:
    """Return the page: tables of all rows, and the reasons of those that did not pass."""
    counts = {"passed": sum(row.passed for row in rows), "total": len(rows), "attention": len(model_types())}
    counts["calling"] = sum(row.passed for row in rows if row.kind in model_types())
    of_nested = {"passed": sum(row.passed for row in nested), "total": len(nested)}
    text = HEAD.format(version=transformers.__version__, **counts) + table(rows)
    return text + NESTED_HEAD.format(**of_nested) + table(nested)


def published_part(page: Path) -> str:
    """Return what `published.py` has written to the page."""
    _, begin, rest = page.read_text().partition(BEGIN) if page.is_file() else ("", "", "")
    part, end, _ = rest.partition(END)
    return f"\n{begin}{part}{end}" if end else ""


def table(rows: Iterable[Row]) -> str:
    """Return the rows of a table, and below it the reasons."""
    rows = sorted(rows, key=lambda row: row.kind)
    text = "".join(f"| {row.kind} | {row.architecture} | {row.text.partition(':')[0]} |\n" for row in rows)
    text += "\nReasons:\n\n"
    for row in rows:
        if not row.passed:
            reason = row.text.replace(f"{row.architecture}: ", "")
            text += textwrap.fill(f"- `{row.kind}`: {reason}", 100, subsequent_indent="  ") + "\n"
    return text


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
