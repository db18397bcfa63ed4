"""Lightning, with its checkpoints written by ckpt.CheckpointManager, and an exact resume.

    python -m pip install lightning torchdata
    python examples/lightning_callback.py                # about ten seconds on two cores
    python examples/lightning_callback.py --kill-at 43   # dies right after step 43, in mid-epoch
    python examples/lightning_callback.py                # goes on from step 40, to the same weights

Two small classes do it: a CheckpointIO plugin, through which Lightning writes, and a callback that
says when, and keeps the random numbers, which Lightning does not. The position in the data is in
the checkpoint only if the loader has a state_dict: Lightning takes a plain DataLoader from its
beginning, in the middle of an epoch. Hence torchdata's StatefulDataLoader. The files are plain
Lightning checkpoints. With several processes, the random numbers are those of the first.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

import torch

# In your own repository ckpt.py lies next to the script, and this line is not needed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_text

import ckpt

try:
    import lightning as L
    from lightning.pytorch.callbacks import LambdaCallback
    from lightning.pytorch.plugins.io import TorchCheckpointIO
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError as error:
    what = "this example needs Lightning and torchdata: python -m pip install lightning torchdata"
    raise SystemExit(f"{what} ({error})") from None


class ManagerIO(TorchCheckpointIO):
    """Writes what Lightning wants written. For Trainer(plugins=...)."""

    def __init__(self, manager: ckpt.CheckpointManager):
        self.manager = manager

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        step = checkpoint["global_step"]
        if Path(path) == self.manager.path_for(step):
            self.manager.save(step, checkpoint)
        else:  # a ModelCheckpoint, say, which names its files itself
            ckpt.atomic_torch_save(checkpoint, path)


class SaveEvery(L.Callback):
    """Saves when the manager says so. For Trainer(callbacks=...)."""

    def __init__(self, manager: ckpt.CheckpointManager):
        self.manager, self.rng, self.saved = manager, None, 0

    def state_dict(self):
        return {"rng": ckpt.capture_rng_state()}

    def load_state_dict(self, state):
        self.rng = state["rng"]

    def on_train_start(self, trainer, module):
        self.saved = trainer.global_step

    # In the middle of an epoch the first batch is the time to put them back, for the loader draws
    # when it begins; where an epoch has just ended that draw is one of the next epoch, and counts.
    def on_train_epoch_start(self, trainer, module):
        if self.rng:
            ckpt.restore_rng_state(self.rng)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.rng and batch_idx > 0:
            ckpt.restore_rng_state(self.rng)
        self.rng = None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if not trainer.is_last_batch:
            self.save(trainer)

    def on_train_epoch_end(self, trainer, module):
        self.save(trainer)  # saved before, the epoch would be counted twice

    def save(self, trainer):
        step = trainer.global_step
        if step != self.saved and (self.manager.should_save(step) or step == trainer.max_steps):
            self.saved = step  # the next batch may have the same number, if gradients accumulate
            trainer.save_checkpoint(self.manager.path_for(step))


class LanguageModel(L.LightningModule):
    def __init__(self, steps: int):
        super().__init__()
        self.steps, self.model = steps, train_text.ByteTransformer(width=64, layers=2)

    def training_step(self, batch, batch_idx):
        return self.model(batch[0])

    def configure_optimizers(self):
        optimizer = train_text.make_optimizer(self)
        scheduler = train_text.make_scheduler(optimizer, self.steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="how long to train")
    parser.add_argument("--out", default="runs/lightning_callback", help="folder of checkpoints")
    parser.add_argument("--kill-at", type=int, help="die right after this step, before its save")
    args = parser.parse_args()

    ckpt.seed_everything(1)
    rows = train_text.load_text()[0][:420]
    loader = StatefulDataLoader(torch.utils.data.TensorDataset(rows), batch_size=14, shuffle=True)
    model = LanguageModel(args.steps)
    manager = ckpt.CheckpointManager(args.out, every_steps=10)
    latest = manager.latest_path()  # None at the first start
    print(f"resumed at step {manager.steps()[-1]}" if latest else "starting fresh", flush=True)

    def kill(trainer, *_):
        if trainer.global_step == args.kill_at and not latest:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = L.Trainer(
        max_steps=args.steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        devices=1,
        plugins=[ManagerIO(manager)],
        callbacks=[LambdaCallback(on_train_batch_end=kill), SaveEvery(manager)],
        enable_checkpointing=False,  # of Lightning's own accord
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(model, loader, ckpt_path=latest)
    print(f"weights: {train_text.fingerprint(model)}")


if __name__ == "__main__":
    main()
