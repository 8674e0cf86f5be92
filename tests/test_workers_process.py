"""The worker as a process of its own: how it starts, what it reads, how it ends, and how a backbone lives with it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest

from orchestrator.engine.model import Model
from orchestrator.engine.session import Session
from orchestrator.errors import InputError, ProtocolError, WorkerLostError
from orchestrator.gateway.backbone import open_backbone
from orchestrator.models.gguf import GgufFile
from orchestrator.transport.tcp import TcpConnector
from orchestrator.types import Contract, EngineIdentity, Ownership
from orchestrator.wire.connection import Connection
from orchestrator.wire.messages import SUPPORTED, Goodbye, Hello, Message, Welcome
from orchestrator.wire.state import Role
from orchestrator.workers.inject import Injection
from orchestrator.workers.local import LocalWorkers

ROOT = Path(__file__).resolve().parent.parent
MODULE = (sys.executable, "-m", "orchestrator", "worker")
PATIENCE = 60.0
TOKENS = [5, 17, 3, 250, 9, 41, 7, 7, 100, 2, 64, 11]


@pytest.fixture
def model(synthetic: Callable[[str], Path]) -> Path:
    return synthetic("qwen2moe")


@contextlib.contextmanager
def started(
    *arguments: str | Path,
    command: Sequence[str] = MODULE,
    cwd: Path = ROOT,
    env: dict[str, str] | None = None,
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, object]]]:
    process = subprocess.Popen(
        [*command, *map(str, arguments), "--json"],
        cwd=cwd,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], PATIENCE)[0], "not ready in time"
        line = process.stdout.readline()
        assert line, process.communicate()[1].decode()
        yield process, json.loads(line)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def greet(address: object) -> tuple[Welcome, Callable[[], Message]]:
    """Connect and greet; the function receives the next message."""
    link = TcpConnector(str(address)).connect(PATIENCE)
    connection = Connection(Role.BACKBONE)
    link.send(connection.send(Hello(SUPPORTED, EngineIdentity("x", "y", False), "test")))

    def receive() -> Message:
        deadline = time.monotonic() + PATIENCE
        while (message := connection.next_message()) is None:
            connection.received(link.receive_into(connection.receive_buffer(), deadline))
        return message

    welcome = receive()
    assert isinstance(welcome, Welcome)
    return welcome, receive


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MODULE, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


# --- starting ------------------------------------------------------------------------------------------------


def test_reads_its_own_experts_only_and_says_so(model: Path) -> None:
    file = GgufFile.open(model)
    layers, experts = file.moe_layers[1:3], (0, 2, 3)
    wanted = sum(
        file.expert_range(tensor, expert)[2]
        for layer in layers
        for tensor in file.expert_tensors(layer)
        for expert in experts
    )
    with started(
        model, "--layers", f"{layers[0]}-{layers[1]}", "--experts", "0,2-3", "--name", "left", "--threads", "1"
    ) as (process, ready):
        assert ready["ready"] is True
        assert (ready["pid"], ready["name"], ready["threads"]) == (process.pid, "left", 1)
        assert ready["owned"] == [{"layers": f"{layers[0]}-{layers[1]}", "experts": "0,2-3"}]
        assert ready["bytes_read"] == wanted
        assert wanted < ready["bytes_in_file"] == file.n_bytes
        welcome, _ = greet(ready["address"])
        assert welcome.ownership == Ownership.product(layers, experts)
        assert (welcome.pid, welcome.name, welcome.model_sha256) == (process.pid, "left", file.header_sha256)


def test_reads_no_more_of_the_disk_than_it_says(model: Path) -> None:
    # The kernel's own count of what this process read; the libraries and headers come on top.
    file = GgufFile.open(model)
    with started(model, "--experts", "0", "--threads", "1") as (process, _):
        less = psutil.Process(process.pid).io_counters().read_chars
    with started(model, "--threads", "1") as (process, ready):
        more = psutil.Process(process.pid).io_counters().read_chars
        everything = int(str(ready["bytes_read"]))
    share = everything // file.n_expert
    assert abs((more - less) - (everything - share)) < everything // 50


@pytest.mark.parametrize("entry", ["module", "command"])
def test_runs_with_an_empty_environment_in_a_folder_that_cannot_be_written(model: Path, entry: str) -> None:
    # /proc cannot be written, not even by root, for whom a read-only mode bit means nothing.
    environment: dict[str, str] = {}
    if not is_installed():
        environment["PYTHONPATH"] = str(
            ROOT
        )  # from a clone that is not installed: the one thing it cannot do without
    command: Sequence[str] = MODULE
    if entry == "command":
        script = Path(sys.executable).with_name("linkcpp")
        if not script.exists():
            pytest.skip("the package is not installed here, so there is no linkcpp command")
        command = (str(script), "worker")
    with started(model.resolve(), "--listen", "127.0.0.1:0", command=command, cwd=Path("/proc"), env=environment) as (
        process,
        ready,
    ):
        greet(ready["address"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


def is_installed() -> bool:
    """Whether this Python finds the package by itself, from anywhere."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('orchestrator') is None)"
    return subprocess.run([sys.executable, "-c", code], cwd="/proc", env={}, check=False).returncode == 0


def test_listens_on_ipv6(model: Path) -> None:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(socket.create_server(("::1", 0), family=socket.AF_INET6))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
        _, ready = stack.enter_context(started(model, "--listen", "[::]:0"))
        port = str(ready["address"]).rpartition(":")[2]
        greet(f"[::1]:{port}")
        greet(f"127.0.0.1:{port}")


def test_without_an_ipv4_loopback_the_default_is_ipv6(model: Path) -> None:
    unshare, ip = shutil.which("unshare"), shutil.which("ip")
    if unshare is None or ip is None or os.geteuid() != 0:
        pytest.skip("needs root, unshare and ip to make a machine without IPv4")
    script = f'{ip} link set lo up && {ip} addr del 127.0.0.1/8 dev lo && exec "$@"'
    command = (unshare, "--net", "sh", "-c", script, "sh", *MODULE)
    with started(model, "--experts", "0", command=command) as (_, ready):
        assert str(ready["address"]).startswith("[::1]:")


def test_a_plain_bind_elsewhere_warns_and_loopback_does_not(model: Path) -> None:
    for address, warned in (("0.0.0.0:0", True), ("127.0.0.1:0", False)):
        with started(model, "--experts", "0", "--listen", address) as (process, _):
            process.send_signal(signal.SIGINT)
            errors = process.communicate(timeout=PATIENCE)[1].decode()
            assert ("neither encrypted nor authenticated" in errors) is warned
            assert process.returncode == 0


def test_a_taken_port_is_an_input_error(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run(model, "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert done.returncode == 2
    assert "cannot listen" in done.stderr


def test_unusable_arguments_and_files_end_with_code_2_and_one_line(model: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "no.gguf"
    text = tmp_path / "text.gguf"
    text.write_text("hello, this is no model at all " * 10)
    short = tmp_path / "short.gguf"
    short.write_bytes(model.read_bytes()[: model.stat().st_size // 2])
    cases = [
        ((model, "--layers", "0-99"), "no experts in layer"),
        ((model, "--experts", "0-99"), "has no expert"),
        ((model, "--experts", "a"), "--experts"),
        ((model, "--listen", "nowhere"), "not an address"),
        ((nothing,), "no such file"),
        ((text,), "GGUF"),
        ((short,), "short.gguf"),
    ]
    for arguments, words in cases:
        done = run(*arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert done.stderr.startswith("error: ")
        assert words in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""


# --- ending --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order_with_a_goodbye(model: Path, number: signal.Signals) -> None:
    with started(model, "--experts", "0") as (process, ready):
        _, receive = greet(ready["address"])
        begin = time.monotonic()
        process.send_signal(number)
        assert isinstance(receive(), Goodbye)
        assert process.wait(PATIENCE) == 0
        assert time.monotonic() - begin < 5.0
        with pytest.raises(ProtocolError):
            receive()


def test_it_ends_when_its_parent_is_killed(model: Path) -> None:
    code = (
        "import sys, time\nfrom orchestrator.workers.local import LocalWorkers\n"
        "with LocalWorkers(sys.argv[1], 2) as local:\n    print(*local.pids, flush=True)\n    time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(model)], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pids = [int(text) for text in parent.stdout.readline().split()]
    assert len(pids) == 2
    children = [psutil.Process(pid) for pid in pids]
    parent.kill()
    parent.communicate()
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive


# --- local workers -------------------------------------------------------------------------------------------


def test_local_workers_are_ready_and_gone_afterwards(model: Path) -> None:
    with LocalWorkers(model, 3) as local:
        assert len(set(local.addresses)) == len(set(local.pids)) == 3
        for address, pid, ownership in zip(local.addresses, local.pids, local.ownerships, strict=True):
            welcome, _ = greet(address)
            assert (welcome.pid, welcome.ownership) == (pid, ownership)
        pids = local.pids
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_local_workers_take_any_ownership_and_a_core(model: Path) -> None:
    layers = GgufFile.open(model).moe_layers
    shares = [
        Ownership({layer: (layer % 3, 4) for layer in layers}),
        Ownership({layers[0]: (0, 1, 2)}),
    ]
    core = min(os.sched_getaffinity(0))
    with LocalWorkers(model, split=shares, pin=[core, core]) as local:
        assert local.ownerships == tuple(shares)
        for address, share in zip(local.addresses, shares, strict=True):
            assert greet(address)[0].ownership == share
        for pid in local.pids:
            threads = psutil.Process(pid).threads()
            assert {frozenset(os.sched_getaffinity(thread.id)) for thread in threads} == {frozenset({core})}


def test_a_killed_worker_comes_back_on_its_port(model: Path) -> None:
    with LocalWorkers(model, 2) as local:
        before, addresses = local.pids, local.addresses
        local.kill(1)
        assert not psutil.pid_exists(before[1])
        local.restart(1)
        assert local.addresses == addresses
        assert local.pids[0] == before[0]
        assert local.pids[1] != before[1]
        assert greet(addresses[1])[0].pid == local.pids[1]


def test_a_worker_that_cannot_start_says_why(model: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(WorkerLostError, match="has no experts in layer 99") as caught,
        LocalWorkers(model, split=[Ownership({99: (0,)})]),
    ):
        pass
    assert "local-1" in str(caught.value)
    assert "exit code 2" in str(caught.value)
    with pytest.raises(WorkerLostError, match="not ready within"), LocalWorkers(model, 1, timeout=0.05):
        pass
    with pytest.raises(InputError):
        LocalWorkers(model, 99)
    with pytest.raises(InputError):
        LocalWorkers(tmp_path / "none.gguf", 1)


# --- with a backbone -----------------------------------------------------------------------------------------


def oracle(path: Path) -> list[bytes]:
    with Model.open(path) as model, Session(model, n_ctx=64) as session:
        return decode(session)


def decode(session: Session) -> list[bytes]:
    session.clear()
    prefill = session.decode(TOKENS[:8], all_logits=True)
    return [prefill.tobytes(), *(session.decode([token]).tobytes() for token in TOKENS[8:])]


def test_logits_over_real_processes_are_the_bytes_of_one_process(model: Path) -> None:
    with (
        LocalWorkers(model, 3) as local,
        open_backbone(model, local.addresses, contract=Contract.EXACT, n_ctx=64) as backbone,
    ):
        assert decode(backbone.session) == oracle(model)
        assert backbone.dispatcher is not None
        assert all(worker.rows > 0 for worker in backbone.dispatcher.statistics().workers)


def test_a_prompt_of_one_token_reaches_the_workers_of_both_halves(model: Path) -> None:
    with LocalWorkers(model, 2) as local, open_backbone(model, local.addresses, n_ctx=64) as backbone:
        backbone.session.decode([5])
        assert backbone.dispatcher is not None
        rows = [worker.rows for worker in backbone.dispatcher.statistics().workers]
    assert min(rows) > 0, rows


def test_a_long_prompt_over_three_workers_gives_the_first_token_of_one_process(
    synthetic: Callable[[str], Path],
) -> None:
    path = synthetic("llama")
    tokens = np.random.default_rng(4).integers(0, 200, 300).tolist()
    with Model.open(path) as alone, Session(alone, n_ctx=512) as session:
        expected = session.decode(tokens, all_logits=True)
    with LocalWorkers(path, 3) as local, open_backbone(path, local.addresses, n_ctx=512) as backbone:
        logits = backbone.session.decode(tokens, all_logits=True)
    assert int(logits[-1].argmax()) == int(expected[-1].argmax())
    assert logits.tobytes() == expected.tobytes()


def test_a_killed_worker_fails_the_step_by_name_and_the_next_one_after_its_return_is_right(model: Path) -> None:
    expected = oracle(model)
    with LocalWorkers(model, 2) as local, open_backbone(model, local.addresses, n_ctx=64) as backbone:
        assert decode(backbone.session) == expected
        local.kill(1)
        with pytest.raises(WorkerLostError) as caught:
            decode(backbone.session)
        assert local.addresses[1] in str(caught.value) or "local-2" in str(caught.value)
        local.restart(1)
        assert decode(backbone.session) == expected


def test_two_backbones_share_workers_and_get_the_same_bytes(model: Path) -> None:
    with (
        LocalWorkers(model, 2) as local,
        open_backbone(model, local.addresses, n_ctx=64) as first,
        open_backbone(model, local.addresses, n_ctx=64) as second,
    ):
        expected = decode(first.session)
        assert decode(second.session) == expected
        assert decode(first.session) == expected


@pytest.mark.parametrize("kind", list(Injection))
def test_an_injected_fault_changes_the_logits_and_is_in_the_ready_line(model: Path, kind: Injection) -> None:
    with started(model, "--experts", "0", "--inject", kind.value) as (_, ready):
        assert ready["inject"] == kind.value
    with LocalWorkers(model, 2, inject=kind) as local, open_backbone(model, local.addresses, n_ctx=64) as backbone:
        wrong = decode(backbone.session)
    right = oracle(model)
    assert wrong != right
    arrays = [np.frombuffer(data, np.float32) for data in (wrong[0], right[0])]
    assert np.isfinite(arrays[0]).all()
