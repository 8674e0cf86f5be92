"""Choose among replicas: complete backends of one model behind one gateway. PURE.

A session should stay with the replica whose caches have its prefix. Two ways to find it again:

- by looking: the replica whose slots hold the longest beginning of the prompt, where that is worth something;
- by hashing (rendezvous hashing): of a session's name, or else of the prompt's first tokens, so that several
  gateways in front of the same replicas agree without speaking to each other. A replica that is added or lost moves
  only the sessions that it gets or had.

Load comes first: a replica without a free slot is passed over while another has one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from orchestrator.gateway.prefix import WORTH_SAVING

HASHED_TOKENS: Final = 64
"""Tokens of a prompt that decide where it goes. Few, so that a conversation's later turns hash as its first one."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica as a request finds it: ``held`` is how many tokens of the prompt its caches have."""

    name: str
    requests: int  # live and waiting
    slots: int
    held: int = 0
    is_up: bool = True


def affinity_key(prompt: Sequence[int], session: str) -> bytes:
    """Return what decides where a request goes: its session, or the beginning of its prompt."""
    if session:
        return b"session " + session.encode()
    return b"prompt " + b" ".join(b"%d" % token for token in prompt[:HASHED_TOKENS])


def rank(key: bytes, names: Sequence[str]) -> list[int]:
    """Return the order in which a key prefers replicas, as indices into ``names``."""

    def weight(index: int) -> bytes:
        return hashlib.blake2b(key + b"\0" + names[index].encode(), digest_size=16).digest()

    return sorted(range(len(names)), key=weight, reverse=True)


def choose(key: bytes, candidates: Sequence[Candidate]) -> int:
    """Return the index of the replica that a request goes to; of those that are lost only if all are."""
    order = rank(key, [candidate.name for candidate in candidates])
    usable = [index for index in order if candidates[index].is_up] or order
    free = [index for index in usable if candidates[index].requests < candidates[index].slots]
    if not free:  # all are busy: the shortest queue, and of equal ones the preferred
        return min(usable, key=lambda index: candidates[index].requests / candidates[index].slots)
    best = max(free, key=lambda index: candidates[index].held)
    return best if candidates[best].held >= WORTH_SAVING else free[0]
