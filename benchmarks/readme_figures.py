"""The figures of README and docs/, from benchmarks/results: `python -m benchmarks.readme_figures --write` or `--check`.

Tables are rendered by benchmarks/readme_tables.py, figures in sentences come from the same files. Each stands once, on
any page. `--check` exits with 1 and a diff where a page says something else than the results.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import rows, speculation_h200
from benchmarks.readme_tables import BLOCKS, result
from benchmarks.relimit import RESULTS
from benchmarks.rendered import Mistake, Sentence, rendered
from benchmarks.report import ROOT

PAGE_BREAK = "\n\f\n"  # pages are rendered as one document, so that a table may move from one to another


def pages(root: Path = ROOT) -> list[Path]:
    """README and everything below docs/."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def ratio(part: float, whole: float) -> str:
    return f"{part / whole:.2f}"


def share(report: Any, kernel: str, shape: str) -> str:
    """Percent of its limit that the product's own form of a kernel reaches."""
    figure = chosen(report, kernel, shape)
    return f"{100 * figure['share']:.0f}"


def chosen(report: Any, kernel: str, shape: str) -> Any:
    return next(
        figure for figure in report["figures"]
        if (figure["kernel"], figure["shape"], figure["chosen"]) == (kernel, shape, True)
    )  # fmt: skip


def teraflops(report: Any, shape: str) -> str:
    figure = chosen(report, "attention", shape)
    return f"{figure['flops'] / figure['microseconds'] / 1e6:.0f}"


def fuzz() -> Sentence:
    report = result("fuzz.json")
    counts = report["requests"], *(count for _, count in sorted(report["statuses"].items()))
    return Sentence("Of its {} requests {} were answered with 200, {} with 400 and {} with 404. There was no 500",
                    tuple(f"{count:,}" for count in counts))  # fmt: skip


def soak() -> list[Sentence]:
    summary = result("soak_cpu.json")["summary"]
    counts = [summary["requests"], *(summary["statuses"][code] for code in ("200", "429", "400", "504"))]
    flood, capacity = summary["p99_in_flood"], summary["p99_at_capacity"]
    return [
        Sentence("It got {} requests, three times what it takes: {} were served, {} heard 429, {} heard 400 "
                 "and {} heard 504",
                 tuple(f"{count:,}" for count in counts)),
        Sentence("first tokens came after {} s in the flood and {} s at capacity, {} times as late (limit 2)",
                 (f"{flood:.2f}", f"{capacity:.2f}", ratio(flood, capacity))),
    ]  # fmt: skip


def bombs() -> list[Sentence]:
    gpu, cpu = result("bombs_8b_h200.json"), result("bombs.json")
    alone, plain, hit = (gpu[name] for name in ("alone", "among_plain_requests", "among_bombs"))
    return [
        Sentence("between tokens from {} to {} ms, {} times (goal 1.2); as many plain requests raise it to {} ms. "
                 "The longest gap goes from {} to {} ms",
                 (f"{alone['p99_ms']:.2f}", f"{hit['p99_ms']:.2f}", f"{gpu['p99_ratio_bombs']:.2f}",
                  f"{plain['p99_ms']:.2f}", f"{alone['max_ms']:.1f}", f"{hit['max_ms']:.1f}")),
        Sentence("which met {} bombs of all kinds, dealt", (str(sum(gpu["answers"].values())),)),
        Sentence("it was {} times, and {} among plain requests",
                 (f"{cpu['p99_ratio_bombs']:.2f}", f"{cpu['p99_ratio_plain']:.2f}")),
    ]  # fmt: skip


def structured() -> list[Sentence]:
    found = result("structured.json")
    assert found["wrong"] == []
    cases = found["cases"]
    return [
        Sentence("over {} schemas, {} regexes and {} grammars",
                 (str(cases["json_schema"]), str(cases["regex"]), str(cases["grammar"]))),
        Sentence("Of {} generations {} ended by themselves, and the others met `max_tokens`. None was wrong.",
                 (f"{found['generations']:,}", f"{found['finished']:,}")),
    ]  # fmt: skip


def held_out() -> list[Sentence]:
    found = result("schemas_held_out.json")
    shares = (f"{found['schemas']:,}", f"{found['strict_percent']:.1f}", f"{found['lenient_percent']:.1f}")
    accepted = str(found["with_wrong_accepts"])
    return [
        Sentence("Of {} schemas of MaskBench {} % compile exactly, and {} % do with `lenient`.", shares),
        Sentence("{} take an instance that the corpus calls wrong", (accepted,)),
    ]


def placement() -> list[Sentence]:
    found = result("placement_h200.json")["comparison"]
    rates, outputs, hits = (found[name] for name in ("tokens_per_second", "output_tokens_per_second", "hit_rate"))
    values = [f"{value:.0f}" for policy in ("prefix", "round_robin") for value in (100 * hits[policy], outputs[policy])]
    return [
        Sentence("By prefix {} % were found in a cache and output was {} tokens/s; in turns it was {} % "
                 "and {} tokens/s. That is **{} times** (goal 1.5). With prompt tokens, cached ones too, it was {} "
                 "and {} tokens/s",
                 (*values, f"{found['ratio']:.2f}", f"{rates['prefix']:,.0f}", f"{rates['round_robin']:,.0f}")),
    ]  # fmt: skip


def tracing() -> list[Sentence]:
    host, device = result("tracing_host.json"), result("h200/tracing.json")
    some, every = host["costs"]
    rates = {name: [one["tokens_per_second"] for one in report["measured"]] for name, report in
             (("host", host), ("device", device))}  # fmt: skip
    return [
        Sentence("traces of everything took {} % of throughput in the median, with rounds from {} to {} %",
                 (f"{every['throughput']:.1f}", *(f"{bound:+.0f}" for bound in every["throughput_range"]))),
        Sentence("took nothing that shows: {} %, with rounds from {} to {} %",
                 (f"{some['throughput']:+.0f}", *(f"{bound:+.0f}" for bound in some["throughput_range"]))),
        Sentence("two cores give {} to {} tokens/s",
                 tuple(f"{round(bound(rates['host']), -3):,.0f}" for bound in (min, max))),
        Sentence("five rounds in turns of {} to {} tokens/s",
                 tuple(f"{bound(rates['device']):,.0f}" for bound in (min, max))),
        Sentence("decode_c256 of the 8B shape loses {} % to traces of everything",
                 (f"{device['costs'][-1]['throughput']:.1f}",)),
    ]  # fmt: skip


def requests() -> list[Sentence]:
    """What stands below the tables of serving."""
    found = rows.read(RESULTS / "h200")
    names = ("json_c256", "json_c64", "free_c256", "free_c64")
    spent = (found["8b", name].host_microseconds_per_token["scheduler"] for name in names)
    alone = found["8b", "json_c1"].client
    assert alone is not None
    return [
        Sentence("The scheduler spends {} to {} µs of CPU on each token of JSON rows at 256 and 64 rows, "
                 "against {} and {} µs without", tuple(f"{each:.0f}" for each in spent)),
        Sentence("json_c1 takes {} tokens a step", (f"{alone.tokens_per_chunk:.1f}",)),
    ]  # fmt: skip


def speculation() -> list[Sentence]:
    plain = (one for one in result("speculation_h200.json")["figures"] if one["way"] == "plain")
    reports = {report.rate: report for report in speculation_h200.read(RESULTS / "h200" / "speculation")}
    without, never = (next(one.tpot_ms for one in reports[rate].figures if one.batch == 64) for rate in (None, 0.0))
    return [
        Sentence("where {} and {} tokens/s are to be beaten",
                 tuple(f"{one['tokens_per_second']:,.0f}" for one in plain)),
        Sentence("At that rate 64 requests lose {} %", (f"{100 * (never / without - 1):.1f}",)),
    ]  # fmt: skip


def faults() -> list[Sentence]:
    exact, plain = result("h200/faults.json")
    same = {one["blow"]["role"]: str(one["same"]) for one in plain["strikes"]}
    first = next(one for one in exact["strikes"] if one["blow"] == {"role": "executor", "signal": "SIGKILL"})
    return [
        Sentence("Of 64 streams of these random weights {} were the same in a second undisturbed run, "
                 "{} after a scheduler's death, {} after an executor's",
                 (same[""], same["scheduler"], same["executor"])),
        Sentence("clients waited for {} s: {} until the driver had cleared the GPU, 1.6 of imports, {} of load",
                 tuple(f"{first[name]:.1f}" for name in ("longest_pause", "died", "load"))),
    ]  # fmt: skip


def drafts() -> list[Sentence]:
    gpu, cpu = (
        {(row["load"], row["way"]): row for row in result(f"schema_drafts_{name}.json")["figures"]}
        for name in ("h200", "cpu")
    )
    ways = ("free", "schema, forced runs alone", "schema")
    return [
        Sentence("takes {} ms a token there free, {} with forced runs alone and {} with likely ones",
                 tuple(f"{gpu['extract', way]['milliseconds']:.2f}" for way in ways)),
        Sentence("it is {} times as fast as free in `extract` and {} times in `call`",
                 tuple(f"{cpu[load, 'schema']['speedup']:.2f}" for load in ("extract", "call"))),
    ]  # fmt: skip


def kernels() -> list[Sentence]:
    report = result("kernels_h200.json")
    return [
        Sentence("Attention reaches {} TFLOP/s in a prefill of 8,192 and {} in one of 32,768",
                 (teraflops(report, "prefill 8192 of 8192"), teraflops(report, "prefill 32768 of 32768"))),
        Sentence("Decoding attention of 64 rows of 512, 2,048 and 8,192 keys reads at {}, {} and {} % of the bandwidth",
                 tuple(share(report, "attention", f"decode 64 x {keys}") for keys in (512, 2048, 8192))),
    ]  # fmt: skip


def fp8_kv() -> Sentence:
    """Tokens a second of as many rows as fit."""
    most = (result(f"h200/{name}.json")["figures"][-1] for name in ("fp8_kv", "fp8_kv_off"))
    eight, plain = (figure["batch"] / figure["step_ms"] for figure in most)
    return Sentence("As many rows as fit decode {} times as fast with pages in FP8", (ratio(eight, plain),))


def heads() -> Sentence:
    """Drafts of a model's own head with a set rate of acceptance, against none."""
    with_head, without = (
        rows.read(RESULTS / "h200" / name)["qwen3.6-35b-a3b", "lat_bs1"].value for name in ("mtp", "mtp_off")
    )
    assert with_head is not None
    assert without is not None
    return Sentence("a token of the 35B takes {} ms in place of {}: {} times as fast",
                    (f"{with_head:.2f}", f"{without:.2f}", ratio(without, with_head)))  # fmt: skip


def start() -> Sentence:
    return Sentence("Start to ready: {} s.", (f"{result('cpu_embedded.json')['start_seconds']:.1f}",))


def sentences() -> list[Sentence]:
    """Prose of the pages with the figures that its results give."""
    return [
        fuzz(), *soak(), *bombs(), *structured(), *held_out(), *placement(), *tracing(), *drafts(), *kernels(), start(),
        *requests(), *speculation(), *faults(), heads(), fp8_kv(),
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme_figures", description=__doc__.partition("\n")[0])
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--write", action="store_true", help="put the results' figures into README and docs/")
    way.add_argument("--check", action="store_true", help="only compare")
    options = parser.parse_args(arguments)
    found = {path: path.read_text() for path in pages()}
    try:
        made = rendered(PAGE_BREAK.join(found.values()), BLOCKS, sentences()).split(PAGE_BREAK)
    except Mistake as mistake:
        print(mistake, file=sys.stderr)
        return 1
    changed = {path: after for (path, before), after in zip(found.items(), made, strict=True) if before != after}
    for path, after in changed.items():
        if options.write:
            path.write_text(after)
            continue
        diff = difflib.unified_diff(
            found[path].splitlines(), after.splitlines(), path.name, "results", lineterm="", n=0
        )
        print("\n".join(diff))
    return int(bool(changed) and not options.write)


if __name__ == "__main__":
    sys.exit(main())
