"""A team of four on this machine, each a process with a quarter of the text; one of them is killed.

    python examples/diloco_local.py               # nobody waits for anybody; 2 minutes on two cores
    python examples/diloco_local.py --blocking    # in rounds
    python examples/diloco_local.py --steps 12 --inner-steps 4 --warmup-steps 4 --slow 0.1
    python examples/diloco_local.py --hub s3://bucket/new-folder     # through a bucket

First one process makes --warmup-steps with the whole text, then a master and three workers
(diloco_node.py) go on from there, at different speeds. One worker dies on the way, as in a power
cut, and is started again. In the end the shared model, as a newcomer gets it from the hub, is
beside one machine that goes on alone from the same weights, for as many steps as each of the team,
with the whole text. Where matplotlib is installed, the losses on the way become a picture.
"""

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

# In your own repository ckpt.py lies next to the script, and this line is not needed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_text
from diloco_node import SAMPLE

import ckpt

NODE = Path(__file__).resolve().with_name("diloco_node.py")
SPEEDS = {"master": 0, "ann": 0.25, "bob": 0.5, "eve": 1}  # the part of --slow that each one sleeps
DIES = "bob"


class Processes:
    """Nodes that run; at the end of the block none is left."""

    def __init__(self):
        self._running: dict[str, subprocess.Popen] = {}
        self._printers: dict[str, threading.Thread] = {}

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for process in self._running.values():
            process.terminate()  # a node saves, and ends
        for process in self._running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()

    def start(self, name: str, *options: object, threads: int | None = None) -> None:
        environment = dict(os.environ)
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        process = subprocess.Popen(
            [sys.executable, str(NODE), "--node-id", name, *map(str, options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self._running[name] = process
        printer = threading.Thread(target=show, args=(name, process.stdout), daemon=True)
        printer.start()
        self._printers[name] = printer

    def wait(self) -> tuple[str, int]:
        """The next one that ends, and its exit status."""
        while True:
            for name, process in self._running.items():
                if process.poll() is not None:
                    del self._running[name]
                    self._printers.pop(name).join(5)  # its last lines, before ours
                    return name, process.returncode
            time.sleep(0.1)

    def __len__(self):
        return len(self._running)


def show(name: str, lines) -> None:
    for line in lines:
        if line.strip():
            print(f"{name:>7} | {line.rstrip()}", flush=True)


def train_alone(name: str, out: Path, *options: object) -> dict:
    """One process with the whole text and all cores; its report."""
    with Processes() as processes:
        processes.start(name, "--out", out / name, *options)
        check(*processes.wait())
    return read_report(out, name)


def train_together(out: Path, hub: str, options: list, args: argparse.Namespace) -> dict[str, dict]:
    """All four until each has done its steps; their reports."""
    commands = {}
    for number, (name, part) in enumerate(SPEEDS.items(), 1):
        role = "master" if name == "master" else "worker"
        command = ["--hub", hub, "--role", role, "--shard", f"{number}/{len(SPEEDS)}", *options]
        command += ["--seed", args.seed + number, "--slow", part * args.slow, "--out", out / name]
        commands[name] = command + ["--blocking"] * args.blocking
    with Processes() as processes:
        for name, command in commands.items():
            deadly = ["--kill-at", args.kill_at] if name == DIES and args.kill_at else []
            processes.start(name, *command, *deadly, threads=1)
        killed = False
        while processes:
            name, status = processes.wait()
            if name == DIES and status == -signal.SIGKILL and args.kill_at and not killed:
                killed = True
                print(f"{name} is started again", flush=True)
                processes.start(name, *commands[name], threads=1)
            else:
                check(name, status)
            if name == "master" and "latest.json" not in ckpt.Hub(hub).list("global"):
                raise SystemExit(f"the master could not publish its model in {hub}")
    return {name: read_report(out, name) for name in SPEEDS}


def check(name: str, status: int) -> None:
    if status:
        raise SystemExit(f"{name} failed with exit status {status}")


def read_report(out: Path, name: str) -> dict:
    with contextlib.suppress(FileNotFoundError):
        return json.loads((out / name / "report.json").read_text())
    raise SystemExit(f"{name} was stopped before its end")


def read_shared(hub: str) -> tuple[train_text.ByteTransformer, int]:
    """The shared model and its version, got as any new node gets it."""
    model = train_text.make_model()
    reader = ckpt.DumbDiLoCo(model, hub, node_id="reader")
    reader.start()
    reader.stop()
    if not reader.outer_step:
        raise SystemExit(f"there is no shared model in {hub}")
    return model, reader.outer_step


def draw(file: Path, reports: dict[str, dict], shared: float, args: argparse.Namespace) -> None:
    """The held-out losses of each process on the way, and that of the shared model."""
    try:
        from matplotlib.figure import Figure
        from PIL import Image  # comes with it
    except ImportError:
        print("For a picture of the losses: python -m pip install matplotlib")
        return
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    colors = ("k", "#0072b2", "#e69f00", "#009e73", "#cc79a7")
    for (name, report), color, marker in zip(reports.items(), colors, "sov^D", strict=True):
        steps, losses = zip(*report["history"], strict=True)
        style, label = "--", "one machine alone, whole text"
        if name in SPEEDS:
            style, label = "-", f"{name}, +{1000 * SPEEDS[name] * args.slow:.0f} ms a step"
        axes.plot(steps, losses, style, color=color, marker=marker, ms=5, label=label)
        if name == DIES and 0 < args.kill_at <= args.steps:
            at = args.kill_at, np.interp(args.kill_at, steps, losses)
            axes.plot(*at, "X", color=color, mec="k", ms=11, label=f"{name} dies, and is restarted")
    axes.axhline(shared, color="#d55e00", ls=":", lw=2.5, label="the shared model in the end")
    mode = "in rounds" if args.blocking else "without waiting"
    axes.set_title(
        "Four nodes that share a folder, each with a quarter of the text\n"
        f"{args.warmup_steps} common steps, then a delta every {args.inner_steps} steps, {mode}",
        fontsize=11,
    )
    axes.set_xlabel("steps of each node after the common start")
    axes.set_ylabel(f"held-out loss on {SAMPLE} rows (nats per byte)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.open(drawn).convert("RGB").quantize().save(file, "PNG")  # a third of the bytes
    print(f"The losses on the way are drawn in {file}")


def run(out: Path, args: argparse.Namespace) -> None:
    hub = args.hub or str(out / "hub")
    if ckpt.Hub(hub).list("global") or any((out / name).exists() for name in SPEEDS):
        raise SystemExit(f"there was a run in {hub} or {out} already: name another place")
    seed = ["--seed", args.seed]
    init = []
    if args.warmup_steps:
        start = train_alone("warmup", out, "--steps", args.warmup_steps, *seed)
        init = ["--init", out / "warmup"]
    common = ["--steps", args.steps, "--inner-steps", args.inner_steps, *init]
    alone = train_alone("alone", out, *common, *seed)
    began = time.monotonic()
    reports = train_together(out, hub, [*common, "--poll", args.poll], args)
    elapsed = time.monotonic() - began
    model, versions = read_shared(hub)
    held_out = train_text.load_text()[1]
    shared = train_text.evaluate(model, held_out)

    print(f"\nThe team took {elapsed:.0f} s. Bytes that went over the wire, by node:")
    for name, report in reports.items():
        read, written = report["bytes_read"], report["bytes_written"]
        print(f"{name:>7}: {read:>13,} read, {written:>13,} written")
    total = sum(report["bytes_read"] + report["bytes_written"] for report in reports.values())
    each = total // versions
    print(f"{versions} versions of the shared model; all nodes together, {each:,} bytes for each")
    print("Held-out loss in nats per byte:")
    if args.warmup_steps:
        print(f"  at the common start             {start['loss']:.4f}")
    print(f"  one machine alone, {args.steps:>4} steps   {alone['loss']:.4f}")
    mode = "in rounds" if args.blocking else "without waiting"
    print(f"  the shared model                {shared:.4f}  ({mode}, {args.steps} steps a node)")
    file = Path(args.plot or Path(args.out or "runs") / "diloco_local.png")
    sample = train_text.evaluate(model, held_out, SAMPLE)  # the rows that the curves are about
    draw(file, {"alone": alone, **reports}, sample, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="steps of each node")
    parser.add_argument("--inner-steps", type=int, default=25, help="steps between two deltas")
    parser.add_argument("--warmup-steps", type=int, default=100, help="common steps before")
    parser.add_argument("--blocking", action="store_true", help="in rounds, waiting for each other")
    parser.add_argument("--kill-at", type=int, help=f"step after which {DIES} dies; 0: none")
    parser.add_argument(
        "--slow", type=float, default=0.15, help="sleep of the slowest in each step"
    )
    parser.add_argument("--poll", type=float, default=0.3, help="seconds between looks at the hub")
    parser.add_argument("--hub", help="a folder or a URL that fsspec opens; OUT/hub if not given")
    parser.add_argument("--out", help="folder of all checkpoints; a temporary one if not given")
    parser.add_argument("--plot", help="a PNG; if not given OUT/diloco_local.png, or in runs")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.kill_at is None:  # halfway, between two checkpoints
        half = args.steps // 2
        args.kill_at = half - half % args.inner_steps + args.inner_steps // 2
    for number in (signal.SIGTERM, signal.SIGINT):  # so that the nodes are ended, too
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with contextlib.ExitStack() as stack:
        out = args.out or stack.enter_context(tempfile.TemporaryDirectory())
        run(Path(out), args)


if __name__ == "__main__":
    main()
