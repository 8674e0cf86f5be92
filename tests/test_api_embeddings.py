"""Embeddings by the official client, of a model made for them; the oracle is the engine's own vector per token."""

from __future__ import annotations

import json

import numpy as np
import openai
import pytest
from serve_process import post, running

from orchestrator.engine.context import Context
from orchestrator.engine.model import Model
from orchestrator.ring.steps import one_sequence

TEXTS = ["Once upon a time", "another text"]


@pytest.fixture(scope="module")
def path(synthetic):
    return synthetic("nomic-bert-moe")


@pytest.fixture(scope="module")
def server(path):
    with running(path, "--unverified", "--ctx", "128") as process:
        yield process


def oracle(path, text):
    with Model.open(path) as model, Context(model, n_ctx=128) as context:
        tokens = model.tokenize(text)
        mean = context.decode(one_sequence(tokens, 0, every=True)).logits.astype(np.float64).mean(axis=0)
        return mean / np.linalg.norm(mean), len(tokens)


def test_vectors_are_those_of_the_engine(server, path):
    api = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    name = api.models.list().data[0].id
    packed = api.embeddings.create(model=name, input=TEXTS)  # the client asks for base64
    plain = api.embeddings.create(model=name, input=TEXTS, encoding_format="float")
    wanted = [oracle(path, text) for text in TEXTS]
    for answer in (packed, plain):
        assert [entry.index for entry in answer.data] == [0, 1]
        for entry, (vector, _) in zip(answer.data, wanted, strict=True):
            assert np.allclose(entry.embedding, vector, atol=1e-6)
            assert np.isclose(np.linalg.norm(entry.embedding), 1.0, atol=1e-5)
    assert packed.usage.prompt_tokens == sum(count for _, count in wanted)


def test_what_such_a_model_refuses(server):
    for body, code in (
        ({"input": "x" * 2000}, "context_length_exceeded"),
        ({"input": [10**6]}, "invalid_value"),
        ({"input": "x", "dimensions": 5}, "unsupported_parameter"),
        ({"input": "x", "encoding_format": "hex"}, "invalid_value"),
        ({"input": 5}, "invalid_value"),
        ({"inputs": "x"}, "unknown_parameter"),
    ):
        status, text = post(server.url, body, "/v1/embeddings")
        assert (status, json.loads(text)["error"]["code"]) == (400, code)
    status, text = post(server.url, {"prompt": "x", "max_tokens": 1})
    assert (status, json.loads(text)["error"]["code"]) == (400, "unsupported_operation")
    assert post(server.url, {"input": "x"}, "/v1/embeddings")[0] == 200
