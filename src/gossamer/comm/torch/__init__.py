"""Torch: one rank's way to the others over the process groups of ``torch.distributed``."""
