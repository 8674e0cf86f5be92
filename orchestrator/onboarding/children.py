"""Run one job of a long series in a process of its own, because the engine may end the process it runs in.

A job is a module with a ``main`` that takes one JSON object as its argument and prints one as the last line of its
standard output. What it says on standard error is shown only where the process ends without an answer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from orchestrator.errors import EngineError, LinkcppError

_PACKAGE_PARENT: Final = Path(__file__).resolve().parents[2]
_LONGEST_REASON: Final = 300
_LOOK_SECONDS: Final = 1.0
_CLEAN_SECONDS: Final = 10.0
_TELLING: Final = ("GGML_ASSERT", "GGML_ABORT", "error", "Error")


class JobFailedError(EngineError):
    """A job gave no answer: it raised, was killed, or took too long. The text is the reason in one line."""


def run_job(
    module: str,
    order: Mapping[str, object],
    *,
    timeout: float,
    environment: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """Run ``python -m module ORDER`` and return its answer; raise :class:`JobFailedError`.

    ``environment`` is added to this process's. ``timeout`` is in seconds.
    """
    paths = [str(_PACKAGE_PARENT), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, json.dumps(order)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout,
            env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(paths)},
        )
    except subprocess.TimeoutExpired as error:
        raise JobFailedError(f"no answer within {timeout:g} s") from error
    except OSError as error:
        raise JobFailedError(f"cannot be started: {error}") from error
    answer = _last_object(done.stdout)
    if answer is None:
        raise JobFailedError(_reason(done.returncode, done.stderr))
    if "error" in answer:
        raise JobFailedError(str(answer["error"]))
    return answer


def answer_order(job: Callable[[Mapping[str, object]], Mapping[str, object]]) -> None:
    """Be the other side of :func:`run_job`: read the order, do the job, print the answer or the error's words.

    A job whose parent is gone ends: nobody would read its answer.
    """
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), name="parent", daemon=True).start()
    order = json.loads(sys.argv[1])
    try:
        answer = job(order)
    except LinkcppError as error:
        answer = {"error": str(error).splitlines()[0]}
    sys.stdout.write("\n" + json.dumps(answer, allow_nan=False) + "\n")
    sys.stdout.flush()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C would: what was made is cleaned up
    time.sleep(_CLEAN_SECONDS)
    os._exit(1)  # the engine computes, or the signal is ignored


def _last_object(text: str) -> dict[str, object] | None:
    lines = text.strip().splitlines()
    if not lines:
        return None
    try:
        value = json.loads(lines[-1])
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _reason(code: int, said: str) -> str:
    """Choose the most telling line: the engine's assertion, else an exception, else the last."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    end = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    for sign in _TELLING:
        telling = [line for line in lines if sign in line]
        if telling:
            return f"{end}: {telling[-1][:_LONGEST_REASON]}"
    return f"{end}: {lines[-1][:_LONGEST_REASON]}" if lines else end
