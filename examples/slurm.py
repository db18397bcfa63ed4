"""A run that lives under a queue's time limit, or on machines that may be taken away.

Under Slurm, with this as train.sbatch, it trains for as many times four hours as it needs:

    #!/bin/bash
    #SBATCH --job-name=train
    #SBATCH --time=04:00:00
    #SBATCH --gpus=1
    #SBATCH --cpus-per-task=4
    #SBATCH --output=%x-%j.log
    #SBATCH --open-mode=append
    #SBATCH --signal=USR1@120
    #SBATCH --requeue
    srun python examples/slurm.py --steps 100000

Two minutes before the end Slurm sends SIGUSR1; the step is finished and saved, and the job puts
itself back into the queue. Upon SIGTERM it only saves: that is scancel, or a job that makes way for
another, which Slurm requeues itself. Elsewhere a run that is not complete ends with status 75
("try again"), upon which a spot machine's service starts it again (systemd:
RestartForceExitStatus=75), or a loop:

    while python examples/slurm.py; [ $? -eq 75 ]; do sleep 1; done

To try it: --signal-at 12 sends the SIGUSR1, --kill-at 12 is a machine that vanishes.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import torch

# In your own repository ckpt.py lies next to the script, and this line is not needed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_text

import ckpt

TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


def requeue() -> bool:
    """Put the job back into Slurm's queue; False where there is none, or it does not want it."""
    job, scontrol = os.environ.get("SLURM_JOB_ID"), shutil.which("scontrol")
    return bool(job and scontrol) and subprocess.run([scontrol, "requeue", job]).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="how long to train")
    parser.add_argument("--out", default="runs/slurm", help="folder of the checkpoints")
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--kill-at", type=int, help="die right after this step, before its save")
    parser.add_argument("--signal-at", type=int, help="send itself a SIGUSR1 after this step")
    args = parser.parse_args()

    ckpt.seed_everything(1)
    model = train_text.ByteTransformer(width=64, layers=2)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = train_text.make_optimizer(model)

    def on_step(trainer: ckpt.Trainer, loss: torch.Tensor) -> None:
        progress.show(trainer.step, loss)
        if trainer.step == args.kill_at and not resumed:
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.step == args.signal_at:
            os.kill(os.getpid(), signal.SIGUSR1)

    trainer = ckpt.Trainer(
        model,
        optimizer,
        train_text.make_loader(train_text.load_text()[0]),
        scheduler=train_text.make_scheduler(optimizer, args.steps),
        clip_grad_norm=1.0,
        checkpoint_manager=ckpt.CheckpointManager(args.out, every_steps=args.every),
        on_step=on_step,
        exact_resume=True,
        save_final=True,
        save_on_signal=SIGNALS,
    )
    # A machine may have vanished at any moment: a file that its disk has damaged is passed over.
    resumed = trainer.resume(fallback=True)
    print(f"resumed at step {trainer.step}" if resumed else "starting fresh", flush=True)
    if trainer.step < args.steps:
        progress = train_text.Progress(trainer.step, args.steps)
        result = trainer.fit(args.steps)
        if result.steps < args.steps:
            print(f"{result.stop_reason}: step {result.steps} is saved", flush=True)
            if result.stop_reason == "SIGUSR1" and requeue():
                print("requeued", flush=True)
                return
            raise SystemExit(TRY_AGAIN)
    print(f"weights: {train_text.fingerprint(model)}")


if __name__ == "__main__":
    main()
