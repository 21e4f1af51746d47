"""A host mesh for the tests, and the tests' own helper modules made importable in spawned procs."""

import os
from pathlib import Path

import pytest

import mesh  # noqa: F401  before anything imports Monarch: it sets how fast dead processes are noticed

HERE = Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="session")
def host():
    """This machine as a Monarch host mesh, set up as the driver sets it up."""
    from monarch.actor import shutdown_context, this_host

    from mesh.supervision import install_fault_hook
    from mesh.topology import configure_monarch

    configure_monarch()
    install_fault_hook(lambda text: print("fault:", text))
    yield this_host()
    shutdown_context().get(timeout=30)
