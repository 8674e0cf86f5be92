"""What a user says about speculation, and the speculation of a gateway that follows from it."""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass
from pathlib import Path

from orchestrator.engine.model import Model
from orchestrator.engine.prediction import why_no_prediction
from orchestrator.errors import InputError, LinkcppError
from orchestrator.gateway.backend import BackendFacts
from orchestrator.gateway.drafters.model import ModelDrafter
from orchestrator.gateway.drafters.mtp import MtpDrafter
from orchestrator.gateway.drafters.ngram import NgramDrafter
from orchestrator.gateway.speculation import DEFAULT_DEPTH, Drafter, Speculation, why_not

logger = logging.getLogger(__name__)


class SpeculationMode(enum.Enum):
    """Who guesses, and whether as much as pays or always."""

    OFF = "off"
    AUTO = "auto"  # the draft model, or the model's prediction layers, or the text itself; as much as pays
    NGRAM = "ngram"  # the text itself, always
    DRAFT = "draft"  # the draft model, always
    MTP = "mtp"  # the model's own prediction layers, always


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
        if not reason and self.mode is SpeculationMode.MTP:
            reason = why_not_mtp(facts, target.path)
        if reason and self.mode is not SpeculationMode.AUTO:
            raise InputError(f"no speculation: {reason}", hint="leave --speculate out, or use --speculate off")
        if reason:
            return None
        drafter = self._drafter(facts, target)
        most = drafter.most if isinstance(drafter, MtpDrafter) else None
        depth = self.depth if most is None else min(self.depth, most)
        return Speculation(drafter, facts, depth=depth, adaptive=self.mode is SpeculationMode.AUTO)

    def describe(self, speculation: Speculation | None, facts: BackendFacts, *, exact: bool) -> str:
        """Return what came of it, in words."""
        if speculation is not None:
            file = "" if self.draft_model is None else self.draft_model.name
            names = {"draft": f"the draft model {file}", "mtp": "the model's own prediction layers"}
            who = names.get(speculation.drafter.name, "the text itself")
            return f"{self.mode.value}: {who}, at most {speculation.depth} tokens at once"
        reason = why_not(facts, exact=exact) if self.mode is not SpeculationMode.OFF else ""
        return f"off: {reason}" if reason else "off"

    def _drafter(self, facts: BackendFacts, target: Model) -> Drafter:
        if self.mode is SpeculationMode.NGRAM:
            return NgramDrafter()
        if self.mode is SpeculationMode.MTP:
            return self._prediction_layers(facts, target)
        if self.draft_model is not None:
            return ModelDrafter.open(
                self.draft_model, target, n_ctx=facts.n_ctx, n_sequences=facts.n_sequences, n_threads=self.threads
            )
        if not facts.hidden or why_not_mtp(facts, target.path):  # most files need not be looked into
            return NgramDrafter()
        try:
            return self._prediction_layers(facts, target)
        except LinkcppError as error:  # nobody asked for them
            logger.warning("the prediction layers are not used: %s", error)
            return NgramDrafter()

    def _prediction_layers(self, facts: BackendFacts, target: Model) -> MtpDrafter:
        return MtpDrafter.open(target.path, n_ctx=facts.n_ctx, n_sequences=facts.n_sequences, n_threads=self.threads)


def why_not_mtp(facts: BackendFacts, path: Path) -> str:
    """Return why a model's prediction layers cannot guess for a backend, in words; empty where they can."""
    reason = why_no_prediction(path)
    if not reason and not facts.hidden:
        return "prediction layers go on from the last layer's hidden rows, and a stage of the ring has that layer"
    return reason


NO_SPECULATION = SpeculationSettings(SpeculationMode.OFF)
