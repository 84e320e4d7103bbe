"""The schema as it was written: its draft, its subschemas by number, and what each local reference points at.

References resolve as RFC 3986 (sections 5.2 and 5.3) and the drafts say (2020-12 core, sections 8 and 9): JSON
pointers, `$anchor`, `$id` as base, draft 7's `$id: "#name"`. Nothing is ever fetched. The metaschemas of drafts 4, 6
and 7 are known, as json-schema.org publishes them (AFL-2.1 or BSD-3-Clause). The standard library joins URIs in a
module that can fetch, and engine_core has no network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.engine_core.grammar.schema.cells import ANY, NEVER, Place, Term
from penstock.protocol.errors import UnsupportedSchema

# keywords whose value is a schema, a list of them, or a map of them
ONE = frozenset((
    *("additionalProperties", "propertyNames", "items", "additionalItems", "contains", "not", "if", "then", "else"),
    *("unevaluatedProperties", "unevaluatedItems", "contentSchema"),
))  # fmt: skip
MANY = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
NAMED = frozenset((
    *("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"),
))  # fmt: skip
IDENTIFIERS = frozenset(("$id", "id", "$anchor", "$dynamicAnchor"))
PARTS = re.compile(r"^(([^:/?#]+):)?(//([^/?#]*))?([^?#]*)(\?([^#]*))?(#(.*))?\Z", re.DOTALL)  # appendix B
ESCAPES = re.compile(r"(?:%[0-9A-Fa-f]{2})+")
METASCHEMAS: Mapping[str, dict[str, Any]] = json.loads(Path(__file__).with_name("metaschemas.json").read_bytes())
OLD_DRAFTS = ("draft-03", "draft-04", "draft-05", "draft-06", "draft-07")


def pointer(*tokens: str) -> str:
    """A JSON pointer (RFC 6901)."""
    return "".join("/" + token.replace("~", "~0").replace("/", "~1") for token in tokens)


def subschemas(node: dict[str, object]) -> Iterator[tuple[str, object]]:
    """Schemas right inside one, with the end of their pointers."""
    for keyword, value in node.items():
        if keyword in MANY and isinstance(value, list):
            yield from ((pointer(keyword, str(i)), child) for i, child in enumerate(value))
        elif keyword in ONE:
            yield pointer(keyword), value
        elif keyword in NAMED and isinstance(value, dict):
            yield from ((pointer(keyword, name), child) for name, child in value.items())


class Document:
    """Subschemas get their numbers when something first asks for them; equal numbers are the same schema.

    `loose`: readers leave out what needs a negation, so that every term may accept more than its schema does. `notes`
    says what was left out. If `lenient`, a pattern that is not understood waits to be written.
    """

    def __init__(self, root: dict[str, object], *, loose: bool = False, lenient: bool = False) -> None:
        self.loose = loose
        self.lenient = lenient
        self.notes: dict[str, None] = {}
        draft = root.get("$schema")
        self.old = isinstance(draft, str) and any(name in draft for name in OLD_DRAFTS)
        self.takes_id = not isinstance(draft, str) or any(name in draft for name in OLD_DRAFTS[:2])
        self.nodes: list[dict[str, object]] = []
        self.paths: list[str] = []
        self.bases: list[str] = []
        self.numbers: dict[int, int] = {}  # id() of a node, which the root keeps alive → its number
        self.targets: set[int] = set()  # numbers that a reference points at
        self.resources: dict[str, int] = {}  # absolute URI → number of the node with that $id
        self.anchors: dict[tuple[str, str], list[int]] = {}  # base URI and name → numbers
        self.dynamic: dict[str, list[int]] = {}  # name → numbers of nodes with that $dynamicAnchor
        self.tracks_evaluation = False
        self.root = self._number(root, "", "")
        self.resources.setdefault("", self.root)
        self._index()

    def term(self, schema: object, path: str, base: str) -> Term:
        """The term of a subschema. Raises UnsupportedSchema for what is none."""
        if schema is True or schema == {}:
            return ANY
        if schema is False:
            return NEVER
        if not isinstance(schema, dict):
            raise UnsupportedSchema(path.rpartition("/")[2], path, "a schema is an object or a boolean")
        return Place(self._number(schema, path, base))

    def path(self, term: Term) -> str:
        """Where a term stands, or '' for one made on the way."""
        return self.paths[term.number] if isinstance(term, Place) else ""

    def drops(self, place: Place, keyword: str, how: str) -> bool:
        """Whether a keyword gives way to something wider here, which is noted."""
        if self.loose:
            self.notes[f"{keyword} at {self.path(place) or '/'}: {how}"] = None
        return self.loose

    def child(self, place: Place, schema: object, *tokens: str) -> Term:
        """The term of a schema inside another."""
        number = place.number
        return self.term(schema, self.paths[number] + pointer(*tokens), self.bases[number])

    def branches(self, place: Place, node: dict[str, object], keyword: str) -> list[Term]:
        """The terms of a list of schemas. Raises UnsupportedSchema."""
        value = node[keyword]
        if not isinstance(value, list) or not value:
            raise UnsupportedSchema(keyword, self.path(place), "it must be a list of schemas, not empty")
        return [self.child(place, schema, keyword, str(i)) for i, schema in enumerate(value)]

    def table(self, place: Place, node: dict[str, object], keyword: str) -> dict[str, object]:
        """A keyword whose value is an object. Raises UnsupportedSchema."""
        value = node[keyword]
        if not isinstance(value, dict):
            raise UnsupportedSchema(keyword, self.path(place), "it must be an object")
        return value

    def target(self, place: Place, keyword: str) -> Term:
        """What a place's $ref, $dynamicRef or $recursiveRef points at; loosely, anything where that is remote.

        Raises UnsupportedSchema: remote or missing.
        """
        path = self.paths[place.number]
        reference = self.nodes[place.number][keyword]
        if not isinstance(reference, str):
            raise UnsupportedSchema(keyword, path, "a reference is a string")
        if keyword == "$dynamicRef":
            self._check_dynamic(reference, path)
        base = self.bases[place.number]
        uri, fragment = (base, reference[1:]) if reference.startswith("#") else defragmented(joined(base, reference))
        fragment = unescaped(fragment)
        start = self.resources.get(uri)
        known = uri.replace("https:", "http:", 1)
        if start is None and known in METASCHEMAS:
            start = self.resources[uri] = self._number(METASCHEMAS[known], f"{uri}#", uri)
        if start is None:
            remote = UnsupportedSchema(keyword, path, f"{reference[:200]!r} is not in this schema; nothing is fetched")
            if not self.loose:
                raise remote
            self.notes[remote.message] = None
            return ANY
        if fragment and not fragment.startswith("/"):
            found = self.anchors.get((uri, fragment), [])
            if not found and self.takes_id:
                found = self.anchors.get((self.bases[self.root], fragment), [])
            if len(found) != 1:
                raise UnsupportedSchema(keyword, path, f"{len(found)} anchors are named {fragment[:200]!r}")
            term: Term = Place(found[0])
        else:
            # an `id` without a meaning is common: what it hides is looked for from the root
            begins = start if start == self.root or not self.takes_id or self._holds(start, fragment) else self.root
            term = self._follow(begins, fragment, keyword, path, reference)
        if isinstance(term, Place):
            self.targets.add(term.number)
        return term

    def _holds(self, start: int, fragment: str) -> bool:
        """Whether a pointer's first step is there."""
        steps = fragment.split("/")[1:2]
        return not steps or steps[0].replace("~1", "/").replace("~0", "~") in self.nodes[start]

    def _check_dynamic(self, reference: str, path: str) -> None:
        """Where one $dynamicAnchor has the name, the dynamic scope cannot matter and the reference is a plain one."""
        name = reference.rpartition("#")[2]
        if len(self.dynamic.get(name, ())) > 1:
            raise UnsupportedSchema("$dynamicRef", path, f"{name[:200]!r} depends on where the reference is met")

    def _follow(self, start: int, fragment: str, keyword: str, path: str, reference: str) -> Term:
        node: object = self.nodes[start]
        base, at = self.bases[start], self.paths[start]
        for token in fragment.split("/")[1:]:
            token = token.replace("~1", "/").replace("~0", "~")
            at += pointer(token)
            if isinstance(node, dict) and token in node:
                node = node[token]
            elif isinstance(node, list) and token.isdecimal() and int(token) < len(node):
                node = node[int(token)]
            else:
                raise UnsupportedSchema(keyword, path, f"{reference[:200]!r} points at nothing")
            if isinstance(node, dict):
                base = self._base_of(node, base)
        return self.term(node, at, base)

    def _base_of(self, node: dict[str, object], base: str) -> str:
        known = self.numbers.get(id(node))
        if known is not None:
            return self.bases[known]
        identity = self._identity(node)
        if identity is not None and not identity.startswith("#"):
            return defragmented(joined(base, identity))[0]
        return base

    def _identity(self, node: dict[str, object]) -> str | None:
        """What a node calls itself: `$id`, and `id` up to draft 4 or where no draft is announced."""
        if self.old and "$ref" in node:
            return None
        identity = node.get("$id", node.get("id") if self.takes_id else None)
        return identity if isinstance(identity, str) else None

    def _number(self, node: dict[str, object], path: str, base: str) -> int:
        number = self.numbers.get(id(node))
        if number is None:
            number = len(self.nodes)
            base = self._base_of(node, base)
            self.numbers[id(node)] = number
            self.nodes.append(node)
            self.paths.append(path)
            self.bases.append(base)
        return number

    def _index(self) -> None:
        """Number every subschema and note what its identifiers call it."""
        pending = [self.root]
        seen = {self.root}
        while pending:
            number = pending.pop()
            node, path, base = self.nodes[number], self.paths[number], self.bases[number]
            if "unevaluatedProperties" in node or "unevaluatedItems" in node:
                self.tracks_evaluation = True
            if not IDENTIFIERS.isdisjoint(node):
                self._identify(number, node, base)
            for end, child in subschemas(node):
                if isinstance(child, dict) and child:
                    inner = self._number(child, path + end, base)
                    if inner not in seen:
                        seen.add(inner)
                        pending.append(inner)

    def _identify(self, number: int, node: dict[str, object], base: str) -> None:
        identity = self._identity(node)
        if identity is not None:
            if identity.startswith("#"):
                self.anchors.setdefault((base, identity[1:]), []).append(number)
            else:
                self.resources[base] = number
        for keyword in ("$anchor", "$dynamicAnchor"):
            name = node.get(keyword)
            if isinstance(name, str):
                self.anchors.setdefault((base, name), []).append(number)
                if keyword == "$dynamicAnchor":
                    self.dynamic.setdefault(name, []).append(number)


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
