"""The command line: its verbs in the order of the flow, its errors and exit codes.

Each verb is a library function; what is heavy is imported where it is used.

Results go to stdout, progress and logs to stderr. An error is one line; `--debug` adds the traceback.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from dexter import __version__
from dexter.cli.options import Settings
from dexter.errors import DexterError, printable
from dexter.processes import read_launch

EXIT_CODES = """Exit codes: 0 ok, 1 bug, 2 usage, 3 data, 4 model or index, 5 resources (disk, memory, permission, a
missing package), 6 diverged, 130 or 143 interrupted (training saves its state first)."""

_VERBS = {
    "demo": "main.demo",
    "train": "train.train",
    "import": "train.import_command",
    "plan": "train.plan",
    "evaluate": "evaluate.evaluate",
    "tune": "evaluate.tune",
    "predict": "predict.predict",
    "index": "index.index_command",
    "export": "index.export",
    "card": "index.card",
    "compare": "evaluate.compare",
    "serve": "predict.serve",
}
"""The function of each verb in the modules of this package, in the order of the flow."""
_GROUPS = {
    "data": "data.data_app",
    "labels": "labels.labels_app",
    "examples": "examples.examples_app",
    "recipes": "train.recipes_app",
}
"""The same of verbs that have verbs of their own."""

log = logging.getLogger("dexter")
_INTERRUPTED = 130
_ClickError: type[Any] = typer.BadParameter.__mro__[2]
"""ClickException, from wherever Typer has it: newer versions carry a copy of click of their own."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dexter {__version__}")
        raise typer.Exit


class _PrintableFormatter(logging.Formatter):
    """Escapes control characters, which names in untrusted files may hold."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).split("\n")))


def main() -> None:
    """Run the command line; turn errors into one line and an exit code."""
    # Threads that wait by spinning make a step up to 40 times slower when another process wants the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = _move_common_options(sys.argv[1:])
    debug = "--debug" in arguments
    try:
        with _termination_as_error():
            verb = next((name for name in arguments if not name.startswith("-")), None)
            code = build_app(verb)(arguments, prog_name="dexter", standalone_mode=False)
        if code == _INTERRUPTED:
            _fail("interrupted", code, debug=False)
        sys.exit(code if isinstance(code, int) else 0)
    except DexterError as error:
        _fail(str(error), error.exit_code, debug=debug)
    except _Terminated:
        _fail("terminated", 128 + signal.SIGTERM, debug=debug)
    except _ClickError as error:
        _fail_usage(error)
    except Exception as error:
        _fail(*_explain(error), debug=debug)


def build_app(verb: str | None = None) -> typer.Typer:
    """Build the command line, with one verb only if that exists: a verb's module takes a while to import."""
    app = typer.Typer(
        help="Dual encoders for extreme multi-label classification: a few right labels out of thousands to millions."
        "\n\nExample: dexter train data.csv --out runs/first && dexter predict runs/first 'a text'",
        epilog=EXIT_CODES,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(common)
    is_known = verb in _VERBS or verb in _GROUPS
    for name, place in _VERBS.items():
        if name == verb or not is_known:
            app.command(name)(_find(place))
    for name, place in _GROUPS.items():
        if name == verb or not is_known:
            app.add_typer(_find(place), name=name)
    return app


def __getattr__(name: str) -> Any:
    """Return the whole command line as `app`, built when it is asked for."""
    if name == "app":
        return build_app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _find(place: str) -> Any:
    """Import what a module of this package has under a name."""
    module, name = place.split(".")
    return getattr(import_module(f"dexter.cli.{module}"), name)


def common(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only warnings and errors on stderr.")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version.")
    ] = False,
) -> None:
    """Options of every verb."""
    # Of several processes that torchrun started, only the first logs.
    quiet = quiet or not read_launch().is_first
    level = logging.DEBUG if debug else logging.WARNING if quiet else logging.INFO
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PrintableFormatter("%(message)s"))
    log.handlers[:] = [handler]
    log.setLevel(level)


def demo(
    out: Annotated[Path, typer.Option(help="Where to put the data, the run and the page.")] = Path("demo"),
    settings: Settings = None,
) -> None:
    """Run the whole flow on built-in data.

    Build, check, baselines, train, evaluate, a plot and a page, and a new label without training.

    Example: dexter demo --out demo
    """
    from dexter.cli.demo import run_demo
    from dexter.config import parse_overrides

    run_demo(out, overrides=parse_overrides(settings or []))


def _move_common_options(arguments: list[str]) -> list[str]:
    """Move --debug and --quiet before the verb, so that they may be given after it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    general = [name for name in ("--debug", "--quiet") if name in arguments[:end]]
    return [*general, *(name for name in arguments[:end] if name not in general), *arguments[end:]]


class _Terminated(BaseException):
    """Raised on SIGTERM; no `Exception`, like KeyboardInterrupt, so that no handler of failures catches it."""


@contextmanager
def _termination_as_error() -> Iterator[None]:
    """Raise an exception on SIGTERM, so that temporary files are removed on the way out."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _explain(error: Exception) -> tuple[str, int]:
    """The message and exit code of an error that is not one of ours."""
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "out of memory" in str(error).lower():
        return "out of memory: use smaller batches or fewer labels, or a machine with more memory", 5
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "transformers"):
        return f"this needs the package {error.name!r}, which is not installed: pip install 'dexter-xmc[train]'", 5
    if isinstance(error, OSError):
        return f"{error.filename or 'input or output'}: {error.strerror or error}", 5
    return f"{type(error).__name__}: {error} (a bug in dexter: --debug shows where)", 1


def _fail(message: str, code: int, *, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exc()
    lines = [printable(" ".join(line.split())) for line in message.splitlines()]
    launch = read_launch()
    rank = f"rank {launch.rank}: " if launch.size > 1 else ""
    print(f"dexter: error: {rank}{lines[0] if lines else 'unknown'}", *lines[1:], sep="\n", file=sys.stderr)
    sys.exit(code)


def _fail_usage(error: Any) -> NoReturn:
    """Report a wrong option or argument in one line; show the help where no verb was given."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(error.exit_code)
    command = context.command_path if context is not None else "dexter"
    message = error.format_message().replace("Value error, ", "")  # which Typer puts before its own words
    _fail(f"{message} (see {command} --help)", error.exit_code, debug=False)
