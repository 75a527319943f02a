"""Waiting for answers without waiting in vain: not too long, and not for a client that is gone."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

from starlette.requests import ClientDisconnect, Request

from hnclip.search.serve.failures import Refused, busy
from hnclip.search.serve.line import Full, Line
from hnclip.search.serve.service import Service

STARTING = "the model is still being loaded: try again soon"
GLANCE = 0.1  # seconds between two looks whether the model is loaded


async def answered(service: Service, request: Request, line: Line[Any], question: object) -> Any:
    """The answer to a question.

    Raises:
        Refused: too many wait already, or it took too long.
        ClientDisconnect: nobody wants the answer any more. It is not computed then, unless that has begun.
    """
    try:
        answer = asyncio.wrap_future(line.ask(question))
    except Full:
        raise busy() from None
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({answer, gone}, timeout=service.options.timeout, return_when=asyncio.FIRST_COMPLETED)
        if answer.cancelled():
            raise busy("the server is stopping")
        if answer.done():
            return answer.result()
        if gone.done():
            raise ClientDisconnect
        raise Refused(504) if service.keeper.searchable else busy(STARTING, seconds=5)
    finally:
        answer.cancel()
        gone.cancel()


async def ready(service: Service) -> None:
    """Wait for the model.

    Raises:
        Refused: that took too long.
    """
    until = monotonic() + service.options.timeout
    while not service.keeper.searchable:
        if monotonic() > until:
            raise busy(STARTING, seconds=5)
        await asyncio.sleep(GLANCE)


async def _gone(request: Request) -> None:
    """Returns when the client has gone away; its request has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
