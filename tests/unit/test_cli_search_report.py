"""The report and the data of a search, and of a comparison."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from nccltune.cli import main
from nccltune.cli.bench_report import bench_data, bench_parts
from nccltune.cli.envelope import plain
from nccltune.cli.search_data import SavedProfile, search_data
from nccltune.cli.search_report import search_parts
from nccltune.cli.sources import Source, open_recording
from nccltune.cli.workload import Demand
from nccltune.measurement import Launch, Outcome
from nccltune.payloads.derive import default_workload
from nccltune.search.result import AblationStep, TrialsEnd
from tests.support.command_line import FACTS, FakeBench
from tests.support.results import (
    IMPROVED,
    INCONCLUSIVE,
    KEEP_DEFAULT,
    PAYLOADS,
    TUNED,
    answer_of,
    bench_report,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import RenderableType

    from nccltune.bench.report import BenchReport
    from nccltune.search.result import SearchResult

SAVED = SavedProfile("kimi-2x-h200", Path("/state/profiles/kimi-2x-h200.json"))
NEXT = "nccltune bench --profile kimi-2x-h200"


def rendered(parts: Iterable[RenderableType], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, record=True, markup=False, highlight=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
    return console.export_text()


def report(result: SearchResult, width: int = 80) -> str:
    return rendered(search_parts(result, SAVED, next_command=NEXT), width)


def data(result: SearchResult) -> dict[str, object]:
    return search_data(result, SAVED, workload="kimi-k2.5", next_command=NEXT)


@pytest.mark.parametrize("result", [IMPROVED, KEEP_DEFAULT, INCONCLUSIVE])
@pytest.mark.parametrize("width", [80, 120])
def test_report_fits_its_width_and_begins_with_the_verdict(
    result: SearchResult, width: int
) -> None:
    text = report(result, width)

    assert text.startswith(result.sentence)
    assert max(map(len, text.splitlines())) <= width


def test_report_at_80_columns_keeps_every_payload_on_one_line() -> None:
    lines = report(IMPROVED).splitlines()

    rows = [line.split() for line in lines if "ring LL, 4 channels" in line]
    assert [row[:6] for row in rows] == [
        ["43008", "0.500", "10.00", "8.00", "0.800", "0.790..0.810"],
        ["344064", "0.500", "20.00", "18.00", "0.900", "0.890..0.910"],
        ["14336", "guard", "9.00", "9.00", "1.000", "0.990..1.010"],
        ["67108864", "guard", "2000.0", "2020.0", "1.010", "1.000..1.020"],
    ]


def test_report_lists_settings_with_what_each_is_worth_and_what_was_dropped() -> None:
    lines = [" ".join(line.split()) for line in report(IMPROVED).splitlines()]

    assert "NCCL_MIN_CTAS=8 without it 5.0 % slower" in lines
    assert "NCCL_THREAD_THRESHOLDS='-2 -2 -2 4 -2 -2' without it 8.0 % slower" in lines
    assert "left out, as they do not pay: NCCL_NTHREADS" in lines


def test_report_shows_one_example_of_each_bad_ending() -> None:
    text = report(IMPROVED)

    assert "trial 9: NCCL_BUFFSIZE=1000" in text
    assert "rank 1 died of signal 8" in text
    assert "trial 11" not in text
    assert "no answer within 30 s" in text
    assert "ncclInvalidUsage (5)" in text
    crashed = next(line for line in text.splitlines() if line.strip().startswith("crashed"))
    assert crashed.split()[1] == "2"


def test_report_says_that_the_folk_profile_is_slower_at_the_large_guard() -> None:
    text = " ".join(report(IMPROVED).split())

    assert "folk-ll-ring: 0.3 % slower by score; 3.40 times slower at 67108864 B (64 MiB)" in text
    assert "try-1: rejected: refused" in text


def test_report_ends_with_the_file_and_the_next_command_unbroken() -> None:
    lines = report(IMPROVED, width=40).splitlines()

    assert "  /state/profiles/kimi-2x-h200.json" in lines
    assert lines[-1] == f"  {NEXT}"


def test_report_without_an_improvement_says_that_nothing_was_saved() -> None:
    text = rendered(search_parts(KEEP_DEFAULT, SavedProfile(), next_command=""))

    assert "Best settings tried  not saved" in text
    assert "Saved as" not in text
    assert "Next" not in text


def test_report_of_an_unknown_interval_shows_none() -> None:
    text = report(INCONCLUSIVE)

    assert "inf" not in text
    assert "0.850 of the baseline's all-reduce time" in [
        line.removeprefix("score").strip() for line in text.splitlines()
    ]


def test_report_names_what_was_not_run_and_why() -> None:
    text = " ".join(report(INCONCLUSIVE).split())

    assert "not run duel and ablation were not run: time was over" in text


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("recording:h200-2x-shm", "nothing was run here"),
        ("shared-gpu", "these times mean nothing"),
    ],
)
def test_report_says_what_its_source_is_worth(source: str, said: str) -> None:
    assert said in " ".join(report(replace(IMPROVED, source=source)).split())


def test_report_of_failed_collectives_says_which_outcome() -> None:
    launch = Launch(TUNED, Outcome.WRONG_DATA, message="wrong data in broadcast")

    text = report(replace(IMPROVED, collectives=launch))

    assert "wrong_data: wrong data in broadcast" in text


def test_report_of_a_search_stopped_at_once_is_short() -> None:
    nothing = replace(INCONCLUSIVE, payloads=(), failures=(), comparisons=(), outcome_counts={})

    text = report(nothing)

    assert "Payloads" not in text
    assert "Trials that" not in text


def test_data_has_every_promised_field() -> None:
    found = data(IMPROVED)

    assert found["verdict"] == "improved"
    assert found["profile"] == {"name": SAVED.name, "settings": TUNED, "path": str(SAVED.path)}
    assert found["score_ratio"] == 0.85
    assert found["score_ci"] == [0.83, 0.87]
    assert found["trial_count"] == 40
    assert found["duration_s"] == 131.0
    assert found["source"] == "gpus"
    row = found["payloads"]
    assert isinstance(row, list)
    assert row[0] == {
        "bytes": 43008,
        "weight": 0.5,
        "is_guard": False,
        "baseline_us": 10.0,
        "tuned_us": 8.0,
        "ratio": 0.8,
        "ratio_ci": [pytest.approx(0.79), pytest.approx(0.81)],
        "used": "ring LL, 4 channels",
    }


def test_data_is_strict_json_and_keeps_every_failure() -> None:
    for result in (IMPROVED, KEEP_DEFAULT, INCONCLUSIVE):
        found = json.loads(json.dumps(plain(data(result)), allow_nan=False))

        assert len(found["failures"]) == len(IMPROVED.failures)
        assert len(found["payloads"]) == len(PAYLOADS)


def test_data_of_an_unknown_interval_is_null() -> None:
    assert data(INCONCLUSIVE)["score_ci"] == [None, None]


def test_data_without_an_improvement_has_no_settings_in_the_profile() -> None:
    found = search_data(KEEP_DEFAULT, SavedProfile(), workload="w", next_command="")

    assert found["profile"] == {"name": None, "settings": {}, "path": None}
    assert found["best_settings"] == TUNED


def test_data_of_an_ablation_step_that_was_not_measured_is_null() -> None:
    steps = (AblationStep("NCCL_PROTO", None, is_dropped=False),)

    found = data(replace(IMPROVED, ablation=steps))["ablation"]

    assert found == [{"variable": "NCCL_PROTO", "score_ratio_without": None, "is_dropped": False}]


def test_bench_report_fits_80_columns_and_shows_both_arms() -> None:
    text = rendered(bench_parts([bench_report()]))

    lines = [line.split() for line in text.splitlines()]
    assert max(map(len, text.splitlines())) <= 80
    assert ["43008", "10.00", "9.70", "10.50", "8.00", "7.76", "8.40", "5.38"] in lines
    assert any(line[:4] == ["67108864", "3.400", "3.390..3.410", "right"] for line in lines)
    assert "faster at 1 of 2 payloads, slower at 1" in text


def test_bench_report_of_a_failed_candidate_says_how_it_ended() -> None:
    failed = bench_report(outcome=Outcome.CRASHED, rows=(), message="rank 1 died of signal 8")

    assert "folk-ll-ring: crashed: rank 1 died of signal 8" in rendered(bench_parts([failed]))


def test_bench_report_with_wrong_data_shouts() -> None:
    rows = tuple(replace(row, is_data_ok=False) for row in bench_report().rows)

    assert "WRONG" in rendered(bench_parts([bench_report(rows=rows)]))


def test_bench_report_of_too_few_launches_claims_nothing() -> None:
    rows = tuple(replace(row, ratio_low=None, ratio_high=None) for row in bench_report().rows)

    text = rendered(bench_parts([bench_report(rows=rows, interval_method="")]))

    assert "too few launches to tell a difference from noise" in text
    [line] = [each for each in text.splitlines() if each.split()[:1] == ["interval"]]
    assert line.split(maxsplit=1)[1] == "none: it takes 3 launches an arm"


def test_bench_report_says_how_the_intervals_that_it_has_were_found() -> None:
    text = rendered(bench_parts([bench_report()]))

    assert "made up for a test" in text
    assert "none: it takes" not in text


def test_bench_data_has_the_first_candidate_at_the_top_and_all_in_a_list() -> None:
    reports: list[BenchReport] = [bench_report(), bench_report(name="second")]

    found = bench_data(reports, workload="kimi-k2.5")

    assert found["outcome"] == "ok"
    candidates = found["candidates"]
    assert isinstance(candidates, list)
    assert [each["name"] for each in candidates] == ["folk-ll-ring", "second"]
    assert found["payloads"] == candidates[0]["payloads"]


# Why there were no more trials.


def recorded() -> Source:
    return open_recording("h200-2x-shm", Demand(default_workload(), 2))


def on_gpus(**pinned: str) -> Source:
    return Source(bench=FakeBench(), place="2x", facts=FACTS, pinned=pinned)  # type: ignore[arg-type]


SOURCES: dict[str, Callable[[], Source]] = {
    "recording": recorded,
    "gpus": on_gpus,
    "pinned": lambda: on_gpus(NCCL_PROTO="LL"),
}
CUT = replace(INCONCLUSIVE, trial_count=9, trial_limit=40)
OUT_OF_TIME = "--timeout-s 20: no time was left for more trials"
NOTHING_LEFT = {
    "recording": "the recording: nothing is left to try",
    "gpus": "the search space: nothing is left to try",
    "pinned": "the variables that are set already: nothing is left to try",
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("end", TrialsEnd)
@pytest.mark.parametrize("is_interrupted", [False, True], ids=["finished", "interrupted"])
def test_search_with_fewer_trials_than_asked_for_says_what_ended_them(
    end: TrialsEnd, source: str, is_interrupted: bool
) -> None:
    result = replace(CUT, trials_end=end, is_interrupted=is_interrupted)

    answer = answer_of(result, SOURCES[source](), timeout_s=20.0)

    lines = rendered(answer.show(), 200).splitlines()
    said = [line.removeprefix("ended by").strip() for line in lines if "ended by" in line]
    reasons = {TrialsEnd.OUT_OF_TIME: OUT_OF_TIME, TrialsEnd.EXHAUSTED: NOTHING_LEFT[source]}
    reason = None if is_interrupted else reasons.get(end)
    assert said == ([] if reason is None else [reason])
    assert answer.data["trials_end"] == str(end)


@pytest.mark.parametrize(
    ("end", "trial_count", "next_command"),
    [
        (TrialsEnd.COMPLETE, 40, "nccltune search --trials 80 --resume"),
        (TrialsEnd.OUT_OF_TIME, 9, "nccltune search --trials 40 --resume"),
        (TrialsEnd.OUT_OF_TIME, 30, "nccltune search --trials 60 --resume"),
        (TrialsEnd.EXHAUSTED, 9, ""),
    ],
)
def test_inconclusive_search_is_gone_on_with_where_there_is_more_to_try(
    end: TrialsEnd, trial_count: int, next_command: str
) -> None:
    result = replace(CUT, trials_end=end, trial_count=trial_count)

    answer = answer_of(result, on_gpus(), "--trials", "40")

    assert answer.data["next_command"] == next_command


def test_search_that_is_cut_by_its_time_limit_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = count()
    monkeypatch.setattr(
        "nccltune.search.engine.time", SimpleNamespace(monotonic=lambda: next(seconds))
    )
    words = ["search", "--recording", "h200-2x-shm", "--trials", "40", "--timeout-s", "100"]

    main(words)

    out = capsys.readouterr().out
    assert re.search(r"^trials +\d+ of 40 in ", out, flags=re.MULTILINE)
    assert "ended by  --timeout-s 100: no time was left for more trials" in out


@pytest.mark.parametrize(
    ("duration_s", "said"), [(0.34, "in 0.3 s"), (42.0, "in 42 s"), (131.0, "in 2:11 min")]
)
def test_short_times_are_told_in_seconds(duration_s: float, said: str) -> None:
    assert said in report(replace(IMPROVED, duration_s=duration_s))
    assert said in rendered(bench_parts([bench_report(duration_s=duration_s)]))
