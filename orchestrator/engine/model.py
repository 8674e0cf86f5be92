"""One loaded GGUF: its metadata and its tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType

from bindings.handles import ModelHandle, NativeError
from bindings.library import EngineUnavailableError, load
from bindings.nextn import prediction_layers
from orchestrator.engine.grammar import Grammar, GrammarFactory
from orchestrator.errors import EngineMissingError, ModelFileError, UnknownArchitectureError
from orchestrator.models.architectures import RECIPES

_UNKNOWN = re.compile(r"unknown (?:model )?architecture: '?([^']*)'?")


def require_engine() -> None:
    """Raise :class:`EngineMissingError` unless the patched engine is loaded."""
    try:
        load()
    except EngineUnavailableError as error:
        raise EngineMissingError(str(error), hint=error.hint) from error


class Model:
    """A model in memory, usable by any number of sessions; a context manager.

    ``embeds`` says that it answers with an embedding of each token instead of logits, ``reads_whole_text`` that
    each token attends to later ones too, so that a text is one batch and there is nothing to continue.
    """

    def __init__(self, path: Path, handle: ModelHandle, stage: tuple[int, int] | None = None) -> None:
        api, _ = load()
        self.path = path
        self.handle = handle
        self.metadata: Mapping[str, str] = dict(handle.metadata())
        address = handle.address
        self.architecture = self.metadata.get("general.architecture", "")
        self.n_layer = int(api.llama_model_n_layer(address))
        self.prediction_layers = prediction_layers(handle)
        self.n_embd = int(api.llama_model_n_embd(address))
        self.n_ctx_train = int(api.llama_model_n_ctx_train(address))
        self.n_vocab = int(api.llama_vocab_n_tokens(handle.vocab))
        self.is_hybrid = bool(api.llama_model_is_recurrent(address) or api.llama_model_is_hybrid(address))
        recipe = RECIPES.get(self.architecture)
        self.embeds = recipe is not None and recipe.embeds
        self.reads_whole_text = recipe is not None and recipe.bidirectional
        self.bos = int(api.llama_vocab_bos(handle.vocab))
        self.eos = int(api.llama_vocab_eos(handle.vocab))
        self.stage = stage if stage is not None else (0, self.n_layer)
        self.is_whole = self.stage == (0, self.n_layer)
        self.has_output = self.stage[1] == self.n_layer
        self.has_window = self.metadata.get(f"{self.architecture}.attention.sliding_window", "0") != "0"
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self._grammars = GrammarFactory(handle)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        without_experts: bool = False,
        stage: tuple[int, int] | None = None,
        repack: bool = False,
        gpu_layers: int = -1,
        progress: Callable[[float], None] | None = None,
        only_behind: int | None = None,
    ) -> Model:
        """Load a GGUF; with ``without_experts`` its expert tensors take no memory and are not read.

        ``stage`` (first, last) holds only the layers first to last - 1 of it. ``only_behind`` loads the prediction
        layers, which nothing else does, and none of the layers before this one: a model for
        :class:`orchestrator.engine.prediction.PredictionContext` alone.

        Raises :class:`ModelFileError` or :class:`UnknownArchitectureError` with the engine's words.
        """
        require_engine()
        path = Path(path)
        try:
            handle = ModelHandle(
                str(path),
                without_experts=without_experts,
                stage=stage,
                repack=repack,
                gpu_layers=gpu_layers,
                progress=progress,
                only_behind=only_behind,
            )
        except NativeError as error:
            unknown = _UNKNOWN.search(str(error))
            if unknown:
                raise UnknownArchitectureError(
                    f"{path}: this engine knows no architecture {unknown[1]!r}",
                    hint="the engine is pinned; see `linkcpp engine info` for its version",
                ) from error
            raise ModelFileError(f"{path}: {error}") from error
        return cls(path, handle, stage)

    def close(self) -> None:
        """Free the weights; sessions of this model must be closed before."""
        self.handle.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def description(self) -> str:
        """Name for people: ``general.name`` or the file's name."""
        return self.metadata.get("general.name") or self.path.stem

    @property
    def chat_template(self) -> str | None:
        """The Jinja template that the file carries, or None."""
        return self.metadata.get("tokenizer.chat_template") or None

    @property
    def has_tokenizer(self) -> bool:
        """Whether text can be turned into tokens."""
        return bool(load()[0].llama_vocab_type(self.handle.vocab))

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return token ids; ``parse_special`` makes ``<|...|>`` of the text control tokens."""
        if not self.has_tokenizer:
            raise ModelFileError(f"{self.path} has no tokenizer")
        return self.handle.tokenize(
            text.encode("utf-8", "surrogatepass"), add_special=add_special, parse_special=parse_special
        )

    def piece(self, token: int, special: bool = False) -> bytes:
        """Return the bytes of a token; control tokens are empty unless ``special``."""
        key = (token, special)
        if key not in self._pieces:
            self._pieces[key] = self.handle.piece(token, special=special)
        return self._pieces[key]

    def is_end_of_generation(self, token: int) -> bool:
        """Tell whether a token ends an answer."""
        return bool(load()[0].llama_vocab_is_eog(self.handle.vocab, token))

    def constrain(self, grammar: str, visible: Collection[int] = ()) -> Grammar:
        """Return which tokens an answer may hold that follows a GBNF grammar, at its beginning.

        Control tokens are never allowed, except end tokens and those in ``visible``. Raises :class:`InputError`.
        """
        return self._grammars(grammar, visible)
