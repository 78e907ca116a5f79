"""A convolutional network, trained on Fashion-MNIST.

torchrun --nproc-per-node 4 examples/02_convnet.py --method gossip
gossamer lab --hosts 4 --rate 200mbit -- examples/02_convnet.py --method ddp --steps 100 --log-to -
python examples/02_convnet.py --log-to -
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gossamer
from common import chosen_algorithm, consensus, finish, leave, mean_over_ranks, option_parser, start
from data import fashion_mnist
from training_log import TrainingLog

BATCH = 64


class ConvNet(nn.Module):
    """Two convolutions with pooling and two linear layers, for 28 × 28 images; 1.63 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.classes = nn.Sequential(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.classes(self.features(images))


# The benchmarks (gossamer.bench) take these seven from any script.


def build_model() -> nn.Module:
    """The model that is trained."""
    return ConvNet()


def build_optimizer(model: nn.Module) -> Optimizer:
    """Its optimizer: fused, because nothing can be communicated while it runs."""
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True)


def random_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch that only has the right shape."""
    return torch.rand(BATCH, 1, 28, 28, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(outputs, targets)


def training_batches(rank: int, world: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One worker's batches, without end."""
    images, labels = fashion_mnist()[0]
    sampler = DistributedSampler(labels, num_replicas=world, rank=rank, seed=seed)
    return epochs(DataLoader(TensorDataset(images, labels), BATCH, sampler=sampler, drop_last=True), sampler, 10**6)


def training_samples() -> tuple[Tensor, Tensor]:
    """All training images and their labels."""
    return fashion_mnist()[0]


@torch.no_grad()
def quality(net: nn.Module) -> dict[str, float]:
    """Accuracy on the whole test set."""
    images, labels = fashion_mnist()[1]
    right = sum((net(x).argmax(1) == y).sum().item() for x, y in zip(images.split(250), labels.split(250), strict=True))
    return {"accuracy": right / len(labels)}


def epochs(loader: DataLoader, sampler: DistributedSampler, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of this rank, epoch after epoch, each in another order."""
    for epoch in range(count):
        sampler.set_epoch(epoch)
        yield from loader


@torch.no_grad()
def validate(net: nn.Module, images: Tensor, labels: Tensor, rank: int, world: int) -> dict[str, float]:
    """Loss and accuracy on the test set; each rank computes its share."""
    total_loss = total_right = 0.0
    for inputs, targets in zip(images[rank::world].split(250), labels[rank::world].split(250), strict=True):
        outputs = net(inputs)
        total_loss += loss(outputs, targets).item() * len(targets)
        total_right += (outputs.argmax(1) == targets).sum().item()
    share = world / len(labels)
    return {
        "validation_loss": mean_over_ranks(total_loss, images.device) * share,
        "accuracy": mean_over_ranks(total_right, images.device) * share,
    }


def main() -> None:
    parser = option_parser(__doc__, steps=None, eval_every=100)
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()
    rank, world, device = start(options)
    dtype = getattr(torch, options.dtype)
    (images, labels), (test_images, test_labels) = fashion_mnist()
    test_images, test_labels = test_images.to(device, dtype), test_labels.to(device)
    sampler = DistributedSampler(labels, num_replicas=world, rank=rank, seed=options.seed)
    loader = DataLoader(TensorDataset(images.to(dtype), labels), BATCH, sampler=sampler, drop_last=True)
    torch.manual_seed(options.seed)
    net = build_model().to(device, dtype)
    optimizer = build_optimizer(net)

    model, replica = net, None
    if options.method == "ddp":
        model = DistributedDataParallel(net)
    elif options.method != "none":
        replica = gossamer.replicate(net, optimizer, chosen_algorithm(options))

    log = TrainingLog(options, net, optimizer, replica)
    steps = min(options.epochs * len(loader), options.steps or options.epochs * len(loader))
    for step, (inputs, targets) in zip(range(1, steps + 1), epochs(loader, sampler, options.epochs), strict=False):
        optimizer.zero_grad()
        error = loss(model(inputs.to(device)), targets.to(device))
        error.backward()
        optimizer.step()
        log.step(error, len(targets))
        if step % options.eval_every == 0 or step == steps:
            with log.paused(), consensus(replica):
                results = validate(net, test_images, test_labels, rank, world)
            log.evaluated(results)
            if log.out_of_time():
                break
    finish(options, rank, net, replica)


if __name__ == "__main__":
    main()
    leave()
