"""Load a GGUF in the installed engine and report what it computes; run as a script, prints one JSON object.

A process of its own, because a wrong model may end it inside the engine.
"""

from __future__ import annotations

import ctypes
import json
import sys

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as api


class Tensor(ctypes.Structure):
    """``ggml_tensor`` of the pinned engine."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    )


class Probe:
    """One context; every decode starts from an empty cache. ``watched`` are the tensors whose values are kept."""

    watched: tuple[str, ...] = ("ffn_moe_topk-",)

    def __init__(
        self, path: str, n_ctx: int = 640, n_ubatch: int = 512, embeds: bool = False, flash_attention: bool = False
    ) -> None:
        self.log: list[str] = []
        self._log = api.llama_log_callback(
            lambda level, text, _: self.log.append(text.decode()) if level >= 4 else None
        )
        api.llama_log_set(self._log, None)
        parameters = api.llama_model_default_params()
        parameters.n_gpu_layers = 0
        parameters.use_extra_bufts = False
        self.model = api.llama_model_load_from_file(path.encode(), parameters)
        if not self.model:
            raise SystemExit("load: " + "".join(self.log)[-400:])
        self.vocab = api.llama_model_get_vocab(self.model)
        self.n_vocab = api.llama_vocab_n_tokens(self.vocab)
        self.routed: dict[str, list[np.ndarray]] = {}
        self._eval = api.ggml_backend_sched_eval_callback(self._observe)
        options = api.llama_context_default_params()
        options.n_ctx = n_ctx
        options.n_batch = n_ubatch
        options.n_ubatch = n_ubatch
        options.n_threads = options.n_threads_batch = 1
        options.cb_eval = self._eval
        if flash_attention:
            options.flash_attn_type = 1
        self.embeds = embeds
        if embeds:
            options.embeddings = True
            options.pooling_type = 0  # one embedding for each token
        self.context = api.llama_init_from_model(self.model, options)
        if not self.context:
            raise SystemExit("context: " + "".join(self.log)[-400:])

    def _observe(self, address: int, ask: bool, _data: object) -> bool:
        tensor = Tensor.from_address(address)
        name = tensor.name.decode()
        wanted = name.startswith(self.watched)
        if wanted and not ask:
            k, n = (tensor.ne[0], tensor.ne[1]) if tensor.ne[2] == 1 else (tensor.ne[1], tensor.ne[2])
            stride = tensor.nb[1] if tensor.ne[2] == 1 else tensor.nb[2]
            element = ctypes.c_float if tensor.type == 0 else ctypes.c_int32
            rows = [
                np.ctypeslib.as_array((element * k).from_address(tensor.data + row * stride)).copy()
                for row in range(n)
            ]
            self.routed.setdefault(name, []).append(np.stack(rows))
        return wanted if ask else True

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Logits or embeddings of all positions, [n, width]."""
        memory = api.llama_get_memory(self.context)
        if memory:
            api.llama_memory_clear(memory, True)
        n = len(tokens)
        batch = api.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for i, token in enumerate(tokens):
            batch.token[i] = int(token)
            batch.pos[i] = i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = 1
        status = api.llama_decode(self.context, batch)
        api.llama_batch_free(batch)
        if status != 0:
            raise SystemExit(f"decode: status {status} " + "".join(self.log)[-400:])
        if self.embeds:
            rows, width = api.llama_get_embeddings(self.context), api.llama_model_n_embd(self.model)
        else:
            rows, width = api.llama_get_logits(self.context), self.n_vocab
        return np.ctypeslib.as_array(rows, shape=(n, width)).copy()


def report(path: str, embeds: bool = False) -> dict[str, object]:
    probe = Probe(path, embeds=embeds)
    rng = np.random.default_rng(7)
    tokens = rng.integers(3, probe.n_vocab, 33)
    logits = probe.decode(tokens)
    again = probe.decode(tokens)
    changed = tokens.copy()
    changed[0] = 3 + (changed[0] - 2) % (probe.n_vocab - 3)
    other = probe.decode(changed)
    probe.routed.clear()
    probe.decode(rng.integers(3, probe.n_vocab, 512))
    n_expert = int(meta(probe.model, ".expert_count"))
    used = {name: len(np.unique(np.concatenate(rows))) / n_expert for name, rows in probe.routed.items()}
    distance = np.abs(logits[1:] - logits[:-1]).max(axis=1)
    return {
        "finite": bool(np.isfinite(logits).all()),
        "distinct": len(np.unique(logits, axis=0)),
        "step": float(distance.min()),
        "deviation": float(logits.std()),
        "repeatable": bool((logits == again).all()),
        "context_effect": float(np.abs(other[-1] - logits[-1]).max()),
        "moe_layers": len(used),
        "experts_used": min(used.values(), default=0.0),
        "n_vocab": probe.n_vocab,
    }


def meta(model: object, suffix: str) -> str:
    architecture = ctypes.create_string_buffer(64)
    api.llama_model_meta_val_str(model, b"general.architecture", architecture, 64)
    value = ctypes.create_string_buffer(64)
    api.llama_model_meta_val_str(model, architecture.value + suffix.encode(), value, 64)
    return value.value.decode()


if __name__ == "__main__":
    assert llama_cpp
    print(json.dumps(report(sys.argv[1], embeds="--embeds" in sys.argv)))
