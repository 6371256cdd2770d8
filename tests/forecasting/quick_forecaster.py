"""Options of a forecaster that trains in a second."""

QUICK = [
    "--run.wandb=false",
    "--run.samples=0",
    "--trainer.accelerator=cpu",
    "--data.lookback=24",
    "--data.horizon=6",
    "--model.dim=8",
    "--model.num_heads=2",
    "--model.depth=1",
    "--model.patch_size=6",
    "--model.optim.warmup_steps=1",
]
