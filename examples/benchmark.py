"""How fast saving, resuming and training are, each beside the fastest that the machine can do.

    python examples/benchmark.py            # 1 GB of state; half an hour
    python examples/benchmark.py --gb 4 --only resume

Every row is a ratio of medians, limit / contender: 1.0 is as fast as the limit, 0.5 takes twice as
long. Contenders run in processes of their own, in turns. Other libraries are measured where they
are installed: safetensors, accelerate, lightning; torch.distributed.checkpoint comes with torch.
Where matplotlib is installed, the ratios become a picture.
"""

import argparse
import io
import itertools
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import ckpt


# --------------------------------------------------------------------------------------------------
# The state: a model and its AdamW, 12 bytes for each parameter
# --------------------------------------------------------------------------------------------------
class Model(torch.nn.Module):
    def __init__(self, gb, tensors):
        super().__init__()
        size = max(1, round(gb * 1e9 / 12 / tensors))
        self.weights = torch.nn.ParameterList([torch.rand(size) for _ in range(tensors)])


def model_and_optimizer(gb, tensors):
    model = Model(gb, tensors)
    return model, torch.optim.AdamW(model.parameters(), lr=0.0)


def trained(gb, tensors):
    model, optimizer = model_and_optimizer(gb, tensors)
    for weight in model.parameters():
        weight.grad = torch.rand_like(weight)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def make_state(args):
    model, optimizer = trained(args.gb, args.tensors)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def arrays(state):
    tensors = [*state["model"].values()]
    tensors += [v for entry in state["optimizer"]["state"].values() for v in entry.values()]
    return [tensor.numpy().reshape(-1).view(np.uint8) for tensor in tensors]


def sync(path):
    """fsync a file, or every file under a directory."""
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        with open(file, "rb+") as opened:
            os.fsync(opened.fileno())


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    os.sync()


# --------------------------------------------------------------------------------------------------
# Contenders: generators of what is timed. What they do between two yields is not.
# --------------------------------------------------------------------------------------------------
def saves(args, save):
    """save(state, path), then all of it synced, always to a new name."""
    state = make_state(args)
    for number in itertools.count():
        path = args.directory / f"{os.getpid()}-{number}.pt"
        yield lambda path=path: save(state, path)
        remove(path)


def raw_write(args):
    def save(state, path):
        with open(path, "wb") as file:
            for array in arrays(state):
                file.write(array)
            file.flush()
            os.fsync(file.fileno())

    return saves(args, save)


def ours_save(args):
    return saves(args, ckpt.atomic_torch_save)


def torch_save(args):
    def save(state, path):
        torch.save(state, path)
        sync(path)

    return saves(args, save)


def safetensors_save(args):
    from safetensors.torch import save_file

    def save(state, path):
        moments = state["optimizer"]["state"]
        tensors = {f"{i}.{k}": v for i, entry in moments.items() for k, v in entry.items()}
        save_file({**state["model"], **tensors}, path)
        sync(path)

    return saves(args, save)


def dcp_save(args):
    import torch.distributed.checkpoint as dcp

    return saves(args, lambda state, path: dcp.save(state, checkpoint_id=path))


def lightning_save(args):
    from lightning.fabric.plugins.io import TorchCheckpointIO

    def save(state, path):
        TorchCheckpointIO().save_checkpoint(state, path)
        sync(path)

    return saves(args, save)


def accelerate_save(args):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*trained(args.gb, args.tensors))
    for number in itertools.count():
        path = args.directory / f"{os.getpid()}-{number}"

        def save(path=path):
            accelerator.save_state(path)
            sync(path)

        yield save
        remove(path)


def copying(args):
    """Between touched buffers: what a snapshot cannot be faster than."""
    sources = arrays(make_state(args))
    targets = [np.ones_like(source) for source in sources]
    while True:
        yield lambda: [np.copyto(a, b) for a, b in zip(targets, sources, strict=True)]


def ours_stall(args):
    state = make_state(args)
    manager = ckpt.CheckpointManager(args.directory / str(os.getpid()), background=True)
    for step in itertools.count(1):
        yield lambda step=step: manager.save(step, state)
        manager.wait()


def clone_stall(args):
    state = make_state(args)
    path = args.directory / f"{os.getpid()}.pt"

    def save():
        optimizer = state["optimizer"]
        moments = {
            index: {name: value.clone() for name, value in entry.items()}
            for index, entry in optimizer["state"].items()
        }
        copied = {
            "model": {name: value.clone() for name, value in state["model"].items()},
            "optimizer": {**optimizer, "state": moments},
        }
        threads.append(threading.Thread(target=torch.save, args=(copied, path)))
        threads[-1].start()

    threads = []
    while True:
        yield save
        threads.pop().join()


def dcp_stall(args, kind="thread"):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    address = f"file://{args.directory}/{os.getpid()}.rendezvous"
    torch.distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    state, futures = make_state(args), []

    def save():
        path, type_ = args.directory / f"{os.getpid()}", AsyncCheckpointerType(kind)
        futures.append(dcp.async_save(state, checkpoint_id=path, async_checkpointer_type=type_))

    while True:
        yield save
        done = futures.pop()
        getattr(done, "upload_completion", done).result()


def lightning_stall(args):
    from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

    state = make_state(args)
    path = args.directory / f"{os.getpid()}.ckpt"
    while True:
        plugin = AsyncCheckpointIO(TorchCheckpointIO())
        yield lambda plugin=plugin: plugin.save_checkpoint(state, path)
        plugin.teardown()


def training(args, begin):
    """Steps per second while what begin() starts goes on, as a time per step."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(8)])
    optimizer, data = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.rand(32, 128)

    def run(busy):
        started, steps = time.perf_counter(), 0
        while steps == 0 or busy():
            optimizer.zero_grad()
            model(data).pow(2).mean().backward()
            optimizer.step()
            steps += 1
        return (time.perf_counter() - started) / steps

    while True:
        busy = begin()
        yield lambda busy=busy: run(busy)


def undisturbed(args):
    def begin():
        end = time.perf_counter() + 1.0
        return lambda: time.perf_counter() < end

    return training(args, begin)


def while_saving(args, stall):
    """Training while a contender of the stall row writes."""
    saving = stall(args)
    ready = [next(saving)]

    def begin():
        ready.pop()()  # how long this takes is the stall
        waiter = threading.Thread(target=lambda: ready.append(next(saving)))  # ends with the write
        waiter.start()
        return waiter.is_alive

    return training(args, begin)


def resumes(args, load):
    """load(model, optimizer), freshly made ones; then each page of them is looked at."""
    while True:
        model, optimizer = model_and_optimizer(args.gb, args.tensors)

        def run(model=model, optimizer=optimizer):
            load(model, optimizer)
            for array in arrays({"model": model.state_dict(), "optimizer": optimizer.state_dict()}):
                array[::4096].max()

        yield run
        del model, optimizer, run


def reading(args):
    """The file's bytes into touched memory."""
    path = args.directory / f"{os.getpid()}.pt"
    torch.save(make_state(args), path)
    memory = memoryview(bytearray(path.stat().st_size))

    def read():
        with open(path, "rb", buffering=0) as file:
            at = 0
            while at < len(memory):
                at += file.readinto(memory[at:])

    while True:
        yield read


def ours_resume(args):
    manager = ckpt.CheckpointManager(args.directory / str(os.getpid()))
    counters = {"step": 1, "samples": 1, "tokens": 1, "rng": ckpt.capture_rng_state()}
    manager.save(1, {**make_state(args), **counters})
    return resumes(
        args, lambda *made: ckpt.Trainer(*made, [0], checkpoint_manager=manager).resume()
    )


def torch_resume(args, load=torch.load):
    path = args.directory / f"{os.getpid()}.pt"
    torch.save(make_state(args), path)

    def resume(model, optimizer):
        state = load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return resumes(args, resume)


def lightning_resume(args):
    from lightning.fabric.plugins.io import TorchCheckpointIO

    return torch_resume(args, TorchCheckpointIO().load_checkpoint)


def dcp_resume(args):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    path = args.directory / str(os.getpid())

    def states(model, optimizer):
        return dict(zip(["model", "optimizer"], get_state_dict(model, optimizer), strict=True))

    def resume(model, optimizer):
        state = states(model, optimizer)
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    dcp.save(states(*trained(args.gb, args.tensors)), checkpoint_id=path)
    return resumes(args, resume)


def accelerate_resume(args):
    from accelerate import Accelerator

    path = args.directory / str(os.getpid())
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*trained(args.gb, args.tensors))
    accelerator.save_state(path)

    def resume(model, optimizer):
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model, optimizer)
        accelerator.load_state(path)

    del accelerator
    return resumes(args, resume)


def loops(args, prepare):
    """prepare(model, optimizer, data) returns what trains for args.steps steps of about 1 ms."""
    torch.set_num_threads(1)
    batches = [(torch.rand(32, 128),) for _ in range(50)]
    data = torch.utils.data.DataLoader(batches, batch_size=None)
    while True:
        layers = [torch.nn.Linear(128, 128) for _ in range(10)]
        model = torch.nn.Sequential(*layers)
        yield prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), data)


def endless(loader):
    while True:
        yield from loader


def loss_of(model, batch):
    return model(batch[0]).pow(2).mean()


def hand_loop(args):
    def prepare(model, optimizer, data):
        def run():
            model.train()
            for batch in itertools.islice(endless(data), args.steps):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()

        return run

    return loops(args, prepare)


def ours_loop(args):
    def prepare(model, optimizer, data):
        trainer = ckpt.Trainer(model, optimizer, data, loss_fn=loss_of)
        return lambda: trainer.fit(args.steps) and None

    return loops(args, prepare)


def accelerate_loop(args):
    from accelerate import Accelerator

    def prepare(model, optimizer, data):
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)

        def run():
            for batch in itertools.islice(endless(data), args.steps):
                with accelerator.accumulate(model):
                    optimizer.zero_grad()
                    accelerator.backward(loss_of(model, batch))
                    optimizer.step()

        return run

    return loops(args, prepare)


def lightning_loop(args):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, model, optimizer):
            super().__init__()
            self.model, self.optimizer = model, optimizer

        def training_step(self, batch):
            return loss_of(self.model, batch)

        def configure_optimizers(self):
            return self.optimizer

    def prepare(model, optimizer, data):
        trainer = lightning.Trainer(accelerator="cpu", max_steps=args.steps, barebones=True)
        return lambda: trainer.fit(Module(model, optimizer), data)

    return loops(args, prepare)


def checksums(args):
    sources = arrays(make_state(args))
    while True:
        yield lambda: [zlib.crc32(source) for source in sources] and None


def checks(args, check):
    path = args.directory / f"{os.getpid()}.pt"
    torch.save(make_state(args), path)
    while True:
        yield lambda: check(path)


def ours_verify(args):
    return checks(args, ckpt.verify_checkpoint)


def testzip(args):
    def check(path):
        with zipfile.ZipFile(path) as archive:
            archive.testzip()

    return checks(args, check)


# --------------------------------------------------------------------------------------------------
# Rows: the limit, what we promise, ours, others
# --------------------------------------------------------------------------------------------------
def busy(stall):
    return lambda args: while_saving(args, stall)


def dcp_process_stall(args):
    return dcp_stall(args, "process")


STALLS = {
    "clone + torch.save in a thread": clone_stall,
    "torch DCP async, thread": dcp_stall,
    "torch DCP async, process": dcp_process_stall,
    "Lightning async": lightning_stall,
}
OTHER_SAVES = {
    "torch.save + fsync": torch_save,
    "safetensors + fsync": safetensors_save,
    "torch DCP": dcp_save,
    "Lightning + fsync": lightning_save,
    "Accelerate + fsync": accelerate_save,
}
OTHER_RESUMES = {
    "torch.load": torch_resume,
    "torch DCP": dcp_resume,
    "Lightning": lightning_resume,
    "Accelerate": accelerate_resume,
}
OTHER_LOOPS = {"Accelerate": accelerate_loop, "Lightning": lightning_loop}
BUSY = {name: busy(stall) for name, stall in STALLS.items()}


# name: what, limit, what we promise, contenders
# --------------------------------------------------------------------------------------------------
# DumbDiLoCo: what it computes, on the model alone
# --------------------------------------------------------------------------------------------------
def copying_model(args):
    sources = arrays(
        {"model": Model(args.gb, args.tensors).state_dict(), "optimizer": {"state": {}}}
    )
    targets = [np.ones_like(source) for source in sources]
    while True:
        yield lambda: [np.copyto(a, b) for a, b in zip(targets, sources, strict=True)]


def joined(args):
    """A node on top of the shared model, and that."""
    model = Model(args.gb, args.tensors)
    work = ckpt.DumbDiLoCo(model, args.directory / "hub", node_id="a")._work
    return work, work.found({name: p.detach() for name, p in model.named_parameters()})


def ours_boundary(args):
    """What the training thread does."""
    work, _ = joined(args)
    while True:
        yield lambda: work.capture(1)
        work.finish()


def ours_outer(args):
    """The delta of one node, its sum with that of another, and the outer step of the master."""
    (work, shared), spare = joined(args), None

    def step():
        work.finish()
        total = {name: tensor.detach() for name, tensor in other.items()}
        ckpt._add(total, work.upload.delta, shared, work.layout)
        return ckpt._outer_step(shared, total, 2, 0.7, 0.5, work.layout, spare)

    for number in itertools.count():
        work.capture(1)
        other = {name: torch.full(shape, 1e-4) for name, shape in work.layout.parameters.items()}
        done = []
        if number < 3:  # from the fourth version on it is memory of its own, used before
            done.append(step())
        else:
            yield lambda done=done: done.append(step())
        shared, spare = done[0], None if shared.lent else shared


ROWS = {
    "save": ("durable save", "raw write + fsync", raw_write, 0.6, ours_save, OTHER_SAVES),
    "stall": ("background save: stall", "copying", copying, 0.85, ours_stall, STALLS),
    "busy": ("training meanwhile", "no save", undisturbed, 0.92, busy(ours_stall), BUSY),
    "resume": ("resume", "reading the file", reading, 1.0, ours_resume, OTHER_RESUMES),
    "verify": ("verify", "zlib.crc32", checksums, 0.8, ours_verify, {"testzip": testzip}),
    "boundary": (
        "DumbDiLoCo: boundary",
        "copying the model",
        copying_model,
        0.85,
        ours_boundary,
        {},
    ),
    "outer": (
        "delta, sum and outer step",
        "copying the model",
        copying_model,
        1 / 6,
        ours_outer,
        {},
    ),
    "loop": ("trainer loop, 1 ms a step", "by hand", hand_loop, 0.97, ours_loop, OTHER_LOOPS),
    "small-save": ("20,000 tensors: save", "torch.save + fsync", torch_save, None, ours_save, {}),
    "small-stall": (
        "20,000 tensors: stall",
        "torch.save + fsync",
        torch_save,
        None,
        ours_stall,
        {},
    ),
    "small-resume": ("20,000 tensors: resume", "torch.load", torch_resume, None, ours_resume, {}),
}


# Rows in which the first time in a process counts, and what we promise for it
FIRST = {"stall": 0.15, "resume": None}
# Rows that also say how much memory it took, and what we promise for it
MEMORY = {"save": 0.05, "resume": 0.75}


# --------------------------------------------------------------------------------------------------
# Measuring, one contender at a time
# --------------------------------------------------------------------------------------------------
def run_child(args):
    """Says "ready", waits for a line, runs what is timed, says how long that took, and again."""
    row, name = args.child
    _, _, limit, _, ours, others = ROWS[row]
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # for what libraries print
    for run in {"limit": limit, "ours": ours, **others}[name](args):
        os.sync()  # so that nothing is left to write meanwhile
        print("ready", file=results)
        if not sys.stdin.readline():
            break
        started = time.perf_counter()
        result = run()
        elapsed = time.perf_counter() - started
        print(result if isinstance(result, float) else elapsed, file=results)


def run(row, name, args, times=3):
    """[(seconds, most bytes of memory meanwhile beyond those before)] from a new process.

    Memory that only maps a file is not counted: the kernel takes it back when it needs some.
    """
    command = [sys.executable, __file__, "--child", row, name, "--gb", str(args.gb)]
    command += ["--tensors", str(args.tensors), "--steps", str(args.steps)]
    command += ["--directory", str(args.directory)]
    found = []
    pipes = dict.fromkeys(["stdin", "stdout"], subprocess.PIPE)
    pipes["stderr"] = subprocess.DEVNULL  # libraries are talkative
    # A virtual machine gets memory from its host when it is first touched, slowly: not our matter.
    if row in FIRST:
        touch = f"import numpy; numpy.ones({int(4e9 * args.gb)}, 'u1')"
        subprocess.run([sys.executable, "-c", touch], check=True)
    with subprocess.Popen(command, **pipes, text=True, bufsize=1) as child:
        while child.stdout.readline() == "ready\n" and len(found) < times:
            reply = []
            waiter = threading.Thread(target=lambda: reply.append(child.stdout.readline()))  # noqa: B023
            before = peak = memory(child.pid)
            child.stdin.write("run\n")
            waiter.start()
            while waiter.is_alive():
                peak = max(peak, memory(child.pid))
                # Looking costs a core: only where memory is what we want to know.
                waiter.join(0.005 if row in MEMORY else None)
            if reply[0]:
                found.append((float(reply[0]), peak - before))
        child.kill()
    for left in args.directory.iterdir():
        remove(left)
    return found


def memory(pid):
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:  # not Linux
        return 0
    lines = [line.split() for line in status.splitlines()]
    return sum(int(line[1]) * 1024 for line in lines if line[0] in ("RssAnon:", "RssShmem:"))


def measure(row, args):
    """{contender: ([first times], [later times])}, each a (seconds, bytes); in turns."""
    names, measured = ["limit", "ours", *ROWS[row][-1]], {}
    for _ in range(args.rounds):
        for name in random.sample(names, len(names)):
            if found := run(row, name, args):
                first, later = measured.setdefault(name, ([], []))
                first.append(found[0])
                later += found[1:]
            else:
                print(
                    f"left out: {name}, not installed? See --child {row} {name!r}", file=sys.stderr
                )
                names.remove(name)
    return measured


def table(row, args):
    """The lines of one row, as line() takes them: ratios to the limit, memory where it matters."""
    what, against, _, promised, _, _ = ROWS[row]
    measured = measure(row, args)
    limit = statistics.median(seconds for seconds, _ in measured["limit"][1])

    def ratios(when):
        medians = {n: statistics.median(s for s, _ in both[when]) for n, both in measured.items()}
        return {name: limit / seconds for name, seconds in medians.items()}

    yield what, against, ratios(1), promised
    if row in ("stall", "resume"):
        yield "the same, first in a process", against, ratios(0), FIRST[row]
    if row in MEMORY and sys.platform == "linux":
        bytes_ = {n: statistics.median(m for _, m in both[0]) for n, both in measured.items()}
        extra = {name: value / args.gb / 1e9 for name, value in bytes_.items()}
        yield "extra memory", "of the state", extra, MEMORY[row]


def line(what, against, values, promised):
    others = ", ".join(f"{name} {values[name]:.2f}" for name in contenders(values))
    promise = "" if promised is None else f"{promised:.2f}"
    return f"| {what} | {against} | {values['ours']:.2f} | {promise} | {others} |"


def contenders(values):
    return sorted(values.keys() - {"limit", "ours"})


def draw(file, title, rows):
    """The rows as bars: what reaches the line is as fast as the limit."""
    try:
        from matplotlib.figure import Figure
        from PIL import Image  # comes with it
    except ImportError:
        print("For a picture of it: python -m pip install matplotlib")
        return
    ours, others, promises, labels, y = {}, {}, {}, {}, 0.0  # all by y, from the top
    for what, against, values, promised in rows:
        ours[y], labels[y] = values["ours"], f"{what} vs. {against}"
        if promised is not None:
            promises[y] = promised
        for name in contenders(values):
            y += 1
            others[y], labels[y] = values[name], name
        y += 1.7
    figure = Figure(figsize=(8, 1.2 + 0.145 * y), layout="constrained")
    axes = figure.subplots()
    axes.barh(ours.keys(), ours.values(), color="#0072b2", label="ckpt.py")
    if others:
        axes.barh(others.keys(), others.values(), 0.7, color="#b5c7d3", label="others")
    axes.axvline(1, color="k", lw=1, label="as fast as the limit")
    axes.plot(promises.values(), promises.keys(), "D", color="#e69f00", mec="k", label="promised")
    for y, ratio in {**ours, **others}.items():
        promise = promises.get(y, ratio)
        end = promise if 0 < promise - ratio < 0.2 else ratio  # not on the marker
        text = axes.annotate(f"{ratio:.2f}", (end, y), (6, 0), textcoords="offset points")
        text.set(va="center", size=7.5, weight="bold" if y in ours else "normal")
        text.set_bbox({"fc": "w", "ec": "none", "pad": 0.5})  # where it is on the line
    axes.set_yticks([*labels], labels.values(), size=7.5)
    for y, text in zip(labels, axes.get_yticklabels(), strict=True):
        text.set_weight("bold" if y in ours else "normal")
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel("time of the limit / time measured: longer is faster")
    figure.suptitle(title, size=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.open(drawn).convert("RGB").quantize().save(file, "PNG")  # a third of the bytes
    print(f"The ratios are drawn in {file}")


def import_cost(args):
    """Milliseconds that import ckpt takes in an interpreter that has imported torch."""
    code = (
        "import time, torch; t = time.perf_counter(); import ckpt; print(time.perf_counter() - t)"
    )
    root = Path(ckpt.__file__).parent
    run = [sys.executable, "-c", code]
    times = [float(subprocess.check_output(run, cwd=root)) for _ in range(args.rounds)]
    return f"| import ckpt, after torch | | {1e3 * statistics.median(times):.0f} ms | 20 ms | |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5, help="processes for each contender")
    parser.add_argument("--steps", type=int, default=1000, help="of the trainer loop")
    parser.add_argument("--only", nargs="+", choices=[*ROWS, "import"], default=[*ROWS, "import"])
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--plot", type=Path, default=Path("runs/benchmark.png"), help="a PNG")
    parser.add_argument("--tensors", type=int, default=24, help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.directory = args.directory.absolute()
    if args.child:
        return run_child(args)
    lines, pictured = [], []
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="benchmark-") as directory:
        for row in args.only:
            if row == "import":
                lines.append(import_cost(args))
                continue
            row_args = argparse.Namespace(**{**vars(args), "directory": Path(directory)})
            if row.startswith("small"):  # a weight, two moments and a step of each
                row_args.gb, row_args.tensors = 0.24 * min(args.gb, 1), 5000
            for new in table(row, row_args):
                lines.append(line(*new))
                print(lines[-1], file=sys.stderr, flush=True)
                if new[0] != "extra memory":
                    pictured.append(new)
    cpu = f"{os.cpu_count()} CPUs, {platform.system()}, torch {torch.__version__}"
    print(f"\n{args.gb:g} GB, {cpu}, {time.strftime('%Y-%m-%d')}: limit / contender\n")
    print("| what | the limit | ours | promised | others |\n| --- | --- | --- | --- | --- |")
    print(*lines, sep="\n")
    print("\nOf extra memory less is better. States under 1 GB and few rounds say little.")
    if pictured:
        draw(args.plot, f"{args.gb:g} GB of model and AdamW state, {cpu}", pictured)
    return None


if __name__ == "__main__":
    main()
