"""What `attach` refuses, undoes and leaves in place, on real Megatron optimizers of one rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_cases import Build, megatron_builds

BUILDS = [build for build in megatron_builds() if build.flavour == "torch"]


@pytest.mark.megatron
@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.version)
def test_attach(build: Build, tmp_path: Path) -> None:
    script = Path(__file__).with_name("megatron_attach_checks.py")
    root = script.parents[2]
    places = [build.path, str(root), str(script.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    failed = json.loads(done.stdout.splitlines()[-1])
    assert not failed, "\n".join(failed.values())
