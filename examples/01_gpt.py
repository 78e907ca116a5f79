"""A byte-level GPT, trained on the source text of Python's own standard library.

torchrun --nproc-per-node 4 examples/01_gpt.py --method gossip
gossamer lab --hosts 4 --rate 200mbit -- examples/01_gpt.py --method ddp --steps 100 --log-to -
python examples/01_gpt.py --log-to -
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import gossamer
from common import chosen_algorithm, consensus, finish, leave, mean_over_ranks, option_parser, start
from data import standard_library
from gossamer.optim import GossipAdamW
from training_log import TrainingLog

LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 4, 128, 4, 64, 8
WINDOWS = 256  # to validate on


class Block(nn.Module):
    """One layer of a transformer: causal attention, then a perceptron, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.perceptron(self.norm2(x))


class GPT(nn.Module):
    """Predicts each byte from those before it; 0.87 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for weight in (self.token.weight, self.place.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


# The benchmarks (gossamer.bench) take these six from any script.


def build_model() -> nn.Module:
    """The model that is trained."""
    return GPT()


def build_optimizer(model: nn.Module) -> Optimizer:
    """Its optimizer: fused, because nothing can be communicated while it runs."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def random_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch that only has the right shape."""
    tokens = torch.randint(0, 256, (BATCH, CONTEXT + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def batches(text: Tensor, seed: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows at random places of the text, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        places = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
        windows = text[places + torch.arange(CONTEXT + 1)].long().to(device)
        yield windows[:, :-1], windows[:, 1:]


def training_batches(rank: int, world: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One worker's batches, without end."""
    return batches(standard_library(0, 1)[0], seed * world + rank, torch.device("cpu"))


def quality(net: nn.Module) -> dict[str, float]:
    """The loss on the held-out windows."""
    return {"loss": sum_of_losses(net, standard_library(0, 1)[1], 0, 1, torch.device("cpu")) / WINDOWS}


@torch.no_grad()
def sum_of_losses(net: nn.Module, text: Tensor, rank: int, world: int, device: torch.device) -> float:
    """Of this rank's share of the windows, which are spread over the held-out text."""
    places = torch.linspace(0, len(text) - CONTEXT - 1, WINDOWS).long()[rank::world, None]
    windows = text[places + torch.arange(CONTEXT + 1)].long().to(device)
    return sum(loss(net(part[:, :-1]), part[:, 1:]).item() * len(part) for part in windows.split(32))


def validate(net: nn.Module, text: Tensor, rank: int, world: int, device: torch.device) -> dict[str, float]:
    """The loss on the held-out windows; each rank computes its share of them."""
    total = sum_of_losses(net, text, rank, world, device)
    return {"validation_loss": mean_over_ranks(total, device) * world / WINDOWS}


def main() -> None:
    options = option_parser(__doc__, steps=500, eval_every=50).parse_args()
    rank, world, device = start(options)
    train, held_out = standard_library(rank, world)
    torch.manual_seed(options.seed)
    net = build_model().to(device, getattr(torch, options.dtype))
    algorithm = None if options.method in ("none", "ddp") else chosen_algorithm(options)
    # Where weights are averaged and not gradients, AdamW would divide by the noise of one worker's small batch.
    gossips = algorithm is not None and algorithm.subject == "weights"
    optimizer = GossipAdamW(net.parameters(), lr=1e-3) if gossips else build_optimizer(net)

    model, replica = net, None
    if options.method == "ddp":
        model = DistributedDataParallel(net)
    elif algorithm is not None:
        replica = gossamer.replicate(net, optimizer, algorithm)

    log = TrainingLog(options, net, optimizer, replica)
    source = batches(train, options.seed * world + rank, device)
    for step, (inputs, targets) in zip(range(1, options.steps + 1), source, strict=False):
        optimizer.zero_grad()
        error = loss(model(inputs), targets)
        error.backward()
        optimizer.step()
        log.step(error, targets.numel())
        if step % options.eval_every == 0 or step == options.steps:
            with log.paused(), consensus(replica):
                results = validate(net, held_out, rank, world, device)
            log.evaluated(results)
            if log.out_of_time():
                break
    finish(options, rank, net, replica)


if __name__ == "__main__":
    main()
    leave()
