"""The roles' contracts against the actors that play them: no actor may drift from what its callers are promised."""

import asyncio
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.replica_runner import ReplicaRunnerActor
from launch.config import load_config
from launch.places import places
from launch.services import LocalServers
from mesh import roles
from mesh.actor import MeshActor
from mesh.roles import PEERS, contract_of

ROLES = {**roles.ROLES, **{f"{role}/peer": contract for role, contract in PEERS.items()}}
ROLE_NAMES = sorted(ROLES)


def filled(folder):
    """Actor, name and arguments of each role, as the bundled run fills them."""
    config = load_config(settings=["trainer.replicas=2"])
    servers = LocalServers(config, folder)
    servers.urls = {"environment": "http://environment", "teachers": "http://teachers"}
    run = SimpleNamespace(path=folder, logs=folder, teachers=folder / "teachers.jsonl")
    made = places(config, run, Path("model"), servers)
    return {place.role: (place.actor, place.name, place.args) for place in made} | {
        f"{place.role}/peer": (place.peer, place.name, place.args) for place in made if place.peer is not None
    }


ACTORS = {role: actor for role, (actor, _, _) in filled(Path("nowhere")).items()}


def endpoints(role):
    """The endpoints of a protocol by name, those of `Member` included."""
    ours = [base for base in role.__mro__ if base.__module__ == roles.__name__]
    functions = {
        name: function for base in ours for name, function in vars(base).items() if inspect.isfunction(function)
    }
    return {name: function for name, function in functions.items() if not name.startswith("_")}


def implementation(actor, name):
    """The actor's own function behind an endpoint; None when it has no endpoint of that name."""
    found = inspect.getattr_static(actor, name)
    return inspect.unwrap(found._method) if hasattr(found, "_method") else None


def test_every_role_is_played_by_an_actor_and_every_actor_plays_a_role():
    ours = {actor for actor in MeshActor.__subclasses__() if actor.__module__.startswith("actors.")}
    ours -= {ReplicaRunnerActor}  # an executor's, and no member of a run
    assert set(ACTORS) == set(ROLES)
    assert ours == set(ACTORS.values())


@pytest.mark.parametrize("role", ROLE_NAMES)
def test_every_endpoint_of_a_role_has_a_contract(role):
    found = endpoints(ROLES[role])
    assert {"status", "bind", "start", "finish"} < set(found)
    for name, function in found.items():
        assert 0 < contract_of(function).limit_s < float("inf"), name


def test_a_function_without_a_contract_is_no_endpoint():
    with pytest.raises(TypeError, match="has no @contract"):
        contract_of(filled)


@pytest.mark.parametrize("role", ROLE_NAMES)
def test_the_actor_of_a_role_has_exactly_its_endpoints(role):
    actor = ACTORS[role]
    assert {name for name in dir(actor) if implementation(actor, name)} == set(endpoints(ROLES[role]))


@pytest.mark.parametrize("role", ROLE_NAMES)
def test_the_endpoints_of_an_actor_take_what_its_role_promises_and_run_concurrently(role):
    for name, promised in endpoints(ROLES[role]).items():
        kept = implementation(ACTORS[role], name)
        assert inspect.iscoroutinefunction(kept), name
        signatures = [
            [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
            for function in (kept, promised)
        ]
        assert signatures[0] == signatures[1], f"{ACTORS[role].__name__}.{name}"


@pytest.mark.parametrize("role", ROLE_NAMES)
def test_an_actor_answers_for_its_status_before_it_is_started(role, tmp_path):
    actor, name, arguments = filled(tmp_path)[role]

    async def scenario():
        return await implementation(actor, "status")(actor(name, *arguments))

    status = asyncio.run(scenario())
    assert (status["name"], status["running"], status["failure"]) == (name, False, None)
    assert list(tmp_path.iterdir()) == []
