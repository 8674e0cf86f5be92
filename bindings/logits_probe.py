"""Write the logits of a fixed run of a model, through nothing but upstream's own API.

``python -m bindings.logits_probe MODEL OUTPUT`` runs with whichever ``llama_cpp`` comes first on the path, ours
or upstream's, so that the two files can be compared byte by byte. The run holds a prefill with two sizes of
micro-batch and greedy steps; all of its choices are fixed here.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import BinaryIO

import llama_cpp
import numpy as np
import numpy.typing as npt

MICRO_BATCHES = (7, 512)
PREFILL = 70
STEPS = 8


def _drop(_level: int, _text: bytes, _data: int | None) -> None:
    """Drop a line of the engine's log: stdout and stderr are for our own words."""


SILENT = llama_cpp.llama_log_callback(_drop)  # kept here, because C calls it as long as the process lives


class ProbeError(RuntimeError):
    """The engine did not load the model or did not decode."""


def run(model_path: Path, output: BinaryIO) -> None:
    """Write every logit row of the run to ``output``: F32, [rows, vocabulary], rows in order."""
    llama_cpp.llama_log_set(SILENT, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(model_path).encode(), parameters)
    if not model:
        raise ProbeError(f"cannot load {model_path}")
    try:
        for n_ubatch in MICRO_BATCHES:
            _run_once(model, n_ubatch, output)
    finally:
        llama_cpp.llama_model_free(model)


def _run_once(model: llama_cpp.llama_model_p, n_ubatch: int, output: BinaryIO) -> None:
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = 256
    parameters.n_batch = 128
    parameters.n_ubatch = n_ubatch
    parameters.n_threads = parameters.n_threads_batch = 2
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        raise ProbeError("the engine made no context")
    try:
        n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        tokens = [(index * 7919 + 13) % n_vocab for index in range(PREFILL)]
        position = 0
        for _ in range(STEPS + 1):
            rows = _decode(context, tokens, position, n_vocab)
            output.write(rows.tobytes())
            position += len(tokens)
            tokens = [int(rows[-1].argmax())]
    finally:
        llama_cpp.llama_free(context)


def _decode(
    context: llama_cpp.llama_context_p, tokens: list[int], position: int, n_vocab: int
) -> npt.NDArray[np.float32]:
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    try:
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = position + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = 1
        code = llama_cpp.llama_decode(context, batch)
        if code != 0:
            raise ProbeError(f"llama_decode returned {code}")
    finally:
        llama_cpp.llama_batch_free(batch)
    logits = llama_cpp.llama_get_logits(context)
    return np.ctypeslib.as_array(logits, shape=(len(tokens), n_vocab)).copy()


def main() -> int:
    """Run the probe from the command line; return the exit code."""
    model, output = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        with output.open("wb") as file:
            run(model, file)
    except (ProbeError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{Path(llama_cpp.__file__).parent}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
