"""Which tests of a parallel run one worker takes together, and in what order: units, each a file or several that share
what is costly to make. Files that mostly wait for other processes come between those that compute, for as long as
there are some: workers that all wait leave the cores idle."""

from __future__ import annotations

from collections.abc import Iterable

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

TOGETHER = {  # files, and folders with all they hold
    "the parsed tree": ("tests/rules/", "tests/benchmarks/test_chips.py", "tests/security/test_advisories.py"),
    "the server of tests/e2e": (
        *("tests/e2e/test_canary.py", "tests/e2e/test_messages.py", "tests/e2e/test_node.py"),
        *("tests/e2e/test_openai_client.py", "tests/e2e/test_page.py", "tests/e2e/test_processes.py"),
        *("tests/e2e/test_responses.py", "tests/e2e/test_snippets.py", "tests/e2e/test_structured.py"),
        *("tests/e2e/test_tools.py", "tests/e2e/test_vectors.py"),
    ),
    "the single replica of tests/e2e/chaos": (
        *("tests/e2e/chaos/test_disaggregation.py", "tests/e2e/chaos/test_prefill_hosts.py"),
    ),
    "the server of tests/services/commands": ("tests/services/commands/",),
    "the engine of tests/services/llm": ("tests/services/llm/",),
    "the ranks of tests/matrix": (
        *("tests/matrix/test_images.py", "tests/matrix/test_rank_encoders.py"),
        *("tests/matrix/test_rank_families.py", "tests/matrix/test_ranks.py"),
    ),
    "the answers of tests/matrix": (
        *("tests/matrix/test_adapter_drafts.py", "tests/matrix/test_eagle.py", "tests/matrix/test_kv_cache.py"),
        *(
            "tests/matrix/test_own_drafts.py",
            "tests/matrix/test_quantized.py",
            "tests/matrix/test_quantized_folders.py",
        ),
    ),
    "the ranks of tests/engine_core/distributed": ("tests/engine_core/distributed/",),
}
# The longest: nobody waits for one worker's in the end.
FIRST = ("tests/sim/", "tests/test_installation.py", "tests/rules/", *TOGETHER["the server of tests/e2e"])
WAITING = (
    *("tests/e2e/", "tests/deploy/", "tests/benchmarks/", "tests/services/commands/", "tests/services/llm/"),
    "tests/services/supervisor/",
)
ENDED = 0.9  # of the way: the last files compute, which is soon over


def unit_of(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return next((name for name, paths in TOGETHER.items() if file.startswith(paths)), file)


def ordered(nodeids: Iterable[str]) -> list[str]:
    """The units of these tests in the order in which workers take them."""
    first, waiting, computing = {}, {}, {}
    for nodeid in nodeids:
        kind = first if nodeid.startswith(FIRST) else waiting if nodeid.startswith(WAITING) else computing
        kind[unit_of(nodeid)] = None
    for unit in first:
        waiting.pop(unit, None)
        computing.pop(unit, None)
    places = [(at / len(computing), unit) for at, unit in enumerate(computing)]
    places += [(ENDED * at / len(waiting), unit) for at, unit in enumerate(waiting)]
    return [*first, *dict.fromkeys(unit for _, unit in sorted(places))]


class Units(LoadFileScheduling):
    """Gives each worker whole units. What it has done is forgotten: it would be gone through after each test."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        own = self.assigned_work[node]
        for unit in [unit for unit, tests in own.items() if all(tests.values())]:
            del own[unit]
        super()._assign_work_unit(node)
