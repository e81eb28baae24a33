"""The command line: one function for each command, its options read off the signature by tyro.

Nothing here imports torch before a command runs, so that `cutslots --help` answers at once.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

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


def generate(
    family: tyro.conf.Positional[Literal["plain", "textured", "ood", "camo", "moving"]],
    out: Path,
    count: int = 100,
    size: int = 128,
    split: Literal["train", "val", "test"] = "train",
    seed: int = 0,
    overwrite: bool = False,
) -> None:
    """Write built-in scenes as files: images, masks, ground truth, a contact sheet.

    Args:
        family: Which scenes.
        out: The folder to write to. One that an interrupted run of the same command has left is gone on with.
        count: How many scenes, from number 0 on.
        size: The side of the pictures, in pixels.
        split: A number means another scene in each split.
        seed: Another seed, other scenes.
        overwrite: Empty the folder first if it holds something else.
    """
    from cutslots.scenes import Scenes, files

    if count < 1:
        raise ValueError(f"--count is {count}; expected at least 1")
    scenes = Scenes(family, split, size, seed, count)
    files.generate(scenes, out, overwrite)
    print(f"wrote {count} scenes to {out}; see {out / 'contact_sheet.png'}")


COMMANDS: dict[str, Callable[..., None]] = {"generate": generate, "info": info}


def main() -> None:
    """Runs a command; what the user can mend is said in one sentence, without a traceback."""
    if sys.argv[1:] == ["--version"]:
        print(cutslots.__version__)
        return
    summary = (cutslots.__doc__ or "").split("\n")[0]
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="cutslots", description=summary)
    except OSError as error:
        sys.exit(f"cutslots: {error.filename}: {error.strerror}" if error.filename else f"cutslots: {error}")
    except (ValueError, TypeError) as error:
        sys.exit(f"cutslots: {error}")
    except KeyboardInterrupt:
        sys.exit("cutslots: interrupted; the same command goes on from here")
