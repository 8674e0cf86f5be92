"""Models without a cache to append to: diffusion models and encoders, in the engine and in the gate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from orchestrator.engine.model import Model
from orchestrator.engine.session import Session
from orchestrator.errors import InputError, RequestError
from orchestrator.onboarding.options import GateOptions
from orchestrator.onboarding.run import run_gate
from orchestrator.onboarding.whole_text import WholeText, decoder_of
from orchestrator.types import Contract

Make = Callable[[str], Path]

TOKENS = [int(token) for token in np.random.default_rng(5).integers(3, 320, 60)]


@pytest.mark.parametrize(("architecture", "width"), [("rnd1", 320), ("nomic-bert-moe", 64), ("llama-embed", 64)])
def test_later_tokens_count_and_one_row_is_the_last(synthetic: Make, architecture: str, width: int) -> None:
    with Model.open(synthetic(architecture)) as model, Session(model, n_ctx=96) as session:
        whole = session.decode(TOKENS, all_logits=True)
        assert whole.shape == (60, width)
        assert len(np.unique(whole, axis=0)) == 60
        session.clear()
        beginning = session.decode(TOKENS[:40], all_logits=True)
        assert not np.array_equal(beginning[0], whole[0])  # what comes later changes the first row
        session.clear()
        last = session.decode(TOKENS)
    assert np.array_equal(last, whole[-1:])


def test_longer_texts_are_refused_in_words(synthetic: Make) -> None:
    with Model.open(synthetic("rnd1")) as model, Session(model, n_ctx=32) as session:
        with pytest.raises(RequestError):
            session.decode(TOKENS)
        session.decode(TOKENS[:32])
    # the engine would abort the process: its micro-batch is smaller than the text
    with Model.open(synthetic("rnd1")) as model, Session(model, n_ctx=96, n_batch=16) as session:
        with pytest.raises(InputError, match="at most 16 tokens"):
            session.decode(TOKENS[:17])
        assert session.position == 0


def test_appending_is_decoding_the_longer_text(synthetic: Make) -> None:
    with Model.open(synthetic("nomic-bert-moe")) as model, Session(model, n_ctx=96) as session:
        decoder = decoder_of(session)
        assert isinstance(decoder, WholeText)
        decoder.decode(TOKENS[:30], all_logits=True)
        new = decoder.decode(TOKENS[30:33], all_logits=True)
        one = decoder.decode(TOKENS[33:34])
        session.clear()
        shorter = session.decode(TOKENS[:33], all_logits=True)
        session.clear()
        longer = session.decode(TOKENS[:34], all_logits=True)
    assert np.array_equal(new, shorter[-3:])
    assert np.array_equal(one, longer[-1:])


def test_other_models_are_decoded_as_they_are(synthetic: Make) -> None:
    with Model.open(synthetic("llama")) as model, Session(model, n_ctx=32) as session:
        assert decoder_of(session) is session


def test_an_encoder_passes_the_gate(synthetic: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINKCPP_DATA", str(tmp_path / "data"))
    options = GateOptions(worker_counts=(2,), steps=2, prompts=("short", "long"))
    record = run_gate(synthetic("nomic-bert-moe"), options).record
    assert record.passed
    assert record.contracts[Contract.EXACT][2].positions == 8 + 128 + 4
    assert not record.contracts[Contract.SUM][2].byte_identical  # the comparison sees what workers compute
    assert record.invariance.one is None
