"""The ring over connections, against the same layers in one process: every arrangement, every fault, by twins."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.errors import (
    ComputeError,
    InputError,
    LinkcppError,
    StageFailedError,
    StageLostError,
    StageRefusedError,
    StageTimeoutError,
    StepDroppedError,
    WorkerLostError,
)
from orchestrator.ring.client import Ring
from orchestrator.ring.link import StageLink
from orchestrator.ring.pipeline import Pipeline
from orchestrator.ring.steps import Copy, Keep, Remove, Shift, TokenBatch, one_sequence
from orchestrator.types import Contract, EngineIdentity
from orchestrator.wire.messages import SUPPORTED, Hello
from orchestrator.wire.ring_messages import Attach, Purpose
from tests.faults import Faults
from tests.ring_net import IDENTITY, Net, net, replace
from tests.ring_twin import N_LAYER, N_VOCAB, Output, facts, twin_pipeline
from tests.test_workers_server import OWNERSHIP, TwinCompute, Worker

__all__ = ["net"]

ARRANGEMENTS = [
    pytest.param([[(0, 12)]], [], id="one"),
    pytest.param([[(0, 5)], [(5, 12)]], [], id="two"),
    pytest.param([[(5, 12)], [(0, 3)], [(3, 5)]], [], id="three"),
    pytest.param([[(4, 12)]], [(0, 4)], id="head at the gateway"),
    pytest.param([[(0, 8)]], [(8, 12)], id="tail at the gateway"),
    pytest.param([[(2, 6)], [(6, 10)]], [(0, 2), (10, 12)], id="sandwich"),
    pytest.param([[(0, 2), (10, 12)], [(2, 6)], [(6, 10)]], [], id="two ranges in one process"),
    pytest.param([[(0, 2), (8, 10)], [(2, 4)], [(10, 12)]], [(4, 8)], id="middle at the gateway"),
    pytest.param([], [(0, 6), (6, 12)], id="all at the gateway"),
]


def start(net: Net, places: list[list[tuple[int, int]]]) -> list[str]:
    return [net.start(f"s{index}", *ranges) for index, ranges in enumerate(places)]


def story(ring: Ring | Pipeline) -> Iterator[bytes]:
    """Do a bit of everything and give all logits."""
    rng = np.random.default_rng(3)

    def step(count: int, sequence: int) -> TokenBatch:
        tokens = [int(token) for token in rng.integers(0, N_VOCAB, count)]
        return one_sequence(tokens, ring.length(sequence), sequence=sequence, every=True)

    def collected() -> Iterator[bytes]:
        while ring.busy:
            completion = ring.collect()
            assert completion.error is None
            assert completion.logits is not None
            yield completion.logits.tobytes()

    for count, sequence in ((5, 0), (8, 1), (3, 0), (1, 1), (1, 0)):
        ring.submit(step(count, sequence))
    yield from collected()
    assert ring.apply(Copy(0, 2, 0, 6))
    assert ring.apply(Remove(1, 4))
    for sequence in (2, 1, 2, 0):
        ring.submit(step(2, sequence))
    yield from collected()
    ring.save(0, key=9)
    assert ring.apply(Remove(0, 2, 4))
    assert ring.apply(Shift(0, 4, -1, -2))
    ring.submit(step(1, 0))
    ring.restore(3, key=9)
    ring.submit(step(1, 3))
    ring.forget(9)
    yield from collected()
    assert ring.apply(Keep(3))
    yield ring.decode(step(3, 3)).tobytes()
    yield ring.decode(step(20, 0)).tobytes()
    assert [ring.length(sequence) for sequence in range(4)] == [20, 0, 0, 15]


@pytest.mark.parametrize(("places", "local"), ARRANGEMENTS)
def test_every_arrangement_gives_what_one_process_gives(
    net: Net, places: list[list[tuple[int, int]]], local: list[tuple[int, int]]
):
    with net.ring(start(net, places), *local) as ring:
        assert list(story(ring)) == list(story(twin_pipeline(())))
        assert ring.statistics()[0].layers.first == 0
        assert all(found.connected for found in ring.statistics())
        assert all(found.steps > 10 for found in ring.statistics())


def test_items_go_from_stage_to_stage_and_not_through_the_gateway(net: Net):
    names = start(net, [[(0, 4)], [(4, 8)], [(8, 12)]])
    with net.ring(names) as ring:
        for place in ring._places[:2]:
            before = place.control._connection.bytes_received
            ring.decode(one_sequence([1, 2], ring.length(0)))
            assert place.control._connection.bytes_received == before
        assert [hop.feed is not None for hop in ring._hops] == [True, False, False]


def test_many_steps_in_flight_larger_than_any_buffer_do_not_lock_up():
    net = Net(facts(n_ctx=40_000, n_batch=20_000))
    for stage in ("a", "b"):
        net.start(stage, (0, 6) if stage == "a" else (6, 12))
    for stages in net.stages.values():
        for stage in stages:
            stage.decode = big_decode(stage)  # type: ignore[method-assign]
    with net.ring(["a", "b"]) as ring:
        n = 20_000
        for round_ in range(2):
            for sequence in range(4):
                ring.submit(one_sequence([round_] * n, round_ * n, sequence=sequence, every=True))
        for _ in range(8):
            completion = ring.collect()
            assert completion.error is None
            assert completion.logits.shape == (n, N_VOCAB)
    net.close()


def big_decode(stage):
    """Decode without hashing: megabytes of boundary and logits in no time."""

    def decode(batch: TokenBatch, boundary: bytes):
        n = len(batch)
        if stage.layers.last == N_LAYER:
            assert len(boundary) == 400 * n
            return Output(np.zeros((n, N_VOCAB), np.float32), b"")
        return Output(None, bytes(400 * n))

    return decode


def test_all_stages_compute_at_the_same_time_while_a_prompt_comes_in(net: Net):
    names = start(net, [[(0, 4)], [(4, 8)], [(8, 12)]])
    together = threading.Barrier(3)
    counts = dict.fromkeys(names, 0)

    def meet(name: str, first: int):
        def before(_batch: TokenBatch) -> None:
            counts[name] += 1
            # stage i computes part k while the one before computes part k + 1
            if first <= counts[name] < first + 6:
                together.wait(5)

        return before

    for index, name in enumerate(names):
        net.stages[name][0].before_decode = meet(name, 3 - index)
    with net.ring(names) as ring:
        logits = ring.decode(one_sequence([1] * 64, 0))
        assert logits.tobytes() == twin_pipeline(()).decode(one_sequence([1] * 64, 0)).tobytes()
    assert counts == dict.fromkeys(names, 8)
    assert not together.broken


# --- what cannot be a ring ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("places", "local", "text", "hint"),
    [
        ([[(0, 5)]], [], "no stage holds layers 5-11 and the output layer", "--layers 5:12"),
        ([[(0, 5)], [(5, 11)]], [], "no stage holds layer 11 and the output layer", "--layers 11:12"),
        ([[(5, 12)]], [], "no stage holds layers 0-4", "--layers 0:5"),
        ([[(0, 4)], [(6, 12)]], [], "no stage holds layers 4-5", "--layers 4:6"),
        ([[(0, 6)], [(5, 12)]], [], "layer 5 would be computed twice, by s0 .* and by s1", "spare"),
        ([[(0, 6)], [(0, 6)], [(6, 12)]], [], "layers 0-5 would be computed twice", "spare"),
        ([[(0, 12)]], [(0, 12)], "layers 0-11 would be computed twice", "spare"),
        ([[(0, 3)], [(1, 2)], [(3, 12)]], [], "layer 1 would be computed twice", "spare"),
    ],
)
def test_layers_that_do_not_tile_the_model_are_refused_in_words(
    net: Net, places: list[list[tuple[int, int]]], local: list[tuple[int, int]], text: str, hint: str
):
    with pytest.raises(InputError, match=text) as caught:
        net.ring(start(net, places), *local).open()
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_sha256": "other"}, "model file other instead of m"),
        ({"identity": EngineIdentity("build-2", "AVX2", False)}, "engine build build-2 instead of build-1"),
        ({"identity": EngineIdentity("build-1", "AVX512", False)}, "instruction set AVX512 instead of AVX2"),
        ({"identity": EngineIdentity("build-1", "AVX2", True)}, "weight repacking True instead of False"),
        ({"n_ubatch": 4}, "micro-batch 4 instead of 8"),
        ({"batch_invariant": False}, "batch invariance False instead of True"),
        ({"facts": facts(n_sequences=2)}, "sequences 2 instead of 4"),
    ],
)
def test_a_stage_that_differs_is_refused_in_words(net: Net, changes: dict[str, object], text: str):
    net.start("a", (0, 6))
    net.start("b", (6, 12), **changes)
    with pytest.raises(StageRefusedError, match=f"stage b .*: does not fit a .*: {text}"):
        net.ring(["a", "b"]).open()
    net.start("c", (6, 12))
    with net.ring(["a", "c"]) as ring:  # nothing is left behind of the attempt
        ring.decode(one_sequence([1], 0))


def test_stages_that_agree_with_each_other_must_agree_with_the_gateway_too(net: Net):
    net.start("a", (0, 12))
    with pytest.raises(StageRefusedError, match="another model file"):
        net.ring(["a"], model_sha256="mine").open()
    with pytest.raises(StageRefusedError, match="another engine"):
        net.ring(["a"], identity=EngineIdentity("build-1", "NEON", False)).open()


def test_a_stage_serves_one_ring_at_a_time_and_the_next_begins_empty(net: Net, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("orchestrator.workers.stage.HANDOVER_SECONDS", 0.2)
    net.start("a", (0, 12))
    with net.ring(["a"]) as first:
        first.decode(one_sequence([1, 2], 0))
        with pytest.raises(StageRefusedError, match=r"refused \(overloaded\): this stage serves the ring of memory"):
            net.ring(["a"]).open()
        first.decode(one_sequence([3], 2))
    monkeypatch.setattr("orchestrator.workers.stage.HANDOVER_SECONDS", 5.0)
    with net.ring(["a"]) as second:
        assert list(story(second)) == list(story(twin_pipeline(())))


def test_a_feed_must_know_the_ring(net: Net):
    net.start("a", (0, 6), (9, 12))
    net.start("b", (6, 9))
    with net.ring(["a", "b"]):
        for attach, text in (
            (Attach(1, Purpose.FEED, 0, "guess"), "not part of that ring"),
            (Attach(1, Purpose.FEED, 0, ""), "not part of that ring"),
        ):
            link = StageLink(net.connector("a"))
            link.open(Hello(SUPPORTED, IDENTITY, client="thief"), 1.0, time.monotonic() + 5)
            with pytest.raises(StageRefusedError, match=text):
                link.request(attach, time.monotonic() + 5)
            link.close("")


# --- what fails ------------------------------------------------------------------------------------------------


def test_a_failing_step_ends_with_an_error_that_names_the_stage_and_the_ring_lives(net: Net):
    names = start(net, [[(0, 6)], [(6, 12)]])
    with net.ring(names) as ring:
        ring.decode(one_sequence([1, 2, 3], 0))

        def fail(_batch: TokenBatch) -> None:
            net.stages["s1"][0].before_decode = lambda _batch: None
            raise ComputeError("no memory")

        net.stages["s1"][0].before_decode = fail
        ring.submit(one_sequence([4], 3))
        ring.submit(one_sequence([1], 0, sequence=1))
        ring.submit(one_sequence([5], 4))
        ends = [ring.collect() for _ in range(3)]
        assert isinstance(ends[0].error, StageFailedError)
        assert str(ends[0].error) == "stage layers 6-11 (s1 (s1)): no memory"
        assert ends[0].resume == {0: 3}
        assert ends[1].error is None
        assert isinstance(ends[2].error, StepDroppedError)
        expected = twin_pipeline(()).decode(one_sequence([1, 2, 3, 4, 5], 0))
        assert ring.decode(one_sequence([4, 5], 3)).tobytes() == expected.tobytes()


def test_a_cancelled_step_is_dropped_by_the_stages_that_have_not_begun_it(net: Net):
    names = start(net, [[(0, 6)], [(6, 12)]])
    running, go_on = threading.Event(), threading.Event()

    def hold(_batch: TokenBatch) -> None:
        running.set()
        assert go_on.wait(5)

    with net.ring(names) as ring:
        ring.decode(one_sequence([1], 0))
        net.stages["s0"][0].before_decode = hold
        numbers = [ring.submit(one_sequence([2], 1 + i)) for i in range(3)]
        assert running.wait(5)
        assert ring.cancel(numbers[0])
        while not all(net.layers[name].hops[0]._cancelled for name in names):
            time.sleep(0.001)
        net.stages["s0"][0].before_decode = lambda _batch: None
        go_on.set()
        ends = [ring.collect() for _ in numbers]
        assert all(isinstance(end.error, StepDroppedError) for end in ends)
        assert ends[0].resume == {0: 1}
        ring.settle()
        assert [net.stages[name][0].decoded for name in names] == [2, 1]
        assert [len(net.stages[name][0].held[0]) for name in names] == [1, 1]
        ring.decode(one_sequence([3], 1))


KILLED = ["s0", "s1", "s2"]


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_stage_is_named_and_replaced_and_the_story_goes_on(net: Net, name: str):
    names = start(net, [[(0, 4)], [(4, 8)], [(8, 12)]])
    spare = net.start("spare", (4 * KILLED.index(name), 4 * KILLED.index(name) + 4))
    with net.ring(names) as ring:
        ring.decode(one_sequence([1, 2], 0))
        ring.submit(one_sequence([3], 2))
        net.kill(name)
        ring.settle()
        end = ring.collect()
        if end.error is None:  # it came round before the end was noticed
            ring.submit(one_sequence([4], 3))
            end = ring.collect()
        assert isinstance(end.error, StageLostError)
        assert f"({name} ({name}))" in str(end.error)
        assert ring.lost_address == name
        with pytest.raises(StageLostError):
            ring.submit(one_sequence([4], 3))
        with pytest.raises(LinkcppError):
            replace(ring, {name: name})  # it is still gone
        assert ring.broken is not None
        replace(ring, {name: spare})
        assert ring.lost_address is None
        assert list(story(ring)) == list(story(twin_pipeline(())))


def test_two_stages_lost_at_once_are_found_one_after_the_other(net: Net):
    names = start(net, [[(0, 4)], [(4, 8)], [(8, 12)]])
    spares = {name: net.start(f"spare{i}", (4 * i, 4 * i + 4)) for i, name in enumerate(names)}
    with net.ring(names) as ring:
        ring.decode(one_sequence([1], 0))
        net.kill("s0")
        net.kill("s2")
        ring.submit(one_sequence([2], 1))
        assert isinstance(ring.collect().error, StageLostError)
        first = ring.lost_address
        assert first in ("s0", "s2")
        with pytest.raises(StageLostError):
            replace(ring, {first: spares[first]})
        second = ring.lost_address
        assert {first, second} == {"s0", "s2"}
        replace(ring, {name: spares[name] for name in (first, second)})
        assert list(story(ring)) == list(story(twin_pipeline(())))


def test_a_spare_that_is_no_good_leaves_the_place_open(net: Net):
    names = start(net, [[(0, 6)], [(6, 12)]])
    wrong = net.start("wrong", (6, 11))
    alien = net.start("alien", (6, 12), model_sha256="other")
    good = net.start("good", (6, 12))
    gone = net.start("gone", (6, 12))
    net.kill("gone")
    with net.ring(names) as ring:
        net.kill("s1")
        ring.submit(one_sequence([2], 0))
        ring.collect()
        for spare, error in ((wrong, InputError), (alien, StageRefusedError), (gone, StageLostError)):
            with pytest.raises(error):
                replace(ring, {"s1": spare})
            assert ring.broken is not None
            assert ring.lost_address == ("gone" if spare == gone else "s1")
        replace(ring, {"s1": good})
        assert list(story(ring)) == list(story(twin_pipeline(())))


def test_a_loss_is_noticed_while_idle(net: Net):
    names = start(net, [[(0, 6)], [(6, 12)]])
    with net.ring(names) as ring:
        assert ring.check() is None
        net.kill("s0")
        deadline = time.monotonic() + 5
        while ring.check() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ring.lost_address == "s0"


def test_a_draining_stage_says_goodbye(net: Net):
    names = start(net, [[(0, 6)], [(6, 12)]])
    with net.ring(names) as ring:
        ring.decode(one_sequence([1], 0))
        assert net.servers["s1"].drain()
        ring.submit(one_sequence([2], 1))
        assert "this stage is shutting down" in str(ring.collect().error)
        assert ring.lost_address == "s1"
    with pytest.raises(StageLostError):
        net.ring(names).open()


@pytest.mark.parametrize("index", [0, 1])
def test_a_stage_that_computes_without_end_is_found_by_deadline(net: Net, index: int):
    names = start(net, [[(0, 6)], [(6, 12)]])
    go_on = threading.Event()
    with net.ring(names, timeout=0.3) as ring:
        ring.decode(one_sequence([1], 0))
        net.stages[f"s{index}"][0].before_decode = lambda _batch: go_on.wait(10)
        ring.submit(one_sequence([2], 1))
        error = ring.collect().error
        go_on.set()
        assert isinstance(error, StageTimeoutError)
        assert f"s{index}" in str(error)
        assert "nothing came round for 0.3 s, and it computes on" in str(error)
        assert ring.lost_address == f"s{index}"
        net.stages[f"s{index}"][0].before_decode = lambda _batch: None
        replace(ring, {f"s{index}": f"s{index}"})  # it is well again
        assert list(story(ring)) == list(story(twin_pipeline(())))


def test_a_stage_that_is_only_slow_is_not_lost(net: Net):
    names = start(net, [[(0, 6)], [(6, 12)]])
    with net.ring(names, timeout=0.4) as ring:
        net.stages["s0"][0].before_decode = lambda _batch: time.sleep(0.25)
        for position in range(6):
            ring.submit(one_sequence([2], position))
        assert [ring.collect().error for _ in range(6)] == [None] * 6


def test_a_stage_whose_frames_are_lost_is_found_by_deadline(net: Net):
    # of the connections to s1: control, then the feed from s0, whose sends are greeting, attach, items
    net.faults["s1"] = [None, Faults(drop_sends=frozenset({3}))]
    names = start(net, [[(0, 6)], [(6, 12)]])
    with net.ring(names, timeout=0.3) as ring:
        ring.decode(one_sequence([1], 0))
        ring.submit(one_sequence([2], 1))
        error = ring.collect().error
        assert isinstance(error, StageTimeoutError)
        assert "s1" in str(error)
        assert "nothing reaches it" in str(error)


@pytest.mark.parametrize(
    ("faults", "text"),
    [
        (Faults(kill_at_send=3), "from layers 0-5: .*killed at send 3"),
        (Faults(truncate_sends={3: 30}), "s1"),
        (Faults(duplicate_sends=frozenset({3})), "s1"),
    ],
    ids=["killed", "truncated", "doubled"],
)
def test_a_broken_way_between_two_stages_loses_the_one_behind(net: Net, faults: Faults, text: str):
    net.faults["s1"] = [None, faults]
    names = start(net, [[(0, 6)], [(6, 12)]])
    with net.ring(names) as ring:
        ring.decode(one_sequence([1], 0))
        ends = []
        for position in range(1, 4):
            if ring.broken is None:
                ring.submit(one_sequence([2], position))
                ends.append(ring.collect())
        assert isinstance(ends[-1].error, StageLostError)
        assert ring.lost_address == "s1"
        with pytest.raises(StageLostError, match=text):
            raise ends[-1].error
        replace(ring, {"s1": "s1"})
        assert list(story(ring)) == list(story(twin_pipeline(())))


def test_a_flipped_bit_on_the_way_never_becomes_an_answer(net: Net):
    net.faults["s1"] = [Faults(flip_received={400: 4})]
    names = start(net, [[(0, 6)], [(6, 12)]])
    with net.ring(names) as ring:
        wanted = twin_pipeline(())
        seen = 0
        for position in range(40):
            batch = one_sequence([position % N_VOCAB], position, every=True)
            ring.submit(batch)
            end = ring.collect()
            if end.error is not None:
                assert isinstance(end.error, StageLostError)
                assert "checksum" in str(end.error)
                break
            assert end.logits.tobytes() == wanted.decode(batch).tobytes()
            seen += 1
        else:
            pytest.fail("the flipped bit was never received")
        assert seen > 0


def test_a_stage_cannot_reach_the_next_one(net: Net):
    names = start(net, [[(0, 6)], [(6, 12)]])
    net.faults["s1"] = [None, Faults(kill_at_send=0)]
    with pytest.raises(StageRefusedError, match=r"cannot reach the next stage, s1: stage s1: .*killed"):
        net.ring(names).open()
    with net.ring(names) as ring:
        ring.decode(one_sequence([1], 0))


def test_an_expert_worker_is_no_stage_and_a_stage_no_expert_worker(net: Net):
    worker = Worker("memory", TwinCompute(OWNERSHIP, None))
    net.listeners["expert"] = worker.listener
    try:
        with pytest.raises(StageRefusedError, match=r"is an expert worker, not a stage") as caught:
            net.ring(["expert"]).open()
        assert "linkcpp stage" in str(caught.value.hint)
    finally:
        worker.server.drain()
    net.start("stage", (0, 12))
    dispatcher = Dispatcher([net.listeners["stage"].connector()], Contract.EXACT, IDENTITY, timeout=5.0)
    with pytest.raises(WorkerLostError, match="it greeted with STAGE_WELCOME"):
        dispatcher.connect()
