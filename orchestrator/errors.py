"""The exception tree: whose fault it was and what the caller can do next.

Every error that leaves a public function of this package is a :class:`LinkcppError`. Foreign exceptions
(``OSError``, ``aiohttp``, ``ctypes``) are translated once, at the boundary where they appear, with
``raise ... from``. The class carries the process exit code; ``hint`` is the next thing to try.
"""

from __future__ import annotations


class LinkcppError(Exception):
    """Base of all errors of linkcpp; ``str(error)`` is one line for people, ``hint`` says what to do."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


# --- the caller's input cannot be used (exit code 2) ---------------------------------------------------------


class InputError(LinkcppError):
    """An argument, a file or a setting is unusable; nothing was changed."""

    exit_code = 2


class ConfigError(InputError):
    """A configuration file or environment variable does not say what it should."""


class ModelFileError(InputError):
    """The model file is missing, no GGUF, truncated or damaged."""


class UnknownArchitectureError(InputError):
    """The GGUF names an architecture that this engine does not know."""


class DenseModelError(InputError):
    """The GGUF has no experts, so there is nothing to dispatch."""


class PlanError(InputError):
    """The model does not fit onto the machines as asked; the message says how much is missing where."""


class ChatTemplateError(InputError):
    """The GGUF has no chat template where one is needed, or one that cannot be rendered."""


class DownloadError(InputError):
    """A file could not be fetched, or what came is not what was asked for (hash, size)."""


# --- the engine on this machine (exit code 3) ----------------------------------------------------------------


class EngineError(LinkcppError):
    """The engine of this process could not do what was asked."""

    exit_code = 3


class EngineMissingError(EngineError):
    """llama-cpp-python is not installed, or it is the stock one without our hook."""


class EngineBuildError(EngineError):
    """The engine could not be built: compiler, disk, network or a patch that does not apply."""


class ComputeError(EngineError):
    """A decode or an expert computation failed; the KV cache is as it was before the call."""


# --- workers and the way to them (exit code 4) ---------------------------------------------------------------


class FleetError(LinkcppError):
    """Another machine, or the way to it, is at fault."""

    exit_code = 4


class ProtocolError(FleetError):
    """The peer sent bytes that are not the protocol; the connection is closed."""


class OwnershipError(FleetError):
    """The connected workers leave experts without an owner."""


class WorkerError(FleetError):
    """A worker failed a request. Names the worker, and the layer where there is one."""

    def __init__(self, message: str, *, worker: str, layer: int | None = None, hint: str | None = None) -> None:
        place = f"worker {worker}" + ("" if layer is None else f", layer {layer}")
        super().__init__(f"{place}: {message}", hint=hint)
        self.worker = worker
        self.layer = layer


class WorkerLostError(WorkerError):
    """The connection to a worker is gone or cannot be made."""


class WorkerTimeoutError(WorkerError):
    """A worker did not answer within the deadline; its late answer will be dropped."""


class WorkerRefusedError(WorkerError):
    """A worker answered with a typed refusal (:class:`orchestrator.types.RefusalCode`)."""


class StageError(FleetError):
    """A stage of a ring failed. ``stage`` names its layers and where it is."""

    def __init__(self, message: str, *, stage: str, hint: str | None = None) -> None:
        super().__init__(f"stage {stage}: {message}", hint=hint)
        self.stage = stage


class StageLostError(StageError):
    """The connection to a stage is gone or cannot be made; what its caches held is lost."""


class StageTimeoutError(StageLostError):
    """A stage did not go on within the deadline; it counts as lost."""


class StageRefusedError(StageError):
    """A stage answered with a refusal, or cannot be part of this ring."""


class StageFailedError(StageError):
    """A stage could not do one step or operation; the ring lives on."""


class StepDroppedError(LinkcppError):
    """A step was cancelled, or came to nothing because one did that it goes on from."""


# --- verification (exit code 1) ------------------------------------------------------------------------------


class GateError(LinkcppError):
    """The verification gate failed, or a model that has not passed it was to be served."""


# --- requests of a client (mapped to HTTP statuses in api) ---------------------------------------------------


class RequestError(LinkcppError):
    """A client's request cannot be served as it is; ``status`` is the HTTP status, ``code`` OpenAI's code."""

    exit_code = 2

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request_error",
        param: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code
        self.param = param


class BusyError(RequestError):
    """More requests wait than there is room for; ``retry_after`` is when to come again, in seconds."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message, status=429, code="queue_full", hint=f"try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class DeadlineError(RequestError):
    """The time that a request was given is over before its answer is complete."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"the answer was not complete within {seconds:g} s",
            status=504,
            code="deadline_exceeded",
            hint="ask for fewer tokens, or allow more time",
        )


class ContextLengthError(RequestError):
    """The prompt is longer than the context; carries both counts."""

    def __init__(self, prompt_tokens: int, n_ctx: int, *, param: str | None = None) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens, more than the context of {n_ctx}",
            code="context_length_exceeded",
            param=param,
            hint="shorten the conversation, or serve with a larger --ctx",
        )
        self.prompt_tokens = prompt_tokens
        self.n_ctx = n_ctx
