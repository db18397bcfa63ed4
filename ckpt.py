# ckpt.py: a training run that survives anything and goes on exactly where it was, in one file.
# MIT License. Copyright (c) 2026 the ckpt.py authors.
# Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
# associated documentation files (the "Software"), to deal in the Software without restriction,
# including without limitation the rights to use, copy, modify, merge, publish, distribute,
# sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
# furnished to do so, subject to the following conditions:
# The above copyright notice and this permission notice shall be included in all copies or
# substantial portions of the Software.
# THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
# NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
# NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
# DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT
# OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""Atomic checkpoints, exact RNG and data position, and a small trainer that resumes bit for bit.

    manager = CheckpointManager("runs/a", every_steps=500, keep_last=3)
    trainer = Trainer(model, optimizer, loader, checkpoint_manager=manager, exact_resume=True)
    trainer.resume()        # False at the first start
    trainer.fit(10_000)     # kill it whenever you like, run the script again
    if state := manager.load_latest():  # or so, in a loop of your own; None at the first start
        load_model_state_dict(model, state["model"]), ..., restore_rng_state(state["rng"])
    if manager.should_save(step):
        manager.save(step, {"model": model_state_dict(model), ..., "rng": capture_rng_state()})

Sections, each using only those above it: errors, atomic files, RNG, model and optimizer state,
manager, trainer, DumbDiLoCo, command line. Cut the file at any banner (__all__ too): what is above
still works. In a terminal: python ckpt.py -h
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import datetime
import errno
import functools
import hashlib
import io
import json
import logging
import math
import multiprocessing.util
import operator
import os
import pickle
import pprint
import random
import re
import shutil
import signal
import stat
import sys
import threading
import time
import types
import warnings
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch

__version__ = "0.1.0"
__all__ = """
    CheckpointError atomic_torch_save atomic_json_dump verify_checkpoint capture_rng_state
    restore_rng_state seed_everything model_state_dict load_model_state_dict CheckpointManager
    SyncCoordinator TrainResult Trainer DumbDiLoCo Hub
""".split()

log = logging.getLogger("ckpt")


# ==================================================================================================
# Errors
# ==================================================================================================
class CheckpointError(RuntimeError):
    """A checkpoint that is missing, damaged or does not fit.

    ``path`` (a ``Path``) and ``step`` (an int) say which one it is; None where that is unknown.
    """

    def __init__(
        self, message: str, *, path: str | os.PathLike | None = None, step: int | None = None
    ):
        super().__init__(message)
        self.path = None if path is None else Path(path)
        self.step = step


def _check_int(name: str, value: Any, least: int) -> int:
    """The argument as an int, or the error that names it."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r}")
    return number


def _check_number(
    name: str,
    value: Any,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (above < value < below and value >= least):
        raise ValueError(f"{name} is out of range, got {value!r}")


def _check_type(name: str, value: Any, kind: Any) -> None:
    if not isinstance(value, kind):
        expected = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise TypeError(f"{name} must be of type {expected}, got {value!r:.200}")


# ==================================================================================================
# Atomic files: write beside the destination, sync, rename, sync the directory
# ==================================================================================================
def atomic_torch_save(state: Any, path: str | os.PathLike, *, fsync: bool = True) -> None:
    """``torch.save(state, path)``, so that ``path`` holds the old file or the new one, whole.

    The bytes go to ``.<name>.tmp-<pid>`` beside ``path`` and are renamed over it; missing parent
    directories are made. With ``fsync`` file and directory have reached the disk on return.
    An OSError carries errno and filename. Whatever is raised, no temporary file stays, and the old
    file does, unless it was the last step, syncing the directory, that failed. A Ctrl-C, as other
    signals, is obeyed when the file is there, a second one at once. Threads and processes may save
    to one path at once: the last one wins.
    """
    with _signals_deferred():
        _write_atomically(path, lambda file: torch.save(state, file), fsync)


def atomic_json_dump(value: Any, path: str | os.PathLike, *, fsync: bool = True) -> None:
    """Indented JSON of ``value`` in ``path``, as atomically as :func:`atomic_torch_save`."""
    data = (json.dumps(value, indent=2) + "\n").encode()
    _write_atomically(path, lambda file: file.write(data), fsync)


def verify_checkpoint(path: str | os.PathLike) -> None:
    """Compare every record of a ``torch.save`` file with its CRC-32, without unpickling anything.

    Raises CheckpointError naming the damaged record (``torch.load`` itself does not look: a flipped
    bit in a tensor loads silently). A file that has no checksums, because it is in torch's legacy
    format or was written without them, passes with a warning.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            if file.read(len(_LEGACY_MAGIC)) == _LEGACY_MAGIC:
                log.warning("%s is in the legacy format, which has no checksums", path)
                return
            damaged = _damaged_record(file, path)
    except Exception as error:  # a damaged zip makes zipfile raise almost anything
        raise CheckpointError(f"{path} cannot be read ({error}); {_WAY_OUT}", path=path) from error
    if damaged:
        message = f"{path} is damaged: record {damaged!r} is missing or fails its checksum"
        raise CheckpointError(f"{message}; {_WAY_OUT}", path=path)


def _damaged_record(file: BinaryIO, name: Any) -> str | None:
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        # The directory has no checksum. This bit makes a record a folder, read as nothing.
        damaged = next((r.filename for r in records if r.external_attr & 0x10), None)
        if not any(r.filename.endswith("/data.pkl") for r in records):
            return "data.pkl"
        if not any(r.CRC for r in records):
            log.warning("%s was written without checksums: nothing to verify", name)
            return None
        file.seek(0)  # where torch takes the file to begin
        torch._C.PyTorchFileReader(file)  # which checks the rest of the directory
        return damaged or archive.testzip()


_WAY_OUT = "use an older checkpoint: load_latest(fallback=True) or resume(fallback=True)"
_LEGACY_MAGIC = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2)
# What a file system says that cannot sync a directory. Never among them: ENOSPC, EIO.
_CANNOT_SYNC = {
    getattr(errno, name)
    for name in "EINVAL ENOTSUP EOPNOTSUPP ENOSYS EBADF EACCES EPERM EISDIR".split()
}
_in_use: dict[str, object] = {}  # the temporary files that this process is writing now


def _write_atomically(
    path: str | os.PathLike, write: Callable[[BinaryIO], Any], fsync: bool
) -> None:
    path = Path(path)
    if not path.name:
        raise ValueError(f"path must name a file, got {str(path)!r}")
    _make_directory(path.parent, fsync)
    handled = sys.exc_info()[1]  # what the caller may be in the middle of: not about this file
    temporary, owner = str(path.with_name(f".{path.name}.tmp-{os.getpid()}")), object()
    # setdefault is one step, so of two threads that write the same file one gets another name.
    while _in_use.setdefault(temporary, owner) is not owner:
        temporary += "0"
    try:
        with io.BufferedWriter(_EagerFile(temporary, fsync), 1 << 20) as file:
            write(file)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        _remove(temporary)
        # torch.save reports a failed write as "unexpected pos", with the OSError as its context.
        failed = error.__context__ if type(error) is RuntimeError else error
        if isinstance(failed, OSError) and failed.filename is None and failed is not handled:
            failed.filename = str(path)
            raise failed from None
        raise
    finally:
        del _in_use[temporary]
    if fsync:
        _sync_directory(path.parent)


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """The program's signal handlers, Ctrl-C's too, run at the end of the block.

    What one raised while torch writes would come out as another error, or abort the process.
    """
    arrived: list[tuple[int, Any]] = []
    handlers = {}

    def handle(number: int, frame: Any) -> None:
        arrived.append((number, frame))
        signal.signal(number, handlers[number])  # the next one is obeyed at once

    if threading.current_thread() is threading.main_thread():
        present = {number: signal.getsignal(number) for number in signal.valid_signals()}
        handlers.update((n, handler) for n, handler in present.items() if callable(handler))
    try:
        for number in handlers:
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in arrived:
            handlers[number](number, frame)


class _EagerFile(io.FileIO):
    """A new file whose bytes start for the disk as they come, so that fsync finds few left."""

    def __init__(self, path: str, eager: bool):
        super().__init__(path, "w")
        self._eager = eager and hasattr(os, "posix_fadvise")
        self._sent = self._written = 0

    def write(self, data: memoryview) -> int:
        written = super().write(data[:_PIECE])
        self._written += written
        if self._eager and self._written - self._sent >= _PIECE:
            # "Not needed" makes Linux write at once; what it has not written yet stays cached.
            advice = self._sent, self._written - self._sent, os.POSIX_FADV_DONTNEED
            with contextlib.suppress(OSError):  # it is only advice
                os.posix_fadvise(self.fileno(), *advice)
            self._sent = self._written
        return written


_PIECE = 1 << 25  # bytes


def _make_directory(directory: Path, fsync: bool) -> None:
    made = [d for d in (directory, *directory.parents) if not d.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    if fsync:
        for new in made:
            _sync_directory(new.parent)


def _sync_directory(directory: Path) -> None:
    if os.name == "nt":  # Windows cannot open a directory
        return
    try:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            error.filename = str(directory)
            raise
        log.debug("cannot sync directory %s: %s", directory, error)


def _remove(path: str | os.PathLike) -> None:
    """Remove a file that is not needed. That it stays is no reason to end a run: it is logged."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass  # another process was quicker
    except OSError as error:
        log.warning("cannot remove %s: %s", path, error)


# ==================================================================================================
# RNG
# ==================================================================================================
def capture_rng_state() -> dict:
    """The state of every global generator, in a form that ``torch.load(weights_only=True)`` takes.

    Keys: ``python`` (tuple), ``numpy`` (tuple; its array is an int64 tensor), ``torch`` (uint8
    tensor), ``cuda`` (list with a uint8 tensor for each device; only with CUDA), ``mps`` (uint8
    tensor; only with MPS). Nothing is drawn.
    """
    name, keys, *rest = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_rng_state(state: Mapping, *, strict: bool = False) -> None:
    """Put back what :func:`capture_rng_state` took, part by part.

    A part that is missing, damaged or for devices that are not here is logged in one warning and
    left as it is. With ``strict`` the same is a CheckpointError that lists the parts, and nothing
    has changed. Raises TypeError when ``state`` is not a mapping.
    """
    _check_type("state", state, Mapping)
    before = capture_rng_state() if strict else None
    failed = []
    for part, restore in _RESTORE.items():
        if part not in state and part in ("cuda", "mps"):
            continue
        try:
            restore(state[part])
        except Exception as error:  # swallowed by contract: a run goes on with other numbers
            failed.append(f"{part} ({'missing' if part not in state else error})")
    if failed and strict:
        restore_rng_state(before)
        raise CheckpointError(f"RNG state cannot be restored: {', '.join(failed)}")
    if failed:
        log.warning("RNG state not restored, random numbers will differ: %s", ", ".join(failed))


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (all devices). ``seed``: 0 <= int < 2**32, else ValueError."""
    number = _check_int("seed", seed, 0)
    if number >= 2**32:
        raise ValueError(f"seed must be below 2**32, got {seed!r}")
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def _restore_python(state: tuple) -> None:
    version, internal, gauss = state
    random.setstate((version, tuple(internal), gauss))


def _restore_numpy(state: tuple) -> None:
    name, keys, *rest = state
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))


def _restore_cuda(states: list) -> None:
    here = torch.cuda.device_count()
    for device, state in enumerate(states[:here]):
        torch.cuda.set_rng_state(state.cpu(), device)
    if len(states) > here:
        raise ValueError(f"saved on {len(states)} devices, {here} are here")


_RESTORE = {
    "python": _restore_python,
    "numpy": _restore_numpy,
    "torch": lambda state: torch.set_rng_state(state.cpu()),
    "cuda": _restore_cuda,
    "mps": lambda state: torch.mps.set_rng_state(state.cpu()),
}


# ==================================================================================================
# Model and optimizer state
# ==================================================================================================
def model_state_dict(model: torch.nn.Module) -> dict:
    """``model.state_dict()`` under bare names: what ``torch.compile`` (``_orig_mod.``),
    DistributedDataParallel and DataParallel (``module.``) put before them is gone, at any depth.

    The tensors are the model's own, not copies; tied ones keep all their names and share storage.
    CheckpointError for one that is spread over several processes (FSDP, DTensor).
    """
    _check_whole(model)
    state, bare_name = model.state_dict(), _bare_namer(model)
    bare = OrderedDict((bare_name(name), value) for name, value in state.items())
    if hasattr(state, "_metadata"):  # module versions, which load_state_dict may ask for
        bare._metadata = OrderedDict((bare_name(n), v) for n, v in state._metadata.items())
    return bare


def load_model_state_dict(model: torch.nn.Module, state: Mapping) -> None:
    """Copy ``state`` into ``model``, whichever of the two is wrapped (compiled, DDP) or bare.

    Strict: one CheckpointError names every missing and unexpected key and every other shape, and
    the model is unchanged. (It is half loaded if a module's own code raises after that, or torch
    cannot write to a tensor of it, as to an expanded view.)
    A tensor of another dtype is cast. TypeError if it is not a mapping.
    """
    _check_type("state", state, Mapping)
    _check_whole(model)
    _check_whole(state)
    fitted, problems = _fit(model, state)
    if problems:
        raise CheckpointError("the state does not fit the model:\n  " + "\n  ".join(problems))
    try:
        model.load_state_dict(fitted)
    except Exception as error:  # from a module's own code
        raise CheckpointError(f"the model refused its state: {error!r}") from error


def _check_whole(held: Any, error: type[Exception] = CheckpointError) -> None:
    """Raise ``error`` if of a model or a state this process has only its part (FSDP, DTensor)."""
    if _process_count() == 0:  # nothing can be spread, and it takes a while to look
        return
    parts = _named_tensors(held)
    if isinstance(held, torch.nn.Module):
        parts = (*held.named_modules(), *held.named_parameters(), *held.named_buffers())
    for name, part in parts:
        kind = type(part)
        where = "torch.distributed" + (".fsdp" if isinstance(part, torch.nn.Module) else "")
        if kind.__module__.startswith(f"{where}."):
            what = f"{name or 'the model'} is a {kind.__name__}, of which each process has a part"
            raise error(f"{what}: such a model is for torch.distributed.checkpoint")


def _process_count() -> int:
    """How many processes torch.distributed has joined with this one, itself too; 0: it has not."""
    dist = torch.distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0


def _named_tensors(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested dicts, lists and tuples, under dotted names."""
    left, seen = [("", value)], set()  # a list may hold itself
    while left:
        name, value = left.pop()
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            inner = [(f"{name}.{key}" if name else str(key), item) for key, item in items]
            left.extend(reversed(inner))


def _bare_namer(model: torch.nn.Module) -> Callable[[str], str]:
    wrapped = any(map(_wrapped_child, model.modules()))
    return functools.partial(_bare_name, model) if wrapped else str


def _bare_name(model: torch.nn.Module, name: str) -> str:
    module, kept = model, []
    for part in name.split("."):
        if part != _wrapped_child(module):
            kept.append(part)
        module = module._modules.get(part) if isinstance(module, torch.nn.Module) else None
    return ".".join(kept)


def _wrapped_child(module: Any) -> str | None:
    """The attribute under which a wrapper holds the module that it wraps."""
    if isinstance(module, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        return "module"
    # By name: importing torch._dynamo for its class takes a second.
    return "_orig_mod" if type(module).__name__ == "OptimizedModule" else None


def _fit(model: torch.nn.Module, state: Mapping) -> tuple[dict, list[str]]:
    """``state`` under the names that ``model.load_state_dict`` expects, and all that differs."""
    own = model.state_dict()
    bare_name = _bare_namer(model)
    live = {bare_name(name): name for name in own}
    saved = dict(zip(_saved_names(state, live), state.values(), strict=True))
    problems = [f"missing: {name}" for name in sorted(live.keys() - saved.keys())]
    problems += [f"unexpected: {name}" for name in sorted(saved.keys() - live.keys())]
    # Where a module loads its state in its own way (fake quantization resizes buffers), let it.
    modules = model.named_modules(remove_duplicate=False)
    own_way = {prefix for prefix, module in modules if _loads_in_its_own_way(module)}
    for name in sorted(live.keys() & saved.keys()):
        mine, theirs = own[live[name]], saved[name]
        if not isinstance(mine, torch.Tensor) or torch.nn.parameter.is_lazy(mine):
            continue
        if live[name].rpartition(".")[0] in own_way:
            continue
        if not isinstance(theirs, torch.Tensor) or torch.nn.parameter.is_lazy(theirs):
            problems.append(f"{name}: saved as {type(theirs).__name__}, the model has a tensor")
        elif mine.shape != theirs.shape:
            problems.append(f"{name}: saved {tuple(theirs.shape)}, the model {tuple(mine.shape)}")
        elif (
            theirs.is_meta
            or theirs.layout != mine.layout
            or theirs.is_quantized != mine.is_quantized
        ):
            problems.append(f"{name}: saved as {theirs.layout}, {theirs.dtype} on {theirs.device}")
    fitted = OrderedDict((live.get(name, name), value) for name, value in saved.items())
    if hasattr(state, "_metadata"):
        inner = {bare_name(name): name for name in getattr(own, "_metadata", {})}
        fitted._metadata = OrderedDict((inner.get(n, n), v) for n, v in state._metadata.items())
    return fitted, problems


def _loads_in_its_own_way(module: torch.nn.Module) -> bool:
    return not module._load_from_state_dict.__module__.startswith("torch.nn.")


def _unwrapped(name: Any, wrappers: Iterable[str] = ("_orig_mod", "module")) -> str:
    """The name without the parts that a wrapper may have put in, where only names are known."""
    return ".".join(part for part in str(name).split(".") if part not in wrappers)


def _saved_names(state: Mapping, live: Mapping) -> list[str]:
    """The keys of ``state`` under the bare names in ``live``, as far as they can be told apart."""
    raw = list(map(str, state))
    plain = [_unwrapped(name, ["_orig_mod"]) for name in raw]
    outer = [name.removeprefix("module.") for name in plain]
    # Wrapped further in (model.generator = DDP(…)): drop "module" where that leaves no doubt.
    short: dict[str, str | None] = {}
    for name in live:
        key = _unwrapped(name)
        short[key] = None if key in short else name
    inner = [name if name in live else short.get(_unwrapped(name)) or name for name in plain]
    readings = [n for n in (raw, plain, outer, inner) if len(set(n)) == len(n)]
    return max(readings or [list(map(repr, state))], key=lambda n: len(live.keys() & set(n)))


def _optimizer_problems(optimizer: torch.optim.Optimizer, saved: Any) -> list[str]:
    """Why ``saved`` does not belong to ``optimizer``: groups, sizes, names, kind, shapes."""
    if "param_groups" not in (own := optimizer.state_dict()):  # a layout of its own
        fits = isinstance(saved, Mapping) and saved.keys() == own.keys()
        return [] if fits else ["not the state_dict of this optimizer"]
    try:
        theirs = [
            {**g, "params": list(g["params"]), "param_names": list(g.get("param_names", ()))}
            for g in saved["param_groups"]
        ]
        state = dict(saved["state"])
    except (TypeError, KeyError, ValueError, AttributeError):
        return ["not an optimizer's state_dict"]
    ours, problems = optimizer.param_groups, []
    if len(ours) != len(theirs):
        return [f"saved with {len(theirs)} parameter groups, here are {len(ours)}"]
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        names = zip(other["param_names"], mine.get("param_names", ()), strict=False)
        wrong = next((pair for pair in names if len({*map(_unwrapped, pair)}) > 1), None)
        if len(mine["params"]) != len(other["params"]):
            sizes = f"{len(other['params'])} parameters, here are {len(mine['params'])}"
            problems.append(f"group {number} was saved with {sizes}")
        elif wrong:
            problems.append(f"group {number} holds {wrong[0]} where {wrong[1]} is here")
        elif misfit := _group_misfit(optimizer, other, mine["params"], state):
            problems.append(f"group {number} was saved {misfit}")
    return problems


def _group_misfit(
    optimizer: torch.optim.Optimizer, group: dict, parameters: list[torch.Tensor], state: Mapping
) -> str | None:
    """What a step with the saved options on spare parameters shows, for torch's own kinds."""
    kind = type(optimizer)
    own = kind.__module__.startswith("torch.optim") and "LBFGS" not in kind.__name__
    if not own or any(map(torch.nn.parameter.is_lazy, parameters)):
        return None
    spare = {p.dim(): torch.zeros_like(p.detach()[(slice(1),) * p.dim()]) for p in parameters}
    for parameter in spare.values():
        parameter.grad = torch.zeros_like(parameter)
    twin, options = copy.copy(optimizer), {**group, "params": list(spare.values())}
    try:
        twin.__setstate__({"state": defaultdict(dict), "param_groups": [options]})
        twin.step()
    except Exception as error:  # SparseAdam, say, takes no dense gradient: that tells nothing
        if isinstance(error, KeyError) and error.args[0] in optimizer.defaults:
            return f"by another kind of optimizer: it has no {error.args[0]}"
        if isinstance(error, TypeError):
            return f"by another kind of optimizer: {error}"
        log.debug("options of %s were not tried: %r", kind, error)
    for index, parameter in zip(group["params"], parameters, strict=True):
        entry, shape = state.get(index) or {}, tuple(parameter.shape)
        if not isinstance(entry, Mapping):
            return f"with {entry!r:.80} for parameter {index}"
        # Where the step told nothing: Adagrad of torch 2.6, say, has its state from the beginning.
        needed = twin.state[spare[len(shape)]] or optimizer.state.get(parameter, {})
        lacking = ", ".join(sorted(needed.keys() - entry.keys()))
        if entry and lacking:
            return f"by another kind of optimizer: parameter {index} has no {lacking}"
        for name in needed.keys() & entry.keys():
            value = entry[name]
            saved = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
            sizes = zip(saved[::-1], shape[::-1], strict=False)
            if any(size not in (1, expected) for size, expected in sizes):
                return f"with {name} {saved} for parameter {index} {shape}"
    return None


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping) -> None:
    """``optimizer.load_state_dict``, but no tensor is shared with ``saved`` or has another dtype.

    torch casts fp32 moments to the dtype of bf16 parameters, and keeps the caller's tensors.
    """
    if "param_groups" not in saved:
        optimizer.load_state_dict(copy.deepcopy(saved))
        return
    optimizer.load_state_dict(saved)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [i for group in saved["param_groups"] for i in group["params"]]
    owner = dict(zip(indices, parameters, strict=True))
    for index, entry in saved["state"].items():
        key = owner.get(index, index)  # state of the optimizer as a whole has a key of its own
        if key in optimizer.state:
            optimizer.state[key] = _own(optimizer.state[key], entry)


def _own(live: Any, saved: Any) -> Any:
    if isinstance(saved, torch.Tensor) and isinstance(live, torch.Tensor):
        if live is not saved and live.dtype == saved.dtype:
            return live
        return _copied(saved.detach(), live.device)
    if isinstance(saved, str):  # which torch makes into the name of a generator
        return saved
    if isinstance(saved, dict) and isinstance(live, dict):
        return {key: _own(value, saved.get(key)) for key, value in live.items()}
    if isinstance(saved, (list, tuple)) and isinstance(live, (list, tuple)):
        return type(live)(map(_own, live, saved))
    return copy.deepcopy(live)


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    on_cpu = {tensor.device.type, device.type} == {"cpu"}
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    odd = tensor.is_nested or tensor.is_quantized
    if not (on_cpu and plain) or odd or tensor.nbytes < _HUGE:
        return tensor.to(device, copy=True)
    strides = torch.empty_like(tensor, device="meta").stride()
    storage = _new_buffer(tensor.nbytes).untyped_storage()
    fresh = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return fresh.set_(storage, 0, tensor.size(), strides).copy_(tensor)


_HUGE = 1 << 22  # bytes from which on NumPy asks for huge pages


def _new_buffer(size: int, pinned: bool = False) -> torch.Tensor:
    """``size`` bytes that begin at a multiple of 64, as torch's own do.

    From NumPy, which asks Linux for huge pages: to touch them first takes a fraction of the time.
    ``pinned``: in memory that a GPU copies to fast.
    """
    if pinned:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    memory = np.empty(size + 63, np.uint8)
    start = -memory.ctypes.data % 64
    return torch.from_numpy(memory[start : start + size])


# ==================================================================================================
# Manager
# ==================================================================================================
class CheckpointManager:
    """The checkpoints of one run in one directory: ``step_<12 digits>.pt`` and ``latest.json``.

    ``every_steps``: the interval of :meth:`should_save`. ``keep_last``: how many files
    :meth:`prune` keeps, None for all. ``keep_every``: steps that it divides are kept for ever and
    do not count. ``enabled=False``: should_save is always False, and a trainer saves nothing.
    ``fsync=False``: faster, but a power cut may take the last saves. ``background=True``:
    :meth:`save` takes a copy of the state, in memory that it keeps for the next one, and a thread
    writes it. ``weights_only=True``: load without running pickled code, for files that you do not
    trust. Bad arguments are a ValueError or TypeError.

    One process at a time writes a directory, from one thread; any number may read it meanwhile.
    As a context manager it is closed at the end of the block.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        every_steps: int = 500,
        keep_last: int | None = 3,
        enabled: bool = True,
        fsync: bool = True,
        background: bool = False,
        keep_every: int | None = None,
        weights_only: bool = False,
    ):
        if not os.fspath(directory):
            raise ValueError(f"directory must name one, got {directory!r}")
        # Absolute where a thread writes later on, when the working directory may be another.
        self.directory = Path(directory).absolute() if background else Path(directory)
        self.every_steps = _check_int("every_steps", every_steps, 1)
        self.keep_last = None if keep_last is None else _check_int("keep_last", keep_last, 1)
        self.keep_every = None if keep_every is None else _check_int("keep_every", keep_every, 1)
        self.enabled, self.fsync, self.background = enabled, fsync, background
        self.weights_only = weights_only
        self._writing: _Writing | None = None  # the write in flight
        self._failed: tuple[int, BaseException] | None = None  # what became of the last one
        self._snapshot = _Snapshot()
        self._rewound = False  # whether the last save was below the newest: warned about once

    def should_save(self, step: int) -> bool:
        """Whether ``step`` is a positive multiple of ``every_steps`` and saving is enabled."""
        return bool(self.enabled and step > 0 and step % self.every_steps == 0)

    def path_for(self, step: int) -> Path:
        """Where the checkpoint of ``step`` is, or would be."""
        return self.directory / f"step_{_check_int('step', step, 0):012d}.pt"

    def save(self, step: int, state: dict) -> Path:
        """Write the checkpoint, then the pointer, then prune; the file's path.

        Saves whatever ``enabled`` and ``should_save`` say. A step below the newest is saved too,
        and is the latest from then on; one that is there already is replaced. An OSError passes
        through. Until the pointer names it, a new file is removed again when something is raised.

        In the background: waits for the write in flight, copies and returns; the file will be
        there when :meth:`wait` has returned. A write that failed is a CheckpointError of the next
        save, wait, close or copy_to, in place of its work.
        """
        step = _check_int("step", step, 0)
        _check_type("state", state, dict)
        _check_whole(state)
        self.wait()
        if self.background and threading.main_thread().is_alive():
            copied = self._snapshot.take(state)
            self._writing = _Writing(lambda: self._write_behind(step, copied))
            self._writing.thread.start()
        else:  # at the interpreter's end nobody would wait for a new thread
            self._write(step, state)
        return self.path_for(step)

    def wait(self) -> None:
        """Until nothing is being written any more. CheckpointError when the write has failed."""
        self._join()
        if self._failed is not None:
            (step, error), self._failed = self._failed, None
            message = f"the background save of step {step} failed: {error}; the checkpoint before"
            message += " it is good, and what this call is for has not been done"
            raise CheckpointError(message, path=self.path_for(step), step=step) from error

    def close(self) -> None:
        """:meth:`wait`, and free the memory of background saves. (A later save is no error.)"""
        try:
            self.wait()
        finally:
            self._snapshot = _Snapshot()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            self.close()
        except CheckpointError:  # it was logged, and is not to hide what happened in the block
            if error is None:
                raise

    def load_latest(self, *, fallback: bool = False) -> dict | None:
        """The latest checkpoint, on the CPU, or None when the directory holds none.

        A file that cannot be read, or is not a dict, is a CheckpointError. With ``fallback`` each
        file is verified before it is loaded, a damaged one is skipped with a warning for the next
        lower step, and when none is left one CheckpointError names them all.
        """
        return self._load_latest(fallback, mapped=False)[1]

    def latest_path(self) -> Path | None:
        """The file that ``latest.json`` names, if it is there, else the one of the highest step.

        A crash between the two writes of a save leaves the pointer one save behind; it is trusted.
        """
        self._join()
        return self._latest()

    def steps(self) -> list[int]:
        """The steps that have a checkpoint here, ascending."""
        self._join()
        return sorted(self._files())

    def prune(self) -> None:
        """Delete all but the ``keep_last`` newest checkpoints up to the one that is latest.

        Later files (a run that was rewound), multiples of ``keep_every`` and the latest itself
        stay. A file that cannot be deleted is logged.
        """
        self._join()
        self._prune()

    def copy_to(self, destination: str | os.PathLike) -> Path | str:
        """Copy the latest checkpoint out of prune's reach; returns where it is.

        A path is written atomically; a directory, or a name that ends in a slash, gets the file
        under its own name. A URL (``s3://…``) is anything that fsspec opens with the packages
        installed. CheckpointError when there is nothing to copy, or the write in flight failed.
        """
        self.wait()
        while (source := self._latest()) is not None:
            try:
                return self._copy(source, os.fspath(destination))
            except FileNotFoundError:
                if source.exists():
                    raise
        raise CheckpointError(f"{self.directory} holds no checkpoint to copy", path=self.directory)

    def _join(self) -> None:
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _write_behind(self, step: int, state: _Pickled) -> None:
        try:
            self._write(step, state)
        except BaseException as error:  # for wait() to raise
            log.error("the background save of step %d failed: %r", step, error)
            self._failed = step, error

    def _write(self, step: int, state: dict | _Pickled) -> None:
        path = self.path_for(step)
        existed = path.exists()
        pointer = {"step": step, "file": path.name}
        try:
            if isinstance(state, _Pickled):
                _write_atomically(path, state.save, self.fsync)
            else:
                atomic_torch_save(state, path, fsync=self.fsync)
            atomic_json_dump(pointer, self.directory / _POINTER, fsync=self.fsync)
        except BaseException:
            if not existed and self._pointed() != path:
                _remove(path)
            raise
        later = sorted(other for other in self._files() if other > step)
        if later and not self._rewound:
            log.warning("%s also holds later steps, which stay: %s", self.directory, later)
        self._rewound = bool(later)
        self._prune()
        self._sweep(path)

    def _latest(self) -> Path | None:
        if (pointed := self._pointed()) is not None:
            return pointed
        files = self._files()
        return files[max(files)] if files else None

    def _prune(self) -> None:
        latest, files = self._latest(), self._files()
        if latest is None or self.keep_last is None:
            return
        top, every = self._step_of(latest), self.keep_every
        past = [step for step in sorted(files) if step <= top]
        counted = [step for step in past if not (every and step % every == 0)]
        for step in counted[: -self.keep_last]:
            _remove(files[step])

    def _copy(self, source: Path, destination: str) -> Path | str:
        if "://" in destination:
            import fsspec.implementations.local

            url = destination + source.name if destination.endswith("/") else destination
            filesystem, remote = fsspec.core.url_to_fs(url)
            if not isinstance(filesystem, fsspec.implementations.local.LocalFileSystem):
                filesystem.put_file(str(source), remote)
                return url
            destination = remote
        target = Path(destination)
        if target.is_dir() or destination.endswith(("/", os.sep)):
            target = target / source.name
        with open(source, "rb") as file:
            _write_atomically(
                target, lambda copied: shutil.copyfileobj(file, copied, 1 << 22), self.fsync
            )
        return target

    def _load_latest(self, fallback: bool, mapped: bool) -> tuple[Path | None, dict | None]:
        self._join()
        failed: list[Path] = []
        while (path := self._next_newest(failed)) is not None:
            try:
                if fallback:
                    verify_checkpoint(path)
                return path, self._load(path, mapped)
            except CheckpointError as error:
                if not path.exists():  # pruned by the writer in between: there is a newer one
                    continue
                if not fallback:
                    raise
                # As text: the error's traceback holds us, and who keeps the record would hold that.
                log.warning("trying an older checkpoint: %s", str(error))
                failed.append(path)
        if failed:
            names = ", ".join(path.name for path in failed)
            message = f"no checkpoint in {self.directory} can be loaded: {names}; each was logged"
            raise CheckpointError(message, path=self.directory)
        return None, None

    def _next_newest(self, failed: list[Path]) -> Path | None:
        """The latest file, or the one of the highest lower step that has not failed yet."""
        latest = self._latest()
        if latest not in failed:
            return latest
        files, top = self._files(), self._step_of(latest)
        left = [step for step in files if step < top and files[step] not in failed]
        return files[max(left)] if left else None

    def _load(self, path: Path, mapped: bool) -> dict:
        """``mapped``: tensors are read when they are used, and keep the file's space meanwhile."""
        step = self._step_of(path)
        load = functools.partial(torch.load, map_location="cpu", weights_only=self.weights_only)
        try:
            try:
                state = load(path, mmap=mapped)
            except Exception as error:
                if not mapped:
                    raise
                log.debug("%s cannot be mapped: %r", path, error)  # legacy files, some file systems
                state = load(path)
        except Exception as error:  # a damaged file makes torch.load raise almost anything
            message = f"{path} cannot be loaded ({error!r:.500}); {_WAY_OUT}"
            refused = self.weights_only and isinstance(error, pickle.UnpicklingError)
            if refused and zipfile.is_zipfile(path):
                message = f"{path} is damaged, or takes weights_only=False to load: if you trust it"
            raise CheckpointError(message, path=path, step=step) from error
        if not isinstance(state, dict):
            message = f"{path} holds a {type(state).__name__}, not a state dictionary; {_WAY_OUT}"
            raise CheckpointError(message, path=path, step=step)
        return state

    def _pointed(self) -> Path | None:
        """The file that the pointer names, None when there is no pointer or it is no use."""
        pointer = self.directory / _POINTER
        try:
            content, before = pointer.read_bytes(), None
            while content != before:  # a writer may have pruned the file in between: look again
                name = json.loads(content)["file"]
                if not re.search(r"[/\\:\0]", name) and self._finished(self.directory / name):
                    return self.directory / name
                content, before = pointer.read_bytes(), content
            raise ValueError(f"it names {name!r}, which is not a file in this directory")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            log.warning("%s is ignored: %s", pointer, error)
            return None

    def _finished(self, path: Path) -> bool:
        """Whether it is a file of this directory, not a link out of it.

        It is whole then: a name of this form appears by a rename only.
        """
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                return False
        except PermissionError:  # it may well be one: to begin afresh would be wrong
            raise
        except (OSError, ValueError):
            return False
        return not path.is_symlink() or path.resolve().parent == self.directory.resolve()

    def _files(self) -> dict[int, Path]:
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return {}
        found = {}
        for name in sorted(names, reverse=True):  # of two names for one step the padded one counts
            match = _STEP_FILE.fullmatch(name)
            if match and self._finished(self.directory / name):
                found[int(match[1])] = self.directory / name
        return found

    def _step_of(self, path: Path) -> int:
        match = _STEP_FILE.fullmatch(path.name)
        if match:
            return int(match[1])
        try:  # a pointer to a file with a name of its own
            return operator.index(json.loads((self.directory / _POINTER).read_bytes())["step"])
        except (OSError, ValueError, TypeError, KeyError):
            return max(self._files(), default=0)

    def _sweep(self, saved: Path) -> None:
        """Delete temporary files that a killed process left behind.

        A pid says nothing about another machine on a shared folder, so they must also be old.
        """
        with contextlib.suppress(FileNotFoundError):  # another process sweeps or prunes too
            newest = saved.stat().st_mtime
            for path in self.directory.iterdir():
                match = _TEMPORARY.fullmatch(path.name)
                if not match or path.name in map(os.path.basename, list(_in_use)):
                    continue
                if not _is_running(int(match[1])) and path.stat().st_mtime <= newest - 60:
                    _remove(path)


_POINTER = "latest.json"
_STEP_FILE = re.compile(r"step_([0-9]+)\.pt")
_TEMPORARY = re.compile(r"\..+\.(?:pt|json)\.tmp-([0-9]+)")


def _is_running(pid: int) -> bool:
    """Whether another process of this number runs here."""
    if pid == os.getpid() or os.name == "nt":  # there kill() kills; open files cannot be removed
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


class _Writing:
    """A thread that runs ``work``, which must not raise; the interpreter ends only after it."""

    def __init__(self, work: Callable[[], Any]):
        self._pid, self._ended, self._wake = os.getpid(), False, threading.Lock()
        self._wake.acquire()
        self.thread = threading.Thread(target=self._run, args=(work,))

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            work()
        finally:
            self._ended = True
            self._wake.release()

    def join(self) -> None:
        """Wait for it, also after a Ctrl-C has interrupted that.

        Thread.join would from then on take the thread for ended, and an Event be out of order.
        """
        while not self._ended and self._pid == os.getpid():
            if not self._wake.acquire(timeout=1) and self.thread.ident is None:
                return  # interrupted before it was started


class _Snapshot:
    """Copies of states, in memory that is kept: to touch it first takes longer than to copy.

    ``take`` pickles the state and copies each storage that the pickle names (_TensorPickler); the
    thread has torch.save write the two (_Pickled, through _Prepared), as it writes a live state.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, bool], list[torch.Tensor]] = {}  # by size, and if pinned

    def take(self, state: Any) -> _Pickled:
        """``state`` as it is now; its tensors hold until the next one is taken."""
        spare, self._buffers = self._buffers, defaultdict(list)
        pickled = io.BytesIO()
        pickler = _TensorPickler(pickled, functools.partial(self._copy, spare))
        try:
            pickler.dump(state)
        except BaseException:
            self._buffers = {}  # they may be as odd as what has failed
            raise
        for device in {live.device for live in pickler.live if live.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        return _Pickled(pickled.getvalue(), pickler.copies)

    def _copy(self, spare: dict, live: torch.UntypedStorage) -> torch.UntypedStorage:
        cuda, size = live.device.type == "cuda", live.nbytes()
        if live.device.type not in ("cpu", "cuda"):
            return live.cpu()
        if spare.get((size, cuda)):
            buffer = spare[size, cuda].pop()
        else:
            buffer = _new_buffer(size, pinned=cuda)
        self._buffers[size, cuda].append(buffer)
        source = torch.empty(0, dtype=torch.uint8, device=live.device).set_(live)
        if cuda:
            buffer.copy_(source, non_blocking=True)
        else:
            np.copyto(buffer.numpy(), source.numpy())  # at full speed with one thread
        return buffer.untyped_storage()


class _TensorPickler(pickle.Pickler):
    """Writes the pickle that torch.save would, and copies each storage when it comes to it."""

    def __init__(self, file: BinaryIO, copy_storage: Callable):
        super().__init__(file, torch.serialization.DEFAULT_PROTOCOL)
        self._copy_storage = copy_storage
        self._seen: dict[int, tuple[str, torch.dtype]] = {}
        self.live: list[torch.UntypedStorage] = []  # held, so that none gets the place of another
        self.copies: list[torch.UntypedStorage] = []

    def persistent_id(self, value: Any) -> tuple | None:
        if not isinstance(value, (torch.UntypedStorage, torch.storage.TypedStorage)):
            return None
        live = getattr(value, "_untyped_storage", value)
        kind, dtype, size = type(value), torch.uint8, live.nbytes()
        if live is not value:
            kind, dtype = getattr(torch, value._pickle_storage_type()), value.dtype
            size = value._size()
        if live._cdata not in self._seen:
            self._seen[live._cdata] = str(len(self.live)), dtype
            self.live.append(live)
            self.copies.append(self._copy_storage(live))
        key, first = self._seen[live._cdata]
        if dtype != first and live.nbytes():  # as torch.save has it: a file knows only one
            raise RuntimeError(f"cannot save the same memory as {first} and as {dtype}")
        return ("storage", kind, key, torch.serialization.location_tag(live), size)


@dataclasses.dataclass
class _Pickled:
    """A state as torch.save pickles it, and copies of the storages that it asks for, in order."""

    pickle: bytes
    storages: list[torch.UntypedStorage]

    def save(self, file: BinaryIO) -> None:
        torch.save(self, file, pickle_module=types.SimpleNamespace(__name__="", Pickler=_Prepared))


class _Prepared:
    """In place of torch.save's pickler: hands it the storages, and the pickle made before."""

    def __init__(self, file: BinaryIO, protocol: int):
        self._file = file

    def dump(self, state: _Pickled) -> None:
        for storage in state.storages:
            self.persistent_id(storage)  # which torch.save has added
        self._file.write(state.pickle)


# ==================================================================================================
# Trainer
# ==================================================================================================
class SyncCoordinator(Protocol):
    """What the trainer asks of an object that keeps several machines together.

    An attribute ``should_stop``, where there is one, is set to a callable before ``start``: it says
    whether a signal asked the run to stop, and whatever waits has to ask it. Of several processes
    each calls its own.
    """

    def start(self) -> None: ...
    def after_optimizer_step(self, model: torch.nn.Module, step: int) -> bool:
        """Called after each update, before ``on_step`` and the save; True: weights were changed."""

    def stop(self) -> None: ...
    def state_dict(self) -> dict: ...
    def load_state_dict(self, state: dict) -> None:
        """Called after ``start`` when a checkpoint was resumed."""


@dataclasses.dataclass
class TrainResult:
    """What ``fit`` did. The first three are the trainer's counters, so they count earlier runs too.

    ``final_loss``: mean loss of the last step's micro-batches, None when no step ran.
    ``elapsed_s``: seconds of this call. ``stop_reason``: ``"max_steps"``, ``"data"`` (an iterator
    that cannot start again ran out) or the name of a signal, as ``"SIGTERM"``, also when it came
    in the last step.
    """

    steps: int
    samples: int
    tokens: int
    final_loss: float | None
    elapsed_s: float
    stop_reason: str


class Trainer:
    """A plain training loop that checkpoints, and resumes to the bit where the data allows.

    A batch that is a dict becomes ``model(**batch)``, a tuple or list ``model(*batch)``, anything
    else ``model(batch)``; the model returns a scalar loss, a mapping with ``"loss"``, or a tuple
    that begins with it. Anything else is for ``loss_fn(model, batch)``, which returns the same.

    ``device``: where the model is moved to; None: it stays where it is. ``scheduler`` steps once
    for each optimizer step. ``precision``: fp32, bf16, fp16 (with a GradScaler) or auto; one that
    the device lacks becomes fp32 with a warning. Gradients of ``accumulation_steps`` batches are
    averaged (across the end of an epoch too) and clipped to the norm ``clip_grad_norm``. ``fit``
    puts the whole model into train mode, and again after an ``on_step`` that left it in another.
    ``config`` (dict, dataclass, namespace) is stored without its secrets.
    ``on_step(trainer, loss)`` runs after each step, before the save; ``loss`` is a detached scalar
    on its device. ``coordinator``: what keeps several machines together, as a ``DumbDiLoCo``.
    ``extra_state``: {name: object with state_dict and load_state_dict} to save too.
    ``exact_resume``: go on with the next batch, not at the loader's beginning. ``save_final``: save
    at the end of ``fit`` too. ``save_on_signal``: signals upon which the step is finished and
    saved and ``fit`` returns; a DataLoader's workers outlive them too (not a forkserver's).

    Where torch.distributed is initialized (``torchrun``), make it on each rank alike, around a
    DistributedDataParallel. Rank 0 writes the file; each rank resumes with its own random numbers
    and data position; what a save raises, all raise; a signal to one stops all. Losses, samples
    and tokens are each rank's own.

    Bad arguments are a ValueError or TypeError. For one thread; signals need the main one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        dataloader: Iterable,
        *,
        device: str | torch.device | None = None,
        scheduler: Any = None,
        precision: str = "fp32",
        accumulation_steps: int = 1,
        clip_grad_norm: float | None = None,
        loss_fn: Callable[[torch.nn.Module, Any], Any] | None = None,
        checkpoint_manager: CheckpointManager | None = None,
        coordinator: SyncCoordinator | None = None,
        config: Any = None,
        on_step: Callable[[Trainer, torch.Tensor], Any] | None = None,
        extra_state: Mapping[str, Any] | None = None,
        exact_resume: bool = False,
        save_final: bool = False,
        save_on_signal: Iterable[int] = (),
    ):
        _check_type("model", model, torch.nn.Module)
        _check_whole(model, ValueError)
        _check_type("optimizer", optimizer, torch.optim.Optimizer)
        _check_type("dataloader", dataloader, Iterable)
        _check_type("save_on_signal", save_on_signal, Iterable)
        _check_type("clip_grad_norm", clip_grad_norm, (int, float, types.NoneType))
        _check_type("loss_fn", loss_fn, (Callable, types.NoneType))
        _check_type("on_step", on_step, (Callable, types.NoneType))
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm must be above 0, got {clip_grad_norm!r}")
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError("scheduler: ReduceLROnPlateau needs a metric, step it in on_step")
        if checkpoint_manager is None and (save_final or save_on_signal):
            raise ValueError("save_final and save_on_signal need a checkpoint_manager, got None")
        self.model, self.optimizer = model, optimizer
        self.device = _device_of(model, device)
        self.precision = _plan_precision(precision, self.device)
        self.scheduler, self.loss_fn, self.on_step = scheduler, loss_fn, on_step
        self.accumulation_steps = _check_int("accumulation_steps", accumulation_steps, 1)
        self.clip_grad_norm = clip_grad_norm
        self.checkpoint_manager, self.coordinator = checkpoint_manager, coordinator
        self.config = None if config is None else _public_config(config)
        self.extra_state = dict(extra_state or {})
        for name, part in self._parts().items():
            if not _is_stateful(part):
                raise TypeError(f"{name} needs state_dict and load_state_dict, got {part!r}")
        self.exact_resume, self.save_final = exact_resume, save_final
        self.save_on_signal = [_check_signal(number) for number in save_on_signal]
        self.step = self.samples = 0
        self._tokens: int | torch.Tensor = 0  # a tensor while batches are counted on the device
        self._saved_step: int | None = None  # the step that the manager's latest file holds
        self._owed = False  # whether a save has failed, and none has been made since
        self._scaler: torch.amp.GradScaler | None = None
        self._deferred: dict[str, Any] = {}  # what fit() will load: scaler, coordinator, rng
        self._batches = _Batches(dataloader, exact_resume, self.save_on_signal)
        if device is not None:
            model.to(self.device)
        if not _has_part_of(optimizer, model):
            log.warning("optimizer holds no parameter of the model: was it made for another one?")

    @property
    def tokens(self) -> int:
        """Tokens trained on: sum of ``attention_mask``, else elements of ``input_ids`` or of an
        integer first tensor, else samples. Waits for the device if batches are born there."""
        self._tokens = int(self._tokens)
        return self._tokens

    def fit(self, max_steps: int) -> TrainResult:
        """Train until ``step`` is ``max_steps`` (absolute, at least 1), a signal or the data's end.

        A second call goes on: with ``exact_resume`` in the same epoch, else the loader restarts.
        (When a step has raised, the next call goes on with the next batch.)
        Returns when the last save is on the disk; CheckpointError if that failed in the background.
        A save that has failed is made up for by the next one, at the latest as a later call ends.
        RuntimeError when fp16 overflows 100 times in a row. ValueError for a loader without
        batches, or a loss that is not a scalar that requires grad.
        """
        max_steps, began = _check_int("max_steps", max_steps, 1), time.perf_counter()
        loss, reason = None, "max_steps"
        self._check_alike(max_steps)
        if self.step > max_steps:
            log.warning("nothing to do: step is %d, max_steps %d", self.step, max_steps)
        if self.step < max_steps:
            with contextlib.ExitStack() as stack:
                grace = 0 if self._ranks.count == 1 else 2
                signals = _catch_signals(self.save_on_signal, stack, grace)
                self._start(stack, signals)
                loss, reason = self._loop(max_steps, signals)
                self._finish(reason)
                if reason in signal.Signals.__members__:
                    time.sleep(grace)  # till it has reached this process, too
        elif self.step == max_steps:
            self._finish(reason)
        final_loss = None if loss is None else float(loss)
        elapsed = time.perf_counter() - began
        return TrainResult(self.step, self.samples, self.tokens, final_loss, elapsed, reason)

    def resume(self, state: dict | None = None, *, fallback: bool = False) -> bool:
        """Go back to ``state``, or to the manager's latest checkpoint; False if there is none.

        Everything is compared first: when the model, the optimizer or the order of the parameters
        does not fit, one CheckpointError names all of it and nothing has changed. What only the
        checkpoint or only the trainer has is a warning, as is another config or precision. The
        scaler and the coordinator get their state in ``fit``, and with ``exact_resume`` the
        generators once more, so that nothing drawn before it counts. The manager's file is mapped
        while it is read, and let go of again. Of ``state`` no tensor is kept, unless code of
        another does (an object in ``extra_state``, a hook).
        Saved options of optimizer and scheduler count, not those that they were made with.
        """
        path, source = None, "the state"
        if state is None:
            if self.checkpoint_manager is None:
                raise ValueError("resume() needs a state or a checkpoint_manager")
            path, state = self._ranks.load_latest(self.checkpoint_manager, fallback)
            if state is None:
                return False
            source = str(path)
        state, notes = self._ranks.each(lambda: self._check(state, source, path))
        if notes and self._ranks.rank == 0:
            log.warning("%s differs from this run: %s", source, "; ".join(notes))
        try:
            with contextlib.ExitStack() as undo:
                self._restore(state, undo, mapped=path is not None)
                undo.pop_all()
        except Exception as error:  # from code that is not ours: a loader, an object in extra_state
            raise CheckpointError(f"{source} cannot be resumed: {error!r}", path=path) from error
        self._saved_step, self._owed = None if path is None else self.step, False
        log.info("resumed %s at step %d", source, self.step)
        return True

    def state_dict(self) -> dict:
        """The checkpoint: model, optimizer, scaler, scheduler, step, samples, tokens, config, rng,
        coordinator, precision; with the switches also data and extra. Tensors are not copied.

        Of several processes each has to call it. ``ranks`` is then a list of what each has of its
        own: rng, data, samples, tokens; samples and tokens beside it are the sums.
        """
        state: dict[str, Any] = {}

        def of_this_rank() -> dict:
            state.update(self._state())
            return {name: state[name] for name in _OF_A_RANK if name in state}

        ranks = self._ranks.share(of_this_rank)
        if len(ranks) > 1:
            sums = {name: sum(of[name] for of in ranks) for name in ("samples", "tokens")}
            state.update(sums, ranks=ranks)
        return state

    def _state(self) -> dict:
        state = {
            "model": model_state_dict(self.model),
            "optimizer": _get_state(self.optimizer),
            "scaler": self._deferred.get("scaler") or _get_state(self._scaler),
            "scheduler": _get_state(self.scheduler),
            "step": self.step,
            "samples": self.samples,
            "tokens": self.tokens,
            "config": self.config,
            "rng": None,
            "coordinator": self._deferred.get("coordinator") or _get_state(self.coordinator),
            "precision": dict(self.precision),
        }
        if self.exact_resume:
            state["data"] = self._batches.state_dict()
        if self.extra_state:
            state["extra"] = {name: _get_state(part) for name, part in self.extra_state.items()}
        # Last, for a foreign state_dict() may draw.
        state["rng"] = self._deferred.get("rng") or capture_rng_state()
        return state

    _joined: _Ranks | None = None

    @property
    def _ranks(self) -> _Ranks:
        self._joined = _Ranks.now(self._joined)
        return self._joined

    def _check_alike(self, max_steps: int) -> None:
        """Ranks that are to do different things would wait for each other for ever."""
        manager = self.checkpoint_manager
        settings = {"step": self.step, "max_steps": max_steps}
        settings["saves every"] = manager.every_steps if manager and manager.enabled else None
        for name in ("accumulation_steps", "exact_resume", "save_final", "save_on_signal"):
            settings[name] = getattr(self, name)
        self._ranks.check_alike(settings)
        several, first = self._ranks.count > 1, self._ranks.rank == 0
        if several and first and "module" not in map(_wrapped_child, self.model.modules()):
            log.warning("the model is not DistributedDataParallel: each rank trains its own")

    def _start(self, stack: contextlib.ExitStack, signals: list[str]) -> None:
        if self.coordinator is not None:
            if hasattr(self.coordinator, "should_stop"):
                self.coordinator.should_stop = lambda: bool(signals)
            self.coordinator.start()
            stack.callback(self.coordinator.stop)
            if "coordinator" in self._deferred:
                self.coordinator.load_state_dict(self._deferred["coordinator"])
                del self._deferred["coordinator"]
        if self.precision["use_scaler"] and self._scaler is None:
            self._scaler = torch.amp.GradScaler(self.device.type)
        if self._deferred.get("scaler"):  # {} is what a disabled GradScaler saves
            self._scaler.load_state_dict(self._deferred.pop("scaler"))
        if not self.exact_resume:
            self._batches.restart()
        self.model.train()
        self._modules = list(self.model.modules())
        if "rng" in self._deferred:
            restore_rng_state(self._deferred.pop("rng"))

    def _loop(self, max_steps: int, signals: list[str]) -> tuple[torch.Tensor | None, str]:
        loss, came = None, self._came(signals)
        while self.step < max_steps and came is None:
            last = self._train_step()
            if last is None:
                return loss, "data"
            loss, came = last, self._came(signals)
        return loss, came or "max_steps"

    def _finish(self, reason: str) -> None:
        """The last save, if one is wanted or has failed before; and the end of all writing."""
        wanted = self.save_final or self._owed or reason in signal.Signals.__members__
        if wanted and self.step > 0 and self.step != self._saved_step:
            self._save()
        if self.checkpoint_manager is not None:
            try:
                self._ranks.share(self.checkpoint_manager.wait)
            except Exception:
                self._saved_step, self._owed = None, True
                raise

    def _came(self, signals: list[str]) -> str | None:
        """The signal that came, on whichever rank: all have to end with the same step."""
        if not self.save_on_signal:
            return None
        [number] = self._ranks.highest(signal.Signals[signals[0]] if signals else 0)
        return signal.Signals(number).name if number else None

    def _train_step(self) -> torch.Tensor | None:
        """One optimizer step and all that follows it; its loss, None when there are no data."""
        for _ in range(_MAX_SKIPPED):
            window = self._accumulate()
            if window is None:
                return None
            if self._update():
                break
        else:
            message = f"the loss overflowed {_MAX_SKIPPED} times in a row: is it NaN? Try bf16"
            raise RuntimeError(f"{message} or a lower learning rate (step {self.step})")
        loss, samples, tokens = window
        self._batches.finish_step()
        self.step += 1
        self.samples += samples
        self._tokens = self._tokens + tokens
        if self.coordinator is not None:
            self.coordinator.after_optimizer_step(self.model, self.step)
        if self.on_step is not None:
            self.on_step(self, loss)
            if not all(module.training for module in self._modules):
                self.model.train()
        if self.checkpoint_manager is not None and self.checkpoint_manager.should_save(self.step):
            self._save()
        return loss

    def _accumulate(self) -> tuple[torch.Tensor, int, int | torch.Tensor] | None:
        """Gradients of one window; its mean loss, samples and tokens. None: the data ran out."""
        self.optimizer.zero_grad()
        total, samples, tokens = None, 0, 0
        no_sync = getattr(self.model, "no_sync", contextlib.nullcontext)
        for left in reversed(range(self.accumulation_steps)):
            batch = self._batches.next()
            if self._batches.may_end and self._ranks.highest(batch is _END)[0]:
                return None
            more_samples, more_tokens = _count(batch)
            samples, tokens = samples + more_samples, tokens + more_tokens
            # The ranks of a DistributedDataParallel average their gradients with the last batch.
            with no_sync() if left else contextlib.nullcontext():
                loss = self._loss(_to_device(batch, self.device))
                if self.accumulation_steps > 1:
                    loss = loss / self.accumulation_steps
                (loss if self._scaler is None else self._scaler.scale(loss)).backward()
            total = loss.detach() if total is None else total + loss.detach()
        return total, samples, tokens

    def _loss(self, batch: Any) -> torch.Tensor:
        dtype = _AUTOCAST[self.precision["mode"]]
        with torch.autocast(self.device.type, dtype) if dtype else contextlib.nullcontext():
            if self.loss_fn is not None:
                output = self.loss_fn(self.model, batch)
            elif isinstance(batch, Mapping):
                output = self.model(**batch)
            elif isinstance(batch, (tuple, list)):
                output = self.model(*batch)
            else:
                output = self.model(batch)
        return _scalar_loss(output)

    def _update(self) -> bool:
        """Unscale, clip, optimizer, scaler, scheduler; False when the scaler skipped the step."""
        if self.clip_grad_norm is not None:
            if self._scaler is not None:
                self._scaler.unscale_(self.optimizer)
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self.clip_grad_norm)
        if self._scaler is None:
            self.optimizer.step()
        else:
            scale = self._scaler.get_scale()
            self._scaler.step(self.optimizer)
            self._scaler.update()
            if self._scaler.get_scale() < scale:
                return False
        if self.scheduler is not None:
            self.scheduler.step()
        return True

    def _save(self) -> None:
        """Rank 0 writes; the others wait, for what it raises they raise too."""
        if not self.checkpoint_manager.enabled:
            return
        self._owed = True
        state = self.state_dict()

        def write() -> None:
            if self._ranks.rank == 0:
                self.checkpoint_manager.save(self.step, state)

        self._ranks.share(write)
        self._saved_step, self._owed = self.step, False

    def _parts(self) -> dict[str, Any]:
        """What has a state of its own; the optimizer after the scheduler, for its rates count."""
        parts = {f"extra {name}": part for name, part in self.extra_state.items()}
        parts |= {"scheduler": self.scheduler, "optimizer": self.optimizer, "model": self.model}
        return {name: part for name, part in parts.items() if part is not None}

    def _loaded_by_fit(self) -> set[str]:
        used = {"scaler": self.precision["use_scaler"], "rng": self.exact_resume}
        used["coordinator"] = self.coordinator is not None
        return {name for name in used if used[name]}

    def _check(self, state: dict, source: str, path: Path | None) -> tuple[dict, list[str]]:
        """What of ``state`` is this rank's, and what is to be said about it, if it fits."""
        _check_type("state", state, dict)
        state, notes = self._ranks.own_part(state)
        problems = self._compare(state)
        if problems:
            message = f"{source} does not fit this run:\n  " + "\n  ".join(problems)
            raise CheckpointError(message, path=path)
        return state, notes + self._notes(state)

    def _compare(self, state: dict) -> list[str]:
        """All that does not fit."""
        problems = [] if state.get("model") is not None else ["model: missing"]
        for name in ("scaler", "scheduler", "rng", "data", "extra"):
            if not isinstance(state.get(name), (Mapping, types.NoneType)):
                problems.append(f"{name}: not a dict but {type(state[name]).__name__}")
                state = {**state, name: None}
        saved = _flat(state)
        for name, part in self._parts().items():
            if saved.get(name) is not None:
                problems += [f"{name}: {problem}" for problem in _part_problems(part, saved[name])]
        if saved.get("optimizer") is not None and not problems:
            problems += _order_problems(self.model, self.optimizer, saved)
        counters = {name: state[name] for name in ("step", "samples", "tokens") if name in state}
        if self.exact_resume and state.get("data") is not None:
            counters |= {f"data {name}": state["data"].get(name) for name in ("epoch", "batch")}
        for name, value in counters.items():
            try:
                _check_int(name, value, 0)
            except (TypeError, ValueError) as error:
                problems.append(str(error))
        return problems

    def _notes(self, state: dict) -> list[str]:
        """What only one side has, and each difference of config and precision."""
        used = set(self._parts()) | self._loaded_by_fit() | {"step", "samples", "tokens", "rng"}
        used |= {"data"} if self.exact_resume else set()
        saved = {name for name, value in _flat(state).items() if value is not None}
        saved -= {"config", "precision", "extra"}
        notes = [f"without {name}" for name in sorted(used - saved)]
        notes += [f"{name} is not used" for name in sorted(map(str, saved - used))]
        for name, ours in {"config": self.config, "precision": self.precision}.items():
            if ours is not None and state.get(name) is not None:
                notes += _differences(name, state[name], ours)
        if self.exact_resume and state.get("data") is not None:
            here, there = self._batches.length(), state["data"].get("batches")
            if None not in (here, there) and here != there:
                notes.append(f"an epoch had {there} batches, has {here}: it is another data order")
        return notes

    def _unmap(self, state: dict) -> None:
        """Copy out of the mapped file what code that is not ours may keep, and the file with it."""
        used = {**dict.fromkeys(self._loaded_by_fit() | {"data"}), **self._parts()}
        for prefix, holder in {"": state, "extra ": state.get("extra") or {}}.items():
            for name in [name for name in holder if f"{prefix}{name}" in used]:
                part, value = used[f"{prefix}{name}"], holder[name]
                if not _loads_like_torch(part):
                    holder[name] = copy.deepcopy(value)
                elif isinstance(part, torch.nn.Module):
                    for key in value:
                        if key.endswith("_extra_state"):  # what set_extra_state gets
                            value[key] = copy.deepcopy(value[key])

    def _restore(self, state: dict, undo: contextlib.ExitStack, mapped: bool) -> None:
        """Load what _compare found to fit: code that may yet refuse it first, the models last."""

        def load(models: bool) -> None:
            saved = _flat(state)
            for name, part in self._parts().items():
                if isinstance(part, torch.nn.Module) == models and saved.get(name) is not None:
                    _set_state(part, saved[name], undo)

        def load_what_may_refuse() -> None:
            if mapped:
                self._unmap(state)
            undo.callback(restore_rng_state, capture_rng_state())
            load(models=False)
            self._batches.load_state_dict(state.get("data") if self.exact_resume else None, undo)

        self._ranks.share(load_what_may_refuse)
        self._ranks.share(lambda: load(models=True))
        self.step = int(state.get("step", self.step))
        self.samples = int(state.get("samples", self.samples))
        self._tokens = int(state.get("tokens", self._tokens))
        names = self._loaded_by_fit()
        self._deferred = {name: state[name] for name in names if state.get(name) is not None}
        if state.get("rng") is not None:
            restore_rng_state(state["rng"])  # last: replaying the data has moved it


_END = object()
_MAX_SKIPPED = 100
_OF_A_RANK = ("rng", "data", "samples", "tokens")
_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class _Ranks:
    """The processes that torch.distributed has joined, which call the same; or just this one."""

    # What was passed last: had gloo's thread to free it as torch ends, both might wait for ever.
    _passed: list[torch.Tensor]

    def __init__(self) -> None:
        self.rank, self.count = 0, max(1, _process_count())
        if self.count > 1:
            self.rank = torch.distributed.get_rank()
            self._group = torch.distributed.new_group(backend="gloo")  # for what is on the CPU

    @staticmethod
    def now(known: _Ranks | None) -> _Ranks:
        """``known``, unless they have been joined since, or parted."""
        still = known is not None and known.count == max(1, _process_count())
        return known if still else _Ranks()

    def share(self, work: Callable[[], Any]) -> list:
        """What ``work()`` returns on each rank. What it raises on one, all raise."""
        if self.count == 1:
            return [work()]
        try:
            failure, outcome = None, pickle.dumps((None, work()))
        except Exception as error:
            text = type(error).__name__
            with contextlib.suppress(Exception):  # an odd one, which cannot even be printed
                text = repr(error)
            failure, outcome = error, pickle.dumps((text, None))
        [size] = self.highest(len(outcome))
        ours = torch.zeros(size, dtype=torch.uint8, device="cpu")
        ours[: len(outcome)] = torch.frombuffer(bytearray(outcome), dtype=torch.uint8)
        every = [torch.empty_like(ours) for _ in range(self.count)]
        torch.distributed.all_gather(every, ours, group=self._group)
        _Ranks._passed = [*every, ours]
        if failure is not None:
            raise failure
        results = []
        for rank, passed in enumerate(every):
            failed, result = pickle.loads(passed.numpy())  # which ends before the zeros do
            if failed:
                raise CheckpointError(f"rank {rank} failed: {failed}")
            results.append(result)
        return results

    def each(self, work: Callable[[], Any]) -> Any:
        """What ``work()`` returns here, once it has been done on every rank."""
        done = []
        self.share(lambda: done.append(work()))
        return done[0]

    def highest(self, *numbers: int) -> list[int]:
        """Of what each rank has. It takes a fraction of the time of ``share``."""
        if self.count == 1:
            return list(numbers)
        ours = torch.tensor(numbers, device="cpu")
        torch.distributed.all_reduce(ours, torch.distributed.ReduceOp.MAX, group=self._group)
        _Ranks._passed = [ours]
        return ours.tolist()

    def check_alike(self, settings: dict) -> None:
        """ValueError that names the first one in which another rank differs."""
        for rank, theirs in enumerate(self.share(lambda: settings)):
            for name, ours in settings.items():
                if theirs[name] != ours:
                    message = f"it is {theirs[name]!r} on rank {rank}, here {ours!r}"
                    raise ValueError(f"{name} must be the same on all ranks: {message}")

    def load_latest(
        self, manager: CheckpointManager, fallback: bool
    ) -> tuple[Path | None, dict | None]:
        """The manager's latest checkpoint, mapped; rank 0 says which one that is."""
        found: list = [None, None]

        def choose() -> str | None:
            if self.rank == 0:
                found[:] = manager._load_latest(fallback, mapped=True)
            return found[0] and found[0].name

        name = self.share(choose)[0]

        def load_the_same() -> None:
            if name is not None and self.rank > 0:
                path = manager.directory / name
                found[:] = path, manager._load(path, mapped=True)

        self.share(load_the_same)
        return tuple(found)

    def own_part(self, state: dict) -> tuple[dict, list[str]]:
        """``state`` as it concerns this rank, and a note if it is of more processes, or fewer."""
        ranks, rank, count = state.get("ranks", [{}]), self.rank, self.count
        if not isinstance(ranks, list) or not all(isinstance(part, Mapping) for part in ranks):
            raise CheckpointError(f"ranks must be a list of dicts, got {ranks!r:.80}")
        own = {name: value for name, value in state.items() if name != "ranks"}
        own |= ranks[rank] if rank < len(ranks) else {"rng": None}
        if len(ranks) == count:
            return own, []
        for name in ("samples", "tokens"):  # so that their sums stay what they are
            if isinstance(total := state.get(name), int):
                own[name] = total // count + (rank < total % count)
        if isinstance(own.get("data"), Mapping):
            own["data"] = {"epoch": own["data"].get("epoch"), "batch": 0, "begin": None}
        what = "random numbers are others, and the epoch begins again"
        return own, [f"saved by {len(ranks)} processes, here are {count}: {what}"]

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give ``tensors`` the values that they have on rank 0."""
        for tensor in tensors:
            passed = tensor.detach().to("cpu").contiguous()
            data = passed.reshape(-1).view(torch.uint8)  # gloo does not know every dtype
            torch.distributed.broadcast(data, 0, group=self._group)
            _Ranks._passed = [data]
            if self.rank > 0 and passed.data_ptr() != tensor.data_ptr():
                tensor.copy_(passed)


class _Batches:
    """The batches of a loader, epoch after epoch, and the position to go on from.

    ``exact``: note the generators before each epoch, so that the position can be replayed.
    ``signals``: those of which a worker process has to outlive the first.
    """

    def __init__(self, loader: Iterable, exact: bool, signals: list[int]):
        self.loader, self.exact, self.signals = loader, exact, signals
        self.may_end = hasattr(loader, "__next__")  # an iterator
        self.given = False  # whether there has been a batch
        self.epoch = 0
        self.restart()
        self.finish_step()

    def restart(self) -> None:
        self.iterator: Iterator | None = None
        self.broken = False  # whether the iterator was, in the middle of an epoch
        self.batch = 0  # batches taken in this epoch
        self.begin: dict | None = None  # generators just before the epoch's iterator was made

    def finish_step(self) -> None:
        """What was taken so far has been trained on: a window that breaks off does not count."""
        self.done = {"epoch": self.epoch, "batch": self.batch, "begin": self.begin}

    def next(self) -> Any:
        """The next batch, of a new epoch where this one is over; _END when an iterator is."""
        for _ in range(2):
            if self.iterator is None and not self.broken:
                self._set_epoch()
                if self.exact:
                    self.begin = {"rng": capture_rng_state(), "generators": self._generators()}
                self.iterator = self._iterate()
            try:
                if self.broken:
                    self._begin_again()
                batch = next(self.iterator, _END)
            except BaseException:  # as a Ctrl-C, upon which a worker's batch may be lost for ever
                self.iterator, self.broken = None, self.exact and not self.may_end
                raise
            if batch is not _END:
                self.batch, self.given = self.batch + 1, True
                return batch
            self.restart()
            self.epoch += 1
        if self.may_end and self.given:
            return _END
        raise ValueError(f"the dataloader has no batches: {self.loader!r}")

    def length(self) -> int | None:
        """Batches of an epoch, where the loader knows."""
        try:
            return len(self.loader)
        except Exception as error:  # many have no length, each in its own way
            log.debug("the dataloader has no length: %r", error)
            return None

    def state_dict(self) -> dict:
        state = {**self.done, "batches": self.length()}
        if (self.epoch, self.batch) != (state["epoch"], state["batch"]):
            log.warning("state of an unfinished step: its batches will be taken again, inexactly")
        else:
            state["generators"] = self._generators()
            if self.iterator is not None and _is_stateful(self.loader):
                state["loader"] = _get_state(self.loader)
        return state

    def load_state_dict(self, state: dict | None, undo: contextlib.ExitStack) -> None:
        """Make the epoch's iterator as it was made, and take from it what had been taken.

        Leaves the global generators moved. None: the loader restarts.
        """
        undo.callback(self._set_generators, self._generators())
        undo.callback(self._set_epoch)
        undo.callback(vars(self).update, vars(self).copy())
        self.restart()
        self.epoch = 0
        if state is not None:
            self.epoch, self.batch, self.begin = state["epoch"], state["batch"], state["begin"]
        stateful = _is_stateful(self.loader) and "loader" in (state or {})
        if self.begin is not None and (stateful or not self.may_end):
            self._replay(state["loader"] if stateful else None)
            self._set_generators(state.get("generators", {}))
        elif self.begin is not None:
            log.warning("the dataloader is an iterator and cannot be replayed: it goes on as it is")
        self.finish_step()

    def _begin_again(self) -> None:
        """Another iterator in the place of the one that broke, to go on with the next batch."""
        rng, generators = capture_rng_state(), self._generators()
        try:
            self._replay(None)
        finally:
            self._set_generators(generators)
            restore_rng_state(rng)
        self.broken = False

    def _replay(self, loader_state: Any) -> None:
        began = time.perf_counter()
        self._set_epoch()
        persistent = getattr(self.loader, "persistent_workers", False) and loader_state is None
        if persistent and self.epoch > 0:
            log.warning("persistent workers: what they draw at random is not replayed exactly")
            self._iterate()  # starts the workers, which draws a number that later epochs do not
        restore_rng_state(self.begin["rng"])
        self._set_generators(self.begin["generators"])
        if loader_state is not None:
            self.loader.load_state_dict(loader_state)
        self.iterator = self._iterate()
        for done in range(self.batch if loader_state is None else 0):
            if next(self.iterator, _END) is _END:
                log.warning("the dataloader ended after %d of %d batches", done, self.batch)
                break
        log.info("data position replayed in %.1f s", time.perf_counter() - began)

    def _iterate(self) -> Iterator:
        if not self.signals or not getattr(self.loader, "num_workers", 0):
            return iter(self.loader)
        init, extra = self.loader.worker_init_fn, (self.signals, self.closing)
        self.loader.worker_init_fn = functools.partial(_init_worker, init, *extra)
        try:
            return iter(self.loader)
        finally:
            self.loader.worker_init_fn = init

    @functools.cached_property
    def closing(self) -> Any:
        """A byte that the workers share: 1 once multiprocessing is about to terminate them."""
        flag = multiprocessing.RawValue("b", 0)
        multiprocessing.util.Finalize(None, setattr, (flag, "value", 1), exitpriority=100)
        return flag

    def _sources(self) -> dict[str, Any]:
        """The loader and what it draws from, by the name under which generators are stored."""
        found = {"loader": self.loader}
        for name in ("sampler", "batch_sampler", "batch_sampler.sampler", "dataset"):
            with contextlib.suppress(AttributeError):
                found[name] = operator.attrgetter(name)(self.loader)
        return found

    def _set_epoch(self) -> None:
        for source in {id(source): source for source in self._sources().values()}.values():
            if callable(getattr(source, "set_epoch", None)):
                source.set_epoch(self.epoch)

    def _generators(self) -> dict[str, torch.Tensor]:
        sources = self._sources().items()
        found = {name: getattr(source, "generator", None) for name, source in sources}
        return {name: g.get_state() for name, g in found.items() if isinstance(g, torch.Generator)}

    def _set_generators(self, states: Mapping[str, torch.Tensor]) -> None:
        for name, state in states.items():
            generator = getattr(self._sources().get(name), "generator", None)
            if isinstance(generator, torch.Generator):
                generator.set_state(state)
            else:
                log.warning("the dataloader's %s had a generator when it was saved, now none", name)


def _catch_signals(
    numbers: list[signal.Signals], stack: contextlib.ExitStack, grace: float
) -> list[str]:
    """The names of the signals that have come; what handled them before is put back later.

    A second one within ``grace`` seconds is the first once more, as when torchrun passes it on.
    """
    received: list[str] = []
    previous, came = {}, {}

    def handle(number: int, frame: Any) -> None:
        name = signal.Signals(number).name
        if name not in received:
            came[name] = time.monotonic()
            received.append(name)
            if not grace:  # at once: the next one may find us stuck where no handler runs
                signal.signal(number, previous[number])
        elif time.monotonic() - came[name] >= grace:  # it acts as if we were not there
            signal.signal(number, previous[number])
            signal.raise_signal(number)

    if numbers and threading.current_thread() is not threading.main_thread():
        log.warning("save_on_signal does nothing outside the main thread")
        return received
    for number in numbers:
        previous[number] = signal.getsignal(number) or signal.SIG_DFL
        stack.callback(signal.signal, number, previous[number])
        signal.signal(number, handle)
    return received


def _init_worker(init: Callable | None, signals: list[int], closing: Any, worker: int) -> None:
    """Let a worker outlive the first signal, which goes to every process of the run.

    It obeys the second, and the one with which multiprocessing terminates it as the run ends.
    """
    seen: set[int] = set()

    def handle(number: int, frame: Any) -> None:
        if closing.value or number in seen:
            os._exit(0)
        seen.add(number)

    for number in signals:
        signal.signal(number, handle)
    if init is not None:
        init(worker)


def _device_of(model: torch.nn.Module, device: Any) -> torch.device:
    if device is None:
        tensors = (*model.parameters(), *model.buffers())
        return tensors[0].device if tensors else torch.device("cpu")
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must name a torch device, got {device!r}") from error


def _has_part_of(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> bool:
    ours = set(map(id, model.parameters()))
    return any(id(p) in ours for group in optimizer.param_groups for p in group["params"])


def _check_signal(number: Any) -> signal.Signals:
    never = {getattr(signal, name, None) for name in ("SIGKILL", "SIGSTOP")}
    if number not in set(signal.Signals) - never:
        raise ValueError(f"save_on_signal must hold signals that can be caught, got {number!r}")
    return signal.Signals(number)


def _plan_precision(mode: str, device: torch.device) -> dict:
    if mode not in (*_AUTOCAST, "auto"):
        raise ValueError(f"precision must be fp32, bf16, fp16 or auto, got {mode!r}")
    if mode == "auto":
        mode = "fp32"
        if device.type == "cuda":
            native = torch.cuda.is_bf16_supported(including_emulation=False)
            mode = "bf16" if native else "fp16"
    if mode != "fp32" and not _autocast_works(device, _AUTOCAST[mode]):
        log.warning("precision %s is not supported on %s: fp32 instead", mode, device)
        mode = "fp32"
    return {"mode": mode, "autocast_enabled": mode != "fp32", "use_scaler": mode == "fp16"}


def _autocast_works(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns, and leaves autocast off
            with torch.autocast(device.type, dtype):
                one = torch.ones(1, 1, device=device)
                return (one @ one).dtype == dtype
    except Exception as error:  # whatever it says, fp32 is the answer
        log.debug("autocast with %s on %s: %s", dtype, device, error)
        return False


def _scalar_loss(output: Any) -> torch.Tensor:
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif isinstance(output, (tuple, list)):
        output = output[0] if output else None
    if not isinstance(output, torch.Tensor):
        raise ValueError(f"the loss must be a tensor, got {type(output)}: pass loss_fn")
    if output.dim() != 0:
        raise ValueError(f"the loss must be a scalar, got shape {tuple(output.shape)}")
    if not output.requires_grad:
        raise ValueError("the loss does not require grad: is every parameter frozen?")
    return output


def _count(batch: Any) -> tuple[int, int | torch.Tensor]:
    """Samples and tokens of a batch; the tokens as a tensor where counting would wait for it."""
    first = _first_tensor(batch)
    samples = first.shape[0] if first is not None and first.dim() else 1
    fields = batch if isinstance(batch, Mapping) else {}
    mask, ids = fields.get("attention_mask"), fields.get("input_ids")
    if isinstance(mask, torch.Tensor):
        # An additive mask (0 and -inf) counts nothing, rather than making the sum infinite.
        tokens = (mask.clamp(min=0) if mask.is_floating_point() else mask).sum()
        return samples, int(tokens) if mask.device.type == "cpu" else tokens
    if isinstance(ids, torch.Tensor):
        return samples, ids.numel()
    if first is not None and not (first.dtype.is_floating_point or first.dtype.is_complex):
        return samples, first.numel()
    return samples, samples


def _first_tensor(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch
    items = batch.values() if isinstance(batch, Mapping) else batch
    found = map(_first_tensor, items) if isinstance(batch, (Mapping, tuple, list)) else ()
    return next((tensor for tensor in found if tensor is not None), None)


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if callable(getattr(value, "to", None)):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _to_device(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_to_device(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _is_stateful(part: Any) -> bool:
    methods = (getattr(part, name, None) for name in ("state_dict", "load_state_dict"))
    return all(map(callable, methods))


def _get_state(part: Any) -> Any:
    if part is None:
        return None
    is_model = isinstance(part, torch.nn.Module)
    return model_state_dict(part) if is_model else _plain_numbers(part.state_dict())


def _plain_numbers(value: Any) -> Any:
    """NumPy's scalars (a LambdaLR with np.cos makes some) as Python's, which load everywhere."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {key: _plain_numbers(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain_numbers, value))
    return value


def _part_problems(part: Any, saved: Any) -> list[str]:
    if isinstance(part, torch.nn.Module):
        return _fit(part, saved)[1] if isinstance(saved, Mapping) else ["not a state_dict"]
    if type(part).__module__ == "torch.optim.lr_scheduler" and isinstance(saved, Mapping):
        # A release of torch adds attributes or drops them; both at once is another scheduler.
        ours, theirs = (
            {k for k in names if k[0] != "_" or k == "_schedulers"}
            for names in (part.state_dict(), saved)
        )
        lacking, unknown = sorted(ours - theirs), sorted(theirs - ours)
        wrong = (lacking and unknown) or "last_epoch" in lacking
        return [f"saved by another kind: has {unknown} but not {lacking}"] if wrong else []
    return _optimizer_problems(part, saved) if isinstance(part, torch.optim.Optimizer) else []


def _order_problems(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping
) -> list[str]:
    """The first parameter that another one would give its optimizer state to.

    That state goes by position, so two layers of one shape in another order swap theirs. What tells
    is the order of the saved model, as far as the groups here follow the order of the model here.
    """
    groups = [*optimizer.param_groups, *saved["optimizer"].get("param_groups", ())]
    if not saved["optimizer"].get("state") or all("param_names" in group for group in groups):
        return []
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order_here, order_saved = list(model.state_dict()), list(_fit(model, saved["model"])[0])
    for group in optimizer.param_groups:
        here = [names.get(id(parameter)) for parameter in group["params"]]
        members = set(here)
        if here != [name for name in order_here if name in members]:
            continue
        there = [name for name in order_saved if name in members]
        for mine, other in zip(here, there, strict=True):
            if mine != other:
                order = f"saved for parameters in another order: {other} where {mine} is here"
                return [f"optimizer: {order}"]
    return []


def _set_state(part: Any, saved: Any, undo: contextlib.ExitStack) -> None:
    if isinstance(part, torch.nn.Module):
        load_model_state_dict(part, saved)
    elif isinstance(part, torch.optim.Optimizer):
        for name in ("state", "param_groups"):
            undo.callback(setattr, part, name, getattr(part, name))
        _load_optimizer(part, saved)
    else:
        try:
            undo.callback(part.load_state_dict, copy.deepcopy(part.state_dict()))
        except Exception as error:  # it may have no state yet, or none that can be copied
            log.debug("loading %s could not be undone: %r", type(part), error)
        is_scheduler = isinstance(part, torch.optim.lr_scheduler.LRScheduler)
        part.load_state_dict(copy.deepcopy(saved) if is_scheduler else saved)  # it keeps the lists


def _loads_like_torch(part: Any) -> bool:
    """Whether only code of torch sees what is loaded, which copies it (or our own code does)."""
    if isinstance(part, torch.nn.Module):
        load = getattr(part.load_state_dict, "__func__", None)
        return load is torch.nn.Module.load_state_dict and not any(
            module._load_state_dict_pre_hooks or _loads_in_its_own_way(module)
            for module in part.modules()
        )
    if isinstance(part, torch.optim.Optimizer):
        kind = type(part)
        hooks = (
            part._optimizer_load_state_dict_pre_hooks,
            part._optimizer_load_state_dict_post_hooks,
        )
        torchs = kind.load_state_dict is torch.optim.Optimizer.load_state_dict
        return torchs and kind.__setstate__.__module__.startswith("torch.optim") and not any(hooks)
    return False


def _flat(state: Mapping) -> dict:
    """The state under the names of ``Trainer._parts``."""
    return {**state, **{f"extra {name}": v for name, v in (state.get("extra") or {}).items()}}


def _public_config(value: Any, key: str = "") -> Any:
    """``value`` without secrets and in plain types; what is none of those becomes a string."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        value = vars(value)
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    elif isinstance(value, (set, frozenset)):
        value = sorted(value, key=str)  # in an order that the next run will have too
    if isinstance(value, Mapping):
        return {str(name): _public_config(item, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_public_config(item, key) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, np.generic):
        value = value.item()
    large = type(value) is int and value.bit_length() > 2000  # more than the safe loader takes
    if large or (value is not None and type(value) not in (bool, int, float, str)):
        value = re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))  # an address is another in each run
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", key)
    secret = _SECRET & {word.lower() for word in words} and key not in _NO_SECRET
    return "<redacted>" if secret and isinstance(value, str) and value else value


_SECRET = set(
    "token secret password passwd key apikey credential credentials authorization".split()
)
_NO_SECRET = {f"{kind}_token" for kind in "eos pad bos unk mask sep cls".split()}


def _differences(name: str, saved: Any, ours: Any) -> list[str]:
    if isinstance(saved, Mapping) and isinstance(ours, Mapping):
        pairs = [(f"{name}.{k}", saved.get(k), ours.get(k)) for k in {**saved, **ours}]
        return [line for pair in pairs for line in _differences(*pair)]
    return [] if repr(saved) == repr(ours) else [f"{name} was {saved!r}, is {ours!r}"]


# ==================================================================================================
# DumbDiLoCo: several machines, one model, nothing between them but a folder or a bucket
# ==================================================================================================
class Hub:
    """The shared place: named bytes, each of which appears whole or not at all.

    ``url``: a directory, or what fsspec opens with the packages installed (``s3://…``, ``gs://…``,
    ``hf://…``, ``sftp://…``), with their own configuration and credentials. Names are like
    ``nodes/a/alive.json``: letters, digits and ``._-`` between slashes, no part beginning with a
    dot; any other is a ValueError. What the file system raises passes through, FileNotFoundError
    for what is not there. Any number of threads, processes and machines may use it at once.
    """

    def __init__(self, url: str | os.PathLike):
        _check_type("url", url, (str, os.PathLike))
        import fsspec.implementations.local

        self.url = os.fspath(url)
        try:
            if not self.url:
                raise ValueError("which is empty")
            self._files, root = fsspec.core.url_to_fs(self.url)
        except ValueError as error:
            message = f"url must be a directory or a URL that fsspec knows, got {self.url!r}"
            raise ValueError(f"{message} ({error})") from error
        self._root = root.rstrip("/")
        self._local = isinstance(self._files, fsspec.implementations.local.LocalFileSystem)
        # Without a rename of its own it is a bucket, whose objects appear whole.
        self._renames = type(self._files).mv is not fsspec.AbstractFileSystem.mv

    def read(self, name: str, limit: int | None = None) -> bytes:
        """The bytes, or the first ``limit`` of them."""
        path = self._path(name)
        self._files.invalidate_cache()
        return self._files.cat_file(path, end=limit)

    def write(self, name: str, data: bytes) -> None:
        """Put ``data`` in place of what was there; in a directory it has reached the disk then."""
        path = self._path(name)
        if self._local:
            _write_atomically(path, lambda file: file.write(data), fsync=True)
        elif not self._renames:
            self._files.pipe_file(path, data)
        else:
            folder, _, last = path.rpartition("/")
            temporary = f"{folder}/.{last}.tmp-{os.urandom(8).hex()}"
            self._files.makedirs(folder, exist_ok=True)
            try:
                self._files.pipe_file(temporary, data)
                self._files.mv(temporary, path)
            except BaseException:
                with contextlib.suppress(Exception):  # what is raised already is what counts
                    self._files.rm_file(temporary)
                raise

    def list(self, folder: str) -> list[str]:
        """The names of files and folders in ``folder``, sorted; none when it is not there."""
        return sorted(name for name in self._listed(folder) if _HUB_NAME.fullmatch(name))

    def delete(self, name: str) -> None:
        """Remove it; that it is not there is no error."""
        path = self._path(name)
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(path)

    def size(self, name: str) -> int:
        """Its length in bytes."""
        path = self._path(name)
        self._files.invalidate_cache()
        return int(self._files.size(path))

    def _path(self, name: str) -> str:
        _check_type("name", name, str)
        if not all(map(_HUB_NAME.fullmatch, name.split("/"))):
            raise ValueError(f"name must be parts of letters, digits and ._- , got {name!r}")
        return f"{self._root}/{name}"

    def _listed(self, folder: str) -> list[str]:
        path = self._path(folder)
        self._files.invalidate_cache()
        try:
            found = self._files.ls(path, detail=True)
        except FileNotFoundError:
            return []
        real = [i["name"] for i in found if i["type"] in ("file", "directory")]  # no links
        return [name.rstrip("/").rpartition("/")[2] for name in real]

    def _sweep(self, folders: Iterable[str]) -> None:
        """Delete temporary files that a killed process left in folders which only we write."""
        for folder in folders:
            for name in self._listed(folder):
                if name.startswith(".") and ".tmp-" in name:
                    self._files.rm_file(f"{self._path(folder)}/{name}")


_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class DumbDiLoCo:
    """DiLoCo (Douillard et al. 2023, arXiv 2311.08105) through nothing but a :class:`Hub`.

    Each node trains on its own; every ``inner_steps`` it uploads its delta, what its parameters
    have moved by. One of them, the master, makes the mean of the deltas a step of
    ``SGD(outer_lr, outer_momentum, nesterov)`` on the shared model, publishes that, and all go on
    from there. The inner optimizer is left alone. Every delta counts exactly once, whoever dies.

    ``blocking=True``: textbook rounds. A node waits for the round that holds its delta and installs
    it; the master for ``quorum`` nodes, None: all live ones. Otherwise no node ever waits: a thread
    exchanges, a newer shared model is put under the work done meanwhile, the master takes what is
    there (quorum 1). ``outer_momentum=None`` is 0.9 if blocking, else 0.5.

    ``hub``: a Hub, a path or URL, or any object with a Hub's methods. ``node_id``: 1 to 64 letters,
    digits, ``._-``; of one process only. ``role``: "worker", or "master" for one of the team; it
    may also only call :meth:`start` and wait. ``poll_interval``: seconds between two looks at the
    Hub. ``node_timeout``: seconds without a sign of life after which the master counts a node out.
    ``delta_dtype``: float32, bfloat16 or float16 on the wire; what it rounds away comes later.

    In a loop of your own: :meth:`start` once the model is where it trains, load_state_dict if a
    checkpoint was loaded, :meth:`after_optimizer_step` in each step, :meth:`stop` at the end, and
    :meth:`state_dict` in the checkpoint. ``node.should_stop = function`` makes every wait end once
    that returns True (a trainer sets it). Blocking, the master has to be the last to leave.
    Parameters travel as fp32 under bare names. Float buffers are averaged, of others the largest
    values travel. Bad arguments are a ValueError or TypeError. Failures of the Hub are logged and
    tried again. For one thread, which trains the model. The processes that torch.distributed has
    joined are one node: each calls the same, rank 0 talks to the Hub, and all get its weights.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        hub: Hub | str | os.PathLike,
        *,
        node_id: str,
        role: str = "worker",
        inner_steps: int = 500,
        poll_interval: float = 60.0,
        outer_lr: float = 0.7,
        outer_momentum: float | None = None,
        quorum: int | None = None,
        node_timeout: float = 600.0,
        blocking: bool = False,
        delta_dtype: torch.dtype = torch.float32,
    ):
        _check_type("model", model, torch.nn.Module)
        _check_whole(model, ValueError)
        _check_type("node_id", node_id, str)
        if not _NODE_ID.fullmatch(node_id):
            raise ValueError(f"node_id must be 1 to 64 letters, digits or ._-, got {node_id!r}")
        if role not in ("worker", "master"):
            raise ValueError(f"role must be worker or master, got {role!r}")
        if delta_dtype not in _DELTA_DTYPES:
            raise ValueError(f"delta_dtype must be one of {_DELTA_DTYPES}, got {delta_dtype!r}")
        if outer_momentum is None:  # 0.9 rings where deltas come one by one
            outer_momentum = 0.9 if blocking else 0.5
        if quorum is None:
            quorum = 0 if blocking else 1  # 0: all that live
        else:
            _check_int("quorum", quorum, 1)
        _check_type("blocking", blocking, bool)
        _check_number("outer_lr", outer_lr, above=0)
        _check_number("outer_momentum", outer_momentum, least=0, below=1)
        _check_number("poll_interval", poll_interval, above=0)
        _check_number("node_timeout", node_timeout, above=0)
        self._layout = _Layout(model)
        self.model, self.node_id, self.role, self.blocking = model, node_id, role, blocking
        self.inner_steps = _check_int("inner_steps", inner_steps, 1)
        self.outer_lr, self.outer_momentum, self.quorum = outer_lr, outer_momentum, quorum
        self.delta_dtype, self.node_timeout = delta_dtype, node_timeout
        self.poll_interval = min(poll_interval, node_timeout / 4)  # else we would seem dead
        self.hub = Hub(hub) if isinstance(hub, (str, os.PathLike)) else hub
        for name in "read write list delete size".split():
            _check_type(f"hub.{name}", getattr(self.hub, name, None), Callable)
        self.should_stop: Callable[[], bool] = lambda: False
        self.local_step = 0
        self._uploaded_step = 0
        self._work = _Work(model, self._layout, node_id, delta_dtype)
        self._lock = threading.RLock()  # of the work and of what the exchange brings
        self._settled: _Look | None = None  # what the state was last related to
        self._kept: dict[str, torch.Tensor] | None = None  # the weights at the start
        self._training, self._ticks = False, 0
        self._exchange = _Exchange(self)

    @property
    def outer_step(self) -> int:
        """The version of the shared model that was installed last."""
        return self._work.version

    def start(self) -> None:
        """Begin to exchange with the Hub, and install its shared model if there is one.

        Waits for a first try of that, 30 seconds at most; a blocking node for the shared model, and
        for the round of its own delta if one is on its way. A master on an empty Hub makes the
        weights that it has now version 0, and publishes it with its first step, or a second later.
        CheckpointError when the model there is another one. RuntimeError when it runs already.
        """
        self._first_does(self._start)

    def _start(self) -> bool:
        if self._exchange.running:
            raise RuntimeError(f"{self.node_id} was started already")
        self._training, self._settled = False, None
        self._kept = _copies(_all_tensors(self.model))
        outer, self._exchange = self._exchange.outer, _Exchange(self)
        self._exchange.outer = outer
        self._exchange.begin()
        try:
            if self.blocking:
                self._wait(self._exchange.is_ready, "the master to publish a shared model")
            else:
                self._wait(lambda: self._exchange.tries > 0, "the Hub", seconds=30)
            if isinstance(self._exchange.error, CheckpointError):
                raise self._exchange.error
            self._take_news()
        except BaseException:
            self.stop()
            raise
        self._exchange.opens = min(self._exchange.opens, time.monotonic() + _GRACE)
        return True

    def after_optimizer_step(self, model: torch.nn.Module, step: int) -> bool:
        """Call it after each optimizer step. True: the weights of the model were changed.

        Each ``inner_steps``-th call captures a delta, for which it copies the model once. Blocking,
        it returns when the round is installed, or ``should_stop()``. ``model`` and ``step`` are
        what a trainer hands over; nothing depends on them. RuntimeError before :meth:`start`.
        """
        changed = self._first_does(self._after_step)
        if not changed and self._ranks.rank > 0:
            self.local_step += 1
        return changed

    def _after_step(self) -> bool:
        if not self._exchange.running:
            raise RuntimeError(f"{self.node_id} is not running: call start() first")
        self.local_step += 1
        self._ticks += 1
        first, self._training = not self._training, True
        changed = self._take_news()
        if self._settled is not None and self._kept is not None:
            self._make_first()
            self._kept = self._settled.shared = None
        if first:
            self._exchange.wake.set()
        if self.local_step % self.inner_steps == 0:
            changed = self._boundary() or changed
        return changed

    def stop(self) -> None:
        """End the exchange after a last one, which uploads the delta in flight if it can.

        Waits a minute at most, five seconds if ``should_stop()``. What could not be uploaded, and
        what was done since that delta was captured, is in :meth:`state_dict` and the model and goes
        on from there after a resume. The node may be started again.
        """
        self._exchange.end(5 if self.should_stop() else 60)

    def state_dict(self) -> dict:
        """All that is needed to go on, also without the Hub. Tensors are on the CPU, not copied.

        Keys: node_id, role, local_step, last_global_step, last_uploaded_step, baseline (fp32),
        baseline_generation, pending_delta and pending_delta_step (always None), pending_upload
        (None or a dict: step, base_outer_step, baseline_generation, delta, target), outer (None or,
        of a master, the shared model: model, outer_step, momentum, applied).
        """
        with self._lock:
            self._work.finish()
            work, upload, outer = self._work, self._work.upload, self._exchange.outer
            if outer is not None:
                outer.lent = True
            return {
                "node_id": self.node_id,
                "role": self.role,
                "local_step": self.local_step,
                "last_global_step": work.version,
                "last_uploaded_step": self._uploaded_step,
                "baseline": work.baseline,
                "baseline_generation": work.generation,
                "pending_delta": None,
                "pending_delta_step": None,
                "pending_upload": upload and {**upload.state_dict(), "target": work.baseline},
                "outer": outer and outer.state_dict(),
            }

    def load_state_dict(self, state: Mapping) -> None:
        """Go on from ``state``, with the weights that the model had at :meth:`start`.

        If the shared model is still the one that it was saved with, weights and baseline are those,
        to the bit. Else the work since then is moved onto the newer one, unless a delta that holds
        it is known on the Hub. Blocking, it waits for the round of a delta in flight. From another
        node's state a master takes the shared model, and the node joins anew. CheckpointError, with
        nothing changed, when it does not fit. It may come before start() too, where the weights are
        those that the model has then. RuntimeError after the first step.
        """
        _check_type("state", state, Mapping)
        self._first_does(lambda: self._load(state))

    def _load(self, state: Mapping) -> bool:
        if self._exchange.running and self._training:
            raise RuntimeError(f"{self.node_id} is training: load_state_dict() comes before that")
        counters = ("local_step", "last_global_step", "last_uploaded_step", "baseline_generation")
        try:
            numbers = [_check_int(name, state[name], 0) for name in counters]
            node_id, baseline = state["node_id"], state["baseline"]
            upload, outer = state["pending_upload"], state["outer"]
            if baseline is not None:
                self._layout.check(baseline, [torch.float32], buffers=False)
                baseline = _copies(baseline)
            if upload is not None:
                upload = _Upload.from_state(upload, self._layout)
            if outer is not None:
                outer = _Global.from_state(outer, self._layout)
        except (KeyError, TypeError, ValueError) as error:
            message = f"this is not the state of such a DumbDiLoCo: {error!r}"
            raise CheckpointError(message) from error
        if node_id != self.node_id:
            log.warning("%s joins anew: the state is that of %s", self.node_id, node_id)
            numbers, baseline, upload = [0, 0, 0, 0], None, None
        with self._lock, _signals_deferred():
            self.local_step, version, self._uploaded_step, generation = numbers
            self._work.restore(version, baseline, generation, upload)
            self._settled, ours = None, self._exchange.outer
            if outer is not None and (ours is None or outer.step > ours.step):
                self._exchange.outer = outer
            if self._exchange.running:  # start() may have put the shared model there
                for name, tensor in _all_tensors(self.model).items():
                    tensor.copy_(self._kept[name])
        self._take_news()
        return True

    _joined: _Ranks | None = None

    @property
    def _ranks(self) -> _Ranks:
        self._joined = _Ranks.now(self._joined)
        return self._joined

    def _first_does(self, work: Callable[[], bool]) -> bool:
        """Where several processes are the node: the first does it, the others get its weights."""
        ranks = self._ranks
        if ranks.count == 1:
            return work()
        outcome, failure = _WAITS, None
        if ranks.rank == 0:
            try:
                outcome = int(work())
            except Exception as error:
                outcome, failure = _FAILED, error
            ranks.highest(outcome, 0)
        while outcome == _WAITS:
            outcome, _ = ranks.highest(0, bool(self.should_stop()))

        def report() -> None:
            if failure is not None:
                raise failure

        if outcome == _FAILED:
            ranks.share(report)
        if outcome:
            counters = torch.tensor([self.local_step, self.outer_step], device="cpu")
            ranks.follow([counters, *_all_tensors(self.model).values()])
            self.local_step, self._work.version = counters.tolist()
        return bool(outcome)

    def _make_first(self) -> None:
        """A master on an empty Hub: the weights at the start become the first shared model."""
        with self._lock:
            leads = self._exchange.master is not None and self._exchange.outer is None
            if leads and self._kept is not None:
                self._exchange.outer = self._work.found(self._kept)

    def _wait(self, until: Callable[[], Any], what: str, seconds: float = math.inf) -> bool:
        """Whether it has come true, before a stop was asked for or the time ran out."""
        began = time.monotonic()
        due = began + (self.node_timeout if self._training else min(2, self.node_timeout))
        while not until():
            now = time.monotonic()
            if self._stop_asked() or now - began > seconds:
                return False
            if now > due:
                due, master = now + self.node_timeout, self._exchange.master
                whom = f" ({master.waits_for})" if master is not None and master.waits_for else ""
                log.warning("%s waits for %s%s", self.node_id, what, whom)
            self._ticks += 1  # a node that waits is alive
            time.sleep(0.02)
        return True

    def _stop_asked(self) -> bool:
        """By whichever process of the node: the others wait in _first_does for this one."""
        return bool(self._ranks.highest(_WAITS, bool(self.should_stop()))[1])

    def _take_news(self) -> bool:
        """Install what the thread has brought, if that is what a node does now."""
        look, work = self._exchange.look, self._work
        if look is not None and look is not self._settled:
            return self._settle(look)
        if self.blocking or self._exchange.fetched is None:
            return False
        with self._lock:  # till it is installed: its memory is used again
            shared = self._take_fetched()
            whole = work.damaged or work.baseline is None
            if not whole and shared.step <= work.version:
                return False
            work.install(shared, whole)
        return True

    def _take_fetched(self) -> _Global:
        shared, self._exchange.fetched = self._exchange.fetched, None
        if not self._training:  # a state that is loaded yet is related to this
            shared.lent, self._settled.shared = True, shared
        return shared

    def _settle(self, look: _Look) -> bool:
        """Relate the state that this node starts from to the first that it sees of the Hub."""
        shared, master, work = look.shared, self._exchange.master, self._work
        with self._lock:
            self._settled = look
            if master is not None:
                shared = master.start_from(shared)
            if shared is None:
                return False
            again = work.rejoin(look, shared, self._kept)
            changed = work.baseline is None or again or shared.step != work.version
            if changed:
                work.install(shared, whole=work.baseline is None)
        waits = self.blocking and work.upload is not None
        return (waits and self._wait_for_round()) or changed

    def _boundary(self) -> bool:
        """Capture a delta, unless there is nothing to relate it to or one is in flight."""
        work = self._work
        with self._lock, _signals_deferred():
            work.finish()
            if self._settled is None or work.baseline is None or work.damaged:
                return False
            if work.upload is None:
                work.capture(self.local_step)
            elif not self.blocking:
                return False
        self._exchange.wake.set()
        return self.blocking and self._wait_for_round()

    def _wait_for_round(self) -> bool:
        """Until the shared model holds the delta in flight (or there is one to replace a NaN)."""
        with self._lock:
            self._work.finish()
        exchange, number = self._exchange, self._work.generation
        exchange.opens = min(exchange.opens, time.monotonic())  # a master waits for itself

        def published() -> bool:
            found = exchange.fetched
            return found is not None and found.applied.get(self.node_id, 0) >= number

        if not self._wait(published, f"the master's round with its delta {number}"):
            return False
        with self._lock:
            self._work.install(self._take_fetched(), whole=True)
        return True


_CPU = torch.device("cpu")
_DELTA_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
_GRACE = 1.0  # seconds in which the state of a master may still be loaded
_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


_WAITS, _FAILED = 3, 2  # how rank 0 stands, beside whether it has changed the weights


class _Work:
    """What a node has done on top of the shared model, as baseline - parameters, and a delta of it.

    ``version``: outer step of the shared model that was installed last. ``baseline``: what the
    work counts from. ``upload``: the delta in flight, which the shared model does not hold yet;
    ``generation`` is its number. A capture becomes a delta at the first ``finish``, whoever calls
    it. All but the live model is on the CPU, parameters in fp32. Callers hold the node's lock.
    """

    def __init__(
        self, model: torch.nn.Module, layout: _Layout, node_id: str, delta_dtype: torch.dtype
    ):
        self.model, self.layout, self.node_id = model, layout, node_id
        self.delta_dtype = delta_dtype
        self.damaged = False  # a NaN was found: the shared model has to replace it
        self._memory: dict[str, torch.Tensor] = {}  # for captures, kept: fresh memory is slow
        self._odd: set[str] = set()  # buffers that are not finite in the shared model either
        self.restore(0, None, 0, None)

    def restore(
        self, version: int, baseline: dict | None, generation: int, upload: _Upload | None
    ) -> None:
        self.version = version  # of the shared model that was installed last
        self.baseline = baseline  # None: there was none yet
        self.generation = generation  # the number of the last delta
        self.upload = upload  # the delta in flight: not in the shared model yet
        self._captured: tuple[int, dict] | None = None  # what the next one is made of

    def capture(self, step: int) -> None:
        """Copy the model; the delta is made of that later, by the thread if it comes to it."""
        parameters, tensors = self.layout.parameters, _all_tensors(self.model)
        for name, tensor in tensors.items():
            if name not in self._memory:
                dtype = torch.float32 if name in parameters else tensor.dtype
                self._memory[name] = _new_tensor(tensor, dtype)
            self._memory[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        self._captured = step, dict(self._memory)

    def finish(self) -> None:
        """Make the delta of what was captured; the baseline becomes what that leads to."""
        if self._captured is None:
            return
        with _signals_deferred():
            (step, delta), self._captured = self._captured, None
            for name, base in self.baseline.items():
                torch.sub(base, delta[name], out=delta[name])
                delta[name] = _rounded(delta[name], self.delta_dtype)
            odd = [n for n, t in delta.items() if n not in self._odd and not _is_finite(t)]
            if odd:
                self.damaged, message = True, "%s takes the shared model: %s is not finite here"
                log.warning(message, self.node_id, ", ".join(odd[:3]))
                return
            for name, base in self.baseline.items():
                base.sub_(delta[name])
            self.generation += 1
            self.upload = _Upload(step, self.version, self.generation, delta)

    def install(self, shared: _Global, whole: bool) -> None:
        """Put ``shared`` under the work. ``whole``: in place of it and of the buffers."""
        parameters, buffers = _tensors(self.model)
        with _signals_deferred():
            self.finish()
            self._forget_applied(shared)
            if self.baseline is None:
                self.baseline = {n: _new_tensor(p, torch.float32) for n, p in parameters.items()}
            for name, live in parameters.items():
                base, target = self.baseline[name], shared.model[name]
                if self.upload is not None:
                    target = target - self.upload.delta[name]
                if whole:
                    base.copy_(live.copy_(target))
                else:
                    work = base.sub_(live.to(_CPU))
                    # In bf16 the model rounds: work is what moved since, not that.
                    base.add_(live.copy_(target - work).to(_CPU))
            if whole:
                for name, live in buffers.items():
                    live.copy_(shared.model[name])
            self.version, self.damaged = shared.step, False

    def found(self, start: dict[str, torch.Tensor]) -> _Global:
        """The first shared model, of the weights at the start; the work is what moved since."""
        weights = self.layout.parameters
        model = {**start, **{name: start[name].float() for name in weights}}
        # Newer than what other nodes may have of a Hub that was lost.
        self.version = 0 if self.baseline is None else self.version + 1
        self.baseline = _copies({name: model[name] for name in weights})
        applied = {self.node_id: self.generation} if self.generation else {}  # it is in there
        shared = _Global(self.version, model, None, applied)
        self._forget_applied(shared)
        return shared

    def rejoin(self, look: _Look, shared: _Global, start: dict[str, torch.Tensor] | None) -> bool:
        """Whether the Hub knows of a delta which this state, of an older checkpoint, does not.

        What was done after the checkpoint is in there, so it is not to be counted again.
        """
        recorded = shared.applied.get(self.node_id, 0)
        newest = max(recorded, look.generation)
        found = look.upload if look.generation > recorded else None
        unknown = newest > self.generation
        if found is not None and newest == self.generation:
            # The same number may be that of another delta, of a run that began without checkpoint.
            unknown = self.upload is not None and not self.upload.equals(found)
            self.upload = found
        if unknown:
            self.generation, self.upload = newest, found
            for name, base in (self.baseline or {}).items():
                base.copy_((start or _all_tensors(self.model))[name])
        self._forget_applied(shared)
        return unknown

    def _forget_applied(self, shared: _Global) -> None:
        """The delta in flight is none any more, once it is in the shared model."""
        recorded = shared.applied.get(self.node_id, 0)
        if self.upload is not None and self.upload.generation <= recorded:
            self.upload = None
        self.generation = max(self.generation, recorded)
        self._odd = {name for name in self.layout.buffers if not _is_finite(shared.model[name])}


class _Exchange:
    """A node's other side: all that goes over the Hub. Its thread never touches the live model."""

    def __init__(self, node: DumbDiLoCo):
        self.node, self.hub, self.layout = node, _Patient(node), node._layout
        self.folder = f"nodes/{node.node_id}"
        master = _Master(node, self.hub) if node.role == "master" else None
        self.master: _Master | None = master  # None if deposed, too
        self.opens = math.inf  # when a master begins, if its node has not trained before
        self.look: _Look | None = None  # the first that was seen of the Hub
        self.fetched: _Global | None = None  # the newest version after that, until it is taken
        self.error: Exception | None = None  # what the last exchange failed of
        self.tries = 0
        self.wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._ending = False
        self._signs: list[bytes] = []  # the signs of life that were written last
        self._newest, self._recorded = -1, 0  # the newest version, and our last delta in it
        self._random = random.Random()  # for waiting times; the global one is not ours

    @property
    def running(self) -> bool:
        return self._thread is not None

    @property
    def outer(self) -> _Global | None:
        return None if self.master is None else self.master.outer

    @outer.setter
    def outer(self, outer: _Global | None) -> None:
        if self.master is not None:
            self.master.outer = outer

    def begin(self) -> None:
        name = f"ckpt-{self.node.node_id}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def end(self, seconds: float) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ending = True
            self.wake.set()
            thread.join(seconds)
            if thread.is_alive():
                log.warning("%s leaves in the middle of an exchange", self.node.node_id)

    def is_ready(self) -> bool:
        """Whether a blocking node can begin."""
        found = self.look is not None and (self.look.shared or self.master)
        return bool(found or isinstance(self.error, CheckpointError))

    def exchange(self) -> None:
        """Fetch what is newer, say that we live, upload what is in flight; a master aggregates.

        This is the whole protocol. What fails is raised, and done again by the next exchange.
        """
        worker = self.master is None
        if self.look is None:
            self._take_look()
        elif worker and (pointer := _read_pointer(self.hub)) is not None:
            if self.look.empty:
                self._take_look()
            elif self._wants(pointer["outer_step"]):
                self._offer(_read_global(self.hub, pointer, self.layout))
        if self.node._training:
            self._say_alive()
        self._send()
        if not worker and self._may_lead():
            self._lead()

    def _say_alive(self) -> None:
        name, data = f"{self.folder}/{_ALIVE}", json.dumps({"counter": self.node._ticks}).encode()
        with contextlib.suppress(FileNotFoundError):
            if self._signs and self.hub.read(name, 100) not in self._signs:
                message = "another process is %s too: work of both is lost, give each its own name"
                log.error(message, self.node.node_id)
        self._signs = [*self._signs[-1:], data]  # the last one may not have been written
        self.hub.write(name, data)

    def _may_lead(self) -> bool:
        """Whether it is known what to go on from; a state may be loaded right after start()."""
        with self.node._lock:
            if not self.node._training and time.monotonic() < self.opens:
                return False
            if self.node._settled is None:  # the first look came late
                self.master.start_from(self.look.shared)
            self.node._make_first()
            return self.outer is not None

    def _lead(self) -> None:
        if not self.master.keep_published():
            log.error("%s leads no more: another master has published", self.node.node_id)
            self.master = None
            return
        if self._wants(self.outer.step):
            self._offer(self.outer)
        if self.master.aggregate():
            self._offer(self.outer)

    def _wants(self, step: int) -> bool:
        return step > self._newest or (self.node._work.damaged and self.fetched is None)

    def _offer(self, shared: _Global) -> None:
        with self.node._lock:
            self.fetched = self._remember(shared)

    def _remember(self, shared: _Global) -> _Global:
        """What is newest on the Hub, as far as this side knows."""
        self._newest = shared.step
        self._recorded = shared.applied.get(self.node.node_id, 0)
        if self.master is None:
            shared.momentum = None  # of no use here
        return shared

    def _take_look(self) -> None:
        """The shared model, and what of this node's deltas is on the Hub or in that."""
        # In this order: a delta that is listed no more has been applied to what is read then.
        newest = max(_deltas_in(self.hub.list(self.folder)), default=0)
        pointer, shared, upload = _read_pointer(self.hub), None, None
        if isinstance(self.node.hub, Hub):
            self.node.hub._sweep([self.folder] if self.master is None else [self.folder, "global"])
        if pointer is not None:
            shared = self._remember(_read_global(self.hub, pointer, self.layout))
        if newest > self._recorded:
            try:
                upload = _read_delta(self.hub, self.node.node_id, newest, self.layout)
            except _Refused as error:  # by the master too
                log.warning("delta %d of %s is of no use: %s", newest, self.node.node_id, error)
        if pointer is None and self.master is None:
            what = "waits" if self.node.blocking else "trains alone"
            log.warning("%s %s until a master has published a model", self.node.node_id, what)
        self.look = _Look(shared, shared is None, newest, upload)

    def _send(self) -> None:
        with self.node._lock:
            self.node._work.finish()
            upload = self.node._work.upload
            # Until it is settled, what the Hub holds of this node is not known.
            ready = self.node._settled is not None and upload is not None
        if not ready or upload.generation <= self._recorded:
            return
        name = _delta_name(self.node.node_id, upload.generation)
        with contextlib.suppress(FileNotFoundError):
            if upload.size is not None and self.hub.size(name) == upload.size:
                return
        data = upload.to_bytes(self.node.node_id)
        self.hub.write(name, data)
        upload.size, self.node._uploaded_step = len(data), upload.step

    def _run(self) -> None:
        failures, ending, name = 0, False, self.node.node_id
        while not ending:
            ending = self._ending  # one more exchange after that
            try:
                self.exchange()
                if ending:
                    self.hub.delete(f"{self.folder}/{_ALIVE}")
                if failures:
                    log.warning("%s reaches the Hub again", name)
                self.error, failures = None, 0
            except Exception as error:  # the training goes on without the Hub
                if repr(error) != repr(self.error):
                    log.warning("%s could not exchange, and tries again: %r", name, error)
                self.error, failures = error, failures + 1
            self.tries += 1
            if not ending:
                self._pause(failures)

    def _pause(self, failures: int) -> None:
        """Until the next look at the Hub; after failures nothing but the end shortens it."""
        seconds = self.node.poll_interval
        if failures:
            permanent = isinstance(self.error, (PermissionError, CheckpointError))
            backoff = min(seconds, 2 ** min(failures, 10) / 2)
            seconds = self._random.uniform(0.5, 1.5) * (max(seconds, 600) if permanent else backoff)
        elif self.master is not None and time.monotonic() < self.opens:
            seconds = min(seconds, _GRACE)
        deadline = time.monotonic() + seconds
        while not self._ending and (left := deadline - time.monotonic()) > 0:
            if self.wake.wait(left):
                self.wake.clear()
                if not failures:
                    return


class _Patient:
    """The Hub's methods, each tried three times: a bad line fails now and then."""

    def __init__(self, node: DumbDiLoCo):
        self._hub, self._pause = node.hub, min(node.poll_interval, 1.0)

    def __getattr__(self, name: str) -> Callable:
        return functools.partial(self._call, getattr(self._hub, name))

    def _call(self, method: Callable, *arguments: Any) -> Any:
        for tries in (1, 2):
            try:
                return method(*arguments)
            except (FileNotFoundError, *_LASTING):
                raise
            except Exception as error:
                log.debug("%r with %r is tried again: %r", method, arguments[:1], error)
                time.sleep(self._pause * tries / 2)
        return method(*arguments)


# What trying again does not mend.
_LASTING = (
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    LookupError,
    TypeError,
    ValueError,
)


class _Master:
    """What makes a node the master: it completes the rounds and publishes the shared model."""

    def __init__(self, node: DumbDiLoCo, hub: _Patient):
        self.hub, self.layout, self._lock = hub, node._layout, node._lock
        self.node_timeout = node.node_timeout
        self.lr, self.momentum, self.quorum = node.outer_lr, node.outer_momentum, node.quorum
        self.outer: _Global | None = None
        self._spare: _Global | None = None  # the one before: memory for the next (fresh is slow)
        self.waits_for = ""  # the nodes whose deltas the round lacks
        self._ours: set[str | None] = {None}  # digests of what may be on the Hub
        self._seen: dict[str, tuple[Any, float]] = {}  # each node's counter, when it last moved
        self._troubles: dict[str, str] = {}  # what could not be read, and why
        self._sizes: dict[str, int] = {}  # of deltas that looked cut
        self._refused: set[str] = set()

    def start_from(self, shared: _Global | None) -> _Global | None:
        """The Hub's version, unless there is none or a checkpoint has a newer one."""
        if shared is not None:
            self._ours.add(shared.digest)
            if self.outer is None or shared.step >= self.outer.step:
                self.outer = shared
        return self.outer

    def keep_published(self) -> bool:
        """See to it that our version is on the Hub. False when another master's is there."""
        try:
            pointer = _read_pointer(self.hub)
        except ValueError as error:
            log.warning("global/%s is damaged, and is written again: %s", _POINTER, error)
            pointer = None
        digest = None if pointer is None else pointer["sha256"]
        if digest not in self._ours:
            return False
        if digest is None or digest != self.outer.digest:
            self._publish()
        return True

    def aggregate(self) -> bool:
        """Make and publish another version, if a round is complete.

        It reuses the memory of the version before the last: the node was offered the last one.
        """
        following = self._round(*self._survey())
        if following is None:
            return False
        with self._lock:
            if following.model is not self.outer.model:
                self._spare = self.outer
            self.outer = following
        self._publish()
        return True

    def _publish(self) -> None:
        """The version, then the pointer. Applied deltas are deleted when that is seen there."""
        data = _to_bytes(self.outer.state_dict())
        digest, file = hashlib.sha256(data).hexdigest(), f"step_{self.outer.step:012d}.pt"
        self.outer.digest = digest
        self._ours.add(digest)
        pointer = {
            "outer_step": self.outer.step,
            "file": file,
            "bytes": len(data),
            "sha256": digest,
            "algorithm": _ALGORITHM,
            "updated_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        self.hub.write(f"global/{file}", data)
        self.hub.write(f"global/{_POINTER}", json.dumps(pointer, indent=2).encode())
        self._ours = {digest, None}
        for name in self.hub.list("global"):
            match = _GLOBAL_FILE.fullmatch(name)
            if match and int(match[1]) <= self.outer.step - 3:
                self._delete(f"global/{name}")

    def _survey(self) -> tuple[dict[str, list[int]], set[str]]:
        """The numbers of the deltas that are to be applied, by node, and which nodes live."""
        deltas: dict[str, list[int]] = {}
        for node in filter(_NODE_ID.fullmatch, self.hub.list("nodes")):
            try:
                self._look_at(node, deltas)
            except FileNotFoundError:
                pass  # it has just ended
            except _LASTING as error:  # which is no reason to keep the others waiting
                self._complain(f"nodes/{node}", error)
        now = time.monotonic()
        moved = {node for node, (_, when) in self._seen.items() if now - when < self.node_timeout}
        return deltas, moved

    def _look_at(self, node: str, deltas: dict[str, list[int]]) -> None:
        names = self.hub.list(f"nodes/{node}")
        applied = self.outer.applied.get(node, 0)
        for number in _deltas_in(names):
            if number <= applied:
                self._delete(_delta_name(node, number))
            else:
                deltas.setdefault(node, []).append(number)
        if _ALIVE not in names:
            self._seen.pop(node, None)
            return
        counter = json.loads(self.hub.read(f"nodes/{node}/{_ALIVE}", 100))["counter"]
        if self._seen.get(node, (None,))[0] != counter:
            self._seen[node] = counter, time.monotonic()

    def _complain(self, name: str, error: Exception) -> None:
        if self._troubles.get(name) != repr(error):
            log.warning("%s cannot be read, and is left out: %r", name, error)
            self._troubles[name] = repr(error)

    def _round(self, deltas: dict[str, list[int]], live: set[str]) -> _Global | None:
        """The next version, if enough deltas have arrived: their sum, in the order of the nodes."""
        if not self._is_complete(set(deltas), live):
            return None
        total, applied, counted = {}, dict(self.outer.applied), set()
        for node in sorted(deltas):
            for number in deltas[node]:
                delta = self._usable_delta(node, number)
                if delta is _LATER:
                    break
                applied[node] = number
                if delta is not None:
                    _add(total, delta, self.outer, self.layout)
                    counted.add(node)
        arrived = {node for node in deltas if applied.get(node) != self.outer.applied.get(node)}
        if not self._is_complete(arrived, live):
            return None
        outer, nodes = self.outer, len(live | counted)
        if total:  # else all were refused, which another version has to say
            spare = None if self._spare is None or self._spare.lent else self._spare
            outer = _outer_step(outer, total, nodes, self.lr, self.momentum, self.layout, spare)
        step, lent = outer.step + 1, not total
        return dataclasses.replace(outer, step=step, applied=applied, digest=None, lent=lent)

    def _is_complete(self, arrived: set[str], live: set[str]) -> bool:
        missing, lacking = sorted(live - arrived), self.quorum - len(arrived)
        self.waits_for = ", ".join(missing) or f"{max(1, lacking)} more"
        return bool(arrived) and (lacking <= 0 if self.quorum else not missing)

    def _usable_delta(self, node: str, number: int) -> Any:
        """Its tensors, None if it is refused, _LATER if it may still be on its way."""
        name = _delta_name(node, number)
        if name in self._refused:
            return None
        try:
            upload = _read_delta(self.hub, node, number, self.layout)
            self.layout.check_buffers(upload.delta, self.outer)
        except _Refused as error:
            cut = error.size is not None and self._sizes.get(name) != error.size
            if cut:  # perhaps, and it grows yet
                self._sizes[name] = error.size
                return _LATER
            log.warning("%s is refused: %s", name, error)
            self._refused.add(name)
            return None
        except _LASTING as error:
            self._complain(name, error)
            return _LATER
        age = self.outer.step - upload.base_outer_step
        log.info("%s is taken, made %d versions ago", name, age)
        return upload.delta

    def _delete(self, name: str) -> None:
        """Delete what is not needed. That it stays is harmless: the next exchange tries again."""
        self._refused.discard(name)
        self._sizes.pop(name, None)
        try:
            self.hub.delete(name)
        except Exception as error:
            log.debug("%s was not deleted: %r", name, error)


_LATER = object()  # said of a delta that may still be on its way


@dataclasses.dataclass
class _Global:
    """A version of the shared model. Its tensors stay as they are while anybody can see them."""

    step: int
    model: dict[str, torch.Tensor]  # parameters in fp32, buffers as they are
    momentum: dict[str, torch.Tensor] | None
    applied: dict[str, int]  # of each node the last delta that is in here
    digest: str | None = None  # sha256 of its file, once there is one
    lent: bool = True  # whether a checkpoint may be reading it

    def state_dict(self) -> dict:
        names = {"outer_step": self.step, "model": self.model, "momentum": self.momentum}
        return {**names, "applied": self.applied}

    @staticmethod
    def from_state(state: Any, layout: _Layout) -> _Global:
        """ValueError when it is not a version of this model."""
        names = ("outer_step", "model", "momentum", "applied")
        step, model, momentum, applied = (_item(state, name) for name in names)
        layout.check(model, [torch.float32])
        if momentum is not None:
            layout.check(momentum, [torch.float32], buffers=False)
        _check_type("applied", applied, dict)
        for node, number in applied.items():
            if not (isinstance(node, str) and _NODE_ID.fullmatch(node)):
                raise ValueError(f"applied must be of nodes, got {node!r:.80}")
            _check_int(f"applied {node}", number, 0)
        return _Global(_check_int("outer_step", step, 0), model, momentum, applied)


@dataclasses.dataclass
class _Upload:
    """A delta: baseline - parameters in ``delta_dtype``, and the values of the buffers."""

    step: int  # of its node
    base_outer_step: int  # the version that it starts from
    generation: int  # its number: a node's deltas count up
    delta: dict[str, torch.Tensor]
    size: int | None = None  # bytes on the Hub, once it is there

    def state_dict(self) -> dict:
        names = {"step": self.step, "base_outer_step": self.base_outer_step}
        return {**names, "baseline_generation": self.generation, "delta": self.delta}

    @staticmethod
    def from_state(state: Any, layout: _Layout) -> _Upload:
        """ValueError when it is not a delta of this model."""
        names = ("step", "base_outer_step", "baseline_generation")
        numbers = [_check_int(name, _item(state, name), 0) for name in names]
        delta = _item(state, "delta")
        layout.check(delta, _DELTA_DTYPES)
        return _Upload(*numbers, delta)

    def equals(self, other: _Upload) -> bool:
        pairs = ((tensor, other.delta[name]) for name, tensor in self.delta.items())
        return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)

    def to_bytes(self, node: str) -> bytes:
        header = {"node_id": node, "generation": self.generation, "step": self.step}
        header["base_outer_step"] = self.base_outer_step
        return _to_bytes({**header, "delta": self.delta})


class _Refused(ValueError):
    """What is on the Hub is no delta of this node and model. ``size``: in bytes."""

    size: int | None = None


@dataclasses.dataclass
class _Look:
    """What a node finds on the Hub when it starts."""

    shared: _Global | None
    empty: bool  # there was none
    generation: int  # of the newest of its own deltas that is there
    upload: _Upload | None  # that delta, where it is not applied yet


class _Layout:
    """What travels: names, shapes, dtypes; and the most bytes that this can take."""

    def __init__(self, model: torch.nn.Module):
        if any(map(torch.nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
            raise ValueError("model has parameters without a shape yet: run one batch through it")
        parameters, buffers = _tensors(model)
        if not parameters:
            raise ValueError("model has no floating-point parameter to train")
        for name, tensor in {**parameters, **buffers}.items():
            dense = tensor.layout == torch.strided and not tensor.is_quantized
            if not dense or tensor.is_meta or tensor.is_complex() or tensor.is_nested:
                raise ValueError(
                    f"model: {name} cannot be shared, it is {type(tensor).__name__}"
                    f" of {tensor.dtype}, {tensor.layout}, on {tensor.device}"
                )
        self.parameters = {name: tensor.shape for name, tensor in parameters.items()}
        self.buffers = {name: (tensor.shape, tensor.dtype) for name, tensor in buffers.items()}
        size = sum(4 * p.numel() for p in parameters.values())
        size += sum(b.numel() * max(4, b.dtype.itemsize) for b in buffers.values())
        # A kilobyte a tensor for what the file says about it.
        self.limit = 2 * size + (1 << 20) + 2048 * (len(parameters) + len(buffers))

    def check(self, tensors: Any, dtypes: Iterable[torch.dtype], buffers: bool = True) -> None:
        """ValueError naming all names, shapes and dtypes that differ; parameters must be finite."""
        _check_type("tensors", tensors, dict)
        wanted = {name: (shape, dtypes) for name, shape in self.parameters.items()}
        if buffers:
            wanted |= {name: (shape, [dtype]) for name, (shape, dtype) in self.buffers.items()}
        problems = [f"missing: {name}" for name in sorted(wanted.keys() - tensors.keys())]
        unknown = sorted(map(str, tensors.keys() - wanted.keys()))
        problems += [f"unexpected: {name}" for name in unknown]
        for name in wanted.keys() & tensors.keys():
            (shape, allowed), tensor = wanted[name], tensors[name]
            if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
                problems.append(f"{name}: not a plain tensor")
            elif tensor.device.type != "cpu" or tensor.is_nested:
                problems.append(f"{name}: a tensor on {tensor.device}")
            elif tensor.shape != shape or tensor.dtype not in allowed:
                found = f"{tuple(tensor.shape)} {tensor.dtype}"
                problems.append(f"{name}: {found} instead of {tuple(shape)} {allowed[0]}")
            elif name in self.parameters and not _is_finite(tensor):
                problems.append(f"{name}: not finite")
        if problems:
            raise ValueError("; ".join(problems[:20]))

    def check_buffers(self, delta: dict[str, torch.Tensor], outer: _Global) -> None:
        """Refused when a value is not finite where that of the shared model is."""
        for name in self.buffers:
            value = delta[name]
            if not _is_finite(value) and (value.isfinite() < outer.model[name].isfinite()).any():
                raise _Refused(f"{name}: not finite")


def _add(total: dict, delta: dict[str, torch.Tensor], outer: _Global, layout: _Layout) -> None:
    """Add a delta: parameters in fp32, float buffers as a change, of others the largest value."""
    for name, value in delta.items():
        if name in layout.parameters:
            value = value if name in total else value.float().contiguous()
        elif value.is_floating_point():
            change = value.double() - outer.model[name].double()
            value = change.masked_fill_(~outer.model[name].isfinite(), 0)
        if name not in total:
            total[name] = value
        elif value.is_floating_point():
            total[name].add_(value)
        else:
            total[name] = torch.maximum(total[name], value)


def _outer_step(
    outer: _Global,
    total: dict,
    nodes: int,
    lr: float,
    momentum: float,
    layout: _Layout,
    spare: _Global | None,
) -> _Global:
    """Nesterov SGD on the mean delta (Douillard et al. 2023, algorithm 1, line 14)."""
    model = _copies(outer.model, spare and spare.model)
    buffers = _copies(outer.momentum or {}, spare and spare.momentum) if momentum else {}
    weights = [model[name] for name in layout.parameters]
    sgd = torch.optim.SGD(weights, lr=lr, momentum=momentum, nesterov=momentum > 0, foreach=True)
    for name, weight in zip(layout.parameters, weights, strict=True):
        weight.grad = total[name].div_(nodes)
        if name in buffers:
            sgd.state[weight]["momentum_buffer"] = buffers[name]
    sgd.step()
    for name, weight in zip(layout.parameters, weights, strict=True):
        buffers[name], weight.grad = sgd.state[weight].get("momentum_buffer"), None
    for name in layout.buffers:
        if model[name].is_floating_point():
            model[name].add_(total[name].div_(nodes))
        else:
            model[name] = torch.maximum(model[name], total[name])
    return dataclasses.replace(
        outer, model=model, momentum=buffers if momentum else None, lent=False
    )


def _copies(tensors: dict, spare: dict | None = None) -> dict:
    """Copies on the CPU, in the memory of ``spare`` where there is one."""
    if not spare:
        return {name: _copied(tensor, _CPU) for name, tensor in tensors.items()}
    return {name: spare[name].copy_(tensor) for name, tensor in tensors.items()}


def _tensors(model: torch.nn.Module) -> tuple[dict, dict]:
    """What travels, live: floating parameters, tied ones once, and what else the state holds."""
    every = model.named_parameters(remove_duplicate=False)
    bare_name = _bare_namer(model)
    floating = {bare_name(name): p.detach() for name, p in every if p.is_floating_point()}
    once = {bare_name(name) for name, _ in model.named_parameters()}
    parameters = {name: p for name, p in floating.items() if name in once}
    state = model_state_dict(model).items()
    others = {n: t for n, t in state if n not in floating and isinstance(t, torch.Tensor)}
    return parameters, others


def _all_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    parameters, buffers = _tensors(model)
    return {**parameters, **buffers}


def _new_tensor(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """On the CPU, of that shape; where the model is on a GPU, in memory that it copies to fast."""
    memory = _new_buffer(like.numel() * dtype.itemsize, pinned=like.is_cuda)
    return memory.view(dtype).view(like.shape)


def _rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float16:  # beyond its range it would be infinite; the rest goes next time
        tensor = tensor.clamp(-65504, 65504)
    return tensor.to(dtype)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all is finite, and sums of it will be."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    narrow = tensor.dtype.itemsize == 1  # for which torch has no minimum
    low, high = map(float, (tensor.float() if narrow else tensor).aminmax())
    return low > -1e30 and high < 1e30


def _read_pointer(hub: Any) -> dict | None:
    """What names the newest version of the shared model; None when there is none."""
    try:
        pointer = json.loads(hub.read(f"global/{_POINTER}", 1 << 16))
    except FileNotFoundError:
        return None
    if not isinstance(pointer, dict):
        raise ValueError(f"global/{_POINTER} holds {pointer!r:.200}")
    if pointer.get("algorithm") != _ALGORITHM:
        raise CheckpointError(f"global/{_POINTER} is not of {_ALGORITHM}: {pointer!r:.200}")
    kinds = {"outer_step": int, "file": str, "sha256": str}
    whole = all(isinstance(pointer.get(name), kind) for name, kind in kinds.items())
    if not whole or not _GLOBAL_FILE.fullmatch(pointer["file"]):
        raise ValueError(f"global/{_POINTER} is not whole: {pointer!r:.200}")
    return pointer


def _read_global(hub: Any, pointer: dict, layout: _Layout) -> _Global:
    name = f"global/{pointer['file']}"
    try:
        size = hub.size(name)
        data = hub.read(name) if size <= layout.limit else b""
    except FileNotFoundError:  # there are newer ones
        again = _read_pointer(hub)
        if again in (None, pointer):
            raise
        return _read_global(hub, again, layout)
    try:
        if size > layout.limit:
            raise ValueError(f"it has {size} bytes, this one at most {layout.limit}")
        digest = hashlib.sha256(data).hexdigest()
        if digest != pointer["sha256"]:
            raise OSError(f"{name} is not yet what {_POINTER} says")
        shared = _Global.from_state(_unpacked(data, name), layout)
    except OSError:
        raise
    except Exception as error:
        message = f"{name} does not hold this model: {error}"
        raise CheckpointError(message, path=name, step=pointer["outer_step"]) from error
    shared.digest = digest
    return shared


def _read_delta(hub: Any, node: str, number: int, layout: _Layout) -> _Upload:
    name = _delta_name(node, number)
    size = hub.size(name)
    data = hub.read(name) if size <= layout.limit else b""
    try:
        if size > layout.limit:
            raise ValueError(f"it has {size} bytes, at most {layout.limit} are expected")
        payload = _unpacked(data, name)
        header = _item(payload, "node_id"), _item(payload, "generation")
        if header != (node, number):
            raise ValueError(f"its header says {header!r:.200}")
        upload = _Upload.from_state({**payload, "baseline_generation": number}, layout)
    except Exception as error:  # damaged or hostile bytes make torch raise almost anything
        refused = _Refused(f"{error!r:.500}")
        refused.size = size
        raise refused from error
    upload.size = size
    return upload


def _to_bytes(payload: dict) -> bytes:
    file = io.BytesIO()
    torch.save(payload, file)
    return file.getvalue()


def _unpacked(data: bytes, name: str) -> Any:
    """What ``torch.save`` has made, checked against its checksums, without running any code."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if sum(record.file_size for record in archive.infolist()) > len(data):
            raise ValueError("it would grow when it is read")
    damaged = _damaged_record(io.BytesIO(data), name)
    if damaged:
        raise ValueError(f"record {damaged!r} is missing or fails its checksum")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _item(mapping: Any, name: str) -> Any:
    if not isinstance(mapping, dict) or name not in mapping:
        raise ValueError(f"{name} is missing")
    return mapping[name]


def _deltas_in(names: list[str]) -> list[int]:
    return sorted(int(match[1]) for match in map(_DELTA_FILE.fullmatch, names) if match)


def _delta_name(node: str, number: int) -> str:
    return f"nodes/{node}/delta_{number:012d}.pt"


_ALGORITHM, _ALIVE = "dumb_diloco", "alive.json"
_DELTA_FILE = re.compile(r"delta_([0-9]{12})\.pt")
_GLOBAL_FILE = re.compile(r"step_([0-9]{12})\.pt")


# ==================================================================================================
# Command line
# ==================================================================================================
def main(argv: list[str] | None = None) -> int:
    """``python ckpt.py ls|show|verify|hub …``; returns the exit status.

    0: all is well; 1: a file is damaged; 2: it could not be done, for a reason given in one line.
    No code from a file or a Hub is run.
    """
    parser = argparse.ArgumentParser(description="Look at checkpoints, and at a Hub.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(run: Callable, name: str, argument: str, what: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=what, description=what)
        added.add_argument("place", metavar=argument)
        added.set_defaults(run=run)
        return added

    ls = command(_list, "ls", "DIR", "list the checkpoints of a directory")
    ls.add_argument("--verify", action="store_true", help="compare each with its checksums")
    command(_show, "show", "FILE", "what is in a checkpoint (of a directory: in the latest)")
    command(_verify, "verify", "DIR|FILE", "compare checkpoints with their checksums")
    command(_show_hub, "hub", "URL", "the shared model, the nodes and their deltas")
    args = parser.parse_args(argv)
    try:
        status = args.run(args)
        print(end="", flush=True)
        return status
    except BrokenPipeError:  # who reads it, as head does, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # whatever it is, it becomes one line
        text = (str(error) or type(error).__name__).removesuffix(f"; {_WAY_OUT}")
        _say(f"{parser.prog}: {' '.join(text.split())}", file=sys.stderr)
        return 2


def _list(args: argparse.Namespace) -> int:
    checkpoints, latest = _checkpoints_in(Path(args.place))
    rows, statuses = [], [0]
    for step, path in checkpoints:
        with contextlib.suppress(FileNotFoundError):  # a run that goes on prunes its files
            row = [str(step), path.name, *_size_and_age(path)]
            if args.verify:
                status, said = _judged(path)
                statuses.append(status)
                row.append(said)
            rows.append([*row, "latest" if path == latest else ""])
    titles = ["step", "file", "size", "age", *(["checksums"] if args.verify else []), ""]
    _say_table([titles, *rows])
    return max(statuses)


def _show(args: argparse.Namespace) -> int:
    given = place = Path(args.place)
    while True:  # a run that goes on prunes its files
        if given.is_dir():
            _, place = _checkpoints_in(given)
        try:
            size_and_age, (status, said) = _size_and_age(place), _judged(place)
            if status == 2:
                raise ValueError(f"{place}: {said}")
            state = CheckpointManager(place.parent, weights_only=True)._load(place, mapped=True)
            break
        except (FileNotFoundError, CheckpointError):
            if place is given or place.exists():
                raise
    _say(f"{place}: {', '.join(size_and_age)} old, {said}")
    rows = [["tensor", "dtype", "shape", "size"]]
    for key, value in state.items():
        tensors = list(_named_tensors({key: value}))
        if not tensors:
            lines = pprint.pformat(value, width=100)[:2000].splitlines()
            for line in [f"{key}: {lines[0]}", *lines[1:]]:
                _say(line)
        for name, tensor in tensors:
            kind, shape, size = str(tensor.dtype).removeprefix("torch."), "nested", ""
            if not tensor.is_nested:
                shape, dense = str(tuple(tensor.shape)), tensor.layout == torch.strided
                size = _bytes(tensor.nbytes) if dense else str(tensor.layout)
            rows.append([name, kind, shape, size])
    _say_table(rows)
    return status


def _verify(args: argparse.Namespace) -> int:
    place, statuses = Path(args.place), [0]
    if not place.is_dir():
        place.stat()
    for _, path in _checkpoints_in(place)[0] if place.is_dir() else [(0, place)]:
        with contextlib.suppress(FileNotFoundError):
            status, said = _judged(path)
            statuses.append(status)
            _say(f"{path}: {said}")
    return max(statuses)


def _show_hub(args: argparse.Namespace) -> int:
    hub, applied, status = Hub(args.place), {}, 0
    nodes = hub.list("nodes")
    try:
        if (pointer := _read_pointer(hub)) is not None:
            name = f"global/{pointer['file']}"
            what = f"{_bytes(hub.size(name))}, published {_age_on(hub, name)}"
            _say(f"{hub.url}: version {pointer['outer_step']} of the shared model, {what}")
            with hub._files.open(hub._path(name)) as file, zipfile.ZipFile(file) as archive:
                record = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
                applied = _Outline(io.BytesIO(archive.read(record))).load()["applied"]
        elif nodes:
            _say(f"{hub.url}: no shared model yet")
        else:
            raise FileNotFoundError(f"{hub.url} holds neither a shared model nor nodes")
    except OSError:
        raise
    except Exception as error:  # damaged bytes raise almost anything
        _say(f"{hub.url}: the shared model, or global/{_POINTER}, is damaged: {error!r:.200}")
        status = 1
    rows = [["node", "last delta", "", "sign of life"]]
    for node in sorted({*nodes, *applied}):
        last, where = applied.get(node, 0), "in the model"
        try:
            names = hub.list(f"nodes/{node}")
            newest = max(_deltas_in(names), default=0)
            if newest > last:
                name, last = _delta_name(node, newest), newest
                where = f"waits, {_bytes(hub.size(name))}, made {_age_on(hub, name)}"
            sign = f"nodes/{node}/{_ALIVE}"
            life = _age_on(hub, sign) if _ALIVE in names else "not training"
        except OSError as error:
            status, life = 2, f"cannot be read: {error.strerror or error}"
        rows.append([node, str(last or "none"), where if last else "", life])
    _say_table(rows)
    return status


class _Outline(pickle.Unpickler):
    """A file without its tensors, which need not be read; nothing that it names is called."""

    def find_class(self, module: str, name: str) -> Callable:
        return lambda *_: {}

    def persistent_load(self, storage: Any) -> None:
        return None


def _checkpoints_in(directory: Path) -> tuple[list[tuple[int, Path]], Path]:
    """All by step, and the latest, which may have a name of its own."""
    if directory.is_file():
        raise NotADirectoryError(f"{directory} is a file, not a directory")
    manager = CheckpointManager(directory)
    files = {path: step for step, path in manager._files().items()}
    if (latest := manager.latest_path()) is None:
        raise CheckpointError(f"there is no checkpoint in {directory}")
    files.setdefault(latest, manager._step_of(latest))
    return sorted((step, path) for path, step in files.items()), latest


def _judged(path: Path) -> tuple[int, str]:
    """The exit status that the file is worth, and why. FileNotFoundError when there is none."""
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe would have us wait for ever
        return 2, "not a regular file"
    try:
        path.open("rb").close()
        verify_checkpoint(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        return 2, f"cannot be read: {error.strerror}"
    except CheckpointError as error:
        if not path.exists():
            raise FileNotFoundError(f"{path} is gone") from error
        return 1, str(error).removeprefix(f"{path} ").partition("; ")[0]
    return 0, "whole"


def _size_and_age(path: Path) -> tuple[str, str]:
    found = path.stat()
    return _bytes(found.st_size), _age(found.st_mtime)


def _age_on(hub: Hub, name: str) -> str:
    try:
        when = hub._files.modified(hub._path(name))
    except (NotImplementedError, FileNotFoundError):
        return "at an unknown time"
    if when.tzinfo is None:
        when = when.replace(tzinfo=datetime.timezone.utc)
    return f"{_age(when.timestamp())} ago"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"


def _age(when: float) -> str:
    count, unit = time.time() - when, "s"
    for larger, size in {"min": 60, "h": 60, "d": 24}.items():
        if count < 2 * size:
            break
        count, unit = count / size, larger
    return f"{max(0, count):.0f} {unit}"


def _printable(text: str) -> str:
    """One line, with nothing by which a name in a file could play tricks on a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _say(text: str, file: Any = None) -> None:
    print(_printable(text), file=file)


def _say_table(rows: list[list[str]]) -> None:
    rows = [list(map(_printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        _say("  ".join(map(str.ljust, row, widths)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
