"""A small GPT and its training script, in the style in which such scripts are written for DDP."""

import json
import math
import os
import sys
from contextlib import nullcontext

import torch
import torch.nn as nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

out_dir, resume = sys.argv[1], "--resume" in sys.argv
batch_size, block_size, gradient_accumulation_steps, max_iters, eval_interval = 4, 16, 4, 6, 3
learning_rate, grad_clip, weight_decay = 1e-2, 1.0, 0.1


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, width=16, vocabulary=32):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, idx, targets=None):
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1]))
        logits = self.head(self.blocks(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        nodecay = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": nodecay, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


ddp = int(os.environ.get("RANK", -1)) != -1
init_process_group(backend="gloo")
ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
gradient_accumulation_steps //= ddp_world_size
torch.manual_seed(1337 + ddp_rank)
torch.set_default_dtype(torch.float64)

data = torch.randint(0, 32, (2000,), generator=torch.Generator().manual_seed(0))
draws = torch.Generator().manual_seed(100 + ddp_rank)


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,), generator=draws)
    return torch.stack([data[i : i + block_size] for i in ix]), torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])


torch.manual_seed(7)
model = GPT()
optimizer = model.configure_optimizers()
iter_num = 0
if resume:
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
if ddp:
    model = DDP(model)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model(data[None, i : i + block_size], data[None, i + 1 : i + 1 + block_size])[1].item() for i in (0, 500, 1000)]
    model.train()
    return sum(losses) / 3


def get_lr(it):
    return learning_rate * 0.5 * (1.0 + math.cos(math.pi * it / 12))


X, Y = get_batch()
raw_model = model.module if ddp else model  # unwrap DDP container if needed
losses, exchanged = [], 0
last = iter_num + max_iters
while iter_num < last:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0 and master_process:
        losses.append(estimate_loss())
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            # in DDP training we only need to sync gradients at the last micro step
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with nullcontext():
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        loss.backward()
    if grad_clip != 0.0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1

if master_process:
    checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
    torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
exchanges = getattr(getattr(model, "replica", None), "step", None)
weights = torch.cat([p.detach().flatten() for p in raw_model.parameters()]).tolist()
with open(os.environ["FOUND"], "w") as file:
    json.dump({"weights": weights, "losses": losses, "exchanges": exchanges, "keys": list(model.state_dict())}, file)
if ddp:
    destroy_process_group()
