"""All commands, and the one place that turns errors into a line and an exit code.

0: done. 1: an answer that is a no (nothing fits), or a rank that broke. 2: bad input.
"""

from __future__ import annotations

import os
import sys
from typing import cast

import typer
from pydantic import ValidationError

from meshwright.cli.calibrate import calibrate
from meshwright.cli.check import check
from meshwright.cli.common import BAD_INPUT
from meshwright.cli.compare import compare
from meshwright.cli.doctor import doctor
from meshwright.cli.explain import explain as explain_plan
from meshwright.cli.export_weights import export_weights
from meshwright.cli.imports import import_app
from meshwright.cli.plan import plan
from meshwright.cli.predict import predict
from meshwright.cli.profile import profile
from meshwright.cli.recommend import recommend
from meshwright.cli.schema import schema
from meshwright.cli.show import show
from meshwright.cli.space import space
from meshwright.cli.train import train
from meshwright.cli.trials import trials_of_file
from meshwright.cli.tune import tune
from meshwright.errors import UserError
from meshwright.files import explain

# What all complaints of the option parser are, which has no public name.
_WRONG_USE = cast(type[typer.BadParameter], typer.BadParameter.__base__)

app = typer.Typer(
    name="meshwright",
    help="Finds the fastest hybrid-parallel way to train a Transformer on given devices, and trains with it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (plan, predict, check, recommend, show, space, train, profile, tune, compare, calibrate, schema, doctor):
    app.command()(command)
app.command("explain")(explain_plan)
app.command()(export_weights)
app.command("run-trials", hidden=True)(trials_of_file)
app.add_typer(import_app)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    code = BAD_INPUT
    try:
        ended = app(args=arguments, prog_name="meshwright", standalone_mode=False)
        code = ended or 0  # a number where a command has ended with one
    except _WRONG_USE as error:
        said = error.format_message()
        if "\n" in said:  # the help of a command that was called with nothing
            sys.stderr.write(f"{said}\n")
        elif _is_first_rank():
            _complain(_in_one_line(error, sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        code = error.exit_code
        if not error.on_every_rank or _is_first_rank():
            _complain(str(error))
    except ValidationError as error:
        _complain(explain(error))
    sys.exit(code)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _in_one_line(error: typer.BadParameter, arguments: list[str]) -> str:
    """Return what is wrong with the options of a command, and where all of them are listed."""
    said = error.format_message().rstrip(".")
    if error.ctx is not None:
        where = error.ctx.command_path
    else:  # an option without its value does not know whose it is
        where = " ".join(["meshwright", *(word for word in arguments[:1] if not word.startswith("-"))])
    return f"{where}: {said[:1].lower()}{said[1:]}; {where} --help lists what there is"


def _complain(line: str) -> None:
    """Print an error as one line, whatever names and values are quoted in it (a path may hold line breaks)."""
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
    rank = os.environ.get("RANK")
    sys.stderr.write(f"error: {line}\n" if rank is None else f"error: rank {rank}: {line}\n")
    sys.stderr.flush()
