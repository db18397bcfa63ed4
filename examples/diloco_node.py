"""One machine of a team that trains one model through nothing but a shared folder or a bucket.

    python examples/diloco_node.py --hub s3://bucket/run --node-id ann --role master --shard 1/2
    python examples/diloco_node.py --hub s3://bucket/run --node-id bob --shard 2/2

Each person runs one of them, one of the team with --role master. The model and the text are those
of train_text.py; a node trains on its shard, a contiguous part, so no two have files in common.
Killed and started again, a node goes on from its last checkpoint. A master that has done its own
steps stays until the others have ended. Without --hub it trains alone, on the same data.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import torch

# In your own repository ckpt.py lies next to the script, and this line is not needed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_text

import ckpt

SAMPLE = 64  # held-out rows that are looked at on the way: a quarter of those at the end


class CountingHub(ckpt.Hub):
    """A Hub that counts what goes over the wire; up to the last checkpoint, if it is killed."""

    bytes_read = bytes_written = 0

    def read(self, name, limit=None):
        data = super().read(name, limit)
        self.bytes_read += len(data)
        return data

    def write(self, name, data):
        super().write(name, data)
        self.bytes_written += len(data)

    def state_dict(self):
        return {"bytes_read": self.bytes_read, "bytes_written": self.bytes_written}

    def load_state_dict(self, state):
        vars(self).update(state)


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Constant after 20 steps: nodes join and end when they like, so no decay would suit all."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))


def wait_for_model(hub: ckpt.Hub, poll: float) -> None:
    """What a worker does before there is a shared model would not get into it."""
    said = False
    while "latest.json" not in hub.list("global"):
        if not said:
            print("waiting for a master", flush=True)
        said = True
        time.sleep(poll)


def signs_of_life(hub: ckpt.Hub) -> dict[str, bytes]:
    """Of each node that has not ended, the counter that it moves while it trains."""
    alive = {}
    for node in hub.list("nodes"):
        with contextlib.suppress(FileNotFoundError):
            alive[node] = hub.read(f"nodes/{node}/alive.json")
    return alive


def serve(coordinator: ckpt.DumbDiLoCo, hub: ckpt.Hub) -> None:
    """Be the master, without training, until all others have ended or are silent for long."""
    print("serving until the others have ended", flush=True)
    coordinator.start()
    seen, since = None, time.monotonic()
    try:
        while True:
            with contextlib.suppress(OSError):  # a Hub that is away for a while
                found = signs_of_life(hub)
                if found != seen:
                    seen, since = found, time.monotonic()
            # A few seconds even if all have ended: a master begins only a second after start().
            if time.monotonic() - since > (coordinator.node_timeout if seen else 3):
                return
            time.sleep(coordinator.poll_interval)
    finally:
        coordinator.stop()  # takes what the others have left


def parse_shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not 1 <= int(number) <= int(count):
        raise ValueError
    return int(number), int(count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hub", help="the shared folder, or a URL that fsspec opens")
    parser.add_argument("--node-id", default="alone", help="a name that no other node has")
    parser.add_argument("--role", choices=("worker", "master"), default="worker")
    parser.add_argument("--blocking", action="store_true", help="in rounds, waiting for each other")
    parser.add_argument("--inner-steps", type=int, default=200, help="steps between two deltas")
    parser.add_argument("--poll", type=float, default=5, help="seconds between looks at the hub")
    parser.add_argument("--steps", type=int, default=4000, help="how long to train")
    parser.add_argument("--shard", type=parse_shard, default=(1, 1), help="I/K: part I of K")
    parser.add_argument("--init", help="folder of a checkpoint, whose weights to begin with")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="folder of the checkpoints; runs/diloco_NODE_ID if not given")
    parser.add_argument("--slow", type=float, default=0, help="seconds to sleep in each step")
    parser.add_argument("--kill-at", type=int, help="die right after this step, before its save")
    args = parser.parse_args()
    out = Path(args.out or f"runs/diloco_{args.node_id}")

    ckpt.seed_everything(args.seed)
    training, held_out = train_text.load_text()
    number, count = args.shard
    rows = training.tensor_split(count)[number - 1]
    model = train_text.make_model()
    if args.init:
        state = ckpt.CheckpointManager(args.init).load_latest()
        if state is None:
            raise SystemExit(f"--init: there is no checkpoint in {args.init}")
        ckpt.load_model_state_dict(model, state["model"])
    optimizer = train_text.make_optimizer(model)
    history = train_text.Remembered()
    history.value = []  # [step, held-out loss] at the start, each inner_steps, and the end

    hub = coordinator = None
    if args.hub:
        hub = CountingHub(args.hub)
        coordinator = ckpt.DumbDiLoCo(
            model,
            hub,
            node_id=args.node_id,
            role=args.role,
            inner_steps=args.inner_steps,
            poll_interval=args.poll,
            blocking=args.blocking,
        )

    def look(step: int) -> None:
        history.value.append([step, train_text.evaluate(model, held_out, SAMPLE)])

    def on_step(trainer: ckpt.Trainer, loss: torch.Tensor) -> None:
        progress.show(trainer.step, loss)
        if trainer.step % args.inner_steps == 0 or trainer.step == args.steps:
            look(trainer.step)
        time.sleep(args.slow)
        if trainer.step == args.kill_at and not resumed:
            print(f"killed at step {trainer.step}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = ckpt.Trainer(
        model,
        optimizer,
        train_text.make_loader(rows),
        scheduler=make_scheduler(optimizer),
        precision="auto",
        clip_grad_norm=1.0,
        checkpoint_manager=ckpt.CheckpointManager(out, every_steps=args.inner_steps),
        coordinator=coordinator,
        on_step=on_step,
        extra_state={"history": history} | ({"traffic": hub} if hub else {}),
        exact_resume=True,
        save_final=True,
        save_on_signal=(signal.SIGTERM, signal.SIGINT),
    )
    resumed = trainer.resume()
    print(f"resumed at step {trainer.step}" if resumed else "starting fresh", flush=True)
    if not resumed:
        look(0)
    if hub and args.role == "worker" and not resumed:
        wait_for_model(ckpt.Hub(args.hub), args.poll)

    if trainer.step < args.steps:
        progress = train_text.Progress(trainer.step, args.steps)
        result = trainer.fit(args.steps)
        if result.steps < args.steps:
            print(f"\n{result.stop_reason}: step {result.steps} is saved, run it again to go on")
            return
    elif coordinator:  # it was killed after its last save, and may have left a delta behind
        coordinator.start()
        coordinator.load_state_dict(trainer.state_dict()["coordinator"])
        coordinator.stop()
    loss = train_text.evaluate(model, held_out)
    print(f"held-out loss of its own model: {loss:.4f} nats per byte", flush=True)
    report = {"steps": trainer.step, "loss": loss, "history": history.value}
    if coordinator:
        if args.role == "master":
            serve(coordinator, ckpt.Hub(args.hub))  # not the hub that counts
        report |= hub.state_dict()
        print(f"traffic: {hub.bytes_read} bytes read, {hub.bytes_written} written", flush=True)
    ckpt.atomic_json_dump(report, out / "report.json")


if __name__ == "__main__":
    main()
