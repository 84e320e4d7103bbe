"""The page at /, in a real browser where one is installed: it chats, stops, asks for the key, obeys its policy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.browser import Page, installed, page
from tests.e2e.server import Server, serving

pytestmark = pytest.mark.skipif(not installed(), reason="no browser is installed; chromium would do")

READY = "document.getElementById('model').options.length && document.getElementById('state').className === 'ready'"
IDLE = "!document.getElementById('send').hidden"
LAST = "document.querySelector('article.assistant:last-of-type')"
ANSWERED = f"{IDLE} && {LAST}?.querySelector('.timing')"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}  # fmt: skip


@pytest.fixture
def chat(server: Server, tmp_path: Path) -> Iterator[Page]:
    with page(tmp_path) as found:
        found.size(1200, 800)
        found.open(server.url + "/")
        found.until(READY)
        yield found
        assert found.faults == []


def set_option(chat: Page, name: str, value: str) -> None:
    script = f"(() => {{ const box = document.getElementById({name!r}); box.value = {json.dumps(value)}; "
    chat.evaluate(script + "box.dispatchEvent(new Event('input')); })()")


def say(chat: Page, text: str) -> None:
    chat.evaluate("document.getElementById('prompt').focus()")
    chat.type(text)
    chat.press("Enter", text="\r")


def said(chat: Page) -> str:
    chat.until(ANSWERED)
    found = chat.evaluate(f"{LAST}.querySelector('.text').textContent")
    assert isinstance(found, str)
    return found


def test_a_conversation_with_its_timing(chat: Page) -> None:
    set_option(chat, "temperature", "0")
    say(chat, "What is 128 + 457?")
    assert "585" in said(chat)
    told = chat.evaluate(f"{LAST}.querySelector('.timing').innerText")
    for word in ("first token", "tokens/s", "in all", " in, "):
        assert word in told
    assert chat.evaluate(f"{LAST}.querySelectorAll('.tick').length") > 3
    say(chat, "Tell me a short story.")
    assert len(said(chat)) > 40
    assert chat.evaluate("document.querySelectorAll('article').length") == 4
    chat.press("n", "KeyN", modifiers=1)
    chat.until("document.querySelectorAll('article').length === 0")


def test_options_reach_the_server(chat: Page) -> None:
    for name, value in (("temperature", "1"), ("seed", "7"), ("max_tokens", "5"), ("top_p", "0.9")):
        set_option(chat, name, value)
    answers = set()
    for _ in range(2):
        say(chat, "Tell me a short story.")
        answers.add(said(chat))
        assert "5 out" in chat.evaluate(f"{LAST}.querySelector('.timing').innerText")
        assert "length" in chat.evaluate(f"{LAST}.querySelector('.timing').innerText")
        chat.press("n", "KeyN", modifiers=1)
    assert len(answers) == 1
    chat.open(chat.evaluate("location.href"))
    chat.until(READY)
    assert chat.evaluate("document.getElementById('seed').value") == "7"  # kept for the next visit


def test_an_answer_by_a_schema(chat: Page) -> None:
    set_option(chat, "temperature", "0")
    set_option(chat, "schema", "{")
    say(chat, "Tom is 5 years old.")
    assert chat.evaluate("document.querySelectorAll('article').length") == 0  # what is no JSON is not sent
    set_option(chat, "schema", json.dumps(SCHEMA))
    chat.press("Enter", text="\r") if chat.evaluate("document.activeElement.id") == "prompt" else say(chat, "")
    answer = json.loads(said(chat))
    assert answer["age"] == 5


def test_stopping_with_the_keyboard_and_what_was_said_stays(chat: Page) -> None:
    set_option(chat, "temperature", "1")
    say(chat, "Tell me a long story. " * 3)
    chat.until(f"{LAST}?.querySelector('.text').textContent.length > 5 || {IDLE}")
    if not chat.evaluate(IDLE):
        chat.press("Escape")
    said(chat)
    chat.press("ArrowUp")
    assert chat.evaluate("document.getElementById('prompt').value").startswith("Tell me a long story.")


# The server's answers, written by the test: how many requests there were, and a way to say something in the latest.
SCRIPTED = """(() => {
  const real = window.fetch;
  window.asked = [];
  window.fetch = (path, options) => {
    if (!String(path).endsWith("/chat/completions")) return real(path, options);
    const turn = { body: JSON.parse(options.body), stopped: false };
    window.asked.push(turn);
    return new Promise((resolve, reject) => {
      const failed = () => new DOMException("stopped", "AbortError");
      options.signal.addEventListener("abort", () => {
        turn.stopped = true;
        turn.pipe?.error(failed());
        reject(failed());
      });
      turn.answer = () => resolve(new Response(new ReadableStream({ start: (pipe) => { turn.pipe = pipe; } })));
      turn.say = (content) => turn.pipe.enqueue(new TextEncoder().encode(
        `data: ${JSON.stringify({ choices: [{ delta: { content }, finish_reason: null }] })}\\n\\n`));
      turn.end = () => turn.pipe.close();
    });
  };
})()"""
SHOWN = "[...document.querySelectorAll('article .text')].map((one) => one.textContent)"


def sent(chat: Page) -> list[tuple[str, str]]:
    """The messages of the latest request."""
    found = chat.evaluate("window.asked.at(-1).body.messages")
    return [(message["role"], message["content"]) for message in found]


def begun(chat: Page, question: str, words: str) -> None:
    """A scripted answer that streams and has not ended."""
    count = chat.evaluate("window.asked.length")
    say(chat, question)
    chat.until(f"window.asked.length === {count + 1}")
    chat.evaluate("window.asked.at(-1).answer()")
    chat.evaluate(f"window.asked.at(-1).say({words!r})")
    chat.until(f"{LAST}?.querySelector('.text').textContent === {words!r}")


def test_a_new_chat_while_an_answer_streams_begins_empty(chat: Page) -> None:
    chat.evaluate(SCRIPTED)
    begun(chat, "first", "a half")
    chat.evaluate("document.getElementById('clear').click()")
    assert chat.evaluate("window.asked[0].stopped")
    assert chat.evaluate(IDLE)
    assert chat.evaluate(SHOWN) == []
    begun(chat, "second", "another")
    assert sent(chat) == [("user", "second")]
    assert not chat.evaluate("window.asked[1].stopped")
    assert chat.evaluate(SHOWN) == ["second", "another"]
    chat.evaluate("window.asked[1].end()")
    assert said(chat) == "another"
    begun(chat, "third", "more")
    assert sent(chat) == [("user", "second"), ("assistant", "another"), ("user", "third")]


def test_stop_before_the_first_token_takes_the_message_back(chat: Page) -> None:
    chat.evaluate(SCRIPTED)
    begun(chat, "first", "answer")
    chat.evaluate("window.asked[0].end()")
    said(chat)
    say(chat, "second")
    chat.until("window.asked.length === 2")
    assert not chat.evaluate("document.getElementById('stop').hidden")
    chat.evaluate("document.getElementById('stop').click()")
    chat.until(IDLE)
    assert chat.evaluate("window.asked[1].stopped")
    assert chat.evaluate("document.getElementById('prompt').value") == "second"
    assert chat.evaluate(SHOWN) == ["first", "answer"]
    assert chat.evaluate("document.querySelectorAll('.fault').length") == 0
    chat.evaluate("document.getElementById('prompt').value = ''")
    begun(chat, "third", "more")
    assert sent(chat) == [("user", "first"), ("assistant", "answer"), ("user", "third")]


def test_stopping_an_answer_keeps_what_was_said(chat: Page) -> None:
    chat.evaluate(SCRIPTED)
    begun(chat, "first", "a half")
    chat.press("Escape")
    assert said(chat) == "a half"
    assert "you" in chat.evaluate(f"{LAST}.querySelector('.timing').innerText")
    begun(chat, "second", "more")
    assert sent(chat) == [("user", "first"), ("assistant", "a half"), ("user", "second")]


def test_the_key_for_a_new_chat_is_no_letter_of_anybodys(chat: Page) -> None:
    chat.evaluate(SCRIPTED)
    begun(chat, "first", "answer")
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
    assert chat.evaluate("window.asked[0].stopped")
    assert "Alt+N" in chat.evaluate("document.getElementById('clear').title")


def test_a_refusal_is_shown_and_the_message_comes_back(chat: Page) -> None:
    set_option(chat, "max_tokens", "4000")
    text = "word " * 200
    say(chat, text)
    chat.until(f"{IDLE} && document.querySelector('.fault')")
    assert "maximum context length" in chat.evaluate("document.querySelector('.fault').textContent")
    assert chat.evaluate("document.getElementById('prompt').value") == text.strip()
    assert all("400" in fault for fault in chat.faults)  # the browser tells of it too
    chat.faults.clear()


def test_markup_is_text(chat: Page) -> None:
    say(chat, "<img src=x onerror=\"document.title='bad'\"><b>bold</b>")
    said(chat)
    assert chat.evaluate("document.querySelectorAll('article img, article b').length") == 0
    assert chat.evaluate("document.title") == "Penstock"


def test_nothing_comes_from_elsewhere_and_the_policy_holds(chat: Page) -> None:
    own = chat.evaluate("performance.getEntriesByType('resource').every((e) => e.name.startsWith(location.origin))")
    assert own
    blocked = "fetch('http://127.0.0.2:1/').then(() => 'through', () => 'blocked')"
    assert chat.evaluate(blocked) == "blocked"
    script = "Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'})"
    chat.evaluate(f"document.body.append({script})")
    assert chat.evaluate("window.ran") is None
    assert any("Content Security Policy" in fault for fault in chat.faults)
    chat.faults.clear()


def test_light_and_dark_and_narrow(chat: Page) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light = chat.evaluate(paper)
    chat.size(400, 700, dark=True)
    chat.until(f"{paper} !== {light!r}")
    assert chat.evaluate("document.documentElement.scrollWidth") <= 400
    chat.evaluate("document.getElementById('theme').click()")
    assert chat.evaluate(paper) == light
    assert chat.evaluate("getComputedStyle(document.getElementById('options')).display") == "none"
    chat.evaluate("document.getElementById('fold').click()")
    assert chat.evaluate("getComputedStyle(document.getElementById('options')).display") == "block"


def test_it_asks_for_the_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("right\n")
    with serving(tmp_path, "--api-key-file", str(tmp_path / "keys")) as locked, page(tmp_path) as found:
        found.open(locked.url + "/")
        found.until("document.getElementById('lock').open")
        for key in ("wrong", "right"):
            found.evaluate("document.getElementById('key').focus()")
            found.type(key)
            found.press("Enter", text="\r")
            if key == "wrong":
                found.until("document.getElementById('lock-title').textContent.includes('does not know')")
        found.until(READY)
        assert not found.evaluate("document.getElementById('lock').open")
        set_option(found, "temperature", "0")
        say(found, "What is 2 + 2?")
        assert said(found)
        found.faults.clear()  # the browser tells of each 401
