import numpy as np
import pytest

from cutslots.scenes import physics, shapes
from cutslots.scenes.sample import FRAMES, HashRNG, sample_scenes


@pytest.fixture(scope="module")
def scenes():
    return sample_scenes("moving", "test", 0, np.arange(12)).numpy()


def test_motion_is_continuous(scenes):
    for b, n in enumerate(scenes.count):
        step = np.diff(scenes.position[b, :, :n], axis=0)
        assert np.linalg.norm(step, axis=-1).max() <= physics.MAX_STEP
        turn = np.einsum("fkij,fkij->fk", scenes.rotation[b, 1:, :n], scenes.rotation[b, :-1, :n])
        assert np.degrees(np.arccos(np.clip((turn - 1) / 2, -1, 1))).max() < 120
    assert scenes.position.shape[1] == FRAMES


def test_rotations_stay_rotations(scenes):
    R = scenes.rotation
    assert np.allclose(R @ R.swapaxes(-1, -2), np.eye(3), atol=1e-9) and np.allclose(np.linalg.det(R), 1)


def test_objects_fall_and_slow_down(scenes):
    for b, n in enumerate(scenes.count):
        height = scenes.position[b, :, :n, 2]
        assert height.min() > 0
        assert height[-1].mean() < height[0].mean()
        speed = np.linalg.norm(scenes.velocity[b, :, :n], axis=-1)
        assert speed[-1].mean() < 2.0


def test_bodies_do_not_sink_into_the_ground_or_overlap(scenes):
    for b, n in enumerate(scenes.count):
        bodies = physics.Bodies(scenes.shape[b : b + 1], scenes.size[b : b + 1], np.arange(10)[None] < n)
        radius = bodies.radius[0, :n]
        for f in range(FRAMES):
            bodies.rotation, bodies.x = scenes.rotation[b : b + 1, f], scenes.position[b : b + 1, f]
            clearance = np.where(bodies.round, bodies.size, -bodies.depth())[0, :n]
            assert (bodies.x[0, :n, 2] > clearance - 0.08 * bodies.size[0, :n] - 0.03).all()
            gap = np.linalg.norm(bodies.x[0, :n, None] - bodies.x[0, None, :n], axis=-1)
            np.fill_diagonal(gap, np.inf)
            assert (gap > 0.93 * (radius[:, None] + radius)).all()


def test_energy_never_grows():
    rng = HashRNG("moving", "train", 5, np.arange(8), np.zeros(8, dtype=int))
    shape = rng.choice("shape", [shapes.NAMES.index(s) for s in ("sphere", "cube", "cylinder")], 10).numpy()
    bodies = physics.Bodies(shape, rng.choice("size", [0.7, 0.4], 10).numpy(), np.ones((8, 10), dtype=bool))
    bodies.x = rng.uniform("x", -2, 2, 10, 3).numpy()
    bodies.x[..., 2] += 3
    bodies.v, bodies.w = rng.uniform("v", -3, 3, 10, 3).numpy(), rng.uniform("w", -5, 5, 10, 3).numpy()
    last = bodies.energy()
    for _ in range(600):
        bodies.step(1 / 192)
        now = bodies.energy()
        assert (now <= last * (1 + 1e-9) + 1e-9).all()
        last = now


def test_a_ball_falls_with_constant_acceleration():
    bodies = physics.Bodies(np.array([[shapes.NAMES.index("sphere")]]), np.array([[0.5]]), np.array([[True]]))
    bodies.x[0, 0] = [0, 0, 5]
    for _ in range(96):
        bodies.step(1 / 192)
    assert abs(bodies.x[0, 0, 2] - (5 - physics.GRAVITY * 0.5**2 / 2)) < 0.05
