"""The verb that answers over HTTP: serve."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from dexter.cli.options import RuntimeOption, parse_runtime
from dexter.errors import UsageError


def serve(
    runs: Annotated[list[str], typer.Argument(help="Run folders, or NAME=FOLDER; the first is the default.")],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 8000,
    workers: Annotated[int, typer.Option(help="Processes that answer; they share the files in memory.")] = 1,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A host name that requests may address; repeat for several.")
    ] = None,
    keep_edits: Annotated[
        bool, typer.Option(help="Write edits of labels to the run folders, or forget them at the end.")
    ] = True,
    keys: Annotated[
        Path | None, typer.Option(help="A file of API keys, one NAME:ROLE:SHA256 per line; SIGHUP reads it again.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="A public address without an API key; needs --allow-host.")
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="A certificate (PEM), to answer over HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The private key of the certificate (PEM).")] = None,
    explanations: Annotated[bool, typer.Option(help="Say why a text has its labels, where a request asks.")] = True,
    training_texts: Annotated[bool, typer.Option(help="Show training and test texts.")] = True,
    log_requests: Annotated[bool, typer.Option("--log-requests", help="One line on stderr per request.")] = False,
    log_format: Annotated[str, typer.Option(help="Lines of the log: text or json.")] = "text",
    runtime: RuntimeOption = "torch",
) -> None:
    """Serve runs over HTTP, with a page at /, until SIGTERM or Ctrl-C; DEXTER_API_KEY or the file of --keys has keys.

    Example: dexter serve runs/pydocs --port 8000
    """
    from dexter.errors import require

    for module in ("fastapi", "uvicorn", "jinja2", "prometheus_client"):
        require(module, extra="serve", purpose="dexter serve")
    from dexter.serving.keys import find_keys
    from dexter.serving.server import name_runs
    from dexter.serving.server import serve as serve_runs
    from dexter.serving.settings import ServeSettings

    if (tls_cert is None) != (tls_key is None):
        raise UsageError("--tls-cert and --tls-key belong together: give both or none")
    if log_format not in ("text", "json"):
        raise UsageError(f"--log-format {log_format}: expected text or json")
    settings = ServeSettings(
        host=host,
        port=port,
        workers=workers,
        tls=None if tls_cert is None or tls_key is None else (tls_cert, tls_key),
        keys=find_keys(keys, os.environ),
        keys_file=keys,
        allowed_hosts=tuple(allow_host or ()),
        keep_edits=keep_edits,
        insecure=insecure,
        explanations=explanations,
        training_texts=training_texts,
        log_requests=log_requests,
        log_format="json" if log_format == "json" else "text",
        runtime=parse_runtime(runtime),
    )
    serve_runs(name_runs(runs), settings)
