"""The fleet behind one gateway at one moment, and its JSON form.

The JSON carries ``version``. A reader ignores fields that it does not know and fills in fields that are absent,
so fields can be added without a new version; the version grows when a field changes its meaning, and a reader
then says so instead of showing something untrue.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeGuard

from orchestrator.errors import InputError, ProtocolError
from orchestrator.types import format_ranges, parse_ranges

SNAPSHOT_VERSION: Final = 1


class WorkerState(enum.Enum):
    """Whether a worker can be used; the value is the word that people read."""

    UP = "up"
    LOST = "lost"
    CONNECTING = "connecting"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One expert worker as the gateway sees it.

    ``layers`` and ``experts`` are the distinct ids owned, ``pairs`` the number of (layer, expert) pairs.
    ``bytes_in`` came from the worker, ``bytes_out`` went to it. ``rtt_ms`` is None until it was measured.
    """

    name: str
    address: str
    state: WorkerState
    pid: int | None = None
    rtt_ms: float | None = None
    layers: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    pairs: int = 0
    rows: int = 0
    rows_per_second: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    errors: int = 0
    late_frames: int = 0
    problem: str = ""

    @property
    def uniform(self) -> bool:
        """Tell whether each owned layer has the same experts, so that both lists together say it all."""
        return len(self.layers) * len(self.experts) == self.pairs

    def to_json(self) -> dict[str, object]:
        """Return the JSON object; ids are written as ranges such as ``0-7,12``."""
        return {
            "name": self.name,
            "address": self.address,
            "state": self.state.value,
            "pid": self.pid,
            "rtt_ms": self.rtt_ms,
            "layers": format_ranges(self.layers),
            "experts": format_ranges(self.experts),
            "pairs": self.pairs,
            "rows": self.rows,
            "rows_per_second": self.rows_per_second,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "errors": self.errors,
            "late_frames": self.late_frames,
            "problem": self.problem,
        }

    @classmethod
    def from_json(cls, value: object) -> WorkerSnapshot:
        """Read what :meth:`to_json` wrote; raise :class:`ProtocolError` on a field of the wrong type."""
        fields = _Fields(value, "worker")
        word = fields.text("state", WorkerState.UNKNOWN.value)
        known = {state.value for state in WorkerState}
        return cls(
            name=fields.text("name"),
            address=fields.text("address"),
            state=WorkerState(word) if word in known else WorkerState.UNKNOWN,
            pid=fields.optional_count("pid"),
            rtt_ms=fields.optional_number("rtt_ms"),
            layers=fields.ranges("layers"),
            experts=fields.ranges("experts"),
            pairs=fields.count("pairs"),
            rows=fields.count("rows"),
            rows_per_second=fields.number("rows_per_second"),
            bytes_in=fields.count("bytes_in"),
            bytes_out=fields.count("bytes_out"),
            errors=fields.count("errors"),
            late_frames=fields.count("late_frames"),
            problem=fields.text("problem"),
        )


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """The request that is being answered; ``phase`` is ``queued``, ``prefill`` or ``decode``."""

    id: str
    phase: str
    prompt_tokens: int = 0
    generated_tokens: int = 0
    tokens_per_second: float = 0.0

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        return {
            "id": self.id,
            "phase": self.phase,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "tokens_per_second": self.tokens_per_second,
        }

    @classmethod
    def from_json(cls, value: object) -> RequestSnapshot:
        """Read what :meth:`to_json` wrote; raise :class:`ProtocolError` on a field of the wrong type."""
        fields = _Fields(value, "request")
        return cls(
            id=fields.text("id"),
            phase=fields.text("phase"),
            prompt_tokens=fields.count("prompt_tokens"),
            generated_tokens=fields.count("generated_tokens"),
            tokens_per_second=fields.number("tokens_per_second"),
        )


@dataclass(frozen=True, slots=True)
class SlotSnapshot:
    """One of the places for requests: how many tokens its cache holds, and the request that it answers."""

    index: int
    held_tokens: int = 0
    request: RequestSnapshot | None = None

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        return {
            "index": self.index,
            "held_tokens": self.held_tokens,
            "request": None if self.request is None else self.request.to_json(),
        }

    @classmethod
    def from_json(cls, value: object) -> SlotSnapshot:
        """Read what :meth:`to_json` wrote; raise :class:`ProtocolError` on a field of the wrong type."""
        fields = _Fields(value, "slot")
        request = fields.raw("request")
        return cls(
            index=fields.count("index"),
            held_tokens=fields.count("held_tokens"),
            request=None if request is None else RequestSnapshot.from_json(request),
        )


@dataclass(frozen=True, slots=True)
class SpeculationSnapshot:
    """Who guesses tokens, in words, and how that went since the start.

    ``drafted`` tokens were guessed and computed, ``accepted`` of them came true; an answer got ``tokens_per_step``
    tokens of a step that it was in.
    """

    words: str
    drafted: int = 0
    accepted: int = 0
    tokens_per_step: float = 0.0

    def to_json(self) -> dict[str, object]:
        """Return the JSON object."""
        return {
            "words": self.words,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens_per_step": self.tokens_per_step,
        }

    @classmethod
    def from_json(cls, value: object) -> SpeculationSnapshot:
        """Read what :meth:`to_json` wrote; raise :class:`ProtocolError` on a field of the wrong type."""
        fields = _Fields(value, "speculation")
        return cls(
            words=fields.text("words"),
            drafted=fields.count("drafted"),
            accepted=fields.count("accepted"),
            tokens_per_step=fields.number("tokens_per_step"),
        )


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """One gateway, its workers and what they do; ``request`` is the one that has been answered for the longest.

    ``taken_at`` is Unix time in seconds. ``tokens_per_second_history`` holds one value per second, oldest first;
    ``tokens_per_second`` is the newest of them.
    """

    model: str
    contract: str
    engine: str
    taken_at: float
    uptime_seconds: float
    workers: tuple[WorkerSnapshot, ...] = ()
    request: RequestSnapshot | None = None
    tokens_per_second_history: tuple[float, ...] = ()
    tokens_generated: int = 0
    requests_finished: int = 0
    requests_failed: int = 0
    round_trips: int = 0
    slots: tuple[SlotSnapshot, ...] = ()
    requests_waiting: int = 0
    speculation: SpeculationSnapshot | None = None

    @property
    def tokens_per_second(self) -> float:
        """The newest value of the history; 0 where there is none."""
        return self.tokens_per_second_history[-1] if self.tokens_per_second_history else 0.0

    @property
    def ready(self) -> bool:
        """Tell whether each worker is up, so that a request can be answered now."""
        return all(worker.state is WorkerState.UP for worker in self.workers)

    def to_json(self) -> dict[str, object]:
        """Return the JSON object that ``GET /status`` serves."""
        return {
            "version": SNAPSHOT_VERSION,
            "model": self.model,
            "contract": self.contract,
            "engine": self.engine,
            "taken_at": self.taken_at,
            "uptime_seconds": self.uptime_seconds,
            "ready": self.ready,
            "workers": [worker.to_json() for worker in self.workers],
            "request": None if self.request is None else self.request.to_json(),
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_history": list(self.tokens_per_second_history),
            "tokens_generated": self.tokens_generated,
            "requests_finished": self.requests_finished,
            "requests_failed": self.requests_failed,
            "round_trips": self.round_trips,
            "slots": [slot.to_json() for slot in self.slots],
            "requests_waiting": self.requests_waiting,
            "speculation": None if self.speculation is None else self.speculation.to_json(),
        }

    @classmethod
    def from_json(cls, value: object) -> FleetSnapshot:
        """Read what :meth:`to_json` wrote, as an object or as JSON text.

        Raise :class:`ProtocolError` on text that is no JSON, on another version and on a field of the wrong type.
        """
        if isinstance(value, str | bytes):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ProtocolError(
                    "the status is not JSON", hint="is the address that of a linkcpp gateway?"
                ) from error
        fields = _Fields(value, "status")
        version = fields.optional_count("version")
        if version != SNAPSHOT_VERSION:
            said = "no version" if version is None else f"version {version}"
            raise ProtocolError(
                f"the status carries {said}, this linkcpp reads version {SNAPSHOT_VERSION}",
                hint="use the same linkcpp version here and at the gateway",
            )
        request = fields.raw("request")
        speculation = fields.raw("speculation")
        return cls(
            model=fields.text("model"),
            contract=fields.text("contract"),
            engine=fields.text("engine"),
            taken_at=fields.number("taken_at"),
            uptime_seconds=fields.number("uptime_seconds"),
            workers=tuple(WorkerSnapshot.from_json(item) for item in fields.items("workers")),
            request=None if request is None else RequestSnapshot.from_json(request),
            tokens_per_second_history=fields.numbers("tokens_per_second_history"),
            tokens_generated=fields.count("tokens_generated"),
            requests_finished=fields.count("requests_finished"),
            requests_failed=fields.count("requests_failed"),
            round_trips=fields.count("round_trips"),
            slots=tuple(SlotSnapshot.from_json(item) for item in fields.items("slots")),
            requests_waiting=fields.count("requests_waiting"),
            speculation=None if speculation is None else SpeculationSnapshot.from_json(speculation),
        )


def _is_finite(value: object) -> TypeGuard[int | float]:
    """Tell whether a JSON value is a number that fits a float; JSON integers can be of any length."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


class _Fields:
    """Typed access to one JSON object that came from outside."""

    def __init__(self, value: object, what: str) -> None:
        if not isinstance(value, Mapping):
            raise ProtocolError(f"the {what} is not a JSON object", hint="is the address that of a linkcpp gateway?")
        self._values: Mapping[str, object] = value
        self._what = what

    def raw(self, name: str) -> object:
        return self._values.get(name)

    def text(self, name: str, default: str = "") -> str:
        value = self._values.get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "text")
        return value

    def optional_number(self, name: str) -> float | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not _is_finite(value):
            raise self._wrong(name, "a finite number")
        return float(value)

    def number(self, name: str) -> float:
        return self.optional_number(name) or 0.0

    def optional_count(self, name: str) -> int | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(name, "a count")
        return value

    def count(self, name: str) -> int:
        return self.optional_count(name) or 0

    def items(self, name: str) -> list[object]:
        value = self._values.get(name, [])
        if not isinstance(value, list):
            raise self._wrong(name, "a list")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        values = self.items(name)
        numbers = tuple(float(value) for value in values if _is_finite(value))
        if len(numbers) != len(values):
            raise self._wrong(name, "a list of finite numbers")
        return numbers

    def ranges(self, name: str) -> tuple[int, ...]:
        text = self.text(name)
        try:
            return parse_ranges(text, what=name) if text else ()
        except InputError as error:
            raise self._wrong(name, "a list of ranges") from error

    def _wrong(self, name: str, wanted: str) -> ProtocolError:
        return ProtocolError(f"field {name!r} of the {self._what} is not {wanted}")
