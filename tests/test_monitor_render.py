from __future__ import annotations

import dataclasses
import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from orchestrator.monitor.render import (
    View,
    format_bytes,
    format_count,
    format_duration,
    format_ids,
    render,
    sparkline,
)
from orchestrator.status.snapshot import FleetSnapshot, RequestSnapshot, WorkerSnapshot, WorkerState

URL = "http://127.0.0.1:8080"

WORKERS = (
    WorkerSnapshot(
        name="left",
        address="127.0.0.1:50051",
        state=WorkerState.UP,
        pid=4711,
        rtt_ms=0.21,
        layers=tuple(range(30)),
        experts=tuple(range(8)),
        pairs=240,
        rows=12_345,
        rows_per_second=1234.5,
        bytes_in=5 * 1024**2,
        bytes_out=700 * 1024,
    ),
    WorkerSnapshot(
        name="right",
        address="[2001:db8:1:2:3:4:5:6]:50052",
        state=WorkerState.LOST,
        pid=4712,
        rtt_ms=80.4,
        layers=tuple(range(30)),
        experts=tuple(range(8, 16)),
        pairs=240,
        errors=3,
        late_frames=2,
        problem="connection closed by the worker at layer 7",
    ),
)
SNAPSHOT = FleetSnapshot(
    model="smollm2-moe.gguf",
    contract="exact",
    engine="0.3.36+linkcpp.1",
    taken_at=1000.0,
    uptime_seconds=3725.0,
    workers=WORKERS,
    request=RequestSnapshot("chatcmpl-17", "decode", prompt_tokens=33, generated_tokens=12, tokens_per_second=21.5),
    tokens_per_second_history=(0.0, 10.0, 18.0, 21.5),
    tokens_generated=1500,
    requests_finished=9,
    requests_failed=1,
    round_trips=45_000,
)


def draw(view: View, width: int, *, colour: bool = False, **options: bool) -> list[str]:
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        height=50,
        force_terminal=colour,
        color_system="standard" if colour else None,
        legacy_windows=False,
    )
    console.print(render(view, width, **options))
    return out.getvalue().split("\n")


@pytest.mark.parametrize("width", [40, 60, 80, 100, 110, 120, 160, 200])
@pytest.mark.parametrize("silent_for", [None, 4.0])
def test_no_line_is_wider_than_the_terminal(width: int, silent_for: float | None) -> None:
    view = View(URL, SNAPSHOT, silent_for, "connection refused" if silent_for else "")
    assert max(cell_len(line) for line in draw(view, width)) <= width


@pytest.mark.parametrize("width", [80, 160])
def test_shows_each_worker_with_all_its_figures(width: int) -> None:
    lines = draw(View(URL, SNAPSHOT), width)
    (left,) = [line for line in lines if line.startswith("127.0.0.1:50051")]
    if width == 80:
        assert left.split() == ["127.0.0.1:50051", "up", "0.21", "0-29", "0-7", "1.2k", "5.0", "M", "700", "K", "0"]
    else:
        assert left.split() == (
            [
                "127.0.0.1:50051",
                "left",
                "4711",
                "up",
                "0.21",
                "0-29",
                "0-7",
                "12.3k",
                "1.2k",
                "5.0",
                "M",
                "700",
                "K",
                "0",
                "0",
            ]
        )
    text = "\n".join(lines)
    assert "lost" in text
    assert "8-15" in text
    assert "80.4" in text
    assert "connection closed by the worker at layer 7" in text
    assert "1 of 2 workers up" in text
    for title in ("worker", "state", "RTT ms", "layers", "experts", "rows/s", "in", "out", "err"):
        assert title in lines[3], title


@pytest.mark.parametrize("width", [80, 160])
def test_shows_the_running_request_and_the_speed(width: int) -> None:
    text = "\n".join(draw(View(URL, SNAPSHOT), width))
    assert "smollm2-moe.gguf  contract exact" in text
    assert "up 1 h 2 min" in text
    assert "decode  33 prompt + 12 generated tokens  21.5 tokens/s  chatcmpl-17" in text
    assert "tokens/s    21.5 ▁▄▇█ peak 21.5" in text
    assert "1.5k tokens  9 requests finished, 1 failed" in text


def test_a_long_request_id_is_cut_and_takes_no_second_line() -> None:
    request = dataclasses.replace(SNAPSHOT.request, id="cmpl-" + 40 * "a")
    lines = draw(View(URL, dataclasses.replace(SNAPSHOT, request=request)), 80)
    (line,) = [line for line in lines if line.startswith("request")]
    assert "21.5 tokens/s  cmpl-aaa" in line
    assert lines[lines.index(line) + 1].startswith("tokens/s")


def test_an_idle_gateway_without_workers_is_drawn() -> None:
    idle = dataclasses.replace(SNAPSHOT, workers=(), request=None, tokens_per_second_history=())
    text = "\n".join(draw(View(URL, idle), 80))
    assert "no workers" in text
    assert "request   idle" in text
    assert "tokens/s     0.0" in text


def test_a_long_ipv6_address_keeps_its_port_at_80_columns() -> None:
    text = "".join(line.split(" ")[0] for line in draw(View(URL, SNAPSHOT), 80))
    assert "[2001:db8:1:2:3:4:5:6]:50052" in text


def test_a_state_has_a_colour_besides_its_word() -> None:
    text = "\n".join(draw(View(URL, SNAPSHOT), 80, colour=True))
    assert "\x1b[1;32mup" in text
    assert "\x1b[1;31mlost" in text


def test_an_unreachable_gateway_is_said_clearly_and_old_figures_are_marked() -> None:
    text = "\n".join(draw(View(URL, SNAPSHOT, 125.0, "connection refused"), 80))
    assert "GATEWAY UNREACHABLE for 2 min 5 s  connection refused" in text
    assert "below is the last that was known" in text
    assert "was up" in text
    assert "workers up" not in text
    first = "\n".join(draw(View(URL, None, 0.0, "connection refused"), 80))
    assert "GATEWAY UNREACHABLE for 0 s" in first
    assert URL in first
    assert "last that was known" not in first


def test_uneven_ownership_shows_pairs_instead_of_a_span_that_claims_too_much() -> None:
    uneven = dataclasses.replace(WORKERS[0], pairs=17)
    for width in (80, 160):
        text = "\n".join(draw(View(URL, dataclasses.replace(SNAPSHOT, workers=(uneven,))), width))
        assert "17 pairs" in text


def test_text_from_the_network_cannot_steer_the_terminal() -> None:
    evil = dataclasses.replace(WORKERS[1], name="\x1b[2J\n[bold]x", problem="\x1b]0;owned\x07", address="h\r:1")
    view = View(URL, dataclasses.replace(SNAPSHOT, workers=(evil,), model="\x1b[31mm"))
    text = "\n".join(draw(view, 160))
    assert "\x1b" not in text
    assert "\r" not in text
    assert "\x07" not in text
    assert "[bold]x" in text  # markup is text, not markup


def test_ascii_only_needs_no_unicode() -> None:
    for width in (80, 160):
        "\n".join(draw(View(URL, SNAPSHOT), width, ascii_only=True)).encode("ascii")


def test_sparkline_scales_from_zero_and_keeps_small_values_visible() -> None:
    assert sparkline([0, 1, 1000], 10) == "▁▂█"
    assert sparkline([5, 5], 10) == "██"
    assert sparkline([0, 0], 10) == "▁▁"
    assert sparkline(range(100), 3) == "███"
    assert sparkline([], 3) == ""
    assert sparkline([1.0], 0) == ""


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 K"),
        (1536, "1.5 K"),
        (140 * 1024**3, "140 G"),
        (1000 * 1024**2, "1.0 G"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (7, "7"), (12.46, "12.5"), (999.4, "999"), (999.9, "1.0k"), (34_500_000, "34.5M")]
)
def test_format_count(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize("power", range(19))
def test_figures_fit_their_column(power: int) -> None:
    for digit in (1, 9.994, 9.996):
        value = digit * 10**power
        assert len(format_bytes(int(value))) <= 6
        assert power > 16 or len(format_count(value)) <= 6


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.9, "59 s"), (125, "2 min 5 s"), (7200, "2 h 0 min"), (190_000, "2 d 4 h")]
)
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_format_ids() -> None:
    assert format_ids((), 10) == "-"
    assert format_ids((0, 1, 2, 3), 10) == "0-3"
    assert format_ids(range(0, 256, 2), 10) == "128 of 0-254"
