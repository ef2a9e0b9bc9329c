"""Options of the engine, under the names of `pagestream-engine`'s flags: `pagestream_options.engine` declares them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pagestream_options.declaration import Option
from pagestream_options.engine import ENGINE_OPTIONS, POLICIES, SCALED_CACHE_DTYPES
from pydantic import Field, create_model
from pydantic.alias_generators import to_camel

from pagestream_operator.api.base import ApiModel, Rule

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
