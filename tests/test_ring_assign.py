"""Stages that are told to hold other layers: what they say to it, and rings that go on over them."""

from __future__ import annotations

import threading
import time

import pytest

from orchestrator.errors import LinkcppError, StageLostError, StageRefusedError
from orchestrator.models.gguf_writer import Progress
from orchestrator.ring.client import Ring
from orchestrator.ring.layout import LayerRange
from orchestrator.ring.link import StageLink
from orchestrator.ring.steps import one_sequence
from orchestrator.types import RefusalCode
from orchestrator.wire.messages import SUPPORTED, Hello, Refuse, VersionRange
from orchestrator.wire.ring_messages import Assign, Attach, Purpose, Route
from tests.ring_net import IDENTITY, Net, net, replace
from tests.test_ring_client import start, story, twin_pipeline

__all__ = ["net"]

FIRST, SECOND = LayerRange(0, 6), LayerRange(6, 12)


def broken(net: Net, **options: object) -> Ring:
    """Open a ring of s0 and s1 and lose s1."""
    ring = net.ring(start(net, [[(0, 6)], [(6, 12)]]), **options)
    ring.open()
    ring.decode(one_sequence([1, 2], 0))
    net.kill("s1")
    ring.submit(one_sequence([3], 2))
    assert isinstance(ring.collect().error, StageLostError)
    return ring


def test_a_process_without_layers_takes_those_of_a_lost_stage(net: Net) -> None:
    reserve = net.start("reserve")
    ring = broken(net)
    assert ring.look(reserve) == ()
    ring.assign(reserve, [SECOND])
    assert ring.look(reserve) == (SECOND,)
    replace(ring, {"s1": reserve})
    assert list(story(ring)) == list(story(twin_pipeline(())))
    ring.close()


def test_a_stage_takes_the_layers_of_another_beside_its_own(net: Net) -> None:
    ring = broken(net)
    ring.assign("s0", [FIRST, SECOND])
    ring.rearrange({"s0": [FIRST, SECOND]})
    assert list(story(ring)) == list(story(twin_pipeline(())))
    assert [hop.address for hop in ring.statistics()] == ["s0", "s0"]
    ring.close()


def test_layers_beside_those_in_use_are_left_alone(net: Net) -> None:
    """The lost stage comes back, while the one that stood in still holds its layers."""
    ring = broken(net)
    ring.assign("s0", [FIRST, SECOND])
    net.start("s1", (6, 12))
    ring.rearrange({"s0": [FIRST], "s1": [SECOND]})
    assert list(story(ring)) == list(story(twin_pipeline(())))
    assert net.stages["s0"][1].decoded == 0
    ring.close()


def test_no_room_is_said_in_words_and_changes_nothing(net: Net) -> None:
    ring = broken(net)
    net.layers["s0"].room = 11
    with pytest.raises(StageRefusedError, match=r"s0 .*refused \(no_room\): room for 11 layers"):
        ring.assign("s0", [FIRST, SECOND])
    assert ring.look("s0") == (FIRST,)
    assert ring.broken is not None
    ring.close()


def test_layers_that_cannot_be_loaded_are_said_in_words_and_the_stage_lives(net: Net) -> None:
    ring = broken(net)

    def fail(_progress: Progress) -> None:
        raise LinkcppError("the file is damaged")

    net.layers["s0"].loading = fail
    with pytest.raises(StageRefusedError, match="the file is damaged"):
        ring.assign("s0", [FIRST, SECOND])
    assert ring.look("s0") == (FIRST,)
    ring.close()


def test_a_stage_that_loads_for_long_says_so_and_one_that_is_silent_is_lost(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.workers.stage._SIGN_SECONDS", 0.05)
    ring = broken(net, timeout=0.5)
    go_on = threading.Event()

    def slowly(progress: Progress) -> None:
        for tick in range(15):
            time.sleep(0.06)
            progress(tick, 15)

    def silently(_progress: Progress) -> None:
        go_on.wait(5)

    net.layers["s0"].loading = slowly
    ring.assign("s0", [FIRST, SECOND])
    net.layers["s0"].loading = silently
    with pytest.raises(StageLostError, match="did not answer in time"):
        ring.assign("s0", [FIRST])
    assert ring.lost_address == "s0"
    go_on.set()
    ring.close()


def test_layers_do_not_move_under_a_ring(net: Net) -> None:
    net.start("s0", (0, 12))
    with net.ring(["s0"]) as ring:
        reply = net.servers["s0"].service.order(Assign(9, ((0, 12),)))
        assert isinstance(reply, Refuse)
        assert reply.code is RefusalCode.BAD_REQUEST
        assert ring.decode(one_sequence([1], 0)) is not None


def test_a_stage_of_the_version_before_is_not_asked(net: Net) -> None:
    net.start("old")
    net.servers["old"].versions = VersionRange(0, 0)
    ring = broken(net)
    with pytest.raises(StageRefusedError, match="a version in which layers cannot be assigned"):
        ring.assign("old", [SECOND])
    ring.close()


def test_a_process_without_layers_is_no_stage_of_a_ring_yet(net: Net) -> None:
    link = StageLink(net.connector(net.start("reserve")))
    deadline = time.monotonic() + 5
    welcome = link.open(Hello(SUPPORTED, IDENTITY, client="test"), 1.0, deadline)
    assert welcome.ranges == ()
    link.request(Attach(1, Purpose.CONTROL, 0, "ring"), deadline)
    with pytest.raises(StageRefusedError, match="no range of this stage begins at layer 0"):
        link.request(Route(2, 0, ""), deadline)
    link.close("")
