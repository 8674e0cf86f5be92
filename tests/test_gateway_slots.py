"""How many slots a gateway offers."""

from __future__ import annotations

import pytest
from serve_process import get, post, running

from orchestrator.errors import InputError
from orchestrator.gateway.backend import Invariance, known_invariance
from orchestrator.gateway.slots import count_slots, sequence_bytes
from orchestrator.models.gguf import GgufFile

GIB = 1 << 30


@pytest.mark.parametrize(
    ("wanted", "each", "available", "expected"),
    [
        (None, GIB, 100 * GIB, 4),
        (None, GIB, 5 * GIB, 2),  # half of the memory
        (None, 9 * GIB, 2 * GIB, 1),  # never none
        (16, GIB, 17 * GIB, 16),
        (1, GIB, GIB, 1),
    ],
)
def test_slots_are_bounded_by_memory(wanted, each, available, expected):
    assert count_slots(wanted, each, available, 63) == expected


def test_more_slots_than_fit_are_refused_with_both_sizes():
    with pytest.raises(InputError, match=r"8 slots take 16.0 GiB, and 7.0 GiB are free"):
        count_slots(8, 2 * GIB, 7 * GIB, 63)
    with pytest.raises(InputError, match="1 to 63"):
        count_slots(64, 1, GIB, 63)


def test_the_caches_of_a_slot_are_those_of_its_context(synthetic):
    # llama: keys and values of all layers in F16; the engine rounds 300 tokens up to 512
    file = GgufFile.open(synthetic("llama"))
    heads, length = file.number("attention.head_count_kv", 0), file.number("attention.key_length", 0)
    length = length or file.number("embedding_length", 0) // file.number("attention.head_count", 1)
    assert sequence_bytes(file, 300) == 512 * file.n_layer * heads * length * 2 * 2


@pytest.mark.parametrize(
    ("architecture", "one", "several", "expected"),
    [
        ("llama", None, None, Invariance.SEVERAL),
        ("llama", True, None, Invariance.SEVERAL),
        ("llama", True, False, Invariance.ONE),
        ("llama", False, None, Invariance.NONE),
        ("deepseek4", None, None, Invariance.NONE),
        ("deepseek4", True, True, Invariance.SEVERAL),  # the gate knows better: it tried this model
    ],
)
def test_what_the_gate_found_decides_before_what_is_known(architecture, one, several, expected):
    assert known_invariance(architecture, one=one, several=several) is expected


def test_serve_offers_the_slots_that_were_asked_for_and_shows_them(synthetic):
    with running(synthetic("llama"), "--unverified", "--slots", "3", "--ctx", "256", "--threads", "1") as server:
        assert [slot["index"] for slot in server.ready["slots"]] == [0, 1, 2]
        status, _ = post(server.url, {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True})
        assert status == 200
        _, shown = get(server.url, "/status")
        assert sorted(slot["held_tokens"] for slot in shown["slots"]) == [0, 0, 6]
        assert [slot["request"] for slot in shown["slots"]] == [None] * 3
        assert server.stop() == 0
