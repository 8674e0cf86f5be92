"""Payloads of the messages that carry no rows, each ``push_x`` with its ``pull_x``; order is the wire's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from orchestrator.errors import ProtocolError
from orchestrator.types import TENSOR_ROLES, EngineIdentity, LayerDescriptor, Ownership, RefusalCode
from orchestrator.wire.fields import Reader, Writer
from orchestrator.wire.messages import (
    Describe,
    Described,
    Goodbye,
    Hello,
    Measure,
    Measured,
    MessageType,
    Ping,
    Pong,
    Refuse,
    VersionRange,
    Welcome,
)

TEXT_LIMIT: Final = 4096
"""Longest text of a refusal or goodbye in bytes; the rest is cut off by its sender."""

MAX_OWNED: Final = 1 << 20
"""Most (layer, expert) pairs in one greeting. Ranges are short and what they stand for is not, so the number
is checked before they are written out (the largest model known has 23,000)."""


def push_identity(writer: Writer, identity: EngineIdentity) -> None:
    """Write an engine's identity."""
    writer.push_text(identity.build)
    writer.push_text(identity.isa)
    writer.push_u8(identity.repack)


def pull_identity(reader: Reader) -> EngineIdentity:
    """Read an engine's identity."""
    return EngineIdentity(build=reader.pull_text(), isa=reader.pull_text(), repack=bool(reader.pull_u8()))


def push_ownership(writer: Writer, ownership: Ownership) -> None:
    """Write ownership as ranges of expert ids per layer."""
    layers = ownership.layers
    writer.push_u16(len(layers))
    for layer in layers:
        ranges = _ranges(ownership.experts[layer])
        writer.push_u16(layer)
        writer.push_u16(len(ranges))
        for first, last in ranges:
            writer.push_u16(first)
            writer.push_u16(last)


def pull_ownership(reader: Reader) -> Ownership:
    """Read ownership; raise :class:`ProtocolError` where ranges overlap, run backwards or are too many."""
    experts: dict[int, tuple[int, ...]] = {}
    total = 0
    for _ in range(reader.pull_u16()):
        layer = reader.pull_u16()
        ids: list[int] = []
        for _ in range(reader.pull_u16()):
            first, last = reader.pull_u16(), reader.pull_u16()
            if last < first or (ids and first <= ids[-1]):
                raise ProtocolError(f"expert ranges of layer {layer} are not ascending")
            total += last - first + 1
            if total > MAX_OWNED:
                raise ProtocolError(f"a greeting claims more than {MAX_OWNED} experts")
            ids.extend(range(first, last + 1))
        if layer in experts or not ids:
            raise ProtocolError(f"layer {layer} is owned twice or not at all")
        experts[layer] = tuple(ids)
    return Ownership(experts)


def _ranges(ids: tuple[int, ...]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for expert in sorted(set(ids)):
        if ranges and expert == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], expert)
        else:
            ranges.append((expert, expert))
    return ranges


def push_descriptor(writer: Writer, descriptor: LayerDescriptor) -> None:
    """Write one layer descriptor."""
    writer.push_u16(descriptor.layer)
    writer.push_u8(descriptor.call)
    writer.push_u8(descriptor.weight_before_ffn)
    writer.push_i32(descriptor.activation)
    writer.push_u32(descriptor.n_embd)
    writer.push_u32(descriptor.n_ff)
    writer.push_u32(descriptor.n_expert)
    writer.push_u32(descriptor.top_k)
    writer.push_u32(descriptor.hyper_connections)
    writer.push_u32(descriptor.precision)
    writer.push_f64(descriptor.clamp)
    writer.push_f64(descriptor.situ_beta)
    writer.push_f64(descriptor.situ_linear_beta)
    writer.push_text(descriptor.architecture)
    writer.push_u8(len(descriptor.tensors))
    for role, name in descriptor.tensors:
        writer.push_u8(TENSOR_ROLES.index(role))
        writer.push_text(name)


def pull_descriptor(reader: Reader) -> LayerDescriptor:
    """Read one layer descriptor; raise :class:`ProtocolError` where a tensor's role is unknown."""
    layer, call, weight_before_ffn = reader.pull_u16(), reader.pull_u8(), bool(reader.pull_u8())
    activation = reader.pull_i32()
    n_embd, n_ff, n_expert, top_k = reader.pull_u32(), reader.pull_u32(), reader.pull_u32(), reader.pull_u32()
    hyper_connections, precision = reader.pull_u32(), reader.pull_u32()
    clamp, situ_beta, situ_linear_beta = reader.pull_f64(), reader.pull_f64(), reader.pull_f64()
    architecture = reader.pull_text()
    tensors: list[tuple[str, str]] = []
    for _ in range(reader.pull_u8()):
        role = reader.pull_u8()
        if role >= len(TENSOR_ROLES):
            raise ProtocolError(f"layer {layer}: unknown tensor role {role}")
        tensors.append((TENSOR_ROLES[role], reader.pull_text()))
    return LayerDescriptor(
        layer=layer,
        call=call,
        architecture=architecture,
        activation=activation,
        n_embd=n_embd,
        n_ff=n_ff,
        n_expert=n_expert,
        top_k=top_k,
        weight_before_ffn=weight_before_ffn,
        clamp=clamp,
        situ_beta=situ_beta,
        situ_linear_beta=situ_linear_beta,
        hyper_connections=hyper_connections,
        tensors=tuple(tensors),
        precision=precision,
    )


def push_hello(writer: Writer, message: Hello) -> None:
    """Write a hello. Its first four bytes, the versions, are the same in all versions."""
    writer.push_u16(message.versions.lowest)
    writer.push_u16(message.versions.highest)
    push_identity(writer, message.identity)
    writer.push_text(message.client)


def pull_hello(reader: Reader, sequence: int) -> Hello:
    """Read a hello; what a later version wrote behind it is passed over."""
    versions = VersionRange(reader.pull_u16(), reader.pull_u16())
    return Hello(versions, pull_identity(reader), client=reader.pull_text(), sequence=sequence)


def push_welcome(writer: Writer, message: Welcome) -> None:
    """Write a welcome."""
    writer.push_u16(message.version)
    writer.push_u32(message.pid)
    writer.push_u32(message.n_threads)
    push_identity(writer, message.identity)
    writer.push_text(message.name)
    writer.push_text(message.model_sha256)
    writer.push_text(message.architecture)
    push_ownership(writer, message.ownership)


def pull_welcome(reader: Reader, sequence: int) -> Welcome:
    """Read a welcome; what a later version wrote behind it is passed over."""
    version, pid, n_threads = reader.pull_u16(), reader.pull_u32(), reader.pull_u32()
    identity = pull_identity(reader)
    return Welcome(
        version=version,
        name=reader.pull_text(),
        pid=pid,
        identity=identity,
        model_sha256=reader.pull_text(),
        architecture=reader.pull_text(),
        ownership=pull_ownership(reader),
        n_threads=n_threads,
        sequence=sequence,
    )


def push_refuse(writer: Writer, message: Refuse) -> None:
    """Write a refusal. Its layout is the same in all versions."""
    writer.push_u16(message.code)
    writer.push_text(message.text, limit=TEXT_LIMIT)


def pull_refuse(reader: Reader, sequence: int) -> Refuse:
    """Read a refusal."""
    number = reader.pull_u16()
    try:
        code = RefusalCode(number)
    except ValueError as error:
        raise ProtocolError(f"unknown refusal code {number}: {reader.pull_text()}") from error
    return Refuse(sequence, code, reader.pull_text())


def push_describe(writer: Writer, message: Describe) -> None:
    """Write the layer descriptors."""
    writer.push_u16(len(message.descriptors))
    for descriptor in message.descriptors:
        push_descriptor(writer, descriptor)


def pull_describe(reader: Reader, sequence: int) -> Describe:
    """Read the layer descriptors."""
    descriptors = tuple([pull_descriptor(reader) for _ in range(reader.pull_u16())])
    reader.finish()
    return Describe(sequence, descriptors)


def push_described(writer: Writer, message: Described) -> None:
    """Write how many descriptors were taken."""
    writer.push_u32(message.accepted)


def pull_described(reader: Reader, sequence: int) -> Described:
    """Read how many descriptors were taken."""
    message = Described(sequence, reader.pull_u32())
    reader.finish()
    return message


def push_measure(writer: Writer, message: Measure) -> None:
    """Write which layer and call to measure."""
    writer.push_u16(message.layer)
    writer.push_u8(message.call)


def pull_measure(reader: Reader, sequence: int) -> Measure:
    """Read which layer and call to measure."""
    message = Measure(sequence, layer=reader.pull_u16(), call=reader.pull_u8())
    reader.finish()
    return message


def push_measured(writer: Writer, message: Measured) -> None:
    """Write the times in milliseconds."""
    writer.push_f64(message.ms_at_1)
    writer.push_f64(message.ms_at_32)


def pull_measured(reader: Reader, sequence: int) -> Measured:
    """Read the times in milliseconds."""
    message = Measured(sequence, ms_at_1=reader.pull_f64(), ms_at_32=reader.pull_f64())
    reader.finish()
    return message


def push_ping(writer: Writer, message: Ping | Pong) -> None:
    """Write the nonce of a ping or pong."""
    writer.push_u64(message.nonce)


def pull_ping(reader: Reader, sequence: int) -> Ping:
    """Read a ping."""
    message = Ping(sequence, reader.pull_u64())
    reader.finish()
    return message


def pull_pong(reader: Reader, sequence: int) -> Pong:
    """Read a pong."""
    message = Pong(sequence, reader.pull_u64())
    reader.finish()
    return message


def push_goodbye(writer: Writer, message: Goodbye) -> None:
    """Write the reason of a goodbye."""
    writer.push_text(message.text, limit=TEXT_LIMIT)


def pull_goodbye(reader: Reader, sequence: int) -> Goodbye:
    """Read the reason of a goodbye."""
    message = Goodbye(reader.pull_text(), sequence)
    reader.finish()
    return message


# The value types are those of each pair above; a table over a union of messages cannot say so to the checker.
PUSH: Final[Mapping[int, Callable[[Writer, Any], None]]] = {
    MessageType.HELLO: push_hello,
    MessageType.WELCOME: push_welcome,
    MessageType.REFUSE: push_refuse,
    MessageType.DESCRIBE: push_describe,
    MessageType.DESCRIBED: push_described,
    MessageType.MEASURE: push_measure,
    MessageType.MEASURED: push_measured,
    MessageType.PING: push_ping,
    MessageType.PONG: push_ping,
    MessageType.GOODBYE: push_goodbye,
}

PULL: Final[Mapping[int, Callable[[Reader, int], Any]]] = {
    MessageType.HELLO: pull_hello,
    MessageType.WELCOME: pull_welcome,
    MessageType.REFUSE: pull_refuse,
    MessageType.DESCRIBE: pull_describe,
    MessageType.DESCRIBED: pull_described,
    MessageType.MEASURE: pull_measure,
    MessageType.MEASURED: pull_measured,
    MessageType.PING: pull_ping,
    MessageType.PONG: pull_pong,
    MessageType.GOODBYE: pull_goodbye,
}
