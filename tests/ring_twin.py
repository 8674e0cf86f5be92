"""The in-memory twin of a range of layers: caches of tokens, and values that depend on all that is cached.

A token's value behind a layer is a hash of its value before it and of everything that the layer holds of its
sequence up to it, so that a wrong, missing or doubled entry of any cache changes the logits.
"""

from __future__ import annotations

import ast
import itertools
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.errors import ComputeError, InputError
from orchestrator.ring.hop import Hop
from orchestrator.ring.layout import LayerRange
from orchestrator.ring.pipeline import Pipeline
from orchestrator.ring.state import RingFacts
from orchestrator.ring.steps import Clear, Copy, Keep, KvOperation, Remove, Restore, Shift, TokenBatch
from orchestrator.types import FloatArray
from orchestrator.wire.ring_codec import FramedStep

N_VOCAB = 7
N_LAYER = 12


def facts(*, cuttable: bool = True, n_sequences: int = 4, n_ctx: int = 64, n_batch: int = 8) -> RingFacts:
    return RingFacts(N_LAYER, N_VOCAB, n_ctx, n_sequences, n_batch, cuttable=cuttable, shiftable=cuttable)


@dataclass
class Output:
    logits: FloatArray | None
    boundary: bytes
    hidden: FloatArray | None = None


class TwinStage:
    """A range of layers that remembers; ``before_decode`` may raise, or wait, to imitate a failing engine."""

    def __init__(self, first: int, last: int, ring: RingFacts) -> None:
        self.layers = LayerRange(first, last)
        self.facts = ring
        self.n_layer, self.n_vocab = ring.n_layer, ring.n_vocab
        self.n_sequences, self.n_batch, self.n_ctx = ring.n_sequences, ring.n_batch, ring.n_ctx
        # position -> the values that came into each layer
        self.held: list[dict[int, tuple[int, ...]]] = [{} for _ in range(ring.n_sequences)]
        self.before_decode: Callable[[TokenBatch], None] = lambda _batch: None
        self.decoded = 0

    def decode(self, batch: TokenBatch, boundary: bytes) -> Output:
        kept = [dict(held) for held in self.held]
        try:
            self.before_decode(batch)
            return self._decode(batch, boundary)
        except BaseException:
            self.held = kept
            raise

    def run_frame(self, step: FramedStep, minor: int | None) -> None:
        return None

    def rehearse(self, step: FramedStep) -> None:
        pass

    def _decode(self, batch: TokenBatch, boundary: bytes) -> Output:
        self.decoded += 1
        n = len(batch)
        incoming = batch.tokens.astype(np.uint32) if self.layers.first == 0 else np.frombuffer(boundary, np.uint32)
        if len(incoming) != n:
            raise ComputeError("the boundary is not the one that these tokens need")
        for sequence, start in batch.starts().items():
            held = self.held[sequence]
            if held and start != max(held) + 1:
                raise ComputeError(f"sequence {sequence} ends at {max(held)}, and the step begins at {start}")
        values = np.empty(n, np.uint32)
        for i in range(n):
            sequence, position = int(batch.sequences[i]), int(batch.positions[i])
            held = self.held[sequence]
            value, entry = int(incoming[i]), []
            for index, layer in enumerate(range(self.layers.first, self.layers.last)):
                entry.append(value)
                seen = [(at - position, held[at][index]) for at in sorted(held)]
                value = zlib.crc32(repr((layer, seen, value)).encode())
            held[position] = tuple(entry)
            values[i] = value
        if self.layers.last < self.n_layer:
            return Output(None, values.tobytes())
        wanted = values[batch.outputs]
        rows = [np.random.default_rng(int(value)).standard_normal(N_VOCAB, np.float32) for value in wanted]
        return Output(np.array(rows, np.float32).reshape(len(rows), N_VOCAB) if rows else None, b"")

    def apply(self, operation: KvOperation) -> bool:
        match operation:
            case Remove(sequence, first, last):
                held = self.held[sequence]
                gone = {at for at in held if first <= at and (last < 0 or at < last)}
                if gone and gone != set(held) and not self.facts.cuttable:
                    return False
                self.held[sequence] = {at: value for at, value in held.items() if at not in gone}
            case Copy(source, destination):
                self.held[destination] = dict(self.held[source])
            case Keep(sequence):
                self.held = [held if i == sequence else {} for i, held in enumerate(self.held)]
            case Shift(sequence, first, last, delta):
                moved = {at: first <= at and (last < 0 or at < last) for at in self.held[sequence]}
                self.held[sequence] = {
                    at + delta if moved[at] else at: value for at, value in self.held[sequence].items()
                }
            case Clear():
                self.held = [{} for _ in self.held]
            case Restore(sequence, state):
                self.held[sequence] = ast.literal_eval(state.decode())
        return True

    def save(self, sequence: int) -> bytes:
        if sequence >= self.n_sequences:
            raise InputError("no such sequence")
        return repr(self.held[sequence]).encode()


def twin_hops(cuts: Sequence[int], ring: RingFacts) -> list[Hop]:
    bounds = [0, *cuts, N_LAYER]
    return [
        Hop(TwinStage(first, last, ring), clock=time.perf_counter_ns) for first, last in itertools.pairwise(bounds)
    ]


def twin_pipeline(cuts: Sequence[int], ring: RingFacts | None = None) -> Pipeline:
    ring = ring or facts()
    return Pipeline(twin_hops(cuts, ring), ring)
