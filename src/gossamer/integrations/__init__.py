"""Integrations: gossamer inside of other libraries. Each module imports its library when it is imported, and not before.

``gossamer.integrations.lightning``, ``.fabric``, ``.accelerate``, ``.transformers``: strategies for Lightning's ``Trainer``
and for ``Fabric``, an ``Accelerator``, a ``Trainer`` for Transformers;
``.logging``: rates for TensorBoard, W&B and MLflow; ``.launchers``: process groups under ``mpirun`` and ``srun``;
``.script``: the first step of a training script, for ``gossamer simulate``.
"""
