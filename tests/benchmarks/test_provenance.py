"""A result that does not say what it was measured on is marked."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.provenance import CHANGED, NO_COMMIT, NO_DATE, lacking, main, marks


def test_every_published_result_says_its_commit_and_date_or_is_marked() -> None:
    assert main(["--check"]) == 0, "run `python -m benchmarks.provenance --write`"


def test_what_a_result_lacks(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    for report, expected in (
        ({"commit": "abc", "started": "2026-11-22"}, []),
        ({"commit": "abc", "date": "2026-11-22"}, []),
        ({"environment": {"commit": "abc", "started": "2026-11-22"}}, []),
        ({"commit": "abc+", "started": "2026-11-22"}, [CHANGED]),
        ({"commit": "", "started": "2026-11-22"}, [NO_COMMIT]),
        ({"commit": "abc"}, [NO_DATE]),
        ([{"commit": "abc", "date": "2026-11-22"}, {"date": "2026-11-22"}], [NO_COMMIT]),
    ):
        path.write_text(json.dumps(report))
        assert lacking(path) == expected, report
        assert marks(tmp_path) == ({"one.json": expected} if expected else {})
    (tmp_path / "profile.txt").write_text("12.5 ms")
    assert marks(tmp_path)["profile.txt"] == [NO_COMMIT, NO_DATE]
