"""What the two sides of a greeting decide, as functions of values: versions, engine, model."""

from __future__ import annotations

from orchestrator.types import Contract, EngineIdentity
from orchestrator.wire.messages import SUPPORTED, Hello, VersionRange, Welcome


def agree_version(hello: Hello, versions: VersionRange = SUPPORTED) -> int | str:
    """Choose the highest minor version that both speak, or say in words why there is none."""
    theirs = hello.versions
    chosen = min(theirs.highest, versions.highest)
    if chosen < max(theirs.lowest, versions.lowest):
        return f"the backbone speaks protocol version {theirs}, this worker speaks {versions}"
    return chosen


def find_difference(
    welcome: Welcome, identity: EngineIdentity, contract: Contract, model_sha256: str | None
) -> str | None:
    """Say in words why a worker cannot serve under this contract, or give None where it can.

    The model must be the same under every contract. Build, instruction set and repacking must be equal for
    ``exact`` only: they change the order in which floats are added. An unknown model (None) is not compared.
    """
    if model_sha256 is not None and welcome.model_sha256 != model_sha256:
        theirs = welcome.model_sha256[:12] or "none"
        return f"it holds experts of another model file ({theirs}, the backbone has {model_sha256[:12]})"
    if contract is not Contract.EXACT:
        return None
    own, peer = identity, welcome.identity
    differences = []
    if peer.build != own.build:
        differences.append(f"engine build {peer.build} (the backbone has {own.build})")
    if peer.isa != own.isa:
        differences.append(f"instruction set {peer.isa!r} (the backbone uses {own.isa!r})")
    if peer.repack != own.repack:
        differences.append(f"weight repacking {_switch(peer.repack)} (the backbone has it {_switch(own.repack)})")
    if not differences:
        return None
    return "its results would not be byte-identical: it has " + ", ".join(differences)


def _switch(value: bool) -> str:
    return "on" if value else "off"
