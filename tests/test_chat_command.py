from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from api_server import fake_server
from fake_engine import FakeModel, FakeSession, answer

from orchestrator.cli.chat import printable

ROOT = Path(__file__).resolve().parent.parent


def linkcpp(*arguments, stdin="", timeout=60):
    return subprocess.run(
        [sys.executable, "-m", "orchestrator", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        check=False,
    )


def echo(held):
    """Answer with the number of messages of the conversation, so that its history shows."""
    turns = sum(1 for token in held if token == 258)  # <|im_start|>
    return answer([*f"turn {turns}".encode()])(held)


def test_lines_of_a_pipe_are_a_conversation():
    with fake_server(FakeSession(script=echo)) as (url, _):
        done = linkcpp("chat", "--url", url, stdin="Hi\n\nMore\n/reset\nAgain\n/exit\nnever\n")
    assert (done.returncode, done.stdout) == (0, "turn 2\nturn 4\nturn 2\n"), done.stderr


def test_one_message_and_json():
    with fake_server(FakeSession(script=echo)) as (url, _):
        done = linkcpp("chat", "--url", url, "--system", "Be kind", "--prompt", "Hi", "--json")
        assert json.loads(done.stdout)["text"] == "turn 3"
        assert json.loads(done.stdout)["finish_reason"] == "stop"
        done = linkcpp("chat", "--url", url, "--prompt", "-", "--max-tokens", "3", stdin="several\nlines\n")
        assert done.stdout == "tur\n"


def test_errors_have_a_line_a_hint_and_an_exit_code():
    done = linkcpp("chat", "--url", "http://127.0.0.1:9", "--prompt", "Hi")
    assert done.returncode == 4
    assert done.stderr.startswith("error: there is no server at http://127.0.0.1:9")
    assert "hint: " in done.stderr
    with fake_server(model=FakeModel(chat_template=None)) as (url, _):
        done = linkcpp("chat", "--url", url, stdin="Hi\n")
        assert done.returncode == 2
        assert "no chat template" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["m.gguf", "--url", "http://x"], ["--workers", "2"], ["m.gguf", "--workers", "1", "--worker", "h:1"]],
)
def test_contradictions_are_usage_errors(arguments):
    assert linkcpp("chat", *arguments).returncode == 2


class Screen:
    """A command on a terminal of its own."""

    def __init__(self, *arguments):
        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        os.set_blocking(self._master, False)
        self.text = ""

    def type(self, text):
        os.write(self._master, text.encode())

    def wait_for(self, text, seconds=30):
        deadline = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            try:
                self.text += os.read(self._master, 4096).decode()
            except BlockingIOError:
                time.sleep(0.02)
        self.text = self.text.partition(text)[2]

    def close(self):
        code = self.process.wait(30)
        os.close(self._master)
        return code


def test_on_a_terminal_ctrl_c_stops_the_answer_and_not_the_program():
    def script(held):
        return ord("a") if len(held) < 200 else echo(held)

    session = FakeSession(script=script, step_seconds=0.02, n_ctx=600)
    with fake_server(session) as (url, gateway):
        screen = Screen("chat", "--url", url)
        screen.wait_for("/exit")
        screen.wait_for("> ")
        screen.type("Hello\n")
        screen.wait_for("aaaaa")
        screen.process.send_signal(signal.SIGINT)
        screen.wait_for("(stopped)")
        screen.wait_for("> ")
        deadline = time.monotonic() + 15
        while gateway.state().running is not None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        screen.process.send_signal(signal.SIGINT)
        screen.wait_for("/exit")
        screen.type("/help\n")
        screen.wait_for("/reset")
        screen.type("x" * 700 + "\n")
        screen.wait_for("more than the context of 600")
        screen.wait_for("> ")
        screen.type("x" * 200 + "\n")
        screen.wait_for("turn 4")  # the stopped answer is part of the conversation, the refused message is not
        screen.type("/exit\n")
        assert screen.close() == 0


def test_a_terminal_gets_no_control_characters():
    assert printable("a\x1b[2Jb\tc\n\x9bd\x07é😀") == "a[2Jb\tc\ndé😀"
