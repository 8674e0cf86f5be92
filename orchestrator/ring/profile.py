"""What a stage says of itself, and whether several stages can form one ring. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.errors import StageRefusedError
from orchestrator.ring.hop import StageCompute
from orchestrator.ring.layout import LayerRange
from orchestrator.ring.state import RingFacts
from orchestrator.types import EngineIdentity
from orchestrator.wire.ring_messages import StageWelcome


class LocalStage(StageCompute, Protocol):
    """A range of layers in this process (:class:`orchestrator.engine.stage.StageContext`)."""

    @property
    def facts(self) -> RingFacts:
        """What the other stages must agree on."""

    @property
    def n_ubatch(self) -> int:
        """Tokens of a micro-batch."""

    @property
    def batch_invariant(self) -> bool:
        """Whether logits do not depend on how tokens are grouped."""


@dataclass(frozen=True, slots=True)
class StageProfile:
    """One process with stages: the gateway's own, or a stage worker at ``address``."""

    name: str  # for people
    address: str  # empty: this process
    pid: int
    n_threads: int
    identity: EngineIdentity
    model_sha256: str  # empty: unknown, only of the gateway
    architecture: str
    facts: RingFacts
    n_ubatch: int
    batch_invariant: bool
    ranges: tuple[LayerRange, ...]


def profile_of(welcome: StageWelcome, address: str) -> StageProfile:
    """Read a stage worker's greeting."""
    return StageProfile(
        name=f"{welcome.name} ({address})",
        address=address,
        pid=welcome.pid,
        n_threads=welcome.n_threads,
        identity=welcome.identity,
        model_sha256=welcome.model_sha256,
        architecture=welcome.architecture,
        facts=RingFacts(
            n_layer=welcome.n_layer,
            n_vocab=welcome.n_vocab,
            n_ctx=welcome.n_ctx,
            n_sequences=welcome.n_sequences,
            n_batch=welcome.n_batch,
            cuttable=welcome.cuttable,
            shiftable=welcome.shiftable,
        ),
        n_ubatch=welcome.n_ubatch,
        batch_invariant=welcome.batch_invariant,
        ranges=tuple(LayerRange(first, last) for first, last in welcome.ranges),
    )


def agree(profiles: Sequence[StageProfile]) -> RingFacts:
    """Return what a ring of these processes can do.

    Raises:
        StageRefusedError: one differs from the first in what decides the bytes: the model, the engine, or how
            tokens are grouped. The message has both values.
    """
    first = profiles[0]
    for other in profiles[1:]:
        differences = list(_differences(first, other))
        if differences:
            raise StageRefusedError(
                f"does not fit {first.name}: {', '.join(differences)}",
                stage=other.name,
                hint="start all stages from the same model, engine, --ctx, --sequences, --ubatch and --batch",
            )
    facts = [profile.facts for profile in profiles]
    return RingFacts(
        n_layer=first.facts.n_layer,
        n_vocab=first.facts.n_vocab,
        n_ctx=min(fact.n_ctx for fact in facts),
        n_sequences=first.facts.n_sequences,
        n_batch=min(fact.n_batch for fact in facts),
        cuttable=all(fact.cuttable for fact in facts),
        shiftable=all(fact.shiftable for fact in facts),
    )


def _differences(first: StageProfile, other: StageProfile) -> list[str]:
    pairs: list[tuple[str, object, object]] = [
        ("model file", first.model_sha256[:12] or other.model_sha256[:12], other.model_sha256[:12]),
        ("layers", first.facts.n_layer, other.facts.n_layer),
        ("vocabulary", first.facts.n_vocab, other.facts.n_vocab),
        ("engine build", first.identity.build, other.identity.build),
        ("instruction set", first.identity.isa, other.identity.isa),
        ("weight repacking", first.identity.repack, other.identity.repack),
        ("sequences", first.facts.n_sequences, other.facts.n_sequences),
        ("batch invariance", first.batch_invariant, other.batch_invariant),
    ]
    if first.ranges and other.ranges:  # before it has a context, a process does not know how the engine rounds it
        pairs.append(("micro-batch", first.n_ubatch, other.n_ubatch))
    return [f"{what} {theirs} instead of {ours}" for what, ours, theirs in pairs if ours != theirs]
