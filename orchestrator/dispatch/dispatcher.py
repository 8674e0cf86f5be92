"""The star's dispatcher: one connection per worker, every row to its owners, every answer to its place."""

from __future__ import annotations

import select
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from orchestrator.dispatch.exchange import DispatchStatistics, LayerSample, Measurement
from orchestrator.dispatch.link import WorkerLink
from orchestrator.dispatch.native import MAX_ROWS, NO_COUNTS, NativeStar, Rest
from orchestrator.dispatch.routing import CallKey, Route, Share, route_rows
from orchestrator.dispatch.sending import finish_sends
from orchestrator.dispatch.state import StarState
from orchestrator.errors import ComputeError, FleetError, InputError, OwnershipError, WorkerError, WorkerRefusedError
from orchestrator.transport.base import Buffer, Connector
from orchestrator.transport.sockets import send_error
from orchestrator.transport.tcp import TcpConnector
from orchestrator.types import Contract, EngineIdentity, ExpertBatch, FloatArray, LayerDescriptor
from orchestrator.wire.codec import CONTRACT_CODES, EncodedDispatch
from orchestrator.wire.frame import MAX_PAYLOAD
from orchestrator.wire.handshake import find_difference
from orchestrator.wire.messages import (
    SUPPORTED,
    Describe,
    Described,
    Hello,
    Measure,
    Measured,
    Ping,
    Result,
    VersionRange,
)
from orchestrator.wire.tensors import F32

N_SAMPLES: Final = 8192
"""How many calls the figures remember: 170 tokens of a model of 48 MoE layers."""

N_PINGS: Final = 5
GREETING_TIMEOUT: Final = 10.0  # seconds for a greeting or ping: the worker's machine may be busy
CHECK_TIMEOUT: Final = 1.0  # the same between steps, where the next request must not wait for a dead worker


class _Call(NamedTuple):
    """What was sent and is not combined yet."""

    key: CallKey
    sequence: int
    shares: list[Share]
    n_tokens: int
    top_k: int
    length: int
    spent: float  # seconds in dispatch
    n_done: int = 0  # shares whose answers native code has put into the output
    compute_us: int = 0  # of those
    waited: float = 0.0  # seconds in combine already


class Dispatcher:
    """Sends the rows of each MoE call to the workers that own the experts and gathers their answers.

    One thread uses it, except for :meth:`statistics`. It is the :class:`orchestrator.dispatch.exchange.RowExchange`
    of a star.

    Args:
        workers: addresses ``host:port``, or connectors of another transport.
        contract: what the workers return.
        identity: of this process's engine; under ``exact`` the workers' must be equal.
        model_sha256: identity of the model's experts that the workers must have; None does not compare.
        timeout: seconds to wait for the answers of one call, and for a description.
        connect_timeout: seconds to wait for a connection; a step with a lost worker fails after that.
        native: carries small calls without Python (see :mod:`orchestrator.dispatch.native`); the hook asks for it.
        now: the clock of the deadlines, in seconds; the links use ``time.monotonic``.
    """

    def __init__(
        self,
        workers: Sequence[str | Connector],
        contract: Contract,
        identity: EngineIdentity,
        *,
        model_sha256: str | None = None,
        timeout: float = 60.0,
        connect_timeout: float = 2.0,
        client: str = "linkcpp",
        versions: VersionRange = SUPPORTED,
        native: NativeStar | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if not workers:
            raise InputError("a star needs at least one worker")
        self._links = [WorkerLink(TcpConnector(place) if isinstance(place, str) else place) for place in workers]
        self.native = native
        # One series of numbers for both, whoever takes the next.
        self._state = StarState(len(self._links), None if native is None else partial(native.number, advance=True))
        self._routed: Mapping[CallKey, Route] | None = None  # what native code was told
        self._contract = contract
        self._contract_code = CONTRACT_CODES[contract]
        self._identity = identity
        self._model_sha256 = model_sha256
        self._hello = Hello(versions, identity, client)
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._now = now
        self._call: _Call | None = None
        self._steps = 0
        self._round_trips = 0
        self._samples: deque[LayerSample] = deque(maxlen=N_SAMPLES)

    def __enter__(self) -> Dispatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def contract(self) -> Contract:
        """What the workers return."""
        return self._contract

    # --- control ---------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Greet all workers that are not connected.

        Raises:
            WorkerLostError: one cannot be reached.
            WorkerRefusedError: one speaks another protocol version, has another model, or (``exact``) another
                engine; the text names what differs.
        """
        for worker in self._absent():
            self._bring_back(worker, timeout=GREETING_TIMEOUT, layer=self._first_layer(worker))

    def describe(self, descriptors: Sequence[LayerDescriptor]) -> None:
        """Tell all workers how the experts compute, and settle who computes which.

        Raises:
            OwnershipError: experts that no worker owns; layers and experts are named.
            WorkerError: a worker is lost, or refuses a description.
        """
        self._state.described(descriptors)
        self._state.settle()
        for worker in range(len(self._links)):
            self._describe_to(worker)

    def measure(self) -> tuple[Measurement, ...]:
        """Ask every worker once for its time per expert and round trip; workers without experts are left out."""
        measurements = []
        for worker, link in enumerate(self._links):
            owned = self._described_for(worker)
            if not owned:
                continue
            self._ping(link, timeout=GREETING_TIMEOUT)
            sequence = self._state.next_sequence()
            request = Measure(sequence, owned[0].layer, owned[0].call)
            reply = link.request(request, self._now() + self._timeout, owned[0].layer)
            if not isinstance(reply, Measured):
                link.fail_protocol(f"it answered MEASURE with {reply.type.name}", owned[0].layer)
            figures = link.statistics(self._state.holding(worker))
            measurements.append(
                Measurement(figures.name, figures.address, reply.ms_at_1, reply.ms_at_32, link.round_trip_ms or 0.0)
            )
        return tuple(measurements)

    def check(self) -> None:
        """Ping every worker and try to bring lost ones back; call it between steps, on the thread that decodes.

        Nothing is raised: what is wrong shows in :meth:`statistics` (``connected``, ``last_error``), and a step
        that needs the worker fails in words.
        """
        self._absorb_arrived()
        for worker, link in enumerate(self._links):
            try:
                if link.is_open:
                    self._ping(link, count=1, timeout=CHECK_TIMEOUT)
                else:
                    self._state.lost(worker)
                    self._bring_back(worker, timeout=CHECK_TIMEOUT)
            except FleetError as error:
                if link.is_open:  # it did not answer a ping: nothing is lost by a new connection
                    link.drop(str(error), counted=False)

    def close(self) -> None:
        """Say goodbye to all workers; harmless when repeated."""
        for link in self._links:
            link.close("the backbone is done")

    def _absent(self) -> tuple[int, ...]:
        for worker, link in enumerate(self._links):
            if not link.is_open:
                self._state.lost(worker)
        return self._state.absent()

    def _first_layer(self, worker: int) -> int | None:
        """Return the first layer that a step cannot pass without this worker; None before its first greeting."""
        welcome = self._links[worker].welcome
        return min(welcome.ownership.layers, default=None) if welcome is not None else None

    def _bring_back(self, worker: int, *, timeout: float, layer: int | None = None) -> None:
        link = self._links[worker]
        before = link.welcome
        connect_timeout = min(self._connect_timeout, timeout)
        welcome = link.open(self._hello, connect_timeout, self._now() + connect_timeout + timeout, layer)
        difference = find_difference(welcome, self._identity, self._contract, self._model_sha256)
        if difference is not None:
            name = link.name
            link.reject(difference)
            link.welcome = before
            raise WorkerRefusedError(f"cannot serve {self._contract.value}: {difference}", worker=name, layer=layer)
        self._state.greeted(worker, welcome.ownership)
        try:
            self._describe_to(worker)
            self._ping(link, timeout=timeout)
        except WorkerError as error:
            if link.is_open:
                link.drop(str(error), counted=False)
            self._state.lost(worker)
            raise

    def _described_for(self, worker: int) -> list[LayerDescriptor]:
        owned = self._state.holding(worker).experts
        # A call may have fewer experts than its layer (grovemoe's second one), and the worker none of those.
        return [
            descriptor
            for descriptor in self._state.descriptors
            if any(expert < descriptor.n_expert for expert in owned.get(descriptor.layer, ()))
        ]

    def _describe_to(self, worker: int) -> None:
        owned = self._described_for(worker)
        if not owned:
            return
        link = self._links[worker]
        request = Describe(self._state.next_sequence(), tuple(owned))
        reply = link.request(request, self._now() + self._timeout)
        if not isinstance(reply, Described) or reply.accepted != len(owned):
            link.fail_protocol(f"it answered {len(owned)} descriptors with {reply}", None)

    def _ping(self, link: WorkerLink, *, timeout: float, count: int = N_PINGS) -> None:
        times = []
        for _ in range(count):
            sequence = self._state.next_sequence()
            begin = self._now()
            link.request(Ping(sequence, sequence), begin + timeout)
            times.append(1e3 * (self._now() - begin))
        link.round_trip_ms = statistics.median(times)

    # --- steps (RowExchange) ---------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Drop what is stale and bring lost workers back.

        Raises:
            WorkerLostError: a worker cannot be reached within the connect timeout.
            WorkerRefusedError: a worker came back as another one that cannot serve.
            OwnershipError: a worker came back with fewer experts, and now some have no owner.
        """
        self._steps += 1
        self.abort_step()
        self._absorb_arrived()
        self.connect()
        self._state.settle()
        if self.native is not None:
            self._arm(self.native)

    def _arm(self, native: NativeStar) -> None:
        """Let native code take the small calls of this step, if all links are such as it can read and write."""
        sockets = [link.native_socket() for link in self._links]
        for worker, socket in enumerate(sockets):
            if socket is None:
                return
            native.set_link(worker, *socket)
        if self._routed is not self._state.routes:
            self._routed = self._state.routes
            native.set_routes((*key, route.owner_list) for key, route in self._routed.items())
        native.arm(int(1e3 * self._timeout), MAX_ROWS)

    def _adopt(self, rest: Rest) -> None:
        """Go on with a call that native code left.

        Raises:
            WorkerLostError, WorkerTimeoutError: it left because the request could not be sent.
        """
        shares = route_rows(self._state.routes[rest.layer, rest.call], rest.experts, rest.weights)
        n_tokens, top_k = rest.experts.shape
        if rest.send_error is not None:
            for share in shares[: rest.n_done]:
                self._links[share.worker].adopt(rest.sequence)
            self._links[rest.worker].lose(send_error(rest.send_error), rest.layer)
        for share in shares[rest.n_done :]:
            received = rest.received if share.worker == rest.worker else b""
            self._links[share.worker].adopt(rest.sequence, received)
        self._call = _Call(
            (rest.layer, rest.call),
            rest.sequence,
            shares,
            n_tokens,
            top_k,
            rest.length,
            rest.spent,
            rest.n_done,
            rest.compute_us,
            rest.waited,
        )

    def abort_step(self) -> None:
        """Forget what is under way; its answers are late from now on."""
        self._call = None
        passed = 0
        if self.native is not None:
            self.native.disarm()
            passed = self.native.number(advance=False)
        for link in self._links:
            link.abandon(passed)

    def dispatch(self, batch: ExpertBatch) -> None:
        """Send the rows of a call to all owners; the batch's arrays are free again on return.

        Raises:
            OwnershipError: the call was not described.
            InputError: the batch does not fit into a frame.
            WorkerLostError, WorkerTimeoutError: a worker is gone or takes no data.
        """
        begin = self._now()
        unfinished = None if self.native is None else self.native.take_rest()
        if unfinished is not None:
            self._adopt(unfinished)
        layer, call, rows = batch.layer, batch.call, batch.rows
        route = self._state.routes.get((layer, call))
        if route is None:
            raise OwnershipError(f"layer {layer}, call {call} was not described to the workers")
        n_tokens, length = rows.shape
        top_k = batch.experts.shape[1]
        if 4 * length * n_tokens * top_k + 64 > MAX_PAYLOAD:
            raise InputError(
                f"{n_tokens} rows of {top_k} x {length} values are too many for one exchange",
                hint="use a smaller micro-batch (n_ubatch)",
            )
        shares = route_rows(route, batch.experts, batch.weights)
        sequence = self._state.next_sequence()
        whole: memoryview | None = None
        unsent: dict[WorkerLink, Sequence[Buffer]] = {}
        try:
            for worker, row_numbers, _, n_rows, n_pairs, tail in shares:
                if row_numbers is not None:
                    data = F32.encode(rows[row_numbers])
                else:
                    data = whole = F32.encode(rows) if whole is None else whole
                encoded = EncodedDispatch(
                    layer, call, self._contract_code, F32.code, n_rows, n_pairs, length, data, tail
                )
                link = self._links[worker]
                rest = link.post(sequence, encoded)
                if rest:
                    unsent[link] = rest
            if unsent:
                finish_sends(unsent, begin + self._timeout, layer)
        except WorkerError:
            # A request that is cut off leaves its worker in the middle of a frame: only a new connection helps.
            for link in unsent:
                if link.is_open:
                    link.drop("a request was cut off because of another worker", counted=False)
            raise
        self._call = _Call((layer, call), sequence, shares, n_tokens, top_k, length, self._now() - begin)

    def combine(self, layer: int, call: int, out: FloatArray) -> None:
        """Wait for the results of the call dispatched last and fill ``out``.

        Args:
            layer: of the call.
            call: of the layer.
            out: [n_tokens, top_k, n_embd] for ``exact``, [n_tokens, n_embd] for ``sum``; C-contiguous.

        Raises:
            ComputeError: this is not the call that was dispatched last, or ``out`` has another shape.
            WorkerLostError, WorkerTimeoutError, WorkerRefusedError: naming worker and layer.
        """
        begin = self._now()
        unfinished = None if self.native is None else self.native.take_rest()
        if unfinished is not None:
            self._adopt(unfinished)
        current, self._call = self._call, None
        if current is None or current.key != (layer, call):
            raise ComputeError(f"layer {layer}, call {call} is combined, but was not dispatched before")
        _, sequence, shares, n_tokens, top_k, length, spent, n_done, compute_us, waited = current
        exact = self._contract is Contract.EXACT
        expected = (n_tokens, top_k, length) if exact else (n_tokens, length)
        if out.shape != expected or not out.flags.c_contiguous:
            raise ComputeError(f"layer {layer}: results of shape {expected} do not fit into {out.shape}")
        if exact:
            out = out.reshape(n_tokens * top_k, length)
        elif n_done == 0:
            out.fill(0.0)
        deadline = begin + self._timeout - waited
        for worker, row_numbers, places, n_rows, n_pairs, _ in shares[n_done:]:
            link = self._links[worker]
            result = link.collect(sequence, deadline, layer)
            if not isinstance(result, Result):
                link.fail_protocol(f"it answered a dispatch with {result.type.name}", layer)
            values = result.rows
            if values.shape != (n_pairs if exact else n_rows, length):
                link.fail_protocol(f"it answered {n_rows} rows of {length} values with {values.shape}", layer)
            if exact:
                if places is None:
                    out[...] = values
                elif n_tokens == 1:  # a few rows: quicker than numpy's indexing by a list
                    for place, value in zip(places, values, strict=True):
                        out[place] = value
                else:
                    out[places] = values
            elif row_numbers is None:
                out += values
            else:
                out[row_numbers] += values
            compute_us = max(compute_us, result.compute_us)
        sample = LayerSample(1e6 * (spent + waited + self._now() - begin), compute_us, n_tokens)
        if self.native is not None:
            self.native.record(sample)
        else:
            self._round_trips += 1
            self._samples.append(sample)

    def _absorb_arrived(self) -> None:
        """Take what has come since the last step: late answers, goodbyes, ends of connections. Never waits."""
        poller = select.poll()
        links = {link.fileno(): link for link in self._links if link.is_open and link.fileno() >= 0}
        for descriptor in links:
            poller.register(descriptor, select.POLLIN)
        deadline = self._now() + self._connect_timeout
        while links and (events := poller.poll(0)):
            for descriptor, _ in events:
                link = links[descriptor]
                try:
                    link.absorb(deadline)
                except FleetError as error:
                    link.drop(str(error))
                    poller.unregister(descriptor)
                    del links[descriptor]

    # --- figures ---------------------------------------------------------------------------------------------

    def statistics(self) -> DispatchStatistics:
        """Give the counters; may be called by any thread."""
        native = self.native
        round_trips, samples = (self._round_trips, tuple(self._samples)) if native is None else native.samples()
        return DispatchStatistics(
            workers=tuple(
                [
                    link.statistics(self._state.holding(at), NO_COUNTS if native is None else native.counts(at))
                    for at, link in enumerate(self._links)
                ]
            ),
            steps=self._steps,
            round_trips=round_trips,
            samples=samples,
        )
