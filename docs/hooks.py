"""Hooks of MkDocs: tables made from the code, and links that leave docs/.

A table stands where a page says `<!-- generated: NAME -->`. A link that leaves docs/ leads into the repository, or is
plain text while that has no public address (`repo_url` in mkdocs.yml).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.engine_core.models import spec
from penstock.protocol.config import ApiConfig, Config, Field, fields
from penstock.services.metrics.definitions import METRICS, Kind
from penstock.services.metrics.exposition import VLLM
from penstock.services.openai.openapi import document
from penstock.services.openai.routes import ROUTES

MARK = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
HEADS: Mapping[str, str] = {
    "model": "Model", "api": "HTTP server", "tokenizer": "Tokenizer processes", "scheduler": "Scheduler",
    "executor": "Executors", "links": "Links between processes", "run": "Processes and logs", "trace": "Tracing",
}  # fmt: skip


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("\n", " ") for cell in line) + " |" for line in lines)


def cell(text: str) -> str:
    """Words of the code as they stand in a cell: a bar or a bracket is none of Markdown's."""
    return re.sub(r"([|<>*_\[\]])", r"\\\1", text)


def code(text: str) -> str:
    return "`" + text.replace("|", r"\|") + "`"


def options() -> str:
    """Every option by section, in the order of the code: names, type, default, allowed values, help."""
    parts = []
    for section in Config.__struct_fields__:
        rows = [
            [", ".join(map(code, names(field))), code(shown(field)) if shown(field) else "", cell(meaning(field))]
            for field in fields() if field.section == section
        ]  # fmt: skip
        parts.append(f"## {HEADS[section]}\n\nIn a file: `[{section}]`.\n\n" + table(["Option", "Default", ""], rows))
    return "\n\n".join(parts)


def names(field: Field) -> list[str]:
    every = [field.flag, *field.option.aliases]
    return [*every, f"--no-{field.flag[2:]}"] if field.type is bool else every


def shown(field: Field) -> str:
    if field.type is bool:
        return "on" if field.default else "off"
    return str(field.default)


def meaning(field: Field) -> str:
    """The help text as a sentence, with what is allowed and the variable of a secret."""
    said = [sentence(field.option.help)]
    if field.allowed:
        said.append(sentence(field.allowed))
    if field.option.secret:
        said.append(f"May come from ${field.variable}.")
    return " ".join(said)


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def http() -> str:
    """Every route of openapi.json with its parameters, body, answer and statuses, then every schema they name."""
    described = document(ROUTES, ApiConfig(), locked=False)
    parts = ["## Endpoints"]
    for path, methods in described["paths"].items():
        parts += [endpoint(f"{method.upper()} {path}", one) for method, one in methods.items()]
    parts.append("## Schemas")
    parts += [schema(name, one) for name, one in described["components"]["schemas"].items()]
    return "\n\n".join(parts)


def endpoint(title: str, described: Mapping[str, Any]) -> str:
    said = [f"### `{title}`", sentence(described["summary"])]
    rows = [
        [code(one["name"]), one["in"], kind(one["schema"]), cell(one.get("description", ""))]
        for one in described.get("parameters", ())
    ]
    if rows:
        said.append(table(["Parameter", "In", "Type", ""], rows))
    if body := described.get("requestBody"):
        said.append("Body: " + contents(body) + ".")
    answers = [
        [code(status), contents(one), cell(one["description"])] for status, one in described["responses"].items()
    ]
    return "\n\n".join([*said, table(["Status", "Answer", ""], answers)])


def contents(described: Mapping[str, Any]) -> str:
    return ", or ".join(f"{code(media)}: {kind(one['schema'])}" for media, one in described["content"].items())


def kind(found: Mapping[str, Any]) -> str:
    """A JSON Schema in a few words."""
    if "$ref" in found:
        name = found["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in found or "const" in found:
        return " ".join(code(repr(one).replace("'", '"')) for one in found.get("enum", [found.get("const")]))
    if "anyOf" in found:
        return " or ".join(dict.fromkeys(kind(one) for one in found["anyOf"] if one.get("type") != "null"))
    if found.get("type") == "array":
        return "list" + (f" of {kind(found['items'])}" if found.get("items") else "")
    bounds = [f"{sign} {found[word]}" for word, sign in (("minimum", "≥"), ("maximum", "≤")) if word in found]
    return " ".join([str(found.get("type", "any")), *bounds])


def schema(name: str, found: Mapping[str, Any]) -> str:
    said = [f"### {name}"]
    if found.get("description"):
        said.append(cell(found["description"]))
    needed = found.get("required", ())
    rows = [
        [code(key) + (" (required)" if key in needed else ""), kind(one), default(one)]
        for key, one in found.get("properties", {}).items()
    ]
    if rows:
        said.append(table(["Field", "Type", "Default"], rows))
    else:
        said.append(f"Type: {kind(found)}.")
    return "\n\n".join(said)


def default(found: Mapping[str, Any]) -> str:
    given = found.get("default")
    return "" if given is None else code(repr(given).replace("'", '"'))


def metrics() -> str:
    """Every metric as /metrics has it; a counter's name ends in `_total`."""
    rows = []
    for metric in METRICS.values():
        name = f"penstock_{metric.name}" + ("_total" if metric.kind is Kind.COUNTER else "")
        labels = " ".join(map(code, (*metric.subject.value, *metric.labels)))
        rows.append([code(name), metric.kind.value, labels, cell(sentence(metric.help))])
    return table(["Metric", "Kind", "Labels", ""], rows)


def aliases() -> str:
    """vLLM's names, and the metrics that have the same meaning."""
    rows = []
    for theirs, (ours, text) in VLLM.items():
        total = "_total" if METRICS[ours].kind is Kind.COUNTER else ""
        rows.append([code(theirs + total), code(f"penstock_{ours}{total}"), cell(sentence(text))])
    return table(["vLLM's name", "Metric", ""], rows)


def families() -> str:
    """The architectures that config.json may name."""
    rows = []
    for architecture, family in spec.ARCHITECTURES.items():
        (base,) = (name for name, of in spec.BASES.items() if of == family)
        kind_of = "mixture of experts" if family in spec.NAMES else "dense"
        rows.append([code(architecture), code(base), code(family), kind_of])
    return table(["`architectures`", "Embedding model", "Family", "Layers"], rows)


GENERATED = {
    "options": options, "http": http, "metrics": metrics, "metrics-vllm": aliases, "families": families,
}  # fmt: skip


def outward(markdown: str, page: str, repository: str) -> str:
    """`markdown` of the page docs/`page` with its links that leave docs/ made links into `repository`, or text."""

    def led(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        place = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target.partition("#")[0]))
        if re.match(r"[a-z]+:|#", target) or place.startswith("docs/"):
            return link[0]
        return f"{picture}[{text}]({repository}/blob/main/{place})" if repository else text

    parts = FENCED.split(markdown)
    blocks = [*FENCED.findall(markdown), ""]
    return "".join(LINK.sub(led, part) + block for part, block in zip(parts, blocks, strict=True))


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Called by MkDocs for each page."""
    markdown = outward(markdown, page.file.src_uri, (config.repo_url or "").rstrip("/"))
    return MARK.sub(lambda mark: GENERATED[mark[1]](), markdown)
