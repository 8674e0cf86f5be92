"""Who computes: what must be equal on two machines for equal bytes."""

from __future__ import annotations

import functools
import re

from bindings.build import installed
from bindings.errors import BindingsError
from bindings.library import load, system_info
from orchestrator.errors import EngineMissingError
from orchestrator.types import EngineIdentity

_UNRECORDED = "unrecorded"  # an engine that was not built by `linkcpp engine build`


@functools.cache
def engine_identity(repack: bool = False) -> EngineIdentity:
    """Return build, instruction set and repacking of this process; raise :class:`EngineMissingError`."""
    try:
        load()
        features = system_info()
        engine = installed()
    except BindingsError as error:
        raise EngineMissingError(str(error), hint=error.hint) from error
    record = {} if engine is None or engine.record is None else engine.record
    # The source hash covers pin, patches and shim; base flags are part of the source of truth that makes wheels.
    build = str(record.get("source", _UNRECORDED))[:16]
    isa = " ".join(re.findall(r"(\w+) = 1", features))
    return EngineIdentity(build=build, isa=isa, repack=repack)
