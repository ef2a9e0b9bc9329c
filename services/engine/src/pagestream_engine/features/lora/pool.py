"""The adapters of an engine: their matrices in host memory, and those of the running rows in slots.

A thread beside the steps reads matrices, one adapter after the other.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pagestream_engine.attention import StepContext
from pagestream_engine.config import AdapterConfig
from pagestream_engine.errors import (
    AdapterError,
    InvariantViolation,
    UnsupportedOption,
)
from pagestream_engine.features.lora.additions import (
    NO_SLOT,
    CurrentRows,
    LinearAdapters,
    NativeAdditions,
    TorchAdditions,
    TritonAdditions,
    group_rows,
    native_lora,
)
from pagestream_engine.features.lora.files import ModuleSlice, ModuleWeights, adaptable_modules, read_adapter
from pagestream_engine.layers.linear import Linear
from pagestream_engine.models.model import Model, ModelSource, Target
from pagestream_engine.plan import AdapterLoad, Int64Array, LoadedAdapter, StepPlan
from pagestream_engine.request import Adapter


class AdapterPool:
    """Has adapters read beside the steps, and sets the linears up for each step.

    Matrices stay in host memory until a load evicts them, and in a slot until `max_loras` others were used after them.
    On a CPU a slot's matrices are those in host memory.

    Args:
        linears: of the model, by parameter.
        modules: that adapters may change, by their names in the checkpoint.
        device: that computes.
        exact: whether a row has to have the same bits in any batch.
        by_triton: whether the model computes by Triton's kernels, on a CPU under the interpreter.
    """

    def __init__(
        self,
        linears: Mapping[str, Linear],
        modules: Mapping[str, ModuleSlice],
        config: AdapterConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        exact: bool,
        by_triton: bool,
    ) -> None:
        self._modules = modules
        self._dtype = dtype
        self._device = device
        self._exact = exact
        self._by_triton = by_triton
        self._loader = AdapterLoader(modules, dtype, config.max_lora_rank)
        self._current = CurrentRows(is_exact=exact)
        self._host: dict[str, Weights] = {}
        """By revision; the loader's thread adds to it."""
        self._slot_of: OrderedDict[str, int] = OrderedDict()
        """By revision, the least recently used one first."""
        self._ranks: dict[int, int] = {}
        """The largest of each slot's adapter."""
        self._free_slots = list(range(config.max_loras))
        self._of_row: dict[int, Adapter] = {}
        """The adapter of each row of the batch that has one."""
        self._names: dict[str, list[str]] = {}
        """Of each linear, its modules."""
        for name, module in sorted(modules.items(), key=lambda item: (item[1].parameter, item[1].part)):
            if module.rows:
                self._names.setdefault(module.parameter, []).append(name)
        self._linears = {parameter: self._attach(linears[parameter], names) for parameter, names in self._names.items()}

    def load(self, load: AdapterLoad, reply: Callable[[LoadedAdapter], None]) -> None:
        """Evict what a load names, and begin to read its adapter; `reply` is called when it is there, or can't be."""
        if load.evicted is not None:
            del self._host[load.evicted]
            slot = self._slot_of.pop(load.evicted, None)
            if slot is not None:
                self._clear(slot)
                self._free_slots.append(slot)
        revision = load.adapter.revision

        def done(weights: Weights | None, error: str | None) -> None:
            if weights is not None:
                self._host[revision] = weights
            reply(LoadedAdapter(revision, error))

        self._loader.load(load.adapter, done)

    def close(self) -> None:
        """End the thread that reads."""
        self._loader.close()

    def empty_slots(self) -> None:
        """Free all slots: matrices stay in host memory, and the steps that need them put them into slots again."""
        for slot in self._slot_of.values():
            self._clear(slot)
            self._free_slots.append(slot)
        self._slot_of.clear()

    def apply(self, plan: StepPlan) -> None:
        """Take the rows that a plan removes and adds."""
        for row in plan.removed.tolist():
            self._of_row.pop(row, None)
        self._of_row.update((new.row, new.adapter) for new in plan.added if new.adapter is not None)

    def forget_rows(self) -> None:
        """Free all rows."""
        self._of_row.clear()
        self._current.begin(None)

    def begin_step(self, plan: StepPlan) -> AdapterPool | None:
        """Set the linears up for a plan that was applied; return itself where one of its rows has an adapter."""
        self._current.begin(None)
        if self._of_row:
            rows = plan.rows.tolist()
            wanted = {row: self._of_row[row] for row in rows if row in self._of_row}
            self._fill_slots({adapter.revision for adapter in wanted.values()})
            slots = [self._slot_of[wanted[row].revision] if row in wanted else NO_SLOT for row in rows]
            of_tokens: Int64Array = np.repeat(np.array(slots, np.int64), plan.num_new_tokens)
            self._current.begin(group_rows(of_tokens, self._device), max_rank=max(self._ranks.values(), default=0))
        return None if self._current.rows is None else self

    def forward(self, model: Model, token_ids: Tensor, wanted: Tensor, context: StepContext) -> Tensor:
        """Run all layers of a step with adapters as `Model.forward`: the last one for all tokens too, since a linear
        finds the adapter of a row by its place among them. Then the linears compute without adapters again."""
        hidden = model.forward(token_ids, torch.arange(len(token_ids), device=self._device), context)
        self._current.begin(None)
        return hidden[wanted] if len(hidden) else hidden  # A stage has sent all of it to the next one.

    def _fill_slots(self, wanted: Collection[str]) -> None:
        """Give each of these revisions a slot."""
        for revision in wanted:
            if revision in self._slot_of:
                self._slot_of.move_to_end(revision)
        for revision in wanted:
            if revision not in self._slot_of:
                if revision not in self._host:
                    raise InvariantViolation(f"adapter {revision}: a step has rows with it, and it was not read")
                slot = self._take_slot(wanted)
                self._put(slot, self._host[revision])
                self._slot_of[revision] = slot

    def _take_slot(self, wanted: Collection[str]) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        oldest = next((revision for revision in self._slot_of if revision not in wanted), None)
        if oldest is None:
            raise InvariantViolation(f"adapters: given {len(wanted)} in a step, expected at most {len(self._slot_of)}")
        return self._slot_of.pop(oldest)

    def _put(self, slot: int, weights: Weights) -> None:
        # A stage of a pipeline may have none of an adapter's layers.
        self._ranks[slot] = max((len(each.a) for each in weights.values()), default=0)
        for parameter, names in self._names.items():
            self._linears[parameter].put(slot, [self._on_device(weights.get(name)) for name in names])

    def _clear(self, slot: int) -> None:
        del self._ranks[slot]
        for parameter, names in self._names.items():
            self._linears[parameter].put(slot, [None] * len(names))

    def _on_device(self, weights: ModuleWeights | None) -> ModuleWeights | None:
        if weights is None or self._device.type == "cpu":
            return weights
        return ModuleWeights(weights.a.to(self._device), weights.b.to(self._device), weights.scale)

    def _attach(self, linear: Linear, names: Sequence[str]) -> LinearAdapters:
        modules, num_slots = [self._modules[name] for name in names], len(self._free_slots)
        made: LinearAdapters
        if self._by_triton:
            made = TritonAdditions(self._current, modules, num_slots, self._dtype, self._device)
        elif self._device.type == "cpu" and (kernel := native_lora(self._dtype)) is not None:
            made = NativeAdditions(self._current, modules, num_slots, kernel)
        else:
            made = TorchAdditions(self._current, modules, num_slots, row_by_row=self._exact)
        linear.adapters = made
        return made


def attach_adapters(source: ModelSource, model: Model, config: AdapterConfig, target: Target) -> AdapterPool | None:
    """Let a model's linears take adapters; None where they are off.

    Raises:
        UnsupportedOption: the model is none of a family.
    """
    if not config.enable_lora:
        return None
    if source.weights is None:
        hint = "its code is not this engine's own"
        raise UnsupportedOption("enable_lora", True, f"False for {source.info.architecture}", hint)
    modules = adaptable_modules(source.weights, source.weights_of_rank(target))
    linears, exact = model.named_linears(), target.exact_linears
    return AdapterPool(linears, modules, config, target.dtype, target.device, exact=exact, by_triton=target.by_triton)


Weights = Mapping[str, ModuleWeights]
Done = Callable[[Weights | None, str | None], None]
"""Gets the matrices, or why there are none."""

_log = logging.getLogger(__name__)
_CLOSE_LIMIT_S = 5.0


Wanted = queue.SimpleQueue[tuple[Adapter, Done] | None]


class AdapterLoader:
    """A thread that begins with the first adapter. Who wants adapters bounds their number (`AdapterResidency`).

    A disk that does not answer delays the adapters that are wanted after it, and no step. `close` ends the thread, and
    so does the end of the loader itself.
    """

    def __init__(self, modules: Mapping[str, ModuleSlice], dtype: torch.dtype, max_rank: int) -> None:
        """`modules`, `dtype` and `max_rank` as for `read_adapter`."""
        self._read = partial(read_adapter, modules=modules, dtype=dtype, max_rank=max_rank)
        self._wanted: Wanted = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def load(self, adapter: Adapter, done: Done) -> None:
        """Begin to read an adapter's matrices into the CPU's memory; `done` is called on the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=_run, args=(self._wanted, self._read), name="adapters", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._wanted.put, None)
        self._wanted.put((adapter, done))

    def close(self) -> None:
        """End the thread after the adapters that are wanted; one that hangs is left behind after 5 s."""
        if self._thread is not None:
            self._wanted.put(None)
            self._thread.join(_CLOSE_LIMIT_S)
            self._thread = None


def _run(wanted: Wanted, read: Callable[[Adapter], Weights]) -> None:
    while _serve(wanted.get(), read):  # keeps no reference to what was read, nor to who wanted it
        pass


def _serve(wanted: tuple[Adapter, Done] | None, read: Callable[[Adapter], Weights]) -> bool:
    """Read an adapter; return whether there may be others."""
    if wanted is None:
        return False
    adapter, done = wanted
    try:
        weights = read(adapter)
    except AdapterError as error:
        done(None, str(error))
    except BaseException as error:  # noqa: BLE001 - a file of an unforeseen form ends its requests alone
        _log.exception("adapter %s could not be read", adapter.name)
        done(None, f"{adapter.folder}: malformed: {type(error).__name__}: {error}")
    else:
        done(weights, None)
    return True
