"""Who computes which rows: owners per layer, and the rows of one call grouped by owner. No I/O, no time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from orchestrator.errors import OwnershipError
from orchestrator.types import FloatArray, IntArray, LayerDescriptor, Ownership, format_ranges
from orchestrator.wire.codec import push_tail, push_tail_of_one

CallKey: TypeAlias = tuple[int, int]
"""Layer and call."""

IndexArray: TypeAlias = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Route:
    """Who computes each expert of one layer and call."""

    owners: IndexArray  # [n_expert], the worker's place in the dispatcher's list
    owner_list: tuple[int, ...]  # the same, for the path of one row
    sole: int | None  # the worker that computes them all, if one does
    n_embd: int


class Share(NamedTuple):
    """One worker's part of a call (a named tuple: one is made per worker, layer and token).

    ``rows`` are the token numbers, ascending, None for all; ``places`` the pairs' places in [n_tokens * top_k],
    in the order in which the worker answers them, None for all in order.
    """

    worker: int
    rows: IndexArray | None
    places: IndexArray | list[int] | None
    n_rows: int
    n_pairs: int
    tail: bytes


def assign_owners(descriptors: Sequence[LayerDescriptor], holdings: Sequence[Ownership]) -> dict[CallKey, Route]:
    """Choose one owner for every expert of every call.

    Where several workers hold an expert, the one with the fewest experts of that layer takes it, the first of
    the list among equals, so that overlapping workers share a layer's work.

    Raises:
        OwnershipError: experts that nobody holds, named by layer.
    """
    held = [{layer: frozenset(ids) for layer, ids in holding.experts.items()} for holding in holdings]
    routes: dict[CallKey, Route] = {}
    gaps: dict[tuple[int, ...], set[int]] = {}
    empty: frozenset[int] = frozenset()
    for descriptor in descriptors:
        holders = [
            [worker for worker, layers in enumerate(held) if expert in layers.get(descriptor.layer, empty)]
            for expert in range(descriptor.n_expert)
        ]
        missing = tuple([expert for expert, workers in enumerate(holders) if not workers])
        if missing:
            gaps.setdefault(missing, set()).add(descriptor.layer)
            continue
        owners = _spread(holders, len(holdings))
        routes[descriptor.layer, descriptor.call] = Route(
            owners=np.array(owners, dtype=np.intp),
            owner_list=tuple(owners),
            sole=owners[0] if len(set(owners)) == 1 else None,
            n_embd=descriptor.n_embd,
        )
    if gaps:
        raise _gap_error(gaps)
    return routes


def _spread(holders: Sequence[Sequence[int]], n_workers: int) -> list[int]:
    load = [0] * n_workers
    owners = [-1] * len(holders)
    # Experts with one holder first: they are not a choice, and they are the load that the others balance.
    for expert in sorted(range(len(holders)), key=lambda expert: len(holders[expert])):
        owner = min(holders[expert], key=lambda worker: load[worker])
        owners[expert] = owner
        load[owner] += 1
    return owners


def _gap_error(gaps: Mapping[tuple[int, ...], set[int]]) -> OwnershipError:
    parts = [f"experts {format_ranges(ids)} of layers {format_ranges(layers)}" for ids, layers in gaps.items()]
    more = f" and {len(parts) - 4} more" if len(parts) > 4 else ""
    ids, layers = next(iter(gaps.items()))
    return OwnershipError(
        "no worker owns " + ", ".join(parts[:4]) + more,
        hint=f"start another worker with --experts {format_ranges(ids)} --layers {format_ranges(layers)}",
    )


def route_rows(route: Route, experts: IntArray, weights: FloatArray) -> list[Share]:
    """Group the pairs of a call by the worker that owns the expert, workers in the list's order.

    Every row goes once to each worker that owns one of its experts, with its pairs in router order.

    Args:
        route: of this layer and call.
        experts: [n_tokens, top_k], each below the layer's number of experts.
        weights: [n_tokens, top_k].

    Raises:
        OwnershipError: an expert id that the layer does not have.
    """
    n_tokens, top_k = experts.shape
    try:
        if n_tokens == 1:
            return _route_one(route, experts, weights)
        if route.sole is not None:
            counts = np.full(n_tokens, top_k, dtype=np.uint16)
            tail = push_tail(weights.ravel(), counts, experts.ravel())
            return [Share(route.sole, None, None, n_tokens, n_tokens * top_k, tail)]
        return _route_many(route, experts, weights)
    except IndexError as error:
        raise OwnershipError(f"the router chose an expert over {len(route.owner_list) - 1}, the last one") from error


def _route_one(route: Route, experts: IntArray, weights: FloatArray) -> list[Share]:
    ids, values = experts[0].tolist(), weights[0].tolist()
    if route.sole is not None:
        return [Share(route.sole, None, None, 1, len(ids), push_tail_of_one(values, ids))]
    groups: dict[int, tuple[list[int], list[int], list[float]]] = {}
    owner_list = route.owner_list
    for slot, expert in enumerate(ids):
        owner = owner_list[expert]
        group = groups.get(owner)
        if group is None:
            group = groups[owner] = ([], [], [])
        group[0].append(slot)
        group[1].append(expert)
        group[2].append(values[slot])
    return [
        Share(owner, None, places, 1, len(places), push_tail_of_one(group_values, group_ids))
        for owner, (places, group_ids, group_values) in sorted(groups.items())
    ]


def _route_many(route: Route, experts: IntArray, weights: FloatArray) -> list[Share]:
    n_tokens, top_k = experts.shape
    owners = route.owners[experts.ravel()]
    order = np.argsort(owners, kind="stable")  # stable: within a worker the pairs stay in router order
    owners, tokens = owners[order], order // top_k
    ids, values = experts.ravel()[order], weights.ravel()[order]
    is_first = np.empty(len(order), dtype=np.bool_)  # of its row on its worker
    is_first[0] = True
    np.not_equal(tokens[1:], tokens[:-1], out=is_first[1:])
    is_first[1:] |= owners[1:] != owners[:-1]
    row_at = np.flatnonzero(is_first)
    counts = np.diff(row_at, append=len(order))
    changes = np.flatnonzero(owners[1:] != owners[:-1]) + 1
    bounds = [0, *changes.tolist(), len(order)]
    row_bounds = [*np.searchsorted(row_at, bounds[:-1]).tolist(), len(row_at)]
    shares = []
    for index in range(len(bounds) - 1):
        pairs = slice(bounds[index], bounds[index + 1])
        rows = slice(row_bounds[index], row_bounds[index + 1])
        n_rows = rows.stop - rows.start
        shares.append(
            Share(
                worker=int(owners[pairs.start]),
                rows=None if n_rows == n_tokens else tokens[row_at[rows]],
                places=order[pairs],
                n_rows=n_rows,
                n_pairs=pairs.stop - pairs.start,
                tail=push_tail(values[pairs], counts[rows], ids[pairs]),
            )
        )
    return shares
