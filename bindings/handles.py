"""Owners of C objects: a model, a context, its hook. Each is freed once, in the order that C needs."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bindings.errors import BindingsError
from bindings.library import (
    Callback,
    CutStruct,
    EventStruct,
    LayerStruct,
    forget_log,
    last_log_line,
    load,
)
from bindings.memory import FloatArray, FloatViews, copy_bytes

if TYPE_CHECKING:
    from bindings.wire import StarHandle  # which builds on this module

_OVERRIDE_INTEGER, _OVERRIDE_STRING = 0, 3  # llama_model_kv_override_type
_FLASH_ATTENTION = {None: -1, False: 0, True: 1}  # llama_flash_attn_type
_POOLING_NONE = 0  # llama_pooling_type: an embedding for each token
_PREDICTION = 1  # llama_context_type: LLAMA_CONTEXT_TYPE_MTP
_POLL = 1
"""Polling level of the thread pool: about 2 ms of polling, then the threads park (ggml's unit is 131072 pauses)."""

ABORTED = 2
"""llama_decode's status when the hook refused to go on."""


class NativeError(BindingsError):
    """The engine refused; the text is its own last line where it gave one."""


class Handle:
    """A C object behind an address; usable until :meth:`close`."""

    def __init__(self, address: int | None) -> None:
        self._address = address

    @property
    def address(self) -> int:
        """The address; raise :class:`NativeError` after :meth:`close`."""
        if self._address is None:
            raise NativeError(f"{type(self).__name__} is closed")
        return self._address

    def _free(self, address: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Free the object; harmless when called again."""
        address, self._address = self._address, None
        if address is not None:
            self._free(address)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


class ModelHandle(Handle):
    """``llama_model``. Raises :class:`NativeError` with the engine's words if the file cannot be used.

    ``only_behind`` loads prediction layers and, of the other layers, those from this one on.
    """

    def __init__(
        self,
        path: str,
        *,
        without_experts: bool,
        stage: tuple[int, int] | None,
        repack: bool,
        gpu_layers: int,
        progress: Callable[[float], None] | None,
        only_behind: int | None = None,
    ) -> None:
        super().__init__(None)
        api, _ = load()
        params = api.llama_model_default_params()
        params.use_extra_bufts = repack
        params.n_gpu_layers = gpu_layers
        settings: list[tuple[bytes, bytes | int]] = [(b"linkcpp.skip", b"experts")] if without_experts else []
        if stage is not None:
            settings += [(b"linkcpp.stage.first", stage[0]), (b"linkcpp.stage.last", stage[1])]
        if only_behind is not None:
            params.load_mtp = True
            settings.append((b"linkcpp.only.behind", only_behind))
        overrides = (api.llama_model_kv_override * (len(settings) + 1))()
        for override, (key, value) in zip(overrides, settings, strict=False):
            override.key = key
            if isinstance(value, int):
                override.tag, override.value.val_i64 = _OVERRIDE_INTEGER, value
            else:
                override.tag, override.value.val_str = _OVERRIDE_STRING, value
        params.kv_overrides = ctypes.cast(overrides, type(params.kv_overrides))
        report = api.llama_progress_callback(lambda done, _data: _report(progress, done))
        params.progress_callback = report
        forget_log()
        address = api.llama_model_load_from_file(path.encode(), params)
        if not address:
            raise NativeError(last_log_line("the engine cannot load the model"))
        self._address = address
        self.vocab = api.llama_model_get_vocab(address)

    def _free(self, address: int) -> None:
        load()[0].llama_model_free(address)

    def metadata(self) -> Iterator[tuple[str, str]]:
        """Yield the file's metadata as (key, value as text)."""
        api, _ = load()
        small = ctypes.create_string_buffer(512)
        for i in range(api.llama_model_meta_count(self.address)):
            api.llama_model_meta_key_by_index(self.address, i, small, len(small))
            key = small.value.decode("utf-8", "replace")
            needed = api.llama_model_meta_val_str_by_index(self.address, i, small, len(small))
            buffer = small
            if needed >= len(small):
                buffer = ctypes.create_string_buffer(needed + 1)
                api.llama_model_meta_val_str_by_index(self.address, i, buffer, len(buffer))
            yield key, buffer.value.decode("utf-8", "replace")

    def tokenize(self, text: bytes, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the token ids of UTF-8 text."""
        api, _ = load()
        capacity = len(text) + 8
        while True:
            tokens = (api.llama_token * capacity)()
            n = api.llama_tokenize(self.vocab, text, len(text), tokens, capacity, add_special, parse_special)
            if n >= 0:
                return list(tokens[:n])
            if -n <= capacity:
                raise NativeError("the model has no tokenizer for this text")
            capacity = -n

    def piece(self, token: int, *, special: bool) -> bytes:
        """Return the bytes of one token."""
        api, _ = load()
        buffer = ctypes.create_string_buffer(64)
        n = api.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = api.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        return bytes(buffer.raw[:n])


def _report(progress: Callable[[float], None] | None, done: float) -> bool:
    if progress is not None:
        progress(done)
    return True


class HookHandle(Handle):
    """``linkcpp_hook``: a Python function behind the nodes at which a context's graph stops."""

    def __init__(
        self,
        callback: Callable[[EventStruct], int],
        *,
        remote_experts: bool = False,
        partial_sums: bool = False,
        star: StarHandle | None = None,
    ) -> None:
        super().__init__(None)
        _, shim = load()
        # The C side calls this object for as long as the hook lives.
        self._callback = Callback(lambda event, _data: callback(event.contents))
        self._star = star
        if star is None:
            self._address = shim.linkcpp_hook_new(self._callback, None, remote_experts, partial_sums)
        else:
            event = star.hook(self._callback)
            self._address = shim.linkcpp_hook_new(event, star.address, remote_experts, partial_sums)

    def _free(self, address: int) -> None:
        load()[1].linkcpp_hook_free(address)

    def layers(self) -> Sequence[LayerStruct]:
        """Return the layer descriptors captured when the context was made."""
        _, shim = load()
        count = shim.linkcpp_hook_layers(self.address, None, 0)
        layers = (LayerStruct * count)()
        shim.linkcpp_hook_layers(self.address, layers, count)
        return list(layers)

    def feed(self, boundary: bytes) -> None:
        """Give the next decode the boundary of the stage before; kept until the next call."""
        self._boundary = boundary
        load()[1].linkcpp_hook_feed(self.address, boundary, len(boundary))

    def was_fed(self) -> bool:
        """Tell whether the last decode used exactly the boundary that it was fed."""
        return bool(load()[1].linkcpp_hook_fed(self.address))

    def left(self) -> bytes:
        """Copy the boundary of the last decode for the stage behind."""
        size = ctypes.c_uint64()
        address = load()[1].linkcpp_hook_left(self.address, ctypes.byref(size))
        return copy_bytes(address, size.value)

    def survey(self) -> None:
        """Make the context that this hook is attached to next find out what its cuts would carry."""
        load()[1].linkcpp_hook_survey(self.address)

    def cuts(self) -> Sequence[CutStruct]:
        """Return what the last graph of a surveying context says about each cut."""
        _, shim = load()
        count = shim.linkcpp_hook_cuts(self.address, None, 0)
        cuts = (CutStruct * count)()
        shim.linkcpp_hook_cuts(self.address, cuts, count)
        return list(cuts)

    def graph(self) -> list[tuple[str, str]]:
        """Return (op, name) of the last graph's nodes in order; only while the context lives."""
        _, shim = load()
        size = shim.linkcpp_hook_graph(self.address, None, 0) + 1
        text = ctypes.create_string_buffer(size)
        shim.linkcpp_hook_graph(self.address, text, size)
        pairs = (line.partition(" ") for line in text.value.decode("utf-8", "replace").splitlines())
        return [(op, name) for op, _, name in pairs]


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """What a context is made with; ``flash_attention`` None leaves the choice to the engine.

    ``n_ctx`` is the engine's own number: all sequences together. ``unified`` puts them into one buffer.
    """

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    n_sequences: int
    unified: bool
    flash_attention: bool | None
    embeddings: bool = False  # one row per token instead of its logits
    prediction: bool = False  # of a model's prediction layers


class ContextHandle(Handle):
    """``llama_context`` with its own attached thread pool; holds its model and hook alive."""

    def __init__(self, model: ModelHandle, options: ContextOptions, hook: HookHandle | None) -> None:
        super().__init__(None)
        api, shim = load()
        self._model, self._hook = model, hook
        self._views = FloatViews()
        params = api.llama_context_default_params()
        params.n_ctx = options.n_ctx
        params.n_batch = options.n_batch
        params.n_ubatch = options.n_ubatch
        params.n_seq_max = options.n_sequences
        params.n_threads = params.n_threads_batch = options.n_threads
        params.flash_attn_type = _FLASH_ATTENTION[options.flash_attention]
        params.kv_unified = options.unified
        params.no_perf = True
        if options.embeddings:
            params.embeddings = True
            params.pooling_type = _POOLING_NONE
        if options.prediction:
            params.ctx_type = _PREDICTION
        if hook is not None:
            shim.linkcpp_hook_attach(hook.address, ctypes.addressof(params))
        forget_log()
        address = api.llama_init_from_model(model.address, params)
        if not address:
            raise NativeError(last_log_line("the engine cannot make a context for this model"))
        self._address = address
        self._pool = shim.linkcpp_threadpool_new(options.n_threads, _POLL)
        shim.llama_attach_threadpool(address, self._pool, self._pool)
        self._memory = api.llama_get_memory(address)
        n = options.n_batch
        self._batch = api.llama_batch_init(n, 0, 1)
        self._tokens = np.ctypeslib.as_array(self._batch.token, (n,))
        self._positions = np.ctypeslib.as_array(self._batch.pos, (n,))
        self._wanted = np.ctypeslib.as_array(self._batch.logits, (n,))
        np.ctypeslib.as_array(self._batch.n_seq_id, (n,))[:] = 1
        self._sequences = [self._batch.seq_id[i] for i in range(n)]
        self._sequence_of = [-1] * n
        self.n_ctx_sequence = int(api.llama_n_ctx_seq(address))
        self.has_memory = bool(self._memory)
        self._is_behind = False

    def _free(self, address: int) -> None:
        api, shim = load()
        api.llama_batch_free(self._batch)
        api.llama_free(address)
        shim.linkcpp_threadpool_free(self._pool)

    def fill(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        outputs: Sequence[int] | Literal[0],
    ) -> None:
        """Write a batch for :meth:`decode`; logits are kept where ``outputs`` is not 0."""
        n = len(tokens)
        self._batch.n_tokens = n
        self._tokens[:n] = tokens
        self._positions[:n] = positions
        self._wanted[:n] = outputs
        for i, sequence in enumerate(sequences):
            if self._sequence_of[i] != sequence:
                self._sequences[i][0] = self._sequence_of[i] = int(sequence)

    def decode(self) -> int:
        """Run ``llama_decode`` on the batch of :meth:`fill` and return its status."""
        self._is_behind = False
        return int(load()[0].llama_decode(self.address, self._batch))

    def logits(self, rows: int, n_vocab: int) -> FloatArray:
        """Copy the logits of the last decode, [rows, n_vocab]."""
        pointer = load()[0].llama_get_logits(self.address)
        return self._views.at(ctypes.addressof(pointer.contents), (rows, n_vocab)).copy()

    def embeddings(self, rows: int, length: int) -> FloatArray:
        """Copy the embeddings of the last decode, [rows, length]; only of a context made for them."""
        pointer = load()[0].llama_get_embeddings(self.address)
        return self._views.at(ctypes.addressof(pointer.contents), (rows, length)).copy()

    def remove(self, sequence: int, first: int, last: int) -> bool:
        """Remove positions [first, last) of a sequence (-1: open end); False if this memory cannot."""
        api, _ = load()
        return bool(api.llama_memory_seq_rm(self._memory, sequence, first, last))

    def copy(self, source: int, destination: int, first: int = -1, last: int = -1) -> None:
        """Make positions of ``source`` part of ``destination`` too (one buffer: copy on write)."""
        api, _ = load()
        api.llama_memory_seq_cp(self._memory, source, destination, first, last)
        self._is_behind = True

    def keep(self, sequence: int) -> None:
        """Forget all sequences but one."""
        api, _ = load()
        api.llama_memory_seq_keep(self._memory, sequence)

    def can_shift(self) -> bool:
        """Tell whether positions can be moved."""
        api, _ = load()
        return bool(api.llama_memory_can_shift(self._memory))

    def shift(self, sequence: int, first: int, last: int, delta: int) -> None:
        """Move positions; ask :meth:`can_shift` first, the engine aborts the process otherwise."""
        api, _ = load()
        api.llama_memory_seq_add(self._memory, sequence, first, last, delta)
        self._is_behind = True

    def last_position(self, sequence: int) -> int:
        """Return the highest position of a sequence, -1 if it is empty."""
        api, _ = load()
        return int(api.llama_memory_seq_pos_max(self._memory, sequence))

    def clear(self) -> None:
        """Forget all sequences."""
        api, _ = load()
        api.llama_memory_clear(self._memory, True)

    def _catch_up(self) -> None:
        """Carry out copies and shifts, which the engine leaves for the next decode and a state would miss."""
        if not self._is_behind:
            return
        load()[1].linkcpp_catch_up(self.address)
        self._is_behind = False

    def save(self, sequence: int, *, recurrent_only: bool = False) -> bytes:
        """Return a sequence's state (of this context's layers), or only what of it cannot be cut."""
        api, _ = load()
        self._catch_up()
        flags = api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY if recurrent_only else 0
        size = api.llama_state_seq_get_size_ext(self.address, sequence, flags)
        buffer = (ctypes.c_uint8 * size)()
        written = api.llama_state_seq_get_data_ext(self.address, buffer, size, sequence, flags)
        if written == 0 and size > 0:
            raise NativeError("the engine cannot save this sequence")
        return bytes(memoryview(buffer)[:written])

    def restore(self, sequence: int, state: bytes, *, recurrent_only: bool = False) -> None:
        """Put a saved state into a sequence; raise :class:`NativeError` if it does not fit."""
        api, _ = load()
        self._catch_up()
        flags = api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY if recurrent_only else 0
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        if api.llama_state_seq_set_data_ext(self.address, buffer, len(state), sequence, flags) == 0:
            raise NativeError("the saved state does not fit this context")
