"""How the command line tells a mistake: one line on stderr, without a traceback, and an exit code."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any

import typer

from rlkit import terminal
from rlkit.errors import BadInput, RlkitError
from rlkit.sigterm import TERMINATED, sigterm_as_exit

# What a user gets wrong about files; anything else (a full disk, say) is the machine's failure.
_USERS = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}

_FULL = {errno.ENOSPC, errno.EDQUOT}

INTERRUPTED = 130  # what a shell expects of a program that Ctrl-C ended: 128 + SIGINT
# No error: somebody wanted it, and what was being done may be complete. rlkit.console says the same.
STOPPED = "rlkit: stopped"


class OneLineErrors(typer.core.TyperGroup):
    """A mistake is told in one line, without a traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _one_line(ctx):
            _refuse_empty(args)
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _one_line(ctx), sigterm_as_exit():
            return super().invoke(ctx)


@contextlib.contextmanager
def _one_line(ctx: Any) -> Iterator[None]:
    try:
        yield
    except RlkitError as error:
        terminal.print_error(str(error))
        raise typer.Exit(error.exit_code) from None
    except typer.BadParameter as error:
        terminal.print_error(f"{_named(error)}; see {_help_of(error, ctx)}")
        raise typer.Exit(BadInput.exit_code) from None
    except typer.TyperException as error:  # an unknown command or option, or one that lacks its value
        message = error.format_message()
        if not message:  # no arguments at all: the help was printed
            raise
        terminal.print_error(f"{message.strip().rstrip('.')}; see {_help_of(error, ctx)}")
        raise typer.Exit(BadInput.exit_code) from None
    except OSError as error:
        # A write names no file; that the disk is full is told all the same.
        if error.filename is None and error.errno not in _FULL:
            raise
        reason = os.strerror(error.errno) if error.errno else str(error)
        terminal.print_error(f"{error.filename}: {reason}" if error.filename else f"cannot write: {reason}")
        raise typer.Exit(BadInput.exit_code if error.errno in _USERS else RlkitError.exit_code) from None
    except KeyboardInterrupt:
        terminal.say(STOPPED, terminal.err)
        raise typer.Exit(INTERRUPTED) from None
    except SystemExit as ended:
        if ended.code != TERMINATED:
            raise
        terminal.say(STOPPED, terminal.err)
        raise typer.Exit(TERMINATED) from None


def _named(error: typer.BadParameter) -> str:
    """The parameter and what is wrong with its value; typer passes pydantic's words on."""
    from pydantic import ValidationError

    if isinstance(error.__cause__, ValidationError) and error.param is not None:
        from rlkit.refusals import refusals

        return f"{max(error.param.opts, key=len)}: {refusals(error.__cause__)[0][1].rstrip('.')}"
    return error.format_message().strip().rstrip(".")


def _help_of(error: Any, ctx: Any) -> str:
    return f"{(getattr(error, 'ctx', None) or ctx).command_path} --help"


def _refuse_empty(args: list[str]) -> None:
    """An empty value, most often a shell variable that is not set, would be taken for the current folder."""
    for before, argument in zip(["", *args], args, strict=False):
        option, separator, value = argument.partition("=")
        if not argument:
            where = f"{before}: its value" if before.startswith("-") else "an argument"
            raise BadInput(f"{where} is empty ('')")
        if option.startswith("--") and separator and not value:
            raise BadInput(f"{option}: its value is empty ('')")
