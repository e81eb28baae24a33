import numpy as np
import pytest
from skimage.color import deltaE_ciede2000, rgb2lab

from cutslots.viz.palette import PALETTE

# Machado, Oliveira and Fernandes (2009), severity 1: matrices that act on linear RGB.
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def to_lab(colors, vision):
    """CIELAB of sRGB bytes (N, 3) as seen with this kind of vision."""
    x = colors / 255
    linear = np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4) @ np.transpose(VISION[vision])
    linear = linear.clip(0, 1)
    return rgb2lab(np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055))


def smallest_distance(colors, vision):
    lab = to_lab(colors, vision)
    i, j = np.triu_indices(len(lab), 1)
    return deltaE_ciede2000(lab[i], lab[j]).min()


@pytest.mark.parametrize("vision", VISION)
def test_first_colors_differ_for_every_kind_of_vision(vision):
    assert smallest_distance(PALETTE[:6], vision) > 24
    assert smallest_distance(PALETTE[:9], vision) > 20
    assert smallest_distance(PALETTE[:13], vision) > 15.5
    overlay = 0.35 * 127 + 0.65 * PALETTE  # on a gray image
    assert smallest_distance(overlay[:9], vision) > 15 and smallest_distance(overlay[:13], vision) > 11.5


def test_first_colors_differ_in_grayscale():
    lightness = to_lab(PALETTE, "normal")[:, 0]
    assert np.diff(np.sort(lightness[:9])).min() > 6.5 and np.diff(np.sort(lightness[:13])).min() > 5
    assert lightness[:13].max() < 95, "no color is close to white paper"


def test_every_label_has_its_own_color():
    assert PALETTE.shape == (256, 3) and not PALETTE[0].any()
    assert len(np.unique(PALETTE, axis=0)) == 256
