"""Hugging Face's Trainer on a small GPT-2: python train_transformers.py KIND FOLDER [resume]"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import gossamer
from gossamer.integrations.transformers import GossamerTrainer

kind, folder, how = sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""


class Watch(transformers.TrainerCallback):  # type: ignore[misc]
    """What the trainer knows while it trains."""

    found: dict[str, Any]
    trainer: Any = None

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        replica = getattr(self.trainer, "replica", None)
        self.found = {"own": vector(model), "exchanges": None if replica is None else replica.step, "steps": state.global_step}


def vector(model: torch.nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def main() -> None:
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(5)
    model = transformers.GPT2LMHeadModel(config).double()
    tokens = torch.randint(0, 32, (64, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        max_steps=8,
        save_steps=4,
        eval_steps=4,
        eval_strategy="steps",
        logging_steps=4,
        report_to=[],
        disable_tqdm=True,
    )
    watch = Watch()
    given: dict[str, Any] = {"args": args, "train_dataset": data, "eval_dataset": data[:16], "callbacks": [watch]}
    if kind == "ddp":
        trainer = transformers.Trainer(model, **given)
    else:
        trainer = GossamerTrainer(model, algorithm=gossamer.AllReduce() if kind == "exact" else gossamer.Gossip(), **given)
    watch.trainer = trainer
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4") if how == "resume" else None)
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    saved = transformers.GPT2LMHeadModel.from_pretrained(folder / "checkpoint-8", dtype="auto")
    found = watch.found | {"weights": vector(trainer.model), "saved": vector(saved), "losses": losses}
    found["loss of the average"] = trainer.evaluate()["eval_loss"]
    Path(os.environ["FOUND"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
