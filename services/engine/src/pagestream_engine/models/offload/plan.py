"""Which layers' linears stay in host memory, and where each of them lies in its layer's page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pagestream_engine.errors import ConfigError
from pagestream_engine.models.weights import LinearWeight, WeightMap
from pagestream_engine.transfers import slab_pages

NUM_BUFFERS = 2
"""On the device, of a page each: one layer computes from the one while the next one comes to the other."""
_ALIGNMENT = 256
"""Of a matrix in its page, in bytes: that of an allocation of torch's on a GPU."""
_LAYER = re.compile(r"(\d+)\.")

PageLayout = Mapping[str, int]
"""Parameter -> where it begins in its layer's page, in bytes."""


@dataclass(frozen=True)
class OffloadPlan:
    """Layers whose linears are in host memory, a page each. Their biases, norms and all else are on the device."""

    pages: Mapping[int, PageLayout]
    """By layer, ascending."""
    page_bytes: int
    """Of the largest of them, which is what each page takes."""
    slabs: tuple[int, ...]
    """Pages of each allocation of host memory, as `slab_pages` says."""
    weight_bytes: int
    """Of the linears in all pages."""

    @property
    def freed_bytes(self) -> int:
        """Bytes of the device's memory that the weights don't take."""
        return self.weight_bytes - NUM_BUFFERS * self.page_bytes


def plan_offload(weights: WeightMap, dtype: torch.dtype, max_bytes: int, *, pinned: bool) -> OffloadPlan:
    """Choose as many layers as fit into `max_bytes` of host memory, spread evenly over the model: between two of them
    others compute, while the next one is copied.

    Args:
        weights: a model's; a layer's are those whose names begin with its index and a dot.
        dtype: that they are loaded in.
        pinned: whether it is, so that torch rounds each allocation up.

    Raises:
        ConfigError: so few layers fit that the buffers on the device would take as much as is freed.
    """
    layers: dict[int, dict[str, LinearWeight]] = {}
    for name, weight in weights.items():
        if isinstance(weight, LinearWeight) and (found := _LAYER.match(name)):
            layers.setdefault(int(found[1]), {})[name] = weight
    sizes = {index: _lay_out(linears, dtype)[1] for index, linears in layers.items()}
    page_bytes = max(sizes.values(), default=0)
    slabs = slab_pages(max_bytes, page_bytes, pinned=pinned) if page_bytes else []
    count = min(len(sizes), sum(slabs))
    if count <= NUM_BUFFERS:
        expected = f"GiB of at least {NUM_BUFFERS + 1} layers of {page_bytes / 2**30:.3g} GiB, of which there are "
        hint = f"{NUM_BUFFERS} layers' memory stays on the device, to compute from"
        raise ConfigError("cpu_offload_gb", max_bytes / 2**30, expected + str(len(sizes)), hint)
    ordered = sorted(sizes)
    chosen = [ordered[(2 * place + 1) * len(ordered) // (2 * count)] for place in range(count)]
    return OffloadPlan(
        pages={index: _lay_out(layers[index], dtype)[0] for index in chosen},
        page_bytes=page_bytes,
        slabs=tuple(_for(count, slabs)),
        weight_bytes=sum(_num_bytes(weight, dtype) for index in chosen for weight in layers[index].values()),
    )


def _lay_out(linears: Mapping[str, LinearWeight], dtype: torch.dtype) -> tuple[dict[str, int], int]:
    """Return where each linear begins, and the bytes of all."""
    begins: dict[str, int] = {}
    end = 0
    for name, weight in linears.items():
        begins[name] = end
        end += -(-_num_bytes(weight, dtype) // _ALIGNMENT) * _ALIGNMENT
    return begins, end


def _num_bytes(weight: LinearWeight, dtype: torch.dtype) -> int:
    return weight.num_rows * weight.in_features * dtype.itemsize


def _for(count: int, slabs: list[int]) -> list[int]:
    """The first of these slabs that hold so many pages."""
    kept = []
    for slab in slabs:
        if count <= 0:
            break
        kept.append(min(slab, count))
        count -= slab
    return kept
