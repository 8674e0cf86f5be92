"""One message of each type of the ring, as docs/protocol.md shows them."""

from __future__ import annotations

import numpy as np

from orchestrator.types import EngineIdentity
from orchestrator.wire.ring_messages import (
    Accepted,
    Assign,
    Assigning,
    Attach,
    Cancel,
    Fault,
    FaultKind,
    Operate,
    Outcome,
    Probe,
    Probed,
    Purpose,
    RingMessage,
    Route,
    StageWelcome,
    Step,
)

RING_EXAMPLES: tuple[RingMessage, ...] = (
    StageWelcome(
        version=0,
        name="s1",
        pid=4711,
        identity=EngineIdentity("7f3a", "AVX2", False),
        model_sha256="5e0f",
        architecture="llama",
        n_threads=2,
        n_layer=30,
        n_vocab=49152,
        n_ctx=4096,
        n_sequences=4,
        n_ubatch=60,
        n_batch=480,
        batch_invariant=True,
        cuttable=True,
        shiftable=True,
        ranges=((12, 24),),
    ),
    Attach(1, Purpose.FEED, 12, "c0ffee"),
    Route(2, 12, "10.0.0.3:9338"),
    Accepted(2),
    Step(
        7,
        12,
        np.array([17, 4], np.int32),
        np.array([5, 6], np.int32),
        np.array([0, 0], np.int32),
        np.array([False, True]),
        (850,),
        np.array([1, 2], np.float32).tobytes(),
    ),
    Outcome(7, 30, (850, 900), np.array([[0.5, -1]], np.float32)),
    Operate(8, 12, 1, (0, 6, -1, 0), True, ""),
    Fault(7, 24, FaultKind.FAILED, 12, 24, "no room"),
    Cancel((7, 9)),
    Probe(3),
    Probed(3, ((12, 9, 8),)),
    Assign(4, ((12, 24), (30, 40))),
    Assigning(4, 250),
)
