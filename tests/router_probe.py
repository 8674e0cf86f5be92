"""Write what the routers of the engine alone decide, as arrays; run as a script: MODEL OUT.npz TOKEN..."""

from __future__ import annotations

import os
import sys

import numpy as np

os.environ.update(GGML_CPU_TILED_MM="0", GGML_CPU_SPLIT_KV="0")  # what the orchestrator sets for its own engine

from synth_probe import Probe


class RouterProbe(Probe):
    """Keeps the chosen experts and every form of their weights; the last one scales the rows of the experts."""

    watched = ("ffn_moe_topk-", "ffn_moe_weights")


def main(path: str, out: str, *tokens: str) -> None:
    probe = RouterProbe(path, n_ubatch=63, flash_attention=True)
    kept = {"logits": probe.decode(np.array([int(token) for token in tokens]))}
    for name, values in probe.routed.items():  # in the order of the graph
        kind, layer = name.split(" ")[0].rsplit("-", 1)
        for call, value in enumerate(values):
            kept[f"{'experts' if kind == 'ffn_moe_topk' else 'weights'}-{layer}-{call}"] = value
    np.savez(out, **kept)


if __name__ == "__main__":
    main(*sys.argv[1:])
