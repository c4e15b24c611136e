"""Growth in the training loops of Lightning and Hugging Face transformers, where these are installed."""

from __future__ import annotations

import copy
import importlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from esper.growth import GrowthConfig, GrowthError, Planned, load, save
from esper.growth.events import EpochEnded, StageEntered
from esper.growth.lifecycle.stages import Germinate
from esper.growth.metrics import accuracy
from tests.growth.builders import QUICK, QUICK_SHADOW, SLOTS, Script, assert_same, config, host_state, make_data, make_host
from tests.growth.test_callbacks import EpochCounter, Kept

EPOCHS = 4
PLAN = [(1, "first", "mlp")]  # after one epoch

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),  # the tests ask for the CPU
    pytest.mark.filterwarnings("ignore:.*dataloader is not resumable.*"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists and is not empty.*"),
]


def stages(events: Sequence[Any]) -> list[tuple[int, str]]:
    return [(event.epoch, event.stage) for event in events if isinstance(event, StageEntered)]


# Lightning


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.extra(name.split(".")[0])) for name in ("lightning.pytorch", "pytorch_lightning")]
)
def pl(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def make_module(pl: ModuleType, **options: Any) -> Any:
    """With dropout, batch norm, and a schedule that changes the learning rate."""

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_host(**options)
            self.losses: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = step_loss(self, batch)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", step_loss(self, batch))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", step_loss(self, batch))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            return [optimizer], [StepLR(optimizer, 2)]

    return Module()


def step_loss(module: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(module(batch[0]), batch[1])


def loader(*, shuffle: bool) -> DataLoader:
    """Validated on what was trained on, so that a seed is worth something after a few steps."""
    x, y = make_data(1, size=40)[0]
    return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=shuffle)


def make_growth(controller: Any = "never", settings: GrowthConfig | None = None, **options: Any) -> Any:
    callbacks = importlib.import_module("esper.growth.integrations.lightning")
    settings = settings or config(QUICK, slots=("net.first", "net.second"))
    return callbacks.GrowthCallback(make_data(1, size=2)[0][0], step_loss, controller=controller, config=settings, **options)


def planned() -> Planned:
    return Planned([(epoch, f"net.{slot}", blueprint) for epoch, slot, blueprint in PLAN])


def fit(
    pl: ModuleType,
    module: Any,
    callbacks: Sequence[Any],
    folder: Path,
    *,
    shuffle: bool = True,
    ckpt_path: Path | None = None,
    **options: Any,
) -> Any:
    options = {"max_epochs": EPOCHS, "enable_checkpointing": False, **options}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **options,
    )
    torch.manual_seed(7)
    trainer.fit(module, loader(shuffle=shuffle), loader(shuffle=False), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("attribute", [None, "net"])
def test_in_lightning_a_planned_seed_is_kept_and_baked_into_an_equal_model(pl: ModuleType, attribute: str | None, tmp_path: Path) -> None:
    module, events = make_module(pl), []
    settings = config(QUICK, slots=SLOTS if attribute else ("net.first", "net.second"))
    growth = make_growth(Planned(PLAN) if attribute else planned(), settings, model_attribute=attribute, on_event=events.append)
    fit(pl, module, [growth], tmp_path)
    assert [stage for _, stage in stages(events)][-1] == "FOSSILIZED"
    x = make_data()[0][0]
    module.eval()
    with torch.no_grad():
        grown = module(x)
        baked = growth.bake()
        assert baked is (module.net if attribute else module)
        assert torch.equal(module(x), grown)
        assert not torch.equal(module.net.head(module.net.second(module.net.after(nn.Linear.forward(module.net.first, x)))), grown)
    assert "net.first.esper_seed.use_esper_load" in module.state_dict()


def accuracy_of(module: nn.Module, batch: Any) -> Tensor:
    return accuracy(module(batch[0]), batch[1])


def test_in_lightning_metrics_callbacks_sinks_and_progress_are_those_of_grow(
    pl: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = []
    for options in ({}, {"metrics": {"accuracy": accuracy_of}}):
        module, counter, sink, calls = make_module(pl), EpochCounter(), Kept(), list[int]()
        module.net.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        growth = make_growth(planned(), callbacks=[counter], sinks=[sink], progress=bool(options), **options)
        torch.manual_seed(0)
        fit(pl, module, [growth], tmp_path)
        assert counter.epochs == [1, 2, 3, 4]
        results.append((len(calls), {name: value.clone() for name, value in module.state_dict().items()}))
    assert results[0][0] == results[1][0]  # metrics need no forward pass of their own
    assert_same(results[0][1], results[1][1])
    x, y = make_data(1, size=40)[0]
    module.eval()
    with torch.no_grad():
        right = float(accuracy(module(x), y))
    assert not sink.is_closed
    growth.bake()  # waits until the thread of the sink has written everything
    assert sink.is_closed
    ended = [record.event for record in sink.records if isinstance(record.event, EpochEnded)]
    assert ended[-1].metrics == {"accuracy": pytest.approx(right)}
    assert capsys.readouterr().err.count("accuracy ") == EPOCHS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"callbacks": print}, "callbacks must be a list"),
        ({"sinks": [print]}, "belongs into callbacks"),
        ({"metrics": {"accuracy": 0.5}}, "must be a function of a batch"),
    ],
)
def test_wrong_callbacks_sinks_and_metrics_are_refused_where_the_lightning_callback_is_made(
    pl: ModuleType, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(GrowthError, match=message):
        make_growth(**options)


def test_in_lightning_a_seed_in_the_shadow_leaves_the_host_bit_identical(pl: ModuleType, tmp_path: Path) -> None:
    plain, module = make_module(pl), make_module(pl)
    fit(pl, plain, [], tmp_path)
    growth = make_growth(
        Script({0: [Germinate(slot="net.first", reason="test", blueprint="mlp")]}), config(QUICK_SHADOW, slots=("net.first",))
    )
    fit(pl, module, [growth], tmp_path)
    backend = growth.grower.lifecycles.slots["net.first"]
    assert backend.stage.name == "TRAINING"
    assert backend.record.gradients.mean_norm > 0
    assert module.losses == plain.losses
    assert_same(host_state(module), dict(plain.state_dict()))


def test_in_lightning_a_seed_learns_under_a_loss_scale(pl: ModuleType, tmp_path: Path) -> None:
    module, growth = make_module(pl), make_growth(planned())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = importlib.import_module(f"{pl.__name__}.plugins").MixedPrecision("16-mixed", "cpu", scaler)
    fit(pl, module, [growth], tmp_path, plugins=[plugin])
    assert growth.grower.scaler is scaler
    assert growth.grower.lifecycles.slots["net.first"].stage.name == "FOSSILIZED"


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}], ids=["plain", "accumulating"])
def test_in_lightning_never_growing_changes_no_bit(pl: ModuleType, options: dict[str, Any], tmp_path: Path) -> None:
    plain, module = make_module(pl), make_module(pl)
    expected = fit(pl, plain, [], tmp_path, **options)
    growth = make_growth()
    trainer = fit(pl, module, [growth], tmp_path, **options)
    assert module.losses == plain.losses
    assert_same(dict(module.state_dict()), dict(plain.state_dict()))
    assert_same(trainer.optimizers[0].state_dict(), expected.optimizers[0].state_dict())
    assert growth.grower.epoch == EPOCHS
    means = torch.tensor(plain.losses).reshape(EPOCHS, -1)
    if not options:
        assert growth.grower.history.train_losses == pytest.approx(means.mean(dim=1).tolist())
        assert growth.grower.history.length == 5
    else:
        weights = torch.tensor([1, 1, 1, 1, 2]) / 6  # the last step has one batch of its own
        assert growth.grower.history.train_losses == pytest.approx((means * weights).sum(dim=1).tolist())
        assert growth.grower.history.length == 3


MOMENTS = {
    "after every epoch": {"save_on_train_epoch_end": True},
    "after every validation": {"save_on_train_epoch_end": False},
    "after the last step of every epoch": {"every_n_train_steps": 5},
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_lightning_run_resumed_from_a_checkpoint_equals_an_uninterrupted_one(pl: ModuleType, moment: str, tmp_path: Path) -> None:
    def run(folder: Path, *, ckpt_path: Path | None = None) -> tuple[Any, Any]:
        keeping = pl.callbacks.ModelCheckpoint(folder, "{step}", save_top_k=-1, **MOMENTS[moment])
        module = make_module(pl, dropout=0.0)  # Lightning saves no random streams
        growth = make_growth(planned())
        fit(pl, module, [growth, keeping], tmp_path, shuffle=False, ckpt_path=ckpt_path, enable_checkpointing=True)
        return module, growth

    _, whole = run(tmp_path / "whole")
    assert whole.grower.lifecycles.slots["net.first"].stage.name == "FOSSILIZED"
    checkpoints = sorted((tmp_path / "whole").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    assert len(checkpoints) == EPOCHS
    for checkpoint in checkpoints[:-1]:  # the last one is over for Lightning
        _, resumed = run(tmp_path / "again", ckpt_path=checkpoint)
        assert resumed.grower.ledger == whole.grower.ledger, checkpoint
        assert resumed.grower.history.val_losses == whole.grower.history.val_losses
        assert_same(dict(copy.deepcopy(resumed).bake().state_dict()), dict(copy.deepcopy(whole).bake().state_dict()))


def test_a_lightning_checkpoint_is_tested_with_the_seeds_it_was_saved_with(pl: ModuleType, tmp_path: Path) -> None:
    keeping = pl.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    module, growth = make_module(pl), make_growth(planned())
    trainer = fit(pl, module, [growth, keeping], tmp_path, enable_checkpointing=True)
    for epoch in (0, 1, 3):  # before there was a seed, and with one in two states of learning
        tested = trainer.test(module, loader(shuffle=False), ckpt_path=tmp_path / f"epoch={epoch}.ckpt", verbose=False)
        assert tested[0]["test_loss"] == pytest.approx(growth.grower.history.val_losses[epoch], rel=1e-6)


def test_the_weights_in_a_lightning_checkpoint_hold_the_seeds(pl: ModuleType, tmp_path: Path) -> None:
    module, growth = make_module(pl), make_growth(planned())
    trainer = fit(pl, module, [growth], tmp_path)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    x = make_data()[0][0]
    with torch.no_grad():
        expected = module.eval()(x)
        weights = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
        assert torch.equal(load(weights, model=make_module(pl).eval())(x), expected)
    with pytest.raises(RuntimeError, match=r"net\.first\.esper_seed\.use_esper_load"):
        make_module(pl).load_state_dict(weights)


def test_a_callback_that_has_grown_a_model_fits_again_only_from_a_checkpoint(pl: ModuleType, tmp_path: Path) -> None:
    module, growth = make_module(pl), make_growth(planned())
    trainer = fit(pl, module, [growth], tmp_path, max_epochs=3)
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    with pytest.raises(GrowthError, match="has grown a model already"):
        fit(pl, module, [growth], tmp_path)
    fit(pl, module, [growth], tmp_path, ckpt_path=tmp_path / "three.ckpt")
    assert growth.grower.epoch == EPOCHS
    assert [entry.blueprint for entry in growth.grower.ledger.seeds] == ["mlp"]


def test_a_module_that_lightning_cannot_grow_is_refused_and_left_unchanged(pl: ModuleType, tmp_path: Path) -> None:
    module = make_module(pl)
    names = list(module.state_dict())
    with pytest.raises(GrowthError, match="nothing has grown yet"):
        make_growth().bake()
    with pytest.raises(GrowthError, match="no submodule 'mode'; it has net"):
        fit(pl, module, [make_growth(model_attribute="mode")], tmp_path)
    with pytest.raises(GrowthError, match="no controller is named 'heuristics'"):
        fit(pl, module, [make_growth("heuristics")], tmp_path)
    module.automatic_optimization = False
    with pytest.raises(GrowthError, match="manual optimization"):
        fit(pl, module, [make_growth()], tmp_path)
    module.automatic_optimization = True
    with pytest.raises(GrowthError, match="pass val_dataloaders"):
        fit(pl, module, [make_growth()], tmp_path, limit_val_batches=0)
    fit(pl, module, [make_growth()], tmp_path)  # there are no slots in the way
    assert list(module.state_dict()) == names


# Hugging Face transformers


@pytest.fixture(
    params=[pytest.param("esper.growth.integrations.huggingface", marks=pytest.mark.extra("transformers", "accelerate"), id="transformers")]
)
def huggingface(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


class Sentences(Dataset):
    """Sequences of eight letters, each the one before plus one or two."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        steps = torch.randint(1, 3, (size, 8), generator=generator)
        self.letters = steps.cumsum(dim=1) % 11

    def __len__(self) -> int:
        return len(self.letters)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.letters[index], "labels": self.letters[index]}


def make_gpt2() -> Any:
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 11, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))


def arguments(folder: Path, **options: Any) -> Any:
    transformers = importlib.import_module("transformers")
    settings = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "learning_rate": 0.01,
        "logging_strategy": "epoch",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return transformers.TrainingArguments(str(folder), **{**settings, **options})


PLACE = "transformer.h.0.mlp"


def make_callback(huggingface: ModuleType, controller: Any = "never", lifecycle: Any = QUICK, **options: Any) -> Any:
    return huggingface.GrowthTrainerCallback(controller=controller, config=config(lifecycle, slots=(PLACE,)), **options)


def make_trainer(huggingface: ModuleType, growth: Any, folder: Path, model: Any = None, **options: Any) -> Any:
    data = Sentences(40)
    return huggingface.GrowthTrainer(
        make_gpt2() if model is None else model, arguments(folder, **options), train_dataset=data, eval_dataset=data, growth=growth
    )


def test_in_transformers_a_planned_seed_is_kept_and_baked_into_an_equal_model(huggingface: ModuleType, tmp_path: Path) -> None:
    model, events = make_gpt2(), []
    growth = make_callback(huggingface, Planned([(1, PLACE, "mlp")]), on_event=events.append)
    make_trainer(huggingface, growth, tmp_path, model).train()
    assert stages(events)[0][0] == 1
    assert stages(events)[-1][1] == "FOSSILIZED"
    model.eval()
    letters = Sentences(3).letters
    with torch.no_grad():
        grown = model(letters).logits
        baked = growth.bake()
        assert baked is model
        assert torch.equal(baked(letters).logits, grown)
        save(baked, tmp_path / "model.safetensors")
        assert torch.equal(load(tmp_path / "model.safetensors", model=make_gpt2()).eval()(letters).logits, grown)


def letters_right(model: Any, batch: Any) -> Tensor:
    return accuracy(model(**batch).logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:])


def test_in_transformers_metrics_callbacks_sinks_and_progress_are_those_of_grow(
    huggingface: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = []
    for options in ({}, {"metrics": {"accuracy": letters_right}}):
        model, counter, sink, calls = make_gpt2(), EpochCounter(), Kept(), list[int]()
        model.transformer.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        plan = Planned([(1, PLACE, "mlp")])
        growth = make_callback(huggingface, plan, callbacks=[counter], sinks=[sink], progress=bool(options), **options)
        make_trainer(huggingface, growth, tmp_path, model).train()
        assert counter.epochs == [1, 2, 3, 4]
        results.append((len(calls), {name: value.clone() for name, value in model.state_dict().items()}))
    assert results[0][0] == results[1][0]  # metrics need no forward pass of their own
    assert_same(results[0][1], results[1][1])
    model.eval()
    letters = Sentences(40).letters
    with torch.no_grad():
        right = float(letters_right(model, {"input_ids": letters, "labels": letters}))
    growth.bake()  # waits until the thread of the sink has written everything
    assert sink.is_closed
    ended = [record.event for record in sink.records if isinstance(record.event, EpochEnded)]
    assert ended[-1].metrics == {"accuracy": pytest.approx(right)}
    assert capsys.readouterr().err.count("accuracy ") == EPOCHS


def test_a_model_that_transformers_saves_in_mid_growth_keeps_its_seeds(huggingface: ModuleType, tmp_path: Path) -> None:
    model = make_gpt2()
    growth = make_callback(huggingface, Script({1: [Germinate(slot=PLACE, reason="test", blueprint="mlp")]}))
    make_trainer(huggingface, growth, tmp_path, model, save_strategy="epoch").train()
    model.save_pretrained(tmp_path / "saved")
    letters = Sentences(3).letters
    with torch.no_grad():
        expected = model.eval()(letters).logits
        for folder in ("saved", "checkpoint-20"):
            assert torch.equal(load(tmp_path / folder, model=make_gpt2()).eval()(letters).logits, expected)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_in_transformers_never_growing_changes_no_bit(huggingface: ModuleType, accumulated: int, tmp_path: Path) -> None:
    plain, model, data = make_gpt2(), make_gpt2(), Sentences(40)
    options = {"gradient_accumulation_steps": accumulated, "eval_strategy": "epoch"}
    expected = importlib.import_module("transformers").Trainer(plain, arguments(tmp_path, **options), train_dataset=data, eval_dataset=data)
    expected.train()
    growth = make_callback(huggingface)
    trainer = make_trainer(huggingface, growth, tmp_path, model, **options)
    trainer.train()
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))
    assert_same(trainer.optimizer.state_dict(), expected.optimizer.state_dict())
    logged = {key: [entry[key] for entry in trainer.state.log_history if key in entry] for key in ("loss", "eval_loss")}
    assert logged == {key: [entry[key] for entry in expected.state.log_history if key in entry] for key in ("loss", "eval_loss")}
    assert growth.grower.history.train_losses == pytest.approx(logged["loss"], rel=1e-3)
    assert growth.grower.history.val_losses == pytest.approx(logged["eval_loss"], rel=1e-3)


def test_in_transformers_a_seed_in_the_shadow_leaves_the_host_bit_identical(huggingface: ModuleType, tmp_path: Path) -> None:
    models = [make_gpt2(), make_gpt2()]
    script = Script({0: [Germinate(slot=PLACE, reason="test", blueprint="mlp")]})
    callbacks = [make_callback(huggingface), make_callback(huggingface, script, QUICK_SHADOW)]
    for model, growth in zip(models, callbacks, strict=True):
        make_trainer(huggingface, growth, tmp_path, model).train()
    backend = callbacks[1].grower.lifecycles.slots[PLACE]
    assert backend.stage.name == "TRAINING"
    assert backend.record.gradients.mean_norm > 0
    assert_same(*map(host_state, models))


@pytest.mark.parametrize("when", [{"save_strategy": "epoch"}, {"save_strategy": "steps", "save_steps": 1}], ids=["epochs", "steps"])
def test_a_transformers_run_resumed_from_a_checkpoint_equals_an_uninterrupted_one(
    huggingface: ModuleType, when: dict[str, Any], tmp_path: Path
) -> None:
    def callback() -> Any:
        return make_callback(huggingface, Planned([(1, PLACE, "mlp")]))

    whole = callback()
    make_trainer(huggingface, whole, tmp_path / "run", **when).train()
    baked = copy.deepcopy(whole.grower.slotted).bake()
    assert [entry.blueprint for entry in whole.grower.ledger.seeds] == ["mlp"]
    steps = (5, 10, 15) if when["save_strategy"] == "epoch" else (5, 7, 10, 13)
    for step in steps:
        resumed = callback()
        torch.manual_seed(99)
        make_trainer(huggingface, resumed, tmp_path / "again").train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
        assert resumed.grower.ledger == whole.grower.ledger, step
        assert resumed.grower.history.val_losses == whole.grower.history.val_losses
        assert_same(dict(resumed.bake().state_dict()), dict(baked.state_dict()))


def test_the_last_checkpoint_of_transformers_is_found_and_one_without_growth_is_refused(huggingface: ModuleType, tmp_path: Path) -> None:
    growth = make_callback(huggingface)
    make_trainer(huggingface, growth, tmp_path, num_train_epochs=2, save_strategy="epoch").train()
    with pytest.raises(GrowthError, match="has grown a model already"):
        growth.trainer.train()
    again = make_callback(huggingface)
    make_trainer(huggingface, again, tmp_path, save_strategy="epoch").train(resume_from_checkpoint=True)
    assert again.grower.epoch == EPOCHS
    shutil.rmtree(tmp_path / "checkpoint-10" / "growth")
    trainer = make_trainer(huggingface, make_callback(huggingface), tmp_path)
    with pytest.raises(GrowthError, match="checkpoint-10 has no folder 'growth'"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    # The failed start leaves nothing behind: the callback has no grower, and trains from another checkpoint.
    with pytest.raises(GrowthError, match="nothing has grown yet"):
        trainer.growth.bake()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert trainer.growth.grower.epoch == EPOCHS
    # A callback that has grown a model loses it to the training that resumes, even if that fails.
    with pytest.raises(GrowthError, match="checkpoint-10 has no folder 'growth'"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    with pytest.raises(GrowthError, match="nothing has grown yet"):
        trainer.growth.bake()


def test_a_model_that_transformers_cannot_grow_is_refused(huggingface: ModuleType, tmp_path: Path) -> None:
    transformers = importlib.import_module("transformers")
    with pytest.raises(GrowthError, match="nothing has grown yet"):
        make_callback(huggingface).bake()
    lonely = transformers.Trainer(make_gpt2(), arguments(tmp_path), train_dataset=Sentences(8), callbacks=[make_callback(huggingface)])
    with pytest.raises(GrowthError, match="has to be a GrowthTrainer"):
        lonely.train()
    blind = huggingface.GrowthTrainer(make_gpt2(), arguments(tmp_path), train_dataset=Sentences(8), growth=make_callback(huggingface))
    with pytest.raises(GrowthError, match="pass eval_dataset"):
        blind.train()
    best = {"load_best_model_at_end": True, "save_strategy": "epoch", "eval_strategy": "epoch"}
    with pytest.raises(GrowthError, match="load_best_model_at_end"):
        make_trainer(huggingface, make_callback(huggingface), tmp_path, **best).train()
