"""The history of a host: verifies and searches in one list, and figures over time."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nccltune.cli import main
from nccltune.cli.search_data import SavedProfile, search_data
from nccltune.cli.sources import Source
from nccltune.cli.trend import BLOCKS, PLAIN_BLOCKS, draw_sparkline
from nccltune.cli.verify_answer import conclude
from nccltune.cli.verify_data import judgement_data
from nccltune.paths import state_dir
from nccltune.sglang.defaults import SGLANG_BASE_ENVIRONMENT
from nccltune.store import searches
from nccltune.store.reading import read_text
from nccltune.store.searches import keep_search, read_searches
from nccltune.verify import record as record_module
from nccltune.verify.model import RankState
from nccltune.verify.record import VerifyRecord, save
from tests.support.boots import HOST, ON_PATH, mirrored, record_of
from tests.support.command_line import FACTS, FakeBench, envelope_of
from tests.support.results import IMPROVED, KEEP_DEFAULT, answer_of

if TYPE_CHECKING:
    from nccltune.search.result import SearchResult

Capture = pytest.CaptureFixture[str]


def keep_verify(day: int, default_ms: float, fast_ms: float, **changes: Any) -> VerifyRecord:
    """Keep a verify with its verdict, as the command does."""
    record = record_of(
        mirrored(("default", default_ms), ("fast", fast_ms)),
        id=f"202611{day:02}-120000-7",
        created_at=f"2026-11-{day:02}T12:00:00+00:00",
        **changes,
    )
    judged: Any = json.loads(json.dumps(judgement_data(conclude(record).judgement)))
    record = replace(record, judgement=judged)
    save(record)
    return record


def keep_a_search(day: int, baseline_us: float = 10.0, **answered: Any) -> None:
    rows = (replace(IMPROVED.payloads[0], baseline_us=baseline_us), *IMPROVED.payloads[1:])
    result = replace(IMPROVED, payloads=rows)
    data = search_data(result, SavedProfile("fast"), workload="kimi-k2.5", next_command="")
    facts = {**data, "fingerprint": HOST.to_json(), **answered}
    answer: Any = json.loads(json.dumps(facts, default=str))
    keep_search("fast", datetime(2026, 11, day, 13, tzinfo=UTC), answer)


def test_history_of_a_new_host_says_what_to_do(capsys: Capture) -> None:
    assert main(["history"]) == 0

    assert "nccltune verify -- CMD" in capsys.readouterr().out
    assert envelope_of(capsys, "history")["data"]["entries"] == []


def test_history_lists_verifies_and_searches_oldest_first(capsys: Capture) -> None:
    keep_verify(3, 9.8, 8.9)
    keep_a_search(2)
    keep_verify(1, 9.8, 9.8)

    entries = envelope_of(capsys, "history")["data"]["entries"]

    assert [entry["kind"] for entry in entries] == ["verify", "search", "verify"]
    assert [entry["verdict"] for entry in entries] == ["no_difference", "improved", "gain"]
    assert entries[2]["id"] == "20261103-120000-7"
    assert entries[2]["effect_pct"] == pytest.approx(9.1, abs=0.1)
    assert entries[1]["score_ratio"] == IMPROVED.score_ratio
    assert entries[1]["profile"] == "fast"


def test_history_shows_the_newest_only_where_asked(capsys: Capture) -> None:
    for day in range(1, 6):
        keep_verify(day, 9.8, 8.9)

    data = envelope_of(capsys, "history", "--last", "2")["data"]

    assert [entry["id"][:8] for entry in data["entries"]] == ["20261104", "20261105"]
    assert data["entry_count"] == 5
    assert len(data["series"][0]["points"]) == 2


def test_history_shows_how_the_same_figure_moved(capsys: Capture) -> None:
    keep_verify(1, 9.8, 8.9)
    keep_verify(2, 9.8, 8.9)
    keep_verify(3, 10.78, 8.9)
    keep_a_search(1, 10.0)
    keep_a_search(3, 12.0)

    series = {each["name"]: each for each in envelope_of(capsys, "history")["data"]["series"]}

    defaults = series["defaults, 2 steps, kimi, tp 2"]
    assert [point["value"] for point in defaults["points"]] == pytest.approx(
        [9.805, 9.805, 10.785], abs=0.005
    )
    assert defaults["change_pct"] == pytest.approx(10.0, abs=0.1)
    assert series["fast, 2 steps, kimi, tp 2"]["change_pct"] == pytest.approx(0.0)
    reduced = series["defaults, all-reduce of 43008 B"]
    assert (reduced["unit"], reduced["change_pct"]) == ("us", pytest.approx(20.0))


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": replace(HOST, gpu_uuids=("GPU-2", "GPU-3"))},
        {"load": {"concurrency": 8}},
        {"load": {"concurrency": 1, "tokens": 21}},
        {"arms": None},
    ],
    ids=["GPUs", "concurrency", "tokens", "flags"],
)
def test_figures_of_another_host_load_or_launch_are_not_compared(
    capsys: Capture, changes: dict[str, Any]
) -> None:
    first = keep_verify(1, 9.8, 8.9)
    if "arms" in changes:
        more = ("--mem-fraction-static", "0.8")
        changes["arms"] = tuple(replace(arm, argv=(*arm.argv, *more)) for arm in first.arms)
    keep_verify(2, 19.6, 17.8, **changes)

    series = envelope_of(capsys, "history")["data"]["series"]

    assert [len(each["points"]) for each in series] == [1, 1, 1, 1]


def test_searches_under_another_environment_are_not_compared(capsys: Capture) -> None:
    usual = dict(SGLANG_BASE_ENVIRONMENT)
    for day, base in enumerate((usual, {**usual, "NCCL_P2P_DISABLE": "1"}, usual), start=1):
        keep_a_search(day, base_environment=base)

    series = envelope_of(capsys, "history")["data"]["series"]

    size = IMPROVED.payloads[0].size_bytes
    assert [(each["name"], len(each["points"])) for each in series] == [
        (f"defaults, all-reduce of {size} B", 2),
        (f"defaults, all-reduce of {size} B, NCCL_P2P_DISABLE=1", 1),
    ]


def test_figures_of_one_name_say_what_tells_them_apart(capsys: Capture) -> None:
    for day, tokens in enumerate((20, 41, 41), start=1):
        keep_verify(day, 9.8, 8.9, load={"concurrency": 1, "tokens": tokens})

    series = envelope_of(capsys, "history")["data"]["series"]

    assert {each["name"]: len(each["points"]) for each in series} == {
        "defaults, 2 steps, kimi, tp 2, concurrency 1, tokens 20": 1,
        "fast, 2 steps, kimi, tp 2, concurrency 1, tokens 20": 1,
        "defaults, 2 steps, kimi, tp 2, concurrency 1, tokens 41": 2,
        "fast, 2 steps, kimi, tp 2, concurrency 1, tokens 41": 2,
    }


def test_a_server_that_runs_is_on_the_line_of_the_verify_of_its_profile(capsys: Capture) -> None:
    first = keep_verify(1, 9.8, 8.9)
    (fast,) = [arm for arm in first.arms if arm.name == "fast"]
    assert fast.profile is not None
    boots = [replace(boot, arm="running") for boot in first.boots if boot.arm == "fast"]
    running = replace(
        first,
        id="20261102-120000-7",
        created_at="2026-11-02T12:00:00+00:00",
        url="http://127.0.0.1:30000",
        arms=(replace(fast, name="running"),),
        boots=tuple(boots[:1]),
        environ={**first.environ, **fast.profile.settings},
    )
    save(running)

    series = envelope_of(capsys, "history")["data"]["series"]

    assert [len(each["points"]) for each in series] == [1, 2]


def test_verifies_of_one_second_are_listed_in_their_order(capsys: Capture) -> None:
    record = keep_verify(1, 9.8, 8.9)
    save(replace(record, id="20261101-120000-8"))

    entries = envelope_of(capsys, "history")["data"]["entries"]

    assert [entry["id"] for entry in entries] == ["20261101-120000-7", "20261101-120000-8"]


def test_figures_of_another_port_and_driver_are_compared(capsys: Capture) -> None:
    first = keep_verify(1, 9.8, 8.9)
    arms = tuple(replace(arm, argv=(*arm.argv, "--port", "31000")) for arm in first.arms)
    keep_verify(2, 9.8, 8.9, arms=arms, fingerprint=replace(HOST, driver_version="590.2"))

    series = envelope_of(capsys, "history")["data"]["series"]

    assert [len(each["points"]) for each in series] == [2, 2]


def test_history_names_a_verify_that_was_stopped(capsys: Capture) -> None:
    keep_verify(1, 9.8, 8.9, is_finished=False)

    (entry,) = envelope_of(capsys, "history")["data"]["entries"]

    assert entry["verdict"] == "not finished"


@pytest.mark.parametrize("folder", ["verifies", "searches"])
@pytest.mark.parametrize("text", ["{", "{}", '{"schema": "nccltune.search/1", "name": "x"}'])
def test_a_damaged_file_is_named_and_hides_no_other(
    capsys: Capture, folder: str, text: str
) -> None:
    keep_verify(1, 9.8, 8.9)
    keep_a_search(2)
    (state_dir() / folder / "20261105-bad.json").write_text(text)

    envelope = envelope_of(capsys, "history")

    assert envelope["exit_code"] == 0
    assert len(envelope["data"]["entries"]) == 2
    assert len(envelope["warnings"]) == 1


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("effect_ci_pct", [1]),
        ("effect_ci_pct", ["a", "b"]),
        ("effect_ci_pct", [[1], [2]]),
        ("effect_pct", 10**400),
    ],
)
def test_a_verdict_that_cannot_be_shown_is_named_and_hides_no_other(
    capsys: Capture, place: str, value: object
) -> None:
    keep_verify(1, 9.8, 8.9)
    record = keep_verify(2, 9.8, 8.9)
    save(replace(record, judgement={**record.judgement, place: value}))

    envelope = envelope_of(capsys, "history")

    assert envelope["exit_code"] == 0
    assert [entry["id"][:8] for entry in envelope["data"]["entries"]] == ["20261101"]
    (warning,) = envelope["warnings"]
    assert f"{record.id}.json: is damaged" in warning


@pytest.mark.parametrize("arm", ["default", "fast"])
def test_boots_that_lost_the_profile_are_not_plotted_as_that_profile(
    capsys: Capture, arm: str
) -> None:
    keep_verify(1, 9.8, 8.9)
    record = keep_verify(2, 9.8, 8.9)
    lost = replace(ON_PATH, ranks={"TP0": {"NCCL_PROTO": RankState.LOST}})
    boots = (replace(boot, seen=lost) if boot.arm == arm else boot for boot in record.boots)
    save(replace(record, boots=tuple(boots)))

    series = {each["name"]: each for each in envelope_of(capsys, "history")["data"]["series"]}

    # The defaults promise no setting, so that none can be lost.
    assert len(series["defaults, 2 steps, kimi, tp 2"]["points"]) == 2
    assert len(series["fast, 2 steps, kimi, tp 2"]["points"]) == (1 if arm == "fast" else 2)


def test_figures_are_told_apart_by_what_a_config_file_said_then(
    capsys: Capture, tmp_path: Path
) -> None:
    first = keep_verify(1, 9.8, 8.9)
    arms = tuple(replace(arm, argv=(*arm.argv, "--config", "gone.yaml")) for arm in first.arms)
    said: dict[str, tuple[str, ...]] = {"model_path": ("/m/kimi",), "config": ("gone.yaml",)}
    for day, value in ((2, "0.8"), (3, "0.8"), (4, "0.7")):
        flags = {arm.name: {**said, "mem_fraction_static": (value,)} for arm in arms}
        keep_verify(day, 9.8, 8.9, arms=arms, flags=flags)

    series = envelope_of(capsys, "history")["data"]["series"]

    assert sorted(len(each["points"]) for each in series) == [1, 1, 1, 1, 2, 2]


def test_no_more_files_are_read_than_are_shown(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for day in range(1, 10):
        keep_verify(day, 9.8, 8.9)
        keep_a_search(day)
    read: list[Path] = []

    def note(path: Path, **words: Any) -> str:
        read.append(path)
        return read_text(path, **words)

    monkeypatch.setattr(record_module, "read_text", note)
    monkeypatch.setattr(searches, "read_text", note)

    data = envelope_of(capsys, "history", "--last", "3")["data"]

    assert len(read) == 6
    assert [entry["kind"] for entry in data["entries"]] == ["search", "verify", "search"]
    assert [entry["at"][:10] for entry in data["entries"]] == [
        *("2026-11-08", "2026-11-09", "2026-11-09")
    ]
    assert data["entry_count"] == 18


@pytest.mark.parametrize("place", [".", "verifies"])
def test_state_folder_that_is_a_file_is_said(capsys: Capture, place: str) -> None:
    path = state_dir() / place
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        path.rmdir()
    path.write_text("")

    envelope = envelope_of(capsys, "history")

    (error,) = envelope["errors"]
    assert (envelope["exit_code"], error["code"]) == (6, "cannot_read")
    assert str(state_dir()) in error["message"]


def test_state_folder_that_cannot_be_read_is_said(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_verify(1, 9.8, 8.9)

    def refuse(_path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)

    envelope = envelope_of(capsys, "history")

    assert envelope["exit_code"] == 6
    assert "Permission denied" in envelope["errors"][0]["message"]


def test_folder_of_searches_that_is_a_file_is_named_and_hides_no_verify(capsys: Capture) -> None:
    keep_verify(1, 9.8, 8.9)
    (state_dir() / "searches").write_text("")

    envelope = envelope_of(capsys, "history")

    assert len(envelope["data"]["entries"]) == 1
    assert "searches: cannot be read (Not a directory)" in envelope["warnings"][0]


@pytest.mark.parametrize("width", ["80", "120"])
def test_history_fits_the_terminal_and_ends_with_a_baseline(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    for day in (1, 2, 4):
        keep_verify(day, 9.8 + 0.1 * day, 8.9)
    keep_a_search(3)

    assert main(["history"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= int(width)
    assert lines[0] == "3 verifies and 1 search, oldest first"
    assert lines[-1] == "  nccltune verify --url URL"
    (moved,) = [line for line in lines if "defaults, 2 steps" in line]
    assert len(set(moved) & set(BLOCKS)) > 1


# What a search leaves.


def searched(result: SearchResult, bench: Any) -> None:
    source = Source(bench=bench, place="2x-H200", facts=FACTS, fingerprint=HOST.to_json())
    answer_of(result, source)


def test_a_search_without_a_winner_is_in_the_history(capsys: Capture) -> None:
    searched(KEEP_DEFAULT, FakeBench())

    (entry,) = envelope_of(capsys, "history")["data"]["entries"]

    assert (entry["kind"], entry["verdict"], entry["subject"]) == ("search", "keep_default", "mine")
    assert entry["profile"] is None


def test_a_search_that_was_stopped_is_not() -> None:
    searched(replace(KEEP_DEFAULT, is_interrupted=True), FakeBench())

    assert read_searches() == ([], [])


# The picture.


def test_sparkline_does_not_make_mountains_of_noise() -> None:
    assert set(draw_sparkline([10.0, 10.01, 9.99, 10.0])) <= set("▄▅")
    assert draw_sparkline([10.0, 10.0]) in ("▄▄", "▅▅")


def test_sparkline_shows_a_jump_and_only_the_newest() -> None:
    assert draw_sparkline([10.0, 10.0, 20.0]) == "▁▁█"
    assert draw_sparkline([5.0, *[10.0] * 30, 20.0], width=3) == "▁▁█"
    assert draw_sparkline([]) == ""


@pytest.mark.parametrize(("encoding", "marks"), [("ascii", PLAIN_BLOCKS), ("utf-8", BLOCKS)])
def test_history_draws_plain_marks_where_the_terminal_knows_no_blocks(
    monkeypatch: pytest.MonkeyPatch, encoding: str, marks: str
) -> None:
    keep_verify(1, 9.8, 8.9)
    keep_verify(2, 10.78, 8.9)
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", stream)

    assert main(["history"]) == 0

    stream.flush()
    lines = stream.buffer.getvalue().decode(encoding).splitlines()
    [row] = [line for line in lines if "defaults," in line and " to " in line]
    assert f" {marks[0]}{marks[-1]} " in row
