"""What grammars cost: compiling, a mask for a token, and memory, on schemas of growing difficulty.

    .venv/bin/python tests/benchmarks/structured_output.py [--tokenizer FILE] [--count N] [--peer FOLDER]

Each schema is compiled, and an answer to it is drawn at random, token by token, from what its masks allow; times are of
the library's calls that the engine makes. With `--peer`, a folder with xgrammar installed, xgrammar runs in turns with
llguidance on the same schemas and tokens; it takes part only here.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.engines.json_schemas import schemas

DEMO = Path(__file__).resolve().parents[2] / "deploy" / "demo-model" / "model" / "tokenizer.json"
MOST_TOKENS = 100
WORD_BITS = 32


class Llguidance:
    """Compiles as `GrammarCompiler` does."""

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self._tokens = LLTokenizer(tokenizer.to_str(), eos_token=eos_token_id)
        self.num_words = -(-self._tokens.vocab_size // WORD_BITS)

    def compile(self, schema: str) -> LLMatcher:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        matcher.compute_bitmask()
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def start(self, compiled: LLMatcher) -> LLMatcher:
        return compiled.deep_copy()

    def fill(self, matcher: LLMatcher, bits: np.ndarray[Any, Any]) -> None:
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)

    def take(self, matcher: LLMatcher, token_id: int) -> None:
        matcher.consume_token(token_id)


class Xgrammar:
    """The peer, as vLLM calls it."""

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        import torch
        import xgrammar
        from transformers import PreTrainedTokenizerFast

        wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        info = xgrammar.TokenizerInfo.from_huggingface(wrapped, stop_token_ids=[eos_token_id])
        self._xgrammar, self._torch = xgrammar, torch
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: str) -> Any:
        return self._compiler.compile_json_schema(schema, any_whitespace=False, separators=(",", ":"))

    def start(self, compiled: Any) -> Any:
        return self._xgrammar.GrammarMatcher(compiled)

    def fill(self, matcher: Any, bits: np.ndarray[Any, Any]) -> None:
        matcher.fill_next_token_bitmask(self._torch.from_numpy(bits[None]))

    def take(self, matcher: Any, token_id: int) -> None:
        matcher.accept_token(token_id)


def answer(library: Any, compiled: Any, num_words: int, eos_token_id: int) -> tuple[list[float], list[int] | None]:
    """Draw an answer. Return the microseconds of each mask, and its tokens; None where it has not ended."""
    generator = random.Random(1)
    times: list[float] = []
    token_ids: list[int] = []
    matcher = library.start(compiled)
    bits = np.zeros(num_words, np.int32)
    for _ in range(MOST_TOKENS):
        started = time.perf_counter()
        library.fill(matcher, bits)
        times.append((time.perf_counter() - started) * 1e6)
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little").nonzero()[0]
        token_id = int(generator.choice(allowed))
        if token_id == eos_token_id:
            return times, token_ids
        library.take(matcher, token_id)
        token_ids.append(token_id)
    return times, None


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Return whether an answer is what its schema asks for."""
    try:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def resident_bytes() -> int:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def row(name: str, values: list[float], unit: str) -> str:
    """Return a line of a table: median, 95th and 99th percentile, largest."""
    ordered = sorted(values)
    at = [statistics.median(ordered), *(ordered[int(len(ordered) * share)] for share in (0.95, 0.99)), ordered[-1]]
    return f"| {name} | " + " | ".join(f"{value:.3g} {unit}" for value in at) + " |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--tokenizer", type=Path, default=DEMO)
    parser.add_argument("--eos", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000, help="schemas")
    parser.add_argument("--peer", type=Path)
    given = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(given.tokenizer))
    started = time.perf_counter()
    own = Llguidance(tokenizer, given.eos)
    libraries: dict[str, Any] = {"llguidance": own}
    print(f"{tokenizer.get_vocab_size()} tokens, laid out in {time.perf_counter() - started:.3f} s")
    if given.peer is not None:
        sys.path.append(str(given.peer))
        libraries["xgrammar"] = Xgrammar(tokenizer, given.eos)
    compiling: dict[str, list[float]] = {name: [] for name in libraries}
    first: dict[str, list[float]] = {name: [] for name in libraries}
    again: dict[str, list[float]] = {name: [] for name in libraries}
    refused: dict[str, list[str]] = {name: [] for name in libraries}
    invalid: dict[str, list[str]] = {name: [] for name in libraries}
    ended = dict.fromkeys(libraries, 0)
    grown, kept = [], []
    for schema_name, schema in list(schemas().items())[: given.count]:
        text = json.dumps(schema)
        for name, library in libraries.items():
            before = resident_bytes()
            started = time.perf_counter()
            try:
                compiled = library.compile(text)
            except (ValueError, RuntimeError):
                refused[name].append(schema_name)
                continue
            compiling[name].append((time.perf_counter() - started) * 1e3)
            times, token_ids = answer(library, compiled, own.num_words, given.eos)
            first[name] += times
            again[name] += answer(library, compiled, own.num_words, given.eos)[0]
            if token_ids is not None:
                ended[name] += 1
                if not is_valid(tokenizer.decode(token_ids, skip_special_tokens=False), schema):
                    invalid[name].append(schema_name)
            kept.append(compiled)
            if name == "llguidance":
                grown.append((resident_bytes() - before) / 2**10)
    print("\n| | median | p95 | p99 | largest |\n|---|---|---|---|---|")
    for name in libraries:
        print(row(f"{name}: compile", compiling[name], "ms"))
        print(row(f"{name}: mask, first answer", first[name], "us"))
        print(row(f"{name}: mask, the same answer again", again[name], "us"))
        print(
            f"{name}: {len(first[name])} masks; {len(refused[name])} schemas refused: {refused[name]}; "
            f"{ended[name]} answers ended, {len(invalid[name])} of them do not validate: {invalid[name]}"
        )
    print(f"memory of a compiled grammar after two answers: mean {statistics.mean(grown):.0f} KiB")


if __name__ == "__main__":
    main()
