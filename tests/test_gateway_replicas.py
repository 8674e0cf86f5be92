"""A replica that is lost: its conversations go on with another one."""

from __future__ import annotations

import os

import pytest
from fake_backend import FakeBackend, greedy
from fake_engine import FailOnce, FakeModel
from test_gateway_batching import ask, numbers, read

from orchestrator.cli.app import Terminal
from orchestrator.cli.backbone_options import BackboneOptions
from orchestrator.cli.replicas import plan_replicas
from orchestrator.dispatch.exchange import DispatchStatistics, WorkerStatistics
from orchestrator.errors import LinkcppError, RequestError, WorkerLostError
from orchestrator.gateway.gateway import Gateway
from orchestrator.gateway.replicas import Replicas, merged_statistics
from orchestrator.gateway.scheduler import Limits, Terms
from orchestrator.models.deployment import Deployment, GatewayEntry, StageEntry, write_deployment
from orchestrator.types import Contract, Ownership

LOST = WorkerLostError("gone", worker="w", layer=3)
TALK = numbers(100, 1)


class Fleet:
    """Two replicas with a session that is at home in one of them."""

    def __init__(self, **limits):
        self.backends = {name: FakeBackend(n_sequences=2) for name in ("one", "two")}
        self.lost: set[str] = set()
        self.gateways = {
            name: Gateway(FakeModel(), backend, limits=Limits(**limits)) for name, backend in self.backends.items()
        }
        self.replicas = Replicas(
            self.gateways, {name: lambda name=name: name not in self.lost for name in ("one", "two")}
        )

    def tell(self, prompt, count=5):
        return self.replicas.submit(ask(prompt, count), Terms(session="mine"))

    def home(self):
        return max(self.gateways, key=lambda name: self.gateways[name].state().prompt_tokens)

    def other(self):
        return next(name for name in self.gateways if name != self.home())


@pytest.fixture
def fleet():
    made = Fleet()
    with made.replicas:
        assert read(made.tell(TALK))[0] == greedy(TALK, 5)
        yield made


def test_a_lost_replica_gets_no_requests_and_gets_them_again_when_it_is_back(fleet):
    home, other = fleet.home(), fleet.other()
    fleet.lost.add(home)
    for n in range(3):
        tokens, end = read(fleet.tell([*TALK, n]))
        assert tokens == greedy([*TALK, n], 5)
        assert (end.usage.cached_tokens > 90) == (n > 0)  # computed once more, and then it is at home there
    assert [fleet.gateways[name].state().finished for name in (home, other)] == [1, 3]
    assert fleet.replicas.is_usable()
    fleet.lost = {other}
    assert read(fleet.tell([*TALK, 9]))[1].usage.cached_tokens > 90
    fleet.lost = {home, other}
    assert not fleet.replicas.is_usable()
    assert read(fleet.tell(TALK))[0] == greedy(TALK, 5)  # nobody knows better than to try


def test_a_request_whose_replica_is_lost_before_its_first_text_begins_again_elsewhere(fleet):
    fleet.backends[fleet.home()].before_step = FailOnce(LOST, 1)
    tokens, end = read(fleet.tell([*TALK, 7]))
    assert (tokens, end.usage.cached_tokens) == (greedy([*TALK, 7], 5), 0)
    assert fleet.replicas.state().failed == 1


def test_what_a_client_has_read_is_not_begun_again(fleet):
    fleet.backends[fleet.home()].before_step = FailOnce(LOST, 3)
    with pytest.raises(WorkerLostError):
        read(fleet.tell([*TALK, 7]))
    assert fleet.gateways[fleet.other()].state().finished == 0


def test_no_request_moves_twice_or_to_a_replica_that_is_lost_too(fleet):
    for backend in fleet.backends.values():
        backend.before_step = FailOnce(LOST, 1)
    with pytest.raises(WorkerLostError):
        read(fleet.tell([*TALK, 7]))
    assert fleet.replicas.state().failed == 2
    fleet.lost.add(fleet.other())
    fleet.backends[fleet.home()].before_step = FailOnce(LOST, 1)
    with pytest.raises(WorkerLostError):
        read(fleet.tell([*TALK, 8]))
    assert fleet.replicas.state().failed == 3


def test_a_clients_own_fault_moves_nothing(fleet):
    grammarless = FailOnce(RequestError("yours"), 1)
    fleet.backends[fleet.home()].before_step = grammarless
    with pytest.raises(RequestError):
        read(fleet.tell([*TALK, 7]))
    assert fleet.gateways[fleet.other()].state().finished == 0


def test_a_full_queue_elsewhere_leaves_the_first_error():
    fleet = Fleet(waiting=1)
    generation = fleet.tell(TALK)
    first = next(name for name, gateway in fleet.gateways.items() if gateway.state().waiting)
    fleet.backends[first].before_step = FailOnce(LOST, 1)
    other = next(name for name in fleet.gateways if name != first)
    fleet.gateways[other].submit(ask(TALK))
    fleet.gateways[first].step()
    with pytest.raises(LinkcppError, match="gone"):
        read(generation)


def test_each_replica_computes_with_its_part_of_the_cores_unless_its_file_says_otherwise(synthetic, tmp_path):
    options = BackboneOptions(0, (), Contract.EXACT, None, None, True, 1.0, None, "off", None, None)
    files = []
    for name, threads in (("a", None), ("b", 7)):
        stage = StageEntry("s", ((0, 4),), f"{name}:1")
        plan = Deployment(str(synthetic("llama")), 64, gateway=GatewayEntry(threads=threads), stages=(stage,))
        files.append(tmp_path / f"{name}.toml")
        write_deployment(files[-1], plan)
    _, planned = plan_replicas(Terminal(), None, files, (), options, None)
    assert [one.options.threads for one in planned] == [max(1, (os.cpu_count() or 1) // 2), 7]
    assert [one.name for one in planned] == ["a:1", "b:1"]
    _, [alone] = plan_replicas(Terminal(), None, files[:1], (), options, None)
    assert alone.options.threads is None


def test_counters_of_all_replicas_are_told_apart_by_number():
    def worker(name):
        owned = Ownership.product(range(2), range(3))
        return WorkerStatistics(name, "h:1", 1, True, None, 1, 1, 1, 1, 0, 0, owned, None)

    ones = [DispatchStatistics((worker("w"),), 2, 3, ()), DispatchStatistics((worker("w"), worker("v")), 5, 7, ())]
    merged = merged_statistics(ones)
    assert [one.name for one in merged.workers] == ["1/w", "2/w", "2/v"]
    assert (merged.steps, merged.round_trips) == (7, 10)
