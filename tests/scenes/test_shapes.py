import math

import numpy as np
import pytest
import torch

from cutslots.scenes import shapes

SLOPE = 0.75 / 1.5  # of the pyramid's walls


def inside(name, p, slack=0.0):
    """Whether points (3, m) lie in a shape, computed independently of the intersections."""
    x, y, z = p
    r = np.hypot(x, y)
    hexagon = np.maximum.reduce([x * math.cos(a) + y * math.sin(a) for a in np.arange(6) * math.pi / 3])
    depth = {
        "sphere": np.sqrt(x**2 + y**2 + z**2) - 1,
        "cube": np.maximum.reduce([abs(x), abs(y), abs(z)]) - 0.75,
        "cylinder": np.maximum(r, abs(z)) - 0.85,
        "cone": np.maximum(r - 0.95 * (0.85 - z) / 1.7, abs(z) - 0.85),
        "pyramid": np.maximum(np.maximum(abs(x), abs(y)) - SLOPE * (0.75 - z), abs(z) - 0.75),
        "prism": np.maximum(hexagon - 0.75, abs(z) - 0.7),
        "dome": np.maximum(np.sqrt(x**2 + y**2 + (z + 0.5) ** 2) - 1, -0.5 - z),
        "capsule": np.sqrt((x - np.clip(x, -0.55, 0.55)) ** 2 + y**2 + z**2) - 0.5,
        "wedge": np.maximum.reduce([(abs(x) * 0.8 + z * 0.6) - 0.42, abs(y) - 0.7, -0.6 - z]),
    }
    return depth[name] <= slack


def random_rays(n=400):
    rng = np.random.default_rng(0)
    o = rng.standard_normal((3, n))
    o *= 3 / np.linalg.norm(o, axis=0)
    d = rng.uniform(-0.9, 0.9, (3, n)) - o
    return o, d / np.linalg.norm(d, axis=0)


@pytest.mark.parametrize("name", shapes.NAMES)
def test_intersections_agree_with_ray_marching(name):
    """The reference takes small steps along the ray until a point is inside."""
    o, d = random_rays()
    t, normal = (x.numpy() for x in shapes.SHAPES[name][0](torch.tensor(o), torch.tensor(d)))
    steps = np.linspace(0, 6, 4001)
    is_inside = np.stack([inside(name, o + s * d) for s in steps])
    marched = np.where(is_inside.any(0), steps[is_inside.argmax(0)], np.inf)
    hit = np.isfinite(t)
    # Marching may step over a corner that a ray grazes. It never finds a hit that the intersection misses.
    assert not (np.isfinite(marched) & ~hit).any() and (hit & np.isfinite(marched)).sum() > 100
    both = hit & np.isfinite(marched)
    assert np.abs(t[both] - marched[both]).max() < 2e-3
    point = o + np.where(hit, t, 0) * d
    assert inside(name, point[:, hit], 1e-6).all() and not inside(name, point[:, hit], -1e-6).any()
    assert np.allclose(np.linalg.norm(normal[:, hit], axis=0), 1, atol=1e-6)
    assert ((normal * d).sum(0)[hit] < 1e-9).all()


@pytest.mark.parametrize("name", shapes.NAMES)
def test_bounding_radii_and_rest_height(name):
    i = shapes.NAMES.index(name)
    grid = np.stack(np.meshgrid(*[np.linspace(-1.4, 1.4, 113)] * 3)).reshape(3, -1)
    points = grid[:, inside(name, grid)]
    assert np.linalg.norm(points, axis=0).max() <= shapes.OUTER_RADIUS[i] + 1e-9
    assert np.hypot(points[0], points[1]).max() <= shapes.GROUND_RADIUS[i] + 1e-9
    assert abs(points[2].min() + shapes.REST_HEIGHT[i]) < 0.03
