"""A loop of the usual hand-written kind, as nanoGPT's, and the lines that make it resume exactly.

    python examples/adopt.py                 # half a minute on two cores
    python examples/adopt.py --stop-at 190   # ends abruptly right after step 190
    python examples/adopt.py                 # goes on from the last checkpoint, to the same weights

Each line marked "# ckpt" was added. The rest is what such a loop looks like anyway, but for the
options --out and --stop-at, which are for trying it. Two things to see to in a loop of your own:
the evaluation has a generator of its own, so that it may be repeated when the run goes on; and a
batch that is fetched ahead of its step, as nanoGPT does, has to be in the state, too.
"""

import argparse
import hashlib
import math
import os
import sys
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

# In your own repository ckpt.py lies next to the script, and this line is not needed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ckpt  # ckpt

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--steps", type=int, default=400, help="how long to train")
parser.add_argument("--out", default="runs/adopt", help="folder of the checkpoints")
parser.add_argument("--stop-at", type=int, help="end abruptly right after this step")
parser.add_argument("--compile", action="store_true", help="needs a C++ compiler; on a CPU, too")
args = parser.parse_args()

# Plain settings, as such scripts have them.
block_size, batch_size, accumulation = 64, 16, 2
width, heads, layers, dropout = 96, 4, 2, 0.1
peak_lr, warmup = 3e-3, 40
eval_interval, eval_batches = 25, 4
always_save_checkpoint = True  # if False, only when the loss on held-out text is the best so far
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1337)

# The text: the sources of Python's own standard library.
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray().join(f.read_bytes() for f in files), dtype=torch.uint8)
data = {"train": text[: len(text) * 9 // 10], "val": text[len(text) * 9 // 10 :]}


def get_batch(split, generator=None):
    starts = torch.randint(len(data[split]) - block_size, (batch_size,), generator=generator)
    rows = torch.stack([data[split][i : i + block_size + 1] for i in starts.tolist()])
    rows = rows.long().to(device)
    return rows[:, :-1], rows[:, 1:]


def get_lr(step):
    if step < warmup:
        return peak_lr * (step + 1) / warmup
    return peak_lr * (0.55 + 0.45 * math.cos(math.pi * step / args.steps))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(block_size, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(block_size, device)
        x = self.blocks(self.token(x) + self.place.weight, mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.1)
if args.compile:
    model = torch.compile(model)


@torch.no_grad()
def estimate_loss():
    generator = torch.Generator().manual_seed(1337)  # the same batches each time
    model.eval()
    losses = dict.fromkeys(data, 0.0)
    for split in data:
        for _ in range(eval_batches):
            with torch.autocast(device, torch.bfloat16):
                losses[split] += model(*get_batch(split, generator)).item() / eval_batches
    model.train()
    return losses


step, best_val_loss = 0, math.inf
if state := (manager := ckpt.CheckpointManager(args.out)).load_latest():  # ckpt
    ckpt.load_model_state_dict(model, state["model"])  # ckpt
    optimizer.load_state_dict(state["optimizer"])  # ckpt
    step, best_val_loss = state["step"], state["best_val_loss"]  # ckpt
    ckpt.restore_rng_state(state["rng"])  # ckpt

print(f"from step {step} to {args.steps}", flush=True)
while True:
    if (step > 0 and step % eval_interval == 0) or step >= args.steps:
        losses = estimate_loss()
        print(f"step {step}: train {losses['train']:.4f}, val {losses['val']:.4f}", flush=True)
        is_best = losses["val"] <= best_val_loss  # or as good: a run that goes on repeats it
        best_val_loss = min(losses["val"], best_val_loss)
        if is_best or always_save_checkpoint:
            state = {"model": ckpt.model_state_dict(model), "rng": ckpt.capture_rng_state()}  # ckpt
            state |= {"step": step, "best_val_loss": best_val_loss}  # ckpt
            manager.save(step, state | {"optimizer": optimizer.state_dict()})  # ckpt
        if is_best:
            print("  the best so far", flush=True)
            manager.copy_to(f"{args.out}/best.pt")  # ckpt: after the save, for it copies the latest
    if step >= args.steps:
        break
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)
    for _ in range(accumulation):
        x, y = get_batch("train")
        with torch.autocast(device, torch.bfloat16):
            loss = model(x, y) / accumulation
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step == args.stop_at:
        os._exit(1)

sha = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
print(f"weights: {sha.hexdigest()[:16]}")
