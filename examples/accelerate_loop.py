"""A training loop of the Hugging Face kind, with ckpt.py in the place of accelerator.save_state.

    python -m pip install accelerate
    python examples/accelerate_loop.py                # about ten seconds on two cores
    python examples/accelerate_loop.py --kill-at 33   # dies right after step 33, in the third epoch
    python examples/accelerate_loop.py                # goes on from step 30, to the same weights

All the processes of `accelerate launch` go on from one file, which the first of them writes. It
holds the random numbers of each; a run that goes on with another number of processes has others.
With mixed_precision="fp16" accelerator.scaler has a state to save, too. What a dataset itself draws
at random (augmentation) is not exact: Accelerate fetches a batch ahead. ckpt.Trainer is.
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
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import gather_object
except ImportError:
    raise SystemExit("this example needs Accelerate: python -m pip install accelerate") from None


class LanguageModel(train_text.ByteTransformer):
    """As the models of Transformers: keywords in, a dict with the loss out."""

    def forward(self, rows):
        return {"loss": super().forward(rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="how long to train")
    parser.add_argument("--out", default="runs/accelerate_loop", help="folder of the checkpoints")
    parser.add_argument("--kill-at", type=int, help="die right after this step, before its save")
    args = parser.parse_args()

    ckpt.seed_everything(1)
    # The seedable sampler shuffles by the number of the epoch alone, so that number and a count of
    # batches are the position. The generator keeps the loader from drawing from the global one.
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    rows = [{"rows": row} for row in train_text.load_text()[0][:420]]
    loader = torch.utils.data.DataLoader(
        rows, batch_size=14, shuffle=True, generator=torch.Generator()
    )
    model = LanguageModel(width=64, layers=2)
    optimizer = train_text.make_optimizer(model)
    # Accelerate steps a scheduler once for each process.
    scheduler = train_text.make_scheduler(optimizer, args.steps * accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    manager = ckpt.CheckpointManager(args.out, every_steps=10)
    step = epoch = taken = 0  # taken: batches of this epoch
    if state := manager.load_latest():
        ckpt.load_model_state_dict(model, state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        step, epoch, taken = state["step"], state["epoch"], state["taken"]
        process = accelerator.process_index % len(state["rng"])
        ckpt.restore_rng_state(state["rng"][process])
    accelerator.print(f"resumed at step {step}" if state else "starting fresh", flush=True)

    while step < args.steps:
        loader.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(loader, taken):
            taken += 1
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue  # in the middle of a step: gradients are in no checkpoint
            step += 1
            if step == args.kill_at and not state:
                os.kill(os.getpid(), signal.SIGKILL)
            if manager.should_save(step) or step == args.steps:
                accelerator.print(f"step {step}: loss {loss.item():.3f}", flush=True)
                rng = gather_object([ckpt.capture_rng_state()])  # each process takes part in this
                if accelerator.is_main_process:
                    position = {"step": step, "epoch": epoch, "taken": taken}
                    parts = {"optimizer": optimizer, "scheduler": scheduler}
                    parts = {name: part.state_dict() for name, part in parts.items()}
                    model_state = ckpt.model_state_dict(model)  # the same names under DDP
                    manager.save(step, {"model": model_state, "rng": rng, **parts, **position})
            if step == args.steps:
                break
        epoch, taken = epoch + 1, 0
    accelerator.print(f"weights: {train_text.fingerprint(model)}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
