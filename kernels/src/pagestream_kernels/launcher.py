"""Launches one compiled kernel again and again, past Triton's `JITFunction.run`, which takes 24 us of Python a launch.

`run` binds keyword arguments, specialises each in turn and makes a string of them, by which it finds the compiled
kernel. A `Launcher` finds it by a tuple of what the specialisation hangs on, and gives its addresses and numbers to the
driver's launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter, itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes of a pointer, and elements of a stride: what Triton specialises on
MAX_SHORTCUTS = 4096  # of a launcher: strides that grow with a step's rows have as many values as there are steps

_WIDE = 2**31
_ON_CPU = -1  # as `Tensor.get_device` says: tensors of a driver that stands in for an absent GPU's
_address = Tensor.data_ptr
_dtype = attrgetter("dtype")

LaunchKey = tuple[Any, ...]
"""What the compiled kernel of a launch hangs on: GPU, alignments, widths and classes of numbers, dtypes."""
NamedKey = tuple[str, tuple[tuple[str, Any], ...], LaunchKey]
"""With the kernel's name and its constants."""

_recorded: ContextVar[set[NamedKey] | None] = ContextVar("recorded", default=None)


@dataclass(slots=True)
class Compilations:
    """Launches in this process that were the first of their key: a compilation, or a look into Triton's cache folder.

    A server counts them after its warm-up, where there should be none.
    """

    count: int = 0


compilations = Compilations()


class _Bound(NamedTuple):
    """A compiled kernel on a device."""

    run: Callable[..., None]
    function: Any
    metadata: Any


class Launcher:
    """Launches a function of Triton with fixed constants.

    Args:
        function: what `triton.jit` returned.
        signature: type of each argument of a launch; one that begins with `*` is a pointer.
        constants: value of each argument that is known at compile time.
        unspecialised: arguments whose value and alignment never decide the machine code.
        options: `num_warps` and `num_stages`.
    """

    def __init__(
        self,
        function: Any,
        signature: Mapping[str, str],
        constants: Mapping[str, Any],
        unspecialised: Sequence[str],
        options: Mapping[str, int],
    ) -> None:
        import triton

        self._function = function
        self._constants = dict(constants)
        self._options = dict(options)
        names = list(function.arg_names)
        pointers = [name for name in names if signature.get(name, "").startswith("*")]
        numbers = [name for name in names if name in signature and name not in pointers]
        aligned = [index for index, name in enumerate(pointers) if name not in unspecialised]
        self._pointers = _getter(pointers)
        self._numbers = _getter(numbers)
        self._aligned = _getter(aligned)
        integers = [name for name in numbers if not signature[name].startswith("fp")]
        annotations = function.fn.__annotations__
        self._specialised = _getter([name for name in integers if name not in unspecialised])
        self._sized = _getter([name for name in integers if name in unspecialised and annotations[name] != "int"])
        """What is passed as 32 or 64 bits, whichever holds it."""
        self._constant_values = tuple(constants[name] for name in names if name in constants)
        given = [*pointers, *numbers, *(name for name in names if name in constants)]
        self._in_order = None if given == names else _getter([given.index(name) for name in names])
        self._bound: dict[LaunchKey, _Bound] = {}
        self._shortcuts: dict[LaunchKey, _Bound] = {}
        """By keys with the numbers as they are, in place of their classes."""
        self._drivers, self._hooks = triton.runtime.driver, triton.knobs.runtime

    def interpret(self, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        """Run the function under Triton's interpreter."""
        recorded = _recorded.get()
        if recorded is not None:
            tensors = self._pointers(arguments)
            key = self._key(_ON_CPU, tensors, list(map(_address, tensors)), arguments)
            recorded.add(self._named(_classified(key)))
        self._function[grid](**arguments, **self._constants, **self._options)

    def launch(self, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        """Start the compiled kernel on the current stream of its tensors' GPU; compile it where there is none."""
        tensors = self._pointers(arguments)
        driver, device = self._drivers.active, tensors[0].get_device()
        current: int = driver.get_current_device()
        if device not in (current, _ON_CPU):
            with torch.cuda.device(device):
                self.launch(grid, arguments)
            return
        addresses = list(map(_address, tensors))
        key = self._key(current, tensors, addresses, arguments)
        bound = self._shortcuts.get(key)
        if bound is None or self._hooks.launch_enter_hook.calls or self._hooks.launch_exit_hook.calls:
            # A profiler's hooks want Triton's own description of a launch.
            self._run(grid, arguments, key)
            return
        values = (*addresses, *self._numbers(arguments), *self._constant_values)
        if self._in_order is not None:
            values = self._in_order(values)
        first, second, third = (*grid, 1, 1)[:3]
        stream = driver.get_current_stream(current)
        bound.run(first, second, third, stream, bound.function, bound.metadata, None, None, None, *values)

    def _run(self, grid: tuple[int, ...], arguments: Mapping[str, Any], key: LaunchKey) -> None:
        """Launch by Triton's own way, and keep what it has compiled."""
        compiled = self._function[grid](**arguments, **self._constants, **self._options)
        classified = _classified(key)
        if classified not in self._bound:
            compilations.count += 1
            self._bound[classified] = _Bound(compiled.run, compiled.function, compiled.packed_metadata)
            recorded = _recorded.get()
            if recorded is not None:
                recorded.add(self._named(classified))
        if len(self._shortcuts) >= MAX_SHORTCUTS:
            self._shortcuts.clear()
        self._shortcuts[key] = self._bound[classified]

    def _key(
        self, device: int, tensors: Sequence[Tensor], addresses: Sequence[int], arguments: Mapping[str, Any]
    ) -> LaunchKey:
        specialised, sized = self._aligned(addresses), self._sized(arguments)
        aligned: tuple[bool, ...] = ()  # all are
        if reduce(or_, specialised, 0) % ALIGNMENT:
            aligned = tuple(address % ALIGNMENT == 0 for address in specialised)
        wide: tuple[bool, ...] = ()  # none is
        if max(sized, default=0) >= _WIDE:
            wide = tuple(size >= _WIDE for size in sized)
        return (device, aligned, wide, self._specialised(arguments), *map(_dtype, tensors))

    def _named(self, key: LaunchKey) -> NamedKey:
        return self._function.fn.__name__, tuple(self._constants.items()), key


@contextmanager
def recorded_launches() -> Iterator[set[NamedKey]]:
    """Collect the keys of the launches inside that need a kernel of their own: with the interpreter of all launches,
    on a GPU of those whose kernel had not been launched before."""
    keys: set[NamedKey] = set()
    token = _recorded.set(keys)
    try:
        yield keys
    finally:
        _recorded.reset(token)


def _classified(key: LaunchKey) -> LaunchKey:
    """Replace the specialised numbers of a key by what Triton looks at: 1, a multiple of 16 or neither, and width."""
    device, aligned, wide, numbers, *dtypes = key
    classes = (1 if number == 1 else ((number % ALIGNMENT == 0), number >= _WIDE) for number in numbers)
    return device, aligned, wide, tuple(classes), *dtypes


def _getter(keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """As `operator.itemgetter`, with a tuple as the result for any number of keys."""
    if len(keys) > 1:
        return itemgetter(*keys)
    if not keys:
        return lambda _: ()
    (key,) = keys
    return lambda values: (values[key],)
