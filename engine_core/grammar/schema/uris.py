"""References as RFC 3986 resolves them (sections 5.2 and 5.3). The standard library's way to do so comes with a client
that fetches, and engine_core has no network."""

from __future__ import annotations

import re

PARTS = re.compile(r"^(([^:/?#]+):)?(//([^/?#]*))?([^?#]*)(\?([^#]*))?(#(.*))?\Z", re.DOTALL)  # appendix B
ESCAPES = re.compile(r"(?:%[0-9A-Fa-f]{2})+")


def defragmented(uri: str) -> tuple[str, str]:
    """A URI without its fragment, and the fragment."""
    bare, _, fragment = uri.partition("#")
    return bare, fragment


def unescaped(text: str) -> str:
    """Percent escapes decoded; what is no UTF-8 becomes a replacement character."""
    return ESCAPES.sub(lambda found: bytes.fromhex(found[0].replace("%", "")).decode(errors="replace"), text)


def joined(base: str, reference: str) -> str:
    """The URI that a reference means where `base` is in force."""
    scheme, authority, path, query, fragment = _split(reference)
    outer_scheme, outer_authority, outer_path, outer_query, _ = _split(base)
    if scheme or not base:
        return reference if not base else _whole(scheme, authority, _flat(path), query, fragment)
    if authority:
        return _whole(outer_scheme, authority, _flat(path), query, fragment)
    if not path:
        return _whole(outer_scheme, outer_authority, outer_path, query or outer_query, fragment)
    if not path.startswith("/"):
        cut = outer_path.rfind("/") + 1
        path = outer_path[:cut] + path if cut or not outer_authority else "/" + path
    return _whole(outer_scheme, outer_authority, _flat(path), query, fragment)


def _split(uri: str) -> tuple[str, str, str, str, str]:
    """Scheme, authority, path, query and fragment, the marks that set them off included."""
    found = PARTS.match(uri)
    assert found is not None, "the expression matches any text"
    return found[1] or "", found[3] or "", found[5], found[6] or "", found[8] or ""


def _whole(scheme: str, authority: str, path: str, query: str, fragment: str) -> str:
    return scheme + authority + path + query + fragment


def _flat(path: str) -> str:
    """A path without its dot segments."""
    out: list[str] = []
    segments = path.split("/")
    for at, segment in enumerate(segments):
        if segment == "..":
            if len(out) > 1 or (out and out[0]):
                out.pop()
        elif segment != ".":
            out.append(segment)
        if segment in (".", "..") and at == len(segments) - 1:
            out.append("")
    return "/".join(out)
