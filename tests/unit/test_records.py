from __future__ import annotations

import json
import random

import pytest

from nccltune.measurement import Launch, Outcome, PayloadMeasurement
from nccltune.search.records import launch_from_record, record_from_launch

SIZES = (14336, 43008, 67108864)


def drawn_payload(rng: random.Random, size_bytes: int) -> PayloadMeasurement:
    """A payload with raw samples, or with a summary alone."""
    if rng.random() < 0.3:
        return PayloadMeasurement(size_bytes, rng.uniform(1.0, 1e4), None, None)
    samples = [rng.uniform(1.0, 1e4) for _ in range(rng.randint(1, 15))]
    return PayloadMeasurement.from_samples(size_bytes, samples, is_data_ok=rng.random() < 0.8)


def drawn_launch(rng: random.Random) -> Launch:
    """A launch with anything in it that one can have."""
    names = rng.sample(["NCCL_PROTO", "NCCL_ALGO", "NCCL_NTHREADS"], rng.randint(0, 3))
    sizes = rng.sample(SIZES, rng.randint(0, len(SIZES)))
    return Launch(
        settings={name: str(rng.randint(0, 9)) for name in names},
        outcome=rng.choice(list(Outcome)),
        payloads=tuple(drawn_payload(rng, size) for size in sizes),
        message=rng.choice(["", 'rank 1 died of SIGFPE: "quoted", größer\nsecond line']),
        is_pruned=rng.random() < 0.5,
        phases_s={"start": rng.random(), "measure": rng.random()},
        memory_bytes=tuple(rng.randint(0, 1 << 34) for _ in range(rng.randint(0, 2))),
        failed_rank=rng.choice([None, 0, 7]),
        duration_s=rng.random(),
        gathers=tuple(drawn_payload(rng, size) for size in rng.sample(SIZES, rng.randint(0, 2))),
    )


@pytest.mark.parametrize("seed", range(40))
def test_launch_survives_the_way_through_the_journal_unchanged(seed: int) -> None:
    launch = drawn_launch(random.Random(seed))

    line = json.dumps(record_from_launch(launch), allow_nan=False)

    assert launch_from_record(json.loads(line)) == launch


def test_launch_without_gathers_is_recorded_as_ever() -> None:
    assert "gathers" not in record_from_launch(Launch({}, Outcome.OK))


def test_launch_from_record_keeps_the_order_of_payloads() -> None:
    payloads = tuple(PayloadMeasurement(size, 1.0, None, None) for size in (86016, 14336, 43008))

    launch = launch_from_record(record_from_launch(Launch({}, Outcome.OK, payloads)))

    assert [one.size_bytes for one in launch.payloads] == [86016, 14336, 43008]


def test_launch_from_record_of_something_else_raises_what_a_damaged_journal_raises() -> None:
    record = record_from_launch(Launch({}, Outcome.OK))

    with pytest.raises(KeyError):
        launch_from_record({})
    with pytest.raises(ValueError, match="nonsense"):
        launch_from_record(record | {"outcome": "nonsense"})
