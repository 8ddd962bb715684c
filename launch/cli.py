"""`ringattn COMMAND [options]`: one module of this folder a command, imported when it is called."""

import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "verify": "many ranks give what one rank gives, forward and backward",
    "plan": "a picture of who computes what at which step",
    "trace": "what every rank did last, side by side, after a crash",
    "doctor": "what is here, which backend and transport would answer, what does not work",
}
"""Every command and what it shows; the module of that name holds `main(argv) -> exit code`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code, 2 where there is none of that name.

    Example:
        >>> main(["--help"])
        usage: ringattn COMMAND [options]
        ...
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] in (["-h"], ["--help"]):
        print(_usage())
        return 0
    if not argv or argv[0] not in COMMANDS:
        said = f"unknown command {argv[0]!r}; choose one of {', '.join(COMMANDS)}" if argv else _usage()
        print(said, file=sys.stderr)
        return 2
    return import_module(f"ringattn.launch.{argv[0]}").main(argv[1:])


def _usage() -> str:
    commands = "\n".join(f"  {name:8} {shows}" for name, shows in COMMANDS.items())
    return f"usage: ringattn COMMAND [options]\n\n{commands}\n\nringattn COMMAND --help lists the options of a command."


if __name__ == "__main__":
    raise SystemExit(main())
