"""Files that need no key: the page with its policy, icons, robots; they hold nothing of the server."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from penstock.services.http import static_files as files
from penstock.services.http.static_files import FILES
from tests.services.client.fake_engine import FakeLink, app_state, client, silent

VOID = frozenset(("meta", "link", "img", "input", "br"))
REMOTE = re.compile(r"https?://(?!www\.w3\.org/2000/svg)")


class Outline(HTMLParser):
    """Elements, ids and labels of a page; fails where tags do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def outline() -> Outline:
    parser = Outline()
    parser.feed(FILES["/"].body.decode())
    parser.close()
    assert parser.open == []
    return parser


def head(path: str) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in FILES[path].headers}


@pytest.mark.parametrize("path", FILES)
async def test_each_is_served_without_a_key(path: str) -> None:
    async with client(app_state(FakeLink(silent), api_key="k")) as http:
        answer = await http.get(path)
        assert answer.status_code == 200
        assert answer.content == FILES[path].body
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        tag = answer.headers["etag"]
        for known in (tag, f'"other", W/{tag}'):
            again = await http.get(path, headers={"if-none-match": known})
            assert again.status_code == 304
            assert again.content == b""
            assert again.headers["etag"] == tag
        assert (await http.get(path, headers={"if-none-match": '"other"'})).status_code == 200
        assert (await http.head(path)).status_code == 200
        assert (await http.post(path)).status_code == 405


def test_the_page_loads_nothing_from_elsewhere() -> None:
    text = FILES["/"].body.decode()
    assert not REMOTE.search(text)
    assert len(text) < 40_000
    for tag, attributes in outline().found:
        for name in ("src", "href", "action"):
            assert (attributes.get(name) or "/").startswith("/")
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag


def test_the_policy_allows_what_stands_in_the_page_and_no_more() -> None:
    policy = dict(part.strip().split(" ", 1) for part in head("/")["content-security-policy"].split(";"))
    text = FILES["/"].body.decode()
    for kind in ("script", "style"):
        (content,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in head("/")["content-security-policy"]


def test_everything_has_a_name_for_those_who_do_not_see() -> None:
    parser = outline()
    tags = [tag for tag, _ in parser.found]
    assert ("html", {"lang": "en"}) in parser.found
    assert tags.count("h1") == tags.count("main") == tags.count("title") == 1
    text = FILES["/"].body.decode()
    for tag, attributes in parser.found:
        if tag in ("input", "select", "textarea"):
            labelled = "aria-label" in attributes or re.search(rf'<label>[^<]+<{tag} id="{attributes["id"]}"', text)
            assert labelled, attributes
        if tag == "img":
            assert "alt" in attributes
    ids = [attributes["id"] for _, attributes in parser.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'\bat\("(\w[\w-]*)"\)', text)) | set(re.findall(r"\bgetElementById\('(\w+)'\)", text))
    assert used <= set(ids)


@pytest.mark.skipif(shutil.which("node") is None, reason="node checks the script's syntax")
def test_the_script_is_javascript(tmp_path: Path) -> None:
    (script,) = re.findall(r"<script>(.*?)</script>", FILES["/"].body.decode(), re.DOTALL)
    (tmp_path / "page.js").write_text(script)
    subprocess.run(["node", "--check", str(tmp_path / "page.js")], check=True, capture_output=True)


def test_crawlers_are_asked_to_stay_away_and_icons_are_pictures() -> None:
    assert FILES["/robots.txt"].body == files.ROBOTS.encode()
    assert head("/favicon.ico")["content-type"] == "image/svg+xml"
    assert FILES["/favicon.ico"].body.startswith(b"<svg ")
