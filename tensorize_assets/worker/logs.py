"""The worker's own Python logging, in the shape of vLLM's, which the launcher reads."""

from __future__ import annotations

import logging


def set_up() -> None:
    """Print what libraries log or warn of on stderr, each line with its level.

    Python's default prints bare messages, which nobody can tell from a progress bar. vLLM's own
    loggers keep their handlers.
    """
    logging.basicConfig(
        level=logging.INFO,
        format="(%(processName)s pid=%(process)d) %(levelname)s %(asctime)s "
        "[%(filename)s:%(lineno)d] %(message)s",
        datefmt="%m-%d %H:%M:%S",
    )
    logging.captureWarnings(True)
