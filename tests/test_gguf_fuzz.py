"""Random damage to headers of all kinds of files: words or a model, never a crash, a hang or a mountain of memory."""

from __future__ import annotations

import contextlib
import random
import resource
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_gguf import write_moe

from orchestrator.errors import InputError
from orchestrator.models.checksums import pieces_of
from orchestrator.models.gguf import GgufFile
from orchestrator.models.gguf_header import read_header
from orchestrator.models.inspection import Inspection
from orchestrator.models.slices import Selection, plan_slice, write_slice

FEW = 3_000
MANY = 110_000
SECONDS_PER_FILE = 0.02  # of this process; a bound against hangs, not a measurement
MEMORY = 200_000  # KiB more at the peak

# Numbers at which arithmetic turns over, and those that a count may have.
NUMBERS = [0, 1, 2, 3, 7, 8, 255, 256, 1023, 1024, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63]


def sources(folder: Path) -> list[tuple[Path, bytes, int]]:
    """Return files to damage: (where to put the damaged one, content, bytes of the header)."""
    whole = write_moe(folder / "whole.gguf", layers=1, embedding=8, ff=8)
    old = bytearray(whole.read_bytes())
    struct.pack_into("<I", old, 4, 2)
    (folder / "version2.gguf").write_bytes(old)
    write_slice(whole, folder / "experts.gguf", Selection(experts=(0, 2)))
    write_slice(whole, folder / "backbone.gguf", Selection(without_experts=True))
    first = write_moe(
        folder / "part-00001-of-00002.gguf",
        layers=1,
        embedding=8,
        ff=8,
        extra=lambda writer: (writer.add_uint16("split.no", 0), writer.add_uint16("split.count", 2)),
    )
    second = bytearray(first.read_bytes())
    at = second.index(b"split.no") + len(b"split.no") + 4
    struct.pack_into("<H", second, at, 1)
    (folder / "part-00002-of-00002.gguf").write_bytes(
        second.replace(b"blk.0.", b"blk.1.").replace(b"token_", b"other_")
    )
    assert len(GgufFile.open(first).headers) == 2
    names = ("whole", "version2", "experts", "backbone", "part-00001-of-00002")
    found = []
    for name in names:
        path = folder / f"{name}.gguf"
        data = path.read_bytes()
        place = path if name.startswith("part") else folder / "damaged.gguf"
        found.append((place, data, read_header(path).data_at))
    return found


def damaged(good: bytes, header: int, numbers: random.Random) -> bytes:
    """Return the file with one to sixteen things wrong in its header, and now and then its end missing."""
    data = bytearray(good)
    for _ in range(numbers.choice([1, 1, 1, 2, 4, 16])):
        at, kind = numbers.randrange(header), numbers.randrange(7)
        if kind == 0:
            data[at] ^= 1 << numbers.randrange(8)
        elif kind == 1:
            data[at] = numbers.choice([0, 1, 0x7F, 0x80, 0xFF])
        elif kind == 2:
            data[at : at + 8] = struct.pack("<Q", numbers.choice(NUMBERS))
        elif kind == 3:
            data[at : at + 4] = struct.pack("<I", numbers.choice(NUMBERS) % 2**32)
        elif kind == 4:
            del data[at : at + numbers.randrange(1, 64)]
        elif kind == 5:
            data[at:at] = bytes(numbers.randrange(256) for _ in range(numbers.randrange(1, 16)))
        else:  # a piece of the header a second time: keys and tensors that repeat
            start = numbers.randrange(header)
            data[at:at] = data[start : start + numbers.randrange(8, 128)]
    if numbers.randrange(8) == 0:
        del data[numbers.randrange(len(data)) :]
    return bytes(data)


def use(path: Path) -> None:
    """Do with a file what the program does: read all of its metadata, find every expert, plan slices."""
    model = GgufFile.open(path)
    for key in model.metadata:
        model.metadata[key]
    sizes = [file.stat().st_size for file in model.files]
    for layer, experts in model.shares.items():
        for info in model.expert_tensors(layer):
            held = model.stacked(info)
            for expert in held:
                _, offset, size = model.expert_range(info, expert)
                assert offset >= 0
                assert offset + size <= sizes[info.file_index]
        assert set(experts) <= set(range(1024))
        model.bytes_per_expert(layer)
    for info in model.tensors.values():
        assert sum(piece.size for piece in pieces_of(model, info)) == info.n_bytes
    assert len(model.header_sha256) == 64
    if "general.architecture" in model.metadata:
        Inspection.of(model).to_json()
        for selection in (
            Selection(),
            Selection(experts=(0,)),
            Selection(without_experts=True),
            Selection(layers=(0,)),
        ):
            with contextlib.suppress(InputError):
                plan_slice(model, selection).header()


def torment(folder: Path, rounds: int, seed: int) -> Iterator[InputError | None]:
    """Damage files and use them; yield how each was refused, if it was."""
    numbers = random.Random(seed)
    files = sources(folder)
    for number in range(rounds):
        place, good, header = files[number % len(files)]
        place.write_bytes(damaged(good, header, numbers))
        try:
            use(place)
        except InputError as error:
            yield error
        else:
            yield None


def check(folder: Path, rounds: int, seed: int) -> None:
    memory, started, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time(), 0
    for error in torment(folder, rounds, seed):
        if error is not None:
            refused += 1
            assert "\n" not in str(error)
            assert len(str(error)) > 20
    took = time.process_time() - started
    # Both ways are taken: most damage is noticed, and what does no harm is not refused.
    assert rounds / 3 < refused < rounds
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert grown < MEMORY, f"{grown} KiB more at the peak: a count was believed before it was checked"
    assert took < 5 + rounds * SECONDS_PER_FILE


def test_thousands_of_damaged_headers_give_words_or_a_model(tmp_path: Path) -> None:
    check(tmp_path, FEW, seed=20)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_damaged_headers_give_words_or_a_model(tmp_path: Path) -> None:
    check(tmp_path, MANY, seed=21)
