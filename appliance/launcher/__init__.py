"""The launcher of one GPU slot: the only one that starts or stops this GPU's engines."""
