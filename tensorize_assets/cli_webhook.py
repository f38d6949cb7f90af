"""`tensorize webhook`: receives what the Hub says about new commits."""

from __future__ import annotations

import logging
import socket
import sys
from contextlib import ExitStack
from os import environ
from typing import Annotated

import typer

from tensorize_assets.cli_common import catalog_path, errors, home_and_catalog, say
from tensorize_assets.core.errors import CatalogError
from tensorize_assets.core.secret_settings import HUB_WEBHOOK_SECRET, secret_setting

_SHORTEST_SECRET = 16


def webhook(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8765,
) -> None:
    """Start builds within seconds of a commit: receive the Hub's webhook at POST /hub.

    The secret that the Hub sends comes from TENSORIZE_ASSETS_WEBHOOK_SECRET, or from the file that
    TENSORIZE_ASSETS_WEBHOOK_SECRET_FILE names. What arrives is believed no further than that a
    repo is worth a look: the sensor hf_revision_sensor, which must run, asks the Hub. Plain HTTP:
    what the internet reaches is a proxy with TLS in front of it. GET /health answers 200.
    """
    with errors():
        secret = _secret()
        home, catalog = home_and_catalog()
        try:
            from tensorize_assets.webhook import followed_repos, webhook_app, webhook_server
        except ModuleNotFoundError as error:
            raise CatalogError(
                f"{error.name} is not installed; install the extra `webhook` of tensorize_assets"
            ) from None
        with ExitStack() as ended:
            # Before Dagster, whose import takes seconds.
            listener = ended.enter_context(_listen(host, port))
            import dagster as dg

            from tensorize_assets.running import open_instance

            _log_to_stderr()
            instance = ended.enter_context(open_instance(home))

            def report(repo: str, commit: str | None) -> None:
                instance.report_runless_asset_event(
                    dg.AssetObservation(
                        asset_key="hf_snapshot",
                        metadata={
                            "repo": repo,
                            "source": "webhook",
                            **({"commit": commit} if commit else {}),
                        },
                    )
                )

            server = webhook_server(webhook_app(secret, catalog_path(home), report))
            at = listener.getsockname()
            shown = f"[{at[0]}]:{at[1]}" if ":" in at[0] else f"{at[0]}:{at[1]}"
            say(f"POST http://{shown}/hub; {len(followed_repos(catalog))} repos are followed")
            try:
                server.run(sockets=[listener])
            except (SystemExit, KeyboardInterrupt):
                # uvicorn raises the signal again, once it has ended in order.
                if not server.started:
                    raise
    say("ended")


def _secret() -> str:
    secret = secret_setting(HUB_WEBHOOK_SECRET, environ)
    if secret is None:
        raise CatalogError(
            f"no secret: set {HUB_WEBHOOK_SECRET} (or {HUB_WEBHOOK_SECRET}_FILE, a file that holds "
            "it) to that of the webhook in the Hub's settings; `openssl rand -hex 32` makes one"
        )
    if not (secret.isascii() and secret.isprintable()):
        raise CatalogError(
            f"{HUB_WEBHOOK_SECRET} has characters that are not ASCII, which the Hub cannot send"
        )
    if len(secret) < _SHORTEST_SECRET:
        raise CatalogError(
            f"{HUB_WEBHOOK_SECRET} has {len(secret)} characters, which can be guessed; it needs "
            f"{_SHORTEST_SECRET}. `openssl rand -hex 32` makes one; the Hub's settings take it too"
        )
    return secret


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise CatalogError(f"cannot listen on {host} port {port}: {error.strerror}") from None


def _log_to_stderr() -> None:
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("tensorize_assets").setLevel(logging.INFO)
