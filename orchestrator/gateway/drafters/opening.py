"""What a user says about speculation, and the speculation of a gateway that follows from it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from orchestrator.engine.model import Model
from orchestrator.errors import InputError
from orchestrator.gateway.backend import BackendFacts
from orchestrator.gateway.drafters.model import ModelDrafter
from orchestrator.gateway.drafters.ngram import NgramDrafter
from orchestrator.gateway.speculation import DEFAULT_DEPTH, Drafter, Speculation, why_not


class SpeculationMode(enum.Enum):
    """Who guesses, and whether as much as pays or always."""

    OFF = "off"
    AUTO = "auto"  # the draft model where there is one, else the text itself; as much as pays
    NGRAM = "ngram"  # the text itself, always
    DRAFT = "draft"  # the draft model, always


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """What is asked for; ``draft_model`` is a GGUF file, ``threads`` are those of its computation."""

    mode: SpeculationMode = SpeculationMode.AUTO
    draft_model: Path | None = None
    depth: int = DEFAULT_DEPTH
    threads: int = 1

    def open(self, facts: BackendFacts, target: Model, *, exact: bool) -> Speculation | None:
        """Return the speculation of a gateway, or None; it closes the draft model with itself.

        ``exact`` tells whether the backend is in the batch-invariant configuration. Raises :class:`InputError` where
        guesses are demanded of a backend that cannot check them, and for a draft model of another vocabulary.
        """
        if self.mode is SpeculationMode.OFF:
            return None
        reason = why_not(facts, exact=exact)
        if reason and self.mode is not SpeculationMode.AUTO:
            raise InputError(f"no speculation: {reason}", hint="leave --speculate out, or use --speculate off")
        if reason:
            return None
        return Speculation(
            self._drafter(facts, target), facts, depth=self.depth, adaptive=self.mode is SpeculationMode.AUTO
        )

    def describe(self, speculation: Speculation | None, facts: BackendFacts, *, exact: bool) -> str:
        """Return what came of it, in words."""
        if speculation is not None:
            file = None if self.mode is SpeculationMode.NGRAM else self.draft_model
            who = "the text itself" if file is None else f"the draft model {file.name}"
            return f"{self.mode.value}: {who}, at most {self.depth} tokens at once"
        reason = why_not(facts, exact=exact) if self.mode is not SpeculationMode.OFF else ""
        return f"off: {reason}" if reason else "off"

    def _drafter(self, facts: BackendFacts, target: Model) -> Drafter:
        if self.mode is SpeculationMode.NGRAM or self.draft_model is None:
            return NgramDrafter()
        return ModelDrafter.open(
            self.draft_model, target, n_ctx=facts.n_ctx, n_sequences=facts.n_sequences, n_threads=self.threads
        )


NO_SPECULATION = SpeculationSettings(SpeculationMode.OFF)
