"""`linkcpp chat` with the real engine."""

from __future__ import annotations

import pytest
from serve_process import CHATML, add_template, run_linkcpp, running

OPTIONS = ("--prompt", "Grüße?", "--seed", "4", "--max-tokens", "24")


@pytest.fixture(scope="module")
def model(synthetic, tmp_path_factory):
    return add_template(synthetic("llama"), tmp_path_factory.mktemp("chat") / "tiny.gguf", CHATML)


def test_here_over_workers_and_through_a_server_the_answer_is_the_same(model):
    alone = run_linkcpp("chat", model, *OPTIONS)
    assert alone.returncode == 0, alone.stderr
    assert len(alone.stdout) > 10
    assert run_linkcpp("chat", model, "--workers", "3", *OPTIONS).stdout == alone.stdout
    with running(model, "--unverified") as server:
        assert run_linkcpp("chat", "--url", server.url, *OPTIONS).stdout == alone.stdout
    assert run_linkcpp("chat", model, *OPTIONS[:3], "5", *OPTIONS[4:]).stdout != alone.stdout


def test_models_that_cannot_chat_each_say_why(synthetic, model, tmp_path):
    text = tmp_path / "text.gguf"
    text.write_text("this is not a model, it is a longer piece of text")
    broken = add_template(synthetic("llama"), tmp_path / "broken.gguf", "{{ messages[0].content | nosuchfilter }}")
    silent = add_template(synthetic("llama"), tmp_path / "silent.gguf", "Hello!")
    tries = {
        "nothing.gguf": [tmp_path / "nothing.gguf"],
        "GGUF": [text],
        "has no chat template": [synthetic("llama")],
        "is broken": [broken],
        "leaves out what the user says": [silent],
        "fills in a whole text at once": [synthetic("llada-moe")],
        "cannot read the chat template": [model, "--chat-template", tmp_path / "no.jinja"],
    }
    for words, arguments in tries.items():
        done = run_linkcpp("chat", *arguments, *OPTIONS)
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert (done.returncode, done.stdout, len(errors)) == (2, "", 1), (arguments, done)
        assert words in errors[0]
