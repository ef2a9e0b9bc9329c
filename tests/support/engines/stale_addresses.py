"""Finds addresses of memory that is gone, in anything that an object reaches: tables that kernels read, keys, closures.

A table of addresses outlives the memory that it names without a sign of it: the kernel reads what lies there then.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

Span = tuple[int, int]
"""Where memory begins and ends."""
_LEAST_ADDRESS = 1 << 20
_LEAVES = (ModuleType, type, CodeType, FrameType, str, bytes, float, bool, type(None), torch.dtype, torch.device)


def storages(root: object) -> dict[int, int]:
    """Return where the memory of each tensor begins that an object reaches, and how many bytes it has."""
    found = {}
    for each, _ in _walk(root):
        if isinstance(each, Tensor) and each.layout == torch.strided:
            storage = each.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def freed(before: dict[int, int], after: dict[int, int]) -> list[Span]:
    """Return the memory of the first of two results of `storages` that is not in the second, which is taken later."""
    return [(begin, begin + size) for begin, size in before.items() if begin not in after]


def stale_addresses(root: object, gone: Iterable[Span]) -> list[str]:
    """Return the paths to all numbers that an object reaches, and that lie in memory which is gone."""
    spans = np.array(sorted(gone), np.int64).reshape(-1, 2)
    return [path for each, path in _walk(root) if _names(each, spans)]


def _names(each: object, spans: np.ndarray[Any, Any]) -> bool:
    if isinstance(each, Tensor):
        if each.dtype not in (torch.int64, torch.uint64) or each.device.type != "cpu":
            return False
        numbers = each.detach().flatten().view(torch.int64).numpy()
    elif isinstance(each, np.ndarray):
        names = each.dtype.names or ()
        wide = [each[name] for name in names if each.dtype[name].itemsize == 8] if names else [each]
        kinds = [part.ravel() for part in wide if part.dtype.kind in "iu" and part.dtype.itemsize == 8]
        numbers = np.concatenate(kinds).astype(np.int64) if kinds else np.empty(0, np.int64)
    elif isinstance(each, int) and _LEAST_ADDRESS <= each < 1 << 63:
        numbers = np.array([each])
    else:
        return False
    numbers = numbers[numbers >= _LEAST_ADDRESS]
    places = np.searchsorted(spans[:, 0], numbers, side="right") - 1
    return bool(len(numbers) and len(spans) and ((places >= 0) & (numbers < spans[places, 1])).any())


def _walk(root: object) -> Iterator[tuple[object, str]]:
    """Yield all that an object reaches, once each, with a path to it."""
    seen: set[int] = set()
    waiting: list[tuple[object, str]] = [(root, type(root).__name__)]
    kept = []  # so that no number of an object is another one's meanwhile
    while waiting:
        each, path = waiting.pop()
        if isinstance(each, _LEAVES) or (id(each) in seen and not isinstance(each, int)):
            continue
        seen.add(id(each))
        kept.append(each)
        yield each, path
        waiting += _parts(each, path)


def _parts(each: object, path: str) -> list[tuple[object, str]]:  # noqa: PLR0911 - one a kind of object
    if isinstance(each, dict):
        values = [(value, f"{path}[{key!r:.40}]") for key, value in each.items()]
        return values + [(key, f"{path}, a key") for key in each]
    if isinstance(each, list | tuple | set | frozenset):
        return [(value, f"{path}[{number}]") for number, value in enumerate(each)]
    if isinstance(each, FunctionType):  # its module's names are not its own
        cells = each.__closure__ or ()
        return [(cell, f"{path}, its closure") for cell in cells] + [(each.__defaults__, f"{path}, its defaults")]
    if isinstance(each, MethodType):
        return [(each.__self__, path), (each.__func__, path)]
    if isinstance(each, partial):
        return [(each.func, path), (each.args, f"{path}, its arguments"), (each.keywords, f"{path}, its arguments")]
    if isinstance(each, BuiltinFunctionType | int | Tensor | np.ndarray):
        return []
    names = {id(value): name for name, value in getattr(each, "__dict__", {}).items()}
    for kind in type(each).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(each, name):
                names[id(getattr(each, name))] = name
    named = [*getattr(each, "__dict__", {}).values(), *gc.get_referents(each)]
    return [(value, f"{path}.{names.get(id(value), type(value).__name__)}") for value in named]
