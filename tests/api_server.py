"""An endpoint on a real port, in a thread of its own, over the in-memory twin of the engine."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager

from fake_backend import SessionBackend
from fake_engine import FakeModel, FakeSession

from orchestrator.api.endpoint import Endpoint, ServedModel
from orchestrator.api.listen import listening
from orchestrator.api.schema import ModelNames
from orchestrator.errors import ChatTemplateError
from orchestrator.gateway.gateway import Gateway
from orchestrator.gateway.report import FleetReport
from orchestrator.gateway.template import ChatTemplate, missing_template
from orchestrator.transport.base import HostPort


def served(model: FakeModel, session: FakeSession, gateway: Gateway, statistics=None) -> ServedModel:
    template: ChatTemplate | ChatTemplateError = missing_template()
    if model.chat_template is not None:
        template = ChatTemplate(model.chat_template, bos="<s>")
    report = FleetReport(
        model="fake",
        contract="exact",
        engine="twin",
        state=gateway.state,
        statistics=statistics,
        now=time.monotonic,
        wall=time.time,
    )
    return ServedModel.of(gateway, model, template, report, "twin")


@contextmanager
def serving(endpoint: Endpoint):
    """Serve an endpoint on a free port; gives the URL."""
    started = threading.Event()
    box = {}

    async def main():
        box["stop"] = asyncio.Event()
        box["loop"] = asyncio.get_running_loop()
        async with listening(endpoint, HostPort("127.0.0.1", 0)) as bound:
            box["url"] = f"http://{bound}"
            started.set()
            await box["stop"].wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert started.wait(10)
    try:
        yield box["url"]
    finally:
        box["loop"].call_soon_threadsafe(box["stop"].set)
        thread.join(10)
        assert not thread.is_alive()


@contextmanager
def fake_server(session: FakeSession | None = None, model: FakeModel | None = None, statistics=None):
    """Serve the twin; gives (URL, gateway)."""
    session = session or FakeSession()
    model = model or FakeModel()
    endpoint = Endpoint(ModelNames("fake", "fake.gguf"))
    with Gateway(model, SessionBackend(session)) as gateway:
        endpoint.served = served(model, session, gateway, statistics)
        with serving(endpoint) as url:
            yield url, gateway
