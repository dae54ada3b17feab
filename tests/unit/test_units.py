from __future__ import annotations

import pytest

from nccltune.units import busbw_gb_s, format_bytes, parse_size_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4096", 4096),
        ("0", 0),
        ("512B", 512),
        ("64KiB", 65536),
        ("64 MiB", 67108864),
        (" 1GiB ", 2**30),
        ("64kib", 65536),
    ],
)
def test_parse_size_bytes_of_a_clear_size_is_exact(text: str, size_bytes: int) -> None:
    assert parse_size_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("4M", "write 4MiB or 4194304"),
        ("4K", "write 4KiB or 4096"),
        ("4mb", "write 4MiB or 4194304"),
        ("2 GB", "write 2GiB or 2147483648"),
    ],
)
def test_parse_size_bytes_of_an_ambiguous_suffix_says_what_to_write(text: str, advice: str) -> None:
    with pytest.raises(ValueError, match="ambiguous") as refusal:
        parse_size_bytes(text)

    assert advice in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("-1", "negative"),
        ("-4KiB", "negative"),
        ("KiB", "not a size"),
        ("4Kib/s", "not a size"),
        ("1.5MiB", "not a size"),
        ("1e6", "not a size"),
        ("0x10", "not a size"),
        ("1_000", "not a size"),
        ("\u0664\u0660", "not a size"),
        ("9" * 40, "not a size"),
    ],
)
def test_parse_size_bytes_of_anything_else_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refusal:
        parse_size_bytes(text)

    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (14336, "14336 B"),
        (16384, "16 KiB"),
        (43008, "42 KiB"),
        (43009, "43009 B"),
        (1376256, "1344 KiB"),
        (2**20, "1 MiB"),
        (67108864, "64 MiB"),
        (2**30, "1 GiB"),
    ],
)
def test_format_bytes_never_rounds(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize("size_bytes", [16384, 43008, 344064, 67108864, 3 * 2**30])
def test_format_bytes_reads_back_as_the_same_size(size_bytes: int) -> None:
    assert parse_size_bytes(format_bytes(size_bytes)) == size_bytes


def test_busbw_gb_s_of_two_ranks_is_the_algorithm_bandwidth() -> None:
    assert busbw_gb_s(67108864, 250.0, 2) == pytest.approx(268.435456)


def test_busbw_gb_s_of_eight_ranks_counts_fourteen_eighths() -> None:
    assert busbw_gb_s(1_000_000_000, 10_000.0, 8) == pytest.approx(175.0)


def test_busbw_gb_s_of_one_rank_is_zero() -> None:
    assert busbw_gb_s(1024, 1.0, 1) == 0.0


@pytest.mark.parametrize(("time_us", "world_size"), [(0.0, 2), (-1.0, 2), (1.0, 0)])
def test_busbw_gb_s_of_an_impossible_measurement_is_refused(
    time_us: float, world_size: int
) -> None:
    with pytest.raises(ValueError, match="="):
        busbw_gb_s(1024, time_us, world_size)
