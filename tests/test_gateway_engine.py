"""The gateway with the real engine."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.engine.model import Model
from orchestrator.engine.session import Session
from orchestrator.engine.synth import synth
from orchestrator.errors import WorkerError
from orchestrator.gateway.backbone import open_backbone
from orchestrator.gateway.sampling import SamplingParameters
from orchestrator.gateway.sequence import GenerationRequest, TextDelta
from orchestrator.workers.local import LocalWorkers

GREEDY = SamplingParameters(temperature=0)


def numbers(count, seed):
    return tuple(int(n) for n in np.random.Generator(np.random.PCG64(seed)).integers(3, 250, count))


def ask(gateway, prompt, count):
    """Return (tokens, their log probabilities, cached tokens)."""
    request = GenerationRequest(prompt, count, GREEDY, top_logprobs=0, ignore_end=True)
    *deltas, end = list(gateway.submit(request))
    records = [record for delta in deltas if isinstance(delta, TextDelta) for record in delta.tokens]
    return [record.token for record in records], [record.logprob for record in records], end.usage.cached_tokens


@pytest.mark.parametrize("architecture", ["llama", "qwen35moe"])
def test_a_reused_prefix_gives_the_same_bytes(synthetic, architecture):
    first, second = numbers(100, 1), (*numbers(100, 1)[:70], *numbers(40, 2))
    with open_backbone(synthetic(architecture), n_ctx=512) as backbone:
        results = []
        for reuse in (True, False):
            backbone.session.clear()
            with backbone.gateway(reuse_prefix=reuse) as gateway:
                tokens, *_ = ask(gateway, first, 8)
                answers = [ask(gateway, prompt, 8) for prompt in ((*first, *tokens, *numbers(9, 3)), second)]
                results.append(answers)
    (longer, shorter), without = results
    assert longer[2] == 107  # the whole conversation so far, but for the answer's last token
    assert shorter[2] == (70 if architecture == "llama" else 0)  # recurrent memory cannot be cut
    assert [answer[2] for answer in without] == [0, 0]
    assert [answer[:2] for answer in (longer, shorter)] == [answer[:2] for answer in without]


def test_chunks_of_the_gateway_give_the_bytes_of_one_call(synthetic):
    prompt = numbers(200, 5)
    with Model.open(synthetic("llama")) as model, Session(model, n_ctx=512) as session:
        logits = session.decode(prompt)[-1].astype(np.float64)
        best = int(logits.argmax())
        expected = logits[best] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    with open_backbone(synthetic("llama"), n_ctx=512) as backbone, backbone.gateway() as gateway:
        tokens, logprobs, _ = ask(gateway, prompt, 1)
    assert (tokens, logprobs) == ([best], [float(expected)])


# --- a star, compared with one process ----------------------------------------------------------------------------


def decode(session, prompt, steps):
    """Prefill, then greedy single steps; returns all their logits."""
    logits = [session.decode(prompt)]
    for _ in range(steps):
        logits.append(session.decode([int(logits[-1][-1].argmax())]))
    return np.concatenate(logits)


def test_three_workers_a_prompt_of_300_tokens_and_two_of_eight_experts(tmp_path):
    path = tmp_path / "mixtral-like.gguf"
    synth("llama", path, n_expert=8, top_k=2)
    prompt = numbers(300, 7)
    with Model.open(path) as model, Session(model, n_ctx=512) as session:
        oracle = decode(session, prompt, 4)
    with LocalWorkers(path, 3) as workers, open_backbone(path, workers.addresses, n_ctx=512) as backbone:
        assert decode(backbone.session, prompt, 4).tobytes() == oracle.tobytes()


def test_a_prompt_of_one_token_reaches_both_workers(tmp_path):
    path = tmp_path / "many-experts.gguf"
    synth("qwen2moe", path, n_expert=128, top_k=8)
    with Model.open(path) as model, Session(model, n_ctx=64) as session:
        oracle = decode(session, [5], 1)
    with LocalWorkers(path, 2) as workers, open_backbone(path, workers.addresses, n_ctx=64) as backbone:
        assert decode(backbone.session, [5], 1).tobytes() == oracle.tobytes()
        figures = backbone.dispatcher.statistics().workers
        assert [worker.ownership.layers and worker.rows > 0 for worker in figures] == [True, True]
        backbone.session.clear()
        workers.kill(1)
        with pytest.raises(WorkerError, match=r"local-2.*layer \d+|local-2") as caught:
            backbone.session.decode([5])
        assert caught.value.worker.startswith("local-2")
        assert backbone.session.position == 0
        workers.restart(1)
        assert decode(backbone.session, [5], 1).tobytes() == oracle.tobytes()
