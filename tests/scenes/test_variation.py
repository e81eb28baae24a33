"""Varied scenes: ranges, addresses, and light and sensor against formulas written out."""

import dataclasses
import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from cutslots.data.open import open_dataset
from cutslots.scenes import FAMILIES, Scenes, render, shapes, variation
from cutslots.scenes import sample as sample_module
from cutslots.scenes.sample import SPLITS, sample_scenes
from cutslots.scenes.scene_batch import SceneBatch, VariedSceneBatch
from cutslots.scenes.variation import GRAIN_SIZE, HAZE, RANGES
from tests.conftest import needs_cuda

IMAGE_FAMILIES = [name for name, family in FAMILIES.items() if family.frames == 1]


def sample(family, count, split="train", seed=0, **options):
    return sample_scenes(family, split, seed, np.arange(count), variation="v1", **options)


# --------------------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize("family", FAMILIES)
def test_a_scene_is_the_same_alone_and_in_a_batch(family):
    scenes = Scenes(family, "val", 24, variation="v1")
    together = scenes.get_batch([3, 0, 7])
    for row, index in enumerate((3, 0, 7)):
        alone = scenes.get_batch([index])
        assert torch.equal(alone.image[0], together.image[row]) and torch.equal(alone.mask[0], together.mask[row])


@pytest.mark.parametrize("height, width", [(24, 40), (37, 23)])
def test_any_image_size(height, width):
    """Vignette and noise are those of the square image."""
    side = max(height, width)
    square, scenes = (Scenes("textured", size=size, count=5, variation="v1") for size in (side, (height, width)))
    top, left = (side - height) // 2, (side - width) // 2
    for whole, crop in zip(square.get_batch([4, 1]), scenes.get_batch([4, 1]), strict=True):
        assert torch.equal(crop, whole[..., top : top + height, left : left + width])


def test_splits_seeds_families_and_variations_share_no_scene():
    positions = set()
    for family in ("plain", "textured"):
        for split in SPLITS:
            for seed in (0, 1):
                for kind in ("none", "v1"):
                    scenes = sample_scenes(family, split, seed, np.arange(10), variation=kind)
                    positions |= {tuple(p) for p in scenes.position[:, 0, 0].tolist()}
    assert len(positions) == 2 * 3 * 2 * 2 * 10


def test_other_scenes_are_as_before():
    """Digests of what these scenes contained before there were varied ones."""
    names = ["count", "shape", "size", "color", "position", "rotation", "velocity", "material", "palette", "finish"]
    names += ["camera", "target", "key_light", "fill_light", "light_strength"]
    assert set(names) == {field.name for field in dataclasses.fields(SceneBatch)}
    for family, expected in {"plain": "f332bdd7182c", "textured": "fae490519f18", "camo": "e3309d695e34"}.items():
        scenes = sample_scenes(family, "train", 0, np.arange(40))
        content = b"".join(np.ascontiguousarray(getattr(scenes, name)).tobytes() for name in names)
        assert type(scenes) is SceneBatch and hashlib.sha256(content).hexdigest()[:12] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_no_random_number_is_used_twice(family, monkeypatch):
    """Numbers of one name are the same: two uses would depend on each other."""
    names, call = [], sample_module.HashRNG.__call__

    def recorded(self, name, *shape):
        names.append(name)
        return call(self, name, *shape)

    monkeypatch.setattr(sample_module.HashRNG, "__call__", recorded)
    monkeypatch.setattr(sample_module, "_all_visible", lambda scenes, family: scenes.count > 0)
    monkeypatch.setattr(sample_module, "_arrange", accept(sample_module._arrange))
    sample(family, 1)
    assert len(names) > 40 and len(names) == len(set(names))


def accept(arrange):
    """Return `arrange` with every arrangement valid, so that there is one attempt."""
    return lambda *args: (*(parts := arrange(*args))[:3], parts[3] | True)


def test_ground_truth_tells_the_camera():
    _, (truth,) = Scenes("plain", size=16, count=1, variation="v1").describe([0])
    assert truth["variation"] == "v1" and 27 <= truth["camera"]["field_of_view"] <= 34
    _, (truth,) = Scenes("plain", size=16, count=1).describe([0])
    assert "variation" not in truth and truth["camera"].keys() == {"camera", "target"}


@needs_cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_scenes_are_the_same_on_every_device(family):
    count = 4 if family == "moving" else 2000
    expected, found = (vars(sample(family, count, device=device).numpy()) for device in ("cpu", "cuda"))
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name


@needs_cuda
def test_images_are_the_same_on_every_device_up_to_rounding():
    scenes = Scenes("textured", size=64, variation="v1")
    expected, found = scenes.get_batch(range(8)), scenes.get_batch(range(8), "cuda")
    assert (found.mask.cpu() != expected.mask).float().mean() < 1e-3
    assert (found.image.cpu().int() - expected.image.int()).abs().float().mean() < 0.1


def test_textures_of_training_keep_the_variation():
    ramp, full = (Scenes("textured", size=24, count=4, textures=t, variation="v1") for t in ("ramp", "full"))
    changed, original = ramp.sample(range(4)), full.sample(range(4))
    assert isinstance(changed, VariedSceneBatch) and not changed.finish[0, :, 1].any()
    for name in ("camera", "half_width", "light_radius", "light", "sensor", "position"):
        assert np.array_equal(getattr(changed, name), getattr(original, name)), name


def test_names_and_requests_tell_scenes_apart(tmp_path):
    none, varied = Scenes("plain", size=16, count=4), Scenes("plain", size=16, count=4, variation="v1")
    assert none.cache_name == "plain-train-16x16-4" and varied.cache_name == "plain-train-16x16-4-v1"
    assert "variation" not in none.request() and varied.request()["variation"] == "v1"
    none.cache(tmp_path, quiet=True)
    with pytest.raises(ValueError, match=r"holds another cache \(differing in variation\)"):
        varied.cache(tmp_path, quiet=True)
    with pytest.raises(ValueError, match=r"\Avariation is 'v0'; expected one of none, v1\Z"):
        Scenes("plain", variation="v0")


def test_varied_scenes_open_by_text():
    data = open_dataset("plain:2-5,variation=v1", "val", 16, 3)
    assert data.num_objects == (2, 5)
    expected = Scenes("plain", "val", 16, count=3, num_objects=(2, 5), variation="v1").get_batch(range(3))
    assert torch.equal(data.get_batch(range(3)).image, expected.image)


# ------------------------------------------------------------------------------------------------------------ ranges


def spherical(offset):
    """Return distance, azimuth and elevation of offsets (n, 3), in degrees."""
    distance = np.linalg.norm(offset, axis=1)
    azimuth = np.degrees(np.arctan2(offset[:, 1], offset[:, 0])) % 360
    return distance, azimuth, np.degrees(np.arcsin(offset[:, 2] / distance))


def check_range(name, values):
    """Values lie in the range and reach almost both ends."""
    low, high = RANGES[name]
    near = 0.1 * (high - low)
    assert values.min() >= low - 1e-9 and values.max() <= high + 1e-9, name
    assert values.min() < low + near and values.max() > high - near, name


@pytest.fixture(scope="module")
def textured():
    return sample("textured", 150).numpy()


def test_camera_ranges(textured):
    distance, azimuth, elevation = spherical(textured.camera - textured.target)
    for name, values in (("distance", distance), ("azimuth", azimuth), ("elevation", elevation)):
        check_range(f"camera {name}", values)
    check_range("field of view", np.degrees(2 * np.arctan(textured.half_width)))
    assert np.abs(textured.target[:, :2]).max() <= 0.4


def test_light_ranges(textured):
    light, (key, fill, ambient) = textured.light, textured.light_strength.T
    for name, position in (("key", textured.key_light), ("fill", textured.fill_light), ("back", light[:, :3])):
        distance, azimuth, elevation = spherical(position)
        for each, values in ((f"{name} azimuth", azimuth), (f"{name} elevation", elevation)):
            check_range(each, values)
        check_range("light distance", distance)
    for name, strength in (("fill", fill), ("back", light[:, 3]), ("ambient", ambient)):
        check_range(f"{name} strength", strength / key)
    check_range("falloff", light[:, 4])
    check_range("polish", light[:, 5])
    check_range("key radius", textured.light_radius)
    sines = [p[:, 2] / np.linalg.norm(p, axis=1) for p in (textured.key_light, textured.fill_light, light[:, :3])]
    check_range("exposure", ambient + key * sines[0] + fill * sines[1] + light[:, 3] * sines[2])


def test_sensor_ranges(textured):
    red, green, blue, *others, row, column = textured.sensor.T
    check_range("warmth", red - 1)
    check_range("tint", green - 1)
    assert np.allclose(blue, 2 - red)
    for name, values in zip(("tone", "haze", "vignette", "noise"), others, strict=True):
        check_range(name, values)
    assert set(np.unique(np.concatenate([row, column]))) <= set(range(GRAIN_SIZE))


def test_object_ranges(textured):
    present = np.arange(textured.size.shape[1]) < textured.count[:, None]
    factor = textured.size[present][:, None] / np.array(FAMILIES["textured"].sizes)
    nearest = np.take_along_axis(factor, np.abs(np.log(factor)).argmin(1)[:, None], 1)
    assert nearest.min() >= 0.87 and nearest.max() <= 1.15
    scale = np.log(textured.finish[..., 0])
    assert scale.min() >= np.log(0.1) and scale.max() <= np.log(1.2) and abs(scale.mean() - np.log(0.12) / 2) < 0.1
    cameras = sample("textured", 150).cameras()
    centre = cameras.project(torch.from_numpy(textured.position[:, 0])).abs().amax(-1).numpy()[present]
    assert 1 < centre.max() <= RANGES["border"][1]


def test_grays_of_plain_grounds():
    ground = sample("plain", 150).numpy().palette[:, 0]
    assert np.allclose(ground, ground[:, :1, :1])
    check_range("ground", ground[:, 0, 0])


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_objects_stand_apart_on_the_ground_and_are_visible(family):
    scenes = sample(family, 40)
    visible = render.count_visible_pixels(scenes, 32)[:, 0]
    scenes = scenes.numpy()
    for b in range(40):
        n = scenes.count[b]
        centre, size = scenes.position[b, 0, :n], scenes.size[b, :n]
        radius = shapes.GROUND_RADIUS[scenes.shape[b, :n]] * size
        gap = np.hypot(*(centre[:, None, :2] - centre[None, :, :2]).transpose(2, 0, 1))
        np.fill_diagonal(gap, np.inf)
        assert (gap > radius[:, None] + radius).all() and visible[b, :n].min() >= 3
        assert np.allclose(centre[:, 2], shapes.REST_HEIGHT[scenes.shape[b, :n]] * size)
    if family == "camo":
        assert (scenes.palette == scenes.palette[:, :1]).all()
        assert (scenes.finish[..., :3] == scenes.finish[:, :1, :3]).all()


def test_images_are_neither_dark_nor_bright():
    for family in ("plain", "textured"):
        image = Scenes(family, "val", 24, variation="v1").get_batch(range(60)).image.float() / 255
        means, spread = image.mean((1, 2, 3)), image.std((1, 2, 3))
        assert means.min() > 0.1 and means.max() < 0.9 and spread.min() > 0.02
        assert (image >= 1).all(1).float().mean((1, 2)).max() < 0.5, "share of white pixels"


def test_the_docs_list_all_ranges():
    text = (Path(__file__).parents[2] / "docs" / "scenes.md").read_text()
    rows = dict(re.findall(r"\| ([a-z ]+) \| (-?[\d.]+ to [\d.]+) \|", text))
    assert rows == {name: f"{low:g} to {high:g}" for name, (low, high) in RANGES.items()}


# ----------------------------------------------------------------------------------------------------- light, sensor


def test_lights_fall_off_with_the_squared_distance():
    point = torch.tensor([[[1.0, -2.0]], [[0.5, 3.0]], [[0.0, 0.4]]])
    key, strength = torch.tensor([[[3.0]], [[4.0]], [[6.0]]]), torch.tensor([[2.0]])
    for falloff in (0.0, 0.3, 1.0):
        light = torch.tensor([-1.0, 2.0, 5.0, 0.5, falloff, 0.0])[:, None]
        found = variation.vary_lights(light, point, [(key, strength)])
        assert len(found) == 2
        for (position, power), start in zip(found, (2.0, 0.5), strict=True):
            for i in range(2):
                near, far = (position[:, 0, 0] ** 2).sum(), ((position[:, 0, 0] - point[:, 0, i]) ** 2).sum()
                expected = start / (1 + falloff * (far / near - 1))
                torch.testing.assert_close(power[0, i], expected)


def test_ambient_light_falls_off_with_the_distance_from_the_origin():
    point, strength = torch.tensor([[[0.0, 6.0, 8.0]], [[0.0, 0.0, -6.0]], [[0.5, 0.5, 0.5]]]), torch.tensor([[2.0]])
    for falloff in (0.0, 0.5, 1.0):
        found = variation.vary_ambient(torch.tensor([0.0, 0, 0, 0, falloff, 0])[:, None], point, strength)
        expected = [2 / (1 + falloff * square / 36) for square in (0, 36, 100)]
        assert found[0].tolist() == pytest.approx(expected)


def test_polished_metal_is_darkest_at_the_horizon():
    z, dull = torch.linspace(-1, 1, 201)[None], torch.full((1, 201), 0.7)
    light = torch.zeros(6, 1)
    assert torch.equal(variation.reflection(light, z, dull), dull)
    torch.testing.assert_close(variation.matte(light, torch.ones(1, 1)), torch.tensor([[1 - 0.65]]))
    light[5] = 1
    mirror = variation.reflection(light, z, dull)[0]
    assert mirror.argmin() == 100 and mirror[0] > 0.8 and mirror[-1] > 0.8
    assert variation.matte(light, torch.tensor([[0.0, 1.0]])).tolist()[0] == pytest.approx([1.0, 0.05])


def neutral(**changes):
    names = ("red", "green", "blue", "tone", "haze", "vignette", "noise", "row", "column")
    values = dict.fromkeys(names, 0.0) | {"red": 1.0, "green": 1.0, "blue": 1.0} | changes
    return torch.tensor([values[name] for name in names])[:, None]


@pytest.fixture
def linear():
    return torch.rand(3, 1, 12, 16, generator=torch.Generator().manual_seed(0))


def test_a_neutral_sensor_is_the_root(linear):
    assert torch.equal(variation.expose(neutral(), linear, 16), linear.sqrt())


def test_gains_tone_and_haze(linear):
    found = variation.expose(neutral(red=1.1, blue=0.9, tone=-0.2, haze=0.1), linear, 16)
    for channel, gain in enumerate((1.1, 1.0, 0.9)):
        value = (linear[channel] * gain).clamp(max=1).sqrt()
        value = value - 0.2 * value * (1 - value)
        torch.testing.assert_close(found[channel], 0.9 * value + 0.1 * HAZE)


def test_vignette_is_that_of_the_square_image(linear):
    found = variation.expose(neutral(vignette=0.3), linear, 16)
    for row, column in ((0, 0), (5, 7), (11, 15)):
        u, v = (column + 0.5) / 8 - 1, (row + 2 + 0.5) / 8 - 1
        expected = (linear[:, 0, row, column] * (1 - 0.15 * (u * u + v * v))).sqrt()
        torch.testing.assert_close(found[:, 0, row, column], expected)


def test_noise_has_the_standard_deviation_asked_for():
    gray = torch.full((3, 1, 200, 200), 0.25)
    found = variation.expose(neutral(noise=0.02, row=200.0, column=30.0), gray, 200)
    assert abs(found.mean() - 0.5) < 1e-3 and abs(found.std() - 0.02) < 1e-3
    moved = variation.expose(neutral(noise=0.02, row=203.0, column=29.0), gray, 200)
    torch.testing.assert_close(found[:, :, 3:, :-1], moved[:, :, :-3, 1:])


def test_frames_have_noise_of_their_own():
    scenes = dataclasses.replace(sample("moving", 1), sensor=neutral(noise=0.02).T.double())
    sensor = render._frames(scenes, torch.tensor([0, 0]), torch.tensor([0, 5])).sensor
    assert sensor[7].tolist() == [0, 5 * render.GRAIN_STEP] and torch.equal(sensor[:7, 0], sensor[:7, 1])


@pytest.mark.parametrize("radius", [0.0, 1.5])
def test_the_key_light_has_its_own_radius(radius):
    scenes = sample("plain", 2)
    scenes = dataclasses.replace(scenes, light_radius=torch.full_like(scenes.light_radius, radius))
    frames = render._frames(scenes, torch.arange(2), torch.zeros(2, dtype=torch.long))
    points = render._key_light_samples(frames, 4)
    distance = (points - frames.key_light[..., None]).norm(dim=0)
    torch.testing.assert_close(distance, torch.full((2, 4), radius), rtol=0, atol=1e-5)


def test_the_field_of_view_scales_the_image():
    scenes = sample("plain", 3)
    point = scenes.target[:, None] + torch.tensor([[0.3, -0.2, 0.4]], dtype=torch.float64)
    wide = dataclasses.replace(scenes, half_width=2 * scenes.half_width)
    torch.testing.assert_close(wide.cameras().project(point), scenes.cameras().project(point) / 2)
