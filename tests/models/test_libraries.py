"""Tests that other libraries train, adapt, quantise and store our networks, as docs/libraries.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from tests.models import test_tools
from vitrail.errors import ConfigError
from vitrail.models.variants import build
from vitrail.models.vit import VisionTransformer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("types_unchecked"),
    pytest.mark.filterwarnings("default"),  # of other libraries
]


def network(kind: str = "full", **fields: Any) -> Any:
    torch.manual_seed(0)
    return test_tools.network(kind, **fields).train()


def batches(count: int = 16) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(count) % 5
    images = torch.randn(count, 3, *test_tools.OWN, generator=generator) + labels[:, None, None, None]
    return DataLoader(TensorDataset(images, labels), batch_size=8)


def by_hand(made: nn.Module, epochs: int) -> nn.Module:
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    made.train()
    for _ in range(epochs):
        for images, labels in batches():
            optimizer.zero_grad()
            F.cross_entropy(made(images), labels).backward()
            optimizer.step()
    return made


def assert_same_weights(found: nn.Module, expected: nn.Module) -> None:
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["full", "hybrid", "ResNet of basic units", "blocks", "reversible", "waves"])
def test_lightning_resumes_averages_and_casts(name: str, tmp_path: Path) -> None:
    """A run that continues from a checkpoint ends as the whole run; the callback's mean is that of the weights."""
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import EMAWeightAveraging

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network(name)
            self.losses: list[float] = []
            self.seen: list[dict[str, Tensor]] = []

        def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
            torch.manual_seed(self.trainer.global_step)
            loss = F.cross_entropy(self.network(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def on_train_batch_end(self, *given: Any) -> None:
            self.seen.append({name: weight.clone() for name, weight in self.network.state_dict().items()})

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def fitted(epochs: int, checkpoint: str | None = None, **settings: Any) -> Any:
        module = Classifier()
        trainer = lightning.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path, **settings,
        )  # fmt: skip
        trainer.fit(module, batches(), ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return module

    whole = fitted(2)
    fitted(1)
    continued = fitted(2, str(tmp_path / "1.ckpt"))
    assert_same_weights(continued.network, whole.network)
    averaged = fitted(2, callbacks=[EMAWeightAveraging(decay=0.5)])
    mean = whole.seen[0]
    for weights in whole.seen[1:]:
        mean = {key: 0.5 * mean[key] + 0.5 * weights[key] for key in mean}
    for key, weight in averaged.network.state_dict().items():
        torch.testing.assert_close(weight, mean[key], rtol=1e-4, atol=1e-6, msg=key)
    cast = fitted(2, precision="bf16-mixed")
    assert {weight.dtype for weight in cast.network.parameters()} == {torch.float32}
    assert cast.losses == pytest.approx(whole.losses, rel=0.02) and cast.losses != whole.losses


@pytest.mark.parametrize(
    ("fields", "targets"),
    [
        ({}, ["qkv", "up", "out"]),
        ({"pool": "gap"}, ["qkv", "up", "out"]),
        ({"reversible": True}, ["qkv", "up", "out"]),
        ({"positions": "sincos-2d", "pool": "map"}, ["qkv", "up"]),
        ({"positions": "rotary-2d", "activation": "swiglu"}, r"blocks\.[01]\..*\.(qkv|down)"),
        ({"attention": "blocks:size=2:shift=1", "pool": "gap"}, r".*\.(qkv|up)"),
    ],
    ids=str,
)
def test_peft_adapts_stores_and_merges(fields: dict[str, Any], targets: list[str] | str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(network(**fields), settings)
    images = next(iter(batches()))[0]
    before = adapted.eval()(images)
    assert not torch.allclose(before, network(**fields).eval()(images), atol=1e-3)
    by_hand(adapted, 1)
    frozen, trained = network(**fields).state_dict(), dict(adapted.named_parameters())
    for name, weight in adapted.base_model.model.named_parameters():
        if "lora" in name:
            assert weight.grad is not None and weight.grad.abs().sum() > 0, name
        else:
            assert torch.equal(weight, frozen[name.replace(".base_layer", "")]), name
    assert any("lora_A" in name for name in trained)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(network(**fields), tmp_path).eval()
    expected = adapted.eval()(images)
    torch.testing.assert_close(again(images), expected)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged.eval()(images), expected, rtol=1e-4, atol=1e-5)
    assert merged.state_dict().keys() == frozen.keys()


@pytest.mark.parametrize(
    "fields",
    [{}, {"pool": "gap"}, {"pool": "map"}, {"positions": "sincos-2d"}, {"pool": "gap", "reversible": True}],
    ids=str,
)
def test_opacus_has_the_gradients_of_each_image(fields: dict[str, Any]) -> None:
    opacus = pytest.importorskip("opacus")
    private, plain = opacus.GradSampleModule(network(**fields), loss_reduction="sum"), network(**fields)
    images, labels = next(iter(batches()))
    F.cross_entropy(private(images), labels, reduction="sum").backward()
    for number in range(2):
        plain.zero_grad()
        F.cross_entropy(plain(images[number : number + 1]), labels[number : number + 1]).backward()
        for (name, weight), own in zip(plain.named_parameters(), private.parameters(), strict=True):
            assert weight.grad is not None
            torch.testing.assert_close(own.grad_sample[number], weight.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_torchao_quantises_dense_layers() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    made, images = network(pool="gap").eval(), next(iter(batches()))[0]
    with torch.no_grad():
        expected = made(images)
        quantization.quantize_(made, quantization.Int8WeightOnlyConfig())
        assert type(made.get_submodule("blocks.0.mlp.up").get_parameter("weight").data) is not Tensor
        found = made(images)
    assert not torch.equal(found, expected)
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_the_hubs_mixin_stores_and_reads(tmp_path: Path) -> None:
    class OnTheHub(VisionTransformer, PyTorchModelHubMixin): ...

    original = OnTheHub(network(registers=2).config)
    original.load_state_dict(network(registers=2).state_dict())
    original.save_pretrained(tmp_path)
    again = OnTheHub.from_pretrained(tmp_path)
    images = next(iter(batches()))[0]
    assert again.config == original.config
    assert torch.equal(again.eval()(images), original.eval()(images))


def test_accelerate_trains_as_plain_pytorch_does() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator, made = accelerate.Accelerator(cpu=True), network()
    prepared, optimizer, data = accelerator.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1), batches())
    prepared.train()
    for _ in range(2):
        for images, labels in data:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(prepared(images), labels))
            optimizer.step()
    assert_same_weights(accelerator.unwrap_model(prepared), by_hand(network(), 2))


def test_trainer_trains_a_wrapped_network_and_refuses_a_bare_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class Classifier(nn.Module):
        def __init__(self, network: nn.Module) -> None:
            super().__init__()
            self.network = network

        def forward(self, images: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            logits = self.network(images)
            return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}

    given: Any = batches().dataset
    data = [{"images": image, "labels": label} for image, label in given]
    settings = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
        learning_rate=1e-2,
    )  # fmt: skip
    module = Classifier(network())
    transformers.Trainer(module, settings, train_dataset=data).train()
    assert not torch.equal(module.network.head.weight, network().head.weight)
    with pytest.raises(ConfigError, match="libraries"):
        transformers.Trainer(network(), settings, train_dataset=data)


def test_fsdp_fills_a_network_on_meta(tmp_path: Path) -> None:
    original = network(stochastic_depth=0.5)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with torch.device("meta"):
            made = build(original.config)
        for block in made.layers().blocks:
            fully_shard(block, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        fully_shard(made, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        assert isinstance(made, FSDPModule)
        made.to_empty(device="cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(made, original.state_dict(), options=options)
        results = []
        for one in (original, made):
            torch.manual_seed(3)
            results.append(one.train()(next(iter(batches()))[0]))
        torch.testing.assert_close(results[1], results[0])
    finally:
        torch.distributed.destroy_process_group()
