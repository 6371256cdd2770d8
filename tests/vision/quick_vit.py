"""Options of a Vision Transformer that trains in a second."""

SMALL = [
    "--model.dim=16",
    "--model.depth=2",
    "--model.num_heads=2",
    "--run.wandb=false",
    "--run.samples=0",
    "--trainer.accelerator=cpu",
]
