"""Every report in a narrow terminal holds the words of a wide one: names can be copied."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from nccltune.cli import main, render
from nccltune.cli.bench_report import bench_parts
from nccltune.cli.search_data import SavedProfile
from nccltune.cli.search_report import search_parts
from nccltune.cli.verify_answer import conclude
from nccltune.cli.verify_report import verify_parts
from nccltune.profile import Profile
from nccltune.store import save_candidate
from nccltune.store.searches import keep_search
from tests.support.boots import mirrored, record_of
from tests.support.command_line import FINGERPRINT
from tests.support.results import IMPROVED, TUNED, bench_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import RenderableType

VERBS = {
    "recording list": ["recording", "list"],
    "recording show": ["recording", "show", "h200-2x-shm"],
    "payloads": ["payloads"],
    "profile list": ["profile", "list"],
    "profile show": ["profile", "show", "kimi-k2.5-2x-nvidia-h200-sxm"],
    "profile diff": ["profile", "diff", "folk-ll-ring", "kimi-k2.5-2x-nvidia-h200-sxm"],
    "profile activate": ["profile", "activate", "folk-ll-ring"],
    "doctor": ["doctor"],
    "history": ["history"],
}
REPORTS: dict[str, Callable[[], Iterable[RenderableType]]] = {
    "search": lambda: search_parts(IMPROVED, SavedProfile(), next_command=""),
    "bench": lambda: bench_parts([bench_report()]),
    "verify": lambda: verify_parts(conclude(record_of(mirrored(("default", 9.8), ("fast", 8.9))))),
}


@pytest.fixture(autouse=True)
def found_profile() -> None:
    name = "kimi-k2.5-2x-nvidia-h200-sxm"
    save_candidate(Profile(name, TUNED, source="gpus", fingerprint=FINGERPRINT.to_json()))
    keep_search(name, datetime(2026, 11, 29, tzinfo=UTC), {"verdict": "keep_default"})


def words(text: str) -> set[str]:
    """Return the words, without the rule below the heads of a table."""
    return {word for word in text.split() if set(word) != {"─"}}


@pytest.mark.parametrize("verb", VERBS)
def test_report_holds_every_word_whole_at_any_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def at(width: int) -> set[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        main(VERBS[verb])
        return words(capsys.readouterr().out)

    at(500)  # once: to activate a profile again says another thing
    wide = at(500)
    for width in (24, 40, 50, 64, 80):
        assert at(width) == wide, width


@pytest.mark.parametrize("report", REPORTS)
def test_report_of_measurements_holds_every_word_whole_at_any_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, report: str
) -> None:
    def at(width: int) -> set[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        render.print_report(REPORTS[report]())
        return words(capsys.readouterr().out)

    wide = at(500)
    for width in (24, 40, 50, 64, 80):
        assert at(width) == wide, width
