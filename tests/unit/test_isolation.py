from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "nccltune.invalid"])
def test_connection_to_another_machine_fails_the_test(host: str) -> None:
    with pytest.raises(pytest.fail.Exception, match="only loopback is allowed"):
        socket.create_connection((host, 80), timeout=1)


def test_connection_over_loopback_works() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(("localhost", server.getsockname()[1]), timeout=5) as client,
    ):
        assert client.getpeername() == server.getsockname()


def test_environment_holds_no_setting_and_no_state_of_the_host(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    names = [name for name in os.environ if name.startswith(("NCCL_", "SGLANG_", "CUDA_VISIBLE"))]

    assert names == []
    assert Path(os.environ["NCCLTUNE_HOME"]).is_relative_to(tmp_path_factory.getbasetemp())
