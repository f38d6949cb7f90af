"""The Postgres that tests and benchmarks start."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from tests.postgres import postgres


def test_it_answers_and_leaves_nothing_behind(tmp_path: Path):
    """A server that outlives its test takes a port and memory from every later one."""
    with postgres(tmp_path / "postgres", options=["-cshared_buffers=16MB"]) as server:
        engine = create_engine(server.url)
        with engine.connect() as connection:
            assert "16MB" == connection.execute(text("SHOW shared_buffers")).scalar_one()
            assert "dagster" == connection.execute(text("SELECT current_database()")).scalar_one()
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        # The connection stays open: the server does not wait for it.
    assert [] == [process for process in family if process.is_running()]
    engine.dispose()


def test_another_password_is_refused(tmp_path: Path):
    """Tests of passwords and of their files mean something only then."""
    with postgres(tmp_path / "postgres", password="mine") as server:
        url = server.url.replace("mine", "other")
        with pytest.raises(OperationalError, match="password authentication failed"):
            create_engine(url).connect()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_as_root_it_runs_as_nobody(tmp_path: Path):
    """Postgres refuses to run as root, and CI does."""
    with postgres(tmp_path / "postgres") as server:
        assert "nobody" == psutil.Process(server.pid).username()


def test_what_it_says_when_it_does_not_start_is_told(tmp_path: Path):
    """Of a wrong option a person wants the server's own words."""
    with (
        pytest.raises(RuntimeError, match="no_such_setting"),
        postgres(tmp_path / "postgres", options=["-cno_such_setting=1"]),
    ):
        pass
