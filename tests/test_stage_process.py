"""Stage workers as processes: the command, byte-identity with the unsplit engine, kill -9 at several points."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from orchestrator.engine.identity import engine_identity
from orchestrator.engine.stage import StageContext, StageSizes
from orchestrator.errors import StageLostError, StageTimeoutError
from orchestrator.models.gguf import GgufFile
from orchestrator.models.slices import Selection, write_slice
from orchestrator.ring.client import Ring
from orchestrator.ring.layout import LayerRange
from orchestrator.ring.replay import Journal
from orchestrator.ring.steps import one_sequence
from orchestrator.types import FloatArray
from orchestrator.workers.local import LocalWorkers
from orchestrator.workers.local_stages import LocalStages
from tests.ring_models import batches, decode_all, same, tokens_of, whole
from tests.ring_net import replace

ROOT = Path(__file__).parent.parent
SIZES = StageSizes(n_ctx=256)
OPTIONS = ("--ctx", "256")
STEPS = 8


def open_ring(
    path: Path, addresses: Sequence[str], local: Sequence[StageContext] = (), timeout: float = 60.0
) -> Ring:
    sha256 = GgufFile.open(path).header_sha256
    return Ring(addresses, local=local, identity=engine_identity(), model_sha256=sha256, timeout=timeout)


def oracle(path: Path, parts: Sequence[int] = (1, 33, 130)) -> tuple[list[int], list[FloatArray]]:
    with whole(path, SIZES) as context:
        tokens = tokens_of(context.model.n_vocab, sum(parts) + STEPS)
        return tokens, decode_all(context, list(batches(tokens, parts, context.n_batch)))


@pytest.mark.parametrize("architecture", ["llama", "qwen35moe"])
def test_two_processes_give_the_bytes_of_one(synthetic: Callable[[str], Path], architecture: str) -> None:
    path = synthetic(architecture)
    tokens, expected = oracle(path)
    n_layer = GgufFile.open(path).n_layer
    middle = n_layer // 2
    with (
        LocalStages(path, [[LayerRange(0, middle)], [LayerRange(middle, n_layer)]], options=OPTIONS) as stages,
        open_ring(path, stages.addresses) as ring,
    ):
        got = [ring.decode(batch) for batch in batches(tokens, (1, 33, 130), ring.facts.n_batch)]
        assert same(got, expected)


def test_the_gateway_holds_both_ends_and_a_process_two_ranges(synthetic: Callable[[str], Path]) -> None:
    path = synthetic("step35")
    tokens, expected = oracle(path)
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(StageContext.open(path, LayerRange(*r), SIZES)) for r in ((0, 1), (7, 8))]
        stages = stack.enter_context(
            LocalStages(path, [[LayerRange(1, 3), LayerRange(5, 7)], [LayerRange(3, 5)]], options=OPTIONS, unix=True)
        )
        ring = stack.enter_context(open_ring(path, stages.addresses, ends))
        got = [ring.decode(batch) for batch in batches(tokens, (1, 33, 130), ring.facts.n_batch)]
        assert same(got, expected)
        assert [found.layers.first for found in ring.statistics()] == [0, 1, 3, 5, 7]
        assert len({found.pid for found in ring.statistics()}) == 3


def test_a_stage_runs_its_experts_as_a_star_from_files_that_hold_no_others(
    synthetic: Callable[[str], Path], tmp_path: Path
) -> None:
    path = synthetic("qwen2moe")
    tokens, expected = oracle(path)
    sliced = [tmp_path / "first.gguf", tmp_path / "second.gguf"]
    file = GgufFile.open(path)
    for target, layers in zip(sliced, (range(2), range(2, 4)), strict=True):
        write_slice(file, target, Selection(layers=tuple(layers), without_experts=target == sliced[0]))
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(LocalWorkers(path, 2))
        star = [text for address in workers.addresses for text in ("--worker", address)]
        first = stack.enter_context(LocalStages(sliced[0], [[LayerRange(0, 2)]], options=[*OPTIONS, *star]))
        second = stack.enter_context(LocalStages(sliced[1], [[LayerRange(2, 4)]], options=OPTIONS))
        ring = stack.enter_context(open_ring(path, [*first.addresses, *second.addresses]))
        got = [ring.decode(batch) for batch in batches(tokens, (1, 33, 130), ring.facts.n_batch)]
        assert same(got, expected)
        workers.kill(0)
        ring.submit(one_sequence([1], ring.length(0)))
        end = ring.collect()
        assert "layers 0-1" in str(end.error)
        assert "worker local-1" in str(end.error)
        assert ring.broken is None
        workers.restart(0)
        again = ring.decode(one_sequence(tokens[-1:], end.resume[0]))
        assert np.isfinite(again).all()


# --- loss ------------------------------------------------------------------------------------------------------


class Text:
    """Greedy decoding that survives losses: what a gateway does, at its smallest."""

    def __init__(self, ring: Ring, recover: Callable[[Ring], None], *, batch_invariant: bool = True) -> None:
        self.ring = ring
        self.recover = recover
        self.journal = Journal(1, batch_invariant=batch_invariant)
        self.logits: list[bytes] = []
        self.recoveries: list[float] = []

    def feed(self, tokens: Sequence[int], strike: Callable[[], None] = lambda: None) -> int:
        """Decode tokens and return the next one; ``strike`` happens while they are on their way."""
        while True:
            try:
                batch = one_sequence(tokens, self.ring.length(0))
                self.ring.submit(batch)
                strike()
                strike = lambda: None  # noqa: E731
                end = self.ring.collect()
                if end.error is not None:
                    raise end.error
                break
            except StageLostError:
                begin = time.monotonic()
                self.recover(self.ring)
                self.ring.replay(self.journal.plan(self.ring.facts.n_batch))
                self.recoveries.append(time.monotonic() - begin)
        self.journal.record(batch)
        self.logits.append(end.logits.tobytes())
        return int(end.logits[0].argmax())

    def write(self, prompt: Sequence[int], count: int, strikes: dict[int, Callable[[], None]]) -> None:
        token = self.feed(prompt, strikes.get(0, lambda: None))
        for index in range(1, count + 1):
            token = self.feed([token], strikes.get(index, lambda: None))


def ranges(*bounds: int) -> list[LayerRange]:
    return [LayerRange(first, last) for first, last in itertools.pairwise(bounds)]


class Site:
    """Stages and a spare for each, as processes; a killed one is started again and becomes the spare."""

    def __init__(
        self,
        path: Path,
        stack: contextlib.ExitStack,
        layers: Sequence[LayerRange],
        options: Sequence[str] = OPTIONS,
    ) -> None:
        self.groups = [
            stack.enter_context(LocalStages(path, [[found] for found in layers], options=options)) for _ in range(2)
        ]
        self.used = [0] * len(layers)

    @property
    def addresses(self) -> list[str]:
        return [self.groups[group].addresses[index] for index, group in enumerate(self.used)]

    def kill(self, index: int) -> None:
        self.groups[self.used[index]].kill(index)

    def stop(self, index: int) -> None:
        os.kill(self.groups[self.used[index]].pids[index], signal.SIGSTOP)

    def recover(self, ring: Ring) -> None:
        changes: dict[str, str] = {}
        gone: list[tuple[int, int]] = []
        while ring.broken is not None:  # more than one may have been killed
            lost = ring.lost_address
            assert lost is not None
            assert lost not in changes
            index = self.addresses.index(lost)
            gone.append((self.used[index], index))
            self.used[index] = 1 - self.used[index]
            changes[lost] = self.addresses[index]
            with contextlib.suppress(StageLostError):
                replace(ring, changes)
        for group, index in gone:
            self.groups[group].kill(index)
            self.groups[group].restart(index)


def undisturbed(path: Path, prompt: Sequence[int], count: int, sizes: StageSizes = SIZES) -> list[bytes]:
    with whole(path, sizes) as context:
        rows = [context.decode(one_sequence(prompt, 0)).logits]
        for _ in range(count):
            rows.append(context.decode(one_sequence([int(rows[-1][0].argmax())], context.length(0))).logits)
    return [row.tobytes() for row in rows]


@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen35moe", marks=pytest.mark.slow)])
def test_killed_stages_are_replaced_and_the_text_is_the_same(
    synthetic: Callable[[str], Path], architecture: str
) -> None:
    path = synthetic(architecture)
    layers = ranges(0, 3, 5, 8) if architecture == "qwen35moe" else ranges(0, 2, 3, 4)
    with contextlib.ExitStack() as stack:
        site = Site(path, stack, layers)
        ring = stack.enter_context(open_ring(path, site.addresses))
        prompt = tokens_of(ring.facts.n_vocab, 70)
        text = Text(ring, site.recover)

        def kill_two() -> None:
            site.kill(2)
            site.kill(0)

        text.write(prompt, 12, {0: lambda: site.kill(1), 4: lambda: site.kill(0), 9: kill_two})
        assert len(text.recoveries) == 3
    assert text.logits == undisturbed(path, prompt, 12)


def test_without_batch_invariance_the_steps_are_repeated_as_they_were(synthetic: Callable[[str], Path]) -> None:
    path = synthetic("llama")
    sizes = StageSizes(n_ctx=256, n_ubatch=512, batch_invariant=False)
    with contextlib.ExitStack() as stack:
        site = Site(path, stack, ranges(0, 2, 3, 4), [*OPTIONS, "--no-batch-invariant"])
        ring = stack.enter_context(open_ring(path, site.addresses))
        prompt = tokens_of(ring.facts.n_vocab, 150)
        text = Text(ring, site.recover, batch_invariant=False)
        text.write(prompt, 8, {5: lambda: site.kill(1)})
        assert len(text.recoveries) == 1
    assert text.logits == undisturbed(path, prompt, 8, sizes)


def test_a_stopped_stage_is_found_by_deadline_and_replaced(synthetic: Callable[[str], Path]) -> None:
    path = synthetic("llama")
    found: list[str] = []
    with contextlib.ExitStack() as stack:
        site = Site(path, stack, ranges(0, 2, 3, 4))
        ring = stack.enter_context(open_ring(path, site.addresses, timeout=1.0))
        prompt = tokens_of(ring.facts.n_vocab, 40)

        def recover(broken: Ring) -> None:
            assert isinstance(broken.broken, StageTimeoutError)
            found.append(str(broken.broken))
            site.recover(broken)

        text = Text(ring, recover)
        text.write(prompt, 6, {3: lambda: site.stop(1)})
    assert len(found) == 1
    assert "layer 2 (stage-2" in found[0]
    assert text.logits == undisturbed(path, prompt, 6)


@pytest.mark.slow
def test_twenty_random_kills_change_no_byte(synthetic: Callable[[str], Path]) -> None:
    path = synthetic("llama")
    rng = np.random.default_rng(5)
    with contextlib.ExitStack() as stack:
        site = Site(path, stack, ranges(0, 2, 3, 4))
        ring = stack.enter_context(open_ring(path, site.addresses))
        prompt = tokens_of(ring.facts.n_vocab, 70)
        text = Text(ring, site.recover)

        def strike() -> None:
            time.sleep(float(rng.uniform(0, 0.003)))
            site.kill(int(rng.integers(3)))

        text.write(prompt, 100, {int(index): strike for index in rng.choice(100, 20, replace=False)})
    assert text.logits == undisturbed(path, prompt, 100)
    print(f"recovered in {np.median(text.recoveries):.2f} s (median of {len(text.recoveries)})")


# --- the command -------------------------------------------------------------------------------------------------


def run(*arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestrator", "stage", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        (["1:9"], "layers 1-8: the model has 4 layers"),
        (["2:2"], "'2:2' holds no layer"),
        (["3:1"], "'3:1' holds no layer"),
        (["2"], "'2' is no range of layers"),
        (["-1:2"], "'-1:2' is no range of layers"),
        (["a:b"], "'a:b' is no range of layers"),
        (["0:2", "1:3"], "layers 0-1 and layers 1-2 overlap"),
        (["4:5"], "layer 4: the model has 4 layers"),
    ],
)
def test_an_impossible_layer_map_is_one_line_and_a_hint(
    synthetic: Callable[[str], Path], layers: list[str], text: str
) -> None:
    result = run(str(synthetic("llama")), *(word for found in layers for word in ("--layers", found)))
    assert result.returncode == 2
    assert text in result.stderr
    assert "Traceback" not in result.stderr


def test_a_process_without_layers_says_so_and_takes_no_size_that_is_none(synthetic: Callable[[str], Path]) -> None:
    result = run(str(synthetic("llama")), "--memory", "much")
    assert result.returncode == 2
    assert "--memory 'much' is no size" in result.stderr
    command = [sys.executable, "-m", "orchestrator", "stage", str(synthetic("llama")), "--threads", "1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(4)]
        process.terminate()
        process.communicate(timeout=20)
    assert process.returncode == 0
    assert lines[1].startswith("holds no layers yet, a spare for any of 4")


def test_an_illegal_cut_is_refused_with_the_nearest_legal_ones(synthetic: Callable[[str], Path]) -> None:
    path = synthetic("nomic-bert-moe")
    result = run(str(path), "--layers", "0:1")
    assert result.returncode == 2
    assert "cannot be cut in front of layer 1: this architecture does not mark the output of layer 0" in result.stderr
    assert "hint: it must stay in one process" in result.stderr


def test_an_open_address_is_warned_of_and_sigterm_ends_in_order(synthetic: Callable[[str], Path]) -> None:
    command = [sys.executable, "-m", "orchestrator", "stage", str(synthetic("llama")), "--layers", "2:4"]
    command += ["--layers", "0:1", "--listen", "0.0.0.0:0", "--json", "--threads", "1", "--name", "one"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        ready = json.loads(process.stdout.readline())
        assert (ready["name"], ready["layers"], ready["layers_in_model"]) == ("one", [[0, 1], [2, 4]], 4)
        process.terminate()
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "neither encrypted nor authenticated" in errors
    assert "layers 2-3: 0 steps" in errors
