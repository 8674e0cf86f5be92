"""Choose a slot for a prompt and what of the caches serves for it. PURE.

A prompt may continue what a slot holds, or share its beginning with it: then only the rest is computed. Three places
are looked at: free slots, busy slots (whose beginning can be copied), and saved copies. The rules:

- A free slot is continued *in place* if it throws away at most half of what it keeps: the next turn of a
  conversation. Otherwise the common beginning is *copied* into the slot that was used least recently, so that a
  conversation does not vanish because another one begins with the same instructions.
- Copies are made only where they save more than :data:`WORTH_COPYING` tokens.
- What a slot is going to lose is saved first, if it is long enough and held nowhere else.
- Memory that cannot be cut (recurrent state) serves only as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from orchestrator.errors import InputError

WORTH_COPYING: Final = 32
"""Tokens that a copy within the caches must save, beyond what the slot itself has."""

WORTH_SAVING: Final = 64
"""Tokens that a lost beginning must have to be saved, and that a recalled one must spare."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a slot's cache holds; ``used_at`` orders slots by their last use."""

    tokens: Sequence[int]
    is_free: bool
    used_at: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A copy that the backend keeps under ``key``."""

    key: int
    tokens: Sequence[int]
    n_bytes: int
    used_at: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a prompt goes, and how its first ``keep`` tokens come there without being computed.

    From the slot itself, copied from slot ``copy_from``, or recalled from the copy ``recall``. ``rescue``: save what
    the slot holds before it is lost.
    """

    slot: int
    keep: int = 0
    copy_from: int | None = None
    recall: int | None = None
    rescue: bool = False


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with in common."""
    low, high = 0, min(len(first), len(second))
    # Slices are compared in C: a few comparisons instead of a loop over tens of thousands of tokens.
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def reusable_prefix(held: Sequence[int], prompt: Sequence[int], *, cuttable: bool) -> int:
    """Return how many tokens of a cache that holds ``held`` serve for ``prompt``.

    The last token of the prompt is always computed again, because its logits are needed. A cache that cannot be
    cut (hybrid and recurrent models) serves only if all of it is a beginning of the prompt.
    """
    common = common_prefix(held, prompt[:-1])
    return common if cuttable or common == len(held) else 0


def place(
    prompt: Sequence[int],
    slots: Sequence[Holding],
    saved: Sequence[Saved] = (),
    *,
    cuttable: bool = True,
    reuse: bool = True,
    can_save: bool = False,
) -> Placement:
    """Return where a prompt goes. One slot must be free; all tokens must be of one type of sequence (list).

    ``reuse`` off looks only for the slot. ``can_save`` tells that what is lost may be saved first.
    """
    free = [index for index, slot in enumerate(slots) if slot.is_free]
    if not free:
        raise InputError("no slot is free")
    if not reuse:
        return Placement(_least_recent(slots, free))
    keeps = [reusable_prefix(slot.tokens, prompt, cuttable=cuttable) for slot in slots]
    placement = _place_by_slots(slots, free, keeps)
    for copy in saved:
        keep = reusable_prefix(copy.tokens, prompt, cuttable=cuttable)
        if keep > placement.keep + (WORTH_SAVING if placement.recall is None else 0):
            placement = Placement(_least_recent(slots, free), keep, recall=copy.key)
    if can_save and _is_loss(placement, slots, saved):
        return Placement(placement.slot, placement.keep, placement.copy_from, placement.recall, rescue=True)
    return placement


def _place_by_slots(slots: Sequence[Holding], free: Sequence[int], keeps: Sequence[int]) -> Placement:
    here = max(free, key=lambda index: (keeps[index], -len(slots[index].tokens), -index))
    there = max(range(len(slots)), key=lambda index: (keeps[index], index in free))
    lost = len(slots[here].tokens) - keeps[here]
    if keeps[here] and lost <= keeps[here] // 2 and keeps[there] <= keeps[here] + WORTH_COPYING:
        return Placement(here, keeps[here])
    useless = [index for index in free if index != there or not keeps[there]]
    victim = _least_recent(slots, useless or free)
    if victim != there and keeps[there] > keeps[victim] + WORTH_COPYING:
        return Placement(victim, keeps[there], copy_from=there)
    return Placement(victim, keeps[victim])


def _least_recent(slots: Sequence[Holding], among: Sequence[int]) -> int:
    """Return an empty slot, or the one that was used least recently; of equal ones the first.

    The first, because the engine computes neighbouring sequences together.
    """
    return min(among, key=lambda index: (bool(slots[index].tokens), slots[index].used_at, index))


def _is_loss(placement: Placement, slots: Sequence[Holding], saved: Sequence[Saved]) -> bool:
    """Tell whether the chosen slot holds something long that nobody else holds and that will be gone."""
    mine = slots[placement.slot].tokens
    stays = placement.keep if placement.copy_from is None and placement.recall is None else 0
    if len(mine) - stays < WORTH_SAVING:
        return False
    others = [slot.tokens for index, slot in enumerate(slots) if index != placement.slot]
    others += [copy.tokens for copy in saved if copy.key != placement.recall]
    return not any(other[: len(mine)] == mine for other in others)


def least_recent_beyond(saved: Sequence[Saved], limit: int) -> tuple[int, ...]:
    """Return the keys of the copies that must go so that the others take at most ``limit`` bytes."""
    total = 0
    dropped = []
    for copy in sorted(saved, key=lambda copy: -copy.used_at):
        total += copy.n_bytes
        if total > limit:
            dropped.append(copy.key)
    return tuple(dropped)
