"""Errors in the form of the OpenAI API: which status, which body. Pure."""

from __future__ import annotations

from orchestrator.errors import (
    BusyError,
    ChatTemplateError,
    ContextLengthError,
    FleetError,
    LinkcppError,
    RequestError,
    WorkerError,
)


def status_of(error: LinkcppError) -> int:
    """Return the HTTP status: the client's fault, a worker's (503: worth another try), or this server's."""
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, ChatTemplateError):
        return 400
    return 503 if isinstance(error, FleetError) else 500


def retry_after(error: LinkcppError) -> int | None:
    """Return in how many seconds another try may do better; None where it will not."""
    if isinstance(error, BusyError):
        return max(1, round(error.retry_after))
    return 1 if status_of(error) in (429, 503) else None


def error_body(error: LinkcppError) -> dict[str, object]:
    """Return the JSON body; further fields carry what a program may want to read."""
    status = status_of(error)
    fields: dict[str, object] = {
        "message": str(error) if error.hint is None else f"{error}; {error.hint}",
        "type": "invalid_request_error" if status < 500 else "server_error",
        "param": error.param if isinstance(error, RequestError) else None,
        "code": _code(error),
    }
    if isinstance(error, ContextLengthError):
        # Clients of llama.cpp's server look for this type, those of OpenAI for the code.
        fields["type"] = "exceed_context_size_error"
        fields["n_prompt_tokens"] = error.prompt_tokens
        fields["n_ctx"] = error.n_ctx
    if isinstance(error, WorkerError):
        fields["worker"] = error.worker
        fields["layer"] = error.layer
    return {"error": fields}


def _code(error: LinkcppError) -> str:
    if isinstance(error, RequestError):
        return error.code
    if isinstance(error, ChatTemplateError):
        return "chat_template_error"
    return "worker_unavailable" if isinstance(error, FleetError) else "engine_error"
