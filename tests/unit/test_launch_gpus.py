"""Which GPUs a launch runs on, whoever asks: bench and search, doctor, profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nccltune.bench.session import BenchOptions
from nccltune.cli import launch_path
from nccltune.cli.launch_path import find_path
from nccltune.cli.sources import demand_here, open_gpus
from nccltune.cli.workload import WorkloadOptions, workload_from_options
from nccltune.doctor import gpus as doctor_gpus
from nccltune.errors import BusyError, UsageProblem
from nccltune.host.fingerprint import MatchKind
from nccltune.host.gpu_choice import VARIABLE as VISIBLE
from nccltune.host.launch_gpus import gpus_of_launch
from nccltune.host.match import gpu_groups, match_host, needed_gpus
from tests.support.doctor_hosts import doctor_host
from tests.support.fake_nvml import FakeNvml, fake_uuid, island_host, nvswitch_host
from tests.support.gpu_launches import (
    HostPutter,
    demand_of,
    host_putter,
    launch,
    opened,
    read,
    seen_by,
)

if TYPE_CHECKING:
    from nccltune.doctor import Case
    from nccltune.sglang.command import LaunchCommand

LAUNCHES: list[tuple[int, str, str, list[int]]] = [
    (2, "", "--tp 2", [0, 1]),
    (4, "", "--tp 2 --base-gpu-id 2", [2, 3]),
    (4, "", "--tp 2 --gpu-id-step 2", [0, 2]),
    (4, "", "--tp=2 --base-gpu-id=1 --gpu-id-step=2", [1, 3]),
    (8, "", "--tp 4", [0, 1, 2, 3]),
    (8, "", "--tp 4 --base-gpu-id 4", [4, 5, 6, 7]),
    (8, "", "--tp 4 --gpu-id-step 2", [0, 2, 4, 6]),
    (8, "", "--tp 4 --gpu-id-step 2 --base-gpu-id 1", [1, 3, 5, 7]),
    (8, "", "--tp 2 --base-gpu-id 1 --gpu-id-step 6", [1, 7]),
    (8, "", "--tp 8", list(range(8))),
    (8, "", "--tp 2 --dp-size 2 --base-gpu-id 4", [4, 5]),
    (8, "", "--tp 2 --pp-size 2 --base-gpu-id 4", [4, 5]),
    (8, f"env {VISIBLE}=4,5,6,7", "--tp 4", [4, 5, 6, 7]),
    (8, f"env {VISIBLE}=7,6,5,4,3", "--tp 4 --base-gpu-id 1", [6, 5, 4, 3]),
    (8, f"env {VISIBLE}=7,5,3,1", "--tp 2 --gpu-id-step 2", [7, 3]),
    (8, f"env {VISIBLE}={fake_uuid(6)},{fake_uuid(2)}", "--tp 2", [6, 2]),
    (8, f"numactl -N 1 env {VISIBLE}=6,4 nice", "--tp 2", [6, 4]),
]
IDS = [" ".join((str(count), *words)) for count, *words, _ in LAUNCHES]


@pytest.fixture
def put_host(monkeypatch: pytest.MonkeyPatch) -> HostPutter:
    return host_putter(monkeypatch)


def looked_into(
    folder: Path, nvml: FakeNvml, command: LaunchCommand, environ: Mapping[str, str] | None = None
) -> Case:
    """Return what ``doctor`` looks at for a launch."""
    host = doctor_host(folder)
    host.nvml = nvml
    host.environ = dict(environ or {})
    return host.case(*command.argv)


def predictions(patch: pytest.MonkeyPatch) -> list[str | None]:
    """Return a list that will hold the GPU that each prediction of a path is made for."""
    told: list[str | None] = []
    patch.setattr(
        launch_path, "all_reduce_path", lambda *_, **facts: told.append(facts["gpu_architecture"])
    )
    return told


@pytest.mark.parametrize("base", [0, 1, 4])
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize(
    ("tp", "dp", "pp"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 1, 2), (2, 3, 2)]
)
def test_groups_are_what_sglang_computes(base: int, step: int, tp: int, dp: int, pp: int) -> None:
    # data_parallel_controller.py and engine.py, 0.5.15.post1 and 0.5.23.
    expected = [
        [base + replica * tp * pp * step + stage * tp + rank * step for rank in range(tp)]
        for replica in range(dp)
        for stage in range(pp)
    ]
    flags = f"--tp {tp} --dp-size {dp} --pp-size {pp} --base-gpu-id {base} --gpu-id-step {step}"

    command = launch(flags)

    assert [list(group) for group in gpu_groups(command)] == expected
    assert needed_gpus(command) == max(map(max, expected)) + 1


@pytest.mark.parametrize(("count", "before", "flags", "expected"), LAUNCHES, ids=IDS)
def test_everything_that_chooses_gpus_chooses_those_of_the_launch(
    put_host: HostPutter,
    tmp_path: Path,
    count: int,
    before: str,
    flags: str,
    expected: list[int],
) -> None:
    hardware = put_host(nvswitch_host(count))
    command = launch(flags, before)

    _source, session = opened(command)
    looked_at = looked_into(tmp_path, nvswitch_host(count), command)

    assert [gpu.idx for gpu in session.plan.gpus] == expected
    assert [gpu.idx for gpu in looked_at.gpus] == expected
    alone = replace(command, dp_size=1, pp_size=1)
    found = match_host(session.fingerprint.to_json(), seen_by(command, hardware), alone)
    assert found.kind is MatchKind.IDENTICAL


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("", [5, 4]),
        (f"env {VISIBLE}=3,2,1", [2, 1]),
        (f"env -u {VISIBLE}", [1, 2]),
        ("env -i PATH=/bin", [1, 2]),
        (f"env {VISIBLE}=7,6,5 env -u {VISIBLE}", [1, 2]),
        (f"env -u {VISIBLE} env {VISIBLE}=7,6,5", [6, 5]),
    ],
)
def test_words_of_env_before_the_command_decide_over_the_caller(
    put_host: HostPutter,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    before: str,
    expected: list[int],
) -> None:
    nvml = nvswitch_host(8)
    for idx, gpu in enumerate(nvml.gpus):
        gpu.capability = (9, idx)
    put_host(nvml)
    monkeypatch.setenv(VISIBLE, "6,5,4")
    command = launch("--tp 2 --base-gpu-id 1", before)
    predicted = predictions(monkeypatch)

    _source, session = opened(command)
    find_path(demand_of(command), use_gpus=True)

    assert [gpu.idx for gpu in session.plan.gpus] == expected
    looked_at = looked_into(tmp_path, nvml, command, {VISIBLE: "6,5,4"})
    assert [gpu.idx for gpu in looked_at.gpus] == expected
    assert predicted == [f"sm9{expected[0]}"]


def test_path_is_predicted_for_the_ranks_that_are_measured(
    put_host: HostPutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_host(island_host(8, size=4))
    joined: list[object] = []
    monkeypatch.setattr(
        launch_path, "all_reduce_path", lambda *_, **facts: joined.append(facts["has_full_nvlink"])
    )
    demand = demand_of(launch("--tp 8"))

    for ranks in (None, 8, 4):
        find_path(replace(demand, tp=ranks), use_gpus=True)

    # Four ranks stay on one island of the two.
    assert joined == [False, False, True]


@pytest.mark.parametrize("busy", [[0, 1, 2, 3], [4, 5, 6, 7]])
def test_only_users_of_the_launchs_own_gpus_stand_in_its_way(
    put_host: HostPutter, busy: list[int]
) -> None:
    nvml = nvswitch_host(8)
    for idx in busy:
        nvml.gpus[idx].processes = {4242: 1 << 30}
    put_host(nvml)

    for base in (0, 4):
        command = launch(f"--tp 4 --base-gpu-id {base}")
        if base in busy:
            with pytest.raises(BusyError, match=rf"GPU {base} .* is in use"):
                opened(command)
        else:
            assert opened(command)[1].plan.gpus[0].idx == base


def test_ranks_asked_for_by_option_start_at_the_launchs_first_gpu() -> None:
    command = launch("--tp 4 --base-gpu-id 2 --gpu-id-step 3")

    gpus = gpus_of_launch(read(nvswitch_host(8)), {}, command, 2)

    assert [gpu.idx for gpu in gpus] == [2, 5]


@pytest.mark.parametrize(("base", "expected"), [(1, 1), (3, 3), (4, 0)])
def test_shared_gpu_is_the_launchs_first_where_there_is_such_a_one(
    base: int, expected: int
) -> None:
    command = launch(f"--tp 2 --base-gpu-id {base}")

    gpus = gpus_of_launch(read(nvswitch_host(4)), {}, command, 2, is_shared=True)

    assert [gpu.idx for gpu in gpus] == [expected] * 2


@pytest.mark.parametrize(
    ("count", "before", "flags", "needed"),
    [
        (4, "", "--tp 4 --base-gpu-id 1", 5),
        (8, "", "--tp 8 --gpu-id-step 2", 15),
        (8, f"env {VISIBLE}=0,1,2,3", "--tp 4 --base-gpu-id 4", 8),
        (8, "", "--tp 2 --base-gpu-id 999999999", 10**9 + 1),
        (8, "", "--tp 1000 --gpu-id-step 999999999", 999 * 999_999_999 + 1),
    ],
)
def test_launch_beyond_the_visible_gpus_says_how_many_it_needs(
    put_host: HostPutter, tmp_path: Path, count: int, before: str, flags: str, needed: int
) -> None:
    put_host(nvswitch_host(count))
    command = launch(flags, before)

    with pytest.raises(UsageProblem, match=f"ranks need {needed} GPUs .--base-gpu-id") as caught:
        opened(command)
    looked_at = looked_into(tmp_path, nvswitch_host(count), command)

    assert caught.value.code == "too_few_gpus"
    assert looked_at.gpus == ()
    assert f"needs {needed} GPUs" in str(looked_at.gpu_error)


@pytest.mark.parametrize("flags", ["--tp 4 --dp-size 3", "--tp 4 --pp-size 3", "--tp 16"])
def test_doctor_counts_the_gpus_of_every_replica_and_stage(flags: str) -> None:
    looked_at = doctor_gpus.choose(read(nvswitch_host(8)), {}, launch(flags))

    assert "needs 1" in str(looked_at.error)
    assert "fewer of this host's 8" in str(looked_at.error)


def test_doctor_of_one_rank_looks_at_the_gpu_that_it_runs_on() -> None:
    looked_at = doctor_gpus.choose(read(nvswitch_host(8)), {}, launch("--tp 1 --base-gpu-id 5"))

    assert [gpu.idx for gpu in looked_at.gpus] == [5]


# How many ranks, where nobody said.


@pytest.mark.parametrize(
    ("count", "visible", "ranks"), [(2, None, 2), (4, None, 4), (8, None, 8), (8, "1,3,5,7", 4)]
)
def test_all_gathers_are_those_of_the_ranks_that_are_measured(
    put_host: HostPutter,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    visible: str | None,
    ranks: int,
) -> None:
    put_host(nvswitch_host(count))
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)

    demand = demand_here(WorkloadOptions(), is_shared=False)

    said = workload_from_options(WorkloadOptions(tp=ranks))
    assert demand.workload == said.workload
    assert demand.workload.batches[0].gathers
    assert demand.workload.digest() == workload_from_options(WorkloadOptions()).workload.digest()
    with open_gpus(BenchOptions(rank_count=demand.tp), demand) as (_source, session):
        assert session.plan.rank_count == ranks


@pytest.mark.parametrize("nvml", [nvswitch_host(1), nvswitch_host(0)], ids=["one", "none"])
def test_gpus_that_cannot_be_used_are_left_to_who_opens_them(
    put_host: HostPutter, nvml: FakeNvml
) -> None:
    put_host(nvml)

    assert demand_here(WorkloadOptions(), is_shared=False) == workload_from_options(
        WorkloadOptions()
    )
