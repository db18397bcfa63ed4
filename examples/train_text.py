"""Train a small byte-level transformer on Python's own standard library; kill it when you like.

    python examples/train_text.py                  # about a minute on two cores
    python examples/train_text.py --kill-at 170    # dies as in a power cut, right after step 170
    python examples/train_text.py                  # goes on from the last checkpoint
    torchrun --nproc-per-node 2 examples/train_text.py    # the same on two GPUs, or two cores

However often it is killed, it ends with the two lines that a run left in peace ends with (on one
machine; a GPU may need torch.use_deterministic_algorithms for that). To begin again, delete the
folder --out or name another.
"""

import argparse
import functools
import hashlib
import math
import os
import signal
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

# In your own repository ckpt.py lies next to the script, and this line is not needed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ckpt

CONTEXT, BATCH = 128, 16  # bytes that the model sees at once; windows of that size in a step


# --- data: what every machine with Python has -----------------------------------------------------
def load_text() -> tuple[torch.Tensor, torch.Tensor]:
    """The standard library's sources as rows of bytes, to train on and (each tenth file) held out.

    A row begins with the byte that ended the row before it, so each byte is predicted once.
    """
    stdlib = Path(sysconfig.get_path("stdlib"))
    folders = (
        stdlib,
        *(stdlib / name for name in ("asyncio", "email", "http", "json", "unittest")),
    )
    files = [file for folder in folders for file in sorted(folder.glob("*.py"))]
    if not files:
        raise SystemExit(f"this Python comes without its sources in {stdlib}")
    texts = [bytearray(), bytearray()]
    for number, file in enumerate(files):
        texts[number % 10 == 0] += file.read_bytes()
    training, held_out = (torch.frombuffer(text, dtype=torch.uint8) for text in texts)
    return training.unfold(0, CONTEXT + 1, CONTEXT), held_out.unfold(0, CONTEXT + 1, CONTEXT)


def make_loader(rows: torch.Tensor) -> torch.utils.data.DataLoader:
    """Batches in random order; of several processes each takes its share of the rows."""
    dataset, sampler = torch.utils.data.TensorDataset(rows), None
    if dist.is_initialized():
        sampler = torch.utils.data.DistributedSampler(dataset)
    return torch.utils.data.DataLoader(
        dataset, batch_size=BATCH, shuffle=sampler is None, sampler=sampler, drop_last=True
    )


# --- model ----------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x):
        split = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = split.permute(2, 0, 3, 1, 4)  # each (batch, head, position, width of a head)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ByteTransformer(nn.Module):
    """Takes rows of bytes and returns the loss, which is all that the trainer asks of a model."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 3, dropout: float = 0.1):
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, rows):
        inputs, targets = rows[:, :-1].long(), rows[:, 1:].long()
        x = self.byte(inputs) + self.place.weight[: inputs.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_model() -> ByteTransformer:
    return ByteTransformer().to("cuda" if torch.cuda.is_available() else "cpu")


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)


def make_scheduler(optimizer: torch.optim.Optimizer, steps: int):
    """Up in a straight line for a tenth of the run, then down along half a cosine."""
    warmup = max(1, steps // 10)

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


# --- looking at it --------------------------------------------------------------------------------
@torch.no_grad()
def evaluate(model: nn.Module, rows: torch.Tensor, count: int = 256) -> float:
    """Nats per byte on so many of the rows, the same ones each time."""
    device = next(model.parameters()).device
    batches = rows[:: max(1, len(rows) // count)][:count].split(BATCH)
    model.eval()
    losses = [model(batch.to(device)).item() for batch in batches]
    model.train()
    return sum(losses) / len(losses)


def fingerprint(model: nn.Module) -> str:
    """The start of the sha256 of all weights: where it is the same, every bit of them is."""
    sha = hashlib.sha256()
    for tensor in ckpt.model_state_dict(model).values():
        sha.update(tensor.cpu().numpy().tobytes())
    return sha.hexdigest()[:16]


class Progress:
    """One line, written over and over; where the output is no terminal, a new line now and then."""

    def __init__(self, first: int, last: int):
        self.first, self.last, self.began, self.due = first, last, time.monotonic(), 0.0

    def show(self, step: int, loss: torch.Tensor) -> None:
        now, terminal = time.monotonic(), sys.stdout.isatty()
        if now < self.due and step < self.last:
            return  # loss.item() waits for the GPU, so it is not called in every step
        self.due = now + (0.2 if terminal else 5)
        speed = (step - self.first) / max(now - self.began, 1e-6)
        line = f"step {step}/{self.last}  loss {loss.item():.3f}  {speed:.1f} steps/s"
        line += f"  {(self.last - step) / speed:.0f} s left"
        end = "" if terminal and step < self.last else "\n"
        print(f"\r{line:<78}" if terminal else line, end=end, flush=True)


class Remembered:
    """A value that the checkpoints keep: any object with these two methods can be in them."""

    value = math.nan

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


# --- the run --------------------------------------------------------------------------------------
def join_processes() -> int:
    """This process's rank under torchrun, one for each GPU; without it 0."""
    if "LOCAL_RANK" not in os.environ:
        return 0
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=600, help="how long to train")
    parser.add_argument("--out", default="runs/train_text", help="folder of the checkpoints")
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--kill-at", type=int, help="die right after this step, before its save")
    args = parser.parse_args()

    rank = join_processes()
    say = functools.partial(print, flush=True) if rank == 0 else lambda *text: None
    ckpt.seed_everything(1)
    training, held_out = load_text()
    model = make_model()
    together = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = make_optimizer(model)
    first_loss = Remembered()
    if rank > 0:
        ckpt.seed_everything(1 + rank)  # each rank drops out other numbers

    def on_step(trainer: ckpt.Trainer, loss: torch.Tensor) -> None:
        if rank == 0:
            progress.show(trainer.step, loss)
        if trainer.step == args.kill_at and not resumed:
            say(f"\nkilled at step {trainer.step}: run it again, without --kill-at")
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = ckpt.Trainer(
        together,
        optimizer,
        make_loader(training),
        scheduler=make_scheduler(optimizer, args.steps),
        precision="auto",
        clip_grad_norm=1.0,
        checkpoint_manager=ckpt.CheckpointManager(args.out, every_steps=args.every),
        config={"steps": args.steps},  # the schedule depends on it: another one is warned about
        on_step=on_step,
        extra_state={"first_loss": first_loss},
        exact_resume=True,
        save_final=True,
        save_on_signal=(signal.SIGTERM, signal.SIGINT),
    )
    resumed = trainer.resume()
    say(f"resumed at step {trainer.step}" if resumed else "starting fresh")
    if not resumed:
        first_loss.value = evaluate(model, held_out)

    if trainer.step >= args.steps:
        say("nothing left to do: the run is complete")
    else:
        progress = Progress(trainer.step, args.steps)
        result = trainer.fit(args.steps)
        if result.steps < args.steps:
            say(f"\n{result.stop_reason}: step {result.steps} is saved, run it again to go on")
    if trainer.step >= args.steps:
        last_loss = evaluate(model, held_out)
        say(f"held-out loss: {first_loss.value:.4f} -> {last_loss:.4f} nats per byte")
        say(f"weights: {fingerprint(model)}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
