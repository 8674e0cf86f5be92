"""Prediction layers (MTP) in the engine: hidden rows cost no byte, and guesses do not depend on how they were fed."""

from __future__ import annotations

import numpy as np
import pytest
from inprocess import InProcessExchange
from predicting import CASES, MORE

from orchestrator.engine.context import Context
from orchestrator.engine.experts import ExpertStore
from orchestrator.engine.model import Model
from orchestrator.engine.prediction import PredictionContext, why_no_prediction
from orchestrator.engine.synth import synth
from orchestrator.errors import ComputeError, InputError
from orchestrator.models.gguf import GgufFile
from orchestrator.models.slices import write_backbone_slice
from orchestrator.ring.steps import one_sequence
from orchestrator.types import Contract

ALL = [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)]
TEXT = [int(token) for token in np.random.Generator(np.random.PCG64(5)).integers(3, 250, 80)]


@pytest.fixture(scope="module", params=ALL, ids=lambda case: f"{case[0]}-{case[1]}")
def predicting(request, tmp_path_factory):
    architecture, count = request.param
    path = tmp_path_factory.mktemp("predicting") / f"{architecture}.gguf"
    synth(architecture, path, n_predict=count)
    return path


def steps(context):
    """A prompt without logits, one with all, and single tokens."""
    yield context.decode(one_sequence(TEXT[:30], 0))
    yield context.decode(one_sequence(TEXT[30:70], 30, every=True))
    for i in range(70, 80):
        yield context.decode(one_sequence(TEXT[i : i + 1], i))


def hidden_rows(path):
    """The hidden row of each token of the text."""
    with Model.open(path) as model, Context(model, n_ctx=128) as context:
        context.keep_hidden(True)
        return np.concatenate([outcome.hidden for outcome in steps(context)])


def test_keeping_hidden_rows_changes_no_byte(predicting):
    with Model.open(predicting) as model, Context(model, n_ctx=128) as plain, Context(model, n_ctx=128) as keeping:
        keeping.keep_hidden(True)
        for without, with_rows in zip(steps(plain), steps(keeping), strict=True):
            assert without.hidden is None
            assert with_rows.logits.tobytes() == without.logits.tobytes()
        keeping.keep_hidden(False)
        assert keeping.decode(one_sequence([7], 80)).hidden is None


def test_hidden_rows_have_the_same_bytes_over_a_star_and_in_any_parts(predicting):
    expected = hidden_rows(predicting)
    assert expected.shape[0] == len(TEXT)
    assert np.unique(expected, axis=0).shape == expected.shape  # no row twice, so their order is told
    with Model.open(predicting, without_experts=True) as model, ExpertStore(predicting, None) as store:
        exchange = InProcessExchange([store], Contract.EXACT)
        with Context(model, n_ctx=128, n_batch=20, exchange=exchange) as context:
            exchange.describe(context.descriptors)
            context.keep_hidden(True)
            found = context.decode(one_sequence(TEXT, 0)).hidden
    assert found.tobytes() == expected.tobytes()


def test_guesses_follow_from_text_and_hidden_rows_alone(predicting):
    rows = hidden_rows(predicting)
    before = np.concatenate([np.zeros_like(rows[:1]), rows[:-1]])  # the row in front of each token
    with PredictionContext(predicting, n_ctx=128, n_sequences=2) as layers:

        def guess(sequence, token, layer):
            logits, hidden = layers.guess(one_sequence([token], 80, sequence=sequence), rows[-1:], layer)
            return logits, hidden

        layers.read(one_sequence(TEXT, 0), before)
        for start in range(0, 80, 16):  # in parts, with wrong guesses between them
            layers.read(one_sequence(TEXT[start : start + 16], start, sequence=1), before[start : start + 16])
            layers.guess(one_sequence([9, 8, 7], start + 16, sequence=1), rows[:3])
        for layer in range(layers.n_layers):
            (first, own), (second, other) = guess(0, 5, layer), guess(1, 5, layer)
            np.testing.assert_allclose(second, first, atol=1e-4)
            np.testing.assert_allclose(other, own, atol=1e-4)
            changed, _ = layers.guess(one_sequence([5], 80), rows[:1], layer)
            assert np.abs(changed - first).max() > 0.1  # the hidden row matters
        layers.cut(1, 0)
        changed, _ = guess(1, 5, 0)
        assert np.abs(changed - guess(0, 5, 0)[0]).max() > 1e-3  # and so does the text in front


def test_other_layers_are_not_loaded_with_the_prediction_layers(predicting):
    with Model.open(predicting) as model, PredictionContext(predicting, n_ctx=128, n_sequences=1) as layers:
        assert layers.model.prediction_layers == model.prediction_layers > 0
        assert layers.model.n_layer == model.n_layer
        with pytest.raises(ComputeError, match=r"does not hold the data of tensor 'blk\.0\."):
            Context(layers.model, n_ctx=64)


def test_why_a_file_cannot_predict(synthetic, predicting, tmp_path):
    assert why_no_prediction(predicting) == ""
    assert why_no_prediction(synthetic("glm4moe")) == "glm4moe.gguf has no prediction layers"
    with pytest.raises(InputError, match="has no prediction layers"):
        PredictionContext(synthetic("glm4moe"), n_ctx=64, n_sequences=1)
    with (
        Model.open(synthetic("glm4moe")) as model,
        Context(model, n_ctx=64) as context,
        pytest.raises(InputError, match="no prediction layers"),
    ):
        context.keep_hidden(True)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(predicting.read_bytes().replace(b".nextn.enorm.", b".nextn.xnorm."))
    assert why_no_prediction(damaged) == "damaged.gguf names prediction layers and does not hold them"
    backbone = tmp_path / "backbone.gguf"
    write_backbone_slice(GgufFile.open(predicting), backbone)
    assert "does not hold the experts of its prediction layers" in why_no_prediction(backbone)


def test_more_prediction_layers_than_the_engine_computes_are_refused(tmp_path):
    with pytest.raises(InputError, match="at most 1 prediction layers of glm4moe"):
        synth("glm4moe", tmp_path / "two.gguf", n_predict=2)
    with pytest.raises(InputError, match="at most 0 prediction layers of llama"):
        synth("llama", tmp_path / "one.gguf", n_predict=1)


def test_a_hybrid_model_loads_with_prediction_layers(tmp_path):
    path = tmp_path / "hybrid.gguf"
    synth("qwen35moe", path, n_predict=1)
    with Model.open(path) as model, Context(model, n_ctx=64) as context:
        assert (model.prediction_layers, model.is_hybrid) == (1, True)
        context.keep_hidden(True)
        rows = context.decode(one_sequence(TEXT[:20], 0)).hidden
    with PredictionContext(path, n_ctx=64, n_sequences=1) as layers:
        layers.read(one_sequence(TEXT[1:20], 0), rows[:-1])
        logits, _ = layers.guess(one_sequence([3], 19), rows[-1:])
    assert np.isfinite(logits).all()
