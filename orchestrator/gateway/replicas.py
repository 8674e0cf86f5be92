"""Several complete backends of one model behind one door: each request goes to the replica that suits it best."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Final

from orchestrator.errors import BusyError, InputError
from orchestrator.gateway.gateway import DEFAULT_TERMS, Gateway
from orchestrator.gateway.generation import Generation
from orchestrator.gateway.prefix import reusable_prefix
from orchestrator.gateway.routing import Candidate, affinity_key, choose
from orchestrator.gateway.scheduler import Terms
from orchestrator.gateway.sequence import GenerationRequest
from orchestrator.gateway.state import GatewayState, SlotState

_SUMMED: Final = (
    "waiting",
    "finished",
    "failed",
    "cancelled",
    "prompt_tokens",
    "generated_tokens",
    "cached_tokens",
    "steps",
    "rows",
    "sequences",
    "saved",
    "saved_bytes",
)


class Replicas:
    """Gateways by name that together answer as one; use it like a :class:`Gateway`."""

    def __init__(self, gateways: Mapping[str, Gateway]) -> None:
        if not gateways:
            raise InputError("there must be at least one replica")
        self.gateways = dict(gateways)
        self.n_ctx = min(gateway.n_ctx for gateway in gateways.values())
        self.n_vocab = min(gateway.n_vocab for gateway in gateways.values())

    def submit(self, request: GenerationRequest, terms: Terms = DEFAULT_TERMS) -> Generation:
        """Queue a request with the replica that suits it best; see :meth:`Gateway.submit` for the errors."""
        names = list(self.gateways)
        candidates = [self._candidate(name, request) for name in names]
        first = choose(affinity_key(request.prompt, terms.session), candidates)
        # Should its queue be full, anybody's will do.
        busy: BusyError | None = None
        for name in [names[first], *(name for name in names if name != names[first])]:
            try:
                return self.gateways[name].submit(request, terms)
            except BusyError as error:
                busy = error if busy is None or error.retry_after < busy.retry_after else busy
        raise busy or InputError("no replica takes requests")

    def state(self) -> GatewayState:
        """Return what all replicas do together; slots are numbered through."""
        states = [gateway.state() for gateway in self.gateways.values()]
        slots = [slot for state in states for slot in state.slots]
        sums = {name: sum(getattr(state, name) for state in states) for name in _SUMMED}
        return GatewayState(
            running=next((state.running for state in states if state.running is not None), None),
            problem=next((state.problem for state in states if state.problem), ""),
            slots=tuple(SlotState(index, slot.held_tokens, slot.request) for index, slot in enumerate(slots)),
            **sums,
        )

    def start(self) -> None:
        """Start the loops of all replicas."""
        for gateway in self.gateways.values():
            gateway.start()

    def close(self, timeout: float = 10.0) -> bool:
        """End all; return False if a step outlasts ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        stopped = [gateway.close(max(0.0, deadline - time.monotonic())) for gateway in self.gateways.values()]
        return all(stopped)

    def __enter__(self) -> Replicas:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _candidate(self, name: str, request: GenerationRequest) -> Candidate:
        gateway = self.gateways[name]
        requests, slots = gateway.load()
        prompt = list(request.prompt)
        cuttable = gateway.cuttable
        held = max(reusable_prefix(tokens, prompt, cuttable=cuttable) for tokens in gateway.holdings())
        return Candidate(name, requests, slots, held, gateway.is_up)
