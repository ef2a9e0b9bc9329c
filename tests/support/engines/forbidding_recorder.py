"""A recorder of steps that forbids what no CUDA graph can hold, on a machine without a GPU.

A graph repeats kernels with the addresses and sizes that they had when it was recorded. So a recorded step must not
copy from the host, read a result, make a shape of one, or do anything else the next time. On a CPU all of that works,
and shows in nothing: here each step is watched while it is recorded and each time that it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from pagestream_engine.runner import Step
from pagestream_kernels.runtime import Variant
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

HOST = torch.device("meta")
"""What stands for the host while a step is watched: factories make tensors there unless they are told where."""
_FROM_HOST = {"lift_fresh", "lift_fresh_copy"}
"""What `torch.tensor` and its kin do with numbers of Python's."""
_TO_HOST = {"resolve_conj", "resolve_neg"}
"""What comes before a tensor's memory is read: by `tolist`, `numpy`, `float`."""
_WAITS = torch.Tag.data_dependent_output
_SHAPES = torch.Tag.dynamic_output_shape
_BY_MASK = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operations on indices, which count the true ones of a mask."""
_CALLS = {
    torch.tensor: "makes a tensor from numbers of the host",
    torch.as_tensor: "makes a tensor from numbers of the host",
    torch.asarray: "makes a tensor from numbers of the host",
    Tensor.new_tensor: "makes a tensor from numbers of the host",
    Tensor.pin_memory: "makes a tensor of the host",
    Tensor.cpu: "copies to the host",
    **dict.fromkeys(
        (
            Tensor.item,
            Tensor.tolist,
            Tensor.numpy,
            Tensor.__array__,
            Tensor.__bool__,
            Tensor.__int__,
            Tensor.__float__,
            Tensor.__index__,
            Tensor.__contains__,
        ),
        "reads a result on the host",
    ),
}
_OUTSIDE_MODES = ("from_numpy", "frombuffer")
"""Functions of torch that no mode sees."""

Event = tuple[Any, ...]


class Forbidden(AssertionError):  # noqa: N818 - reads as what happened
    """A recorded step did what a graph can't hold, or something else than when it was recorded."""


class ForbiddingRecorder:
    """Watches each step that is recorded, and each time that it runs. Kernels run by Triton's interpreter, unless
    inside `without_kernels`."""

    is_strict = True

    def __init__(self) -> None:
        self.num_sets = 0
        self.num_recorded = 0
        self.num_checked = 0
        """Runs that did what was recorded."""
        self.kernels: set[str] = set()
        """Names of those that were launched."""

    def begin(self) -> None:
        """Count one more set."""
        self.num_sets += 1

    def record(self, step: Step) -> Step:
        """Run a step as a graph's recorder does, once for what happens the first time, and once watched."""
        with self._kernels(None):
            step()
        recorded = self._watched(step)
        self.num_recorded += 1

        def replay() -> None:
            _compare(recorded, self._watched(step))
            self.num_checked += 1

        return replay

    def _watched(self, step: Step) -> list[Event]:
        """Return what a step does, in order."""
        trace = _Trace()
        with ExitStack() as stack:
            stack.enter_context(self._kernels(trace))
            for name in _OUTSIDE_MODES:
                stack.enter_context(patch.object(torch, name, _refuser(name)))
            stack.enter_context(_Operations(trace))
            stack.enter_context(HOST)
            stack.enter_context(_Calls())  # the innermost: it sees a call before a device is given to it
            step()
        return trace.events

    @contextmanager
    def _kernels(self, trace: _Trace | None) -> Iterator[None]:
        launch = Variant.launch

        def noted(variant: Variant, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
            name = variant.kernel.packed.fn.__name__
            self.kernels.add(name)
            if trace is not None:
                constants = tuple(sorted((key, str(value)) for key, value in variant.constants.items()))
                trace.note(f"kernel {name}", (grid, constants), list(arguments.items()))
            # The interpreter reads tensors on the host; a GPU's kernel does not.
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                launch(variant, grid, arguments)

        with patch.object(Variant, "launch", noted):
            yield


@contextmanager
def without_kernels() -> Iterator[None]:
    """Launch nothing inside: results are what the memory has, on which nothing that may be recorded depends."""

    def drop(*_: object) -> None: ...

    with patch.object(Variant, "launch", drop):
        yield


@dataclass
class _Trace:
    """What a step does. Tensors are named by their addresses, those that it has made itself by their number."""

    events: list[Event] = field(default_factory=list)
    _made: dict[int, int] = field(default_factory=dict)
    """By storage, of those that the step has made."""
    _outside: set[int] = field(default_factory=set)
    """Storages that were there before."""
    _kept: list[Tensor] = field(default_factory=list)
    """So that no storage is another one's place meanwhile."""

    def note(self, what: str, how: object, given: Sequence[Any], results: Sequence[Tensor] = ()) -> None:
        """Note an operation or a launch."""
        self.events.append((what, how, *(self._named(each) for each in given)))
        for result in results:
            storage = result.untyped_storage()._cdata
            if storage not in self._made and storage not in self._outside:
                self._made[storage] = len(self._made)
                self._kept.append(result)

    def _named(self, given: Any) -> object:
        if isinstance(given, tuple | list):
            return tuple(self._named(each) for each in given)
        if not isinstance(given, Tensor):
            return str(given) if isinstance(given, torch.dtype | torch.device) else given
        if given.is_mkldnn:  # a weight in oneDNN's layout, which no GPU has
            self._kept.append(given)
            return id(given)
        storage = given.untyped_storage()
        place: object = self._made.get(storage._cdata)
        if place is None:
            self._outside.add(storage._cdata)
            self._kept.append(given)
            place = f"at {storage.data_ptr():#x}"
        return (place, given.storage_offset(), tuple(given.shape), given.stride(), str(given.dtype))


class _Operations(TorchDispatchMode):
    """Refuses operations that wait for the device or come from the host, and notes the others."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func).split(".")[1]
        given, _ = tree_flatten((args, kwargs))
        if name in _FROM_HOST:
            _refuse(func, "makes a tensor from numbers of the host")
        if name in _TO_HOST or _WAITS in func.tags:
            _refuse(func, "reads a result on the host")
        if _SHAPES in func.tags and name not in _BY_MASK and not _has_size(func, kwargs):
            _refuse(func, "has a result whose shape depends on numbers of the device")
        if name in _BY_MASK and any(_is_mask(each) for each in args[1]):
            _refuse(func, "has a result whose shape depends on numbers of the device")
        if kwargs.get("pin_memory"):
            _refuse(func, "makes a tensor of the host")
        result = func(*args, **kwargs)
        made = [each for each in tree_flatten(result)[0] if isinstance(each, Tensor)]
        if any(each.device == HOST for each in made):
            _refuse(func, "makes a tensor of the host: no device is given")
        self._trace.note(str(func), None, given, made)
        return result


class _Calls(TorchFunctionMode):
    """Refuses what shows in no operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refused = _CALLS.get(func)
        if refused is not None:
            _refuse(func.__name__, refused)
        return func(*args, **(kwargs or {}))


def _has_size(func: Any, kwargs: Mapping[str, Any]) -> bool:
    return "repeat_interleave" in str(func) and kwargs.get("output_size") is not None


def _is_mask(index: object) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _refuser(name: str) -> Any:
    def refuse(*_: object, **__: object) -> NoReturn:
        _refuse(f"torch.{name}", "makes a tensor of the host")

    return refuse


def _refuse(what: object, why: str) -> NoReturn:
    raise Forbidden(f"a recorded step calls {what}, which {why}")


def _compare(recorded: list[Event], found: list[Event]) -> None:
    for number, (expected, event) in enumerate(zip(recorded, found, strict=False)):
        if expected != event:
            raise Forbidden(f"a recorded step does something else at operation {number}: {event}, recorded {expected}")
    if len(recorded) != len(found):
        raise Forbidden(f"a recorded step does {len(found)} operations, recorded {len(recorded)}")
