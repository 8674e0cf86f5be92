"""A deployment behind the gateway: answers as from one process, and stages that die, hang and come back meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.engine.context import Context
from orchestrator.engine.model import Model
from orchestrator.errors import InputError, LinkcppError, StageLostError, StageRefusedError
from orchestrator.gateway.gateway import Gateway
from orchestrator.gateway.ring_backbone import open_ring
from orchestrator.gateway.sampling import SamplingParameters
from orchestrator.gateway.sequence import GenerationRequest, TextDelta
from orchestrator.gateway.standby import Standby
from orchestrator.models.deployment import Deployment, GatewayEntry, StageEntry, WorkerEntry
from orchestrator.ring.layout import LayerRange
from orchestrator.ring.steps import one_sequence
from orchestrator.workers.deployment import DeployedProcesses

GREEDY = SamplingParameters(temperature=0)
ANY = "127.0.0.1:0"


FIRST, SECOND = LayerRange(0, 2), LayerRange(2, 4)


class FakeRing:
    """Processes by address: the ranges that each holds, for how many there is room, and whether it answers."""

    def __init__(self, **ranges: Sequence[LayerRange]) -> None:
        self.held: dict[str, tuple[LayerRange, ...]] = {address: tuple(found) for address, found in ranges.items()}
        self.room = dict.fromkeys(self.held, 1)
        self.holders: Mapping[str, Sequence[LayerRange]] = {a: held for a, held in self.held.items() if held}
        self.silent: set[str] = set()
        self.bad: set[str] = set()  # they answer, and take no ring
        self.lost_address: str | None = None
        self.broken: LinkcppError | None = None
        self.did: list[str] = []

    def lose(self, address: str, *, silent: bool = True) -> None:
        self.lost_address, self.broken = address, StageLostError("is gone", stage=address)
        if silent:
            self.silent.add(address)

    def look(self, address: str) -> Sequence[LayerRange] | None:
        return None if address in self.silent else self.held[address]

    def assign(self, address: str, ranges: Sequence[LayerRange]) -> None:
        if len(ranges) > self.room[address]:
            raise StageRefusedError("refused (no_room): too much", stage=address)
        self.did.append(f"{address} loads {', '.join(map(str, ranges))}")
        self.held[address] = tuple(ranges)

    def rearrange(self, holders: Mapping[str, Sequence[LayerRange]]) -> None:
        self.did.append(" ".join(sorted(holders)))
        for address, ranges in holders.items():
            if address in self.silent | self.bad:
                self.lost_address = address
                raise StageLostError("cannot connect", stage=address)
            assert set(ranges) <= set(self.held[address])
        assert sorted(found for ranges in holders.values() for found in ranges) == [FIRST, SECOND]
        self.holders, self.broken, self.lost_address = holders, None, None


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def standby(ring: FakeRing, others: Sequence[str], clock: Clock | None = None) -> Standby:
    clock = clock or Clock()
    return Standby(ring, others, patience=5.0, now=lambda: clock.time, sleep=clock.sleep)


def test_a_spare_takes_the_place_and_the_lost_one_becomes_the_spare() -> None:
    ring = FakeRing(a=[FIRST], b=[SECOND])
    ring.held["c"] = (SECOND,)
    place = standby(ring, ["c"])
    ring.lose("b")
    place.reopen()
    assert ring.holders == {"a": [FIRST], "c": [SECOND]}
    assert place.recoveries == 1
    ring.silent.clear()
    ring.lose("c")
    place.reopen()
    assert ring.holders == {"a": [FIRST], "b": [SECOND]}


def test_a_stage_that_answers_and_does_not_compute_is_not_asked_first() -> None:
    ring = FakeRing(a=[FIRST], b=[SECOND])
    ring.held["c"] = (SECOND,)
    place = standby(ring, ["c"])
    ring.lose("b", silent=False)
    place.reopen()
    assert ring.did == ["a c"]


def test_a_spare_that_does_not_do_is_passed_over_for_the_next() -> None:
    ring = FakeRing(a=[FIRST], b=[SECOND])
    ring.held |= {"c": (SECOND,), "d": (SECOND,)}
    place = standby(ring, ["c", "d"])
    ring.lose("b")
    ring.bad.add("c")
    place.reopen()
    assert ring.did == ["a c", "a d"]


def test_two_stages_lost_at_once_are_replaced_together() -> None:
    ring = FakeRing(a=[FIRST], b=[SECOND])
    ring.held |= {"c": (FIRST,), "d": (SECOND,)}
    place = standby(ring, ["c", "d"])
    ring.silent.add("a")
    ring.lose("b")
    place.reopen()
    assert ring.did == ["c d"]


def test_a_process_in_reserve_loads_what_is_lost_before_a_stage_does() -> None:
    ring = FakeRing(a=[FIRST], b=[SECOND], r=[])
    ring.room["a"] = 2
    place = standby(ring, ["r"])
    ring.lose("b")
    place.reopen()
    assert ring.did == ["r loads layers 2-3", "a r"]
    assert ring.holders == {"a": [FIRST], "r": [SECOND]}


def test_the_stage_with_room_takes_more_layers_and_gives_them_back() -> None:
    ring = FakeRing(a=[FIRST], b=[SECOND])
    ring.room["a"] = 2
    place = standby(ring, [])
    ring.lose("b")
    place.reopen()
    assert ring.did == ["a loads layers 0-1, layers 2-3", "a"]
    ring.silent.clear()
    ring.lose("a", silent=False)  # for whatever reason: b is back, and holds fewer layers
    place.reopen()
    assert ring.holders == {"a": [FIRST], "b": [SECOND]}


def test_what_a_process_in_reserve_does_not_need_any_more_makes_room() -> None:
    ring = FakeRing(a=[FIRST], b=[SECOND], r=[])
    place = standby(ring, ["r"])
    ring.lose("b")
    place.reopen()
    ring.silent.clear()  # b is back
    ring.lose("r", silent=False)
    place.reopen()
    assert ring.holders == {"a": [FIRST], "b": [SECOND]}
    ring.lose("a")
    place.reopen()
    assert ring.did[-2:] == ["r loads layers 0-1", "b r"]


def test_a_process_in_reserve_that_was_started_again_loads_again() -> None:
    ring = FakeRing(a=[FIRST], b=[SECOND], r=[])
    place = standby(ring, ["r"])
    ring.lose("b")
    place.reopen()
    ring.held["r"] = ()
    ring.lose("r", silent=False)
    place.reopen()
    assert ring.holders == {"a": [FIRST], "r": [SECOND]}


def test_without_room_it_waits_for_the_stage_itself_and_not_for_ever() -> None:
    clock, ring = Clock(), FakeRing(a=[FIRST], b=[SECOND])
    place = standby(ring, [], clock)
    ring.lose("b")
    with pytest.raises(StageLostError, match=r"layers 2-3: lost, .* take them over: stage a: .*too much") as caught:
        place.reopen()
    assert caught.value.hint == "start it again: linkcpp stage MODEL --layers 2:4 --listen b"
    assert 5.0 < clock.time < 6.0
    ring.silent.clear()
    place.reopen()
    assert ring.holders == {"a": [FIRST], "b": [SECOND]}


def test_time_to_load_is_no_time_to_wait() -> None:
    clock, ring = Clock(), FakeRing(a=[FIRST], b=[SECOND], r=[], s=[])
    place = standby(ring, ["r", "s"], clock)
    ring.lose("b")
    ring.bad |= {"r"}
    load = ring.assign

    def assign(address: str, ranges: Sequence[LayerRange]) -> None:
        clock.sleep(100)
        load(address, ranges)

    ring.assign = assign
    place.reopen()
    assert ring.did == ["r loads layers 2-3", "a r", "s loads layers 2-3", "a s"]


# --- with processes ------------------------------------------------------------------------------------------------


def prompt(n_vocab: int, count: int, seed: int) -> tuple[int, ...]:
    return tuple((7 * seed + 13 * i * i + i) % n_vocab for i in range(count))


def alone(path: Path, prompts: Sequence[tuple[int, ...]], count: int) -> list[list[int]]:
    """Greedy decoding of each prompt in one process."""
    answers = []
    with Model.open(path) as model:
        for tokens in prompts:
            with Context(model, n_ctx=256) as context:
                row = context.decode(one_sequence(tokens, 0)).logits
                answer = [int(row[-1].argmax())]
                for index in range(count - 1):
                    row = context.decode(one_sequence(answer[-1:], len(tokens) + index)).logits
                    answer.append(int(row[-1].argmax()))
            answers.append(answer)
    return answers


def ask(gateway: Gateway, prompts: Sequence[tuple[int, ...]], count: int, strike: Callable[[], None]) -> list:
    """Run all prompts at once; ``strike`` happens in the middle of the first answer."""
    generations = [gateway.submit(GenerationRequest(tokens, count, GREEDY, ignore_end=True)) for tokens in prompts]
    answers = []
    for number, generation in enumerate(generations):
        tokens: list[int] = []
        for event in generation:
            if isinstance(event, TextDelta):
                tokens += [token.token for token in event.tokens]
                if number == 0 and len(tokens) >= count // 3:
                    strike()
                    strike = lambda: None  # noqa: E731
        answers.append(tokens)
    return answers


@contextlib.contextmanager
def tended(processes: DeployedProcesses, said: list[str]) -> Iterator[None]:
    """Look after the processes in a thread, as `linkcpp deploy` does."""
    stop = threading.Event()

    def tend() -> None:
        while not stop.wait(0.1):
            processes.tend(said.append)

    thread = threading.Thread(target=tend)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def stages(cuts: Sequence[int], name: str = "stage") -> tuple[StageEntry, ...]:
    spans = zip(cuts, cuts[1:], strict=False)  # noqa: RUF007
    return tuple(StageEntry(f"{name}-{i}", (span,), ANY) for i, span in enumerate(spans, 1))


def test_many_streams_through_a_sandwich_with_experts_beside_it(synthetic: Callable[[str], Path]) -> None:
    """The gateway holds both ends and computes their experts on a worker; five requests for four sequences."""
    path = synthetic("step35")
    plan = Deployment(
        model=str(path),
        context=256,
        sequences=4,
        gateway=GatewayEntry(((0, 2), (7, 8))),
        stages=stages((2, 4, 7)),
        workers=(WorkerEntry("experts", None, None, ANY),),
    )
    with (
        DeployedProcesses(plan, path, threads=1) as processes,
        open_ring(path, processes.deployment) as backbone,
    ):
        prompts = [prompt(backbone.model.n_vocab, 3 + 20 * n, n) for n in range(5)]
        with backbone.gateway() as gateway:
            answers = ask(gateway, prompts, 12, lambda: None)
        names = [worker.name for worker in backbone.statistics().workers]
        assert names[0] == names[-1] == "gateway"
        assert len(names) == 4
        assert [worker.ownership.layers for worker in backbone.statistics().workers][1] == (2, 3)
    assert answers == alone(path, prompts, 12)


@pytest.mark.parametrize("architecture", ["llama", "qwen35moe"])
def test_a_killed_stage_is_replaced_by_its_spare_in_the_middle_of_an_answer(
    synthetic: Callable[[str], Path], architecture: str
) -> None:
    path = synthetic(architecture)
    cuts = (0, 2, 4) if architecture == "llama" else (0, 4, 8)
    plan = Deployment(
        model=str(path), context=256, sequences=2, stages=stages(cuts), spares=stages(cuts, "spare")[1:]
    )

    with (
        DeployedProcesses(plan, path, threads=1) as processes,
        open_ring(path, processes.deployment, patience=30) as backbone,
    ):
        prompts = [prompt(backbone.model.n_vocab, 40, 1), prompt(backbone.model.n_vocab, 9, 2)]
        victim = next(found for found in processes.running if found.name == "stage-2")
        with backbone.gateway() as gateway:
            answers = ask(gateway, prompts, 200, lambda: os.kill(victim.pid, signal.SIGKILL))
        assert backbone.standby.recoveries == 1
        spare = next(found for found in processes.running if found.name == "spare-2")
        assert backbone.ring.addresses[1] == spare.address
    assert answers == alone(path, prompts, 200)


def test_a_process_without_layers_loads_those_of_a_killed_stage(synthetic: Callable[[str], Path]) -> None:
    path = synthetic("llama")
    plan = Deployment(
        model=str(path),
        context=256,
        sequences=2,
        stages=stages((0, 2, 4)),
        spares=(StageEntry("reserve", (), ANY, memory="2GB"),),
    )
    with (
        DeployedProcesses(plan, path, threads=1) as processes,
        open_ring(path, processes.deployment, patience=30) as backbone,
    ):
        prompts = [prompt(backbone.model.n_vocab, 40, 1), prompt(backbone.model.n_vocab, 9, 2)]
        found = {process.name: process for process in processes.running}
        with backbone.gateway() as gateway:
            answers = ask(gateway, prompts, 100, lambda: os.kill(found["stage-1"].pid, signal.SIGKILL))
        assert backbone.ring.holders == {
            found["reserve"].address: (LayerRange(0, 2),),
            found["stage-2"].address: (LayerRange(2, 4),),
        }
    assert answers == alone(path, prompts, 100)


@pytest.mark.slow
def test_a_process_without_layers_loads_those_of_a_stage_that_hangs(synthetic: Callable[[str], Path]) -> None:
    path = synthetic("qwen35moe")
    plan = Deployment(
        model=str(path), context=256, stages=stages((0, 4, 8)), spares=(StageEntry("reserve", (), ANY),)
    )
    with (
        DeployedProcesses(plan, path, threads=1) as processes,
        open_ring(path, processes.deployment, timeout=2, patience=30) as backbone,
    ):
        prompts = [prompt(backbone.model.n_vocab, 40, 1)]
        found = {process.name: process for process in processes.running}
        try:
            with backbone.gateway() as gateway:
                answers = ask(gateway, prompts, 60, lambda: os.kill(found["stage-2"].pid, signal.SIGSTOP))
        finally:
            os.kill(found["stage-2"].pid, signal.SIGCONT)
        assert found["reserve"].address in backbone.ring.holders
    assert answers == alone(path, prompts, 60)


def test_a_stage_with_room_takes_the_layers_of_a_killed_one_and_another_says_what_is_missing(
    synthetic: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three losses: one that a stage makes up for, one that none can, and the request after the stage is back."""
    monkeypatch.setattr("orchestrator.workers.child.RESTART_SECONDS", 0.0)
    path = synthetic("llama")
    first, second = stages((0, 2, 4))
    plan = Deployment(
        model=str(path), context=256, stages=(replace(first, memory="1MB"), replace(second, memory="2GB"))
    )
    with (
        DeployedProcesses(plan, path, threads=1) as processes,
        open_ring(path, processes.deployment, patience=0.5) as backbone,
    ):
        prompts = [prompt(backbone.model.n_vocab, 40, 1)]
        expected = alone(path, prompts, 60)
        with backbone.gateway() as gateway:

            def kill(name: str) -> None:
                os.kill(next(found.pid for found in processes.running if found.name == name), signal.SIGKILL)

            assert ask(gateway, prompts, 60, lambda: kill("stage-1")) == expected
            assert list(backbone.ring.holders.values()) == [(LayerRange(0, 2), LayerRange(2, 4))]
            said: list[str] = []
            processes.tend(said.append)
            assert "stage-1 runs again" in said[-1]
            with pytest.raises(StageLostError, match=r"layers 2-3: lost, .*layers 2-3 need .* more memory") as caught:
                ask(gateway, prompts, 60, lambda: kill("stage-2"))
            assert "--layers 2:4 --listen 127.0.0.1:" in str(caught.value.hint)
            processes.tend(said.append)
            assert ask(gateway, prompts, 60, lambda: None) == expected
        assert sorted(backbone.ring.holders.values()) == [(LayerRange(0, 2),), (LayerRange(2, 4),)]


def test_without_a_spare_the_answer_waits_until_the_stage_is_started_again(
    synthetic: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.workers.child.RESTART_SECONDS", 0.0)
    path = synthetic("llama")
    plan = Deployment(model=str(path), context=256, stages=stages((0, 2, 4)))
    said: list[str] = []
    with (
        DeployedProcesses(plan, path, threads=1) as processes,
        open_ring(path, processes.deployment, patience=60) as backbone,
        tended(processes, said),
    ):
        prompts = [prompt(backbone.model.n_vocab, 40, 1)]
        victim = processes.running[0]
        begin = time.monotonic()
        with backbone.gateway() as gateway:
            answers = ask(gateway, prompts, 200, lambda: os.kill(victim.pid, signal.SIGKILL))
        print(f"{time.monotonic() - begin:.1f} s with the loss")
        assert backbone.standby.recoveries == 1
    assert answers == alone(path, prompts, 200)
    assert "ended with signal 9" in said[0]


def test_a_deployment_that_leaves_layers_out_is_refused(synthetic: Callable[[str], Path]) -> None:
    path = synthetic("llama")
    plan = Deployment(model=str(path), context=256, stages=stages((0, 2)), gateway=GatewayEntry(((3, 4),)))
    with (
        DeployedProcesses(plan, path, threads=1) as processes,
        pytest.raises(InputError, match="no stage holds layer 2"),
    ):
        open_ring(path, processes.deployment)
