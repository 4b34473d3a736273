"""The ``modalities`` command. Each command's module is imported when it is called, so that ``--help`` stays instant."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import re
import sys
import time
import traceback
import warnings
from importlib.metadata import version
from typing import Any

import click

from modalities.exceptions import ConfigError, Interrupted, RunsPart, UserError

_COMMANDS = {
    "run": ("modalities.cli.run:run", "Train from a YAML config."),
    "warmstart": ("modalities.cli.run:warmstart", "Train on from a checkpoint that the config itself loads."),
    "check": ("modalities.cli.check:check", "Check a config without starting anything."),
    "config": ("modalities.cli.config:config", "Show, compare, draw, explain and upgrade configs."),
    "generate": ("modalities.cli.generate:generate", "Continue a text with a trained model."),
    "components": ("modalities.cli.components:components", "List components, or show one with its fields."),
    "checkpoint": ("modalities.cli.checkpoint:checkpoint", "List, inspect, verify, compare and mend checkpoints."),
    "data": ("modalities.cli.data:data", "Index and pack training data."),
}

EXIT_USER_ERROR = 2
EXIT_LOST_ANOTHER_RANK = 3
"""Of a rank, told to the launcher only."""

_NO_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
"""What the user's disk says when it is full or closed to us."""


_STORES = ("botocore", "aiobotocore", "s3fs", "gcsfs", "google", "adlfs", "azure", "aiohttp")
"""Libraries by which fsspec reaches stores of objects; each has exceptions of its own."""

_LOST_CONNECTION = re.compile(r"gloo.*(?:Connection (?:closed|reset) by peer|Broken pipe)|remote process exited")
"""What gloo and NCCL say when another rank has gone."""


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module_name, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module_name), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("modalities"), prog_name="modalities")
@click.option("--debug", is_flag=True, help="Show the traceback of errors, and debug messages.")
def cli(debug: bool) -> None:
    """Train large language models in PyTorch from a YAML file."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the command; exits with 0 when done, 2 for a user's mistake, 1 for anything else."""
    words = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in words
    _configure_logging(debug)
    # the option may stand anywhere, also behind the command that failed
    exit_code = _run([word for word in words if word != "--debug"], debug)
    if exit_code and "RANK" in os.environ:
        # gloo's threads of a job that failed now and then abort the interpreter's exit, which would hide the exit code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


def _run(words: list[str], debug: bool) -> int:
    try:
        outcome: Any = cli.main(args=words, prog_name="modalities", standalone_mode=False)
        return outcome if isinstance(outcome, int) else 0
    except click.exceptions.Abort:
        return _interrupted("interrupted")
    except click.ClickException as error:
        error.show()
        return EXIT_USER_ERROR
    except UserError as error:
        _report(_text_of(error), debug)
        _let_rank_zero_speak()
        return EXIT_USER_ERROR
    except RunsPart as parted:
        _report(str(parted), debug)
        _let_rank_zero_speak()
        return 1
    except Interrupted as stopped:
        return _interrupted(str(stopped), 0 if stopped.is_preemption else 1)
    except KeyboardInterrupt:
        return _interrupted("interrupted")
    except BrokenPipeError:
        return 1
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_WRITING:
            verb = "open" if error.errno == errno.EACCES else "write"
            _report(f"cannot {verb} {error.filename or 'a file'}: {error.strerror}", debug)
            return EXIT_USER_ERROR
        if type(error).__module__.partition(".")[0] in _STORES:
            _report(f"the store of objects answers: {error}; check the URL, the credentials and the network", debug)
            return EXIT_USER_ERROR
        if isinstance(error, RuntimeError) and _LOST_CONNECTION.search(str(error)) and not debug:
            return _lost_another_rank(str(error).partition("\n")[0])
        _mark_rank()
        traceback.print_exc()
        return 1


def _text_of(error: UserError) -> str:
    """The message, with colours on a terminal."""
    if isinstance(error, ConfigError) and error.faults and "NO_COLOR" not in os.environ and sys.stderr.isatty():
        from modalities.config.faults import report

        return report(error.faults, color=True)
    return str(error)


def _report(message: str, debug: bool) -> None:
    """One message per job, not one per rank."""
    if debug:
        traceback.print_exc()
    if os.environ.get("RANK", "0") == "0" or message.startswith(f"rank {os.environ.get('RANK')}:"):
        click.echo(message if message.startswith(("error", "warning", "\x1b")) else f"error: {message}", err=True)


def _let_rank_zero_speak() -> None:
    """The launcher ends rank 0 when another rank leaves."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(1)


def _interrupted(message: str, exit_code: int = 1) -> int:
    if os.environ.get("RANK", "0") == "0":
        click.echo(message, err=True)
    return exit_code


def _lost_another_rank(cause: str) -> int:
    """Ours under --nproc is the launcher, which knows which rank is the cause, and tells."""
    from modalities.run_request import NUM_PROCESSES_VARIABLE

    if NUM_PROCESSES_VARIABLE not in os.environ:
        click.echo(f"rank {os.environ.get('RANK', '0')} lost another rank, which tells why it ended: {cause}", err=True)
        return 1
    return EXIT_LOST_ANOTHER_RANK


def _mark_rank() -> None:
    if "RANK" in os.environ:
        click.echo(f"rank {os.environ['RANK']} failed:", err=True)


def _configure_logging(debug: bool) -> None:
    level = logging.DEBUG if debug else logging.INFO
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    logging.getLogger("modalities").setLevel(level)
    # what torch announces of its own interface is for us to heed, not for the user
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
    for message in (
        ".*_get_pg_default_device.* will be deprecated",
        "Multiple backends are registered with this ProcessGroup",
        "Please use DTensor instead",
    ):
        warnings.filterwarnings("ignore", message=message)


if __name__ == "__main__":
    main()
