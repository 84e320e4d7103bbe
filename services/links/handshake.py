"""What the two ends of a link say to each other before anything else, and why one may turn the other away."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.protocol.links import PROTOCOL_VERSION, Hello, Link, Welcome

if TYPE_CHECKING:
    from penstock.services.links.link import Self


def hello(me: Self, epoch: int, session: int) -> Hello:
    """A connector's."""
    return Hello(
        version=PROTOCOL_VERSION,
        role=me.role,
        index=me.index,
        incarnation=me.incarnation,
        pid=os.getpid(),
        config=me.shared,
        epoch=epoch,
        session=session,
        place=me.place,
    )


def welcome(me: Self, answered: Hello, epoch: int, number: int) -> Welcome:
    """A binder's answer, in its session of that number."""
    return Welcome(
        version=PROTOCOL_VERSION,
        role=me.role,
        index=me.index,
        incarnation=me.incarnation,
        pid=os.getpid(),
        epoch=epoch,
        session=answered.session,
        number=number,
        place=me.place,
    )


def refusal(link: Link, me: Self, hello: Hello) -> str:
    """Why this hello cannot be accepted, in words that say which side to fix; empty when it can."""
    who = f"{hello.role}-{hello.index} (pid {hello.pid})"
    if hello.role != link.connector:
        return f"{who} connected to the link {link.name!r}, which is for role {link.connector.value!r}"
    if hello.version != PROTOCOL_VERSION:
        return (
            f"{who} speaks protocol version {hello.version}, {me.role.value}-{me.index} speaks {PROTOCOL_VERSION}; "
            "start both from the same release"
        )
    if hello.config != me.shared:
        return (
            f"{who} was started with other model options than {me.role.value}-{me.index}; give both the same "
            "(compare `penstock config` on each side)"
        )
    return ""
