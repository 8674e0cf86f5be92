"""What each cut of a model would carry, found from its graph and not from a list of architectures."""

from __future__ import annotations

from dataclasses import dataclass

from bindings.handles import ContextHandle, ContextOptions, HookHandle, NativeError
from orchestrator.engine.model import Model
from orchestrator.errors import ComputeError, InputError

_CONTEXT = 64
_SHARED_CACHE = -1


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut in front of ``layer``; ``reason`` says in words why it is not possible, None if it is."""

    layer: int
    bytes_per_token: int
    reason: str | None

    @property
    def is_legal(self) -> bool:
        """Whether stages may be split here."""
        return self.reason is None


def survey(model: Model) -> tuple[Cut, ...]:
    """Return the cuts in front of layers 1 to n - 1 of a whole model; its experts may be placeholders."""
    if not model.is_whole:
        raise InputError("only a whole model can be surveyed for cuts")

    def never_called(_event: object) -> int:
        raise ComputeError("a survey computes nothing")

    hook = HookHandle(never_called, remote_experts=True)
    hook.survey()
    options = ContextOptions(
        n_ctx=_CONTEXT,
        n_batch=_CONTEXT,
        n_ubatch=_CONTEXT // 2,
        n_threads=1,
        n_sequences=1,
        unified=False,
        flash_attention=None,
    )
    try:
        with ContextHandle(model.handle, options, hook):
            found = hook.cuts()
    except NativeError as error:
        raise ComputeError(f"{model.path}: {error}") from error
    finally:
        hook.close()
    return tuple(Cut(cut.cut, cut.n_bytes // max(cut.n_tokens, 1), _reason(cut)) for cut in found)


def nearest_legal(cuts: tuple[Cut, ...], layer: int) -> tuple[int, ...]:
    """Return the legal cuts nearest to ``layer`` on both sides, for a message that helps."""
    before = [cut.layer for cut in cuts if cut.is_legal and cut.layer <= layer]
    behind = [cut.layer for cut in cuts if cut.is_legal and cut.layer >= layer]
    return tuple(sorted({*before[-1:], *behind[:1]}))


def _reason(cut: object) -> str | None:
    status, layer, place = (getattr(cut, name) for name in ("status", "layer", "cut"))
    if status == 0:
        return None
    if status == _SHARED_CACHE:
        return f"layers on both sides of it use the cache of layer {layer}"
    return f"this architecture does not mark the output of layer {place - 1}"
