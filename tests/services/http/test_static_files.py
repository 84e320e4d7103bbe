"""Files that need no key: the page, what it loads, its policy, icons, robots; they hold nothing of the server."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from penstock.services.http.static_files import FILES, folder
from tests.services.client.fake_engine import FakeLink, app_state, client, silent

VOID = frozenset(("meta", "link", "img", "input", "br"))
REMOTE = re.compile(r"https?://(?!www\.w3\.org/2000/svg)")
VENDORED = "/static/marked.js"
SCRIPTS = sorted(path for path in FILES if path.endswith(".js"))
OWN = [path for path in SCRIPTS if path != VENDORED]
# Whatever makes HTML or a script of text, should a browser not know Trusted Types.
SINKS = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|DOMParser|\beval\b|new Function")


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


POLICY = head("/")["content-security-policy"]


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


async def test_no_other_file_is_served() -> None:
    async with client(app_state(FakeLink(silent))) as http:
        for name in ("README.md", "marked.LICENSE", "page.html", "../static_files.py", "%2e%2e/static_files.py", ""):
            assert (await http.get(f"/static/{name}")).status_code == 404, name


def test_the_page_loads_nothing_from_elsewhere_and_also_works_below_a_path() -> None:
    for tag, attributes in outline().found:
        for name in ("src", "href", "action"):
            assert f"/{attributes[name]}" in FILES if name in attributes else True
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
    for path in ("/", "/static/page.css", *OWN):
        text = FILES[path].body.decode()
        assert not REMOTE.search(text), path
        for name in re.findall(r'from "\./([\w.]+)"', text):
            assert f"/static/{name}" in FILES
        assert not re.search(r"""(fetch|call)\(["'`]/""", text), "paths are relative to the page"
    assert sum(len(FILES[path].body) for path in FILES) < 130_000


def test_the_policy_allows_this_server_and_no_inline_script() -> None:
    policy = {name: rest for name, _, rest in (part.strip().partition(" ") for part in POLICY.split(";"))}
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["trusted-types"] == "'none'"
    assert "unsafe" not in POLICY
    for path in OWN:
        assert not SINKS.search(FILES[path].body.decode()), path


def test_the_vendored_library_is_the_one_that_the_note_names() -> None:
    note = (folder() / "README.md").read_text()
    (version,) = re.findall(r"/marked\) (\d+\.\d+\.\d+), MIT", note)
    assert f" * marked v{version} - a markdown parser".encode() in FILES[VENDORED].body[:200]
    assert "MIT" in (folder() / "marked.LICENSE").read_text()
    for path in FILES:
        if path.startswith("/static/"):
            assert f"`{path.removeprefix('/static/')}`" in note, path


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
    scripts = "".join(FILES[path].body.decode() for path in OWN)
    used = set(re.findall(r'\bat\("([\w-]+)"\)', scripts)) | set(re.findall(r'\blisten\("([\w-]+)"', scripts))
    assert used <= set(ids)
    assert {"prompt", "talk", "schema-problem"} <= set(ids)


@pytest.mark.skipif(shutil.which("node") is None, reason="node checks the scripts' syntax")
@pytest.mark.parametrize("path", SCRIPTS)
def test_the_scripts_are_javascript(path: str) -> None:
    subprocess.run(["node", "--check", "--input-type=module"], input=FILES[path].body, check=True, capture_output=True)


def test_crawlers_are_asked_to_stay_away_and_icons_are_pictures() -> None:
    assert FILES["/robots.txt"].body == b"User-agent: *\nDisallow: /\n"
    assert head("/favicon.ico")["content-type"] == "image/svg+xml"
    assert FILES["/favicon.ico"].body.startswith(b"<svg ")
