"""Between the engine's graph and Python: ctypes events in, arrays out.

A graph stops at a MoE call whose experts are elsewhere (dispatch, combine). The arrays are views of engine memory,
valid until the callback returns.
"""

from __future__ import annotations

from collections.abc import Mapping

from bindings.handles import HookHandle
from bindings.library import DISPATCH, EventStruct, LayerStruct
from bindings.memory import FloatViews, IntegerViews
from orchestrator.dispatch.exchange import RowExchange
from orchestrator.engine.native import EngineStar
from orchestrator.errors import ComputeError
from orchestrator.types import TENSOR_ROLES, Contract, ExpertBatch, LayerDescriptor

_STOP = 1


class GraphHook:
    """The callback of one context. An exception inside is kept for the caller and ends the step.

    With an ``exchange`` the experts of every MoE call are its business.
    """

    def __init__(self, exchange: RowExchange | None, contract: Contract) -> None:
        self._exchange = exchange
        self._exact = contract is Contract.EXACT
        self._floats = FloatViews()
        self._integers = IntegerViews()
        self._failure: BaseException | None = None
        native = getattr(exchange, "native", None)
        self.handle = HookHandle(
            self._on_event,
            remote_experts=exchange is not None,
            partial_sums=not self._exact,
            # native code goes in front: the callback above then sees only what is not plain
            star=native.handle if isinstance(native, EngineStar) else None,
        )

    def close(self) -> None:
        """Free the C side; the context must be closed before."""
        self.handle.close()

    def take_failure(self) -> BaseException | None:
        """Return what ended the last step, once."""
        failure, self._failure = self._failure, None
        return failure

    def descriptors(self) -> tuple[LayerDescriptor, ...]:
        """Return the layers that the context dispatches, in graph order."""
        return tuple(descriptor_from_struct(layer) for layer in self.handle.layers())

    def _on_event(self, event: EventStruct) -> int:
        try:
            if self._exchange is None:
                raise ComputeError("the engine asks for experts, and nobody was named to compute them")
            n_tokens, n_embd, top_k = event.n_tokens, event.n_embd, event.top_k
            if n_tokens == 0:
                return 0  # the last layers see only tokens whose logits are wanted, and here none is
            if event.kind == DISPATCH:
                self._exchange.dispatch(
                    ExpertBatch(
                        event.layer,
                        event.call,
                        self._floats.at(event.rows, (n_tokens, n_embd)),
                        self._integers.at(event.experts, (n_tokens, top_k)),
                        self._floats.at(event.weights, (n_tokens, top_k)),
                    )
                )
            else:
                shape = (n_tokens, top_k, n_embd) if self._exact else (n_tokens, n_embd)
                self._exchange.combine(event.layer, event.call, self._floats.at(event.out, shape))
        except BaseException as error:  # nothing may cross the C frames below; the session raises it
            self._failure = error
            return _STOP
        return 0


def descriptor_from_struct(layer: LayerStruct) -> LayerDescriptor:
    """Turn the shim's descriptor into the value that travels to workers."""
    names = [bytes(name.value).decode() for name in layer.tensors]
    return LayerDescriptor(
        layer=layer.layer,
        call=layer.call,
        architecture=bytes(layer.architecture).decode(),
        activation=layer.activation,
        n_embd=layer.n_embd,
        n_ff=layer.n_ff,
        n_expert=layer.n_expert,
        top_k=layer.top_k,
        weight_before_ffn=bool(layer.weight_before_ffn),
        clamp=layer.clamp,
        situ_beta=layer.situ_beta,
        situ_linear_beta=layer.situ_linear_beta,
        hyper_connections=layer.hyper_connections,
        precision=layer.precision,
        tensors=tuple((role, name) for role, name in zip(TENSOR_ROLES, names, strict=True) if name),
    )


def struct_from_descriptor(descriptor: LayerDescriptor) -> LayerStruct:
    """Do the inverse of :func:`descriptor_from_struct`."""
    names: Mapping[str, str] = dict(descriptor.tensors)
    layer = LayerStruct(
        layer=descriptor.layer,
        call=descriptor.call,
        n_embd=descriptor.n_embd,
        n_ff=descriptor.n_ff,
        n_expert=descriptor.n_expert,
        top_k=descriptor.top_k,
        activation=descriptor.activation,
        weight_before_ffn=int(descriptor.weight_before_ffn),
        hyper_connections=descriptor.hyper_connections,
        precision=descriptor.precision,
        clamp=descriptor.clamp,
        situ_beta=descriptor.situ_beta,
        situ_linear_beta=descriptor.situ_linear_beta,
        architecture=descriptor.architecture.encode(),
    )
    for i, role in enumerate(TENSOR_ROLES):
        layer.tensors[i].value = names.get(role, "").encode()
    return layer
