"""A whole star inside one process: the same workers, protocol and dispatcher, over in-memory links.

For series of many small models, where starting worker processes would take longer than all the rest, and for
settings that the commands do not offer (repacked weights on both sides).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.engine.experts import ExpertStore
from orchestrator.engine.identity import engine_identity
from orchestrator.engine.model import Model
from orchestrator.engine.session import Session
from orchestrator.models.gguf import GgufFile
from orchestrator.onboarding.star import Star
from orchestrator.transport.memory import MemoryListener
from orchestrator.types import Contract, Ownership
from orchestrator.workers.expert import ExpertService, WorkerProfile
from orchestrator.workers.server import ServerLimits, WorkerServer

_LIMITS: Final = ServerLimits(linger=0.0)  # nobody else is connected who should hear a refusal first


@contextmanager
def open_memory_star(
    path: Path,
    shares: Sequence[Ownership],
    *,
    contract: Contract,
    n_ctx: int,
    n_ubatch: int,
    repack: bool,
    batch_invariant: bool,
) -> Iterator[Star]:
    """Open a backbone over one worker per share, all in this process; raises what the parts raise."""
    file = GgufFile.open(path)
    with ExitStack() as stack:
        connectors = []
        for index, share in enumerate(shares):
            store = stack.enter_context(ExpertStore(path, share, repack=repack))
            profile = WorkerProfile(f"memory-{index + 1}", os.getpid(), file.header_sha256, 1)
            listener = MemoryListener()
            server = WorkerServer(ExpertService(store, profile), listener, limits=_LIMITS)
            stack.callback(server.drain)
            server.start()
            connectors.append(listener.connector())
        identity = engine_identity(repack)
        dispatcher = Dispatcher(connectors, contract, identity, model_sha256=file.header_sha256, client="gate")
        stack.enter_context(dispatcher)
        dispatcher.connect()
        model = stack.enter_context(Model.open(path, without_experts=True, repack=repack))
        session = Session(
            model,
            n_ctx=n_ctx,
            n_ubatch=n_ubatch,
            exchange=dispatcher,
            contract=contract,
            batch_invariant=batch_invariant,
        )
        stack.enter_context(session)
        dispatcher.describe(session.descriptors)
        yield Star(model, session, dispatcher)
