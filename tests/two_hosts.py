"""A ring over two hosts of the WAN lab: starts both machines' processes, then decodes on the first one.

    wanlab.py --host A:0 --host B:5 -- python two_hosts.py run A B DEPLOYMENT RESULT

The result is JSON: a hash of the logits of every step, and the times between which each phase ran.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from orchestrator.ring.steps import TokenBatch, one_sequence
from orchestrator.types import FloatArray

ROOT = Path(__file__).parent.parent
LENGTHS = (1, 5, 17, 33, 40, 63, 64, 100)
"""Tokens of the eight prompts."""

ALONE, TOGETHER, FLYING = 16, 8, 4
"""Steps of one sequence; steps of all eight in one batch; rounds of eight steps in flight."""


class Target(Protocol):
    """A ring, or the unsplit engine."""

    def decode(self, batch: TokenBatch) -> FloatArray: ...


def prompt(sequence: int, n_vocab: int) -> list[int]:
    rng = np.random.default_rng(100 + sequence)
    return [int(token) for token in rng.integers(0, n_vocab, LENGTHS[sequence])]


def together(tokens: Sequence[int], positions: Sequence[int]) -> TokenBatch:
    """One token of each sequence."""
    n = len(tokens)
    return TokenBatch(
        np.asarray(tokens, np.int32), np.asarray(positions, np.int32), np.arange(n, dtype=np.int32), np.ones(n, bool)
    )


def phases(target: Target, n_vocab: int, fly: bool) -> Iterator[tuple[str, list[FloatArray]]]:
    """Greedy decoding in four phases; yields the rows of logits of each, in an order that does not depend on how."""
    count = len(LENGTHS)
    rows, next_token, position = [], [0] * count, list(LENGTHS)
    for sequence in range(count):
        row = target.decode(one_sequence(prompt(sequence, n_vocab), 0, sequence=sequence))
        rows.append(row)
        next_token[sequence] = int(row[-1].argmax())
    yield "prefill", rows
    rows = []
    for _ in range(ALONE):
        rows.append(target.decode(one_sequence([next_token[0]], position[0])))
        next_token[0], position[0] = int(rows[-1][0].argmax()), position[0] + 1
    yield "alone", rows
    rows = []
    for _ in range(TOGETHER):
        row = target.decode(together(next_token, position))
        rows.append(row)
        next_token, position = [int(one.argmax()) for one in row], [place + 1 for place in position]
    yield "together", rows
    rows = []
    for _ in range(FLYING):
        batches = [one_sequence([next_token[s]], position[s], sequence=s) for s in range(count)]
        if fly:
            for batch in batches:
                target.submit(batch)
            ends = [target.collect() for _ in batches]
            found = [end.logits for end in ends]
        else:
            found = [target.decode(batch) for batch in batches]
        rows += found
        next_token, position = [int(one[0].argmax()) for one in found], [place + 1 for place in position]
    yield "flying", rows


def digest(rows: Sequence[FloatArray]) -> list[str]:
    return [hashlib.sha256(row.tobytes()).hexdigest() for row in rows]


def drive(deployment: Path, result: Path) -> None:
    """Decode over the ring of a deployment."""
    from orchestrator.gateway.ring_backbone import open_ring
    from orchestrator.models.deployment import read_deployment

    found = read_deployment(deployment)
    with open_ring(Path(found.model), found) as backbone:
        ring = backbone.ring
        said, begin = {}, time.perf_counter()
        for name, rows in phases(ring, ring.facts.n_vocab, fly=True):
            end = time.perf_counter()
            said[name] = {"rows": digest(rows), "begin": begin, "end": end}
            time.sleep(0.2)  # so that no packet is between two phases
            begin = time.perf_counter()
        said["stages"] = [[s.layers.first, s.layers.last, s.address] for s in ring.statistics()]
    result.write_text(json.dumps(said))


def run(hosts: Sequence[str], deployment: Path, result: Path) -> int:
    """Start what belongs to each host inside its namespace, and decode on the first one."""
    from orchestrator.models.deployment import read_deployment

    busy = {stage.node for stage in read_deployment(deployment).stages}
    with contextlib.ExitStack() as stack:
        deployed = []
        for host in (host for host in hosts if host in busy):
            command = ["ip", "netns", "exec", host, sys.executable, "-m", "orchestrator", "deploy", str(deployment)]
            command += ["--node", host, "--threads", "1", "--json", "--until-stdin-ends"]
            process = stack.enter_context(
                subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.terminate)
            deployed.append(process)
        for process in deployed:
            if not process.stdout.readline():
                return 1
        command = ["ip", "netns", "exec", hosts[0], sys.executable, __file__, "drive", str(deployment), str(result)]
        return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    if sys.argv[1] == "drive":
        drive(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        sys.exit(run(sys.argv[2:4], Path(sys.argv[4]), Path(sys.argv[5])))
