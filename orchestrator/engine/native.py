"""The native hot path under both ends of a connection; None where the engine was built without it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bindings.memory import FloatViews, IntegerViews, copy_bytes
from bindings.wire import PeerHandle, StarHandle, wire
from orchestrator.config import setting
from orchestrator.dispatch.exchange import LayerSample
from orchestrator.dispatch.native import Counts, Rest
from orchestrator.types import Contract

NativePeer = PeerHandle


def is_available() -> bool:
    """Tell whether the engine has it and ``LINKCPP_WIRE=python`` does not forbid it."""
    return setting("LINKCPP_WIRE") != "python" and wire() is not None


def native_star(n_workers: int, contract: Contract) -> EngineStar | None:
    """Make what :class:`orchestrator.dispatch.dispatcher.Dispatcher` takes as ``native``."""
    return EngineStar(StarHandle(n_workers, partial_sums=contract is Contract.SUM)) if is_available() else None


class EngineStar:
    """The :class:`orchestrator.dispatch.native.NativeStar` of this engine; a hook takes its ``handle``."""

    def __init__(self, handle: StarHandle) -> None:
        self.handle = handle
        self._floats = FloatViews()
        self._integers = IntegerViews()

    def number(self, *, advance: bool) -> int:
        """Take the next number of a request, or look at the last one."""
        return self.handle.number(advance=advance)

    def set_routes(self, routes: Iterable[tuple[int, int, Sequence[int]]]) -> None:
        """Say which worker computes each expert, per (layer, call)."""
        self.handle.set_routes(routes)

    def set_link(self, worker: int, descriptor: int, minor: int) -> None:
        """Give a worker's socket and protocol version."""
        self.handle.set_link(worker, descriptor, minor)

    def give_way(self, every_ms: int) -> None:
        """Hand a call to Python at least so often, so that it can end the step."""
        self.handle.give_way(every_ms)

    def arm(self, timeout_ms: int, max_rows: int) -> None:
        """Take calls of up to so many rows from now on."""
        self.handle.arm(timeout_ms, max_rows)

    def disarm(self) -> None:
        """Take none, and forget the call that is under way."""
        self.handle.disarm()

    def take_rest(self) -> Rest | None:
        """Give the call that was left unfinished, once."""
        rest = self.handle.take()
        if rest is None:
            return None
        shape = rest.n_tokens, rest.top_k
        return Rest(
            layer=rest.layer,
            call=rest.call,
            sequence=rest.sequence,
            worker=rest.worker,
            n_done=rest.n_done,
            send_error=rest.error if rest.problem else None,
            experts=self._integers.at(rest.experts, shape).copy(),
            weights=self._floats.at(rest.weights, shape).copy(),
            length=rest.n_embd,
            compute_us=rest.compute_us,
            spent=1e-6 * rest.spent_us,
            waited=1e-6 * rest.waited_us,
            received=copy_bytes(rest.received, rest.n_received),
        )

    def counts(self, worker: int) -> Counts:
        """Give the counters of a worker."""
        return Counts(*self.handle.counts(worker))

    def record(self, sample: LayerSample) -> None:
        """Note a call that Python carried out."""
        self.handle.record(sample.hook_us, sample.compute_us, sample.rows)

    def samples(self) -> tuple[int, tuple[LayerSample, ...]]:
        """Give the number of all calls, and the most recent ones, oldest first."""
        count, samples = self.handle.samples()
        columns = (samples[name].tolist() for name in ("hook_us", "compute_us", "rows"))
        return count, tuple(map(LayerSample, *columns))
