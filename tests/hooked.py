"""A dispatcher whose calls go the engine's way: as events through the native star, Python behind it."""

from __future__ import annotations

import numpy as np

from bindings.library import COMBINE, DISPATCH, Callback, EventStruct
from bindings.memory import FloatViews, IntegerViews
from bindings.wire import StarHandle
from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.engine.native import EngineStar
from orchestrator.types import Contract, ExpertBatch, FloatArray


class HookedDispatcher(Dispatcher):
    """Counts the calls that Python had to carry out or finish."""

    def __init__(self, workers, contract: Contract, *rest, **options) -> None:
        handle = StarHandle(len(workers), partial_sums=contract is Contract.SUM)
        super().__init__(workers, contract, *rest, native=EngineStar(handle), **options)
        self.python_calls = 0
        self._floats, self._integers = FloatViews(), IntegerViews()
        self._failure: BaseException | None = None
        self._event = handle.hook(Callback(lambda event, _data: self._on_event(event.contents)))
        self._handle = handle
        self._top_k = 0

    def _on_event(self, event: EventStruct) -> int:
        self.python_calls += 1
        n, k, width = event.n_tokens, event.top_k, event.n_embd
        try:
            if event.kind == DISPATCH:
                rows = self._floats.at(event.rows, (n, width))
                ids = self._integers.at(event.experts, (n, k))
                super().dispatch(
                    ExpertBatch(event.layer, event.call, rows, ids, self._floats.at(event.weights, (n, k)))
                )
            else:
                shape = (n, k, width) if self.contract is Contract.EXACT else (n, width)
                super().combine(event.layer, event.call, self._floats.at(event.out, shape))
        except BaseException as error:
            self._failure = error
            return 1
        return 0

    def _call_hook(self, **fields: int) -> None:
        status = self._event(EventStruct(**fields), self._handle.address)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        assert status == 0

    def dispatch(self, batch: ExpertBatch) -> None:
        rows = np.ascontiguousarray(batch.rows)
        ids = np.ascontiguousarray(batch.experts)
        weights = np.ascontiguousarray(batch.weights)
        self._call_hook(
            kind=DISPATCH,
            layer=batch.layer,
            call=batch.call,
            n_tokens=len(rows),
            n_embd=rows.shape[1],
            top_k=ids.shape[1],
            rows=rows.ctypes.data,
            experts=ids.ctypes.data,
            weights=weights.ctypes.data,
        )
        self._top_k = ids.shape[1]

    def combine(self, layer: int, call: int, out: FloatArray) -> None:
        self._call_hook(
            kind=COMBINE,
            layer=layer,
            call=call,
            n_tokens=out.shape[0],
            n_embd=out.shape[-1],
            top_k=out.shape[1] if self.contract is Contract.EXACT else self._top_k,
            out=out.ctypes.data,
        )
