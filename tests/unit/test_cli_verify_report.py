"""The report of a verify in each of its forms: terminal, JSON, Markdown; and its two live views."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from nccltune.cli.envelope import plain
from nccltune.cli.verify_answer import conclude
from nccltune.cli.verify_data import Verified, verify_data
from nccltune.cli.verify_markdown import format_markdown
from nccltune.cli.verify_report import SIMULATED_NOTE, verify_parts
from nccltune.cli.verify_view import LiveView, PlainView
from nccltune.sglang.log_stages import Stage
from nccltune.sglang.start_progress import Step, StepTime
from nccltune.supervise import Moment, Waited
from nccltune.verify.judging.baseline import judge_running
from nccltune.verify.judging.cost_model import CostModel
from nccltune.verify.judging.judgement import Cause, Judgement, Reason, Verdict
from nccltune.verify.judging.numbers import summarize_arms
from nccltune.verify.judging.prediction import PredictionCheck
from nccltune.verify.judging.stored import Baseline
from nccltune.verify.model import Arm, RankState
from nccltune.verify.record import Problem
from nccltune.verify.spec import VerifyProgress, VerifyStage
from tests.support.boots import (
    DEFAULT_ARM,
    FAST,
    FAST_ARM,
    LAUNCH,
    ON_PATH,
    TOKENS,
    boot,
    mirrored,
    record_of,
)

if TYPE_CHECKING:
    from nccltune.verify.model import Boot

PLAIN_ARM = Arm("no speculation", LAUNCH, is_speculative=False)
FIVE_ARM = Arm("5 steps", LAUNCH, num_steps=5)
TWO_ARM = Arm("2 steps", LAUNCH, num_steps=2)


def gain() -> Verified:
    return conclude(record_of(mirrored(("default", 9.8), ("fast", 8.9))))


def story() -> Verified:
    """The three arms of the story, with acceptance that the server makes up."""
    seen = replace(ON_PATH, is_simulated_acceptance=True, ranks={})
    times = (("no speculation", 8.7), ("5 steps", 11.2), ("2 steps", 10.2))
    boots: list[Boot] = []
    for name, ms in (*times, *reversed(times)) * 2:
        is_speculative = name != "no speculation"
        boots.append(boot(name, len(boots), ms, is_speculative=is_speculative, seen=seen))
    return conclude(record_of(tuple(boots), arms=(PLAIN_ARM, FIVE_ARM, TWO_ARM)))


def expected_tok_s(ms: float, *positions: int) -> float:
    """20 tokens a run: two after 30 ms, two more with each of 9 steps."""
    times = [0.030 + 9e-3 * ms * (1.0 + 0.001 * (position % 3)) for position in positions]
    return TOKENS * len(times) / sum(times)


def rendered(verified: Verified, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, record=True, markup=False, highlight=False)
    for part in verify_parts(verified):
        console.print(part, soft_wrap=isinstance(part, str))
    return console.export_text()


def rows_of(text: str, title: str) -> list[list[str]]:
    """Return the words of the lines below a heading and its rule, as far as the next empty line."""
    lines = text.splitlines()
    start = next(idx for idx, line in enumerate(lines) if line.startswith(title))
    rule = next(idx for idx in range(start, len(lines)) if "───" in lines[idx])
    end = next((idx for idx in range(rule, len(lines)) if not lines[idx].strip()), len(lines))
    return [line.split() for line in lines[rule + 1 : end]]


# The terminal.


@pytest.mark.parametrize("make", [gain, story])
@pytest.mark.parametrize("width", [80, 120])
def test_report_fits_its_width_and_begins_with_the_sentence(make: Any, width: int) -> None:
    verified = make()

    text = rendered(verified, width)

    assert " ".join(text.split()).startswith(verified.judgement.sentence)
    assert max(map(len, text.splitlines())) <= width


def test_report_has_the_columns_that_people_compare() -> None:
    text = rendered(gain())

    default, fast = rows_of(text, "Speed")
    before, after = expected_tok_s(9.8, 0, 3, 4, 7), expected_tok_s(8.9, 1, 2, 5, 6)
    change = f"{100.0 * (after / before - 1.0):+.1f}"
    assert default == ["default", f"{before:.1f}", "9.80", "2.00", "4"]
    assert fast == ["fast", f"{after:.1f}", change, "%", "8.91", "2.00", "4"]


def test_report_shows_the_effect_with_its_interval_and_the_guards_below_it() -> None:
    text = rendered(gain())

    effect, short, long = rows_of(text, "Against default")
    assert effect[:7] == ["fast:", "time", "of", "a", "verify", "step", "+9.1"]
    assert effect[-2:] == ["2", "gain"]
    assert short[:3] == ["TTFT,", "short", "prompt"]
    assert " ".join(long).endswith("not 5 % slower")


def test_report_writes_what_rounds_to_nothing_without_a_sign() -> None:
    verified = conclude(record_of(mirrored(("default", 9.8), ("fast", 9.8))))
    (compared,) = verified.judgement.comparisons
    check = PredictionCheck(-0.0001, -0.0002, (-0.001, 0.001), 0.12, "x")
    nothing = replace(compared, effect_pct=-0.01, effect_ci_pct=(-0.04, 0.03), check=check)
    judged = replace(verified.judgement, comparisons=(nothing,))
    verified = replace(verified, judgement=judged)

    for text in (rendered(verified), format_markdown(verified)):
        assert "0.0..0.0 %" in text.replace("\\", "")
        assert "-0.0 " not in text
        assert "-0.0." not in text
        assert "-0.000" not in text


def test_report_shows_every_run_of_every_boot() -> None:
    rows = rows_of(rendered(gain()), "Runs")

    assert [row[:2] for row in rows] == [
        [str(idx + 1), name] for idx, name in enumerate(["default", "fast", "fast", "default"] * 2)
    ]
    assert rows[0][2:] == ["169", "169", "9.80", "9.80"]


def test_report_labels_acceptance_that_was_made_up() -> None:
    assert SIMULATED_NOTE in rendered(story())
    assert "simulated" not in rendered(gain())


def test_report_says_which_number_of_draft_steps_is_best() -> None:
    verified = story()
    model = verified.judgement.cost_model
    assert isinstance(model, CostModel)

    text = rendered(verified, 120)
    rows = [row for row in rows_of(text, "Draft steps") if row[0].isdecimal() and "." in row[1]]

    assert [row[0] for row in rows] == [str(each.num_steps) for each in model.estimates]
    assert [row[0] for row in rows if "measured" in " ".join(row)] == ["0", "2", "5"]
    assert [row[0] for row in rows if row[-1] == "best"] == [str(model.best.num_steps)]
    assert model.sentence in " ".join(text.split())


def test_report_puts_the_prediction_beside_the_measurement() -> None:
    verified = gain()
    comparison = verified.judgement.comparisons[0]
    check = PredictionCheck(0.246, 0.9, (0.8, 1.0), 0.12, "the server saves more than predicted")
    judged = replace(verified.judgement, comparisons=(replace(comparison, check=check),))

    text = rendered(replace(verified, judgement=judged))

    assert rows_of(text, "Predicted beside measured")[0] == ["fast", "+0.246", "+0.900", "12", "%"]
    assert "fast: the server saves more than predicted" in text


def test_report_of_an_arm_without_a_boot_shows_no_number() -> None:
    problem = Problem("default", 0, "fewer_tokens", "boot 1 of 4: 20 tokens where 500 were asked")
    verified = conclude(
        record_of(boot_total=8, problems=(problem,), is_finished=False),
    )

    text = rendered(verified)

    assert verified.judgement.verdict is Verdict.UNUSABLE
    assert "20 tokens where 500 were asked" in text
    assert "tok/s" not in text
    assert "boots        0 of 8" in text


def test_report_names_only_the_newest_baselines_that_do_not_serve() -> None:
    verified = gain()
    misses = tuple(Reason(Cause.NO_BASELINE, f"verify {idx}: other host") for idx in range(9))
    judged = Judgement(Verdict.INCONCLUSIVE, verified.judgement.exit_code, "x", reasons=misses)

    text = rendered(replace(verified, judgement=judged))

    assert "verify 2: other host" in text
    assert "verify 3: other host" not in text
    assert "6 older verifies do not serve either" in text


def test_report_ends_with_the_file_and_the_next_command_unbroken() -> None:
    path = Path("/state/verifies/20261129-120000-7.json")
    command = "nccltune profile activate fast"

    lines = rendered(replace(gain(), path=path, next_command=command), width=40).splitlines()

    assert f"  {path}" in lines
    assert lines[-1] == f"  {command}"


# JSON.


def test_data_has_every_promised_field() -> None:
    data: Any = plain(verify_data(gain()))

    json.dumps(data, allow_nan=False)
    assert data["verdict"] == "gain"
    assert data["effect_pct"] == pytest.approx(9.1, abs=0.05)
    low, high = data["effect_ci_pct"]
    assert low < data["effect_pct"] < high
    default, fast = data["arms"]
    assert (default["name"], default["boots"], len(default["runs"])) == ("default", 4, 8)
    assert (fast["name"], fast["settings"]) == ("fast", dict(FAST.settings))
    run = fast["runs"][0]
    assert run["tokens"] == TOKENS
    assert run["tok_s"] == pytest.approx(run["tokens"] / run["duration_s"])
    assert (run["ttft_ms"], run["accept_length"]) == (pytest.approx(30.0), 2.0)
    assert run["ms_per_verify"] == pytest.approx(8.9 * 1.001)
    assert run["boot"] == 1


def test_data_of_nothing_to_compare_has_nulls_and_no_zeros() -> None:
    data: Any = verify_data(conclude(record_of(boot_total=8, is_finished=False)))

    assert data["effect_pct"] is None
    assert data["effect_ci_pct"] == [None, None]
    assert [arm["runs"] for arm in data["arms"]] == [[], []]
    assert data["arms"][0]["summary"]["tok_s"] is None


def test_data_of_three_arms_speaks_of_the_largest_effect() -> None:
    data: Any = verify_data(story())

    largest = max(each["effect_pct"] for each in data["comparisons"])
    assert data["effect_pct"] == largest
    assert [each["num_steps"] for each in data["cost_model"]["estimates"]] == [0, 1, 2, 3, 4, 5]
    assert data["cost_model"]["best_num_steps"] == data["cost_model"]["best"]["num_steps"]
    assert data["is_simulated_acceptance"] is True


def test_data_of_a_running_server_names_rank_and_key_that_lost_the_profile() -> None:
    lost = {"TP0": {"NCCL_PROTO": RankState.IN_EFFECT}, "TP1": {"NCCL_PROTO": RankState.LOST}}
    seen = replace(ON_PATH, ranks=lost)
    arm = Arm("running", LAUNCH, FAST)
    record = record_of((boot("running", 0, 9.0, seen=seen),), arms=(arm,), url="http://x:1")
    judgement = judge_running(record.boots[0], arm, Baseline())

    data: Any = verify_data(Verified(record, judgement, summarize_arms((arm,), record.boots), {}))

    assert data["verdict"] == "drift"
    assert data["boots"][0]["ranks"]["TP1"] == {"NCCL_PROTO": "lost"}
    (reason,) = [each for each in data["reasons"] if each["cause"] == "profile_not_in_effect"]
    assert "TP1" in reason["text"]
    assert "NCCL_PROTO" in reason["text"]


# Markdown.


def test_markdown_has_the_same_tables_and_every_run() -> None:
    text = format_markdown(gain())

    assert text.startswith("# nccltune verify: gain\n")
    assert "| config | tok/s | against baseline | ms per verify | accept length | boots |" in text
    assert f"| fast | {expected_tok_s(8.9, 1, 2, 5, 6):.1f} | +7.3 % | 8.91 | 2.00 | 4 |" in text
    assert "sglang serve --model-path /models/kimi" in text
    assert sum(line.startswith(("| 1 | ", "| 8 | ")) for line in text.splitlines()) == 4
    widths = {line.count("|") for line in text.split("## Every run")[1].splitlines() if "|" in line}
    assert widths == {10}


def test_markdown_keeps_hostile_text_from_being_markup() -> None:
    arm = replace(FAST_ARM, name="a|b <img> `x`")
    boots = mirrored(("default", 9.8), (arm.name, 8.9))

    text = format_markdown(conclude(record_of(boots, arms=(DEFAULT_ARM, arm))))

    assert "| a\\|b &lt;img> \\`x\\` | " in text
    assert "<img>" not in text


def test_markdown_of_simulated_acceptance_says_so() -> None:
    assert f"**{SIMULATED_NOTE}**" in format_markdown(story())


# Live.


def starting(position: int = 2) -> VerifyProgress:
    step = Step(Stage.WEIGHTS, "", 3.0, 5, 64)
    times = (StepTime(Step(Stage.START, "", 0.0), 3.0), StepTime(step, 8.0))
    moment = Moment(Waited(step, 11.0, 2.0, last_text="Load weight begin."), times, None, 4711)
    return VerifyProgress(VerifyStage.START, "fast", position, 8, 245.0, 750.0, moment)


class FakeClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def drawn(view: LiveView, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, record=True, markup=False, highlight=False)
    console.print(view.draw())
    return console.export_text()


@pytest.mark.parametrize("width", [80, 120])
def test_live_view_shows_arm_boot_stage_and_time_left(width: int) -> None:
    clock = FakeClock()
    view = LiveView(clock=clock)
    first = boot("default", 0, 9.8)
    view.update(replace(starting(0), stage=VerifyStage.STOP, moment=None, boot=first))
    view.update(starting())
    clock.now_s = 5.0

    text = drawn(view, width)

    assert "fast, boot 3 of 8" in text
    assert "4:10 gone, 12:25 left" in text
    assert "loading weights (5 of 64)" in text
    assert "Load weight begin." in text
    assert "9.80 ms/verify" in text
    assert max(map(len, text.splitlines())) <= width


def test_live_view_counts_down_within_a_boot() -> None:
    clock = FakeClock()
    view = LiveView(clock=clock)
    view.update(starting())
    clock.now_s = 60.0
    view.update(replace(starting(), elapsed_s=305.0))  # the same estimate, said again

    assert "5:05 gone, 11:30 left" in drawn(view)


def test_live_view_of_the_first_boot_promises_nothing() -> None:
    view = LiveView(clock=FakeClock())
    view.update(replace(starting(0), remaining_s=None))

    text = drawn(view)
    assert "4:05 gone" in text
    assert "left" not in text


def test_plain_view_writes_a_line_for_each_stage_run_and_boot() -> None:
    stream = io.StringIO()
    view = PlainView(stream)
    running = replace(starting(), stage=VerifyStage.MEASURE, moment=None)
    done = replace(running, stage=VerifyStage.STOP, boot=boot("fast", 2, 8.9))
    for progress in (
        starting(),
        starting(),
        replace(running, note="run 1 of 5"),
        replace(running, note="run 1 of 5"),
        replace(running, note="run 2 of 5"),
        replace(running, stage=VerifyStage.STOP),
        done,
    ):
        view.update(progress)

    lines = [line.split("fast: ")[1] for line in stream.getvalue().splitlines()]
    assert lines == [
        "loading weights (5 of 64); starting took 3 s",
        "run 1 of 5",
        "run 2 of 5",
        "stopping the server",
        "done, 8.90 ms per verify, 181.7 tok/s, started in 60 s; 12:30 left",
    ]
    assert stream.getvalue().startswith("   4:05  boot 3/8  fast: ")


def test_plain_view_survives_a_terminal_that_is_gone() -> None:
    class Lost(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    PlainView(Lost()).update(starting())
