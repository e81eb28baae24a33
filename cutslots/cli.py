"""The command line: one function for each command, its options read from the signature by tyro.

Nothing here imports torch before a command runs, so that `cutslots --help` answers at once. `cutslots train` and
`cutslots pretrain` have command lines of their own (training/options.py), since their options depend on the parts that
are selected.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import platform
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

import cutslots
from cutslots.files import Notice, escape_unprintable
from cutslots.models.associations import Association
from cutslots.models.mask_kinds import MaskKind, VideoMaskKind

Split = Literal["train", "val", "test"]
PublishedDataset = Literal[
    "clevr",
    "clevrtex",
    "clevrtex-ood",
    "clevrtex-camo",
    "clevrtex-pbg",
    "clevrtex-vbg",
    "clevrtex-grassbg",
    "movi-a",
    "movi-c",
    "movi-e",
    "coco",
    "voc",
    "davis",
    "ytvis",
]
Accelerator = Literal["auto", "cpu", "cuda", "mps"]
Precision = Literal["auto", "32-true", "bf16-mixed"]
Checkpoint = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
Images = Annotated[
    tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES...", help_behavior_hint="(required)")
]
Out = Annotated[Path, tyro.conf.arg(aliases=["-o"])]
Plugins = Annotated[
    tyro.conf.UseAppendAction[tuple[str, ...]],
    tyro.conf.arg(name="plugin", help="Python file or module that registers parts; may be repeated."),
]


_default_format = warnings.formatwarning


def train(preset: tyro.conf.Positional[str]) -> None:
    """Train a model. Run the same command again to resume an interrupted run.

    Args:
        preset: The name of a preset; `cutslots train --help` lists them, `cutslots train PRESET --help` its options.
    """


def pretrain(preset: tyro.conf.Positional[str]) -> None:
    """Train an encoder on images without labels, for --encoder pretrained. Run the same command again to resume.

    Args:
        preset: The name of a preset; `cutslots pretrain --help` lists them, `cutslots pretrain PRESET --help` its
            options.
    """


def run_training(words: list[str]) -> None:
    """Train with the options of `cutslots train`."""
    _import_fabric()
    from cutslots.training import loop
    from cutslots.training.options import parse_train

    config = parse_train(words)
    with _resumable("train", words):
        loop.train(config)


def run_pretraining(words: list[str]) -> None:
    """Train an encoder with the options of `cutslots pretrain`."""
    _import_fabric()
    from cutslots.training.options import parse_pretrain
    from cutslots.training.pretrain import pretrain

    config = parse_pretrain(words)
    with _resumable("pretrain", words):
        pretrain(config)


def _import_fabric() -> None:
    """Import Lightning Fabric without torchmetrics.

    Fabric imports it for its version alone, and where transformers is installed that takes seconds.
    """
    hides = "torchmetrics" not in sys.modules
    if hides:
        sys.modules["torchmetrics"] = None  # type: ignore[assignment]
    try:
        import lightning_fabric  # noqa: F401
    finally:
        if hides:
            del sys.modules["torchmetrics"]


@contextlib.contextmanager
def _resumable(command: str, words: list[str]) -> Iterator[None]:
    """Exit if training is interrupted; one process of several prints the command that resumes."""
    from cutslots.training.loop import Interrupted

    try:
        yield
    except Interrupted as stopped:
        if stopped.report:
            shown = ["cutslots", command, *(word for word in words if word != "--overwrite")]
            print(f"cutslots: {stopped}\nresume with: {shlex.join(shown)}")
        sys.exit(130 if stopped.report else 0)  # Lightning kills all processes when another than the first fails


def evaluate(
    checkpoint: Checkpoint,
    data: tuple[str, ...] = ("plain",),
    out: Path | None = None,
    split: Split = "test",
    num_images: int | None = None,
    accelerator: Accelerator = "auto",
    devices: int = 1,
    precision: Precision = "auto",
    association: Association | None = None,
    plugins: Plugins = (),
) -> None:
    """Evaluate a checkpoint on datasets: ARI, mIoU, mBO, objects found, tracking metrics, MSE; as tables and a report.

    Args:
        checkpoint: A run folder, a .safetensors file or the name of a checkpoint (`cutslots parts`).
        data: plain, textured, ood, camo, moving; clevrtex:DIR and the like; with numbers of objects as in plain:2-5;
            folders with images/ and masks/.
        out: The folder to write to; by default evaluation/ in the run folder.
        split: Which images. Built-in scenes differ by split. Of a folder, val is every tenth image and test is all.
        num_images: Images of each dataset, a video counting as one; by default all, which is 1,000 for built-in scenes.
        accelerator: Device type.
        devices: Processes, one for each device. The metrics do not depend on it.
        precision: bf16-mixed on CUDA, 32-true elsewhere.
        association: How slots of videos are associated over time: weighted by area, by the learned matching of
            pairs, or by the Hungarian algorithm on inner products (the paper's baseline). area by default.
    """
    _import_fabric()
    from cutslots.devices import make_fabric
    from cutslots.evaluation.evaluate import evaluate

    if num_images is not None and num_images < 1:
        raise ValueError(f"num_images is {num_images}; expected at least 1")
    fabric = make_fabric(accelerator, devices, 1, precision)
    evaluate(checkpoint, data, out, split, num_images, fabric, association, plugins)


def probe(
    checkpoint: Checkpoint,
    data: str = "plain",
    out: Path | None = None,
    num_train: int = 2000,
    num_test: int = 500,
    device: str = "auto",
    plugins: Plugins = (),
) -> None:
    """Measure how well slots predict an object's shape, color, size and position: linear and MLP probes.

    Args:
        checkpoint: A run folder, a .safetensors file or the name of a checkpoint (`cutslots parts`).
        data: plain, textured, ood or camo; with numbers of objects as in plain:2-5.
        out: A JSON file for the scores.
        num_train: Scenes that probes are trained on, of the split val.
        num_test: Scenes that they are scored on, of the split test.
        device: cpu, cuda, cuda:1, mps; by default CUDA where available. Probes are trained on the CPU.
    """
    from cutslots.evaluation.probes import probe

    probe(checkpoint, data, out, num_train, num_test, device, plugins)
    if out is not None:
        print(f"wrote {out}")


def predict(
    checkpoint: Checkpoint,
    images: Images,
    out: Out,
    device: str = "auto",
    masks: MaskKind = "refined",
    resize: Literal["pad", "stretch"] = "pad",
    background: bool = True,
    overwrite: bool = False,
    plugins: Plugins = (),
) -> None:
    """Run inference on images or folders of images: overlay, masks, reconstruction, COCO JSON.

    The checkpoints of the package are trained on rendered scenes, not on photographs. A warning says when images are
    far from the training data.

    Args:
        checkpoint: A run folder, a .safetensors file or the name of a checkpoint (`cutslots parts`).
        images: Images or folders of images, of any mode, up to 178 megapixels.
        out: The folder to write to.
        device: cpu, cuda, cuda:1, mps; by default CUDA where available.
        masks: refined: the posterior of the decoder's masks given the image, similar slots merged, weighed by colors,
            then a minimum cut along the edges of the image, without fragments, with missed objects added. high-recall:
            these, with the background down-weighted, to miss fewer objects. decoder: the decoder's masks unchanged.
        resize: pad keeps the aspect ratio and pads the image to the size of the model; stretch does not keep it.
        background: Write the mask and the annotation of the background, the slot with the most border pixels.
        overwrite: Replace what an earlier prediction wrote to the folder.
    """
    # Before torch is imported: threads that wait by spinning take the cores from those they wait for. On two busy cores
    # that took two to four times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from cutslots.inference.predict import predict

    if not predict(checkpoint, images, out, device, overwrite, masks, resize, plugins, background):
        sys.exit(1)


def track(
    checkpoint: Checkpoint,
    video: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="VIDEO")],
    out: Out,
    device: str = "auto",
    masks: VideoMaskKind = "refined",
    association: Association | None = None,
    resize: Literal["pad", "stretch"] = "pad",
    overlay: Literal["auto", "mp4", "gif", "none"] = "auto",
    background: bool = True,
    overwrite: bool = False,
    plugins: Plugins = (),
) -> None:
    """Track the objects in a video: overlay video, masks of every frame, tracks as JSON.

    The checkpoints of the package are trained on rendered scenes, not on recorded videos. A warning says when a video
    is far from the training data.

    Args:
        checkpoint: A run folder, a .safetensors file or the name of a checkpoint (`cutslots parts`).
        video: A video file (with the video extra), a GIF or other animated image, or a folder of frames.
        out: The folder to write to.
        device: cpu, cuda, cuda:1, mps; by default CUDA where available.
        masks: refined: the posterior of the decoder's masks given the frame, similar slots merged in all frames, then a
            minimum cut along the edges of the frame; takes two passes. decoder: the decoder's masks unchanged.
        association: How slots are associated over time: weighted by area, by the learned matching of pairs, or by the
            Hungarian algorithm on inner products. area by default.
        resize: pad keeps the aspect ratio and pads frames to the size of the model; stretch does not keep it.
        overlay: The format of the overlay video; by default MP4 where PyAV is installed, else GIF.
        background: Write the masks and the track of the background, the slot with the most border pixels.
        overwrite: Replace what an earlier command wrote to the folder.
    """
    from cutslots.inference.track import track

    track(checkpoint, video, out, device, association, overlay, overwrite, resize, plugins, masks, background)


def segment(
    image: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE")],
    scribbles: Path,
    out: Out,
    capacity: float = 40.0,
    tolerance: float = 1e-3,
    overwrite: bool = False,
) -> None:
    """Segment a photograph by scribbles, without training: labels, soft masks, overlay.

    Color models of the marks and the edges of the image give the weights of a minimum cut.

    Args:
        image: A photograph, or any image.
        scribbles: An image of the same size, best a PNG. Every color marks one label; black or transparent pixels are
            not marked.
        out: The folder to write to.
        capacity: How strongly neighbors of one color are held together. Larger values give smoother outlines.
        tolerance: The iterations stop at this duality gap, relative to the value of the cut problem.
        overwrite: Replace what an earlier command wrote to the folder.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as for predict
    from cutslots.inference.segment import segment_file

    segment_file(image, scribbles, out, capacity, tolerance, overwrite)


def export(
    checkpoint: Checkpoint,
    out: Out,
    batch_size: int | None = None,
    overwrite: bool = False,
    plugins: Plugins = (),
) -> None:
    """Write a model of images as an ONNX file, for runtimes without PyTorch.

    Args:
        checkpoint: A run folder, a .safetensors file or the name of a checkpoint (`cutslots parts`).
        out: The file to write, such as model.onnx.
        batch_size: Images of a batch; any number by default.
        overwrite: Replace the file if it exists.
    """
    from cutslots.inference.export import export

    export(checkpoint, out, batch_size, overwrite, plugins)


def app(
    checkpoints: tyro.conf.Positional[tuple[str, ...]] = (),
    host: str = "127.0.0.1",
    port: int = 7860,
    device: str = "auto",
    plugins: Plugins = (),
) -> None:
    """Serve a web page to try models and cuts: discover objects, select and merge slots, segment by scribbles.

    Args:
        checkpoints: Checkpoints to choose from besides those of the package: run folders or .safetensors files.
        host: Address to listen on; by default this machine only. With 0.0.0.0 everybody who can reach the machine may
            choose among the listed checkpoints, but name no files. Requests to other host names are refused.
        port: Port to listen on; 0 takes any free port.
        device: cpu, cuda, cuda:1, mps; by default CUDA where available.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as for predict
    from cutslots.app.server import serve

    serve(checkpoints, host, port, device, plugins)


def generate(
    family: tyro.conf.Positional[Literal["plain", "textured", "ood", "camo", "moving"]],
    out: Out,
    count: int = 100,
    image_size: tuple[int, int] = (128, 128),
    split: Split = "train",
    seed: int = 0,
    num_objects: tuple[int, int] = (3, 10),
    variation: Literal["none", "v1"] = "none",
    overwrite: bool = False,
) -> None:
    """Write built-in scenes as files: images, masks, ground truth, a contact sheet.

    Args:
        family: The family of scenes.
        out: The folder to write to. Run the same command again to resume.
        count: Number of scenes.
        image_size: Height and width of the images, in pixels.
        split: The scenes of the splits differ.
        seed: The scenes of two seeds differ.
        num_objects: Smallest and largest number of objects in a scene.
        variation: With v1, scenes vary more: light from any side, other cameras, surfaces and exposures.
        overwrite: Replace other scenes in the folder.
    """
    from cutslots.scenes import Scenes, export

    if count < 1:
        raise ValueError(f"count is {count}; expected at least 1")
    scenes = Scenes(family, split, image_size, seed, count, num_objects, variation=variation)
    export.generate(scenes, out, overwrite)
    print(f"wrote {count} scenes to {out}; see {out / 'contact_sheet.png'}")


def prepare(
    dataset: tyro.conf.Positional[PublishedDataset],
    source: Path,
    out: Out,
    size: int | None = None,
    protocol: Literal["clevrtex", "slot-attention", "savi", "videosaur", "dinosaur", "spot"] | None = None,
    workers: int | None = None,
    overwrite: bool = False,
) -> None:
    """Read a published dataset, crop and resize it, and write a cache to train from: --data clevrtex:OUT.

    Args:
        dataset: The dataset.
        source: clevr: the .tfrecords file. clevrtex: the unpacked folder, or that of the tar or zip files. movi-a,
            movi-c, movi-e: the TFDS folder. coco, voc, davis, ytvis: the unpacked folder.
        out: The folder to write to. Run the same command again to resume.
        size: Height and width of the images, in pixels; by default that of the protocol.
        protocol: Whose crop, resizing and splits: clevrtex for clevr, clevrtex and movi-a; slot-attention for clevr;
            savi for movi-a; videosaur for movi-c, movi-e, davis and ytvis; dinosaur for coco, voc, movi-c and movi-e;
            spot for coco and voc. By default the first of these that the dataset has.
        workers: Threads that decode images; by default one for each core.
        overwrite: Replace another cache in the folder.
    """
    from cutslots.data.prepare import prepare
    from cutslots.data.prepared import read_manifest

    if not prepare(dataset, source, out, size, protocol, workers, overwrite):
        print(f"{out} is up to date")
        return
    manifest = read_manifest(out)
    splits = ", ".join(f"{name} {b - a:,}" for name, (a, b) in manifest["splits"].items())
    print(f"wrote {manifest['rows']:,} rows to {out} ({splits}); use it as --data {dataset}:{out}")


def inspect(
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")],
    num_images: int | None = None,
    out: Path | None = None,
    plugins: Plugins = (),
) -> None:
    """Print what a dataset holds: splits, numbers of objects, label shares; write a contact sheet.

    Args:
        data: A family of scenes, a prepared dataset as in clevrtex:DIR, or a folder with images/ and masks/.
        num_images: Images of each split to read; by default all, and 200 of built-in scenes.
        out: The contact sheet; by default beside a prepared dataset, else in the current folder.
    """
    from cutslots.data.inspect import inspect
    from cutslots.registry import load_plugins

    if num_images is not None and num_images < 1:
        raise ValueError(f"num_images is {num_images}; expected at least 1")
    load_plugins(plugins)
    inspect(data, num_images, out)


def parts(plugins: Plugins = ()) -> None:
    """List the registered parts, the presets and the checkpoints, with one line each."""
    from cutslots.listing import print_parts

    print_parts(plugins)


def info() -> None:
    """Print the versions and devices that a bug report should name."""
    import torch

    print(f"cutslots {cutslots.__version__}, Python {platform.python_version()}, {platform.platform()}")
    for package in ("torch", "numpy", "scipy", "cholespy", "lightning-fabric", "safetensors", "huggingface_hub"):
        print(f"  {package:16s} {importlib.metadata.version(package)}")
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"  devices          {torch.get_num_threads()} CPU threads" + "".join(f", {name}" for name in devices))


COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "pretrain": pretrain,
    "evaluate": evaluate,
    "probe": probe,
    "predict": predict,
    "track": track,
    "segment": segment,
    "export": export,
    "app": app,
    "generate": generate,
    "prepare": prepare,
    "inspect": inspect,
    "parts": parts,
    "info": info,
}


def main() -> None:
    """Run a command. An error that the user can fix is one sentence, without a traceback."""
    words = sys.argv[1:]
    if words == ["--version"]:
        print(cutslots.__version__)
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name may hold bytes that are not text
    warnings.formatwarning = _format_warning
    try:
        _dispatch(words)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else error
        sys.exit("cutslots: " + escape_unprintable(message))
    except (ValueError, TypeError) as error:
        sys.exit(f"cutslots: {escape_unprintable(error)}")
    except KeyboardInterrupt:
        print("cutslots: interrupted", file=sys.stderr)
        sys.exit(130)


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a notice as one line, other warnings as Python shows them."""
    if issubclass(category, Notice):
        return f"cutslots: {escape_unprintable(message)}\n"
    return _default_format(message, category, filename, lineno, line)


def _dispatch(words: list[str]) -> None:
    runs = {"train": run_training, "pretrain": run_pretraining}
    if words and words[0] in runs:
        runs[words[0]](words[1:])
        return
    commands = dict(COMMANDS)
    if any(word.startswith(("--tyro-print-completion", "--tyro-write-completion")) for word in words):
        commands |= _commands_with_all_options()
    summary = (cutslots.__doc__ or "").split("\n")[0]
    tyro.extras.subcommand_cli_from_dict(
        commands, prog="cutslots", description=summary, args=words, sort_subcommands=False
    )


def _commands_with_all_options() -> dict[str, Callable[..., None]]:
    """Return stand-ins for commands with presets, whose signatures hold every preset, for shell completion."""
    from cutslots.training.options import PRETRAIN, TRAIN, command_line

    commands = {}
    for command in (TRAIN, PRETRAIN):
        defaults = {name: command_line(config)() for name, config in command.presets.items()}
        presets: Any = tyro.extras.subcommand_type_from_defaults(defaults, command.summaries, prefix_names=False)

        def stand_in(config: Any) -> None: ...

        stand_in.__doc__ = COMMANDS[command.name].__doc__.split("\n")[0]  # type: ignore[union-attr]
        stand_in.__annotations__["config"] = Annotated[presets, tyro.conf.arg(name="")]
        commands[command.name] = stand_in
    return commands
