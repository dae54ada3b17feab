"""Both views of a running search."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace

import pytest
from rich.console import Console

from nccltune.cli.live import RECENT_COUNT, STAGE_WORDS, LiveView, PlainView, follow
from nccltune.measurement import Launch, Outcome, Settings
from nccltune.search.result import Progress, Stage

CANDIDATE = {"NCCL_MIN_CTAS": "8", "NCCL_PROTO": "allreduce:LL"}


class FakeClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class LostStream(io.StringIO):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def moment(trial_idx: int, launch: Launch | None = None, **changes: object) -> Progress:
    progress = Progress(
        stage=Stage.SEARCH,
        settings=CANDIDATE,
        trial_idx=trial_idx,
        trial_total=40,
        elapsed_s=83.0,
        remaining_s=190.0,
        best_score_ratio=0.893,
        best_settings={"NCCL_NTHREADS": "128"},
        outcome_counts={Outcome.OK: 10, Outcome.CRASHED: 1},
        launch=launch,
        score_ratio=0.934 if launch is not None and launch.outcome is Outcome.OK else None,
    )
    return replace(progress, **changes)  # type: ignore[arg-type]


def launched(
    settings: Settings = CANDIDATE, outcome: Outcome = Outcome.OK, message: str = ""
) -> Launch:
    return Launch(settings=settings, outcome=outcome, message=message)


def drawn(view: LiveView, width: int = 80) -> list[str]:
    console = Console(
        file=io.StringIO(), width=width, record=True, force_terminal=True, markup=False
    )
    console.print(view.draw())
    return console.export_text().splitlines()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def view(clock: FakeClock) -> LiveView:
    return LiveView(name="search", clock=clock)


def test_live_view_before_the_first_moment_says_that_it_starts(view: LiveView) -> None:
    assert drawn(view) == ["nccltune search: starting"]


def test_live_view_shows_stage_trials_best_now_and_endings(view: LiveView) -> None:
    view.update(moment(13))

    text = "\n".join(drawn(view))

    assert STAGE_WORDS[Stage.SEARCH] in text
    assert "13/40" in text
    assert "1:23 gone, 3:10 left" in text
    assert "0.893  NTHREADS=128" in text
    assert "MIN_CTAS=8 PROTO=LL" in text
    assert "ok 10, crashed 1" in text
    assert "Ctrl-C" in text


def test_live_view_clock_runs_while_a_launch_hangs(view: LiveView, clock: FakeClock) -> None:
    view.update(moment(13))
    clock.now_s = 20.0

    text = "\n".join(drawn(view))

    assert "1:43 gone, 2:50 left" in text
    assert "(20 s)" in text


def test_live_view_without_an_end_in_sight_has_no_time_left(view: LiveView) -> None:
    view.update(moment(13, remaining_s=None))

    assert "1:23 gone, - left" in drawn(view)[0]


def test_live_view_keeps_the_last_few_launches_with_how_they_ended(view: LiveView) -> None:
    for trial_idx in range(12):
        view.update(moment(trial_idx, launched()))
    view.update(moment(12, launched(outcome=Outcome.CRASHED, message="rank 1 died of signal 8")))

    lines = [line for line in drawn(view) if "MIN_CTAS" in line and "now" not in line]

    assert len(lines) == RECENT_COUNT
    assert lines[-1].split()[:3] == ["12", "-", "crashed"]
    assert "rank 1 died of signal 8" in lines[-1]
    assert lines[0].split()[:3] == ["8", "0.934", "ok"]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_live_view_never_wraps(view: LiveView, width: int) -> None:
    long = {f"NCCL_VARIABLE_{idx}": "x" * 30 for idx in range(10)}
    view.update(moment(7, launched(long, Outcome.TIMEOUT, "no answer " * 30), best_settings=long))

    lines = drawn(view, width)

    assert max(map(len, lines)) <= width
    assert len(lines) == (8 if width >= 80 else 9)  # the last line folds on a very narrow terminal


def test_live_view_takes_markup_in_a_message_as_text(view: LiveView) -> None:
    view.update(moment(7, launched(outcome=Outcome.REJECTED, message="[bold]bad[/nothing]")))

    assert any("[bold]bad[/nothing]" in line for line in drawn(view, 120))


def test_plain_view_writes_a_line_for_each_stage_and_each_launch() -> None:
    stream = io.StringIO()
    view = PlainView(stream)

    view.update(moment(0, stage=Stage.BASELINE))
    view.update(moment(0, launched({}), stage=Stage.BASELINE))
    view.update(moment(1))
    view.update(moment(1, launched()))
    view.update(moment(2, launched(outcome=Outcome.TIMEOUT, message="no answer\nwithin 30 s")))

    lines = stream.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[0].split(maxsplit=1)[1] == STAGE_WORDS[Stage.BASELINE]
    assert lines[1].split()[1:3] == ["baseline", "ok"]
    assert lines[2].split(maxsplit=1)[1] == STAGE_WORDS[Stage.SEARCH]
    assert lines[3].split()[1:4] == ["trial", "1", "ok"]
    assert "NCCL_MIN_CTAS=8 NCCL_PROTO=allreduce:LL" in lines[3]
    assert lines[4].endswith(": no answer within 30 s")


def test_plain_view_names_the_stage_of_a_launch_that_is_no_trial() -> None:
    stream = io.StringIO()

    PlainView(stream).update(moment(40, launched(), stage=Stage.DUEL))

    assert stream.getvalue().splitlines()[1].split()[1:3] == ["duel", "ok"]


def test_plain_view_announces_a_stage_once_though_the_baseline_comes_again() -> None:
    stream = io.StringIO()
    view = PlainView(stream)

    for stage in (Stage.BASELINE, Stage.SEARCH, Stage.BASELINE, Stage.SEARCH):
        view.update(moment(1, stage=stage))

    assert len(stream.getvalue().splitlines()) == 2


def test_plain_view_calls_a_pruned_launch_pruned() -> None:
    stream = io.StringIO()

    PlainView(stream).update(moment(1, replace(launched(), is_pruned=True)))

    assert " pruned " in stream.getvalue()


def test_plain_view_on_a_closed_terminal_stays_quiet() -> None:
    PlainView(LostStream()).update(moment(1, launched()))


@pytest.mark.parametrize("wants_json", [True, False])
def test_follow_without_a_terminal_writes_plain_lines_to_stderr(
    capsys: pytest.CaptureFixture[str], wants_json: bool
) -> None:
    with follow("search", wants_json=wants_json) as observer:
        observer.update(moment(1, launched()))

    captured = capsys.readouterr()
    assert captured.out == ""
    assert "trial 1" in captured.err


def test_every_stage_has_words() -> None:
    words: Mapping[Stage, str] = STAGE_WORDS

    assert set(words) == set(Stage)
