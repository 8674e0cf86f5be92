from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.gateway.detokenize import Detokenizer, StopScanner, TextDecoder

TEXT = "Grüße, 世界 😀 — fin"


def cut(data: bytes, points) -> list[bytes]:
    edges = sorted({0, len(data), *(point % (len(data) + 1) for point in points)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(st.lists(st.integers(0, 1000), max_size=30))
def test_text_is_the_same_however_its_bytes_are_cut(points):
    decoder = TextDecoder()
    parts = [decoder.feed(piece) for piece in cut(TEXT.encode(), points)]
    assert "".join(parts) == TEXT


def test_single_bytes_never_give_replacement_characters():
    decoder = TextDecoder()
    assert not any("\ufffd" in decoder.feed(bytes([byte])) for byte in TEXT.encode())


def test_an_answer_cut_inside_a_character_ends_before_it():
    text = Detokenizer()
    released = text.feed("a😀".encode()[:3], 1)
    assert (released.text, text.finish().text) == ("a", "")


def test_bytes_that_are_no_text_become_replacement_characters():
    decoder = TextDecoder()
    assert decoder.feed(b"a\xffb") == "a\ufffdb"


def reference_stop(text: str, stops) -> str:
    """The definition: read character by character, the first stop string that is complete ends the text."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


@settings(max_examples=400)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    points=st.lists(st.integers(0, 100), max_size=30),
)
def test_stop_strings_equal_their_definition_however_the_text_is_cut(text, stops, points):
    scanner = StopScanner(stops)
    parts = [scanner.feed(piece.decode()) for piece in cut(text.encode(), points)]
    if not scanner.matched:
        parts.append(scanner.flush())
    assert "".join(parts) == reference_stop(text, stops)


def test_only_a_possible_start_is_held_back():
    scanner = StopScanner(["STOP"])
    assert scanner.feed("one ST") == "one "
    assert scanner.feed("AR ") == "STAR "
    assert scanner.feed("two STO") == "two "
    assert scanner.feed("P three") == ""
    assert scanner.matched
    assert scanner.feed("more") == ""


def test_items_come_with_the_first_character_of_their_token():
    text: Detokenizer[str] = Detokenizer(["STOP"])
    assert text.feed(b"Hi ", "Hi ").items == ("Hi ",)
    assert text.feed("ä".encode()[:1], "half").items == ()
    released = text.feed("ä".encode()[1:], "other half")
    assert (released.text, released.items) == ("ä", ("half", "other half"))
    assert text.feed(b"ST", "ST").items == ()
    released = text.feed(b"AR", "AR")
    assert (released.text, released.items) == ("STAR", ("ST", "AR"))
    text.feed(b"x STO", "x STO")
    assert text.feed(b"P!", "P!").items == ()
    assert text.stopped
    assert text.finish().items == ()


def test_what_was_held_back_comes_at_the_end():
    text: Detokenizer[int] = Detokenizer(["STOP"])
    text.feed(b"S", 1)
    released = text.finish()
    assert (released.text, released.items) == ("S", (1,))


@pytest.mark.parametrize("stops", [[], [""]])
def test_without_stop_strings_nothing_is_held_back(stops):
    assert StopScanner(stops).feed("text") == "text"
