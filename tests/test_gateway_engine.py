"""The gateway with the real engine."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.engine.model import Model
from orchestrator.engine.session import Session
from orchestrator.gateway.backbone import open_backbone
from orchestrator.gateway.sampling import SamplingParameters
from orchestrator.gateway.sequence import GenerationRequest, TextDelta

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
