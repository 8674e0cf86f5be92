"""The routes that generate: chats, completions, responses."""

from __future__ import annotations

import asyncio
import secrets
import string

from aiohttp import web

from orchestrator.api.answering import answer
from orchestrator.api.embeddings import check_dimensions, check_tokens, embedding_body, parse_embedding_request
from orchestrator.api.endpoint import Endpoint, ServedModel, read_json
from orchestrator.api.logs import notes
from orchestrator.api.planning import ChatPlan, check_grammar, format_grammar, param_of_grammar, tokenize
from orchestrator.api.responses import ResponseForm, parse_response_request
from orchestrator.api.schema import ChatRequest, GenerationOptions, parse_chat_request, parse_completion_request
from orchestrator.api.stream import AnswerForm, AnswerHead, ChatForm, CompletionForm
from orchestrator.errors import RequestError
from orchestrator.gateway.sequence import GenerationRequest, Usage

_LETTERS = string.ascii_letters + string.digits


class GeneratingRoutes:
    """One method per route."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Continue a conversation."""
        body = await read_json(request)
        served = self._endpoint.ready_to_continue()
        parsed = parse_chat_request(body, self._endpoint.names, secrets.randbits(63))
        plan = await _plan(served, parsed)
        options = parsed.options
        head = self._endpoint.head("chatcmpl-", served)
        form = ChatForm(
            head,
            [plan.new_reader() for _ in range(options.n)],
            logprobs=options.top_logprobs is not None,
            include_usage=options.include_usage,
            new_identifier=_call_identifier,
        )
        return await self._answer(request, served, options, head, [plan.prompt], form, plan.grammar, plan.visible)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Continue a conversation in the form of the Responses API."""
        body = await read_json(request)
        served = self._endpoint.ready_to_continue()
        parsed = parse_response_request(body, self._endpoint.names, secrets.randbits(63))
        plan = await _plan(served, parsed.chat)
        head = self._endpoint.head("resp_", served)
        form = ResponseForm(head, plan.new_reader(), parsed.echo)
        options = parsed.chat.options
        return await self._answer(request, served, options, head, [plan.prompt], form, plan.grammar, plan.visible)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Continue texts."""
        body = await read_json(request)
        served = self._endpoint.ready_to_continue()
        parsed = parse_completion_request(body, self._endpoint.names, secrets.randbits(63))
        options = parsed.options
        grammar = format_grammar(options.format)
        check_grammar(served.tokenizer, grammar, options.format.param)
        prompts = [_prompt_tokens(served, prompt) for prompt in parsed.prompts]
        head = self._endpoint.head("cmpl-", served)
        form = CompletionForm(
            head,
            len(prompts) * options.n,
            logprobs=options.top_logprobs is not None,
            include_usage=options.include_usage,
        )
        return await self._answer(request, served, options, head, prompts, form, grammar, frozenset())

    async def embed(self, request: web.Request) -> web.StreamResponse:
        """Embed texts, where the model can."""
        body = await read_json(request)
        served = self._endpoint.ready()
        name = self._endpoint.names.name
        embedder = served.embedder
        if embedder is None:
            raise RequestError(
                f"{name!r} continues text and makes no embeddings",
                code="unsupported_operation",
                hint="serve a model made for embeddings",
            )
        parsed = parse_embedding_request(body, self._endpoint.names)
        inputs = [_prompt_tokens(served, one) for one in parsed.inputs]
        check_tokens(inputs, served.gateway.n_vocab)
        vectors = []
        for tokens in inputs:
            vectors.append(await asyncio.to_thread(embedder.embed, tokens))
            check_dimensions(parsed.dimensions, len(vectors[-1]))
        count = sum(map(len, inputs))
        notes().usage = Usage(count, 0)
        return web.json_response(embedding_body(name, vectors, count, as_base64=parsed.as_base64))

    async def _answer(
        self,
        request: web.Request,
        served: ServedModel,
        options: GenerationOptions,
        head: AnswerHead,
        prompts: list[tuple[int, ...]],
        form: AnswerForm,
        grammar: str | None,
        visible: frozenset[int],
    ) -> web.StreamResponse:
        wanted = [
            GenerationRequest(
                prompt=prompt,
                max_tokens=options.max_tokens,
                sampling=options.sampling_of(number),
                stop=options.stop,
                top_logprobs=options.top_logprobs,
                ignore_end=options.ignore_end,
                identifier=head.identifier,
                grammar=grammar,
                visible=visible,
            )
            for prompt in prompts
            for number in range(options.n)
        ]
        terms = self._endpoint.terms(request, options.session)
        metrics = self._endpoint.metrics
        return await answer(request, served.gateway, wanted, terms, form, metrics, stream=options.stream)


async def _plan(served: ServedModel, parsed: ChatRequest) -> ChatPlan:
    planner = served.chat()

    def plan() -> ChatPlan:
        planned = planner.plan(parsed)
        check_grammar(served.tokenizer, planned.grammar, param_of_grammar(parsed.tools, parsed.options.format))
        return planned

    # A long conversation or a large schema takes a while, and the event loop has other requests.
    return await asyncio.to_thread(plan)


def _prompt_tokens(served: ServedModel, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
    tokens = tokenize(served.tokenizer, prompt, add_special=True) if isinstance(prompt, str) else prompt
    if not tokens and served.tokenizer.bos >= 0:
        return (served.tokenizer.bos,)  # an empty prompt: any text
    return tokens


def _call_identifier() -> str:
    """Return an identifier that the strictest chat templates take too."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))
