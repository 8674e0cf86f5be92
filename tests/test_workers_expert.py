from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import ComputeError
from orchestrator.types import Contract, Ownership, RefusalCode
from orchestrator.wire.messages import (
    Describe,
    Described,
    Dispatch,
    Goodbye,
    Measure,
    Measured,
    Ping,
    Pong,
    Refuse,
    Result,
)
from orchestrator.workers.expert import ExpertService, ExpertSession, WorkerProfile
from orchestrator.workers.inject import InjectedCompute, Injection
from tests.workers_twin import IDENTITY, TwinCompute, descriptor, expert_row

PROFILE = WorkerProfile(name="twin", pid=1, model_sha256="a" * 64, n_threads=1)


def service(compute: TwinCompute | None = None, **options: int) -> ExpertService:
    compute = compute or TwinCompute(Ownership.product([0, 1], [0, 1, 2, 5]))
    return ExpertService(compute, PROFILE, **options)


def session(made: ExpertService | None = None) -> ExpertSession:
    """A session that knows layers 0 and 1; layer 2 was described too and is not owned."""
    opened = ExpertSession(made or service())
    reply = opened.answer(Describe(1, (descriptor(0), descriptor(1), descriptor(1, 1), descriptor(2))))
    assert reply == Described(1, 3)
    return opened


def dispatch(
    counts: list[int],
    experts: list[int],
    *,
    layer: int = 0,
    call: int = 0,
    n_embd: int = 4,
    contract: Contract = Contract.EXACT,
    sequence: int = 9,
) -> Dispatch:
    rows = np.arange(len(counts) * n_embd, dtype=np.float32).reshape(len(counts), n_embd)
    weights = np.linspace(0.5, 1.5, len(experts), dtype=np.float32)
    return Dispatch(
        sequence, layer, call, contract, rows, np.array(counts, np.uint16), np.array(experts, np.uint16), weights
    )


def refused(reply: object, code: RefusalCode, *words: str) -> None:
    assert isinstance(reply, Refuse)
    assert reply.code is code
    for word in words:
        assert word in reply.text


def test_exact_gives_one_row_per_pair_in_the_order_of_the_pairs() -> None:
    message = dispatch([2, 1], [5, 0, 1], layer=1, call=1)
    reply = session().answer(message)
    assert isinstance(reply, Result)
    assert reply.sequence == 9
    expected = [expert_row(message.rows[row], expert, 1, 1) for row, expert in [(0, 5), (0, 0), (1, 1)]]
    np.testing.assert_array_equal(reply.rows, expected)


def test_sum_gives_one_weighted_row_per_row() -> None:
    message = dispatch([2, 1], [5, 0, 1], contract=Contract.SUM)
    reply = session().answer(message)
    assert isinstance(reply, Result)
    weights = message.weights
    first = weights[0] * expert_row(message.rows[0], 5, 0, 0) + weights[1] * expert_row(message.rows[0], 0, 0, 0)
    np.testing.assert_allclose(reply.rows, [first, weights[2] * expert_row(message.rows[1], 1, 0, 0)], rtol=1e-6)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.sampled_from([0, 1, 2, 5]), min_size=1, max_size=2), min_size=1, max_size=90))
def test_few_and_many_rows_are_answered_alike(pairs: list[list[int]]) -> None:
    # 64 pairs is where the checks change from sets to numpy.
    message = dispatch([len(ids) for ids in pairs], [expert for ids in pairs for expert in ids])
    reply = session().answer(message)
    assert isinstance(reply, Result)
    expected = [expert_row(message.rows[row], expert, 0, 0) for row, ids in enumerate(pairs) for expert in ids]
    np.testing.assert_array_equal(reply.rows, expected)


def test_the_result_buffer_is_used_again() -> None:
    opened = session()
    first = opened.answer(dispatch([2] * 10, [0, 1] * 10))
    second = opened.answer(dispatch([1], [5]))
    assert isinstance(first, Result)
    assert isinstance(second, Result)
    assert np.shares_memory(first.rows, second.rows)


@pytest.mark.parametrize("many", [1, 100])
def test_what_contradicts_the_descriptor_is_refused(many: int) -> None:
    compute = TwinCompute(Ownership.product([0, 1], [0, 1, 2, 5]))
    opened = session(service(compute))
    refused(opened.answer(dispatch([1] * many, [0] * many, n_embd=5)), RefusalCode.BAD_REQUEST, "layer 0", "5 floats")
    refused(opened.answer(dispatch([3] * many, [0, 1, 2] * many)), RefusalCode.BAD_REQUEST, "top-2")
    refused(opened.answer(dispatch([1] * many, [0] * (many + 1))), RefusalCode.BAD_REQUEST, "pairs")
    refused(opened.answer(dispatch([2, 0] * many, [0, 1] * many)), RefusalCode.BAD_REQUEST, "pairs")
    refused(opened.answer(dispatch([1] * many, [8] * many)), RefusalCode.BAD_REQUEST, "expert 8", "8 experts")
    refused(opened.answer(dispatch([1] * many, [0xFFFF] * many)), RefusalCode.BAD_REQUEST, "expert 65535")
    refused(opened.answer(dispatch([1] * many, [3] * many)), RefusalCode.NOT_OWNED, "[3]")
    refused(opened.answer(dispatch([1] * many, [0] * many, layer=7)), RefusalCode.UNKNOWN_LAYER, "layer 7")
    refused(opened.answer(dispatch([1] * many, [0] * many, call=3)), RefusalCode.UNKNOWN_LAYER, "call 3")
    refused(opened.answer(dispatch([1] * many, [0] * many, layer=2)), RefusalCode.NOT_OWNED, "layer 2")
    assert compute.calls == 0, "nothing of this may reach the engine"
    assert isinstance(opened.answer(dispatch([1] * many, [0] * many)), Result)


def test_arrays_of_unequal_length_are_refused() -> None:
    message = dispatch([1, 1], [0, 1])
    opened = session()
    refused(opened.answer(dataclasses.replace(message, weights=message.weights[:1])), RefusalCode.BAD_REQUEST)
    refused(opened.answer(dataclasses.replace(message, counts=message.counts[:1])), RefusalCode.BAD_REQUEST)
    none = dataclasses.replace(
        message,
        rows=message.rows[:0],
        counts=message.counts[:0],
        experts=message.experts[:0],
        weights=message.weights[:0],
    )
    refused(opened.answer(none), RefusalCode.BAD_REQUEST)


def test_a_result_that_fits_no_frame_is_refused_before_it_is_allocated() -> None:
    opened = session(service(max_payload=64 * 1024 + 10 * 16))
    assert isinstance(opened.answer(dispatch([1] * 10, [0] * 10)), Result)
    refused(opened.answer(dispatch([1] * 11, [0] * 11)), RefusalCode.BAD_REQUEST, "fit a frame")
    both = dispatch([2] * 6, [0, 1] * 6)
    refused(opened.answer(both), RefusalCode.BAD_REQUEST, "fit a frame")
    assert isinstance(opened.answer(dataclasses.replace(both, contract=Contract.SUM)), Result)


def test_a_failed_computation_is_a_refusal_and_the_next_one_is_right() -> None:
    failures = [ComputeError("graph failed"), MemoryError(), ZeroDivisionError("a defect")]

    def fail() -> None:
        if failures:
            raise failures.pop(0)

    made = service(TwinCompute(Ownership.product([0, 1], [0, 1]), fail))
    opened, other = session(made), session(made)
    refused(opened.answer(dispatch([1], [0])), RefusalCode.COMPUTE_FAILED, "layer 0", "graph failed")
    refused(opened.answer(dispatch([1], [0])), RefusalCode.COMPUTE_FAILED, "memory")
    refused(opened.answer(dispatch([1], [0])), RefusalCode.COMPUTE_FAILED, "ZeroDivisionError")
    assert isinstance(other.answer(dispatch([1], [0])), Result)
    assert isinstance(opened.answer(dispatch([1], [0])), Result)


def test_describe_takes_all_layers_or_none() -> None:
    opened = ExpertSession(service())
    strange = dataclasses.replace(descriptor(1), architecture="gpt-oss")
    refused(opened.answer(Describe(3, (descriptor(0), strange))), RefusalCode.BAD_REQUEST, "layer 1", "gpt-oss")
    refused(opened.answer(dispatch([1], [0])), RefusalCode.UNKNOWN_LAYER)
    missing = dataclasses.replace(descriptor(0), tensors=())
    refused(opened.answer(Describe(4, (missing,))), RefusalCode.COMPUTE_FAILED, "ffn_up_exps", "missing")


@pytest.mark.parametrize(
    "changes", [{"n_embd": 0}, {"n_embd": 1 << 30}, {"n_ff": -1}, {"n_expert": 0}, {"top_k": 0}, {"top_k": 9}]
)
def test_a_descriptor_with_impossible_numbers_is_refused(changes: dict[str, int]) -> None:
    compute = TwinCompute(Ownership.product([0], [0]))
    wrong = dataclasses.replace(descriptor(0), **changes)
    refused(ExpertSession(service(compute)).answer(Describe(1, (wrong,))), RefusalCode.BAD_REQUEST, "no layer has")
    assert not compute.descriptors


def test_a_peer_cannot_fill_the_memory_with_descriptors() -> None:
    opened = ExpertSession(service(max_layers=3))
    for number in range(3):
        unlike = dataclasses.replace(descriptor(0), clamp=float(number))
        assert isinstance(opened.answer(Describe(number, (unlike,))), Described)
    refused(opened.answer(Describe(9, (dataclasses.replace(descriptor(0), clamp=99.0),))), RefusalCode.BAD_REQUEST)
    assert isinstance(opened.answer(Describe(10, (dataclasses.replace(descriptor(0), clamp=1.0),))), Described)


def test_sessions_share_prepared_layers_and_nothing_else() -> None:
    compute = TwinCompute(Ownership.product([0, 1], [0, 1, 2, 5]))
    made = service(compute)
    session(made), session(made)
    assert len(compute.descriptors) == 3
    fresh = ExpertSession(made)
    refused(fresh.answer(dispatch([1], [0])), RefusalCode.UNKNOWN_LAYER)


def test_two_backbones_with_unlike_descriptors_do_not_disturb_each_other() -> None:
    made = service()
    narrow, wide = ExpertSession(made), ExpertSession(made)
    assert isinstance(narrow.answer(Describe(1, (descriptor(0, n_embd=4),))), Described)
    assert isinstance(wide.answer(Describe(1, (descriptor(0, n_embd=6),))), Described)
    assert isinstance(narrow.answer(dispatch([1], [0], n_embd=4)), Result)
    assert isinstance(wide.answer(dispatch([1], [0], n_embd=6)), Result)
    refused(narrow.answer(dispatch([1], [0], n_embd=6)), RefusalCode.BAD_REQUEST)


def test_a_second_call_of_a_layer_may_have_fewer_experts() -> None:
    opened = ExpertSession(service())
    assert opened.answer(Describe(1, (descriptor(0), descriptor(0, 1, n_expert=2)))) == Described(1, 2)
    assert isinstance(opened.answer(dispatch([1], [5])), Result)
    refused(opened.answer(dispatch([1], [5], call=1)), RefusalCode.BAD_REQUEST, "expert 5")


def test_ping_measure_and_strange_messages() -> None:
    opened = session()
    assert opened.answer(Ping(4, 77)) == Pong(4, 77)
    measured = opened.answer(Measure(5, 1, 0))
    assert isinstance(measured, Measured)
    assert measured.sequence == 5
    assert 0 < measured.ms_at_1 < measured.ms_at_32
    refused(opened.answer(Measure(6, 9, 0)), RefusalCode.UNKNOWN_LAYER)
    refused(opened.answer(Pong(7, 1)), RefusalCode.BAD_REQUEST)
    refused(opened.answer(Goodbye("x")), RefusalCode.BAD_REQUEST)


def test_measure_reports_a_failure() -> None:
    def fail() -> None:
        raise ComputeError("no")

    opened = session(service(TwinCompute(Ownership.product([0, 1], [0, 1]), fail)))
    refused(opened.answer(Measure(5, 0, 0)), RefusalCode.COMPUTE_FAILED)


def test_computations_take_turns_and_the_queue_is_bounded() -> None:
    go, running = threading.Event(), threading.Event()

    def wait() -> None:
        running.set()
        assert go.wait(20)

    compute = TwinCompute(Ownership.product([0, 1], [0, 1, 2, 5]), wait)
    made = service(compute, queue_limit=2)
    replies: list[object] = []

    def ask() -> None:
        replies.append(session(made).answer(dispatch([1], [0])))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    threads[0].start()
    assert running.wait(20)
    for thread in threads[1:]:
        thread.start()
    while made.queue.waiting < 2:
        threading.Event().wait(0.005)
    refused(session(made).answer(dispatch([1], [0])), RefusalCode.OVERLOADED, "2 requests")
    refused(session(made).answer(Measure(1, 0, 0)), RefusalCode.OVERLOADED)
    go.set()
    for thread in threads:
        thread.join(20)
    assert len(replies) == 3
    assert all(isinstance(reply, Result) for reply in replies)
    assert compute.most_inside == 1
    assert (made.requests, made.rows, made.queue.waiting) == (3, 3, 0)


def test_a_draining_worker_refuses_everything_but_pings() -> None:
    made = service()
    opened = session(made)
    made.draining = True
    refused(opened.answer(dispatch([1], [0])), RefusalCode.DRAINING, "shutting down")
    refused(opened.answer(Describe(1, (descriptor(0),))), RefusalCode.DRAINING)
    refused(opened.answer(Measure(1, 0, 0)), RefusalCode.DRAINING)
    assert opened.answer(Ping(4, 77)) == Pong(4, 77)


def test_welcome_says_what_the_worker_is() -> None:
    welcome = service().welcome(0, sequence=3)
    assert (welcome.name, welcome.pid, welcome.model_sha256, welcome.n_threads) == ("twin", 1, "a" * 64, 1)
    assert (welcome.identity, welcome.architecture, welcome.sequence) == (IDENTITY, "llama", 3)
    assert welcome.ownership == Ownership.product([0, 1], [0, 1, 2, 5])


@pytest.mark.parametrize("contract", list(Contract))
@pytest.mark.parametrize("kind", list(Injection))
def test_injection_spoils_one_expert_only_and_always_alike(kind: Injection, contract: Contract) -> None:
    ownership = Ownership.product([0, 1], [1, 2, 5])
    honest = session(service(TwinCompute(ownership)))
    message = dispatch([2, 1, 1], [5, 1, 2, 1], contract=contract)
    message.rows[:] = np.random.default_rng(3).standard_normal(message.rows.shape)
    right = honest.answer(message)
    assert isinstance(right, Result)
    answers = []
    for _ in range(2):
        reply = session(ExpertService(InjectedCompute(TwinCompute(ownership), kind), PROFILE)).answer(message)
        assert isinstance(reply, Result)
        answers.append(reply.rows.copy())
    np.testing.assert_array_equal(answers[0], answers[1])
    touched = [1, 3] if contract is Contract.EXACT else [0, 2]
    same = (answers[0] == right.rows).all(axis=1)
    assert [index for index, equal in enumerate(same) if not equal] == touched
    for index in touched:
        if kind is Injection.BIT_FLIP:
            np.testing.assert_allclose(answers[0][index], right.rows[index], rtol=1e-4)
        elif kind is Injection.ZEROS and contract is Contract.EXACT:
            assert not answers[0][index].any()
        elif kind is Injection.WRONG_QUANT:
            step = np.abs(right.rows[index]).max() / 7
            assert np.abs(answers[0][index] - right.rows[index]).max() <= step / 2 * 1.001
    if kind is Injection.ZEROS and contract is Contract.SUM:
        np.testing.assert_array_equal(answers[0][2], np.zeros(4))
