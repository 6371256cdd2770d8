"""What the experiments share: optimisation, losses, checkpoints, loggers, run folders, the command line."""
