#!/bin/sh
# Starts the container's command under the active NCCL profile, as the same process: signals and the
# exit status are the command's own. Where nccltune cannot run at all, the command starts without it.
set -eu

if [ "$#" -eq 0 ]; then
    echo "${0##*/}: no command: give the container the server's launch command" >&2
    exit 125
fi
if ! nccltune --version >/dev/null 2>&1; then
    echo "${0##*/}: nccltune does not run here: starting on NCCL's defaults" >&2
    exec "$@"
fi
exec nccltune run -- "$@"
