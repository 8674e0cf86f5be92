from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.engine.synth import synth

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts jobs in the background with Ctrl-C ignored, and our child processes would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

FAMILIES = (
    "llama",
    "qwen2moe",
    "qwen3moe",
    "deepseek2",
    "gpt-oss",
    "llama4",
    "grovemoe",
    "step35",
    "qwen35moe",
)
"""The named subset of architectures that `make test` runs; `make test-all` runs every one."""


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Make a tiny random model of an architecture once per run."""
    folder = tmp_path_factory.mktemp("synthetic")

    def make(architecture: str) -> Path:
        path = folder / f"{architecture}.gguf"
        if not path.exists():
            synth(architecture, path)
        return path

    return make


@pytest.fixture(scope="session")
def synthetic_like(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], Path]]:
    """Make a model with the true shape of a known one once per run."""
    folder = tmp_path_factory.mktemp("faithful")

    def make(architecture: str, like: str) -> Path:
        path = folder / f"{like}.gguf"
        if not path.exists():
            synth(architecture, path, like=like)
        return path

    return make
