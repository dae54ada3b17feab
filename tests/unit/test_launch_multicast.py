"""What is said to have run is what ran: NVLink multicast is off in every rank."""

from __future__ import annotations

import pytest

from nccltune.bench.host import rank_environ
from tests.support.fake_nvml import nvswitch_host
from tests.support.gpu_launches import host_putter, launch, opened

NVLS = "NCCL_NVLS_ENABLE"


@pytest.mark.parametrize(
    ("flags", "environ", "value"),
    [
        ("--tp 8", {}, None),
        ("--tp 8", {NVLS: "0"}, None),
        ("--tp 8", {NVLS: "1"}, "1"),
        ("--tp 4 --base-gpu-id 4", {NVLS: "2"}, "2"),
        ("--tp 8 --enable-nccl-nvls", {}, "1"),
        ("--tp 8 --enable-nccl-nvls", {NVLS: "0"}, "1"),
        ("--tp 2 --enable-symm-mem", {}, "1"),
        ("", {}, None),
        ("", {NVLS: "1"}, "1"),
    ],
)
@pytest.mark.parametrize("is_in_command", [False, True])
def test_multicast_stays_off_and_is_told_where_the_launch_turns_it_on(
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    environ: dict[str, str],
    value: str | None,
    is_in_command: bool,
) -> None:
    host_putter(monkeypatch)(nvswitch_host(8))
    words = " ".join(f"{name}={text}" for name, text in environ.items())
    for name, text in () if is_in_command and flags else environ.items():
        monkeypatch.setenv(name, text)
    before = f"env {words}" if is_in_command and words else ""

    source, session = opened(launch(flags, before) if flags else None)

    told = [text for text in source.warnings if "multicast" in text]
    assert len(told) == (value is not None)
    assert all(f"sets {NVLS}={value}" in text and f"{NVLS}=0" in text for text in told)
    ran = rank_environ(session.base, session.plan, 0, {}, environ={}, conf_names=())
    recorded = {**session.base, **source.pinned}
    assert recorded[NVLS] == "0"
    assert {name: ran[name] for name in recorded} == recorded
