"""What the journal gets to read, and what not twice."""

from __future__ import annotations

import logging

import pytest

from nccltuned.journal import MAX_LINES_PER_SERVER, open_journal, summary, tell_changes
from tests.support.stocks import server_data, stock_data


@pytest.fixture(autouse=True)
def everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_changes_name_pid_rank_key_expected_and_actual(caplog: pytest.LogCaptureFixture) -> None:
    tell_changes(None, stock_data(server_data(100, "not_in_effect", "in_effect", "lost")))

    assert (
        "lost: pid=102 rank=TP1 key=NCCL_ALGO expected=allreduce:ring actual=(not set) source=- "
        "why=why" in caplog.messages
    )


def test_changes_that_are_none_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    stock = stock_data(server_data(100, "not_in_effect", "lost"))

    tell_changes(stock, stock)

    assert caplog.messages == []


def test_changes_in_what_is_not_known_yet_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tell_changes(stock_data(unknown="the NCCL of the server"), stock_data())

    assert caplog.messages == []


def test_changes_tell_of_a_server_that_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    tell_changes(stock_data(server_data(100)), stock_data())

    assert caplog.messages == ["server is gone: pid=100"]


def test_changes_tell_unreadable_ranks_in_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    tell_changes(None, stock_data(server_data(100, "unreadable", "unreadable", "unreadable")))

    lines = [line for line in caplog.messages if line.startswith("unreadable: ")]
    assert lines == [
        "unreadable: pid=101 rank=TP0 keys=NCCL_ALGO why=wiped",
        "unreadable: pid=102 rank=TP1 keys=NCCL_ALGO why=wiped",
    ]


def test_changes_of_a_large_server_end_somewhere(caplog: pytest.LogCaptureFixture) -> None:
    tell_changes(None, stock_data(server_data(100, "not_in_effect", *["lost"] * 500)))

    assert sum(line.startswith("lost: ") for line in caplog.messages) == MAX_LINES_PER_SERVER
    assert "and 436 more" in caplog.text


@pytest.mark.parametrize(
    ("changes", "level", "word"),
    [
        ({}, logging.INFO, "profile is active"),
        ({"name": None}, logging.INFO, "no profile is active"),
        ({"problem": "is gone", "advice": "nccltune x"}, logging.ERROR, "run=nccltune x"),
        (
            {"is_degraded": True, "differing": ["gpu_names"], "advice": "nccltune search"},
            logging.ERROR,
            "differing=gpu_names",
        ),
        (
            {"is_stale": True, "stale": ["the driver"], "advice": "nccltune verify -- CMD"},
            logging.WARNING,
            "changed=the driver run=nccltune verify",
        ),
    ],
    ids=["active", "none", "broken", "foreign", "stale"],
)
def test_changes_of_the_profile_are_as_loud_as_they_are_grave(
    caplog: pytest.LogCaptureFixture, changes: dict[str, object], level: int, word: str
) -> None:
    tell_changes(None, stock_data(**changes))

    [record] = caplog.records
    assert record.levelno == level
    assert word in record.getMessage()


@pytest.mark.parametrize(
    ("stock", "text"),
    [
        (None, "nothing is known of this host yet"),
        (stock_data(), "mine (identical), no server runs"),
        (stock_data(name=None), "no profile is active, no server runs"),
        (stock_data(problem="x"), "mine (cannot be used), no server runs"),
        (stock_data(is_degraded=True), "mine (not used on this host), no server runs"),
        (stock_data(is_stale=True), "mine (stale), no server runs"),
        (
            stock_data(server_data(1), server_data(2, "not_in_effect")),
            "mine (identical), 2 servers: in effect, not in effect",
        ),
    ],
    ids=["unknown", "good", "none", "broken", "foreign", "stale", "servers"],
)
def test_summary_says_how_it_stands(stock: dict[str, object] | None, text: str) -> None:
    assert summary(stock) == text


@pytest.mark.parametrize(("stream", "head"), [("1:2", "<4>odd"), (None, "nccltuned: WARNING: odd")])
def test_journal_lines_are_single_and_printable(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stream: str | None,
    head: str,
) -> None:
    root = logging.getLogger()
    before = (root.handlers, root.level, logging.raiseExceptions)
    if stream is None:
        monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    else:
        monkeypatch.setenv("JOURNAL_STREAM", stream)
    try:
        open_journal(is_verbose=False)
        logging.getLogger("nccltuned").warning("odd\n%s", "\x1b[2J")
    finally:
        root.handlers, root.level, logging.raiseExceptions = before

    assert capsys.readouterr().err == f"{head} | ?[2J\n"
