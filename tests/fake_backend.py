"""The in-memory twin of a backend: several sequences, steps under way, and operations in their order.

Logits are a function of all that a sequence's cache holds, so a token too many, too few or of somebody else changes
the answer, and the tests notice.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from fake_engine import N_VOCAB, FakeSession, Script

from orchestrator.errors import ComputeError, EngineError, LinkcppError, StepDroppedError
from orchestrator.gateway.backend import BackendFacts, Invariance, StepResult
from orchestrator.ring.steps import Copy, Remove, TokenBatch


class FakeBackend:
    """A backend whose steps are computed when they are submitted, and given out in their order.

    ``before_step`` may raise or wait. ``steps`` holds, for each step, (sequence, tokens) pairs.
    """

    def __init__(
        self,
        *,
        n_ctx: int = 512,
        n_sequences: int = 1,
        n_chunk: int = 16,
        n_step: int | None = None,
        in_flight: int = 1,
        cuttable: bool = True,
        invariance: Invariance = Invariance.SEVERAL,
        script: Script = lambda held: None,
        step_seconds: float = 0.0,
    ) -> None:
        self.facts = BackendFacts(
            N_VOCAB, n_ctx, n_sequences, n_chunk, n_step or n_chunk, in_flight, in_flight, cuttable, invariance
        )
        self.caches: list[list[int]] = [[] for _ in range(n_sequences)]
        self.kept: dict[int, list[int]] = {}
        self.steps: list[list[tuple[int, int]]] = []
        self.operations: list[object] = []
        self.cancelled: list[int] = []
        self.most_under_way = 0
        self.before_step: Callable[[TokenBatch], None] = lambda batch: None
        self._script = script
        self._step_seconds = step_seconds
        self._results: deque[StepResult] = deque()
        self._spoiled: dict[int, int] = {}
        self._tickets = 0

    def submit(self, batch: TokenBatch, wanted: Callable[[], bool]) -> int:
        assert len(batch) <= self.facts.n_step
        assert len(self._results) < self.facts.in_flight
        assert list(batch.sequences) == sorted(batch.sequences)
        self._tickets += 1
        starts = batch.starts()
        time.sleep(self._step_seconds)
        if not self._spoiled.keys().isdisjoint(starts):
            result = StepResult(
                self._tickets, error=StepDroppedError("relies on another"), resume=dict(self._spoiled)
            )
        else:
            try:
                self.before_step(batch)
                if not wanted():
                    raise StepDroppedError("not wanted")
                result = StepResult(self._tickets, self._compute(batch))
            except LinkcppError as error:
                self._spoiled.update(starts)
                result = StepResult(self._tickets, error=error, resume=dict(starts))
        self._results.append(result)
        self.most_under_way = max(self.most_under_way, len(self._results))
        return self._tickets

    def _compute(self, batch: TokenBatch) -> np.ndarray | None:
        rows = []
        counts: dict[int, int] = {}
        for token, position, sequence, output in zip(
            batch.tokens.tolist(), batch.positions.tolist(), batch.sequences.tolist(), batch.outputs, strict=True
        ):
            cache = self.caches[sequence]
            assert position == len(cache), f"sequence {sequence} holds {len(cache)} tokens, this is number {position}"
            if position >= self.facts.n_ctx:
                raise ComputeError("the context is full")
            cache.append(token)
            counts[sequence] = counts.get(sequence, 0) + 1
            if output:
                rows.append(logits_of(cache, self._script))
        self.steps.append(sorted(counts.items()))
        return np.stack(rows) if rows else None

    def collect(self) -> StepResult:
        result = self._results.popleft()
        if result.error is not None and not isinstance(result.error, StepDroppedError):
            for sequence in result.resume:  # and not those of a failure that nobody has been told of
                self._spoiled.pop(sequence, None)
        if not self._results:
            self._spoiled.clear()
        return result

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(ticket)

    def apply(self, operation: Remove | Copy) -> bool:
        self.operations.append(operation)
        match operation:
            case Remove(sequence, first, -1):
                if 0 < first < len(self.caches[sequence]) and not self.facts.cuttable:
                    return False
                del self.caches[sequence][first:]
                self._spoiled.pop(sequence, None) if first == 0 else None
            case Copy(source, destination, 0, -1):
                self.caches[destination] = list(self.caches[source])
            case _:
                raise AssertionError(operation)
        return True

    def save(self, sequence: int, key: int) -> int | None:
        self.kept[key] = list(self.caches[sequence])
        return 100 * len(self.kept[key])

    def recall(self, sequence: int, key: int) -> bool:
        self.caches[sequence] = list(self.kept[key])
        return True

    def forget(self, key: int) -> None:
        del self.kept[key]

    def dump(self, sequence: int) -> bytes | None:
        return np.array(self.caches[sequence], "<i4").tobytes()

    def load(self, sequence: int, state: bytes) -> bool:
        self.caches[sequence] = np.frombuffer(state, "<i4").tolist()
        return True

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


def logits_of(held: Sequence[int], script: Script = lambda held: None) -> np.ndarray:
    session = FakeSession(script=script)
    session.held = list(held)
    return session.logits()


def greedy(prompt: Sequence[int], count: int, script: Script = lambda held: None) -> list[int]:
    """Return the answer that a prompt gets at temperature 0 when it is alone."""
    held = list(prompt)
    for _ in range(count):
        held.append(int(logits_of(held, script).argmax()))
    return held[len(prompt) :]


class SessionBackend:
    """A backend of one sequence over the twin of a session, which tests may look into."""

    def __init__(self, session: FakeSession, *, n_chunk: int = 16, cuttable: bool = True) -> None:
        self.facts = BackendFacts(N_VOCAB, session.n_ctx, 1, n_chunk, n_chunk, cuttable=cuttable)
        self.check: Callable[[], None] = lambda: None
        self._session = session
        self._results: deque[StepResult] = deque()

    def submit(self, batch: TokenBatch, wanted: Callable[[], bool]) -> int:
        start = batch.starts()[0]
        try:
            logits = self._session.decode(batch.tokens.tolist()) if wanted() else None
            result = StepResult(1, logits)
        except LinkcppError as error:
            result = StepResult(1, error=error, resume={0: start})
        except Exception as error:
            failure = EngineError(f"the engine failed unexpectedly: {type(error).__name__}: {error}")
            result = StepResult(1, error=failure, resume={0: 0})
        self._results.append(result)
        return 1

    def collect(self) -> StepResult:
        return self._results.popleft()

    def cancel(self, ticket: int) -> None:
        pass

    def apply(self, operation: Remove | Copy) -> bool:
        assert isinstance(operation, Remove)
        if operation.first == 0:
            self._session.clear()
            return True
        return operation.first >= self._session.position or self._session.truncate(operation.first)

    def save(self, sequence: int, key: int) -> int | None:
        return None

    def recall(self, sequence: int, key: int) -> bool:
        return False

    def forget(self, key: int) -> None:
        pass

    def dump(self, sequence: int) -> bytes | None:
        return None

    def load(self, sequence: int, state: bytes) -> bool:
        return False

    def close(self) -> None:
        pass
