"""What Prometheus reads: counters, gauges and histograms of one serving process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_ROWS: Final = (1, 2, 4, 8, 16, 32, 63, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Reading:
    """One value that is read when somebody asks: a total that only grows, or a state (``is_total`` False).

    ``labels`` are (name, value) pairs, the same names for all readings of one ``name``.
    """

    name: str
    description: str
    value: float
    is_total: bool = True
    labels: tuple[tuple[str, str], ...] = ()


class Metrics:
    """The metrics of a process: those noted here, and readings taken at every look (:meth:`read_from`)."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._readings = _Readings()
        self._registry.register(self._readings)
        self._requests = Counter(
            "linkcpp_http_requests",
            "Requests by route and status.",
            ("route", "status"),
            registry=self._registry,
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From a request to its first text.", _SECONDS
        )
        self._between_tokens = self._histogram("inter_token_seconds", "Between the pieces of an answer.", _SECONDS)
        self._queued = self._histogram("queue_seconds", "From a request to its admission to a slot.", _SECONDS)
        self._request = self._histogram("request_seconds", "From a request to its end.", _SECONDS)
        self._prompt = self._histogram("prompt_tokens", "Tokens of prompts.", _TOKENS)
        self._completion = self._histogram("completion_tokens", "Tokens of answers.", _TOKENS)
        self._rows = self._histogram("step_rows", "Tokens in one step of the engine.", _ROWS)
        self._sequences = self._histogram("step_sequences", "Requests in one step of the engine.", _ROWS)

    def _histogram(self, name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"linkcpp_{name}", description, buckets=buckets, registry=self._registry)

    def read_from(self, read: Callable[[], Iterable[Reading]]) -> None:
        """Ask for further values at every look from now on."""
        self._readings.read = read

    def note_http(self, route: str, status: int) -> None:
        """Count an answered HTTP request."""
        self._requests.labels(route, str(status)).inc()

    def note_first_token(self, seconds: float) -> None:
        """Note how long an answer's first text took."""
        self._first_token.observe(seconds)

    def note_next_token(self, seconds: float) -> None:
        """Note how long a piece of an answer came after the one before."""
        self._between_tokens.observe(seconds)

    def note_answer(self, *, queued: float, total: float, prompt_tokens: int, completion_tokens: int) -> None:
        """Note a finished answer; times in seconds."""
        self._queued.observe(queued)
        self._request.observe(total)
        self._prompt.observe(prompt_tokens)
        self._completion.observe(completion_tokens)

    def note_step(self, rows: int, sequences: int) -> None:
        """Note a step of the engine."""
        self._rows.observe(rows)
        self._sequences.observe(sequences)

    def text(self) -> bytes:
        """Return all of it in Prometheus' text format."""
        return generate_latest(self._registry)


class _Readings(Collector):
    """Turns readings into metrics."""

    def __init__(self) -> None:
        self.read: Callable[[], Iterable[Reading]] = tuple

    def describe(self) -> Iterator[Metric]:
        """Say nothing in advance: what there is depends on the fleet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield one metric for each name."""
        found: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for reading in self.read():
            family = found.get(reading.name)
            if family is None:
                kind = CounterMetricFamily if reading.is_total else GaugeMetricFamily
                names = [name for name, _ in reading.labels]
                family = found[reading.name] = kind(f"linkcpp_{reading.name}", reading.description, labels=names)
            family.add_metric([value for _, value in reading.labels], reading.value)
        yield from found.values()
