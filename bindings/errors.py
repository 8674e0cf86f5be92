"""Errors of the bindings; the engine translates them where it calls."""

from __future__ import annotations


class BindingsError(Exception):
    """Something about the native library; ``str(error)`` is one line for people, ``hint`` says what to do."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class BuildError(BindingsError):
    """The engine could not be fetched, patched, compiled or installed."""
