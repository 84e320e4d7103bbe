"""The page at /, in a real browser where one is installed. In whatever state a conversation is left (stopped, failed,
reloaded, edited, deleted), what it sends next is valid; what models write stays text; people who use a keyboard or a
screen reader reach everything.

Most tests play the engine themselves (scripted.py), so that an answer stops where they want it. `PENSTOCK_PICTURES=1`
makes the pictures of the docs anew.
"""

from __future__ import annotations

import base64
import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.messages import SubmitText
from tests.e2e.agents import node_package
from tests.e2e.browser import Browser, Page, browser, fresh, installed
from tests.e2e.scripted import Engine, scripted
from tests.e2e.server import Server

pytestmark = pytest.mark.skipif(not installed(), reason="no browser is installed; `make browser` installs Chromium")

READY = "document.getElementById('model').options.length && document.getElementById('state').className === 'ready'"
IDLE = "!document.getElementById('send').hidden"
LAST = "document.querySelector('article.assistant:last-of-type')"
ANSWERED = f"{IDLE} && {LAST}?.querySelector('.timing')"
SHOWN = "[...document.querySelectorAll('article .text')].map((one) => one.textContent)"
LIST = "[...document.querySelectorAll('#list a')].map((one) => one.textContent)"
PROMPT = "document.getElementById('prompt').value"
PROBLEM = "document.getElementById('problem').textContent"
PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
AXE = "axe-core@4.14.1"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """An empty page of a new user; what it complains of fails the test."""
    with fresh(chromium) as found:
        found.size(1280, 800)
        yield found
        assert found.faults == []


@pytest.fixture
def engine() -> Iterator[Engine]:
    with scripted() as found:
        yield found


@pytest.fixture
def chat(page: Page, engine: Engine) -> Page:
    """The page of the server whose engine the test plays."""
    visit(page, engine.url)
    return page


@pytest.fixture
def real(page: Page, server: Server) -> Page:
    """The page of a real server."""
    visit(page, server.url)
    return page


def visit(page: Page, url: str) -> None:
    page.open(url + "/")
    page.until(READY)


def set_option(chat: Page, name: str, value: str) -> None:
    script = f"(() => {{ const box = document.getElementById({name!r}); box.value = {json.dumps(value)}; "
    chat.evaluate(script + "box.dispatchEvent(new Event('input')); })()")


def click(chat: Page, name: str, *, of: str = "body", index: int = -1) -> None:
    """Press the button of this name or label, the last one of several, below `of`."""
    named = f"(one.ariaLabel ?? one.textContent) === {json.dumps(name)} && one.checkVisibility()"
    found = f"[...document.querySelectorAll({json.dumps(of + ' button')})].filter((one) => {named}).at({index})"
    chat.until(found)
    chat.evaluate(f"{found}.click()")


def say(chat: Page, text: str) -> None:
    chat.evaluate("document.getElementById('prompt').focus()")
    chat.type(text)
    chat.press("Enter", text="\r")


def said(chat: Page) -> str:
    chat.until(ANSWERED)
    found = chat.evaluate(f"{LAST}.querySelector('.text').textContent")
    assert isinstance(found, str)
    return found


def shows(chat: Page, *texts: str) -> None:
    """Wait until the turns say this and nothing else."""
    chat.until(f"JSON.stringify({SHOWN}) === JSON.stringify({json.dumps(texts)})")


def begun(chat: Page, engine: Engine, count: int, question: str, words: str) -> list[tuple[str, str]]:
    """Ask; request number `count` begins to answer with `words`. The messages that were sent."""
    say(chat, question)
    messages = engine.request(count)
    engine.say(words)
    chat.until(f"{LAST}?.querySelector('.text').textContent === {json.dumps(words)}")
    return short(messages)


def answered(chat: Page, engine: Engine, count: int, question: str, words: str) -> list[tuple[str, str]]:
    """The same, to the answer's end."""
    messages = begun(chat, engine, count, question, words)
    engine.end()
    chat.until(ANSWERED)
    return messages


def short(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"][0], message["content"]) for message in messages]


def kept(chat: Page, *titles: str) -> None:
    """Wait until the list of conversations is this one."""
    chat.until(f"JSON.stringify({LIST}) === JSON.stringify({json.dumps(titles)})")


# --- Conversations


def test_a_conversation_with_its_timing(real: Page) -> None:
    set_option(real, "temperature", "0")
    say(real, "What is 128 + 457?")
    assert "585" in said(real)
    told = real.evaluate(f"{LAST}.querySelector('.timing').innerText")
    for word in ("first token", "tokens/s", "in all", " in, "):
        assert word in told
    say(real, "Tell me a short story.")
    real.until(f"document.querySelectorAll('article').length === 4 && {ANSWERED}")
    assert len(said(real)) > 40
    before = real.evaluate(SHOWN)
    real.reload()
    real.until(f"{READY} && document.querySelectorAll('article').length === 4")
    assert real.evaluate(SHOWN) == before
    assert real.evaluate(f"{LAST}.querySelector('.timing').innerText").count("tokens/s") == 1
    real.press("n", "KeyN", modifiers=1)
    shows(real)


def test_the_bar_of_an_answer_has_a_tick_for_each_part(chat: Page, engine: Engine) -> None:
    begun(chat, engine, 1, "Hello", "one")
    for said_so_far, word in (("one two", " two"), ("one two three", " three")):
        engine.say(word)
        chat.until(f"{LAST}?.querySelector('.text').textContent === {json.dumps(said_so_far)}")
    engine.end()
    chat.until(ANSWERED)
    assert chat.evaluate(f"{LAST}.querySelector('.ticks').getAttribute('d').split('M').length") == 1 + 3


def test_options_reach_the_server_and_are_kept(chat: Page, engine: Engine) -> None:
    given = {"temperature": "1", "seed": "7", "max_tokens": "5", "top_p": "0.9", "system": "Be kind."}
    for name, value in given.items():
        set_option(chat, name, value)
    chat.reload()
    chat.until(READY)
    assert answered(chat, engine, 1, "Hello", "Hi") == [("s", "Be kind."), ("u", "Hello")]
    sampling = engine.latest.sampling
    assert (sampling.temperature, sampling.seed, sampling.max_tokens, sampling.top_p) == (1.0, 7, 5, 0.9)


def test_a_message_before_the_models_are_known(page: Page, engine: Engine) -> None:
    page.call("Network.setBlockedURLs", urls=["*/v1/models"])
    page.open(engine.url + "/")
    attach(page, "notes.txt", "['one']")
    page.until("document.querySelectorAll('#attached li').length === 1")
    assert answered(page, engine, 1, "Hello", "Hi") == [("u", "notes.txt:\n```\none\n```\n\nHello")]
    page.faults.clear()  # the browser tells of what was blocked


def test_a_new_chat_while_an_answer_streams(chat: Page, engine: Engine) -> None:
    begun(chat, engine, 1, "first", "a half")
    click(chat, "New chat")
    engine.aborted()
    assert chat.evaluate(IDLE)
    shows(chat)
    assert answered(chat, engine, 2, "second", "another") == [("u", "second")]
    kept(chat, "second", "first")
    chat.evaluate("document.querySelectorAll('#list a')[1].click()")
    shows(chat, "first", "a half")
    assert answered(chat, engine, 3, "more", "end") == [("u", "first"), ("a", "a half"), ("u", "more")]
    chat.evaluate("history.back()")
    shows(chat, "second", "another")


def test_stop_before_the_first_token_takes_the_message_back(chat: Page, engine: Engine) -> None:
    answered(chat, engine, 1, "first", "answer")
    say(chat, "second")
    engine.request(2)
    chat.type("and what I wrote meanwhile")
    click(chat, "Stop")
    engine.aborted()
    shows(chat, "first", "answer")
    assert chat.evaluate(PROMPT) == "second\n\nand what I wrote meanwhile"
    assert not chat.evaluate(PROBLEM)
    chat.evaluate("document.getElementById('prompt').value = ''")
    assert answered(chat, engine, 3, "third", "more") == [("u", "first"), ("a", "answer"), ("u", "third")]


def test_a_new_chat_before_the_first_token_keeps_the_message_as_a_draft(chat: Page, engine: Engine) -> None:
    answered(chat, engine, 1, "first", "answer")
    say(chat, "second")
    engine.request(2)
    chat.press("n", "KeyN", modifiers=1)
    engine.aborted()
    assert chat.evaluate(PROMPT) == ""
    chat.evaluate("document.querySelector('#list a').click()")
    shows(chat, "first", "answer")
    assert chat.evaluate(PROMPT) == "second"
    chat.press("Enter", text="\r")
    assert short(engine.request(3)) == [("u", "first"), ("a", "answer"), ("u", "second")]


def test_stopping_an_answer_keeps_what_was_said(chat: Page, engine: Engine) -> None:
    begun(chat, engine, 1, "first", "a half")
    chat.press("Escape")
    engine.aborted()
    assert said(chat) == "a half"
    assert "you" in chat.evaluate(f"{LAST}.querySelector('.timing').innerText")
    assert answered(chat, engine, 2, "second", "more") == [("u", "first"), ("a", "a half"), ("u", "second")]
    chat.press("ArrowUp")
    assert chat.evaluate(PROMPT) == "second"


def test_stopping_in_the_reasoning_sends_both_questions_as_one(chat: Page, engine: Engine) -> None:
    say(chat, "first")
    engine.request(1)
    engine.think("Well, ")
    chat.until(f"{LAST}?.querySelector('.thought div').textContent === 'Well, '")
    click(chat, "Stop")
    chat.until(ANSWERED)
    assert answered(chat, engine, 2, "second", "more") == [("u", "first\n\nsecond")]
    assert answered(chat, engine, 3, "third", "end")[1:] == [("a", "more"), ("u", "third")]


def test_an_error_in_an_answer_keeps_what_was_said(chat: Page, engine: Engine) -> None:
    begun(chat, engine, 1, "first", "a half")
    engine.fail("the logits were not finite")
    chat.until(f"{IDLE} && {LAST}.querySelector('.fault')")
    fault = chat.evaluate(f"{LAST}.querySelector('.fault').textContent")
    assert "not finite" in fault
    chat.reload()
    chat.until(f"{LAST}?.querySelector('.fault')?.textContent === {json.dumps(fault)}")
    assert chat.evaluate(SHOWN) == ["first", "a half"]
    assert answered(chat, engine, 2, "second", "x") == [("u", "first"), ("a", "a half"), ("u", "second")]


def test_a_refusal_is_shown_and_the_message_comes_back(real: Page) -> None:
    set_option(real, "max_tokens", "4000")
    text = "word " * 200
    say(real, text)
    real.until(f"{IDLE} && {PROBLEM}")
    assert "maximum context length" in real.evaluate(PROBLEM)
    assert real.evaluate(PROMPT) == text.strip()
    shows(real)
    assert all("400" in fault for fault in real.faults)  # the browser tells of it too
    real.faults.clear()


def test_a_reload_while_an_answer_streams_keeps_what_was_said(chat: Page, engine: Engine) -> None:
    begun(chat, engine, 1, "first", "a half")
    chat.reload()
    engine.aborted()
    chat.until(READY)
    shows(chat, "first", "a half")
    assert begun(chat, engine, 2, "second", "more") == [("u", "first"), ("a", "a half"), ("u", "second")]


def test_a_reload_before_the_first_token_takes_the_message_back(chat: Page, engine: Engine) -> None:
    say(chat, "first")
    engine.request(1)
    chat.reload()
    chat.until(f"{READY} && {PROMPT} === 'first'")
    shows(chat)
    chat.press("Enter", text="\r")
    assert short(engine.request(2)) == [("u", "first")]
    engine.say("answer")
    shows(chat, "first", "answer")
    click(chat, "New chat")
    assert chat.evaluate(PROMPT) == ""


def test_editing_an_earlier_message_replaces_what_followed_until_that_is_undone(chat: Page, engine: Engine) -> None:
    answered(chat, engine, 1, "first", "one")
    answered(chat, engine, 2, "second", "two")
    click(chat, "Edit", index=0)
    chat.evaluate("document.querySelector('.edit textarea').value = 'changed'")
    chat.press("Enter", text="\r")
    assert short(engine.request(3)) == [("u", "changed")]
    click(chat, "Stop")  # before the first token: as if it had not been sent, the edit included
    chat.until("document.querySelector('.edit textarea')?.value === 'changed'")
    click(chat, "Send", of=".edit")
    assert short(engine.request(4)) == [("u", "changed")]
    engine.end("new")
    chat.until(ANSWERED)
    shows(chat, "changed", "new")
    click(chat, "Undo")
    shows(chat, "first", "one", "second", "two")
    assert answered(chat, engine, 5, "third", "x")[:4] == [("u", "first"), ("a", "one"), ("u", "second"), ("a", "two")]
    click(chat, "Edit")
    chat.press("Escape")
    shows(chat, "first", "one", "second", "two", "third", "x")


def test_regenerating_asks_the_same_again_until_that_is_undone(chat: Page, engine: Engine) -> None:
    answered(chat, engine, 1, "first", "one")
    answered(chat, engine, 2, "second", "two")
    click(chat, "Regenerate")
    assert short(engine.request(3)) == [("u", "first"), ("a", "one"), ("u", "second")]
    engine.say("new")
    shows(chat, "first", "one", "second", "new")
    click(chat, "Undo")  # also while it streams
    engine.aborted()
    shows(chat, "first", "one", "second", "two")
    click(chat, "Regenerate", index=0)
    assert short(engine.request(4)) == [("u", "first")]
    click(chat, "Stop")
    shows(chat, "first", "one", "second", "two")
    assert answered(chat, engine, 5, "third", "x")[3:] == [("a", "two"), ("u", "third")]


def test_deleting_a_conversation_and_undoing_it(chat: Page, engine: Engine) -> None:
    answered(chat, engine, 1, "first", "one")
    click(chat, "New chat")
    begun(chat, engine, 2, "second", "tw")
    kept(chat, "second", "first")
    click(chat, "Delete second")  # it is on the screen, and its answer streams
    engine.aborted()
    shows(chat)
    kept(chat, "first")
    assert chat.evaluate("document.activeElement.id") == "undo"
    click(chat, "Undo")
    shows(chat, "second", "tw")
    kept(chat, "second", "first")
    assert answered(chat, engine, 3, "more", "x") == [("u", "second"), ("a", "tw"), ("u", "more")]
    click(chat, "Delete first")
    kept(chat, "second")
    shows(chat, "second", "tw", "more", "x")
    chat.reload()
    kept(chat, "second")


# A browser's limit is out of reach: Chromium's own way to lower it leaves IndexedDB as it was.
FULL = """(() => {
  const real = IDBObjectStore.prototype.put;
  IDBObjectStore.prototype.put = () => { throw new DOMException("no room", "QuotaExceededError"); };
  window.make_room = () => { IDBObjectStore.prototype.put = real; };
})()"""


def test_a_full_storage_is_told_and_the_conversation_goes_on(chat: Page, engine: Engine) -> None:
    answered(chat, engine, 1, "first", "one")
    kept(chat, "first")
    chat.evaluate(FULL)
    click(chat, "New chat")
    answered(chat, engine, 2, "second", "two")
    chat.until(f"{PROBLEM}.includes('storage is full')")
    assert len(answered(chat, engine, 3, "third", "three")) == 3
    kept(chat, "first")
    click(chat, "Delete first")  # what the page advises: the space is used for what is on the screen
    kept(chat)
    chat.evaluate("make_room()")
    assert len(answered(chat, engine, 4, "fourth", "four")) == 5
    chat.until(f"!{PROBLEM}")
    kept(chat, "second")
    chat.reload()
    chat.until(f"{SHOWN}.length === 6")


def test_two_tabs_share_conversations_and_lose_none(chat: Page, engine: Engine) -> None:
    answered(chat, engine, 1, "first", "one")
    kept(chat, "first")
    other = chat.tab()
    other.open(chat.evaluate("location.href"))
    shows(other, "first", "one")
    chat.front()
    answered(chat, engine, 2, "second", "two")
    shows(other, "first", "one", "second", "two")  # a tab follows what another one does
    say(chat, "here")
    engine.request(3)
    first = engine.latest
    other.front()
    say(other, "there")
    assert short(engine.request(4))[-1] == ("u", "there")
    engine.end("told there")
    kept(other, "first")
    other.until(ANSWERED)
    chat.front()
    engine.answer(first, "told here")
    shows(chat, "first", "one", "second", "two", "here", "told here")
    kept(chat, "Copy: first", "first")  # both went on from the same turns: none overwrites the other
    shows(other, "first", "one", "second", "two", "there", "told there")
    assert len(answered(chat, engine, 5, "more", "x")) == 7
    other.close()


def test_a_browser_that_keeps_nothing_still_chats(page: Page, engine: Engine) -> None:
    off = "Object.defineProperty(window, 'indexedDB', {value: {open() { throw new Error('turned off') }}})"
    page.call("Page.addScriptToEvaluateOnNewDocument", source=off)
    visit(page, engine.url)
    page.until(f"{PROBLEM}.includes('turned off')")
    answered(page, engine, 1, "first", "one")
    assert len(answered(page, engine, 2, "second", "two")) == 3


# --- Tools, schemas and files


def test_an_answer_by_a_schema(real: Page) -> None:
    set_option(real, "temperature", "0")
    for wrong, why in (("{", "not JSON"), ("[]", "JSON object")):
        set_option(real, "schema", wrong)
        assert why in real.evaluate("document.getElementById('schema-problem').textContent")
        say(real, "Tom is 5 years old.")
        assert real.evaluate("document.activeElement.id") == "schema"
        assert real.evaluate(PROMPT) == "Tom is 5 years old."
        shows(real)
        real.evaluate("document.getElementById('prompt').value = ''")
    set_option(real, "schema", '{"type": "strin"}')
    say(real, "Tom is 5 years old.")  # what only the server knows stands beside the field, too
    real.until("document.getElementById('schema-problem').textContent")
    assert real.evaluate("document.getElementById('schema').ariaInvalid") == "true"
    assert "400" in real.faults.pop()
    set_option(real, "schema", json.dumps(SCHEMA))
    real.press("Enter", text="\r")
    real.until(ANSWERED)
    assert json.loads(real.evaluate(f"{LAST}.querySelector('.text code').textContent"))["age"] == 5


def test_tools_that_are_wrong_are_told_beside_the_field(chat: Page) -> None:
    for wrong, why in (
        ("[", "not JSON"),
        ("[]", "empty"),
        ("[3]", "Tool 1 is not"),
        ('{"name": "a b"}', "letters, digits"),
        ('[{"name": "a"}, {"type": "function", "function": {"name": "a"}}]', "name of another"),
        ('{"name": "a", "parameters": []}', "JSON schema"),
    ):
        set_option(chat, "tools", wrong)
        assert why in chat.evaluate("document.getElementById('tools-problem').textContent"), wrong
    click(chat, "Example of a tool")
    assert not chat.evaluate("document.getElementById('tools-problem').textContent")
    assert chat.evaluate("document.getElementById('tools').ariaInvalid") == "false"


def test_calls_get_their_results(chat: Page, engine: Engine) -> None:
    set_option(chat, "tools", json.dumps([TOOL]))
    say(chat, "Weather?")
    engine.request(1)
    assert engine.latest.tools is not None
    engine.call("get_weather", '{"city": ', '"Rome"}')
    engine.call("get_weather", '{"city": "Oslo"}')
    engine.end()
    chat.until("document.querySelectorAll('.calls textarea').length === 2")
    chat.evaluate("document.querySelector('.calls textarea').focus()")
    chat.type("Sunny")
    click(chat, "Send results")
    sent = engine.request(2)
    assert [message["content"] for message in sent] == ["Weather?", None, "Sunny", "The user gave no result."]
    assert json.loads(sent[1]["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"}
    engine.end("Sunny in Rome.")
    chat.until(ANSWERED)
    assert len(answered(chat, engine, 3, "Thanks", "Bye")) == 6


def test_a_call_that_is_cut_off_or_left_without_a_result(chat: Page, engine: Engine) -> None:
    set_option(chat, "tools", json.dumps([TOOL]))
    say(chat, "Weather?")
    engine.request(1)
    engine.say("Let me see.")
    engine.call("get_weather", '{"city": "Ro')
    chat.until("document.querySelector('.call')")
    click(chat, "Stop")
    chat.until("document.querySelector('.call .hint')?.textContent.includes('cut off')")
    say(chat, "Go on")
    assert short(engine.request(2)) == [("u", "Weather?"), ("a", "Let me see."), ("u", "Go on")]
    engine.call("get_weather", '{"city": "Rome"}')
    engine.end()
    chat.until(ANSWERED)
    say(chat, "Never mind")
    assert short(engine.request(3))[3:] == [("a", None), ("t", "The user gave no result."), ("u", "Never mind")]


def attach(chat: Page, name: str, content: str, kind: str = "text/plain") -> None:
    """Choose a file; `content` is the JavaScript of its parts."""
    chat.evaluate(f"""(() => {{
        const chosen = new DataTransfer();
        chosen.items.add(new File({content}, {name!r}, {{type: {kind!r}}}));
        document.getElementById('files').files = chosen.files;
        document.getElementById('files').dispatchEvent(new Event('change'));
    }})()""")


def test_text_files_are_sent_as_text_and_others_refused(chat: Page, engine: Engine) -> None:
    attach(chat, "notes.txt", "['one\\n```\\ntwo\\n']")
    chat.until("document.querySelectorAll('#attached li').length === 1")
    for name, content, kind, why in (
        ("a.png", "['x']", "image/png", "picture"),
        ("a.bin", "[new Uint8Array([255, 254])]", "", "not text"),
        ("a.zip", "['a\\0b']", "", "not text"),
        ("a.log", "['x'.repeat(8193)]", "text/plain", "8,193 bytes"),
    ):
        attach(chat, name, content, kind)
        chat.until(f"{PROBLEM}.includes({why!r}) && {PROBLEM}.includes({name!r})")
    sent = answered(chat, engine, 1, "Read this", "Done")
    assert sent == [("u", "notes.txt:\n````\none\n```\ntwo\n````\n\nRead this")]
    assert not chat.evaluate(PROBLEM)
    assert chat.evaluate("document.querySelectorAll('#attached li').length") == 0
    assert chat.evaluate("document.querySelector('article .files').textContent") == "notes.txt"


@pytest.fixture
def seeing() -> Iterator[Engine]:
    """An engine whose model takes four pictures at most."""
    with scripted(images=4) as found:
        yield found


# A picture of one colour, by the name of a canvas' type.
DRAWN = """(async (name, color, width = 60, height = 40) => {
    const canvas = Object.assign(document.createElement('canvas'), {width, height});
    const brush = canvas.getContext('2d');
    brush.fillStyle = color;
    brush.fillRect(0, 0, width, height);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, 'image/png'));
    const given = new DataTransfer();
    given.items.add(new File([blob], name, {type: 'image/png'}));
    return given;
})"""
BITMAP = b"BM" + struct.pack("<IHHI", 54 + 4096 * 8 * 3, 0, 0, 54) + struct.pack(
    "<IiiHHIIiiII", 40, 4096, 8, 1, 24, 0, 0, 0, 0, 0, 0
) + bytes((0, 128, 255)) * 4096 * 8  # fmt: skip
THUMBNAILS = "[...document.querySelectorAll('{} img')].map((one) => one.complete && one.naturalWidth && one.alt)"


def pictures(page: Page, place: str, *names: str) -> None:
    """Wait until these pictures, and no others, are shown at the place, and have been drawn."""
    page.until(f"JSON.stringify({THUMBNAILS.format(place)}) === JSON.stringify({json.dumps(names)})")


def test_pictures_are_attached_pasted_and_dropped(page: Page, seeing: Engine) -> None:
    """They are sent with each turn of the conversation, and kept with it."""
    visit(page, seeing.url)
    assert "pictures" in page.evaluate("document.getElementById('attach').title")
    page.evaluate(f"""{DRAWN}('red.png', 'red').then((given) => {{
        document.getElementById('files').files = given.files;
        document.getElementById('files').dispatchEvent(new Event('change'));
    }})""")
    pictures(page, "#attached", "red.png")
    page.evaluate(f"""{DRAWN}('blue.png', 'blue').then((clipboardData) => document.getElementById('prompt')
        .dispatchEvent(new ClipboardEvent('paste', {{clipboardData, bubbles: true, cancelable: true}})))""")
    pictures(page, "#attached", "red.png", "blue.png")
    page.evaluate(f"""{DRAWN}('green.png', 'green').then((dataTransfer) => document.dispatchEvent(
        new DragEvent('drop', {{dataTransfer, bubbles: true, cancelable: true}})))""")
    pictures(page, "#attached", "red.png", "blue.png", "green.png")
    click(page, "Remove blue.png")
    pictures(page, "#attached", "red.png", "green.png")
    say(page, "What is this?")
    asked = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "What is this?"}]
    assert seeing.request(1) == [{"role": "user", "content": asked}]
    images = seeing.latest.images
    assert [image.data[:8] for image in images] == [b"\x89PNG\r\n\x1a\n"] * 2
    assert images[0].data != images[1].data
    seeing.end("Two colours")
    page.until(ANSWERED)
    pictures(page, "article", "red.png", "green.png")
    pictures(page, "#attached")
    say(page, "Which?")
    assert seeing.request(2)[0]["content"] == asked
    assert [image.data for image in seeing.latest.images] == [image.data for image in images]
    seeing.end("Red and green")
    page.until(ANSWERED)
    page.reload()
    page.until(READY)
    pictures(page, "article", "red.png", "green.png")
    click(page, "Regenerate")
    seeing.until(lambda: len(seeing.link.of(SubmitText)) == 3)
    assert [image.data for image in seeing.latest.images] == [image.data for image in images]
    seeing.end("Green and red")
    page.until(ANSWERED)


def test_a_picture_with_a_wrong_name_is_sent_as_what_it_is(page: Page, seeing: Engine) -> None:
    visit(page, seeing.url)
    page.evaluate(f"""(async () => {{
        const given = await {DRAWN}('red.jpg', 'red');
        const renamed = new File([given.files[0]], 'red.jpg', {{type: 'image/jpeg'}});
        given.items.clear();
        given.items.add(renamed);
        const box = document.getElementById('files');
        box.files = given.files;
        box.dispatchEvent(new Event('change'));
    }})()""")
    pictures(page, "#attached", "red.jpg")
    say(page, "Which?")
    seeing.until(lambda: bool(seeing.link.of(SubmitText)))
    assert seeing.latest.images[0].data.startswith(b"\x89PNG")
    seeing.end("Red")
    page.until(ANSWERED)


def test_a_picture_that_is_large_or_of_a_rare_kind_is_drawn_anew(page: Page, seeing: Engine) -> None:
    visit(page, seeing.url)
    bitmap = base64.b64encode(BITMAP).decode()
    attach(page, "a.bmp", f"[Uint8Array.from(atob('{bitmap}'), (one) => one.charCodeAt(0))]", "image/bmp")
    pictures(page, "#attached", "a.bmp")
    found = page.evaluate("(({naturalWidth, naturalHeight, src}) => [naturalWidth, naturalHeight, src.slice(0, 23)])"
                          "(document.querySelector('#attached img'))")  # fmt: skip
    assert found == [2048, 4, "data:image/jpeg;base64,"]
    attach(page, "a.tiff", "['x']", "image/tiff")
    page.until(f"{PROBLEM}.includes('a.tiff is a picture that this browser cannot read')")
    attach(page, "a.bin", "[new Uint8Array([255])]", "")
    page.until(f"{PROBLEM}.includes('this model reads text and pictures only')")
    pictures(page, "#attached", "a.bmp")


def test_pictures_that_the_server_refuses_are_not_lost(page: Page, seeing: Engine) -> None:
    visit(page, seeing.url)
    for number in range(5):
        attach(page, f"{number}.png", "['x']", "image/png")
        page.until(f"document.querySelectorAll('#attached img').length === {number + 1}")
    say(page, "What is this?")
    page.until(f"{PROBLEM}.includes('a request may have 4 images')")
    assert page.evaluate(PROMPT) == "What is this?"
    assert page.evaluate("document.querySelectorAll('#attached img').length") == 5
    assert any("400" in fault for fault in page.faults)
    page.faults.clear()


# --- Safety


def test_what_people_write_is_text(chat: Page, engine: Engine) -> None:
    markup = "<img src=x onerror=\"document.title='bad'\"><b>bold</b> *star*"
    answered(chat, engine, 1, markup, "ok")
    assert chat.evaluate("document.querySelector('article.user .text').innerHTML").startswith("&lt;img")
    assert chat.evaluate("document.title") == "Penstock"


MARKDOWN = """# Title

Some *em*, **strong**, `code &lt;`, AT&amp;T and [a link](https://example.org/?a&amp;b "t").
A new line <b onclick="alert(1)">bold</b> &copy; &#65;&#x110000;

| a | b |
|:--|--:|
| 1 | `2` |

1. one
   - [x] done
   - two

> quoted

```python
print("<script>")
```

<script>window.ran = 1</script>

<img src="http://127.0.0.2:1/x.png" onerror="window.ran = 1">

![picture](http://127.0.0.2:1/secret.png) [bad](javascript:window.ran=1) [worse](data:text/html,x) [ref]

[ref]: https://example.org/ref

---

#### Deep"""
TAGS = "a blockquote br button code div em h3 h4 hr input li ol p pre span strong table tbody td th thead tr ul"


def test_markdown_is_shown_and_nothing_of_it_runs_or_loads(chat: Page, engine: Engine) -> None:
    say(chat, "Show me")
    engine.request(1)
    for part in re.findall(r"(?s).{1,40}", MARKDOWN):
        engine.say(part)
    engine.end()
    chat.until(ANSWERED)
    text = f"{LAST}.querySelector('.text')"
    tags = chat.evaluate(f"[...new Set([...{text}.querySelectorAll('*')].map((one) => one.localName))].sort()")
    assert tags == TAGS.split()
    links = chat.evaluate(f"[...{text}.querySelectorAll('a')].map((one) => [one.textContent, one.href, one.rel])")
    safe = "noopener noreferrer"
    assert links == [
        ["a link", "https://example.org/?a&b", safe],
        ["picture", "http://127.0.0.2:1/secret.png", safe],
        ["ref", "https://example.org/ref", safe],
    ]
    shown = chat.evaluate(f"{text}.innerText")
    for words in (
        "AT&T",
        "code &lt;",
        '<b onclick="alert(1)">bold</b>',
        "&copy; A\ufffd",
        "<script>window.ran",
        "worse",
    ):
        assert words in shown, words
    assert chat.evaluate("window.ran") is None
    assert chat.evaluate("performance.getEntriesByType('resource').every((e) => e.name.startsWith(location.origin))")
    # What streamed in parts is what a reload shows at once.
    before = chat.evaluate(f"{text}.innerHTML")
    chat.reload()
    chat.until(f"{LAST}?.querySelector('.timing')")
    assert chat.evaluate(f"{text}.innerHTML") == before


def test_markdown_that_is_made_to_hurt(chat: Page, engine: Engine) -> None:
    for count, nasty in enumerate((">" * 20_000, "[" * 20_000, "*a " * 20_000, "- " * 5_000, "|" * 20_000), 1):
        say(chat, "again")
        engine.request(count)
        engine.end(nasty)
        chat.until(f"document.querySelectorAll('.timing').length === {count} && {IDLE}")


def test_copying(chat: Page, engine: Engine) -> None:
    chat.allow("clipboardReadWrite", "clipboardSanitizedWrite")
    chat.front()
    for count, text in enumerate(("Use *this*:", "x\n```sh\nls -l\n```"), 1):
        say(chat, f"Show {count}")
        engine.request(count)
        engine.end(text)
        chat.until(f"document.querySelectorAll('.timing').length === {count}")
    for name, index, text in (
        ("Copy", 0, "Show 1"),
        ("Copy", 0, "Use *this*:"),
        ("Copy the code", -1, "ls -l"),
        ("Copy", -1, "x\n```sh\nls -l\n```"),
    ):
        click(chat, name, of="#talk", index=index)
        chat.until("document.getElementById('told').textContent === 'Copied'")
        assert chat.evaluate("navigator.clipboard.readText()") == text
        chat.evaluate("document.getElementById('told').textContent = ''")


def test_nothing_comes_from_elsewhere_and_the_policy_holds(chat: Page) -> None:
    assert chat.evaluate("performance.getEntriesByType('resource').every((e) => e.name.startsWith(location.origin))")
    blocked = "fetch('http://127.0.0.2:1/').then(() => 'through', () => 'blocked')"
    assert chat.evaluate(blocked) == "blocked"
    script = "Object.assign(document.createElement('script'), {text: 'window.ran = 1'})"
    for attack in (f"document.body.append({script})", "document.body.innerHTML = '<b>x</b>'"):
        assert chat.evaluate(f"(() => {{ try {{ {attack} }} catch (error) {{ return error.name }} }})()") == "TypeError"
    assert chat.evaluate("window.ran") is None
    assert any("Content Security Policy" in fault or "TrustedHTML" in fault for fault in chat.faults)
    chat.faults.clear()


def test_it_asks_for_the_key(page: Page) -> None:
    with scripted(api_key="right") as locked:
        page.open(locked.url + "/")
        page.until("document.getElementById('lock').open")
        for key in ("wrong", "right"):
            page.evaluate("document.getElementById('key').focus()")
            page.type(key)
            page.press("Enter", text="\r")
            if key == "wrong":
                page.until("document.getElementById('lock-title').textContent.includes('does not know')")
        page.until(READY)
        assert not page.evaluate("document.getElementById('lock').open")
        answered(page, locked, 1, "Hello", "Hi")
        page.reload()
        page.until(READY)  # kept for this tab
        page.faults.clear()  # the browser tells of each 401


# --- Looks, keyboard, screen readers


def test_the_key_for_a_new_chat_is_no_letter_of_anybodys(chat: Page, engine: Engine) -> None:
    begun(chat, engine, 1, "first", "answer")
    # AltGr+N writes a letter on some keyboards, with control and alt on Windows; N lies elsewhere on others.
    for key, code, modifiers in (
        ("ń", "KeyN", 1),
        ("n", "KeyN", 3),
        ("n", "KeyN", 9),
        ("b", "KeyN", 1),
        ("n", "KeyN", 0),
    ):
        chat.press(key, code, modifiers=modifiers)
        assert chat.evaluate(SHOWN) == ["first", "answer"], (key, modifiers)
    chat.press("n", "KeyL", modifiers=1)
    assert chat.evaluate(SHOWN) == []
    engine.aborted()
    assert "Alt+N" in chat.evaluate("document.getElementById('clear').title")


def test_light_dark_and_narrow(chat: Page) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light = chat.evaluate(paper)
    chat.size(400, 700, dark=True)
    chat.until(f"{paper} !== {light!r}")
    dark = chat.evaluate(paper)
    click(chat, "Theme")
    assert chat.evaluate(paper) == light
    chat.reload()
    assert chat.evaluate(paper) == light
    click(chat, "Theme")
    assert chat.evaluate(paper) == dark
    for button, panel, other in (("Options", "options", "conversations"), ("Chats", "conversations", "options")):
        click(chat, button)
        assert chat.evaluate(f"document.getElementById({panel!r}).checkVisibility()")
        assert not chat.evaluate(f"document.getElementById({other!r}).checkVisibility()")
        assert chat.evaluate("document.getElementById('talk').inert")
    chat.press("Escape")
    assert not chat.evaluate("document.getElementById('conversations').checkVisibility()")
    assert not chat.evaluate("document.getElementById('talk').inert")


def test_the_keyboard_reaches_everything(chat: Page, engine: Engine) -> None:
    answered(chat, engine, 1, "first", "one")
    kept(chat, "first")
    chat.evaluate("document.activeElement.blur()")
    visible = (
        "[...document.querySelectorAll('a, button, input, select, textarea')].filter((one) => one.checkVisibility())"
    )
    chat.evaluate(f"window.missing = new Set({visible})")
    for _ in range(40):
        chat.press("Tab")
        chat.evaluate("window.missing.delete(document.activeElement)")
    assert chat.evaluate("[...window.missing].map((one) => one.id || one.textContent)") == []


@pytest.fixture(scope="module")
def axe() -> str:
    return (node_package(AXE) / "node_modules" / "axe-core" / "axe.min.js").read_text()


def audited(page: Page, axe: str, where: str) -> None:
    """Fail for what axe-core objects to, or where the page is wider than its window."""
    page.evaluate(f"window.axe ? 0 : (() => {{ {axe} }})()")
    violations = "axe.run().then((all) => all.violations)"
    parts = "one.nodes.map((node) => node.html + ' ' + node.failureSummary)"
    found = page.evaluate(f"{violations}.then((all) => all.map((one) => [one.id, {parts}]))")
    assert found == [], where
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), where


WINDOWS = ((320, 640, False), (320, 640, True), (1280, 800, False), (3840, 2160, True))


@pytest.mark.parametrize(("width", "height", "dark"), WINDOWS)
def test_axe_finds_nothing(chat: Page, engine: Engine, axe: str, width: int, height: int, *, dark: bool) -> None:
    chat.size(width, height, dark=dark)
    audited(chat, axe, "empty")
    set_option(chat, "tools", json.dumps([TOOL]))
    attach(chat, "notes.txt", "['one']")
    say(chat, "What do you *think* of this very long word: " + "x" * 200)
    engine.request(1)
    engine.think("Well, ")
    engine.say(MARKDOWN)
    chat.until("document.querySelector('article hr')")
    audited(chat, axe, "streaming")
    engine.call("get_weather", '{"city": "Rome"}')
    engine.end()
    chat.until(ANSWERED)
    audited(chat, axe, "answered, with a call")
    click(chat, "Edit")
    set_option(chat, "schema", "{")
    audited(chat, axe, "editing, with a wrong schema")
    for name in ("Options", "Chats") if width < 1100 else ():
        click(chat, name)
        audited(chat, axe, name)
    if width < 1100:
        click(chat, "Chats")
    set_option(chat, "schema", "")
    chat.press("Escape")
    attach(chat, "a.bin", "[new Uint8Array([255])]")
    chat.until(PROBLEM)
    audited(chat, axe, "a problem")
    chat.evaluate("document.querySelector('#list button').click()")
    chat.until("!document.getElementById('note').hidden")
    audited(chat, axe, "deleted")


@pytest.mark.skipif(not os.environ.get("PENSTOCK_PICTURES"), reason="makes the docs' pictures; PENSTOCK_PICTURES=1")
def test_pictures_of_the_docs(real: Page) -> None:
    PICTURES.mkdir(exist_ok=True)
    set_option(real, "temperature", "0")
    for question in ("What is 128 + 457?", "Tell me a short story."):
        count = real.evaluate("document.querySelectorAll('.timing').length")
        say(real, question)
        real.until(f"document.querySelectorAll('.timing').length === {count + 1} && {IDLE}")
    real.screenshot(PICTURES / "chat.png")
    click(real, "Theme")
    real.screenshot(PICTURES / "chat-dark.png")
    click(real, "Theme")
    click(real, "New chat")
    set_option(real, "schema", json.dumps(SCHEMA, indent=1))
    say(real, "Tom is 5 years old.")
    real.until(ANSWERED)
    real.evaluate("document.getElementById('options').scrollTo(0, 9999)")
    real.screenshot(PICTURES / "schema-panel.png")
