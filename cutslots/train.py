"""Training: a loop to read from top to bottom. Devices, precision and processes are Lightning Fabric's.

A step's images, learning rate and random numbers follow from (seed, step) alone; state.pt holds the weights and Adam's
moments after some step. So a run that was killed goes on from its newest state to the very weights it would have had.

A run folder:

    run.json            the resolved configuration        metrics.jsonl     loss, speed and scores by step
    config.json         that of the model                 model.safetensors the newest weights
    state.pt            the newest training state         tensorboard/      the same curves, for TensorBoard
    pictures/           what it sees, over time           report.html       all of it on one page
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning_fabric import Fabric
from lightning_fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.nn import functional as F

import cutslots
from cutslots.board import Board
from cutslots.data import Clips, Frames, Images, hold, open_data, open_films
from cutslots.devices import make_fabric, settled
from cutslots.disk import append_line, locked, naming, progress, read_lines, write_atomically
from cutslots.evaluate import judge, look
from cutslots.model import Discovery, as_floats, build, channels_last, load, save, weights_file
from cutslots.presets import TrainConfig
from cutslots.report import Pictures, sheet, write_training
from cutslots.scenes import FAMILIES, Scenes
from cutslots.scenes.dataset import Surfaces
from cutslots.scenes.files import png

LOG_EVERY = 20  # steps between lines of metrics.jsonl; the loss is looked at no sooner, for the device not to wait
MOST_IMAGES = 65_536  # a step
LEAST_BLUR = 0.3  # in pixels; under it a picture stays as it is
FLAT, SPAN = 0.15, 0.3  # the strongest textures of scenes that are nearly flat; how far those of a batch lie apart
MIRROR, STRENGTH, WHICH_NEAR = 1, 7, 8  # what numbers are drawn for, each in a stream of its own
RISING, NEAR = 12_000, 16_000  # scenes whose textures rise, or whose objects are near the ground in colour, at most
# What may differ when a run is gone on with.
NOT_THE_RUN = {"out", "overwrite", "cache", "steps", "minutes", "save_minutes"}
NOT_THE_RUN |= {"accelerator", "devices", "nodes", "compile"}
# What older runs do not name, as it was then.
NEWER = {"flips": False, "start": None, "blur": 0.0, "blur_steps": 0}
NEWER |= {"flat_until": 0, "whole_from": 0, "near": 0.0, "near_from": 0}
WRITTEN = {"metrics.jsonl", "config.json", "model.safetensors", "state.pt", "report.html"}
WRITTEN |= {"tensorboard", "pictures", "evaluation"}


class Interrupted(Exception):
    """Training stopped because it was asked to; the state is saved. One process of several is to tell."""

    def __init__(self, sentence: str, tell: bool) -> None:
        super().__init__(sentence)
        self.tell = tell


def train(config: TrainConfig) -> Path:
    """Runs, or goes on with, a training run; returns its folder. What can be wrong is found before processes start."""
    check(config)
    config = resolved(config)
    folder = cast(Path, config.out)
    if config.start is not None and not _is_begun(folder, config):
        if weights_file(config.start).parent.resolve() == folder.resolve():
            raise ValueError(f"start is {config.start}, in the run folder itself; expected weights that lie elsewhere")
        _started(config)  # what may be wrong with it, before anything is written
    rank: int = rank_zero_only.rank  # type: ignore[attr-defined]
    other = rank > 0 or int(os.environ.get("NODE_RANK", 0)) > 0
    with contextlib.nullcontext() if other else open_run(folder, config):
        fabric = make_fabric(config.accelerator, config.devices, config.nodes, config.precision)
        if other and fabric.global_rank == 0:
            raise ValueError(f"devices is {config.devices} and nodes {config.nodes}; expected as many as were started")
        if config.batch % fabric.world_size:
            raise ValueError(f"batch is {config.batch}; expected a multiple of the {fabric.world_size} processes")
        return _train(config, folder, fabric)


def _train(config: TrainConfig, folder: Path, fabric: Fabric) -> Path:
    images, judged = training_data(config, fabric), validation_data(config, fabric)
    torch.manual_seed(config.seed)
    fresh = config.start is None or (folder / "state.pt").exists()
    raw = channels_last(build(config.model) if fresh else _started(config))
    if config.model.encoder_norm and fabric.world_size > 1:
        if fabric.device.type != "cuda":
            raise ValueError("encoder_norm needs one process or CUDA: elsewhere processes cannot share statistics")
        raw = torch.nn.SyncBatchNorm.convert_sync_batchnorm(raw)
    raw.to(fabric.device)  # before Adam, whose moments follow
    optimizer = torch.optim.Adam(raw.parameters(), config.lr, fused=True)
    state = load_state(folder / "state.pt", raw, optimizer)
    if len({int(step) for step in torch.as_tensor(fabric.all_gather(torch.tensor(state["step"]))).flatten()}) > 1:
        raise ValueError(f"processes found different states in {folder}; expected a disk that all nodes share")
    fast = cast(torch.nn.Module, torch.compile(raw)) if config.compile == "on" else raw
    model, optimizer = fabric.setup(fast, optimizer)

    log, stop = Log(folder, config, fabric, state), Stop(config, fabric)
    others = other_surfaces(config, fabric, len(images), state["step"])
    batches = Batches(images, config, fabric, state["step"], *others)
    last, asked = True, False  # if there is nothing left to do
    started = time.monotonic() - state["seconds"]
    with log, stop, batches:
        for step in range(state["step"], state["step"] if stop.is_over(state["seconds"]) else config.steps):
            for group in optimizer.param_groups:
                group["lr"] = rate(config, step)
            torch.manual_seed((config.seed << 32) + step * fabric.world_size + fabric.global_rank)
            image = next(batches)
            found = model(image)
            difference = found.reconstruction - as_floats(image)
            error = difference.square().mean()
            seen = blurred(difference, blur(config, step)).square().mean()
            fabric.backward(seen + price(config, step) * (1 - found.masks.select(-3, 0)).mean())
            norm = fabric.clip_gradients(model, optimizer, max_norm=config.clip or math.inf, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()

            log.note(error, norm)
            state |= {"step": step + 1, "seconds": time.monotonic() - started}
            last, asked = stop.due(**state), stop.asked(**state)
            if last or state["step"] % LOG_EVERY == 0:
                log.losses(**state, lr=rate(config, step))
            if last or state["step"] % config.eval_every == 0:
                log.judge(state["step"], raw, judged)
            if last or asked or log.save_due(state["step"]):
                log.save(raw, optimizer, state)
            if last or asked:
                break
    fabric.barrier()  # until process 0 has saved
    if asked and not last:
        raise Interrupted(f"stopped after step {state['step']}; all is saved in {folder}", fabric.global_rank == 0)
    return log.finish(raw, judged)


def rate(config: TrainConfig, step: int) -> float:
    """Rises linearly over `warmup` steps, falls exponentially."""
    return config.lr * min(1.0, (step + 1) / max(config.warmup, 1)) * config.decay ** (step / config.decay_steps)


def price(config: TrainConfig, step: int) -> float:
    """What a pixel costs that is not the first slot's: nothing at first, for objects to part; then rising linearly."""
    return config.area_price * min(1.0, max(0.0, (step + 1 - config.area_from) / max(config.area_from, 1)))


def textures(config: TrainConfig, step: int) -> tuple[float, float]:
    """The least and the greatest strength of textures at a step: nearly flat at first, then rising linearly."""
    risen = (step - config.flat_until) / max(config.whole_from - config.flat_until, 1)
    high = FLAT + (1 - FLAT) * min(1.0, max(0.0, risen))
    return max(0.0, high - SPAN), high


def blur(config: TrainConfig, step: int) -> float:
    """The spread of the blur that the error is seen through: falling linearly, then nothing."""
    return config.blur * max(0.0, 1 - step / max(config.blur_steps, 1))


def blurred(x: Tensor, spread: float) -> Tensor:
    """Pictures (..., S, S) under a Gaussian of this spread in pixels, cut off at three; edges are repeated."""
    if spread < LEAST_BLUR:
        return x
    reach = math.ceil(3 * spread)
    at = torch.arange(-reach, reach + 1, device=x.device, dtype=x.dtype)
    weights = torch.exp(-0.5 * (at / spread) ** 2)
    flat = x.reshape(-1, 1, *x.shape[-2:])
    for shape, padding in (((1, -1), (reach, reach, 0, 0)), ((-1, 1), (0, 0, reach, reach))):
        flat = F.conv2d(F.pad(flat, padding, mode="replicate"), (weights / weights.sum()).view(1, 1, *shape))
    return flat.view_as(x)


def resolved(config: TrainConfig) -> TrainConfig:
    """What was left to us, decided."""
    accelerator, precision = settled(config.accelerator, config.precision)
    compiled = {"auto": "on" if accelerator == "cuda" else "off"}.get(config.compile, config.compile)
    name = f"{config.preset}-{Path(config.data).name.replace(':', '-')}-{config.seed}"
    decided: dict[str, Any] = {"accelerator": accelerator, "precision": precision, "compile": compiled}
    return dataclasses.replace(config, out=config.out or Path("runs") / name, **decided)


def check(config: TrainConfig) -> None:
    for name in ("batch", "steps", "lr", "decay", "decay_steps", "eval_every", "eval_images"):
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} is {getattr(config, name)}; expected a positive number")
    if config.batch > MOST_IMAGES:
        raise ValueError(f"batch is {config.batch}; expected at most {MOST_IMAGES:,}")
    if not math.isfinite(config.lr):
        raise ValueError(f"lr is {config.lr}; expected a finite number")
    if not config.clip >= 0:
        raise ValueError(f"clip is {config.clip}; expected zero or more")
    if not 0 <= config.seed < 2**32:
        raise ValueError(f"seed is {config.seed}; expected a whole number from 0 to 2^32 - 1")
    if config.images is not None and config.images < 1:
        raise ValueError(f"images is {config.images}; expected at least 1")
    for name in ("area_price", "area_from", "blur", "blur_steps", "flat_until", "whole_from", "near", "near_from"):
        if not getattr(config, name) >= 0:
            raise ValueError(f"{name} is {getattr(config, name)}; expected zero or more")
    if config.blur > config.model.size:
        raise ValueError(f"blur is {config.blur}; expected at most the side of the pictures, {config.model.size}")
    if config.whole_from and config.flat_until > config.whole_from:
        raise ValueError(f"flat_until is {config.flat_until}; expected at most whole_from, {config.whole_from}")
    if config.near > 1:
        raise ValueError(f"near is {config.near}; expected a share from 0 to 1")
    if config.near and not has_textures(config):
        raise ValueError(f"near is {config.near} and data {config.data!r}; expected built-in scenes that have textures")
    if config.near and FAMILIES[config.data.partition(":")[0]].one_material:
        raise ValueError(
            f"near is {config.near} and data {config.data!r}, whose objects are as near as can be; expected 0"
        )
    if config.area_price and config.model.module == "attention":
        raise ValueError("area_price is set, but Slot Attention has no slot for the ground; expected 0")
    frames = config.model.frames
    with torch.no_grad():
        clip = torch.zeros(1, frames, 3, config.model.size, config.model.size)
        build(config.model).eval()(clip if frames > 1 else clip[:, 0])
    for split in ("train", "val"):
        opened = open_images(config, split, None)
        if frames > 1:
            Clips(opened, frames)


def _is_begun(folder: Path, config: TrainConfig) -> bool:
    return (folder / "state.pt").exists() and not config.overwrite


def _started(config: TrainConfig) -> Discovery:
    """The model that a run begins with, learned elsewhere."""
    model = load(cast(str, config.start)).train()
    if model.config != config.model:
        seen, expected = dataclasses.asdict(model.config), dataclasses.asdict(config.model)
        odd = next(name for name in seen if seen[name] != expected[name])
        raise ValueError(f"start is {config.start}, whose {odd} is {seen[odd]}; expected {expected[odd]}, as the run's")
    return model


# ---------------------------------------------------------------------------------------------------------------- data


def open_images(config: TrainConfig, split: str, count: int | None) -> Any:
    """What the run is about: images; films for a model that sees several frames, and to be judged by where there are
    films. `count` is of images or frames."""
    if config.model.frames == 1:
        images = open_data(config.data, split, config.model.size, count, masks=split != "train")
        return images.films if isinstance(images, Frames) and split == "val" else images
    if config.data.partition(":")[0] not in FAMILIES and (Path(config.data) / "images").is_dir():
        raise ValueError(f"data is {config.data!r}, images; a model of {config.model.frames} frames expects films")
    return open_films(config.data, split, config.model.size, frames=count)


def training_data(config: TrainConfig, fabric: Fabric) -> Images:
    opened = open_images(config, "train", config.images)
    whole = len(opened) if config.images is None else len(open_images(config, "train", None))
    if len(opened) < whole and fabric.global_rank == 0:
        what = "images" if getattr(opened, "frames", 1) == 1 else "films"
        print(f"learning from the first {len(opened):,} of {whole:,} {what} (--images)")
    data = _held(opened, config, fabric, f"{config.data}, train")
    return data if config.model.frames == 1 else Clips(cast(Any, data), config.model.frames)


def has_textures(config: TrainConfig) -> bool:
    """Whether the run is about built-in scenes whose textures we may change."""
    family = config.data.partition(":")[0]
    return config.model.frames == 1 and family in FAMILIES and FAMILIES[family].textured


def other_surfaces(config: TrainConfig, fabric: Fabric, count: int, step: int) -> list[Images | None]:
    """Scenes whose textures rise, and such whose objects are near the ground in colour, if what is left of the run has
    any after this step."""
    if not has_textures(config) or step >= config.steps:
        return [None, None]
    if config.whole_from >= config.steps and fabric.global_rank == 0:
        print(f"textures are whole from step {config.whole_from:,} on (--whole-from); this run ends before")
    rising = step < config.whole_from
    near = config.near > 0 and max(config.near_from, config.whole_from) < config.steps
    return [
        _with_surfaces("rising", min(count, RISING), 1, config, fabric) if rising else None,
        _with_surfaces("near", min(count, NEAR), 2, config, fabric) if near else None,
    ]


def _with_surfaces(surfaces: Surfaces, count: int, seed: int, config: TrainConfig, fabric: Fabric) -> Images:
    """As many of the run's scenes with other surfaces. They are others than its own, which have seed 0."""
    like = open_images(config, "train", count)
    scenes = Scenes(like.family, "train", like.size, seed, len(like), (like.objects[0], like.objects[1]), surfaces)
    return _held(scenes, config, fabric, f"{config.data}, {surfaces}")


def validation_data(config: TrainConfig, fabric: Fabric) -> Images:
    return _held(open_images(config, "val", config.eval_images), config, fabric, f"{config.data}, val")


def _held(data: Any, config: TrainConfig, fabric: Fabric, title: str) -> Images:
    if isinstance(data, Frames):
        return Frames(cast(Any, _held(data.films, config, fabric, title)), data.count)
    if config.cache is not None and hasattr(data, "cache"):  # one process renders, the others wait and read
        kind = getattr(data, "kind", data.split)
        place = config.cache / f"{config.data.replace(':', '-')}-{kind}-{data.size}-{len(data)}"
        with fabric.rank_zero_first(local=True):
            data = data.cache(place, fabric.device, quiet=fabric.local_rank > 0)
    return hold(data, fabric.device, fabric.global_rank > 0, title)


class Batches:
    """The images of one step after another, made ready by a thread while the device works on the step before.

    Up to `whole_from` they come from `rising`, scene by scene as strong in texture as the step asks for; from
    `near_from` on, once textures are whole, a share of them from `near`."""

    def __init__(
        self,
        images: Images,
        config: TrainConfig,
        fabric: Fabric,
        step: int,
        rising: Images | None = None,
        near: Images | None = None,
    ) -> None:
        self.images, self.config, self.fabric, self.step = images, config, fabric, step
        self.rising, self.near = rising, near
        self.epoch, self.order = -1, np.empty(0, dtype=np.int64)

    def __enter__(self) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.ahead = self.pool.submit(self._make, self.step)

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)

    def __next__(self) -> Tensor:
        image = self.ahead.result()
        self.step += 1
        self.ahead = self.pool.submit(self._make, self.step)
        return image

    def _make(self, step: int) -> Tensor:
        image = self._images(step)
        if not self.config.flips:
            return image
        mirrored = self._mine(self._dice(step, MIRROR).random(self.config.batch)) < 0.5
        return _where(mirrored, image.flip(-1), image)

    def _images(self, step: int) -> Tensor:
        if self.rising is not None and step < self.config.whole_from:
            strength = self._dice(step, STRENGTH).uniform(*textures(self.config, step), self.config.batch)
            chosen = (len(self.rising) * self._mine(strength)).astype(np.int64)
            return self.rising.render(chosen, self.fabric.device).image
        image = self.images.render(self.numbers(step), self.fabric.device).image
        if self.near is None or step < self.config.near_from:
            return image
        dice = self._dice(step, WHICH_NEAR)
        chosen = self._mine(dice.integers(0, len(self.near), self.config.batch))
        other = self.near.render(chosen, self.fabric.device).image
        return _where(self._mine(dice.random(self.config.batch)) < self.config.near, other, image)

    def _dice(self, step: int, what: int) -> np.random.Generator:
        return np.random.default_rng([self.config.seed, step, what])

    def _mine(self, draws: np.ndarray) -> np.ndarray:
        """This process's share of what was drawn for a whole batch."""
        share = self.config.batch // self.fabric.world_size
        return draws[self.fabric.global_rank * share :][:share]

    def numbers(self, step: int) -> np.ndarray:
        """The images of this process at a step: its share of the next `batch` of an order shuffled every epoch."""
        first = step * self.config.batch
        return np.array([self._shuffled(i) for i in self._mine(np.arange(first, first + self.config.batch))])

    def _shuffled(self, i: int) -> int:
        epoch, place = divmod(i, len(self.images))
        if epoch != self.epoch:
            self.epoch = epoch
            self.order = np.random.default_rng([self.config.seed, epoch]).permutation(len(self.images))
        return int(self.order[place])


def _where(chosen: np.ndarray, these: Tensor, those: Tensor) -> Tensor:
    """For each image, of these if it is chosen, else of those."""
    return torch.where(torch.from_numpy(chosen).to(these.device).view(-1, *[1] * (these.ndim - 1)), these, those)


# ------------------------------------------------------------------------------------------------------ the run folder


@contextlib.contextmanager
def open_run(folder: Path, config: TrainConfig) -> Iterator[None]:
    """Makes the folder, or finds the run in it to be the same; holds its lock while training."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a folder for the run")
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock", busy=f"{folder} is in use by another run; wait for it or choose another --out"):
        _claim(folder, config)
        yield


def _claim(folder: Path, config: TrainConfig) -> None:
    """Writes run.json, unless the folder holds something else."""
    values = json.loads(json.dumps(dataclasses.asdict(config), default=str)) | {"version": cutslots.__version__}
    others = [path for path in folder.iterdir() if path.name not in (".lock", "run.json", "run.json.part")]
    if others and not config.overwrite:
        _same_run(folder / "run.json", values)
    elif others:
        strange = [path.name for path in others if path.name.removesuffix(".part") not in WRITTEN]
        if strange or not (folder / "run.json").is_file():
            what = f"{strange[0]}, which no run writes" if strange else "no run"
            raise ValueError(f"{folder} holds {what}: --overwrite empties run folders only")
        for path in others:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    write_atomically(folder / "run.json", json.dumps(values, indent=1).encode())


def _same_run(file: Path, values: dict[str, Any]) -> None:
    try:
        before = dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        raise ValueError(f"{file.parent} is not empty and holds no run; choose another --out") from None
    inner = {"context": 0, "placed": False, "background_anchor": None} | (
        before.get("model") or {}
    )  # what older runs do not name
    before = NEWER | before | {"model": inner}
    wrong = [k for k in values if k not in NOT_THE_RUN and before.get(k) != values[k]]
    if "model" in wrong:
        wrong += [k for k, v in values["model"].items() if inner.get(k) != v]
        wrong.remove("model")
    if wrong:
        raise ValueError(
            f"{file.parent} holds another run (its {', '.join(wrong)} differ); choose another --out or pass --overwrite"
        )


def load_state(file: Path, model: Discovery, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Puts the newest state back; where there is none, the run begins."""
    if not file.exists():
        return {"step": 0, "seconds": 0.0}
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return {"step": int(state["step"]), "seconds": float(state["seconds"])}
    except Exception as error:  # torch.load raises whatever a damaged file leads it to
        first = str(error).split("\n")[0]
        raise ValueError(f"{file} is not a training state of this model ({first}); delete it to begin again") from None


class Stop:
    """When to stop: after the last step, when the time is up, or after the step at which Ctrl-C or SIGTERM came. A
    second Ctrl-C ends the run at once."""

    def __init__(self, config: TrainConfig, fabric: Fabric) -> None:
        self.config, self.fabric, self.flag = config, fabric, False

    def __enter__(self) -> None:
        self.before = {s: signal.signal(s, self._heard) for s in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, _: object) -> None:
        if self.flag:
            raise KeyboardInterrupt
        self.flag = True

    def is_over(self, seconds: float) -> bool:
        return self.config.minutes is not None and seconds > 60 * self.config.minutes

    def due(self, step: int, seconds: float) -> bool:
        return step == self.config.steps or self._agreed(step, self.is_over(seconds))

    def asked(self, step: int, seconds: float) -> bool:
        return self._agreed(step, self.flag)

    def _agreed(self, step: int, wish: bool) -> bool:
        """Whether any process wishes it. All must stop at the same step: several ask each other when they log."""
        if self.fabric.world_size == 1:
            return wish
        if step % LOG_EVERY:
            return False
        wishes = self.fabric.all_reduce(torch.tensor(float(wish), device=self.fabric.device), reduce_op="sum")
        return bool(torch.as_tensor(wishes) > 0)


class Log:
    """What a run tells: progress, metrics.jsonl, TensorBoard, pictures, weights, state. Process 0 writes."""

    def __init__(self, folder: Path, config: TrainConfig, fabric: Fabric, state: dict[str, Any]) -> None:
        self.folder, self.config, self.fabric, self.first = folder, config, fabric, state["step"]
        self.writes = fabric.global_rank == 0
        self.saved = self.logged_at = time.monotonic()
        self.logged = state["step"]
        self.newest: dict[str, float] = {}
        self.recent: list[Tensor] = []
        self.speed = 0.0
        self.bar = progress(not self.writes, "{task.fields[told]}")
        if self.writes:
            self._forget_after(state["step"])
            (folder / "pictures").mkdir(exist_ok=True)

    def __enter__(self) -> None:
        self.bar.start()
        self.task = self.bar.add_task(self.config.preset, total=self.config.steps, completed=self.first, told="")
        if self.writes:
            self.board = Board(self.folder / "tensorboard", self.first)
            if self.first:
                self.bar.console.print(f"going on after step {self.first}")

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        if self.writes:
            self.board.close()

    def _forget_after(self, step: int) -> None:
        """Drops lines that a killed run wrote after its newest state: those steps are done again."""
        kept = [line for line in read_lines(self.folder / "metrics.jsonl") if line.get("step", 0) <= step]
        if (self.folder / "metrics.jsonl").exists():
            write_atomically(self.folder / "metrics.jsonl", b"".join(json.dumps(x).encode() + b"\n" for x in kept))
        for line in kept:
            self.newest = line.get("val", self.newest)

    def note(self, error: Tensor, norm: Tensor | None) -> None:
        """Remembers a step's loss and gradient, on the device: it is not made to wait."""
        self.recent.append(torch.stack([error.detach(), error.detach() if norm is None else norm.detach()]))

    def losses(self, step: int, seconds: float, lr: float) -> None:
        self.check(step)
        rows = torch.stack(self.recent).mean(0)
        if self.fabric.world_size > 1:
            rows = torch.as_tensor(self.fabric.all_reduce(rows, reduce_op="mean"))
        loss, norm = rows.tolist()
        now = time.monotonic()
        images = (step - self.logged) * self.config.batch * self.config.model.frames
        self.speed = images / max(now - self.logged_at, 1e-9)
        self.logged, self.logged_at, self.recent = step, now, []
        line = {"step": step, "loss": loss, "gradient": norm, "lr": lr, "images_per_second": self.speed}
        self._write(line | {"seconds": round(seconds, 2)})
        if self.writes:
            names = ("loss", "gradient", "lr", "images_per_second")
            self.board.scalars(step, {f"train/{name}": line[name] for name in names})
        self.bar.update(self.task, completed=step, told=self._told(loss))

    def check(self, step: int) -> None:
        """Stops with a sentence if a loss or a gradient since the last look is not finite."""
        values = torch.stack(self.recent).tolist() if self.recent else []
        for i, (loss, norm) in enumerate(values, start=step - len(values) + 1):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                state = self.folder / "state.pt"
                good = f"the last good state is {state}" if state.exists() else "no state was saved before"
                what = f"loss is {loss}" if not math.isfinite(loss) else f"norm of the gradient is {norm}"
                raise ValueError(f"the {what} at step {i}; {good}; try a lower --lr")

    def _told(self, loss: float) -> str:
        score = f"  ARI-FG {100 * self.newest['ari_fg']:.1f}" if "ari_fg" in self.newest else ""
        return f"loss {loss:.5f}  {self.speed:.0f} images/s{score}"

    def judge(self, done: int, model: Discovery, data: Images) -> None:
        self.check(done)
        began = time.monotonic()
        self.newest = judge(model, data, self.fabric).means()
        if self.writes:
            self._write({"step": done, "val": self.newest})
            self.board.scalars(done, {f"val/{name}": value for name, value in self.newest.items()})
            pictures = sheet(look(model, data, 4, self.fabric))
            write_atomically(self.folder / "pictures" / f"step_{done:07d}.png", png(pictures))
            self.board.image(done, "pictures", np.asarray(pictures))
            shown = [("ARI-FG", "ari_fg"), ("mIoU", "miou")] if "ari_fg" in self.newest else []
            told = "".join(f"{name} {100 * self.newest[key]:.1f}  " for name, key in shown)
            self.bar.console.print(f"step {done}: {told}MSE {self.newest['mse']:.1f}", highlight=False)
        self.logged_at += time.monotonic() - began  # the speed is that of training

    def _write(self, line: dict[str, Any]) -> None:
        if self.writes:
            append_line(self.folder / "metrics.jsonl", json.dumps(line).encode())

    def save_due(self, step: int) -> bool:
        """Process 0 saves by the clock, after whole steps: which one does not matter, a state is exact at any. Of
        several processes all must find a loss that is not finite: they look when they log."""
        if self.fabric.world_size > 1 and step % LOG_EVERY:
            return False
        return self.writes and time.monotonic() - self.saved > 60 * self.config.save_minutes

    def save(self, model: Discovery, optimizer: Any, state: dict[str, Any]) -> None:
        self.check(state["step"])
        if self.writes:
            data = io.BytesIO()
            inner = getattr(optimizer, "optimizer", optimizer)
            torch.save({**state, "model": model.state_dict(), "optimizer": inner.state_dict()}, data)
            save(model, self.folder)  # first: a run whose state says that it is done is not gone on with
            write_atomically(self.folder / "state.pt", data.getvalue())
        self.saved = time.monotonic()

    def finish(self, model: Discovery, data: Images) -> Path:
        if self.writes:
            pictures = look(model, data, 8, self.fabric)
            write_training_report(self.folder, self.config, len(data), pictures, self.fabric)
            print(f"wrote {self.folder / 'model.safetensors'} and {self.folder / 'report.html'}")
        return self.folder


def write_training_report(folder: Path, config: TrainConfig, judged: int, pictures: Pictures, fabric: Fabric) -> None:
    history = read_lines(folder / "metrics.jsonl")
    losses = [line for line in history if "loss" in line]
    scores = next((line["val"] for line in reversed(history) if "ari_fg" in line.get("val", {})), None)
    values = {"seed": str(config.seed)}
    if scores:
        values = {"ARI-FG": f"{100 * scores['ari_fg']:.1f}", "mIoU": f"{100 * scores['miou']:.1f}"} | values
    if losses:
        values |= {"steps": f"{losses[-1]['step']:,}", "minutes": f"{losses[-1]['seconds'] / 60:.1f}"}
        values["images a second"] = f"{np.median([line['images_per_second'] for line in losses]):,.0f}"
    cuda = fabric.device.type == "cuda"
    device = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads"
    title = f"cutslots: {config.preset} on {config.data}"
    results = {config.data: {"images": judged, **scores}} if scores else {}
    write_training(folder / "report.html", title, folder, values, results, pictures, device)
