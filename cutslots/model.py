"""`Discovery`: from an image to slots, masks and a reconstruction, in one call. `PairDiscovery`: from two frames, their
slots matched. `VolumeDiscovery`: from a clip, cut as one.

Annotations are not postponed here: the Hub's mixin reads from them that `config` is a ModelConfig.

Shapes: B batch, T frames, K slots, D slot length, S side of the picture, h its half (the feature grid).
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

from cutslots.disk import write_atomically
from cutslots.matching import MatchedSlots, match_slots
from cutslots.networks import BroadcastDecoder, CNNEncoder, Context, ResNetEncoder, SubpixelDecoder
from cutslots.presets import ModelConfig
from cutslots.slots import CutSlots, SlotAttention, Slots, SoftmaxSlots, VolumeSlots

SHIPPED = Path(__file__).parent / "weights"  # a folder for each name
MOST_CONFIG = 2**20  # bytes


class Found(NamedTuple):
    """What a model finds in images; in clips, with a frame axis after B."""

    slots: Tensor  # (B, K, D)
    masks: Tensor  # (B, K, S, S): the decoder's, summing to one over K
    partition: Tensor  # (B, K, h, h): the slots' own masks, on the feature grid
    reconstruction: Tensor  # (B, 3, S, S) in [0, 1], give or take
    pictures: Tensor  # (B, K, 3, S, S): each slot's


class Discovery(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="cutslots",
    license="apache-2.0",
    tags=["object-centric-learning", "image-segmentation", "graph-cut"],
):
    """Encoder, slots, decoder: finds objects by learning to redraw the image one slot at a time.

    `save_pretrained`, `from_pretrained` and `push_to_hub` keep config.json and model.safetensors.

    >>> from cutslots.presets import PRESETS
    >>> model = Discovery(PRESETS["tiny"].model)
    >>> found = model(torch.rand(2, 3, 64, 64))
    >>> found.masks.shape, found.partition.shape, found.reconstruction.shape
    (torch.Size([2, 6, 64, 64]), torch.Size([2, 6, 32, 32]), torch.Size([2, 3, 64, 64]))
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if type(self) is Discovery and config.frames > 1:
            raise ValueError(
                f"frames is {config.frames}; expected 1, or PairDiscovery or VolumeDiscovery (see cutslots.load)"
            )
        self.config = config
        grid = (config.size // 2, config.size // 2)
        self.encoder: nn.Module = (
            CNNEncoder(config.encoder_maps, config.encoder_kernels)
            if config.encoder == "cnn"
            else ResNetEncoder(config.encoder_maps, config.encoder_kernels, config.encoder_norm)
        )
        if config.context:
            self.encoder = nn.Sequential(self.encoder, Context(config.encoder_maps, config.context))
        self.slots = _slot_module(config, grid)
        common = (config.slot_dim, config.size, config.decoder_maps)
        self.decoder = (
            SubpixelDecoder(*common, placed=config.placed)
            if config.decoder == "subpixel"
            else BroadcastDecoder(*common, config.decoder_extra, config.decoder_style, config.placed)
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> Self:
        """The model in a folder, shipped under a name (nothing is downloaded then), or on the Hub as OWNER/NAME.

        It is float32 and ready to use, also where the file holds float16 or bfloat16. The options are the mixin's."""
        found = _or_shipped(pretrained_model_name_or_path)
        on_hub = not Path(found).exists() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(found))
        if not on_hub and not (Path(found) / "config.json").is_file():
            raise ValueError(
                f"pretrained_model_name_or_path is {str(found)!r}; expected a name ({', '.join(shipped_names())}), "
                "a folder of config.json and model.safetensors, or OWNER/NAME on the Hugging Face Hub"
            )
        return super().from_pretrained(found, **options)

    def forward(self, image: Tensor) -> Found:
        """`image` (B, 3, S, S) is uint8, or floating point in [0, 1]."""
        slots, partition = self.encode(image)
        return Found(slots, partition=partition, **self.decode(slots))

    def encode(self, image: Tensor) -> Slots:
        """Slots (B, K, D) of images, and their masks on the feature grid."""
        return self.slots(self.encoder(self._prepared(image)))

    def decode(self, slots: Tensor) -> dict[str, Tensor]:
        """Masks, pictures and reconstruction from slots (B, K, D)."""
        out = full(self.decoder(slots))
        pictures, masks = out[:, :, :3] / 2 + 0.5, out[:, :, 3].softmax(1)
        return {"masks": masks, "pictures": pictures, "reconstruction": (masks[:, :, None] * pictures).sum(1)}

    def _prepared(self, image: Tensor) -> Tensor:
        side = self.config.size
        if image.ndim != 4 or image.shape[1:] != (3, side, side):
            raise ValueError(f"image has shape {tuple(image.shape)}; expected (B, 3, {side}, {side})")
        image = as_floats(image).to(next(self.parameters()).dtype) * 2 - 1
        return image.contiguous(memory_format=torch.channels_last)


class PairDiscovery(Discovery):
    """Pairs of frames (B, 2, 3, S, S): slots of each, matched (algorithm 3), transformed, decoded to both frames.

    Slot i of the first frame and its partner r_i of the second pass an MLP that gives each frame's slot a change. So
    slot i redraws one thing in both frames, and the loss asks the matching to find it. Slots are matched by the cosine
    between them, in float32. `match` and `paired` are the two steps alone, for tracking.

    >>> from cutslots.presets import PRESETS
    >>> model = PairDiscovery(dataclasses.replace(PRESETS["tiny"].model, frames=2))
    >>> found = model(torch.rand(3, 2, 3, 64, 64))
    >>> found.slots.shape, found.masks.shape, found.reconstruction.shape
    (torch.Size([3, 2, 6, 64]), torch.Size([3, 2, 6, 64, 64]), torch.Size([3, 2, 3, 64, 64]))
    """

    def __init__(self, config: ModelConfig) -> None:
        if config.frames != 2 or config.volume:
            seen = "volume is set" if config.volume else f"frames is {config.frames}"
            raise ValueError(f"{seen}; expected 2 frames that are matched, or another class (see cutslots.load)")
        super().__init__(config)
        wide = 2 * config.slot_dim
        self.motion = nn.Sequential(
            nn.LayerNorm(wide), nn.Linear(wide, config.hidden), nn.ReLU(), nn.Linear(config.hidden, wide)
        )

    def forward(self, image: Tensor) -> Found:
        slots, partition = (x.unflatten(0, image.shape[:2]) for x in self.encode(_flat(image, 2)))
        partner, weights = self.match(slots[:, 0], slots[:, 1])
        joined = self.paired(slots[:, 0], partner)
        moved = (weights @ partition[:, 1].flatten(2)).view_as(
            partition[:, 1]
        )  # the partner's part, as far as there is one partner
        drawn = {name: x.unflatten(0, image.shape[:2]) for name, x in self.decode(joined.flatten(0, 1)).items()}
        return Found(joined, partition=torch.stack([partition[:, 0], moved], 1), **drawn)

    def match(self, s: Tensor, t: Tensor) -> MatchedSlots:
        """For slots s of one frame their partners among t of the other, both (B, K, D), and the weights (B, K, K)."""
        gamma, temperature = self.config.match_gamma, self.config.match_temperature
        with torch.autocast(s.device.type, enabled=False):
            s, t = full(s), full(t)
            unit_s, unit_t = (nn.functional.normalize(x, dim=-1) for x in (s, t))
            weights = match_slots(unit_s, unit_t, gamma, temperature).weights
            return MatchedSlots(weights @ t, weights)

    def paired(self, s: Tensor, r: Tensor) -> Tensor:
        """The slots (B, 2, K, D) that redraw both frames, from slots s and their partners r."""
        pair = torch.cat([full(s), full(r)], -1)
        return torch.stack((pair + self.motion(pair)).chunk(2, -1), 1)


class VolumeDiscovery(Discovery):
    """Clips (B, T, 3, S, S) of any length, parted by cuts through space and time; each frame decoded from its slots.

    >>> from cutslots.presets import PRESETS
    >>> model = VolumeDiscovery(dataclasses.replace(PRESETS["tiny"].model, frames=2, volume=True))
    >>> model(torch.rand(1, 3, 3, 64, 64)).masks.shape
    torch.Size([1, 3, 6, 64, 64])
    """

    def __init__(self, config: ModelConfig) -> None:
        if not config.volume:
            raise ValueError("volume is not set; expected it to be, or Discovery or PairDiscovery (see cutslots.load)")
        super().__init__(config)

    def forward(self, image: Tensor) -> Found:
        features = self.encoder(self._prepared(_flat(image))).unflatten(0, image.shape[:2])
        slots, partition = self.slots(features)
        drawn = {name: x.unflatten(0, image.shape[:2]) for name, x in self.decode(slots.flatten(0, 1)).items()}
        return Found(slots, partition=partition, **drawn)


def full(x: Tensor) -> Tensor:
    """Half precision as float32; others as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _flat(frames: Tensor, count: int | None = None) -> Tensor:
    """Frames of clips (B, T, 3, S, S) as so many images."""
    if frames.ndim != 5 or (count and frames.shape[1] != count):
        raise ValueError(f"image has shape {tuple(frames.shape)}; expected clips (B, {count or 'T'}, 3, S, S)")
    return frames.flatten(0, 1)


def build(config: ModelConfig) -> Discovery:
    """The untrained model that a configuration describes."""
    if config.volume:
        return VolumeDiscovery(config)
    return Discovery(config) if config.frames == 1 else PairDiscovery(config)


def as_floats(image: Tensor) -> Tensor:
    """uint8 as numbers in [0, 1]; floating point as it is."""
    if image.dtype == torch.uint8:
        return image / 255.0
    if image.is_floating_point():
        return image
    raise TypeError(f"image is of type {image.dtype}; expected uint8 or floating point")


def channels_last(model: Discovery) -> Discovery:
    """The layout that convolutions are fastest in."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _slot_module(config: ModelConfig, grid: tuple[int, int]) -> nn.Module:
    common = (config.encoder_maps, config.slots, grid, config.slot_dim)
    if config.module == "attention":
        return SlotAttention(*common, iterations=config.iterations, hidden=config.hidden, placed=config.placed)
    kind: type[CutSlots] = VolumeSlots if config.volume else CutSlots if config.module == "cut" else SoftmaxSlots
    more: dict[str, Any] = {"frames": config.frames} if config.volume else {}
    return kind(
        *common,
        **more,
        feature_maps=config.feature_maps,
        hidden=config.hidden,
        pool=config.pool,
        streams=config.streams,
        kernels=config.weight_kernels,
        signed=config.signed,
        gamma=config.gamma,
        reach=config.reach,
        anchor=config.anchor,
        background_anchor=config.background_anchor,
        temperature=config.temperature,
        background=config.background,
        background_temperature=config.background_temperature,
        sharpen=config.sharpen,
        weight_maps=config.weight_maps,
        placed=config.placed,
    )


def save(model: Discovery, folder: Path, half: bool = False) -> None:
    """config.json and model.safetensors, each whole or as it was; with `half`, floating point as float16."""
    from safetensors.torch import save as to_bytes

    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    if half:
        tensors = {
            name: _halved(name, value) if value.is_floating_point() else value for name, value in tensors.items()
        }
    write_atomically(folder / "config.json", json.dumps(dataclasses.asdict(model.config), indent=1).encode())
    write_atomically(folder / "model.safetensors", to_bytes(tensors, metadata={"format": "pt"}))


def _halved(name: str, value: Tensor) -> Tensor:
    small = value.half()
    if not small.isfinite().all():
        raise ValueError(
            f"half: {name} holds {value.abs().max():.6g}; expected finite values up to 65,504, float16's largest"
        )
    return small


def load(weights: str | Path, device: torch.device | str = "cpu") -> Discovery:
    """The model in a folder, beside a model.safetensors, or shipped under a name; ready to use, not to train.

    It is float32, also where the file holds float16 or bfloat16."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = weights_file(weights)
    model = _model_for(file.with_name("config.json"))
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a whole safetensors file ({error})") from None
    wrong = _differences(model.state_dict(), tensors)
    if wrong:
        raise ValueError(f"{file} does not fit its config.json: {wrong}")
    model.load_state_dict(tensors)  # casts to float32
    for name, value in model.state_dict().items():
        if not value.isfinite().all():
            raise ValueError(
                f"{file} holds values in {name} that are not finite; expected weights of a run that learned"
            )
    return model.to(device).eval()


def weights_file(weights: str | Path) -> Path:
    path = Path(_or_shipped(weights))
    if path.is_dir():
        path = path / "model.safetensors"
    if not path.is_file():
        names = ", ".join(shipped_names())
        raise ValueError(f"weights: there is no {path}; expected a run folder, a .safetensors file or a name ({names})")
    if path.suffix != ".safetensors":
        raise ValueError(
            f"weights: {path} is not a .safetensors file; pickled checkpoints may run code and are not read"
        )
    return path


def shipped_names() -> list[str]:
    return sorted(path.name for path in SHIPPED.glob("*") if path.is_dir())


def _or_shipped(weights: str | Path) -> str | Path:
    """The folder of the weights shipped under a name, unless a file or folder of that name holds weights."""
    path = Path(weights)
    own = path.is_file() or (path / "model.safetensors").is_file()
    return weights if own or not (SHIPPED / path).is_dir() else SHIPPED / path


def _model_for(path: Path) -> Discovery:
    """An untrained model as config.json describes it."""
    if not path.is_file():
        raise ValueError(f"there is no {path}, which says what model the weights beside it are for")
    if path.stat().st_size > MOST_CONFIG:
        raise ValueError(
            f"{path} has {path.stat().st_size:,} bytes; expected a configuration of at most {MOST_CONFIG:,}"
        )
    try:
        values: dict[str, Any] = dict(json.loads(path.read_text()))
    except (ValueError, TypeError, RecursionError):
        raise ValueError(f"{path} is not readable as JSON") from None
    known = {field.name: field.default is not dataclasses.MISSING for field in dataclasses.fields(ModelConfig)}
    odd = ", ".join(sorted(name for name in values.keys() ^ known.keys() if not known.get(name)))
    if odd:
        raise ValueError(f"{path} is not the configuration of a Discovery model: missing or unknown are {odd}")
    try:
        return build(ModelConfig(**values))
    except (ValueError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is not the configuration of a Discovery model: {error}") from None


def _differences(expected: dict[str, Tensor], seen: dict[str, Tensor]) -> str:
    for name in sorted(expected.keys() | seen.keys()):
        if name not in seen:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is unexpected"
        if expected[name].shape != seen[name].shape:
            return f"{name} has shape {tuple(seen[name].shape)}, expected {tuple(expected[name].shape)}"
        if expected[name].is_floating_point() != seen[name].is_floating_point():
            return f"{name} is of type {seen[name].dtype}, expected {expected[name].dtype}"
    return ""
