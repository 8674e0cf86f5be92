"""`linkcpp chat`: talk with a model in the terminal."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import click

from orchestrator.api.client import stream_chat
from orchestrator.cli.app import Terminal
from orchestrator.cli.backbone_options import BackboneOptions, backbone_options, open_model, start_workers
from orchestrator.cli.client_options import api_key_option
from orchestrator.errors import ChatTemplateError, LinkcppError
from orchestrator.gateway.backend import known_invariance
from orchestrator.gateway.sampling import SamplingParameters
from orchestrator.gateway.sequence import Finished, GenerationRequest
from orchestrator.gateway.template import ChatMessage, ChatTemplate
from orchestrator.models.catalog import resolve_model

if TYPE_CHECKING:
    from orchestrator.engine.model import Model
    from orchestrator.gateway.gateway import Gateway

DEFAULT_URL: Final = "http://127.0.0.1:8080"
HELP: Final = "/reset forgets the conversation, /exit (or Ctrl-D) ends it, Ctrl-C stops an answer"

Write = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How answers are made; None leaves the choice to the model or the server."""

    temperature: float | None
    top_p: float | None
    seed: int | None
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an answer ended, and its token counts where they are known."""

    finish_reason: str
    prompt_tokens: int | None
    completion_tokens: int | None


class Answerer(Protocol):
    """Whoever answers: a model in this process or an endpoint."""

    def answer(self, messages: Sequence[ChatMessage], write: Write) -> Outcome:
        """Answer a conversation, writing the text piece by piece; raise an error for an answer that failed."""


class RemoteAnswerer:
    """Asks an endpoint of the OpenAI API."""

    def __init__(self, url: str, settings: AnswerSettings, api_key: str | None = None) -> None:
        self._url = url
        self._api_key = api_key
        named = {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": settings.seed,
            "max_tokens": settings.max_tokens,
        }
        self._parameters = {name: value for name, value in named.items() if value is not None}

    def answer(self, messages: Sequence[ChatMessage], write: Write) -> Outcome:
        """Answer a conversation; see :class:`Answerer`."""
        return asyncio.run(self._answer(messages, write))

    async def _answer(self, messages: Sequence[ChatMessage], write: Write) -> Outcome:
        reason, prompt_tokens, completion_tokens = "", None, None
        async for part in stream_chat(self._url, messages, self._parameters, self._api_key):
            if part.text:
                write(part.text)
            reason = part.finish_reason or reason
            prompt_tokens = part.prompt_tokens or prompt_tokens
            completion_tokens = part.completion_tokens or completion_tokens
        return Outcome(reason, prompt_tokens, completion_tokens)


class LocalAnswerer:
    """Asks a gateway in this process."""

    def __init__(self, gateway: Gateway, model: Model, template: ChatTemplate, settings: AnswerSettings) -> None:
        self._gateway = gateway
        self._model = model
        self._template = template
        self._settings = settings
        self._answers = 0

    def answer(self, messages: Sequence[ChatMessage], write: Write) -> Outcome:
        """Answer a conversation; see :class:`Answerer`."""
        prompt = self._template.render(messages)
        add_special = not (self._template.bos and prompt.startswith(self._template.bos))
        tokens = self._model.tokenize(prompt, add_special=add_special, parse_special=True)
        generation = self._gateway.submit(
            GenerationRequest(tuple(tokens), self._settings.max_tokens, self._sampling(), identifier="chat")
        )
        try:
            for event in generation:
                if isinstance(event, Finished):
                    return Outcome(event.reason, event.usage.prompt_tokens, event.usage.completion_tokens)
                if event.text:
                    write(event.text)
        finally:
            generation.cancel()
        raise AssertionError("a generation ends with Finished or an error")

    def _sampling(self) -> SamplingParameters:
        default = SamplingParameters()
        settings = self._settings
        self._answers += 1
        return SamplingParameters(
            temperature=default.temperature if settings.temperature is None else settings.temperature,
            top_p=default.top_p if settings.top_p is None else settings.top_p,
            seed=time.time_ns() if settings.seed is None else settings.seed,
        )


class Conversation:
    """Reads what the user says, answers it, and remembers both."""

    def __init__(self, terminal: Terminal, answerer: Answerer, system: str | None, *, as_json: bool) -> None:
        self._terminal = terminal
        self._answerer = answerer
        self._system = [ChatMessage("system", system)] if system else []
        self._messages = list(self._system)
        self._as_json = as_json

    def run_interactive(self) -> None:
        """Talk until the user ends it; an answer that fails or is stopped does not end it."""
        with suppress(ImportError):
            import readline  # noqa: F401  (input() then edits lines and recalls them)
        self._terminal.print(HELP, style="dim")
        while True:
            try:
                line = input("> ")
            except EOFError:
                self._terminal.print()
                return
            except KeyboardInterrupt:
                self._terminal.print("\n" + HELP, style="dim")
                continue
            if line.strip() in {"/exit", "/quit"}:
                return
            try:
                self._handle(line)
            except LinkcppError as error:
                self._terminal.error(f"error: {error}")
                if error.hint:
                    self._terminal.error(f"hint: {error.hint}")
            except KeyboardInterrupt:
                self._terminal.print(" (stopped)", style="dim")

    def run_lines(self, lines: Iterable[str]) -> None:
        """Answer each line of a pipe; the first answer that fails ends it with an error."""
        for line in lines:
            if line.strip() in {"/exit", "/quit"}:
                return
            self._handle(line.rstrip("\n"))

    def say(self, text: str) -> None:
        """Answer one message of the user and remember both; a message whose answer failed is forgotten."""
        self._messages.append(ChatMessage("user", text))
        parts: list[str] = []
        try:
            outcome = self._answerer.answer(self._messages, lambda part: self._show(part, parts))
        except LinkcppError:
            self._end_line(parts)
            self._messages.pop()
            raise
        except KeyboardInterrupt:
            self._messages.append(ChatMessage("assistant", "".join(parts)))  # what the user has seen was said
            raise
        self._messages.append(ChatMessage("assistant", "".join(parts)))
        if self._as_json:
            self._terminal.json(
                {
                    "text": "".join(parts),
                    "finish_reason": outcome.finish_reason,
                    "prompt_tokens": outcome.prompt_tokens,
                    "completion_tokens": outcome.completion_tokens,
                }
            )
        self._end_line(parts)

    def _handle(self, line: str) -> None:
        match line.strip():
            case "":
                return
            case "/reset":
                self._messages = list(self._system)
                self._terminal.error("the conversation is forgotten")
            case "/help":
                self._terminal.error(HELP)
            case _:
                self.say(line)

    def _show(self, part: str, parts: list[str]) -> None:
        parts.append(part)
        if not self._as_json:
            file = self._terminal.console.file
            # A model's text must not move the cursor or rename the window: no control characters to a terminal.
            file.write(printable(part) if self._terminal.console.is_terminal else part)
            file.flush()

    def _end_line(self, parts: Sequence[str]) -> None:
        if not self._as_json and parts and not parts[-1].endswith("\n"):
            self._terminal.print()


def printable(text: str) -> str:
    """Return a text without control characters other than line feed and tab."""
    return "".join(char for char in text if char in "\n\t" or not (ord(char) < 32 or 127 <= ord(char) < 160))


@click.command("chat")
@click.argument("model", required=False)
@click.option("--url", default=None, metavar="URL", help=f"Talk with a server. [without MODEL: {DEFAULT_URL}]")
@api_key_option
@click.option("--system", default=None, metavar="TEXT", help="Instructions to the model, before the conversation.")
@click.option("--prompt", default=None, metavar="TEXT", help="Answer one message and end; - reads it from stdin.")
@click.option("--temperature", type=click.FloatRange(0, 2), default=None, help="0 always takes the likeliest token.")
@click.option("--top-p", type=click.FloatRange(0, 1), default=None, help="Choose among this share of likely tokens.")
@click.option("--seed", type=int, default=None, help="Give the same answers again.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=None, help="Longest answer.")
@click.option("--json", "as_json", is_flag=True, help="Print each answer as a JSON object.")
@backbone_options
@click.pass_obj
def command(
    terminal: Terminal,
    model: str | None,
    url: str | None,
    api_key: str | None,
    system: str | None,
    prompt: str | None,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
    max_tokens: int | None,
    as_json: bool,
    options: BackboneOptions,
) -> None:
    """Talk with MODEL (a name or a GGUF file) here, or with the model of a server.

    On a terminal: /reset forgets the conversation, /exit ends it, Ctrl-C stops an answer. From a pipe each line is
    a message, and only the answers are printed.
    """
    if model is not None and url is not None:
        raise click.UsageError("MODEL runs here, --url is a server elsewhere: use one of them")
    if model is None and options.has_workers:
        raise click.UsageError("workers need a MODEL")
    settings = AnswerSettings(temperature, top_p, seed, max_tokens)
    with ExitStack() as stack:
        if model is None:
            answerer: Answerer = RemoteAnswerer(url or DEFAULT_URL, settings, api_key)
        else:
            answerer = _open_local(terminal, stack, model, options, settings)
        conversation = Conversation(terminal, answerer, system, as_json=as_json)
        if prompt is not None:
            conversation.say(sys.stdin.read() if prompt == "-" else prompt)
        elif sys.stdin.isatty():
            conversation.run_interactive()
        else:
            conversation.run_lines(sys.stdin)


def _open_local(
    terminal: Terminal, stack: ExitStack, name: str, options: BackboneOptions, settings: AnswerSettings
) -> Answerer:
    """Open a model, with its workers, for as long as the stack is open."""
    addresses = start_workers(terminal, stack, resolve_model(name), options)
    backbone = open_model(terminal, resolve_model(name), addresses, options)
    gateway = backbone.gateway(
        invariance=known_invariance(backbone.model.architecture), speculate=options.speculation
    )
    stack.callback(backbone.close, gateway)
    template = options.template(backbone.model)
    if isinstance(template, ChatTemplateError):
        raise template
    gateway.start()
    return LocalAnswerer(gateway, backbone.model, template, settings)
