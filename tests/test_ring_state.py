"""The books of a ring under every order of events: steps, operations, failures and cancels, against a twin.

The oracle is one range that holds all layers and runs the same items one after the other, without the steps that
came to nothing.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import (
    ComputeError,
    InputError,
    LinkcppError,
    ProtocolError,
    StageFailedError,
    StageLostError,
    StepDroppedError,
)
from orchestrator.ring.items import operation_item, operation_of, step_item
from orchestrator.ring.pipeline import Pipeline, explain
from orchestrator.ring.positions import Positions
from orchestrator.ring.state import Completion, RingState
from orchestrator.ring.steps import (
    Clear,
    Copy,
    Forget,
    Keep,
    Recall,
    Remove,
    Restore,
    RingOperation,
    Save,
    Shift,
    TokenBatch,
    one_sequence,
)
from orchestrator.wire.ring_messages import Fault, FaultKind, Operate, Outcome, Step
from tests.ring_twin import N_LAYER, N_VOCAB, TwinStage, facts, twin_pipeline


def step(tokens: list[int], position: int, sequence: int = 0) -> TokenBatch:
    return one_sequence(tokens, position, sequence=sequence, every=True)


class Watched(Pipeline):
    """A pipeline that notes every item that goes in, and what every step became."""

    def __init__(self, inner: Pipeline) -> None:
        super().__init__(inner.hops, inner.facts)
        self.items: list[Step | Operate] = []
        self.ends: dict[int, Completion] = {}

    def _launch(self, items) -> None:
        items = tuple(items)
        self.items.extend(items)
        super()._launch(items)

    def finish(self) -> None:
        self.settle()
        while self.busy:
            completion = self.collect()
            assert completion.number not in self.ends
            self.ends[completion.number] = completion
        self.settle()

    def check(self) -> None:
        """Compare logits and caches with one range that never heard of the steps that came to nothing."""
        whole = TwinStage(0, N_LAYER, self.facts)
        saved: dict[int, bytes] = {}
        for item in self.items:
            if isinstance(item, Step):
                end = self.ends[item.sequence]
                if end.error is None:
                    batch = TokenBatch(item.tokens, item.positions, item.sequences, item.outputs)
                    expected = whole.decode(batch, b"").logits
                    assert end.logits is not None
                    assert end.logits.tobytes() == (b"" if expected is None else expected.tobytes())
            elif item.sequence not in self.ends:
                match operation_of(item):
                    case Save(sequence, key):
                        saved[key] = whole.save(sequence)
                    case Recall(sequence, key):
                        whole.apply(Restore(sequence, saved[key]))
                    case Forget(key):
                        saved.pop(key, None)
                    case operation:
                        assert whole.apply(operation)
        for sequence in range(self.facts.n_sequences):
            positions = sorted(whole.held[sequence])
            assert self.length(sequence) == (positions[-1] + 1 if positions else 0)
            for at in positions:
                parts = [hop.compute.held[sequence][at] for hop in self.hops]
                assert sum(parts, ()) == whole.held[sequence][at]
            assert all(sorted(hop.compute.held[sequence]) == positions for hop in self.hops)


# --- the property --------------------------------------------------------------------------------------------

sequences = st.integers(0, 1)  # few, so that what happens to one touches the other
submit = st.tuples(st.just("submit"), sequences, st.integers(1, 4), st.booleans())
advance = st.tuples(st.just("advance"), st.integers(0, 2), st.integers(1, 3))
cancel = st.tuples(st.just("cancel"), st.integers(0, 3))
spans = st.sampled_from([(0, -1), (0, -1), (0, -1), (0, 4), (2, 6), (3, -1)])
pairs = st.sampled_from([(0, 1), (1, 0), (0, 2), (2, 0)])
copy = st.tuples(st.just("copy"), pairs, spans)
rollback = st.tuples(st.just("rollback"), sequences, st.integers(0, 3))
events = st.one_of(
    submit,
    submit,
    submit,
    advance,
    advance,
    cancel,
    cancel,
    copy,
    copy,
    rollback,
    st.tuples(st.just("mixed"), sequences, sequences, st.integers(1, 3)),
    st.tuples(st.just("fail"), st.integers(0, 2)),
    st.tuples(st.just("collect")),
    st.tuples(st.just("remove"), sequences, spans),
    st.tuples(st.just("shift"), sequences, st.integers(0, 6), st.integers(1, 3)),
    st.tuples(st.just("keep"), sequences),
    st.tuples(st.just("clear")),
    st.tuples(st.just("save"), sequences, st.integers(0, 1)),
    st.tuples(st.just("recall"), sequences, st.integers(0, 1)),
    st.tuples(st.just("forget"), st.integers(0, 1)),
)


def fail_once(stage: TwinStage) -> None:
    def fail(_batch: TokenBatch) -> None:
        stage.before_decode = lambda _batch: None
        raise ComputeError("injected")

    stage.before_decode = fail


def play(ring: Watched, event: tuple, rng: np.random.Generator) -> None:
    def tokens(count: int) -> list[int]:
        return [int(token) for token in rng.integers(0, N_VOCAB, count)]

    def apply(operation: RingOperation) -> None:
        try:
            ring.apply(operation)
        except InputError:
            assert isinstance(operation, Shift | Recall)  # onto others, or nothing saved

    room = ring.facts.n_ctx - 8
    match event:
        case ("submit", sequence, count, every):
            if ring.length(sequence) < room:
                ring.submit(one_sequence(tokens(count), ring.length(sequence), sequence=sequence, every=every))
        case ("mixed", one, other, count) if one != other:
            if max(ring.length(one), ring.length(other)) < room:
                parts = [step(tokens(count), ring.length(s), s) for s in (one, other)]
                names = ("tokens", "positions", "sequences", "outputs")
                ring.submit(TokenBatch(*(np.concatenate([getattr(p, name) for p in parts]) for name in names)))
        case ("advance", index, count):
            for _ in range(count):
                ring.advance(index % len(ring.hops))
        case ("cancel", back):
            numbers = [item.sequence for item in ring.items if isinstance(item, Step)]
            if back < len(numbers):
                ring.cancel(numbers[-1 - back])
        case ("fail", index):
            fail_once(ring.hops[index % len(ring.hops)].compute)
        case ("collect",):
            completion = ring._state.next_completion()
            if completion is not None:
                ring.ends[completion.number] = completion
        case ("remove", sequence, span):
            apply(Remove(sequence, *span))
        case ("rollback", sequence, count):
            apply(Remove(sequence, max(0, ring.length(sequence) - count)))
        case ("copy", pair, span):
            apply(Copy(*pair, *span))
        case ("shift", sequence, first, distance):
            apply(Remove(sequence, first, first + distance))
            apply(Shift(sequence, first + distance, -1, -distance))
        case ("keep", sequence):
            apply(Keep(sequence))
        case ("clear",):
            apply(Clear())
        case ("save", sequence, key):
            apply(Save(sequence, key))
        case ("recall", sequence, key):
            apply(Recall(sequence, key))
        case ("forget", key):
            apply(Forget(key))


@settings(max_examples=250, deadline=None)
@given(
    st.lists(events, min_size=30, max_size=60) | st.lists(events),
    st.sampled_from([(), (5,), (3, 8)]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_any_order_of_events_leaves_what_the_good_steps_made(
    story: list[tuple], cuts: tuple[int, ...], cuttable: bool, seed: int
):
    ring = Watched(twin_pipeline(cuts, facts(cuttable=cuttable)))
    rng = np.random.default_rng(seed)
    for event in story:
        play(ring, event, rng)
    for hop in ring.hops:
        hop.compute.before_decode = lambda _batch: None
    ring.finish()
    ring.check()
    submitted = {item.sequence for item in ring.items if isinstance(item, Step)}
    assert submitted == {number for number, end in ring.ends.items() if end.operation is None}


# --- examples ------------------------------------------------------------------------------------------------


def test_steps_of_several_sequences_travel_at_once_and_end_in_order():
    ring = twin_pipeline((3, 6))
    numbers = [ring.submit(step([1, 2], 2 * i, s)) for i in range(3) for s in (0, 1)]
    assert [ring.waiting(index) for index in range(3)] == [6, 0, 0]
    for _ in range(2):
        ring.advance(0)
    ring.advance(1)
    assert [ring.waiting(index) for index in range(3)] == [4, 1, 1]
    assert [ring.collect().number for _ in numbers] == numbers
    assert not ring.busy


def test_a_failed_step_takes_those_with_it_that_go_on_from_it_and_no_others():
    ring = Watched(twin_pipeline((6,)))
    ring.decode(step([1, 2, 3], 0, 0))
    fail_once(ring.hops[1].compute)
    bad = ring.submit(step([4, 5], 3, 0))
    other = ring.submit(step([6], 0, 1))
    behind = ring.submit(step([6], 5, 0))
    first, second, third = ring.collect(), ring.collect(), ring.collect()
    assert (first.number, second.number, third.number) == (bad, other, behind)
    assert isinstance(first.error, StageFailedError)
    assert str(first.error) == "stage layers 6-11: injected"
    assert first.resume == {0: 3}
    assert second.error is None
    assert isinstance(third.error, StepDroppedError)
    assert "goes on from step" in str(third.error)
    assert third.resume == {0: 3}
    ring.settle()
    assert [sorted(hop.compute.held[0]) for hop in ring.hops] == [[0, 1, 2]] * 2
    again = ring.decode(step([4, 5, 6], 3, 0))
    assert again.tobytes() == twin_pipeline(()).decode(step([1, 2, 3, 4, 5, 6], 0)).tobytes()[3 * 4 * N_VOCAB :]


def test_a_cancelled_step_is_dropped_at_the_next_stage_and_undone_everywhere():
    ring = twin_pipeline((4, 8))
    ring.decode(step([1, 2], 0))
    number = ring.submit(step([3], 2))
    ring.advance(0)
    assert ring.hops[0].compute.held[0].keys() == {0, 1, 2}
    assert ring.cancel(number)
    assert not ring.cancel(number)
    completion = ring.collect()
    assert isinstance(completion.error, StepDroppedError)
    assert completion.resume == {0: 2}
    ring.settle()
    assert [hop.compute.decoded for hop in ring.hops] == [2, 1, 1]
    assert [sorted(hop.compute.held[0]) for hop in ring.hops] == [[0, 1]] * 3


def test_memory_that_cannot_be_cut_loses_the_whole_sequence():
    ring = twin_pipeline((4,), facts(cuttable=False))
    ring.decode(step([1, 2], 0))
    number = ring.submit(step([3], 2))
    ring.cancel(number)
    assert ring.collect().resume == {0: 0}
    ring.settle()
    assert [hop.compute.held[0] for hop in ring.hops] == [{}, {}]
    assert ring.apply(Remove(0, 0))
    assert ring.apply(Remove(0, 5))
    ring.decode(step([1, 2], 0))
    assert not ring.apply(Remove(0, 1))
    assert not ring.apply(Shift(0, 1, -1, 1))
    assert not ring.apply(Copy(0, 1, 0, 1))
    assert ring.apply(Copy(0, 1, 0, 2))
    assert ring.length(1) == 2


def test_a_loss_ends_everything_in_flight_and_a_reset_begins_again():
    ring = Watched(twin_pipeline((6,)))
    done = ring.submit(step([1], 0, 0))
    ring.settle()
    flying = ring.submit(step([2], 1, 0))
    ring.advance(0)
    error = StageLostError("killed", stage="layers 6-11")
    ring.lose(1, error)
    assert [ring.collect().error, ring.collect().error] == [None, error]
    assert (done, flying) == (1, 2)
    with pytest.raises(StageLostError):
        ring.submit(step([3], 0))
    with pytest.raises(StageLostError):
        ring.apply(Clear())
    ring.reset()
    assert ring.length(0) == 0
    expected = twin_pipeline(()).decode(step([1, 2], 0))
    assert ring.decode(step([1, 2], 0)).tobytes() == expected.tobytes()


def test_an_operation_that_a_stage_cannot_do_is_told_and_its_sequence_is_empty():
    ring = twin_pipeline((6,))
    ring.decode(step([1, 2, 3], 0))
    ring.hops[1]._saved_limit = 10
    with pytest.raises(StageFailedError, match=r"layers 6-11: \d+ more bytes .* over the limit of 10"):
        ring.save(0, key=5)
    assert ring.length(0) == 3
    ring.submit(step([1], 3))
    with pytest.raises(InputError, match="collect all steps"):
        ring.save(0, key=5)
    ring.collect()
    ring.hops[1]._saved_limit = 1000
    ring.save(0, key=5)
    ring.hops[1]._saved.clear()
    ring.restore(1, key=5)
    number = ring.submit(step([1], 4, 1))
    first, second = ring.collect(), ring.collect()
    assert first.operation == Recall(1, 5)
    assert first.resume == {1: 0}
    assert "nothing is saved under 5" in str(first.error)
    assert second.number == number
    assert isinstance(second.error, StepDroppedError)
    ring.settle()
    assert [hop.compute.held[1] for hop in ring.hops] == [{}, {}]


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (step([1], 1), "sequence 0 goes on at position 0, not at 1"),
        (step([1], 0, 4), "sequence 4: there are 4"),
        (step([1] * 9, 0), "a step of 9 tokens; at most 8 fit"),
        (step([N_VOCAB], 0), "token ids must be from 0 to 6"),
        (step([-1], 0), "token ids"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_and_changes_nothing(batch: TokenBatch, text: str):
    ring = twin_pipeline((6,))
    with pytest.raises(InputError, match=text):
        ring.submit(batch)
    assert not ring.busy
    assert ring.length(0) == 0
    ring.decode(step([1], 0))


def test_the_context_is_bounded():
    ring = twin_pipeline((6,), facts(n_ctx=10))
    ring.decode(step([1] * 9, 0))
    with pytest.raises(InputError, match="11 tokens do not fit into the context of 10"):
        ring.decode(step([1, 1], 9))
    ring.decode(step([1], 9))


def test_what_comes_out_of_order_or_unfinished_is_a_broken_protocol():
    state = RingState(facts(), explain)
    first = state.submit(step([1], 0))
    second = state.submit(step([1], 1))
    with pytest.raises(ProtocolError, match="item 2 came out of the ring, expected was 1"):
        state.arrived(Outcome(second.sequence, N_LAYER, (), np.zeros((1, N_VOCAB), np.float32)))
    with pytest.raises(ProtocolError, match="unfinished"):
        state.arrived(first)
    with pytest.raises(ProtocolError, match="2 rows of logits, wanted are 1"):
        state.arrived(Outcome(second.sequence, N_LAYER, (), np.zeros((2, N_VOCAB), np.float32)))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(1, 5)),
            st.tuples(st.just("remove"), st.integers(0, 20), st.integers(-1, 20)),
            st.tuples(st.just("shift"), st.integers(0, 20), st.integers(-1, 20), st.integers(-5, 5)),
        ),
        max_size=20,
    )
)
def test_positions_are_those_of_a_set(story: list[tuple]):
    positions, held = Positions(1, 1000), set()
    for event in story:
        match event:
            case ("append", count):
                end = max(held) + 1 if held else 0
                positions.append(step([1] * count, end))
                held |= set(range(end, end + count))
            case ("remove", first, last):
                positions.apply(Remove(0, first, last))
                held -= {at for at in held if first <= at and (last < 0 or at < last)}
            case ("shift", first, last, delta):
                moving = {at for at in held if first <= at and (last < 0 or at < last)}
                moved = {at + delta for at in moving}
                collides = bool(moved & (held - moving)) or any(at < 0 for at in moved)
                try:
                    positions.apply(Shift(0, first, last, delta))
                except InputError:
                    assert collides
                else:
                    assert not collides
                    held = held - moving | moved
        assert positions.length(0) == (max(held) + 1 if held else 0)
        assert positions.has_gaps(0) == (held != set(range(len(held))))


OPERATIONS = [
    Remove(1, 2, 3),
    Remove(1),
    Copy(1, 2),
    Copy(1, 2, 3, 4),
    Keep(3),
    Shift(0, 4, -1, -2),
    Clear(),
    Save(1, 77),
    Recall(2, 77),
    Forget(77),
]


@pytest.mark.parametrize("operation", OPERATIONS, ids=repr)
def test_an_operation_travels_as_numbers(operation: RingOperation):
    assert operation_of(operation_item(4, operation)) == operation


def test_an_unknown_operation_is_refused_by_every_stage_and_goes_on():
    ring = twin_pipeline((6,))
    item = ring.hops[0].run(Operate(1, 0, 99, (0, 0, 0, 0), True, ""))
    assert not item.done
    assert item.text == "layers 0-5: unknown operation 99 on the caches"


@pytest.mark.parametrize(
    "operation", [Remove(4), Remove(-1), Copy(0, 9), Copy(9, 0), Keep(4), Shift(7, 0, 1, 1), Save(4, 1), Recall(9, 1)]
)
def test_a_stage_does_not_trust_its_peer(operation: RingOperation):
    hop = twin_pipeline(()).hops[0]
    assert not hop.run(operation_item(1, operation)).done
    assert not hop.run(operation_item(2, Copy(0, 1, 0, 3))).done
    wrong = step_item(3, step([1], 0, 8))
    fault = hop.run(wrong)
    assert isinstance(fault, Fault)
    assert fault.kind is FaultKind.REFUSED
    with pytest.raises(LinkcppError, match="item 3 came behind item 3"):
        hop.run(wrong)


def test_more_logits_than_a_frame_carries_are_refused():
    hop = twin_pipeline(()).hops[0]
    hop.compute.n_vocab = 40 << 20
    fault = hop.run(step_item(1, step([1, 2], 0)))
    assert isinstance(fault, Fault)
    assert "320 MiB of logits" in fault.text


def test_a_state_saved_of_a_spoiled_sequence_is_forgotten():
    ring = Watched(twin_pipeline((6,)))
    number = ring.submit(step([1, 2], 0))
    ring.advance(0)
    ring.apply(Save(0, 3))
    ring.cancel(number)
    ring.finish()
    assert [hop.saved_bytes for hop in ring.hops] == [0, 0]
    with pytest.raises(InputError, match="nothing is saved under 3"):
        ring.restore(1, 3)
    ring.check()


def test_a_defect_costs_one_step():
    ring = twin_pipeline(())
    heard: list[Exception] = []
    ring.hops[0]._on_defect = heard.append

    def broken(_batch: TokenBatch) -> None:
        raise ZeroDivisionError("oops")

    ring.hops[0].compute.before_decode = broken
    ring.submit(step([1], 0))
    assert "defect: ZeroDivisionError: oops" in str(ring.collect().error)
    assert len(heard) == 1
    ring.hops[0].compute.before_decode = lambda _batch: None
    ring.decode(step([1], 0))
