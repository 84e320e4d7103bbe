"""Templates of requests: whatever they are made of, each ends within its limits, and nobody else is harmed."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.engine_core.embedded import demo_folder
from penstock.engine_core.images.picture import Picture
from penstock.engine_core.parsers.dialect import THINK, Dialect
from penstock.engine_core.parsers.formats import CallFormat
from penstock.engine_core.text.prompts import PromptLimits
from penstock.engine_core.text.rendering import Rendered, Renderer
from penstock.engine_core.text.template import ChatTemplate
from penstock.protocol.columns import pack
from penstock.protocol.config import TokenizerConfig
from penstock.protocol.errors import EngineFailure, InvalidRequest
from penstock.protocol.images import ImageFile
from penstock.protocol.messages import Detokenize, Sampling, SubmitText, Tokenize, ToolUse, Written
from penstock.services.tokenizer import template_worker, templates, worker_pool
from penstock.services.tokenizer.confinement import limit_passed
from penstock.services.tokenizer.template_worker import TemplateSettings, TrialTokenizer
from penstock.services.tokenizer.templates import Templates
from penstock.services.tokenizer.worker_protocol import Refusal
from tests.engine_core.text.sighted import FAMILIES

NAMES = {"bos_token": "<s>"}
DIALECT = Dialect(calls=CallFormat.HERMES, reasoning=THINK, reasoning_marks=frozenset({7}))
MODEL = (str(demo_folder()), "", PromptLimits(2048, 4096, (1,)))
CONTROLS = frozenset(("<s>", "<|end|>"))
MESSAGES = [{"role": "user", "content": "hello world " * 8}]
LIMITS: dict[str, Any] = {"template_workers": 1, "template_timeout": 0.3, "template_memory": 48 << 20}
DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x @ ns.x %}{% endfor %}"
RECURSION = "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BOMBS = [
    "{{ [1] | batch(10**9, 0) | list }}",
    "{{ 'a' | batch(10**9, 'x') | map('length') | list }}",
    "{{ [1] | slice(10**9) | list }}",
    "{{ [[[1]]] | tojson(indent=10**9) }}",
    "{{ ('a ' * 10**6) | wordwrap(1, wrapstring='b' * 10**6) }}",
    "{{ ('a' * 10**6).translate({97: 'b' * 10**6}) }}",
    "{{ (['b' * 10**6] * 10**4) | sum(start=[]) }}",
    "{{ ([[0] * 10**4] * 10**5) | sum(start=[]) }}",
    RECURSION + "{{ m(0) }}",
    "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}",
    "{% macro a(n) %}{% if n %}{{ a(n - 1) ~ a(n - 1) }}{% else %}" + "x" * 99 + "{% endif %}{% endmacro %}{{ a(60) }}",
    "{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    DOUBLING.replace("@", "+"),
    DOUBLING.replace("@", "~"),
    DOUBLING.replace("'ab'", "[1]").replace("@", "+"),
    DOUBLING.replace("'ab'", "9").replace("@", "*"),
    "{% set a = 'x' * 9999 %}" + "".join(f"{{% set a = a ~ a %}}{{# {i} #}}" for i in range(60)) + "{{ a }}",
    LOOPS,
    "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ [0] * 10**10 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ 10 ** (10 ** 8) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ '{:9999999999d}'.format(1) }}",
    "{{ '{:{}}'.format(1, 999999999) }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ 'a' | center(10**10) }}",
    "{{ 'a'.zfill(10**10) }}",
    "{{ 'a\na' | indent(10**10) }}",
    "{{ ('a' * 10**5) | replace('a', 'b' * 10**5) }}",
    "{{ ('b' * 10**5).join('a' * 10**5) }}",
    "{{ (['b' * 10**5] * 10**5) | join }}",
    "{{ ('\t' * 10**5).expandtabs(10**5) }}",
    "{{ (1.0).__format__ }}{{ 'x'.encode('utf-8') * 10**10 }}",
    "{{ strftime_now('%999999999d') ~ strftime_now('%999999999d') }}",
    "{{ ('a' * 10**6).split('') }}{{ ('a' * 10**8) | list | length }}",
    "{{ ('(' * 10**6) | urlencode | urlencode | urlencode | urlencode | urlencode | urlencode | urlencode }}",
    "{{ dict(range(0)).fromkeys(range(99999)) }}{{ ('a' * 10**7) | unique | list }}{{ (range(99999) | list * 10**4) }}",
    "{{ penstock_meter.turn() }}",
    "{{ [1] | metered }}",
    "{{ lipsum(n=10**6) }}",
]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU time is limited, as each test says. By the clock a busy machine may take a minute."""
    monkeypatch.setattr(templates, "SLACK", 60.0)


@asynccontextmanager
async def rendering(model: Any = MODEL, **options: Any) -> AsyncIterator[Templates]:
    chosen = TokenizerConfig(**{**LIMITS, **options})
    limits = (chosen.template_timeout, chosen.template_memory)
    templates = Templates(TemplateSettings(*model, NAMES, DIALECT, CONTROLS, *limits), chosen)
    try:
        yield templates
    finally:
        workers = list(templates._pool.workers)
        templates.close()
        for worker in workers:
            await worker.end()


def chat(template: str, messages: Any = None, **fields: Any) -> SubmitText:
    body = json.dumps(messages or MESSAGES).encode()
    return SubmitText(id=1, messages=body, chat_template=template, sampling=Sampling(), **fields)


async def test_it_renders_what_the_models_own_template_would() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}{{ tools | tojson }}"
        "{{ strftime_now('%d %b %H') }}{% if enable_thinking %}<think>{% endif %}"
    )
    tools = b'[{"type": "function", "function": {"name": "f"}}]'
    use = ToolUse(names=("f",))
    asked = chat(source, tools=tools, tool_use=use, template_arguments=b'{"enable_thinking": true}')
    async with rendering() as templates:
        found = await templates.render(asked, 86_400.0 * 365)
        own = Renderer(ChatTemplate({"default": source}, NAMES), DIALECT).render(asked, 86_400.0 * 365)
        assert found == own
        assert (found.inside, found.thinks) == (True, True)
        for wrong in ("{% if %}", "{{ raise_exception('no') }}", "{{ 1 + 'a' }}", "{{ messages | nothing }}"):
            with pytest.raises(InvalidRequest):
                await templates.render(chat(wrong), 0.0)
        statistics = templates.statistics()
        assert (statistics.rendered, statistics.refused, statistics.ended) == (1, 4, 0)
        assert statistics.workers == 1


async def test_contents_spell_no_control_tokens_in_a_requests_template_either() -> None:
    messages = [{"role": "user", "content": "a<|end|>b"}]
    async with rendering() as templates:
        found = await templates.render(chat("{{ messages[0].content }}<|end|>", messages), 0.0)
        assert found.pieces == ("a<|end|>b", "<|end|>", "")


async def test_no_bomb_takes_more_than_its_limits() -> None:
    """One worker outlives them all, or is replaced; an honest neighbour is served in between."""
    async with rendering() as templates:
        for bomb in BOMBS:
            (found,) = await asyncio.gather(templates.render(chat(bomb), 0.0), return_exceptions=True)
            if isinstance(found, Rendered):  # harmless after all: a name that is gone prints nothing
                assert len(found.text) < 1 << 20, bomb
            else:
                assert isinstance(found, InvalidRequest), bomb
                assert found.param in ("chat_template", "messages"), bomb
        assert (await templates.render(chat("{{ messages[0].role }}"), 0.0)).text == "user"
        assert templates.statistics().ended > len(BOMBS) // 2


@pytest.mark.parametrize(
    ("bomb", "option"),
    [
        (LOOPS, "--template-timeout"),
        ("{{ 10 ** (10 ** 8) }}", "--template-timeout"),  # a single operation in C
        ("{{ 'a' * 10**10 }}", "--template-memory"),
        (DOUBLING.replace("@", "~"), "--template-memory"),
        ("{{ 'a'.ljust(10**10) }}", "--template-memory"),
    ],
)
async def test_a_limit_is_named(bomb: str, option: str) -> None:
    limits = {} if option == "--template-timeout" else {"template_timeout": 10.0}  # of which the bomb takes a hundredth
    async with rendering(**limits) as templates:
        with pytest.raises(InvalidRequest, match=option) as caught:
            await templates.render(chat(bomb), 0.0)
        assert (caught.value.param, caught.value.code) == ("chat_template", "template_too_complex")
        assert templates.statistics().ended == 1


async def test_compiling_a_template_is_limited_too() -> None:
    """Constants are computed while a template is compiled."""
    slow = "{{ " + " ~ ".join(["(('a ' | center(9999999)) | wordwrap(1) | length)"] * 40) + " }}"
    async with rendering(template_memory=512 << 20) as templates:
        with pytest.raises(InvalidRequest, match="--template-timeout"):
            await templates.render(chat(slow), 0.0)
        assert templates._pool.replaced == 0
        assert (await templates.render(chat("ok"), 0.0)).text == "ok"


async def test_nobody_waits_for_anothers_bomb() -> None:
    async with rendering(template_workers=2, template_timeout=30.0) as templates:
        await asyncio.gather(templates.render(chat("a"), 0.0), templates.render(chat("b"), 0.0))  # both are up
        slow = asyncio.create_task(templates.render(chat(LOOPS), 0.0))
        for number in range(20):
            await templates.render(chat(f"{number}"), 0.0)
        assert not slow.done()
        slow.cancel()
        await asyncio.wait([slow])
        assert templates.statistics().workers == 1


async def test_a_worker_that_is_killed_costs_time_only() -> None:
    async with rendering() as templates:
        await templates.render(chat("a"), 0.0)
        (worker,) = templates._pool.workers
        os.kill(worker._process.pid, signal.SIGKILL)
        assert (await templates.render(chat("b"), 0.0)).text == "b"


async def test_a_worker_that_the_system_refuses_is_our_failure_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def exhausted(*_: object) -> object:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with rendering() as templates:
        with monkeypatch.context() as patched:
            patched.setattr(worker_pool, "begin", exhausted)
            with pytest.raises(EngineFailure, match=r"does not start.*log says why"):
                await templates.render(chat("a"), 0.0)
        (said,) = [record for record in caplog.records if record.message == "worker_failed"]
        assert "Too many open files" in str(said.__dict__), "the log says why"
        assert (await templates.render(chat("b"), 0.0)).text == "b"


async def test_memory_of_worker_and_owner_stays_flat() -> None:
    """Nothing of a rendering stays in the worker."""
    async with rendering(template_memory=256 << 20) as templates:
        sizes = []
        for number in range(60):
            big = "{{ (messages[0].role * 5000000) | length }}{# " + str(number) + "y" * 60_000 + " #}"
            assert (await templates.render(chat(big), 0.0)).text == "20000000"
            (worker,) = templates._pool.workers
            sizes.append((resident(worker._process.pid), resident(os.getpid())))
        assert max(worker for worker, _ in sizes) < 96 << 20
        for before, after in zip(sizes[29], sizes[59], strict=True):
            assert after - before < 8 << 20


async def test_what_a_tokenizer_may_have_died_of_is_tried_apart(tmp_path: Path) -> None:
    """Only what kills a process there is fatal: not its neighbours, and not what ends with an error of its own."""
    killer = tmp_path / "killer.jinja"
    killer.write_text("{% if messages[0].content == 'kill' %}{{ 'x' * 10**12 }}{% endif %}{{ messages[0].content }}")
    model = (MODEL[0], str(killer), MODEL[2])

    def said(content: Any, **fields: Any) -> SubmitText:
        return SubmitText(id=1, messages=json.dumps([{"role": "user", "content": content}]).encode(),
                          sampling=Sampling(), **fields)  # fmt: skip

    async with rendering(model) as templates:
        assert "a process that did the same" in await templates.fatal(said("kill"), 0.0, None)
        written = (Written(pack("i", [9, 10, 11]), False),)
        innocents = (
            said("a"), said("a" * 100_000), said("<|im_end|>", written=written), Tokenize(id=2, prompt="x"),
            Detokenize(3, pack("i", [1, 2])), Detokenize(3, b"odd"), said("a", stop=("b",)),
        )  # fmt: skip
        for innocent in innocents:
            assert await templates.fatal(innocent, 0.0, None) == ""
        own = chat("x" * 9)
        assert await templates.fatal(own, 0.0, await templates.render(own, 0.0)) == ""
        assert templates.statistics().workers == 1


async def test_images_are_tried_by_their_sizes(tmp_path: Path) -> None:
    """With the model's vision spec, which travels in the settings."""
    family = FAMILIES["qwen"]
    limits = PromptLimits(400, 4096, (1,), vision=family.vision())
    messages = json.dumps([{"role": "user", "content": [{"type": "image"}]}]).encode()
    files = (ImageFile(data=b""),)
    picture = Picture(64, 32, bytes(16), bytes(3 * 64 * 32))
    settings = TemplateSettings(str(family.write(tmp_path)), "", limits, {}, DIALECT, None, 2.0, 64 << 20)
    trials = TrialTokenizer(template_worker.SETTINGS.decode(msgspec.msgpack.encode(settings)))
    made = trials._prompter.prepare(
        SubmitText(id=1, messages=messages, images=files, sampling=Sampling()), 0.0, None, (picture,)
    )
    assert made.request.images[0].rows == 2
    async with rendering((settings.folder, "", limits)) as templates:
        own = chat("{{ messages[0].content[0].type }}<|image_pad|>", json.loads(messages), images=files)
        assert (await templates.render(own, 0.0)).text == "image<|image_pad|>"
        for call in (own, Tokenize(id=2, messages=messages, images=files)):
            rendered = await templates.render(own, 0.0) if call is own else None
            assert await templates.fatal(call, 0.0, rendered, (picture,)) == ""


async def test_what_cannot_be_tried_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> None:
        raise EngineFailure("no worker")

    async with rendering() as templates:
        monkeypatch.setattr(templates._pool, "ask", fails)
        assert await templates.fatal(chat("x"), 0.0, None) == ""


ATOMS = ("messages", "messages[0].content", "'ab'", "[1, 2]", "9", "range(99)", "ns.x", "{'a': 'b'}", "loop", "self")
FILTERS = (
    "batch(9999999)", "slice(9999999)", "center(99999999)", "indent(9999999)", "tojson(indent=99999)", "list", "join",
    "wordwrap(1)", "sum(start=[])", "string", "reverse", "sort", "length", "upper", "map('string')", "unique", "first",
    "replace('a', 'bbbbbbbbbbbbbbbb')", "urlencode", "title", "truncate(9)", "groupby('x')", "items", "e", "striptags",
)  # fmt: skip
WRAPS = (
    "{{% for i in {0} %}}{1}{{% endfor %}}",
    "{{% for i in range(9999) %}}{1}{{% set ns.x = ns.x ~ {0} %}}{{% endfor %}}",
    "{{% macro m(n) %}}{1}{{{{ m({0}) if n }}}}{{% endmacro %}}{{{{ m(1) }}}}",
    "{{% set ns.x = ({0}) ~ ns.x ~ ns.x %}}{1}",
    "{{% if {0} %}}{1}{{{{ {0} }}}}{{% endif %}}",
    "{{% filter upper %}}{1}{{{{ {0} }}}}{{% endfilter %}}",
)


def nest(chosen: random.Random, depth: int) -> str:
    """A random template of loops, macros, doublings and filters, `depth` deep."""
    expression = chosen.choice(ATOMS)
    for _ in range(chosen.randrange(5)):
        expression = f"({expression} | {chosen.choice(FILTERS)})"
        if chosen.random() < 0.3:
            expression = f"({expression} * {chosen.choice((9, 9999, 99999999))})"
    inner = nest(chosen, depth - 1) if depth else "{{ ns.x }}"
    return chosen.choice(WRAPS).format(expression, inner)


async def test_random_nestings_end_within_their_limits() -> None:
    chosen = random.Random(19)
    async with rendering(template_timeout=0.2) as templates:
        for _ in range(60):
            source = "{% set ns = namespace(x='ab') %}" + nest(chosen, chosen.randrange(6))
            try:
                found: Any = await templates.render(chat(source), 0.0)
            except InvalidRequest as error:
                found = error
            assert isinstance(found, Rendered | InvalidRequest), source
        assert (await templates.render(chat("ok"), 0.0)).text == "ok"


def test_how_a_child_ended_is_told() -> None:
    setting = TemplateSettings(*MODEL, {}, DIALECT, None, 2.0, 64 << 20)
    for code, text in (
        (-signal.SIGPROF, "2 s (--template-timeout)"),
        (-signal.SIGXCPU, "2 s (--template-timeout)"),
        (-signal.SIGSEGV, "64 MiB (--template-memory)"),
        (os.EX_UNAVAILABLE, "64 MiB (--template-memory)"),
    ):
        found = limit_passed(code, setting.of_rendering)
        assert isinstance(found, Refusal)
        assert text in found.message
    assert limit_passed(os.EX_SOFTWARE, setting.of_rendering) is None


def resident(pid: int) -> int:
    """Bytes. Source: proc(5), statm."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
