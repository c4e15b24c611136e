"""Saving, loading and exporting grown models; files that do not fit are refused before anything is changed."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import esper
from esper.growth import GrowthError, add_slots, register_blueprint
from esper.growth.host.layout import Place
from esper.growth.host.slotted import Slotted
from esper.growth.seeds import blueprints as registry
from tests.growth.host.helpers import every_family, germinate, hooks_of, is_same, perturb, plant_kept_seeds, run
from tests.growth.hosts import FAMILIES, GPT, Family, ResNet

RESNET = FAMILIES["resnet"]


@pytest.fixture(autouse=True)
def _blueprints_restored() -> Iterator[None]:
    before = dict(registry.REGISTRY)
    yield
    registry.REGISTRY.clear()
    registry.REGISTRY.update(before)


def grown_model(family: Family = RESNET, *names: str) -> nn.Module:
    slotted = add_slots(family.model(), family.batch()[:2])
    plant_kept_seeds(slotted, *(names or family.slots))
    return slotted.bake()


def unchanged(model: nn.Module, source: Any, message: str) -> None:
    """Loading is refused, and the model is what it was."""
    names, before = list(model.state_dict()), [tensor.clone() for tensor in model.state_dict().values()]
    with pytest.raises(GrowthError, match=message):
        esper.load(source, model=model)
    assert list(model.state_dict()) == names
    assert is_same(list(model.state_dict().values()), before)
    assert not hooks_of(model)


@pytest.mark.slow
@every_family
def test_a_saved_model_loads_with_equal_outputs(family: Family, tmp_path: Path) -> None:
    batch = family.batch()
    model = grown_model(family)
    expected = run(model, batch)
    esper.save(model, tmp_path / "grown.safetensors")
    assert is_same(run(esper.load(tmp_path / "grown.safetensors", model=family.model()), batch), expected)

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = family.make()  # other weights
    assert esper.load(torch.load(file, weights_only=True), model=fresh) is fresh
    assert is_same(run(fresh.eval(), batch), expected)
    assert list(fresh.state_dict()) == list(model.state_dict())


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    model = grown_model(FAMILIES["gpt"])
    esper.save(model, tmp_path / "grown.safetensors")
    assert len({"tokens.weight", "head.weight"} & set(load_file(tmp_path / "grown.safetensors"))) == 1
    loaded = esper.load(tmp_path / "grown.safetensors", model=GPT())
    assert loaded.get_submodule("head").weight is loaded.get_submodule("tokens").weight
    assert torch.equal(loaded.get_submodule("head").weight, model.get_submodule("head").weight)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_model_on_which_nothing_grew_is_saved_and_loaded_too(tmp_path: Path) -> None:
    model = add_slots(RESNET.model(), RESNET.batch()).bake()
    esper.save(model, tmp_path / "plain.safetensors")
    assert is_same(run(esper.load(tmp_path / "plain.safetensors", model=ResNet()).eval(), RESNET.batch()), run(model, RESNET.batch()))


@pytest.mark.slow
def test_alpha_and_blending_are_saved_and_loaded() -> None:
    slotted = add_slots(RESNET.model(), RESNET.batch())
    perturb(germinate(slotted, "layer1.0", "conv3x3", blending="gate"))
    perturb(germinate(slotted, "layer1.1", "conv1x1", blending="multiply"))
    for name in ("layer1.0", "layer1.1"):
        slotted.slot(name).alpha, slotted.slot(name).is_kept = 0.5, True
    model = slotted.bake()
    assert is_same(run(esper.load(model.state_dict(), model=RESNET.model()), RESNET.batch()), run(model, RESNET.batch()))


@pytest.mark.slow
def test_a_loaded_model_has_the_mode_and_precision_of_the_instance() -> None:
    state = grown_model().state_dict()
    model = esper.load(state, model=ResNet().double().eval())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert not any(module.training for module in model.modules())
    assert all(module.training for module in esper.load(state, model=ResNet()).modules())
    run(model, RESNET.batch().double())


@pytest.mark.slow
def test_a_loaded_model_trains_and_grows_on() -> None:
    model = esper.load(grown_model().state_dict(), model=RESNET.model()).train()
    model(RESNET.batch()).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert tuple(add_slots(model, RESNET.batch()).slots) == RESNET.slots


# Refused files and hosts


@pytest.mark.slow
def test_another_host_is_refused_before_anything_is_changed() -> None:
    state = grown_model().state_dict()
    unchanged(FAMILIES["sequential mlp"].model(), state, "seed after 'layer1.0', which this model does not have")
    wider = RESNET.model()
    wider.fc = nn.Linear(16, 7)  # type: ignore[assignment]
    unchanged(wider, state, r"does not fit this instance of the host, so nothing was loaded; of another shape: fc.weight, fc.bias")
    more = RESNET.model()
    more.extra = nn.Linear(2, 2)  # type: ignore[assignment]
    unchanged(more, state, "not in the file: extra.weight, extra.bias")
    less = {name: tensor for name, tensor in state.items() if name != "layer1.0.esper_seed.alpha"}
    unchanged(RESNET.model(), less, r"not in the file: layer1.0.esper_seed.alpha")
    unchanged(RESNET.model(), {**state, "surplus": torch.zeros(1)}, "only in the file: surplus")


@pytest.mark.slow
def test_an_instance_that_has_grown_already_is_refused() -> None:
    model = grown_model()
    with pytest.raises(GrowthError, match=r"already has the seed 'layer1.0.esper_seed'; pass a new instance, or use load_state_dict"):
        esper.load(model.state_dict(), model=model)
    model.load_state_dict(grown_model().state_dict())


@pytest.mark.slow
def test_a_file_that_is_no_safetensors_file_is_refused_with_advice(tmp_path: Path) -> None:
    torch.save(grown_model().state_dict(), tmp_path / "model.pt")
    unchanged(
        RESNET.model(),
        tmp_path / "model.pt",
        r"cannot be read as a safetensors file .*esper.load\(torch.load\('.*model.pt', weights_only=True\)",
    )
    (tmp_path / "empty").write_bytes(b"")
    unchanged(RESNET.model(), tmp_path / "empty", "cannot be read as a safetensors file")
    unchanged(RESNET.model(), tmp_path / "nothing", "there is no file .*nothing")


@pytest.mark.slow
def test_a_damaged_spec_is_refused(tmp_path: Path) -> None:
    esper.save(grown_model(), tmp_path / "grown.safetensors")
    state = load_file(tmp_path / "grown.safetensors")
    for damaged in (state["layer1.0.esper_seed.use_esper_load"][:-3].clone(), torch.zeros(4)):
        save_file({**state, "layer1.0.esper_seed.use_esper_load": damaged}, tmp_path / "damaged.safetensors")
        unchanged(RESNET.model(), tmp_path / "damaged.safetensors", "esper_seed.use_esper_load' does not describe a seed.*damaged")


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [[], [0, 8, 8], [-4, 8, 8], [8], [8, 8, 8, 8], [2**40, 8, 8], [2**62, 8, 8], [2**70, 8, 8], [2**20, 8, 8]]
)
def test_a_spec_of_an_absurd_shape_is_refused(shape: list[int]) -> None:
    state = grown_model().state_dict()
    name = "layer1.0.esper_seed.use_esper_load"
    spec = json.loads(bytes(state[name].tolist()))
    state[name] = torch.frombuffer(bytearray(json.dumps({**spec, "shape": shape}).encode()), dtype=torch.uint8)
    unchanged(RESNET.model(), state, r"layer1\.0")


def own_blueprint(bias: bool = True) -> None:
    @register_blueprint("mine", kinds=["conv"], replace=True)
    def mine(place: Place) -> nn.Module:
        layer = nn.Conv2d(place.width, place.width, 5, padding=2, bias=bias)
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
        return layer


@pytest.mark.slow
def test_a_custom_blueprint_must_be_registered_unchanged_to_load() -> None:
    own_blueprint()
    slotted = add_slots(RESNET.model(), RESNET.batch())
    plant_kept_seeds(slotted, "layer1.0")
    model = slotted.bake()
    assert is_same(run(esper.load(model.state_dict(), model=RESNET.model()), RESNET.batch()), run(model, RESNET.batch()))
    own_blueprint(bias=False)
    unchanged(RESNET.model(), model.state_dict(), r"only in the file: layer1.0.esper_seed.branch.bias")
    del registry.REGISTRY["mine"]
    message = r"seed after 'layer1.0' cannot be built: no blueprint named 'mine'; .*register the same one before loading"
    unchanged(RESNET.model(), model.state_dict(), message)


class Dropping(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dropout, self.layer = nn.Dropout(0.5), nn.Linear(width, width)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, h: Tensor) -> Tensor:
        result: Tensor = self.layer(self.dropout(h))
        return result


def test_a_seed_with_dropout_follows_the_mode_of_the_host_in_a_slot_and_baked() -> None:
    register_blueprint("dropping", kinds=["dense"])(lambda place: Dropping(place.width))
    family = FAMILIES["sequential mlp"]
    batch = family.batch()
    slotted = add_slots(family.model(), batch)
    perturb(germinate(slotted, "1", "dropping"))
    slotted.slot("1").is_kept = True
    assert is_same(run(slotted, batch), run(slotted, batch))
    slotted.host.train()
    assert not is_same(run(slotted, batch), run(slotted, batch))
    model = slotted.bake()
    assert not is_same(run(model, batch), run(model, batch))
    model.eval()
    assert is_same(run(model, batch), run(model, batch))


# Other programs

WITHOUT_ESPER = """
import sys, torch

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("esper", "tests"):
            raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, Blocker())
try:
    import esper
except ImportError:
    pass
else:
    raise SystemExit("esper could be imported")
for folder in sys.argv[1:]:
    program = torch.export.load(f"{folder}/model.pt2")
    batch, expected = torch.load(f"{folder}/batch.pt", weights_only=True)
    torch.testing.assert_close(program.module()(batch), expected)  # another process may choose other kernels
    print(folder)
assert not any(name.split(".")[0] == "esper" for name in sys.modules)
"""


def two_kinds_grown(name: str) -> Slotted:
    family = FAMILIES[name]
    slotted = add_slots(family.model(), family.batch())
    plant_kept_seeds(slotted, *family.slots)
    return slotted


@pytest.mark.slow
def test_exported_models_run_without_esper_and_give_equal_outputs(tmp_path: Path) -> None:
    names = ["resnet", "gpt", "encoder", "sequential mlp"]
    for name in names:
        batch = FAMILIES[name].batch()
        model = two_kinds_grown(name).bake().eval()
        (expected,) = run(model, batch)
        folder = tmp_path / name
        folder.mkdir()
        torch.export.save(torch.export.export(model, (batch,)), folder / "model.pt2")
        output = torch.export.load(folder / "model.pt2").module()(batch)
        tolerance = 1e-5 if FAMILIES[name].is_fused else 0.0  # torch's own kernel for the whole layer is not exported
        torch.testing.assert_close(output, expected, rtol=0.0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")
        torch.save((batch, expected), folder / "batch.pt")
    # One process for all of them: to start it takes longer than all the rest.
    answer = subprocess.run([sys.executable, "-c", WITHOUT_ESPER, *names], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines() == names


def test_loading_into_a_class_says_to_pass_an_instance(tmp_path: Path) -> None:
    with pytest.raises(GrowthError, match=r"is the class Linear; pass an instance: model=Linear\(\)"):
        esper.load(tmp_path / "model.safetensors", model=nn.Linear)  # type: ignore[arg-type]


def test_a_folded_layer_with_a_weight_norm_is_saved_and_loaded(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(weight_norm(nn.Linear(8, 6)), nn.ReLU(), nn.Linear(6, 3))

    inputs = torch.randn(4, 8)
    slotted = add_slots(make(), inputs, slots=["0"])
    perturb(germinate(slotted, "0", "widen_50"))
    slotted.slot("0").is_kept = True
    grown = slotted(inputs)
    folded = slotted.bake()
    assert torch.allclose(folded(inputs), grown, atol=1e-6)
    esper.save(folded, tmp_path / "model.safetensors")
    loaded = esper.load(tmp_path / "model.safetensors", model=make())
    assert torch.equal(loaded(inputs), folded(inputs))
    assert loaded[0].parametrizations.weight.original0.shape == (9, 1)
