"""A deployment behind the gateway: answers as from one process, and stages that die, hang and come back meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from orchestrator.engine.context import Context
from orchestrator.engine.model import Model
from orchestrator.errors import InputError, LinkcppError, StageLostError
from orchestrator.gateway.gateway import Gateway
from orchestrator.gateway.ring_backbone import Standby, open_ring
from orchestrator.gateway.sampling import SamplingParameters
from orchestrator.gateway.sequence import GenerationRequest, TextDelta
from orchestrator.models.deployment import Deployment, GatewayEntry, StageEntry, WorkerEntry
from orchestrator.ring.steps import one_sequence
from orchestrator.workers.deployment import DeployedProcesses

GREEDY = SamplingParameters(temperature=0)
ANY = "127.0.0.1:0"


class FakeRing:
    """A ring of which each place works with some addresses and not with others."""

    def __init__(self, addresses: Sequence[str], good: set[str], lost: str | None) -> None:
        self.addresses = tuple(addresses)
        self.good = good
        self.lost_address = lost
        self.broken: LinkcppError | None = StageLostError("is gone", stage=f"layers 0-1 (s ({lost}))")
        self.tried: list[tuple[str, ...]] = []

    def replace_all(self, spares: Mapping[str, str]) -> None:
        wanted = tuple(spares.get(address, address) for address in self.addresses)
        self.tried.append(wanted)
        bad = next((address for address in wanted if address not in self.good), None)
        if bad is not None:
            raise StageLostError("cannot connect", stage=bad)
        self.addresses = wanted
        self.broken = None


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def standby(ring: FakeRing, spares: Mapping[str, Sequence[str]], listening: set[str], clock: Clock) -> Standby:
    return Standby(
        ring, spares, patience=5.0, reachable=listening.__contains__, now=lambda: clock.time, sleep=clock.sleep
    )


def test_a_spare_takes_the_place_and_the_lost_one_becomes_the_spare() -> None:
    ring, listening = FakeRing(["a", "b"], {"a", "c"}, "b"), {"a", "c"}
    place = standby(ring, {"b": ["c"]}, listening, Clock())
    place.reopen()
    assert ring.addresses == ("a", "c")
    assert place.recoveries == 1
    ring.good, ring.lost_address = {"a", "b"}, "c"
    listening.add("b")
    place.reopen()
    assert ring.addresses == ("a", "b")


def test_a_stage_that_hangs_still_listens_and_is_not_asked_first() -> None:
    ring = FakeRing(["a", "b"], {"a", "c"}, "b")
    standby(ring, {"b": ["c"]}, {"a", "b", "c"}, Clock()).reopen()
    assert ring.tried == [("a", "c")]


def test_a_spare_that_does_not_do_is_passed_over_for_the_next() -> None:
    ring = FakeRing(["a", "b"], {"a", "d"}, "b")
    standby(ring, {"b": ["c", "d"]}, {"a", "c", "d"}, Clock()).reopen()
    assert ring.tried == [("a", "c"), ("a", "d")]


def test_two_stages_lost_at_once_are_replaced_together() -> None:
    ring = FakeRing(["a", "b"], {"c", "d"}, "b")
    standby(ring, {"a": ["c"], "b": ["d"]}, {"c", "d"}, Clock()).reopen()
    assert ring.addresses == ("c", "d")
    assert len(ring.tried) == 1


def test_without_a_spare_it_waits_for_the_stage_itself_and_not_for_ever() -> None:
    clock = Clock()
    ring = FakeRing(["a", "b"], {"a"}, "b")
    listening = {"a"}
    place = standby(ring, {}, listening, clock)
    with pytest.raises(StageLostError, match="cannot connect"):
        place.reopen()
    assert 5.0 < clock.time < 6.0
    listening.add("b")
    ring.good.add("b")
    place.reopen()
    assert ring.addresses == ("a", "b")


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


def test_without_a_spare_the_answer_waits_until_the_stage_is_started_again(
    synthetic: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.workers.deployment.RESTART_SECONDS", 0.0)
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
