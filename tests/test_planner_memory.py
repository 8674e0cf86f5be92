"""Memory of a stage, measured: its weights and caches are its share, and nothing is kept for other layers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.engine.facts import file_facts, load_of, model_facts
from orchestrator.engine.synth import synth
from orchestrator.models.gguf import GgufFile
from orchestrator.planner.cost import Measures
from orchestrator.planner.inventory import Node
from orchestrator.planner.plan import PROCESS_BYTES, plan_ring

ROOT = Path(__file__).parent.parent
TESTS = Path(__file__).parent

PROBE = """
import json, re, sys
from contextlib import ExitStack
from pathlib import Path
import numpy as np
from orchestrator.engine.stage import StageContext, StageSizes
from orchestrator.engine.context import INVARIANT_ROWS
from orchestrator.ring.layout import LayerRange
from ring_models import one_sequence, tokens_of

small, path, first, last, n_ctx, n_sequences, crossing = *sys.argv[1:3], *map(int, sys.argv[3:])

def pss():
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(re.search(r"^Pss: +(\\d+)", text, re.M)[1])

def run(stage, crossing):
    rng = np.random.default_rng(3)
    for batch in one_sequence(tokens_of(stage.n_vocab, 8 * INVARIANT_ROWS), 0).split(INVARIANT_ROWS):
        row = rng.standard_normal(crossing // 4 * len(batch), np.float32) if stage.layers.first else np.empty(0)
        stage.decode(batch, row.tobytes())

# The engine itself, its threads and its libraries: with a model that is nearly nothing.
with StageContext.open(small, LayerRange(0, 1), StageSizes(512)) as stage:
    run(stage, 0)
    engine = pss()
with StageContext.open(path, LayerRange(first, last), StageSizes(n_ctx, n_sequences, n_ubatch=8)) as stage:
    run(stage, crossing)
    print(json.dumps({"engine": engine, "used": pss() - engine}))
"""


def measure(
    small: Path, path: Path, span: tuple[int, int], n_ctx: int, n_sequences: int, crossing: int
) -> dict[str, int]:
    """Run a stage in a process of its own until all of its weights were used; return bytes."""
    arguments = [str(small), str(path), *map(str, (*span, n_ctx, n_sequences, crossing))]
    ended = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{TESTS}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, int] = json.loads(ended.stdout)
    return found


SHAPES = {
    "step35": {"n_embd": 256, "n_head": 8, "n_head_kv": 4, "n_ff": 2048, "n_ff_exp": 512, "n_expert": 16, "top_k": 8},
    "qwen35moe": {"n_embd": 256, "n_head": 8, "n_head_kv": 4, "n_ff_exp": 512, "n_ff_shexp": 512, "top_k": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(SHAPES))
def test_a_stage_takes_its_share_and_no_more(
    synthetic: Callable[[str], Path], tmp_path: Path, architecture: str
) -> None:
    """The stages of a plan, one after the other: weights and caches within 10 % of what the plan says."""
    path = tmp_path / "model.gguf"
    synth(architecture, path, **SHAPES[architecture])
    n_ctx, n_sequences = 32_768, 2
    load = load_of(n_ctx, n_sequences)
    facts = model_facts(path, load)
    plan = plan_ring(facts, [Node("here", "h")], load, n_stages=3)
    for stage in plan.stages:
        (span,) = stage.ranges
        found = measure(synthetic(architecture), path, span, n_ctx, n_sequences, facts.crossing(span[0]))
        assert found["used"] == pytest.approx(stage.weights + stage.cache, rel=0.10)
        assert found["engine"] < PROCESS_BYTES
        assert found["engine"] + found["used"] <= stage.memory, "the plan counts everything"


@pytest.mark.slow
def test_machines_of_three_two_and_one_parts_keep_within_their_memory(
    synthetic: Callable[[str], Path], tmp_path: Path
) -> None:
    """Memory that only just suffices, unevenly spread: what each stage really takes is below its machine's."""
    path = tmp_path / "model.gguf"
    synth("step35", path, **SHAPES["step35"])
    load = load_of(16_384)
    facts = model_facts(path, load)
    measures = Measures.of(facts, load, PROCESS_BYTES)
    need = measures.weights_of(0, 8) + measures.cache_of(0, 8) + 3 * measures.overhead_of(((0, 1),))
    nodes = [Node(f"n{parts}", f"h{parts}", int(1.25 * need * parts / 6)) for parts in (3, 2, 1)]
    plan = plan_ring(facts, nodes, load)
    assert len({stage.node.name for stage in plan.stages}) >= 2
    for stage in plan.stages:
        (span,) = stage.ranges
        found = measure(synthetic("step35"), path, span, 16_384, 1, facts.crossing(span[0]))
        assert found["engine"] + found["used"] <= (stage.node.memory or 0)


UNFIT = """
import resource, sys
from pathlib import Path
from orchestrator.engine.stage import StageContext, StageSizes
from orchestrator.errors import LinkcppError
from orchestrator.ring.layout import LayerRange

path, n_ctx, limit, spans = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
StageContext.open(path, LayerRange(0, 1), StageSizes(256, n_ubatch=4)).close()  # the libraries, before the limit
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + limit,) * 2)
for span in spans:
    try:
        StageContext.open(path, LayerRange(*map(int, span.split(":"))), StageSizes(n_ctx, n_ubatch=4)).close()
    except (LinkcppError, MemoryError) as error:
        print(f"{span} refused: {error}")
    else:
        print(f"{span} fits")
"""


@pytest.mark.parametrize("architecture", ["step35", "qwen35moe"])
def test_a_context_fits_that_would_not_if_all_layers_had_caches(tmp_path: Path, architecture: str) -> None:
    """The cache of one attention layer fits under a limit, those of all do not: two in the hybrid, eight else."""
    path = tmp_path / "model.gguf"
    synth(architecture, path, n_head=16, n_head_kv=16, head=64)
    load = load_of(1 << 17)
    measures = Measures.of(file_facts(GgufFile.open(path), load), load, 0)
    whole, part = measures.cache_of(0, 8), measures.cache_of(7, 8)
    limit = part + 350_000_000  # the rest is for what the engine needs besides
    assert limit < whole
    arguments = [str(path), str(load.cells), str(limit), "7:8", "0:8", "7:8"]
    ended = subprocess.run(
        [sys.executable, "-c", UNFIT, *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0] == "7:8 fits"
    assert lines[1].startswith("0:8 refused: ")
    assert lines[2] == "7:8 fits", "a refused context leaves nothing behind"
