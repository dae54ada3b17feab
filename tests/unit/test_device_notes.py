"""What a rank on a GPU notes of its steps, on a torch and an NCCL that only keep what is called."""

from __future__ import annotations

import importlib
import sys
from ctypes import c_void_p
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest

from nccltune.bench.rank import Role
from nccltune.measurement import PayloadRequest

if TYPE_CHECKING:
    from collections.abc import Callable

MODULE = "nccltune.bench.device"
WAIT, REPLAY, RECORD = "wait", "replay", "record"


@pytest.fixture
def events() -> list[str]:
    """Notes, replays, recorded CUDA events and waits, in order."""
    return []


@pytest.fixture
def rank(events: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    torch = MagicMock()
    torch.cuda.synchronize.side_effect = lambda: events.append(WAIT)
    torch.cuda.CUDAGraph.return_value.replay.side_effect = lambda: events.append(REPLAY)
    torch.cuda.Event.return_value.record.side_effect = lambda: events.append(RECORD)
    torch.cuda.Event.return_value.elapsed_time.return_value = 1.0
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    device = importlib.import_module(MODULE)
    monkeypatch.setattr(device, "Nccl", MagicMock())
    monkeypatch.setattr(device, "_pattern", MagicMock())
    one = device.open_device(Role(1, 8, 1), events.append)
    one.open_context()
    one._communicators = [c_void_p(1), c_void_p(2)]
    events.clear()
    yield one
    sys.modules.pop(MODULE, None)


REQUEST = PayloadRequest(43008, 123, replay_count=4, warmup_count=2)
COMMANDS: dict[str, Callable[[Any], object]] = {
    "measure": lambda rank: rank.measure(REQUEST, 1),
    "measure_gather": lambda rank: rank.measure_gather(REQUEST, 1),
    "check_collectives": lambda rank: rank.check_collectives(1),
}


@pytest.mark.parametrize("command", ["measure", "measure_gather"])
def test_nothing_is_noted_from_the_first_warm_up_to_the_end_of_the_timing(
    rank: Any, events: list[str], command: str
) -> None:
    COMMANDS[command](rank)

    timing = [REPLAY] * 2 + [RECORD, REPLAY, RECORD] * 4 + [WAIT]
    start = events.index("timing the graph") + 1
    assert events[start : start + len(timing)] == timing


@pytest.mark.parametrize("command", COMMANDS)
def test_every_wait_of_a_command_has_a_note_of_its_own(
    rank: Any, events: list[str], command: str
) -> None:
    COMMANDS[command](rank)

    calls = {WAIT, REPLAY, RECORD}
    notes: list[str] = []
    assert events.count(WAIT) > 1
    for event in events:
        if event == WAIT:
            assert notes
            assert notes[-1].startswith(("waiting for", "timing the graph"))
            notes.clear()
        elif event not in calls:
            notes.append(event)


def test_joining_is_noted_before_it_may_block(rank: Any, events: list[str]) -> None:
    rank._nccl.init_rank.side_effect = lambda *_: events.append(WAIT)
    rank.connect(bytes(128))

    assert events == ["joining", WAIT]
