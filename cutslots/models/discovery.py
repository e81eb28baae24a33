"""`Discovery`: from an image to slots, masks and a reconstruction in one call.

An encoder, a slot module and a decoder fit together by what they say of themselves: `encoder.out_channels` and
`encoder.out_size`, `slots.num_slots`, `slots.slot_dim` and `slots.position_dim`, `decoder.image_size`.

Shapes: B batch, T frames, K slots, D slot dimension, H W the image, h w the feature grid.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from huggingface_hub import ModelHubMixin
from torch import Tensor, nn

import cutslots
from cutslots.models import model_card
from cutslots.models.mask_kinds import DEFAULT_MASK_KIND, MaskKind, VideoMaskKind
from cutslots.models.training_data import TrainingData
from cutslots.modules import graph_ocl, patch_vit, pretrained, slot_attention, vit  # noqa: F401  they register parts
from cutslots.modules.base import exportable, first_parameter, to_channels_last
from cutslots.modules.decoders import DECODERS, Decoder, DecoderConfig, DecoderOutput, SpatialBroadcastConfig
from cutslots.modules.encoders import ENCODERS, CNNConfig, Encoder, EncoderConfig
from cutslots.modules.feature_decoders import FeatureDecoder, FeatureDecoderOutput
from cutslots.modules.slots import SLOTS, CutSlotsConfig, SlotModule, Slots, SlotsConfig
from cutslots.registry import PartConfig, Range, Registry

if TYPE_CHECKING:
    from cutslots.inference.prediction import Prediction
    from cutslots.inference.prepare import Images

M = TypeVar("M", bound=nn.Module)

MAX_CLIP_PIXELS = 2**26  # of a training sample


@dataclass(frozen=True)
class ModelConfig(PartConfig):
    """Base of the configs of models. A checkpoint's config.json holds one."""

    image_size: Annotated[tuple[int, int], Range(8, 2048)] = (128, 128)
    """Height and width of the images."""
    encoder: EncoderConfig = field(default_factory=CNNConfig)
    slots: SlotsConfig = field(default_factory=CutSlotsConfig)
    decoder: DecoderConfig = field(default_factory=SpatialBroadcastConfig)

    def validate(self) -> None:
        super().validate()
        if self.frames * self.image_size[0] * self.image_size[1] > MAX_CLIP_PIXELS:
            given = f"image_size is {self.image_size} with {self.frames} frames"
            raise ValueError(f"{given}; expected at most {MAX_CLIP_PIXELS:,} pixels in a sample")

    @property
    def frames(self) -> int:
        """Frames of a training sample: 1 for images."""
        return 1


MODELS = Registry("model", ModelConfig)


@exportable
class DiscoveryOutput(NamedTuple):
    """What a model returns for images; for clips, with a frame axis after B."""

    slots: Tensor  # (B, K, D)
    masks: Tensor  # (B, K, H, W): the decoder's, summing to one over K
    partition_masks: Tensor  # (B, K, h, w): those of the slot module, on the feature grid
    reconstruction: Tensor  # (B, 3, H, W), about in [0, 1]
    slot_reconstructions: Tensor  # (B, K, 3, H, W): what each slot reconstructs


@exportable
class FeatureOutput(NamedTuple):
    """What a model returns whose decoder reconstructs the features of its encoder; for clips, with a frame axis."""

    slots: Tensor  # (B, K, D)
    masks: Tensor  # (B, K, H, W): the decoder's, upsampled from the feature grid
    partition_masks: Tensor  # (B, K, h, w): those of the slot module, on the feature grid
    reconstruction: Tensor  # (B, C, h, w)
    target: Tensor  # (B, C, h, w): the features


ModelOutput = DiscoveryOutput | FeatureOutput


class Discovery(
    nn.Module,
    ModelHubMixin,
    library_name="cutslots",
    license="apache-2.0",
    pipeline_tag=model_card.PIPELINE_TAG,
    tags=list(model_card.TAGS),
    repo_url=model_card.project_url("Repository"),
    paper_url=model_card.PAPER_URL,
    docs_url=model_card.project_url("Documentation"),
    model_card_template=model_card.TEMPLATE,
):
    """Encoder, slot module and decoder: discovers objects by reconstructing the image from slots.

    `build(config)` makes one from registered parts; only such a model can be saved, because config.json names its
    parts. `save_pretrained`, `from_pretrained` and `push_to_hub` work as in Hugging Face's libraries.

    >>> model = build(DiscoveryConfig(image_size=(64, 96)))
    >>> output = model(torch.rand(2, 3, 64, 96))
    >>> output.masks.shape, output.partition_masks.shape, output.reconstruction.shape
    (torch.Size([2, 11, 64, 96]), torch.Size([2, 11, 32, 48]), torch.Size([2, 3, 64, 96]))
    """

    frames: int = 1  # of a training sample
    checkpoint: str | None = None  # the file that the weights were loaded from
    spacetime: ClassVar[bool] = False  # whether a clip is partitioned as a whole
    associations: ClassVar[tuple[str, ...]] = ("area", "hungarian")  # how slots can be associated over time

    def __init__(self, encoder: nn.Module, slots: SlotModule, decoder: Decoder) -> None:
        super().__init__()
        if slots.spacetime and not self.spacetime:
            raise ValueError(
                "slots partition clips; expected a slot module for images, or the model SpacetimeDiscovery"
            )
        if isinstance(decoder, FeatureDecoder) and any(p.requires_grad for p in encoder.parameters()):
            raise ValueError(
                f"the decoder {type(decoder).__name__} reconstructs the features of an encoder that is trained, which "
                "could make them constant; expected a frozen encoder, such as --encoder vit or --encoder pretrained"
            )
        self.encoder, self.slots, self.decoder = encoder, slots, decoder
        self.config: ModelConfig | None = None
        self.training_data: TrainingData | None = None  # of a checkpoint that says what it was trained on

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images."""
        return self.decoder.image_size

    @property
    def num_slots(self) -> int:
        return self.slots.num_slots

    @property
    def reconstructs_features(self) -> bool:
        """Whether the decoder reconstructs the features of the encoder, instead of the image."""
        return isinstance(self.decoder, FeatureDecoder)

    def forward(self, image: Tensor) -> ModelOutput:
        """Return slots, masks and reconstruction of images (B, 3, H, W), uint8 or floating point in [0, 1].

        The type and the shape are checked, the values are not: that would make the CPU wait for the GPU.
        `cutslots.prepare_images` checks them, and makes such a tensor of paths, PIL images and arrays.
        """
        return self.forward_features(self.features(image))

    def forward_features(self, features: Tensor) -> ModelOutput:
        """Return the same for the features (B, C, h, w) of images, or (B, T, C, h, w) of clips: of `features`."""
        slots, partition_masks = self.slots(features)
        return make_output(slots, partition_masks, self.decode_frame(slots, *self.target(features))._asdict())

    def target(self, features: Tensor) -> tuple[Tensor, ...]:
        """Return what `decode` takes besides slots: features to reconstruct, or nothing."""
        return (features,) if self.reconstructs_features else ()

    def encode(self, image: Tensor) -> Slots:
        """Return the slots (B, K, D) of images, and their masks on the feature grid."""
        return self.slots(self.features(image))

    def features(self, image: Tensor) -> Tensor:
        """Return the features (B, C, h, w) of images."""
        return self.encoder(self.normalize(image))

    def encode_with_target(self, image: Tensor) -> tuple[Slots, tuple[Tensor, ...]]:
        """Return the slots of images, and what `decode` takes besides; see `target`."""
        if not self.reconstructs_features:
            return self.encode(image), ()
        features = self.features(image)
        return self.slots(features), self.target(features)

    def decode(self, slots: Tensor, *target: Tensor) -> DecoderOutput | FeatureDecoderOutput:
        """Return masks and reconstruction for slots (B, K, D): with slot reconstructions of an image, or with features.

        A decoder of features needs them as `target`, see `features`.
        """
        return self.decoder(slots, *target)

    def decode_frame(self, slots: Tensor, *target: Tensor) -> DecoderOutput | FeatureDecoderOutput:
        """Decode the slots (B, K, D) of an image, or of one frame of a video."""
        return self.decode(slots, *target)

    def normalize(self, image: Tensor) -> Tensor:
        """Check images and map them to the range that the encoder expects."""
        height, width = self.image_size
        check_is_tensor(image)
        if image.ndim != 4 or image.shape[1:] != (3, height, width):
            raise ValueError(f"image has shape {tuple(image.shape)}; expected (B, 3, {height}, {width})")
        image = to_float(image).to(first_parameter(self).dtype)
        normalize = self.encoder.normalize if isinstance(self.encoder, Encoder) else _to_unit_range
        return to_channels_last(normalize(image))

    def predict(
        self,
        images: Images,
        masks: MaskKind = DEFAULT_MASK_KIND,
        resize: Literal["pad", "stretch"] = "pad",
    ) -> list[Prediction]:
        """Return the objects in images of any size: a `Prediction` with labels, masks, boxes and scores for each.

        Args:
            images: An image, a folder of images or a sequence of images, as paths, PIL images, arrays or tensors; see
                `cutslots.prepare_images`.
            masks: "refined", "high-recall" or "decoder".
            resize: "pad" keeps the aspect ratio; "stretch" does not.

        Warns once if images are far from the training data of the checkpoint.

        >>> model = Discovery.from_pretrained("tiny-64")
        >>> scene = cutslots.Scenes("plain", split="test", size=64)[6].image
        >>> prediction = model.predict(scene)[0]
        >>> prediction.masks.shape, prediction.boxes.shape, prediction.scores.shape
        ((3, 64, 64), (3, 4), (3,))
        """
        return cutslots.predict_images(self, images, masks, resize)  # inference is a layer above models

    def track(
        self,
        video: Images,
        masks: VideoMaskKind = "refined",
        association: str | None = None,
        resize: Literal["pad", "stretch"] = "pad",
    ) -> Iterator[Prediction]:
        """Yield the objects in every frame of a video. A label is the same object in all frames.

        Args:
            video: A video file, a GIF, a folder of frames, or the frames as a sequence, an array or a tensor.
            masks: "refined" or "decoder". Refined masks take two passes over the video: which slots are merged depends
                on all frames.
            association: How slots are associated over time, one of `associations`; by default the first of them.
            resize: "pad" keeps the aspect ratio; "stretch" does not.
        """
        return cutslots.track_video(self, video, masks, association, resize)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        name_or_path: str | Path,
        device: torch.device | str = "cpu",
        plugins: Iterable[str | Path] = (),
        **hub: Any,
    ) -> Discovery:
        """Load a model from a folder, by the name of a checkpoint of this package, or from the Hub as OWNER/NAME.

        The model is float32 and in evaluation mode. Further options are those of `huggingface_hub.hf_hub_download`.
        """
        from cutslots.models.checkpoints import checkpoint_names, find_checkpoint, load

        found = find_checkpoint(name_or_path)
        if not Path(found).exists() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(found)):
            return cls._checked(load(_download(str(found), **hub), device, plugins), name_or_path)
        if not (Path(found) / "config.json").is_file():
            raise ValueError(
                f"name_or_path is {str(found)!r}; expected a name ({', '.join(checkpoint_names())}), "
                "a folder with config.json and model.safetensors, or OWNER/NAME on the Hugging Face Hub"
            )
        return cls._checked(load(found, device, plugins), name_or_path)

    @classmethod
    def _checked(cls, model: Discovery, name_or_path: str | Path) -> Discovery:
        if not isinstance(model, cls):
            raise ValueError(
                f"{name_or_path} is a {type(model).__name__}; expected a {cls.__name__} (see cutslots.load)"
            )
        return model

    def _save_pretrained(self, save_directory: Path) -> None:
        from cutslots.models.checkpoints import save

        save(self, save_directory)


@dataclass(frozen=True)
class DiscoveryConfig(ModelConfig):
    pass


@MODELS.register("discovery", DiscoveryConfig)
def build_discovery(
    image_size: tuple[int, int], encoder: EncoderConfig, slots: SlotsConfig, decoder: DecoderConfig
) -> Discovery:
    """Objects in single images."""
    return Discovery(*build_parts(image_size, encoder, slots, decoder))


def build_parts(
    image_size: tuple[int, int], encoder: EncoderConfig, slots: SlotsConfig, decoder: DecoderConfig
) -> tuple[Encoder, SlotModule, Decoder]:
    """Build the parts of a model so that they fit together."""
    encoder_module: Encoder = ENCODERS.build(encoder)
    grid = encoder_module.out_size(image_size)
    slot_module: SlotModule = SLOTS.build(slots, in_channels=encoder_module.out_channels, size=grid)
    context: dict[str, Any] = {"slot_dim": slot_module.slot_dim, "position_dim": slot_module.position_dim}
    kind = DECODERS.part_of(decoder).build
    if isinstance(kind, type) and issubclass(kind, FeatureDecoder):
        context |= {"feature_channels": encoder_module.out_channels, "feature_size": grid}
    decoder_module: Decoder = DECODERS.build(decoder, image_size=image_size, **context)
    return encoder_module, slot_module, decoder_module


def build(config: ModelConfig) -> Discovery:
    """Build the untrained model that a config describes."""
    model: Discovery = MODELS.build(config)
    model.config = config
    return model


def make_output(slots: Tensor, partition_masks: Tensor, decoded: dict[str, Tensor]) -> ModelOutput:
    """Return the output of a model from what its decoder returns, by name."""
    kind = FeatureOutput if "target" in decoded else DiscoveryOutput
    return kind(slots, partition_masks=partition_masks, **decoded)


def map_output(function: Callable[..., Tensor], *outputs: ModelOutput) -> ModelOutput:
    """Return an output of a function of every tensor of outputs. A decoder may return no slot reconstructions."""
    tensors: Iterable[Any] = zip(*outputs, strict=True)
    made: list[Any] = [None if each[0] is None else function(*each) for each in tensors]
    return type(outputs[0])(*made)


def check_is_tensor(image: object) -> None:
    """Raise a TypeError for images that are not a tensor."""
    if not isinstance(image, Tensor):
        advice = "cutslots.prepare_images makes one of paths, PIL images and arrays"
        raise TypeError(f"image is a {type(image).__name__}; expected a tensor ({advice})")


def to_float(image: Tensor) -> Tensor:
    """Return uint8 images as floats in [0, 1], and floating-point images unchanged. Does not look at the values."""
    if image.dtype == torch.uint8:
        return image / 255.0
    if image.is_floating_point():
        return image
    raise TypeError(f"image has dtype {image.dtype}; expected uint8 or a floating-point type")


def check_finite(model: Discovery, **outputs: Tensor) -> None:
    """Raise a ValueError that names the model's checkpoint if one of its outputs holds NaN or infinity."""
    raise_unless_finite(model, are_finite(**outputs))


def are_finite(**outputs: Tensor) -> dict[str, Tensor]:
    """Return for each output whether all its values are finite, on its device."""
    return {name: value.isfinite().all() for name, value in outputs.items()}


def raise_unless_finite(model: Discovery, finite: Mapping[str, Tensor | bool]) -> None:
    """Raise the error of `check_finite` unless all outputs are finite, by name."""
    for name, value in finite.items():
        if not value:
            raise ValueError(
                f"{model.checkpoint or 'the model'} returns NaN or infinity in its {name}; "
                "expected the weights and the config.json of a good run"
            )


def channels_last(model: M) -> M:
    """Put the weights into the memory format in which convolutions are fastest."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def flatten_frames(clips: Tensor, frames: int | None = None) -> Tensor:
    """Return the frames of clips (B, T, 3, H, W) as images (B * T, 3, H, W)."""
    check_is_tensor(clips)
    if clips.ndim != 5 or (frames and clips.shape[1] != frames):
        raise ValueError(f"image has shape {tuple(clips.shape)}; expected clips (B, {frames or 'T'}, 3, H, W)")
    return clips.flatten(0, 1)


def unflatten_frames(decoded: DecoderOutput | FeatureDecoderOutput, clips: Tensor) -> dict[str, Tensor]:
    """Return what was decoded from the frames of clips (B, T, ...) with the frame axis restored."""
    return {name: x.unflatten(0, clips.shape[:2]) for name, x in decoded._asdict().items()}


def _to_unit_range(image: Tensor) -> Tensor:
    return image * 2 - 1


def _download(repository: str, **hub: Any) -> Path:
    from huggingface_hub import hf_hub_download

    files = [hf_hub_download(repository, name, **hub) for name in ("config.json", "model.safetensors")]
    return Path(files[-1])
