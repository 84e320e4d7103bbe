"""Hooks of MkDocs: tables made from the code, and links that leave docs/.

A table stands where a page says `<!-- generated: NAME -->`. A link that leaves docs/ leads into the repository, or is a
path while that has no public address (`repo_url` in mkdocs.yml).
"""

from __future__ import annotations

import functools
import inspect
import json
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.engine_core.models import foreign, spec
from penstock.engine_core.models.families import families as registry
from penstock.engine_core.models.layer_spec import NO_ROPE, Body
from penstock.engine_core.models.quantization.config import METHODS
from penstock.engine_core.models.reading import ROPE_KINDS, ModelFile
from penstock.engine_core.models.weight_files import STORED_TYPES
from penstock.kernels.chip import CHIPS
from penstock.protocol.config import ApiConfig, Config, fields
from penstock.protocol.option import Field
from penstock.services.metrics.definitions import METRICS, Kind
from penstock.services.metrics.exposition import VLLM, VLLM_INFO
from penstock.services.openai.openapi import document
from penstock.services.openai.routes import ROUTES
from penstock.services.supervisor.foreign_flags import read_table

MARK = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
WIDE = 2**31 - 1
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
        parts.append(
            f"## {HEADS[section]}\n\nIn a file: `[{section}]`.\n\n" + table(["Option", "Default", "Meaning"], rows)
        )
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
        said.append(table(["Parameter", "In", "Type", "Meaning"], rows))
    if body := described.get("requestBody"):
        said.append("Body: " + contents(body) + ".")
    answers = [
        [code(status), contents(one), cell(one["description"])] for status, one in described["responses"].items()
    ]
    return "\n\n".join([*said, table(["Status", "Answer", "Meaning"], answers)])


def contents(described: Mapping[str, Any]) -> str:
    return ", or ".join(f"{code(media)}: {kind(one['schema'])}" for media, one in described["content"].items())


def kind(found: Mapping[str, Any]) -> str:
    """A JSON Schema in a few words."""
    if "$ref" in found:
        name = found["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in found or "const" in found:
        return " ".join(code(json.dumps(one)) for one in found.get("enum", [found.get("const")]))
    if "anyOf" in found:
        return " or ".join(dict.fromkeys(kind(one) for one in found["anyOf"] if one.get("type") != "null"))
    if found.get("type") == "array":
        return "list" + (f" of {kind(found['items'])}" if found.get("items") else "")
    return str(found.get("type", "any")) + bounds(found.get("minimum"), found.get("maximum"))


def bounds(low: float | None, high: float | None) -> str:
    """What a number may be, in words; bounds that only say how wide an integer is are left out."""
    low, high = (None if value is None or abs(value) >= WIDE else value for value in (low, high))
    if low is None or high is None:
        return f" ≥ {low:g}" if low is not None else f" ≤ {high:g}" if high is not None else ""
    return f" of {low:g} to {high:g}"


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
        shown = 3 if any(row[2] for row in rows) else 2
        said.append(table(["Field", "Type", "Default"][:shown], [row[:shown] for row in rows]))
    else:
        said.append(f"Type: {kind(found)}.")
    return "\n\n".join(said)


def default(found: Mapping[str, Any]) -> str:
    given = found.get("default")
    return "" if given is None else code(json.dumps(given))


def metrics() -> str:
    """Every metric as /metrics has it; a counter's name ends in `_total`."""
    rows = []
    for metric in METRICS.values():
        name = f"penstock_{metric.name}" + ("_total" if metric.kind is Kind.COUNTER else "")
        labels = " ".join(map(code, (*metric.subject.value, *metric.labels)))
        rows.append([code(name), metric.kind.value, labels, cell(sentence(metric.help))])
    return table(["Metric", "Kind", "Labels", "Meaning"], rows)


def aliases() -> str:
    """vLLM's names, and the metrics that have the same meaning."""
    rows = []
    for theirs, (ours, text) in VLLM.items():
        total = "_total" if METRICS[ours].kind is Kind.COUNTER else ""
        rows.append([code(theirs + total), code(f"penstock_{ours}{total}"), cell(sentence(text))])
    for theirs, (several, text) in VLLM_INFO.items():
        rows.append([code(theirs), " ".join(code(f"penstock_{ours}") for ours in several), cell(sentence(text))])
    return table(["vLLM's name", "Metric", "Meaning"], rows)


PROBE: Mapping[str, object] = {  # a config.json that asks for all that a family has
    "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 8, "vocab_size": 64,
    "intermediate_size": 64, "num_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 1, "moe_topk": 1,
    "moe_intermediate_size": 64, "use_sliding_window": True, "max_window_layers": 0,
    "use_qk_norm": True, "qk_layernorm": True, "residual_multiplier": 0.5,
    "sliding_window": 1 << 24, # Llama's reader refuses one that would hide a key
}  # fmt: skip

ASKED: Mapping[str, Mapping[str, object]] = {  # of files that must have more
    **{f"deepseek_v{version}": {"q_lora_rank": 64, "n_group": 1, "topk_group": 1} for version in (2, 3)},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8},
    "falcon_h1": {"mamba_n_heads": 8, "key_multiplier": 0.5, "embedding_multiplier": 2.0},
    "electra": {"embedding_size": 64},
    "granitemoehybrid": {"layer_types": ["mamba"] * 7 + ["attention"], "mamba_n_heads": 8},
    "nemotron_h": {"hybrid_override_pattern": "ME*-MEM-", "moe_shared_expert_intermediate_size": 64},
    "glm4_moe_lite": {"q_lora_rank": 64},
    "nomic_bert": {"num_experts": 0},
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": 2},
    "mellum": {"layer_types": ["sliding_attention", "full_attention"] * 4},
    **{key: {"full_attn_idxs": [1]} for key in ("lfm2", "lfm2_moe")},
    "ministral3": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0,
                                       "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}},
}  # fmt: skip


def families() -> str:
    """The architectures that config.json may name, and what the reader makes of a file that asks for everything."""
    rows = []
    for family in registry().values():
        found = family.read(ModelFile(Path("config.json"), {**PROBE, **ASKED.get(family.name, {})}, family.defaults))
        classes = map(code, (family.architecture, *family.wrappers))
        rows.append([family.name, " ".join(classes), code(family.base), ", ".join(layer_options(found))])
    return table(["Family", "Architecture", "Embedding model", "Beyond Llama's layers"], rows)


def layer_options(found: Body) -> Iterator[str]:
    """What some layer has that Llama's have not."""
    layers = found.layers
    dense = [layer.dense for layer in layers if layer.dense is not None]
    sparse = [layer.experts for layer in layers if layer.experts is not None]
    own, norms = [layer.attention for layer in layers if layer.attention is not None], layers[-1].norms
    ropes = {attention.rope for attention in own}
    yield from [text for text, has in {
        "bidirectional attention": own[0].bidirectional,
        "latent attention (MLA)": own[0].latent is not None,
        "learned position embeddings": found.embedding.positions,
        "recurrent layers": any(layer.recurrence for layer in layers),
        "attention and recurrence in one layer": any(layer.attention and layer.recurrence for layer in layers),
        "QKV bias": own[0].qkv_bias,
        "QK norm": own[0].qk_norm == "head",
        "QK norm with weights for each head": own[0].qk_norm == "heads",
        "norm of values": own[0].value_norm,
        "two head sizes": len({attention.head_dim for attention in own}) > 1,
        "QK norm over all heads": own[0].qk_norm == "width",
        "sliding windows": any(attention.window for attention in own),
        "layers without RoPE": not found.embedding.positions and any(rope.kind == "none" for rope in ropes),
        "several RoPE bases": len(ropes - {NO_ROPE}) > 1,
        "partial RoPE": any(rope.dim for rope in ropes),
        "attention scale of its own": any(attention.scale and attention.latent is None for attention in own),
        "logit softcaps": any(attention.softcap for attention in own) or found.logit_softcap,
        "attention sinks": any(attention.sinks for attention in own),
        "LayerNorm": layers[0].norm.centered,
        "norms after attention and MLP": norms.attention_output,
        "no norms before them": not norms.attention_input,
        "norms after the residual sums": found.post_norm,
        "GELU": any(mlp.activation.startswith("gelu") for mlp in dense),
        "multipliers": (found.residual_scale, found.embedding_scale, found.logit_scale) != (1, 1, 1),
        "experts (MoE)": sparse,
        "shared experts": any(experts.shared for experts in sparse),
        "sigmoid routing": any(experts.routing.scores == "sigmoid" for experts in sparse),
    }.items() if has]  # fmt: skip


def formats() -> str:
    """What may be stored, what is computed with, how positions are stretched, and which parsers there are."""
    parsers = [field for field in fields() if field.name in ("tool_call_parser", "reasoning_parser")]
    return table(["Setting", "Values"], [
        ["Types of stored tensors", " ".join(map(code, STORED_TYPES))],
        ["Arithmetic (`--dtype`)", " ".join(map(code, spec.DTYPES))],
        ["Rope scaling", " ".join(map(code, ROPE_KINDS))],
        *([f"`{field.flag}`", " ".join(map(code, field.option.choices))] for field in parsers),
    ])  # fmt: skip


def weight_formats() -> str:
    """Every `quant_method` that is read, in its reader's words."""
    rows = [[code(name), cell((inspect.getdoc(read) or "").partition("\n")[0])] for name, read in METHODS.items()]
    return table(["`quant_method`", "What is read"], rows)


def flags_of(server: str) -> str:
    """What becomes of each flag of another server, which the tests' list of its flags names."""
    lists = Path(__file__).parents[1] / "tests" / "services" / "supervisor" / "flags"
    lines = (lists / f"{server}.txt").read_text().split("\n")
    known = read_table()
    same: list[str] = []
    renamed: list[list[str]] = []
    ignored: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for flag in " ".join(line for line in lines if not line.startswith("#")).split():
        found = known.get(flag)
        if found is None:
            same.append(code(flag))
        elif found.option:
            renamed.append([code(flag), code(found.option)])
        else:
            (refused if found.refused else ignored).setdefault(found.why, []).append(code(flag))
    return "\n\n".join((
        f"### Flags with the same name\n\n{' '.join(same)}",
        "### Flags under another name\n\n" + table(["Flag", "Taken as"], renamed),
        "### Flags without effect\n\n" + reasons(ignored, "Why"),
        "### Flags that are refused\n\n" + reasons(refused, "Why, and what to do instead"),
    ))  # fmt: skip


def reasons(groups: Mapping[str, Sequence[str]], head: str) -> str:
    """The largest groups last: a short list is what a reader looks through."""
    rows = sorted(groups.items(), key=lambda group: len(group[1]))
    option = re.compile(r"(?<![\w`-])--[a-z][\w-]*")
    return table([head, "Flags"], ([option.sub(r"`\g<0>`", cell(why)), " ".join(flags)] for why, flags in rows))


def elsewhere() -> str:
    """The files of other tools that a folder may hold in place of a model's, and what the start says of them."""
    says: dict[str, list[str]] = {}
    for pattern, text in foreign.FORMATS:
        says.setdefault(sentence(text.format("it")), []).append(code(pattern))
    return table(
        ["A folder with", "What the start says"], [[" ".join(found), cell(text)] for text, found in says.items()]
    )


COMPILED = Path(__file__).parents[1] / "benchmarks" / "results" / "chips.json"
# Of each architecture: GPUs that have it, and whether kernels ran on one of them or were only compiled.
ARCHITECTURES: Mapping[str, tuple[str, bool]] = {
    "sm_80": ("A100, A30", False), "sm_86": ("A10, A40, RTX 3090", False), "sm_89": ("L4, L40S, RTX 4090", False),
    "sm_90": ("H100, H200", True), "sm_100": ("B200", False), "sm_120": ("RTX 5090, RTX PRO 6000", False),
}  # fmt: skip


def chips() -> str:
    """Each architecture, what its GPUs have, and what was compiled for it, of benchmarks/results/chips.json."""
    rows = []
    kernels = json.loads(COMPILED.read_text())
    for name, chip in CHIPS.items():
        gpus, ran = ARCHITECTURES[name]
        forms = [[taken[name][0] for taken in kernel["rows"].values() if name in taken] for kernel in kernels.values()]
        most = max(shared for found in forms for shared in found)
        features = [word for word, has in (("TMA", chip.tma), ("PDL", chip.pdl), ("WGMMA", chip.wgmma)) if has]
        rows.append([
            gpus, code(name), "run" if ran else "compiled", f"{sum(map(bool, forms))} kernels in "
            f"{sum(map(len, forms))} forms", f"{most / 1024:.0f} of {chip.shared_memory / 1024:.0f} KiB",
            ", ".join(features) or "none",
        ])  # fmt: skip
    heads = ["GPUs", "Architecture", "Kernels were", "Compiled", "Shared memory of the largest", "Beyond Ampere"]
    return table(heads, rows)


GENERATED: Mapping[str, Callable[[], str]] = {
    "options": options, "http": http, "metrics": metrics, "metrics-vllm": aliases, "families": families,
    "flags-vllm": functools.partial(flags_of, "vllm"), "flags-sglang": functools.partial(flags_of, "sglang"),
    "formats": formats, "weight-formats": weight_formats, "foreign-formats": elsewhere, "chips": chips,
}  # fmt: skip


def outward(markdown: str, page: str, repository: str) -> str:
    """`markdown` of the page docs/`page` with its links that leave docs/ made links into `repository`, or paths."""

    def led(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        place = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target.partition("#")[0]))
        if picture or re.match(r"[a-z]+:|#", target) or place.startswith("docs/"):
            return link[0]
        if repository:
            return f"[{text}]({repository}/blob/main/{place})"
        named = text in ("result", "results") or place.endswith(text.rstrip("/"))
        return code(place) if named else f"{text} ({code(place)})"

    parts = FENCED.split(markdown)
    blocks = [*FENCED.findall(markdown), ""]
    return "".join(LINK.sub(led, part) + block for part, block in zip(parts, blocks, strict=True))


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Called by MkDocs for each page."""
    markdown = outward(markdown, page.file.src_uri, (config.repo_url or "").rstrip("/"))
    return MARK.sub(lambda mark: GENERATED[mark[1]](), markdown)
