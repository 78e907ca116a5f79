"""One of Accelerate's own test scripts with gossamer's ``Accelerator`` in place of Accelerate's.

JUDGE=gossamer python -m judge.scripts test_sync, in as many processes as a launcher starts.
"""

import os
import sys
from importlib import import_module
from typing import Any

import accelerate
from torch import nn
from torch.optim import Optimizer

from judge.shim import Standing

SCRIPTS = ("test_sync", "test_script")


def replace() -> None:
    """Put gossamer's class where the scripts look for Accelerate's."""
    from gossamer.integrations.accelerate import Accelerator

    class Judged(Accelerator):
        """A model that the scripts prepare alone gets an optimizer that does nothing."""

        def prepare(self, *given: Any, **options: Any) -> Any:
            alone = [each for each in given if isinstance(each, nn.Module)]
            if not alone or any(isinstance(each, Optimizer) for each in given):
                return super().prepare(*given, **options)
            prepared = super().prepare(*given, *map(Standing, alone), **options)[: len(given)]
            return prepared if len(given) > 1 else prepared[0]

    accelerate.Accelerator = accelerate.accelerator.Accelerator = Judged


if __name__ == "__main__":
    if os.environ.get("JUDGE") == "gossamer":
        replace()
    import_module(f"accelerate.test_utils.scripts.{sys.argv[1]}").main()
