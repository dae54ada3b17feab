from __future__ import annotations

from pathlib import Path

import pytest

from nccltune.errors import ExitCode, HostError, NccltuneError, UsageProblem
from nccltune.host.gpu_choice import choose_gpus, numbers_named
from nccltune.host.hardware import Hardware, read_gpus
from tests.support.fake_nvml import GPU_IS_LOST, FakeNvml, fake_uuid, nvswitch_host


def host(count: int = 8, *, nvml: FakeNvml | None = None) -> Hardware:
    return read_gpus(nvml or nvswitch_host(count), sys_root=Path("/nonexistent"))


def chosen(visible: str | None, rank_count: int | None = None, count: int = 8) -> list[int]:
    return [gpu.idx for gpu in choose_gpus(host(count), visible, rank_count, is_shared=False)]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("0,2", [0, 2]),
        (" 3 , 1 ", [3, 1]),
        ("7,6,5", [7, 6, 5]),
        ("00,01", [0, 1]),
        (f"{fake_uuid(4)},{fake_uuid(2)}", [4, 2]),
        ("GPU-4,GPU-2a", [4, 2]),
        ("GPU-4A, 0", [4, 0]),
        ("gpu-1a000001,3", [1, 3]),
    ],
)
def test_choose_gpus_takes_every_form_in_its_order(
    visible: str | None, expected: list[int]
) -> None:
    assert chosen(visible) == expected


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0,2", {0, 2}),
        (" 3 , 1 ", {3, 1}),
        ("07", {7}),
        (None, None),
        ("", None),
        ("0,", None),
        ("0,-1", None),
        ("0,GPU-1a", None),
        ("MIG-1", None),
        ("²", None),
        ("9" * 5000, None),
    ],
)
def test_numbers_named_are_told_only_where_all_are_numbers(
    visible: str | None, expected: set[int] | None
) -> None:
    assert numbers_named(visible) == expected


@pytest.mark.parametrize(
    ("visible", "rank_count", "expected"),
    [(None, 2, [0, 1]), ("5,4,3", 2, [5, 4]), (None, 8, list(range(8)))],
)
def test_choose_gpus_takes_the_first_of_many(
    visible: str | None, rank_count: int, expected: list[int]
) -> None:
    assert chosen(visible, rank_count) == expected


@pytest.mark.parametrize(
    ("visible", "words"),
    [
        ("0,9", ("no GPU 9", "0, 1, 2, 3, 4, 5, 6, 7", "CUDA would stop there")),
        ("-1", ("-1", "leave it out")),
        ("0,-1,1", ("-1", "leave it out")),
        ("0,1,0", ("GPU 0", "twice")),
        (f"0,{fake_uuid(0)}", ("GPU 0", "twice")),
        ("GPU-0,GPU-0a", ("GPU 0", "twice")),
        ("GPU-ff,1", ("'GPU-ff'", fake_uuid(7))),
        ("GPU-,1", ("'GPU-'", "several", fake_uuid(0))),
        ("0,,1", ("empty", "comma")),
        ("0,1,", ("empty", "comma")),
        ("zero,1", ("'zero'", "neither an index nor")),
        ("0;1", ("'0;1'",)),
        ("1.0,2", ("'1.0'",)),
        ("²,1", ("'²'",)),
    ],
)
def test_choose_gpus_with_bad_variable_says_which_entry(
    visible: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(UsageProblem) as caught:
        chosen(visible)

    message = str(caught.value)
    assert caught.value.code == "bad_visible_devices"
    assert message.startswith(f"CUDA_VISIBLE_DEVICES={visible}: ")
    assert all(word in message for word in words)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("visible", "reason"),
    [
        ("0," * 20000, "is named twice"),
        ("9" * 40000, "neither an index nor"),  # more digits than int() takes
        (f"-{'9' * 40000}", "leave it out"),
        (f"0,{'x' * 40000}", "neither an index nor"),
        (f"0,GPU-{'f' * 40000}", "no GPU has a UUID"),
        (f"MIG-{'f' * 40000}", "no P2P"),
        (f"0,MIG-{'f' * 40000}", "no P2P"),
        (f"99{',1' * 20000}", "there is no GPU 99"),
        (f"GPU-{',GPU-' * 10000}", "several GPUs"),
        (f"0,{' ' * 40000}", "an entry is empty"),
    ],
)
def test_choose_gpus_quotes_no_more_of_a_long_variable_than_one_reads(
    visible: str, reason: str
) -> None:
    with pytest.raises(NccltuneError, match=reason) as caught:
        chosen(visible)

    message = str(caught.value)
    assert len(message) < 1000
    assert message.startswith("CUDA_VISIBLE_DEVICES")
    assert " characters)" in message


def test_choose_gpus_quotes_a_short_variable_whole() -> None:
    visible = f"{'0' * 117},0,"[:120]

    with pytest.raises(UsageProblem) as caught:
        chosen(visible)

    assert str(caught.value).startswith(f"CUDA_VISIBLE_DEVICES={visible}: ")


@pytest.mark.parametrize("visible", ["", "  "])
def test_choose_gpus_with_empty_variable_says_no_gpu_is_visible(visible: str) -> None:
    with pytest.raises(HostError, match="no GPU is visible") as caught:
        chosen(visible)

    assert caught.value.code == "no_gpu_visible"


def test_choose_gpus_without_gpus_says_so() -> None:
    with pytest.raises(HostError) as caught:
        chosen(None, count=0)

    assert caught.value.code == "no_gpu"


@pytest.mark.parametrize("visible", ["MIG-1234", "0,MIG-GPU-8a/1/0", "mig-1"])
def test_choose_gpus_with_mig_instance_refuses_with_the_reason(visible: str) -> None:
    with pytest.raises(HostError, match="no P2P") as caught:
        chosen(visible)

    assert caught.value.code == "mig_unsupported"
    assert "MIG" in str(caught.value)


def test_choose_gpus_with_mig_mode_refuses_only_the_chosen_gpu() -> None:
    nvml = nvswitch_host(4)
    nvml.gpus[2].mig = 1
    hardware = host(nvml=nvml)

    assert len(choose_gpus(hardware, None, 2, is_shared=False)) == 2
    with pytest.raises(HostError, match=r"GPU 2 .* is in MIG mode") as caught:
        choose_gpus(hardware, "1,2", None, is_shared=False)
    assert caught.value.exit_code is ExitCode.HOST


@pytest.mark.parametrize(
    ("visible", "rank_count", "words"),
    [
        (None, 16, ("16 ranks need 16 GPUs", "8 are visible")),
        ("1,2", 4, ("4 ranks need 4 GPUs", "2 are visible")),
        ("3", None, ("2 ranks need 2 GPUs", "1 is visible")),
    ],
)
def test_choose_gpus_with_too_few_names_both_numbers_and_the_way_out(
    visible: str | None, rank_count: int | None, words: tuple[str, ...]
) -> None:
    with pytest.raises(UsageProblem) as caught:
        chosen(visible, rank_count)

    assert caught.value.code == "too_few_gpus"
    assert all(word in str(caught.value) for word in (*words, "--share-gpu"))


@pytest.mark.parametrize("rank_count", [1, 0, -2])
@pytest.mark.parametrize("is_shared", [False, True])
def test_choose_gpus_with_fewer_than_two_ranks_refuses(rank_count: int, is_shared: bool) -> None:
    with pytest.raises(UsageProblem, match="no all-reduce") as caught:
        choose_gpus(host(), None, rank_count, is_shared=is_shared)

    assert caught.value.code == "too_few_ranks"


@pytest.mark.parametrize(
    ("visible", "rank_count", "expected"),
    [(None, 4, [0, 0, 0, 0]), ("3,1", 2, [3, 3]), ("5", None, [5, 5])],
)
def test_choose_gpus_shared_puts_all_ranks_on_the_first(
    visible: str | None, rank_count: int | None, expected: list[int]
) -> None:
    gpus = choose_gpus(host(), visible, rank_count, is_shared=True)

    assert [gpu.idx for gpu in gpus] == expected


def test_choose_gpus_shared_on_mig_gpu_refuses() -> None:
    nvml = nvswitch_host(1)
    nvml.gpus[0].mig = 1

    with pytest.raises(HostError, match="MIG"):
        choose_gpus(host(nvml=nvml), None, 2, is_shared=True)


@pytest.mark.parametrize(("visible", "rank_count"), [("1,0", None), (None, 3)])
def test_choose_gpus_with_lost_gpu_says_why_it_is_missing(
    visible: str | None, rank_count: int | None
) -> None:
    nvml = nvswitch_host(3)
    nvml.gpus[1].errors["handle"] = GPU_IS_LOST

    with pytest.raises(NccltuneError, match="GPU 1 cannot be read"):
        choose_gpus(host(nvml=nvml), visible, rank_count, is_shared=False)


def test_choose_gpus_keeps_nvml_numbers_when_one_is_lost() -> None:
    nvml = nvswitch_host(3)
    nvml.gpus[0].errors["handle"] = GPU_IS_LOST

    gpus = choose_gpus(host(nvml=nvml), "1,2", None, is_shared=False)

    assert [gpu.uuid for gpu in gpus] == [fake_uuid(1), fake_uuid(2)]
