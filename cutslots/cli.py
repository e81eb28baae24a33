"""The command line: one function for each command, its options read off the signature by tyro.

Nothing here imports torch before a command runs, so that `cutslots --help` answers at once.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import platform
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

import cutslots
from cutslots.disk import one_line
from cutslots.presets import PRESETS, TrainConfig


def info() -> None:
    """Print the versions and devices that a bug report should name."""
    import torch

    print(f"cutslots {cutslots.__version__}, Python {platform.python_version()}, {platform.platform()}")
    for package in ("torch", "numpy", "scipy", "cholespy", "lightning-fabric", "safetensors", "huggingface_hub"):
        print(f"  {package:16s} {importlib.metadata.version(package)}")
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"  devices          {torch.get_num_threads()} CPU threads" + "".join(f", {name}" for name in devices))


def generate(
    family: tyro.conf.Positional[Literal["plain", "textured", "ood", "camo", "moving"]],
    out: Path,
    count: int = 100,
    size: int = 128,
    split: Literal["train", "val", "test"] = "train",
    seed: int = 0,
    objects: tuple[int, int] = (3, 10),
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
        objects: How many objects a scene holds, at least and at most.
        overwrite: Empty the folder first if it holds something else.
    """
    from cutslots.scenes import Scenes, files

    if count < 1:
        raise ValueError(f"--count is {count}; expected at least 1")
    scenes = Scenes(family, split, size, seed, count, objects)
    files.generate(scenes, out, overwrite)
    print(f"wrote {count} scenes to {out}; see {out / 'contact_sheet.png'}")


if TYPE_CHECKING:
    Preset = TrainConfig
else:  # a subcommand for each preset, whose options are its numbers
    described = {
        "tiny": "finds objects on two CPU cores in minutes",
        "clevr": "the paper's text, for plain scenes",
        "clevrtex": "the paper's text, for textured scenes",
        "best": "ours for images: placed slots, wider sight, textures that rise",
        "released": "what the authors' code does where it differs",
        "movi": "the paper's text, for pairs of frames of films",
        "movi11": "ours for films: more slots, a cheaper network, one slot for the ground",
    }
    Preset = tyro.conf.OmitArgPrefixes[
        tyro.extras.subcommand_type_from_defaults(PRESETS, described, prefix_names=False)
    ]


def train(config: Preset) -> None:
    """Learn to find objects. The same command again goes on with a run that was interrupted."""
    from cutslots import train

    try:
        train.train(config)
    except train.Interrupted as stopped:
        if stopped.tell:
            words = ["cutslots", *(word for word in sys.argv[1:] if word != "--overwrite")]
            print(f"cutslots: {stopped}\nthis command goes on from there: {shlex.join(words)}")
        sys.exit(130 if stopped.tell else 0)  # Lightning kills all processes when another than the first fails


def evaluate(
    weights: tyro.conf.Positional[str],
    data: tuple[str, ...] = ("plain",),
    out: Path | None = None,
    split: Literal["train", "val", "test"] = "test",
    images: int | None = None,
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    devices: int = 1,
    precision: Literal["auto", "32-true", "bf16-mixed"] = "auto",
    join: Literal["area", "matching", "hungarian"] = "area",
) -> None:
    """Score a model on datasets: ARI, ARI-FG, mIoU, MSE; a table, JSON, a CSV of every image and a page of pictures.

    Args:
        weights: A run folder, a .safetensors file or the name of shipped weights.
        data: plain, textured, ood, camo, moving; clevrtex:DIR and the like; with numbers of objects as in plain:2-5;
            folders with images/ and masks/.
        out: Where to write; by default evaluation/ in the run folder.
        split: Which images: of scenes, another set for each; of folders, val is every tenth image and test is all.
        images: How many of each dataset, films counting as one; by default all, which is 1,000 of scenes.
        accelerator: Where to run.
        devices: Processes, one for each device. The scores do not depend on it.
        precision: bf16-mixed on CUDA, 32-true elsewhere.
        join: How slots of films are joined over time: weighted by area (ours), by the learned matching of pairs, or by
            the Hungarian algorithm on inner products (the paper's baseline).
    """
    from cutslots.devices import make_fabric
    from cutslots.evaluate import evaluate

    if images is not None and images < 1:
        raise ValueError(f"images is {images}; expected at least 1")
    fabric = make_fabric(accelerator, devices, 1, precision)
    evaluate(weights, data, out, split, images, fabric, join)


def predict(
    weights: tyro.conf.Positional[str],
    images: tyro.conf.Positional[Path],
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])],
    device: str = "auto",
    masks: Literal["joined", "eager", "decoder"] = "joined",
    overwrite: bool = False,
) -> None:
    """Find the objects in an image or in all images of a folder: overlay, masks, reconstruction, COCO JSON.

    Args:
        weights: A run folder, a .safetensors file or the name of shipped weights.
        images: A picture or a folder of pictures, of any size and mode.
        out: The folder to write to.
        device: cpu, cuda, cuda:1, mps; by default CUDA where there is one.
        masks: Those read from the decoder's with the picture as evidence, slots that draw the same being joined; these,
            with the ground giving way, to miss fewer things; or the decoder's as they are.
        overwrite: Write over what an earlier prediction left in the folder.
    """
    # Before torch is imported: threads that wait by spinning take the cores from those they wait for. On two busy cores
    # that took two to four times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from cutslots.predict import predict

    if not predict(weights, images, out, device, overwrite, masks):
        sys.exit(1)


def track(
    weights: tyro.conf.Positional[str],
    video: tyro.conf.Positional[Path],
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])],
    device: str = "auto",
    join: Literal["area", "matching", "hungarian"] = "area",
    overlay: Literal["auto", "mp4", "gif", "none"] = "auto",
    overwrite: bool = False,
) -> None:
    """Follow the objects in a video: overlay video, masks of every frame, tracks as JSON.

    Args:
        weights: A run folder, a .safetensors file or the name of shipped weights.
        video: A video file (with the video extra), a GIF or other moving picture, or a folder of frames.
        out: The folder to write to.
        device: cpu, cuda, cuda:1, mps; by default CUDA where there is one.
        join: How slots are joined over time: weighted by area (ours), by the learned matching of pairs, or by the
            Hungarian algorithm on inner products.
        overlay: The kind of the overlay video; by default an MP4 where PyAV is installed, else a GIF.
        overwrite: Write over what an earlier command left in the folder.
    """
    from cutslots.track import track

    track(weights, video, out, device, join, overlay, overwrite)


def prepare(
    dataset: tyro.conf.Positional[Literal["clevr", "clevrtex", "clevrtex-ood", "clevrtex-camo", "movi-a"]],
    source: Path,
    out: Path,
    size: int = 128,
    splits: Literal["clevrtex", "slot-attention"] = "clevrtex",
    workers: int | None = None,
    overwrite: bool = False,
) -> None:
    """Read a dataset as published, crop and resize it, and write a cache to train from: --data clevrtex:OUT.

    Args:
        dataset: Which.
        source: clevr: the .tfrecords file. clevrtex: the unpacked folder, or that of the tar or zip parts. movi-a: the
            TFDS folder.
        out: The folder to write to. One that an interrupted run of the same command has left is gone on with.
        size: The side of the pictures, in pixels.
        splits: Whose crop and splits. slot-attention's are for clevr: rows 29-220, the first 70,000 to learn from, and
            scenes of at most 6 objects.
        workers: Threads that decode; by default one for each core.
        overwrite: Replace another cache in the folder.
    """
    from cutslots.data.prepare import prepare
    from cutslots.data.prepared import read_manifest

    if not prepare(dataset, source, out, size, splits, workers, overwrite):
        print(f"{out} is up to date")
        return
    manifest = read_manifest(out)
    shared = ", ".join(f"{name} {b - a:,}" for name, (a, b) in manifest["splits"].items())
    print(f"wrote {manifest['rows']:,} rows to {out} ({shared}); use it as --data {dataset}:{out}")
    if manifest["published"] not in (None, manifest["rows"]):
        print(f"the source holds {manifest['rows']:,} of the published {manifest['published']:,}: splits are of these")


def inspect(data: tyro.conf.Positional[str], images: int | None = None, out: Path | None = None) -> None:
    """Print what is in a dataset: splits, numbers of objects, each label's share; write a contact sheet.

    Args:
        data: A family of scenes, a prepared dataset as in clevrtex:DIR, or a folder with images/ and masks/.
        images: How many of each split to look at; by default all, of built-in scenes 200.
        out: The contact sheet; by default beside a prepared dataset, else in the current folder.
    """
    from cutslots.data.inspect import inspect

    if images is not None and images < 1:
        raise ValueError(f"images is {images}; expected at least 1")
    inspect(data, images, out)


def app(
    weights: tyro.conf.Positional[tuple[str, ...]] = (),
    host: str = "127.0.0.1",
    port: int = 7860,
    device: str = "auto",
) -> None:
    """Serve a page to try models and cuts on: slots found, picked, hidden, merged; one picture cut by scribbles.

    Args:
        weights: Models to choose from besides the shipped ones: run folders or .safetensors files.
        host: Whom to answer. By default this machine alone; 0.0.0.0 answers everybody who can reach it, who may then
            choose among the models listed but name no files.
        port: 0 takes any that is free.
        device: cpu, cuda, cuda:1, mps; by default CUDA where there is one.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as for predict
    from cutslots.app import serve

    serve(weights, host, port, device)


COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "evaluate": evaluate,
    "predict": predict,
    "track": track,
    "app": app,
    "generate": generate,
    "prepare": prepare,
    "inspect": inspect,
    "info": info,
}


def main() -> None:
    """Runs a command; what the user can mend is said in one sentence, without a traceback."""
    if sys.argv[1:] == ["--version"]:
        print(cutslots.__version__)
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name may hold bytes that are no text
    summary = (cutslots.__doc__ or "").split("\n")[0]
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="cutslots", description=summary)
    except OSError as error:
        sys.exit("cutslots: " + one_line(f"{error.filename}: {error.strerror}" if error.filename else error))
    except (ValueError, TypeError) as error:
        sys.exit(f"cutslots: {one_line(error)}")
    except KeyboardInterrupt:
        print("cutslots: interrupted", file=sys.stderr)
        sys.exit(130)
