"""What is lost is rebuilt: the journal's plan on empty caches gives the caches that were, whatever happened."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import InputError
from orchestrator.ring.pipeline import Pipeline
from orchestrator.ring.replay import Journal
from orchestrator.ring.steps import (
    Clear,
    Copy,
    Forget,
    Keep,
    Recall,
    Remove,
    RingOperation,
    Save,
    Shift,
    TokenBatch,
    one_sequence,
)
from tests.ring_twin import N_VOCAB, facts, twin_pipeline

sequences = st.integers(0, 2)
spans = st.sampled_from([(0, -1), (0, -1), (0, 3), (2, 5), (3, -1)])
pairs = st.sampled_from([(0, 1), (1, 0), (0, 2), (2, 1)])
step = st.tuples(st.just("step"), sequences, st.integers(1, 4))
events = st.one_of(
    step,
    step,
    step,
    st.tuples(st.just("mixed"), pairs, st.integers(1, 3)),
    st.tuples(st.just("copy"), pairs, spans),
    st.tuples(st.just("remove"), sequences, spans),
    st.tuples(st.just("rollback"), sequences, st.integers(1, 3)),
    st.tuples(st.just("shift"), sequences, st.integers(0, 6), st.integers(1, 3)),
    st.tuples(st.just("keep"), sequences),
    st.tuples(st.just("clear")),
    st.tuples(st.just("save"), sequences, st.integers(0, 1)),
    st.tuples(st.just("recall"), sequences, st.integers(0, 1)),
    st.tuples(st.just("forget"), st.integers(0, 1)),
)


def operations(event: tuple, length: int) -> list[RingOperation]:
    match event:
        case ("copy", pair, span):
            return [Copy(*pair, *span)]
        case ("remove", sequence, span):
            return [Remove(sequence, *span)]
        case ("rollback", sequence, count):
            return [Remove(sequence, max(0, length - count))]
        case ("shift", sequence, first, count):
            return [Remove(sequence, first, first + count), Shift(sequence, first + count, -1, -count)]
        case ("keep", sequence):
            return [Keep(sequence)]
        case ("clear",):
            return [Clear()]
        case ("save", sequence, key):
            return [Save(sequence, key)]
        case ("recall", sequence, key):
            return [Recall(sequence, key)]
        case ("forget", key):
            return [Forget(key)]
    raise AssertionError(event)


@settings(max_examples=200, deadline=None)
@given(st.lists(events, min_size=15, max_size=40) | st.lists(events), st.booleans(), st.booleans())
def test_a_plan_gives_the_caches_that_were(story: list[tuple], batch_invariant: bool, prune_at_once: bool):
    ring = twin_pipeline((6,), facts(n_ctx=200))
    journal = Journal(4, batch_invariant=batch_invariant)
    journal._next_prune = 1 if prune_at_once else 10**9
    rng = np.random.default_rng(1)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in rng.integers(0, N_VOCAB, count)]

    def submit(batch: TokenBatch) -> None:
        ring.submit(batch)
        journal.record(batch)

    for event in story:
        if event[0] == "step":
            submit(one_sequence(tokens(event[2]), ring.length(event[1]), sequence=event[1]))
        elif event[0] == "mixed":
            parts = [one_sequence(tokens(event[2]), ring.length(s), sequence=s) for s in event[1]]
            names = ("tokens", "positions", "sequences", "outputs")
            submit(TokenBatch(*(np.concatenate([getattr(p, name) for p in parts]) for name in names)))
        else:
            length = ring.length(event[1]) if event[0] == "rollback" else 0
            for operation in operations(event, length):
                try:
                    assert ring.apply(operation)
                except InputError:
                    assert isinstance(operation, Shift | Recall)
                else:
                    journal.record(operation)
    ring.settle()
    other = twin_pipeline((4, 9), facts(n_ctx=200))
    other.replay(journal.plan(8))
    assert held(ring) == held(other)
    for key in (0, 1):
        for each in (ring, other):
            each.apply(Clear())
            with contextlib.suppress(InputError):
                each.restore(3, key)
            each.settle()
        assert held(ring) == held(other)


def held(ring: Pipeline) -> list[dict[int, tuple[int, ...]]]:
    """Return what all hops together hold of each sequence."""
    return [
        {at: sum((hop.compute.held[s][at] for hop in ring.hops), ()) for at in ring.hops[0].compute.held[s]}
        for s in range(4)
    ]


def journal_of(*done: TokenBatch | RingOperation, batch_invariant: bool = True) -> Journal:
    journal = Journal(4, batch_invariant=batch_invariant)
    for doing in done:
        journal.record(doing)
    return journal


def fed(journal: Journal) -> list[list[int]]:
    return [doing.tokens.tolist() for doing in journal.plan(8) if isinstance(doing, TokenBatch)]


def test_tokens_are_fed_again_in_the_largest_steps_and_without_logits():
    journal = journal_of(*[one_sequence([i], i) for i in range(20)])
    plan = journal.plan(8)
    assert [len(batch) for batch in plan] == [8, 8, 4]
    assert not any(batch.outputs.any() for batch in plan)
    assert np.concatenate([batch.tokens for batch in plan]).tolist() == list(range(20))
    assert journal.tokens(0) == tuple(range(20))


def test_without_batch_invariance_the_partition_is_repeated():
    steps = [one_sequence([1, 2, 3], 0), one_sequence([4], 3), one_sequence([9], 0, sequence=1), one_sequence([5], 4)]
    journal = journal_of(*steps, batch_invariant=False)
    assert fed(journal) == [[1, 2, 3], [4], [9], [5]]
    journal.record(Remove(1))
    assert fed(journal) == [[1, 2, 3], [4], [5]]


def test_a_rollback_leaves_no_trace_and_a_shift_does():
    rolled = journal_of(one_sequence([1, 2, 3, 4], 0), Remove(0, 2), one_sequence([5], 2))
    assert [doing.tokens.tolist() for doing in rolled.plan(8)] == [[1, 2, 5]]
    shifted = journal_of(one_sequence([1, 2, 3, 4], 0), Remove(0, 1, 2), Shift(0, 2, -1, -1), one_sequence([5], 3))
    plan = shifted.plan(8)
    assert [type(doing) for doing in plan] == [TokenBatch, Remove, Shift, TokenBatch]


def test_the_log_of_dead_sequences_does_not_grow():
    journal = Journal(2, batch_invariant=False)
    journal.record(one_sequence([1], 0, sequence=1))
    for _ in range(1000):
        journal.record(one_sequence([1, 2], 0))
        journal.record(Remove(0))
    assert len(journal._log) < 600
    assert fed(journal) == [[1]]


@pytest.mark.parametrize("cuttable", [True, False])
def test_a_ring_goes_on_after_a_loss_with_the_same_logits(cuttable: bool):
    ring, journal = twin_pipeline((6,), facts(cuttable=cuttable)), Journal(4)
    undisturbed = twin_pipeline((6,), facts(cuttable=cuttable))
    for position in range(10):
        batch = one_sequence([position % N_VOCAB], position)
        expected = undisturbed.decode(batch)
        if position in (3, 7):
            ring.reset()  # all caches are gone
            assert ring.replay(journal.plan(4)) == position
        assert ring.decode(batch).tobytes() == expected.tobytes()
        journal.record(batch)
