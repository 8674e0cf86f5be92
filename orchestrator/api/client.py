"""Ask an OpenAI-compatible endpoint for a streamed answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import aiohttp

from orchestrator.errors import FleetError, InputError, LinkcppError, ProtocolError, RequestError
from orchestrator.gateway.template import ChatMessage


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of an answer; ``finish_reason`` is set in the last one with text, the counts in the last of all."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


async def stream_chat(
    url: str, messages: Sequence[ChatMessage], parameters: Mapping[str, object], api_key: str | None = None
) -> AsyncGenerator[AnswerPart, None]:
    """Yield the parts of the answer to a conversation.

    ``url`` is the server's, with or without ``/v1``; ``parameters`` are further fields of the request. ``api_key``
    is for a server that asks for one. Raises
    :class:`RequestError` with the server's words when it refuses, and :class:`FleetError` when it is not there,
    leaves, or fails in the middle of the answer.
    """
    body = {
        "messages": [{"role": message.role, "content": message.content} for message in messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        **parameters,
    }
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    # No limit for the whole answer: a large model over a slow line takes minutes, and Ctrl-C is at hand.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 20) as session,
            session.post(chat_url(url), json=body, headers=headers) as response,
        ):
            if response.status != 200:
                raise _refusal(response.status, await response.text())
            async with aclosing(_parts(response.content)) as parts:
                async for part in parts:
                    yield part
    except aiohttp.InvalidURL as error:
        raise InputError(f"{url!r} is not a URL", hint="write it like http://127.0.0.1:8080") from error
    except aiohttp.ClientConnectorError as error:
        raise FleetError(
            f"there is no server at {url}: {error.os_error.strerror or error}", hint="start one with `linkcpp serve`"
        ) from error
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        raise FleetError(f"the connection to {url} broke: {error or type(error).__name__}") from error


def chat_url(url: str) -> str:
    """Return the address of the chat route of a server."""
    base = url.rstrip("/").removesuffix("/v1")
    return ("" if "://" in base else "http://") + base + "/v1/chat/completions"


def parse_event(data: bytes) -> AnswerPart | None:
    """Parse one event's data; None for the end mark.

    Raises :class:`FleetError` for an error that the server reports, :class:`ProtocolError` for anything unexpected.
    """
    if data == b"[DONE]":
        return None
    try:
        body = json.loads(data)
        if "error" in body:
            raise FleetError(str(body["error"]["message"]))
        usage = body.get("usage") or {}
        choice = body["choices"][0] if body["choices"] else {}
        return AnswerPart(
            text=choice.get("delta", {}).get("content") or "",
            finish_reason=choice.get("finish_reason"),
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=usage.get("completion_tokens"),
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ProtocolError("the server sent an event that is not of the OpenAI API") from error


async def _parts(content: aiohttp.StreamReader) -> AsyncGenerator[AnswerPart, None]:
    async for line in content:
        if line.startswith(b"data:"):
            part = parse_event(line.removeprefix(b"data:").strip())
            if part is None:
                return
            yield part
    raise FleetError("the server ended the answer in the middle")


def _refusal(status: int, text: str) -> LinkcppError:
    try:
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the server answers with HTTP {status}"
    if status >= 500:
        return FleetError(message)
    hint = "give it with --api-key or LINKCPP_API_KEY" if status == 401 else None
    return RequestError(message, status=status, hint=hint)
