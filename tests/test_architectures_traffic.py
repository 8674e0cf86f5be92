"""Bytes of decode steps over real workers, against the protocol's frames and the catalogue's formula."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.models.footprint import wire_bytes
from orchestrator.models.gguf import GgufFile
from orchestrator.onboarding.architectures import SHAPES, SeriesOptions, run_shapes
from orchestrator.onboarding.traffic import CONTRACTS, Traffic, measure_traffic

Make = Callable[[str], Path]


def test_every_byte_is_accounted_for(synthetic: Make) -> None:
    file = GgufFile.open(synthetic("llama"))
    found = measure_traffic(file, 64, (1, 2))
    assert [(each.workers, each.contract) for each in found] == [
        (count, contract) for count in (1, 2) for contract in CONTRACTS
    ]
    for each in found:
        assert each.as_expected, each
        assert not replace(each, bytes_in=each.bytes_in + 4).as_expected
        assert Traffic.from_json(json.loads(json.dumps(each.to_json()))) == each
    for each in found[:2]:
        assert each.requests == 1.0
        assert each.row_bytes == wire_bytes(64, 4)[each.contract.value]
    assert 1.0 < found[2].requests <= 2.0  # top-4 over two workers


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SHAPES)
def test_the_shape_of_a_known_model_passes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINKCPP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("LINKCPP_CACHE", str(tmp_path / "cache"))
    (result,) = run_shapes([name], SeriesOptions(worker_counts=(3,), steps=2))
    assert result.passed, result.reason
    assert all(each.as_expected for each in result.traffic)
    assert [each.contract for each in result.traffic] == list(CONTRACTS)
