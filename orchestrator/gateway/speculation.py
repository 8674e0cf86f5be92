"""Guess the next tokens and let the model check several at once: more than one token of a step. PURE.

*Exactness.* A step computes an answer's newest token and behind it the guesses; its logits say what follows each of
them. Tokens are then chosen from these logits one by one, by the request's own sampler with all that belongs to it
(penalties, bias, grammar, seed), as without guesses; once the chosen token is not the guessed one, the rest of the
logits is of no use, and the cache forgets the rest of the guesses. So every token is chosen from the logits and with
the random number that it would be chosen with anyway: the answer is the same, token by token, greedy and sampled.

For guesses that are certain of themselves (one token and no distribution, as all drafters here make them) this *is*
speculative sampling (Leviathan et al. 2023, Chen et al. 2023): a guess x is accepted with probability p(x), and what
replaces a refused one comes from p without x, normalised. It takes logits that do not depend on how tokens are
grouped into steps, and caches that can forget.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, runtime_checkable

from orchestrator.gateway.backend import BackendFacts, Invariance
from orchestrator.gateway.depth import (
    COSTLY_MARGIN,
    MARGIN,
    Candidate,
    Choice,
    Rates,
    StepTimes,
    best_choice,
    micro_batches,
)
from orchestrator.gateway.prefix import common_prefix
from orchestrator.gateway.scheduler import Job, Segment, Step
from orchestrator.types import FloatArray

DEFAULT_DEPTH: Final = 8
"""Guesses for an answer in one step at most."""

TRIAL_SHARE: Final = 0.005
"""The part of the time that trials may cost where guessing does not seem to pay."""

STALE_STEPS: Final = 8
"""After so many steps a single step is made and timed again: what it takes is what guesses are measured by. Where
guesses gain much, after more steps: the square of the gain."""

SINGLES_EACH: Final = 4
"""One in so many single steps is timed."""

RESTING_STEPS: Final = 7
"""Steps after one for which no depth paid, before the question is asked again for no better guesses."""

_LAST_STEPS: Final = 64
"""Over how many steps a drafter's preparations are spread at most: nobody knows how long an answer gets."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A text (prompt and answer so far) of a slot, and how many tokens that follow it are to be guessed.

    ``left`` is how many tokens the answer may still get.
    """

    slot: int
    tokens: Sequence[int]
    count: int
    left: int


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens; drafts of one ``kind`` are equally sure, whatever its number."""

    tokens: tuple[int, ...]
    kind: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """The hidden rows [n, width] of a text's tokens from position ``start`` on: they were computed, and they stay.

    ``tokens`` is the whole text of the slot, at least up to the last of them.
    """

    slot: int
    tokens: Sequence[int]
    start: int
    rows: FloatArray


class Drafter(Protocol):
    """Whoever guesses, for the texts of a gateway's slots.

    ``is_free``: guessing takes no time worth mentioning, so that guesses are made and compared even where none are
    computed. ``prior`` is the rate of right guesses to begin with.
    """

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def is_free(self) -> bool:
        """Tell whether a guess costs nothing."""

    @property
    def prior(self) -> float:
        """The rate of right guesses before any was made."""

    def begin(self, slot: int) -> None:
        """Note that a slot has another text from now on."""

    def propose(self, wanted: Sequence[Wanted]) -> Mapping[int, Draft]:
        """Return guesses by slot, at most as many as wanted; a slot without a guess is left out."""

    def seconds(self, slots: int) -> float:
        """Return what one more guess for so many slots at once takes."""

    def debt(self, slot: int, tokens: Sequence[int]) -> float:
        """Return the seconds that pass before the first guess for a text, beyond what each guess takes."""

    def close(self) -> None:
        """Give everything back."""


@runtime_checkable
class Reader(Protocol):
    """A drafter that goes on from what the model computes, so that it has to see all of it."""

    def read(self, seen: Sequence[Seen]) -> None:
        """Take the rows of a step; a slot may have another text than before, or its text another end."""


def why_not(facts: BackendFacts, *, exact: bool = True) -> str:
    """Return why a backend cannot check guesses, in words; empty where it can.

    ``exact`` tells whether it is in the batch-invariant configuration.
    """
    if not facts.cuttable:
        return "this model keeps recurrent state, which cannot forget a wrong guess"
    if not exact:
        return "without batch invariance guesses would change the answers"
    if facts.invariance is Invariance.NONE:
        return "this model's logits depend on how tokens are grouped into steps: guesses would change its answers"
    return ""


class Speculation:
    """Adds guesses to the steps of one gateway.

    ``depth`` is the most guesses for an answer in one step. With ``adaptive`` there are as many as pay, measured, and
    none where none do; without it always as many as there are.
    """

    def __init__(
        self,
        drafter: Drafter,
        facts: BackendFacts,
        *,
        depth: int = DEFAULT_DEPTH,
        adaptive: bool = True,
    ) -> None:
        self.drafter = drafter
        self.depth = depth
        self.adaptive = adaptive
        self.times = StepTimes()
        self._facts = facts
        self._all_rates = Rates(drafter.prior)
        self._rates: dict[int, Rates] = {}  # by slot, of the request that has it
        self._jobs: dict[int, object] = {}  # whose they are
        self._drafts: dict[int, Draft] = {}  # made for steps under way, whether computed or not
        self._budget = 0.0  # seconds that trials may cost
        self._singles = 0  # steps since the last one with guesses
        self._rest = 0  # steps for which no rate up to the hopeless one is looked at again
        self._hopeless = 0.0

    @property
    def reads_hidden(self) -> bool:
        """Tell whether the drafter wants to see the hidden rows of each step."""
        return isinstance(self.drafter, Reader)

    def close(self) -> None:
        """Close the drafter."""
        self.drafter.close()

    def extend(self, step: Step, jobs: Sequence[Job[Any]]) -> Step:
        """Return a step with guesses behind the newest tokens of its answers, within a micro-batch's rows."""
        wanted = []
        for segment, job in zip(step.segments, jobs, strict=True):
            left = self._left(segment, job)
            if left > 1:  # the step itself gives one
                if self._jobs.get(segment.slot) is not job:
                    self._begin(segment.slot, job)
                wanted.append(Wanted(segment.slot, job.answer.tokens, min(self.depth, left - 1), left))
        if not wanted:
            return step
        drafts = self._adapted(step, wanted) if self.adaptive else self._as_many_as_fit(step, wanted)
        if not any(drafts.values()):
            return step
        return Step(tuple(_with(segment, drafts.get(segment.slot, ())) for segment in step.segments))

    def learn(self, step: Step, jobs: Sequence[Job[Any]], seconds: float, hidden: FloatArray | None = None) -> None:
        """Compare the guesses with what was chosen, after a step that took so long and ended well.

        ``hidden`` are the hidden rows of its tokens, where the backend gives them.
        """
        if hidden is not None and isinstance(self.drafter, Reader):
            self.drafter.read(list(_seen(step, jobs, hidden)))
        self._budget += TRIAL_SHARE * seconds
        if self._is_telling(step):
            lengths = {segment.slot: len(segment.tokens) for segment in step.segments}
            self.times.observe(micro_batches(lengths, self._facts.n_chunk), seconds)
        for segment, job in zip(step.segments, jobs, strict=True):
            draft = self._drafts.pop(segment.slot, None)
            if draft is None:
                continue
            chosen = job.answer.tokens[segment.start + segment.sure :]
            for guess, token in zip(draft.tokens, chosen, strict=False):
                self._rates[segment.slot].observe(draft.kind, right=guess == token)
                if guess != token:
                    break

    def _is_telling(self, step: Step) -> bool:
        """Tell whether the time of a step says what steps of its size take.

        Parts of prompts give no logits and overlap each other. What a drafter computes takes the processor's caches,
        which makes the step behind it slower, by as much as half: for steps with guesses that is so, but single ones
        are looked at from the second on. One in a few of these is enough: Python runs slowly between two steps.
        """
        if any(segment.sure != 1 for segment in step.segments):
            return False
        if any(segment.drafts for segment in step.segments):
            self._singles = 0
            return True
        self._singles += 1
        return self._singles % SINGLES_EACH == (1 if self.drafter.is_free else 2)

    def dropped(self, step: Step) -> None:
        """Forget the guesses of a step that came to nothing."""
        for segment in step.segments:
            self._drafts.pop(segment.slot, None)

    def _begin(self, slot: int, job: object) -> None:
        self._jobs[slot] = job
        self._rates[slot] = Rates(self._all_rates)
        self._drafts.pop(slot, None)
        self.drafter.begin(slot)

    def _left(self, segment: Segment, job: Job[Any]) -> int:
        """Return how many tokens may follow a newest token, by context and wanted length; 0 for parts of prompts."""
        if segment.outputs != 1 or len(segment.tokens) != 1:
            return 0
        room = self._facts.n_ctx - segment.start
        most = job.answer.request.max_tokens
        return room if most is None else min(room, most - job.answer.generated)

    def _as_many_as_fit(self, step: Step, wanted: Sequence[Wanted]) -> dict[int, tuple[int, ...]]:
        share = (self._facts.n_chunk - step.rows) // len(wanted)
        if share < 1:
            return {}
        made = self._propose([replace(one, count=min(one.count, share)) for one in wanted])
        return {slot: draft.tokens for slot, draft in made.items()}

    def _adapted(self, step: Step, wanted: Sequence[Wanted]) -> dict[int, tuple[int, ...]]:
        """Return the guesses that pay; those of a free drafter are remembered in any case, to learn from."""
        if self.drafter.is_free:
            made = self._propose(wanted)
            rates = {slot: self._rates[slot].rate(draft.kind) for slot, draft in made.items()}
        else:
            rates = {one.slot: self._rates[one.slot].rate(0) for one in wanted}
        if not rates:
            return {}
        if self._rest and max(rates.values()) <= self._hopeless:
            self._rest -= 1
            return {}
        if self.drafter.is_free:
            candidates = [Candidate(slot, len(made[slot].tokens), rate) for slot, rate in rates.items()]
        else:
            candidates = [self._costly(one, rates[one.slot]) for one in wanted]
        lengths = {segment.slot: len(segment.tokens) for segment in step.segments}
        choice = best_choice(
            candidates,
            lengths,
            self.times,
            n_chunk=self._facts.n_chunk,
            streams=sum(segment.outputs for segment in step.segments),
            draft_seconds=self.drafter.seconds(len(wanted)),
        )
        if choice is None or not self._pays(choice, lengths):
            self._rest, self._hopeless = RESTING_STEPS, max(rates.values())
            return {}
        self._rest = 0
        chosen = [replace(one, count=choice.depth) for one in wanted if one.slot in choice.slots]
        if not self.drafter.is_free:
            made = self._propose(chosen)
        return {one.slot: made[one.slot].tokens[: choice.depth] for one in chosen if one.slot in made}

    def _costly(self, one: Wanted, rate: float) -> Candidate:
        debt = self.drafter.debt(one.slot, one.tokens)
        return Candidate(one.slot, one.count, rate, debt, min(one.left, _LAST_STEPS))

    def _pays(self, choice: Choice, lengths: Mapping[int, int]) -> bool:
        rows = micro_batches(lengths, self._facts.n_chunk)
        if len(set(rows)) == 1:
            age = self.times.age(rows[0])
            if age is None or age > STALE_STEPS * max(1.0, choice.gain) ** 2:
                return False
        margin = MARGIN if self.drafter.is_free else COSTLY_MARGIN
        if choice.gain >= margin:
            return True
        if choice.seconds - choice.plain / margin > self._budget:
            return False
        self._budget = 0.0
        return True

    def _propose(self, wanted: Sequence[Wanted]) -> Mapping[int, Draft]:
        made = self.drafter.propose(wanted)
        self._drafts.update(made)
        return made


def _seen(step: Step, jobs: Sequence[Job[Any]], hidden: FloatArray) -> Iterator[Seen]:
    """Give the rows of each segment without those of wrong guesses."""
    first = 0
    for segment, job in zip(step.segments, jobs, strict=True):
        text = job.answer.tokens
        chosen = text[segment.start + segment.sure : segment.start + len(segment.tokens)]
        stays = segment.sure + common_prefix(segment.draft, tuple(chosen))
        yield Seen(segment.slot, text, segment.start, hidden[first : first + stays])
        first += len(segment.tokens)


def _with(segment: Segment, guesses: tuple[int, ...]) -> Segment:
    count = len(guesses)
    return replace(segment, tokens=segment.tokens + guesses, outputs=segment.outputs + count, drafts=count)
