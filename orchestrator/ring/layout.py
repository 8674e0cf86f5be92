"""How the layers of a model lie over stages: ranges, whether they tile the model, where it may be cut. PURE."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.errors import InputError


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """The layers ``first`` to ``last`` - 1."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"layer {self.first}" if self.last == self.first + 1 else f"layers {self.first}-{self.last - 1}"

    def __len__(self) -> int:
        return self.last - self.first


class Cut(Protocol):
    """What a survey of the model's graph says of the cut in front of a layer."""

    @property
    def layer(self) -> int:
        """The layer behind the cut."""

    @property
    def reason(self) -> str | None:
        """Why it is not possible, None if it is."""


def parse_layers(text: str) -> LayerRange:
    """Read ``12:24``, the layers 12 to 23; raise :class:`InputError` on anything else."""
    first, colon, last = text.strip().partition(":")
    if not (colon and first.isascii() and first.isdecimal() and last.isascii() and last.isdecimal()):
        raise InputError(f"{text!r} is no range of layers", hint="write it like 12:24 for the layers 12 to 23")
    found = LayerRange(int(first), int(last))
    if found.last <= found.first:
        raise InputError(f"the range {text!r} holds no layer", hint="write it like 12:24 for the layers 12 to 23")
    return found


def merge(ranges: Iterable[LayerRange], n_layer: int) -> tuple[LayerRange, ...]:
    """Sort the ranges of one process and join those that touch.

    Raises:
        InputError: two of them overlap, or the model has no such layers.
    """
    merged: list[LayerRange] = []
    for found in sorted(ranges):
        if found.last > n_layer:
            raise InputError(
                f"{found}: the model has {n_layer} layers",
                hint=f"its last range ends with :{n_layer}, and holds the output too",
            )
        if merged and found.first < merged[-1].last:
            raise InputError(f"{merged[-1]} and {found} overlap")
        if merged and found.first == merged[-1].last:
            merged[-1] = LayerRange(merged[-1].first, found.last)
        else:
            merged.append(found)
    if not merged:
        raise InputError("a stage needs at least one range of layers", hint="--layers 12:24")
    return tuple(merged)


def tile(holders: Sequence[tuple[LayerRange, str]], n_layer: int) -> tuple[int, ...]:
    """Return the order in which (range, holder's name) pairs form the whole model, as indices into ``holders``.

    Raises:
        InputError: layers that nobody holds (the output behind the last one among them), that two hold, or that
            the model does not have.
    """
    order = sorted(range(len(holders)), key=lambda index: holders[index][0])
    reached, before = 0, ""
    for index in order:
        found, name = holders[index]
        if found.last > n_layer:
            raise InputError(f"{name} holds {found}, but the model has {n_layer} layers")
        if found.first < reached:
            both = LayerRange(found.first, min(found.last, reached))
            raise InputError(
                f"{both} would be computed twice, by {before} and by {name}",
                hint="name one of them; a spare is for when the other is lost",
            )
        if found.first > reached:
            raise InputError(f"no stage holds {LayerRange(reached, found.first)}", hint=_wanted(reached, found.first))
        reached, before = found.last, name
    if reached < n_layer:
        missing = LayerRange(reached, n_layer)
        raise InputError(f"no stage holds {missing} and the output layer", hint=_wanted(reached, n_layer))
    return tuple(order)


def _wanted(first: int, last: int) -> str:
    return f"start one with: linkcpp stage MODEL --layers {first}:{last}"


def check_cuts(ranges: Iterable[LayerRange], cuts: Sequence[Cut], n_layer: int) -> None:
    """Raise :class:`InputError` with the nearest legal cuts where a range begins or ends at an illegal one."""
    illegal = {cut.layer: cut.reason for cut in cuts if cut.reason is not None}
    legal = [0, *sorted(cut.layer for cut in cuts if cut.reason is None), n_layer]
    for found in ranges:
        for place in (found.first, found.last):
            if place not in illegal:
                continue
            near = sorted({max(layer for layer in legal if layer < place), min(n for n in legal if n > place)})
            names = " and ".join(str(layer) for layer in near if 0 < layer < n_layer)
            hint = f"the nearest cuts that it can take: {names}" if names else "it must stay in one process"
            raise InputError(f"this model cannot be cut in front of layer {place}: {illegal[place]}", hint=hint)
