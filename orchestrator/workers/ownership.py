"""Shares of a model's experts as people and command lines write them."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.errors import InputError
from orchestrator.models.gguf import GgufFile
from orchestrator.types import Ownership, format_ranges, parse_ranges


def split_evenly(model: GgufFile, count: int) -> tuple[Ownership, ...]:
    """Cut the experts into ``count`` runs whose lengths differ by one at most, the same in each MoE layer."""
    n_expert = model.n_expert
    if not 1 <= count <= n_expert:
        raise InputError(f"{n_expert} experts cannot be split among {count} workers")
    bounds = [index * n_expert // count for index in range(count + 1)]
    return tuple(
        Ownership.product(model.moe_layers, range(bounds[index], bounds[index + 1])) for index in range(count)
    )


def owned_bytes(model: GgufFile, ownership: Ownership) -> int:
    """Return how many bytes the weights of the owned experts take."""
    return sum(model.bytes_per_expert(layer) * len(ownership.experts[layer]) for layer in ownership.layers)


def describe_ownership(ownership: Ownership) -> list[tuple[str, str]]:
    """Return (layers, experts) as ranges, one pair per distinct set of experts."""
    layers_of: dict[tuple[int, ...], list[int]] = {}
    for layer in ownership.layers:
        layers_of.setdefault(tuple(ownership.experts[layer]), []).append(layer)
    return [(format_ranges(layers), format_ranges(experts)) for experts, layers in layers_of.items()]


def ownership_arguments(ownership: Ownership) -> list[str]:
    """Write any ownership as options of `linkcpp worker`: one ``--own LAYERS:EXPERTS`` per set of experts."""
    return [
        argument for layers, experts in describe_ownership(ownership) for argument in ("--own", f"{layers}:{experts}")
    ]


def parse_ownership(parts: Sequence[str]) -> Ownership:
    """Read ``LAYERS:EXPERTS`` texts; the inverse of :func:`ownership_arguments`. Overlaps add up."""
    experts: dict[int, set[int]] = {}
    for part in parts:
        layers, colon, ids = part.partition(":")
        if not colon:
            raise InputError(f"{part!r} does not say who owns what", hint="write it like 0-29:0-7, layers first")
        wanted = parse_ranges(ids, what="experts")
        for layer in parse_ranges(layers, what="layers"):
            experts.setdefault(layer, set()).update(wanted)
    return Ownership({layer: tuple(sorted(ids)) for layer, ids in sorted(experts.items())})


def choose_ownership(
    model: GgufFile, layers: str | None = None, experts: str | None = None, own: Sequence[str] = ()
) -> Ownership:
    """Turn ``--layers``, ``--experts`` (all that the file holds by default) or ``--own`` into an ownership.

    Raises :class:`InputError` for layers and experts that the model does not have.
    """
    if own and (layers or experts):
        raise InputError("--own says both layers and experts", hint="leave out --layers and --experts")
    if own:
        chosen = parse_ownership(own)
    else:
        held = model.shares
        wanted = parse_ranges(experts, what="--experts") if experts else None
        everything = tuple(range(model.n_expert))  # where the file holds nothing, so that the store says so
        chosen = Ownership(
            {
                layer: wanted or held.get(layer, everything)
                for layer in (parse_ranges(layers, what="--layers") if layers else tuple(held) or model.moe_layers)
            }
        )
    strange = [layer for layer in chosen.layers if layer not in model.moe_layers]
    if strange:
        raise InputError(
            f"{model.path.name} has no experts in layer {format_ranges(strange)}",
            hint=f"its MoE layers are {format_ranges(model.moe_layers)}",
        )
    beyond = {expert for ids in chosen.experts.values() for expert in ids if expert >= model.n_expert}
    if beyond:
        raise InputError(
            f"{model.path.name} has no expert {format_ranges(beyond)}", hint=f"its experts are 0-{model.n_expert - 1}"
        )
    return chosen
