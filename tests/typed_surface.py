"""The share of the public surface whose types pyright knows without inferring any: ``make types``.

``pyright --verifytypes`` counts every module; here those symbols count that gossamer and its public modules export, and what
belongs to them. Exits with 1 below 100 %.
"""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gossamer

MODULES = ["gossamer", *(f"gossamer.{module.name}" for module in pkgutil.iter_modules(gossamer.__path__))]


def public() -> set[str]:
    """The names that public modules export, and where these are defined."""
    found = set()
    for name in MODULES:
        module = importlib.import_module(name)
        for exported in getattr(module, "__all__", ()):
            value = getattr(module, exported)
            found |= {f"{name}.{exported}", f"{getattr(value, '__module__', name)}.{getattr(value, '__qualname__', exported)}"}
    return found


def symbols() -> list[dict[str, Any]]:
    """What pyright says of each symbol of the package."""
    source = str(Path(gossamer.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["pyright", "--verifytypes", "gossamer", "--ignoreexternal", "--outputjson"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True)
    found: list[dict[str, Any]] = json.loads(said.stdout)["typeCompleteness"]["symbols"]
    return found


def main() -> int:
    names = public()
    mine = [s for s in symbols() if s["name"] in names or s["name"].rpartition(".")[0] in names]
    unknown = [s for s in mine if not s["isTypeKnown"]]
    for symbol in unknown:
        print(symbol["name"], *(each["message"].splitlines()[0] for each in symbol["diagnostics"]), sep="\n    ")
    print(f"{len(mine) - len(unknown)} of {len(mine)} public symbols have known types")
    return int(bool(unknown) or not mine)


if __name__ == "__main__":
    sys.exit(main())
