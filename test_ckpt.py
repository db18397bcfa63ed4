"""The behaviour of ckpt.py, shown with real processes, files, loaders and optimizers.

Run with `pytest`. Processes that get killed are forked from a server that has imported torch
already, so that each costs milliseconds.
"""

import argparse
import collections
import contextlib
import copy
import dataclasses
import errno
import gc
import json
import logging
import multiprocessing
import os
import pickletools
import random
import re
import resource
import signal
import stat
import sys
import threading
import time
import types
import weakref
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import ckpt
from ckpt import CheckpointError, CheckpointManager, Trainer

ROOT = Path(__file__).resolve().parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["torch", "test_ckpt"])


# --------------------------------------------------------------------------------------------------
# Helpers
# --------------------------------------------------------------------------------------------------
def in_child(function, *args, exitcode=0):
    """Run function(*args) in a new process and look at how it ended: -9 is a real SIGKILL."""
    process = forks.Process(target=function, args=args)
    process.start()
    process.join(50)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == exitcode


def kill_me_and_my_workers(*_):
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
    path, state = tmp_path / "x.pt", {"a": torch.arange(20), "b": "text", "c": [1, 2.5]}
    ckpt.atomic_torch_save(state, path)
    whole, found = path.read_bytes(), 0
    chosen = random.Random(5)
    for _ in range(1500):
        path.write_bytes(whole)
        flip_bit(path, chosen.randrange(len(whole)), chosen.randrange(8))
        try:
            ckpt.verify_checkpoint(path)
        except CheckpointError:
            found += 1
            continue
        with contextlib.suppress(RuntimeError):  # torch says it, so it is not silent
            same(torch.load(path), state)  # a bit of padding or of a date
    assert found > 500


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
    os.setuid(65534)  # root may write anywhere
    with pytest.raises(PermissionError, match=re.escape(str(directory))):
        CheckpointManager(directory).save(2, {"step": 2})
    assert CheckpointManager(directory).load_latest() == {"step": 1}


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")
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


def dead_pid():
    process = forks.Process(target=int)
    process.start()
    process.join()
    return process.pid


def test_stale_temporary_files_are_swept_at_a_save(tmp_path):
    dead, old = dead_pid(), time.time() - 1000
    mine, alive = os.getpid(), os.getppid()
    swept = [f".step_000000000001.pt.tmp-{dead}", f".latest.json.tmp-{mine}", f".b.pt.tmp-{dead}"]
    kept_old = [f".step_000000000001.pt.tmp-{alive}", ".notes", f"x.pt.tmp-{dead}", f".x.tmp-{dead}"]
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
# RNG
# --------------------------------------------------------------------------------------------------
def draw():
    numbers = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
    return numbers + [float(torch.rand(())), float(torch.randn(()))]


def test_rng_round_trip_through_a_safe_file(tmp_path):
    ckpt.seed_everything(3)
    draw()  # leaves half a pair of gaussians in Python and NumPy
    state = ckpt.capture_rng_state()
    ckpt.atomic_torch_save(state, tmp_path / "rng.pt")
    expected = [draw() for _ in range(3)]
    loaded = torch.load(tmp_path / "rng.pt", weights_only=True)
    ckpt.restore_rng_state(loaded)
    assert [draw() for _ in range(3)] == expected
    assert {"python", "numpy", "torch"} <= loaded.keys() <= {"python", "numpy", "torch", "cuda", "mps"}
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
        with pytest.raises(CheckpointError, match=f"saved on {count + 2} devices, {count} are here"):
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
        inner = Holder(module=One(value))
        inner.w = nn.Parameter(torch.full((2,), value + 1))
        inner = wrapper(inner)
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


def test_buffers_and_lazy_modules_load():
    model, target = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    model(torch.randn(5, 3))
    ckpt.load_model_state_dict(target, ckpt.model_state_dict(model))
    same(dict(target.state_dict()), dict(model.state_dict()))
    lazy = nn.LazyLinear(2)
    ckpt.load_model_state_dict(lazy, nn.Linear(3, 2).state_dict())
    assert lazy.weight.shape == (2, 3)
