"""What a tokenizer process tells of itself and passes on, and what passes through its relay."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from penstock.engine_core.histogram import Histogram
from penstock.engine_core.parsers.dialect import Dialect
from penstock.engine_core.text.prompts import PromptLimits
from penstock.protocol.config import TokenizerConfig
from penstock.protocol.figures import Census
from penstock.protocol.links import Role
from penstock.protocol.messages import Message
from penstock.services.links.link import Joined, PortStatistics, Self
from penstock.services.metrics.definitions import METRICS, TOKENIZER
from penstock.services.metrics.snapshot import LAG, Vitals
from penstock.services.metrics.tokenizer import Figures
from penstock.services.tokenizer.grammar_compiler import Compiler
from penstock.services.tokenizer.server_loop import Relay
from penstock.services.tokenizer.template_protocol import Setting
from penstock.services.tokenizer.templates import Templates
from tests.engine_core.text.streams import make_frontend
from tests.services.metrics.figures import every
from tests.services.tokenizer.test_server_loop import Neighbour, Wire


class FakeWatch:
    """An end of a link with these peers."""

    def __init__(self, *peers: Neighbour) -> None:
        self.peers = peers
        self.sent: list[tuple[Neighbour, Message]] = []

    def send_each(self, peers: list[Neighbour], message: Message) -> bool:
        self.sent += [(peer, message) for peer in peers]
        return True

    def statistics(self) -> PortStatistics:
        return PortStatistics(len(self.peers), 2, 3, 4, 5, 6, 7)


async def test_everything_in_the_catalogue_is_told_with_what_schedulers_told(tmp_path: Path) -> None:
    api, full, scheduler = Neighbour(), Neighbour(1, credit=0), Neighbour()
    text, tokens = FakeWatch(api, full), FakeWatch(scheduler)
    watches: list[Any] = [text, tokens]
    with ThreadPoolExecutor(1) as threads:
        relay = Relay(make_frontend(apis=()), Wire(), [Wire()], threads)
        relay.from_scheduler(0, [scheduler.arrival(Joined())])
        told = Census((every(Role.SCHEDULER), every(Role.EXECUTOR)))
        relay.from_scheduler(0, [scheduler.arrival(told)])  # type: ignore[arg-type]
        vitals = Vitals(Self(Role.TOKENIZER, 1, 5, 7), tmp_path, Histogram(LAG))
        options = TokenizerConfig()
        templates = Templates(Setting("", "", PromptLimits(9, 9, ()), {}, Dialect(), None, 2.0, 1 << 30), options)
        figures = Figures(vitals, relay, Compiler(tmp_path, options), templates, watches[0], [watches[1]])
        figures.tell()
        ((to, census),) = text.sent
        assert to is api
        assert isinstance(census, Census)
        assert [(each.role, each.index) for each in census.processes] == [
            ("tokenizer", 1), ("executor", 0), ("scheduler", 0),
        ]  # fmt: skip
        own = census.processes[0]
        known = {metric.name: metric for metric in METRICS}
        for each in (*own.samples, *own.spreads):
            assert len(each.labels) == len(known[each.name].labels), each.name
        assert {metric.name for metric in TOKENIZER} <= {each.name for each in (*own.samples, *own.spreads)}
        reasons = {sample.labels for sample in own.samples if sample.name == "waiting_requests"}
        assert reasons == {("text",), ("grammar",), ("engine",)}
        tokens.peers = ()
        figures.tell()
        assert [each.role for each in text.sent[-1][1].processes] == ["tokenizer"]  # type: ignore[attr-defined]
        relay.close()
