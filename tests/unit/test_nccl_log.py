from __future__ import annotations

from pathlib import Path

import pytest

from nccltune.bench.nccl_log import NcclReport, parse_nccl_log

LOGS = Path(__file__).resolve().parents[1] / "data" / "nccl-logs"
PREFIX = "vm:1:2 [0] NCCL INFO "


def report_of(name: str) -> NcclReport:
    return parse_nccl_log((LOGS / name).read_text(encoding="utf-8").splitlines())


def report(*lines: str) -> NcclReport:
    return parse_nccl_log(PREFIX + line for line in lines)


def test_parse_nccl_log_of_nvlink_host_tells_all() -> None:
    assert report_of("nvlink-2x-h200.log") == NcclReport(
        used={43008: "ring LL, 5 channels"},
        confirmed={"NCCL_NVLS_ENABLE": "0"},
        transports=frozenset({"P2P"}),
        is_ll128_offered=True,
    )


def test_parse_nccl_log_of_two_ranks_on_one_gpu_tells_what_was_taken() -> None:
    found = report_of("two-ranks-one-gpu.log")

    assert found.used == {
        4: "ring LL, 1 channel",
        14336: "ring LL, 1 channel",
        43008: "ring LL, 2 channels",
    }
    assert found.confirmed == {
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_HOSTID": "n0",
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_PROTO": "allreduce:LL",
    }
    assert found.is_ll128_offered is False
    assert found.transports == frozenset()


def test_extracts_are_short_and_name_no_host() -> None:
    for path in LOGS.glob("*.log"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 60
        assert not any("eth0" in line or "/tmp" in line for line in lines)


@pytest.mark.parametrize(
    ("line", "used"),
    [
        (
            "AllReduce: 67108864 Bytes -> Algo TREE proto SIMPLE channel{Lo..Hi}={0..23}",
            "tree Simple, 24 channels",
        ),
        (
            "AllReduce: 67108864 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={4..4}",
            "ring LL128, 1 channel",
        ),
        (
            "AllReduce: 67108864 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1} "
            "cgaClusterSize 4",
            "ring LL, 2 channels",
        ),
        (
            "AllReduce [Symmetric]: 67108864 Bytes -> Kernel AllReduce_AGxLL_R nchannels 4 "
            "nthreads 512 nWorks 1",
            "AllReduce_AGxLL_R, 4 channels",
        ),
    ],
    ids=["tree", "ll128", "2.31", "symmetric"],
)
def test_parse_nccl_log_choice_is_said_in_words(line: str, used: str) -> None:
    assert report(line).used == {67108864: used}


def test_parse_nccl_log_other_collectives_are_passed_over() -> None:
    line = "AllGather: 96000 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..1}"

    assert report(line).used == {}


def test_parse_nccl_log_last_word_on_a_size_counts() -> None:
    first = "AllReduce: 43008 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}"
    last = "AllReduce: 43008 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..3}"

    assert report(first, last).used == {43008: "tree LL, 4 channels"}


@pytest.mark.parametrize(
    ("line", "transport"),
    [
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "P2P"),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/IPC/read", "P2P"),
        ("Channel 03 : 1[1] -> 0[0] via SHM/direct/direct", "SHM"),
        ("Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0", "NET"),
        ("Channel 01/0 : 0[0] -> 1[0] [send] via NET/Socket/0/Shared", "NET"),
    ],
)
def test_parse_nccl_log_transport_is_named(line: str, transport: str) -> None:
    assert report(line).transports == {transport}


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("NCCL_NTHREADS set by environment to 256.", "NCCL_NTHREADS", "256"),
        ("NCCL_ALGO set by environment to allreduce:Ring", "NCCL_ALGO", "allreduce:Ring"),
        (
            "NCCL_THREAD_THRESHOLDS set by environment to -2 -2 -2 4 -2 -2",
            "NCCL_THREAD_THRESHOLDS",
            "-2 -2 -2 4 -2 -2",
        ),
    ],
)
def test_parse_nccl_log_variable_that_nccl_took_is_confirmed(
    line: str, name: str, value: str
) -> None:
    assert report(line).confirmed == {name: value}


def test_parse_nccl_log_of_nothing_or_noise_says_nothing() -> None:
    noise = ["", "\x00\x01", "AllReduce | 1 2 1 | 1 1 |", "Traceback (most recent call last):"]

    assert parse_nccl_log([]) == NcclReport()
    assert parse_nccl_log(noise) == NcclReport()


def test_parse_nccl_log_first_table_decides_on_ll128() -> None:
    rows = [
        "    AllReduce |" + " 8.0/ 61.1 |" * 3 + " 7.8/ 141.0 | 17.8/ 331.2 | 15.2/ 360.0 |",
        "    AllReduce |" + " 0.0/ 0.0 |" * 9,
    ]

    assert report(*rows).is_ll128_offered is True
    assert report(*reversed(rows)).is_ll128_offered is False
