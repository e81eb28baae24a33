import numpy as np
import pytest

from cutslots.scenes import draw, physics, shapes
from cutslots.scenes.draw import FRAMES, Dice


@pytest.fixture(scope="module")
def world():
    return draw.draw("moving", "test", 0, np.arange(12))


def test_motion_is_continuous(world):
    for b, n in enumerate(world.count):
        step = np.diff(world.position[b, :, :n], axis=0)
        assert np.linalg.norm(step, axis=-1).max() <= physics.MOST_STEP
        turn = np.einsum("fkij,fkij->fk", world.rotation[b, 1:, :n], world.rotation[b, :-1, :n])
        assert np.degrees(np.arccos(np.clip((turn - 1) / 2, -1, 1))).max() < 120
    assert world.position.shape[1] == FRAMES


def test_rotations_stay_rotations(world):
    R = world.rotation
    assert np.allclose(R @ R.swapaxes(-1, -2), np.eye(3), atol=1e-9) and np.allclose(np.linalg.det(R), 1)


def test_things_fall_and_come_to_rest_on_the_ground(world):
    for b, n in enumerate(world.count):
        lowest = world.position[b, :, :n, 2]
        assert lowest.min() > 0
        assert lowest[-1].mean() < lowest[0].mean()
        speed = np.linalg.norm(world.velocity[b, :, :n], axis=-1)
        assert speed[-1].mean() < 2.0


def test_bodies_do_not_sink_or_overlap(world):
    for b, n in enumerate(world.count):
        bodies = physics.Bodies(world.shape[b : b + 1], world.size[b : b + 1], np.arange(10)[None] < n)
        radius = bodies.radius[0, :n]
        for f in range(FRAMES):
            bodies.turn, bodies.x = world.rotation[b : b + 1, f], world.position[b : b + 1, f]
            reach = np.where(bodies.round, bodies.size, -bodies.depth())[0, :n]
            assert (bodies.x[0, :n, 2] > reach - 0.08 * bodies.size[0, :n] - 0.03).all()
            gap = np.linalg.norm(bodies.x[0, :n, None] - bodies.x[0, None, :n], axis=-1)
            np.fill_diagonal(gap, np.inf)
            assert (gap > 0.93 * (radius[:, None] + radius)).all()


def test_energy_never_grows():
    dice = Dice("moving", "train", 5, np.arange(8), np.zeros(8, dtype=int))
    shape = dice.choice("shape", [shapes.NAMES.index(s) for s in ("sphere", "cube", "cylinder")], 10)
    bodies = physics.Bodies(shape, dice.choice("size", [0.7, 0.4], 10), np.ones((8, 10), dtype=bool))
    bodies.x = dice.between("x", -2, 2, 10, 3)
    bodies.x[..., 2] += 3
    bodies.v, bodies.w = dice.between("v", -3, 3, 10, 3), dice.between("w", -5, 5, 10, 3)
    last = bodies.energy()
    for _ in range(600):
        bodies.step(1 / 192)
        now = bodies.energy()
        assert (now <= last * (1 + 1e-9) + 1e-9).all()
        last = now


def test_a_ball_falls_as_galileo_says():
    bodies = physics.Bodies(np.array([[shapes.NAMES.index("sphere")]]), np.array([[0.5]]), np.array([[True]]))
    bodies.x[0, 0] = [0, 0, 5]
    for _ in range(96):
        bodies.step(1 / 192)
    assert abs(bodies.x[0, 0, 2] - (5 - physics.GRAVITY * 0.5**2 / 2)) < 0.05
