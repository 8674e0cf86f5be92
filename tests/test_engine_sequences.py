"""Sequences side by side in one context: each gives the bytes that it gives alone, whoever comes and goes."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
from inprocess import InProcessExchange

from orchestrator.engine.context import Context
from orchestrator.engine.experts import ExpertStore
from orchestrator.engine.model import Model
from orchestrator.errors import WorkerLostError
from orchestrator.ring.steps import Copy, Remove, Restore, TokenBatch, one_sequence
from orchestrator.types import Contract


def numbers(count, seed):
    return [int(n) for n in np.random.Generator(np.random.PCG64(seed)).integers(3, 250, count)]


FIRST, SECOND, THIRD = numbers(40, 1), numbers(90, 2), numbers(40, 3)


def join(*batches):
    names = ("tokens", "positions", "sequences", "outputs")
    return TokenBatch(*(np.concatenate([getattr(batch, name) for batch in batches]) for name in names))


def alone(model, tokens):
    with Context(model, n_ctx=128) as context:
        return context.decode(one_sequence(tokens, 0, every=True)).logits


def part(tokens, start, stop, sequence):
    return one_sequence(tokens[start:stop], start, sequence=sequence, every=True)


@pytest.mark.parametrize("architecture", ["llama", "gpt-oss", "deepseek2", "step35", "qwen35moe"])
def test_a_sequence_does_not_feel_who_comes_and_goes_beside_it(synthetic, architecture):
    with Model.open(synthetic(architecture)) as model, Context(model, n_ctx=128, n_sequences=3) as context:
        rows = {0: [], 1: [], 2: []}

        def decode(*parts):
            logits = context.decode(join(*parts)).logits
            sequences = np.concatenate([batch.sequences for batch in parts])
            for sequence in set(sequences.tolist()):
                rows[sequence].append(logits[sequences == sequence])

        decode(part(FIRST, 0, 30, 0), part(SECOND, 0, 20, 1))
        for i in range(10):
            decode(part(FIRST, 30 + i, 31 + i, 0), part(SECOND, 20 + i, 21 + i, 1))
        first = np.concatenate(rows[0])
        assert context.apply(Remove(0))
        rows[0] = []
        for i in range(0, 40, 2):  # the second goes on beside a third, in the place of the first
            decode(part(THIRD, i, i + 2, 0), part(SECOND, 30 + i, 31 + i, 1))
            decode(part(SECOND, 31 + i, 32 + i, 1))
        state = context.save(1)
        context.apply(Copy(1, 2))
        decode(part(SECOND, 70, 80, 1), part(SECOND, 70, 90, 2))
        copied = rows[2].pop()
        context.apply(Remove(2))
        context.apply(Restore(2, state))
        decode(part(SECOND, 70, 90, 2))
        expected = alone(model, SECOND)
        assert first.tobytes() == alone(model, FIRST).tobytes()
        assert np.concatenate(rows[0]).tobytes() == alone(model, THIRD).tobytes()
        assert np.concatenate(rows[1]).tobytes() == expected[:80].tobytes()
        assert copied.tobytes() == rows[2][0].tobytes() == expected[70:].tobytes()


@contextmanager
def star(path, **options):
    with Model.open(path, without_experts=True) as model, ExpertStore(path, None) as store:
        exchange = InProcessExchange([store], Contract.EXACT)
        with Context(model, exchange=exchange, **options) as context:
            exchange.describe(context.descriptors)
            yield context, exchange


@pytest.mark.parametrize("architecture", ["qwen2moe", "qwen35moe"])
@pytest.mark.parametrize("layer", [1, 3])
def test_a_step_that_fails_leaves_no_trace_in_any_of_its_sequences(synthetic, architecture, layer):
    path = synthetic(architecture)
    with Model.open(path) as model:
        expected = [alone(model, tokens) for tokens in (FIRST, SECOND)]
    with star(path, n_ctx=128, n_sequences=2) as (context, exchange):
        context.decode(join(part(FIRST, 0, 25, 0), part(SECOND, 0, 12, 1)))

        def fail(call):
            if call == exchange.calls_before + layer:
                raise WorkerLostError("gone", worker="w")

        exchange.calls_before = exchange.calls
        exchange.before_dispatch = fail
        step = join(part(FIRST, 25, 40, 0), part(SECOND, 12, 13, 1))
        with pytest.raises(WorkerLostError):
            context.decode(step)
        assert (context.length(0), context.length(1)) == (25, 12)
        exchange.before_dispatch = None
        logits = context.decode(step).logits
        assert logits[:15].tobytes() == expected[0][25:40].tobytes()
        assert logits[15:].tobytes() == expected[1][12:13].tobytes()


def test_more_than_256_tokens_and_two_threads_depend_on_no_grouping(synthetic):
    tokens = numbers(300, 4)
    with Model.open(synthetic("llama")) as model:
        with Context(model, n_ctx=512, n_threads=2) as context:
            expected = context.decode(one_sequence(tokens, 0, every=True)).logits
        with Context(model, n_ctx=512, n_threads=2) as context:
            context.decode(one_sequence(tokens[:250], 0))
            single = [context.decode(one_sequence([token], 250 + i)).logits for i, token in enumerate(tokens[250:])]
    assert np.concatenate(single).tobytes() == expected[250:].tobytes()
