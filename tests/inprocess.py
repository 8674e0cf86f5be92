"""A row exchange without wire: expert stores in this process, for tests of the engine alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from orchestrator.engine.experts import ExpertStore
from orchestrator.types import Contract, ExpertBatch, FloatArray, LayerDescriptor


class InProcessExchange:
    """Computes a batch on the stores that own its experts; `before_dispatch` may raise."""

    def __init__(
        self, stores: Sequence[ExpertStore], contract: Contract, before_dispatch: Callable[[int], None] | None = None
    ) -> None:
        self.stores = stores
        self.contract = contract
        self.before_dispatch = before_dispatch
        self.calls = 0
        self.seen: list[ExpertBatch] = []
        self._handles: dict[tuple[int, int], list[int]] = {}
        self._batch: ExpertBatch | None = None

    def describe(self, descriptors: Sequence[LayerDescriptor]) -> None:
        for descriptor in descriptors:
            key = (descriptor.layer, descriptor.call)
            self._handles[key] = [store.layer(descriptor) for store in self.stores]

    def begin_step(self) -> None:
        pass

    def abort_step(self) -> None:
        self._batch = None

    def dispatch(self, batch: ExpertBatch) -> None:
        self.calls += 1
        if self.before_dispatch is not None:
            self.before_dispatch(self.calls)
        self._batch = ExpertBatch(
            batch.layer, batch.call, batch.rows.copy(), batch.experts.copy(), batch.weights.copy()
        )
        self.seen.append(self._batch)

    def combine(self, layer: int, call: int, out: FloatArray) -> None:
        batch = self._batch
        assert batch is not None
        assert (batch.layer, batch.call) == (layer, call)
        if self.contract is Contract.SUM:
            out[:] = 0
        for store, handle in zip(self.stores, self._handles[layer, call], strict=True):
            mine = np.isin(batch.experts, store.ownership.experts[layer])
            counts = mine.sum(axis=1)
            rows = np.flatnonzero(counts)
            if not len(rows):
                continue
            wanted = int(counts.sum()) if self.contract is Contract.EXACT else len(rows)
            result = np.empty((wanted, batch.rows.shape[1]), np.float32)
            store.compute(
                handle,
                self.contract,
                np.ascontiguousarray(batch.rows[rows]),
                counts[rows].astype(np.uint16),
                batch.experts[mine].astype(np.uint16),
                np.ascontiguousarray(batch.weights[mine]),
                result,
            )
            if self.contract is Contract.EXACT:
                out[mine] = result
            else:
                out[rows] += result
