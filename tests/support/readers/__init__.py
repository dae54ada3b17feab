"""Readers of exported files, each by the grammar of the program that it stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.readers import (
    docker_env_file,
    kubernetes_env,
    nccl_conf,
    posix_shell,
    systemd_environment_file,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

READERS: Mapping[str, Callable[[str], dict[str, str]]] = {
    "env": docker_env_file.read,
    "docker": docker_env_file.read,
    "k8s": kubernetes_env.read,
    "shell": posix_shell.read,
    "systemd": systemd_environment_file.read,
    "nccl-conf": nccl_conf.read,
}
