"""What the gateway decides without an engine: whose turn it is, what a step holds, where a prompt goes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_engine import N_VOCAB, FakeModel
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import BusyError
from orchestrator.gateway.backend import BackendFacts, Invariance
from orchestrator.gateway.cost import StepCost
from orchestrator.gateway.prefix import (
    Holding,
    Placement,
    Saved,
    common_prefix,
    least_recent_beyond,
    place,
    reusable_prefix,
)
from orchestrator.gateway.queue import FairQueue
from orchestrator.gateway.scheduler import Job, Limits, Scheduler, Terms, plan_step, split_rows
from orchestrator.gateway.sequence import GenerationRequest, Sequence

FACTS = BackendFacts(N_VOCAB, n_ctx=512, n_sequences=4, n_chunk=16, n_step=16)
MODEL = FakeModel()


def job(prompt, *, slot=0, sent=0, answer=(), served=0, **terms):
    made = Job(Sequence(GenerationRequest(tuple(prompt), 50), MODEL, 512), Terms(**terms), None, 0.0)
    made.answer.tokens.extend(answer)
    made.slot, made.sent, made.served = slot, sent, served
    return made


def shape(step):
    """Return (slot, start, tokens, outputs) of each segment."""
    return [(s.slot, s.start, len(s.tokens), s.outputs) for s in step.segments]


# --- steps --------------------------------------------------------------------------------------------------------


def test_every_answer_gets_its_token_and_the_rest_of_the_step_goes_to_prompts():
    jobs = [
        job(range(10), slot=0, sent=10, answer=[7]),
        job(range(100), slot=1, sent=20),
        job(range(30), slot=2, sent=32, answer=[1, 2, 3]),
    ]
    step = plan_step(jobs, FACTS, 16)
    assert shape(step) == [(0, 10, 1, 1), (1, 20, 14, 0), (2, 32, 1, 1)]
    batch = step.batch()
    assert batch.tokens.tolist() == [7, *range(20, 34), 3]
    assert batch.positions.tolist() == [10, *range(20, 34), 32]
    assert batch.sequences.tolist() == [0, *[1] * 14, 2]
    assert batch.outputs.tolist() == [True, *[False] * 14, True]
    assert [(segment.slot, rows) for segment, rows in split_rows(step)] == [
        (0, slice(0, 1)),
        (1, slice(1, 1)),
        (2, slice(1, 2)),
    ]


def test_prompts_share_a_step_and_a_short_one_leaves_its_rest_to_the_others():
    jobs = [job(range(100), slot=0), job(range(3), slot=1), job(range(90), slot=3)]
    assert shape(plan_step(jobs, FACTS, 16)) == [(0, 0, 7, 0), (1, 0, 3, 1), (3, 0, 6, 0)]


def test_prompts_get_no_more_rows_than_allowed_but_answers_do():
    jobs = [job(range(100), slot=0), job(range(4), slot=1, sent=4, answer=[1])]
    assert shape(plan_step(jobs, FACTS, 5)) == [(0, 0, 5, 0), (1, 4, 1, 1)]


def test_nothing_to_send_is_no_step():
    assert plan_step([], FACTS, 16) is None
    assert plan_step([job(range(4), sent=4)], FACTS, 16) is None  # its result is under way


@pytest.mark.parametrize("invariance", [Invariance.ONE, Invariance.NONE])
def test_one_sequence_a_step_where_more_are_not_proven_and_all_get_their_turn(invariance):
    facts = replace(FACTS, invariance=invariance)
    jobs = [job(range(40), slot=0), job(range(5), slot=1, sent=5, answer=[1]), job(range(40), slot=2)]
    turns = []
    for number in range(1, 7):
        step = plan_step(jobs, facts, 16)
        (segment,) = step.segments
        turns.append(segment.slot)
        jobs[segment.slot].sent += len(segment.tokens)
        jobs[segment.slot].served = number
        if segment.outputs:
            jobs[segment.slot].answer.tokens.append(1)
    assert turns == [0, 1, 2, 0, 1, 2]


def test_with_several_steps_under_way_the_answers_are_shared_out_among_them():
    facts = replace(FACTS, in_flight=2, groups=2)
    jobs = [job(range(4), slot=slot, sent=4, answer=[1]) for slot in range(4)]
    first = plan_step(jobs, facts, 16)
    assert shape(first) == [(0, 4, 1, 1), (1, 4, 1, 1)]
    for segment in first.segments:
        jobs[segment.slot].sent += 1
        jobs[segment.slot].served = 1
    assert shape(plan_step(jobs, facts, 16)) == [(2, 4, 1, 1), (3, 4, 1, 1)]


def test_chunks_of_one_prompt_are_under_way_at_once():
    scheduler = Scheduler(replace(FACTS, in_flight=3), Limits())
    scheduler.enqueue(job(range(60), slot=None))
    (made, placement) = scheduler.admit(0.0)
    scheduler.placed(made, placement.keep)
    starts = []
    while (step := scheduler.next_step()) is not None:
        scheduler.launched(step, scheduler.jobs_in(step), len(starts), 0.0)
        starts.append(step.segments[0].start)
    assert starts == [0, 16, 32]
    # The first comes to nothing, and with it the two that go on from it: the prompt begins again after all are back.
    scheduler.landed(0, 0.0, {0: 0})
    assert scheduler.next_step() is None
    scheduler.landed(1, 0.0, {0: 0})
    scheduler.landed(2, 0.0, {0: 0})
    assert shape(scheduler.next_step()) == [(0, 0, 16, 0)]


def test_the_partition_of_a_sequence_is_recorded():
    scheduler = Scheduler(replace(FACTS, invariance=Invariance.NONE), Limits())
    scheduler.enqueue(job(range(40), slot=None))
    (made, placement) = scheduler.admit(0.0)
    scheduler.placed(made, placement.keep)
    for ticket in range(5):
        step = scheduler.next_step()
        scheduler.launched(step, (made,), ticket, 0.0)
        scheduler.landed(ticket, 0.0)
        if step.segments[0].outputs:
            made.answer.tokens.append(3)
    assert made.partition == [16, 16, 8, 1, 1]


@given(st.data())
def test_any_mixture_of_requests_makes_a_step_that_fits(data):
    n_sequences = data.draw(st.integers(1, 12))
    facts = BackendFacts(N_VOCAB, 512, n_sequences, 16, 16, data.draw(st.integers(1, 4)), 1)
    jobs = []
    for slot in range(n_sequences):
        length = data.draw(st.integers(1, 60))
        generated = data.draw(st.integers(0, 3))
        made = job(range(length), slot=slot, answer=range(generated))
        made.sent = data.draw(st.integers(0, length + generated))
        jobs.append(made)
    step = plan_step(jobs, facts, data.draw(st.integers(1, 16)))
    waiting = [made for made in jobs if made.unsent]
    if step is None:
        assert not waiting
        return
    assert 1 <= step.rows <= facts.n_step
    slots = [segment.slot for segment in step.segments]
    assert slots == sorted(set(slots))
    for segment in step.segments:
        made = jobs[segment.slot]
        assert segment.start == made.sent
        assert list(segment.tokens) == made.answer.tokens[segment.start : segment.start + len(segment.tokens)] != []
        assert segment.outputs == (segment.start + len(segment.tokens) == len(made.answer.tokens))
    assert {made.slot for made in waiting if made.unsent == 1} <= set(slots)


# --- what steps cost ----------------------------------------------------------------------------------------------


def test_the_cost_of_a_step_is_told_apart_into_fixed_and_per_row():
    cost = StepCost()
    assert not cost.is_known
    for rows in (1, 16, 1, 8, 16, 1):
        cost.observe(rows, 0.2 + 0.01 * rows)
    assert cost.fixed == pytest.approx(0.2)
    assert cost.per_row == pytest.approx(0.01)
    assert cost.seconds(10) == pytest.approx(0.3)


def test_a_cost_that_changes_is_followed():
    cost = StepCost()
    for rows in [1, 16] * 50:
        cost.observe(rows, 1.0 + 0.1 * rows)
    for rows in [1, 16] * 100:
        cost.observe(rows, 0.5 + 0.01 * rows)
    assert cost.fixed == pytest.approx(0.5, rel=0.1)
    assert cost.per_row == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize(
    ("fixed", "per_row", "rows"),
    [
        (0.001, 0.001, 64),  # fast: whole steps
        (0.001, 0.02, 19),  # slow rows: the step stays short
        (2.4, 0.02, 64),  # each step costs round trips anyway: more rows cost little beside them
        (0.1, 9.0, 8),  # never less than a few
    ],
)
def test_the_rows_of_prompts_follow_the_cost(fixed, per_row, rows):
    scheduler = Scheduler(replace(FACTS, n_chunk=64, n_step=64), Limits())
    scheduler.enqueue(job(range(400), slot=None))
    (made, placement) = scheduler.admit(0.0)
    scheduler.placed(made, placement.keep)
    for size in (1, 8) * 5:
        scheduler.cost.observe(size, fixed + per_row * size)
    assert scheduler.next_step().rows == pytest.approx(rows, abs=1)


# --- the queue ----------------------------------------------------------------------------------------------------


def test_clients_take_turns_by_the_work_they_ask_for():
    queue = FairQueue(100, 100)
    for number in range(4):
        queue.push(f"long {number}", "long", 1000, 1)
    for number in range(4):
        queue.push(f"short {number}", "short", 100, 1)
    order = [queue.pop() for _ in range(8)]
    assert order == ["long 0", "short 0", "short 1", "short 2", "short 3", "long 1", "long 2", "long 3"]
    assert queue.pop() is None


def test_who_comes_back_begins_at_the_present():
    queue = FairQueue(100, 100)
    queue.push("a0", "a", 10, 1)
    assert queue.pop() == "a0"
    for number in range(3):
        queue.push(f"b{number}", "b", 10, 1)
    assert [queue.pop(), queue.pop()] == ["b0", "b1"]
    queue.push("a1", "a", 10, 1)
    queue.push("a2", "a", 10, 1)
    # a has not saved up turns while it was away
    assert {queue.pop(), queue.pop()} == {"a1", "b2"}
    assert queue.pop() == "a2"


def test_limits_of_the_queue():
    queue = FairQueue(3, 2)
    queue.push("a0", "a", 1, 1)
    queue.push("a1", "a", 1, 1)
    with pytest.raises(BusyError, match="of this client") as caught:
        queue.push("a2", "a", 1, 7.0)
    assert (caught.value.status, caught.value.retry_after) == (429, 7.0)
    queue.push("b0", "b", 1, 1)
    with pytest.raises(BusyError, match="3 requests"):
        queue.push("c0", "c", 1, 1)
    assert queue.remove("a0")
    assert not queue.remove("a0")
    queue.push("c0", "c", 1, 1)
    assert len(queue) == 3


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), max_size=30))
def test_the_queue_loses_nobody_and_keeps_each_clients_order(items):
    queue = FairQueue(100, 100)
    for number, (client, work) in enumerate(items):
        queue.push((client, number), client, work, 1)
    popped = [queue.pop() for _ in items]
    assert sorted(popped, key=lambda item: item[1]) == [(client, n) for n, (client, _) in enumerate(items)]
    for name in "abc":
        mine = [number for client, number in popped if client == name]
        assert mine == sorted(mine)


# --- slots --------------------------------------------------------------------------------------------------------


def holding(tokens, *, used_at=0, free=True):
    return Holding(list(tokens), free, used_at)


SYSTEM = list(range(1000, 1040))  # 40 tokens of instructions


def test_the_next_turn_of_a_conversation_continues_in_place():
    slots = [holding([]), holding([*SYSTEM, *range(50)], used_at=5), holding([*SYSTEM, *range(100, 120)], used_at=9)]
    assert place([*SYSTEM, *range(48), 7, 7, 7], slots) == Placement(1, 88)


def test_another_conversation_with_the_same_instructions_gets_a_copy_and_takes_nothing_away():
    slots = [holding([*SYSTEM, *range(500)], used_at=3), holding([], used_at=0)]
    assert place([*SYSTEM, 7, 8, 9], slots) == Placement(1, 40, copy_from=0)


def test_what_is_not_worth_a_copy_is_computed():
    slots = [holding([1, 2, 3, *range(100, 200)], used_at=3), holding([], used_at=0)]
    assert place([1, 2, 3, 4, 5], slots) == Placement(1, 0)


def test_the_only_free_slot_is_cut_even_if_that_loses_much():
    slots = [holding([*SYSTEM, *range(500)], used_at=3), holding(range(300), free=False)]
    assert place([*SYSTEM, 7], slots) == Placement(0, 40)


def test_the_beginning_of_a_busy_slot_can_be_copied():
    slots = [holding([*SYSTEM, *range(500)], free=False, used_at=3), holding([5, 6, 7], used_at=1)]
    assert place([*SYSTEM, 7], slots) == Placement(1, 40, copy_from=0)


def test_the_least_recently_used_slot_is_given_up():
    slots = [holding(range(100), used_at=3), holding(range(100, 200), used_at=1), holding(range(200, 300), used_at=2)]
    assert place([9999, 1], slots) == Placement(1, 0)


def test_recurrent_memory_serves_as_a_whole_or_not_at_all():
    slots = [holding([1, 2, 3, *range(40)], used_at=1), holding(SYSTEM, used_at=2), holding([], used_at=0)]
    assert place([1, 2, 3, 9], slots, cuttable=False) == Placement(2, 0)
    assert place([*SYSTEM, 5], slots, cuttable=False) == Placement(1, 40)
    assert place(SYSTEM, slots, cuttable=False) == Placement(2, 0)  # the last token's logits are needed


def test_what_is_lost_is_saved_if_it_is_long_and_nobody_else_has_it():
    long = list(range(100))
    assert place([9999], [holding(long)], can_save=True) == Placement(0, 0, rescue=True)
    assert place([9999], [holding(long[:20])], can_save=True) == Placement(0, 0)
    assert place([9999], [holding(long)], [Saved(1, [*long, 5], 10, 0)], can_save=True) == Placement(0, 0)
    assert place([*long, 3], [holding(long)], can_save=True) == Placement(0, 100)  # it goes on: nothing is lost


def test_a_saved_copy_is_recalled_where_it_spares_more():
    saved = [Saved(1, SYSTEM, 10, 0), Saved(2, [*SYSTEM, *range(200)], 10, 0)]
    slots = [holding([], used_at=0), holding(range(500, 700), used_at=3)]
    assert place([*SYSTEM, *range(150), 7, 7], slots, saved) == Placement(0, 190, recall=2)


def test_no_slot_but_a_busy_one_is_ever_given_up():
    slots = [holding(range(100), free=False), holding([], used_at=8)]
    assert place([*range(100), 5], slots, reuse=False) == Placement(1, 0)


def test_copies_beyond_the_limit_go_in_the_order_of_their_last_use():
    saved = [Saved(1, [], 40, 5), Saved(2, [], 40, 9), Saved(3, [], 40, 7)]
    assert least_recent_beyond(saved, 120) == ()
    assert least_recent_beyond(saved, 90) == (1,)
    assert least_recent_beyond(saved, 40) == (3, 1)
    assert least_recent_beyond(saved, 10) == (2, 3, 1)


tokens = st.lists(st.integers(0, 2), max_size=12)


@given(tokens, tokens)
def test_common_prefix_is_what_a_loop_finds(first, second):
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    assert common_prefix(first, second) == count


@given(
    st.lists(st.tuples(tokens, st.booleans(), st.integers(0, 5)), min_size=1, max_size=5),
    st.lists(tokens, max_size=3),
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.booleans(),
)
def test_a_placement_is_always_one_that_can_be_carried_out(slots, copies, prompt, cuttable):
    slots = [Holding(held * 8, free, used) for held, free, used in slots]
    prompt = prompt * 8
    if not any(slot.is_free for slot in slots):
        slots[0] = replace(slots[0], is_free=True)
    saved = [Saved(key, held * 8, 1, 0) for key, held in enumerate(copies)]
    found = place(prompt, slots, saved, cuttable=cuttable, can_save=True)
    assert slots[found.slot].is_free
    assert 0 <= found.keep < len(prompt)
    source = slots[found.slot].tokens
    if found.copy_from is not None:
        source = slots[found.copy_from].tokens
    if found.recall is not None:
        source = saved[found.recall].tokens
    assert source[: found.keep] == prompt[: found.keep]
    assert reusable_prefix(source, prompt, cuttable=cuttable) >= found.keep
    if found.copy_from is not None or found.recall is not None:
        assert found.keep > reusable_prefix(slots[found.slot].tokens, prompt, cuttable=cuttable)
