"""A GGUF model on disk: its metadata, its tensors and what it says about experts, without reading weights.

A model may be split into parts (``NAME-00001-of-00003.gguf``), whose first part carries the metadata, and it may
be a *slice*: a file that lacks tensors or experts of the original and says so (see :mod:`.gguf_manifest`).
Experts are always named by their number in the whole model.
"""

from __future__ import annotations

import bisect
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from orchestrator.errors import DenseModelError, ModelFileError
from orchestrator.models.gguf_header import MAGIC, Header, Metadata, TensorInfo, padded, read_header
from orchestrator.models.gguf_manifest import (
    EXPERT_TENSOR,
    MANIFEST_PREFIX,
    MAX_EXPERTS,
    MAX_LAYERS,
    SLICE_EXPERTS,
    SLICE_PREFIX,
    Shares,
    TensorShape,
    expert_count,
    four,
    parse_manifest,
    parse_shares,
    with_experts,
)
from orchestrator.types import format_ranges

SPLIT_PREFIX: Final = "split."
FILE_PREFIXES: Final = (SPLIT_PREFIX, MANIFEST_PREFIX, SLICE_PREFIX)
"""Keys that tell about a file and not about the model."""

_LOOKUP: Final = "_tid2eid"
"""Part of the name of a table of integers: the experts of each token (``LLM_TENSOR_FFN_GATE_TID2EID``)."""

_PART_NAME: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class GgufFile:
    """An opened model; holds no file handle, so it may be kept and shared."""

    __slots__ = (
        "_header_sha256",
        "_layers",
        "_shares",
        "files",
        "headers",
        "manifest",
        "metadata",
        "path",
        "tensors",
    )

    def __init__(self, headers: tuple[Header, ...], tensors: Mapping[str, TensorInfo]) -> None:
        self.headers = headers
        self.path = headers[0].path
        self.files = tuple(header.path for header in headers)
        self.metadata = Metadata(self.path, headers[0].entries)
        self.tensors = MappingProxyType(dict(tensors))
        self.manifest = MappingProxyType({shape.name: shape for shape in _manifest(self)})
        self._shares: Shares = MappingProxyType(_shares(self))
        self._layers = _expert_layers(self.manifest)
        self._header_sha256: str | None = None

    @classmethod
    def open(cls, path: str | Path) -> GgufFile:
        """Read the headers of a model's file or files; raise :class:`ModelFileError` for what is unusable."""
        first = read_header(Path(path))
        headers = (first, *_other_parts(first))
        tensors: dict[str, TensorInfo] = {}
        for index, header in enumerate(headers):
            for name, info in header.tensors.items():
                if name in tensors:
                    raise ModelFileError(f"{header.path}: tensor {name} is in another part too")
                tensors[name] = (
                    info
                    if index == 0
                    else TensorInfo(name, info.type, info.shape, info.offset, info.n_bytes, file_index=index)
                )
        model = cls(headers, tensors)
        model._check_parts()
        model._check_counts()
        model._check_types()
        model._check_manifest()
        return model

    # --- facts -----------------------------------------------------------------------------------------------

    @property
    def architecture(self) -> str:
        """The architecture's name in the file; whether it is known is the engine's to say."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise ModelFileError(f"{self.path} names no architecture (general.architecture): it is no model")
        if not value.isprintable():
            raise ModelFileError(f"{self.path}: the architecture {value[:40]!r} is not printable")
        return value

    @property
    def name(self) -> str:
        """The model's own name, or the file's."""
        value = self.metadata.get("general.name")
        return value if isinstance(value, str) and value.isprintable() and value else self.path.stem

    @property
    def n_layer(self) -> int:
        """Number of blocks, prediction (MTP) blocks included."""
        return self.number("block_count", 0)

    @property
    def n_expert(self) -> int:
        """Routed experts per MoE layer; 0 for a dense model."""
        return self.number("expert_count", 0)

    @property
    def top_k(self) -> int:
        """Experts used per token: the largest of all layers where they differ."""
        value = self._of_architecture("expert_used_count")
        if isinstance(value, list):
            numbers = [item for item in value if isinstance(item, int)]
            return max(numbers, default=0)
        return self.number("expert_used_count", 0)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with routed experts, ascending, present in this file or only in its manifest."""
        return tuple(self._layers)

    @property
    def is_moe(self) -> bool:
        """Tell whether the model has routed experts."""
        return bool(self._layers)

    @property
    def is_slice(self) -> bool:
        """Tell whether tensors or experts of the model are not in this file."""
        return len(self.manifest) != len(self.tensors) or bool(self._shares)

    @property
    def n_bytes(self) -> int:
        """Size of all files together."""
        return sum(header.file_size for header in self.headers)

    def number(self, key: str, default: int) -> int:
        """Return an integer of the architecture (``block_count`` for ``llama.block_count``) or the default."""
        value = self._of_architecture(key)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelFileError(f"{self.path}: {self.architecture}.{key} is no whole number")
        return value

    def require_moe(self) -> None:
        """Raise :class:`DenseModelError` for a model without routed experts."""
        if not self.is_moe:
            raise DenseModelError(
                f"{self.path} is a dense model ({self.architecture}): it has no experts to distribute",
                hint="use a MoE model, or make one with `linkcpp model upcycle` if it is llama-like",
            )

    def require_backbone(self, *, with_experts: bool) -> None:
        """Raise :class:`ModelFileError` unless the file has all that the first machine needs.

        That is everything but the routed experts, and those too ``with_experts`` (there are no workers).
        """
        absent = [name for name in self.manifest if name not in self.tensors]
        trunk = [name for name in absent if not EXPERT_TENSOR.fullmatch(name)]
        if trunk:
            raise ModelFileError(
                f"{self.path} is a slice without {trunk[0]} and {len(trunk) - 1} more tensors that are no experts",
                hint="a worker can use it; serve the whole model or a slice made with --without-experts",
            )
        if with_experts and (absent or self._shares):
            raise ModelFileError(
                f"{self.path} is a slice without all experts: it needs workers that hold the others",
                hint="start workers with `linkcpp worker` and name them with --worker",
            )

    # --- experts ---------------------------------------------------------------------------------------------

    def expert_tensors(self, layer: int) -> tuple[TensorInfo, ...]:
        """Return the routed experts' tensors of a layer that are in this file, in the order of the file."""
        return tuple(self.tensors[name] for name in self._layers.get(layer, ()) if name in self.tensors)

    def held_experts(self, layer: int) -> tuple[int, ...]:
        """Return the ids of the routed experts of a layer that are in this file, ascending."""
        if not self.expert_tensors(layer):
            return ()
        return self._shares.get(layer, tuple(range(self.n_expert)))

    @property
    def shares(self) -> Shares:
        """The experts that are in this file, layer by layer; layers without any are left out."""
        held = {layer: self.held_experts(layer) for layer in self._layers}
        return MappingProxyType({layer: ids for layer, ids in held.items() if ids})

    def stacked(self, tensor: TensorInfo) -> Sequence[int]:
        """Return the ids of the experts that a stacked tensor of this file holds, in the order of their bytes."""
        whole = expert_count(tensor.name, self.manifest[tensor.name].shape)
        ids = self._shares.get(_layer_of(tensor.name))
        return range(whole) if ids is None else ids[: bisect.bisect_left(ids, whole)]

    def expert_range(self, tensor: TensorInfo, expert: int) -> tuple[Path, int, int]:
        """Return file, offset and bytes of one expert's part of a stacked tensor.

        Raise :class:`ModelFileError` for an expert that this file does not have.
        """
        ids = self.stacked(tensor)
        place = bisect.bisect_left(ids, expert)
        if place == len(ids) or ids[place] != expert:
            whole = expert_count(tensor.name, self.manifest[tensor.name].shape)
            raise ModelFileError(
                f"{self.path}: {tensor.name} holds experts {format_ranges(ids)} of {whole}, not {expert}"
            )
        size = tensor.n_bytes // len(ids)
        return self.files[tensor.file_index], tensor.offset + place * size, size

    def bytes_per_expert(self, layer: int) -> int:
        """Return what one expert of a layer takes, from the manifest where the file lacks it."""
        total = 0
        for name in self._layers.get(layer, ()):
            entry = self.manifest[name]
            total += entry.n_bytes // expert_count(name, entry.shape)
        return total

    # --- identity --------------------------------------------------------------------------------------------

    @property
    def header_sha256(self) -> str:
        """Hash of metadata and tensor list: equal for a model, its split parts and its slices.

        Keys that tell about the file and not the model (:data:`FILE_PREFIXES`) and offsets stay out. Weights
        are not read, so two models that differ only in weights are equal here: the gate tells those apart.
        """
        if self._header_sha256 is None:
            digest = hashlib.sha256()
            for raw in raw_entries(self.headers[0], without=FILE_PREFIXES):
                digest.update(raw)
            for name in sorted(self.manifest):
                entry = self.manifest[name]
                digest.update(f"{name}\0{int(entry.type)}\0{entry.shape}\n".encode())
            self._header_sha256 = digest.hexdigest()
        return self._header_sha256

    # --- checks ----------------------------------------------------------------------------------------------

    def _of_architecture(self, key: str) -> object:
        return self.metadata.get(f"{self.architecture}.{key}")

    def _check_parts(self) -> None:
        expected = self.metadata.get("split.tensors.count")
        if len(self.headers) > 1 and isinstance(expected, int) and expected != len(self.tensors):
            raise ModelFileError(f"{self.path}: the parts hold {len(self.tensors)} tensors instead of {expected}")

    def _check_manifest(self) -> None:
        """Refuse a slice whose tensors are not what its manifest and its list of experts say."""
        for info in self.tensors.values():
            listed = self.manifest.get(info.name)
            expected = None if listed is None else listed.shape
            if listed is not None and EXPERT_TENSOR.fullmatch(info.name) and _layer_of(info.name) in self._shares:
                expected = four(with_experts(info.name, listed.shape, len(self.stacked(info))))
            if listed is None or (listed.type, expected) != (info.type, four(info.shape)):
                raise ModelFileError(f"{self.path}: tensor {info.name} is not as the slice's manifest says")

    def _check_types(self) -> None:
        """Refuse matrices that the engine has no kernel for: it would load them and end the process at the first."""
        for shape in self.manifest.values():
            is_matrix = len(shape.shape) > 1 and shape.name.endswith(".weight") and _LOOKUP not in shape.name
            if is_matrix and not shape.type.multiplies:
                raise ModelFileError(
                    f"{self.path} is damaged or not supported: the engine cannot multiply {shape.name}, "
                    f"because it is of the type {shape.type.name}"
                )

    def _check_counts(self) -> None:
        """Refuse counts on which the engine would abort the process instead of returning an error."""
        stacked = {
            name: expert_count(name, self.manifest[name].shape) for names in self._layers.values() for name in names
        }
        empty = next((name for name, count in stacked.items() if count == 0), None)
        if empty is not None:
            raise ModelFileError(f"{self.path} is damaged or not supported: {empty} holds zero experts")
        if "general.architecture" not in self.metadata:
            return
        experts, used = self.n_expert, self.top_k
        groups, groups_used = self.number("expert_group_count", 0), self.number("expert_group_used_count", 0)
        wrong = next((n for n, count in stacked.items() if count != experts and "_chexps" not in n), None)
        problem = None
        if "block_count" in _keys_of(self) and not 0 < self.n_layer <= MAX_LAYERS:
            problem = f"it claims {self.n_layer} layers (1 to {MAX_LAYERS} are possible)"
        elif stacked and experts == 0:
            problem = f"it has expert tensors and says that it has zero experts ({self.architecture}.expert_count)"
        elif not 0 <= experts <= MAX_EXPERTS:
            problem = f"it claims {experts} experts (at most {MAX_EXPERTS} are possible)"
        elif used > experts:
            problem = f"top-k {used} is larger than its {experts} experts"
        elif experts > 0 and used <= 0:
            problem = f"it has {experts} experts and uses none of them ({self.architecture}.expert_used_count)"
        elif wrong is not None:
            problem = f"{wrong} holds {stacked[wrong]} experts instead of {experts}"
        elif groups and groups >= experts:
            problem = f"{groups} groups of {experts} experts"
        elif groups > 1 and (experts % groups or not 0 < groups_used < groups):
            problem = f"{experts} experts in {groups} groups of which {groups_used} are used"
        if problem is not None:
            raise ModelFileError(f"{self.path} is damaged or not supported: {problem}")


def raw_entries(header: Header, without: tuple[str, ...] = ()) -> Iterable[bytes]:
    """Yield the metadata entries as they lie in the file, except keys with these prefixes."""
    try:
        with header.path.open("rb") as file:
            for entry in header.entries.values():
                if not entry.key.startswith(without):
                    file.seek(entry.start)
                    yield file.read(entry.end - entry.start)
    except OSError as error:
        raise ModelFileError(f"cannot read {header.path}: {error.strerror or error}") from error


def _keys_of(model: GgufFile) -> set[str]:
    prefix = model.architecture + "."
    return {key[len(prefix) :] for key in model.metadata if key.startswith(prefix)}


def _expert_layers(manifest: Mapping[str, TensorShape]) -> dict[int, tuple[str, ...]]:
    layers: dict[int, tuple[str, ...]] = {}
    for name in manifest:
        match = EXPERT_TENSOR.fullmatch(name)
        if match is not None:
            layers[int(match[1])] = (*layers.get(int(match[1]), ()), name)
    return dict(sorted(layers.items()))


def _layer_of(name: str) -> int:
    match = EXPERT_TENSOR.fullmatch(name)
    if match is None:
        raise ModelFileError(f"{name} is not a tensor of routed experts")
    return int(match[1])


def _manifest(model: GgufFile) -> list[TensorShape]:
    """Return all tensors of the original: the manifest of a slice, else the file's own."""
    if MANIFEST_PREFIX + "names" not in model.metadata:
        return [TensorShape(info.name, info.type, four(info.shape)) for info in model.tensors.values()]
    manifest = parse_manifest(*(model.metadata.get(MANIFEST_PREFIX + key) for key in ("names", "types", "shapes")))
    if manifest is None:
        raise _damaged(model)
    return manifest


def _shares(model: GgufFile) -> dict[int, tuple[int, ...]]:
    if SLICE_EXPERTS not in model.metadata:
        return {}
    shares = parse_shares(model.metadata[SLICE_EXPERTS])
    if shares is None:
        raise _damaged(model)
    return shares


def _damaged(model: GgufFile) -> ModelFileError:
    return ModelFileError(f"{model.path}: the slice's manifest is damaged", hint="make the slice again")


def _other_parts(first: Header) -> list[Header]:
    """Read the headers of parts 2 to N; say in words what is wrong with a set of parts."""
    count = _small(first, "split.count") or 1
    number = _small(first, "split.no") or 0
    match = _PART_NAME.fullmatch(first.path.name)
    if _another_gguf_follows(first):
        raise ModelFileError(
            f"{first.path} is several GGUF files joined end to end: only the first of them would be read",
            hint="keep the parts as files of their own, or merge them with `llama-gguf-split --merge`",
        )
    if count == 1:
        return []
    if number != 0:
        name = f"{match[1]}-00001-of-{count:05d}.gguf" if match else "the one that ends in -00001-of-..."
        raise ModelFileError(f"{first.path} is part {number + 1} of {count}", hint=f"open part 1: {name}")
    if match is None or int(match[2]) != 1 or int(match[3]) != count:
        raise ModelFileError(
            f"{first.path} is part 1 of {count} and its name does not say so, so the others cannot be found",
            hint=f"name the parts NAME-00001-of-{count:05d}.gguf and so on",
        )
    parts = []
    for index in range(1, count):
        path = first.path.with_name(f"{match[1]}-{index + 1:05d}-of-{count:05d}.gguf")
        if not path.exists():
            raise ModelFileError(f"part {index + 1} of {count} is missing: {path}", hint="download it too")
        part = read_header(path)
        if _small(part, "split.no") != index or _small(part, "split.count") != count:
            raise ModelFileError(f"{path} is not part {index + 1} of {count} of this model, whatever its name says")
        parts.append(part)
    return parts


def _small(header: Header, key: str) -> int | None:
    entry = header.entries.get(key)
    if entry is None:
        return None
    if not isinstance(entry.value, int) or not 0 <= entry.value < 1 << 16:
        raise ModelFileError(f"{header.path}: {key} is no small number")
    return entry.value


def _another_gguf_follows(header: Header) -> bool:
    places = {header.data_end, padded(header.data_end, header.alignment)}
    try:
        with header.path.open("rb") as file:
            for place in places:
                file.seek(place)
                if file.read(len(MAGIC)) == MAGIC:
                    return True
    except OSError as error:
        raise ModelFileError(f"cannot read {header.path}: {error.strerror or error}") from error
    return False
