"""The behaviour of ckpt.py, shown with real processes, files, loaders and optimizers.

Run with `pytest`. Processes that get killed are forked from a server that has imported torch
already, so that each costs milliseconds.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import copy
import dataclasses
import datetime
import errno
import functools
import gc
import hashlib
import io
import itertools
import json
import logging
import math
import multiprocessing
import os
import pickle
import pickletools
import random
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import types
import typing
import warnings
import weakref
import zipfile
from pathlib import Path

import fsspec.implementations.dirfs
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import ckpt
from ckpt import CheckpointError, CheckpointManager, DumbDiLoCo, Hub, Trainer

ROOT = Path(__file__).resolve().parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["torch", "torch._dynamo", "test_ckpt"])  # optimizers import dynamo


# --------------------------------------------------------------------------------------------------
# Helpers
# --------------------------------------------------------------------------------------------------
def in_child(function, *args, exitcode=0, meanwhile=lambda: None):
    """Run function(*args) in a new process and look at how it ended: -9 is a real SIGKILL."""
    assert exitcode_of(function, *args, meanwhile=meanwhile) == exitcode


def exitcode_of(function, *args, meanwhile=lambda: None):
    with tempfile.TemporaryDirectory() as scratch:  # for what a killed process cannot clean up
        process = forks.Process(target=in_scratch, args=(scratch, function, *args))
        process.start()
        try:
            meanwhile()
            process.join(50)
        finally:
            process.kill()
            process.join()
    return process.exitcode


def in_scratch(scratch, function, *args):
    tempfile.tempdir = os.environ["TMPDIR"] = scratch
    function(*args)


def kill_me_and_my_workers(*_):
    time.sleep(0.1)  # a batch that a worker was just sharing would stay in /dev/shm
    os.killpg(0, signal.SIGKILL)


def same(a, b, where="state"):
    """Equal in structure, type, dtype and every bit."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}.{i}")
    else:
        assert a == b, where


def listing(directory):
    return sorted(os.listdir(directory))


def flip_bit(path, offset, bit=0):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


def flip_in(path, record="data/0"):
    """Flip a bit in the middle of one record of a torch.save file."""
    with zipfile.ZipFile(path) as archive:
        info = next(i for i in archive.infolist() if i.filename.endswith(record))
    data = path.read_bytes()
    name = info.filename.encode()
    extra = int.from_bytes(data[info.header_offset + 28 : info.header_offset + 30], "little")
    flip_bit(path, info.header_offset + 30 + len(name) + extra + info.file_size // 2)


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Unpicklable:
    def __reduce__(self):
        raise ValueError("half-way")


class Marker:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


class Loss(nn.Module):
    """A small model with dropout whose output is its loss."""

    def __init__(self, width=4, dropout=0.3):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 1)
        )

    def forward(self, x, y):
        return ((self.net(x).squeeze(-1) - y) ** 2).mean()


class Weight(nn.Module):
    """One scalar w; the loss is the mean of w * x."""

    def __init__(self, value=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(value))

    def forward(self, x):
        return (self.w * x).mean()


def regression(samples=22):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, 3, generator=generator)
    return TensorDataset(x, x.sum(1))


def make(directory=None, samples=22, batch=2, shuffle=True, every=1, trainer=None, **manager):
    """A trainer on a regression problem; trainer: more arguments for it."""
    ckpt.seed_everything(1)
    model = Loss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(regression(samples), batch_size=batch, shuffle=shuffle)
    if directory is not None:
        manager = CheckpointManager(directory, every_steps=every, fsync=False, **manager)
    return Trainer(model, optimizer, loader, checkpoint_manager=manager or None, **(trainer or {}))


def weight_trainer(loader, value=0.0, lr=1.0, **options):
    model = Weight(value)
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=lr), loader, **options)


def ones(count):
    return [(torch.ones(1),) for _ in range(count)]


@pytest.fixture
def warned(caplog):
    """What ckpt has logged at WARNING or above."""
    caplog.set_level(logging.WARNING, "ckpt")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "ckpt"]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    yield
    wait_until(lambda: not any(t.name.startswith("ckpt-") for t in threading.enumerate()))


# --------------------------------------------------------------------------------------------------
# Errors
# --------------------------------------------------------------------------------------------------
def test_checkpoint_error_is_a_runtime_error_with_path_and_step():
    error = CheckpointError("broken", path="a/b.pt", step=3)
    assert isinstance(error, RuntimeError)
    assert (str(error), error.path, error.step) == ("broken", Path("a/b.pt"), 3)
    assert (CheckpointError("x").path, CheckpointError("x").step) == (None, None)


# --------------------------------------------------------------------------------------------------
# Atomic files
# --------------------------------------------------------------------------------------------------
SAVERS = {
    "torch": lambda path, **k: ckpt.atomic_torch_save({"a": torch.ones(3)}, path, **k),
    "json": lambda path, **k: ckpt.atomic_json_dump({"a": 1}, path, **k),
}
both = pytest.mark.parametrize("save", SAVERS.values(), ids=SAVERS.keys())


class Spy:
    """Lists the directory at the moment when it is pickled."""

    def __init__(self, directory):
        self.directory = directory

    def __reduce__(self):
        Spy.seen = listing(self.directory)
        return (int, ())


@both
def test_parent_directories_are_made_and_nothing_else_is_left(tmp_path, save):
    save(tmp_path / "a" / "b" / "x.pt")
    assert listing(tmp_path) == ["a"]
    assert listing(tmp_path / "a" / "b") == ["x.pt"]


def test_content(tmp_path):
    ckpt.atomic_torch_save({"a": torch.arange(3), "b": "text"}, tmp_path / "x.pt")
    same(torch.load(tmp_path / "x.pt"), {"a": torch.arange(3), "b": "text"})
    ckpt.atomic_json_dump({"a": [1]}, str(tmp_path / "x.json"))
    assert (tmp_path / "x.json").read_text() == '{\n  "a": [\n    1\n  ]\n}\n'


def test_bytes_go_to_a_temporary_file_of_this_process_beside_the_destination(tmp_path):
    ckpt.atomic_torch_save([Spy(tmp_path)], tmp_path / "x.pt")
    assert Spy.seen == [f".x.pt.tmp-{os.getpid()}"]
    assert listing(tmp_path) == ["x.pt"]


def test_names_that_begin_with_a_dot_or_lie_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ckpt.atomic_torch_save({"a": 1}, ".hidden")
    ckpt.atomic_json_dump({"a": 1}, "plain.json")
    assert torch.load(".hidden") == {"a": 1}
    assert listing(".") == [".hidden", "plain.json"]


def test_a_state_that_cannot_be_pickled_changes_nothing(tmp_path):
    path = tmp_path / "x.pt"
    ckpt.atomic_torch_save({"a": 1}, path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="half-way"):
        ckpt.atomic_torch_save({"a": torch.ones(10), "b": Unpicklable()}, path)
    assert path.read_bytes() == before
    assert listing(tmp_path) == ["x.pt"]


def test_json_that_cannot_be_written_touches_nothing(tmp_path):
    with pytest.raises(TypeError):
        ckpt.atomic_json_dump({"a": object()}, tmp_path / "new" / "x.json")
    assert listing(tmp_path) == []


@both
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_mode_follows_the_umask_which_is_never_set(tmp_path, save, umask, mode, monkeypatch):
    before = os.umask(umask)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", None)
            save(tmp_path / "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == mode


@both
def test_tmpdir_is_of_no_concern(tmp_path, save, monkeypatch):
    monkeypatch.setenv("TMPDIR", "/nowhere")
    save(tmp_path / "x")
    assert listing(tmp_path) == ["x"]


def record_calls(monkeypatch, fail=None, error=None):
    """Record fsync and replace, passing them on; the call named `fail` raises `error` instead."""
    calls, fsync, replace = [], os.fsync, os.replace

    def spy_fsync(descriptor):
        kind = "directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        calls.append(f"fsync {kind}")
        if calls[-1] == fail:
            raise error
        fsync(descriptor)

    def spy_replace(source, target):
        size = os.path.getsize(source)
        calls.append("replace")
        assert size > 0, "renamed before its bytes were written"
        if fail == "replace":
            raise error
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    return calls


@both
def test_order_of_the_four_steps(tmp_path, save, monkeypatch):
    calls = record_calls(monkeypatch)
    save(tmp_path / "x")
    assert calls == ["fsync file", "replace", "fsync directory"]
    calls.clear()
    save(tmp_path / "a" / "b" / "x")  # the parents of the two new directories are synced first
    assert calls == ["fsync directory"] * 2 + ["fsync file", "replace", "fsync directory"]
    calls.clear()
    save(tmp_path / "x", fsync=False)
    assert calls == ["replace"]


@both
@pytest.mark.parametrize("step", ["fsync file", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EINVAL])
def test_each_step_that_fails_leaves_the_old_file(tmp_path, save, step, code, monkeypatch):
    path = tmp_path / "x"
    save(path)
    before = path.read_bytes()
    record_calls(monkeypatch, step, OSError(code, os.strerror(code)))
    with pytest.raises(OSError, match="x") as caught:
        save(path)
    assert (caught.value.errno, caught.value.filename) == (code, str(path))
    assert path.read_bytes() == before
    assert listing(tmp_path) == ["x"]


@both
@pytest.mark.parametrize(
    ("code", "raises"),
    [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.ENOSPC, True), (errno.EIO, True)],
)
def test_a_directory_that_cannot_be_synced(tmp_path, save, code, raises, monkeypatch):
    record_calls(monkeypatch, "fsync directory", OSError(code, os.strerror(code)))
    expected = pytest.raises(OSError, match=str(tmp_path)) if raises else contextlib.nullcontext()
    with expected as caught:
        save(tmp_path / "x")
    assert not raises or caught.value.errno == code
    assert listing(tmp_path) == ["x"]


def save_beyond_the_limit(path):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    for state in ({"a": torch.ones(100_000)}, {"a": [torch.ones(2000) for _ in range(100)]}):
        with pytest.raises(OSError, match=re.escape(str(path))) as caught:
            ckpt.atomic_torch_save(state, path)
        assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    with pytest.raises(OSError, match=re.escape(str(path))) as caught:
        ckpt.atomic_json_dump("x" * 200_000, path)
    assert caught.value.errno == errno.EFBIG


def test_no_room_for_the_bytes_is_an_oserror_with_errno_and_filename(tmp_path):
    path = tmp_path / "x.pt"
    ckpt.atomic_torch_save({"a": 1}, path)
    in_child(save_beyond_the_limit, path)
    assert torch.load(path) == {"a": 1}
    assert listing(tmp_path) == ["x.pt"]


def test_a_runtime_error_of_the_users_own_is_not_taken_for_a_full_disk(tmp_path):
    class Bad:
        def __reduce__(self):
            try:
                open("/nowhere/at/all")  # noqa: SIM115
            except OSError:
                raise RuntimeError("mine") from None

    with pytest.raises(RuntimeError, match="mine"):
        ckpt.atomic_torch_save([Bad()], tmp_path / "x")

    class Worse:
        def __reduce__(self):
            raise RuntimeError("mine")

    def save_after_trouble():
        try:
            raise OSError(errno.EIO, "another file")
        except OSError:
            ckpt.atomic_torch_save([Worse()], tmp_path / "x")

    with pytest.raises(RuntimeError, match="mine"):
        save_after_trouble()


@both
def test_the_destination_is_a_directory(tmp_path, save):
    (tmp_path / "x").mkdir()
    with pytest.raises(OSError, match="x"):
        save(tmp_path / "x")
    assert listing(tmp_path) == ["x"]


@both
def test_a_path_without_a_name(tmp_path, save):
    with pytest.raises(ValueError, match="path"):
        save("")


def test_readers_never_see_a_part_of_the_pointer(tmp_path):
    seen, stop = set(), threading.Event()
    ckpt.atomic_json_dump({"step": 0}, tmp_path / "latest.json")

    def read():
        while not stop.is_set():
            names = listing(tmp_path)
            assert "latest.json" in names
            seen.add(json.loads((tmp_path / "latest.json").read_bytes())["step"])

    thread = threading.Thread(target=read)
    thread.start()
    for step in range(1, 301):
        ckpt.atomic_json_dump({"step": step}, tmp_path / "latest.json", fsync=False)
    stop.set()
    thread.join()
    assert len(seen) > 1
    assert listing(tmp_path) == ["latest.json"]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="not on this system")
def test_large_files_start_for_the_disk_while_they_are_written(tmp_path, monkeypatch):
    def advise(descriptor, offset, length, advice):
        assert os.fstat(descriptor).st_size == offset + length
        advised.append((offset, offset + length))
        raise OSError(errno.EINVAL, "not here")  # which is no reason not to save

    advised = []
    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(ckpt, "_PIECE", 1 << 16)
    state = [torch.ones(1 << 15), *torch.ones(9, 1 << 11).unbind(), torch.ones(3)]
    ckpt.atomic_torch_save(state, tmp_path / "x.pt")
    assert advised[0][0] == 0
    assert all(start == end for (_, end), (start, _) in itertools.pairwise(advised))
    assert advised[-1][1] == 3 << 16
    assert len(advised) == 3
    same(torch.load(tmp_path / "x.pt"), state)
    ckpt.atomic_torch_save(state, tmp_path / "x.pt", fsync=False)
    assert len(advised) == 3


class Signals:
    """Sends this process signals when it is pickled."""

    def __init__(self, *numbers):
        self.numbers = numbers

    def __reduce__(self):
        for number in self.numbers:
            os.kill(os.getpid(), number)
        return (int, ())


def test_the_first_ctrl_c_is_obeyed_after_the_save_the_second_at_once(tmp_path):
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        ckpt.atomic_torch_save([Signals(signal.SIGINT)], tmp_path / "one.pt")
    assert torch.load(tmp_path / "one.pt", weights_only=False) == [0]
    with pytest.raises(KeyboardInterrupt):
        ckpt.atomic_torch_save([Signals(signal.SIGINT, signal.SIGINT)], tmp_path / "two.pt")
    assert listing(tmp_path) == ["one.pt"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_of_the_programs_own_run_after_the_save(tmp_path):
    def leave(number, frame):
        raise SystemExit(3 if (tmp_path / "x.pt").exists() else 4)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises(SystemExit, match="3"):
            ckpt.atomic_torch_save([Signals(signal.SIGTERM)], tmp_path / "x.pt")
        assert signal.getsignal(signal.SIGTERM) is leave
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ckpt.atomic_torch_save([Signals(signal.SIGTERM)], tmp_path / "x.pt")
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, previous)


def save_under_fire(directory):
    """Foreground saves, interrupted at random moments."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    rng, manager, interrupted = random.Random(1), CheckpointManager(directory, fsync=False), 0
    for step in range(1, 300):
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.00001, 0.004))
            manager.save(step, {"step": step, "w": torch.ones(300_000)})
            time.sleep(0.004)
        except KeyboardInterrupt:
            interrupted += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert interrupted > 50


def test_ctrl_c_in_a_save_is_a_keyboard_interrupt_and_nothing_else(tmp_path):
    in_child(save_under_fire, tmp_path)
    ckpt.verify_checkpoint(CheckpointManager(tmp_path).latest_path())


def test_threads_that_save_to_one_path_leave_one_whole_file(tmp_path):
    def save(value):
        for _ in range(20):
            ckpt.atomic_torch_save({"v": torch.full((5000,), value)}, tmp_path / "x", fsync=False)

    threads = [threading.Thread(target=save, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.load(tmp_path / "x")["v"].unique().numel() == 1
    assert listing(tmp_path) == ["x"]


# --------------------------------------------------------------------------------------------------
# verify_checkpoint
# --------------------------------------------------------------------------------------------------
def test_verify_finds_the_flipped_bit_that_torch_load_does_not(tmp_path):
    path = tmp_path / "x.pt"
    ckpt.atomic_torch_save({"a": torch.zeros(1000), "b": torch.zeros(10)}, path)
    ckpt.verify_checkpoint(path)
    flip_in(path)
    assert torch.load(path)["a"].count_nonzero() == 1
    with pytest.raises(CheckpointError, match="data/0") as caught:
        ckpt.verify_checkpoint(path)
    assert caught.value.path == path


def test_no_flipped_bit_anywhere_goes_unseen(tmp_path):
    """Every bit of the zip's directory, and each third one of the records before it."""
    path, state = tmp_path / "x.pt", {"a": torch.arange(20), "b": "text", "c": [1, 2.5]}
    ckpt.atomic_torch_save(state, path)
    whole, found = path.read_bytes(), 0
    with zipfile.ZipFile(path) as archive:
        directory = archive.start_dir
    bits = [*range(0, 8 * directory, 3), *range(8 * directory, 8 * len(whole))]
    for bit in bits:
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            ckpt.verify_checkpoint(path)
        except CheckpointError:
            found += 1
        else:
            same(torch.load(path), state)  # a bit of padding or of a date
    assert found > len(bits) / 4


@pytest.mark.parametrize("size", [0, 1, 30, 500, -200, -22, -1])
def test_verify_finds_truncation(tmp_path, size):
    path = tmp_path / "x.pt"
    ckpt.atomic_torch_save({"a": torch.arange(1000)}, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        ckpt.verify_checkpoint(path)


def test_verify_never_unpickles(tmp_path):
    ckpt.atomic_torch_save({"a": Marker(tmp_path / "made")}, tmp_path / "x.pt")
    ckpt.verify_checkpoint(tmp_path / "x.pt")
    assert listing(tmp_path) == ["x.pt"]


def test_what_is_not_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"nothing\.pt"):
        ckpt.verify_checkpoint(tmp_path / "nothing.pt")
    with pytest.raises(CheckpointError):
        ckpt.verify_checkpoint(tmp_path)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(CheckpointError, match="text"):
        ckpt.verify_checkpoint(tmp_path / "text")
    np.savez(tmp_path / "arrays.npz", a=np.ones(3))
    with pytest.raises(CheckpointError, match=r"data\.pkl"):
        ckpt.verify_checkpoint(tmp_path / "arrays.npz")


def test_files_without_checksums_are_not_damaged(tmp_path, warned):
    path = tmp_path / "legacy.pt"
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    ckpt.verify_checkpoint(path)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(3)}, tmp_path / "unchecked.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    ckpt.verify_checkpoint(tmp_path / "unchecked.pt")
    assert len(warned()) == 2
    assert all("checksums" in message for message in warned())


# --------------------------------------------------------------------------------------------------
# CheckpointManager
# --------------------------------------------------------------------------------------------------
def manager_with(directory, steps, **options):
    options = {"keep_last": None, "fsync": False, **options}
    manager = CheckpointManager(directory, **options)
    for step in steps:
        manager.save(step, {"step": step})
    return manager


def test_layout_and_pointer(tmp_path):
    manager = CheckpointManager(tmp_path / "run", every_steps=2)
    assert manager.save(2, {"a": 1}) == tmp_path / "run" / "step_000000000002.pt"
    manager.save(4, {"a": 2})
    names = ["latest.json", "step_000000000002.pt", "step_000000000004.pt"]
    assert listing(tmp_path / "run") == names
    pointer = (tmp_path / "run" / "latest.json").read_text()
    assert json.loads(pointer) == {"step": 4, "file": "step_000000000004.pt"}
    assert "\n  " in pointer


def test_path_for_has_twelve_digits(tmp_path):
    manager = CheckpointManager(tmp_path)
    assert manager.path_for(7) == tmp_path / "step_000000000007.pt"
    assert manager.path_for(np.int64(10**12)).name == "step_1000000000000.pt"
    with pytest.raises(ValueError, match="-1"):
        manager.path_for(-1)
    with pytest.raises(TypeError, match=r"1\.5"):
        manager.path_for(1.5)


@pytest.mark.parametrize("enabled", [True, False])
def test_should_save_at_positive_multiples_when_enabled(tmp_path, enabled):
    manager = CheckpointManager(tmp_path, every_steps=3, enabled=enabled)
    expected = [3, 6, 9] if enabled else []
    assert [step for step in range(-3, 10) if manager.should_save(step)] == expected


@pytest.mark.parametrize("name", ["every_steps", "keep_last", "keep_every"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True])
def test_bad_arguments_are_named_before_anything_is_touched(tmp_path, name, value):
    kind = ValueError if type(value) is int else TypeError
    with pytest.raises(kind, match=f"{name}.*{value}"):
        CheckpointManager(tmp_path / "new", enabled=False, **{name: value})
    assert listing(tmp_path) == []


@pytest.mark.parametrize("state", [None, [1], nn.Linear(1, 1), "x"], ids=repr)
@pytest.mark.parametrize("background", [False, True])
def test_what_could_not_be_loaded_is_not_saved(tmp_path, state, background):
    manager = CheckpointManager(tmp_path / "c", background=background)
    with pytest.raises(TypeError, match="state must be of type dict"):
        manager.save(1, state)
    assert listing(tmp_path) == []


def test_an_empty_name_is_no_directory():
    with pytest.raises(ValueError, match="directory must name one, got ''"):
        CheckpointManager("")


def test_an_optimizer_of_another_model_is_warned_about(warned):
    model, other = Weight(), Weight()
    Trainer(model, torch.optim.SGD([*other.parameters(), *model.parameters()]), [])
    assert warned() == []
    Trainer(model, torch.optim.SGD(other.parameters()), [])
    assert warned() == ["optimizer holds no parameter of the model: was it made for another one?"]


def test_save_asks_neither_enabled_nor_should_save(tmp_path):
    CheckpointManager(tmp_path, every_steps=5, enabled=False).save(3, {"a": 1})
    assert CheckpointManager(tmp_path).load_latest() == {"a": 1}


def test_an_empty_or_missing_directory(tmp_path):
    for directory in (tmp_path, tmp_path / "missing"):
        manager = CheckpointManager(directory)
        manager.prune()
        assert manager.load_latest() is None
        assert manager.load_latest(fallback=True) is None
        assert manager.latest_path() is None
        assert manager.steps() == []
        with pytest.raises(CheckpointError, match=re.escape(str(directory))):
            manager.copy_to(tmp_path / "x.pt")
    assert listing(tmp_path) == []


def test_pointer_is_trusted_though_a_higher_file_is_there(tmp_path):
    manager = manager_with(tmp_path, [2, 4])
    ckpt.atomic_torch_save({"step": 6}, manager.path_for(6))  # died before the pointer
    assert manager.latest_path() == manager.path_for(4)
    assert manager.load_latest() == {"step": 4}
    assert manager.steps() == [2, 4, 6]


def test_pointer_may_name_any_file_of_the_directory(tmp_path):
    manager = manager_with(tmp_path, [2, 4])
    ckpt.atomic_torch_save({"step": "best"}, tmp_path / "best.pt")
    ckpt.atomic_json_dump({"step": 2, "file": "best.pt"}, tmp_path / "latest.json")
    assert manager.load_latest() == {"step": "best"}


def test_without_the_pointers_file_the_highest_step_is_taken(tmp_path):
    manager = manager_with(tmp_path, [2, 4, 10])
    manager.path_for(10).unlink()
    assert manager.latest_path() == manager.path_for(4)
    (tmp_path / "latest.json").unlink()
    assert manager.latest_path() == manager.path_for(4)


POINTERS = [
    b"", b"{", b"[]", b"null", b"3", b'"x"', b"{}", b"\xff\xfe", b'{"file": 3}', b'{"file": null}',
    b'{"file": ""}', b'{"file": "."}', b'{"file": ".."}', b'{"file": "../out.pt"}',
    b'{"file": "link.pt"}', b'{"file": "sub/in.pt"}', b'{"file": "sub\\\\in.pt"}',
    b'{"file": "a\\u0000b"}', b'{"file": "sub"}', b'{"file": "OUTSIDE"}', b"[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("pointer", POINTERS, ids=range(len(POINTERS)))
def test_a_damaged_pointer_or_one_that_leaves_the_directory_is_ignored(tmp_path, pointer, warned):
    run = tmp_path / "run"
    manager = manager_with(run, [2, 4])
    (run / "sub").mkdir()
    for outside in (tmp_path / "out.pt", run / "sub" / "in.pt"):
        ckpt.atomic_torch_save({"step": "outside"}, outside)
    (run / "link.pt").symlink_to(tmp_path / "out.pt")
    outside = str(tmp_path / "out.pt").encode()
    (run / "latest.json").write_bytes(pointer.replace(b"OUTSIDE", outside))
    assert manager.load_latest() == {"step": 4}
    assert any("latest.json is ignored" in message for message in warned())


def test_only_regular_files_with_the_exact_name_count(tmp_path):
    manager = manager_with(tmp_path, [100])
    (tmp_path / "latest.json").unlink()
    strange = [
        "step_000000000200.pt.bak", "old_step_000000000200.pt", "step_.pt", "step_-5.pt",
        "step_٩٩.pt", ".step_000000000200.pt.tmp-1", "step_000000000300.PT", "step_1e3.pt",
        "step_000000000400.pt ", "step_000000000400.pt\n",
    ]  # fmt: skip
    for name in strange:
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "step_000000000500.pt").mkdir()
    (tmp_path / "step_000000000600.pt").symlink_to(tmp_path.parent)
    ckpt.atomic_torch_save({}, tmp_path.parent / "foreign.pt")
    (tmp_path / "step_000000000700.pt").symlink_to(tmp_path.parent / "foreign.pt")
    before = set(listing(tmp_path))
    assert manager.steps() == [100]
    assert manager.load_latest(fallback=True) == {"step": 100}
    CheckpointManager(tmp_path, keep_last=1, fsync=False).save(800, {})
    gone = {"step_000000000100.pt"}
    assert set(listing(tmp_path)) == before - gone | {"step_000000000800.pt", "latest.json"}


def test_a_directory_that_is_itself_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert manager_with(tmp_path / "link", [1]).load_latest() == {"step": 1}


def test_steps_are_numbers_not_text(tmp_path):
    for name in ("step_000000000100.pt.bak", "old_step_000000000100.pt"):
        (tmp_path / name).write_bytes(b"foreign")
    manager = manager_with(tmp_path, range(9000, 10001, 100), keep_last=10)
    assert manager.steps() == list(range(9100, 10001, 100))
    manager = manager_with(tmp_path, [999_999_999_999, 1_000_000_000_000], keep_last=1)
    assert manager.steps() == [1_000_000_000_000]
    assert (tmp_path / "old_step_000000000100.pt").read_bytes() == b"foreign"
    assert (tmp_path / "step_000000000100.pt.bak").read_bytes() == b"foreign"


def test_keep_last(tmp_path):
    assert manager_with(tmp_path / "a", range(1, 8), keep_last=3).steps() == [5, 6, 7]
    assert manager_with(tmp_path / "b", range(1, 8), keep_last=1).steps() == [7]
    assert manager_with(tmp_path / "c", range(1, 8), keep_last=None).steps() == list(range(1, 8))
    assert CheckpointManager(tmp_path / "d").keep_last == 3


def test_keep_every_files_stay_and_do_not_count(tmp_path):
    manager = manager_with(tmp_path, range(1, 12), keep_last=2, keep_every=5)
    assert manager.steps() == [5, 9, 10, 11]


def test_a_rewound_run_keeps_its_files_and_is_warned_once(tmp_path, warned):
    manager_with(tmp_path, [500, 600, 700], keep_last=3)
    manager = manager_with(tmp_path, [100], keep_last=3)
    assert manager.load_latest() == {"step": 100}
    assert manager.steps() == [100, 500, 600, 700]
    for step in (200, 300, 400):
        manager.save(step, {"step": step})
    assert manager.steps() == [200, 300, 400, 500, 600, 700]
    assert [m for m in warned() if "[500, 600, 700]" in m] == warned()
    assert len(warned()) == 1


def test_prune_keeps_what_the_pointer_names(tmp_path):
    manager = manager_with(tmp_path, [1, 2, 3, 4, 5])
    ckpt.atomic_json_dump({"step": 3, "file": "step_000000000003.pt"}, tmp_path / "latest.json")
    CheckpointManager(tmp_path, keep_last=1).prune()
    assert manager.steps() == [3, 4, 5]


def test_a_file_that_another_process_deletes_first_is_no_concern(tmp_path, monkeypatch):
    manager = manager_with(tmp_path, [1, 2, 3])
    unlink = os.unlink

    def too_late(path, *args, **kwargs):
        unlink(path)
        unlink(path, *args, **kwargs)

    monkeypatch.setattr(os, "unlink", too_late)
    manager.keep_last = 1
    manager.prune()
    assert manager.steps() == [3]


def test_a_file_that_cannot_be_deleted_is_logged(tmp_path, monkeypatch, warned):
    manager = manager_with(tmp_path, [1, 2], keep_last=1)

    def refuse(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, "in use", str(path))

    monkeypatch.setattr(os, "unlink", refuse)
    manager.save(3, {"step": 3})
    monkeypatch.undo()
    assert manager.load_latest() == {"step": 3}
    assert "step_000000000002.pt" in warned()[0]


def test_a_step_saved_again_is_replaced(tmp_path):
    manager = manager_with(tmp_path, [1, 2])
    manager.save(2, {"step": "again"})
    assert manager.load_latest() == {"step": "again"}
    assert manager.steps() == [1, 2]


def test_each_save_writes_its_data_once(tmp_path, monkeypatch):
    calls = record_calls(monkeypatch)
    manager = manager_with(tmp_path, [1, 2, 3])
    assert calls == ["replace"] * 6  # a file and a pointer each
    assert (tmp_path / "latest.json").stat().st_size < 1000
    assert manager.load_latest() == {"step": 3}


@pytest.mark.parametrize("step", [3, 2])
@pytest.mark.parametrize("failing", ["data", "pointer"])
def test_a_failed_save_leaves_everything_as_it_was(tmp_path, step, failing, monkeypatch):
    manager = manager_with(tmp_path, [1, 2], keep_last=1)
    before = {name: (tmp_path / name).read_bytes() for name in listing(tmp_path)}
    replace = os.replace

    def refuse(source, target):
        if str(target).endswith("latest.json"):
            raise OSError(errno.EIO, "bad disk", str(target))
        replace(source, target)

    if failing == "data":
        with pytest.raises(ValueError, match="half-way"):
            manager.save(step, {"a": Unpicklable()})
    else:
        monkeypatch.setattr(os, "replace", refuse)
        with pytest.raises(OSError, match="bad disk"):
            manager.save(step, {"step": 2})
    assert {name: (tmp_path / name).read_bytes() for name in listing(tmp_path)} == before


def test_a_failed_sync_of_the_pointer_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    manager, syncs, fsync = CheckpointManager(tmp_path), [], os.fsync

    def refuse_the_last(descriptor):
        syncs.append(descriptor)
        if len(syncs) == 4:
            raise OSError(errno.EIO, "bad disk")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_the_last)
    with pytest.raises(OSError, match="bad disk"):
        manager.save(1, {"step": 1})
    assert manager.load_latest() == {"step": 1}


def test_a_file_where_the_directory_should_be(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(OSError, match="run"):
        CheckpointManager(tmp_path / "run").save(1, {})
    assert (tmp_path / "run").read_text() == "mine"


def save_read_only(directory):
    CheckpointManager(directory).load_latest()  # torch imports what it needs while it can be read
    if os.getuid() == 0:
        os.setuid(65534)  # root may write anywhere
    with pytest.raises(PermissionError, match=re.escape(str(directory))):
        CheckpointManager(directory).save(2, {"step": 2})
    assert CheckpointManager(directory).load_latest() == {"step": 1}


def test_a_directory_that_may_only_be_read():
    directory = Path("/tmp") / f"ckpt-read-only-{os.getpid()}"
    try:
        manager_with(directory, [1])
        directory.chmod(0o555)
        in_child(save_read_only, directory)
        assert listing(directory) == ["latest.json", "step_000000000001.pt"]
    finally:
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()


def look_without_permission(directory, what):
    CheckpointManager(directory / "good").load_latest()
    if os.getuid() == 0:
        os.setuid(65534)
    if what == "directory":
        for fallback in (False, True):
            with pytest.raises(PermissionError):
                CheckpointManager(directory / "good").load_latest(fallback=fallback)
    for command in (["ls", "--verify"], ["verify"]):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert ckpt.main([command[0], str(directory / "good"), *command[1:]]) == 2
        if what == "file":
            assert printed.getvalue().count("cannot be read: Permission denied") == 1
            assert printed.getvalue().count("whole") == 2


@pytest.mark.parametrize("what", ["directory", "file"])
def test_what_may_not_be_read_is_not_taken_for_nothing(what):
    directory = Path(tempfile.mkdtemp(dir="/tmp", prefix="ckpt-unreadable-"))
    try:
        directory.chmod(0o755)
        manager = manager_with(directory / "good", [1, 2, 3])
        (directory / "good").chmod(0o744 if what == "directory" else 0o755)
        manager.path_for(2).chmod(0o600)
        in_child(look_without_permission, directory, what)
    finally:
        shutil.rmtree(directory)


def test_load_is_on_the_cpu_and_unpickles_by_default(tmp_path):
    ckpt.atomic_torch_save({"a": Marker(tmp_path / "made")}, tmp_path / "step_000000000001.pt")
    CheckpointManager(tmp_path).load_latest()
    assert (tmp_path / "made").is_dir()


def test_weights_only_runs_no_pickled_code(tmp_path):
    ckpt.atomic_torch_save({"a": Marker(tmp_path / "made")}, tmp_path / "step_000000000001.pt")
    with pytest.raises(CheckpointError, match="step_000000000001") as caught:
        CheckpointManager(tmp_path, weights_only=True).load_latest()
    assert (caught.value.path, caught.value.step) == (tmp_path / "step_000000000001.pt", 1)
    assert not (tmp_path / "made").exists()


def spoil(path, how):
    if how == "flipped":
        flip_in(path)
    elif how == "list":
        torch.save([1, 2], path)
    elif how == "no zip":
        path.write_bytes(b"not a checkpoint")
    else:
        path.write_bytes(path.read_bytes()[: 0 if how == "empty" else 300])


DAMAGE = ["flipped", "list", "no zip", "empty", "truncated"]


@pytest.mark.parametrize("how", DAMAGE[1:])
def test_damage_is_an_error_that_names_the_file_and_no_older_one_is_tried(tmp_path, how):
    manager = manager_with(tmp_path, [1, 2])
    spoil(manager.path_for(2), how)
    with pytest.raises(CheckpointError, match="fallback=True") as caught:
        manager.load_latest()
    assert (caught.value.path, caught.value.step) == (manager.path_for(2), 2)


@pytest.mark.parametrize("how", DAMAGE)
def test_fallback_takes_the_newest_whole_one(tmp_path, how, warned):
    manager = CheckpointManager(tmp_path, keep_last=None)
    for step in (1, 2, 3, 4):
        manager.save(step, {"step": step, "t": torch.zeros(1000)})
    ckpt.atomic_json_dump({"step": 3, "file": "step_000000000003.pt"}, tmp_path / "latest.json")
    assert manager.load_latest(fallback=True)["step"] == 3
    spoil(manager.path_for(3), how)
    spoil(manager.path_for(2), how)
    assert manager.load_latest(fallback=True)["step"] == 1
    assert [n for n in (1, 2, 3, 4) for m in warned() if f"{n}.pt" in m] == [2, 3]


def test_fallback_with_nothing_whole_left_names_them_all(tmp_path):
    manager = manager_with(tmp_path, [1, 2, 3])
    for step, how in zip((1, 2, 3), ("empty", "list", "truncated"), strict=True):
        spoil(manager.path_for(step), how)
    with pytest.raises(CheckpointError, match=r"0003.*0002.*0001"):
        manager.load_latest(fallback=True)


def test_fallback_passes_a_legacy_file_and_finds_a_cut_one(tmp_path):
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        state = {"step": step, "t": torch.zeros(1000)}
        torch.save(state, manager.path_for(step), _use_new_zipfile_serialization=False)
    assert manager.load_latest()["step"] == 2
    spoil(manager.path_for(2), "truncated")
    assert manager.load_latest(fallback=True)["step"] == 1


@pytest.mark.parametrize("fallback", [True, False])
def test_a_reader_keeps_up_with_a_writer_that_prunes(tmp_path, fallback):
    def write():
        for step in range(1, 200):
            manager.save(step, {"step": step})

    manager = CheckpointManager(tmp_path, keep_last=1, fsync=False)
    manager.save(0, {"step": 0})
    writer, seen = threading.Thread(target=write), [0]
    writer.start()
    while writer.is_alive():
        seen.append(CheckpointManager(tmp_path).load_latest(fallback=fallback)["step"])
    writer.join()
    assert seen == sorted(seen)
    assert len(set(seen)) > 3


def test_a_file_pruned_just_after_the_pointer_was_read(tmp_path, monkeypatch, warned):
    writer, stat = manager_with(tmp_path, [1], keep_last=1), os.stat

    def save_first(path, **options):
        monkeypatch.setattr(os, "stat", stat)
        writer.save(2, {"step": 2})
        ckpt.atomic_torch_save({"step": 3}, writer.path_for(3))  # whole, but nothing names it yet
        return stat(path, **options)

    reader = CheckpointManager(tmp_path)
    monkeypatch.setattr(os, "stat", save_first)
    assert reader.latest_path() == writer.path_for(2)
    assert warned() == []


def dead_pid():
    process = forks.Process(target=int)
    process.start()
    process.join()
    return process.pid


def test_stale_temporary_files_are_swept_at_a_save(tmp_path):
    dead, old = dead_pid(), time.time() - 1000
    mine, alive = os.getpid(), os.getppid()
    swept = [f".step_000000000001.pt.tmp-{dead}", f".latest.json.tmp-{mine}", f".b.pt.tmp-{dead}"]
    kept_old = [
        f".step_000000000001.pt.tmp-{alive}",
        ".notes",
        f"x.pt.tmp-{dead}",
        f".x.tmp-{dead}",
    ]
    kept_new = [f".step_000000000002.pt.tmp-{dead}", f".step_000000000002.pt.tmp-{mine}"]
    for name in [*swept, *kept_old, *kept_new]:
        (tmp_path / name).write_bytes(b"x")
        if name not in kept_new:
            os.utime(tmp_path / name, (old, old))
    manager = manager_with(tmp_path, [3])
    names = ["latest.json", "step_000000000003.pt", *kept_old, *kept_new]
    assert listing(tmp_path) == sorted(names)
    assert manager.steps() == [3]


def test_a_temporary_file_in_use_is_not_swept(tmp_path):
    manager, done = CheckpointManager(tmp_path), []

    class Slow:
        def __reduce__(self):
            name = next(n for n in listing(tmp_path) if n.startswith(".best.pt"))
            os.utime(tmp_path / name, (0, 0))
            manager.save(1, {"step": 1})
            done.append(name in listing(tmp_path))
            return (int, ())

    ckpt.atomic_torch_save([Slow()], tmp_path / "best.pt")
    assert done == [True]
    assert torch.load(tmp_path / "best.pt", weights_only=False) == [0]


def test_copy_to_a_path(tmp_path):
    manager = manager_with(tmp_path / "run", [1, 2])
    out = tmp_path / "out"
    assert manager.copy_to(out / "best.pt") == out / "best.pt"
    assert torch.load(out / "best.pt") == {"step": 2}
    assert manager.copy_to(str(out)) == out / "step_000000000002.pt"
    assert manager.copy_to(f"{tmp_path}/new/") == tmp_path / "new" / "step_000000000002.pt"
    assert manager.copy_to(manager.path_for(1)) == manager.path_for(1)
    assert torch.load(manager.path_for(1)) == {"step": 2}
    assert listing(out) == ["best.pt", "step_000000000002.pt"]
    assert listing(tmp_path / "run") == ["latest.json"] + [f"step_{n:012d}.pt" for n in (1, 2)]


def test_copy_to_follows_the_pointer(tmp_path):
    manager = manager_with(tmp_path, [1, 2])
    ckpt.atomic_json_dump({"step": 1, "file": "step_000000000001.pt"}, tmp_path / "latest.json")
    assert torch.load(manager.copy_to(tmp_path / "best.pt")) == {"step": 1}


def test_copy_to_is_atomic(tmp_path, monkeypatch):
    manager = manager_with(tmp_path / "run", [1, 2])
    manager.copy_to(tmp_path / "best.pt")
    before = (tmp_path / "best.pt").read_bytes()
    record_calls(monkeypatch, "replace", OSError(errno.ENOSPC, "full"))
    with pytest.raises(OSError, match=r"best\.pt"):
        manager.copy_to(tmp_path / "best.pt")
    assert (tmp_path / "best.pt").read_bytes() == before
    assert listing(tmp_path) == ["best.pt", "run"]


def test_copy_to_a_url(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    manager = manager_with(tmp_path / "run", [1, 2])
    assert manager.copy_to("memory://a/best.pt") == "memory://a/best.pt"
    with fsspec.open("memory://a/best.pt") as file:
        assert torch.load(file) == {"step": 2}
    assert manager.copy_to("memory://b/") == "memory://b/step_000000000002.pt"
    fsspec.filesystem("memory").rm("/", recursive=True)
    assert manager.copy_to(f"file://{tmp_path}/c/best.pt") == tmp_path / "c" / "best.pt"
    assert listing(tmp_path / "c") == ["best.pt"]
    with pytest.raises(ValueError, match="nosuch"):
        manager.copy_to("nosuch://a/b")


# --------------------------------------------------------------------------------------------------
# Background saves
# --------------------------------------------------------------------------------------------------
@pytest.fixture
def gate(monkeypatch):
    """Writes wait at their first fsync until gate.set()."""
    gate, fsync = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: gate.wait(20) and fsync(descriptor))
    yield gate
    gate.set()
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        thread.join(20)


def behind(directory, **options):
    return CheckpointManager(directory, background=True, **options)


def test_save_returns_before_the_file_is_there_and_wait_when_it_is(tmp_path, gate):
    manager = behind(tmp_path)
    path = manager.save(1, {"step": 1})
    assert path == manager.path_for(1)
    assert not path.exists()
    gate.set()
    manager.wait()
    assert listing(tmp_path) == ["latest.json", path.name]
    assert manager.load_latest() == {"step": 1}
    manager.wait()  # nothing to wait for


def test_what_happens_after_the_call_is_not_in_the_file(tmp_path, gate):
    model, notes = nn.Linear(3, 2), {"seen": [1], "array": np.zeros(2)}
    manager = behind(tmp_path)
    saved = copy.deepcopy({"model": model.state_dict(), "notes": notes})
    manager.save(5, {"model": model.state_dict(), "notes": notes})
    with torch.no_grad():
        model.weight.zero_()
    notes["seen"].append(2)
    notes["array"][:] = 7
    gate.set()
    manager.wait()
    state = manager.load_latest()
    same(state["model"], saved["model"])
    assert state["notes"]["seen"] == [1]
    assert (state["notes"]["array"] == 0).all()


def test_file_pointer_and_payload_say_the_step_of_the_call(tmp_path, gate):
    trainer = make(tmp_path, every=4, background=True)
    trainer.checkpoint_manager.fsync = True
    trainer.on_step = lambda trainer, loss: trainer.step == 7 and gate.set()
    trainer.fit(7)  # steps 5 to 7 are made while that of 4 is written
    assert json.loads((tmp_path / "latest.json").read_text())["step"] == 4
    assert trainer.checkpoint_manager.load_latest()["step"] == 4
    expected = make(tmp_path / "other", every=4)
    expected.fit(4)
    same(trainer.checkpoint_manager.load_latest(), expected.checkpoint_manager.load_latest())


class Kind(torch.Tensor):
    """A tensor of a kind of its own."""


def everything():
    """A state with all kinds of tensors and other things in it."""
    base = torch.arange(40.0)
    tied = torch.randn(3, 2)
    nested = collections.OrderedDict(a=tied, b=[tied, (tied[1:], base.view(5, 8).t())])
    nested.note = "an attribute"
    loop = [torch.ones(2)]
    loop.append(loop)
    tagged = torch.ones(2)
    tagged.note = "an attribute"
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is in beta
        sparse_rows = torch.eye(3).to_sparse_csr()
        ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    return {
        "views": [base, base[3:9:2], base[:0], base.view(5, 8)[:, 1]],
        "kinds": [torch.ones(2, dtype=t) for t in (torch.bfloat16, torch.int8, torch.bool)],
        "wide": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "leaf": torch.ones(2, requires_grad=True),
        "branch": torch.ones(2, requires_grad=True) * 2,
        "parameter": nn.Parameter(torch.ones(3)),
        "frozen": nn.Parameter(torch.ones(3), requires_grad=False),
        "conjugate": conjugate,
        "negative": conjugate.clone().conj().imag,
        "meta": torch.ones(2, device="meta"),
        "tagged": tagged,
        "sparse": torch.eye(3).to_sparse(),
        "rows": sparse_rows,
        "ragged": ragged,
        "subclass": torch.ones(3).as_subclass(Kind),
        "hidden": collections.deque([(torch.ones(1, requires_grad=True) * 2).conj()]),
        "storage": torch.arange(3.0).untyped_storage(),
        "counts": collections.Counter("abca"),
        "numbers": (1, 2.5, None, "x", b"y", {3}, np.arange(3)),
        "namespace": types.SimpleNamespace(weight=tied),
        "nested": nested,
        "loop": loop,
    }


class Changing:
    """Loses a lock when it is pickled, and counts how often that was."""

    def __init__(self):
        self.lock, self.times = threading.Lock(), 0

    def __getstate__(self):
        state = {**self.__dict__, "times": self.times + 1}
        del state["lock"]
        return state


def test_the_file_is_byte_for_byte_that_of_a_save_in_the_foreground(tmp_path):
    state = {**everything(), "changing": Changing()}
    del state["negative"], state["storage"]  # whose bytes stand in the state as other types too
    data = CheckpointManager(tmp_path / "front").save(1, state).read_bytes()
    with behind(tmp_path / "back") as manager:
        for step in (1, 2):  # into fresh memory, and into what the first one used
            manager.save(step, state)
            manager.wait()
            assert manager.path_for(step).read_bytes() == data


def test_every_kind_of_tensor_survives(tmp_path):
    with behind(tmp_path) as manager:
        state = everything()
        manager.save(1, state)
        loaded = manager.load_latest()
    views = loaded["views"]
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1
    same(loaded["views"], state["views"])
    for name in ("wide", "expanded", "frozen", "parameter", "leaf", "branch"):
        assert torch.equal(loaded[name], state[name])
        assert loaded[name].stride() == state[name].stride()
        assert type(loaded[name]) is type(state[name])
        assert loaded[name].requires_grad == state[name].requires_grad
    assert loaded["conjugate"].tolist() == [1 - 2j, 3 + 4j]
    assert loaded["negative"].tolist() == [2, -4]
    assert loaded["meta"].is_meta
    assert loaded["tagged"].note == "an attribute"
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(loaded["rows"].to_dense(), torch.eye(3))
    assert type(loaded["subclass"]) is Kind
    assert torch.equal(loaded["namespace"].weight, state["namespace"].weight)
    tied = [loaded["nested"]["a"], loaded["namespace"].weight, loaded["nested"]["b"][0]]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tied}) == 1
    assert loaded["loop"][1] is loaded["loop"]
    assert loaded["nested"].note == "an attribute"
    assert loaded["counts"] == state["counts"]


def test_memory_is_used_again_and_shared_storages_take_it_once(tmp_path):
    manager, base = behind(tmp_path), torch.zeros(1000)
    buffers = []  # held, so that none is at the place of another
    for step in range(1, 5):
        manager.save(step, {"a": base, "b": base[:3], "c": base.view(10, 100), "d": torch.ones(5)})
        buffers += [b for bs in manager._snapshot._buffers.values() for b in bs]
        manager.wait()
    assert len({buffer.data_ptr() for buffer in buffers}) == 2
    manager.save(5, {"a": torch.zeros(70)})
    manager.wait()
    kept = [b.nbytes for bs in manager._snapshot._buffers.values() for b in bs]
    assert kept == [280]  # what is not needed any more is let go
    manager.close()
    assert not manager._snapshot._buffers
    manager.save(6, {"step": 6})
    assert manager.load_latest() == {"step": 6}


def test_a_save_that_cannot_be_taken_leaves_nothing_odd_behind(tmp_path):
    manager, state = behind(tmp_path), {"w": torch.ones(70)}
    with torch._subclasses.FakeTensorMode(), pytest.raises(RuntimeError, match="storage"):
        manager.save(1, state)
    manager.save(2, state)
    same(manager.load_latest(), state)


def test_a_save_waits_for_the_one_before_it(tmp_path, gate):
    manager = behind(tmp_path)
    manager.save(1, {"step": 1})
    threading.Timer(0.2, gate.set).start()
    manager.save(2, {"step": 2})
    assert manager.path_for(1).exists()
    assert json.loads((tmp_path / "latest.json").read_text())["step"] in (1, 2)
    manager.wait()
    assert manager.steps() == [1, 2]


READERS = {
    "load_latest": (lambda m: m.load_latest(), {"step": 2}),
    "latest_path": (lambda m: m.latest_path().name, "step_000000000002.pt"),
    "steps": (lambda m: m.steps(), [2]),
    "prune": (lambda m: m.prune() or listing(m.directory)[1:], ["step_000000000002.pt"]),
    "copy_to": (lambda m: torch.load(m.copy_to(m.directory / "best.pt")), {"step": 2}),
    "close": (lambda m: m.close() or m.steps(), [2]),
}


@pytest.mark.parametrize("name", READERS)
def test_whatever_reads_waits_for_the_write_in_flight(tmp_path, gate, name):
    read, expected = READERS[name]
    manager = behind(tmp_path, keep_last=1)
    gate.set()
    manager.save(1, {"step": 1})
    manager.wait()
    gate.clear()
    manager.save(2, {"step": 2})
    threading.Timer(0.1, gate.set).start()
    assert read(manager) == expected


def failing(directory, monkeypatch):
    """A manager whose save of step 2 has failed on the disk."""
    manager = behind(directory)
    manager.save(1, {"step": 1})
    manager.wait()
    with monkeypatch.context() as patch:
        record_calls(patch, "fsync file", OSError(errno.ENOSPC, "No space left on device"))
        manager.save(2, {"step": 2})
        manager._join()
    return manager


RAISING = {
    "save": lambda m: m.save(3, {"step": 3}),
    "wait": lambda m: m.wait(),
    "close": lambda m: m.close(),
    "copy_to": lambda m: m.copy_to(m.directory / "best.pt"),
    "with": lambda m: m.__enter__().__exit__(None, None, None),
}


@pytest.mark.parametrize("name", RAISING)
def test_a_failed_write_is_raised_once_and_the_checkpoint_before_stays(
    tmp_path, name, monkeypatch, warned
):
    manager = failing(tmp_path, monkeypatch)
    before = listing(tmp_path)
    with pytest.raises(CheckpointError, match=r"step 2 failed.*No space left") as caught:
        RAISING[name](manager)
    assert (caught.value.step, caught.value.path) == (2, manager.path_for(2))
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert any("step 2 failed" in message for message in warned())
    assert listing(tmp_path) == before == ["latest.json", "step_000000000001.pt"]
    manager.save(3, {"step": 3})
    manager.wait()
    assert manager.load_latest() == {"step": 3}


def test_readers_say_what_is_there_and_leave_the_error_to_the_next_save(tmp_path, monkeypatch):
    manager = failing(tmp_path, monkeypatch)
    assert (manager.steps(), manager.load_latest()) == ([1], {"step": 1})
    with pytest.raises(CheckpointError, match="step 2 failed"):
        manager.save(3, {"step": 3})


def test_an_error_in_the_block_is_not_hidden_by_that_of_a_write(tmp_path, gate, monkeypatch):
    def leave():
        with failing(tmp_path, monkeypatch) as manager:
            manager.save(2, {"step": 2}) if manager._failed is None else None
            raise ZeroDivisionError

    gate.set()
    with pytest.raises(ZeroDivisionError):
        leave()
    gate.clear()
    threading.Timer(0.1, gate.set).start()
    manager = behind(tmp_path)

    def leave_while_writing():
        with manager:
            manager.save(3, {"step": 3})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave_while_writing()
    assert CheckpointManager(tmp_path).load_latest() == {"step": 3}  # it was waited for
    assert not manager._snapshot._buffers


def test_what_cannot_be_saved_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    manager = behind(tmp_path)
    manager.save(1, {"step": 1})
    with pytest.raises(TypeError, match="pickle"):
        manager.save(2, {"lock": threading.Lock()})
    with pytest.raises(ValueError, match="half-way"):
        manager.save(2, {"a": Unpicklable()})
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        manager.save(2, {"a": lambda: 0})
    with pytest.raises(RuntimeError, match=r"float32 and as torch.int32"):
        manager.save(2, {"a": torch.ones(3), "b": (w := torch.ones(2)), "c": w.view(torch.int32)})
    assert manager.load_latest() == {"step": 1}
    assert listing(tmp_path) == ["latest.json", "step_000000000001.pt"]
    record_calls(monkeypatch, "replace", ZeroDivisionError("whatever it is"))
    manager.save(2, {"step": 2})
    with pytest.raises(CheckpointError, match=r"step 2 failed.*whatever it is"):
        manager.wait()
    assert listing(tmp_path) == ["latest.json", "step_000000000001.pt"]


def test_bad_arguments_are_refused_at_the_call(tmp_path):
    with pytest.raises(TypeError, match="step must be an int, got '3'"):
        behind(tmp_path).save("3", {})


def interrupted_in_a_wait(directory):
    fsync = os.fsync
    os.fsync = lambda descriptor: time.sleep(0.2) or fsync(descriptor)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    manager = behind(directory)
    for step, wait in ((1, manager.wait), (2, lambda: manager.save(3, content(3)))):
        manager.save(step, content(step))
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            wait()
        assert step not in CheckpointManager(directory).steps()
        manager.wait()
        same(CheckpointManager(directory).load_latest(), content(step))


def test_a_wait_that_ctrl_c_has_interrupted_can_be_waited_again(tmp_path):
    in_child(interrupted_in_a_wait, tmp_path)


@pytest.mark.parametrize("started", [True, False])
def test_ctrl_c_while_the_thread_is_started(tmp_path, started, monkeypatch):
    def start_and_stop(thread):
        if started:
            start(thread)
        raise KeyboardInterrupt

    start, manager, w = threading.Thread.start, behind(tmp_path), torch.ones(3_000_000)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_and_stop)
        with pytest.raises(KeyboardInterrupt):
            manager.save(1, {"w": w})
    w.fill_(2)
    manager.save(2, {"w": w})
    manager.wait()
    assert [set(torch.load(manager.path_for(s))["w"].tolist()) for s in manager.steps()] == (
        [{1.0}, {2.0}] if started else [{2.0}]
    )
    assert manager.latest_path() == manager.path_for(2)


def test_a_relative_directory_is_the_one_of_the_beginning(tmp_path, monkeypatch, gate):
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    manager = behind("run")
    manager.save(1, {"step": 1})
    monkeypatch.chdir(tmp_path)
    gate.set()
    manager.wait()
    assert listing(tmp_path) == ["a"]
    assert CheckpointManager(tmp_path / "a" / "run").steps() == manager.steps() == [1]


LEAVE = """
import atexit, os, signal, sys, threading, time, torch, ckpt
manager = ckpt.CheckpointManager(sys.argv[1], background=True)
state = {"a": [torch.ones(300_000) for _ in range(20)], "step": 1}
if sys.argv[2] == "end":
    manager.save(1, state)
elif sys.argv[2] == "raise":
    manager.save(1, state)
    raise SystemExit(3)
elif sys.argv[2] == "interrupt":
    fsync = os.fsync
    os.fsync = lambda descriptor: time.sleep(0.2) or fsync(descriptor)
    manager.save(1, state)
    threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
    manager.wait()
else:
    atexit.register(manager.save, 1, state)
"""


@pytest.mark.parametrize(
    ("how", "status"), [("end", 0), ("raise", 3), ("interrupt", -signal.SIGINT), ("atexit", 0)]
)
def test_leaving_the_interpreter_finishes_the_write(tmp_path, how, status):
    run = subprocess.run([sys.executable, "-c", LEAVE, tmp_path, how], cwd=ROOT, timeout=50)
    assert run.returncode == status
    assert CheckpointManager(tmp_path).load_latest()["step"] == 1
    assert listing(tmp_path) == ["latest.json", "step_000000000001.pt"]


def test_fit_returns_when_its_last_save_is_there(tmp_path, gate):
    threading.Timer(0.2, gate.set).start()
    trainer = make(tmp_path, every=3, background=True)
    trainer.checkpoint_manager.fsync = True
    trainer.fit(3)
    assert json.loads((tmp_path / "latest.json").read_text())["step"] == 3


@pytest.mark.parametrize("save_final", [False, True])
@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_failed_is_made_up_for_as_fit_ends(tmp_path, background, save_final):
    directory, last = tmp_path / "c", 6 if save_final else 4
    options = {"background": background, "trainer": {"save_final": save_final}}
    trainer = make(directory, every=2, **options)
    trainer.fit(2)
    shutil.move(directory, tmp_path / "moved")
    directory.touch()
    with pytest.raises((OSError, CheckpointError)):
        trainer.fit(last)
    with pytest.raises((OSError, CheckpointError)):
        trainer.fit(last)
    directory.unlink()
    shutil.move(tmp_path / "moved", directory)
    assert trainer.fit(last).steps == trainer.step
    assert trainer.checkpoint_manager.steps()[-1] == trainer.step
    before = trainer.checkpoint_manager.latest_path().stat().st_mtime_ns
    trainer.fit(trainer.step)
    assert trainer.checkpoint_manager.latest_path().stat().st_mtime_ns == before


def test_fit_raises_what_became_of_its_last_save(tmp_path, monkeypatch):
    trainer = make(tmp_path, every=3, background=True)
    record_calls(monkeypatch, "replace", OSError(errno.EIO, "bad disk"))
    with pytest.raises(CheckpointError, match="step 3 failed"):
        trainer.fit(4)
    assert trainer.step == 4
    assert listing(tmp_path) == []


def stop_in_a_slow_write(directory):
    fsync, entered = os.fsync, []

    def slow(descriptor):
        entered.append(time.sleep(0.1))
        fsync(descriptor)

    os.fsync = slow
    trainer = make(
        directory, every=1000, background=True, trainer={"save_on_signal": [signal.SIGTERM]}
    )
    trainer.checkpoint_manager.fsync = True
    trainer.on_step = lambda t, loss: t.step == 5 and os.kill(os.getpid(), signal.SIGTERM)
    assert trainer.fit(100).stop_reason == "SIGTERM"
    assert len(entered) == 4
    os._exit(7)  # so that nothing but fit can have waited


def test_a_save_on_a_signal_is_finished_before_fit_returns(tmp_path):
    in_child(stop_in_a_slow_write, tmp_path, exitcode=7)
    assert CheckpointManager(tmp_path).load_latest()["step"] == 5


def test_a_background_run_resumes_to_the_bit(tmp_path):
    whole = make(tmp_path / "whole", every=3, trainer={"exact_resume": True})
    whole.fit(20)
    for steps in (7, 20):
        trainer = make(tmp_path / "b", every=3, background=True, trainer={"exact_resume": True})
        trainer.resume()
        trainer.fit(steps)
    same(trainer.state_dict(), whole.state_dict())


def test_a_process_forked_during_a_write_has_none_in_flight(tmp_path, gate):
    manager = behind(tmp_path)
    manager.save(1, {"step": 1})
    pid = os.fork()
    if pid == 0:
        os._exit(0 if manager.steps() == [] else 1)
    assert os.waitpid(pid, 0)[1] == 0


# --------------------------------------------------------------------------------------------------
# Crashes
# --------------------------------------------------------------------------------------------------
class Disk:
    """Stands between ckpt and the files below a directory, and notes each operation.

    ``at(number, kind)`` is called before each. Larger writes are two operations, so that a file can
    be cut short. Kinds: mkdir, create, write, fsync, rename, unlink, sync directory.
    """

    def __init__(self, root, at=lambda number, kind: None):
        self.root, self.at, self.operations = str(root), at, []
        self.files = {}  # file descriptor: number of the file

    def note(self, kind, *details):
        self.operations.append((kind, *details))
        self.at(len(self.operations), kind)

    def install(self, setattr=setattr):
        def spy(module, name, kind):
            real = getattr(module, name)

            def call(path, *arguments, **options):
                if str(path).startswith(self.root) and (kind != "mkdir" or not path.exists()):
                    self.note(kind, str(path), *map(str, arguments[:1]))
                return real(path, *arguments, **options)

            setattr(module, name, call)

        fsync = os.fsync

        def spy_fsync(descriptor):
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                same = os.path.samestat(os.fstat(descriptor), os.stat(self.root))
                self.note("sync directory" if same else "sync parent")
            else:
                self.note("fsync", self.files[descriptor])
            fsync(descriptor)

        setattr(ckpt, "_EagerFile", functools.partial(DiskFile, self))
        setattr(os, "fsync", spy_fsync)
        names = {"replace": "rename", "unlink": "unlink", "remove": "unlink", "mkdir": "mkdir"}
        for name, kind in names.items():
            spy(os, name, kind)


class DiskFile(ckpt._EagerFile):
    """What ckpt writes with, noted; in four pieces each time, so that it can be cut short."""

    def __init__(self, disk, path, eager):
        self.disk, self.number = disk, len(disk.operations)
        disk.note("create", path, self.number)
        super().__init__(path, eager)
        disk.files[self.fileno()] = self.number

    def write(self, data):
        self.cuts = (getattr(self, "cuts", 0) or 4) - 1  # the rest is given to us again
        part = data[: max(1, len(data) // 2)] if self.cuts else data
        self.disk.note("write", self.number, self.tell(), bytes(part))
        return super().write(part)


SAVES = [1, 2, 3, 3, 2]  # steps: also one that is there already, and one below the newest


def content(save):
    return {"save": save, "w": torch.full((3000,), float(save)), "names": ["a"] * save}


def save_and_report(directory, report, background, fsync=True, first=1):
    """The saves of SAVES; report(number) when one of them has to survive."""
    manager = CheckpointManager(directory, keep_last=2, background=background, fsync=fsync)
    for save, step in enumerate(SAVES, first):
        manager.save(step, content(save))
        if background and save % 2 == 0:
            continue  # and goes on while it is written
        manager.wait()
        report(save)


def save_until_killed(directory, reported, number, background):
    def at(count, kind):
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    Disk(directory, at).install()
    save_and_report(directory, lambda save: reported.write_text(str(save)), background)


def check_what_is_left(directory, reported):
    survivor = int(reported.read_text()) if reported.exists() else 0
    manager = CheckpointManager(directory, keep_last=2)
    state = manager.load_latest()
    if state is None:
        assert survivor == 0
    else:
        assert state["save"] >= survivor
        same(state, content(state["save"]))
        ckpt.verify_checkpoint(manager.latest_path())
    for name in os.listdir(directory) if directory.exists() else []:
        if ".tmp-" in name:
            os.utime(directory / name, (1, 1))
    manager.save(4, content(9))
    same(manager.load_latest(), content(9))
    assert not [name for name in listing(directory) if not re.match(r"step_|latest", name)]


def check_all(root):
    for directory in sorted(root.iterdir()):
        if directory.suffix == "":
            check_what_is_left(directory, directory.with_suffix(".reported"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("background", [False, True])
def test_killed_at_any_file_operation(tmp_path, background):
    status, number = -signal.SIGKILL, 0
    while status == -signal.SIGKILL:
        number += 1
        directory = tmp_path / f"{number:03}"
        reported = directory.with_suffix(".reported")
        status = exitcode_of(save_until_killed, directory, reported, number, background)
    assert status == 0
    assert number > 80  # so many were killed; this one got through
    in_child(check_all, tmp_path)


def what_a_power_cut_leaves(operations):
    """{files of the directory, or None when there is none: the last save that had returned}.

    The power fails after each operation. Of the names that changed since their directory was synced
    any may have been kept. A file that was not synced has all its bytes, the synced ones, half of
    them, or only zeros.
    """
    states, names, live, pending, returned = {}, {}, {}, [], 0  # names: number of the file, or None
    written, synced = collections.defaultdict(bytes), collections.defaultdict(bytes)
    exists = {True}
    for kind, *details in [("start",), *operations]:
        if kind == "returned":
            returned = details[0]
        elif kind == "mkdir":
            exists = {True, False}
        elif kind == "sync parent":
            exists = {True}
        elif kind == "write":
            written[details[0]] = written[details[0]][: details[1]] + details[2]
        elif kind == "fsync":
            synced[details[0]] = written[details[0]]
        elif kind == "sync directory":
            names, pending = dict(live), []
        elif kind != "start":
            name, *more = details
            change = {name: more[0]} if kind == "create" else {name: None}
            if kind == "rename":
                change[more[0]] = live[name]
            live |= change
            pending.append(change)
        for kept in subsets(pending):
            present = dict(names)
            for change in kept:
                present |= change
            for fate in FATES:
                files = {
                    name: synced[n] if synced[n] == written[n] else fate(synced[n], written[n])
                    for name, n in present.items()
                    if n is not None
                }
                for there in exists:
                    state = frozenset(files.items()) if there else None
                    states[state] = max(returned, states.get(state, 0))
    return states


def subsets(changes):
    """All of them; where they are too many, those that lack the last ones or a single one."""
    if len(changes) <= 6:
        kept = itertools.product([True, False], repeat=len(changes))
        return [list(itertools.compress(changes, which)) for which in kept]
    places = range(len(changes) + 1)
    return [changes[:i] for i in places] + [changes[:i] + changes[i + 1 :] for i in places]


FATES = [
    lambda synced, written: written,
    lambda synced, written: synced,
    lambda synced, written: written[: len(written) // 2],
    lambda synced, written: bytes(len(written)),
]


def violations(directory, states):
    found = 0
    for number, (state, returned) in enumerate(states.items()):
        left = directory / str(number)
        for name, data in state or ():
            left.mkdir(exist_ok=True, parents=True)
            (left / os.path.basename(name)).write_bytes(data)
        try:
            loaded = CheckpointManager(left).load_latest()
        except CheckpointError:
            loaded = None
        save = 0 if loaded is None else loaded["save"]
        if save:
            same(loaded, content(save))
        found += save < returned
    return found


@pytest.mark.parametrize("background", [False, True])
def test_power_lost_at_any_moment(tmp_path, background, monkeypatch):
    found = {}
    for fsync in (True, False):
        directory = tmp_path / f"synced {fsync}"
        disk = Disk(directory)
        report = functools.partial(disk.note, "returned")
        with monkeypatch.context() as patch:
            disk.install(functools.partial(patch.setattr, raising=False))
            save_and_report(directory, report, background, fsync)
        states = what_a_power_cut_leaves(disk.operations)
        assert len(states) > 100
        found[fsync] = violations(tmp_path / f"left {fsync}", states)
    assert found[True] == 0
    assert found[False] > 0  # or the states that this test makes prove nothing


@pytest.mark.parametrize("background", [False, True])
def test_an_errno_from_each_single_operation(tmp_path, background, monkeypatch):
    def refuse(count, kind):
        if count == number:
            raise OSError(errno.EIO, "Input/output error")

    number, seen = 0, set()
    while True:
        number += 1
        directory = tmp_path / str(number)
        manager = CheckpointManager(directory, keep_last=1, background=background)
        manager.save(1, content(1))
        manager.wait()
        disk, raised = Disk(directory, refuse), None
        with monkeypatch.context() as patch:
            disk.install(functools.partial(patch.setattr, raising=False))
            try:
                manager.save(2, content(2))
                manager.wait()
            except (OSError, CheckpointError) as error:
                raised = error
        if len(disk.operations) < number:
            break
        kind = disk.operations[number - 1][0]
        seen.add(kind)
        state = manager.load_latest()
        same(state, content(state["save"]))
        if kind == "unlink":  # a file too many is no reason to end a run
            assert (raised, state["save"]) == (None, 2)
        else:
            assert isinstance(raised, CheckpointError if background else OSError)
            cause = raised.__cause__ if background else raised
            assert cause.errno == errno.EIO
            assert cause.filename.startswith(str(directory))
            named = kind == "sync directory" and disk.operations[number - 2][2:] != ()
            assert state["save"] == 1 or named  # the pointer was renamed, but not surely on disk
            assert manager.steps() == sorted({1, state["save"]})
            assert not [name for name in listing(directory) if ".tmp-" in name]
        manager.save(3, content(3))
        manager.wait()
        same(manager.load_latest(), content(3))
    assert seen == {"create", "write", "fsync", "rename", "unlink", "sync directory"}
    same(manager.load_latest(), content(2))


def save_beyond_the_limit_behind(directory):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    manager = behind(directory)
    manager.save(2, {"a": torch.ones(100_000)})
    with pytest.raises(CheckpointError, match=r"step 2 failed.*File too large") as caught:
        manager.save(3, {"step": 3})
    cause = caught.value.__cause__
    assert (cause.errno, cause.filename) == (errno.EFBIG, str(manager.path_for(2)))
    manager.save(3, {"step": 3})
    manager.close()
    assert manager.steps() == [1, 3]


def test_no_room_for_a_background_save(tmp_path):
    manager_with(tmp_path, [1])
    in_child(save_beyond_the_limit_behind, tmp_path)
    assert CheckpointManager(tmp_path).load_latest() == {"step": 3}
    assert not [name for name in listing(tmp_path) if ".tmp-" in name]


@pytest.mark.parametrize("background", [False, True])
def test_a_directory_removed_between_saves_is_made_again(tmp_path, background):
    with CheckpointManager(tmp_path / "run", background=background) as manager:
        manager.save(1, {"step": 1})
        manager.wait()
        shutil.rmtree(tmp_path / "run")
        assert manager.load_latest() is None
        manager.save(2, {"step": 2})
        assert manager.load_latest() == {"step": 2}


@pytest.mark.parametrize("through", ["load_latest", "resume"])
@pytest.mark.parametrize("damage", ["bit", "cut"])
def test_damage_anywhere_is_found_or_harmless(tmp_path, damage, through, caplog):
    trainer = make(tmp_path)
    trainer.fit(2)
    manager = trainer.checkpoint_manager
    whole = {step: torch.load(manager.path_for(step)) for step in (1, 2)}
    path, data = manager.path_for(2), manager.path_for(2).read_bytes()
    seed = int(time.time())
    print(f"seed {seed}")
    rng, older = random.Random(seed), 0
    for _ in range(60):
        path.write_bytes(data)
        if damage == "bit":
            flip_bit(path, rng.randrange(len(data)), rng.randrange(8))
        else:
            os.truncate(path, rng.randrange(len(data)))
        if through == "load_latest":
            state = manager.load_latest(fallback=True)
        else:
            resumed = make(tmp_path)
            assert resumed.resume(fallback=True)
            state = resumed.state_dict()
        same(state, whole[state["step"]])
        older += state["step"] == 1
    assert older > (0 if damage == "bit" else 59)


def save_often(directory, first):
    manager = CheckpointManager(directory, keep_last=2, fsync=False)
    logging.getLogger("ckpt").setLevel(logging.ERROR)  # each sees the other's later steps
    for step in range(first, 300, 2):
        manager.save(step, {"step": step, "w": torch.full((2000,), step)})


def test_two_processes_save_into_one_directory_while_a_third_reads(tmp_path):
    reader, seen = CheckpointManager(tmp_path), set()
    writers = [forks.Process(target=save_often, args=(tmp_path, first)) for first in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if (state := reader.load_latest(fallback=len(seen) % 2 == 0)) is not None:
            assert (state["w"] == state["step"]).all()
            seen.add(state["step"])
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(seen) > 3
    assert reader.load_latest()["step"] in (298, 299)
    assert not [name for name in listing(tmp_path) if ".tmp-" in name]


# --------------------------------------------------------------------------------------------------
# RNG
# --------------------------------------------------------------------------------------------------
def draw():
    numbers = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
    return [*numbers, float(torch.rand(())), float(torch.randn(()))]


def test_rng_round_trip_through_a_safe_file(tmp_path):
    ckpt.seed_everything(3)
    draw()  # leaves half a pair of gaussians in Python and NumPy
    state = ckpt.capture_rng_state()
    ckpt.atomic_torch_save(state, tmp_path / "rng.pt")
    expected = [draw() for _ in range(3)]
    loaded = torch.load(tmp_path / "rng.pt", weights_only=True)
    ckpt.restore_rng_state(loaded)
    assert [draw() for _ in range(3)] == expected
    assert (
        {"python", "numpy", "torch"} <= loaded.keys() <= {"python", "numpy", "torch", "cuda", "mps"}
    )
    with zipfile.ZipFile(tmp_path / "rng.pt") as archive:
        data = archive.read("archive/data.pkl")
    globals_ = [a for op, a, _ in pickletools.genops(data) if op.name in ("GLOBAL", "STACK_GLOBAL")]
    assert not [name for name in globals_ if "numpy" in str(name)]


def test_capture_draws_nothing_and_does_not_change_later():
    ckpt.seed_everything(3)
    state = ckpt.capture_rng_state()
    kept = copy.deepcopy(state)
    first = draw()
    same(state, kept)
    ckpt.seed_everything(3)
    assert draw() == first


def test_states_in_the_form_that_numpy_and_json_give_are_taken():
    ckpt.seed_everything(3)
    state = {"python": json.loads(json.dumps(random.getstate())), "numpy": np.random.get_state()}
    state["torch"] = torch.get_rng_state()
    expected = draw()
    ckpt.restore_rng_state(state, strict=True)
    assert draw() == expected


def test_a_part_that_cannot_be_restored_is_logged_and_the_rest_is_restored(warned):
    ckpt.seed_everything(3)
    state = ckpt.capture_rng_state()
    expected = draw()
    ckpt.restore_rng_state({**state, "python": "nonsense"})
    assert draw()[2:] == expected[2:]
    assert len(warned()) == 1
    assert "python" in warned()[0]
    ckpt.restore_rng_state({"python": state["python"], "numpy": None})
    assert draw()[0] == expected[0]
    assert "numpy" in warned()[1]
    assert "torch (missing)" in warned()[1]


def test_strict_lists_the_parts_and_changes_nothing():
    ckpt.seed_everything(3)
    state = ckpt.capture_rng_state()
    expected = draw()
    ckpt.seed_everything(3)
    other = {"python": random.Random(9).getstate(), "numpy": 5, "torch": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"numpy.*torch"):
        ckpt.restore_rng_state(other, strict=True)
    assert draw() == expected
    ckpt.restore_rng_state(state, strict=True)
    assert draw() == expected


@pytest.mark.parametrize("strict", [True, False])
def test_fewer_devices_than_were_saved(warned, strict):
    count = torch.cuda.device_count()
    state = ckpt.capture_rng_state()
    state["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * (count + 2)
    if strict:
        with pytest.raises(
            CheckpointError, match=f"saved on {count + 2} devices, {count} are here"
        ):
            ckpt.restore_rng_state(state, strict=True)
    else:
        ckpt.restore_rng_state(state)
        assert len(warned()) == 1
        assert f"saved on {count + 2} devices, {count} are here" in warned()[0]


def test_restore_wants_a_mapping():
    with pytest.raises(TypeError, match="state"):
        ckpt.restore_rng_state([1, 2])


def test_seed_everything():
    ckpt.seed_everything(5)
    first = draw()
    ckpt.seed_everything(np.int64(5))
    assert draw() == first
    for seed, kind in ((-1, ValueError), (2**32, ValueError), ("5", TypeError), (1.0, TypeError)):
        with pytest.raises(kind, match=f"seed.*{seed}"):
            ckpt.seed_everything(seed)
    ckpt.seed_everything(2**32 - 1)


# --------------------------------------------------------------------------------------------------
# Model state
# --------------------------------------------------------------------------------------------------
class One(nn.Module):
    def __init__(self, value=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.full((2,), value))


class Holder(nn.Module):
    """Holds a module under a name of its own."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


wrap = nn.DataParallel  # like DDP in its names, without a process group


def compiled(model):
    return torch.compile(model, backend="eager")


WRAPPED = {
    "_orig_mod.w": (lambda v: compiled(One(v)), "w"),
    "module.w": (lambda v: wrap(One(v)), "w"),
    "_orig_mod.module.w": (lambda v: compiled(wrap(One(v))), "w"),
    "module._orig_mod.w": (lambda v: wrap(compiled(One(v))), "w"),
    "model._orig_mod.w": (lambda v: Holder(model=compiled(One(v))), "model.w"),
    "model.module.w": (lambda v: Holder(model=wrap(One(v))), "model.w"),
    "real.module.w": (lambda v: Holder(real=Holder(module=One(v))), "real.module.w"),
}


def bare_model(bare, value):
    path = {
        "w": One,
        "model.w": lambda v: Holder(model=One(v)),
        "real.module.w": lambda v: Holder(real=Holder(module=One(v))),
    }
    return path[bare](value)


@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_leave_no_trace_and_load_either_way(name):
    build, bare = WRAPPED[name]
    wrapped = build(3.0)
    assert list(wrapped.state_dict()) == [name]
    saved = ckpt.model_state_dict(wrapped)
    assert list(saved) == [bare]
    assert saved[bare].data_ptr() == next(wrapped.parameters()).data_ptr()
    for state in (saved, wrapped.state_dict()):
        for target in (bare_model(bare, 0.0), build(0.0)):
            ckpt.load_model_state_dict(target, state)
            assert next(target.parameters()).tolist() == [3.0, 3.0]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_real_submodule_called_module_beside_its_double(depth):
    def build(value, wrapper=lambda m: m):
        inner = wrapper(Holder(module=Holder(a=One(value)), a=One(value + 1)))
        return inner if depth == 1 else Holder(g=inner)

    for wrapper in (wrap, compiled, lambda m: m):
        state = build(3.0, wrapper).state_dict()
        target = build(0.0)
        try:
            ckpt.load_model_state_dict(target, state)
        except CheckpointError:
            assert (depth, wrapper) == (2, wrap)  # which is which cannot be told: no guess is made
            same(dict(target.state_dict()), dict(build(0.0).state_dict()))
        else:
            same(dict(target.state_dict()), dict(build(3.0).state_dict()))
        ckpt.load_model_state_dict(target, ckpt.model_state_dict(build(5.0, wrapper)))
        same(dict(target.state_dict()), dict(build(5.0).state_dict()))


def test_everything_that_differs_is_named_at_once_and_nothing_changes():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    before = copy.deepcopy(model.state_dict())
    state = {
        "0.weight": torch.ones(9, 9), "0.bias": "text", "1.weight": torch.ones(1, 3),
        "z.extra": torch.ones(1), "a.extra": torch.ones(1),
    }  # fmt: skip
    with pytest.raises(CheckpointError) as caught:
        ckpt.load_model_state_dict(model, state)
    assert str(caught.value).splitlines()[1:] == [
        "  missing: 1.bias",
        "  unexpected: a.extra",
        "  unexpected: z.extra",
        "  0.bias: saved as str, the model has a tensor",
        "  0.weight: saved (9, 9), the model (3, 2)",
    ]
    same(dict(model.state_dict()), dict(before))
    with pytest.raises(TypeError, match="state"):
        ckpt.load_model_state_dict(model, [1])


def test_tied_weights_keep_their_names_and_share_storage(tmp_path):
    model = Holder(a=nn.Linear(500, 500, bias=False), b=nn.Linear(500, 500, bias=False))
    model.b.weight = model.a.weight
    ckpt.atomic_torch_save(ckpt.model_state_dict(model), tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 1.1 * 500 * 500 * 4
    state = torch.load(tmp_path / "x.pt")
    assert list(state) == ["a.weight", "b.weight"]
    assert state["a.weight"].data_ptr() == state["b.weight"].data_ptr()
    other = Holder(a=nn.Linear(500, 500, bias=False), b=nn.Linear(500, 500, bias=False))
    other.b.weight = other.a.weight
    ckpt.load_model_state_dict(other, state)
    assert torch.equal(other.b.weight, model.a.weight)


class Versioned(nn.Linear):
    """Renames nothing and says so by its version, as modules with a history do."""

    _version = 7

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        self.seen = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_module_versions_and_extra_state_travel(tmp_path):
    for build in (lambda: Holder(a=Versioned(2, 2)), lambda: compiled(Holder(a=Versioned(2, 2)))):
        ckpt.atomic_torch_save(ckpt.model_state_dict(build()), tmp_path / "x.pt")
        target = build()
        ckpt.load_model_state_dict(target, torch.load(tmp_path / "x.pt", weights_only=True))
        assert target.a.seen == 7


def test_a_module_that_refuses_its_extra_state_is_named():
    class Picky(nn.Linear):
        def get_extra_state(self):
            return 1

        def set_extra_state(self, state):
            raise KeyError("picky")

    with pytest.raises(CheckpointError, match="picky"):
        ckpt.load_model_state_dict(Picky(1, 1), ckpt.model_state_dict(Picky(1, 1)))


class Resizes(nn.Module):
    """Makes its buffer as long as the saved one, as fake quantization does."""

    def __init__(self, size=0):
        super().__init__()
        self.register_buffer("seen", torch.ones(size))

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.seen.resize_(state_dict[prefix + "seen"].shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_a_module_that_loads_in_its_own_way_is_left_to_it():
    model = Holder(a=Resizes(), b=One())
    ckpt.load_model_state_dict(model, ckpt.model_state_dict(Holder(a=Resizes(4), b=One(2.0))))
    assert model.a.seen.tolist() == [1.0] * 4
    with pytest.raises(CheckpointError, match=r"b\.w: saved \(3,\)"):
        ckpt.load_model_state_dict(model, {"a.seen": torch.ones(5), "b.w": torch.ones(3)})
    assert model.a.seen.shape == (4,)


def test_names_that_look_like_a_wrappers():
    model = nn.ParameterDict({"_orig_mod": torch.ones(1), "module": torch.ones(2)})
    ckpt.load_model_state_dict(model, {"_orig_mod": torch.zeros(1), "module": torch.zeros(2)})
    assert [p.sum().item() for p in model.values()] == [0.0, 0.0]


def test_buffers_and_lazy_modules_load():
    model, target = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    model(torch.randn(5, 3))
    ckpt.load_model_state_dict(target, ckpt.model_state_dict(model))
    same(dict(target.state_dict()), dict(model.state_dict()))
    lazy = nn.LazyLinear(2)
    ckpt.load_model_state_dict(lazy, nn.Linear(3, 2).state_dict())
    assert lazy.weight.shape == (2, 3)


# --------------------------------------------------------------------------------------------------
# Trainer: one step and the counters
# --------------------------------------------------------------------------------------------------
def test_windows_run_on_across_the_end_of_an_epoch():
    seen = []
    trainer = weight_trainer(
        ones(5), accumulation_steps=2, on_step=lambda t, _: seen.append(t.step)
    )
    result = trainer.fit(5)
    assert trainer.model.w.item() == -5.0
    assert (trainer.step, trainer.samples, seen) == (5, 10, [1, 2, 3, 4, 5])
    assert (result.steps, result.samples, result.tokens) == (5, 10, 10)
    assert (result.stop_reason, result.final_loss) == ("max_steps", -4.0)
    assert result.elapsed_s > 0


def test_the_scheduler_steps_once_for_each_update():
    model = Weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    Trainer(model, optimizer, ones(8), scheduler=scheduler, accumulation_steps=4).fit(2)
    assert scheduler.last_epoch == 2
    assert model.w.item() == pytest.approx(-1.1)


def test_gradients_are_clipped_after_they_are_unscaled():
    trainer = weight_trainer([(torch.tensor([3.0]),)], clip_grad_norm=1.0, precision="fp16")
    trainer.fit(1)
    assert trainer.model.w.item() == pytest.approx(-1.0, abs=1e-5)
    assert trainer.state_dict()["scaler"]["scale"] == 65536.0
    trainer = weight_trainer([(torch.tensor([3.0]),)], clip_grad_norm=10, precision="fp16")
    trainer.fit(1)
    assert trainer.model.w.item() == -3.0


def test_clipping_takes_the_norm_over_everything_that_the_optimizer_trains():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.other = (nn.Parameter(torch.zeros(())) for _ in range(3))

        def forward(self, x):
            return 3 * self.a + 4 * self.b + 100 * self.other

    model = Two()
    optimizer = torch.optim.SGD([{"params": [model.a]}, {"params": [model.b]}], lr=1.0)
    Trainer(model, optimizer, [torch.ones(1)], clip_grad_norm=1.0).fit(2)
    assert [model.a.item(), model.b.item()] == pytest.approx([-1.2, -1.6], abs=1e-5)


def test_samples_and_tokens_are_counted_as_they_are():
    loader = DataLoader(TensorDataset(torch.arange(20).view(10, 2)), batch_size=4)
    counts = []

    def loss_fn(model, batch):
        return model(batch[0].float())

    trainer = weight_trainer(
        loader, loss_fn=loss_fn, on_step=lambda t, _: counts.append((t.samples, t.tokens))
    )
    trainer.fit(3)
    assert counts == [(4, 8), (8, 16), (10, 20)]


IDS, MASK = torch.zeros(2, 5, dtype=torch.long), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])
Pair = collections.namedtuple("Pair", "x y")
COUNTED = [
    ({"input_ids": IDS, "attention_mask": MASK}, 2, 5),
    ({"input_ids": IDS, "attention_mask": MASK.bool()}, 2, 5),
    ({"input_ids": IDS, "attention_mask": MASK.float()}, 2, 5),
    ({"input_ids": IDS, "attention_mask": torch.full((2, 1, 5, 5), float("-inf"))}, 2, 0),
    ({"labels": torch.zeros(2), "input_ids": IDS}, 2, 10),
    ({"pixels": torch.zeros(3, 4)}, 3, 3),
    (collections.UserDict(x=IDS), 2, 10),
    ((IDS, torch.zeros(2)), 2, 10),
    ([torch.zeros(4, 9), torch.zeros(4)], 4, 4),
    (Pair(torch.zeros(4, 9), 1), 4, 4),
    (([torch.zeros(6, 2)],), 6, 6),
    (torch.zeros(7, 3), 7, 7),
    (torch.tensor(1.0), 1, 1),
    ("text", 1, 1),
]


@pytest.mark.parametrize(("batch", "samples", "tokens"), COUNTED, ids=range(len(COUNTED)))
def test_what_counts_as_a_sample_and_a_token(batch, samples, tokens):
    trainer = weight_trainer([batch] * 2, loss_fn=lambda model, batch: model(torch.ones(1)))
    trainer.fit(2)
    assert (trainer.samples, trainer.tokens) == (2 * samples, 2 * tokens)
    assert type(trainer.tokens) is int


def test_a_batch_that_lives_on_a_device_is_counted_there():
    mask = torch.ones(2, 3, dtype=torch.long, device="meta")
    samples, tokens = ckpt._count({"attention_mask": mask})
    assert samples == 2
    assert tokens.device.type == "meta"  # no value was asked for


class Takes(nn.Module):
    """Records how it was called and returns `give` of the loss."""

    def __init__(self, give):
        super().__init__()
        self.w, self.give = nn.Parameter(torch.tensor(1.0)), give

    def forward(self, *args, **kwargs):
        self.called = (args, kwargs)
        return self.give(self.w * 1.0)


X = torch.ones(1)


@pytest.mark.parametrize("give", [lambda x: x, lambda x: {"loss": x}, lambda x: (x, 5)])
def test_how_a_batch_is_passed_and_a_loss_returned(give):
    passed = []
    for batch in ({"a": X}, (X, 2), [X, 2], Pair(X, 2), X):
        model = Takes(give)
        Trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), [batch]).fit(1)
        assert model.w.item() == 0.0
        passed.append(model.called)
    assert passed == [((), {"a": X}), ((X, 2), {}), ((X, 2), {}), ((X, 2), {}), ((X,), {})]


def test_loss_fn_gets_the_model_and_the_whole_batch():
    seen = []

    def loss_fn(model, batch):
        seen.append((type(model), type(batch)))
        return {"loss": model.w * 2}

    trainer = weight_trainer([Pair(X, {"deep": [X]})], loss_fn=loss_fn)
    trainer.fit(1)
    assert seen == [(Weight, Pair)]
    assert trainer.model.w.item() == -2.0


BAD_LOSSES = {
    "shape (2,)": lambda w: w * torch.ones(2),
    "shape (1,)": lambda w: w * torch.ones(1),
    "does not require grad": lambda w: torch.tensor(1.0),
    "NoneType": lambda w: {"logits": w},
    "float": lambda w: (1.0, w),
    "pass loss_fn": lambda w: types.SimpleNamespace(loss=w),
    "must be a tensor": lambda w: (),
}


@pytest.mark.parametrize("message", BAD_LOSSES)
def test_a_loss_that_is_none(message):
    model = Takes(BAD_LOSSES[message])
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), [X])
    with pytest.raises(ValueError, match=re.escape(message)):
        trainer.fit(1)
    assert (trainer.step, trainer.samples, model.w.item()) == (0, 0, 1.0)


def test_train_mode_is_set_and_set_again_after_on_step():
    trainer = make(
        trainer={"on_step": lambda t, _: (modes.append(t.model.training), t.model.eval())}
    )
    modes = []
    trainer.model.eval()
    trainer.fit(3)
    assert modes == [True, True, True]
    assert all(m.training for m in trainer.model.modules())


def test_train_mode_is_set_again_in_a_submodule_too():
    trainer = make(
        trainer={"on_step": lambda t, _: (modes.append(t.model.net[2].training), eval_())}
    )
    modes, eval_ = [], trainer.model.net[2].eval
    trainer.fit(3)
    assert modes == [True, True, True]


def test_on_step_gets_a_detached_mean_loss():
    losses = []
    batches = [(torch.tensor([float(i)]),) for i in (1, 3)]
    trainer = weight_trainer(
        batches, value=2.0, accumulation_steps=2, on_step=lambda _, loss: losses.append(loss)
    )
    result = trainer.fit(1)
    assert losses == [torch.tensor(4.0)]
    assert not losses[0].requires_grad
    assert result.final_loss == 4.0


def test_order_of_one_step(tmp_path):
    order = []

    class Order:
        """Stands in wherever an order is seen."""

        def start(self):
            order.append("start")

        def after_optimizer_step(self, model, step):
            order.append(("coordinator", step, model.w.item(), scheduler.last_epoch))
            return False

        def stop(self):
            order.append("stop")

        def state_dict(self):
            order.append("saved")
            return {"n": 1}

        def load_state_dict(self, state):
            order.append(("loaded", state))

    model = Weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    optimizer.register_step_pre_hook(lambda *_: order.append("optimizer"))

    def new(**options):
        manager = CheckpointManager(tmp_path, every_steps=2, fsync=False)
        return Trainer(
            model, optimizer, ones(3), scheduler=scheduler, checkpoint_manager=manager,
            coordinator=Order(), on_step=lambda t, _: order.append(("on_step", t.step)),
        )  # fmt: skip

    new().fit(2)
    assert order == [
        "start", "optimizer", ("coordinator", 1, -1.0, 1), ("on_step", 1),
        "optimizer", ("coordinator", 2, -2.0, 2), ("on_step", 2), "saved", "stop",
    ]  # fmt: skip
    order.clear()
    trainer = new()
    assert trainer.resume()
    assert order == []  # the coordinator's state waits until it has started
    assert trainer.state_dict()["coordinator"] == {"n": 1}  # and is not lost meanwhile
    trainer.fit(3)
    assert order[:2] == ["start", ("loaded", {"n": 1})]
    assert order[-1] == "stop"
    order.clear()
    trainer.fit(4)
    assert "loaded" not in str(order)


def test_the_coordinator_is_stopped_when_training_fails():
    stopped = []
    coordinator = types.SimpleNamespace(
        start=lambda: None, stop=lambda: stopped.append(1), after_optimizer_step=lambda m, s: 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        weight_trainer(ones(3), coordinator=coordinator).fit(1)
    assert stopped == [1]


# --------------------------------------------------------------------------------------------------
# Trainer: fit
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [0, -5, 1.5, "3", None])
def test_max_steps_is_a_positive_int(value):
    trainer = weight_trainer(ones(3))
    with pytest.raises(
        ValueError if type(value) is int else TypeError, match=f"max_steps.*{value}"
    ):
        trainer.fit(value)


def test_max_steps_is_absolute_and_a_second_fit_goes_on():
    trainer = weight_trainer(ones(3))
    assert trainer.fit(2).steps == 2
    assert trainer.fit(5).steps == 5
    assert trainer.model.w.item() == -5.0


def test_max_steps_below_the_restored_step(tmp_path, warned):
    make(tmp_path, every=5).fit(7)
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in listing(tmp_path)}
    trainer = make(tmp_path, every=5, trainer={"save_final": True})
    trainer.resume()
    weights = copy.deepcopy(trainer.model.state_dict())
    result = trainer.fit(3)
    assert (result.steps, result.final_loss, result.stop_reason) == (5, None, "max_steps")
    assert "max_steps 3" in warned()[0]
    assert trainer.fit(5).final_loss is None
    assert len(warned()) == 1  # a run that is complete is nothing to warn about
    same(dict(trainer.model.state_dict()), dict(weights))
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in listing(tmp_path)} == before


def test_the_next_save_after_a_resume_is_on_the_interval(tmp_path):
    trainer = make()
    trainer.fit(7)
    manager = CheckpointManager(tmp_path, every_steps=5, fsync=False)
    manager.save(7, trainer.state_dict())
    resumed = make(tmp_path, every=5)
    resumed.resume()
    resumed.fit(12)
    assert manager.steps() == [7, 10]


def test_only_the_interval_is_saved_unless_save_final(tmp_path):
    for final in (False, True):
        trainer = make(tmp_path / str(final), every=2, trainer={"save_final": final})
        trainer.fit(3)
        assert trainer.checkpoint_manager.steps() == ([2, 3] if final else [2])
        resumed = make(tmp_path / str(final), every=2)
        resumed.resume()
        assert resumed.step == (3 if final else 2)


def test_save_final_does_not_save_one_step_twice(tmp_path, monkeypatch):
    calls = record_calls(monkeypatch)
    trainer = make(tmp_path, every=2, trainer={"save_final": True})
    trainer.fit(2)
    assert len(calls) == 2  # the file and the pointer, once


def test_a_disabled_manager_saves_nothing(tmp_path):
    trainer = make(tmp_path / "new", every=1, enabled=False, trainer={"save_final": True})
    trainer.fit(2)
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    "loader", [[], DataLoader(TensorDataset(torch.ones(1)), 4, drop_last=True)]
)
def test_an_empty_loader_is_an_error(loader):
    with pytest.raises(ValueError, match="no batches"):
        weight_trainer(loader).fit(1)
    with pytest.raises(ValueError, match="no batches"):
        weight_trainer(iter(())).fit(1)


def test_a_loader_that_becomes_empty_is_an_error():
    loader = ones(2)
    trainer = weight_trainer(loader, on_step=lambda *_: loader.clear())
    with pytest.raises(ValueError, match="no batches"):
        trainer.fit(5)


def test_an_iterator_that_runs_out_ends_the_run(tmp_path):
    manager = CheckpointManager(tmp_path, fsync=False)
    trainer = weight_trainer(
        iter(ones(7)), accumulation_steps=2, checkpoint_manager=manager, save_final=True
    )
    result = trainer.fit(9)
    assert (result.steps, result.samples, result.stop_reason) == (3, 6, "data")
    assert manager.steps() == [3]


def test_nothing_is_left_behind_by_an_exception(tmp_path):
    def fail(trainer, loss):
        raise KeyError("mine")

    before = signal.getsignal(signal.SIGTERM)
    trainer = make(tmp_path, trainer={"save_on_signal": [signal.SIGTERM], "on_step": fail})
    with pytest.raises(KeyError):
        trainer.fit(1)
    assert signal.getsignal(signal.SIGTERM) is before
    trainer.on_step = None
    assert trainer.fit(3).steps == 3


def test_losses_are_not_pulled_to_the_host_every_step(monkeypatch):
    pulled = []
    for name in ("item", "__float__", "__bool__", "__int__", "tolist", "numpy"):
        original = getattr(torch.Tensor, name)

        def spy(self, *args, original=original, name=name, **kwargs):
            pulled.append(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, spy)
    # A plain list: a shuffling loader asks the CPU for its own seed once an epoch.
    trainer = weight_trainer(ones(5), accumulation_steps=2, on_step=lambda t, loss: None)
    trainer.fit(4)
    assert pulled == ["__float__"]  # final_loss, once


# --------------------------------------------------------------------------------------------------
# Trainer: arguments
# --------------------------------------------------------------------------------------------------
BAD_ARGUMENTS = [
    ({"model": 3}, TypeError, "model"),
    ({"optimizer": "adam"}, TypeError, "optimizer.*adam"),
    ({"dataloader": 5}, TypeError, "dataloader.*5"),
    ({"precision": "fp8"}, ValueError, "precision.*fp8"),
    ({"accumulation_steps": 0}, ValueError, "accumulation_steps.*0"),
    ({"accumulation_steps": 1.5}, TypeError, r"accumulation_steps.*1\.5"),
    ({"clip_grad_norm": 0}, ValueError, "clip_grad_norm.*0"),
    ({"clip_grad_norm": float("nan")}, ValueError, "clip_grad_norm.*nan"),
    ({"clip_grad_norm": "1"}, TypeError, "clip_grad_norm.*1"),
    ({"device": "nosuch"}, ValueError, "device.*nosuch"),
    ({"scheduler": 3}, TypeError, "scheduler"),
    ({"loss_fn": 3}, TypeError, "loss_fn.*3"),
    ({"on_step": 3}, TypeError, "on_step.*3"),
    ({"extra_state": {"ema": 3}}, TypeError, "extra ema.*3"),
    ({"save_on_signal": [signal.SIGTERM]}, ValueError, "checkpoint_manager"),
    ({"save_final": True}, ValueError, "checkpoint_manager"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD_ARGUMENTS)
def test_bad_arguments_of_the_trainer_are_named(arguments, kind, message):
    model = Weight()
    good = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "dataloader": ones(1)}
    with pytest.raises(kind, match=message):
        Trainer(**{**good, **arguments})


def test_bad_signals_are_refused(tmp_path):
    for bad in ([signal.SIGKILL], [12345], signal.SIGTERM):
        with pytest.raises((ValueError, TypeError), match="save_on_signal"):
            make(tmp_path, trainer={"save_on_signal": bad})
    assert listing(tmp_path) == []


def test_a_plateau_scheduler_is_refused():
    model = Weight()
    optimizer = torch.optim.SGD(model.parameters())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match="on_step"):
        Trainer(model, optimizer, ones(1), scheduler=plateau)


def test_device_moves_the_model_and_none_leaves_it():
    model = Weight().to("meta")
    optimizer = torch.optim.SGD(model.parameters())
    assert Trainer(model, optimizer, ones(1)).device.type == "meta"
    model = Weight()
    optimizer = torch.optim.SGD(model.parameters())
    assert Trainer(model, optimizer, ones(1), device="meta").model.w.device.type == "meta"


# --------------------------------------------------------------------------------------------------
# Trainer: precision
# --------------------------------------------------------------------------------------------------
class Dtype(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x):
        out = self.linear(x)
        self.dtype = out.dtype
        return out.float().mean()


@pytest.mark.parametrize(
    ("asked", "mode", "dtype"),
    [
        ("fp32", "fp32", torch.float32),
        ("bf16", "bf16", torch.bfloat16),
        ("fp16", "fp16", torch.float16),
        ("auto", "fp32", torch.float32),
    ],
)
def test_precision_on_the_cpu(asked, mode, dtype):
    model = Dtype()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, [torch.ones(2, 2)], precision=asked)
    assert trainer.state_dict()["scaler"] is None  # made by fit
    trainer.fit(1)
    state = trainer.state_dict()
    assert model.dtype == dtype
    low = mode != "fp32"
    assert state["precision"] == {
        "mode": mode, "autocast_enabled": low, "use_scaler": mode == "fp16",
    }  # fmt: skip
    assert (state["scaler"] is not None) == (mode == "fp16")


@pytest.mark.parametrize("asked", ["bf16", "fp16"])
def test_an_unsupported_precision_becomes_fp32_with_a_warning(asked, warned):
    model = Weight().to("meta")
    trainer = Trainer(model, torch.optim.SGD(model.parameters()), ones(1), precision=asked)
    assert trainer.precision == {"mode": "fp32", "autocast_enabled": False, "use_scaler": False}
    assert len(warned()) == 1
    assert asked in warned()[0]


def test_a_loss_that_is_nan_for_ever_is_an_error_under_fp16():
    trainer = weight_trainer([(torch.tensor([float("nan")]),)], precision="fp16")
    with pytest.raises(RuntimeError, match="100 times"):
        trainer.fit(5)
    assert (trainer.step, trainer.samples, trainer.model.w.item()) == (0, 0, 0.0)


def test_a_skipped_step_advances_nothing(tmp_path):
    batches = [(torch.tensor([x]),) for x in (1.0, float("inf"), 1.0, 1.0)]
    model, steps = Weight(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    manager = CheckpointManager(tmp_path, every_steps=1, keep_last=None, fsync=False)
    trainer = Trainer(
        model, optimizer, batches, scheduler=scheduler, precision="fp16",
        checkpoint_manager=manager, on_step=lambda t, _: steps.append(t.step),
    )  # fmt: skip
    trainer.fit(3)
    assert (model.w.item(), scheduler.last_epoch, trainer.samples) == (-3.0, 3, 3)
    assert steps == manager.steps() == [1, 2, 3]


def test_scaler_state_is_restored_when_fit_makes_the_scaler(tmp_path):
    batches = [(torch.tensor([x]),) for x in (1.0, float("inf"))]
    manager = CheckpointManager(tmp_path, fsync=False)
    first = weight_trainer(batches, precision="fp16", checkpoint_manager=manager, save_final=True)
    first.fit(2)
    assert first.state_dict()["scaler"]["scale"] == 32768.0
    second = weight_trainer(batches, precision="fp16", checkpoint_manager=manager)
    second.resume()
    assert second._scaler is None
    assert second.state_dict()["scaler"]["scale"] == 32768.0  # a save before fit loses nothing
    second.fit(3)
    assert second.state_dict()["scaler"]["scale"] == 32768.0


# --------------------------------------------------------------------------------------------------
# Trainer: the checkpoint
# --------------------------------------------------------------------------------------------------
SCHEMA = [
    "model", "optimizer", "scaler", "scheduler", "step", "samples", "tokens", "config", "rng",
    "coordinator", "precision",
]  # fmt: skip


def test_schema(tmp_path):
    trainer = make(tmp_path, every=2)
    trainer.fit(2)
    state = trainer.checkpoint_manager.load_latest()
    assert sorted(state) == sorted(SCHEMA)
    assert (state["step"], state["samples"], state["tokens"]) == (2, 4, 4)
    for name in ("scaler", "scheduler", "config", "coordinator"):
        assert state[name] is None
    assert state["precision"] == {"mode": "fp32", "autocast_enabled": False, "use_scaler": False}
    same(dict(state["model"]), dict(trainer.model.state_dict()))
    same(state["optimizer"], trainer.optimizer.state_dict())
    assert state["rng"].keys() == ckpt.capture_rng_state().keys()


def test_switches_add_their_keys_only(tmp_path):
    model = Weight()
    trainer = make(trainer={"exact_resume": True, "extra_state": {"ema": model}})
    trainer.fit(1)
    assert sorted(trainer.state_dict()) == sorted([*SCHEMA, "data", "extra"])


def numpy_schedule(step):
    return 0.5 * (1 + np.cos(np.float64(step)))


def full_trainer(directory, **options):
    """A trainer with everything in its checkpoint."""
    ckpt.seed_everything(1)
    model = Loss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=np.float64(0.05), betas=(0.9, 0.99))
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LambdaLR(optimizer, numpy_schedule),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5]),
        ],
        milestones=[2],
    )
    extra = {
        "ema": copy.deepcopy(model),
        "second": torch.optim.SGD(model.parameters(), momentum=0.9),
    }
    manager = CheckpointManager(directory, every_steps=3, fsync=False, weights_only=True)
    loader = DataLoader(regression(), batch_size=2, shuffle=True)
    options = {"precision": "fp16", "config": {"lr": np.float32(1), "out": Path("a")}, **options}
    return Trainer(
        model, optimizer, loader, scheduler=scheduler, checkpoint_manager=manager,
        exact_resume=True, extra_state=extra, **options,
    )  # fmt: skip


def test_all_that_the_trainer_stores_loads_without_running_code(tmp_path):
    first = full_trainer(tmp_path)
    first.fit(4)
    second = full_trainer(tmp_path)
    assert second.resume()
    same(second.state_dict(), second.checkpoint_manager.load_latest())
    second.fit(4)
    same(second.state_dict(), first.state_dict())


@dataclasses.dataclass
class Nested:
    api_key: str = "k"
    lr: float = 0.1


class Colour(str, __import__("enum").Enum):
    RED = "red"


def test_config_is_redacted_and_reduced():
    config = {
        "max_tokens": 5, "tokenizer": "gpt2", "hub": {"token": "hf_x"}, "api_key": "k",
        "eos_token": "</s>", "out": Path("a"), "lr": np.float64(0.1),
    }  # fmt: skip
    assert ckpt._public_config(config) == {
        "max_tokens": 5, "tokenizer": "gpt2", "hub": {"token": "<redacted>"},
        "api_key": "<redacted>", "eos_token": "</s>", "out": "a", "lr": 0.1,
    }  # fmt: skip


SECRETS = [
    "token", "hf_token", "HF_TOKEN", "hf-token", "accessToken", "AccessToken", "apiKey", "APIKey",
    "API_KEY", "apikey", "secret", "client_secret", "password", "dbPassword", "passwd", "key",
    "credential", "aws_credentials", "authorization", "Authorization", "wandb_api_key", "token2",
]  # fmt: skip
PUBLIC = [
    "eos_token", "pad_token", "bos_token", "unk_token", "mask_token", "sep_token", "cls_token",
    "tokenizer", "tokens", "max_tokens", "monkey", "keyboard", "passwordless", "secrets", "keys",
    "secretary", "author", "", "lr",
]  # fmt: skip


@pytest.mark.parametrize("wrap_in", [dict, argparse.Namespace, types.SimpleNamespace])
def test_which_keys_are_secret(wrap_in):
    config = {name: wrap_in(**{name: "v"}) for name in [*SECRETS, *PUBLIC]}
    found = ckpt._public_config([config])[0]
    assert [name for name in found if found[name][name] != "v"] == SECRETS
    for value in (5, 0.5, True, None, ""):
        assert ckpt._public_config({"api_key": value}) == {"api_key": value}
    assert ckpt._public_config({"token": ["a", ("b",)]}) == {
        "token": ["<redacted>", ("<redacted>",)],
    }
    assert ckpt._public_config({"password": b"x"}) == {"password": "<redacted>"}


def test_config_of_any_kind_becomes_plain_types(tmp_path):
    config = argparse.Namespace(
        nested=Nested(), colour=Colour.RED, dtype=torch.bfloat16, device=torch.device("cpu"),
        items=[(1, np.int64(2)), {"b", "a"}], nothing=None, function=draw, numbers={1: 2.5},
        pair=Pair("x", Nested()),
    )  # fmt: skip
    plain = ckpt._public_config(config)
    assert plain == {
        "nested": {"api_key": "<redacted>", "lr": 0.1}, "colour": str(Colour.RED),
        "dtype": "torch.bfloat16", "device": "cpu", "items": [(1, 2), ["a", "b"]], "nothing": None,
        "function": "<function draw>", "numbers": {"1": 2.5},
        "pair": {"x": "x", "y": {"api_key": "<redacted>", "lr": 0.1}},
    }  # fmt: skip
    assert config.nested.api_key == "k"
    assert type(plain["colour"]) is str
    ckpt.atomic_torch_save(plain, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", weights_only=True) == plain


# --------------------------------------------------------------------------------------------------
# Trainer: resume
# --------------------------------------------------------------------------------------------------
def test_resume_without_a_checkpoint_starts_at_zero(tmp_path):
    trainer = make(tmp_path / "new")
    assert trainer.resume() is False
    assert trainer.step == 0
    assert listing(tmp_path) == []


def test_resume_arguments():
    trainer = make()
    with pytest.raises(ValueError, match="checkpoint_manager"):
        trainer.resume()
    for bad in ([1], "path", 3):
        with pytest.raises(TypeError, match="state"):
            trainer.resume(bad)


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_learning_rates_and_optimizer_state_equal_the_saved_ones(scheduler_first):
    def build(lr, gamma):
        ckpt.seed_everything(1)
        model = Loss(dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr * 3, total_steps=20)
        return Trainer(model, optimizer, [tuple(regression()[:4])], scheduler=scheduler)

    first = build(0.05, 0.5)
    first.fit(7)
    state = first.state_dict()
    state = dict(reversed(state.items())) if scheduler_first else state
    second = build(0.01, 0.9)
    second.fit(2)
    assert second.resume(copy.deepcopy(state))
    same(second.optimizer.state_dict(), first.optimizer.state_dict())
    assert second.scheduler.get_last_lr() == first.scheduler.get_last_lr()
    assert [g["lr"] for g in second.optimizer.param_groups] == first.scheduler.get_last_lr()
    assert (second.step, second.samples, second.tokens) == (7, 28, 28)
    first.fit(12)
    second.fit(12)
    same(dict(second.model.state_dict()), dict(first.model.state_dict()))


def test_fp32_moments_of_bf16_parameters_stay_fp32():
    def build():
        model = Weight().bfloat16()
        return Trainer(model, torch.optim.AdamW(model.parameters()), [(torch.ones(1).bfloat16(),)])

    trainer = build()
    trainer.fit(1)
    state = trainer.state_dict()
    moment = torch.tensor(1.2345678)
    state["optimizer"]["state"][0]["exp_avg"] = moment
    other = build()
    other.resume(state)
    found = other.optimizer.state[other.model.w]["exp_avg"]
    assert found.dtype == torch.float32
    assert found.item() == moment.item()


def test_the_loaded_state_is_neither_kept_nor_shared(tmp_path):
    def build(directory=None):
        trainer = make(directory, every=3)
        trainer.optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
        trainer.scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2)
        return trainer

    first = build(tmp_path)
    first.fit(3)
    state = first.checkpoint_manager.load_latest()
    tensors = [*state["model"].values(), *state["scheduler"]["_last_lr"]]
    for entry in [*state["optimizer"]["state"].values(), *state["optimizer"]["param_groups"]]:
        tensors += [value for value in entry.values() if isinstance(value, torch.Tensor)]
    assert len(tensors) > 4 + 4 * 3 + 1
    alive = [weakref.ref(tensor) for tensor in tensors]
    kept = copy.deepcopy([state["optimizer"], state["scheduler"]])
    second, third = build(), build()
    second.resume(state)
    second.fit(5)
    # Training on does not write into the caller's tensors.
    same([state["optimizer"], state["scheduler"]], kept)
    third.resume(state)
    del state, tensors, entry
    gc.collect()
    assert [ref for ref in alive if ref() is not None] == []


class Remembering(torch.optim.SGD):
    """Has a tensor where only code of its own knows of it."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                note = types.SimpleNamespace(last=parameter.detach().clone())
                self.state[parameter].update(note=note, name="a name")


def test_a_tensor_inside_an_object_in_the_optimizer_state_is_not_shared(tmp_path):
    def build():
        model = Weight(2.0)
        manager = CheckpointManager(tmp_path, every_steps=1)
        optimizer = Remembering(model.parameters(), lr=1.0)
        return Trainer(model, optimizer, ones(1), checkpoint_manager=manager)

    build().fit(1)
    trainer = build()
    state = trainer.checkpoint_manager.load_latest()
    trainer.resume(state)
    state["optimizer"]["state"][0]["note"].last.zero_()
    assert trainer.optimizer.state[trainer.model.w]["note"].last.item() == 2.0
    assert trainer.optimizer.state[trainer.model.w]["name"] == "a name"
    trainer.resume()
    assert not is_mapped(tmp_path / "step_000000000001.pt")


def test_a_compiled_model_and_a_plain_one_resume_each_other(tmp_path):
    plain, wrapped = make(), make()
    plain.fit(3)
    wrapped.model = wrap(compiled(wrapped.model))
    wrapped.resume(copy.deepcopy(plain.state_dict()))
    same(wrapped.state_dict()["model"], plain.state_dict()["model"])
    other = make()
    other.resume(wrapped.state_dict())
    same(other.state_dict()["optimizer"], plain.state_dict()["optimizer"])


def snapshot(trainer):
    """All that a resume might change, the generators included."""
    return copy.deepcopy([trainer.state_dict(), trainer.model.training])


def change(**changes):
    """A checkpoint of make() with some entries replaced; None takes an entry out."""

    def apply(state):
        for path, value in changes.items():
            *parents, last = path.split("__")
            target = state
            for name in parents:
                target = target[int(name) if name.isdigit() else name]
            last = int(last) if last.isdigit() else last
            if value is None:
                del target[last]
            else:
                target[last] = value
        return state

    return apply


def reordered(state):
    state["model"] = dict(reversed(state["model"].items()))
    return state


MISFITS = {
    "model: missing: net.0.bias": change(**{"model__net.0.bias": None}),
    "model: unexpected: z": change(model__z=X),
    "model: net.0.bias: saved (1,)": change(**{"model__net.0.bias": X}),
    "model: missing": change(model=None),
    "model: not a state_dict": change(model=5),
    "net.0.bias: saved as torch.sparse_coo": change(
        **{"model__net.0.bias": torch.ones(4).to_sparse()}
    ),
    "torch.float32 on meta": change(**{"model__net.0.bias": torch.ones(4, device="meta")}),
    "saved as UninitializedParameter": change(**{"model__net.0.bias": nn.UninitializedParameter()}),
    "step must be an int": change(step="4"),
    "step must be at least 0": change(step=-4),
    "samples must be an int": change(samples=1.5),
    "tokens must be an int": change(tokens=[1]),
    "optimizer: not an optimizer's": change(optimizer=[1]),
    "optimizer: not an optimizer's state_dict": change(optimizer__param_groups=[{}]),
    "optimizer: not an optimizer's state_dict ": change(optimizer__param_groups=5),
    "optimizer: not an optimizer's ": change(optimizer__state=None),
    "optimizer: saved with 2 parameter groups": change(
        optimizer__param_groups=[{"params": []}] * 2
    ),
    "optimizer: group 0 was saved with 2 parameters": change(
        optimizer__param_groups=[{"params": [0, 1]}]
    ),
    "another kind of optimizer: it has no betas": change(
        optimizer__param_groups=[{"params": [0, 1, 2, 3], "lr": 1, "dampening": 0}]
    ),
    "another kind of optimizer: ": change(optimizer__param_groups__0__lr="fast"),
    "another kind of optimizer: parameter 1 has no exp_avg": change(
        optimizer__state__1={"step": torch.ones(()), "exp_inf": torch.ones(4)}
    ),
    "with 5 for parameter 1": change(optimizer__state__1=5),
    "with exp_avg (3,) for parameter 1 (4,)": change(optimizer__state__1__exp_avg=torch.ones(3)),
    "optimizer: not an optimizer's state_dict  ": change(optimizer__param_groups=[5]),
    "optimizer: not an optimizer's state_dict   ": change(optimizer__param_groups__0__params=3),
    "optimizer: not an optimizer's state_dict    ": change(
        optimizer__param_groups__0__param_names=3
    ),
    "another order: net.3.bias where net.0.weight is here": reordered,
    "scheduler: not a dict": change(scheduler=[1]),
    "rng: not a dict": change(rng=[1]),
    "data: not a dict": change(data=5),
    "extra: not a dict": change(extra=5),
    "extra ema: missing: w": change(extra={"ema": {}}),
    "extra ema: not a state_dict": change(extra={"ema": 5}),
    "extra second: saved with 0 parameter groups": change(
        extra={"second": {"state": {}, "param_groups": []}}
    ),
    "data batch must be an int, got None": change(data={"epoch": 0}),
    "data batch must be at least 0, got -3": change(data__batch=-3),
    "data epoch must be an int, got '1'": change(data__epoch="1"),
    "cannot be resumed: KeyError('rng')": change(data__begin={}),
    "cannot be resumed: refused": change(extra={"mine": 1}),
}


class Refuses:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        random.random()
        raise KeyError("refused")


@pytest.mark.parametrize("message", MISFITS)
def test_a_checkpoint_that_does_not_fit_changes_nothing(message):
    weight = Weight()
    extra = {"ema": weight, "second": torch.optim.SGD(weight.parameters()), "mine": Refuses()}
    saved = make(trainer={"exact_resume": True})
    saved.fit(5)
    trainer = make(trainer={"exact_resume": True, "extra_state": extra})
    trainer.fit(2)
    before = snapshot(trainer)
    state = MISFITS[message](copy.deepcopy(saved.state_dict()))
    message = message.replace(": refused", ": KeyError('refused'").strip()
    with pytest.raises(CheckpointError, match=re.escape(message)):
        trainer.resume(state)
    same(snapshot(trainer), before)
    trainer.fit(6)
    uninterrupted = make(trainer={"exact_resume": True, "extra_state": extra})
    uninterrupted.fit(6)
    same(dict(trainer.model.state_dict()), dict(uninterrupted.model.state_dict()))


def test_a_refusal_undoes_the_objects_that_were_loaded_before_it():
    class Holds:
        def __init__(self, value):
            self.value = value

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    def build(value):
        parts = {"ema": Weight(value), "plain": Holds([value]), "late": Refuses()}
        return make(trainer={"extra_state": parts}), parts

    saved, _ = build(1.0)
    trainer, parts = build(2.0)
    with pytest.raises(CheckpointError, match="refused"):
        trainer.resume(saved.state_dict())
    assert (parts["ema"].w.item(), parts["plain"].value) == (2.0, [2.0])


def test_an_unforeseen_refusal_of_the_model_is_undone():
    class Late(Loss):
        refuse = False

        def _load_from_state_dict(self, *args, **kwargs):
            if self.refuse:
                raise KeyError("late")
            super()._load_from_state_dict(*args, **kwargs)

    def build():
        ckpt.seed_everything(1)
        model = Late()
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        loader = DataLoader(regression(), batch_size=2, shuffle=True)
        return Trainer(model, optimizer, loader, scheduler=scheduler, exact_resume=True)

    saved, trainer = build(), build()
    saved.fit(5)
    trainer.fit(2)
    before = snapshot(trainer)
    trainer.model.refuse = True
    with pytest.raises(CheckpointError, match="late"):
        trainer.resume(copy.deepcopy(saved.state_dict()))
    trainer.model.refuse = False
    same(snapshot(trainer), before)


def test_every_mismatch_is_named_in_one_error_with_the_file(tmp_path):
    saved = make(tmp_path)
    saved.fit(1)
    state = saved.state_dict()
    del state["model"]["net.0.bias"]
    state["step"], state["optimizer"]["param_groups"] = "x", []
    path = saved.checkpoint_manager.save(1, state)
    trainer = make(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        trainer.resume()
    assert caught.value.path == path
    for part in (str(path), "net.0.bias", "step must be an int", "0 parameter groups"):
        assert part in str(caught.value)


class TwoLayers(nn.Module):
    def __init__(self, names):
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(2, 2))

    def forward(self, x):
        return self.second(self.first(x)).sum()


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_layers_built_the_other_way_round(named, momentum):
    def build(*names):
        model = TwoLayers(names)
        parameters = model.named_parameters() if named else model.parameters()
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=momentum)
        return Trainer(model, optimizer, [torch.ones(1, 2)])

    saved, trainer = build("first", "second"), build("second", "first")
    saved.fit(2)
    assert sorted(saved.state_dict()) == sorted(SCHEMA)  # no key was added to tell the order
    if momentum or named:
        with pytest.raises(CheckpointError, match=r"first\.weight.*second\.weight"):
            trainer.resume(saved.state_dict())
        assert trainer.step == 0
    else:  # no state that could go to the wrong layer
        trainer.resume(saved.state_dict())
        same(trainer.model.first.state_dict(), saved.model.first.state_dict())


def test_an_optimizer_that_knows_the_names_may_have_an_order_of_its_own():
    def build(*names):
        ckpt.seed_everything(len(names[0]))
        model = TwoLayers(names)
        optimizer = torch.optim.AdamW(sorted(model.named_parameters()))
        return Trainer(model, optimizer, [torch.ones(1, 2)])

    saved, trainer = build("first", "second"), build("second", "first")
    saved.fit(2)
    trainer.resume(copy.deepcopy(saved.state_dict()))
    saved.fit(4)
    trainer.fit(4)
    same(trainer.model.first.state_dict(), saved.model.first.state_dict())


@pytest.mark.parametrize("swapped", [False, True])
def test_order_within_parameter_groups(swapped):
    """Decay and no decay, as in nanoGPT: each group follows the order of the model."""

    def build(*names):
        model = TwoLayers(names)
        kinds = [[p for p in model.parameters() if p.dim() == dim] for dim in (2, 1)]
        optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds])
        return Trainer(model, optimizer, [torch.ones(1, 2)])

    saved = build("first", "second")
    trainer = build("second", "first") if swapped else build("first", "second")
    saved.fit(2)
    if swapped:
        with pytest.raises(CheckpointError, match=r"first\.weight where second\.weight is here"):
            trainer.resume(saved.state_dict())
    else:
        assert trainer.resume(saved.state_dict())


def test_an_order_that_is_not_the_models_is_left_alone():
    def build(*names):
        model = TwoLayers(names)
        optimizer = torch.optim.AdamW([p for _, p in sorted(model.named_parameters())])
        return Trainer(model, optimizer, [torch.ones(1, 2)])

    saved = build("first", "second")
    saved.fit(2)
    assert build("second", "first").resume(saved.state_dict())


def test_an_optimizer_of_a_part_of_the_model_has_its_order_compared_alone():
    def build(*names):
        model = TwoLayers(names)
        optimizer = torch.optim.AdamW(model.first.parameters())
        return Trainer(model, optimizer, [torch.ones(1, 2)])

    saved = build("first", "second")
    saved.fit(2)
    assert build("second", "first").resume(saved.state_dict())


OPTIMIZERS = {
    "SGD": {}, "Adam": {}, "AdamW": {"amsgrad": True}, "Adamax": {}, "NAdam": {}, "RAdam": {},
    "Adagrad": {}, "Adadelta": {}, "ASGD": {}, "RMSprop": {"centered": True}, "Rprop": {},
    "Adafactor": {},
}  # fmt: skip


def optimizer_trainer(kind, momentum=0.9):
    ckpt.seed_everything(1)
    model = Loss(dropout=0.0)
    options = {"momentum": momentum} if kind == "SGD" else OPTIMIZERS[kind]
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
    return Trainer(model, optimizer, [tuple(regression().tensors)])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_state_of_another_kind_of_optimizer_is_refused_or_works(kind):
    saved = optimizer_trainer(kind)
    saved.fit(2)
    state = copy.deepcopy(saved.state_dict())
    saved.fit(4)
    refused = set()
    for other in OPTIMIZERS:
        trainer = optimizer_trainer(other)
        before = snapshot(trainer)
        try:
            trainer.resume(state)
        except CheckpointError:
            same(snapshot(trainer), before)
            refused.add(other)
        else:
            trainer.fit(4)
        if other == kind:
            same(trainer.optimizer.state_dict(), saved.optimizer.state_dict())
    assert kind not in refused
    assert len(refused) >= 8  # Adam, AdamW, NAdam and RAdam share their state


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_without_state_resumes(momentum):
    saved = optimizer_trainer("SGD", momentum=0.0)
    saved.fit(2)
    trainer = optimizer_trainer("SGD", momentum=momentum)
    trainer.resume(copy.deepcopy(saved.state_dict()))
    trainer.fit(4)
    assert trainer.optimizer.param_groups[0]["momentum"] == 0.0  # the saved options count


def test_the_state_of_another_kind_of_scheduler_is_refused():
    def build(kind, **options):
        model = Weight()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = getattr(torch.optim.lr_scheduler, kind)(optimizer, **options)
        return Trainer(model, optimizer, ones(3), scheduler=scheduler)

    saved = build("StepLR", step_size=3)
    saved.fit(2)
    for other in (
        build("CosineAnnealingLR", T_max=5),
        build("OneCycleLR", max_lr=1, total_steps=9),
    ):
        before = snapshot(other)
        with pytest.raises(CheckpointError, match="scheduler: saved by another kind"):
            other.resume(saved.state_dict())
        same(snapshot(other), before)
    with pytest.raises(CheckpointError, match="scheduler: saved by another kind"):
        build("StepLR", step_size=3).resume({**saved.state_dict(), "scheduler": {}})
    parts = [torch.optim.lr_scheduler.ConstantLR(saved.optimizer) for _ in range(2)]
    several = torch.optim.lr_scheduler.SequentialLR(saved.optimizer, parts, [2]).state_dict()
    with pytest.raises(CheckpointError, match="scheduler: saved by another kind"):
        build("StepLR", step_size=3).resume({**saved.state_dict(), "scheduler": several})
    older = dict(saved.scheduler.state_dict(), verbose=False)
    assert build("StepLR", step_size=3).resume({**saved.state_dict(), "scheduler": older})


@pytest.mark.parametrize("names", [(None, wrap), (wrap, None), (compiled, None), (None, compiled)])
def test_an_optimizer_with_names_resumes_wrapped_and_bare(names):
    def build(wrapper):
        ckpt.seed_everything(1)
        model = Loss(dropout=0.0)
        model = wrapper(model) if wrapper else model
        optimizer = torch.optim.AdamW(model.named_parameters())
        return Trainer(model, optimizer, [tuple(regression().tensors)])

    saved, trainer = map(build, names)
    saved.fit(2)
    trainer.resume(copy.deepcopy(saved.state_dict()))
    saved.fit(4)
    trainer.fit(4)
    same(trainer.state_dict()["model"], saved.state_dict()["model"])


def test_a_lazy_model_resumes():
    def build():
        model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1))
        return Trainer(
            model, torch.optim.Adam(model.parameters()), [torch.ones(1, 3)],
            loss_fn=lambda model, batch: model(batch).mean(),
        )  # fmt: skip

    saved = build()
    saved.fit(2)
    trainer = build()
    trainer.resume(copy.deepcopy(saved.state_dict()))
    saved.fit(4)
    trainer.fit(4)
    same(trainer.state_dict()["model"], saved.state_dict()["model"])


class Delegates(torch.optim.Optimizer):
    """Wraps an optimizer and has its state, as some libraries do."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(vars(self)["inner"], name)

    state = property(lambda self: self.inner.state, lambda self, v: setattr(self.inner, "state", v))
    param_groups = property(
        lambda self: self.inner.param_groups, lambda self, v: setattr(self.inner, "param_groups", v)
    )

    def step(self, *args):
        return self.inner.step(*args)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad()

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


class OwnLayout(torch.optim.SGD):
    """Saves its state in a form of its own."""

    def state_dict(self):
        return {"base": super().state_dict(), "kind": "mine"}

    def load_state_dict(self, state):
        super().load_state_dict(state["base"])


class Global(torch.optim.SGD):
    """Keeps a tensor for the optimizer as a whole."""

    def step(self, closure=None):
        self.state["global"].setdefault("steps", torch.zeros(1)).add_(1)
        return super().step(closure)


@pytest.mark.parametrize("kind", ["Delegates", "OwnLayout", "Global", "hooked"])
def test_optimizers_of_ones_own_making_resume(kind):
    def build():
        ckpt.seed_everything(1)
        model = Loss(dropout=0.0)
        if kind == "Delegates":
            optimizer = Delegates(torch.optim.Adam(model.parameters()))
        elif kind == "hooked":  # a value of another shape beside Adam's own
            optimizer = torch.optim.Adam(model.parameters())

            def remember(optimizer, args, kwargs):
                for parameter in model.parameters():
                    optimizer.state[parameter]["seen"] = torch.ones(11)

            optimizer.register_step_post_hook(remember)
        else:
            optimizer = globals()[kind](model.parameters(), lr=0.1, momentum=0.9)
        return Trainer(model, optimizer, [tuple(regression().tensors)])

    saved = build()
    saved.fit(2)
    state = copy.deepcopy(saved.state_dict())
    kept = copy.deepcopy(state)
    saved.fit(4)
    for _ in range(2):
        trainer = build()
        trainer.resume(state)
        trainer.fit(4)
        same(trainer.state_dict()["optimizer"], saved.state_dict()["optimizer"])
        same(dict(trainer.model.state_dict()), dict(saved.model.state_dict()))
        same(state["optimizer"], kept["optimizer"])
    if kind == "OwnLayout":
        with pytest.raises(CheckpointError, match="not the state_dict of this optimizer"):
            trainer.resume({**state, "optimizer": saved.state_dict()["optimizer"]["base"]})


def test_a_scheduler_of_ones_own_making_may_have_changed():
    class Mine(torch.optim.lr_scheduler.StepLR):
        def step(self):
            self.warm = True
            super().step()

    def build():
        model = Weight()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return Trainer(model, optimizer, ones(3), scheduler=Mine(optimizer, 2))

    saved, trainer = build(), build()
    saved.fit(2)
    state = saved.state_dict()
    state["scheduler"]["gone"] = 1
    del state["scheduler"]["warm"]
    assert trainer.resume(state)


class Awkward:
    """Has no state before it was loaded, and one that cannot be copied after that."""

    loaded = None

    def state_dict(self):
        if self.loaded is None:
            raise RuntimeError("not started")
        return {"lock": threading.Lock(), "value": self.loaded}

    def load_state_dict(self, state):
        self.loaded = state["value"]


def test_extra_state_need_not_have_a_state_yet_nor_one_that_can_be_copied():
    awkward = Awkward()
    trainer = make(trainer={"extra_state": {"awkward": awkward}})
    state = {**make().state_dict(), "extra": {"awkward": {"value": 3, "lock": threading.Lock()}}}
    for _ in range(2):
        trainer.resume(state)
        assert awkward.loaded == 3


def test_a_frozen_parameter_does_not_count_in_the_order():
    def build():
        model = TwoLayers(["first", "second"])
        model.first.weight.requires_grad_(False)
        trainable = [p for p in model.parameters() if p.requires_grad]
        return Trainer(model, torch.optim.AdamW(trainable), [torch.ones(1, 2)])

    saved, trainer = build(), build()
    saved.fit(2)
    trainer.resume(copy.deepcopy(saved.state_dict()))
    same(trainer.optimizer.state_dict(), saved.optimizer.state_dict())


def test_what_only_one_side_has_is_named_in_one_warning(warned):
    saved = make(trainer={"precision": "fp16", "config": {"lr": 1, "a": {"b": 2}}})
    saved.fit(2)
    state = {**saved.state_dict(), "mine": 3, "coordinator": {"n": 1}}
    del state["samples"]
    trainer = make(
        trainer={
            "exact_resume": True, "extra_state": {"ema": Weight()},
            "config": {"lr": 2, "a": {"b": 2, "c": 3}},
        }
    )  # fmt: skip
    trainer.resume(state)
    assert len(warned()) == 1
    for note in (
        "without data", "without extra ema", "without samples", "mine is not used",
        "scaler is not used", "coordinator is not used", "config.lr was 1, is 2",
        "config.a.c was None, is 3", "precision.mode was 'fp16', is 'fp32'",
    ):  # fmt: skip
        assert note in warned()[0]
    assert "config.a.b" not in warned()[0]
    assert trainer.state_dict()["scaler"] is None
    assert (trainer.step, trainer.samples) == (2, 0)
    trainer.fit(4)


def test_a_run_without_differences_warns_of_nothing(tmp_path, warned):
    full_trainer(tmp_path).fit(3)
    full_trainer(tmp_path).resume()
    assert warned() == []


def test_a_checkpoint_without_scaler_into_an_fp16_run(warned):
    saved = make()
    saved.fit(2)
    trainer = make(trainer={"precision": "fp16"})
    trainer.resume(saved.state_dict())
    assert "without scaler" in warned()[0]
    trainer.fit(3)
    assert trainer.state_dict()["scaler"]["scale"] == 65536.0


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_of_ones_own_making(tmp_path, legacy, warned):
    saved = make()
    saved.fit(4)
    state = {
        "model": saved.model.state_dict(),
        "optimizer": saved.optimizer.state_dict(),
        "step": 4,
    }
    path = tmp_path / "step_000000000004.pt"
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    trainer = make(tmp_path)
    assert trainer.resume()
    assert (trainer.step, trainer.samples, trainer.tokens) == (4, 0, 0)
    same(trainer.optimizer.state_dict(), saved.optimizer.state_dict())
    assert len(warned()) == 1
    for name in ("rng", "samples", "tokens"):
        assert f"without {name}" in warned()[0]
    trainer.fit(5)


def test_resume_with_fallback(tmp_path, warned):
    make(tmp_path, every=1).fit(3)
    manager = CheckpointManager(tmp_path)
    flip_in(manager.path_for(3))
    trainer = make(tmp_path)
    assert trainer.resume(fallback=True)
    assert trainer.step == 2
    assert any("step_000000000003.pt" in message for message in warned())
    spoil(manager.path_for(3), "truncated")
    with pytest.raises(CheckpointError, match="step_000000000003"):
        make(tmp_path).resume()


def test_extra_state_of_any_kind(tmp_path):
    class Counter:
        def __init__(self):
            self.n = 0

        def state_dict(self):
            return {"n": self.n}

        def load_state_dict(self, state):
            self.n = state["n"]

    def build():
        counter = Counter()
        ema = torch.optim.swa_utils.AveragedModel(Loss())
        trainer = make(tmp_path, every=3, trainer={"extra_state": {"counter": counter, "ema": ema}})

        def on_step(trainer, loss):
            counter.n += 1
            ema.update_parameters(trainer.model)

        trainer.on_step = on_step
        return trainer, counter, ema

    trainer, _, ema = build()
    trainer.fit(3)
    other, other_counter, other_ema = build()
    other.resume()
    assert other_counter.n == 3  # updated in on_step, so the save has the newest
    same(dict(other_ema.state_dict()), dict(ema.state_dict()))


def test_by_default_the_loader_restarts(tmp_path):
    seen = []

    def loss_fn(model, batch):
        seen.append(int(batch[0]))
        return model.w * 1.0

    loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=1)
    manager = CheckpointManager(tmp_path, every_steps=3, fsync=False)
    weight_trainer(loader, loss_fn=loss_fn, checkpoint_manager=manager).fit(4)
    trainer = weight_trainer(loader, loss_fn=loss_fn, checkpoint_manager=manager)
    trainer.resume()
    trainer.fit(5)
    assert seen == [0, 1, 2, 3, 0, 1]


def test_resume_restores_the_generators_at_once(tmp_path):
    trainer = make(tmp_path, every=2)
    trainer.fit(2)
    expected = draw()
    other = make(tmp_path)
    other.resume()
    assert draw() == expected


def is_mapped(path):
    """Whether this process has the file, or what is left of it, in its memory."""
    return str(path) in Path("/proc/self/maps").read_text()


class Keeps:
    """Keeps what it is given, and notes whether the checkpoint is mapped meanwhile."""

    def __init__(self, path, seen):
        self.path, self.seen, self.state = path, seen, {"w": [torch.arange(5.0)]}

    def start(self): ...
    def stop(self): ...
    def after_optimizer_step(self, model, step): ...

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.seen.append(is_mapped(self.path))
        self.state = state


class KeepingModel(Loss):
    """A model whose extra state is a tensor, which it keeps."""

    extra = torch.arange(3.0)

    def get_extra_state(self):
        return {"a": self.extra}

    def set_extra_state(self, state):
        self.extra = state["a"]


class KeepingLoader(Keeps):
    def __iter__(self):
        return iter(DataLoader(regression(), batch_size=2))


class KeepingModule(Loss):
    """Keeps the very tensors that it is given."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(3))

    def _load_from_state_dict(self, state, prefix, *arguments):
        self.seen = state[prefix + "seen"]
        super()._load_from_state_dict(state, prefix, *arguments)


class PatchedModule(Loss):
    """Its instance has a method of its own."""

    def __init__(self):
        super().__init__()
        self.net[0].kept, usual = [], self.net[0]._load_from_state_dict

        def load(state, *arguments):
            self.net[0].kept.append(dict(state))
            usual(state, *arguments)

        self.net[0]._load_from_state_dict = load


class RedirectedModule(Loss):
    def __init__(self):
        super().__init__()
        usual = self.load_state_dict

        def load(state, *arguments, **options):
            self.kept = dict(state)
            return usual(state, *arguments, **options)

        self.load_state_dict = load


class HookedModule(Loss):
    def __init__(self):
        super().__init__()
        self.register_load_state_dict_pre_hook(self.keep)

    def keep(self, module, state, *arguments):
        self.kept = dict(state)


class KeepingOptimizer(torch.optim.SGD):
    def state_dict(self):
        return {**super().state_dict(), "shadow": torch.ones(3)}

    def load_state_dict(self, state):
        self.shadow = state["shadow"]
        super().load_state_dict(state)


class HookedOptimizer(torch.optim.SGD):
    def load_and_keep(self, optimizer, state):
        self.kept = state

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.register_load_state_dict_pre_hook(self.load_and_keep)


class ResettingOptimizer(torch.optim.SGD):
    def __setstate__(self, state):
        super().__setstate__(state)
        self.kept = list(state["state"].values())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        (KeepingModule, torch.optim.SGD),
        (HookedModule, torch.optim.SGD),
        (PatchedModule, torch.optim.SGD),
        (RedirectedModule, torch.optim.SGD),
        (Loss, KeepingOptimizer),
        (Loss, HookedOptimizer),
        (Loss, ResettingOptimizer),
    ],
)
def test_models_and_optimizers_that_keep_what_they_get_do_not_keep_the_file(
    tmp_path, model, optimizer
):
    def build():
        module = model()
        manager = CheckpointManager(tmp_path, every_steps=1, fsync=False)
        loader = DataLoader(regression(), batch_size=2)
        chosen = optimizer(module.parameters(), lr=0.1, momentum=0.9)
        return Trainer(module, chosen, loader, checkpoint_manager=manager)

    build().fit(1)
    trainer = build()
    assert trainer.resume()
    assert not is_mapped(tmp_path / "step_000000000001.pt")


def test_a_fallback_lets_go_of_the_file_at_once(tmp_path):
    make(tmp_path).fit(2)
    spoil(tmp_path / "step_000000000002.pt", "truncated")
    gc.disable()
    try:
        assert make(tmp_path).resume(fallback=True)
        assert not is_mapped(tmp_path / "step_000000000001.pt")
    finally:
        gc.enable()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resume_maps_the_file_and_lets_go_of_it_whoever_keeps_what_he_gets(tmp_path):
    def build():
        seen = []
        model = KeepingModel()
        rate = torch.tensor(0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=False, foreach=False)
        extra = {"kept": Keeps(path, seen), "model": KeepingModel()}
        extra["second"] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return seen, Trainer(
            model, optimizer, KeepingLoader(path, seen), coordinator=Keeps(path, seen),
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 3), extra_state=extra,
            checkpoint_manager=CheckpointManager(tmp_path, every_steps=2, fsync=False),
            exact_resume=True, on_step=lambda trainer, loss: extra["second"].step(),
        )  # fmt: skip

    path = tmp_path / "step_000000000002.pt"
    _, first = build()
    first.fit(2)
    seen, trainer = build()
    assert trainer.resume()
    assert seen == [True, True]
    assert not is_mapped(path)
    expected = torch.load(path)
    path.unlink()
    assert not is_mapped(path)
    same(trainer.state_dict(), expected)
    trainer.fit(3)  # which gives the coordinator what was kept for it
    assert seen == [True, True, False]
    same(trainer.coordinator.state, {"w": [torch.arange(5.0)]})


def test_a_resume_that_is_refused_lets_go_of_the_file_too(tmp_path):
    make(tmp_path).fit(1)
    trainer = make(tmp_path)
    trainer.model.net[0] = nn.Linear(3, 5)
    with pytest.raises(CheckpointError, match="does not fit"):
        trainer.resume()
    assert not is_mapped(tmp_path / "step_000000000001.pt")


def test_what_load_latest_returns_does_not_hold_the_file(tmp_path):
    manager = manager_with(tmp_path, [1])
    state = manager.load_latest()
    assert not is_mapped(manager.path_for(1))
    assert state == {"step": 1}


class Convolution(nn.Module):
    """Its one weight is above 4 MiB, and in another order of strides."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        weight = torch.zeros(512, 256, 3, 3, dtype=dtype).to(memory_format=torch.channels_last)
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return (self.weight * x).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_optimizer_state_keeps_its_strides_and_is_resumed_to_the_bit(tmp_path, dtype):
    def build():
        model = Convolution(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        manager = CheckpointManager(tmp_path, every_steps=1, fsync=False)
        return Trainer(model, optimizer, ones(2), checkpoint_manager=manager)

    first, second = build(), build()
    first.fit(2)
    assert second.resume()
    same(second.state_dict(), first.state_dict())
    moment = second.optimizer.state[second.model.weight]["exp_avg"]
    assert moment.stride() == first.optimizer.state[first.model.weight]["exp_avg"].stride()
    assert moment.data_ptr() % 64 == 0
    first.fit(3)
    second.fit(3)
    same(second.state_dict(), first.state_dict())


def memory_of(function, size):
    """The most memory that function() had beyond what it found, in parts of size; files mapped
    into it are not counted."""

    def anonymous():
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) * 1024

    def watch():
        while not done:
            peaks.append(anonymous())

    before, peaks, done = anonymous(), [0], []
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        function()
    finally:
        done.append(True)
        watcher.join()
    return (max(peaks) - before) / size


def save_and_resume_large(directory):
    def build():
        model = nn.ParameterList([torch.ones(2_000_000) for _ in range(8)])
        optimizer = torch.optim.AdamW(model.parameters())
        manager = CheckpointManager(directory, fsync=False)
        return Trainer(model, optimizer, ones(1), checkpoint_manager=manager)

    size, trainer = 12 * 16_000_000, build()
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    trainer.step = 1
    manager = trainer.checkpoint_manager
    assert memory_of(lambda: manager.save(1, trainer.state_dict()), size) < 0.05
    resumed = build()
    assert 0.6 < memory_of(resumed.resume, size) < 0.75  # 2/3 is what the optimizer has from now on
    same(resumed.optimizer.state_dict(), trainer.optimizer.state_dict())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_saving_takes_no_memory_and_resuming_no_more_than_the_optimizer_needs(tmp_path):
    in_child(save_and_resume_large, tmp_path)


# --------------------------------------------------------------------------------------------------
# Signals
# --------------------------------------------------------------------------------------------------
class Interrupts(nn.Module):
    """Sends this process a signal in the middle of the third backward pass."""

    def __init__(self, number):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 1)
        self.number, self.passes = number, 0

    def forward(self, x, y):
        hidden = self.a(x)
        if self.training:
            hidden.register_hook(self.interrupt)
        return ((self.b(hidden).squeeze(-1) - y) ** 2).mean()

    def interrupt(self, grad):
        self.passes += 1
        if self.passes == 3 and self.number:
            os.kill(os.getpid(), self.number)


def interrupted_trainer(directory, number, **options):
    ckpt.seed_everything(1)
    model = Interrupts(number)
    manager = CheckpointManager(directory, every_steps=100, fsync=False)
    loader = DataLoader(regression(), batch_size=2, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters())
    return Trainer(model, optimizer, loader, checkpoint_manager=manager, **options)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_in_the_middle_of_a_backward_pass(tmp_path, number):
    before = signal.getsignal(number)
    trainer = interrupted_trainer(tmp_path, number, save_on_signal=(number,))
    result = trainer.fit(10)
    assert (result.steps, result.stop_reason) == (3, signal.Signals(number).name)
    assert signal.getsignal(number) is before
    whole = interrupted_trainer(tmp_path / "other", None)
    whole.fit(3)
    resumed = interrupted_trainer(tmp_path, None)
    resumed.resume()
    same(resumed.state_dict(), whole.state_dict())


def test_ctrl_c_passes_through_untouched_when_it_was_not_asked_for(tmp_path):
    trainer = interrupted_trainer(tmp_path, signal.SIGINT, save_on_signal=(signal.SIGTERM,))
    before = signal.getsignal(signal.SIGTERM)
    found = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(10)
    finally:
        signal.signal(signal.SIGINT, found)
    assert listing(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) is before


def two_signals(directory):
    def on_step(trainer, loss):
        os.kill(os.getpid(), signal.SIGTERM)
        (directory / "survived the first").touch()
        os.kill(os.getpid(), signal.SIGTERM)
        (directory / "survived the second").touch()

    make(
        directory, every=100, trainer={"save_on_signal": [signal.SIGTERM], "on_step": on_step}
    ).fit(9)


def test_after_the_first_signal_its_handler_is_the_one_before(tmp_path):
    """The system's own ends a process that is stuck where Python runs no handler."""
    before, found = signal.getsignal(signal.SIGTERM), []

    def on_step(trainer, loss):
        os.kill(os.getpid(), signal.SIGTERM)
        found.append(signal.getsignal(signal.SIGTERM))

    trainer = make(tmp_path, trainer={"on_step": on_step, "save_on_signal": [signal.SIGTERM]})
    assert trainer.fit(3).stop_reason == "SIGTERM"
    assert found == [before]


def test_a_second_signal_acts_as_if_we_were_not_there(tmp_path):
    in_child(two_signals, tmp_path, exitcode=-signal.SIGTERM)
    assert listing(tmp_path) == ["survived the first"]


class SignalsAll(Dataset):
    """Its worker sends the whole process group SIGTERM in the middle of a batch."""

    def __len__(self):
        return 20

    def __getitem__(self, i):
        if i == 7:
            os.killpg(0, signal.SIGTERM)
            time.sleep(0.2)
        return torch.tensor(float(i))


def touch(path, worker):
    path.touch()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_signal_to_the_whole_group_spares_the_workers(tmp_path, persistent, method):
    in_child(check_group_signal, tmp_path, persistent, method)
    assert listing(tmp_path) == ["latest.json", "seeds", "step_000000000004.pt"]


def check_group_signal(directory, persistent, method):
    os.setsid()
    multiprocessing.set_start_method(method, force=True)
    loader = DataLoader(
        SignalsAll(), batch_size=2, num_workers=2, persistent_workers=persistent, prefetch_factor=1,
        worker_init_fn=functools.partial(touch, directory / "seeds"),
    )  # fmt: skip
    init = loader.worker_init_fn
    manager = CheckpointManager(directory, every_steps=100, fsync=False)
    trainer = weight_trainer(
        loader, checkpoint_manager=manager, save_on_signal=[signal.SIGTERM], exact_resume=True,
        on_step=lambda trainer, loss: time.sleep(0.3),
    )  # fmt: skip
    trainer.loss_fn = lambda model, batch: model(batch)
    result = trainer.fit(10)
    assert loader.worker_init_fn is init
    assert result.stop_reason == "SIGTERM"
    assert result.steps in (2, 3)
    os.rename(manager.latest_path(), manager.path_for(4))


class Stuck(Dataset):
    """Its worker hangs in the middle of a batch."""

    def __init__(self, directory):
        self.directory = directory

    def __len__(self):
        return 4

    def __getitem__(self, i):
        if i == 2:
            (self.directory / "pid").write_text(str(os.getpid()))
            for _ in range(600):
                time.sleep(0.1)
        return torch.tensor(float(i))


def two_signals_to_the_group(directory):
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)

    def send():
        while not (directory / "pid").exists():
            time.sleep(0.05)
        for _ in range(2):
            time.sleep(0.3)
            os.killpg(0, signal.SIGTERM)

    threading.Thread(target=send).start()
    manager = CheckpointManager(directory / "run")
    trainer = weight_trainer(
        DataLoader(Stuck(directory), num_workers=1),
        checkpoint_manager=manager,
        save_on_signal=[signal.SIGTERM],
    )
    trainer.fit(10)


def test_a_second_signal_ends_a_worker_that_is_stuck(tmp_path):
    in_child(two_signals_to_the_group, tmp_path, exitcode=-signal.SIGTERM)
    stat_file = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
    deadline = time.monotonic() + 5
    while stat_file.exists() and stat_file.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the worker lives on"
        time.sleep(0.1)


EXIT_SCRIPT = """
import os, signal, sys, time
import torch, ckpt
if __name__ == "__main__":
    torch.multiprocessing.set_start_method("fork")
    model = torch.nn.Linear(1, 1)
    trainer = ckpt.Trainer(
        model, torch.optim.SGD(model.parameters(), 0.01),
        torch.utils.data.DataLoader(torch.ones(400, 1), 2, num_workers=2),
        loss_fn=lambda model, batch: model(batch).mean(), exact_resume=True,
        checkpoint_manager=ckpt.CheckpointManager(sys.argv[1]), save_on_signal=[signal.SIGTERM],
        on_step=lambda t, _: sys.argv[2] == "signalled" and t.step == 3 and os.killpg(0, 15),
    )
    print(trainer.fit(5).stop_reason, flush=True)
    if sys.argv[2] == "failed":
        raise SystemExit(7)
"""


@pytest.mark.parametrize("how", ["quiet", "signalled", "failed"])
def test_the_process_ends_while_workers_are_alive(tmp_path, how):
    """Each worker has to obey when the interpreter terminates it, and the signal itself not."""
    script = tmp_path / "script.py"
    script.write_text(EXIT_SCRIPT)
    with tempfile.TemporaryDirectory() as scratch:  # a worker that is terminated cleans nothing up
        done = subprocess.run(
            [sys.executable, script, tmp_path / "run", how], timeout=40, start_new_session=True,
            capture_output=True, text=True, env={**os.environ, "TMPDIR": scratch},
        )  # fmt: skip
    assert done.returncode == (7 if how == "failed" else 0)
    assert done.stdout.split() == ["SIGTERM" if how == "signalled" else "max_steps"]
    assert done.stderr == ""


def test_a_signal_upon_a_step_that_is_saved_anyway_saves_once(tmp_path, monkeypatch):
    calls = record_calls(monkeypatch)
    trainer = make(tmp_path, every=2, trainer={"save_on_signal": [signal.SIGTERM]})
    trainer.on_step = lambda t, _: t.step == 2 and os.kill(os.getpid(), signal.SIGTERM)
    assert trainer.fit(2).stop_reason == "SIGTERM"
    assert len(calls) == 2


def test_a_signal_while_the_coordinator_starts(tmp_path):
    asked = []

    class Waits:
        should_stop = staticmethod(lambda: False)

        def start(self):
            os.kill(os.getpid(), signal.SIGTERM)
            asked.append(self.should_stop())

        def stop(self):
            asked.append("stopped")

        def state_dict(self):
            return {}

    trainer = make(tmp_path, trainer={"save_on_signal": [signal.SIGTERM], "coordinator": Waits()})
    result = trainer.fit(5)
    assert (result.steps, result.stop_reason, result.final_loss) == (0, "SIGTERM", None)
    assert asked == [True, "stopped"]
    assert listing(tmp_path) == []  # nothing was trained


def test_signals_are_left_alone_outside_the_main_thread(tmp_path, warned):
    before, results = signal.getsignal(signal.SIGTERM), []
    trainer = make(tmp_path, trainer={"save_on_signal": [signal.SIGTERM]})
    trainer.on_step = lambda *_: results.append(signal.getsignal(signal.SIGTERM) is before)
    thread = threading.Thread(target=trainer.fit, args=(2,))
    thread.start()
    thread.join()
    assert results == [True, True]
    assert "main thread" in warned()[0]


# --------------------------------------------------------------------------------------------------
# Bit-exact resume
# --------------------------------------------------------------------------------------------------
class Noisy(Dataset):
    """Random augmentation that draws from Python, NumPy and torch."""

    def __len__(self):
        return 22

    def __getitem__(self, i):
        noise = random.random() + np.random.rand() + torch.rand(3)
        return torch.full((3,), i / 22.0) + noise, torch.tensor(i / 22.0)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*regression().tensors, strict=True))


class OwnGenerator(torch.utils.data.Sampler):
    def __init__(self, generator):
        self.generator = generator

    def __len__(self):
        return 22

    def __iter__(self):
        return iter(torch.randperm(22, generator=self.generator).tolist())


class Epochs(torch.utils.data.Sampler):
    """Its order depends on the epoch alone."""

    epoch = 99

    def __len__(self):
        return 22

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(
            torch.randperm(22, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        )


def shuffled(dataset=None, **options):
    return DataLoader(dataset or regression(), batch_size=2, shuffle=True, **options)


def generator():
    return torch.Generator().manual_seed(11)


def stateful(**options):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(regression(), batch_size=2, **options)


LOADERS = {
    "shuffle": lambda: shuffled(),
    "shuffle, generator": lambda: shuffled(generator=generator()),
    "sampler's generator": lambda: DataLoader(
        regression(), batch_size=2, sampler=OwnGenerator(generator())
    ),
    "batch sampler's generator": lambda: DataLoader(
        regression(),
        batch_sampler=torch.utils.data.BatchSampler(OwnGenerator(generator()), 2, False),
    ),
    "set_epoch": lambda: DataLoader(regression(), batch_size=2, sampler=Epochs()),
    "with replacement": lambda: DataLoader(
        regression(), batch_size=2, sampler=RandomSampler(range(22), replacement=True)
    ),
    "augmented": lambda: shuffled(Noisy()),
    "2 workers": lambda: shuffled(num_workers=2),
    "2 workers, augmented": lambda: shuffled(Noisy(), num_workers=2),
    "2 workers, augmented, generator": lambda: shuffled(
        Noisy(), num_workers=2, generator=generator()
    ),
    "persistent": lambda: shuffled(num_workers=2, persistent_workers=True),
    "persistent, generator": lambda: shuffled(
        num_workers=2, persistent_workers=True, generator=generator()
    ),
    "iterable": lambda: DataLoader(Stream(), batch_size=2),
    "iterable, 2 workers": lambda: DataLoader(Stream(), batch_size=2, num_workers=2),
    "list": lambda: list(DataLoader(regression(), batch_size=2)),
    "StatefulDataLoader": lambda: stateful(shuffle=True),
    "StatefulDataLoader, generator": lambda: stateful(shuffle=True, generator=generator()),
    "StatefulDataLoader, 2 workers": lambda: stateful(shuffle=True, num_workers=2),
}


def exact_trainer(kind, directory, every, precision="fp32", accumulation_steps=3):
    torch.set_num_threads(1)
    ckpt.seed_everything(1)
    loader = LOADERS[kind]()
    model = Loss(width=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    manager = CheckpointManager(directory, every_steps=every, fsync=False)
    return Trainer(
        model, optimizer, loader, precision=precision, accumulation_steps=accumulation_steps,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20), clip_grad_norm=1.0,
        checkpoint_manager=manager, exact_resume=True,
    )  # fmt: skip


def train(kind, directory, every, until, kill_at, options):
    """One life of a run: it is killed right after kill_at's update, before that step's save."""
    os.setsid()  # its workers die with it
    multiprocessing.set_start_method("fork", force=True)  # not the server's way, which is slower
    logging.getLogger("ckpt").setLevel(logging.ERROR)
    trainer = exact_trainer(kind, directory, every, **options)
    trainer.resume()
    if kill_at:
        trainer.on_step = lambda t, _: t.step == kill_at and kill_me_and_my_workers()
    trainer.fit(until)
    ckpt.atomic_torch_save(trainer.state_dict(), directory / "end.pt", fsync=False)


def compare_with_an_unbroken_run(tmp_path, kind, every, kills, until, **options):
    directory = tmp_path / "killed"

    def kill_and_resume():
        for kill_at in kills:
            in_child(train, kind, directory, every, until, kill_at, options, exitcode=-9)
        in_child(train, kind, directory, every, until, None, options)

    whole_run = (train, kind, tmp_path / "whole", every, until, None, options)
    in_child(*whole_run, meanwhile=kill_and_resume)
    whole, killed = (torch.load(tmp_path / d / "end.pt") for d in ("whole", "killed"))
    if "Stateful" not in kind:  # theirs holds iterators' details
        same(killed, whole)
    for name in SCHEMA:
        same(killed[name], whole[name], name)


# 11 batches an epoch, 3 to a step: steps 4 to 7 lie in the second epoch, 11 steps are 3 epochs.
@pytest.mark.parametrize("kind", LOADERS)
def test_killed_and_resumed_in_one_epoch_equals_unbroken(tmp_path, kind):
    if "Stateful" in kind:
        pytest.importorskip("torchdata")
    compare_with_an_unbroken_run(tmp_path, kind, 1, (5, 7), 12)


@pytest.mark.parametrize("kind", ["shuffle", "shuffle, generator", "list", "StatefulDataLoader"])
def test_killed_after_the_last_batch_of_an_epoch(tmp_path, kind):
    if "Stateful" in kind:
        pytest.importorskip("torchdata")
    compare_with_an_unbroken_run(tmp_path, kind, 11, (12,), 14)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_killed_under_autocast(tmp_path, precision):
    compare_with_an_unbroken_run(tmp_path, "shuffle", 2, (5,), 8, precision=precision)


def test_killed_in_the_middle_of_an_epoch_without_accumulation(tmp_path):
    compare_with_an_unbroken_run(tmp_path, "2 workers", 4, (7, 14), 16, accumulation_steps=1)


def test_killed_before_the_first_save_starts_again(tmp_path):
    compare_with_an_unbroken_run(tmp_path, "shuffle", 5, (3, 4), 6)


class Recorder:
    """A loader that notes the batches that it gave."""

    def __init__(self, loader):
        self.loader, self.given = loader, []

    def __iter__(self):
        for (batch,) in self.loader:
            self.given.append(batch.tolist())
            yield (batch,)


def numbers(count=8, batch=2, **options):
    return DataLoader(TensorDataset(torch.arange(float(count))), batch_size=batch, **options)


def recorded(directory, loader, every=1, exact=True):
    """A trainer that notes the batches it trained on."""
    used = []

    def loss_fn(model, batch):
        used.append(batch[0].tolist())
        return model(*batch)

    manager = CheckpointManager(directory, every_steps=every, fsync=False)
    trainer = weight_trainer(
        loader, loss_fn=loss_fn, checkpoint_manager=manager, exact_resume=exact, lr=0.01
    )
    return trainer, used


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 8])
def test_every_sample_once_wherever_the_run_stopped(tmp_path, stop):
    ckpt.seed_everything(4)
    whole, expected = recorded(tmp_path / "whole", numbers(shuffle=True))
    whole.fit(12)
    ckpt.seed_everything(4)
    first, used = recorded(tmp_path / "a", numbers(shuffle=True))
    first.fit(stop)
    ckpt.seed_everything(999)
    second, rest = recorded(tmp_path / "a", numbers(shuffle=True))
    second.resume()
    second.fit(12)
    assert used + rest == expected
    for epoch in range(3):
        samples = {i for batch in expected[4 * epoch : 4 * epoch + 4] for i in batch}
        assert samples == set(range(8))


def test_batches_that_workers_have_prefetched_do_not_count(tmp_path):
    in_child(check_prefetched, tmp_path)


def check_prefetched(directory):
    loader = numbers(count=40, shuffle=False, num_workers=2, prefetch_factor=4)
    trainer, used = recorded(directory, loader)
    trainer.fit(3)
    assert trainer.state_dict()["data"]["batch"] == 3
    resumed, rest = recorded(directory, numbers(count=40, num_workers=2, prefetch_factor=4))
    resumed.resume()
    resumed.fit(5)
    assert used + rest == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


class EpochSpy:
    def __init__(self, calls, name, length=4):
        self.calls, self.name, self.length = calls, name, length

    def set_epoch(self, epoch):
        self.calls.append((self.name, epoch))

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return (torch.tensor(float(i)),)

    def __iter__(self):
        self.calls.append((self.name, "iterated"))
        return iter(range(self.length))


@pytest.mark.parametrize("exact", [True, False])
def test_set_epoch_comes_before_each_epoch_and_on_resume(tmp_path, exact):
    def build():
        calls = []
        loader = DataLoader(EpochSpy(calls, "dataset"), sampler=EpochSpy(calls, "sampler"))
        manager = CheckpointManager(tmp_path, every_steps=1, fsync=False)
        trainer = weight_trainer(loader, checkpoint_manager=manager, exact_resume=exact)
        return trainer, calls

    trainer, calls = build()
    trainer.fit(6)
    epoch = [("sampler", 0), ("dataset", 0), ("sampler", "iterated")]
    assert calls == [*epoch, ("sampler", 1), ("dataset", 1), ("sampler", "iterated")]
    trainer, calls = build()
    trainer.resume()
    trainer.fit(7)
    number = 1 if exact else 0
    assert calls == [("sampler", number), ("dataset", number), ("sampler", "iterated")]


class OwnState:
    """A loader that keeps its position itself."""

    def __init__(self):
        self.position, self.calls = 0, []

    def state_dict(self):
        self.calls.append(("saved", self.position))
        return {"position": self.position}

    def load_state_dict(self, state):
        self.calls.append(("loaded", state["position"]))
        self.position = state["position"]

    def __iter__(self):
        while self.position < 5:
            self.position += 1
            yield (torch.tensor(float(self.position)),)
        self.position = 0


@pytest.mark.parametrize("stop", [3, 5, 7])
def test_a_loader_that_keeps_its_own_position_is_asked(tmp_path, stop):
    loader = OwnState()
    trainer, used = recorded(tmp_path, loader, every=stop)
    trainer.fit(stop)
    assert loader.calls == [("saved", (stop - 1) % 5 + 1)]
    other = OwnState()
    resumed, rest = recorded(tmp_path, other)
    resumed.resume()
    assert other.calls == [("loaded", (stop - 1) % 5 + 1)]
    resumed.fit(12)
    assert used + rest == [float(i % 5 + 1) for i in range(12)]


def test_an_iterator_cannot_be_replayed_and_goes_on(tmp_path, warned):
    trainer, _ = recorded(tmp_path, iter([(torch.tensor(1.0),)] * 9))
    trainer.fit(2)
    resumed, used = recorded(tmp_path, iter([(torch.tensor(2.0),)] * 9))
    resumed.resume()
    assert len(warned()) == 1
    assert "cannot be replayed" in warned()[0]
    resumed.fit(4)
    assert used == [2.0, 2.0]


def test_a_loader_that_has_become_shorter_goes_on(tmp_path, warned):
    trainer, _ = recorded(tmp_path, numbers(8))
    trainer.fit(3)
    resumed, used = recorded(tmp_path, numbers(4))
    resumed.resume()
    assert len(warned()) == 2
    assert "an epoch had 4 batches, has 2" in warned()[0]
    assert "ended after 2 of 3 batches" in warned()[1]
    resumed.fit(5)
    assert used == [[0, 1], [2, 3]]


def test_a_loader_of_another_length_is_warned_about(tmp_path, warned):
    recorded(tmp_path, numbers(8))[0].fit(3)
    for count, batch, differs in [(8, 2, False), (7, 2, False), (8, 4, True), (16, 2, True)]:
        recorded(tmp_path, numbers(count, batch))[0].resume()
        assert any("an epoch had 4 batches" in message for message in warned()) == differs


def test_a_replay_that_breaks_off_is_begun_again(tmp_path):
    """Interrupted in mid-epoch, and once more while the way back there is replayed."""
    taken, interrupt_at = [], [5, 8]

    class Counting(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            taken.append(i)
            if len(taken) in interrupt_at:
                raise KeyboardInterrupt
            return torch.tensor([float(i)])

    trainer, used = recorded(tmp_path, DataLoader(Counting(), batch_size=1))
    trainer.loss_fn = lambda model, batch: (used.append(batch.tolist()), model(batch))[1]
    for _ in interrupt_at:
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(8)
    trainer.fit(8)
    assert used == [[[float(i)]] for i in range(8)]
    assert taken[:8] == [0, 1, 2, 3, 4, 0, 1, 2]


class Interrupted(Noisy):
    """Raises, or ends its worker, once, in the midst of an epoch."""

    def __init__(self, flag, how):
        self.flag, self.how = flag, how

    def __getitem__(self, i):
        if i == 5 and self.how and not self.flag.exists():
            self.flag.touch()
            if self.how == "worker":
                os._exit(1)
            raise KeyboardInterrupt
        if torch.utils.data.get_worker_info() is None:  # what it has drawn here is drawn
            return torch.full((3,), i / 22.0), torch.tensor(i / 22.0)
        return super().__getitem__(i)


def interrupted_run(directory, how, workers):
    ckpt.seed_everything(3)
    model = Loss()
    dataset = Interrupted(directory / "flag", how)
    loader = (
        DataLoader(
            dataset, batch_size=2, shuffle=True, num_workers=workers, multiprocessing_context="fork"
        )
        if workers
        else DataLoader(dataset, batch_size=2, shuffle=True)
    )
    used = []

    def loss_fn(model, batch):
        used.append(batch[0].tolist())
        return model(*batch)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, loader, exact_resume=True, loss_fn=loss_fn)
    if how:
        with pytest.raises((KeyboardInterrupt, RuntimeError, OSError, EOFError)):
            trainer.fit(20)
    trainer.fit(20)
    torch.save({"used": used, "model": model.state_dict()}, directory / f"{how}.pt")


@pytest.mark.parametrize(("how", "workers"), [("here", 0), ("worker", 2)])
def test_an_iterator_that_breaks_is_replaced_at_its_place(tmp_path, how, workers):
    in_child(interrupted_run, tmp_path, None, workers)
    in_child(interrupted_run, tmp_path, how, workers)
    whole, broken = (torch.load(tmp_path / f"{name}.pt") for name in (None, how))
    assert (tmp_path / "flag").exists()
    same(broken, whole)


def test_a_loader_that_fails_in_the_replay_changes_nothing(tmp_path):
    class Fails:
        generator = torch.Generator().manual_seed(5)
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            yield (torch.rand(1, generator=self.generator),)
            raise KeyError("gone")

    trainer, _ = recorded(tmp_path, numbers(8, shuffle=True, generator=generator()))
    trainer.fit(7)
    loader = Fails()
    resumed, _ = recorded(tmp_path, loader)
    before = snapshot(resumed)
    assert "loader" in before[0]["data"]["generators"]
    with pytest.raises(CheckpointError, match="gone"):
        resumed.resume()
    same(snapshot(resumed), before)
    assert loader.epoch == 0


class EpochData:
    """Gives items that say which epoch they belong to."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.tensor(100.0 * self.epoch + i)


REFUSED = {
    "plain": lambda: DataLoader(EpochData(), batch_size=1),
    "own position": OwnState,
    "persistent": lambda: numbers(4, 1, num_workers=1, persistent_workers=True),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refused_resume_leaves_a_running_trainer_where_it_is(tmp_path, kind):
    in_child(check_refused_resume, tmp_path, kind)


def check_refused_resume(directory, kind):
    def build(name):
        used = []
        model = Weight()
        trainer = Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), REFUSED[kind](), exact_resume=True,
            loss_fn=lambda model, batch: (used.append(str(batch)), model.w * 1.0)[1],
            extra_state={"mine": Refuses()},
        )  # fmt: skip
        return trainer, used

    whole, expected = build("whole")
    whole.fit(12)
    trainer, used = build("trainer")
    trainer.fit(2)
    state = copy.deepcopy(trainer.state_dict())
    trainer.fit(7)
    with pytest.raises(CheckpointError, match="refused"):
        trainer.resume(state)
    trainer.fit(12)
    assert used == expected


def test_a_window_that_breaks_off_has_not_been_trained_on(warned):
    def build(break_at=None):
        used = []

        def loss_fn(model, batch):
            if len(used) == break_at:
                raise KeyboardInterrupt
            used.append(batch[0].tolist())
            return model.w * 1.0

        loader = numbers(10, shuffle=True, generator=generator())
        model = Weight()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return used, Trainer(
            model, optimizer, loader, loss_fn=loss_fn, accumulation_steps=3, exact_resume=True
        )

    expected, whole = build()
    whole.fit(5)
    for break_at in (4, 5, 1):  # 5: after the end of the first epoch
        used, trainer = build(break_at)
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(5)
        rest, resumed = build()
        resumed.resume(copy.deepcopy(trainer.state_dict()))
        assert "unfinished step" in warned()[-1]
        resumed.fit(5)
        done = 3 * (break_at // 3)
        assert used[:done] + rest == expected


def test_generators_are_restored_last(tmp_path):
    trainer = make(tmp_path, every=3, trainer={"exact_resume": True})
    trainer.fit(3)
    expected = draw()
    other = make(tmp_path, trainer={"exact_resume": True})
    other.resume()
    assert draw() == expected


def test_what_is_drawn_between_resume_and_fit_does_not_count(tmp_path):
    whole = make(tmp_path, every=3, trainer={"exact_resume": True})
    whole.fit(7)
    expected = copy.deepcopy(whole.state_dict())
    resumed = make(trainer={"exact_resume": True})
    resumed.resume(CheckpointManager(tmp_path).load_latest())
    saved = copy.deepcopy(resumed.state_dict())
    list(DataLoader(regression()))  # draws a number even when it does not shuffle
    draw()
    same(resumed.state_dict(), saved)
    resumed.fit(7)
    same(resumed.state_dict(), expected)


def test_persistent_workers_are_warned_about_from_the_second_epoch_on(tmp_path):
    in_child(check_persistent, tmp_path)


def check_persistent(directory):
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append
    logging.getLogger("ckpt").addHandler(handler)
    for steps, warnings_ in ((2, 0), (6, 1)):
        loader = lambda: numbers(8, num_workers=1, persistent_workers=True)  # noqa: E731
        trainer, _ = recorded(directory / str(steps), loader())
        trainer.fit(steps)
        recorded(directory / str(steps), loader())[0].resume()
        assert len(records) == warnings_


@pytest.mark.parametrize("exact", [True, False])
def test_a_second_fit_goes_on_in_the_same_epoch_or_restarts_it(tmp_path, exact):
    trainer, used = recorded(tmp_path, numbers(8), exact=exact)
    trainer.fit(2)
    trainer.fit(4)
    assert used == [[0, 1], [2, 3]] + ([[4, 5], [6, 7]] if exact else [[0, 1], [2, 3]])


def test_an_evaluation_and_an_ema_in_on_step(tmp_path):
    def build(directory):
        trainer = make(directory, every=1, trainer={"exact_resume": True})
        ema = copy.deepcopy(trainer.model)
        held_out = DataLoader(regression(6), batch_size=2, shuffle=True)

        def on_step(trainer, loss):
            trainer.model.eval()
            with torch.no_grad():
                for mine, theirs in zip(ema.parameters(), trainer.model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
                for batch in held_out:
                    trainer.model(*batch)

        trainer.extra_state, trainer.on_step = {"ema": ema}, on_step
        return trainer

    whole = build(tmp_path / "whole")
    whole.fit(9)
    expected = copy.deepcopy(whole.state_dict())
    build(tmp_path / "run").fit(5)
    resumed = build(tmp_path / "run")
    resumed.resume()
    resumed.fit(9)
    same(resumed.state_dict(), expected)


def test_resuming_twice_in_one_process(tmp_path):
    trainer = make(tmp_path, every=5, keep_last=None, trainer={"exact_resume": True})
    trainer.fit(12)
    expected = copy.deepcopy(trainer.state_dict())
    for _ in range(2):
        state = torch.load(trainer.checkpoint_manager.path_for(5), weights_only=False)
        trainer.resume(state)
        trainer.fit(12)
        same(trainer.state_dict(), expected)


def test_exact_resume_of_a_checkpoint_taken_before_the_first_step():
    whole = make(trainer={"exact_resume": True})
    state = copy.deepcopy(whole.state_dict())
    whole.fit(13)
    resumed = make(trainer={"exact_resume": True})
    ckpt.seed_everything(5)
    resumed.resume(state)
    resumed.fit(13)
    same(resumed.state_dict(), whole.state_dict())


# --------------------------------------------------------------------------------------------------
# Hub
# --------------------------------------------------------------------------------------------------
class Renaming(fsspec.implementations.dirfs.DirFileSystem):
    """A store with a rename of its own that is no directory to ckpt, as SFTP has it."""

    protocol = "renaming"
    calls: typing.ClassVar = []

    def __init__(self, **options):
        super().__init__("/", fs=fsspec.filesystem("file"), **options)

    def mv(self, source, target, **options):
        self.calls.append((os.path.basename(source), os.path.basename(target)))
        assert os.path.getsize(source) > 0
        os.replace(source, target)


fsspec.register_implementation("renaming", Renaming, clobber=True)


@pytest.fixture(params=["directory", "memory://", "renaming://"])
def hub(request, tmp_path):
    where = tmp_path / "hub"
    if request.param == "memory://":
        where = f"memory://{tmp_path.name}"
    return Hub(f"renaming://{where}" if request.param == "renaming://" else where)


def test_a_hub_holds_named_bytes(hub):
    assert hub.list("nodes") == []
    with pytest.raises(FileNotFoundError):
        hub.read("nodes/a/alive.json")
    with pytest.raises(FileNotFoundError):
        hub.size("nodes/a/alive.json")
    hub.write("nodes/a/alive.json", b"one")
    hub.write("nodes/a/alive.json", b"three")
    hub.write("nodes/b.json", b"x" * 100)
    assert hub.read("nodes/a/alive.json") == b"three"
    assert hub.read("nodes/a/alive.json", 2) == b"th"
    assert hub.read("nodes/a/alive.json", 1000) == b"three"
    assert hub.size("nodes/b.json") == 100
    assert hub.list("nodes") == ["a", "b.json"]
    assert hub.list("nodes/a") == ["alive.json"]
    hub.delete("nodes/b.json")
    hub.delete("nodes/b.json")
    assert hub.list("nodes") == ["a"]


def test_another_program_sees_what_was_written_and_the_hub_what_that_writes(tmp_path):
    hub = Hub(tmp_path / "hub")
    hub.write("global/a", b"1")
    assert hub.list("global") == ["a"]
    assert (tmp_path / "hub" / "global" / "a").read_bytes() == b"1"
    (tmp_path / "hub" / "global" / "b").write_bytes(b"22")
    assert hub.list("global") == ["a", "b"]
    assert hub.size("global/b") == 2


NAMES = [
    "", "/", "a/", "/a", "../x", "a/../../x", "..", ".", "a/./b", ".hidden", "a/.b", "a\\b",
    "a\0", "a b", "ä", "~", "a\n",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_never_leave_the_hub(tmp_path, name):
    hub = Hub(tmp_path / "in" / "hub")
    for use in (hub.read, hub.list, hub.delete, hub.size, lambda name: hub.write(name, b"")):
        with pytest.raises(ValueError, match="name must be"):
            use(name)
    assert listing(tmp_path) == []


def test_links_out_of_the_hub_are_not_listed(tmp_path):
    (tmp_path / "hub" / "nodes").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "hub" / "nodes" / "a").symlink_to(tmp_path / "secret")
    (tmp_path / "hub" / "nodes" / "b").symlink_to("/etc/hostname")
    os.mkfifo(tmp_path / "hub" / "nodes" / "c")
    assert Hub(tmp_path / "hub").list("nodes") == []


def test_a_directory_hub_writes_durably(tmp_path, monkeypatch):
    hub = Hub(tmp_path)
    calls = record_calls(monkeypatch)
    hub.write("latest.json", b"1")
    assert calls == ["fsync file", "replace", "fsync directory"]


def test_a_store_that_can_rename_gets_a_temporary_name_first(tmp_path, monkeypatch):
    hub = Hub(f"renaming://{tmp_path}")
    Renaming.calls.clear()
    hub.write("global/a", b"1")
    ((temporary, target),) = Renaming.calls
    assert re.fullmatch(r"\.a\.tmp-[0-9a-f]{16}", temporary)
    assert target == "a"
    monkeypatch.setattr(Renaming, "mv", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hub.write("global/a", b"2")
    assert listing(tmp_path / "global") == ["a"]
    assert hub.read("global/a") == b"1"


def test_what_is_no_hub(tmp_path):
    with pytest.raises(ValueError, match=r"url must be .* got 'nonsense://x'"):
        Hub("nonsense://x")
    with pytest.raises(ValueError, match="url must be"):
        Hub("")
    with pytest.raises(TypeError, match="url"):
        Hub(3)
    with pytest.raises(ImportError, match=r"(?i)install"):
        Hub("dropbox://x")


def write_over_and_over(directory):
    hub = Hub(directory)
    for number in range(300):
        hub.write("nodes/a/delta", bytes([number % 256]) * 100_000)


def test_a_reader_of_a_directory_hub_never_sees_a_part(tmp_path):
    hub, seen = Hub(tmp_path), set()

    def read():
        while (names := hub.list("nodes/a")) != ["delta"]:
            assert names == []
        while len(seen) < 10:
            assert hub.list("nodes/a") == ["delta"]
            assert hub.size("nodes/a/delta") == 100_000
            data = hub.read("nodes/a/delta")
            assert data == data[:1] * 100_000
            seen.add(data[0])

    in_child(write_over_and_over, tmp_path, meanwhile=read)
    assert len(seen) == 10


# --------------------------------------------------------------------------------------------------
# DumbDiLoCo: what it is given
# --------------------------------------------------------------------------------------------------
class Vector(nn.Module):
    """Parameters that a test moves by hand."""

    def __init__(self, values=(1.0,), dtype=torch.float32):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values, dtype=dtype))


def node_of(hub, name="a", values=(1.0,), model=None, **options):
    options = {"role": "master" if name == "a" else "worker", "inner_steps": 1, **options}
    model = Vector(values) if model is None else model
    return DumbDiLoCo(model, hub, node_id=name, **{"poll_interval": 0.02, **options})


@pytest.fixture
def by_hand(monkeypatch):
    """Exchanges run when the test says exchange(node), and once in start()."""

    def once(self):
        try:
            self.exchange()
        except Exception as error:
            self.error = error
        self.tries += 1

    monkeypatch.setattr(ckpt._Exchange, "_run", once)


def exchange(*nodes):
    for node in nodes:
        node._exchange.exchange()


def move(node, down=0.0, index=...):
    with torch.no_grad():
        node.model.w[index] -= down
    return node.after_optimizer_step(node.model, 1)


def global_on(hub):
    pointer = json.loads(hub.read("global/latest.json"))
    data = hub.read(f"global/{pointer['file']}")
    assert (len(data), hashlib.sha256(data).hexdigest()) == (pointer["bytes"], pointer["sha256"])
    shared = torch.load(io.BytesIO(data), weights_only=True)
    assert shared["outer_step"] == pointer["outer_step"]
    assert pointer["file"] == f"step_{pointer['outer_step']:012}.pt"
    return shared


def deltas_on(hub):
    return [f"{n}/{f}" for n in hub.list("nodes") for f in hub.list(f"nodes/{n}") if "delta" in f]


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "a\\b", "..", ".hidden", "", "a\0", "a" * 65, "ä", "a\n", "-a"]
)
def test_node_ids_are_names_of_folders(tmp_path, name):
    with pytest.raises(ValueError, match="node_id must be"):
        DumbDiLoCo(Vector(), tmp_path / "hub", node_id=name)
    assert listing(tmp_path) == []


BAD = {
    "role": ["boss", None], "inner_steps": [0, 1.5, True], "poll_interval": [0, -1, "1", True],
    "blocking": ["no", 1], "outer_lr": [0, -0.1, "x", math.nan],
    "outer_momentum": [-0.1, 1, "x", math.nan],
    "quorum": [0, 1.5], "node_timeout": [0, "x"], "delta_dtype": [torch.float64, "fp32"],
    "node_id": [3], "hub": [3, None, object()], "model": [None, nn.Linear],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_bad_arguments_of_a_node_are_named(tmp_path, name, value):
    arguments = {"model": Vector(), "hub": tmp_path / "hub", "node_id": "a", name: value}
    with pytest.raises((ValueError, TypeError), match=name) as raised:
        DumbDiLoCo(arguments.pop("model"), arguments.pop("hub"), **arguments)
    if name not in ("hub", "model"):
        assert repr(value) in str(raised.value)
    assert listing(tmp_path) == []


def odd_models():
    yield "lazy", nn.LazyLinear(2)
    yield "meta", nn.Linear(2, 2, device="meta")
    yield "complex", nn.Linear(2, 2, dtype=torch.complex64)
    yield "none", nn.ReLU()


@pytest.mark.parametrize("name", ["lazy", "meta", "complex", "none"])
def test_models_that_cannot_be_shared(tmp_path, name):
    with pytest.raises(ValueError, match="model"):
        DumbDiLoCo(dict(odd_models())[name], tmp_path, node_id="a")


def test_a_hub_may_be_any_object_with_its_methods(by_hand):
    class Dict:
        def __init__(self):
            self.files = {}

        def read(self, name, limit=None):
            if name not in self.files:
                raise FileNotFoundError(name)
            return self.files[name][:limit]

        def write(self, name, data):
            self.files[name] = data

        def list(self, folder):
            found = [n for n in self.files if n.startswith(f"{folder}/")]
            return sorted({n[len(folder) + 1 :].partition("/")[0] for n in found})

        def delete(self, name):
            self.files.pop(name, None)

        def size(self, name):
            return len(self.read(name))

    node = node_of(Dict(), outer_lr=1.0, outer_momentum=0.0)
    node.start()
    move(node, 0.25)
    exchange(node)
    move(node)
    assert node.model.w.item() == 0.75
    assert global_on(node.hub)["model"]["w"].item() == 0.75


def test_calls_out_of_order(tmp_path, by_hand):
    node = node_of(tmp_path)
    with pytest.raises(RuntimeError, match="call start"):
        node.after_optimizer_step(node.model, 1)
    node.stop()
    node.start()
    with pytest.raises(RuntimeError, match="already"):
        node.start()
    state = node.state_dict()
    move(node)
    with pytest.raises(RuntimeError, match="is training"):
        node.load_state_dict(state)
    node.stop()
    node.load_state_dict(state)
    node.start()


# --------------------------------------------------------------------------------------------------
# DumbDiLoCo: the arithmetic
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("blocking", [False, True])
def test_two_rounds_with_a_master_rebuilt_from_the_hub(tmp_path, by_hand, blocking):
    hub = Hub(tmp_path)
    options = {"quorum": 2, "outer_momentum": 0.9, "inner_steps": 2, "blocking": blocking}
    one = node_of(hub, "a", **options)
    one.start()
    move(one)  # which publishes version 0
    exchange(one)
    for expected in (0.601, 0.0319):
        one, two = node_of(hub, "a", **options), node_of(hub, "b", **options)
        for node, down in ((one, 0.2), (two, 0.4)):
            node.start()
            node.should_stop = lambda: True  # not to wait where nobody else runs
            move(node, down / 2)
            move(node, down / 2)
            exchange(node)
        exchange(one, two)
        assert global_on(hub)["model"]["w"].item() == pytest.approx(expected, abs=1e-6)
        assert one._exchange.fetched.step == two._exchange.fetched.step
        exchange(one)  # what has been applied is deleted
        assert deltas_on(hub) == []
    assert global_on(hub)["outer_step"] == 2


def test_plain_averaging(tmp_path, by_hand):
    hub, options = Hub(tmp_path), {"quorum": 2, "outer_lr": 1.0, "outer_momentum": 0.0}
    one, two = node_of(hub, "a", **options), node_of(hub, "b", **options)
    one.start()
    move(one, 0.2)
    exchange(one)
    two.start()
    move(two, 0.4)
    exchange(two, one)
    assert global_on(hub)["model"]["w"].item() == pytest.approx(0.7)
    assert global_on(hub)["momentum"] is None


@pytest.mark.parametrize(
    ("blocking", "momentum"), [(False, 0.5), (True, 0.9)], ids=["free", "blocking"]
)
def test_defaults_of_the_two_modes(tmp_path, blocking, momentum):
    node = DumbDiLoCo(Vector(), tmp_path, node_id="a", role="master", blocking=blocking)
    assert (node.outer_momentum, node.outer_lr) == (momentum, 0.7)
    assert node.quorum == (0 if blocking else 1)
    assert node.inner_steps == 500


class Task(nn.Module):
    """A small network without dropout, and its loss on random data of a seed."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.data = torch.Generator().manual_seed(seed)

    def step(self, optimizer):
        x = torch.randn(16, 3, generator=self.data)
        optimizer.zero_grad()
        ((self.net(x).squeeze(-1) - x.sum(1).sin()) ** 2).mean().backward()
        optimizer.step()


def textbook(nodes, rounds, inner_steps):
    """DiLoCo in one process, of torch's own optimizers."""
    models = [Task(seed) for seed in range(nodes)]
    inner = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    shared = Task()
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(rounds):
        for model, optimizer in zip(models, inner, strict=True):
            for _ in range(inner_steps):
                model.step(optimizer)
        for number, parameter in enumerate(shared.parameters()):
            ours = [list(model.parameters())[number].detach() for model in models]
            parameter.grad = sum(parameter.detach() - our for our in ours) / nodes
        outer.step()
        for model in models:
            model.load_state_dict(shared.state_dict())
    return shared


def in_threads(*functions):
    with concurrent.futures.ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(50) for future in [pool.submit(f) for f in functions]]


def train_blocking(hub, number, nodes, rounds, inner_steps, role):
    model = Task(number)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    node = node_of(
        hub,
        f"n{number}",
        model=model,
        role=role,
        inner_steps=inner_steps,
        blocking=True,
        quorum=nodes,
    )
    node.start()
    changed = []
    for step in range(1, rounds * inner_steps + 1):
        model.step(optimizer)
        if node.after_optimizer_step(model, step):
            changed.append(step)
    node.stop()
    assert changed == [inner_steps * (i + 1) for i in range(rounds)]
    return model


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("extra_master", [False, True])
def test_blocking_is_textbook_diloco(tmp_path, nodes, extra_master):
    hub, rounds, inner_steps = Hub(tmp_path), 5, 7
    if extra_master:
        options = {"role": "master", "blocking": True, "quorum": nodes}
        master = node_of(hub, "extra", model=Task(), **options)
        master.start()
    models = in_threads(
        *(
            functools.partial(
                train_blocking, hub, i, nodes, rounds, inner_steps,
                "worker" if i or extra_master else "master",
            )
            for i in range(nodes)
        )
    )  # fmt: skip
    if extra_master:
        master.stop()
    expected = textbook(nodes, rounds, inner_steps)
    for model in models:
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert (ours - theirs).abs().max() <= 1e-6
    assert global_on(hub)["outer_step"] == rounds
    assert global_on(hub)["applied"] == {f"n{i}": rounds for i in range(nodes)}
    assert max(len(hub.list(f"nodes/n{i}")) for i in range(nodes)) <= 1


def solo(rounds, work, momentum):
    """Outer steps by hand, all work done on the newest weights."""
    w = nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([w], lr=0.7, momentum=momentum, nesterov=True)
    for _ in range(rounds):
        w.grad = torch.full((1,), work)
        sgd.step()
    return w.item()


def test_one_node_alone_makes_outer_steps(tmp_path, by_hand):
    node = node_of(tmp_path, inner_steps=2)
    node.start()
    for version in range(5):
        assert node.outer_step == max(0, version - 1)
        assert move(node, 0.05) is (version > 0)
        assert move(node, 0.05) is False
        exchange(node)
    move(node)
    assert node.model.w.item() == pytest.approx(solo(5, 0.1, 0.5), abs=1e-6)


def test_one_node_alone_blocking(tmp_path):
    node = node_of(tmp_path, inner_steps=2, blocking=True)
    node.start()
    for version in range(1, 6):
        assert move(node, 0.05) is False
        assert move(node, 0.05) is True
        assert node.model.w.item() == pytest.approx(solo(version, 0.1, 0.9), abs=1e-6)
    node.stop()
    assert node.hub.list("nodes/a") in ([], ["delta_000000000005.pt"])


def test_a_newer_shared_model_is_put_under_the_work_done_meanwhile(tmp_path, by_hand):
    hub, options = Hub(tmp_path), {"outer_lr": 1.0, "outer_momentum": 0.0, "inner_steps": 2}
    one, two = node_of(hub, "a", **options), node_of(hub, "b", **options)
    one.start()
    move(one)
    exchange(one)
    two.start()
    move(two, 0.25)
    move(two, 0.25)  # captured
    exchange(two)
    assert move(two, 0.125) is False  # done while that is on its way
    exchange(one)  # version 1: 1 - 0.5 / 2
    exchange(two)
    assert two.model.w.item() == 1 - 0.625
    assert move(two, 0.0625) is True
    assert two.model.w.item() == 0.75 - 0.1875  # the delta is in version 1, the rest is not
    exchange(two)
    state = two.state_dict()
    assert state["pending_upload"]["delta"]["w"].item() == 0.1875
    assert state["baseline"].keys() == {"w"}
    assert state["baseline"]["w"].item() == two.model.w.item()


def test_a_delta_in_flight_stays_in_the_model(tmp_path, by_hand):
    hub, options = Hub(tmp_path), {"outer_lr": 1.0, "outer_momentum": 0.0}
    one, two = node_of(hub, "a", inner_steps=2, **options), node_of(hub, "b", **options)
    one.start()
    move(one)
    exchange(one)
    two.start()
    move(two, 0.25)  # captured, and not uploaded yet
    move(one, 0.5)
    exchange(one)  # version 1: 1 - 0.5
    two._exchange._send = lambda: None
    exchange(two)
    assert move(two) is True
    assert two.model.w.item() == 0.5 - 0.25  # and not 0.5
    del two._exchange._send
    exchange(two, one, two)
    move(two)
    assert two.model.w.item() == 0.5 - 0.125  # now it is in the mean of two


def test_a_node_has_one_delta_in_flight(tmp_path, by_hand):
    hub = Hub(tmp_path)
    one, two = node_of(hub, "a"), node_of(hub, "b")
    one.start()
    move(one)
    exchange(one)
    two.start()
    for _ in range(5):
        move(two, 0.125)
        exchange(two)
    assert hub.list("nodes/b") == ["alive.json", "delta_000000000001.pt"]
    exchange(one, two)
    move(two)  # what was done since the first is in the second
    assert two.state_dict()["pending_upload"]["delta"]["w"].item() == 0.5


def running_stats(hub, name, mean, var, count):
    model = nn.BatchNorm1d(2)
    node = node_of(hub, name, model=model, blocking=False, quorum=2)
    node.start()
    model.running_mean.fill_(mean)
    model.running_var.fill_(var)
    model.num_batches_tracked.fill_(count)
    return node


def test_batch_norm_statistics_are_averaged_and_counters_are_not(tmp_path, by_hand):
    hub = Hub(tmp_path)
    one = running_stats(hub, "a", 1.0, 0.5, 9)
    one.after_optimizer_step(one.model, 1)
    exchange(one)
    two = running_stats(hub, "b", 3.0, 0.001, 7)
    for version in range(1, 4):
        for node in (one, two):
            node.after_optimizer_step(node.model, 1)
            exchange(node)
        exchange(one, two)
        shared = global_on(hub)["model"]
        assert global_on(hub)["outer_step"] == version
        assert torch.equal(shared["running_mean"], torch.full((2,), 2.0))
        assert torch.allclose(shared["running_var"], torch.full((2,), 0.2505), rtol=1e-6)
        assert shared["num_batches_tracked"].dtype == torch.int64
        assert shared["num_batches_tracked"].item() == 9
    # free-running, the buffers of a node are its own
    assert one.model.running_mean[0].item() == 1.0
    assert one.model.num_batches_tracked.item() == 9
    for node in (one, two):
        node.model.num_batches_tracked.fill_(5)
        node.after_optimizer_step(node.model, 1)
        exchange(node)
    exchange(one)
    assert global_on(hub)["outer_step"] == 4
    joiner = node_of(hub, "c", model=nn.BatchNorm1d(2))
    joiner.start()
    assert torch.equal(joiner.model.running_mean, torch.full((2,), 2.0))
    assert joiner.model.num_batches_tracked.item() == 9


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("flags", torch.tensor([True, False]))


def test_tied_frozen_masked_compiled(tmp_path, by_hand):
    hub, options = Hub(tmp_path), {"outer_lr": 1.0, "outer_momentum": 0.0}
    plain, other = Tied(), Tied()
    one = node_of(hub, "a", model=plain, **options)
    one.start()
    before = plain.embedding.weight.detach().clone()
    with torch.no_grad():
        plain.embedding.weight -= 1
    one.after_optimizer_step(plain, 1)
    exchange(one)
    names = ["embedding.weight", "flags", "frozen", "mask"]
    shared = global_on(hub)["model"]
    assert sorted(shared) == names
    assert torch.allclose(shared["embedding.weight"], before - 1)
    assert torch.equal(shared["mask"], plain.mask)
    assert torch.equal(shared["flags"], plain.flags)
    two = node_of(hub, "b", model=torch.compile(other), **options)
    two.start()
    assert torch.equal(other.embedding.weight, shared["embedding.weight"])
    assert other.head.weight is other.embedding.weight
    two.after_optimizer_step(other, 1)
    assert sorted(two.state_dict()["pending_upload"]["delta"]) == names


def test_bf16_parameters_have_an_outer_copy_in_fp32(tmp_path):
    model = Vector([512.0, 3.0], dtype=torch.bfloat16)
    options = {"outer_lr": 0.1, "outer_momentum": 0.0, "quorum": 1, "blocking": True}
    node = node_of(tmp_path, model=model, **options)
    node.start()
    for _ in range(9):
        assert move(node, 2.0, 0)  # one step of bf16 below 512
        assert model.w.dtype == torch.bfloat16
    node.stop()
    shared = global_on(node.hub)["model"]["w"]
    assert shared.dtype == torch.float32
    # Nine times 0.2, although bf16 knows nothing between 510 and 512.
    assert shared[0].item() == pytest.approx(512 - 9 * 0.2, abs=1e-3)
    assert shared[1].item() == 3.0


def test_a_bf16_model_gives_no_delta_for_its_own_rounding(tmp_path, by_hand):
    hub = Hub(tmp_path)
    one = node_of(hub, values=[1.0009765])
    one.start()
    move(one)
    exchange(one)
    two = node_of(hub, "b", model=Vector([0.0], dtype=torch.bfloat16))
    two.start()
    assert two.model.w.item() == 1.0
    for _ in range(3):
        two.after_optimizer_step(two.model, 1)
        pending = two.state_dict()["pending_upload"]["delta"]["w"]
        assert torch.equal(pending, torch.zeros(1))
        exchange(two, one, two)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_a_small_delta_dtype_rounds_away_goes_with_the_next(tmp_path, by_hand, dtype):
    options = {"outer_lr": 1.0, "outer_momentum": 0.0, "delta_dtype": dtype}
    node = node_of(tmp_path, values=[1.0, 1.0], **options)
    node.start()
    move(node, torch.tensor([1.00048828125, 70000.0]))
    delta = node.state_dict()["pending_upload"]["delta"]["w"]
    assert delta.dtype == dtype
    assert delta[0].item() == 1.0
    assert delta.isfinite().all()
    for _ in range(4):
        exchange(node)
        move(node)
    shared = global_on(node.hub)["model"]["w"]
    assert shared.dtype == torch.float32
    assert torch.equal(shared, torch.tensor([1 - 1.00048828125, 1 - 70000.0]))


# --------------------------------------------------------------------------------------------------
# DumbDiLoCo: state
# --------------------------------------------------------------------------------------------------
def roundtrip(state):
    """As a checkpoint has it, loaded without running code."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


KEYS = """
    baseline baseline_generation last_global_step last_uploaded_step local_step node_id outer
    pending_delta pending_delta_step pending_upload role
""".split()


def test_the_state_of_a_node(tmp_path, by_hand):
    node = node_of(tmp_path)
    same(roundtrip(node.state_dict()), node.state_dict())
    node.start()
    move(node, 0.5)
    exchange(node)
    move(node, 0.25)
    state = roundtrip(node.state_dict())
    assert sorted(state) == KEYS
    assert (state["node_id"], state["role"], state["local_step"]) == ("a", "master", 2)
    assert (state["last_global_step"], state["last_uploaded_step"]) == (1, 1)
    assert (state["pending_delta"], state["pending_delta_step"]) == (None, None)
    assert state["baseline_generation"] == 2
    pending = state["pending_upload"]
    names = ["base_outer_step", "baseline_generation", "delta", "step", "target"]
    assert sorted(pending) == names
    assert (pending["step"], pending["base_outer_step"]) == (2, 1)
    assert pending["baseline_generation"] == 2
    same(pending["delta"], {"w": torch.tensor([0.25])})
    same(pending["target"], state["baseline"])
    assert sorted(state["outer"]) == ["applied", "model", "momentum", "outer_step"]
    assert state["outer"]["applied"] == {"a": 1}
    exchange(node)
    worker = node_of(tmp_path, "b")
    worker.start()
    assert worker.state_dict()["outer"] is None


def test_a_pending_upload_is_one_copy_of_the_model(tmp_path, by_hand):
    node = node_of(tmp_path, "a", values=[0.0] * 1000, role="worker")
    other = node_of(tmp_path, "m", values=[0.0] * 1000, role="master")
    other.start()
    move(other)
    exchange(other)
    node.start()
    move(node, 1.0)
    storages = {}
    pending = node.state_dict()["pending_upload"]
    for tensors in (node.state_dict()["baseline"], pending["delta"], pending["target"]):
        for tensor in tensors.values():
            storages[tensor.untyped_storage().data_ptr()] = tensor.nbytes
    assert sum(storages.values()) == 2 * 4000  # the baseline and the delta
    memory = pending["delta"]["w"].data_ptr()
    exchange(node, other, node)
    move(node, 1.0)
    assert node.state_dict()["pending_upload"]["delta"]["w"].data_ptr() == memory


def work_of(step):
    return torch.tensor([step * 0.125, 1.0 / (step + 2)])


def run_steps(node, steps, deltas, stop=None):
    for step in steps:
        move(node, work_of(step))
        if step != stop:  # killed between its checkpoint and what the thread does
            exchange(node)
        pending = node.state_dict()["pending_upload"]
        if pending is not None:
            deltas[pending["baseline_generation"]] = copy.deepcopy(pending["delta"])


@pytest.mark.parametrize("stop", range(1, 13))
def test_a_checkpoint_at_any_step_gives_the_same_deltas(tmp_path, by_hand, stop):
    """H3 and its neighbours: the process dies at each step of several rounds, and goes on."""
    expected, found = {}, {}
    whole = node_of(tmp_path / "whole", values=[1.0, 2.0], inner_steps=5)
    whole.start()
    run_steps(whole, range(1, 18), expected)
    node = node_of(tmp_path / "parts", values=[1.0, 2.0], inner_steps=5)
    node.start()
    run_steps(node, range(1, stop + 1), found, stop)
    state = roundtrip({"model": node.model.state_dict(), "node": node.state_dict()})
    again = node_of(tmp_path / "parts", values=[1.0, 2.0], inner_steps=5)
    ckpt.load_model_state_dict(again.model, state["model"])
    again.start()
    again.load_state_dict(state["node"])
    same(again.model.state_dict(), state["model"])
    same(again.state_dict()["baseline"], state["node"]["baseline"])
    again._exchange.opens = 0
    exchange(again)
    run_steps(again, range(stop + 1, 18), found)
    same(found, expected)
    assert len(found) == 3
    same(again.model.state_dict(), whole.model.state_dict())
    same(again.state_dict(), whole.state_dict())


def damaged_states(state):
    for name in state:
        if not name.startswith("pending_delta") and name != "role":
            yield f"without {name}", {k: v for k, v in state.items() if k != name}
    for name in ("local_step", "baseline_generation", "last_global_step", "last_uploaded_step"):
        yield f"{name} -1", {**state, name: -1}
    other = {"w": torch.zeros(3)}
    yield "another shape", {**state, "baseline": other}
    yield "another name", {**state, "baseline": {"v": torch.zeros(1)}}
    yield "another dtype", {**state, "baseline": {"w": torch.zeros(1, dtype=torch.float64)}}
    yield "nan", {**state, "baseline": {"w": torch.tensor([math.nan])}}
    yield "no dict", {**state, "pending_upload": 3}
    yield "pending shape", {**state, "pending_upload": {**state["pending_upload"], "delta": other}}
    yield "outer shape", {**state, "outer": {**state["outer"], "model": other}}
    yield "outer empty", {**state, "outer": {}}


def test_a_state_that_does_not_fit_changes_nothing(tmp_path, by_hand):
    first = node_of(tmp_path)
    first.start()
    move(first, 0.5)
    state = copy.deepcopy(first.state_dict())
    node = node_of(tmp_path / "other")
    node.start()
    before = copy.deepcopy(node.state_dict()), node.model.w.item()
    names = []
    for name, damaged in damaged_states(state):
        with pytest.raises(CheckpointError, match="not the state"):
            node.load_state_dict(damaged)
        same(node.state_dict(), before[0])
        names.append(name)
    assert len(names) == 20
    with pytest.raises(TypeError):
        node.load_state_dict(None)
    node.load_state_dict(state)
    same(node.state_dict(), state)


def test_a_loaded_state_is_not_changed_by_training(tmp_path, by_hand):
    first = node_of(tmp_path)
    first.start()
    move(first, 0.5)
    exchange(first)
    state = roundtrip(first.state_dict())
    expected = copy.deepcopy(state)
    node = node_of(tmp_path)
    node.start()
    node.load_state_dict(state)
    for _ in range(3):
        move(node, 0.5)
        exchange(node)
    same(state, expected)


def test_state_may_be_loaded_before_start(tmp_path, by_hand):
    first = node_of(tmp_path, inner_steps=2)
    first.start()
    move(first, 0.5)
    exchange(first)
    state = roundtrip({"model": first.model.state_dict(), "node": first.state_dict()})
    node = node_of(tmp_path, inner_steps=2)
    ckpt.load_model_state_dict(node.model, state["model"])
    node.load_state_dict(state["node"])
    same(node.state_dict(), state["node"])
    node.start()
    assert node.model.w.item() == 0.5
    same(node.state_dict(), state["node"])


def test_the_state_of_another_node_only_gives_a_master_the_model(tmp_path, by_hand, warned):
    first = node_of(tmp_path, outer_lr=1.0, outer_momentum=0.0)
    first.start()
    for _ in range(2):
        move(first, 0.25)
        exchange(first)
    state = roundtrip({"model": first.model.state_dict(), "node": first.state_dict()})
    other = node_of(tmp_path / "new", "b", role="master")
    ckpt.load_model_state_dict(other.model, state["model"])
    other.start()
    other.load_state_dict(state["node"])
    assert warned() == ["b joins anew: the state is that of a"]
    assert other.model.w.item() == 0.5
    assert other.outer_step == 2
    assert other.state_dict()["pending_upload"] is None
    move(other)
    exchange(other)
    assert global_on(other.hub)["outer_step"] >= 2
    assert global_on(other.hub)["applied"]["a"] == 2


def test_work_that_the_hub_knows_is_not_counted_again(tmp_path, by_hand):
    """The process goes back to a checkpoint that is older than its last delta."""
    hub, options = Hub(tmp_path), {"outer_lr": 1.0, "outer_momentum": 0.0}
    master, node = node_of(hub, **options), node_of(hub, "b", **options)
    master.start()
    move(master)
    exchange(master)
    for applied in (False, True):
        node = node_of(hub, "b", **options)
        node.start()
        shared = global_on(hub)["model"]["w"].item()
        assert node.model.w.item() == shared
        node.after_optimizer_step(node.model, 1)  # a delta of zero
        exchange(node, master, node)
        saved = roundtrip({"model": node.model.state_dict(), "node": node.state_dict()})
        move(node, 0.5)
        exchange(node)
        if applied:
            exchange(master)
        again = node_of(hub, "b", **options)
        ckpt.load_model_state_dict(again.model, saved["model"])
        again.start()
        again.load_state_dict(saved["node"])
        exchange(again, master, again)
        move(again)
        exchange(again, master, again)
        move(again)
        assert global_on(hub)["model"]["w"].item() == shared - 0.25  # the mean of two, once
        assert again.model.w.item() == shared - 0.25
        exchange(again, master)


def team_of_two(hub, **options):
    """A master that takes no part, at version 0, and a node of it. Both count for the mean."""
    options = {"outer_lr": 1.0, "outer_momentum": 0.0, **options}
    master, node = node_of(hub, **{**options, "inner_steps": 99}), node_of(hub, "b", **options)
    master.start()
    move(master)
    exchange(master)
    node.start()
    return master, node


def saved(node):
    return roundtrip({"model": node.model.state_dict(), "node": node.state_dict()})


def resumed(node, state):
    ckpt.load_model_state_dict(node.model, state["model"])
    node.start()
    node.load_state_dict(state["node"])
    return node


def test_back_before_a_delta_that_is_on_its_way(tmp_path, by_hand):
    """The work after the checkpoint is in that delta; the shared model is still the same."""
    master, node = team_of_two(tmp_path, inner_steps=2)
    move(node, 0.5)
    state = saved(node)
    move(node, 0.25)
    exchange(node)
    node = resumed(node_of(tmp_path, "b", inner_steps=2), state)
    assert node.model.w.item() == 1 - 0.75
    assert node.state_dict()["baseline_generation"] == 1
    assert node.state_dict()["baseline"]["w"].item() == 1 - 0.75
    same(node.state_dict()["pending_upload"]["delta"], {"w": torch.tensor([0.75])})
    exchange(node, master, master, node)
    move(node)
    assert node.model.w.item() == 1 - 0.375


def test_back_before_a_delta_that_is_applied_and_gone(tmp_path, by_hand):
    master, node = team_of_two(tmp_path, inner_steps=2)
    move(node, 0.5)
    state = saved(node)
    move(node, 0.25)
    exchange(node, master, master)
    assert deltas_on(node.hub) == []
    node = resumed(node_of(tmp_path, "b", inner_steps=2), state)
    assert node.model.w.item() == 1 - 0.375
    move(node)
    assert torch.equal(node.state_dict()["pending_upload"]["delta"]["w"], torch.zeros(1))
    assert node.state_dict()["baseline_generation"] == 2


def test_a_state_that_is_loaded_late_does_not_take_back_what_was_published(tmp_path, by_hand):
    """More than a moment after start() a master has begun, with what it found on the Hub."""
    master, node = team_of_two(tmp_path)
    state = saved(master)
    master = node_of(tmp_path, outer_lr=1.0, outer_momentum=0.0, inner_steps=99)
    ckpt.load_model_state_dict(master.model, state["model"])
    master.start()
    master._exchange.opens = 0
    move(node, 0.5)
    exchange(node, master, master)
    assert deltas_on(node.hub) == []
    master.load_state_dict(state["node"])
    exchange(master)
    assert global_on(node.hub)["applied"] == {"b": 1}
    assert global_on(node.hub)["model"]["w"].item() == 0.75
    assert master.model.w.item() == 0.75


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_branches_with_one_number(tmp_path, by_hand, dtype):
    """A run without the checkpoint has used the number; then the checkpoint comes back."""
    master, node = team_of_two(tmp_path)
    move(node, 0.5)
    state = saved(node)  # its delta 1 was never uploaded
    fresh = node_of(tmp_path, "b", delta_dtype=dtype)
    fresh.start()
    move(fresh, 0.125)
    exchange(fresh)
    node = resumed(node_of(tmp_path, "b"), state)
    assert node.model.w.item() == 1 - 0.125
    exchange(node, master)
    assert global_on(master.hub)["model"]["w"].item() == 1 - 0.125 / 2  # not written over


def test_a_number_that_somebody_else_has_used_up(tmp_path, by_hand, warned):
    master, node = team_of_two(tmp_path)
    master.hub.write(f"nodes/b/delta_{9:012}.pt", b"garbage")
    exchange(master, master, master, node)
    assert global_on(master.hub)["applied"] == {"b": 9}
    move(node, 0.5)
    assert node.state_dict()["baseline_generation"] == 10
    exchange(node, master)
    assert global_on(master.hub)["applied"] == {"b": 10}
    assert global_on(master.hub)["model"]["w"].item() == 0.75


def test_a_blocking_node_that_resumes_waits_for_its_round_first(tmp_path, by_hand):
    master, node = team_of_two(tmp_path, quorum=1)
    node.blocking, node.should_stop = True, lambda: True
    move(node, 0.5)
    state = saved(node)
    again = node_of(tmp_path, "b", blocking=True)
    ckpt.load_model_state_dict(again.model, state["model"])
    again.start()
    thread = threading.Thread(target=again.load_state_dict, args=(state["node"],))
    thread.start()
    time.sleep(0.2)
    assert thread.is_alive()
    exchange(again, master, again)
    thread.join(20)
    assert not thread.is_alive()
    assert again.model.w.item() == 0.75
    assert again.outer_step == 1
    assert again.state_dict()["pending_upload"] is None


def test_a_round_that_start_has_waited_for_counts_for_the_state_too(tmp_path, by_hand):
    """Blocking, its own delta is on the Hub: start() waits for it, then comes load_state_dict()."""
    master, node = team_of_two(tmp_path, quorum=1)
    node.blocking, node.should_stop = True, lambda: True
    move(node, 0.5)
    exchange(node)
    state = saved(node)
    again = node_of(tmp_path, "b", blocking=True)
    ckpt.load_model_state_dict(again.model, state["model"])
    thread = threading.Thread(target=again.start)
    thread.start()
    wait_until(lambda: again._settled)
    exchange(master, again)
    thread.join(20)
    assert again.outer_step == 1
    again.load_state_dict(state["node"])  # returns
    assert again.model.w.item() == 0.75
    assert again.state_dict()["pending_upload"] is None
    assert again.outer_step == 1


def test_a_blocking_master_waits_for_its_own_delta_by_making_the_round(tmp_path):
    node = node_of(tmp_path, blocking=True, quorum=1)
    node.start()
    move(node)
    node.stop()
    node.hub.write(f"nodes/a/delta_{2:012}.pt", delta_file("a", 2, {"w": torch.tensor([0.5])}))
    again = node_of(tmp_path, values=[9.0], blocking=True, quorum=1)
    again.start()
    assert again.model.w.item() == pytest.approx(1 - 0.7 * 1.9 * 0.5)
    assert again.outer_step == 2
    again.stop()


def test_a_worker_that_becomes_the_master_of_an_empty_hub(tmp_path, by_hand):
    """Hub and master are lost; its version is newer than what other nodes have."""
    master, node = team_of_two(tmp_path / "lost")
    for _ in range(3):
        move(node, 0.5)
        exchange(node, master, node)
    move(node, 0.25)
    state = saved(node)
    new = resumed(node_of(tmp_path / "new", "b", role="master", inner_steps=99), state)
    move(new, 0.125)
    exchange(new)
    shared = global_on(new.hub)
    assert shared["outer_step"] == state["node"]["last_global_step"] + 1 == 4
    assert shared["model"]["w"].item() == state["model"]["w"].item()
    assert shared["applied"] == {"b": 4}
    assert new.model.w.item() == state["model"]["w"].item() - 0.125


def test_the_trainer_resumes_a_node_to_the_bit(tmp_path):
    """One node alone, blocking, so that nothing depends on time; stopped inside a round."""

    def trainer(name, hub):
        made = make(tmp_path / name, every=1, keep_last=None, trainer={"exact_resume": True})
        options = {"blocking": True, "quorum": 1, "inner_steps": 4}
        made.coordinator = node_of(tmp_path / hub, model=made.model, **options)
        return made

    whole = trainer("whole", "hub1")
    whole.fit(14)
    expected = torch.load(whole.checkpoint_manager.path_for(14), weights_only=True)
    assert expected["coordinator"]["last_global_step"] == 3
    for stop in (6, 8, 11):
        first = trainer(f"parts{stop}", f"hub{stop}")
        first.fit(stop)
        second = trainer(f"parts{stop}", f"hub{stop}")
        second.resume()
        second.fit(14)
        same(torch.load(second.checkpoint_manager.path_for(14), weights_only=True), expected)


def test_nothing_is_drawn_from_the_global_generators(tmp_path):
    before = ckpt.capture_rng_state()
    node = node_of(tmp_path)
    node.start()
    for _ in range(3):
        move(node, 0.5)
        wait_until(lambda: node._exchange.fetched)
        move(node)
    node.stop()
    same(ckpt.capture_rng_state(), before)


# --------------------------------------------------------------------------------------------------
# DumbDiLoCo: joining, leaving, taking over
# --------------------------------------------------------------------------------------------------
def test_a_late_joiner_gets_the_shared_model(tmp_path, by_hand, warned):
    hub = Hub(tmp_path)
    master = node_of(hub, values=[1.0, 2.0])
    master.start()
    for _ in range(8):
        move(master, 0.5)
        exchange(master)
    move(master)
    late = node_of(hub, "b", values=[7.0, 7.0])
    late.start()
    assert late.outer_step == global_on(hub)["outer_step"] == 8
    same(late.model.w.data, global_on(hub)["model"]["w"])
    same(late.state_dict()["baseline"], {"w": late.model.w.data})
    late.after_optimizer_step(late.model, 1)
    assert torch.equal(late.state_dict()["pending_upload"]["delta"]["w"], torch.zeros(2))
    assert warned() == []


def test_a_worker_on_an_empty_hub_trains_alone(tmp_path, by_hand, warned):
    hub = Hub(tmp_path)
    early = node_of(hub, "b", values=[7.0])
    early.start()
    assert warned() == ["b trains alone until a master has published a model"]
    for _ in range(3):
        assert move(early, 1.0) is False
        exchange(early)
    assert early.state_dict()["baseline"] is None
    assert deltas_on(hub) == []
    master = node_of(hub)
    master.start()
    move(master)
    exchange(master, early)
    assert move(early, 1.0) is True
    assert early.model.w.item() == 1.0
    assert early.state_dict()["pending_upload"]["delta"]["w"].item() == 0


def test_a_blocking_worker_waits_for_the_first_model(tmp_path):
    hub, started = Hub(tmp_path), []
    worker = node_of(hub, "b", values=[7.0], blocking=True)
    thread = threading.Thread(target=lambda: (worker.start(), started.append(True)))
    thread.start()
    time.sleep(0.3)
    assert not started
    master = node_of(hub, blocking=True)
    master.start()
    thread.join(20)  # a master that does not train publishes after a moment
    assert worker.model.w.item() == 1.0
    worker.stop()
    master.stop()
    assert hub.list("nodes/a") == []


def test_the_first_model_is_what_the_master_had_before_its_first_step(tmp_path, by_hand):
    master = node_of(tmp_path, inner_steps=10)
    master.start()
    exchange(master)
    assert master.hub.list("global") == []  # a state may still be loaded
    move(master, 0.5)
    exchange(master)
    assert global_on(master.hub)["model"]["w"].item() == 1.0
    assert global_on(master.hub)["outer_step"] == 0
    assert master.model.w.item() == 0.5


def test_a_master_goes_on_without_the_hub(tmp_path, by_hand):
    first = node_of(tmp_path / "kept", outer_momentum=0.9)
    first.start()
    for _ in range(3):
        move(first, 0.25)
        exchange(first)
    move(first, 0.25)
    state = roundtrip({"model": first.model.state_dict(), "node": first.state_dict()})
    exchange(first)
    again = node_of(tmp_path / "new", values=[5.0], outer_momentum=0.9)
    ckpt.load_model_state_dict(again.model, state["model"])
    again.start()
    again.load_state_dict(state["node"])
    same(again.model.state_dict(), state["model"])
    again._exchange.opens = 0
    exchange(again)
    same(global_on(again.hub), global_on(first.hub))
    assert global_on(again.hub)["applied"] == {"a": 4}


def test_another_machine_takes_over_as_master(tmp_path, by_hand):
    options = {"outer_momentum": 0.9, "quorum": 1}
    for name in ("kept", "lost"):
        hub = Hub(tmp_path / name)
        master, worker = node_of(hub, **options), node_of(hub, "b", **options)
        master.start()
        move(master)
        exchange(master)
        worker.start()
        for version in range(6):
            if name == "lost" and version == 3:  # the first master's machine is gone
                master = node_of(hub, "c", values=[9.0], role="master", inner_steps=99, **options)
                master.node_timeout = master._exchange.master.node_timeout = 1e-9
                master.start()
                master._exchange.opens = 0
            move(worker, 0.25)
            exchange(worker, master, worker)
        del master
    kept, lost = (global_on(Hub(tmp_path / name)) for name in ("kept", "lost"))
    assert lost["outer_step"] == kept["outer_step"]
    assert lost["applied"]["b"] == kept["applied"]["b"] == 6
    assert lost["momentum"]["w"].item() != 0


def test_a_hub_that_was_emptied_is_filled_again(tmp_path, by_hand):
    hub = Hub(tmp_path / "hub")
    node = node_of(hub, outer_lr=1.0, outer_momentum=0.0)
    node.start()
    move(node, 0.25)
    exchange(node)
    shutil.rmtree(tmp_path / "hub")
    exchange(node)
    assert global_on(hub)["model"]["w"].item() == 0.75


def test_two_masters(tmp_path, by_hand, warned):
    hub = Hub(tmp_path)
    one, two = node_of(hub), node_of(hub, "b", role="master")
    one.start()
    move(one, 0.25)
    exchange(one)
    two.start()
    move(two)
    move(two, 0.25)
    exchange(two)  # another version
    assert warned() == []
    before = global_on(hub)
    move(one, 0.5)
    exchange(one)
    assert warned() == ["a leads no more: another master has published"]
    same(global_on(hub), before)
    assert one.state_dict()["outer"] is None
    exchange(one, two, one)  # it goes on as a worker
    assert move(one) is True
    assert global_on(hub)["applied"] == {"a": 2, "b": 1}
    exchange(one)
    assert len(warned()) == 1


def test_a_lost_node_is_counted_out_and_one_that_leaves_is_not_waited_for(tmp_path):
    hub = Hub(tmp_path)
    options = {"blocking": True, "node_timeout": 0.5}
    master = node_of(hub, **options)
    master.start()
    others = [node_of(hub, name, inner_steps=5, **options) for name in "bc"]
    master.after_optimizer_step(master.model, 1)  # alone
    for node in others:
        node.start()
        node.after_optimizer_step(node.model, 1)
    wait_until(lambda: len(hub.list("nodes/b") + hub.list("nodes/c")) == 2)
    lost, left = others
    lost._exchange.hub = None  # its machine is gone: no sign of life any more
    left.stop()
    assert hub.list("nodes/c") == []
    began = time.monotonic()
    master.after_optimizer_step(master.model, 2)
    assert time.monotonic() - began > 0.2
    assert hub.list("nodes/b") == ["alive.json"] or hub.list("nodes/b") == []
    assert global_on(hub)["outer_step"] == 2
    master.stop()
    lost.stop()


def test_a_stuck_node_is_not_alive(tmp_path):
    """Its thread goes on, but the training does not."""
    hub = Hub(tmp_path)
    node = node_of(hub, inner_steps=10)
    node.start()
    node.after_optimizer_step(node.model, 1)
    wait_until(lambda: "alive.json" in hub.list("nodes/a"))
    tries = node._exchange.tries
    seen = hub.read("nodes/a/alive.json")
    wait_until(lambda: node._exchange.tries > tries + 3)
    assert hub.read("nodes/a/alive.json") == seen
    node.after_optimizer_step(node.model, 1)
    wait_until(lambda: hub.read("nodes/a/alive.json") != seen)
    node.stop()


def test_a_node_that_waits_is_alive(tmp_path):
    node = node_of(tmp_path, blocking=True, quorum=2)
    node.start()
    done = []
    node.should_stop = lambda: bool(done)
    thread = threading.Thread(target=node.after_optimizer_step, args=(node.model, 1))
    thread.start()
    wait_until(lambda: deltas_on(node.hub))
    seen = node.hub.read("nodes/a/alive.json")
    wait_until(lambda: node.hub.read("nodes/a/alive.json") != seen)
    done.append(True)
    thread.join()
    node.stop()


def test_signs_of_life_come_at_least_four_times_in_node_timeout(tmp_path):
    assert node_of(tmp_path, poll_interval=100.0, node_timeout=20.0).poll_interval == 5
    assert node_of(tmp_path, poll_interval=1.0, node_timeout=20.0).poll_interval == 1


def test_the_first_step_does_not_wait_for_the_next_look(tmp_path):
    node = node_of(tmp_path, "b", poll_interval=100.0, inner_steps=9)
    node.start()
    time.sleep(0.1)
    move(node)
    wait_until(lambda: "alive.json" in node.hub.list("nodes/b"), 10)
    node.stop()


def test_what_a_node_needed_at_its_start_is_not_kept(tmp_path, by_hand):
    master, _ = team_of_two(tmp_path, outer_momentum=0.5)
    master.hub.write(f"nodes/x/delta_{1:012}.pt", delta_file("x", 1, {"w": torch.ones(1)}))
    exchange(master)
    assert global_on(master.hub)["momentum"] is not None
    node = node_of(tmp_path, "c")
    node.start()
    assert node._exchange.look.shared.momentum is None  # which only a master needs
    weights = [weakref.ref(node._exchange.look.shared.model["w"]), weakref.ref(node._kept["w"])]
    move(node)
    gc.collect()
    assert [reference() for reference in weights] == [None, None]


def test_the_mean_is_of_live_nodes_and_not_of_those_that_arrived(tmp_path, by_hand):
    hub, options = Hub(tmp_path), {"outer_lr": 1.0, "outer_momentum": 0.0, "inner_steps": 2}
    nodes = [node_of(hub, name, **options) for name in "abcd"]
    nodes[0].start()
    move(nodes[0])
    exchange(nodes[0])
    for node in nodes[1:]:
        node.start()
        move(node)
        exchange(node)
    move(nodes[3], 1.0)
    exchange(nodes[3], nodes[0])
    assert global_on(hub)["model"]["w"].item() == 0.75


def test_the_model_on_the_hub_is_another_one(tmp_path, by_hand):
    hub = Hub(tmp_path)
    first = node_of(hub)
    first.start()
    move(first)
    exchange(first)
    other = node_of(hub, "b", model=nn.Linear(2, 2))
    weights = copy.deepcopy(other.model.state_dict())
    with pytest.raises(CheckpointError, match=r"missing: bias.*unexpected: w") as raised:
        other.start()
    assert raised.value.path == Path("global/step_000000000001.pt")
    assert raised.value.step == 1
    same(other.model.state_dict(), weights)
    large = node_of(hub, "c", values=[1.0] * 1_000_000, role="master")
    large.hub = Hub(tmp_path / "large")
    large._exchange = ckpt._Exchange(large)
    large.start()
    move(large)
    exchange(large)
    with pytest.raises(CheckpointError, match="at most"):
        node_of(large.hub, "d").start()
    (tmp_path / "global" / "latest.json").write_text('{"algorithm": "other"}')
    with pytest.raises(CheckpointError, match="is not of dumb_diloco"):
        node_of(hub, "b").start()


def test_a_node_whose_model_is_not_finite_takes_the_shared_one(tmp_path, by_hand, warned):
    hub = Hub(tmp_path)
    one, two = node_of(hub, values=[1.0, 2.0]), node_of(hub, "b", values=[1.0, 2.0])
    one.start()
    move(one)
    exchange(one)
    two.start()
    two.model.w.data[0] = math.nan
    move(two)
    exchange(two)
    assert warned() == ["b takes the shared model: w is not finite here"]
    assert deltas_on(hub) == ["a/delta_000000000001.pt"]
    exchange(two)
    assert move(two) is True
    assert torch.equal(two.model.w.data, global_on(hub)["model"]["w"])
    assert two.state_dict()["baseline_generation"] == 1
    assert len(warned()) == 1


def test_blocking_a_node_that_is_not_finite_goes_on_with_the_shared_model(tmp_path, warned):
    node = node_of(tmp_path, blocking=True)
    node.start()
    assert move(node, 0.5)
    assert move(node, math.inf)
    assert node.model.w.isfinite()
    assert move(node, 0.5)
    node.stop()
    assert len(warned()) == 1
    assert global_on(node.hub)["applied"] == {"a": 2}


# --------------------------------------------------------------------------------------------------
# DumbDiLoCo: failures
# --------------------------------------------------------------------------------------------------
UNITS = 60  # elements of a model on which each piece of work moves another one, by 4


def exchange_by_hand():
    """The fixture by_hand, in a process of its own."""

    def once(self):
        self.exchange()
        self.tries += 1

    ckpt._Exchange._run = once


def prepared(directory, inner_steps=1):
    """A Hub with version 0 and the deltas of two nodes that live: 0.2 and 0.4."""
    hub = Hub(directory)
    first = node_of(hub, "a", inner_steps=99)
    first.start()
    move(first)
    exchange(first)
    hub.delete("nodes/a/alive.json")
    for name, down in (("b", 0.2), ("c", 0.4)):
        node = node_of(hub, name)
        node.start()
        move(node, down)
        exchange(node)
    return hub


def lead(hub, times):
    """A master that does not train, new on this machine."""
    master = node_of(hub, "a", quorum=2, outer_momentum=0.9)
    master.start()
    master._exchange.opens = 0
    for _ in range(times):
        exchange(master)
    return master


def lead_until_killed(directory, number):
    exchange_by_hand()

    def at(count, kind):
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    Disk(directory, at).install()
    lead(Hub(directory), 2)


@pytest.mark.timeout(120)
def test_a_master_killed_at_any_file_operation_makes_one_outer_step(tmp_path, by_hand):
    prepared(tmp_path / "template")
    status, number = -signal.SIGKILL, 0
    while status == -signal.SIGKILL:
        number += 1
        directory = tmp_path / f"{number:03}"
        shutil.copytree(tmp_path / "template", directory)
        status = exitcode_of(lead_until_killed, directory, number)
        lead(hub := Hub(directory), 2)
        shared = global_on(hub)
        assert (shared["outer_step"], shared["applied"]) == (1, {"b": 1, "c": 1})
        assert shared["model"]["w"].item() == pytest.approx(0.601, abs=1e-6)
        assert shared["momentum"]["w"].item() == pytest.approx(0.3, abs=1e-6)
        assert deltas_on(hub) == []
        names = [name for _, _, files in os.walk(directory) for name in files]
        assert sorted(names) == ["alive.json"] * 2 + ["latest.json"] + hub.list("global")[1:]
    assert status == 0
    assert number > 15


def save_node(manager, step, node):
    manager.save(step, {"model": ckpt.model_state_dict(node.model), "node": node.state_dict()})


def work_until_killed(directory, checkpoints, number):
    exchange_by_hand()

    def at(count, kind):
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    node = node_of(directory, "b", values=[1.0, 1.0])
    node.start()
    move(node, 0.5, 0)
    save_node(CheckpointManager(checkpoints), 1, node)
    move(node, 0.25, 1)
    Disk(directory, at).install()
    exchange(node)


def test_a_worker_killed_with_an_upload_pending_counts_once(tmp_path, by_hand):
    """Whatever it had uploaded; what it did after its checkpoint is done again."""
    options = {"values": [1.0, 1.0], "outer_lr": 1.0, "outer_momentum": 0.0, "inner_steps": 99}
    status, number = -signal.SIGKILL, 0
    while status == -signal.SIGKILL:
        number += 1
        master = node_of(tmp_path / f"hub{number}", **options)
        master.start()
        move(master)
        exchange(master)
        hub, checkpoints = master.hub, tmp_path / f"node{number}"
        status = exitcode_of(work_until_killed, hub.url, checkpoints, number)
        if number % 2:
            exchange(master)  # what was uploaded is applied before it comes back
        state = CheckpointManager(checkpoints).load_latest()
        node = node_of(hub, "b", values=[9.0, 9.0])
        ckpt.load_model_state_dict(node.model, state["model"])
        node.start()
        node.load_state_dict(state["node"])
        move(node, 0.25, 1)
        for _ in range(3):
            exchange(node, master, node)
            move(node)
        assert global_on(hub)["model"]["w"].tolist() == [0.75, 0.875]  # means of two nodes
        assert node.model.w.tolist() == [0.75, 0.875]
    assert status == 0
    assert number > 5


def lead_for_ever(directory):
    ckpt._GRACE = 0.01
    options = {"outer_lr": 1.0, "outer_momentum": 0.0, "quorum": 1}
    node_of(directory, "a", values=[1.0] * UNITS, **options).start()
    time.sleep(50)


def work_to_the_end(directory, name, units):
    """Moves each unit by 4, and ends when all is in the shared model."""
    node = node_of(directory, name, values=[1.0] * UNITS)
    node.should_stop = lambda: False
    node.start()
    wait_until(lambda: node._exchange.look.shared is not None)
    move(node)
    wait_until(lambda: all("alive.json" in node.hub.list(f"nodes/{other}") for other in "bc"))
    for unit in units:
        move(node, 4.0, unit)
        time.sleep(0.03)
    last, done = None, 0
    while done < 3:  # deltas of nothing, applied
        move(node)
        pending = node.state_dict()["pending_upload"]
        if pending is not None and pending["baseline_generation"] != last:
            last = pending["baseline_generation"]
            done = 0 if pending["delta"]["w"].any() else done + 1
        time.sleep(0.01)


@pytest.mark.timeout(120)
def test_a_master_killed_at_random_loses_nothing(tmp_path):
    seed = 5
    random_times = random.Random(seed)
    master = forks.Process(target=lead_for_ever, args=(tmp_path,))
    master.start()
    workers = [
        forks.Process(target=work_to_the_end, args=(tmp_path, name, units))
        for name, units in (("b", range(UNITS // 2)), ("c", range(UNITS // 2, UNITS)))
    ]
    try:
        wait_until(lambda: (tmp_path / "global" / "latest.json").exists())
        for worker in workers:
            worker.start()
        for _ in range(20):
            time.sleep(random_times.uniform(0.05, 0.2))
            master.kill()
            master.join()
            assert master.exitcode == -signal.SIGKILL
            master = forks.Process(target=lead_for_ever, args=(tmp_path,))
            master.start()
        for worker in workers:
            worker.join(40)
            assert worker.exitcode == 0
    finally:
        for process in (master, *workers):
            if process.pid is not None:
                process.kill()
                process.join()
    shared = global_on(Hub(tmp_path))
    assert torch.equal(shared["model"]["w"], torch.full((UNITS,), 1 - 4 / 2)), f"seed {seed}"
    assert shared["outer_step"] > 5


def test_what_is_on_the_hub_does_not_grow(tmp_path, by_hand):
    nodes = [node_of(tmp_path, name, values=[1.0] * 50) for name in "abc"]
    nodes[0].start()
    move(nodes[0])
    exchange(nodes[0])
    for node in nodes[1:]:
        node.start()
    sizes = []
    for _ in range(200):
        for node in nodes:
            move(node, 0.125)
            exchange(node)
        files = [Path(path) / name for path, _, names in os.walk(tmp_path) for name in names]
        sizes.append((len(files), sum(file.stat().st_size for file in files)))
    assert global_on(nodes[0].hub)["outer_step"] >= 200
    assert max(count for count, _ in sizes[100:]) <= max(count for count, _ in sizes[:50])
    assert max(size for _, size in sizes[100:]) <= max(size for _, size in sizes[:50]) + 100
    assert sizes[-1][0] <= 1 + 3 + 2 * 3


def delta_file(name="evil", number=1, delta=None, **header):
    delta = {"w": torch.tensor([1.0]), "b": torch.tensor([1.0])} if delta is None else delta
    payload = {"node_id": name, "generation": number, "step": 1, "base_outer_step": 0}
    file = io.BytesIO()
    torch.save({**payload, "delta": delta, **header}, file)
    return file.getvalue()


def with_w(tensor, **more):
    return delta_file(delta={"w": tensor, "b": torch.tensor([1.0]), **more})


def without(name):
    payload = torch.load(io.BytesIO(delta_file()))
    del payload[name]
    file = io.BytesIO()
    torch.save(payload, file)
    return file.getvalue()


def deflated(data):
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as source,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for record in source.infolist():
            target.writestr(record.filename, source.read(record) + b"\0" * 100_000)
    return file.getvalue()


def flipped(data):
    place = data.index(torch.tensor([1.0]).numpy().tobytes())
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


def one(**options):
    return torch.ones(1, **options)


def legacy_file():
    file = io.BytesIO()
    torch.save({"delta": 1}, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


REFUSED_DELTAS = {  # functions, for torch has to be left alone while this module is imported
    "nan": lambda bomb: with_w(torch.tensor([math.nan])),
    "inf": lambda bomb: with_w(torch.tensor([-math.inf])),
    "so large that sums overflow": lambda bomb: with_w(torch.tensor([3e38])),
    "a buffer not finite": lambda bomb: delta_file(delta={"w": one(), "b": one() / 0}),
    "shape": lambda bomb: with_w(torch.ones(2)),
    "scalar": lambda bomb: with_w(torch.tensor(1.0)),
    "missing key": lambda bomb: delta_file(delta={"w": one()}),
    "extra key": lambda bomb: with_w(one(), v=one()),
    "another key": lambda bomb: delta_file(delta={"w": one(), 3: one()}),
    "fp64": lambda bomb: with_w(one(dtype=torch.float64)),
    "int": lambda bomb: with_w(one(dtype=torch.int64)),
    "buffer dtype": lambda bomb: delta_file(delta={"w": one(), "b": one(dtype=torch.float16)}),
    "sparse": lambda bomb: with_w(one().to_sparse()),
    "meta": lambda bomb: with_w(one(device="meta")),
    "a parameter": lambda bomb: with_w(nn.Parameter(one())),
    "no tensor": lambda bomb: with_w([1.0]),
    "no dict": lambda bomb: delta_file(delta=[1]),
    "no delta": lambda bomb: without("delta"),
    "no generation": lambda bomb: without("generation"),
    "another node": lambda bomb: delta_file("good"),
    "another generation": lambda bomb: delta_file(number=2),
    "generation a tensor": lambda bomb: delta_file(generation=torch.ones(2)),
    "step a float": lambda bomb: delta_file(step=1.5),
    "base step below 0": lambda bomb: delta_file(base_outer_step=-1),
    "cut": lambda bomb: delta_file()[:1000],
    "cut at the end": lambda bomb: delta_file()[:-1],
    "a flipped bit": lambda bomb: flipped(delta_file()),
    "0 bytes": lambda bomb: b"",
    "garbage": lambda bomb: random.Random(1).randbytes(3000),
    "json": lambda bomb: b"{}",
    "deflated": lambda bomb: deflated(delta_file()),
    "legacy format": lambda bomb: legacy_file(),
    "plain pickle": lambda bomb: pickle.dumps(Marker(bomb)),
    "bomb": lambda bomb: delta_file(bomb=Marker(bomb)),
}


class TwoTensors(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.register_buffer("b", torch.ones(1))


@pytest.mark.parametrize("kind", [*REFUSED_DELTAS, "2 GiB"])
def test_a_delta_that_is_no_good_is_refused_and_named_once(tmp_path, by_hand, warned, kind):
    hub, bomb = Hub(tmp_path / "hub"), tmp_path / "bomb"
    options = {"outer_lr": 1.0, "outer_momentum": 0.0, "inner_steps": 9}
    master = node_of(hub, model=TwoTensors(), **options)
    master.start()
    master.after_optimizer_step(master.model, 1)
    exchange(master)
    name = f"nodes/evil/delta_{1:012}.pt"
    hub.write("nodes/good/" + name[-21:], delta_file("good"))
    if kind == "2 GiB":
        (tmp_path / "hub" / "nodes" / "evil").mkdir()
        (tmp_path / "hub" / name).touch()
        os.truncate(tmp_path / "hub" / name, 2 << 30)
        read = hub.read
        hub.read = lambda wanted, limit=None: 1 / (wanted != name) and read(wanted, limit)
    else:
        hub.write(name, REFUSED_DELTAS[kind](bomb))
    for _ in range(4):
        exchange(master)
    assert [message.partition(" is refused: ")[0] for message in warned()] == [name]
    assert len(warned()[0]) < 700
    assert not bomb.exists()
    shared = global_on(hub)
    assert shared["applied"] == {"good": 1, "evil": 1}
    assert shared["model"]["w"].item() == 0.5  # the mean of the good one and the master
    assert deltas_on(hub) == []
    hub.write(f"nodes/evil/delta_{2:012}.pt", delta_file(number=2))  # it is not locked out
    exchange(master, master)
    assert global_on(hub)["applied"]["evil"] == 2
    assert len(warned()) == 1


def test_a_delta_that_is_still_being_written_is_waited_for(tmp_path, by_hand, warned):
    """On a store that shows files while they grow."""
    hub = Hub(tmp_path)
    options = {"outer_lr": 1.0, "outer_momentum": 0.0, "inner_steps": 9}
    master = node_of(hub, model=TwoTensors(), **options)
    master.start()
    master.after_optimizer_step(master.model, 1)
    data, file = delta_file("slow"), tmp_path / "nodes" / "slow" / f"delta_{1:012}.pt"
    file.parent.mkdir(parents=True)
    for size in (0, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:size])
        exchange(master)
    assert global_on(hub)["applied"] == {}
    file.write_bytes(data)
    exchange(master)
    assert global_on(hub)["applied"] == {"slow": 1}
    assert warned() == []


def test_an_entry_that_cannot_be_read_keeps_nobody_waiting(tmp_path, by_hand, warned):
    master, node = team_of_two(tmp_path, poll_interval=1e-5)
    (tmp_path / "nodes" / "d" / f"delta_{1:012}.pt").mkdir(parents=True)
    master.hub.write("nodes/e/alive.json", b"{{{")
    real = master.hub.list
    forbidden = PermissionError("not yours")

    def listed(folder):
        if folder == "nodes/c":
            raise forbidden
        return real(folder)

    master.hub.list = listed
    master.hub.write("nodes/c/alive.json", b"{}")
    move(node, 0.5)
    exchange(node)
    for _ in range(4):
        exchange(master)
    assert global_on(node.hub)["applied"] == {"b": 1}
    assert global_on(node.hub)["model"]["w"].item() == 0.75  # the mean of two
    names = sorted(message.partition(" cannot be read, and is left out")[0] for message in warned())
    assert names == ["nodes/c", f"nodes/d/delta_{1:012}.pt", "nodes/e"]


def test_a_damaged_pointer_is_written_again_by_the_master(tmp_path, by_hand, warned):
    master, node = team_of_two(tmp_path)
    outside = {"algorithm": "dumb_diloco", "outer_step": 1, "file": "../x.pt", "sha256": "0"}
    for damage in (b"", b"{", b"[]", json.dumps(outside).encode()):
        (tmp_path / "global" / "latest.json").write_bytes(damage)
        exchange(master)
        assert global_on(master.hub)["outer_step"] == 0
    assert len(warned()) == 4
    (tmp_path / "global" / "latest.json").write_bytes(b"{")
    with pytest.raises(ValueError, match="Expecting"):
        exchange(node)


def test_two_processes_of_one_name_are_reported(tmp_path, by_hand, warned):
    _, node = team_of_two(tmp_path, inner_steps=9)
    move(node)
    move(node)
    exchange(node, node)
    assert warned() == []
    twin = node_of(tmp_path, "b")
    twin.start()
    twin._ticks += 100  # a wait counts, too: by chance both might have come to the same number
    move(twin)
    exchange(twin, node)
    assert warned() == ["another process is b too: work of both is lost, give each its own name"]


def test_a_reader_that_finds_a_version_gone_reads_the_pointer_again(tmp_path, by_hand):
    master, node = team_of_two(tmp_path)
    pointers = []
    for _ in range(6):
        pointers.append(node.hub.read("global/latest.json"))
        move(node, 0.5)
        exchange(node, master, node)
    late, stale = node_of(Hub(tmp_path), "c"), pointers[:2]

    def read(name, limit=None):
        if name == "global/latest.json" and stale:
            return stale.pop()
        return Hub.read(late.hub, name, limit)

    late.hub.read = read
    late.start()
    assert late.outer_step == global_on(node.hub)["outer_step"]
    assert late._exchange.error is None


def test_a_larger_model_with_its_momentum_fits_the_limit(tmp_path, by_hand):
    master, _ = team_of_two(tmp_path, values=[1.0] * 500_000, outer_momentum=0.5)
    delta = {"w": torch.ones(500_000)}
    master.hub.write(f"nodes/x/delta_{1:012}.pt", delta_file("x", 1, delta))
    exchange(master)
    joiner = node_of(tmp_path, "c", values=[0.0] * 500_000)
    joiner.start()
    assert joiner.outer_step == 1
    same(joiner.model.w.data, global_on(master.hub)["model"]["w"])


def test_the_outer_step_uses_memory_again_but_not_what_a_checkpoint_holds(tmp_path, by_hand):
    node = node_of(tmp_path)
    node.start()
    places = []
    for _ in range(8):
        move(node, 0.5)
        exchange(node)
        places.append(node._exchange.outer.model["w"].data_ptr())
    assert places[-1] == places[-3] != places[-2] == places[-4]
    held = node.state_dict()["outer"]
    before = copy.deepcopy(held)
    for _ in range(6):
        move(node, 0.5)
        exchange(node)
    same(held, before)


def test_three_versions_are_kept(tmp_path, by_hand):
    node = node_of(tmp_path)
    node.start()
    for _ in range(6):
        move(node, 0.5)
        exchange(node)
    newest = global_on(node.hub)["outer_step"]
    kept = [f"step_{newest - age:012}.pt" for age in (2, 1, 0)]
    assert node.hub.list("global") == ["latest.json", *kept]


def test_deltas_are_added_in_the_order_of_the_names(tmp_path, by_hand):
    """In fp32 the order shows: (1e8 - 1e8) + 1 is 1, 1 - 1e8 + 1e8 is 0."""
    master, _ = team_of_two(tmp_path, quorum=3)
    for name, value in (("x", 1e8), ("y", -1e8), ("z", 1.0)):
        file = delta_file(name, 1, {"w": torch.tensor([value])})
        master.hub.write(f"nodes/{name}/delta_{1:012}.pt", file)
    exchange(master)
    assert global_on(master.hub)["model"]["w"].item() == 1 - 0.25


def test_foreign_names_on_the_hub_are_left_alone(tmp_path, by_hand, warned):
    hub = Hub(tmp_path)
    foreign = ["nodes/b/notes.txt", "nodes/b/delta_1.pt", "nodes/b/old/delta_000000000001.pt",
               "nodes/readme", "global/best.pt", "global/step_1.pt"]  # fmt: skip
    for name in foreign:
        hub.write(name, b"x")
    (tmp_path / "nodes" / "b" / f"delta_{chr(0x661) * 12}.pt").write_bytes(b"x")
    node = node_of(hub)
    node.start()
    for _ in range(5):
        move(node, 0.5)
        exchange(node)
    assert [name for name in foreign if hub.read(name) != b"x"] == []
    assert warned() == []


def test_temporary_files_of_a_killed_process_are_swept(tmp_path, by_hand):
    mine, others, shared = (tmp_path / name for name in ("nodes/a", "nodes/b", "global"))
    for folder in (mine, others, shared):
        folder.mkdir(parents=True)
        (folder / ".delta_000000000001.pt.tmp-123").touch()
    node_of(tmp_path, "c").start()
    assert len(list(tmp_path.rglob(".*"))) == 3
    node_of(tmp_path).start()
    left = [path.parent.name for path in tmp_path.rglob(".*")]
    assert left == ["b"]


def test_a_delta_is_uploaded_once(tmp_path, by_hand):
    master, node = team_of_two(tmp_path)
    written = []

    def write(name, data):
        written.append(name)
        Hub.write(node.hub, name, data)

    node.hub.write = write
    move(node, 0.5)
    exchange(node, node, node, master, node, master, node, node)
    assert [name for name in written if "delta" in name] == [f"nodes/b/delta_{1:012}.pt"]
    assert deltas_on(node.hub) == []


def test_a_delta_that_somebody_deleted_is_uploaded_again(tmp_path, by_hand):
    master, node = team_of_two(tmp_path)
    move(node, 0.5)
    exchange(node)
    node.hub.delete(f"nodes/b/delta_{1:012}.pt")
    exchange(node, master)
    assert global_on(node.hub)["model"]["w"].item() == 0.75


def test_a_master_whose_first_look_fails_does_not_take_itself_for_another(tmp_path, by_hand):
    master, node = team_of_two(tmp_path)
    state = saved(master)
    hub = Unreliable(tmp_path, unreachable)
    again = node_of(hub, poll_interval=1e-5, outer_lr=1.0, outer_momentum=0.0, inner_steps=99)
    ckpt.load_model_state_dict(again.model, state["model"])
    again.start()
    again.load_state_dict(state["node"])
    move(again)
    hub.fail = lambda number: None
    exchange(again)
    move(node, 0.5)
    exchange(node, again)
    move(again)
    exchange(again)
    assert global_on(hub)["model"]["w"].item() == 0.75


class Unreliable(Hub):
    """fail(number of the call) raises, waits, or does nothing."""

    def __init__(self, url, fail):
        super().__init__(url)
        self.fail, self.calls = fail, 0

    def called(self, method, *arguments):
        self.calls += 1
        self.fail(self.calls)
        return method(*arguments)


def _through(name):
    real = getattr(Hub, name)
    return lambda self, *arguments: self.called(real, self, *arguments)


for _name in ("read", "write", "list", "delete", "size"):
    setattr(Unreliable, _name, _through(_name))


def unreachable(number):
    raise ConnectionError("nobody there")


def test_training_goes_on_without_the_hub(tmp_path, warned):
    hub = Unreliable(tmp_path, unreachable)
    node = node_of(hub, inner_steps=2)
    node.start()
    for _ in range(50):
        assert move(node, 0.5) is False
    node.stop()
    assert node.model.w.item() == -24
    assert node.state_dict()["local_step"] == 50
    assert warned() == ["a could not exchange, and tries again: ConnectionError('nobody there')"]
    assert hub.calls > 1


def test_what_was_not_uploaded_is_in_the_checkpoint(tmp_path, warned):
    hub = Unreliable(tmp_path, lambda number: None)
    node = node_of(hub, inner_steps=2)
    node.start()
    move(node)
    wait_until(lambda: "latest.json" in hub.list("global"))
    hub.fail = unreachable
    for _ in range(5):
        move(node, 0.5)
    node.stop()
    state = node.state_dict()
    assert state["pending_upload"]["delta"]["w"].item() == 0.5
    assert state["last_uploaded_step"] == 0
    hub.fail = lambda number: None
    again = node_of(hub, inner_steps=2, outer_lr=1.0, outer_momentum=0.0)
    again.model.load_state_dict(node.model.state_dict())
    again.start()
    again.load_state_dict(state)

    def all_is_there():
        move(again)
        return global_on(hub)["model"]["w"].item() == -1.5

    wait_until(all_is_there)
    again.stop()


def test_training_does_not_wait_for_a_hub_that_hangs(tmp_path):
    done = threading.Event()
    hub = Unreliable(tmp_path, lambda number: None)
    node = node_of(hub, inner_steps=2)
    node.start()
    move(node)
    wait_until(lambda: "latest.json" in hub.list("global"))
    calls = hub.calls
    hub.fail = lambda number: done.wait(40)
    wait_until(lambda: hub.calls > calls)  # it hangs
    for _ in range(200):
        move(node, 0.125)
    assert not done.is_set()
    assert node.state_dict()["pending_upload"] is not None
    node.should_stop = lambda: True
    node.stop()  # gives up after a while
    done.set()


def test_a_start_does_not_wait_for_ever(tmp_path, monkeypatch, warned):
    done = threading.Event()
    clock = time.monotonic
    node = node_of(Unreliable(tmp_path, lambda number: done.wait(40)), inner_steps=99)
    monkeypatch.setattr(time, "monotonic", lambda: clock() * 100)  # half a minute in no time
    node.start()
    assert node.model.w.item() == 1.0
    monkeypatch.undo()
    assert move(node, 0.5) is False
    done.set()
    wait_until(lambda: node._exchange.look)
    move(node, 0.5)
    wait_until(lambda: "latest.json" in node.hub.list("global"))
    assert global_on(node.hub)["model"]["w"].item() == 1.0  # what it had when it started
    node.stop()


@pytest.mark.parametrize("period", [2, 3, 5])
def test_a_hub_that_fails_now_and_then_changes_nothing(tmp_path, period):
    def fail(number):
        if number % period == 0:
            raise OSError(f"call {number}")

    node = node_of(Unreliable(tmp_path, fail), inner_steps=2, blocking=True)
    node.start()
    for version in range(1, 6):
        move(node, 0.05)
        assert move(node, 0.05) is True
        assert node.model.w.item() == pytest.approx(solo(version, 0.1, 0.9), abs=1e-6)
    node.stop()


def test_a_master_that_only_serves_may_find_the_hub_late(tmp_path):
    hub = Unreliable(tmp_path, unreachable)
    options = {"inner_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    master = node_of(hub, **options)
    master.start()
    hub.fail = lambda number: None
    worker = node_of(tmp_path, "b", values=[5.0], blocking=True, **options)
    worker.start()
    assert move(worker, 0.5) is True
    assert worker.model.w.item() == 0.5
    assert master.model.w.item() == 1.0  # the thread does not touch the model
    move(master)  # and it may yet train
    assert move(master, 0.25) is False
    wait_until(lambda: global_on(Hub(tmp_path))["applied"].get("a"))
    master.stop()
    hub.fail = unreachable  # the same once more, with what is there
    master.start()
    hub.fail = lambda number: None
    assert move(worker, 0.125) is True
    master.stop()
    worker.stop()
    assert global_on(Hub(tmp_path))["applied"]["b"] == 2


def test_a_version_waiting_to_be_installed_is_not_written_over(tmp_path, by_hand):
    """The outer step reuses memory, also when a version could not be published in time."""
    hub, failing = Hub(tmp_path), set()

    def write(name, data):
        if name.endswith("latest.json") and json.loads(data)["outer_step"] in failing:
            raise OSError("not now")
        Hub.write(hub, name, data)

    hub.write = write
    options = {"poll_interval": 1e-5, "outer_lr": 1.0, "outer_momentum": 0.0}
    master, *others = (
        node_of(hub, name, inner_steps=1 if name > "a" else 99, **options) for name in "abc"
    )
    master.start()
    move(master)
    exchange(master)
    for node in others:
        node.start()
        move(node)
        exchange(node)
    exchange(master, *others)
    for number in range(4):
        move(others[number % 2], 3.0)
        exchange(others[number % 2], master, *others)
    failing.add(master._exchange.outer.step + 1)
    for node in others:  # a version that cannot be published; then it can, but not the next one
        move(node)
        move(node, 6.0)
        exchange(node)
        with pytest.raises(OSError, match="not now"):
            exchange(master)
        failing.add(master._exchange.outer.step + 1)
        failing.discard(master._exchange.outer.step)
    waiting = master._exchange.fetched
    file = tmp_path / "global" / f"step_{waiting.step:012}.pt"
    same(waiting.model, dict(torch.load(file)["model"]))
    assert waiting.step == master._exchange.outer.step - 1


def test_a_permanent_error_is_said_once_and_not_hammered(tmp_path, warned):
    def forbidden(number):
        raise PermissionError("not yours")

    hub = Unreliable(tmp_path, forbidden)
    node = node_of(hub, poll_interval=0.01)
    node.start()
    for _ in range(20):
        move(node)
        time.sleep(0.02)
    assert len(warned()) == 1
    assert hub.calls == 1
    node.stop()


def train_blocking_until_sigterm(directory):
    model = Vector()
    trainer = Trainer(
        WithLoss(model),
        torch.optim.SGD(model.parameters(), lr=0.25),
        ones(100),
        checkpoint_manager=CheckpointManager(directory / "run", every_steps=1000),
        coordinator=node_of(directory / "hub", "b", model=model, inner_steps=3, blocking=True),
        save_on_signal=[signal.SIGTERM],
    )
    result = trainer.fit(100)
    assert (result.stop_reason, result.steps) == ("SIGTERM", 3)


class WithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return (self.model.w * x).mean()


def test_a_blocking_node_without_a_master_stops_on_a_signal(tmp_path, by_hand):
    hub = Hub(tmp_path / "hub")
    options = {"inner_steps": 99, "outer_lr": 1.0, "outer_momentum": 0.0}
    master = node_of(hub, **options)
    master.start()
    move(master)
    exchange(master)
    hub.delete("nodes/a/alive.json")
    process = forks.Process(target=train_blocking_until_sigterm, args=(tmp_path,))
    process.start()
    try:
        wait_until(lambda: deltas_on(hub) == [f"b/delta_{1:012}.pt"])
        os.kill(process.pid, signal.SIGTERM)
        process.join(30)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == 0
    state = CheckpointManager(tmp_path / "run").load_latest()["coordinator"]
    assert state["pending_upload"]["delta"]["w"].item() == 0.75
    assert (state["local_step"], state["last_global_step"]) == (3, 0)
    assert hub.list("nodes/b") == [f"delta_{1:012}.pt"]  # a clean stop
    master = node_of(hub, **options)
    master.start()
    master._exchange.opens = 0
    exchange(master)  # it comes back
    node = node_of(hub, "b", values=[0.25], blocking=True)
    node.start()
    node.load_state_dict(state)
    assert node.model.w.item() == 0.25
    assert node.outer_step == 1
    assert node.state_dict()["pending_upload"] is None


def test_a_wait_says_for_whom(tmp_path, warned):
    hub = Hub(tmp_path)
    options = {"blocking": True, "quorum": 2, "node_timeout": 0.2}
    master = node_of(hub, **options)
    master.start()
    began = time.monotonic()
    master.should_stop = lambda: time.monotonic() - began > 1
    assert master.after_optimizer_step(master.model, 1) is False
    assert warned()[0] == "a waits for the master's round with its delta 1 (1 more)"
    assert 2 <= len(warned()) <= 5
    assert master.state_dict()["pending_upload"] is not None
    master.stop()


def test_a_blocking_node_that_went_on_after_a_stop_waits_at_its_next_boundary(tmp_path):
    hub, options = Hub(tmp_path), {"blocking": True, "quorum": 2}
    one, two = node_of(hub, **options), node_of(hub, "b", **options)
    one.start()
    one.should_stop = lambda: True
    assert move(one, 0.5) is False
    one.should_stop = lambda: False
    two.start()
    assert in_threads(lambda: move(one, 0.25), lambda: move(two, 0.5)) == [True, True]
    assert one.model.w.item() == two.model.w.item() == pytest.approx(solo(1, 0.5, 0.9), abs=1e-6)
    one.stop()
    two.stop()


def test_a_node_can_be_stopped_and_started_again(tmp_path):
    node = node_of(tmp_path, inner_steps=2, blocking=True)
    for version in range(1, 4):
        node.start()
        assert move(node, 0.05) is False
        assert move(node, 0.05) is True
        assert node.model.w.item() == pytest.approx(solo(version, 0.1, 0.9), abs=1e-6)
        node.stop()
        assert not [t for t in threading.enumerate() if t.name.startswith("ckpt")]
        assert node.hub.list("nodes/a") in ([], [f"delta_{version:012}.pt"])


def test_a_hub_over_s3(tmp_path, monkeypatch, capsys):
    """The protocol over the semantics of an object store: a whole run of two nodes."""
    moto = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    boto3 = pytest.importorskip("boto3")
    server = moto.ThreadedMotoServer(port=0)
    server.start()
    try:
        url = "http://{}:{}".format(*server.get_host_and_port())
        access = {"key": "x", "secret": "y", "endpoint_url": url}
        monkeypatch.setitem(fsspec.config.conf, "s3", access)
        client = boto3.client(
            "s3", endpoint_url=url, aws_access_key_id="x", aws_secret_access_key="y",
            region_name="us-east-1",
        )  # fmt: skip
        client.create_bucket(Bucket="bucket")
        hub = Hub("s3://bucket/some/run")
        assert hub.list("global") == []
        models = in_threads(
            *(
                functools.partial(train_blocking, hub, i, 2, 3, 4, "worker" if i else "master")
                for i in range(2)
            )
        )
        expected = textbook(2, 3, 4)
        for model in models:
            for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
                assert (ours - theirs).abs().max() <= 1e-6
        assert global_on(hub)["applied"] == {"n0": 3, "n1": 3}
        keys = [item["Key"] for item in client.list_objects_v2(Bucket="bucket")["Contents"]]
        assert all(re.fullmatch(r"some/run/(global|nodes)/[a-z0-9_./]+", key) for key in keys)
        assert len(keys) <= 1 + 3 + 2
        assert ckpt.main(["hub", hub.url]) == 0
        shown = capsys.readouterr().out
        assert "version 3 of the shared model" in shown
        assert re.search(r"n1 +3 +in the model", shown)
    finally:
        server.stop()


# --------------------------------------------------------------------------------------------------
# DumbDiLoCo: everything that happened, counted
# --------------------------------------------------------------------------------------------------
class Chaos:
    """Four nodes of different speed on a Hub that fails, driven by a seed.

    Each piece of work moves an element of its own by 4; the mean of four nodes is 1. So the shared
    model says of each piece how often it was counted. ``owed``: what has to be in there once.
    """

    def __init__(self, directory, seed, events):
        self.random = random.Random(seed)
        self.size, self.done, self.failing = events, 0, False
        self.hub = Unreliable(directory, lambda number: None)
        self.hub.delete = self.delete
        self.uploaded = {}
        self.options = {
            "inner_steps": self.random.choice([1, 2, 3]), "quorum": self.random.choice([1, 1, 2]),
            "delta_dtype": self.random.choice([torch.float32, torch.bfloat16]),
            "outer_lr": 1.0, "outer_momentum": 0.0, "node_timeout": 1e9, "poll_interval": 1e-5,
        }  # fmt: skip
        self.nodes, self.owed = {}, {name: [] for name in "abcd"}
        self.saved = {name: [] for name in "abcd"}
        for name in "abcd":
            self.nodes[name] = self.new(name)
            self.nodes[name].start()
            self.step(name, work=False)
            self.exchange(name)
        self.hub.fail = self.fail if self.random.random() < 0.7 else self.hub.fail

    def fail(self, number):
        self.failing = self.random.random() < (0.5 if self.failing else 0.15)
        if self.failing:
            raise OSError("now and then")

    def delete(self, name):
        if self.random.random() < 0.7:
            Hub.delete(self.hub, name)

    def new(self, name):
        return node_of(self.hub, name, values=[1.0] * self.size, **self.options)

    def step(self, name, work=True):
        node = self.nodes[name]
        alone = node.state_dict()["baseline"] is None
        if work:
            self.owed[name].append(self.done)
        move(node, 4.0 * work, self.done)
        self.done += work
        if alone and node.state_dict()["baseline"] is not None:
            self.owed[name] = []  # what is done before the first shared model is seen is replaced

    def exchange(self, name):
        with contextlib.suppress(OSError):
            exchange(self.nodes[name])
        for path in deltas_on(Hub(self.hub.url)):
            data = Hub(self.hub.url).read(f"nodes/{path}")
            delta = torch.load(io.BytesIO(data))["delta"]["w"]
            same(self.uploaded.setdefault(path, delta), delta, path)  # a name for ever
        shared = self.nodes["a"]._exchange.fetched
        if shared is not None and shared.digest is not None:  # nothing else was written there
            file = Path(self.hub.url) / "global" / f"step_{shared.step:012}.pt"
            if file.exists():
                same(shared.state_dict()["model"], torch.load(file)["model"])

    def save(self, name):
        node = self.nodes[name]
        state = {"model": node.model.state_dict(), "node": node.state_dict()}
        self.saved[name].append((roundtrip(state), list(self.owed[name])))

    def crash(self, name):
        """Back to one of the last checkpoints, or to none; later ones are gone."""
        saved = self.saved[name]
        number = self.random.choice([*range(len(saved))[-3:], None])
        node = self.nodes[name] = self.new(name)
        if number is None:
            self.owed[name], self.saved[name] = [], []
            node.start()
            return
        state, owed = saved[number]
        self.owed[name] = list(owed) if state["node"]["baseline"] is not None else []
        del saved[number + 1 :]
        ckpt.load_model_state_dict(node.model, state["model"])
        node.start()
        node.load_state_dict(state["node"])

    def end(self):
        """The Hub is well again, and everybody goes on until nothing is under way."""
        self.hub.fail = lambda number: None
        for _ in range(12):
            for name in self.nodes:
                self.step(name, work=False)
            for name in (*self.nodes, "a"):
                self.exchange(name)
        counted = 1 - global_on(Hub(self.hub.url))["model"]["w"]
        owed = torch.zeros(self.size)
        for units in self.owed.values():
            owed[units] = 1
        for delta in self.uploaded.values():
            owed[delta.nonzero().flatten()] = 1
        same(counted, owed)
        for node in self.nodes.values():
            same(node.model.w.data, 1 - counted)


@pytest.mark.parametrize("seed", range(24))
def test_all_that_was_done_is_in_the_shared_model_once(tmp_path, by_hand, seed, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    chaos = Chaos(tmp_path, seed, 80)
    kinds = [chaos.step] * 9 + [chaos.exchange] * 7 + [chaos.save] * 2 + [chaos.crash] * 2
    for _ in range(80):
        chaos.random.choice(kinds)(chaos.random.choice("abcd"))
    chaos.end()
    assert chaos.done > 20
    assert len(chaos.uploaded) > 10


# --------------------------------------------------------------------------------------------------
# Several processes that torch.distributed has joined
# --------------------------------------------------------------------------------------------------
def in_group(function, *args, count=2, exitcodes=None, meanwhile=lambda processes: None):
    """Run function(*args) in ``count`` processes as torchrun does; how each of them has ended."""
    with tempfile.TemporaryDirectory() as scratch:
        places = [Path(scratch, str(rank)) for rank in range(count)]
        processes = []
        for rank, place in enumerate(places):
            place.mkdir()
            group = (rank, count, f"file://{scratch}/store", function, *args)
            processes.append(forks.Process(target=in_scratch, args=(str(place), joined, *group)))
        try:
            for process in processes:
                process.start()
            meanwhile(processes)
            for process in processes:
                process.join(50)
        finally:
            for process in processes:
                process.kill()
                process.join()
    assert [process.exitcode for process in processes] == (exitcodes or [0] * count)


def joined(rank, count, store, function, *args):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    function(*args)
    time.sleep(0.1)  # torch 2.6 hangs if it ends while gloo still frees what was passed last
    torch.distributed.destroy_process_group()


def rank_here():
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def shared_trainer(directory, every=3, **options):
    """A trainer as each rank makes it: dropout of its own, a shard of 20 samples, 5 batches."""
    ckpt.seed_everything(1)
    model = Loss()
    dataset, sampler = regression(20), None
    if torch.distributed.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
        sampler = torch.utils.data.DistributedSampler(dataset, seed=3)
    ckpt.seed_everything(10 + rank_here())
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    manager = CheckpointManager(directory, every_steps=every, fsync=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return Trainer(model, optimizer, loader, **{"checkpoint_manager": manager, **options})


def run_shared(directory, report, steps, die_at=None):
    """Resume, train, and leave what this rank has in the end."""

    def on_step(trainer, loss):
        losses.append(float(loss))
        if trainer.step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    losses = []
    trainer = shared_trainer(directory, exact_resume=True, on_step=on_step)
    found = trainer.resume(), trainer.step
    trainer.fit(steps)
    state = {"model": ckpt.model_state_dict(trainer.model), "rng": ckpt.capture_rng_state()}
    state |= {"found": found, "losses": losses, "counters": (trainer.samples, trainer.tokens)}
    torch.save(state, report / f"{rank_here()}.pt")


def reports(directory, count=2):
    return [torch.load(directory / f"{rank}.pt") for rank in range(count)]


def test_killed_ranks_go_on_each_with_its_own_numbers_and_data(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    in_group(run_shared, whole / "c", whole, 12)
    in_group(run_shared, broken / "c", broken, 12, 8, exitcodes=[-9, -9])
    assert listing(broken) == ["c"]
    in_group(run_shared, broken / "c", broken, 12)
    for one, other in zip(reports(whole), reports(broken), strict=True):
        assert (one.pop("found"), other.pop("found")) == ((False, 0), (True, 6))
        assert one.pop("losses")[6:] == other.pop("losses")
        same(one, other)
    first, second = reports(whole)
    same(first["model"], second["model"])
    assert first["losses"] != second["losses"]
    assert not torch.equal(first["rng"]["torch"], second["rng"]["torch"])
    assert first["counters"] == (24, 24)  # each counts its own


def test_the_file_is_that_of_rank_0_with_what_each_rank_has_of_its_own(tmp_path):
    in_group(run_shared, tmp_path / "c", tmp_path, 6)
    assert listing(tmp_path / "c") == [
        "latest.json",
        "step_000000000003.pt",
        "step_000000000006.pt",
    ]
    state = CheckpointManager(tmp_path / "c", weights_only=True).load_latest()
    assert [set(of) for of in state["ranks"]] == [{"rng", "data", "samples", "tokens"}] * 2
    assert (state["samples"], state["tokens"]) == (24, 24)
    assert [of["samples"] for of in state["ranks"]] == [12, 12]
    same(state["rng"], state["ranks"][0]["rng"])
    for report, of in zip(reports(tmp_path), state["ranks"], strict=True):
        same(report["rng"], of["rng"])
        same(report["model"], state["model"])


def resume_here(directory, report):
    logged = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("ckpt").addHandler(handler)
    trainer = shared_trainer(directory, exact_resume=True)
    fresh = ckpt.capture_rng_state()
    assert trainer.resume()
    counters = (trainer.step, trainer.samples, trainer.tokens)
    found = {"counters": counters, "rng": ckpt.capture_rng_state(), "fresh": fresh}
    data = trainer._batches
    found |= {"warned": logged, "data": (data.epoch, data.batch, data.iterator is None)}
    torch.save(found, report / f"{rank_here()}.pt")


@pytest.mark.parametrize(("saved", "here"), [(1, 4), (2, 1), (2, 3)])
def test_another_number_of_processes_is_one_warning(tmp_path, saved, here):
    in_group(run_shared, tmp_path / "c", tmp_path, 9, count=saved)
    state = CheckpointManager(tmp_path / "c").load_latest()
    in_group(resume_here, tmp_path / "c", tmp_path, count=here)
    found = reports(tmp_path, here)
    message = f"saved by {saved} processes, here are {here}: random numbers are others"
    assert [len(of["warned"]) for of in found] == [1] + [0] * (here - 1)
    assert message in found[0]["warned"][0]
    assert sum(of["counters"][1] for of in found) == state["samples"] == 18 * saved
    assert sum(of["counters"][2] for of in found) == state["tokens"]
    assert max(of["counters"][1] for of in found) - min(of["counters"][1] for of in found) <= 1
    for rank, of in enumerate(found):
        assert of["counters"][0] == 9
        assert of["data"] == (state["data"]["epoch"], 0, True)  # the epoch begins again
        known = (state.get("ranks") or [state])[:saved]
        same(of["rng"], known[rank]["rng"] if rank < len(known) else of["fresh"])


def fail_on_rank_0(directory, background):
    trainer = shared_trainer(directory)
    if background:
        trainer.checkpoint_manager.background = True
    if rank_here() == 0:
        write = os.replace

        def replace(source, target):
            if str(target).endswith("6.pt"):
                raise OSError(errno.ENOSPC, "No space left on device")
            write(source, target)

        os.replace = replace
    kind = CheckpointError if background or rank_here() else OSError
    with pytest.raises(kind) as caught:
        trainer.fit(8)
    assert "No space left" in str(caught.value)
    assert (kind is CheckpointError) or caught.value.errno == errno.ENOSPC
    assert ("rank 0 failed" in str(caught.value)) == (rank_here() == 1)
    assert trainer.step == (8 if background else 6)
    assert listing(directory) == ["latest.json", "step_000000000003.pt"]


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails_is_raised_on_every_rank(tmp_path, background):
    in_group(fail_on_rank_0, tmp_path / "c", background)


def stop_together(directory, who):
    def on_step(trainer, loss):
        if trainer.step == 4 and rank_here() == who:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = shared_trainer(directory, save_on_signal=[signal.SIGTERM], on_step=on_step)
    result = trainer.fit(100)
    assert (result.steps, result.stop_reason) == (4, "SIGTERM")
    assert trainer.checkpoint_manager.steps() == [3, 4]


@pytest.mark.parametrize("who", [0, 1])
def test_a_signal_to_one_rank_stops_all_with_the_same_step(tmp_path, who):
    in_group(stop_together, tmp_path / "c", who)


def stop_twice(directory, seconds):
    """The launcher passes a signal on that each process of its job has got already."""

    def on_step(trainer, loss):
        if trainer.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = shared_trainer(directory, save_on_signal=[signal.SIGTERM], on_step=on_step)
    assert trainer.fit(9).steps == 1


def test_a_signal_that_comes_once_more_at_once_is_still_the_first(tmp_path):
    in_group(stop_twice, tmp_path / "quick", 0.1)
    assert CheckpointManager(tmp_path / "quick").steps() == [1]
    in_group(stop_twice, tmp_path / "slow", 2.1, exitcodes=[-15, -15])
    assert CheckpointManager(tmp_path / "slow").steps() == []


class Unprintable(Exception):
    def __repr__(self):
        raise ValueError


def fail_in_many_ways(directory):
    """What is wrong on one rank alone is raised on all, and they can go on together."""
    other = rank_here() == 1
    shared_trainer(directory, exact_resume=True).fit(3)
    trainer = shared_trainer(directory, exact_resume=True)
    state = CheckpointManager(directory).load_latest()
    state["ranks"][1]["data"]["batch"] = -1
    with pytest.raises(CheckpointError, match="rank 1 failed" if not other else "at least 0"):
        trainer.resume(state)
    with pytest.raises(CheckpointError if not other else TypeError):
        trainer.resume("x" if other else copy.deepcopy(state))
    model = nn.Linear(4, 4) if other else Loss()
    optimizer, manager = torch.optim.AdamW(model.parameters()), CheckpointManager(directory)
    misfit = Trainer(model, optimizer, [], checkpoint_manager=manager)
    with pytest.raises(CheckpointError, match="rank 1 failed" if not other else "does not fit"):
        misfit.resume()

    def work():
        if other:
            raise Unprintable

    with pytest.raises(CheckpointError if not other else Unprintable):
        trainer._ranks.share(work)
    assert trainer.resume()
    assert trainer.fit(4).steps == 4


def test_what_fails_on_one_rank_is_raised_on_all(tmp_path):
    in_group(fail_in_many_ways, tmp_path)


def run_out():
    count = 3 if rank_here() else 6
    loader = iter([(torch.ones(1),)] * count)
    model = nn.parallel.DistributedDataParallel(Weight())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = Trainer(model, optimizer, loader, accumulation_steps=2)
    result = trainer.fit(5)
    assert (result.steps, result.stop_reason) == (1, "data")
    assert float(model.module.w) == -1.0


def test_an_iterator_that_ends_on_one_rank_ends_the_run_on_all():
    in_group(run_out)


def stop_apart(directory):
    """Rank 1 is told only when rank 0 and with it the run has stopped."""
    trainer = shared_trainer(directory, save_on_signal=[signal.SIGTERM])

    def on_step(trainer, loss):
        if trainer.step == 1:
            if rank_here() == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()

    trainer.on_step = on_step
    assert trainer.fit(9).steps == 1
    time.sleep(0.5)


def test_a_signal_that_reaches_one_rank_later_finds_it_prepared(tmp_path):
    in_group(stop_apart, tmp_path)


def join_late(directory, store, rank):
    trainer = shared_trainer(directory)
    assert trainer.resume() is False
    trainer.state_dict()
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    trainer.model = nn.parallel.DistributedDataParallel(trainer.model)
    trainer.fit(3)
    assert len(CheckpointManager(directory).load_latest()["ranks"]) == 2
    time.sleep(0.1)
    torch.distributed.destroy_process_group()


def test_processes_that_are_joined_after_the_first_look(tmp_path):
    both = [
        forks.Process(target=join_late, args=(tmp_path / "c", f"file://{tmp_path}/store", rank))
        for rank in range(2)
    ]
    for process in both:
        process.start()
    for process in both:
        process.join(50)
        process.kill()
    assert [process.exitcode for process in both] == [0, 0]


@pytest.mark.parametrize("ranks", ["x", [1, 2], {0: {}}, [{"rng": {}}, None]])
def test_a_damaged_list_of_ranks(ranks):
    trainer = make(trainer={"exact_resume": True})
    trainer.fit(2)
    before = copy.deepcopy(trainer.state_dict())
    with pytest.raises(CheckpointError, match="ranks must be a list of dicts"):
        trainer.resume({**copy.deepcopy(before), "step": 7, "ranks": ranks})
    same(trainer.state_dict(), before)


class Refusing(nn.Module):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        if rank_here() == 1:
            raise ValueError("not on rank 1")


class RefusingObject:
    state_dict, load_state_dict = Refusing.state_dict, Refusing.load_state_dict


def refuse_to_resume(directory, how):
    objects = {"object": RefusingObject, "model": Refusing}
    options = {"extra_state": {"picky": objects[how]()}} if how in objects else {}
    shared_trainer(directory, every=2, **options).fit(2)
    torch.distributed.barrier()
    here = directory
    if how == "directory" and rank_here() == 1:
        here = directory / "another"
    trainer = shared_trainer(here, exact_resume=True, **options)
    before = copy.deepcopy(trainer.state_dict())
    with pytest.raises(CheckpointError, match="rank 1" if rank_here() == 0 else ""):
        trainer.resume()
    if how != "model":  # what code of a model's own refuses is half loaded
        same(trainer.state_dict(), before)


@pytest.mark.parametrize("how", ["object", "model", "directory"])
def test_what_one_rank_cannot_resume_none_does(tmp_path, how):
    in_group(refuse_to_resume, tmp_path / "c", how)


def differ(directory):
    trainer = shared_trainer(directory)
    with pytest.raises(ValueError, match=r"max_steps .* is . on rank"):
        trainer.fit(2 + rank_here())
    if rank_here() == 1:
        trainer.checkpoint_manager = None
    with pytest.raises(ValueError, match="saves every must be the same"):
        trainer.fit(2)
    assert trainer.step == 0


def test_ranks_that_are_to_do_different_things_do_not_begin(tmp_path):
    in_group(differ, tmp_path / "c")


def fit_without_wrapper(directory):
    logged = []
    ckpt.log.warning = lambda message, *args: logged.append(message % args)
    loader = [(torch.ones(1),)]
    weight_trainer(loader).fit(1)
    assert ["each rank trains its own" in message for message in logged] == [True] * (
        not rank_here()
    )
    shared_trainer(directory).fit(1)
    assert len(logged) == (not rank_here())


def test_a_model_whose_gradients_nobody_averages_is_warned_about(tmp_path):
    in_group(fit_without_wrapper, tmp_path)


def accumulate():
    """w moves by the mean of what all ranks see; they meet once in a window."""
    meetings = []

    def hook(state, bucket):
        meetings.append(1)
        future = torch.distributed.all_reduce(bucket.buffer() / 2, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    model = nn.parallel.DistributedDataParallel(Weight())
    model.register_comm_hook(None, hook)
    seen = [1.0, 2.0, 3.0, 4.0] if rank_here() == 0 else [5.0, 6.0, 7.0, 8.0]
    loader = [(torch.tensor([value]),) for value in seen]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = Trainer(model, optimizer, loader, accumulation_steps=2)
    trainer.fit(1)
    assert float(model.module.w) == -3.5
    assert len(meetings) == 1
    trainer.fit(2)  # which begins the loader again
    assert float(model.module.w) == -7.0
    assert len(meetings) == 2


def test_ranks_average_their_gradients_once_in_an_accumulation_window():
    in_group(accumulate)


def one_node(directory, report, die_at=None):
    """Two processes that are one node of a team, in a loop of their own."""
    torch.manual_seed(rank_here())
    model = nn.parallel.DistributedDataParallel(Vector([1.0 + rank_here()]))  # rank 0's counts
    node = node_of(directory, "b", model=model.module, inner_steps=2, blocking=True)
    state = None
    if (report / "state.pt").exists():
        state = torch.load(report / "state.pt")
        ckpt.load_model_state_dict(model, state["model"])
    node.start()
    if state is not None:
        node.load_state_dict(state["node"])
    weights = []
    for _ in range(node.local_step, 6):
        with torch.no_grad():
            model.module.w -= 0.25
        changed = node.after_optimizer_step(model, 1)
        assert changed == (node.local_step % 2 == 0)
        weights.append((node.local_step, node.outer_step, float(model.module.w.detach()[0])))
        if rank_here() == 0:
            torch.save({"model": model.state_dict(), "node": node.state_dict()}, report / "new.pt")
            os.replace(report / "new.pt", report / "state.pt")
        torch.distributed.barrier()
        if node.local_step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
    node.stop()
    (report / f"{rank_here()}.json").write_text(json.dumps(weights))


@pytest.mark.parametrize("die_at", [None, 3])
def test_several_processes_are_one_node(tmp_path, die_at):
    hub, report = tmp_path / "hub", tmp_path / "report"
    report.mkdir()
    options = {"blocking": True, "quorum": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    master = node_of(hub, values=(8.0,), inner_steps=99, **options)
    master.start()  # and does not train, so it is not counted
    try:
        if die_at:
            in_group(one_node, hub, report, die_at, exitcodes=[-9, -9])
        in_group(one_node, hub, report)
    finally:
        master.stop()
    expected = [[1, 0, 7.75], [2, 1, 7.5], [3, 1, 7.25], [4, 2, 7.0], [5, 2, 6.75], [6, 3, 6.5]]
    for rank in (0, 1):
        assert json.loads((report / f"{rank}.json").read_text()) == expected[die_at or 0 :]
    assert global_on(Hub(hub))["model"]["w"].tolist() == [6.5]
    assert deltas_on(Hub(hub)) == []


class Assorted(nn.Module):
    """Every kind of tensor that is to reach the other processes of a node."""

    def __init__(self, value):
        super().__init__()
        self.w = nn.Parameter(torch.full((2, 3, 4, 5), value).to(memory_format=torch.channels_last))
        self.low = nn.Parameter(torch.full((3,), value, dtype=torch.bfloat16))
        self.register_buffer("flag", torch.tensor(value > 1))
        self.register_buffer("count", torch.tensor(int(value)))
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("rows", torch.full((4, 2), value)[:, 1])


def pass_on(directory):
    node = node_of(directory, "b", model=Assorted(1.0 + rank_here()))
    node.start()
    node.stop()
    same(dict(node.model.state_dict()), dict(Assorted(1.0).state_dict()))
    assert node.model.w.is_contiguous(memory_format=torch.channels_last)


def test_tensors_of_every_kind_reach_the_other_processes_of_a_node(tmp_path):
    in_group(pass_on, tmp_path)


def wait_for_ever(directory):
    """No master is there; rank 1 alone is asked to stop."""
    node = node_of(directory, "b", values=[1.0], blocking=True)
    asked = []
    node.should_stop = lambda: bool(asked)
    if rank_here() == 1:
        threading.Timer(0.5, asked.append, (1,)).start()
    node.start()
    node.stop()


def test_each_process_of_a_node_that_waits_may_be_asked_to_stop(tmp_path):
    in_group(wait_for_ever, tmp_path)


def misuse_a_node(directory):
    model = Vector([1.0])
    node = node_of(directory, "b", model=model)
    kind = CheckpointError if rank_here() else RuntimeError
    with pytest.raises(kind, match="call start"):
        node.after_optimizer_step(model, 1)
    with pytest.raises(CheckpointError, match="not the state"):
        node.load_state_dict({})
    node.start()
    assert float(model.w[0]) == 1.0
    node.stop()


def test_what_rank_0_of_a_node_refuses_all_do(tmp_path):
    in_group(misuse_a_node, tmp_path)


def train_one_node(directory, hub, report, die_at=None):
    node = None

    def on_step(trainer, loss):
        if trainer.step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = shared_trainer(directory, every=2, exact_resume=True, on_step=on_step)
    node = node_of(hub, "b", model=trainer.model, inner_steps=2, blocking=True)
    trainer.coordinator = node
    trainer.resume()
    trainer.fit(6)
    torch.save(trainer.model.module.state_dict(), report / f"{rank_here()}.pt")


def test_a_trainer_on_several_processes_is_one_node(tmp_path):
    """Killed between two rounds, it ends with the very weights of a run in peace."""
    found = {}
    for name, die_at in {"whole": None, "broken": 3}.items():
        report = tmp_path / name
        report.mkdir()
        options = {"blocking": True, "quorum": 1, "inner_steps": 99}
        ckpt.seed_everything(5)
        master = node_of(report / "hub", model=Loss(), **options)
        master.start()
        try:
            if die_at:
                in_group(
                    train_one_node, report / "c", report / "hub", report, 3, exitcodes=[-9, -9]
                )
            in_group(train_one_node, report / "c", report / "hub", report)
        finally:
            master.stop()
        first, second = reports(report)
        same(first, second)
        found[name] = first
        assert global_on(Hub(report / "hub"))["applied"] == {"b": 3}
    same(found["whole"], found["broken"])


class WithSharded(nn.Module):
    """Of which only a buffer is spread."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.register_buffer("b", spread(torch.ones(2)))


def spread(tensor):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, init_device_mesh("cpu", (1,)))


def sharded_models():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import distribute_module

    yield distribute_module(Loss(), init_device_mesh("cpu", (1,))), "DTensor"
    yield WithSharded(), "DTensor"
    for original in (False, True):
        cpu = torch.device("cpu")
        sharded = FullyShardedDataParallel(Loss(), device_id=cpu, use_orig_params=original)
        yield sharded, "FullyShardedDataParallel"


def refuse_sharded(directory):
    where = "torch.distributed.checkpoint"
    for model, kind in sharded_models():
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with pytest.raises(CheckpointError, match=f"is a {kind}.*{where}"):
            ckpt.model_state_dict(model)
        with pytest.raises(CheckpointError, match=where):
            ckpt.load_model_state_dict(model, Loss().state_dict())
        with pytest.raises(ValueError, match=where):
            Trainer(model, optimizer, [])
        with pytest.raises(ValueError, match=where):
            DumbDiLoCo(model, directory, node_id="a")
    state = {"net.0.weight": spread(torch.ones(4, 3))}
    with pytest.raises(CheckpointError, match=f"net.0.weight is a DTensor.*{where}"):
        ckpt.load_model_state_dict(Loss(), state)
    for background in (False, True):
        manager = CheckpointManager(directory, background=background)
        with pytest.raises(CheckpointError, match=f"model.net.0.weight is a DTensor.*{where}"):
            manager.save(1, {"model": state})
        manager.close()
    assert listing(directory) == []


def take_what_is_whole():
    """Wrappers of torch.distributed that do not spread a model."""
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain, replicated, checkpointed = Loss(), replicate(Loss()), Loss()
    checkpointed.net[0] = checkpoint_wrapper(checkpointed.net[0])
    for model in (replicated, checkpointed):
        assert ckpt.model_state_dict(model).keys() == plain.state_dict().keys()
        ckpt.load_model_state_dict(model, plain.state_dict())
        Trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), [])


@pytest.mark.filterwarnings("ignore")
def test_wrappers_that_do_not_spread_a_model_are_welcome():
    in_group(take_what_is_whole, count=1)


@pytest.mark.filterwarnings("ignore")
def test_sharded_models_are_for_torchs_own_checkpoints(tmp_path):
    in_group(refuse_sharded, tmp_path, count=1)


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------
def run_main(capsys, *arguments):
    """Exit status, lines on stdout, lines on stderr."""
    status = ckpt.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err.splitlines()


def three_checkpoints(directory):
    """Steps 1, 2 and 12, of which 2 is the latest."""
    manager = CheckpointManager(directory)
    for step in (1, 12, 2):
        manager.save(step, {"step": step, "w": torch.arange(1000.0)})
    return manager


def test_ls_lists_what_is_there_and_marks_the_latest(tmp_path, capsys, warned):
    manager = three_checkpoints(tmp_path)
    hours = time.time() - 5 * 3600
    os.utime(manager.path_for(1), (hours, hours))
    status, out, err = run_main(capsys, "ls", tmp_path)
    size = f"{manager.path_for(1).stat().st_size / 1000:.3g} kB"
    assert (status, err) == (0, [])
    assert [line.split() for line in out] == [
        ["step", "file", "size", "age"],
        ["1", "step_000000000001.pt", *size.split(), "5", "h"],
        ["2", "step_000000000002.pt", *size.split(), "0", "s", "latest"],
        ["12", "step_000000000012.pt", *size.split(), "0", "s"],
    ]
    assert len({line.index(size) for line in out[1:]}) == 1  # in columns


def test_ls_verify_says_which_file_is_damaged_and_where(tmp_path, capsys, warned):
    flip_in(three_checkpoints(tmp_path).path_for(2))
    status, out, _ = run_main(capsys, "ls", tmp_path, "--verify")
    assert status == 1
    assert [("whole" in line, "data/0" in line) for line in out[1:]] == [
        (True, False),
        (False, True),
        (True, False),
    ]


def test_the_latest_may_have_a_name_of_its_own(tmp_path, capsys):
    manager = three_checkpoints(tmp_path)
    os.rename(manager.path_for(2), tmp_path / "best.pt")
    ckpt.atomic_json_dump({"step": 2, "file": "best.pt"}, tmp_path / "latest.json")
    lines = [line.split() for line in run_main(capsys, "ls", tmp_path)[1][1:]]
    assert [(line[0], line[1], line[-1] == "latest") for line in lines] == [
        ("1", "step_000000000001.pt", False),
        ("2", "best.pt", True),
        ("12", "step_000000000012.pt", False),
    ]
    assert run_main(capsys, "show", tmp_path)[1][1] == "step: 2"


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1005, "1 kB"), (1.23e6, "1.23 MB"),
     (45.6e9, "45.6 GB"), (7.89e12, "7.89 TB"), (5e16, "5e+04 TB")],
)  # fmt: skip
def test_sizes(count, shown):
    assert ckpt._bytes(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-5, "0 s"), (0, "0 s"), (119, "119 s"), (121, "2 min"), (7100, "118 min"), (7300, "2 h"),
     (170_000, "47 h"), (180_000, "2 d"), (8_640_000, "100 d")],
)  # fmt: skip
def test_ages(seconds, shown):
    assert ckpt._age(time.time() - seconds) == shown


def test_verify_of_a_directory_and_of_a_file(tmp_path, capsys, warned):
    manager = three_checkpoints(tmp_path)
    assert run_main(capsys, "verify", manager.path_for(2)) == (
        0,
        [f"{manager.path_for(2)}: whole"],
        [],
    )
    flip_in(manager.path_for(12))
    status, out, err = run_main(capsys, "verify", tmp_path)
    assert (status, err) == (1, [])
    assert out[:2] == [f"{manager.path_for(step)}: whole" for step in (1, 2)]
    damage = "is damaged: record 'archive/data/0' is missing or fails its checksum"
    assert out[2:] == [f"{manager.path_for(12)}: {damage}"]
    assert run_main(capsys, "verify", manager.path_for(12))[:2] == (1, out[2:])
    manager.path_for(1).write_bytes(b"")
    assert run_main(capsys, "verify", manager.path_for(1))[0] == 1


def test_show_names_every_tensor_and_prints_the_rest(tmp_path, capsys):
    trainer = make(tmp_path, trainer={"config": {"lr": 0.05, "api_key": "k"}})
    trainer.fit(1)
    status, out, err = run_main(capsys, "show", trainer.checkpoint_manager.path_for(1))
    assert (status, err) == (0, [])
    lines = [line.split() for line in out]
    assert "step: 1" in out
    assert "samples: 2" in out
    assert "config: {'api_key': '<redacted>', 'lr': 0.05}" in out
    assert "precision: {'autocast_enabled': False, 'mode': 'fp32', 'use_scaler': False}" in out
    assert "coordinator: None" in out
    assert ["model.net.0.weight", "float32", "(4,", "3)", "48", "B"] in lines
    assert ["optimizer.state.0.exp_avg", "float32", "(4,", "3)", "48", "B"] in lines
    assert ["rng.torch", "uint8", "(5056,)", "5.06", "kB"] in lines
    assert run_main(capsys, "show", tmp_path)[1] == out


@pytest.mark.parametrize("legacy", [False, True])
def test_show_takes_any_dict_of_tensors(tmp_path, capsys, legacy):
    path, cycle = tmp_path / "a.pt", []
    cycle.append(cycle)
    state = {"w": torch.zeros(2, 2, dtype=torch.bfloat16), "\x1b[2Jclear": 1, "cycle": cycle}
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    status, out, _ = run_main(capsys, "show", path)
    assert status == 0
    assert out[-1].split() == ["w", "bfloat16", "(2,", "2)", "8", "B"]
    assert "?[2Jclear: 1" in out  # which would have cleared the screen


def test_a_hub_at_a_glance(tmp_path, capsys, by_hand):
    master, node = team_of_two(tmp_path / "hub", inner_steps=1)
    for _ in range(2):
        move(node, 0.5)
        exchange(node, master, node)
    move(node, 0.5)
    exchange(node)
    master.stop()
    master._exchange.hub.delete("nodes/a/alive.json")  # as the thread does in the end
    Hub(tmp_path / "hub").write("nodes/c/alive.json", b"{}")
    status, out, err = run_main(capsys, "hub", tmp_path / "hub")
    node.stop()
    assert (status, err) == (0, [])
    assert re.fullmatch(
        r".*/hub: version 2 of the shared model, [0-9.]+ kB, published . s ago", out[0]
    )
    assert [
        re.sub("[0-9.]+ kB", "kB", re.sub("[0-9] s", "s", line)).split() for line in out[1:]
    ] == [
        "node last delta sign of life".split(),
        "a none not training".split(),
        "b 3 waits, kB, made s ago s ago".split(),
        "c none s ago".split(),
    ]
    exchange(master)
    assert "b     3           in the model" in run_main(capsys, "hub", tmp_path / "hub")[1][3]
    shutil.rmtree(tmp_path / "hub" / "nodes" / "b")  # in a bucket an empty folder is none
    last = run_main(capsys, "hub", tmp_path / "hub")[1][3]
    assert last == "b     3           in the model  not training"


@pytest.mark.parametrize("known", [False, True])
def test_ages_on_a_hub_that_has_no_clock_or_no_time_zone(tmp_path, capsys, monkeypatch, known):
    def modified(self, path):
        if not known:
            raise NotImplementedError
        return datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)

    Hub(tmp_path).write("nodes/b/alive.json", b"{}")
    monkeypatch.setattr(fsspec.implementations.local.LocalFileSystem, "modified", modified)
    line = run_main(capsys, "hub", tmp_path)[1][-1]
    assert line.split("none")[1].strip() == ("0 s ago" if known else "at an unknown time")


def test_a_hub_of_a_model_that_does_not_fit_in_memory(tmp_path, capsys, by_hand, monkeypatch):
    """The record is read, the tensors are not; and of what the file names nothing is called."""
    master, _ = team_of_two(tmp_path, inner_steps=1)
    exchange(master)
    monkeypatch.setattr(torch, "load", None)
    monkeypatch.setattr(Hub, "read", lambda *_: pytest.fail("read") if "pt" in _[1] else READ(*_))
    assert run_main(capsys, "hub", tmp_path)[0] == 0
    bomb = Marker(tmp_path / "marker")
    torch.save({"applied": {}, "bomb": bomb}, tmp_path / "global" / "step_000000000000.pt")
    assert run_main(capsys, "hub", tmp_path)[0] == 0
    assert not (tmp_path / "marker").exists()


READ = Hub.read


def test_a_hub_without_a_shared_model(tmp_path, capsys):
    Hub(tmp_path).write("nodes/b/alive.json", b"{}")
    status, out, _ = run_main(capsys, "hub", tmp_path)
    assert (status, out[0]) == (0, f"{tmp_path}: no shared model yet")


@pytest.mark.parametrize(
    ("command", "content", "says"),
    [
        ("ls", None, "no checkpoint in"),
        ("ls", "empty directory", "no checkpoint in"),
        ("ls", b"a file", "is a file, not a directory"),
        ("verify", None, "No such file"),
        ("verify", "empty directory", "no checkpoint in"),
        ("show", None, "No such file"),
        ("show", "empty directory", "no checkpoint in"),
        ("show", b"text", "cannot be loaded"),
        ("show", b"", "cannot be loaded (EOFError("),
        ("show", "bomb", "weights_only=False"),
        ("show", "tensor", "holds a Tensor"),
        ("hub", None, "neither a shared model nor nodes"),
    ],
)
def test_errors_are_one_line_and_status_2(tmp_path, capsys, warned, command, content, says):
    place = tmp_path / "place"
    if isinstance(content, bytes):
        place.write_bytes(content)
    elif content == "bomb":
        torch.save({"bomb": Marker(tmp_path / "marker")}, place)
    elif content == "tensor":
        torch.save(torch.ones(1), place)
    elif content is not None:
        place.mkdir()
    status, out, err = run_main(capsys, command, place)
    assert (status, out, len(err)) == (2, [], 1)
    assert says in err[0]
    assert str(place) in err[0]
    assert "older checkpoint" not in err[0]
    assert not (tmp_path / "marker").exists()


def test_a_name_of_two_lines_is_told_in_one(tmp_path, capsys):
    status, out, err = run_main(capsys, "ls", tmp_path / "a\nb")
    assert (status, out, len(err)) == (2, [], 1)
    path = tmp_path / "x.pt: whole\ny.pt"
    torch.save({"red\nherring": torch.ones(1), "a\nb": 1}, path)
    for command in ("verify", "show"):
        status, out, err = run_main(capsys, command, path)
        assert (status, err) == (0, [])
        assert "x.pt: whole?y.pt: " in out[0]
    assert out[1:] == [
        "a?b: 1",
        "tensor       dtype    shape  size",
        "red?herring  float32  (1,)   4 B",
    ]


@pytest.mark.filterwarnings("ignore:Validating sparse")
def test_show_of_odd_tensors(tmp_path, capsys):
    odd = {"sparse": torch.eye(3).to_sparse(), "meta": torch.empty(2, device="meta")}
    torch.save(odd, tmp_path / "a")
    status, out, err = run_main(capsys, "show", tmp_path / "a")
    assert (status, err) == (0, [])
    assert [line.split() for line in out[2:]] == [
        ["sparse", "float32", "(3,", "3)", "torch.sparse_coo"],
        ["meta", "float32", "(2,)", "8", "B"],
    ]


def test_show_says_when_what_it_shows_is_damaged(tmp_path, capsys):
    path = three_checkpoints(tmp_path).path_for(2)
    flip_in(path)
    status, out, _ = run_main(capsys, "show", path)
    assert status == 1
    assert "record 'archive/data/0' is missing or fails its checksum" in out[0]
    assert "w       float32  (1000,)  4 kB" in out


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_pipe_is_not_waited_for(tmp_path, capsys, command):
    os.mkfifo(tmp_path / "pipe")
    status, out, err = run_main(capsys, command, tmp_path / "pipe")
    assert (status, len(out + err)) == (2, 1)
    assert "pipe: not a regular file" in (out + err)[0]


def test_looking_at_a_run_that_saves_meanwhile(tmp_path, capsys):
    manager, done = CheckpointManager(tmp_path, keep_last=1, fsync=False), []
    manager.save(1, {"step": 1})

    def write():
        step = 1
        while not done:
            step += 1
            manager.save(step, {"step": step})

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(25):
            for command in (["ls"], ["ls", "--verify"], ["verify"], ["show"]):
                assert ckpt.main([command[0], str(tmp_path), *command[1:]]) == 0
    finally:
        done.append(True)
        thread.join()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("broken", ["pointer", "shared model"])
def test_a_damaged_hub_still_shows_its_nodes(tmp_path, capsys, by_hand, broken):
    team_of_two(tmp_path)
    name = "latest.json" if broken == "pointer" else "step_000000000000.pt"
    Hub(tmp_path).write(f"global/{name}", b"[1,2")
    status, out, err = run_main(capsys, "hub", tmp_path)
    assert (status, err) == (1, [])
    assert "global/latest.json, is damaged" in out[-3]
    assert [line.split()[0] for line in out[-2:]] == ["node", "a"]


def test_without_a_standard_output(tmp_path, monkeypatch):
    three_checkpoints(tmp_path)
    monkeypatch.setattr(sys, "stdout", None)
    assert ckpt.main(["ls", str(tmp_path)]) == 0


@pytest.mark.parametrize("arguments", [[], ["ls"], ["frobnicate", "x"], ["ls", "a", "b"]])
def test_wrong_arguments_are_status_2(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        ckpt.main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_the_file_is_a_program(tmp_path):
    flip_in(three_checkpoints(tmp_path).path_for(2))
    run = [sys.executable, "-W", "error", str(ROOT / "ckpt.py")]
    done = subprocess.run([*run, "verify", tmp_path], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout.count("whole")) == (1, 2)
    assert done.stderr == ""
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen([*run, "ls", tmp_path], stdout=-1, stderr=-1, env=buffered) as process:
        process.stdout.close()  # as head does
        assert process.stderr.read() == b""
    assert process.returncode == 0


# --------------------------------------------------------------------------------------------------
# The file and its README
# --------------------------------------------------------------------------------------------------
def sections():
    """The source up to each banner, and the whole."""
    source = (ROOT / "ckpt.py").read_text()
    banner = re.compile(r"^# =+\n# (.+)\n# =+\n", re.MULTILINE)
    return [(m[1], source[: m.start()]) for m in banner.finditer(source)] + [("end", source)]


@pytest.mark.parametrize("cut", range(len(sections())))
def test_the_file_can_be_cut_at_any_banner(cut, tmp_path, monkeypatch):
    title, source = sections()[cut]
    module = types.ModuleType("cut")
    monkeypatch.setitem(sys.modules, "cut", module)  # dataclasses look their module up
    exec(compile(source, f"ckpt.py before {title}", "exec"), vars(module))
    if cut > 2:
        module.atomic_torch_save({"a": 1}, tmp_path / "x.pt")
        module.verify_checkpoint(tmp_path / "x.pt")
    if cut > 3:
        module.restore_rng_state(module.capture_rng_state(), strict=True)
    if cut > 5:
        manager = module.CheckpointManager(tmp_path)
        manager.save(1, {"m": module.model_state_dict(nn.Linear(1, 1))})
        assert manager.load_latest(fallback=True)["m"].keys() == {"weight", "bias"}


def test_a_section_uses_only_what_stands_above_it():
    """Every global that a section's code names is defined in the same prefix."""
    import builtins
    import symtable

    def names(table):
        for symbol in table.get_symbols():
            if symbol.is_global() and symbol.is_referenced():
                yield symbol.get_name()
        for child in table.get_children():
            yield from names(child)

    for title, source in sections():
        table = symtable.symtable(source, "ckpt.py", "exec")
        defined = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned()}
        defined |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_imported()}
        defined |= {child.get_name() for child in table.get_children()}
        undefined = set(names(table)) - defined - set(dir(builtins)) - {"__name__"}
        assert undefined == set(), title


def test_the_first_screen():
    head = (ROOT / "ckpt.py").read_text().splitlines()[:70]
    assert any("MIT License" in line for line in head)
    assert any(line.startswith("__version__") for line in head)
    assert any(line.startswith("__all__") for line in head)
    assert all(getattr(ckpt, name).__module__ == "ckpt" for name in ckpt.__all__)
    assert f'version = "{ckpt.__version__}"' in (ROOT / "pyproject.toml").read_text()


README = (ROOT / "README.md").read_text()


def run_readme(directory):
    """Run the blocks one after the other, as one reader would, and compare what they print."""
    os.chdir(directory)
    blocks = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", README, re.DOTALL)
    assert len(blocks) > 3
    space = {"__name__": "readme"}
    for code, expected in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, "README.md", "exec"), space)
        assert printed.getvalue() == expected
    commands = re.findall(r"^python ckpt\.py (.*?) *(?:#.*)?$", README, re.MULTILINE)
    assert {command.split()[0] for command in commands} == {"ls", "show", "verify", "hub"}
    for command in commands:
        assert ckpt.main(command.split()) == 0


def test_the_code_in_the_readme_runs_as_it_stands(tmp_path):
    in_child(run_readme, tmp_path)
