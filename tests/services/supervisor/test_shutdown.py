"""The end of a server: each role after those that it serves, of all models, within its time."""

from __future__ import annotations

import signal
from typing import Any, cast

from penstock.protocol.links import Role
from penstock.services.supervisor.child import Child
from penstock.services.supervisor.restart_policy import RestartPolicy
from penstock.services.supervisor.shutdown import Shutdown


class FakeChild:
    def __init__(self, role: Role, model: str) -> None:
        self.role, self.model, self.signals = role, model, list[int]()

    def signal(self, number: int) -> None:
        self.signals.append(number)


class FakePolicy:
    def __init__(self) -> None:
        self.given_up: list[Role] = []

    def give_up(self, roles: Any) -> None:
        self.given_up += roles


def test_roles_end_from_the_clients_to_the_device_whatever_model_they_are_of() -> None:
    policies = [FakePolicy(), FakePolicy()]
    shutdown = Shutdown(cast("list[RestartPolicy]", policies), 30.0)
    kinds = [(Role.EXECUTOR, "a"), (Role.EXECUTOR, "b"), (Role.TOKENIZER, "a"), (Role.API, "")]
    children = [FakeChild(role, model) for role, model in kinds]
    shutdown.begin(cast("list[Child]", children))
    assert [each.signals for each in children] == [[], [], [], [signal.SIGTERM]]
    shutdown.next_role(cast("list[Child]", children[:3]))
    assert children[2].signals == [signal.SIGTERM]
    shutdown.next_role(cast("list[Child]", children[:2]))
    assert [each.signals for each in children[:2]] == [[signal.SIGTERM], [signal.SIGTERM]]
    assert all(set(policy.given_up) == set(Role) for policy in policies)
