"""`linkcpp serve` as a process, ready when the context begins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from orchestrator.models.gguf import GgufFile, raw_entries
from orchestrator.models.gguf_writer import PlannedTensor, entry_string, file_bytes, write_gguf

ROOT = Path(__file__).resolve().parent.parent
CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def add_template(source: Path, destination: Path, template: str) -> Path:
    """Copy a model and give it a chat template."""
    model = GgufFile.open(source)
    entries = [*raw_entries(model.headers[0]), entry_string("tokenizer.chat_template", template)]
    tensors = [
        PlannedTensor(name, info.type, info.shape, lambda info=info: file_bytes(source, info))
        for name, info in model.tensors.items()
    ]
    write_gguf(destination, entries, tensors, alignment=model.headers[0].alignment)
    return destination


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def run_linkcpp(*arguments, timeout=120):
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "orchestrator", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(),
        check=False,
    )


class Server:
    """A serve process; ``ready`` is what it said when it was ready."""

    def __init__(self, *arguments):
        command = [sys.executable, "-m", "orchestrator", "serve", *map(str, arguments), "--json"]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed when the process has ended)
        self.process = subprocess.Popen(
            [*command, "--listen", "127.0.0.1:0"],
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment(),
        )
        line = self.process.stdout.readline()
        assert line, self.stderr()
        self.ready = json.loads(line)
        self.url = self.ready["url"]

    def stderr(self):
        self.errors.seek(0)
        return self.errors.read()

    def stop(self, number=signal.SIGTERM, timeout=30):
        """End it with a signal; gives the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout)


@contextmanager
def running(*arguments):
    server = Server(*arguments)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
        server.process.stdout.close()
        server.errors.close()


def post(url, body, path="/v1/completions"):
    """Return (status, body as text)."""
    try:
        request = urllib.request.Request(url + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def get(url, path):
    try:
        with urllib.request.urlopen(url + path, timeout=30) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
