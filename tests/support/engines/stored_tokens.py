"""The arithmetic model's tokens in the real KV store and host pages as well, in any dtype that these have.

A token is one key and one value, small whole numbers that float8 holds exactly at any scale: so its tokens are equal in
every dtype, where a real model's are not.
"""

from __future__ import annotations

import torch
from pagestream_engine.attention.kv_store import KVStore
from pagestream_engine.cache.host_tier import HostMemory
from pagestream_engine.runner.backends import cache_shapes
from pagestream_engine.runner.host_pages import HostPages
from pagestream_engine.step.records import StepPlan
from support.engines.arithmetic_model import ArithmeticRunner, Row, SeededRunner, SlotError
from support.engines.speculating_model import SpeculatingRunner

_BASE = 8
"""A key is a token's id divided by it, a value the rest."""


class StoredTokens(ArithmeticRunner):
    """Writes, copies, swaps and reads what the arithmetic model does, in the first layer of each KV group."""

    def allocate_kv_cache(self, num_blocks: int) -> None:
        super().allocate_kv_cache(num_blocks)
        shapes = cache_shapes(self.kv_layout, torch.float32, self._config.cache.kv_cache_dtype)
        self._store = KVStore(shapes, torch.device("cpu"))
        self._store.allocate(num_blocks)

    def allocate_host_pages(self, num_bytes: int) -> HostMemory:
        memory = super().allocate_host_pages(num_bytes)
        self._swapped = HostPages(self._store, [memory.num_pages])
        return memory

    def _write(self, row: Row, count: int) -> None:
        super()._write(row, count)
        positions = torch.arange(row.num_computed_tokens, row.num_computed_tokens + count)
        ids = torch.tensor(row.token_ids)[positions]
        for group, table in zip(self.kv_layout.groups, row.block_tables, strict=True):
            blocks, offsets = torch.tensor(table)[positions // group.block_size], positions % group.block_size
            key, value = (
                part.float()[:, None, None].expand(-1, group.spec.num_kv_heads, group.spec.head_dim)
                for part in (ids // _BASE, ids % _BASE)
            )
            self._store.write(group.layers[0], key, value, blocks * group.block_size + offsets)

    def _read(self, row: Row, count: int) -> list[int]:
        tokens = super()._read(row, count)
        for group, table in zip(self.kv_layout.groups, row.block_tables, strict=True):
            window, first = group.spec.window, group.first_block(row.num_computed_tokens)
            begin = 0 if window is None else max(0, row.num_computed_tokens + 1 - window)
            used = torch.tensor(table[first : group.num_blocks_for(len(tokens))])
            keys, values = self._store.gather(group.layers[0], used)
            stored = (keys * _BASE + values).transpose(1, 2).flatten(0, 1)[begin - first * group.block_size :]
            expected = torch.tensor(tokens[begin:])[:, None, None]
            if not (stored[: len(expected)] == expected).all():
                raise SlotError(f"{row} reads other tokens than its own from the store")
        return tokens

    def _copy(self, plan: StepPlan) -> None:
        super()._copy(plan)
        if len(plan.copies):
            self._store.copy_blocks(plan.copies.tolist())

    def _swap(self, plan: StepPlan) -> None:
        super()._swap(plan)
        if len(plan.saves) or len(plan.loads):
            self._swapped.launch(plan.saves.tolist(), plan.loads.tolist())


class StoringRunner(StoredTokens, SeededRunner):
    """A `SeededRunner` over the store."""


class StoringSpeculatingRunner(StoredTokens, SpeculatingRunner):
    """A `SpeculatingRunner` over the store."""
