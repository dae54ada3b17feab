"""The metrics text, as Prometheus reads it."""

from __future__ import annotations

import re

import pytest

from nccltuned.metrics import Snapshot, format_metrics
from tests.support.stocks import server_data, stock_data

SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*)\})? (-?[0-9.]+)')


def parse(text: str) -> dict[str, float]:
    """Read the text as a scraper does: every line is a comment or a sample, none occurs twice."""
    assert text.endswith("\n")
    found: dict[str, float] = {}
    declared: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            declared.add(line.split()[2])
        if line.startswith("# "):
            continue
        match = SAMPLE.fullmatch(line)
        assert match is not None, line
        assert match[1] in declared
        name = line.rpartition(" ")[0]
        assert name not in found
        found[name] = float(match[3])
    return found


def test_metrics_before_the_first_look_are_complete_and_say_nothing_of_a_profile() -> None:
    found = parse(format_metrics(Snapshot(None, is_check_failing=True)))

    assert found["nccltune_check_failing"] == 1
    assert not any("profile" in name for name in found)


def test_metrics_count_servers_ranks_and_variables() -> None:
    servers = (server_data(100, "not_in_effect", "lost", "in_effect"), server_data(200))
    snapshot = Snapshot(
        stock_data(*servers),
        checked_at_s=1_764_417_600.5,
        failed_start_count=2,
        rollback_count=1,
        start_counts={"nccl": 2, "ready": 5},
    )

    found = parse(format_metrics(snapshot))

    assert found['nccltune_servers{verdict="not_in_effect"}'] == 1
    assert found['nccltune_servers{verdict="unreadable"}'] == 0
    assert found["nccltune_ranks"] == 2
    assert found['nccltune_rank_variables{pid="100",state="lost"}'] == 1
    assert found['nccltune_rank_variables{pid="200",state="lost"}'] == 0
    assert found["nccltune_last_check_timestamp_seconds"] == 1_764_417_600.5
    assert found["nccltune_failed_starts"] == 2
    assert found["nccltune_rollbacks"] == 1
    assert found['nccltune_recorded_starts{ending="nccl"}'] == 2


@pytest.mark.parametrize("field", ["degraded", "stale"])
def test_metrics_show_a_profile_in_trouble(field: str) -> None:
    found = parse(format_metrics(Snapshot(stock_data(**{f"is_{field}": True}))))

    assert found[f"nccltune_profile_{field}"] == 1
    assert found["nccltune_profile_active"] == 1


def test_metrics_name_the_profile_and_how_far_it_holds() -> None:
    found = parse(format_metrics(Snapshot(stock_data(match=None))))

    digest = "a" * 16
    label = f'nccltune_profile_info{{profile="mine",digest="{digest}",match="unknown"}}'
    assert found[label] == 1


def test_metrics_without_a_profile_have_no_info() -> None:
    found = parse(format_metrics(Snapshot(stock_data(name=None, digest=None))))

    assert found["nccltune_profile_active"] == 0
    assert not any(name.startswith("nccltune_profile_info") for name in found)


def test_metrics_escape_what_could_break_a_line() -> None:
    found = parse(format_metrics(Snapshot(stock_data(name='a"b\\c\nd'))))

    assert any('profile="a\\"b\\\\c\\nd"' in name for name in found)
