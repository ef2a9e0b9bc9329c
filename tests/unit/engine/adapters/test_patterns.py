"""Patterns match as Python's own matcher finds them, and no pattern takes long."""

from __future__ import annotations

import re

import pytest
from pagestream_engine.adapters.patterns import NamePattern

NAMES = [
    f"model.layers.{layer}.{block}.{linear}"
    for layer in (0, 1, 10, 21)
    for block in ("self_attn", "mlp")
    for linear in ("q_proj", "v_proj", "down_proj", "proj.q_proj")
]
USUAL = [
    "q_proj",
    "self_attn.v_proj",
    "model.layers.1.self_attn.q_proj",
    r".*\.1\.self_attn\.v_proj",
    r"layers\.\d+\.mlp\.down_proj",
    "q_proj|v_proj",
    r"model\.layers\.(0|1|2)\.(self_attn|mlp)\..*_proj",
    "^model.*q_proj$",
    r"(layers\.)?1[0-9]?\.[^.]+\.[qkv]_proj",
    r"(.*\.)?(?:q|v)_proj",
    r"layers\.\d{2}\..{3,9}\.\w+?",
    r"(?P<x>m|l)+p\.\S*j",
    "",
]


@pytest.mark.parametrize("pattern", USUAL)
def test_a_pattern_matches_what_it_does_for_peft(pattern: str) -> None:
    found = NamePattern(pattern)
    for name in NAMES:
        assert found.matches(name) == bool(re.match(rf"(.*\.)?({pattern})$", name)), name


@pytest.mark.parametrize("pattern", ["([a-z0-9_.]+)+!", "(.|.)" * 150 + "!", ".*" * 300 + "!", "((a*)*)*" * 60 + "!"])
def test_a_pattern_that_backtracks_without_end_has_one_pass(pattern: str) -> None:
    assert not NamePattern(pattern).matches("model.layers.1.self_attn." + "a" * 60)


@pytest.mark.parametrize(
    ("pattern", "match"),
    [
        (r"(a)\1", "groupref"),
        ("(?=a)a", "assert"),
        ("(?i:a)", "subpattern"),
        (r"\ba", "at_boundary"),
        ("a{1000}" * 9, "too many"),
        ("(((){4000}){4000}){4000}", "too many"),
        ("a)|(b", "unbalanced"),
        ("(?i)a", "global flags"),
        ("a" * 2000, "2000 characters"),
    ],
)
def test_what_needs_backtracking_or_is_too_large_is_refused(pattern: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        NamePattern(pattern)


def test_the_patterns_of_an_adapter_share_their_steps() -> None:
    assert NamePattern("layers.[0-9].mlp", 0).num_steps == 0, "a name takes none"
    first = NamePattern(".{0,100}x")
    assert first.num_steps > 100
    assert NamePattern(".{0,100}x", first.num_steps).matches("ax")
    with pytest.raises(ValueError, match="and those before it have more than 65536 parts"):
        NamePattern(".{0,100}x", first.num_steps - 1)
