"""``python -m lightning_moeclip explain | verify | doctor``: what the package says about your model and machine."""

import argparse
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

_ABOUT = "What the package says about your model and your machine."
_COMMANDS = {
    "explain": "who reduces each parameter, over which ranks and by what it is divided",
    "verify": "train your module on several ranks and on one, in float64, and compare",
    "doctor": "look at versions, machine and process groups",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        1 when something is unreduced or wrong, else 0; 2 for input that cannot be used or judged, and for any other
        failure, which comes with its traceback.
    """
    parser = argparse.ArgumentParser(prog="python -m lightning_moeclip", description=_ABOUT)
    commands = parser.add_subparsers(dest="command", required=True)
    given = next(iter(sys.argv[1:] if arguments is None else arguments), "")
    for name, told in _COMMANDS.items():
        command = commands.add_parser(name, help=told, description=told)
        if given in _COMMANDS and name != given:
            continue  # doctor must run where what the others import cannot
        module = import_module(f"lightning_moeclip.diagnosis.{name}_command")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    try:
        return args.run(args)
    except (ValueError, TypeError, ImportError) as error:
        print(f"{args.command}: {error}", file=sys.stderr)
    except Exception as error:  # Python would exit with 1, which says that something was found
        traceback.print_exc()
        print(f"{args.command}: it failed with {type(error).__name__}, and found nothing out.", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
