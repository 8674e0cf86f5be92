"""Steps of a model with recurrent state that fail: nothing is lost and nothing doubled, however often and where."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
from inprocess import InProcessExchange

from orchestrator.engine import rollback
from orchestrator.engine.context import Context
from orchestrator.engine.experts import ExpertStore
from orchestrator.engine.model import Model
from orchestrator.errors import WorkerLostError
from orchestrator.ring.steps import Clear, Copy, Remove, Restore, TokenBatch, one_sequence
from orchestrator.types import Contract

HYBRIDS = ["qwen35moe", "kimi-linear"]
TOKENS = [[int(n) for n in np.random.default_rng(seed).integers(3, 250, 120)] for seed in range(3)]


def join(*batches):
    names = ("tokens", "positions", "sequences", "outputs")
    return TokenBatch(*(np.concatenate([getattr(batch, name) for batch in batches]) for name in names))


def part(start, stop, sequence=0):
    return one_sequence(TOKENS[sequence][start:stop], start, sequence=sequence, every=True)


def alone(path, sequence=0, *, tokens=120):
    with Model.open(path) as model, Context(model, n_ctx=128) as context:
        return context.decode(one_sequence(TOKENS[sequence][:tokens], 0, every=True)).logits


class Line(InProcessExchange):
    """An exchange whose way is down while ``down`` is true, from the given call of a step on."""

    def __init__(self, stores):
        super().__init__(stores, Contract.EXACT, self._check)
        self.down = False
        self.at = 1
        self._in_step = 0

    def begin_step(self):
        self._in_step = 0

    def _check(self, _calls):
        self._in_step += 1
        if self.down and self._in_step >= self.at:
            raise WorkerLostError("gone", worker="w")


@contextmanager
def star(path, **options):
    with Model.open(path, without_experts=True) as model, ExpertStore(path, None) as store:
        line = Line([store])
        with Context(model, n_ctx=128, exchange=line, **options) as context:
            line.describe(context.descriptors)
            yield context, line


def fails(context, line, batch, *, at=1, times=1):
    line.down, line.at = True, at
    for _ in range(times):
        with pytest.raises(WorkerLostError):
            context.decode(batch)
    line.down = False


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_one_sequence_that_fails_at_any_distance_from_its_copy(synthetic, architecture):
    path = synthetic(architecture)
    expected = alone(path)
    with star(path) as (context, line):
        got = [context.decode(part(0, 7)).logits]
        for i in range(7, 120):
            if i % 9 == 0:
                fails(context, line, part(i, i + 1), at=1 + i % 3, times=1 + i % 2)
                assert context.length(0) == i
            got.append(context.decode(part(i, i + 1)).logits)
        assert context.length(0) == 120
    assert np.concatenate(got).tobytes() == expected.tobytes()


def test_copies_are_rare_and_what_is_decoded_again_is_bounded(synthetic, monkeypatch):
    made = []
    copy = rollback.Rollback.protect

    def counted(self, starts):
        before = dict(self._copies)
        copy(self, starts)
        made.extend(set(self._copies.items()) - set(before.items()))

    monkeypatch.setattr(rollback.Rollback, "protect", counted)
    with star(synthetic("qwen35moe")) as (context, line):
        context.decode(part(0, 20))
        for i in range(20, 110):
            context.decode(part(i, i + 1))
        assert len(made) <= 2 + 110 // rollback.MAX_STEPS
        calls = line.calls
        fails(context, line, part(110, 111))
        context.decode(part(110, 111))
        layers = len(context.descriptors)
        assert (line.calls - calls - 1) // layers <= rollback.MAX_STEPS + 1


def test_what_is_owed_survives_a_failure_while_it_is_decoded_again(synthetic):
    path = synthetic("qwen35moe")
    expected = alone(path, tokens=40)
    with star(path) as (context, line):
        got = [context.decode(part(0, 5)).logits]
        got += [context.decode(part(i, i + 1)).logits for i in range(5, 30)]
        fails(context, line, part(30, 31))
        calls = line.calls
        allowed = [0]  # calls until the way breaks again

        def check(count):
            if count - calls > allowed[0]:
                raise WorkerLostError("gone again", worker="w")

        line.before_dispatch = check
        for allowed[0] in range(3, 40, 7):
            calls = line.calls
            with pytest.raises(WorkerLostError):
                context.decode(part(30, 31))
            assert context.length(0) == 30
        line.before_dispatch = None
        got += [context.decode(part(i, i + 1)).logits for i in range(30, 40)]
    assert np.concatenate(got).tobytes() == expected.tobytes()


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_sequences_side_by_side(synthetic, architecture):
    path = synthetic(architecture)
    expected = [alone(path, sequence, tokens=60) for sequence in range(3)]
    rows = {0: [], 1: [], 2: []}
    with star(path, n_sequences=3) as (context, line):

        def decode(*parts):
            logits = context.decode(join(*parts)).logits
            at = 0
            for batch in parts:
                rows[int(batch.sequences[0])].append(logits[at : at + len(batch)])
                at += len(batch)

        decode(part(0, 10, 0))
        decode(part(10, 11, 0), part(0, 20, 1))
        for i in range(11, 30):
            decode(part(i, i + 1, 0), part(i + 9, i + 10, 1))
        fails(context, line, join(part(30, 31, 0), part(0, 5, 2)), at=2)
        assert [context.length(sequence) for sequence in range(3)] == [30, 39, 0]
        decode(part(0, 5, 2))  # the others are not in this step, and are brought back all the same
        fails(context, line, join(part(30, 33, 0), part(39, 40, 1)), at=3)
        assert context.apply(Remove(1))  # given up while the way is down: nothing of it is owed
        rows[1].clear()
        assert [context.length(sequence) for sequence in range(3)] == [30, 0, 5]
        decode(part(30, 60, 0), part(0, 30, 1))
        state = context.save(2)
        fails(context, line, part(5, 6, 2))
        assert context.apply(Restore(2, state))
        decode(part(5, 60, 2), part(30, 60, 1))
        fails(context, line, part(60, 61, 0))
        assert context.apply(Copy(0, 1))
        more = [context.decode(one_sequence([9], 60, sequence=sequence)).logits for sequence in (0, 1)]
        assert more[0].tobytes() == more[1].tobytes()
    for sequence in range(3):
        assert np.concatenate(rows[sequence]).tobytes() == expected[sequence].tobytes()


def test_clear_owes_nothing(synthetic):
    path = synthetic("qwen35moe")
    with star(path) as (context, line):
        context.decode(part(0, 30))
        fails(context, line, part(30, 31))
        line.down = True
        assert context.apply(Clear())
        assert context.length(0) == 0
        line.down = False
        assert context.decode(part(0, 20)).logits.tobytes() == alone(path, tokens=20).tobytes()
