"""The bench on real GPUs: two ranks, each on a GPU of its own, or both on the only one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nccltune.bench.session import BenchOptions, Session, open_session
from nccltune.host.hardware import read_gpus
from nccltune.measurement import Outcome, PayloadRequest
from nccltune.sglang.defaults import base_environment

REQUESTS = (PayloadRequest(43008, 3, 3, 1), PayloadRequest(1376256, 2, 3, 1))
GATHERS = (PayloadRequest(96000, 3, 3, 1), PayloadRequest(32000, 2, 3, 1))
LARGE = PayloadRequest(67108864, 2, 3, 1)
"""Where each rank has a GPU, a tiny buffer kills only the protocol that large payloads use."""

FAULTS = "hang@1:NCCL_MAX_CTAS=3;wrong_data@0:NCCL_MAX_CTAS=5"

pytestmark = pytest.mark.device


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    is_shared = len(read_gpus().gpus) < 2
    options = BenchOptions(rank_count=2, is_shared=is_shared, deadline_s=20.0)
    environ = {"NCCLTUNE_TEST_FAULT": FAULTS}
    with open_session(options, base_environment(None, 2), REQUESTS, environ) as opened:
        yield opened


def test_launch_measures_right_data_in_place_in_graphs(session: Session) -> None:
    launch = session.bench.launch({}, REQUESTS)

    assert launch.outcome is Outcome.OK, launch.message
    assert all(len(payload.samples_us) == 3 for payload in launch.payloads)


def test_inspect_says_what_nccl_used(session: Session) -> None:
    assert session.baseline_report.used.keys() == {43008, 1376256}
    assert session.baseline_report.confirmed["NCCL_CUMEM_ENABLE"] == "0"


@pytest.mark.parametrize(
    ("settings", "outcome"),
    [
        ({"NCCL_BUFFSIZE": "1000"}, Outcome.CRASHED),
        ({"NCCL_PROTO": "bogus"}, Outcome.REJECTED),
        ({"NCCL_ALGO": "allreduce:CollnetDirect"}, Outcome.UNSUPPORTED),
        ({"NCCL_MAX_CTAS": "5"}, Outcome.WRONG_DATA),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else str(value),
)
def test_launch_under_bad_settings_is_told_apart(
    session: Session, settings: dict[str, str], outcome: Outcome
) -> None:
    requests = REQUESTS if session.plan.is_shared else (*REQUESTS, LARGE)

    assert session.bench.launch(settings, requests).outcome is outcome
    assert session.bench.launch({}, REQUESTS).outcome is Outcome.OK


def test_rank_that_never_begins_is_named(session: Session) -> None:
    launch = session.bench.launch({"NCCL_MAX_CTAS": "3"}, REQUESTS)

    assert (launch.outcome, launch.failed_rank) == (Outcome.TIMEOUT, 1), launch.message


def test_other_collectives_carry_right_data_and_cost_memory(session: Session) -> None:
    check = session.bench.check_collectives({}, GATHERS)

    assert check.outcome is Outcome.OK, check.message
    assert [len(gather.samples_us) for gather in check.gathers] == [3, 3]
    assert all(gather.is_data_ok and gather.median_us > 0 for gather in check.gathers)
    assert min(check.memory_bytes) > 0
