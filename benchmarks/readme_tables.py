"""The documentation's tables of figures, each a function of result files."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from typing import Any

import msgspec

from benchmarks import apart, rows, scaling, speculation_h200
from benchmarks import images as pictures
from benchmarks.relimit import RESULTS
from benchmarks.rendered import Blocks, table
from benchmarks.rows import ALL, UNITS, Record
from benchmarks.shapes import SHAPES


def result(name: str) -> Any:
    """A result file."""
    return json.loads((RESULTS / name).read_bytes())


def cpu(file: str) -> str:
    """Penstock beside `generate` on a CPU."""
    heads = ["Output tokens per second", "Penstock, over HTTP", "transformers `generate`, one padded batch", "ratio",
             "`generate`, one by one", "ratio"]  # fmt: skip
    report = result(file)
    comparisons = report["comparisons"]
    alone = rate(comparisons[0]["generate"])
    lines = []
    for one in comparisons:
        workload, count = one["penstock"]["workload"], one["concurrency"]
        name = f"{count} stream{'s' * (count > 1)}"
        low, high = workload["output"]
        name += f", lengths {low} to {high}" if low != high else ""
        summary = one["penstock"]["summary"]
        cached = summary["cached_tokens"] / summary["prompt_tokens"]
        name += f" ({100 * cached:.0f} % of the prompts were cached)" if cached else ""
        lines.append([name, rate(summary), rate(one["generate"]), times(one["ratio"]), alone,
                      times(one["ratio_alone"])])  # fmt: skip
    return table(heads, lines)


def rate(figures: Mapping[str, Any]) -> str:
    return f"{figures['output_tokens_per_second']:,.0f}"


def times(value: float) -> str:
    return f"{value:.2f}" if value < 2 else f"{value:.1f}"


def scheduler() -> str:
    measured = result("scheduler_cpu.json")["measured"]
    found = next(one for one in measured if one["running"] == 256 and not one["aligned"])["microseconds"]
    goals = {"plan+apply": "median < 400, p99 < 1,000", "outputs": ""}
    quantiles = ("median", "p90", "p99")
    lines = [[name.replace("+", " + "), *(f"{found[name][which]:,.0f}" for which in quantiles), goal]
             for name, goal in goals.items()]  # fmt: skip
    return table(["µs", *quantiles, "goal"], lines)


def h200() -> list[str]:
    """The tables of serving and of what a request asks for."""
    titles = [(shape.name, shape.title) for shape in SHAPES.values()]
    return rows.table(rows.read(RESULTS / "h200"), titles).split("\n\n")


def together(folder: str) -> str:
    """Shapes that were measured on one H200 in one run, beside each other."""
    found = rows.read(RESULTS / "h200" / folder)
    shapes = list(dict.fromkeys(model for model, _ in found))
    lines = []
    for row in rows.SERVING:
        cells = [cell(found.get((shape, row.name))) for shape in shapes]
        if any(cells):
            lines.append([row.name, rows.UNITS[row.figure], *cells])
    return table(["Row", "", *(SHAPES[shape].title for shape in shapes)], lines)


def conversations() -> str:
    """What a hybrid finds of conversations in its prefix cache, and what that is worth."""
    heads = ["Load", "repeated prompt tokens", "of those cached", "first token of a hit, ms", "of a cold one", "ratio"]
    lines = []
    for load in ("chat", "agent"):
        found = result(f"h200/conversations_{load}_qwen3.5-9b.json")["figures"]
        hit, cold = found["hit_ttft_ms"], found["cold_ttft_ms"]
        lines.append([load, f"{found['repeated_tokens']:,}", f"{100 * found['hit_rate']:.1f} %", f"{hit:.0f}",
                      f"{cold:.0f}", f"{hit / cold:.2f}"])  # fmt: skip
    return table(heads, lines)


def images() -> str:
    """What images cost a server."""
    return pictures.table(pictures.figures_of(result("h200/images.json")))


def kv_tier() -> str:
    """What KV blocks in the host's memory are worth."""
    found = result("h200/kv_tier.json")["figures"]
    heads = [f"first token of {found['prompt_tokens']:,}, ms", "found on the GPU", "fetched", "share", "bandwidth",
             "repeated tokens found", "first tokens by turn, ms", "a token beside, ms"]  # fmt: skip
    cells = [f"{found['cold_ttft_ms']:.0f}", f"{found['device_hit_ttft_ms']:.1f}", f"{found['host_hit_ttft_ms']:.1f}",
             f"{found['host_hit_share']:.3f}", f"{found['fetch_bytes_per_second'] / 1e9:.1f} GB/s",
             f"{100 * found['hit_rate']:.1f} %", ", ".join(f"{one:,.0f}" for one in found["turn_ttft_ms"]),
             f"{found['tpot_ms']:.2f} → {found['tpot_beside_fetches_ms']:.2f}, {found['price']:+.1f} %"]  # fmt: skip
    return table(heads, [cells])


def prefill_apart() -> str:
    """Prompts on one GPU and outputs on another, beside two replicas that do both."""
    return apart.figures_table(msgspec.convert(result("h200/apart.json")["figures"], list[apart.Figures]))


def several_models() -> str:
    """Two models that take turns on a GPU, and both on it."""
    found = result("h200/several_models.json")
    heads = ["Two 8B models", "requests", "lost", "tok/s", "switches", "longest request, s"]
    lines = [
        [name, f"{sum(one['requests'].values()):,}", str(sum(one["lost"].values())), f"{one['tokens_per_second']:,.0f}",
         str(one["switches"]), f"{one['longest']:.1f}"]
        for name, one in (("one at a time", found["mixed"]), ("both", found["together"]["mixed"]))
    ]  # fmt: skip
    return table(heads, lines)


def switches() -> str:
    """What a switch between them takes."""
    found = result("h200/several_models.json")
    turns = found["turns"]
    heads = ["first token after a switch, s", "of which the other leaves", "and this one loads", "memory asleep"]
    spans = (f"{min(turns[name]):.1f} to {max(turns[name]):.1f}" for name in ("switched", "left", "load"))
    return table(heads, [[*spans, f"{found['memory_asleep']} of {found['memory_loaded']:,} MiB"]])


def idle() -> str:
    """What a sleep takes and gives back."""
    heads = ["Weights of 8B", "first token after a sleep, s", "of that, the load", "first sleep, s", "later ones",
             "GPU memory asleep, MiB", "kept in host memory"]  # fmt: skip
    if not (RESULTS / "h200" / "idle.json").exists():
        return table(heads, [["not measured yet", *[""] * (len(heads) - 1)]])
    return idle_table(heads, result("h200/idle.json")["cases"])


def idle_table(heads: list[str], cases: list[Mapping[str, Any]]) -> str:
    lines = []
    for case in cases:
        first, *later = case["wakes"]
        kept = f"{case['kept_bytes'] / 1e9:.1f} GB" if case["keep"] else "none"
        lines.append(
            [case["weights"] + (", `--keep-weights`" if case["keep"] else ""), span(case["wakes"], "first_token"),
             span(case["wakes"], "load"), f"{first['sleep']:.1f}", span(later, "sleep"),
             f"{case['memory_asleep']} of {case['memory_loaded']:,}", kept]
        )  # fmt: skip
    return table(heads, lines)


def span(found: list[Mapping[str, Any]], name: str) -> str:
    """Of seconds, to a tenth."""
    values = [f"{one[name]:.1f}" for one in sorted(found, key=lambda one: float(one[name]))]
    return "" if not values else values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def adapters() -> str:
    """What rows with adapters cost, and rows without beside none, in time per token."""
    figures = {(one["load"], one["rows"]): one for one in result("h200/adapters.json")["figures"]}
    loads = {"ttft_128": ("1", "8 (one)"), "bs8": ("8", "10 (each)"), "bs64": ("64", "8 (each)")}
    lines = []
    for load, (count, goal) in loads.items():
        prices = [figures.get((load, kind)) for kind in ("base", "one", "each")]
        shown = ["" if one is None else f"{one['price']:+.1f} %" for one in prices]
        lines.append([count, f"{figures[load, 'off']['tpot_ms']:.2f}", *shown, goal])
    heads = ["Rows", "ms per token without LoRA", "rows of the model, on a server with LoRA", "rows of one adapter",
             "rows of eight", "goal, %"]  # fmt: skip
    return table(heads, lines)


def weight_updates() -> str:
    """Seconds without a token while weights change."""
    found = result("h200/weight_updates.json")["updates"]
    ways = {"disk": "from files in the page cache", "ipc": "from a trainer's memory on the same GPU"}
    lines = []
    for way, title in ways.items():
        ones = [one for one in found if one["way"] == way]
        kept = f"{sum(one['kept'] for one in ones)} of {sum(one['streams'] for one in ones)}"
        pauses = ", ".join(f"{one['pause']:.2f}" for one in ones)
        lines.append([title, f"{ones[0]['bytes'] / 1e9:.1f} GB", pauses, kept])
    return table(["Weights of 8B", "", "pause of three updates, s", "streams that went on"], lines)


def format_scores() -> str:
    """What weight formats cost the embedded model."""
    report = result("format_scores.json")
    titles = {"bf16": "bf16, as it ships", "fp8": "FP8", "int8": "INT8", "int4": "INT4 in groups of 64",
              "w8a16": "INT8, weights alone", "w4a16": "INT4 in groups of 64", "w4a16-zeros": "INT4 with zero points",
              "nvfp4": "NVFP4", "mxfp4": "MXFP4", "awq": "AWQ", "gptq": "GPTQ, `desc_act`",
              "fp8-blocks": "FP8 in blocks of 128x128"}  # fmt: skip
    writers = {"bf16": ""} | dict.fromkeys(("fp8", "int8", "int4"), "`penstock quantize`")
    writers |= dict.fromkeys(("w8a16", "w4a16", "w4a16-zeros", "nvfp4", "mxfp4"), "compressed-tensors")
    lines = [
        [titles[one["format"]], writers.get(one["format"], "this benchmark"), f"{one['bytes'] / 1e6:.1f}",
         str(one["right"]), f"{one['perplexity']:.4f}", f"{one['same_tokens']:.2%}", f"{one['same_answers']:.1%}"]
        for one in report["scores"]
    ]  # fmt: skip
    return table(["Weights", "written by", "MB", f"right answers of {report['conversations']}", "perplexity",
                  "tokens as the original's", "answers as the original's"], lines)  # fmt: skip


def cell(record: Record | None) -> str:
    """The value in bold where it reached a goal, its share of the limit, and the goal that it missed."""
    if record is None or record.value is None:
        return ""
    value = rows.number(record.value)
    text = f"**{value}**" if record.met else value
    text += f", {record.share_of_limit:.0%}" if record.share_of_limit else ""
    return text if record.met or record.goal is None else f"{text} (goal {rows.number(record.goal)})"


def invariant() -> str:
    plain, slow = rows.read(RESULTS / "h200"), rows.read(RESULTS / "h200" / "invariant")
    lines = []
    for row in (row for row in ALL if ("8b", row.name) in slow):
        with_it, without = slow["8b", row.name].value or 0.0, plain["8b", row.name].value or 0.0
        lines.append([row.name, rows.number(with_it), rows.number(without), f"{100 * (1 - with_it / without):.0f} %"])
    return table(["`--batch-invariant`, 8B", "tok/s", "without", "price"], lines)


def plans() -> str:
    """8B with the plans that ship, with plans measured at the start, and on a chip that is simulated."""
    shipped = {one["row"]: statistics.median(one["new"]) for one in result("in_turns_8b_h200.json")["rows"]}
    anew, small = (rows.read(RESULTS / "h200" / folder) for folder in ("measured_anew", "simulated"))
    lines = []
    for row in (row for row in ALL if ("8b", row.name) in small):
        found = shipped[row.name], *(records["8b", row.name].value or 0.0 for records in (anew, small))
        lines.append([row.name, UNITS[row.figure], *map(rows.number, found)])
    return table(["8B", "figure", "plans that ship", "measured at the start", "simulated chip"], lines)


def turns() -> str:
    """Two trees in turns: the median of each, and by how much the later one is better."""
    lines = [
        [one["model"].upper(), one["row"], one["unit"], rows.number(statistics.median(one["old"])),
         rows.number(statistics.median(one["new"])), f"{one['better']:+.1f} %"]
        for name in ("8b", "0.6b") for one in result(f"in_turns_{name}_h200.json")["rows"]
    ]  # fmt: skip
    return table(["Shape", "Row", "figure", "before", "after", "better by"], lines)


def other_heads() -> str:
    """Decoding attention of 64 rows: its share of the speed of a copy in the same run."""
    report = result("kernels_h200.json")
    dims, whole = (64, 80, 96, 128, 192, 256, 512), report["copy_bytes_per_second"]
    shares = {one["shape"]: one["bytes"] / (one["microseconds"] * 1e-6) / whole for one in report["figures"]
              if one["kernel"] == "attention" and one["chosen"]}  # fmt: skip
    lines = []
    for title, keys, end in (
        ("2,048 keys", 2048, ""), ("8,192 keys", 8192, ""),
        *((f"a window of {window:,} of 8,192 keys", 8192, f", window {window}") for window in (4096, 1024, 128)),
    ):  # fmt: skip
        names = (f"decode 64 x {keys}" + (f", heads of {dim}" if dim != 128 or end else "") + end for dim in dims)
        lines.append([title, *(f"{100 * shares[name]:.0f} %" if name in shares else "" for name in names)])
    return table(["Heads of", *map(str, dims)], lines)


def fp8_kv() -> str:
    """Decoding steps of as many rows with pages of both types, and of as many as fit."""
    plain, eight = ({one["batch"]: one for one in result(f"h200/{name}.json")["figures"]} for name in
                    ("fp8_kv_off", "fp8_kv"))  # fmt: skip
    lines = [[str(batch), *(step(found.get(batch)) for found in (plain, eight))] for batch in eight]
    return table(["8B, rows of 8,192 tokens", "cache in bf16: a step, ms", "in FP8"], lines)


def step(figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return "do not fit"
    return f"{figure['step_ms']:.1f}, {rows.number(figure['batch'] / figure['step_ms'] * 1e3)} tok/s"


def experts() -> str:
    report = result("expert_kernels_h200.json")
    names = {"qwen": "Qwen3-30B-A3B, 8 of 128 of width 768, µs", "8x7b": "Mixtral-8x7B, 2 of 8 of width 14,336, µs"}
    sizes = (1, 4, 16, 64, 256, 1024, 8192)
    found = {(one["model"], one["rows"]): one for one in report["figures"]
             if one["product"] == "experts" and one["chosen"]}  # fmt: skip
    lines = [[title, *(of_limit(found[name, size]) for size in sizes)] for name, title in names.items()]
    return table(["Tokens", *(f"{size:,}" for size in sizes)], lines)


def of_limit(figure: Mapping[str, Any]) -> str:
    mark = "" if figure["limit"] == "read" else " of products"
    return f"{figure['microseconds']:,.0f}, {100 * figure['share']:.0f} %{mark}"


def gpus() -> str:
    """The table of scaling without its verdict; shapes in stages have a table of their own."""
    found = {key: record for key, record in scaling.read(RESULTS / "scaling").items() if "stages" not in key[0]}
    return scaling.table(found).split("\n\n")[0]


def stages() -> str:
    found = scaling.read(RESULTS / "scaling")
    cases = [("8b-stages", 2, "8B, 2 GPUs"), ("70b-stages", 4, "70B, 4 GPUs")]
    shown = [row for row in ALL if row.name in scaling.SERVED]
    lines = [[title, *(staged(found.get((shape, size, row.name))) for row in shown)] for shape, size, title in cases]
    return table(["In stages", *(f"{row.name}, {UNITS[row.figure].split(' ')[0]}" for row in shown)], lines)


def staged(record: Record | None) -> str:
    if record is None or record.value is None:
        return ""
    reached = f", {100 * record.share_of_limit:.0f} %" if record.share_of_limit is not None else ""
    return rows.number(record.value) + reached


def exchange() -> str:
    calls = {(one["ranks"], one["tokens"], one["hidden"]): one for one in result("exchange_h200.json")["calls"]}
    heads = ["GPUs", "Tokens"]
    for hidden in (4096, 8192):
        heads += [f"hidden {hidden}: NCCL, norm", "in order, norm", "exchange", "bytes"]
    sizes = [(2, count) for count in (1, 8, 64, 256, 512, 2048)] + [(4, count) for count in (1, 8, 64, 256, 512)]
    lines = []
    for ranks, tokens in sizes:
        cells = [str(ranks), f"{tokens:,}"]
        for hidden in (4096, 8192):
            one = calls[ranks, tokens, hidden]
            gain = one["reduced"] / one["exchanged"]
            cells += [f"{one['reduced']:,.1f}", f"{one['gathered']:,.1f}",
                      f"{one['exchanged']:,.1f} ({gain:.1f} times)", f"{one['sent']:.1f}"]  # fmt: skip
        lines.append(cells)
    return table(heads, lines)


def passes() -> str:
    found = {(one["shape"], one["ranks"], one["tokens"]): one for one in result("exchange_h200.json")["passes"]}
    sizes = (1, 8, 64, 256)
    lines = []
    for shape in ("8B", "70B"):
        for ranks in (2, 4):
            each = [found[shape, ranks, size] for size in sizes]
            cells = [f"{one['reduced']:,.0f}, {one['exchanged']:,.0f}" for one in each]
            lines.append([f"{shape}, {ranks} GPUs", *cells])
    heads = ["A decode pass through 8 layers, µs: NCCL, with the exchange", "1 row", *map(str, sizes[1:])]
    return table(heads, lines)


def placement() -> str:
    report = result("placement_cpu.json")
    load, found = report["load"], report["comparison"]
    first = load["shared"] + load["history"]
    last = first + (load["turns"] - 1) * (load["more"] + load["output"])
    head = (f"{load['conversations']} conversations of {load['turns']} turns over {report['replicas']} replicas, "
            f"{first:,} to {last:,} tokens of prompt, {load['open']} open at once; "
            "each cache holds a third of them")  # fmt: skip
    lines = [
        [f"`--placement {policy}`", f"{100 * found['hit_rate'][policy]:.0f} %",
         f"{found['output_tokens_per_second'][policy]:.1f}", f"{found['tokens_per_second'][policy]:,.0f}"]
        for policy in ("prefix", "round_robin")
    ]  # fmt: skip
    return table([head, "found in a cache", "output tokens/s", "with prompt tokens, cached ones too"], lines)


def synthetic() -> str:
    reports = speculation_h200.read(RESULTS / "h200" / "speculation")
    plain = {one.batch: one.tpot_ms for report in reports if report.rate is None for one in report.figures}
    rated = [report for report in reports if report.rate is not None]
    lines = []
    for batch, free in plain.items():
        each = [next(one.tpot_ms for one in report.figures if one.batch == batch) for report in rated]
        lines.append([str(batch), f"{free:.2f}", *(f"{tpot:.2f} ({free / tpot:.2f})" for tpot in each)])
    return table(["Open requests", "without", *(f"rate {report.rate:.1f}" for report in rated)], lines)


def speculation() -> str:
    found = {
        (name, one["load"], one["way"]): one
        for name in ("cpu", "h200") for one in result(f"speculation_{name}.json")["figures"]
    }  # fmt: skip
    ways = {"prediction": "`prediction`", "ngram": "prompt lookup of 8 tokens", "draft_model": "draft model",
            "eagle": "EAGLE head"}  # fmt: skip
    columns = [(name, load) for load in ("copy", "chat") for name in ("cpu", "h200")]
    lines = [[title, *(sped(found.get((name, load, way))) for name, load in columns)] for way, title in ways.items()]
    return table(["Times as fast, and share of drafts accepted", "repeating lists, CPU", "H200",
                  "questions of all kinds, CPU", "H200"], lines)  # fmt: skip


def sped(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return ""
    drafted = figures["accepted"] + figures["rejected"]
    return f"{figures['speedup']:.2f}" + (f", {100 * figures['acceptance']:.0f} %" if drafted else ", none")


def drafts() -> str:
    found = {(one["load"], one["way"]): one for one in result("schema_drafts_8b_h200.json")["figures"]}
    lines = []
    for load in ("extract", "call"):
        free, forced, full = (found[load, way] for way in ("free", "schema, forced runs alone", "schema"))
        lines.append([load, f"{free['milliseconds']:.2f}", f"{forced['milliseconds']:.2f}",
                      f"**{full['milliseconds']:.2f}, {full['speedup']:.2f} times as fast as free**",
                      f"{full['tokens_per_step']:.2f}", f"{100 * full['acceptance']:.0f} %",
                      f"{100 * full['right']:.0f} %"])  # fmt: skip
    return table(["", "free", "a schema, forced runs alone", "a schema", "tokens a step", "drafts that came true",
                  "right"], lines)  # fmt: skip


def schemas() -> str:
    report = result("schemas.json")
    names = {"own": "our own: tool calls, API payloads, manifests, forms, invoices, unions, trees",
             "suite": "official suite, draft 2020-12"}  # fmt: skip
    fields = ("schemas", "compiled", "right", "with_wrong_accepts", "with_wrong_refusals")
    lines = [[title, *(str(report[name][field]) for field in fields)] for name, title in names.items()]
    return table(["", "schemas", "compiled", "all instances judged right", "wrong accepts", "wrong refusals"], lines)


def faults() -> str:
    """What was struck, and how many streams and how long a pause that left each of the two servers."""
    reports = [report for name in ("faults_cpu.json", "h200/faults.json") for report in result(name) if report["exact"]]
    roles = {"executor": "of the executor", "scheduler": "of the scheduler", "tokenizer": "of one of two tokenizers",
             "api": "of one of two api processes"}  # fmt: skip
    lines = []
    for signal, way in (("SIGKILL", "kill -9"), ("SIGSTOP", "SIGSTOP")):
        for role, title in roles.items():
            cells = []
            for report in reports:
                struck = [one for one in report["strikes"] if one["blow"] == {"role": role, "signal": signal}]
                streams = sum(one["streams"] - one["own"] for one in struck)
                cells += [f"{sum(one['same'] for one in struck)} of {streams}",
                          f"{max((one['longest_pause'] for one in struck), default=0):.2f}"]  # fmt: skip
            lines += [[f"{way} {title}", *cells]] if struck else []
    heads = ["Blow", *(cell for one in reports for cell in (f"{one['title']}: the same tokens", "longest pause, s"))]
    return table(heads, lines)


def highlights() -> str:
    """The README's five figures, beside vLLM's where the load was its, too."""
    found = rows.read(RESULTS / "h200")
    names = ("lat_bs1", "decode_c256", "start_cold", "json_c64")
    latency, decode, start, schema = (found["8b", name] for name in names)
    (report,) = (report for report in result("h200/faults.json") if report["exact"])
    killed = [one for one in report["strikes"] if one["blow"] == {"role": "executor", "signal": "SIGKILL"}]
    pause, streams = max(one["longest_pause"] for one in killed), sum(one["streams"] for one in killed)
    lines = [
        ["ms per token of one request", rows.number(latency.value), theirs(latency)],
        ["output tokens/s of 256 requests, 128 tokens in and 512 out", rows.number(decode.value), theirs(decode)],
        ["seconds from start to ready, nothing compiled before", rows.number(start.value), theirs(start)],
        ["a JSON Schema's price in time per token, 64 requests", f"{schema.price:+.1f} %", f"{schema.vllm[0]:+.0f} %"],
        [f"`kill -9` of the executor under {streams} streams with `--batch-invariant`",
         f"{sum(one['same'] for one in killed)} go on with the same tokens, after {pause:.1f} s at most", ""],
    ]  # fmt: skip
    return table(["8B, one H200", "Penstock", rows.VLLM], lines)


def theirs(record: Record) -> str:
    return " to ".join(map(rows.number, record.vllm))


BLOCKS: Blocks = {
    "highlights": highlights,
    "cpu-embedded": lambda: cpu("cpu_embedded.json"), "cpu-06b": lambda: cpu("cpu_06b.json"),
    "scheduler": scheduler, "h200-serving": lambda: h200()[0],
    "h200-requests": lambda: h200()[1], "h200-invariant": invariant, "experts": experts,
    "formats": lambda: together("formats"), "hybrids": lambda: together("hybrids"),
    "conversations": conversations, "images": images, "kv-tier": kv_tier, "apart": prefill_apart,
    "several-models": several_models, "switches": switches, "idle": idle, "adapters": adapters,
    "weight-updates": weight_updates,
    "fp8-kv": fp8_kv, "format-scores": format_scores, "heads": other_heads, "turns": turns, "plans": plans,
    "scaling": gpus,
    "stages": stages, "exchange": exchange, "passes": passes, "placement": placement, "synthetic": synthetic,
    "speculation": speculation, "schema-drafts": drafts, "schemas": schemas, "faults": faults,
}  # fmt: skip
