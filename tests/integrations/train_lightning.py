"""A LightningModule trained with Trainer: python train_lightning.py STRATEGY FOLDER [CHECKPOINT|whole|unfreeze]"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as L
import torch
from pytorch_lightning.callbacks import BaseFinetuning, Callback, ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gossamer
from gossamer.integrations.lightning import GossamerStrategy

kind, folder, resume = sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None
STRATEGIES = {
    "ddp": DDPStrategy,
    "exact": lambda: GossamerStrategy(gossamer.AllReduce()),
    "gossip": lambda: GossamerStrategy(gossamer.Gossip()),
}
torch.set_default_dtype(torch.float64)


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
        self.validated: list[list[float]] = []

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.validated.append(self.net[0].weight.detach().flatten()[:3].tolist())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


class Watch(Callback):
    """What the strategy knows while it trains."""

    step, reached, own = None, 0, None

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.reached = trainer.global_step

    def on_train_end(self, trainer: Any, module: Any) -> None:
        replica = getattr(trainer.strategy, "replica", None)
        self.step = None if replica is None else replica.step
        self.own = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


class Unfreeze(BaseFinetuning):
    """The first layer trains from the second epoch on."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net[0], optimizer)


def main() -> None:
    torch.manual_seed(3)
    inputs = torch.randn(64, 6)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model, watch = Model(), Watch()
    trainer = L.Trainer(
        strategy=STRATEGIES[kind](),
        accelerator="cpu",
        devices=2,
        max_epochs=4 if resume not in (None, "unfreeze") else 2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[
            watch,
            ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}"),
            *([Unfreeze()] if resume == "unfreeze" else []),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    loaders = DataLoader(data, batch_size=4), DataLoader(data, batch_size=32)
    trainer.fit(model, *loaders, ckpt_path=None if resume in ("whole", "unfreeze") else resume)
    saved = torch.load(folder / "epoch=1.ckpt", weights_only=False)["state_dict"] if (folder / "epoch=1.ckpt").exists() else {}
    found = {
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
        "own": watch.own,
        "exchanges": watch.step,
        "steps": watch.reached,
        "validated": model.validated,
        "saved": {name: value.flatten()[:3].tolist() for name, value in saved.items()},
    }
    Path(os.environ["FOUND"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
