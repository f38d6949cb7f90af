"""The demo with Dagster's UI: sensors build what the local Hub has, and what is pushed to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tensorize_assets.demo.models import MODEL
from tensorize_assets.demo.stage import Root, Say, stage

# It guards nothing: the Hub listens on this machine alone, and the client wants one.
TOKEN = "demo"


def ui(directory: Path, *, root: Root, port: int, hub_port: int, say: Say) -> int:
    """Run Hub, S3 and Dagster until one is told to stop; return Dagster's exit code.

    Raises:
        TensorizeAssetsError: something of it does not start.
    """
    with stage(directory, root, say, hub_port) as (home, hub):
        hub.accept_pushes(directory / "pushes", TOKEN)
        say(f"Dagster: http://127.0.0.1:{port}; its sensors build what the Hub has")
        say(
            f"push a commit: HF_ENDPOINT={hub.endpoint} HF_TOKEN={TOKEN} HF_HUB_DISABLE_XET=1 "
            f"hf upload {MODEL} FOLDER"
        )
        command = [sys.executable, "-m", "dagster", "dev", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--module-name", "tensorize_assets.definitions"]
        # What else there is to say is in the UI, and would be a line every second.
        command += ["--log-level", "warning"]
        # A shell that runs this in the background has SIGINT ignored; Dagster would inherit that,
        # and then not end at a SIGTERM either.
        inherited = signal.signal(signal.SIGINT, signal.SIG_DFL)
        dagster = subprocess.Popen(
            command, cwd=directory, env=os.environ | {"DAGSTER_HOME": str(home)}
        )
        signal.signal(signal.SIGINT, inherited)
        # What ends this process is to end Dagster first: it stops its own processes.
        signal.signal(signal.SIGTERM, lambda number, _: dagster.send_signal(number))
        while True:
            try:
                return dagster.wait()
            except KeyboardInterrupt:
                # The terminal has told Dagster too.
                continue
