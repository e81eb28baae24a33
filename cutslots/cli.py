"""The command line: one function for each command, its options read off the signature by tyro.

Nothing here imports torch before a command runs, so that `cutslots --help` answers at once.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Callable

import tyro

import cutslots


def info() -> None:
    """Print the versions and devices that a bug report should name."""
    import torch

    print(f"cutslots {cutslots.__version__}, Python {platform.python_version()}, {platform.platform()}")
    for package in ("torch", "numpy", "scipy", "cholespy"):
        print(f"  {package:10s} {importlib.metadata.version(package)}")
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"  devices    {torch.get_num_threads()} CPU threads" + "".join(f", {name}" for name in devices))


COMMANDS: dict[str, Callable[..., None]] = {"info": info}


def main() -> None:
    """Runs a command; what the user can mend is said in one sentence, without a traceback."""
    if sys.argv[1:] == ["--version"]:
        print(cutslots.__version__)
        return
    summary = (cutslots.__doc__ or "").split("\n")[0]
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="cutslots", description=summary)
    except (ValueError, TypeError, OSError) as error:
        sys.exit(f"cutslots: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
