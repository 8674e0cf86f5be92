"""What an expert worker does with each message of one backbone; bytes and sockets are the server's.

A :class:`ExpertService` is one process: the experts in memory, the queue in front of them, and whether it
drains. A :class:`ExpertSession` is one backbone's connection: the layers that this backbone described and a
result buffer. Sessions share nothing but the service, so no backbone can disturb another's answers.

Nothing that a backbone sends may end the process: what cannot be served becomes a :class:`Refuse` with a code.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from orchestrator.errors import InputError, LinkcppError
from orchestrator.types import Contract, EngineIdentity, FloatArray, LayerDescriptor, Ownership, RefusalCode
from orchestrator.wire.frame import MAX_PAYLOAD
from orchestrator.wire.messages import (
    Describe,
    Described,
    Dispatch,
    IdArray,
    Measure,
    Measured,
    Message,
    Ping,
    Pong,
    Refuse,
    Result,
    Welcome,
)
from orchestrator.workers.native import NativePeer
from orchestrator.workers.queue import ComputeQueue

_RESULT_SPACE: Final = 64 * 1024
"""Bytes left for header and fields when the largest result is worked out from the frame limit."""

_SMALL: Final = 64
"""Up to this many pairs Python's sets are quicker than numpy's fixed cost of some microseconds per call."""

_MEASURED_EXPERTS: Final = 6
_MEASURED_ROWS: Final = 32


class ExpertCompute(Protocol):
    """The experts in memory (:class:`orchestrator.engine.experts.ExpertStore`, or a twin in tests)."""

    @property
    def ownership(self) -> Ownership:
        """What is held."""

    @property
    def architecture(self) -> str:
        """The architecture that the model file names."""

    @property
    def identity(self) -> EngineIdentity:
        """The engine that computes."""

    @property
    def bytes_read(self) -> int:
        """Bytes of expert weights taken from the file."""

    def layer(self, descriptor: LayerDescriptor) -> int:
        """Prepare one call of one layer; return its handle, or raise a LinkcppError that says what is missing."""

    def compute(
        self,
        handle: int,
        contract: Contract,
        rows: FloatArray,
        counts: IdArray,
        experts: IdArray,
        weights: FloatArray,
        out: FloatArray,
    ) -> None:
        """Fill ``out``, [P, n] for ``exact`` and [R, n] for ``sum``; thread-safe."""


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """What the greeting says besides what the experts say themselves."""

    name: str
    pid: int
    model_sha256: str
    n_threads: int


@dataclass(frozen=True, slots=True)
class _Served:
    """One described call of one layer, ready to compute."""

    handle: int
    n_embd: int
    n_expert: int
    top_k: int
    owned: frozenset[int]
    mask: np.ndarray[tuple[int], np.dtype[np.bool_]]  # [65536]: owned, by expert id


class ExpertService:
    """One worker process: shared by all its connections, each of which has its own thread."""

    def __init__(
        self,
        compute: ExpertCompute,
        profile: WorkerProfile,
        *,
        queue_limit: int = 16,
        max_payload: int = MAX_PAYLOAD,
        max_layers: int = 4096,
    ) -> None:
        self.compute = compute
        self.profile = profile
        self.queue = ComputeQueue(queue_limit)
        self.max_result_bytes = max_payload - _RESULT_SPACE
        self.draining = False
        self.requests = 0
        self.rows = 0
        self._max_layers = max_layers
        self._layers: dict[LayerDescriptor, _Served] = {}
        self._preparing = threading.Lock()

    def welcome(self, version: int, sequence: int = 0) -> Welcome:
        """Return the greeting for a backbone with which this minor version was agreed."""
        return Welcome(
            version=version,
            name=self.profile.name,
            pid=self.profile.pid,
            identity=self.compute.identity,
            model_sha256=self.profile.model_sha256,
            architecture=self.compute.architecture,
            ownership=self.compute.ownership,
            n_threads=self.profile.n_threads,
            sequence=sequence,
        )

    def prepare(self, descriptor: LayerDescriptor) -> _Served:
        """Make a layer ready once for all backbones that describe it alike; raise a LinkcppError if it cannot."""
        with self._preparing:
            served = self._layers.get(descriptor)
            if served is None:
                _check_descriptor(descriptor)
                if len(self._layers) >= self._max_layers:
                    # Each distinct descriptor keeps engine memory until the end: a peer must not choose how much.
                    raise InputError(f"more than {self._max_layers} distinct layer descriptions")
                owned = frozenset(
                    expert
                    for expert in self.compute.ownership.experts.get(descriptor.layer, ())
                    if expert < descriptor.n_expert
                )
                mask = np.zeros(1 << 16, dtype=np.bool_)
                mask[list(owned)] = True
                # A call may have fewer experts than its layer (grovemoe's second one): nothing to prepare then.
                handle = self.compute.layer(descriptor) if owned else -1
                served = _Served(handle, descriptor.n_embd, descriptor.n_expert, descriptor.top_k, owned, mask)
                self._layers[descriptor] = served
            return served


class ExpertSession:
    """The state of one backbone's connection, from its greeting on. Not thread-safe: one thread per session."""

    def __init__(self, service: ExpertService, native: NativePeer | None = None) -> None:
        self._service = service
        self._native = native
        self._table: dict[tuple[int, int], _Served] = {}
        self._not_owned: set[tuple[int, int]] = set()
        self._space = np.empty(0, dtype=np.float32)

    def answer(self, message: Message) -> Message:
        """Return the reply to a request.

        The rows of a :class:`Result` are a view of this session's buffer: they hold until the next call.
        """
        if type(message) is Dispatch:  # first: it is the hot path
            return self._dispatch(message)
        if isinstance(message, Describe):
            return self._describe(message)
        if isinstance(message, Measure):
            return self._measure(message)
        if isinstance(message, Ping):
            return Pong(message.sequence, message.nonce)
        return Refuse(
            message.sequence, RefusalCode.BAD_REQUEST, f"an expert worker does not answer {message.type.name}"
        )

    def _describe(self, message: Describe) -> Message:
        """Take a whole set of layers or none of it; layers of which nothing is owned are noted, not prepared."""
        if self._service.draining:
            return _draining(message.sequence)
        ownership = self._service.compute.ownership.experts
        table: dict[tuple[int, int], _Served] = {}
        not_owned: set[tuple[int, int]] = set()
        for descriptor in message.descriptors:
            place = descriptor.layer, descriptor.call
            if not ownership.get(descriptor.layer):
                not_owned.add(place)
                continue
            try:
                served = self._service.prepare(descriptor)
            except (LinkcppError, MemoryError) as error:
                code = RefusalCode.BAD_REQUEST if isinstance(error, InputError) else RefusalCode.COMPUTE_FAILED
                return Refuse(message.sequence, code, f"layer {place[0]}, call {place[1]}: {_words(error)}")
            except Exception as error:  # a defect here must not take the other backbones' worker away
                return _defect(message.sequence, error)
            if served.owned:
                table[place] = served
            else:
                not_owned.add(place)
        self._table.update(table)
        self._not_owned |= not_owned
        self._not_owned -= table.keys()
        if self._native is not None:
            self._native.set_layers(
                (layer, call, served.handle, served.n_embd, served.top_k, served.mask[: served.n_expert])
                for (layer, call), served in self._table.items()
            )
        return Described(message.sequence, len(table))

    @property
    def native(self) -> NativePeer | None:
        """What answers plain requests without Python, once layers are described."""
        return self._native if self._table else None

    def answer_native(self, native: NativePeer) -> bool | None:
        """Have a request answered that native code has checked.

        False: nothing was done, and Python is to answer, in words. None: the backbone is lost.
        """
        service = self._service
        if service.draining or not service.queue.enter():
            return False
        try:
            done = native.answer()
            if done:
                service.requests += 1  # in turn, hence counted right without a lock of its own
                service.rows += native.rows
        finally:
            service.queue.leave()
        return done

    def _dispatch(self, message: Dispatch) -> Message:
        service = self._service
        if service.draining:
            return _draining(message.sequence)
        served = self._table.get((message.layer, message.call))
        if served is None:
            return self._unknown(message.sequence, message.layer, message.call)
        refused = self._check(message, served)
        if refused is not None:
            return refused
        if not service.queue.enter():
            return self._overloaded(message.sequence)
        try:
            out = self._rows(message.n_replies, served.n_embd)
            begin = time.perf_counter_ns()
            service.compute.compute(
                served.handle, message.contract, message.rows, message.counts, message.experts, message.weights, out
            )
            spent = time.perf_counter_ns() - begin
            service.requests += 1  # in turn, hence counted right without a lock of its own
            service.rows += len(message.rows)
        except (LinkcppError, MemoryError) as error:
            code = RefusalCode.BAD_REQUEST if isinstance(error, InputError) else RefusalCode.COMPUTE_FAILED
            return Refuse(message.sequence, code, f"layer {message.layer}: {_words(error)}")
        except Exception as error:
            return _defect(message.sequence, error)
        finally:
            service.queue.leave()
        return Result(message.sequence, min(spent // 1000, 0xFFFFFFFF), out)

    def _check(self, message: Dispatch, served: _Served) -> Refuse | None:
        """Hold sizes and ids against the descriptor before the engine sees them."""
        n_rows, length = message.rows.shape
        n_pairs = len(message.experts)
        if length != served.n_embd:
            return _bad(message, f"rows of {length} floats, the layer's have {served.n_embd}")
        if n_rows == 0 or len(message.counts) != n_rows or len(message.weights) != n_pairs:
            return _bad(message, f"{n_rows} rows, {len(message.counts)} counts, {len(message.weights)} weights")
        if n_pairs <= _SMALL:
            counts = message.counts.tolist()
            fits = min(counts) >= 1 and max(counts) <= served.top_k and sum(counts) == n_pairs
            owned = served.owned.issuperset(message.experts.tolist())
        else:
            fits = (
                int(message.counts.min()) >= 1
                and int(message.counts.max()) <= served.top_k
                and int(message.counts.sum(dtype=np.int64)) == n_pairs
            )
            owned = bool(served.mask[message.experts].all())
        if not fits:
            return _bad(message, f"the runs of {n_pairs} pairs over {n_rows} rows do not fit top-{served.top_k}")
        if not owned:
            return self._foreign(message, served)
        if 4 * message.n_replies * length > self._service.max_result_bytes:
            return _bad(message, f"the result of {message.n_replies} rows would not fit a frame")
        return None

    def _foreign(self, message: Dispatch, served: _Served) -> Refuse:
        strange = sorted(set(message.experts.tolist()) - served.owned)
        if strange[-1] >= served.n_expert:
            return _bad(message, f"expert {strange[-1]} of a layer with {served.n_expert} experts")
        text = f"layer {message.layer}: experts {strange[:8]} are not held here"
        return Refuse(message.sequence, RefusalCode.NOT_OWNED, text)

    def _unknown(self, sequence: int, layer: int, call: int) -> Refuse:
        if (layer, call) in self._not_owned:
            return Refuse(
                sequence, RefusalCode.NOT_OWNED, f"layer {layer}, call {call}: no expert of it is held here"
            )
        return Refuse(sequence, RefusalCode.UNKNOWN_LAYER, f"layer {layer}, call {call} was not described")

    def _overloaded(self, sequence: int) -> Refuse:
        limit = self._service.queue.limit
        return Refuse(sequence, RefusalCode.OVERLOADED, f"{limit} requests wait already, try again later")

    def _rows(self, n_rows: int, length: int) -> FloatArray:
        """Return the first rows of the session's buffer, which grows and never shrinks."""
        size = n_rows * length
        if size > self._space.size:
            self._space = np.empty(size, dtype=np.float32)
        return self._space[:size].reshape(n_rows, length)

    def _measure(self, message: Measure) -> Message:
        """Time single experts, one after the other, so that their weights come from memory as in decoding."""
        if self._service.draining:
            return _draining(message.sequence)
        served = self._table.get((message.layer, message.call))
        if served is None:
            return self._unknown(message.sequence, message.layer, message.call)
        try:
            times = [self._time(served, n_rows) for n_rows in (1, _MEASURED_ROWS)]
        except (LinkcppError, MemoryError) as error:
            return Refuse(message.sequence, RefusalCode.COMPUTE_FAILED, _words(error))
        except Exception as error:
            return _defect(message.sequence, error)
        if times[0] is None or times[1] is None:
            return self._overloaded(message.sequence)
        return Measured(message.sequence, times[0], times[1])

    def _time(self, served: _Served, n_rows: int) -> float | None:
        """Return the median milliseconds of one expert at this many rows; None where the queue is full."""
        service = self._service
        # Any rows do: the time of a matrix product does not depend on the values. Seeded, so that it is repeatable.
        rows = np.random.default_rng(0).standard_normal((n_rows, served.n_embd), dtype=np.float32)
        counts = np.ones(n_rows, dtype=np.uint16)
        weights = np.ones(n_rows, dtype=np.float32)
        out = self._rows(n_rows, served.n_embd)
        chosen = sorted(served.owned)[:_MEASURED_EXPERTS]
        times: list[int] = []
        for expert in [chosen[0], *chosen]:  # the first one is the warm-up: it builds the graph for this row count
            if not service.queue.enter():
                return None
            try:
                begin = time.perf_counter_ns()
                experts = np.full(n_rows, expert, dtype=np.uint16)
                service.compute.compute(served.handle, Contract.EXACT, rows, counts, experts, weights, out)
                times.append(time.perf_counter_ns() - begin)
            finally:
                service.queue.leave()
        return statistics.median(times[1:]) / 1e6


def _check_descriptor(descriptor: LayerDescriptor) -> None:
    """Refuse numbers that no model has, before anything is allocated by them."""
    sound = (
        0 < descriptor.n_embd <= 1 << 20
        and 0 < descriptor.n_ff <= 1 << 24
        and 0 < descriptor.n_expert <= 1 << 16
        and 0 < descriptor.top_k <= descriptor.n_expert
    )
    if not sound:
        raise InputError(
            f"no layer has {descriptor.n_expert} experts, top-{descriptor.top_k}, "
            f"rows of {descriptor.n_embd} and {descriptor.n_ff} neurons"
        )


def _draining(sequence: int) -> Refuse:
    return Refuse(sequence, RefusalCode.DRAINING, "this worker is shutting down")


def _bad(message: Dispatch, text: str) -> Refuse:
    return Refuse(message.sequence, RefusalCode.BAD_REQUEST, f"layer {message.layer}: {text}")


def _words(error: BaseException) -> str:
    return "not enough memory" if isinstance(error, MemoryError) else str(error)


def _defect(sequence: int, error: Exception) -> Refuse:
    """Report an error that nobody foresaw: in short to the backbone, in full to the operator."""
    traceback.print_exception(error, file=sys.stderr)
    return Refuse(sequence, RefusalCode.COMPUTE_FAILED, f"defect in the worker: {type(error).__name__}: {error}")
