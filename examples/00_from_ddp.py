"""A training script as it would be with DDP, and what changes: mixed precision, accumulation, clipping, a schedule, evaluation,
checkpoints. A network predicts each byte of Python's own standard library from the eight before it.

torchrun --nproc-per-node 2 examples/00_from_ddp.py                     # everything in this one file
torchrun --nproc-per-node 2 examples/00_from_ddp.py --epochs 3 --resume
"""

import argparse
import os
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gossamer
from gossamer import checkpoint

ACCUMULATE = 2


def samples() -> TensorDataset:
    """Eight bytes, and the one that follows them."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:24])
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[:240_000].long().unfold(0, 9, 9)
    return TensorDataset(windows[:, :-1], windows[:, -1])


def build_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(8 * 32, 256), nn.ReLU(), nn.Linear(256, 256))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoints")
    parser.add_argument("--folder", type=Path, default=Path("out/from_ddp"), help="of checkpoints")
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")

    train, held_out = torch.utils.data.random_split(samples(), [0.9, 0.1], torch.Generator().manual_seed(0))
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, batch_size=64, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    model = build_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * -(-len(loader) // ACCUMULATE))
    scaler = torch.amp.GradScaler(device.type, enabled=on_gpu)

    # With DDP: model = DistributedDataParallel(model, device_ids=[device.index]). The model stays itself here, and so do its
    # class and the keys of its state_dict: no model.module anywhere.
    replica = gossamer.replicate(model, optimizer, gossamer.Gossip(), scaler=scaler)

    # With DDP rank 0 saves for all. Here every rank saves its own: the weights of workers that gossip differ a little.
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler, "replica": replica}
    saved = checkpoint.load(options.folder, **parts) if options.resume else None  # None, too, where there is no checkpoint yet

    for epoch in range(saved["epoch"] if saved is not None else 0, options.epochs):
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader):
            last = number % ACCUMULATE == ACCUMULATE - 1 or number == len(loader) - 1
            # With DDP: model.no_sync(). The last pass before a step is outside.
            with nullcontext() if last else replica.no_sync():
                with torch.autocast(device.type, enabled=on_gpu):
                    loss = F.cross_entropy(model(inputs.to(device)), targets.to(device))
                scaler.scale(loss / ACCUMULATE).backward()
            if not last:
                continue
            # As with DDP. Where weights travel, as with Gossip, these are this worker's own gradients, not the mean of all
            # workers': their norm is the larger the smaller its batch is, and the threshold is to be chosen for that.
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()

        # With DDP every rank has the same model. Here it is the average of all that is worth evaluating: every rank enters
        # the block, whichever rank evaluates inside of it.
        with replica.consensus():
            if rank == 0:
                print(f"epoch {epoch}: held-out loss {evaluate(model, held_out, device):.3f}", flush=True)

        # Every rank calls it, outside of consensus(). A process that is killed meanwhile leaves the one before untouched.
        checkpoint.save(options.folder, replica.step, **parts, epoch=epoch + 1)

    replica.close(average=True)  # the model is the average of all workers' now, on every rank
    if rank == 0:
        torch.save(model.state_dict(), options.folder / "model.pt")
    dist.destroy_process_group()


@torch.no_grad()
def evaluate(model: nn.Module, held_out: torch.utils.data.Dataset[tuple[Tensor, ...]], device: torch.device) -> float:
    """The mean cross-entropy in nats."""
    model.eval()
    losses = [
        F.cross_entropy(model(inputs.to(device)), targets.to(device)).item() for inputs, targets in DataLoader(held_out, 1024)
    ]
    model.train()
    return sum(losses) / len(losses)


if __name__ == "__main__":
    main()
