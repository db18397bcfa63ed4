"""A training loop of the usual hand-written kind, and the eight lines that make it resume exactly.

    python examples/adopt.py                 # about 20 seconds on two cores
    python examples/adopt.py --stop-at 190   # ends abruptly right after step 190
    python examples/adopt.py                 # goes on from the last checkpoint, to the same weights

Each line marked "# ckpt" was added. The rest is what such a loop looks like anyway, but for the
options --out and --stop-at, which are for trying it.
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
args = parser.parse_args()

# Plain settings, as such scripts have them.
block_size, batch_size, accumulation = 64, 16, 2
width, heads, layers, dropout = 96, 4, 2, 0.1
peak_lr, warmup = 3e-3, 40
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1337)

# The text: the sources of Python's own standard library.
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
data = torch.frombuffer(bytearray().join(f.read_bytes() for f in files), dtype=torch.uint8)


def get_batch():
    starts = torch.randint(len(data) - block_size, (batch_size,))
    rows = torch.stack([data[i : i + block_size + 1] for i in starts.tolist()])
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
step = 0

if state := (manager := ckpt.CheckpointManager(args.out)).load_latest():  # ckpt
    ckpt.load_model_state_dict(model, state["model"])  # ckpt
    optimizer.load_state_dict(state["optimizer"])  # ckpt
    ckpt.restore_rng_state(state["rng"])  # ckpt
    step = state["step"]  # ckpt

print(f"from step {step} to {args.steps}", flush=True)
while step < args.steps:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)
    for _ in range(accumulation):
        x, y = get_batch()
        with torch.autocast(device, torch.bfloat16):
            loss = model(x, y) / accumulation
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step == args.stop_at:
        os._exit(1)
    if step % 25 == 0 or step == args.steps:
        print(f"step {step}: loss {loss.item() * accumulation:.3f}", flush=True)
        state = {"model": ckpt.model_state_dict(model), "optimizer": optimizer.state_dict()}  # ckpt
        manager.save(step, state | {"step": step, "rng": ckpt.capture_rng_state()})  # ckpt

sha = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
print(f"weights: {sha.hexdigest()[:16]}")
