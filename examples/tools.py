"""Two things that one wants of a checkpoint file now and then.

    python examples/tools.py weights runs/train_text weights.pt           # the model's weights only
    python examples/tools.py weights runs/train_text weights.safetensors  # needs safetensors
    python examples/tools.py diff a.pt b.pt

A folder stands for its latest checkpoint. `diff` names the keys that only one of the two has and
what differs, tensors with the largest absolute difference. Its exit status is that of diff: 0 where
nothing differs, 1 where something does, 2 when a file cannot be read.
"""

import argparse
import os
import pickle
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

# In your own repository ckpt.py lies next to the script, and this line is not needed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ckpt


def fail(message: str) -> None:
    print(message, file=sys.stderr)
    raise SystemExit(2)


def load(path: Path, trust: bool) -> dict:
    if path.is_dir():
        path = ckpt.CheckpointManager(path).latest_path() or path
    if not path.is_file():
        fail(f"{path}: there is no checkpoint")
    try:
        ckpt.verify_checkpoint(path)  # torch.load would not notice a flipped bit
        state = torch.load(path, map_location="cpu", weights_only=not trust)
    except ckpt.CheckpointError as error:
        fail(str(error).partition(";")[0])
    except pickle.UnpicklingError:
        fail(f"{path} holds more than tensors and plain values: --trust, if you trust it")
    except Exception as error:  # torch.load raises almost anything
        fail(f"{path} cannot be loaded ({error!r:.60})")
    if not isinstance(state, Mapping):
        fail(f"{path} holds a {type(state).__name__}, not a dict")
    return state


def weights(args: argparse.Namespace) -> None:
    state = load(args.source, args.trust)
    if not isinstance(state.get(args.key), Mapping):
        fail(f"{args.source} has no dict {args.key!r}; it has {', '.join(map(str, state))}")
    model = state[args.key]
    if args.destination.suffix != ".safetensors":
        ckpt.atomic_torch_save(model, args.destination)
    else:
        try:
            from safetensors.torch import save_file
        except ImportError:
            fail("this needs safetensors: python -m pip install safetensors")
        if others := [name for name, value in model.items() if not torch.is_tensor(value)]:
            fail(f"not tensors, so safetensors cannot hold them: {', '.join(others)}")
        # Tied tensors are stored once for each of their names: the format has no sharing.
        copies = {name: tensor.clone().contiguous() for name, tensor in model.items()}
        beside = args.destination.with_name(f".{args.destination.name}.tmp-{os.getpid()}")
        args.destination.parent.mkdir(parents=True, exist_ok=True)
        save_file(copies, beside)
        os.replace(beside, args.destination)
    print(f"{args.destination}: {len(model)} entries")


def flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """The leaves of nested dicts and lists, as ("optimizer.state.0.exp_avg", tensor)."""
    nested = (Mapping, list, tuple, torch.Tensor)
    if isinstance(value, (list, tuple)) and any(isinstance(child, nested) for child in value):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping) or not value:
        yield name, value
        return
    for key, child in value.items():
        yield from flat(child, f"{name}.{key}" if name else str(key))


def difference(a: object, b: object) -> str | None:
    if not (torch.is_tensor(a) and torch.is_tensor(b)):
        same = type(a) is type(b) and (a == b or (a != a and b != b))
        return None if same else f"{a!r:.40} and {b!r:.40}"
    kinds = [f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (a, b)]
    if kinds[0] != kinds[1]:
        return " and ".join(kinds)
    a, b = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
    same = (a == b) | ((a != a) & (b != b))  # NaN is NaN here
    if same.all():
        return None
    return f"{(~same).sum()} of {a.numel()} differ, by {(a - b)[~same].abs().max():.3g} at most"


def diff(args: argparse.Namespace) -> None:
    a, b = (dict(flat(load(path, args.trust))) for path in (args.a, args.b))
    lines = [f"only in {args.a}: {name}" for name in a if name not in b]
    lines += [f"only in {args.b}: {name}" for name in b if name not in a]
    found = {name: difference(a[name], b[name]) for name in a if name in b}
    lines += [f"{name}: {text}" for name, text in found.items() if text]
    print("\n".join(lines) or f"no difference in {len(a)} entries")
    raise SystemExit(1 if lines else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--trust", action="store_true", help="run the pickled code in the files")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("weights", parents=[common], help="only the model's weights")
    command.add_argument("source", type=Path)
    command.add_argument("destination", type=Path, help="a .safetensors, or anything for torch")
    command.add_argument("--key", default="model", help="where they are; Lightning: state_dict")
    command.set_defaults(run=weights)
    command = commands.add_parser("diff", parents=[common], help="what differs between two files")
    command.add_argument("a", type=Path)
    command.add_argument("b", type=Path)
    command.set_defaults(run=diff)
    args = parser.parse_args()
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `| head` is no error
    try:
        args.run(args)
    except OSError as error:
        fail(str(error))


if __name__ == "__main__":
    main()
