"""Integrations: gossamer inside of other libraries. Each module imports its library when it is imported, and not before.

``gossamer.integrations.lightning``, ``.accelerate``: a strategy for Lightning's ``Trainer``, an ``Accelerator``;
``.logging``: rates for TensorBoard, W&B and MLflow; ``.launchers``: process groups under ``mpirun`` and ``srun``.
"""
