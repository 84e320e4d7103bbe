"""The client that leaves: noticed while its request is read, waited for or streamed."""

from __future__ import annotations

from starlette.types import Receive


class ClientLeft(Exception):
    """The client closed its connection; nobody is there to be answered."""


async def departure(receive: Receive) -> None:
    """Return when the client has left. To be awaited beside the answer, after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass
