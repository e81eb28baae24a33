"""Registries of parts, the checks of their options, and plugins."""

import dataclasses
import importlib.metadata
import json
import math
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutslots import registry as registries
from cutslots.models.checkpoints import load, save
from cutslots.models.discovery import MODELS, DiscoveryConfig, build
from cutslots.modules.decoders import DECODERS
from cutslots.modules.encoders import ENCODERS, CNNConfig, CNNEncoder, EncoderConfig, ResNetConfig
from cutslots.modules.partition import PARTITIONS, CutPartitionConfig, SoftmaxPartitionConfig, SpacetimePartitionConfig
from cutslots.modules.slot_attention import SlotAttentionConfig
from cutslots.modules.slots import SLOTS, CutSlotsConfig
from cutslots.registry import (
    REGISTRIES,
    PartConfig,
    Range,
    Registry,
    check_option,
    load_entry_points,
    load_plugins,
    loaded_plugins,
    plugins_of,
)
from tests.models.configs import CONFIGS, IMAGES

OF_MODELS = [ENCODERS, PARTITIONS, SLOTS, DECODERS, MODELS]
PARTS = [(registry, name) for registry in OF_MODELS for name in registry.names()]


@pytest.fixture(autouse=True)
def clean_registries(monkeypatch):
    """Undo registrations and imports of plugins after each test."""
    monkeypatch.setattr(registries, "REGISTRIES", [*REGISTRIES])
    monkeypatch.setattr(registries, "_loaded", dict(registries._loaded))
    for each in REGISTRIES:
        monkeypatch.setattr(each, "parts", dict(each.parts))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if "plugin" in name:
            del sys.modules[name]


@dataclass(frozen=True)
class ToolConfig(PartConfig):
    pass


@dataclass(frozen=True)
class HammerConfig(ToolConfig):
    weight: Annotated[int, Range(1, 9)] = 3
    share: float = 0.5
    limit: float | None = None
    sizes: tuple[int, ...] = (1, 2)
    pair: Annotated[tuple[int, int], Range(0, 10)] = (3, 4)
    mode: Literal["soft", "hard"] = "soft"
    loud: bool = False
    label: str = ""


@dataclass(frozen=True)
class BoxConfig(ToolConfig):
    owner: str
    weight: Annotated[int, Range(1, 5)] = 2
    inside: ToolConfig = field(default_factory=HammerConfig)


@pytest.fixture
def tools():
    """A registry of two parts."""
    made = Registry("tool", ToolConfig)
    made.register("hammer", HammerConfig)(Hammer)
    made.register("box", BoxConfig)(lambda **given: given)
    return made


class Hammer:
    """Hits things.

    Hard.
    """

    def __init__(self, color: str = "grey", **given):
        self.color, self.given = color, given


# ------------------------------------------------------------------------------------------------------- registration


def test_register_and_build(tools):
    assert tools.names() == ["hammer", "box"] and tools in registries.REGISTRIES
    part = tools["hammer"]
    assert part == ("hammer", HammerConfig, Hammer, "Hits things.", __name__) and part.summary == "Hits things."
    assert tools["box"].summary == ""
    hammer = tools.build(HammerConfig(weight=5), color="red")
    assert isinstance(hammer, Hammer) and hammer.color == "red"
    assert hammer.given == dataclasses.asdict(HammerConfig(weight=5))


def test_register_returns_what_it_decorates(tools):
    @dataclass(frozen=True)
    class SawConfig(ToolConfig):
        teeth: int = 20

    def saw(teeth: int) -> int:
        return teeth

    assert tools.register("saw", SawConfig)(saw) is saw and tools.build(SawConfig(7)) == 7


def test_names_are_unique(tools):
    @dataclass(frozen=True)
    class SawConfig(ToolConfig):
        pass

    with pytest.raises(
        ValueError, match=r"^tool 'hammer' is already registered by tests.test_registry; choose another name$"
    ):
        tools.register("hammer", SawConfig)
    assert tools["hammer"].config is HammerConfig


def test_configs_are_unique():
    """Otherwise a config could not tell its part."""
    with pytest.raises(ValueError, match=r"^CNNConfig is the config of encoder 'cnn'; register a subclass$"):
        ENCODERS.register("mine", CNNConfig)

    @dataclass(frozen=True)
    class MineConfig(CNNConfig):
        pass

    ENCODERS.register("mine", MineConfig)(CNNEncoder)
    assert ENCODERS.part_of(MineConfig()).name == "mine" and ENCODERS.part_of(CNNConfig()).name == "cnn"


def test_configs_are_those_of_the_registry(tools):
    with pytest.raises(TypeError, match=r"^config is CNNConfig; expected a subclass of ToolConfig$"):
        tools.register("cnn", CNNConfig)


def test_unknown_parts(tools):
    message = r"^tool is 'saw'; expected one of hammer, box, or a part of a plugin \(--plugin FILE\)$"
    with pytest.raises(ValueError, match=message):
        tools["saw"]
    with pytest.raises(ValueError, match=r"^ToolConfig is not the config of a registered tool$"):
        tools.build(ToolConfig())


@pytest.mark.parametrize("registry, name", PARTS)
def test_parts_have_a_summary_and_no_plugin(registry, name):
    part = registry[name]
    assert part.summary.endswith(".") and part.plugin is None and plugins_of(part.config()) == []


# -------------------------------------------------------------------------------------------------------- round trips


def through_json(values):
    return json.loads(json.dumps(values))


@pytest.mark.parametrize("registry, name", PARTS)
def test_defaults_round_trip(registry, name):
    config = registry[name].config()
    values = through_json(registry.to_dict(config))
    assert values["name"] == name
    assert set(values) == {"name", *(each.name for each in dataclasses.fields(config))}
    assert registry.from_dict(values) == config == registry.from_dict({"name": name})
    assert type(registry.from_dict(values)) is type(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_models_round_trip(name):
    assert MODELS.from_dict(through_json(MODELS.to_dict(CONFIGS[name]))) == CONFIGS[name]


HAMMERS = st.builds(
    HammerConfig,
    weight=st.integers(1, 9),
    share=st.floats(-65_536, 65_536) | st.integers(-65_536, 65_536),
    limit=st.none() | st.floats(-65_536, 65_536),
    sizes=st.lists(st.integers(0, 65_536), max_size=64).map(tuple),
    pair=st.tuples(st.integers(0, 10), st.integers(0, 10)),
    mode=st.sampled_from(["soft", "hard"]),
    loud=st.booleans(),
    label=st.text(),
)
BOXES = st.recursive(HAMMERS, lambda inner: st.builds(BoxConfig, st.text(), st.integers(1, 5), inner), max_leaves=3)


@given(BOXES)
def test_any_values_round_trip(config):
    tools = Registry("tool", ToolConfig)
    registries.REGISTRIES.remove(tools)
    tools.register("hammer", HammerConfig)(Hammer)
    tools.register("box", BoxConfig)(lambda **given: given)
    assert tools.from_dict(through_json(tools.to_dict(config))) == config


@given(
    channels=st.integers(1, 65_536),
    kernel_sizes=st.lists(st.integers(1, 255), max_size=64).map(tuple),
    temperature=st.floats(1e-6, 1e6),
    reach=st.none() | st.floats(1e-6, 1e6),
    background=st.sampled_from(["cuts", "none"]),
    size=st.tuples(st.integers(8, 2048), st.integers(8, 2048)),
)
def test_any_values_of_a_model_round_trip(channels, kernel_sizes, temperature, reach, background, size):
    partition = CutPartitionConfig(temperature=temperature, reach=reach, background=background)
    encoder = CNNConfig(channels=channels, kernel_sizes=kernel_sizes)
    config = DiscoveryConfig(image_size=size, encoder=encoder, slots=CutSlotsConfig(partition=partition))
    assert MODELS.from_dict(through_json(MODELS.to_dict(config))) == config


def test_missing_options_take_their_defaults(tools):
    assert tools.from_dict({"name": "hammer", "weight": 9}) == HammerConfig(weight=9)
    assert tools.from_dict({"name": "box", "owner": "a"}) == BoxConfig("a")


def test_options_without_a_default_are_required(tools):
    with pytest.raises(ValueError, match=r"^tool 'box' lacks owner$"):
        tools.from_dict({"name": "box", "weight": 2})


def test_unknown_options_list_the_known_ones(tools):
    known = "weight, share, limit, sizes, pair, mode, loud, label"
    with pytest.raises(ValueError, match=f"^tool 'hammer' has no option 'depth'; its options are {known}$"):
        tools.from_dict({"name": "hammer", "depth": 1})
    with pytest.raises(ValueError, match=f"^tool 'hammer' has no option 'owner'; its options are {known}$"):
        tools.from_dict({"name": "box", "owner": "a", "inside": {"name": "hammer", "owner": "b"}})

    @dataclass(frozen=True)
    class BareConfig(ToolConfig):
        pass

    tools.register("bare", BareConfig)(Hammer)
    with pytest.raises(ValueError, match=r"^tool 'bare' has no option 'depth'; its options are none$"):
        tools.from_dict({"name": "bare", "depth": 1})


@pytest.mark.parametrize("values", [None, 3, "hammer", [], ["hammer"], {}, {"name": 3}, {"weight": 3}, {"name": None}])
def test_a_part_is_an_object_with_a_name(tools, values):
    with pytest.raises(ValueError, match=r'^tool is .*; expected an object with a "name" and options$'):
        tools.from_dict(values)
    with pytest.raises(ValueError, match=r'^tool is .*; expected an object with a "name" and options$'):
        tools.from_dict({"name": "box", "owner": "a", "inside": values})


# ------------------------------------------------------------------------------------------------------------- options

NUMBER = "a number from -65,536 to 65,536"


@pytest.mark.parametrize(
    "option, value, expected",
    [
        *(("weight", value, "an integer from 1 to 9") for value in (0, 10, -1, True, 2.0, "3", None, (3,))),
        *(("share", value, NUMBER) for value in (math.nan, math.inf, -math.inf, 1e9, True, "0.5", None)),
        *(("limit", value, f"{NUMBER} or none") for value in (math.nan, math.inf, False, "none", ())),
        *(
            ("sizes", value, "at most 64 values, each an integer from 0 to 65,536")
            for value in (3, "12", None, (1.5,), (True,), (-1,), (65_537,), (1,) * 65, ((1,),), {1: 2}, ["1"])
        ),
        *(
            ("pair", value, "2 values, each an integer from 0 to 10")
            for value in ((1,), (1, 2, 3), (), 5, (1, 11), (1, None), [1, True])
        ),
        *(("mode", value, "one of soft, hard") for value in ("Soft", "", None, 0, ("soft",), ["soft"], {})),
        *(("loud", value, "true or false") for value in (0, 1, "true", None)),
        *(("label", value, "a str") for value in (1, None, b"x", ("a",))),
    ],
)
def test_wrong_options(option, value, expected):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        HammerConfig(**{option: value})
    said = str(caught.value)
    assert said.startswith(f"{option} is ") and said.endswith(f"; expected {expected}") and len(said) < 250


@pytest.mark.parametrize("option", ["weight", "share", "limit"])
def test_integers_that_no_float_can_hold(option):
    for value in (10**400, -(10**400)):
        with pytest.raises(
            ValueError, match=rf"\A{option} is -?10+\.\.\.0+; expected an? (integer|number) from [^\n]+\Z"
        ):
            HammerConfig(**{option: value})


@pytest.mark.parametrize("value", [{}, 3, None, "hammer", CNNConfig()])
def test_wrong_parts(value):
    with pytest.raises(ValueError, match=r"^inside is .*; expected a ToolConfig$"):
        BoxConfig("a", inside=value)


def test_right_options():
    config = HammerConfig(weight=9, share=1, limit=None, sizes=[4, 5], pair=[0, 10], mode="hard", loud=True, label="é")
    assert config.sizes == (4, 5) and config.pair == (0, 10), "lists become tuples"
    assert HammerConfig(sizes=()).sizes == () and HammerConfig(sizes=(7,) * 64).sizes == (7,) * 64
    assert hash(config) == hash(dataclasses.replace(config))


def test_options_cannot_be_set():
    with pytest.raises(dataclasses.FrozenInstanceError):
        HammerConfig().weight = 4


@pytest.mark.parametrize(
    "bounds, text",
    [(Range(1, 65_536), "from 1 to 65,536"), (Range(min=0), "at least 0"), (Range(max=1000), "at most 1,000")],
)
def test_ranges_in_words(bounds, text):
    assert str(bounds) == text


def test_ranges_without_an_end():
    check_option("n", 10**400, Annotated[int, Range(min=0)])
    check_option("n", -(10**400), Annotated[int, Range(max=0)])
    for value in (math.inf, -math.inf, math.nan):
        with pytest.raises(ValueError, match=r"^x is "):
            check_option("x", value, Annotated[float, Range()])
    with pytest.raises(ValueError, match=r"^n is -1; expected an integer at least 0$"):
        check_option("n", -1, Annotated[int, Range(min=0)])


@pytest.mark.parametrize("value, right", [(5, True), (None, True), (0, False), (10, False)])
def test_ranges_of_optional_numbers(value, right):
    for hint in (Annotated[int, Range(1, 9)] | None, Annotated[int | None, Range(1, 9)]):
        if right:
            check_option("n", value, hint)
        else:
            with pytest.raises(ValueError, match=rf"^n is {value}; expected an integer from 1 to 9 or none$"):
                check_option("n", value, hint)


# -------------------------------------------------------------------------------------------------------------- select


def test_select_keeps_shared_options():
    current = CNNConfig(channels=7, kernel_sizes=(3, 3), pyramid_levels=2)
    assert ENCODERS.select(current, "resnet") == ResNetConfig(channels=7, kernel_sizes=(3, 3), pyramid_levels=2)
    assert ENCODERS.select(current, "cnn") is current
    slots = CutSlotsConfig(num_slots=5, slot_dim=9, mlp_dim=17, relative_positions=True)
    expected = SlotAttentionConfig(num_slots=5, slot_dim=9, mlp_dim=17, relative_positions=True)
    assert SLOTS.select(slots, "slot-attention") == expected
    assert SLOTS.select(expected, "cut-slots") == CutSlotsConfig(5, 9, True, mlp_dim=17)


def test_select_between_a_config_and_its_subclass():
    cut = CutPartitionConfig(temperature=0.3, gamma=0.7)
    assert PARTITIONS.select(cut, "spacetime-cut") == SpacetimePartitionConfig(temperature=0.3, gamma=0.7)
    softmax = PARTITIONS.select(cut, "softmax")
    assert type(softmax) is SoftmaxPartitionConfig and softmax.temperature == 0.3
    assert PARTITIONS.select(softmax, "cut") == CutPartitionConfig(temperature=0.3)


def test_select_keeps_nested_parts(tools):
    partition = SoftmaxPartitionConfig(temperature=0.2)
    model = DiscoveryConfig(image_size=(32, 48), slots=CutSlotsConfig(partition=partition))
    pairs = MODELS.select(model, "pair-discovery")
    assert (pairs.image_size, pairs.encoder, pairs.slots, pairs.decoder) == (
        model.image_size,
        model.encoder,
        model.slots,
        model.decoder,
    )


def test_select_keeps_values_that_the_other_part_accepts(tools):
    with pytest.raises(ValueError, match=r"^tool is 'saw'; expected one of hammer, box"):
        tools.select(HammerConfig(), "saw")
    tools.register("crate", CrateConfig)(Hammer)
    assert tools.select(HammerConfig(weight=4), "crate") == CrateConfig(weight=4)
    assert tools.select(HammerConfig(weight=9), "crate") == CrateConfig(), "9 is out of the other part's range"


@dataclass(frozen=True)
class CrateConfig(ToolConfig):
    weight: Annotated[int, Range(1, 5)] = 2


# ------------------------------------------------------------------------------------------------------------- plugins

PLUGIN = '''
from __future__ import annotations
from dataclasses import dataclass
from cutslots.modules.encoders import ENCODERS, CNNEncoder, EncoderConfig

@dataclass(frozen=True)
class MineConfig(EncoderConfig):
    width: int = 4

@ENCODERS.register("mine", MineConfig)
class Mine(CNNEncoder):
    """An encoder of one layer."""

    def __init__(self, width: int) -> None:
        super().__init__(width, (3,))
'''


@pytest.fixture
def plugin(tmp_path):
    """A file that registers the encoder "mine"."""
    file = tmp_path / "my_parts.py"
    file.write_text(PLUGIN)
    return file


def mine(**options):
    return dataclasses.replace(IMAGES, encoder=ENCODERS["mine"].config(**options))


def test_a_plugin_registers_parts(plugin):
    load_plugins([plugin])
    part = ENCODERS["mine"]
    assert (part.plugin, part.summary) == ("my_parts.py", "An encoder of one layer.")
    assert "my_parts.py" in loaded_plugins()
    assert build(mine(width=6)).encoder.out_channels == 6
    assert plugins_of(part.config()) == plugins_of(mine()) == ["my_parts.py"] and plugins_of(IMAGES) == []


def test_a_plugin_is_imported_once(plugin, monkeypatch):
    plugin.write_text(PLUGIN + "\nimport sys\nsys.imports_of_mine = getattr(sys, 'imports_of_mine', 0) + 1\n")
    monkeypatch.setattr(sys, "imports_of_mine", 0, raising=False)
    monkeypatch.chdir(plugin.parent)
    link = plugin.with_name("link.py")
    link.symlink_to(plugin)
    load_plugins([plugin, str(plugin), "my_parts.py", "./my_parts.py", link])
    load_plugins([plugin])
    assert sys.imports_of_mine == 1


def test_parts_registered_after_a_plugin_are_not_its_own(plugin, tools):
    load_plugins([plugin])

    @dataclass(frozen=True)
    class SawConfig(ToolConfig):
        pass

    tools.register("saw", SawConfig)(Hammer)
    assert tools["saw"].plugin == __name__


def test_plugins_of_the_same_file_name(plugin, tmp_path):
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "my_parts.py"
    other.write_text(PLUGIN.replace('"mine"', '"other"'))
    load_plugins([plugin, other])
    assert ENCODERS["mine"].build is not ENCODERS["other"].build
    assert ENCODERS["mine"].config().width == ENCODERS["other"].config().width == 4


@pytest.mark.parametrize("stems", [("a", "a_1"), ("a_1", "a"), ("ab", "a"), ("a_0", "a")])
def test_plugins_do_not_replace_each_others_modules(stems, tmp_path):
    for folder, stem in enumerate((*stems, *stems)):
        file = tmp_path / str(folder) / f"{stem}.py"
        file.parent.mkdir()
        file.write_text(PLUGIN.replace('"mine"', f'"mine-{folder}"'))
        load_plugins([file])
    parts = [ENCODERS[f"mine-{folder}"] for folder in range(4)]
    assert len({part.build.__module__ for part in parts}) == 4
    assert all(sys.modules[part.build.__module__].Mine is part.build for part in parts)


@pytest.mark.parametrize(
    "ending, reason",
    [
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def", "SyntaxError: "),
        ("ENCODERS.register('cnn', EncoderConfig)", "ValueError: encoder 'cnn' is already registered by cutslots"),
        ("ENCODERS.register('mine', EncoderConfig)", "ValueError: encoder 'mine' is already registered by my_parts.py"),
    ],
)
def test_a_plugin_that_fails_leaves_nothing_behind(plugin, ending, reason):
    plugin.write_text(PLUGIN + ending)
    before, modules = ENCODERS.names(), set(sys.modules)
    with pytest.raises(ValueError, match=r"\Aplugin: \S+my_parts\.py cannot be imported: ") as caught:
        load_plugins([plugin])
    assert reason in str(caught.value) and str(plugin) in str(caught.value)
    assert ENCODERS.names() == before and "my_parts.py" not in loaded_plugins()
    assert not [name for name in set(sys.modules) - modules if "my_parts" in name]
    plugin.write_text(PLUGIN)
    load_plugins([plugin])
    assert ENCODERS["mine"].plugin == "my_parts.py", "it can be loaded once it is repaired"


def test_missing_plugins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^plugin: there is no gone\.py; expected a Python file or the name of a mod"):
        load_plugins(["gone.py"])
    message = r"^plugin: no_such_module cannot be imported: ModuleNotFoundError: No module named 'no_such_module'$"
    with pytest.raises(ValueError, match=message):
        load_plugins(["no_such_module"])
    (tmp_path / "folder").mkdir()
    for name in ("", ".", "folder/"):
        with pytest.raises(ValueError, match=r"\Aplugin: [^\n]*cannot be imported: [^\n]+\Z"):
            load_plugins([name])


def test_a_plugin_may_be_a_module(tmp_path, monkeypatch):
    package = tmp_path / "plugin_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "parts.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    load_plugins(["plugin_package.parts", "plugin_package"])
    assert ENCODERS["mine"].plugin == "plugin_package.parts"
    assert {"plugin_package.parts", "plugin_package"} <= loaded_plugins()


# ------------------------------------------------------------------------------------------ plugins of a checkpoint


def forget(plugin_part="mine"):
    """Make the registry what it is in a process that has not loaded the plugin."""
    del ENCODERS.parts[plugin_part]
    registries._loaded.clear()


def test_a_checkpoint_names_its_plugins(plugin, tmp_path):
    load_plugins([plugin])
    config = mine(width=6)
    save(build(config), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["plugins"] == ["my_parts.py"] and values["encoder"] == {"name": "mine", "width": 6}
    assert load(tmp_path).config == config
    forget()
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        load(tmp_path)
    said = (
        f"{tmp_path / 'config.json'} describes a model with parts of the plugin my_parts.py; pass --plugin my_parts.py"
    )
    assert str(caught.value).startswith(said) and "plugins=[...] in Python" in str(caught.value)
    assert load(tmp_path, plugins=[plugin]).encoder.out_channels == 6


def test_a_checkpoint_runs_no_plugin_by_itself(plugin, tmp_path, monkeypatch):
    """config.json may name any file; only the caller's plugins are imported."""
    load_plugins([plugin])
    save(build(mine()), tmp_path)
    forget()
    monkeypatch.chdir(tmp_path)  # where the plugin is
    with pytest.raises(ValueError, match=r"describes a model with parts of the plugin my_parts\.py"):
        load(tmp_path)
    assert "mine" not in ENCODERS.names()


def test_the_wrong_version_of_a_plugin(plugin, tmp_path):
    load_plugins([plugin])
    save(build(mine()), tmp_path)
    forget()
    plugin.write_text(PLUGIN.replace("width", "depth"))
    with pytest.raises(ValueError, match=r"encoder 'mine' has no option 'width'; its options are depth$"):
        load(tmp_path, plugins=[plugin])


# -------------------------------------------------------------------------------------------------------- entry points


@pytest.fixture
def installed(monkeypatch):
    """Return a function that installs entry points, by the name of a module and what loading it does."""

    def install(**plugins: Callable[[], None]):
        def entry(name, action):
            return types.SimpleNamespace(name=name, value=name, load=action)

        found = [entry(name, action) for name, action in plugins.items()]
        monkeypatch.setattr(
            importlib.metadata, "entry_points", lambda group: found if group == "cutslots.plugins" else []
        )

    return install


def test_unknown_names_are_looked_up_in_installed_plugins(installed, tools):
    @dataclass(frozen=True)
    class SawConfig(ToolConfig):
        pass

    calls = []

    def action():
        calls.append(1)
        tools.register("saw", SawConfig)(Hammer)

    installed(plugin_of_saws=action)
    assert tools["hammer"].plugin == __name__ and not calls, "known names need no plugins"
    assert tools["saw"].plugin == "plugin_of_saws" and plugins_of(SawConfig()) == ["plugin_of_saws"]
    assert "plugin_of_saws" in loaded_plugins()
    load_entry_points()
    assert len(calls) == 1
    with pytest.raises(ValueError, match=r"^tool is 'axe'; expected one of hammer, box, saw"):
        tools["axe"]
    assert len(calls) == 1


def test_an_installed_plugin_that_fails(installed, tools):
    installed(plugin_of_saws=lambda: 1 / 0)
    message = r"^plugin: plugin_of_saws cannot be imported: ZeroDivisionError: division by zero$"
    with pytest.raises(ValueError, match=message):
        tools["saw"]
    assert "plugin_of_saws" not in loaded_plugins() and tools.names() == ["hammer", "box"]


def test_checkpoints_find_parts_of_installed_plugins(installed, plugin, tmp_path):
    load_plugins([plugin])
    part = ENCODERS["mine"]
    save(build(mine()), tmp_path)
    forget()
    installed(plugin_of_mine=lambda: ENCODERS.register("mine", part.config)(part.build))
    assert load(tmp_path).encoder.out_channels == 4


def test_base_configs_are_empty():
    assert EncoderConfig() == EncoderConfig() and not dataclasses.fields(EncoderConfig)


# --------------------------------------------------------------------------------------------------- values from JSON


@dataclass(frozen=True)
class DrawerConfig(ToolConfig):
    sizes: tuple[tuple[int, int], ...] = ((1, 2), (3, 4))
    path: Path | None = Path("here")
    inside: ToolConfig | None = field(default_factory=HammerConfig)
    labelled: Annotated[ToolConfig, "of any kind"] = field(default_factory=HammerConfig)


@pytest.mark.parametrize("changes", [{}, {"path": None, "inside": None}, {"sizes": ()}])
def test_nested_values_survive_json(tools, changes):
    tools.register("drawer", DrawerConfig)(lambda **given: given)
    config = DrawerConfig(**changes)
    assert tools.from_dict(json.loads(json.dumps(tools.to_dict(config)))) == config


@pytest.mark.parametrize("name", ["name", "plugins"])
def test_names_of_config_files_are_reserved(tools, name):
    config = dataclasses.make_dataclass("Odd", [(name, str, "x")], bases=(ToolConfig,), frozen=True)
    with pytest.raises(ValueError, match=f"has an option '{name}', which is reserved; choose another name"):
        tools.register("odd", config)


def test_select_drops_values_that_the_other_part_does_not_accept(tools):
    @dataclass(frozen=True)
    class WideConfig(ToolConfig):
        weight: tuple[int, int] = (7, 7)

    tools.register("wide", WideConfig)(Hammer)
    assert tools.select(HammerConfig(weight=5), "wide") == WideConfig()


def test_built_in_parts_that_a_plugin_imports_first_stay_built_in(tmp_path):
    (tmp_path / "early.py").write_text("import cutslots.modules.encoders\nraise ValueError('broken')")
    code = f"""
from cutslots.registry import load_plugins
try:
    load_plugins([{str(tmp_path / "early.py")!r}])
except ValueError as error:
    assert "broken" in str(error)
from cutslots.modules.encoders import ENCODERS
assert ENCODERS["cnn"].plugin is None
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
